"""The linear baseline: never above the exact distance, which rational arithmetic tells, and hardly below it."""

import math
import sys
from fractions import Fraction

import pytest
import torch
from torch import nn

from specguard.certificates import certify, fit_linear, lower_linear_radii
from specguard.data import Dataset, digits
from specguard.errors import ConfigError, DataError
from specguard.geometry import Ball

module = sys.modules[lower_linear_radii.__module__]


def classifier(seed: int, scale: float = 1.0, shift: float = 0.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    layer = nn.Linear(12, 4, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(scale * torch.randn(4, 12, generator=g) + shift)
    layer.bias.copy_(scale * torch.randn(4, generator=g))
    return layer, torch.rand(6, 3, 4, generator=g, dtype=dtype)


def exact_squares(layer, x, label):
    """(margin, squared l2 norm, l1 norm) against each other class, as fractions."""
    W = [[Fraction(v) for v in row] for row in layer.weight.tolist()]
    b, pixels = [Fraction(v) for v in layer.bias.tolist()], [Fraction(v) for v in x.flatten().tolist()]
    for j in range(len(W)):
        if j != label:
            D = [p - q for p, q in zip(W[label], W[j], strict=True)]
            margin = sum(d * p for d, p in zip(D, pixels, strict=True)) + b[label] - b[j]
            yield margin, sum(d * d for d in D), sum(abs(d) for d in D)


def too_large(layer, images, labels, norm) -> int:
    """How many of the radii exceed the exact distance."""
    found, wrong = lower_linear_radii(layer, images, labels, norm).tolist(), 0
    for x, label, radius in zip(images, labels.tolist(), found, strict=True):
        for margin, square, total in exact_squares(layer, x, label):
            r = Fraction(radius)
            beyond = r * r * square > margin * margin if norm == "l2" else r * total > margin
            wrong += radius > 0 and (margin <= 0 or beyond)
    return wrong


CASES = [(1.0, 0.0), (1e-6, 0.0), (1e6, 0.0), (1e-3, 1e4)]  # the last: differences of nearly equal weights


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("scale", "shift"), CASES)
def test_radii_are_never_above_the_exact_distance_and_hardly_below(scale, shift, dtype, norm):
    for seed in range(4):
        layer, images = classifier(seed, scale, shift, dtype)
        labels = layer.double()(images.double().flatten(1)).argmax(1)
        assert too_large(layer, images, labels, norm) == 0
        found = lower_linear_radii(layer, images, labels, norm)
        for x, label, radius in zip(images, labels.tolist(), found.tolist(), strict=True):
            power = 2 if norm == "l2" else 1
            exact = min(float(m) / float(part) ** (1 / power) for m, *p in exact_squares(layer, x, label)
                        for part in (p[0] if norm == "l2" else p[1],))  # fmt: skip
            assert radius >= exact * (1 - 1e-9) - 1e-8 * shift


def test_planted_forgotten_rounding_is_caught(monkeypatch):
    """Without the account of rounding, some radius of nearly tied images exceeds the exact one."""
    monkeypatch.setattr(module, "gamma", lambda count: 0.0)
    monkeypatch.setattr(module, "round_up", lambda values, count: values)
    monkeypatch.setattr(module, "upper_length", lambda x: torch.linalg.vector_norm(x, dim=-1))
    monkeypatch.setattr(module, "UNIT", 0.0)
    wrong = 0
    for seed in range(40):
        layer, images = classifier(seed, dtype=torch.float64)
        wrong += too_large(layer, images, layer(images.flatten(1)).argmax(1), "l2")
    assert wrong > 0


def test_it_is_what_certify_says_of_a_linear_model():
    layer, images = classifier(3)
    labels = layer(images.flatten(1)).argmax(1)
    given = certify(nn.Sequential(nn.Flatten(), layer).eval(), images, labels, Ball("l2", 0.1), ("adjoint",))
    found = lower_linear_radii(layer, images, labels)
    assert (given.largest["adjoint"] <= found * (1 + 1e-9)).all()
    assert (given.largest["adjoint"] >= found * 0.998).all()


def test_a_wrong_image_has_no_radius_and_equal_other_classes_never_win():
    layer, images = classifier(5)
    labels = layer(images.flatten(1)).argmax(1)
    assert (lower_linear_radii(layer, images, (labels + 1) % 4) == 0).all()
    layer.weight.copy_(layer.weight[:1].expand(4, -1))
    layer.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert (lower_linear_radii(layer, images, torch.zeros(6, dtype=torch.long)) == math.inf).all()
    assert (lower_linear_radii(layer, images, torch.ones(6, dtype=torch.long)) == 0).all()


def test_bad_input_is_refused():
    layer, images = classifier(1)
    labels = torch.zeros(6, dtype=torch.long)
    with pytest.raises(DataError, match="not finite"):
        lower_linear_radii(layer, images * math.nan, labels)
    with pytest.raises(DataError, match="from 0 to 3"):
        lower_linear_radii(layer, images, labels + 4)
    tiny = nn.Linear(12, 4, dtype=torch.float64).requires_grad_(False)
    tiny.weight.fill_(1e-70)
    with pytest.raises(ConfigError, match="outside the range"):
        lower_linear_radii(tiny, images, labels)


def test_digits_are_fitted_and_two_classes_too():
    data = digits()
    model = fit_linear(data.train, 10)
    radii = lower_linear_radii(model[1], data.test.images, data.test.labels)
    assert int((radii > 0).sum()) == int((model(data.test.images).argmax(1) == data.test.labels).sum()) > 340
    pair = data.train.labels < 2
    two = Dataset(data.train.images[pair], data.train.labels[pair])
    model = fit_linear(two, 2)
    assert int((model(two.images).argmax(1) == two.labels).sum()) > 0.98 * len(two)
    with pytest.raises(DataError, match="training images of each"):
        fit_linear(two, 3)
    with pytest.raises(DataError, match="of no other"):
        fit_linear(data.train, 9)
