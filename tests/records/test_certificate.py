"""What the records of certificates say together, and whether one can be true, by hand."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from specguard.errors import ConfigError, RunError
from specguard.records.accuracy import Accuracy
from specguard.records.base import About, convert, plain
from specguard.records.certificate import (
    VACUOUS,
    CertificateRecord,
    CertificateSummary,
    CertifySettings,
    CertifyStudy,
    Claim,
    Failure,
    Growth,
    LargestRadius,
    Limit,
    Proof,
    RadiusRecord,
    Stage,
    StageSummary,
    fits,
    summarize,
)

RADII = {"patches": 1.0, "blocks.0.mlp": 2.0, "blocks.0.mlp.branch.norm": 2.0, "head": 10.0, "end": 20.0}
PROOF = Proof(radius=1.0, other_class=1, margin=1.0, loss=0.5, radii=RADII, terms={})


def study(count: int = 1, verifiers: dict[str, str] | None = None, **settings: Any) -> CertifyStudy:
    about = About(model="abc", data="def", dataset="noise", n=count)
    known = CertifySettings(**{"radii": (0.1,), "methods": ("local",)} | settings)
    return CertifyStudy(about=about, settings=known, attack={}, verifiers=verifiers or {})


def record(sample: int = 0, lower: float | None = -1.0, verdict: Any = "unknown", **changes: Any):
    """Of one method, at one radius."""
    known = {
        "label": 0, "predicted": 0, "margin": 1.0, "input": "x", "method": "local", "largest": {"local": 0.0},
        "radii": (RadiusRecord(radius=0.1, verdict=verdict, lower={"local": lower}),),
    }  # fmt: skip
    return CertificateRecord(sample=sample, **known | changes)


def early(sample: int, verdict: Any, proved: Any = (), stages: Any = (), **changes: Any):
    """Of methods that stop early, at one radius."""
    row = RadiusRecord(radius=0.1, verdict=verdict, proved=proved, stages=stages)
    known = {"label": 0, "predicted": 0, "margin": 1.0, "input": "x", "radii": (row,)}
    return CertificateRecord(sample=sample, **known | changes)


# Every method ----------------------------------------------------------------------------------------------------


def test_a_summary_names_the_step_at_which_radii_grow_most_and_counts_vacuous_radii():
    records = [
        record(i, largest={"local": size}, proofs={"local": PROOF} if size else {})
        for i, size in enumerate((0.0, 1e-9, 2.0**-24))
    ]
    found = summarize(records, study(3))
    assert found.growth == (Growth(step="blocks.0.mlp", images=2, factor=5.0),)
    assert found.largest["local"] == LargestRadius(median=1e-9, vacuous=2)
    assert found.vacuous_below == VACUOUS == 2.0**-24


def test_a_summary_of_no_right_image_has_no_median():
    found = summarize([record(predicted=1, verdict="broken", losses={"head": 1.0})], study())
    assert found.largest["local"] == LargestRadius(median=None, vacuous=0)
    assert found.limits == ()
    assert found.clean == Accuracy.of(0, 1)


def test_a_summary_counts_verdicts_methods_and_what_limits_them():
    methods = ("naive", "local")
    verdicts = [
        ("certified", {"naive": None, "local": 1.0}, {"head: radius": 2.0, "head: bend": 1.0}),
        ("certified", {"naive": 0.5, "local": 1.0}, {"head: radius": 2.0}),
        ("unknown", {"naive": -1.0, "local": 0.0}, {}),
        ("broken", {"naive": -1.0, "local": -1.0}, {"head: bend": None}),
    ]
    records = [
        record(
            i,
            radii=(RadiusRecord(radius=0.1, verdict=verdict, lower=lower),),
            losses=losses,
            largest=dict.fromkeys(methods, 0.0),
        )
        for i, (verdict, lower, losses) in enumerate(verdicts)
    ]
    found = summarize(records, study(4, methods=methods))
    (row,) = found.radii
    assert (row.certified, row.robust) == (Accuracy.of(2, 4), Accuracy.of(3, 4))
    assert (row.broken, row.unknown, row.with_verifiers, row.stages) == (1, 1, None, ())
    assert row.by == {"naive": Accuracy.of(1, 4), "local": Accuracy.of(2, 4)}
    assert found.limits == (
        Limit(term="head: radius", images=2), Limit(term="rounding", images=1), Limit(term="head: bend", images=1)
    )  # fmt: skip
    assert found.failures == ()


CERTIFIED = record(lower=1.0, verdict="certified", largest={"local": 0.2}, proofs={"local": PROOF})


def test_a_record_that_can_be_true_fits():
    assert fits(CERTIFIED, study())
    assert fits(record(), study())
    assert fits(record(lower=None, verdict="broken"), study())


def row(**changes: Any) -> tuple[RadiusRecord, ...]:
    return (RadiusRecord(**{"radius": 0.1, "verdict": "certified", "lower": {"local": 1.0}} | changes),)


@pytest.mark.parametrize(
    "changes",
    [
        {"radii": ()}, {"radii": row(radius=0.2)}, {"radii": row() * 2}, {"radii": row(verdict="unknown")},
        {"radii": row(verdict="broken")}, {"radii": row(lower={"local": -1.0})},
        {"radii": row(lower={"local": 0.0})}, {"radii": row(lower={"local": None})},
        {"radii": row(lower={})}, {"radii": row(lower={"naive": 1.0})},
        {"radii": row(lower={"local": 1.0, "naive": 1.0})}, {"method": None}, {"method": "naive"}, {"largest": {}},
        {"largest": {"naive": 0.2}}, {"largest": {"local": 0.2, "naive": 0.2}}, {"proofs": {"naive": PROOF}},
        {"failures": {"local": "why"}}, {"radii": row(stages=(Stage(method="local", classes=1, left=0),))},
        {"radii": row(proved=(Claim(method="local", classes=(1,), lower=1.0),))},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_cannot_be_true_does_not_fit(changes):
    assert not fits(replace(CERTIFIED, **changes), study())


def test_the_best_method_has_the_best_bound_at_the_last_radius():
    methods = ("naive", "local")
    one = replace(
        CERTIFIED, radii=row(lower={"naive": None, "local": 1.0}), largest=dict.fromkeys(methods, 0.0), proofs={}
    )
    assert fits(one, study(methods=methods))
    assert not fits(replace(one, method="naive"), study(methods=methods))
    assert not fits(replace(one, largest={"local": 0.0, "naive": 0.0}), study(methods=methods))  # another order


# Methods that stop early ------------------------------------------------------------------------------------------

OURS = Claim(method="local", classes=(1, 2), lower=0.5)
THEIRS = Claim(method="oracle", classes=(2,), lower=0.5)
EARLY: dict[str, Any] = {"stop_early": True, "search": False, "methods": ("naive", "local")}


def stage(method: str, classes: int, left: int) -> Stage:
    return Stage(method=method, classes=classes, left=left)


def test_what_rests_on_verifiers_is_counted_apart_and_stages_by_their_part():
    records = [
        early(0, "certified", (OURS,), (stage("naive", 2, 2), stage("local", 2, 0))),
        early(1, "certified", (replace(OURS, classes=(1,)), THEIRS), (stage("local", 2, 1), stage("oracle", 1, 0))),
        early(2, "unknown", (), (stage("naive", 2, 1),), failures={"oracle": "no"}),
        early(3, "broken", predicted=1, failures={"oracle": "no"}),
    ]
    found = summarize(records, study(4, {"oracle": "hearsay"}, **EARLY))
    (at,) = found.radii
    assert (at.certified, at.with_verifiers, at.robust) == (Accuracy.of(1, 4), Accuracy.of(2, 4), Accuracy.of(3, 4))
    assert (at.broken, at.unknown, at.by) == (1, 1, {})
    assert at.stages == (
        StageSummary(method="naive", images=2, classes=4, certified=0),
        StageSummary(method="local", images=2, classes=4, certified=1),
        StageSummary(method="oracle", images=1, classes=1, certified=1),
    )
    assert found.failures == (Failure(method="oracle", reason="no", images=2),)
    assert (found.largest, found.limits, found.growth) == ({}, (), ())
    assert [each.third_party({"oracle": "hearsay"}) for each in records] == [False, True, False, False]
    assert not any(each.third_party({}) for each in records)


def test_without_verifiers_nothing_is_said_of_them():
    found = summarize([early(0, "certified", (OURS,))], study(**EARLY))
    assert found.radii[0].with_verifiers is None
    assert "with_verifiers" not in plain(found)["radii"][0]


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "unknown"}, {"verdict": "broken"}, {"proved": ()}, {"proved": (THEIRS,)}, {"radius": 0.2},
        {"lower": {"local": 1.0}}, {"proved": (replace(OURS, classes=()),)},
        {"proved": (replace(OURS, classes=(1, 1)),)}, {"proved": (replace(OURS, lower=0.0),)},
        {"proved": (replace(OURS, lower=-1.0),)}, {"proved": (replace(OURS, method="mixed"),)},
        {"stages": (stage("oracle", 2, 0),)}, {"stages": (stage("local", 1, 2),)},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_that_cannot_be_true_does_not_fit(changes):
    known = early(0, "certified", (OURS,), (stage("naive", 2, 2), stage("local", 2, 0)))
    assert fits(known, study(**EARLY))
    assert not fits(replace(known, radii=(replace(known.radii[0], **changes),)), study(**EARLY))


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "local"}, {"losses": {"head": 1.0}}, {"largest": {"local": 1.0}}, {"norms": {"head": {}}},
        {"proofs": {"local": PROOF}}, {"failures": {"oracle": "why"}}, {"radii": ()},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_stopped_early_claims_nothing_else(changes):
    assert not fits(replace(early(0, "certified", (OURS,)), **changes), study(**EARLY))


def test_neither_kind_of_record_fits_a_study_of_the_other():
    assert not fits(CERTIFIED, study(stop_early=True))
    assert not fits(early(0, "certified", (OURS,)), study())


# Studies and summaries --------------------------------------------------------------------------------------------


def test_a_method_is_no_verifier_and_verifiers_need_methods_that_stop_early():
    for name in ("local", "naive", ""):
        with pytest.raises(ConfigError, match="cannot be called"):
            study(1, {name: "hearsay"}, **EARLY)
    with pytest.raises(ConfigError, match="stop_early"):
        study(1, {"oracle": "hearsay"})
    assert study(1, {"oracle": "hearsay"}, **EARLY).stages == ("naive", "local", "oracle")


def test_a_summary_that_contradicts_itself_is_refused():
    whole = plain(summarize([CERTIFIED], study()))
    assert convert(whole, CertificateSummary, "it") == summarize([CERTIFIED], study())
    for change in ({"n": 2}, {"radii": []}, {"radii": [whole["radii"][0] | {"radius": 0.2}]}):
        with pytest.raises(RunError, match="not those of the study"):
            convert(whole | change, CertificateSummary, "it")
    for change in ({"clean": whole["clean"] | {"count": 0}}, {"clean": whole["clean"] | {"value": 0.5}}):
        with pytest.raises(RunError, match="is not that of"):
            convert(whole | change, CertificateSummary, "it")


@pytest.mark.parametrize(
    "change",
    [
        {"sample": -1}, {"sample": True}, {"label": 1.5}, {"margin": None}, {"margin": 1e301}, {"input": None},
        {"radii": None}, {"losses": {"head": -1.0}}, {"largest": {"local": -1.0}}, {"largest": {"magic": 1.0}},
        {"norms": {"head": {"norm": -1.0}}}, {"norms": {"head": {"norm": None}}}, {"extra": 1},
        {"proofs": {"local": {}}}, {"method": "magic"},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range_and_unknown_fields_are_no_record(change):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain(CERTIFIED) | change, CertificateRecord)
