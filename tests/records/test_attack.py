"""From records to numbers: counted by hand, and bound by laws that hold for any records."""

import json
import math
from itertools import permutations, product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specguard.errors import ConfigError, RunError
from specguard.records.accuracy import Accuracy
from specguard.records.attack import (
    AttackRecord,
    AttackSettings,
    AttackStudy,
    AttackSummary,
    NamedAttack,
    Outcome,
    fits,
    summarize,
)
from specguard.records.base import About, BallRecord, convert, plain

Json = dict[str, Any]


Row = tuple[int, int, int, Outcome]  # sample, label, clean class, and what one attack found


def settings(attacks: list[str], balls: list[tuple[str, float]], stop_early: bool = False) -> AttackStudy:
    return AttackStudy(
        about=About(model="m", data="d", dataset="noise", n=1),
        attacks=tuple(NamedAttack(name=name, settings={}) for name in attacks),
        stop_early=stop_early,
        balls=tuple(BallRecord(norm=norm, radius=radius) for norm, radius in balls),
        settings=AttackSettings(),
    )


def tried(
    sample: int,
    *,
    label: int = 0,
    clean: int | None = None,
    broken: bool = False,
    attack: str = "pgd",
    norm: str = "linf",
    radius: float = 0.1,
    closest: float | None = None,
) -> Row:
    """What one attack did to one image; an image that is wrong from the start is broken by every attack."""
    seen = label if clean is None else clean
    wrong = broken or seen != label
    outcome = Outcome(
        attack=attack,
        norm=norm,
        radius=radius,
        predicted=label + 1 if wrong else label,
        success=wrong,
        distance=radius,
        closest=closest,
    )
    return sample, label, seen, outcome


def records_of(rows: list[Row]) -> list[AttackRecord]:
    """One record per image, in the order in which images are first met."""
    found: dict[int, AttackRecord] = {}
    for sample, label, clean, outcome in rows:
        known = found.get(sample)
        outcomes = (*(known.outcomes if known else ()), outcome)
        found[sample] = AttackRecord(sample=sample, label=label, clean=clean, outcomes=outcomes)
    return list(found.values())


def summary(rows: list[Row], study: AttackStudy, classes: list[str]) -> Json:
    """As it is on the disk."""
    found = summarize(records_of(rows), study, classes)
    assert convert(plain(found), AttackSummary, "it") == found
    return plain(found)


def wilson(count: int, total: int) -> list[float]:
    """The 95 % interval, by the textbook."""
    z = 1.959963984540054
    share, spread = count / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return [middle - half, middle + half]


def proportions(found: Any) -> list[Json]:
    """Every share anywhere in a summary."""
    if isinstance(found, dict):
        here = [found] if "value" in found else []
        return here + [p for value in found.values() for p in proportions(value)]
    return [p for value in found for p in proportions(value)] if isinstance(found, list) else []


def sound(found: Json) -> None:
    """No share without n and its interval, and the three agree."""
    assert proportions(found)
    for share in proportions(found):
        assert set(share) == {"value", "count", "n", "interval95"}
        assert share["value"] == share["count"] / share["n"]
        assert 0 <= share["count"] <= share["n"]
        assert share["interval95"] == pytest.approx(wilson(share["count"], share["n"]), abs=1e-12)
    json.dumps(found, allow_nan=False)


def counts(rows: list[Json]) -> dict[tuple[object, ...], int]:
    """The count of every row, by what the row is about."""
    keys = ("attack", "norm", "radius")
    return {tuple(row[key] for key in keys if key in row): row["accuracy"]["count"] for row in rows}


# By hand -----------------------------------------------------------------------------------------------------


def test_the_clean_accuracy_counts_what_was_right_before_any_attack():
    records = [tried(s, label=s % 2, clean=0) for s in range(5)]  # samples 1 and 3 are wrong
    found = summary(records, settings(["pgd"], [("linf", 0.1)]), ["a", "b"])
    sound(found)
    assert found["n"] == 5
    assert found["clean"] == {
        "value": 0.6,
        "count": 3,
        "n": 5,
        "interval95": pytest.approx([0.23072, 0.88238], abs=1e-5),
    }
    assert counts(found["attacks"]) == {("pgd", "linf", 0.1): 3}


def test_every_attack_at_every_radius_has_a_row_of_its_own_in_the_order_of_the_settings():
    balls = [("linf", 0.2), ("linf", 0.1), ("l2", 1.0)]
    broken = {
        ("pgd", "linf", 0.2): {0, 1, 2},
        ("square", "linf", 0.2): {1},
        ("pgd", "linf", 0.1): {0},
        ("square", "linf", 0.1): set(),
        ("pgd", "l2", 1.0): {3},
        ("square", "l2", 1.0): {2, 3},
    }
    records = [
        tried(s, attack=attack, norm=norm, radius=radius, broken=s in hit)
        for (attack, norm, radius), hit in broken.items()
        for s in range(4)
    ]
    found = summary(records, settings(["pgd", "square"], balls), ["a"])
    sound(found)
    assert [(r["norm"], r["radius"], r["attack"]) for r in found["attacks"]] == [
        (*ball, attack) for ball in balls for attack in ("pgd", "square")
    ]
    assert counts(found["attacks"]) == {key: 4 - len(hit) for key, hit in broken.items()}
    assert found["study"]["stop_early"] is False
    # The union over attacks, and over smaller radii of the same norm.
    assert [(r["norm"], r["radius"]) for r in found["worst_case"]] == balls
    assert counts(found["worst_case"]) == {("linf", 0.2): 1, ("linf", 0.1): 3, ("l2", 1.0): 2}


def test_where_attacks_stop_early_each_counts_what_it_and_those_before_have_broken():
    hits = [("apgd", {0, 1}, range(6)), ("fab", {3}, range(2, 6)), ("square", set(), (2, 4, 5))]
    records = [tried(s, attack=attack, broken=s in hit) for attack, hit, seen in hits for s in seen]
    names = [attack for attack, _, _ in hits]
    found = summary(records, settings(names, [("linf", 0.1)], stop_early=True), ["a"])
    sound(found)
    assert found["study"]["stop_early"] is True
    assert [row["accuracy"]["count"] for row in found["attacks"]] == [4, 3, 3]
    assert all(row["accuracy"]["n"] == 6 for row in found["attacks"])
    assert counts(found["worst_case"]) == {("linf", 0.1): 3}


def test_stopping_early_starts_anew_at_every_radius():
    hits = {("apgd", 0.2): {0, 1}, ("fab", 0.2): {2}, ("apgd", 0.1): {0}, ("fab", 0.1): {3}}
    records = [
        tried(s, attack=attack, radius=radius, broken=s in hit)
        for (attack, radius), hit in hits.items()
        for s in range(5)
        if attack == "apgd" or s not in hits["apgd", radius]
    ]
    found = summary(records, settings(["apgd", "fab"], [("linf", 0.2), ("linf", 0.1)], stop_early=True), ["a"])
    assert [row["accuracy"]["count"] for row in found["attacks"]] == [3, 2, 4, 3]
    # Sample 3 fell at the smaller radius, so the larger one breaks it as well.
    assert counts(found["worst_case"]) == {("linf", 0.2): 1, ("linf", 0.1): 3}


def test_what_falls_at_a_small_radius_has_fallen_at_every_larger_one_but_not_in_another_norm():
    records = [
        *[tried(s, radius=0.1, broken=s == 0) for s in range(3)],
        *[tried(s, radius=0.2, broken=s == 1) for s in range(3)],
        *[tried(s, norm="l2", radius=5.0) for s in range(3)],
    ]
    balls = [("linf", 0.1), ("linf", 0.2), ("l2", 5.0)]
    found = summary(records, settings(["pgd"], balls), ["a"])
    assert counts(found["attacks"]) == {
        ("pgd", "linf", 0.1): 2,
        ("pgd", "linf", 0.2): 2,
        ("pgd", "l2", 5.0): 3,
    }
    assert counts(found["worst_case"]) == {("linf", 0.1): 2, ("linf", 0.2): 1, ("l2", 5.0): 3}


@pytest.mark.parametrize(("closest", "stands"), [(0.05, False), (0.1, False), (0.1000001, True), (None, True)])
def test_a_misclassified_point_that_near_breaks_the_worst_case_though_no_attack_claims_it(closest, stands):
    """A minimal attack at radius 0.3 finds a point closer than 0.1, where PGD found none."""
    records = [
        tried(0, attack="pgd", radius=0.1),
        tried(0, attack="fab", radius=0.1),
        tried(0, attack="pgd", radius=0.3),
        tried(0, attack="fab", radius=0.3, broken=closest is not None, closest=closest),
    ]
    found = summary(records, settings(["pgd", "fab"], [("linf", 0.1), ("linf", 0.3)]), ["a"])
    assert counts(found["attacks"])["fab", "linf", 0.1] == 1
    assert counts(found["worst_case"])["linf", 0.1] == stands


def test_the_nearest_point_of_one_norm_says_nothing_about_another():
    records = [tried(0, norm="l2", radius=0.5, broken=True, closest=0.01), tried(0, norm="linf", radius=0.5)]
    found = summary(records, settings(["pgd"], [("l2", 0.5), ("linf", 0.5)]), ["a"])
    assert counts(found["worst_case"]) == {("l2", 0.5): 0, ("linf", 0.5): 1}
    assert found["distances"]["l2"]["known"] == 1
    assert found["distances"]["linf"]["known"] == 0


def test_every_class_has_its_own_row_and_an_empty_class_says_so():
    labels, wrong, broken = [0, 0, 0, 2, 2, 3], {1, 5}, {0, 3}
    records = [
        tried(s, label=y, clean=y + 1 if s in wrong else y, broken=s in broken) for s, y in enumerate(labels)
    ]
    found = summary(records, settings(["pgd"], [("linf", 0.1)]), ["zero", "one", "two", "three"])
    sound(found)
    assert [(row["name"], row["n"]) for row in found["per_class"]] == [
        ("zero", 3), ("one", 0), ("two", 2), ("three", 1)
    ]  # fmt: skip
    zero, one, two, three = found["per_class"]
    assert one == {"name": "one", "n": 0}
    assert [row["clean"]["count"] for row in (zero, two, three)] == [2, 2, 0]
    assert [row["clean"]["n"] for row in (zero, two, three)] == [3, 2, 1]
    assert [counts(row["worst_case"]) for row in (zero, two, three)] == [
        {("linf", 0.1): 1}, {("linf", 0.1): 1}, {("linf", 0.1): 0}
    ]  # fmt: skip


def quantiles_of(closest: list[float | None]) -> Json:
    records = [tried(s, radius=1.0, broken=d is not None, closest=d) for s, d in enumerate(closest)]
    return summary(records, settings(["pgd"], [("linf", 1.0)]), ["a"])["distances"]["linf"]


def test_the_quantiles_of_the_distances_are_those_among_all_images():
    found = quantiles_of([d / 100 for d in range(21)])  # 0, 0.01 .. 0.2: the q-th percentile is 0.2 q / 100
    assert found["known"] == 21
    assert found["n"] == 21
    assert found["quantiles"] == pytest.approx({"10%": 0.02, "25%": 0.05, "50%": 0.1, "75%": 0.15, "90%": 0.18})


def test_between_two_images_a_quantile_is_interpolated():
    found = quantiles_of([0.1, 0.2])
    assert found["quantiles"] == pytest.approx({"10%": 0.11, "25%": 0.125, "50%": 0.15, "75%": 0.175, "90%": 0.19})


def test_an_image_without_a_known_distance_counts_as_infinitely_far():
    found = quantiles_of([*[d / 100 for d in range(12)], *[None] * 9])  # the same grid, cut after 0.11
    assert found["known"] == 12
    assert found["n"] == 21
    expected = {"10%": 0.02, "25%": 0.05, "50%": 0.1, "75%": None, "90%": None}
    assert {k: v is None for k, v in found["quantiles"].items()} == {k: v is None for k, v in expected.items()}
    assert {k: v for k, v in found["quantiles"].items() if v is not None} == pytest.approx(
        {k: v for k, v in expected.items() if v is not None}
    )


@pytest.mark.parametrize(("known", "quantile", "value"), [(3, "10%", 0.02), (6, "25%", 0.05), (11, "50%", 0.1)])
def test_a_quantile_that_falls_on_the_last_known_image_is_its_distance(known, quantile, value):
    """Nothing is to be interpolated: the image after it, infinitely far, has the weight zero."""
    found = quantiles_of([*[d / 100 for d in range(known)], *[None] * (21 - known)])
    assert found["quantiles"][quantile] == pytest.approx(value)


@pytest.mark.parametrize("closest", [[0.25], [None], [None, None], [None] * 7])
def test_a_single_image_or_none_known_needs_no_special_care(closest):
    found = quantiles_of(closest)
    assert found["known"] == sum(d is not None for d in closest)
    assert found["n"] == len(closest)
    assert set(found["quantiles"].values()) == {closest[0]}


def test_the_nearest_of_all_attacks_and_radii_counts():
    records = [
        tried(0, attack="pgd", radius=0.1, closest=None),
        tried(0, attack="fab", radius=0.1, closest=0.3),
        tried(0, attack="pgd", radius=0.2, closest=0.15, broken=True),
        tried(0, attack="fab", radius=0.2, closest=0.25),
    ]
    found = summary(records, settings(["pgd", "fab"], [("linf", 0.1), ("linf", 0.2)]), ["a"])
    assert found["distances"] == {
        "linf": {"known": 1, "n": 1, "quantiles": dict.fromkeys(("10%", "25%", "50%", "75%", "90%"), 0.15)}
    }


def test_records_may_come_in_any_order():
    rows = [tried(s, attack=a, broken=s == 1, closest=0.1 * s) for a in ("pgd", "fab") for s in range(4)]
    options = settings(["pgd", "fab"], [("linf", 0.1)])
    found = summarize(records_of(rows), options, ["a"])
    assert summarize(tuple(records_of(rows)[::-1]), options, ["a"]) == found


def test_warnings_are_said_once_in_the_order_in_which_they_came():
    rows = records_of([tried(s) for s in range(4)])
    said = [("b",), ("b", "a"), (), ("a", "c")]
    records = [msgspec.structs.replace(r, warnings=texts) for r, texts in zip(rows, said, strict=True)]
    assert summarize(records, settings(["pgd"], [("linf", 0.1)]), ["a"]).warnings == ("b", "a", "c")


# What can be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attacks", "balls"),
    [
        ([], [("l2", 0.1)]),
        (["pgd"], []),
        (["pgd", "pgd"], [("l2", 0.1)]),
        (["pgd"], [("l2", 0.1), ("linf", 0.1), ("l2", 0.1)]),
    ],
    ids=["no attack", "no ball", "attack twice", "ball twice"],
)
def test_settings_that_make_no_sense_are_refused_in_python_and_on_the_disk(attacks, balls):
    with pytest.raises(ConfigError):
        settings(attacks, balls)
    good = plain(settings(["pgd"], [("l2", 0.1)]))
    listed = [{"name": name, "settings": {}} for name in attacks]
    bad = good | {"attacks": listed, "balls": [{"norm": n, "radius": r, "box": True} for n, r in balls]}
    with pytest.raises(RunError, match=r"study\.json is .*(at least one attack and one radius|given twice)"):
        convert(bad, AttackStudy, "study.json")


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_of_nothing_is_refused(batch):
    with pytest.raises(ConfigError, match="batch must be at least 1"):
        AttackSettings(batch=batch)


def test_a_summary_that_contradicts_itself_is_refused():
    rows = [tried(s, radius=radius, broken=s == 1) for s in range(4) for radius in (0.1, 0.2)]
    good = summary(rows, settings(["pgd"], [("linf", 0.1), ("linf", 0.2)]), ["a"])
    better = plain(Accuracy.of(5, 5))
    for bad in (
        {"n": 5},
        {"clean": better},
        {"clean": good["clean"] | {"count": 3}},
        {"clean": good["clean"] | {"value": 0.9}},
        {"clean": good["clean"] | {"interval95": [0.9, 1.0]}},
        {"clean": good["clean"] | {"n": 0, "count": 0}},
        {"worst_case": good["worst_case"][:1]},
        {"worst_case": good["worst_case"][::-1]},
        {"later": 1},
        {"kind": "certify"},
    ):
        with pytest.raises(RunError, match=r"summary\.json is malformed") as caught:
            convert(good | bad, AttackSummary, "summary.json")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stop_early", [False, True])
def test_only_outcomes_of_every_attack_in_order_fit_and_behind_a_success_none_where_attacks_stop_early(stop_early):
    """All records of two attacks in two balls that could be written, and which of them are."""
    study = settings(["pgd", "fab"], [("l2", 0.2), ("l2", 0.1)], stop_early)
    every = [(attack, radius) for radius in (0.2, 0.1) for attack in ("pgd", "fab")]
    seen = 0
    for success in product([False, True], repeat=4):
        known = dict(zip(every, success, strict=True))
        expected = [
            (attack, radius)
            for attack, radius in every
            if not (stop_early and attack == "fab" and known["pgd", radius])
        ]
        for length in range(5):
            for chosen in permutations(every, length):
                rows = [tried(0, attack=a, norm="l2", radius=r, broken=known[a, r]) for a, r in chosen]
                record = AttackRecord(sample=0, label=0, clean=0, outcomes=tuple(row[3] for row in rows))
                assert fits(record, study) == (list(chosen) == expected)
                seen += list(chosen) == expected
    assert seen == 16


# By law ------------------------------------------------------------------------------------------------------

ATTACKS = ["pgd", "fab"]
BALLS = [("linf", 0.2), ("linf", 0.1), ("linf", 0.3), ("l2", 0.2)]


@st.composite
def evaluations(draw, early=(False, True)) -> tuple[list[Row], list[str], bool]:
    """Rows as a study writes them: all images, or where attacks stop early those that still stand."""
    labels = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    clean = [draw(st.sampled_from([y, y, 3 - y])) for y in labels]
    stop_early = draw(st.sampled_from(early))
    records = []
    for norm, radius in BALLS:
        fallen: set[int] = set()
        for attack, (sample, label) in product(ATTACKS, enumerate(labels)):
            if stop_early and sample in fallen:
                continue
            wrong = clean[sample] != label
            broken = wrong or draw(st.booleans())
            near = st.floats(0, radius) if broken else st.floats(radius * 1.01, 1.0)
            closest = 0.0 if wrong else draw(near if broken else st.none() | near)
            if broken:
                fallen.add(sample)
            records.append(
                tried(
                    sample,
                    label=label,
                    clean=clean[sample],
                    broken=broken,
                    attack=attack,
                    norm=norm,
                    radius=radius,
                    closest=closest,
                )
            )
    return records, [f"class {c}" for c in range(4)], stop_early


def law(found: Json) -> None:
    sound(found)
    worst = counts(found["worst_case"])
    for (_, norm, radius), count in counts(found["attacks"]).items():
        assert worst[norm, radius] <= count <= found["clean"]["count"]
    assert worst["linf", 0.1] >= worst["linf", 0.2] >= worst["linf", 0.3]
    rows = [row for row in found["per_class"] if row["n"]]
    assert sum(row["n"] for row in rows) == found["n"]
    assert sum(row["clean"]["count"] for row in rows) == found["clean"]["count"]
    for ball, count in worst.items():
        assert sum(counts(row["worst_case"])[ball] for row in rows) == count
    for norm, distances in found["distances"].items():
        assert distances["n"] == found["n"]
        # What fell has a known distance, and a known distance within the largest radius is a fall.
        largest = max(radius for n, radius in BALLS if n == norm)
        assert distances["known"] >= found["n"] - worst[norm, largest]
        values = [math.inf if v is None else v for v in distances["quantiles"].values()]
        assert values == sorted(values)


@given(evaluations())
def test_the_worst_case_is_worst_monotone_in_the_radius_and_the_classes_add_up(evaluation):
    rows, classes, stop_early = evaluation
    found = summary(rows, settings(ATTACKS, BALLS, stop_early), classes)
    law(found)
    if stop_early:
        for ball in BALLS:
            first, second = (r["accuracy"]["count"] for r in found["attacks"] if (r["norm"], r["radius"]) == ball)
            assert second <= first
    backwards = summarize(records_of(rows)[::-1], settings(ATTACKS, BALLS, stop_early), classes)
    assert found == plain(backwards)
    assert all(fits(record, settings(ATTACKS, BALLS, stop_early)) for record in records_of(rows))


@given(evaluations((False,)))
def test_the_laws_bite(evaluation):
    """An attack that is left out of the worst case, or a sample that is lost, is noticed whenever it matters."""
    records, classes, _ = evaluation
    found = summary(records, settings(ATTACKS, BALLS), classes)
    lost = summary([r for r in records if r[3].attack != "pgd"], settings(ATTACKS, BALLS), classes)
    spoilt = found | {"worst_case": lost["worst_case"], "per_class": lost["per_class"]}
    if any(a["accuracy"]["count"] > b["accuracy"]["count"] for a, b in zip(
        lost["worst_case"], found["attacks"][::2], strict=True
    )):  # fmt: skip
        with pytest.raises(AssertionError):
            law(spoilt)
