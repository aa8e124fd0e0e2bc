"""Layers whose Lipschitz constant is known keep it whatever numbers they are given, and so does a model of them."""

from collections.abc import Callable
from functools import cached_property

import pytest
import torch
from torch import Tensor, nn

from certificates.layers import made
from specguard.certificates import program
from specguard.certificates.attention.point import AttentionPoint
from specguard.certificates.propagate import forward_pass
from specguard.checker import Image, read
from specguard.errors import ConfigError
from specguard.nn import (
    SLL,
    MaxMin,
    SkipAttention,
    Softplus,
    Squareplus,
    almost_orthogonal,
    cap_norm,
    lipschitz_constant,
    materialized,
    orthogonal,
    overrides,
    restore_orthogonal,
    unfuse_attention,
)
from specguard.testing import BrokenLawError, check_rule

SHAPES = [(5, 7), (7, 5), (6, 6)]


def random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def repeated(shape: tuple[int, ...]) -> Tensor:
    U, _, Vt = torch.linalg.svd(random(shape), full_matrices=False)
    return 3 * U @ Vt


def with_zeros(shape: tuple[int, ...]) -> Tensor:
    W = random(shape)
    W[1], W[:, 2] = 0, 0
    return W


WEIGHTS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "random": random,
    "rank one": lambda shape: random((shape[0], 1)) @ random((1, shape[1]), 1),
    "all equal": lambda shape: torch.ones(shape, dtype=torch.float64),
    "repeated singular values": repeated,
    "tiny": lambda shape: 1e-9 * random(shape),
    "huge": lambda shape: 1e6 * random(shape),
    "of very different sizes": lambda shape: random(shape) * torch.logspace(-6, 6, shape[1], dtype=torch.float64),
    "rows and columns of zeros": with_zeros,
    "zero": lambda shape: torch.zeros(shape, dtype=torch.float64),
}
EVERY_WEIGHT = pytest.mark.parametrize("weight", WEIGHTS)
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def plain(shape: tuple[int, int], W: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(shape[1], shape[0], dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(random(shape, 3) if W is None else W)
    return layer


def stored(layer: nn.Linear, W: Tensor) -> nn.Linear:
    """The layer after an optimizer has put these numbers into it."""
    with torch.no_grad():
        original = layer.parametrizations.weight.original
        original.copy_(W.reshape(original.shape))
    return layer


def norm(layer: nn.Linear) -> float:
    return float(torch.linalg.svdvals(materialized(layer).weight.detach().double().flatten(1)).max())


# Linear maps ------------------------------------------------------------------------------------------------------


@EVERY_WEIGHT
@EVERY_SHAPE
@pytest.mark.parametrize("kind", [orthogonal, almost_orthogonal])
def test_whatever_is_stored_the_norm_is_at_most_the_one_that_is_claimed(kind, shape, weight):
    W = WEIGHTS[weight](shape)
    for layer in (kind(plain(shape, W)), stored(kind(plain(shape)), W)):
        assert norm(layer) <= lipschitz_constant(layer) * (1 + 1e-8)


@EVERY_SHAPE
def test_an_orthogonal_map_is_one_on_its_smaller_side_and_starts_near_the_given_weight(shape):
    layer = stored(orthogonal(plain(shape)), random(shape))
    singular = torch.linalg.svdvals(layer.weight)
    torch.testing.assert_close(singular, torch.ones_like(singular))
    W = repeated(shape) / 3
    torch.testing.assert_close(orthogonal(plain(shape, W)).weight.detach(), W)


def test_blocks_have_the_norms_asked_for_and_the_stack_the_one_that_is_claimed():
    layer = stored(orthogonal(plain((18, 6)), (0.3, 0.3, 1.0)), random((18, 6)))
    for block, wanted in zip(layer.weight.chunk(3), (0.3, 0.3, 1.0), strict=True):
        torch.testing.assert_close(torch.linalg.svdvals(block), torch.full((6,), wanted, dtype=torch.float64))
    assert norm(layer) == pytest.approx(lipschitz_constant(layer)) == pytest.approx(1.18**0.5)


@pytest.mark.parametrize("norms", [(1.0,), (0.3, 0.3, 0.7)])
@pytest.mark.parametrize("columns", [2, 4, 9])
def test_a_folded_weight_is_restored_and_is_trained_as_one_that_is_orthogonal(norms, columns):
    def layer(seed: int) -> nn.Linear:
        made = nn.Linear(columns, 4 * len(norms), dtype=torch.float64)
        made.weight.detach().copy_(random(made.weight.shape, seed))
        return orthogonal(made, norms)

    trained, again = layer(0), layer(1)
    trained.get_parameter("parametrizations.weight.original").detach().add_(random(again.weight.shape[:0], 2))
    restore_orthogonal(again, materialized(trained).weight)
    torch.testing.assert_close(again.weight, trained.weight, rtol=0, atol=1e-12)
    with torch.no_grad():
        again.get_parameter("parametrizations.weight.original").add_(0.5)
    for block, norm in zip(again.weight.chunk(len(norms)), norms, strict=True):
        torch.testing.assert_close(torch.linalg.matrix_norm(block, 2).item(), norm)


@pytest.mark.parametrize("make", [lambda layer: layer, lambda layer: cap_norm(layer, 1.0), almost_orthogonal])
def test_only_an_orthogonal_map_is_restored(make):
    with pytest.raises(ConfigError, match="only a layer that `orthogonal` has made can be restored"):
        restore_orthogonal(make(nn.Linear(2, 2)), torch.eye(2))


def test_patches_can_be_orthogonal_and_no_other_convolution():
    layer, images = orthogonal(nn.Conv2d(2, 19, 3, stride=3)), torch.rand(2, 2, 6, 9)
    assert layer.weight.shape == (19, 2, 3, 3)
    assert norm(layer) == pytest.approx(1, abs=1e-5)
    kept = (layer(images) - layer.bias[:, None, None]).detach()
    torch.testing.assert_close(kept.norm(), images.norm())  # 18 numbers to 19: nothing is lost
    with pytest.raises(ConfigError, match="cuts an image into patches"):
        orthogonal(nn.Conv2d(2, 11, 3))
    with pytest.raises(ConfigError, match="7 rows cannot be made of blocks"):
        orthogonal(nn.Linear(3, 7), (1.0, 1.0))


@pytest.mark.parametrize("kind", [orthogonal, almost_orthogonal, lambda layer: cap_norm(layer, 0.3)])
def test_what_is_known_by_construction_folds_into_a_plain_layer(kind):
    layer = kind(plain((5, 7))).eval()
    folded, x = materialized(layer), random((2, 7), 5)
    assert type(folded) is nn.Linear
    assert torch.equal(folded(x), layer(x))
    check_rule(nn.Sequential(layer).eval(), x, radii=(0.1,), methods=("local",), functionals=1, steps=3)


@EVERY_WEIGHT
@EVERY_SHAPE
def test_a_cap_is_met_to_a_hundredth_and_leaves_small_weights_alone(shape, weight):
    W = WEIGHTS[weight](shape)
    layer, size = cap_norm(plain(shape, W), 0.3), float(torch.linalg.svdvals(W)[0])
    assert norm(layer) == pytest.approx(min(size, 0.3), rel=0.01)
    if size < 0.29:
        assert torch.equal(materialized(layer).weight, W)


def test_a_cap_follows_a_weight_that_moves_and_stands_still_in_evaluation():
    layer = cap_norm(plain((5, 7)), 0.3).train()
    goal, optimizer = random((5, 7), 9), torch.optim.SGD(layer.parameters(), 0.05)
    for _ in range(150):
        loss = -(layer.weight * goal).sum() / 10
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert norm(layer) <= 0.3 * 1.01
    before = layer.parametrizations.weight[0].vector.clone()
    layer.eval()(random((2, 7)))
    assert torch.equal(before, layer.parametrizations.weight[0].vector)
    two = [layer.train()(random((2, 7))).sum() for _ in range(2)]  # attacks call a model twice before one backward
    sum(two).backward()


def test_a_cap_must_be_positive_and_an_unknown_layer_claims_nothing():
    with pytest.raises(ConfigError, match="positive and finite, not 0"):
        cap_norm(nn.Linear(2, 2), 0.0)
    with pytest.raises(ConfigError, match="Linear is not known by construction"):
        lipschitz_constant(nn.Linear(2, 2))


# SLL --------------------------------------------------------------------------------------------------------------


def sll(W: Tensor, activation: nn.Module, q: float = 0.0) -> SLL:
    layer = SLL(W.shape[1], W.shape[0], activation).double()
    with torch.no_grad():
        layer.weight.copy_(W)
        layer.bias.copy_(random((W.shape[0],), 7))
        layer.log_q.copy_(q * random((W.shape[0],), 8))
    return layer.requires_grad_(False)


def largest_ratio(function: Callable[[Tensor], Tensor], dim: int, steps: int = 60) -> float:
    """Of `|f(x) - f(y)| / |x - y|`: sampled far and near, then by gradient ascent."""
    x = random((24, dim), 1)
    d = random((24, dim), 2) * torch.logspace(-3, 1, 24, dtype=torch.float64)[:, None]
    x.requires_grad_(True)
    d.requires_grad_(True)
    optimizer, best = torch.optim.Adam([x, d], 0.05), 0.0
    for _ in range(steps):
        ratio = (function(x + d) - function(x)).norm(dim=1) / d.norm(dim=1)
        best = max(best, float(ratio.detach().max()))
        optimizer.zero_grad()
        (-ratio.sum()).backward()
        optimizer.step()
    return best


@EVERY_WEIGHT
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), Softplus(3.0), Squareplus(0.5)], ids=str)
def test_no_two_points_are_farther_apart_behind_sll(activation, weight):
    for q in (0.0, 3.0):
        layer = sll(WEIGHTS[weight]((5, 7)), activation, q)
        assert largest_ratio(layer, 7, 30) <= lipschitz_constant(layer) + 1e-6


def test_an_sll_that_divides_by_too_little_is_caught_by_samples_and_by_the_laws(monkeypatch):
    true = SLL.scale
    monkeypatch.delitem(overrides._trusted, SLL)  # a proof would refuse a class whose functions were replaced
    monkeypatch.setattr(SLL, "scale", lambda self: true(self) / 1.3)
    assert largest_ratio(sll(WEIGHTS["rank one"]((5, 7)), nn.ReLU()), 7) > 1.1
    layer, points = made("sll, relu", 3.0)
    with torch.no_grad():
        layer.weight.copy_(layer.weight[:1].clone())
    with pytest.raises(BrokenLawError, match="radius by"):
        check_rule(layer, points, radii=(30.0,), functionals=1, steps=5)


@pytest.mark.parametrize("activation", [MaxMin(), nn.GELU(), nn.SiLU(), nn.Softplus()], ids=str)
def test_sll_takes_no_activation_whose_slopes_leave_the_unit_interval(activation):
    with pytest.raises(ConfigError, match="slopes between 0 and 1"):
        SLL(4, 5, activation)


def test_an_sll_whose_activation_was_put_in_later_has_no_proof():
    layer = SLL(4, 5)
    layer.activation = nn.GELU()
    layer.eval()
    with pytest.raises(ConfigError, match="is a GELU, which its rule does not cover"):
        program(layer)


def test_an_sll_whose_q_are_too_far_apart_has_no_proof():
    with pytest.raises(ConfigError, match="too far apart"):
        program(nn.Sequential(sll(random((5, 7)), nn.ReLU(), 1e3)).eval())


def test_sll_with_weights_of_all_sizes_obeys_the_laws():
    layer = sll(WEIGHTS["of very different sizes"]((5, 7)), nn.Tanh(), 3.0).eval()
    check_rule(layer, random((2, 7), 4), radii=(0.1, 3.0), methods=("local",), functionals=1, steps=5)


# A position bias --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.0, 1.0, 80.0])
def test_a_position_bias_is_the_same_on_both_paths_and_learns(size):
    layer = SkipAttention(6, 2, 0.4, position_bias=True, tokens=5)
    nn.init.normal_(layer.bias, std=size, generator=torch.Generator().manual_seed(0))
    x, twin = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1)), unfuse_attention(layer)
    torch.testing.assert_close(layer(x), twin(x), rtol=1e-4, atol=1e-5)
    by_path = [torch.autograd.grad(each(x).square().sum(), layer.bias)[0] for each in (layer, twin)]
    torch.testing.assert_close(*by_path, rtol=1e-3, atol=1e-5)
    assert by_path[0].any()
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
    P = 0.6 * torch.eye(5) + 0.4 * (q @ k.mT / 3**0.5 + layer.bias).softmax(-1)
    torch.testing.assert_close(layer.probabilities(x), P)
    torch.testing.assert_close(layer(x), layer.out((P @ v).transpose(1, 2).flatten(2)), rtol=1e-4, atol=1e-5)


def test_without_a_position_bias_nothing_is_stored_for_one():
    assert set(SkipAttention(6, 2).state_dict()) == {"qkv.weight", "qkv.bias", "out.weight", "out.bias"}
    assert SkipAttention(6, 2, position_bias=True, tokens=5).state_dict()["bias"].shape == (2, 5, 5)
    for wrong in ({"position_bias": True}, {"tokens": 5}, {"position_bias": True, "tokens": 0}):
        with pytest.raises(ConfigError, match="must be given with position_bias"):
            SkipAttention(6, 2, **wrong)


def test_another_number_of_tokens_is_refused_everywhere():
    model, x = nn.Sequential(SkipAttention(6, 2, position_bias=True, tokens=5)).eval(), torch.randn(1, 4, 6)
    message = r"positions are (for 5 tokens, not 4|of shape \(2, 5, 5\), for 4 tokens)"
    with pytest.raises(ConfigError, match=message):
        model(x)
    with pytest.raises(ConfigError, match=message):
        forward_pass(program(model).steps, x.double())
    with pytest.raises(ConfigError, match=message):
        Image.of(read(model), x[0].double().numpy(), 0)


def test_a_forgotten_position_bias_is_caught(monkeypatch):
    without = cached_property(lambda self: self.q @ self.k.mT * self.w.tau)
    without.__set_name__(AttentionPoint, "S")
    monkeypatch.setattr(AttentionPoint, "S", without)
    with pytest.raises(BrokenLawError):
        check_rule(*made("skip attention with positions"), radii=(0.1,), steps=3)


def test_making_a_map_orthogonal_leaves_the_worlds_generator_alone():
    layer, state = plain((7, 5)), torch.random.get_rng_state()
    orthogonal(layer)
    assert torch.equal(state, torch.random.get_rng_state())
