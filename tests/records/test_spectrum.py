"""From records of spectra to their numbers, by hand; a record or a summary that cannot be is refused."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

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

PART = PartRecord(
    group="block", kind="residual", sigma=(2.0, 1.0), residual=(0.1, 0.2), converged=True, step=2.5,
    entering=0.5, leaving=1.0, row_column=None,
)  # fmt: skip
HEAD = msgspec.structs.replace(PART, group="head", kind="map", sigma=(4.0,), residual=(0.3,), row_column=6.0)
FORMS = {
    "blocks.0": PartForm(group="block", kind="residual", values=2, dense=False),
    "head": PartForm(group="head", kind="map", values=1, dense=True),
}
NOTHING = Distribution(n=0, mean=None, std=None, quantiles=None)


def record(
    sample: int = 0, block: dict[str, Any] | None = None, head: dict[str, Any] | None = None
) -> SpectrumRecord:
    parts = {
        "blocks.0": msgspec.structs.replace(PART, **(block or {})),
        "head": msgspec.structs.replace(HEAD, **(head or {})),
    }
    return SpectrumRecord(sample=sample, label=1, parts=parts)


def study(n: int, *parts: str) -> SpectrumStudy:
    return SpectrumStudy(About(model="a", data="b", dataset="c", n=n), SpectrumSettings(top=2), parts)


def blocks(*rows: tuple[float, float, float, float]) -> SpectrumRecord:
    keys = ("step", "entering", "leaving")
    parts = {
        f"blocks.{i}": msgspec.structs.replace(PART, sigma=(row[0],), **dict(zip(keys, row[1:], strict=True)))
        for i, row in enumerate(rows)
    }
    return SpectrumRecord(sample=0, label=0, parts=parts)


# The path of blocks ------------------------------------------------------------------------------------------


def test_the_path_of_blocks_by_hand():
    found = path_of(blocks((2.0, 2.5, 0.5, 1.0), (3.0, 4.0, 1.0, 3.0)), ["blocks.0", "blocks.1"])
    assert found == pytest.approx({"exponent": 5.0, "log_product": math.log(10), "growth": math.log(6)})


def test_a_path_that_nothing_enters_has_no_growth_and_is_left_out():
    found = path_of(blocks((2.0, 2.5, 0.0, 0.0)), ["blocks.0"])
    assert math.isnan(found["growth"])
    assert distribution([found["growth"], 1.0, 3.0]).n == 2
    assert distribution([math.nan, math.inf]) == NOTHING


def test_a_step_of_zero_has_no_logarithm_and_is_left_out():
    found = summarize([record(0, {"step": 0.0}), record(1)], study(2, "blocks.0", "head"))
    assert found.log_product is not None
    assert (found.log_product.n, found.log_product.mean) == (1, pytest.approx(math.log(2.5)))
    assert found.parts[0].step.n == 2


# Distributions -----------------------------------------------------------------------------------------------


def test_a_distribution_by_hand():
    values = [0.5, 4.0, 1.0, 2.0, 8.0, 3.0]
    found = distribution([*values, math.inf, math.nan])
    assert (found.n, found.mean) == (6, pytest.approx(18.5 / 6, rel=1e-12))
    assert found.std == pytest.approx(np.std(values), rel=1e-12)
    assert found.quantiles == pytest.approx({str(q): np.quantile(values, q / 100) for q in (5, 25, 50, 75, 95)})
    assert distribution([7.0]) == Distribution(
        n=1, mean=7.0, std=0.0, quantiles=dict.fromkeys(("5", "25", "50", "75", "95"), 7.0)
    )
    assert distribution([]) == NOTHING


def test_a_summary_by_hand():
    found = summarize(
        [record(0), record(3, {"sigma": (4.0, 2.0), "converged": False, "leaving": 2.0}, {"row_column": 12.0})],
        study(2, "blocks.0", "head"),
    )
    block, head = found.parts
    assert found.n == 2
    assert [(part.name, part.group, part.kind) for part in found.parts] == [
        ("blocks.0", "block", "residual"), ("head", "head", "map"),
    ]  # fmt: skip
    assert [d.mean for d in block.sigma] == [3.0, 1.5]
    assert [d.mean for d in head.sigma] == [4.0]
    assert (block.unconverged, head.unconverged) == (1, 0)
    assert block.row_column_over_sigma == NOTHING
    assert (head.row_column_over_sigma.n, head.row_column_over_sigma.mean) == (2, 2.25)
    assert found.exponent == block.sigma[0]
    assert found.log_product is not None
    assert found.log_product.mean == pytest.approx(math.log(2.5))
    assert found.growth is not None
    assert found.growth.mean == pytest.approx(1.5 * math.log(2))
    assert found.weights == WeightSpectra(after=())


def test_a_bound_is_not_compared_with_a_singular_value_of_zero():
    found = summarize([record(0, head={"sigma": (0.0,)}), record(1)], study(2, "head"))
    assert (found.parts[0].row_column_over_sigma.n, found.parts[0].row_column_over_sigma.mean) == (1, 1.5)


def test_without_blocks_nothing_is_said_of_their_path():
    found = summarize([record()], study(1, "head"))
    assert (found.exponent, found.log_product, found.growth) == (None, None, None)
    assert not {"exponent", "log_product", "growth"} & set(plain(found))


# What is refused ---------------------------------------------------------------------------------------------


def test_a_record_fits_parts_of_these_names_and_forms_in_this_order():
    assert fits(record(), FORMS)
    assert not fits(record(), dict(reversed(FORMS.items())))
    assert not fits(record(), {"blocks.0": FORMS["blocks.0"]})
    assert not fits(record(), FORMS | {"network": FORMS["head"]})
    for change in ({"group": "mlp"}, {"kind": "map"}, {"sigma": (1.0,)}, {"residual": (0.1,)}, {"row_column": 1.0}):
        assert not fits(record(block=change), FORMS)
    assert not fits(record(head={"row_column": None}), FORMS)


def whole() -> dict[str, Any]:
    weights = WeightSpectra(after=(WeightNorms(layer="head", kind="head", sigma=(1.0, 2.0)),))
    summary = summarize([record(0), record(1)], study(2, "blocks.0", "head"))
    found: dict[str, Any] = plain(msgspec.structs.replace(summary, weights=weights))
    return found


def test_a_summary_is_read_as_it_was_written():
    found = convert(whole(), SpectrumSummary, "it")
    assert plain(found) == whole()
    assert found.weights.after[0].sigma == (1.0, 2.0)
    assert found.weights.before is None


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another n": lambda s: s.update(n=3),
    "n is text": lambda s: s.update(n="2"),
    "no parts": lambda s: s.update(parts=[]),
    "parts in another order": lambda s: s["parts"].reverse(),
    "a part of another name": lambda s: s["parts"][0].update(name="blocks.1"),
    "parts of another study": lambda s: s["study"].update(parts=["blocks.0"]),
    "another kind": lambda s: s.update(kind="attack"),
    "no weights": lambda s: s.pop("weights"),
    "empty weights": lambda s: s.update(weights={}),
    "a weight without values": lambda s: s["weights"]["after"][0].update(sigma=[]),
    "a negative deviation": lambda s: s["exponent"].update(std=-1.0),
    "a negative count": lambda s: s["parts"][0].update(unconverged=-1),
    "no mean": lambda s: s["growth"].pop("mean"),
    "settings out of range": lambda s: s["study"]["settings"].update(top=0),
    "more": lambda s: s.update(more=1),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_summary_that_cannot_be_is_refused_with_one_sentence(kind):
    found = whole()
    SPOILT[kind](found)
    with pytest.raises(RunError, match="the file is malformed") as caught:
        convert(found, SpectrumSummary, "the file")
    assert "\n" not in str(caught.value)
