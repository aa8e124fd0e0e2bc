"""Curves of accuracy: the same run or method looks the same in every figure, and radii have room on their axis."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from helpers.sample_runs import sample_run, smoothed, stop_early
from specguard.records.accuracy import Accuracy
from specguard.records.certificate import METHOD_NAMES
from specguard.report import (
    Run,
    comparison_figure,
    curve_figure,
    method_figure,
    read_run,
    smoothing_figure,
    training_figure,
    weights_figure,
)
from specguard.report.examples import example_run
from specguard.report.figures.inline import inline_svg
from specguard.report.figures.radius_axis import is_logarithmic
from specguard.report.figures.style import METHOD_COLOURS, method_line, run_color
from specguard.report.html import page

CSS = Path(page.__file__).parent / "templates" / "report.css"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return read_run(sample_run(tmp_path_factory.mktemp("figures") / "run"), "a run")


@pytest.fixture(scope="module")
def noisy(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("noisy")
    smoothed(folder / "run" / "smooth", 40)
    return read_run(folder / "run", "noisy")


def certified_at(run: Run, *radii: float, count: int | None = None) -> Run:
    """The run with a certification at these radii, of which only the summary is known, and without attacks."""
    (study,) = run.certificates
    row = study.summary.radii[0]
    if count is not None:
        some = Accuracy.of(count, study.summary.n)
        row = msgspec.structs.replace(row, certified=some, by=dict.fromkeys(row.by, some))
    header = study.summary.study
    header = msgspec.structs.replace(header, settings=msgspec.structs.replace(header.settings, radii=radii))
    rows = tuple(msgspec.structs.replace(row, radius=radius) for radius in radii)
    summary = msgspec.structs.replace(study.summary, study=header, radii=rows)
    return replace(run, attacks=(), certificates=(replace(study, summary=summary, images=None),))


def legend(figure: Figure) -> dict[str, tuple[str, str, str]]:
    """Color, style and marker of the sample of each label."""
    (found,) = figure.legends
    texts = [text.get_text() for text in found.get_texts()]
    return {
        text: look(handle) for text, handle in zip(texts, found.legend_handles, strict=True) if text != "unknown"
    }


def look(line) -> tuple[str, str, str]:
    return to_hex(line.get_color()), str(line._unscaled_dash_pattern), str(line.get_marker())


def looks(figure: Figure) -> set[tuple[str, str]]:
    """Color and style of every line that is drawn."""
    return {look(line)[:2] for line in figure.axes[0].lines if line.get_linestyle() != "None"}


# The same look ---------------------------------------------------------------------------------------------------


def test_every_line_is_in_the_legend_as_it_is_drawn_and_nothing_else_is(run, noisy):
    early = certified_at(run, 0.05, 0.1)
    for figure in (
        curve_figure(run, "l2"),
        curve_figure(early, "l2"),
        curve_figure(replace(run, certificates=()), "l2"),
        method_figure(run.certificates[0]),
        smoothing_figure([noisy]),
    ):
        assert {style[:2] for style in legend(figure).values()} == looks(figure)


def test_a_kind_of_accuracy_has_the_same_style_in_every_figure(run):
    both, alone = legend(curve_figure(run, "l2")), legend(curve_figure(certified_at(run, 0.05), "l2"))
    attacked, compared = (
        legend(curve_figure(replace(run, certificates=()), "l2")),
        legend(comparison_figure([run], "l2")),
    )
    assert both["certified"] == alone["certified"]
    assert (
        both["clean"] == alone["clean"] == attacked["clean"] == legend(method_figure(run.certificates[0]))["clean"]
    )
    assert both["robust, attacks"] == alone["robust"] == attacked["robust"]
    assert both["robust, certify"] != both["robust, attacks"]
    assert (compared["certified"][1], compared["robust"][1]) == (both["certified"][1], attacked["robust"][1])


def test_a_run_has_one_color_in_every_figure(run, noisy):
    runs = [example_run(), run, replace(run, label="third")]
    compared = comparison_figure(runs, "l2")
    for number in range(3):
        own = {
            to_hex(line.get_color()) for line in compared.axes[0].lines if f"run-{number}-" in str(line.get_gid())
        }
        assert own == {run_color(number)}
    assert legend(compared)["a run"][0] == run_color(1)
    assert next(iter(legend(smoothing_figure([replace(noisy, smoothing=()), noisy])).values()))[0] == run_color(1)
    assert to_hex(training_figure({1: [(1, 0.5), (2, 0.6)]}).axes[0].lines[0].get_color()) == run_color(1)
    norms = run.spectra[0].summary.weights
    assert {to_hex(line.get_color()) for line in weights_figure({1: norms}).axes[0].lines} == {run_color(1)}


def test_runs_without_studies_in_the_norm_leave_the_colors_of_others_alone(run):
    figure = comparison_figure([replace(run, attacks=(), certificates=()), run], "l2")
    assert list(legend(figure)) == ["a run", "certified", "robust"]
    assert legend(figure)["a run"][0] == run_color(1)


def test_a_method_looks_the_same_whichever_others_were_tried(run):
    (study,) = run.certificates
    everything = legend(method_figure(study))
    for names in combinations(("lofast", "local", "adjoint"), 2):
        rows = tuple(
            msgspec.structs.replace(row, by={name: row.by[name] for name in names}) for row in study.summary.radii
        )
        some = replace(study, summary=msgspec.structs.replace(study.summary, radii=rows))
        assert {name: everything[name] for name in ("clean", *names)} == legend(method_figure(some))


def test_methods_have_looks_of_their_own_and_colors_that_the_page_knows():
    found = [(line["color"], str(line["linestyle"])) for line in map(method_line, METHOD_NAMES)]
    assert len({color for color, _ in found}) == len(METHOD_NAMES) <= len(METHOD_COLOURS)
    css = CSS.read_text()
    for number in range(len(METHOD_COLOURS)):
        assert css.count(f"--method-{number}: ") == 2  # in the light and in the dark


def test_certificates_that_are_no_proofs_look_like_no_proof(run, noisy):
    proofs = {style[1] for style in legend(comparison_figure([run], "l2")).values()}
    assert not proofs & {style[1] for style in legend(smoothing_figure([noisy])).values()}


# The axis --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("radii", "expected"),
    [
        ((0.001, 0.01, 0.1), True),
        ((0.0001, 0.1), True),
        ((0.001, 0.002, 0.005, 0.05), True),
        ((0.0, 1e-9, 1.0), True),
        ((1e-300, 1e300), True),
        ((0.02, 0.05, 0.1), False),
        ((1 / 255, 2 / 255, 4 / 255, 8 / 255), False),
        (tuple(k / 10 for k in range(1, 11)), False),
        ((0.01, 0.035, 0.075, 0.1, 0.15, 0.25), False),
        ((0.1,), False),
        ((0.0,), False),
        ((), False),
    ],
)
def test_the_axis_is_logarithmic_where_radii_span_decades(radii, expected):
    assert is_logarithmic(radii) is expected
    assert is_logarithmic(tuple(3e-4 * radius for radius in reversed(radii))) is expected


@pytest.mark.parametrize("radii", [(0.001, 0.01, 0.1), (0.0, 0.001, 0.1)])
def test_on_a_logarithmic_axis_every_radius_has_a_place_and_says_so(run, radii):
    chosen = certified_at(run, *radii)
    for figure in (
        curve_figure(chosen, "l2"),
        comparison_figure([chosen, chosen], "l2"),
        method_figure(chosen.certificates[0]),
    ):
        (axis,) = figure.axes
        assert axis.get_xscale() == "log"
        assert axis.get_xlabel() == "l2 radius, logarithmic"
        assert axis.get_xlim()[0] < min(r for r in radii if r > 0)
        for line in axis.lines:
            assert all(x > 0 for x in line.get_xdata()) or len(set(line.get_ydata())) == 1  # but for the clean one
        parsed(figure)


@pytest.mark.parametrize(
    ("radii", "count"), [((0.1,), 0), ((0.0,), 40), ((0.0, 0.1), 0), (tuple(k / 40 for k in range(1, 11)), 40)]
)
def test_one_radius_or_ten_and_none_certified_or_all_are_drawn(run, radii, count):
    chosen = certified_at(run, *radii, count=count)
    for figure in (
        curve_figure(chosen, "l2"),
        comparison_figure([chosen] * 6, "l2"),
        method_figure(chosen.certificates[0]),
    ):
        (axis,) = figure.axes
        assert axis.get_xscale() == "linear"
        low, high = axis.get_ylim()
        assert low < 0 < 100 < high  # lines at the ends are seen whole
        assert max(radii) <= axis.get_xlim()[1]
        parsed(figure)


def test_methods_that_stop_early_are_one_line(tmp_path):
    stop_early(tmp_path / "run" / "early", 20)
    (study,) = read_run(tmp_path / "run", "a").certificates
    assert list(legend(method_figure(study))) == ["clean", "certified"]


def test_the_lowest_of_several_attacks_is_compared(run):
    """A ball contains the smaller ones, so no accuracy is above that at a smaller radius."""
    figure = comparison_figure([run], "l2")
    (line,) = [line for line in figure.axes[0].lines if line.get_gid() == "run-0-attacked-0"]
    drawn = dict(zip(*line.get_data(), strict=True))
    for known in (run.attacks[0].summary.worst_case, run.certificates[0].summary.radii):
        for row in known:
            accuracy = row.accuracy if hasattr(row, "accuracy") else row.robust
            assert drawn[row.radius] <= 100 * accuracy.value + 1e-9
    y = list(line.get_ydata())
    assert y == sorted(y, reverse=True)


# Smoothing -------------------------------------------------------------------------------------------------------


def test_the_curve_of_smoothing_is_exact_where_the_records_are_known(noisy):
    (study,) = noisy.smoothing
    assert study.radii == (0.3,) * 20
    figure = smoothing_figure([noisy])
    (line,) = [line for line in figure.axes[0].lines if line.get_gid() == "run-0-smoothed-0"]
    for x, y in zip(*line.get_data(), strict=True):
        assert y == (50.0 if x < 0.3 else 0.0)
    unknown = replace(noisy, smoothing=(replace(study, radii=()),))
    (line,) = [x for x in smoothing_figure([unknown]).axes[0].lines if x.get_gid() == "run-0-smoothed-0"]
    assert list(line.get_ydata()) == [50.0, 50.0, 50.0, 0.0]


def test_noises_have_dashes_and_labels_of_their_own(noisy):
    (study,) = noisy.smoothing
    header = study.summary.study
    settings = header.settings
    more = msgspec.structs.replace(settings, smoothing=msgspec.structs.replace(settings.smoothing, sigma=0.5))
    summary = msgspec.structs.replace(study.summary, study=msgspec.structs.replace(header, settings=more))
    found = legend(smoothing_figure([replace(noisy, smoothing=(study, replace(study, summary=summary)))]))
    assert list(found) == ["noisy, noise 0.25", "noisy, noise 0.5"]
    assert len({style[1] for style in found.values()}) == 2


LABELS = ["<script>alert(1)</script>]]>", "$\\frac{", "_private", "a" * 300, "\x00実験"]


@pytest.mark.parametrize("label", LABELS, ids=ascii)
def test_labels_are_inert_text_in_every_legend(run, noisy, label):
    for figure in (
        comparison_figure([replace(run, label=label)], "l2"),
        smoothing_figure([replace(noisy, label=label)]),
    ):
        parsed(figure)
        (found,) = figure.legends
        assert not any(text.get_parse_math() for text in found.get_texts())
        assert len(found.get_texts()[0].get_text()) < 50


def parsed(figure: Figure) -> None:
    """The figure can be drawn, and is well-formed without scripts."""
    for element in ElementTree.fromstring(inline_svg(figure, "figure", "a figure")).iter():
        assert element.tag.rpartition("}")[2] not in ("script", "foreignObject", "a")
