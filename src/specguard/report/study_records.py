"""Records of spectra and of smoothing, reduced to what figures draw."""

from pathlib import Path

import msgspec

from specguard.errors import RunError
from specguard.records.legacy import study_records
from specguard.records.smoothing import SmoothRecord, SmoothSummary
from specguard.records.spectrum import SpectrumRecord, SpectrumSummary
from specguard.report.names import shorten


def read_spectra(folder: Path, summary: SpectrumSummary) -> tuple[SpectrumRecord, ...]:
    """The records of all images, reduced to what figures draw: the largest singular value of each part."""
    record: SpectrumRecord
    found = []
    for record in study_records(folder, SpectrumRecord):
        parts = {
            shorten(name): msgspec.structs.replace(
                part, group=shorten(part.group), kind="", sigma=part.sigma[:1], residual=()
            )
            for name, part in record.parts.items()
        }
        found.append(SpectrumRecord(sample=record.sample, label=record.label, parts=parts))
    if len(found) != summary.n:
        raise RunError(f"it holds {len(found)} of {summary.n} images")
    return tuple(found)


def read_smoothed_radii(folder: Path, summary: SmoothSummary) -> tuple[float, ...]:
    """The certified radii of the images that a smoothed classifier is right about, ascending.

    They must give the accuracies of the summary.
    """
    record: SmoothRecord
    seen, found = 0, []
    for record in study_records(folder, SmoothRecord):
        seen += 1
        if record.predicted == record.label:
            found.append(record.radius)
    if seen != summary.n:
        raise RunError(f"it holds {seen} of {summary.n} images")
    counts = [sum(row.radius < radius for radius in found) for row in summary.radii]
    if [len(found), *counts] != [summary.clean.count, *(row.certified.count for row in summary.radii)]:
        raise RunError("its certified radii do not give the accuracies of its summary")
    return tuple(sorted(found))
