"""Randomized smoothing at every image: probabilistic certificates of another function, in separate records.

None of these results is a proof about the model, and no deterministic study reads these records.
"""

import copy
from pathlib import Path

import torch
from torch import nn

from specguard.certificates.prepare import digest
from specguard.certificates.smoothing import certify_smoothed, lower_probability, lower_smoothed_radius
from specguard.data import Dataset
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
    model: nn.Module,
    split: Dataset,
    folder: Path | str,
    settings: SmoothSettings,
    *,
    about: About,
    device: torch.device,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> SmoothSummary | Pending:
    """Certify the smoothed classifier at every image of `split`, with one record per image in `folder`.

    An interrupted study is continued with the same records, since the noise is addressed by image. A folder with
    the study of another model or data, or with other settings, raises a `RunError`.

    **Guarantee** probabilistic, and about the smoothed classifier, not about the model.

    Args:
        model: The base classifier.
        split: The images.
        folder: Where the records and the summary are written.
        settings: Noise level, numbers of samples, failure probability, radii and seed.
        about: Which model and data this is; see `about_study`.
        device: Where the model is evaluated.
        shard: The fraction of the images of this process; all by default.
        watch: Called with the progress.

    Returns:
        The summary, or `Pending` while other shards are unfinished.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from specguard.data import digits
        >>> from specguard.nn import ViT, preset
        >>> from specguard.records.smoothing import Smoothing
        >>> from specguard.studies import about_study
        >>> model, data = ViT(preset("tiny_smooth"), torch.Generator().manual_seed(0)).eval(), digits()
        >>> split = data.take(1, first=True)
        >>> about = about_study(model, data, split)
        >>> settings = SmoothSettings(Smoothing(sigma=0.5, n0=4, n=10, alpha=0.01))
        >>> with TemporaryDirectory() as folder:
        ...     summary = run_smooth(model, split, Path(folder), settings, about=about, device=torch.device("cpu"))
        >>> summary.n
        1
    """
    folder = Path(folder)
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


def _record(model: nn.Module, data: Dataset, position: int, settings: SmoothSettings) -> SmoothRecord:
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
    """The lower bound on the probability and the radius for a count."""
    probability = lower_probability(count, draws, alpha)
    return probability, lower_smoothed_radius(probability, sigma)
