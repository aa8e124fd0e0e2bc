"""Smooth the classifier at every image: probabilistic certificates of another function, in records of their own.

Nothing here is a proof about the model, and nothing of the deterministic studies reads these records.
"""

import copy
from pathlib import Path

import torch

from specguard.certificates.prepare import digest
from specguard.certificates.smoothing import certify_smoothed, lower_probability, lower_smoothed_radius
from specguard.data import Dataset
from specguard.nn import Network, ViT
from specguard.records.base import About
from specguard.records.shards import WHOLE, Shard
from specguard.records.smoothing import (
    SmoothRecord,
    SmoothSettings,
    SmoothStudy,
    SmoothSummary,
    fits,
    summarize,
)
from specguard.records.study import Pending, Study, Tell, Watcher, complete
from specguard.studies.samples import labels_by_sample


def run_smooth(
    model: ViT | Network,
    split: Dataset,
    folder: Path,
    settings: SmoothSettings,
    *,
    about: About,
    device: torch.device,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> SmoothSummary | Pending:
    """Certify the smoothed classifier at every image of `split`, leave records in `folder`, return the summary.

    A study that was cut short goes on with the next image, to the same records: the noise belongs to the image.
    """
    function, data, header = copy.deepcopy(model).to(device).eval(), split.to(device), SmoothStudy(about, settings)

    def work(begin: int, end: int, tell: Tell) -> tuple[list[SmoothRecord], dict[str, float]]:
        return [_record(function, data, i, settings) for i in range(begin, end)], {}

    study = Study(
        header,
        labels_by_sample(split),
        1,
        SmoothRecord,
        SmoothSummary,
        work,
        fits=lambda record: fits(record, settings.smoothing, _expected),
        summarize=lambda records: summarize(records, header),
        doing="smoothing",
    )
    return complete(study, folder, device, watch, shard)


def _record(model: ViT | Network, data: Dataset, position: int, settings: SmoothSettings) -> SmoothRecord:
    images, labels = data.batch(slice(position, position + 1))
    sample = int(data.samples[position])
    found = certify_smoothed(
        model, images[0], settings.smoothing, sample=sample, seed=settings.seed, batch=settings.batch
    )
    return SmoothRecord(
        sample=sample,
        label=int(labels[0]),
        input=digest(images[0]),
        failure_probability=settings.smoothing.alpha,
        selected=found.selected,
        count=found.count,
        draws=settings.smoothing.n,
        lower_probability=found.lower_probability,
        predicted=found.predicted,
        radius=found.radius,
    )


def _expected(count: int, draws: int, alpha: float, sigma: float) -> tuple[float, float]:
    """The lower probability and the radius that follow from a count."""
    probability = lower_probability(count, draws, alpha)
    return probability, lower_smoothed_radius(probability, sigma)
