"""The figure of a layer has every series of its result, the same bytes every time, and takes its title as text."""

from typing import Any
from xml.etree import ElementTree

import pytest

from specguard.report import save_figure, sensitivity_figure
from specguard.report.figures.sensitivity import ELEMENTS, SERIES


def extent(mean: float) -> dict[str, float]:
    return {"mean": mean, "min": 0.9 * mean, "max": 1.1 * mean}


FACTORS = {"maps": ("found", "lofast1", "lofast2", "ours"), "values": ("found", "lofast1", "naive")}


def row(**key: float) -> dict[str, Any]:
    """Every series has a level of its own."""
    columns = {name: extent(k + key["radius"]) for k, name in enumerate([*SERIES, "best"], 1)}
    return {**key, **columns}


def result() -> dict[str, Any]:
    changes = [{"which": which, "change": change} for which in ELEMENTS for change in (0.1, 1.0)]
    return {
        "radii": [row(radius=radius) for radius in (0.01, 0.1)],
        "head": [
            {"radius": radius, "factor": factor, **{name: extent(1.0 + radius) for name in names}}
            for radius in (0.01, 0.1)
            for factor, names in FACTORS.items()
        ],
        "input_norms": [row(input_norm=norm, radius=radius) for norm in (1.0, 10.0) for radius in (0.01, 0.1)],
        "weights": [{**change, "lofast2": extent(2.0), "t1": extent(1.0)} for change in changes],
        "unchanged": {"lofast2": extent(2.0), "t1": extent(1.0)},
        "settings": {"weight_radius": 0.1},
    }


def labels(legend: Any) -> list[str]:
    assert not any(text.get_parse_math() for text in legend.get_texts())
    return [text.get_text() for text in legend.get_texts()]


def test_all_series_are_drawn_and_named():
    figure = sensitivity_figure(result(), "a run")
    first, maps, values, second, third = figure.axes
    assert (len(maps.lines), len(values.lines)) == (4, 3)
    assert labels(maps.get_legend()) == ["found by ascent", "LoFAST (1)", "LoFAST (2)", "with local constants"]
    assert labels(values.get_legend()) == ["found by ascent", "naive", "LoFAST (1)"]
    assert len(first.lines) == len(second.lines) == len(SERIES)
    assert len(third.lines) == 2 * len(ELEMENTS) + 2
    assert {axis.get_yscale() for axis in figure.axes} == {"log"}
    assert labels(figure.legends[0]) == [label for label, _, _ in SERIES.values()]
    assert labels(third.get_legend()) == [*(label for label, _ in ELEMENTS.values()), "LoFAST (2)", "T1"]
    for number, line in enumerate(first.lines, 1):
        assert line.get_ydata().tolist() == [number + 0.01, number + 0.1]
    for number, line in enumerate(second.lines, 1):  # at the largest radius
        assert line.get_xdata().tolist() == [1.0, 10.0]
        assert line.get_ydata().tolist() == [number + 0.1] * 2


def test_what_is_none_or_zero_is_left_out():
    found = result()
    for r in (*found["radii"], *found["input_norms"]):
        r["t2"], r["naive"] = None, extent(0.0)
    found["radii"][0]["t1"] = None
    found["unchanged"]["t1"] = None
    figure = sensitivity_figure(found, "a run")
    assert len(figure.axes[0].lines) == len(SERIES) - 2
    assert "T2" not in labels(figure.legends[0])
    assert len(figure.axes[4].lines) == 2 * len(ELEMENTS) + 1
    save_figure(figure)


def test_studies_that_were_not_asked_for_leave_their_panels_empty():
    files = save_figure(sensitivity_figure(result() | {"input_norms": [], "weights": []}, "a run"))
    ElementTree.fromstring(files["svg"])


@pytest.mark.parametrize("title", ["<b> & $y$", "_$x^", "a\x01b"])
def test_any_title_is_drawn_as_it_is(title):
    figure = sensitivity_figure(result(), title)
    assert figure._suptitle is not None
    assert figure._suptitle.get_text() == title.replace("\x01", "\ufffd")
    assert not figure._suptitle.get_parse_math()
    root = ElementTree.fromstring(save_figure(figure)["svg"])
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not tags & {"script", "a", "foreignObject"}


def test_the_same_result_gives_the_same_bytes():
    assert save_figure(sensitivity_figure(result(), "a")) == save_figure(sensitivity_figure(result(), "a"))
