"""Claims about spectra and robustness say what the summaries say, and nothing where there is nothing to say."""

import json

import numpy as np
import pytest
from scipy.stats import spearmanr

from specguard.errors import RunError
from specguard.evaluate import cauchy_claims, diagnoses, rank_correlation
from specguard.evaluate.cauchy import MEASURES, diagnosis
from specguard.evaluate.spectral_summary import spectral_summary

RADII = (0.25, 0.5)


def spectrum(sigmas, network=3.0, model="m", growth=1.0):
    """The summary of two images; sigma of a block is `sigmas[block]`, less and more a tenth."""

    def part(group, sigma):
        kind = "residual" if group == "block" else "map"
        numbers = {"sigma": [sigma], "residual": [0.0], "step": 1 + sigma, "entering": 1.0, "leaving": growth}
        return {"group": group, "kind": kind, "converged": True, "row_column": None, **numbers}

    records = [
        {"parts": {f"blocks.{i}": part("block", s + shift) for i, s in enumerate(sigmas)}} for shift in (-0.1, 0.1)
    ]
    for record in records:
        record["parts"]["network"] = part("network", network)
    names = [*(f"blocks.{i}" for i in range(len(sigmas))), "network"]
    return {**spectral_summary(records, names), "settings": {"model": model}}


def attack(robust, clean=0.9, model="m"):
    rows = [{"norm": "l2", "radius": r, "accuracy": {"value": v}} for r, v in zip(RADII, robust, strict=True)]
    return {"clean": {"value": clean, "n": 100}, "worst_case": rows, "settings": {"model": model}}


def networks():
    """Sixteen of them; the larger the spectra, the less robust, and CoViTs by 0.1 more than their ViTs."""
    found = []
    for size in range(1, 5):
        for seed in (0, 1):
            for kind, better in (("vit", 0.0), ("covit", 0.1)):
                sigma = size + 0.1 * seed - 3 * better
                robust = 0.6 - 0.1 * sigma
                blocks = [2 * sigma, sigma, sigma, 3 * sigma] if kind == "vit" else [sigma, 3 * sigma, sigma, sigma]
                found.append(diagnosis(f"{kind}_t{size}-{seed}", attack((robust, robust / 2)), spectrum(blocks)))
    return found


def test_a_diagnosis_is_made_of_the_numbers_of_both_summaries():
    found = diagnosis("vit_t1-0", attack((0.4, 0.1)), spectrum([2.0, 1.0, 6.0], network=5.0, growth=np.e))
    assert found.model == "vit_t1"
    assert found.robust == {0.25: 0.4, 0.5: 0.1}
    assert found.blocks == pytest.approx((2, 1, 6))
    expected = {"sigma": 3, "step": 4, "largest": 6, "exponent": 9, "growth": 3, "network": 5}
    assert {key: found.measures[key] for key in expected} == pytest.approx(expected)
    assert set(found.measures) == set(MEASURES)
    every = [s + shift for s in (2, 1, 6) for shift in (-0.1, 0.1)]
    assert found.spread == pytest.approx(np.std(every))
    logs = [sum(np.log(1 + s + shift) for s in (2, 1, 6)) for shift in (-0.1, 0.1)]
    assert found.measures["log_product"] == pytest.approx(np.mean(logs))


def test_an_order_that_was_planted_is_found_and_a_constant_has_none():
    found = networks()
    rows = {(row["measure"], row["radius"]): row for row in cauchy_claims(found)["correlations"]}
    assert set(rows) == {(measure, radius) for measure in MEASURES for radius in RADII}
    for measure in ("sigma", "largest", "exponent"):
        x, y = [each.measures[measure] for each in found], [each.robust[0.5] for each in found]
        row = rows[measure, 0.5]
        assert row["networks"]["value"] == pytest.approx(spearmanr(x, y).statistic)
        assert (row["networks"]["n"], row["models"]["n"]) == (16, 8)
        expected = rank_correlation(x, y)
        assert (row["networks"]["low"], row["networks"]["high"]) == (expected.low, expected.high)
    assert rows["sigma", 0.25]["networks"]["value"] < -0.9
    assert rows["network", 0.25] == {"measure": "network", "radius": 0.25, "networks": None, "models": None}


def test_covit_is_compared_with_its_own_vit_and_the_ends_are_counted():
    found = networks()
    result = cauchy_claims([*reversed(found)])  # the order of rows does not matter
    robust = next(row for row in result["covit_minus_vit"] if row["radius"] == 0.25)
    assert robust["n"] == 8
    assert robust["mean"] == pytest.approx(0.03)
    clean = next(row for row in result["covit_minus_vit"] if row["radius"] == 0)
    assert (clean["mean"], clean["interval95"]) == (0, None)
    assert result["largest_block"] == {"first": 0, "last": 8, "both_above_all_others": 8}
    alone = cauchy_claims([each for each in found if each.name.startswith("vit")])
    assert alone["covit_minus_vit"][0] == {"radius": 0.0, "mean": None, "interval95": None, "n": 0}


def test_the_interval_of_differences_is_students():
    found = networks()
    changes = np.linspace(-0.02, 0.05, 8)
    covits = iter(changes)
    shifted = [
        diagnosis(each.name, attack((0.5 + next(covits), 0.2)), spectrum([1.0, 2.0]))
        if each.name.startswith("covit")
        else diagnosis(each.name, attack((0.5, 0.2)), spectrum([1.0, 2.0]))
        for each in found
    ]
    row = next(row for row in cauchy_claims(shifted)["covit_minus_vit"] if row["radius"] == 0.25)
    half = 2.3646242515927849 * np.std(changes, ddof=1) / np.sqrt(8)  # t of seven degrees of freedom
    assert row["interval95"] == pytest.approx([np.mean(changes) - half, np.mean(changes) + half])


def test_rows_are_read_where_both_studies_are_complete(tmp_path):
    for name in ("vit_t1_32-0", "covit_t1_32-0", "vit_t1_224-0"):
        (tmp_path / name).mkdir()
    kept = tmp_path / "vit_t1_32-0"
    (kept / "pgd.json").write_text(json.dumps(attack((0.4, 0.1))))
    (kept / "spectrum.json").write_text(json.dumps(spectrum([1.0, 2.0])))
    for study, summary in (("pgd", attack((0.3, 0.2))), ("spectrum", spectrum([3.0, 2.0]))):
        for name in ("covit_t1_32-0", "vit_t1_224-0"):
            (tmp_path / name / study).mkdir()
            (tmp_path / name / study / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "vit_t1_224-0" / "spectrum" / "summary.json").unlink()
    (tmp_path / "notes.txt").write_text("not a row")
    assert [each.name for each in diagnoses(tmp_path)] == ["covit_t1_32-0", "vit_t1_32-0"]
    assert [each.name for each in diagnoses(tmp_path, "vit*")] == ["vit_t1_32-0"]
    assert diagnoses(tmp_path, "none*") == ()


def test_errors_are_sentences():
    with pytest.raises(RunError, match="of two networks"):
        diagnosis("x-0", attack((0.4, 0.1), model="a"), spectrum([1.0], model="b"))
    without = spectrum([1.0])
    without["parts"] = [part for part in without["parts"] if part["group"] != "block"]
    with pytest.raises(RunError, match="lack its blocks"):
        diagnosis("x-0", attack((0.4, 0.1)), without)
    with pytest.raises(RunError, match="no row"):
        cauchy_claims([])
