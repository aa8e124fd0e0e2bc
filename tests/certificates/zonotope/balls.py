"""Laws of enclosures over balls of images: first order, affine networks, budgets of symbols, overflow, margins."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from certificates.zonotope.laws import PROVER, Encloser, Perturbed, function_of
from certificates.zonotope.values import upper
from specguard.certificates.zonotope.ball import Region
from specguard.certificates.zonotope.walk import Output


def over(
    model: nn.Module,
    images: Tensor,
    norm: str,
    radius: object,
    box: bool = False,
    budget: int | None = None,
    by: Encloser = PROVER,
) -> Output:
    """The enclosure of a network's outputs within a radius, or within one of every image."""
    r = torch.as_tensor(radius, dtype=torch.float64).expand(len(images))
    return by.balls(model, images, Region(norm, r, box), budget)


def margins(out: Output) -> Tensor:
    """Single outputs, and the differences of two."""
    size = out.zonotope.center[0].numel()
    eye = torch.eye(size, dtype=torch.float64)
    found = torch.cat([eye, eye - eye.roll(1, 0)])
    return found.view(1, -1, *out.zonotope.shape).expand(len(out.lost), *[-1] * (1 + len(out.zonotope.shape)))


def slopes(f: Callable[[Tensor], Tensor], images: Tensor, a: Tensor) -> Tensor:
    """The gradients of functionals a at the images: batch, functional, pixels."""
    x = images[:, None].expand(-1, a.shape[1], *images.shape[1:]).clone().requires_grad_()
    y = f(x.flatten(0, 1)).unflatten(0, a.shape[:2])
    return torch.autograd.grad((y * a).sum(), x)[0]


def check_first_order(model: nn.Module, images: Tensor, norm: str, by: Encloser = PROVER) -> None:
    """`range / radius` tends to the dual norm of the row of the Jacobian."""
    images, radius = images.double(), 1e-7
    out = over(model, images, norm, radius, by=by)
    a = margins(out)
    row = slopes(function_of(model), images, a).flatten(2)
    wanted = row.norm(p=2 if norm == "l2" else 1, dim=-1)
    found = upper(out.zonotope, a) / radius
    scale = wanted.amax()
    assert not out.lost.any()
    assert (found >= wanted - 1e-9 * scale).all()
    assert (found <= wanted + 1e-3 * scale).all(), f"{float(((found - wanted) / scale).max()):.2g}"


def check_affine(model: nn.Module, images: Tensor, norm: str, box: bool, by: Encloser = PROVER) -> None:
    """Ranges of an affine network are those of its Jacobian, up to rounding."""
    for radius in (1e-6, 0.3, 1e6):
        out = over(model, images, norm, radius, box, by=by)
        a = margins(out)
        f = function_of(model)
        row = slopes(f, images, a)
        low, high = images - radius, images + radius
        if norm == "linf" and box:
            low, high = low.clamp(0, 1), high.clamp(0, 1)
        half, center = (high - low) / 2, f((high + low) / 2)
        wanted = (
            radius * row.flatten(2).norm(dim=-1) if norm == "l2" else (row.abs() * half[:, None]).flatten(2).sum(-1)
        )
        found, size = upper(out.zonotope, a), 1e-11 * (radius + 1)
        assert torch.allclose(found, wanted, rtol=1e-9, atol=size)
        assert torch.allclose(out.zonotope.center, center, rtol=1e-9, atol=size)


def check_overflow(model: nn.Module, images: Tensor, norm: str, by: Encloser = PROVER) -> None:
    """Four images with balls of which most are too large: bounds that are lost say nothing, and others hold."""
    images = images.double()[torch.arange(4) % len(images)]
    radius = torch.tensor([1e-4, 1e40, 1e160, 1e300], dtype=torch.float64)
    out = over(model, images, norm, radius, by=by)
    alone = over(model, images[:1], norm, radius[:1], by=by)
    a = margins(alone)
    assert not out.lost[0]
    assert torch.allclose(upper(out.zonotope, a.expand(4, *a.shape[1:]))[:1], upper(alone.zonotope, a), rtol=1e-9)
    assert out.zonotope.center.isfinite().all()
    found = Perturbed(images, Region(norm, radius, False))
    ends = found.points(found.start(2, torch.Generator().manual_seed(0)))[:, 1]
    y = function_of(model)(ends)
    inside = (y - out.zonotope.center).abs() <= out.zonotope.reach * (1 + 1e-9)
    assert (inside | out.lost.view(-1, *[1] * (y.ndim - 1)) | y.isnan()).all()


def check_margins(
    model: nn.Module,
    images: Tensor,
    region: Region,
    lower_margins: Callable[[Tensor, Tensor], Tensor],
    generator: torch.Generator,
) -> None:
    """No margin in the ball is below `lower_margins(labels, others)`: ascent from the image and corners."""
    f = function_of(model)
    with torch.no_grad():
        labels = f(images).argmax(1)
    classes = f(images).shape[1]
    others = torch.stack([torch.tensor([j for j in range(classes) if j != y]) for y in labels.tolist()])
    lower = lower_margins(labels, others)
    inputs = Perturbed(images, region)
    (delta,) = inputs.start(3 * others.shape[1], generator)
    for _ in range(5):
        delta = delta.detach().requires_grad_()
        y = f(inputs.points([delta]).flatten(0, 1)).unflatten(0, delta.shape[:2])
        found = y.gather(2, labels.view(-1, 1, 1).expand(-1, y.shape[1], 1)) - y
        found = found.gather(2, others.repeat(1, 3)[..., None])[..., 0]
        assert (found >= lower.repeat(1, 3) - 1e-12).all()
        (slope,) = torch.autograd.grad(-found.sum(), delta)
        delta = inputs.farthest([slope], [delta])[0]
