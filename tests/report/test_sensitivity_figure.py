"""The figure of a layer has every series of its result, the same bytes every time, and takes its title as text."""

from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from helpers.sample_runs import about
from specguard.records.sensitivity import (
    HEAD_BOUNDS,
    ChangeSummary,
    Extent,
    Layer,
    SensitivitySettings,
    SensitivityStudy,
    SensitivitySummary,
)
from specguard.report import save_figure, sensitivity_figure
from specguard.report.figures.sensitivity import ELEMENTS, SERIES


def extent(mean: float) -> Extent:
    return Extent(mean=mean, min=0.9 * mean, max=1.1 * mean)


def row(**key: float) -> ChangeSummary:
    """Every series has a level of its own."""
    found, *bounds = (extent(k + key["radius"]) for k in range(1, len(SERIES) + 2))
    names = [*list(SERIES)[1:], "best"]
    return ChangeSummary(**key, found=found, bounds=dict(zip(names, bounds, strict=True)))


def result() -> SensitivitySummary:
    settings = SensitivitySettings(radii=(0.01, 0.1), input_norms=(1.0, 10.0), weight_changes=(0.1, 1.0))
    return SensitivitySummary(
        study=SensitivityStudy(about=about(8), settings=settings, layer="blocks.0.attention"),
        n=8,
        layer=Layer(name="blocks.0.attention", tokens=4, dim=32, heads=2),
        input_norm=extent(3.0),
        radii=tuple(row(radius=radius) for radius in settings.radii),
        head=tuple(
            ChangeSummary(
                radius=radius,
                factor=factor,
                found=extent(1.0 + radius),
                bounds={name: extent(1.0 + radius) for name in names},
            )
            for radius in settings.radii
            for factor, names in HEAD_BOUNDS.items()
        ),
        input_norms=tuple(
            row(input_norm=norm, radius=radius) for norm in settings.input_norms for radius in settings.radii
        ),
        weights=tuple(
            ChangeSummary(element=element, change=change, bounds={"lofast2": extent(2.0), "t1": extent(1.0)})
            for element in ELEMENTS
            for change in settings.weight_changes
        ),
        unchanged={"lofast2": extent(2.0), "t1": extent(1.0)},
    )


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
    gone = {"t2": None, "naive": extent(0.0)}
    radii, scaled = (
        tuple(replace(each, bounds={**each.bounds, **gone}) for each in rows)
        for rows in (found.radii, found.input_norms)
    )
    radii = (replace(radii[0], bounds=radii[0].bounds | {"t1": None}), *radii[1:])
    found = replace(found, radii=radii, input_norms=scaled, unchanged=found.unchanged | {"t1": None})
    figure = sensitivity_figure(found, "a run")
    assert len(figure.axes[0].lines[list(SERIES).index("t1") - 1].get_xdata()) == 1
    assert len(figure.axes[0].lines) == len(SERIES) - 2
    assert "T2" not in labels(figure.legends[0])
    assert len(figure.axes[4].lines) == 2 * len(ELEMENTS) + 1
    save_figure(figure)


def test_studies_that_were_not_asked_for_leave_their_panels_empty():
    found = replace(result(), input_norms=(), weights=(), unchanged={}, head=())
    figure = sensitivity_figure(found, "a run")
    assert [len(axis.lines) for axis in figure.axes] == [len(SERIES), 0, 0, 0, 0]
    ElementTree.fromstring(save_figure(figure)["svg"])


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
