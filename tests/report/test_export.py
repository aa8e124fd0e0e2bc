"""A leaderboard entry has the fields of RobustBench, and claims no more than was measured."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from helpers.sample_runs import about
from specguard.errors import ConfigError
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
from specguard.records.base import BallRecord
from specguard.report import robustbench_record


def evaluated(attack: str, broken: dict[tuple[Any, float], int]) -> AttackSummary:
    """Eight images, of which the last is misclassified, and the first few are broken in each ball."""
    study = AttackStudy(
        about=about(8),
        attacks=(NamedAttack(name=attack, settings={}),),
        stop_early=False,
        balls=tuple(BallRecord(norm=norm, radius=radius) for norm, radius in broken),
        settings=AttackSettings(),
    )
    records = [
        AttackRecord(
            sample=sample,
            label=0,
            clean=int(sample == 7),
            outcomes=tuple(
                Outcome(
                    attack=attack,
                    norm=norm,
                    radius=radius,
                    predicted=int(sample < count or sample == 7),
                    success=sample < count or sample == 7,
                    distance=radius,
                    closest=None,
                )
                for (norm, radius), count in broken.items()
            ),
        )
        for sample in range(8)
    ]
    return summarize(records, study, ["a"])


def entry(summary: AttackSummary) -> dict[str, Any]:
    return robustbench_record(summary, name="a run", architecture="tiny", dataset="digits")


def test_an_entry_has_the_fields_of_robustbench_and_null_where_only_a_person_knows():
    found = entry(evaluated("autoattack", {("linf", 8 / 255): 1}))
    assert found == {
        "link": None, "name": "a run", "authors": None, "additional_data": None, "number_forward_passes": 1,
        "dataset": "digits", "venue": None, "architecture": "tiny", "threat_model": "Linf", "eps": "8/255", "n": 8,
        "clean_acc": "87.50", "autoattack_acc": "75.00", "best_known_acc": "75.00", "unreliable": False,
    }  # fmt: skip
    json.dumps(found, allow_nan=False)


def test_only_an_accuracy_under_autoattack_is_called_that():
    found = entry(evaluated("pgd", {("l2", 0.5): 3}))
    assert found["autoattack_acc"] is None
    assert found["best_known_acc"] == "50.00"
    assert found["threat_model"] == "L2"
    assert found["eps"] == "0.5"


def test_the_largest_radius_is_entered_and_what_a_smaller_one_broke_is_best_known_only():
    found = entry(evaluated("autoattack", {("linf", 8 / 255): 1, ("linf", 4 / 255): 3}))
    assert found["eps"] == "8/255"
    assert found["autoattack_acc"] == "75.00"
    assert found["best_known_acc"] == "50.00"


@pytest.mark.parametrize(
    ("radius", "shown"),
    [(8 / 255, "8/255"), (1 / 255, "1/255"), (128 / 255, "128/255"), (0.5, "0.5"), (0.03, "0.03"), (0.0, "0")],
)
def test_a_radius_is_shown_as_a_fraction_of_255_where_it_is_one(radius, shown):
    assert entry(evaluated("pgd", {("linf", radius): 0}))["eps"] == shown


@pytest.mark.parametrize("sign", [{"flags": (FlagRecord(name="a", message="b"),)}, {"warnings": ("c",)}])
def test_an_evaluation_with_flags_or_warnings_is_unreliable(sign):
    assert entry(replace(evaluated("pgd", {("linf", 0.1): 1}), **sign))["unreliable"] is True


def test_there_is_no_evaluation_without_an_attack_and_a_ball():
    with pytest.raises(ConfigError, match="at least one attack and one radius"):
        evaluated("pgd", {})
