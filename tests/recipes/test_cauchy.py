"""Claims about spectra and robustness say what the summaries say, and nothing where there is nothing to say."""

import msgspec
import numpy as np
import pytest
from scipy.stats import spearmanr, ttest_1samp

from cauchy.claims import MEASURES, cauchy_claims, diagnoses, diagnosis
from specguard.errors import RunError
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackSettings, AttackStudy, AttackSummary, BallAccuracy, NamedAttack
from specguard.records.base import About, BallRecord
from specguard.records.io import write_record
from specguard.records.spectrum import (
    PartRecord,
    SpectrumRecord,
    SpectrumSettings,
    SpectrumStudy,
    summarize,
)

RADII, N = (0.25, 0.5), 10_000


def spectrum(sigmas, network=3.0, model="m", growth=1.0, groups=("block", "network")):
    """The summary of two images; sigma of a block is `sigmas[block]`, less and more a tenth."""

    def part(group, sigma):
        kind = "residual" if group == "block" else "map"
        lengths = {"residual": (0.0,), "step": 1 + sigma, "entering": 1.0, "leaving": growth}
        return PartRecord(group=group, kind=kind, converged=True, row_column=None, sigma=(sigma,), **lengths)

    def record(sample, shift):
        parts = {f"blocks.{i}": part("block", s + shift) for i, s in enumerate(sigmas)}
        parts["network"] = part("network", network)
        kept = {name: each for name, each in parts.items() if each.group in groups}
        return SpectrumRecord(sample=sample, label=0, parts=kept)

    records = [record(0, -0.1), record(1, 0.1)]
    about = About(model=model, data="d", dataset="d", n=2)
    return summarize(records, SpectrumStudy(about, SpectrumSettings(), tuple(records[0].parts)))


def attack(robust, clean=0.9, model="m", balls=tuple(("l2", r) for r in RADII)):
    """The summary of a hundred images."""
    rows = tuple(
        BallAccuracy(norm=n, radius=r, accuracy=Accuracy.of(round(N * v), N))
        for (n, r), v in zip(balls, robust, strict=True)
    )
    study = AttackStudy(
        about=About(model=model, data="d", dataset="d", n=N),
        attacks=(NamedAttack(name="pgd", settings={}),),
        stop_early=False,
        balls=tuple(BallRecord(norm=n, radius=r) for n, r in balls),
        settings=AttackSettings(),
    )
    found = {"attacks": (), "distances": {}, "per_class": ()}
    return AttackSummary(study=study, n=N, clean=Accuracy.of(round(N * clean), N), worst_case=rows, **found)


def networks():
    """Sixteen of them; the larger the spectra, the less robust, and CoViTs by 0.03 more than their ViTs."""
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
    assert found.propagate == pytest.approx(np.std(every))
    logs = [sum(np.log(1 + s + shift) for s in (2, 1, 6)) for shift in (-0.1, 0.1)]
    assert found.measures["log_product"] == pytest.approx(np.mean(logs))


def test_an_order_that_was_planted_is_found_and_a_constant_has_none():
    found = networks()
    rows = {(row["measure"], row["radius"]): row for row in cauchy_claims(found)["correlations"]}
    assert set(rows) == {(measure, radius) for measure in MEASURES for radius in RADII}
    models = [
        [each for each in found if each.model == f"{kind}_t{i}"] for i in range(1, 5) for kind in ("vit", "covit")
    ]
    for measure in ("sigma", "largest", "exponent"):
        x, y = [each.measures[measure] for each in found], [each.robust[0.5] for each in found]
        row = rows[measure, 0.5]
        assert row["networks"]["value"] == pytest.approx(spearmanr(x, y).statistic)
        means = [
            [np.mean(of) for of in zip(*((e.measures[measure], e.robust[0.5]) for e in some), strict=True)]
            for some in models
        ]
        assert row["models"]["value"] == pytest.approx(spearmanr(*zip(*means, strict=True)).statistic)
        assert (row["networks"]["n"], row["models"]["n"]) == (16, 8)
        assert row["networks"]["low"] <= row["networks"]["value"] <= row["networks"]["high"] < 0
    assert rows["sigma", 0.25]["networks"]["value"] < -0.9
    assert set(rows["network", 0.25].values()) == {"network", 0.25, None}
    for kind, name in (("vits", "vit"), ("covits", "covit")):
        some = [each for each in found if each.model.startswith(name)]
        expected = spearmanr(
            [each.measures["step"] for each in some], [each.robust[0.25] for each in some]
        ).statistic
        assert (rows["step", 0.25][kind]["value"], rows["step", 0.25][kind]["n"]) == (pytest.approx(expected), 8)


def test_covit_is_compared_with_its_own_vit_and_the_ends_are_counted():
    found = networks()
    result = cauchy_claims([*reversed(found)])  # the order of rows does not matter
    robust = next(row for row in result["covit_minus_vit"] if row["radius"] == 0.25)
    assert (robust["networks"]["n"], robust["models"]["n"]) == (8, 4)
    assert robust["networks"]["mean"] == pytest.approx(0.03)
    assert result["largest_block"] == {"first": 0, "last": 8, "both_above_all_others": 8}
    alone = cauchy_claims([each for each in found if each.name.startswith("vit")])
    assert alone["covit_minus_vit"][0] == {"radius": 0.0, "networks": None, "models": None}


def test_the_interval_of_differences_is_students():
    changes = np.linspace(-0.02, 0.05, 8)
    found = []
    for i, change in enumerate(changes):
        size, seed = divmod(i, 2)
        for kind, robust in (("vit", 0.5), ("covit", 0.5 + change)):
            found.append(diagnosis(f"{kind}_t{size}-{seed}", attack((robust, 0.2)), spectrum([1.0, 2.0])))
    row = next(row for row in cauchy_claims(found)["covit_minus_vit"] if row["radius"] == 0.25)
    for of, values in (("networks", changes), ("models", changes.reshape(4, 2).mean(1))):
        expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
        assert row[of]["mean"] == pytest.approx(np.mean(values))
        assert row[of]["interval95"] == pytest.approx([expected.low, expected.high])


def test_only_radii_in_l2_that_all_were_attacked_at_are_spoken_of():
    found = networks()
    other = attack((0.3, 0.2, 0.0), balls=(("l2", 0.25), ("l2", 1.0), ("linf", 0.25)))
    odd = diagnosis("vit_t9-0", other, spectrum([1.0, 2.0]))
    assert odd.robust == {0.25: 0.3, 1.0: 0.2}
    assert {row["radius"] for row in cauchy_claims([*found, odd])["correlations"]} == {0.25}
    other = attack((0.2,), balls=(("l2", 1.0),))
    with pytest.raises(RunError, match="common radius"):
        cauchy_claims([*found, diagnosis("vit_t9-0", other, spectrum([1.0, 2.0]))])


def test_values_that_did_not_converge_are_counted():
    lost = spectrum([1.0, 2.0])
    second = msgspec.structs.replace(lost.parts[1], unconverged=2)
    lost = msgspec.structs.replace(lost, parts=(lost.parts[0], second, *lost.parts[2:]))
    found = [diagnosis("vit_t1-0", attack((0.4, 0.1)), summary) for summary in (lost, spectrum([1.0]))]
    assert cauchy_claims(found)["unconverged"] == 2


def test_rows_are_read_where_both_studies_are_complete(tmp_path):
    for name in ("vit_t1_32-0", "covit_t1_32-0", "vit_t1_224-0"):
        (tmp_path / name).mkdir()
    kept = tmp_path / "vit_t1_32-0"
    write_record(kept / "pgd.json", attack((0.4, 0.1)))
    write_record(kept / "spectrum.json", spectrum([1.0, 2.0]))
    for study, summary in (("pgd", attack((0.3, 0.2))), ("spectrum", spectrum([3.0, 2.0]))):
        for name in ("covit_t1_32-0", "vit_t1_224-0"):
            (tmp_path / name / study).mkdir()
            write_record(tmp_path / name / study / "summary.json", summary)
    (tmp_path / "vit_t1_224-0" / "spectrum" / "summary.json").unlink()
    (tmp_path / "notes.txt").write_text("not a row")
    assert [each.name for each in diagnoses(tmp_path)] == ["covit_t1_32-0", "vit_t1_32-0"]
    assert [each.name for each in diagnoses(tmp_path, "vit*")] == ["vit_t1_32-0"]
    assert diagnoses(tmp_path, "none*") == ()


def test_errors_are_sentences():
    with pytest.raises(RunError, match="of two networks"):
        diagnosis("x-0", attack((0.4, 0.1), model="a"), spectrum([1.0], model="b"))
    for group in ("block", "network"):
        without = spectrum([1.0], groups={"block", "network"} - {group})
        with pytest.raises(RunError, match="lack its blocks"):
            diagnosis("x-0", attack((0.4, 0.1)), without)
    with pytest.raises(RunError, match="a perturbation to follow"):
        diagnosis("x-0", attack((0.4, 0.1)), spectrum([1.0], growth=0.0))
    with pytest.raises(RunError, match="no rows"):
        cauchy_claims([])
