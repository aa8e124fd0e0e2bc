"""The plan of a diagnosis: shares of time, decisions that are kept, radii that follow a stated rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specguard.diagnosis.plan import Plan, TooSlow, allotment, images_within, skipped, too_slow
from specguard.diagnosis.proofs import Trial, _fitting
from specguard.diagnosis.radii import attack_radii, grid, limited, proof_radii, smallest
from specguard.diagnosis.stages import stages_of
from specguard.errors import ConfigError, RunError
from specguard.records.accuracy import Accuracy
from specguard.records.base import About
from specguard.records.diagnosis import PLAN, Decision, DiagnosisHeader, DiagnosisSettings, Measured, Spent
from specguard.report.verdict import ATTACKED, PROVED

ABOUT = About(model="abc", data="def", dataset="noise", n=0)
HEADER = DiagnosisHeader(about=ABOUT, settings=DiagnosisSettings())
MEASURED = Measured(
    clean=Accuracy.of(8, 10), forward=1e-3, gradient=1e-2, probed=8, edge={"l2": 0.1, "linf": None}, seconds=2.0
)


def test_the_time_is_shared_and_what_a_stage_leaves_goes_to_later_ones():
    assert allotment(100.0, 0.0, 1.0, [1.0, 2.0]) == 25.0
    assert allotment(100.0, 40.0, 1.0, [2.0]) == 20.0
    assert allotment(100.0, 40.0, 2.0, []) == 60.0


def test_time_that_is_used_up_leaves_none():
    assert allotment(10.0, 11.0, 1.0, []) == 0.0
    assert images_within(-5.0, 1.0, 100) == 0


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 1000))
def test_images_never_take_more_than_the_time(allotted, per_image, most):
    count = images_within(allotted, per_image, most)
    assert 0 <= count <= most
    assert count * per_image <= allotted * (1 + 1e-9)


def test_the_minutes_that_are_named_would_be_enough_for_four_images():
    why = too_slow("a proof", 5.0, 30.0, 2.0, 0.25)
    assert 0.25 * 60 * (why.minutes - 2) + 5.0 >= 4 * 30.0
    assert f"--minutes {why.minutes}" in why.text


def test_stages_share_the_whole_and_end_with_what_depends_on_the_others():
    for norm in ("l2", "linf", None):
        stages = stages_of(DiagnosisSettings(norm=norm))
        assert len({stage.name for stage in stages}) == len(stages)
        assert all(stage.share > 0 for stage in stages)
    assert [stage.name for stage in stages_of(DiagnosisSettings())] == [
        "gradients",
        "attacks-linf",
        "attacks-l2",
        "spectrum",
        "certificates-l2",
        "certificates-linf",
        "smoothing",
    ]


def test_decisions_are_read_again_and_a_line_that_was_cut_is_dropped(tmp_path):
    plan = Plan(tmp_path, HEADER)
    decision = Decision(stage="spectrum", run=True, reason="blocks", images=3, allotted=1.0, seconds=0.5)
    for line in (MEASURED, decision, Spent(stage="spectrum", seconds=4.0)):
        plan.add(line)
    with open(tmp_path / PLAN, "a") as handle:
        handle.write('{"kind": "decision", "sta')
    again = Plan(tmp_path, HEADER)
    assert again.measured == MEASURED
    assert again.decisions == {"spectrum": decision}
    assert again.spent == 2.0 + 0.5 + 4.0
    again.add(skipped("smoothing", TooSlow("it is slow", 9), 1.0, 2.0))
    assert Plan(tmp_path, HEADER).decisions["smoothing"].minutes == 9


def test_the_plan_of_another_diagnosis_is_refused(tmp_path):
    Plan(tmp_path, HEADER)
    other = DiagnosisHeader(about=ABOUT, settings=DiagnosisSettings(minutes=3.0))
    with pytest.raises(RunError, match=r"settings.minutes: 10.0 before, 3.0 now"):
        Plan(tmp_path, other)


def test_a_plan_that_does_not_begin_with_settings_is_refused(tmp_path):
    (tmp_path / PLAN).write_text('{"kind": "spent", "stage": "a", "seconds": 1.0}\n')
    with pytest.raises(RunError, match="does not begin"):
        Plan(tmp_path, HEADER)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"minutes": 0.0}, "minutes must be positive"),
        ({"minutes": float("nan")}, "minutes must be positive"),
        ({"radii": (0.1,)}, "--radius needs --norm"),
        ({"radii": (0.0,), "norm": "l2"}, "radii must be positive"),
        ({"radii": (0.1, 0.1), "norm": "l2"}, "none may be given twice"),
        ({"images": 0}, "images must be at least 1"),
        ({"memory": -1.0}, "memory must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(settings, words):
    with pytest.raises(ConfigError, match=words):
        DiagnosisSettings(**settings)


# Radii ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 9))
def test_bisection_finds_the_smallest_radius_with_few_attacks(first):
    calls: list[float] = []

    def succeeds(radius: float) -> bool:
        calls.append(radius)
        return radius >= first

    radii = [float(k) for k in range(9)]
    assert smallest(radii, succeeds) == (first if first < 9 else None)
    assert len(calls) <= 4


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_attacks_always_include_the_customary_radius(norm):
    for edge in (None, *grid(norm)):
        radii = attack_radii(norm, edge)
        assert ATTACKED[norm] in radii
        assert list(radii) == sorted(set(radii))
        assert len(radii) <= 4
        assert edge is None or edge in radii


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("reach", [0.0, 1e-9, 1e-4, 0.003, 0.1, 0.3])
def test_proofs_are_tried_below_and_above_what_was_certified(norm, reach):
    radii = proof_radii(norm, reach)
    assert list(radii) == sorted(set(radii))
    assert all(radius > 0 for radius in radii)
    if reach > PROVED[norm] * 2.0**-19:
        assert radii[0] <= reach < radii[-1] or reach >= 2 * PROVED[norm]
    if reach >= PROVED[norm] / 8:
        assert PROVED[norm] in radii


def test_radii_that_reach_every_image_are_left_out():
    assert limited((0.5, 1.0, 2.0), "linf", 4) == (0.5,)
    assert limited((0.5, 1.0, 2.0), "l2", 4) == (0.5, 1.0)


# Methods ----------------------------------------------------------------------------------------------------------

FAST, FAR = Trial("local", 0.01, 0.1), Trial("zonotope", 0.1, 6.0)


def test_the_method_that_reaches_farthest_comes_first_and_cheap_ones_join_it():
    methods, _, count = _fitting([FAST, FAR], 3, MEASURED, 100.0, 200)
    assert methods == ("local", "zonotope")
    assert count > 1


def test_a_method_that_would_cost_more_than_half_of_the_images_is_left_out():
    near, slow = Trial("local", 0.1, 0.1), Trial("zonotope", 0.01, 60.0)
    methods, _, count = _fitting([near, slow], 3, MEASURED, 60.0, 200)
    assert methods == ("local",)
    assert count == int(60.0 / (0.1 + 40 * 0.01 * 3))


def test_a_method_that_fits_no_image_is_said_to():
    assert _fitting([FAR], 3, MEASURED, 1.0, 200)[2] == 0
