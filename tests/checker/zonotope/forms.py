"""The checker's affine forms as zonotopes, over which the laws of enclosures run, and back; nothing is computed."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from certificates.zonotope.laws import Encloser, function_of
from certificates.zonotope.values import parts
from specguard.certificates.zonotope import ball
from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.certificates.zonotope.walk import Output
from specguard.checker import read
from specguard.checker.zonotope.form import Form
from specguard.checker.zonotope.region import Region
from specguard.checker.zonotope.walk import Budget, enclose


def form(z: Zonotope, image: int) -> Form:
    """The affine form of one image of a zonotope."""
    fresh = torch.zeros_like(z.center) if z.fresh is None else z.fresh
    mid, free, rad = (x[image].double().numpy().copy() for x in (z.center, fresh, z.slack))
    rows = (x[image].movedim(0, -1).reshape(*mid.shape, -1).numpy().copy() for x in parts(z))
    return Form(mid, *rows, free, rad)


def stacked(found: Iterable[Form | None], empty: Callable[[], Tensor]) -> Output:
    """Forms of several images as one zonotope; those that are lost are like `empty()`."""
    forms = list(found)
    lost = torch.tensor([z is None for z in forms])
    known = [Form.exact(empty()[i].numpy()) if z is None else z for i, z in enumerate(forms)]

    def rows(name: str) -> Tensor:
        each = [getattr(z, name) for z in known]
        count = max(x.shape[-1] for x in each)
        padded = [np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count - x.shape[-1])]) for x in each]
        return torch.from_numpy(np.stack(padded)).movedim(-1, 1)

    balls, shared, local = (rows(name) for name in ("ball", "shared", "local"))
    mid, fresh, rad = (torch.from_numpy(np.stack([getattr(z, k) for z in known])) for k in ("mid", "fresh", "rad"))
    runs = (("shared", shared.shape[1]),), (("local", local.shape[1]),)
    return Output(Zonotope(mid, torch.cat([balls, shared, local], 1), fresh, rad, balls.shape[1], *runs), lost)


def kept(budget: int | None) -> Budget | None:
    return None if budget is None else Budget(budget)


def over_zonotope(layer: nn.Module, z: Zonotope, budget: int | None = None) -> Output:
    """The checker's form of a layer's outputs over every image of a zonotope."""
    steps = read(layer.eval()).steps
    return stacked(
        (enclose(steps, form(z, i), kept(budget)) for i in range(len(z.center))),
        lambda: 0 * function_of(layer)(z.center),
    )


def over_balls(layer: nn.Module, images: Tensor, region: ball.Region, budget: int | None = None) -> Output:
    """The checker's form of a network's outputs over the ball of every image."""
    steps, radii = read(layer.eval()).steps, region.radius.tolist()
    regions = [Region(x.numpy(), region.norm, r, region.box) for x, r in zip(images, radii, strict=True)]
    return stacked((enclose(steps, each, kept(budget)) for each in regions), lambda: 0 * function_of(layer)(images))


CHECKER = Encloser(over_zonotope, over_balls)
