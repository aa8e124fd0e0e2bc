"""Randomized smoothing: probabilistic certificates for any classifier.

They are about *another function* than the model f: the smoothed classifier `g(x) = argmax_c P[f(x + sigma z) = c]`,
z standard normal. With probability `1 - alpha` over the noise drawn, for each image by itself, g predicts the
returned class on the whole l2 ball of the returned radius. Nothing is said about f(x).

The result therefore has a type of its own, which nothing that expects a deterministic `Certificate` accepts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scipy.special import betainc, ndtri
from scipy.stats import beta
from torch import Tensor

from specguard.errors import AttackError, ConfigError
from specguard.inputs import as_images, dtype_of, eval_mode, warn_of_train_mode
from specguard.records.smoothing import Smoothing
from specguard.rng import Noise

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Smoothed:
    """The result for one image: a class of the smoothed classifier, or None to abstain, and a certified radius.

    Args:
        selected: the most frequent class among the first n0 draws.
        count: how many of the n other draws gave it.
        lower_probability: lower bound on its probability.
        predicted: the certified class, or None.
        radius: the certified l2 radius; 0 if abstained.

    Example:
        >>> from specguard.certificates import Smoothed
        >>> Smoothed(3, 990, 0.98, 3, 0.5).predicted
        3
    """

    selected: int
    count: int
    lower_probability: float
    predicted: int | None
    radius: float


def certify_smoothed(
    model: Model,
    image: Any,
    settings: Smoothing,
    *,
    sample: int,
    seed: int = 0,
    batch: int = 500,
) -> Smoothed:
    """Certify the smoothed classifier at an image: its class and a radius within which it is constant, or abstain.

    The noise depends on `sample` and `seed` only, not on the batch size. The n0 draws that select the class and the
    n draws that count it are independent: counting the selection draws would bias the estimate.

    Guarantee: with probability `1 - alpha` over the noise, the smoothed classifier gives `predicted` on the whole
    open l2 ball of this radius, or `predicted` is None; lower bounds rounded down. Nothing is said about the model.
    Cost: n0 + n forward passes.
    Reference: Cohen, Rosenfeld and Kolter 2019, Theorem 1 and section 3.2.2 (CERTIFY).

    Args:
        model: the base classifier, from a batch of images to logits; a module is evaluated in eval mode.
        image: one image: a tensor, an array or a list. Noise is added in float64, and the sum is rounded to the
            dtype of the model.
        settings: sigma, numbers of draws, and failure probability.
        sample: identity of the image, which with `seed` determines the noise.
        seed: of the noise.
        batch: noisy images per forward pass.

    Returns:
        A `Smoothed`, whose `predicted` is None if no radius is certified.

    Example:
        >>> import torch
        >>> from specguard.certificates import Smoothing, certify_smoothed
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2, bias=False)).eval()
        >>> model[1].weight.data = torch.tensor([[1.0] * 4, [-1.0] * 4])
        >>> result = certify_smoothed(model, torch.ones(1, 2, 2), Smoothing(n0=10, n=100), sample=0)
        >>> result.predicted, round(result.radius, 2)
        (0, 0.38)
    """
    if batch < 1:
        raise ConfigError(f"batch must be at least 1, not {batch}")
    given = image[None] if isinstance(image, Tensor) else [image]
    x = as_images(given, model=model, box=False, exact=True)[0]
    warn_of_train_mode(model)
    with eval_mode(model):
        selection_counts = _count_classes(model, x, settings.sigma, settings.n0, _subseed(sample, seed, 0), batch)
        selected = int(selection_counts.argmax())
        counts = _count_classes(model, x, settings.sigma, settings.n, _subseed(sample, seed, 1), batch)
    count = int(counts[selected])
    probability = lower_probability(count, settings.n, settings.alpha)
    radius = lower_smoothed_radius(probability, settings.sigma)
    return Smoothed(selected, count, probability, selected if radius > 0 else None, radius)


def lower_probability(count: int, n: int, alpha: float) -> float:
    """A lower bound on a success probability p, with confidence 1 - alpha.

    `count` of n draws succeeded, each with probability p: Clopper and Pearson's p_lower solves
    `P[Binomial(n, p_lower) >= count] = alpha`. scipy's solution is lowered until that probability, computed as an
    incomplete beta function, is below alpha by more than its own error.

    Guarantee: lower bound with failure probability at most alpha, for any p; rounded down.
    Reference: Clopper and Pearson 1934.
    """
    if not 0 <= count <= n:
        raise ConfigError(f"{count} successes of {n} draws cannot be")
    if count == 0:
        return 0.0
    found = float(beta.ppf(alpha, count, n - count + 1))
    step = 1e-12
    while found > 0 and not betainc(count, n - count + 1, found) <= alpha * (1 - 1e-9):  # NaN compares false
        found, step = found * (1 - step), 2 * step
    return found if found > 0 else 0.0


def lower_smoothed_radius(probability: float, sigma: float) -> float:
    """`sigma Phi^-1(p)` for p above one half, else 0.

    Guarantee: lower bound, rounded down: the inverse is assumed accurate to 1e-13, relative, and to one ulp of p, a
    hundred times the documented error.
    Reference: Cohen, Rosenfeld and Kolter 2019, Theorem 1, with p_B bounded by 1 - p_A.
    """
    if not probability > 0.5:
        return 0.0
    inverse = float(ndtri(min(probability, 1 - 2**-53)))
    inverse = inverse * (1 - 1e-13) - 1e-15
    return max(0.0, math.nextafter(sigma * inverse, 0.0))


def _subseed(sample: int, seed: int, purpose: int) -> int:
    """A seed for one sample and one purpose."""
    return int(Noise.of(torch.tensor([sample]), seed).fold(purpose).keys)


@torch.no_grad()
def _count_classes(model: Model, image: Tensor, sigma: float, draws: int, seed: int, batch: int) -> Tensor:
    """Count the classes predicted for the noisy image, with one random number generator per draw."""
    total: Tensor | None = None
    dtype = dtype_of(model) or image.dtype
    for begin in range(0, draws, batch):
        numbers = torch.arange(begin, min(begin + batch, draws), device=image.device)
        noise = Noise.of(numbers, seed).normal(image.shape, torch.float64)
        logits = model((image.double() + sigma * noise).to(dtype))
        if logits.ndim != 2 or len(logits) != len(numbers) or logits.shape[1] < 2:
            raise AttackError(f"a classifier gives at least two logits for every image, not {tuple(logits.shape)}")
        if not logits.isfinite().all():
            raise AttackError("the model gives logits that are not finite for a noisy image")
        found = torch.bincount(logits.argmax(1), minlength=logits.shape[1])
        total = found if total is None else total + found
    assert total is not None
    return total.cpu()
