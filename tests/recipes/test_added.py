"""Rows of the recipe `relational` that compare all methods with those without zonotopes are complete and sound."""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from helpers.documentation import module_of
from relational import networks
from relational.added import Settings, run_added
from relational.added_records import AddedRecord, AddedSummary
from relational.images import first_images, first_predicted
from relational.networks import CERTIFIED_DIGITS, certified_cifar10, certified_digits
from relational.rows import ADDED, ROWS
from specguard.attacks import APGD
from specguard.certificates import certify, program
from specguard.certificates.methods import ZonotopeMethod
from specguard.certificates.problem import MarginLoss
from specguard.certificates.propagate import forward_pass
from specguard.certificates.zonotope.size import size_of
from specguard.data import digits
from specguard.errors import DataError, SoundnessError, SpecGuardError
from specguard.geometry import Ball
from specguard.nn import ViT, fingerprint, preset, weights_fingerprint
from specguard.records.io import RecordFile, read_json, read_record
from specguard.records.shards import Shard
from specguard.records.store import described
from specguard.records.study import Pending

RECIPES = Path(networks.__file__).parents[1]
BALLS = (
    *(Ball("l2", radius) for radius in (1e-3, 0.02, 3.0, 4.0)),
    *(Ball("linf", radius) for radius in (1e-3, 0.01)),
)
FAST = Settings(
    ZonotopeMethod(symbols=100),
    ("local", "adjoint"),
    APGD(steps=10, restarts=2, loss="margin"),
    searched=2,
    batch=2,
)


def small():
    """A network with random weights, and three images with its predictions."""
    config = preset("tiny", dim=8, depth=1, heads=2)
    network = ViT(config, torch.Generator().manual_seed(1)).double().eval()
    for weight in network.parameters():
        weight.data *= 4 if weight.ndim > 1 else 1
    return network, first_predicted(network, digits().test, 3)


def measured(folder, settings=FAST, balls=BALLS, **given):
    network, chosen = small()
    return run_added("small", network, digits(), chosen, balls, folder, settings, **given)


def stored(folder):
    return RecordFile(folder / "records.jsonl", AddedRecord).read()


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """The folder of a row that was measured, and its summary."""
    folder = tmp_path_factory.mktemp("row") / "small"
    return folder, measured(folder)


# Networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CERTIFIED_DIGITS)
def test_the_training_is_that_of_the_recipe_of_certified_digits(name, tmp_path, monkeypatch):
    recorded = read_json(RECIPES / "digits_certified" / name / "result.json")["settings"]
    assert described(CERTIFIED_DIGITS[name]) == {"awp": None} | recorded["training"]
    short = {each: replace(training, epochs=1) for each, training in CERTIFIED_DIGITS.items()}
    monkeypatch.setattr(networks, "CERTIFIED_DIGITS", short)
    network = certified_digits(name, tmp_path)
    written = read_json(tmp_path / "run.json")
    assert written["model"].items() >= recorded["model"].items()
    assert written["initial_weights"] == recorded["initial_weights"]
    again = certified_digits(name, tmp_path, lambda progress: pytest.fail("it was trained already"))
    assert fingerprint(network) == fingerprint(again)


def test_the_network_of_cifar10_is_that_of_its_recipe():
    network = certified_cifar10()
    assert network.head.weight.dtype == torch.float64
    assert not network.training


def test_all_symbols_of_an_image_of_cifar10_do_not_fit_and_256_do():
    network = program(certified_cifar10())
    path = forward_pass(network.steps, torch.rand(1, 3, 32, 32, dtype=torch.float64))[0]
    for norm, budget in (("l2", 4.5), ("linf", 0.6)):
        assert round(size_of(network.steps, path, norm, None).bytes / 2**30) == 184  # as the page says
        assert size_of(network.steps, path, norm, 256).bytes < budget * 2**30


def test_the_first_images_have_their_own_labels():
    network, split = small()[0], digits().test
    chosen = first_images(network, split, 5)
    assert chosen.labels.tolist() == split.labels[:5].tolist()
    assert chosen.indices.tolist() == [0, 1, 2, 3, 4]
    assert chosen.images.dtype == torch.float64
    with pytest.raises(DataError, match="360 images, not 361"):
        first_images(network, split, 361)


# Measured ---------------------------------------------------------------------------------------------------------


def test_the_records_of_a_row_are_complete(row):
    folder, summary = row
    records = stored(folder)
    network, chosen = small()
    assert [record.sample for record in records] == chosen.indices.tolist()
    assert summary.study.about.model == fingerprint(network)
    assert summary.seconds.keys() == {"total", "before", "after", "attack", "checker"}
    for record in records:
        assert [(ball.norm, ball.radius, ball.box) for ball in record.balls] == [
            (ball.norm, ball.radius, ball.box) for ball in BALLS
        ]
    for number, ball in enumerate(summary.balls):
        of = [record.balls[number] for record in records]
        assert ball.before == sum(each.before for each in of)
        assert ball.after == sum(each.after for each in of) == ball.before + len(ball.gained) - len(ball.lost)
        assert ball.claims == ball.checked == sum(len(each.checked) for each in of)
        assert (ball.lost, ball.broken) == ((), 0)


def test_the_verdicts_are_those_that_certify_finds(row):
    network, chosen = small()
    for ball, of in zip(BALLS, row[1].balls, strict=True):
        without = certify(network, chosen.images, chosen.labels, ball, FAST.others, search=False)
        found = certify(network, chosen.images, chosen.labels, ball, [*FAST.others, FAST.method], search=False)
        assert of.before == int(without.certified.sum())
        assert of.after == int(found.certified.sum())
        assert of.by.get("zonotope", 0) == int(found.certified_by("zonotope").sum())
        assert of.gained == tuple((found.certified & ~without.certified).nonzero()[:, 0].tolist())


def test_zonotopes_gain_images_here_and_are_not_tried_beyond_where_they_prove_nothing(row):
    assert row[1].balls[1].gained
    assert row[1].balls[2].by["zonotope"] == 0
    assert "zonotope" not in row[1].balls[3].by


def test_every_certified_image_is_attacked_in_its_largest_certified_ball(row):
    for record in stored(row[0]):
        for norm in ("l2", "linf"):
            balls = [ball for ball in record.balls if ball.norm == norm]
            certified = [ball.radius for ball in balls if ball.after]
            attacked = [ball.radius for ball in balls if ball.broken is not None]
            assert attacked == certified[-1:]
    assert sum(ball.attacked for ball in row[1].balls) == 6


def test_largest_radii_are_searched_for_the_first_images(row):
    records = stored(row[0])
    assert [bool(record.largest) for record in records] == [True, True, False]
    network, chosen = small()
    for l2, linf in (record.largest for record in records[:2]):
        assert (l2.norm, linf.norm) == ("l2", "linf")
        assert math.isclose(linf.radii["local"], l2.radii["local"] / 8)
        assert math.isclose(sum(l2.limits.values()), 1)
    for number, norm in enumerate(("l2", "linf")):
        found = certify(network, chosen.images[:2], chosen.labels[:2], Ball(norm, 1e-3), [FAST.method]).largest
        radii = [record.largest[number].radii["zonotope"] for record in records[:2]]
        assert radii == pytest.approx(found["zonotope"].tolist(), rel=1e-6)
        assert row[1].largest[number].radii["zonotope"].n == 2
        assert row[1].largest[number].ahead == 2


def test_a_row_that_was_stopped_continues_with_the_batches_that_are_missing(row, tmp_path):
    for name in ("study.json", "environment.jsonl"):
        (tmp_path / name).write_bytes((row[0] / name).read_bytes())
    lines = (row[0] / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:2]))
    seen = []
    again = measured(tmp_path, watch=seen.append)
    assert [progress.done for progress in seen] == [1, 2]
    assert again.balls == row[1].balls
    with pytest.raises(SpecGuardError, match="holds another study"):
        measured(tmp_path, balls=BALLS[:1])


def test_two_processes_share_a_row(tmp_path):
    assert isinstance(measured(tmp_path, balls=BALLS[:1], shard=Shard(0, 2)), Pending)
    assert measured(tmp_path, balls=BALLS[:1], shard=Shard(1, 2)).n == 3


@dataclass(frozen=True)
class Optimist(ZonotopeMethod):
    """Certifies everything."""

    def search(self, problem, ball):
        return torch.full_like(problem.margins[0], 7.0), self.upper_loss(problem, None)

    def upper_loss(self, problem, layer_radii):
        return MarginLoss(torch.zeros_like(problem.margins), {})


@pytest.mark.parametrize("ball", [Ball("l2", 7.0), Ball("linf", 0.9)], ids=str)
def test_a_certificate_that_an_attack_breaks_stops_the_row(ball, tmp_path):
    with pytest.raises(SoundnessError, match=f"is certified and broken at {ball.norm} radius"):
        measured(tmp_path, replace(FAST, method=Optimist(symbols=100)), (ball,))
    assert not stored(tmp_path)


def test_a_certificate_that_the_checker_does_not_prove_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("relational.added.broken", lambda network, x, found, y, ball: torch.zeros(len(y)).bool())
    ball = measured(tmp_path, replace(FAST, method=Optimist(symbols=100)), (Ball("l2", 7.0),)).balls[0]
    assert (ball.after, ball.claims, ball.checked) == (3, 3, 0)


def broken_there(ball):
    ball["broken"] = True


def certified_by_nothing(ball):
    ball["lower"] = dict.fromkeys(ball["lower"], -1.0)


def unchecked(ball):
    ball["checked"] = {}


def another_radius(ball):
    ball["radius"] *= 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (broken_there, "image 1 is certified and broken at l2 radius 0.001"),
        (certified_by_nothing, "does not belong to this study: image 1"),
        (unchecked, "does not belong to this study: image 1"),
        (another_radius, "does not belong to this study: image 1"),
    ],
)
def test_a_record_that_cannot_be_is_refused(change, said, row, tmp_path):
    for name in ("study.json", "environment.jsonl"):
        (tmp_path / name).write_bytes((row[0] / name).read_bytes())
    lines = [json.loads(line) for line in (row[0] / "records.jsonl").read_text().splitlines()]
    change(lines[1]["balls"][0])
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SpecGuardError, match=re.escape(said)):
        measured(tmp_path)


# Committed --------------------------------------------------------------------------------------------------------

COMMITTED = sorted(name for name in ADDED if (RECIPES / "relational" / f"{name}.json").exists())


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_row_says_where_and_how_it_was_measured_and_lost_nothing(name):
    summary, row = read_record(RECIPES / "relational" / f"{name}.json", AddedSummary), ADDED[name]
    assert summary.study.row == name
    assert summary.n == summary.study.about.n == row.images
    assert [(ball.norm, ball.radius, ball.box) for ball in summary.balls] == [
        (ball.norm, ball.radius, ball.box) for ball in row.balls
    ]
    assert all(ball.lost == () and ball.broken == 0 and ball.checked == ball.claims for ball in summary.balls)
    assert all(ball.after >= max(ball.before, *ball.by.values()) for ball in summary.balls)
    assert summary.study.method == described(row.method)
    assert summary.study.searched == summary.largest[0].radii["zonotope"].n == row.searched
    assert summary.environment.hardware["threads"] == 1
    assert re.fullmatch(r"[0-9a-f]{40}\+?", summary.environment.commit)


@pytest.mark.parametrize("name", [name for name in COMMITTED if name.startswith("cifar10")])
def test_a_committed_row_of_cifar10_is_about_the_committed_weights(name):
    summary = read_record(RECIPES / "relational" / f"{name}.json", AddedSummary)
    assert summary.study.about.weights_fingerprint == weights_fingerprint(certified_cifar10())


def test_rows_have_names_of_their_own_and_radii_that_grow():
    assert not ADDED.keys() & ROWS.keys()
    for row in ADDED.values():
        for norm in {ball.norm for ball in row.balls}:
            radii = [ball.radius for ball in row.balls if ball.norm == norm]
            assert radii == sorted(set(radii))


def test_the_command_and_the_page_of_results_name_every_row():
    module_of("tables")
    from published.added import NETWORKS, added_records

    script = (RECIPES / "relational" / "run.sh").read_text()
    assert all(name in script for name in ADDED)
    assert NETWORKS.keys() == ADDED.keys()
    assert sorted(added_records()) == COMMITTED
