"""What the records of spectra say together, by hand."""

import math

import pytest
from msgspec.structs import replace

from specguard.errors import RunError
from specguard.records.base import About, convert, plain
from specguard.records.spectrum import (
    Distribution,
    PartForm,
    PartRecord,
    SpectrumRecord,
    SpectrumSettings,
    SpectrumStudy,
    SpectrumSummary,
    WeightNorms,
    WeightSpectra,
    distribution,
    fits,
    path_of,
    summarize,
)

BLOCKS = ["blocks.0", "blocks.1"]


def part(sigma: float, step: float, entering: float, leaving: float, **changes) -> PartRecord:
    known = {
        "group": "block", "kind": "residual", "sigma": (sigma,), "residual": (0.0,), "converged": True,
        "row_column": None,
    }  # fmt: skip
    return PartRecord(**known | {"step": step, "entering": entering, "leaving": leaving} | changes)


def record(*blocks: PartRecord, sample: int = 0) -> SpectrumRecord:
    return SpectrumRecord(sample=sample, label=1, parts={f"blocks.{i}": block for i, block in enumerate(blocks)})


def study(count: int, parts: tuple[str, ...] = ("blocks.0", "blocks.1")) -> SpectrumStudy:
    about = About(model="abc", data="def", dataset="noise", n=count)
    return SpectrumStudy(about, SpectrumSettings(), parts)


ONE, OTHER = part(2.0, 2.5, 0.5, 1.0), part(3.0, 4.0, 1.0, 3.0)


def test_the_path_of_blocks_by_hand():
    found = path_of(record(ONE, OTHER), BLOCKS)
    assert found == pytest.approx({"exponent": 5.0, "log_product": math.log(10), "growth": math.log(6)})


def test_a_path_that_nothing_enters_has_no_growth_and_is_left_out():
    found = path_of(record(part(2.0, 2.5, 0.0, 0.0)), ["blocks.0"])
    assert math.isnan(found["growth"])
    assert distribution([found["growth"], 1.0, 3.0]).n == 2
    assert distribution([math.nan, math.inf]) == Distribution(n=0, mean=None, std=None, quantiles=None)


def test_a_distribution_by_hand():
    found = distribution([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.n, found.mean, found.std) == (5, 3.0, pytest.approx(math.sqrt(2)))
    assert found.quantiles == pytest.approx({"5": 1.2, "25": 2.0, "50": 3.0, "75": 4.0, "95": 4.8})


def test_a_summary_by_hand():
    rough = part(4.0, 6.0, 0.5, 1.0, row_column=8.0, converged=False)
    found = summarize([record(part(2.0, 2.5, 0.5, 1.0, row_column=3.0), OTHER), record(rough, OTHER)], study(2))
    first, second = found.parts
    assert (first.name, first.group, first.kind) == ("blocks.0", "block", "residual")
    assert (first.sigma[0].mean, first.step.mean, first.unconverged) == (3.0, 4.25, 1)
    assert (first.row_column_over_sigma.n, first.row_column_over_sigma.mean) == (2, 1.75)
    assert (second.row_column_over_sigma.n, second.unconverged) == (0, 0)
    assert found.exponent.mean == pytest.approx(6.0)
    assert found.log_product.mean == pytest.approx((math.log(10) + math.log(24)) / 2)
    assert found.growth.mean == pytest.approx(math.log(6))


def test_without_blocks_there_is_no_path():
    head = SpectrumRecord(sample=0, label=1, parts={"head": part(2.0, 2.5, 0.5, 1.0, group="head", kind="map")})
    found = summarize([head], study(1, ("head",)))
    assert (found.exponent, found.log_product, found.growth) == (None, None, None)
    assert "exponent" not in plain(found)


def test_a_part_whose_derivative_vanishes_is_compared_with_nothing():
    found = summarize([record(part(0.0, 1.0, 0.5, 0.5, row_column=0.0), OTHER)], study(1))
    assert found.parts[0].row_column_over_sigma.n == 0


FORMS = {name: PartForm(group="block", kind="residual", values=1, dense=False) for name in BLOCKS}


@pytest.mark.parametrize(
    "changes",
    [{"group": "head"}, {"kind": "map"}, {"sigma": (1.0, 0.5)}, {"residual": ()}, {"row_column": 1.0}],
    ids=str,
)
def test_a_record_of_another_form_does_not_fit(changes):
    assert fits(record(ONE, OTHER), FORMS)
    assert not fits(record(replace(ONE, **changes), OTHER), FORMS)


def test_a_record_of_other_parts_does_not_fit():
    assert not fits(record(ONE), FORMS)
    assert not fits(record(ONE, OTHER, ONE), FORMS)
    assert not fits(SpectrumRecord(sample=0, label=1, parts={"blocks.1": OTHER, "blocks.0": ONE}), FORMS)


def test_a_summary_of_other_parts_or_of_another_number_of_images_is_refused():
    weights = WeightSpectra((WeightNorms(layer="head", kind="head", sigma=(1.0,)),))
    whole = plain(summarize([record(ONE, OTHER)], study(1))) | {"weights": plain(weights)}
    assert convert(whole, SpectrumSummary, "it").weights == weights
    for change in ({"n": 2}, {"parts": whole["parts"][:1]}, {"parts": whole["parts"][::-1]}):
        with pytest.raises(RunError, match="not those of the study"):
            convert(whole | change, SpectrumSummary, "it")
    with pytest.raises(RunError, match="weights"):
        convert({name: value for name, value in whole.items() if name != "weights"}, SpectrumSummary, "it")
