"""MSVP equals the sum of squared largest singular values, with the right gradient, in every way it is used."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.registry import MODELS, SMALL
from specguard.errors import ConfigError
from specguard.nn import Attention, ViT, ViTConfig
from specguard.penalties import MSVP, SingularValuePenalty, SpectralNorm

STRENGTHS = {"q": 2.0, "k": 3.0, "v": 5.0, "o": 7.0}
FULL = {f"per_head={p}": MSVP(**STRENGTHS, per_head=p) for p in (True, False)}
ATTENTIVE = {name: config for name, config in MODELS.items() if not config.kernels}


def built(config: ViTConfig = SMALL, seed: int = 0) -> ViT:
    """A model whose weights are wide and of distinct scales."""
    model = ViT(config, torch.Generator().manual_seed(seed))
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g))
            p.mul_(torch.logspace(-1, 1, len(p)).view(-1, *[1] * (p.ndim - 1)))  # no two heads alike
    return model


def value(penalty: SingularValuePenalty, model: nn.Module, seed: int = 0) -> torch.Tensor:
    return penalty(model, penalty.start(model, torch.Generator().manual_seed(seed)))[0]


def by_svd(penalty: MSVP, model: ViT) -> torch.Tensor:
    """The slow, independent path: cut the weight matrices by hand and take SVDs in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in model.modules():
        if not hasattr(layer, "qkv"):
            continue
        dim, size = layer.out.in_features, layer.out.in_features // layer.heads
        matrices = {n: layer.qkv.weight[i * dim : (i + 1) * dim] for i, n in enumerate("qkv")}
        matrices["o"] = layer.out.weight
        for name, W in matrices.items():
            blocks = [W]
            if penalty.per_head and name == "o":
                blocks = [W[:, i : i + size] for i in range(0, dim, size)]
            elif penalty.per_head:
                blocks = [W[i : i + size] for i in range(0, dim, size)]
            total = total + getattr(penalty, name) * sum(torch.linalg.svdvals(b.double())[0] ** 2 for b in blocks)
    return total


def heads_on_the_input_axis(penalty: MSVP, model: ViT) -> torch.Tensor:
    """The released SpecFormer code: 'heads' are blocks of input columns, so no head is penalized."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in model.modules():
        if hasattr(layer, "qkv"):
            for name, W in zip("qkv", layer.qkv.weight.chunk(3), strict=True):
                blocks = W.double().chunk(layer.heads, dim=1)
                total = total + getattr(penalty, name) * sum(torch.linalg.svdvals(b)[0] ** 2 for b in blocks)
    return total


def agrees_with_svd(compute: Callable[[MSVP, ViT], torch.Tensor], penalty: MSVP, model: ViT) -> bool:
    exact = by_svd(penalty, model)
    return bool((compute(penalty, model).double() - exact).abs() <= 0.02 * exact)


@pytest.mark.parametrize("penalty", FULL.values(), ids=FULL.keys())
@pytest.mark.parametrize("config", ATTENTIVE.values(), ids=ATTENTIVE.keys())
def test_the_first_value_is_within_one_per_cent_of_the_svd(penalty, config):
    model = built(config)
    exact = by_svd(penalty, model)
    first = value(penalty, model).double()
    assert 0.99 * exact <= first <= exact * (1 + 1e-5)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), heads=st.sampled_from([1, 3, 7]), per_head=st.booleans())
def test_the_value_is_the_sum_of_squared_svd_norms_for_any_weights(seed, heads, per_head):
    penalty = MSVP(**STRENGTHS, per_head=per_head)
    model = built(replace(SMALL, heads=heads), seed % 10_000)
    assert agrees_with_svd(value, penalty, model)


def test_the_released_codes_axis_error_is_caught():
    penalty = MSVP(q=1.0, k=1.0, v=1.0)
    assert agrees_with_svd(value, penalty, built())
    assert not agrees_with_svd(heads_on_the_input_axis, penalty, built())


@pytest.mark.parametrize(("which", "head"), list(product("qkvo", range(3))))
def test_one_head_scaled_by_five_is_seen_and_only_that_head(which, head):
    model = built()
    single = MSVP(**{n: float(n == which) for n in "qkvo"})
    before = by_svd(single, model)
    layer = model.blocks[1].attention.branch.inner
    size = SMALL.dim // SMALL.heads
    with torch.no_grad():
        if which == "o":
            block = layer.out.weight[:, head * size : (head + 1) * size]
        else:
            start = "qkv".index(which) * SMALL.dim + head * size
            block = layer.qkv.weight[start : start + size]
        own = torch.linalg.svdvals(block.double())[0] ** 2
        block.mul_(5)
    torch.testing.assert_close(value(single, model).double(), before + 24 * own, rtol=0.02, atol=0)
    others = MSVP(**{n: float(n != which) for n in "qkvo"})
    torch.testing.assert_close(value(others, model).double(), by_svd(others, built()), rtol=0.02, atol=0)


@pytest.mark.parametrize("penalty", FULL.values(), ids=FULL.keys())
def test_the_gradient_is_two_strength_sigma_u_v(penalty):
    model = built().double()
    vectors = penalty.start(model, torch.Generator().manual_seed(0))
    for _ in range(60):
        total, vectors = penalty(model, vectors)
    total.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    by_svd(penalty, model).backward()
    exact = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == exact.keys()
    for name in exact:
        torch.testing.assert_close(found[name], exact[name], rtol=1e-6, atol=1e-8)


def test_without_strength_it_is_zero_has_no_gradient_and_needs_no_vectors():
    penalty, model = MSVP(0.0, 0.0, 0.0), built()
    vectors = penalty.start(model, torch.Generator())
    total, following = penalty(model, vectors)
    assert total == 0
    assert not total.requires_grad
    assert vectors == following == ()


def test_a_matrix_without_strength_is_left_alone():
    model = built()
    value(MSVP(q=1.0, k=0.0, v=0.0), model).backward()
    gradient = model.blocks[0].attention.branch.inner.qkv.weight.grad
    assert gradient[: SMALL.dim].any()
    assert not gradient[SMALL.dim :].any()


def test_several_forwards_before_one_backward_and_accumulation_give_the_sum():
    penalty, model = FULL["per_head=True"], built()
    vectors = penalty.start(model, torch.Generator().manual_seed(0))
    for _ in range(200):
        vectors = penalty(model, vectors)[1]
    once = torch.autograd.grad(penalty(model, vectors)[0], model.blocks[0].attention.branch.inner.qkv.weight)[0]
    first, vectors = penalty(model, vectors)
    second, vectors = penalty(model, vectors)
    (first + second).backward()
    third, _ = penalty(model, vectors)
    third.backward()
    gradient = model.blocks[0].attention.branch.inner.qkv.weight.grad
    torch.testing.assert_close(gradient, 3 * once, rtol=1e-4, atol=1e-5)


def test_autocast_changes_nothing():
    penalty, model = FULL["per_head=True"], built()
    plain = value(penalty, model)
    with torch.autocast("cpu", torch.bfloat16):
        assert value(penalty, model) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_precisions_are_penalized_in_at_least_float32(dtype):
    penalty, model = FULL["per_head=True"], built().to(dtype)
    total = value(penalty, model)
    assert total.dtype in (torch.float32, torch.float64)
    total.backward()
    assert model.blocks[0].attention.branch.inner.qkv.weight.grad.dtype == dtype
    torch.testing.assert_close(total.double(), by_svd(penalty, model), rtol=0.02, atol=0)


def test_frozen_weights_count_but_get_no_gradient():
    penalty, model = MSVP(1.0, 1.0, 1.0), built()
    whole = value(penalty, model).detach()
    frozen = model.blocks[0].requires_grad_(False)
    total = value(penalty, model)
    torch.testing.assert_close(total.detach(), whole)
    total.backward()
    assert frozen.attention.branch.inner.qkv.weight.grad is None
    assert model.blocks[1].attention.branch.inner.qkv.weight.grad.any()
    assert not value(penalty, model.requires_grad_(False)).requires_grad


@pytest.mark.parametrize("column", [None, 0, 20])
def test_a_zero_matrix_is_seen_again_once_it_is_no_longer_zero(column):
    penalty, model = MSVP(1.0, 1.0, 1.0), built()
    layer = model.blocks[0].attention.branch.inner.qkv
    kept = layer.weight.detach().clone()
    if column is not None:  # everything in one column, wherever it is
        kept = torch.zeros_like(kept).index_fill(1, torch.tensor(column), 10.0)
    with torch.no_grad():
        layer.weight.zero_()
    vectors = penalty.start(model, torch.Generator().manual_seed(0))
    total, vectors = penalty(model, vectors)
    total.backward()
    assert layer.weight.grad.isfinite().all()
    with torch.no_grad():
        layer.weight.copy_(kept)
    for _ in range(100):
        total, vectors = penalty(model, vectors)
    torch.testing.assert_close(total.double(), by_svd(penalty, model), rtol=0.02, atol=0)


COMPILED = """
import torch
from helpers.registry import SMALL
from specguard.nn import ViT
from specguard.penalties import MSVP

model = ViT(SMALL, torch.Generator().manual_seed(0))
penalty = MSVP(2.0, 3.0, 5.0, 7.0)
compiled = torch.compile(penalty.__call__, fullgraph=True, backend="aot_eager")
eager_vectors = compiled_vectors = penalty.start(model, torch.Generator().manual_seed(0))
weight = model.blocks[0].attention.branch.inner.qkv.weight
for _ in range(3):
    eager_value, eager_vectors = penalty(model, eager_vectors)
    compiled_value, compiled_vectors = compiled(model, compiled_vectors)
    assert not any(v.requires_grad for v in (*eager_vectors, *compiled_vectors))
    torch.testing.assert_close(compiled_value, eager_value)
    gradients = torch.autograd.grad(compiled_value, weight), torch.autograd.grad(eager_value, weight)
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        weight -= 0.01 * gradients[1][0]
"""


@pytest.mark.slow
def test_it_compiles_without_a_graph_break_to_the_same_values_and_gradients_step_after_step():
    """In a process of its own: torch.compile cannot trace the tests' type checker. Graphs and gradients do not
    depend on the backend; tests/train/test_compile.py compares the penalty that the default one computes.
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_second_derivative_is_refused_not_silently_wrong():
    penalty, model = MSVP(), built()
    weight = model.blocks[0].attention.branch.inner.qkv.weight
    with pytest.raises(RuntimeError, match="first order only"):
        torch.autograd.grad(value(penalty, model), weight, create_graph=True)


def test_an_attention_layer_with_a_parametrized_gate_is_still_penalized():
    model = built(replace(SMALL, local_blocks=1))
    exact = by_svd(MSVP(), model)
    nn.utils.parametrize.register_parametrization(
        model.local_blocks[0].attention.branch.inner, "gate", nn.Identity()
    )
    torch.testing.assert_close(value(MSVP(), model).double(), exact, rtol=0.01, atol=0)


class Doubled(Attention):
    """A subclass: whatever it does, its parent's weights do not tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_subclass_of_attention_is_refused_by_name():
    with pytest.raises(ConfigError, match="Doubled"):
        value(MSVP(), nn.Sequential(nn.Linear(21, 21), Doubled(21, 3)))


def test_a_compiled_model_is_penalized_like_the_model_itself():
    penalty, model = FULL["per_head=True"], built()
    assert value(penalty, torch.compile(model)) == value(penalty, model)


def test_the_spectral_penalty_is_the_sum_over_all_linear_maps():
    model = built()
    exact = sum(
        torch.linalg.svdvals(layer.weight.double().flatten(1))[0] ** 2
        for layer in model.modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    )
    torch.testing.assert_close(value(SpectralNorm(3.0), model).double(), 3 * exact, rtol=0.02, atol=0)


def test_the_vectors_of_another_model_are_refused():
    penalty = MSVP()
    vectors = penalty.start(built(), torch.Generator())
    with pytest.raises(ConfigError, match="another model"):
        penalty(built(replace(SMALL, heads=7)), vectors)


@pytest.mark.parametrize("strength", [-1e-4, float("nan"), float("inf")])
def test_a_strength_that_makes_no_sense_is_refused(strength):
    with pytest.raises(ConfigError):
        MSVP(q=strength)
    with pytest.raises(ConfigError):
        SpectralNorm(strength)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ConfigError, match="attention"):
        value(MSVP(), nn.Linear(3, 5))
    assert value(MSVP(), nn.Sequential(Attention(21, 3))) > 0


@pytest.mark.gpu
def test_on_the_gpu_it_gives_the_same_value():
    penalty, model = FULL["per_head=True"], built()
    vectors = tuple(v.cuda() for v in penalty.start(model, torch.Generator().manual_seed(0)))
    on_cpu = value(penalty, model)
    torch.testing.assert_close(penalty(model.cuda(), vectors)[0].cpu(), on_cpu)
