"""Runs are compared where their accuracies are of the same images in the same norm; all others are set apart."""

import shutil
from dataclasses import replace

import msgspec
import pytest

from helpers.sample_runs import changed, sample_run, training
from specguard.records.base import Subset
from specguard.report import Run, read_run
from specguard.report.comparison import comparisons
from specguard.report.html.sections import bars
from specguard.report.images import Images, image_sets, images_of, on_images


@pytest.fixture(scope="module")
def forty(tmp_path_factory) -> Run:
    return read_run(sample_run(tmp_path_factory.mktemp("forty") / "run", n=40), "forty")


@pytest.fixture(scope="module")
def twenty(tmp_path_factory) -> Run:
    return read_run(sample_run(tmp_path_factory.mktemp("twenty") / "run", n=20, seed=1), "twenty")


def on(run: Run, **fields: object) -> Run:
    """The run with other images, or other data, in all of its studies."""

    def moved(study):
        header = study.summary.study
        header = msgspec.structs.replace(header, about=msgspec.structs.replace(header.about, **fields))
        return replace(study, summary=msgspec.structs.replace(study.summary, study=header))

    found = {name: tuple(map(moved, getattr(run, name))) for name in ("attacks", "certificates")}
    return replace(run, training=None, **found)


def test_runs_on_the_same_images_are_compared_with_all_their_radii(forty):
    (found,), apart = comparisons([forty, replace(forty, label="again")])
    assert apart == []
    assert (found.norm, found.images.n, [row.number for row in found.rows]) == ("l2", 40, [0, 1])
    assert found.radii == (0.02, 0.05, 0.1)
    for row in found.rows:
        assert set(row.robust) == set(row.certified) == set(found.radii)
        assert {each.n for each in (row.clean, *row.robust.values(), *row.certified.values())} == {40}


def test_another_number_of_images_is_set_apart_with_the_reason(forty, twenty):
    found, apart = comparisons([forty, twenty, replace(forty, label="third")])
    assert [[row.number for row in each.rows] for each in found] == [[0, 2]]
    assert [(each.number, each.reason) for each in apart] == [
        (1, "its l2 results are of 20 images of digits, those of other runs of 40 images of digits")
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"data": "beef"}, "its l2 results are of 40 images of digits, those of other runs of 40 images of digits"),
        (
            {"subset": Subset(rule="stratified", seed=0, of=90)},
            "its l2 results are of 40 images of digits, a subset of 90 stratified by class, "
            "those of other runs of 40 images of digits",
        ),
        ({"data": "unknown"}, "its records do not say which images its l2 results are of"),
    ],
    ids=["data", "subset", "unknown"],
)
def test_as_many_images_are_not_the_same_images(forty, fields, reason):
    found, apart = comparisons([forty, on(forty, **fields)])
    assert found == []
    assert apart[-1].reason == reason


def test_images_that_no_record_names_are_never_the_same(forty):
    one = on(forty, data="unknown")
    found, apart = comparisons([one, one])
    assert found == []
    assert {each.reason for each in apart} == {"its records do not say which images its l2 results are of"}


def test_another_norm_is_set_apart_and_clean_accuracies_remain_comparable(forty, tmp_path):
    linf = sample_run(tmp_path / "run", norm="linf")
    shutil.rmtree(linf / "certificates")
    found, apart = comparisons([forty, read_run(linf, "linf")])
    assert [(each.norm, [row.number for row in each.rows]) for each in found] == [(None, [0, 1])]
    assert all(row.clean is not None and not row.robust and not row.certified for row in found[0].rows)
    assert [each.reason for each in apart] == [
        "no other run was attacked or certified in l2",
        "no other run was attacked or certified in linf",
    ]


def test_trainings_alone_are_compared_by_clean_accuracy_on_the_same_images(tmp_path):
    runs = []
    for number, n in enumerate((40, 40, 20)):
        folder = tmp_path / str(number)
        folder.mkdir()
        training(folder, ["a", "b"], n, "plain")
        runs.append(read_run(folder, str(number)))
    (found,), apart = comparisons(runs)
    assert found.norm is None
    assert [row.number for row in found.rows] == [0, 1]
    assert [(each.number, each.reason) for each in apart] == [
        (number, "it was neither attacked nor certified") for number in range(3)
    ]


def test_attacks_that_differ_are_told_from_those_that_are_the_same(forty, tmp_path):
    (same,), _ = comparisons([forty, forty])
    assert same.same_attacks
    other = sample_run(tmp_path / "run", name="strong")
    (found,), _ = comparisons([forty, read_run(other, "other")])
    assert not found.same_attacks
    assert [row.attacks for row in found.rows] == ["plain, pgd of certify", "strong, pgd of certify"]


def test_many_radii_are_thinned_out_with_both_ends_kept(forty):
    study = forty.attacks[0]
    rows = tuple(msgspec.structs.replace(study.summary.worst_case[0], radius=0.01 * step) for step in range(1, 11))
    balls = tuple(msgspec.structs.replace(study.summary.study.balls[0], radius=row.radius) for row in rows)
    header = msgspec.structs.replace(study.summary.study, balls=balls)
    many = replace(study, summary=msgspec.structs.replace(study.summary, study=header, worst_case=rows))
    run = replace(forty, attacks=(many,), certificates=())
    (found,), _ = comparisons([run, run])
    assert len(found.radii) == 6
    assert (found.radii[0], found.radii[-1]) == (0.01, 0.1)


def test_accuracies_of_other_images_have_bars_of_their_own(tmp_path):
    folder = sample_run(tmp_path / "run", n=40)
    changed(
        folder / "result.json", test_accuracy={"value": 0.5, "count": 50, "n": 100, "interval95": interval(50, 100)}
    )
    run = read_run(folder, "a")
    assert [(each.images, {bar.accuracy.n for bar in each.bars}) for each in bars(run)] == [
        ("40 images of digits", {40}),
        ("100 images of plain", {100}),
    ]


def interval(count: int, n: int) -> list[float]:
    from specguard.records.accuracy import Accuracy

    return list(Accuracy.of(count, n).interval95)


def test_a_run_on_images_has_only_what_is_of_them(forty, twenty):
    both = replace(forty, attacks=(*forty.attacks, *twenty.attacks), certificates=twenty.certificates)
    assert [images.n for images in image_sets(both, "l2")] == [40, 20]
    assert image_sets(both, "linf") == []
    small = on_images(both, images_of(twenty.attacks[0]))
    assert small.attacks == twenty.attacks
    assert small.certificates == twenty.certificates
    assert small.training is None
    assert on_images(both, images_of(forty.attacks[0])).training is forty.training
    assert Images("a", 3) != Images("a", 4)
    assert Images("a", 3, dataset="x") == Images("a", 3, dataset="y")
