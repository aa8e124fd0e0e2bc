"""One attention layer with its skip connection at a point: the largest change found in a ball, and all bounds.

F(X) = X + Attention(X), H = I in LoFAST's notation, where X is the normalized input of the layer for an image.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.certificates.attention import local as tightened
from specguard.certificates.attention import lofast
from specguard.certificates.attention.rule import AnyAttention, AttentionNode, attention
from specguard.certificates.node import up
from specguard.errors import ConfigError
from specguard.linalg import jacobian, lower_singular_values
from specguard.models import attention_weights as all_attention
from specguard.nn import attention_weights, materialized, unfuse_attention
from specguard.rng import Noise

Points = Float[Tensor, "batch token dim"]
PerImage = Float[Tensor, " batch"]
Function = Callable[[Tensor], Tensor]
MATRICES = ("q", "k", "v", "o")

BOUNDS = ("naive", "specformer", "specformer_tight", "lofast1", "lofast2", "t1", "t2", "best")
_DECAY, _PRECISION = 0.93, 1e-12


def attention_name(model: nn.Module, number: int) -> str:
    """The name of an attention layer by its number, counted from 0; a model without this layer is refused."""
    names = [weights.layer for weights in all_attention(model)]
    if not names:
        raise ConfigError("the model has no attention layers")
    if not 0 <= number < len(names):
        raise ConfigError(f"the model has the attention layers 0 to {len(names) - 1}, not {number}")
    name = names[number]
    if name not in [weights.layer for weights in attention_weights(model)]:
        raise ConfigError(f"{name} has norms within its attention, which the bounds of this study do not cover")
    return name


def double_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """The model in float64 and eval mode, without fused attention, with plain and frozen weights."""
    return unfuse_attention(materialized(model)).double().to(device).eval().requires_grad_(False)


@torch.no_grad()
def layer_inputs(model: nn.Module, layer: nn.Module, images: Float[Tensor, "batch channel height width"]) -> Points:
    """The inputs of `layer`, a module of `model`, for these images."""
    recorded: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs[0]))
    try:
        model(images)
    finally:
        hook.remove()
    return recorded[0]


def with_skip(layer: nn.Module) -> Function:
    """F(X) = X + layer(X)."""
    return lambda X: X + layer(X)


def node_at(layer: AnyAttention, X: Points) -> AttentionNode:
    """F at X, with everything that its bounds depend on."""
    node = attention(layer, 1.0)(X)
    assert isinstance(node, AttentionNode)
    return node


def bounds_at(node: AttentionNode, radius: float) -> dict[str, PerImage | None]:
    """Every bound on `||F(X') - F(X)||_F` for `||X' - X||_F <= radius`, by name; `best` is the smallest.

    `t2` is None if the derivative is too large to be formed.
    """
    eps = torch.full((len(node.X),), radius, dtype=torch.float64, device=node.X.device)
    found: dict[str, PerImage | None] = {
        "naive": lofast.naive(node, eps),
        "specformer": lofast.specformer(node, eps),
        "specformer_tight": lofast.specformer(node, eps, tight=True),
        "lofast1": lofast.lofast(node, eps, node.mu_uncentered),
        "lofast2": lofast.lofast(node, eps, node.xi),
        "t1": tightened.upper_t1(node, eps),
        "t2": None if node.derivative_norm is None else tightened.upper_t2(node, eps),
    }
    return found | {"best": torch.stack([bound for bound in found.values() if bound is not None]).amin(0)}


def starting_directions(
    function: Function, X: Points, noise: Noise, count: int
) -> Float[Tensor, "start batch token dim"]:
    """Unit directions to start a search from: the top right singular vector, its negative, and random ones."""
    generator = torch.Generator().manual_seed(int(noise.keys[0]))
    top = lower_singular_values(jacobian(function, X), generator).right[:, 0]
    random = [noise.fold(number).directions(X.shape[1:], X.dtype) for number in range(count)]
    return torch.stack([top, -top, *random])


def largest_change(
    function: Function,
    X: Points,
    radius: float,
    directions: Float[Tensor, "start batch token dim"],
    steps: int,
) -> PerImage:
    """The largest `||F(X + D) - F(X)||_F` found over `||D||_F <= radius`: a lower bound on the maximum."""
    start = function(X).repeat(len(directions), *[1] * (X.ndim - 1))
    return largest_found(lambda x: lengths(function(x) - start), X, radius, directions, steps)


def largest_found(
    score: Function,
    X: Points,
    radius: float,
    directions: Float[Tensor, "start batch token dim"],
    steps: int,
) -> PerImage:
    """The largest score of X + D found over `||D||_F <= radius` by projected gradient ascent: a lower bound.

    All starts are evaluated in one batch.
    Cost: a forward and a backward pass per step.
    """
    starts = len(directions)
    at, D = X.repeat(starts, 1, 1), radius * directions.flatten(0, 1)
    best = torch.zeros(len(at), dtype=X.dtype, device=X.device)
    step = radius
    for _ in range(steps):
        D = D.detach().requires_grad_()
        found = score(at + D)
        best = torch.maximum(best, found.detach())
        (gradient,) = torch.autograd.grad(found.sum(), D)
        D = D.detach() + step * _unit(gradient.nan_to_num())
        D = D * (radius / lengths(D).clamp(min=radius))[:, None, None]
        step *= _DECAY
    with torch.no_grad():
        best = torch.maximum(best, score(at + D.detach()))
    return best.view(starts, len(X)).amax(0)


def first_head(
    node: AttentionNode, radius: float, directions: Float[Tensor, "start batch token dim"], steps: int
) -> dict[str, dict[str, PerImage]]:
    """The two factors of LoFAST's second term for the first head, maximized by ascent, and bounds on each.

    `maps` is `||P(X') - P(X)||_F`, Delta_{2,1}, with delta_{2,1} (1) and (2) and with the bound of this package,
    which uses the local constant of the softmax and centered keys; `values` is `||X' W^V W^O||`, Delta_{2,2}, with
    delta_{2,2} (1) and (2).
    """
    w, eps = node.w, torch.full((len(node.X),), radius, dtype=torch.float64, device=node.X.device)
    VO = w.Wv[0] @ w.Wo[0]

    def maps(X: Tensor) -> Tensor:
        q, k = (X @ W[0] + b[0] for W, b in ((w.Wq, w.bq), (w.Wk, w.bk)))
        return w.mix[0] * (q @ k.mT * w.tau).softmax(-1)

    def move(mu: Tensor) -> PerImage:
        return up(w.mix[0] * node.logit_move(eps, mu)[:, 0])

    return {
        "maps": {
            "found": largest_change(maps, node.X, radius, directions, steps),
            "lofast1": move(node.mu_uncentered),
            "lofast2": move(node.xi),
            "ours": up(move(node.mu) * node.lam(eps).amax(-1)[:, 0]),
        },
        "values": {
            "found": largest_found(
                lambda X: torch.linalg.matrix_norm(X @ VO, 2), node.X, radius, directions, steps
            ),
            "lofast1": up(node.norm_xvo[:, 0] + eps * w.norm_vo[0]),
            "naive": up(w.norm_vo[0] * (node.norm_x + eps)),
        },
    }


def exceeded(found: PerImage, bounds: Mapping[str, PerImage | None], size: PerImage) -> tuple[str, ...]:
    """The names of the bounds that a found change exceeds; `size` is `||F(X)||`, for the rounding of the change."""
    return tuple(
        name
        for name, bound in bounds.items()
        if bound is not None and not (found <= bound * (1 + _PRECISION) + _PRECISION * size).all()
    )


@torch.no_grad()
def changed_layer(layer: AnyAttention, which: str, fraction: float, noise: Noise) -> AnyAttention:
    """A copy in which W^Q, W^K, W^V or W^O has a random perturbation of `fraction` times its Frobenius norm."""
    perturbed = copy.deepcopy(layer)
    (weights,) = attention_weights(perturbed)
    W = weights.matrix(which)
    W += fraction * torch.linalg.vector_norm(W) * noise.directions(W.shape, W.dtype)[0]
    return perturbed


def lengths(x: Float[Tensor, "batch *shape"]) -> PerImage:
    """Frobenius norms."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def _unit(x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
    """Tensors divided by their norms; zero stays zero."""
    size = lengths(x)
    return x / torch.where(size > 0, size, 1.0)[:, None, None]
