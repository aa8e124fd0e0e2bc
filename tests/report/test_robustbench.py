"""A leaderboard entry of an evaluation under attack, as RobustBench has them."""

import json

import msgspec
import pytest

from specguard.records.attack import (
    AttackRecord,
    AttackSettings,
    AttackStudy,
    AttackSummary,
    FlagRecord,
    NamedAttack,
    Outcome,
    summarize,
)
from specguard.records.base import About, BallRecord, Json
from specguard.report import robustbench_record

IMAGES = 8


def evaluated(attack: str, balls: dict[float, int], norm: str = "linf", wrong: int | None = 7) -> AttackSummary:
    """By radius, how many images fall to the attack; one image is `wrong` from the start."""
    study = AttackStudy(
        about=About(model="m", data="d", dataset="digits", n=IMAGES),
        attacks=(NamedAttack(name=attack, settings={}),),
        stop_early=False,
        balls=tuple(BallRecord(norm=norm, radius=radius) for radius in balls),
        settings=AttackSettings(),
    )

    def outcome(sample: int, radius: float, fallen: int) -> Outcome:
        success = sample < fallen or sample == wrong
        return Outcome(
            attack=attack,
            norm=norm,
            radius=radius,
            predicted=int(success),
            success=success,
            distance=radius,
            closest=None,
        )

    records = [
        AttackRecord(
            sample=sample,
            label=0,
            clean=int(sample == wrong),
            outcomes=tuple(outcome(sample, radius, fallen) for radius, fallen in balls.items()),
        )
        for sample in range(IMAGES)
    ]
    return summarize(records, study, ["a"])


def entry(found: AttackSummary) -> Json:
    return robustbench_record(found, name="a run", architecture="tiny", dataset="digits")


def test_an_entry_has_the_fields_of_robustbench_and_null_where_only_a_person_knows():
    found = entry(evaluated("autoattack", {8 / 255: 1}))
    assert found == {
        "link": None, "name": "a run", "authors": None, "additional_data": None, "number_forward_passes": 1,
        "dataset": "digits", "venue": None, "architecture": "tiny", "threat_model": "Linf", "eps": "8/255", "n": 8,
        "clean_acc": "87.50", "autoattack_acc": "75.00", "best_known_acc": "75.00", "unreliable": False,
    }  # fmt: skip
    json.dumps(found, allow_nan=False)


def test_only_an_accuracy_under_autoattack_is_called_that():
    found = entry(evaluated("pgd", {0.5: 3}, "l2"))
    assert found["autoattack_acc"] is None
    assert found["best_known_acc"] == "50.00"
    assert found["threat_model"] == "L2"
    assert found["eps"] == "0.5"


def test_the_largest_radius_is_entered_and_what_a_smaller_one_broke_is_best_known_only():
    found = evaluated("autoattack", {8 / 255: 1, 4 / 255: 3}, wrong=None)
    assert entry(found)["eps"] == "8/255"
    assert entry(found)["autoattack_acc"] == "87.50"
    assert entry(found)["best_known_acc"] == "62.50"


@pytest.mark.parametrize(
    ("radius", "shown"),
    [(8 / 255, "8/255"), (1 / 255, "1/255"), (128 / 255, "128/255"), (0.5, "0.5"), (0.03, "0.03"), (0.0, "0")],
)
def test_a_radius_is_shown_as_a_fraction_of_255_where_it_is_one(radius, shown):
    assert entry(evaluated("pgd", {radius: 0}))["eps"] == shown


@pytest.mark.parametrize("sign", [{"flags": (FlagRecord(name="a", message="b"),)}, {"warnings": ("c",)}], ids=str)
def test_an_evaluation_with_flags_or_warnings_is_unreliable(sign):
    found = evaluated("pgd", {0.1: 1})
    assert entry(found)["unreliable"] is False
    assert entry(msgspec.structs.replace(found, **sign))["unreliable"] is True
