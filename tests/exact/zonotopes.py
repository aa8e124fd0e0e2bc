"""Laws of enclosures in exact arithmetic: the exact value at exact inputs is enclosed, without a tolerance."""

from dataclasses import replace

import torch

from certificates.layers import made
from certificates.zonotope.laws import PROVER, Encloser, Perturbed, Symbols, function_of
from certificates.zonotope.values import by_token, parts
from exact.laws import plain
from exact.numbers import exact, mp, real
from exact.reference import forward
from specguard.certificates.zonotope.ball import Region
from specguard.certificates.zonotope.enclosure import Zonotope

SIZES = (1.0, 1e-9, 1e-4, 1e4, 1e8)
LAYOUTS = {"ball": {"balls": 2, "shared": 1, "local": 1}, "no ball": {"balls": 0, "shared": 2, "local": 0}}


def tokens(x, lead):
    """The entries of an array as tokens and entries of a token."""
    return x.reshape(*x.shape[: lead + 1], -1) if x.ndim > lead + 1 else x.reshape(*x.shape[:lead], 1, -1)


def exact_range(z: Zonotope, a):
    """The range of one functional, an array of numbers, over a zonotope of one image."""
    ball, shared, local = (real(exact(part[0])) for part in parts(z))
    a = tokens(a, 0)
    apart = real(exact(by_token(z.slack if z.fresh is None else torch.stack([z.slack, z.fresh]).sum(0), 1)[0]))
    if z.fresh is not None:
        apart = real(exact(by_token(z.slack, 1)[0])) + real(exact(by_token(z.fresh, 1)[0]))
    most = (abs(a) * apart).sum()
    most += mp.sqrt(sum((row * a).sum() ** 2 for row in ball)) if len(ball) else 0
    most += sum(abs((row * a).sum()) for row in shared)
    return most + sum(abs(each) for row in local for each in (row * a).sum(-1))


def exact_values(z: Zonotope, symbols):
    """The exact value of one image of a zonotope at the symbols of a point; those of the ball get unit length."""
    ball, shared, local = (real(exact(part[0])) for part in parts(z))
    xi, eta, own, fresh, slack = (real(exact(x)) for x in symbols)
    if len(xi) and any(xi):
        xi = xi / mp.sqrt((xi * xi).sum()) * (1 - mp.mpf(10) ** -60)
    x = tokens(real(exact(z.center[0])), 0)
    for factor, row in (*zip(xi, ball, strict=True), *zip(eta, shared, strict=True)):
        x = x + factor * row
    for factors, row in zip(own, local, strict=True):
        x = x + factors[:, None] * row
    x = x + tokens(slack, 0) * tokens(real(exact(z.slack[0])), 0)
    if z.fresh is not None:
        x = x + tokens(fresh, 0) * tokens(real(exact(z.fresh[0])), 0)
    return x.reshape(z.shape)


def functionals(out: Zonotope, generator, entries=6, dense=2):
    """Some entries of the output and some random functionals of it."""
    size = out.center[0].numel()
    chosen = torch.randperm(size, generator=generator)[:entries]
    found = torch.cat([torch.eye(size)[chosen], torch.randn(dense, size, generator=generator)]).double()
    return real(exact(found.view(-1, *out.shape)))


def check_point(layer, out: Zonotope, x, generator, **count):
    """The exact value at x is enclosed: `|<a, f(x) - center>|` is at most the range of a."""
    change = real(forward(plain(layer), x[None])[0]) - real(exact(out.center[0]))
    for a in functionals(out, generator, **count):
        off, most = abs((a * change).sum()), exact_range(out, a)
        assert off <= most, f"an exact value is off by {float(off)}, and the range is {float(most)}"


def check_exactly(layer, z: Zonotope, generator, points=2, by: Encloser = PROVER):
    """Exact values at the center, and at symbols along the slope of a functional, are enclosed."""
    found = by.zonotope(layer, z, None)
    if found.lost.any():
        return
    check_point(layer, found.zonotope, real(exact(z.center[0])), generator)
    inputs = Symbols(z)
    for _ in range(points):
        symbols = [x.requires_grad_() for x in inputs.start(3, generator)]
        y = function_of(layer)(inputs.points(symbols)[0])
        (y * torch.randn(y.shape, generator=generator)).sum().backward()
        ends = inputs.farthest([torch.zeros_like(x) if x.grad is None else x.grad for x in symbols], symbols)
        check_point(layer, found.zonotope, exact_values(z, [x[0, 0].detach() for x in ends]), generator)


def scaled(name, seed):
    """A layer with every tensor of a size of its own, and one point."""
    layer, z = made(name, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    layer, z = layer.double(), z[:1].double()
    with torch.no_grad():
        for tensor in (*layer.parameters(), z):
            tensor.mul_(1 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 1e-3)
            if seed:
                tensor.mul_(SIZES[int(torch.randint(len(SIZES), (), generator=generator))])
        if hasattr(layer, "log_q"):
            layer.log_q.clamp_(-30, 30)
    return layer, z


def sized(z: Zonotope, size: float) -> Zonotope:
    """All errors and generators times a size."""
    fresh = None if z.fresh is None else z.fresh * size
    return replace(z, generators=z.generators * size, fresh=fresh, slack=z.slack * size)


def check_image(model, x, norm, radius, entry, generator, by: Encloser = PROVER):
    """The exact output at the end of a ball along the slope of one entry of the output is enclosed."""
    region = Region(norm, torch.tensor([radius], dtype=torch.float64), False)
    out = by.balls(model, x, region, None).zonotope
    inputs = Perturbed(x, region)
    delta = inputs.start(3, generator)[0].requires_grad_()
    model(inputs.points([delta])[0])[:, entry].sum().backward()
    (end,) = inputs.farthest([delta.grad], [delta])
    d = real(exact(end[0, 0].detach()))
    if norm == "l2" and radius:
        d = d * (mp.mpf(radius) / mp.sqrt((d * d).sum()))
    check_point(model, out, real(exact(x[0])) + d, generator)
