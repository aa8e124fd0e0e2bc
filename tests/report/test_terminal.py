"""What is printed about studies: numbers where there are some, and why there are none where there are not."""

import random
from typing import Any

import pytest
from msgspec.structs import replace
from rich.table import Table

from helpers.sample_runs import about, attack, certificates, layer_sensitivity, smoothed, spectra, stop_early
from specguard.errors import RunError
from specguard.records.accuracy import Accuracy, RadiusAccuracy
from specguard.records.base import Subset
from specguard.records.baseline import LinearBaseline
from specguard.records.certificate import (
    CertificateSummary,
    CertifySettings,
    CertifyStudy,
    Growth,
    LargestRadius,
    Limit,
    RadiusSummary,
)
from specguard.records.legacy import read_summary
from specguard.report import (
    attack_table,
    attack_warnings,
    certificate_tables,
    certificate_verdict,
    sensitivity_tables,
    smoothing_table,
    smoothing_verdict,
    spectrum_lines,
    spectrum_table,
    spectrum_warnings,
    subset_lines,
)

SUBSET = Subset(rule="stratified", seed=0, of=1000)


def cells(table: Table) -> list[list[str]]:
    """The rows of a table, its heading first."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def result(certified: int, median: float | None, vacuous: int = 0, search: bool = True) -> CertificateSummary:
    found = Accuracy.of(certified, 10)
    settings = CertifySettings(radii=(0.1,), methods=("local",), search=search)
    return CertificateSummary(
        study=CertifyStudy(about=about(10), settings=settings, attack={}),
        n=10,
        clean=Accuracy.of(9, 10),
        radii=(
            RadiusSummary(
                radius=0.1,
                robust=Accuracy.of(9, 10),
                certified=found,
                by={"local": found},
                broken=1,
                unknown=9 - certified,
            ),
        ),
        largest={"local": LargestRadius(median=median, vacuous=vacuous)},
        limits=(Limit(term="blocks.1.mlp: bend", images=9),),
        growth=(Growth(step="blocks.0.attention", images=9, factor=123.4),),
        seconds={"local": 0.02, "attack": 3.0, "total": 4.0},
    )


@pytest.fixture
def summary(tmp_path) -> Any:
    """The summary that a study of the samples ends with."""

    def made(study: Any, *arguments: Any) -> Any:
        study(tmp_path / study.__name__, *arguments)
        return read_summary(tmp_path / study.__name__ / "summary.json")

    return made


# Certificates ----------------------------------------------------------------------------------------------------


def test_where_little_is_certified_the_radius_the_term_and_the_block_are_named():
    lines = certificate_verdict(result(0, 3.2e-5, 2))
    assert lines == [
        "radius 0.1: 0 certified, 1 misclassified under attack, 9 unknown, of 10",
        "median certified l2 radius: 3.2e-05 (local); vacuous for 2 of 9 images",
        "largest terms of the margin loss: blocks.1.mlp: bend (9 images)",
        "largest growth of the radius: blocks.0.attention (x 123, 9 images)",
    ]
    assert certificate_verdict(result(0, None, search=False))[1].startswith("largest terms of the margin loss")


def test_a_radius_below_rounding_is_vacuous_and_never_a_small_number():
    for median in (0.0, 1e-12, 2.0**-25):
        found = result(0, median, 9)
        assert "median certified l2 radius: vacuous (local); vacuous for 9 of 9 images" in certificate_verdict(
            found
        )
        (table,) = certificate_tables(found)
        assert cells(table)[3] == ["local", "0.0", "vacuous", "2"]
    (table,) = certificate_tables(result(0, 2.0**-23))
    assert cells(table)[3][2] == "1.19e-07"


def test_where_much_is_certified_there_is_nothing_to_explain():
    assert len(certificate_verdict(result(5, 0.2))) == 1


def test_the_time_of_a_method_is_that_of_one_image_at_one_radius(summary):
    found = replace(summary(certificates, 40, random.Random(0)), seconds={"local": 12.0, "total": 99.0})
    (table,) = certificate_tables(found)
    rows = {row[0]: row for row in cells(table)}
    assert rows["local"][-1] == "100"  # 12 s / 40 images / 3 radii
    assert rows["lofast"][-1] == "0"
    assert list(rows) == ["", "clean", "robust", "lofast", "local", "adjoint", "certified"]
    for place, row in enumerate(found.radii, 1):
        assert rows["certified"][place] == f"{100 * row.certified.value:.1f}"
        assert rows["robust"][place] == f"{100 * row.robust.value:.1f}"
        assert rows["adjoint"][place] == f"{100 * row.by['adjoint'].value:.1f}"


def test_the_linear_model_has_a_row_of_its_own_in_either_table(summary):
    def baseline(radii: tuple[float, ...]) -> LinearBaseline:
        rows = tuple(RadiusAccuracy(radius=radius, certified=Accuracy.of(9, 40)) for radius in radii)
        return LinearBaseline(norm="l2", n=40, clean=Accuracy.of(30, 40), radii=rows, median_radius=0.07)

    for found in (summary(certificates, 40, random.Random(0)), summary(stop_early, 40)):
        table, *_ = certificate_tables(found, baseline(found.study.settings.radii))
        name, *shown = cells(table)[-1]
        assert name == "linear model"
        assert all(cell.startswith("22.5") for cell in shown[:3])
        assert found.study.settings.stop_early or shown[3] == "0.07"


def test_more_than_five_radii_are_several_tables():
    radii = tuple(0.01 * k for k in range(1, 8))
    one = result(3, 0.1)
    found = CertificateSummary(
        study=replace(one.study, settings=replace(one.study.settings, radii=radii)),
        n=10,
        clean=one.clean,
        radii=tuple(replace(one.radii[0], radius=radius) for radius in radii),
        largest=one.largest,
    )
    first, second = certificate_tables(found)
    assert [len(first.columns), len(second.columns)] == [6, 5]
    assert second.title is None
    assert [str(column.header) for column in second.columns][-2:] == ["median radius", "ms/image"]


def test_methods_that_stop_early_have_a_table_of_stages_and_others_proofs_are_apart(summary):
    found = summary(stop_early, 40)
    accuracies, stages = certificate_tables(found)
    rows = {row[0]: row[1:] for row in cells(accuracies)}
    third_party = "with crown (third party)"
    assert list(rows) == ["", "clean", "robust", "certified", third_party]
    assert {cell.partition(" [")[0] for cell in rows["certified"]} == {"25.0"}
    assert {cell.partition(" [")[0] for cell in rows[third_party]} == {"50.0"}
    heading, first, *_, last = cells(stages)
    assert heading == ["radius", "method", "images", "classes", "certified", "seconds"]
    assert first == ["0.1", "lofast", "40", "160", "0", ""]
    assert last == ["all", "local", "120", "480", "30", "3"]
    assert certificate_verdict(found) == [
        "radius 0.1: 10 certified, 10 misclassified under attack, 10 unknown, of 40",
        "10 more certified by third-party verifiers alone: auto_LiRPA 0.6, which does not account for rounding",
        "crown failed on 1 images: no memory",
    ]


def test_proofs_and_probabilistic_certificates_are_never_in_one_table(summary):
    proofs, counts = summary(certificates, 40, random.Random(0)), summary(smoothed, 40)
    for shown in (certificate_tables, certificate_verdict):
        with pytest.raises(RunError, match="never shown among proofs"):
            shown(counts)
    with pytest.raises(RunError, match="only probabilistic certificates"):
        smoothing_table(proofs)


# Other studies ---------------------------------------------------------------------------------------------------


def test_a_subset_is_named_beside_n():
    assert subset_lines(about(40)) == []
    assert subset_lines(replace(about(40), subset=SUBSET)) == [
        "the 40 images are a subset of 1000, stratified by class"
    ]


def test_the_table_of_an_attack_has_every_accuracy_with_its_interval_and_n(summary):
    found = summary(attack, list("abcde"), 40, "pgd", "linf", random.Random(0))
    rows = cells(attack_table(found))
    assert [row[0] for row in rows[1:]] == ["clean", "pgd", "pgd", "pgd", "worst case", "worst case", "worst case"]
    assert rows[1][3] == str(found.clean)
    assert rows[-1] == ["worst case", "linf", "0.1", str(found.worst_case[-1].accuracy)]
    assert all("n = 40" in row[3] and "[" in row[3] for row in rows[1:])
    early = replace(found, study=replace(found.study, stop_early=True), warnings=("few steps",))
    assert cells(attack_table(early))[0][3] == "accuracy after each attack (95 %)"
    assert attack_warnings(early) == [
        "warning, zero gradients: most gradients of pgd vanish",
        "warning, autoattack: few steps",
    ]


def test_the_table_of_smoothing_says_what_its_numbers_are(summary):
    found = summary(smoothed, 40)
    table = smoothing_table(found)
    assert "sigma 0.25" in str(table.title)
    rows = cells(table)
    assert rows[0][1] == "failure probability 0.001 per image"
    assert [row[0] for row in rows[1:]] == [
        "correct",
        "abstains",
        "correct within 0.1",
        "correct within 0.25",
        "correct within 0.5",
    ]
    assert rows[3][1].startswith("50.0 [")
    said = smoothing_verdict(found)
    assert said[0] == (
        "each certificate fails with probability at most 0.001, any of the 40 with probability at most 0.04"
    )
    assert "another function than the model" in said[1]
    assert said[-1] == "median certified radius: 0.3"


def test_the_table_of_spectra_has_a_row_for_every_part(summary):
    found = summary(spectra, 40, random.Random(0))
    rows = cells(spectrum_table("a run", found))
    assert [row[0] for row in rows] == ["part", "embedding", "blocks.0", "blocks.1", "head"]
    assert [bool(row[3]) for row in rows[1:]] == [False, True, True, False]
    for row, part in zip(rows[1:], found.parts, strict=True):
        assert row[1] == f"{part.sigma[0].mean:.3g} ± {part.sigma[0].std:.2g}"
        assert row[2] == f"{part.sigma[0].quantiles['50']:.3g}"
    (line,) = spectrum_lines(found)
    shown = (f"{values.mean:.3g}" for values in (found.exponent, found.log_product, found.growth))
    names = "sum of sigma (Eq. 15) {}, product over blocks {}, PGD-20 perturbation {}"
    assert line == f"log of the growth through the blocks: {names.format(*shown)}"
    assert spectrum_warnings(found) == []
    unconverged = replace(found, parts=(replace(found.parts[0], unconverged=3), *found.parts[1:]))
    assert spectrum_warnings(unconverged) == [
        "warning: 3 values did not converge; raise --most, the limit on products"
    ]


def test_the_tables_of_a_layer_have_every_bound_and_how_loose_it_is(summary):
    found = summary(layer_sensitivity, 8)
    values, ratios = map(cells, sensitivity_tables(found))
    assert values[0] == ["||F(X') - F(X)||", "0.01", "0.1"]
    assert [row[0] for row in values[1:]] == [
        "found", "naive", "SpecFormer", "SpecFormer tight", "LoFAST (1)", "LoFAST (2)", "T1", "T2", "best",
    ]  # fmt: skip
    assert values[1] == ["found", "1", "1"]
    assert ratios[-1] == ["best", "2.000", "2.000"]
    assert len(ratios) == len(values) - 1
    without = tuple(replace(row, bounds=row.bounds | {"t2": None}) for row in found.radii)
    values, ratios = map(cells, sensitivity_tables(replace(found, radii=without)))
    assert "T2" not in {row[0] for row in (*values, *ratios)}
