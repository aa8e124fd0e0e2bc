"""Randomised smoothing on disk: probabilistic certificates of another function, in files of their own.

smoothing.json      what is smoothed, how, and with which failure probability; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per image
seconds.jsonl       how long each image took
summary.json        the numbers; its presence means that the study is complete

Nothing here is a proof about the model, and nothing of the deterministic studies reads these files or is read here.
"""

import copy
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specguard.certificates.certificate import digest
from specguard.certificates.smoothing import (
    ABOUT,
    SUPPOSED,
    Smoothing,
    lower_probability,
    lower_smoothed_radius,
    smoothed,
)
from specguard.data import Dataset
from specguard.errors import ConfigError, RunError
from specguard.nn import Network, ViT
from specguard.records.accuracy import Proportion
from specguard.records.store import Json, described
from specguard.studies.chosen import labels_by_sample, samples_settings
from specguard.studies.folder import Watcher, as_stored
from specguard.studies.study import Study, carried_out

KIND = "probabilistic"


@dataclass(frozen=True)
class SmoothingStudy:
    """How to smooth, and at which radii to count; `batch` noisy images go through the model at once."""

    smoothing: Smoothing = Smoothing()
    radii: tuple[float, ...] = (0.1, 0.25, 0.5)
    batch: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, not {self.batch}")
        if not self.radii or len(set(self.radii)) < len(self.radii):
            raise ConfigError("at least one radius is needed, and none twice")
        if bad := [radius for radius in self.radii if not (math.isfinite(radius) and radius >= 0)]:
            raise ConfigError(f"radius must be finite and not negative, not {bad[0]}")


def smoothing(
    model: ViT | Network,
    split: Dataset,
    folder: Path,
    settings: SmoothingStudy,
    *,
    identity: Json,
    device: torch.device,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Certify the smoothed classifier at every image of `split`, leave records in `folder`, return the summary.

    A study that was cut short goes on with the next image, to the same records: the noise belongs to the image.
    """
    function, data, labels = copy.deepcopy(model).to(device).eval(), split.to(device), labels_by_sample(split)

    def work(begin: int, end: int) -> tuple[list[Json], Json]:
        begun = time.perf_counter()
        records = [_record(function, data, i, settings) for i in range(begin, end)]
        return records, {"seconds": time.perf_counter() - begun}

    study = Study(
        "smoothing",
        as_stored({**identity, **samples_settings(split), "kind": KIND, "about": ABOUT, **described(settings)}),
        list(labels),
        1,
        work=work,
        belongs=lambda record, sample: is_smoothing_record(record, sample, labels[sample], settings.smoothing),
        summary=lambda records: smoothing_summary(records, settings),
        seconds=lambda batches: sum(batch["seconds"] for batch in batches.values()),
        doing="smoothing",
    )
    return carried_out(study, folder, device, watch)


def _record(model: ViT | Network, data: Dataset, position: int, settings: SmoothingStudy) -> Json:
    images, labels = data.batch(slice(position, position + 1))
    sample = int(data.samples[position])
    found = smoothed(model, images[0], settings.smoothing, sample=sample, seed=settings.seed, batch=settings.batch)
    return {
        "sample": sample,
        "label": int(labels[0]),
        "input": digest(images[0]),
        "kind": KIND,
        "failure_probability": settings.smoothing.alpha,
        "selected": found.selected,
        "count": found.count,
        "draws": settings.smoothing.n,
        "lower_probability": found.lower_probability,
        "predicted": found.predicted,
        "radius": found.radius,
    }


def is_smoothing_record(record: Json, sample: int, label: int, settings: Smoothing) -> bool:
    """Whether a record can be what smoothing by these settings has written of this image.

    Probability and radius follow from the count, and are computed again.
    """
    match record:
        case {
            "sample": int(number),
            "label": int(stored),
            "input": str(),
            "kind": str(kind),
            "failure_probability": float(alpha),
            "selected": int(selected),
            "count": int(count),
            "draws": int(draws),
            "lower_probability": float() as probability,
            "predicted": predicted,
            "radius": float() as radius,
        } if len(record) == 11 and draws == settings.n and 0 <= count <= draws:
            expected = lower_smoothed_radius(lower_probability(count, draws, settings.alpha), settings.sigma)
            return (
                (number, stored, kind, alpha) == (sample, label, KIND, settings.alpha)
                and 0 <= probability <= 1
                and math.isclose(radius, expected, rel_tol=1e-9, abs_tol=1e-12)
                and predicted == (selected if radius > 0 else None)
            )
    return False


def smoothing_summary(records: Sequence[Json], settings: SmoothingStudy) -> Json:
    """Shares of images on which the smoothed classifier is right, and right within each radius; who abstains.

    Every share is of certificates that are each false with probability `alpha` at most: of n images, alpha n are
    to be expected at worst, and that none is false has the probability 1 - alpha n at least.
    """
    n, alpha = len(records), settings.smoothing.alpha
    if wrong := [record for record in records if record.get("kind") != KIND]:
        sample = wrong[0].get("sample")
        raise RunError(f"the record of image {sample} is not probabilistic; the two kinds are never mixed")
    right = [record["radius"] for record in records if record["predicted"] == record["label"]]
    return {
        "kind": KIND,
        "about": ABOUT,
        "supposed": SUPPOSED,
        "failure_probability": {"per_image": alpha, "any_of_all": min(1.0, alpha * n)},
        "sigma": settings.smoothing.sigma,
        "n": n,
        "right": Proportion(len(right), n).record(),
        "abstained": Proportion(sum(record["predicted"] is None for record in records), n).record(),
        "radii": [
            {"radius": r, "certified": Proportion(sum(_within(r, found) for found in right), n).record()}
            for r in settings.radii
        ],
        "median_radius": statistics.median(right) if right else None,
    }


def _within(radius: float, found: Any) -> bool:
    """The ball of a certificate is open."""
    return bool(radius < found)
