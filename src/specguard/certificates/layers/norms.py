"""Layers that scale every token by a function of its own length: projections, LayerNorm and RMSNorm.

Both norms are smooth projections: with `c = x - mean(x)` (LayerNorm) or `c = x` (RMSNorm) and
`R^2 = d eps`, `c / sqrt(|c|^2 / d + eps) = (sqrt(d) / R) p_R(c)`, where `p_R(c) = R c / sqrt(R^2 + |c|^2)`.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.certificates.layers.affine import expect
from specguard.certificates.node import VJP, Adjoint, Method, Node, Radius, Rule, Terms, check_magnitude, length, up
from specguard.errors import ConfigError
from specguard.linalg import UNIT, gamma, upper_length
from specguard.nn import LayerProject, SmoothProject
from specguard.nn.settings import positive, width_of_norm

Lengths = Float[Tensor, "batch token"]


@dataclass(frozen=True)
class ScaledTokens:
    """`z -> gain (stretch p(C z)) + shift` per token, p hard or smooth of radius R, C centering or the identity."""

    output: Tensor
    error: Float[Tensor, " batch"]
    unit: Tensor  # C z / sqrt(R^2 + |C z|^2), or C z / max(R, |C z|)
    length: Lengths  # of C z, as computed
    length_error: Lengths  # bound on its error
    radius: float
    stretch: float
    gain: Tensor
    hard: bool
    centered: bool
    affine = False

    def propagate(self, radius: Radius, method: Method) -> Radius:
        """Secants: `|p(x') - p(x)| <= R |x' - x| / sqrt(w(|x|) w(|x'|))`, w(t) `sqrt(R^2 + t^2)` or `max(R, t)`."""
        factor = self.stretch * float(self.gain.abs().amax()) * (1 + gamma(8))
        if method != "local":
            return up(factor * radius)
        low = self._least_length(radius)
        inner, outer = (
            self._width((t * (1 - 8 * UNIT)).clamp(min=0)) for t in (low, self.length - self.length_error)
        )
        slope = (self.radius / (inner * outer).sqrt()).amax(-1).clamp(max=1.0)
        return up(factor * slope * radius)

    def vjp(self, g: Adjoint) -> VJP:
        """`Dp(x)^T h = (R / w) (h - <h, e> e)` with `e = x / w`; a hard projection inside its ball: h."""
        h = (g * self.gain).reshape(*g.shape[:2], *self.unit.shape[1:])
        width = self._width(self.length)
        inside = (self.length <= self.radius) & self.hard
        along = torch.where(inside, 0.0, (h * self.unit).sum(-1))
        adjoint = (self.radius / width)[..., None] * (h - along[..., None] * self.unit) * self.stretch
        if self.centered:
            adjoint = adjoint - adjoint.mean(-1, keepdim=True)
        adjoint = adjoint.reshape(g.shape)
        weight = up(upper_length(h) * self.stretch)
        # The length of the exact point differs by up to `length_error`, and so its derivative by the curvature
        # times that. Near the kink of a hard projection any L with 0 <= L <= I serves: the remainder covers each.
        derivative_error = self._curvature(self.length_error) * self.length_error
        if self.hard:
            derivative_error = torch.where(derivative_error.isinf(), 0.0, derivative_error)
        max_slope = (self.radius / self._width((self.length - self.length_error).clamp(min=0))).amax(-1)
        relative = gamma(3 * g.shape[-1] + 32) * max_slope + derivative_error.amax(-1)
        return VJP(
            adjoint,
            up(length(h, 2) * self.stretch * relative),
            lambda radius: self._curvature_term(weight, radius),
        )

    def _curvature_term(self, weight: Float[Tensor, "other batch token"], radius: Radius) -> Terms:
        """`sum_i |g_i| |r_i|` with `|r_i| <= min(c_i |D_i|^2 / 2, |D_i|)`, 0 while a hard projection is inactive.

        `|r_i| <= |D_i|` because both projections are firmly non-expansive: p(x + D) - p(x) and Dp D lie in the ball
        around D / 2 of radius |D| / 2. Over all tokens, the first bound gives `max_i |g_i| c_i delta^2 / 2`, and
        both together `|(|g_i| min(1, c_i delta / 2))_i| delta`.
        """
        delta = radius[..., None]
        change = (self._curvature(delta + self.length_error) * delta / 2).nan_to_num(nan=0.0, posinf=torch.inf)
        if self.hard:
            change = torch.where(
                self.length + self.length_error + delta <= self.radius * (1 - 8 * UNIT), 0.0, change
            )
        change = change[..., None, :, :]  # other classes come before the batch
        smooth = (weight * change).nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)  # 0 times infinity is 0 here
        capped = upper_length(weight * change.clamp(max=1.0))
        return {"bend": up(torch.minimum(smooth, capped) * radius[..., None, :])}

    def _least_length(self, radius: Radius) -> Tensor:
        return (self.length - self.length_error - radius[..., None]).clamp(min=0)

    def _width(self, t: Tensor) -> Tensor:
        return t.clamp(min=self.radius) if self.hard else (t.square() + self.radius**2).sqrt()

    def _curvature(self, delta: Tensor) -> Tensor:
        """`sup ||D^2 p||` over lengths within delta of the token's own; one delta per token.

        Smooth: `c(t) = 3 R^3 t / w^5` up to `t = R / sqrt 2`, `2 R / (sqrt 3 w^2)` from there, largest at R / 2.
        Hard: `2 R / (sqrt 3 t^2)` outside, and no bound across the kink.
        """
        R = self.radius
        low = (self.length - delta).clamp(min=0)
        if self.hard:
            outside = low > R * (1 + 8 * UNIT)
            return torch.where(outside, 2 / math.sqrt(3) * R / low.square(), torch.inf)
        t = torch.minimum(torch.maximum(low, torch.full_like(low, R / 2)), self.length + delta)
        w = (t.square() + R * R).sqrt()
        near, far = 3 * R**3 * t / w**5, 2 / math.sqrt(3) * R / w.square()
        return torch.where(t <= R / math.sqrt(2), near, far)


def projection(layer: LayerProject | SmoothProject) -> Rule:
    """A projection of every token, hard or smooth."""
    radius = positive("radius", layer.radius)
    return scaled_tokens(radius, 1.0, None, None, hard=isinstance(layer, LayerProject), centered=False)


def layer_norm(layer: nn.LayerNorm) -> Rule:
    """LayerNorm over the last axis."""
    return _scaled(layer, layer.eps, layer.bias, centered=True)


def rms_norm(layer: nn.RMSNorm) -> Rule:
    """RMSNorm over the last axis."""
    if layer.eps is None:
        raise ConfigError("RMSNorm without a number for eps depends on the dtype of its input")
    return _scaled(layer, layer.eps, None, centered=False)


def _scaled(layer: nn.LayerNorm | nn.RMSNorm, eps: float, bias: Tensor | None, *, centered: bool) -> Rule:
    """A norm of d channels as a projection of radius `R = sqrt(d eps)`, scaled by sqrt(d) / R."""
    eps, width = positive("eps", eps), width_of_norm(layer)
    rule = scaled_tokens(
        math.sqrt(width * eps), 1 / math.sqrt(eps), layer.weight, bias, hard=False, centered=centered
    )

    def at(x: Tensor) -> Node:
        expect(x, width)
        return rule(x)

    return at


def scaled_tokens(
    R: float, stretch: float, weight: Tensor | None, bias: Tensor | None, *, hard: bool, centered: bool
) -> Rule:
    """`gain stretch p(C x) + shift` per token: p a projection of radius R, hard or smooth, C centering or not."""
    check_magnitude("its radius", R)

    def at(point: Tensor) -> ScaledTokens:
        for constant in (weight, bias):
            if constant is not None:
                expect(point, len(constant))
        x = point.reshape(len(point), -1, point.shape[-1])  # a pooled image is one token
        gain = x.new_ones(x.shape[-1]) if weight is None else weight.detach()
        shift = x.new_zeros(x.shape[-1]) if bias is None else bias.detach()
        c = x - x.mean(-1, keepdim=True) if centered else x
        size = torch.linalg.vector_norm(c, dim=-1)
        # `vector_norm` and R are accurate to gamma(d + 8); the rounding of the mean shifts every entry.
        length_error = gamma(4 * x.shape[-1] + 32) * (upper_length(c) + R + (upper_length(x) if centered else 0.0))
        unit = c / (size.clamp(min=R) if hard else (size.square() + R * R).sqrt())[..., None]
        output = gain * (stretch * R * unit) + shift
        low = (size - length_error).clamp(min=0)
        slope = R / (low.clamp(min=R) if hard else (low.square() + R * R).sqrt())
        unit_error = upper_length(slope.clamp(max=1.0) * length_error) * stretch * float(gain.abs().amax())
        shift_length = math.sqrt(x[0].numel() / x.shape[-1]) * float(upper_length(shift))
        error = up(2 * unit_error + gamma(2 * x.shape[-1] + 32) * (length(output) + shift_length))
        return ScaledTokens(
            output.reshape(point.shape), error, unit, size, up(length_error), R, stretch, gain, hard, centered
        )

    return at
