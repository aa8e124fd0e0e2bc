"""A run of four images with invented records, for the examples in docstrings."""

from pathlib import Path

from specguard.records import attack, certificate, sensitivity, smoothing, spectrum
from specguard.records.base import About, BallRecord
from specguard.records.files import folder_below
from specguard.records.io import write_record
from specguard.records.study import Summary
from specguard.report.run import FoundAttack, FoundCertificates, FoundSmoothing, FoundSpectrum, FoundStudy, Run

_ABOUT = About(model="0" * 64, data="1" * 64, dataset="digits", n=4)


def example_run() -> Run:
    """A run with an attack, certificates, smoothing, a spectrum and a sensitivity study, but without training.

    Returns:
        The run in memory; nothing is read or written.

    Example:
        >>> run = example_run()
        >>> str(run.attacks[0].summary.clean)
        '75.0 % [30.1, 95.4], n = 4'
    """
    spectra = _spectrum_records()
    return Run(
        "example",
        attacks=(FoundAttack("attacks/pgd", _attack()),),
        certificates=(FoundCertificates("certificates/local", _certificates()),),
        spectra=(FoundSpectrum("spectrum", _spectrum(spectra), records=tuple(spectra)),),
        smoothing=(FoundSmoothing("smoothing", _smoothing(), radii=(0.5, 0.5, 0.5)),),
        sensitivity=(FoundStudy("sensitivity", _sensitivity()),),
    )


def write_example_run(folder: Path) -> Path:
    """Write the summaries of `example_run` to a directory.

    Args:
        folder: an existing or new directory.

    Returns:
        The same directory.
    """
    for study in example_run().studies:
        assert isinstance(study.summary, Summary)
        place = folder_below(folder, *study.place.split("/"))
        write_record(place / "summary.json", study.summary)
    return folder


def _attack() -> attack.AttackSummary:
    study = attack.AttackStudy(
        about=_ABOUT,
        attacks=(attack.NamedAttack(name="pgd", settings={"type": "PGD"}),),
        stop_early=False,
        balls=(BallRecord(norm="l2", radius=0.1),),
        settings=attack.AttackSettings(),
    )
    records = [
        attack.AttackRecord(sample=sample, label=0, clean=int(sample == 3), outcomes=(_outcome(sample >= 2),))
        for sample in range(4)
    ]
    return attack.summarize(records, study, ["zero", "one"])


def _outcome(success: bool) -> attack.Outcome:
    distance = 0.05 if success else None
    return attack.Outcome(
        attack="pgd",
        norm="l2",
        radius=0.1,
        predicted=int(success),
        success=success,
        distance=0.1,
        closest=distance,
    )


def _certificates() -> certificate.CertificateSummary:
    settings = certificate.CertifySettings(radii=(0.05, 0.1), methods=("local",))
    study = certificate.CertifyStudy(about=_ABOUT, settings=settings, attack={"type": "PGD"})
    largest = (0.12, 0.07, 0.0, 0.0)
    verdicts: tuple[tuple[certificate.Verdict, ...], ...] = (
        ("certified", "certified"),
        ("certified", "unknown"),
        ("unknown", "broken"),
        ("broken", "broken"),
    )
    records = [
        certificate.CertificateRecord(
            sample=sample,
            label=0,
            predicted=int(sample == 3),
            margin=1.0,
            input="2" * 64,
            radii=tuple(
                certificate.RadiusRecord(
                    radius=radius, verdict=verdict, lower={"local": 0.5 if verdict == "certified" else -0.5}
                )
                for radius, verdict in zip(settings.radii, verdicts[sample], strict=True)
            ),
            method="local",
            losses={"blocks.0.attention: curvature": 1.5},
            largest={"local": largest[sample]},
        )
        for sample in range(4)
    ]
    return certificate.summarize(records, study)


def _smoothing() -> smoothing.SmoothSummary:
    study = smoothing.SmoothStudy(about=_ABOUT, settings=smoothing.SmoothSettings())
    records = [
        smoothing.SmoothRecord(
            sample=sample,
            label=0,
            input="2" * 64,
            failure_probability=0.001,
            selected=0,
            count=9900 if sample < 3 else 4000,
            draws=10_000,
            lower_probability=0.98 if sample < 3 else 0.4,
            predicted=0 if sample < 3 else None,
            radius=0.5 if sample < 3 else 0.0,
        )
        for sample in range(4)
    ]
    return smoothing.summarize(records, study)


def _spectrum_records() -> list[spectrum.SpectrumRecord]:
    return [
        spectrum.SpectrumRecord(
            sample=sample,
            label=0,
            parts={
                f"blocks.{block}": spectrum.PartRecord(
                    group="block",
                    kind="residual",
                    sigma=(1.0 + block + 0.1 * sample,),
                    residual=(1e-4,),
                    converged=True,
                    step=1.5 + block + 0.1 * sample,
                    entering=0.1,
                    leaving=0.12,
                    row_column=None,
                )
                for block in range(2)
            },
        )
        for sample in range(4)
    ]


def _spectrum(records: list[spectrum.SpectrumRecord]) -> spectrum.SpectrumSummary:
    study = spectrum.SpectrumStudy(
        about=_ABOUT, settings=spectrum.SpectrumSettings(), parts=("blocks.0", "blocks.1")
    )
    return spectrum.summarize(records, study)


def _sensitivity() -> sensitivity.SensitivitySummary:
    settings = sensitivity.SensitivitySettings(radii=(0.01, 0.1))
    study = sensitivity.SensitivityStudy(about=_ABOUT, settings=settings, layer="blocks.0.attention")
    bounds: dict[str, float | None] = dict.fromkeys(sensitivity.BOUNDS, 2.0)
    records = [
        sensitivity.SensitivityRecord(
            sample=sample,
            label=0,
            layer=sensitivity.Layer(name=study.layer, tokens=4, dim=8, heads=2),
            input_norm=1.0,
            radii=tuple(sensitivity.Change(radius=r, found=1.0, bounds=bounds) for r in settings.radii),
            head=(),
            input_norms=(),
        )
        for sample in range(4)
    ]
    return sensitivity.summarize(records, study)
