"""What single layers promise: Lipschitz constants, curvature, exactness at the edges."""

import hashlib
import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from specguard.errors import ConfigError
from specguard.nn import (
    LayerProject,
    LayerScale,
    Normalize,
    Residual,
    Resize,
    SmoothProject,
    Softplus,
    Squareplus,
    TokenBatchNorm,
    TokenConvolution,
    ViT,
    ViTConfig,
    fingerprint,
    materialized,
    weights_fingerprint,
)

PROJECTIONS = [LayerProject(0.7), LayerProject(4.0), SmoothProject(0.7), SmoothProject(4.0)]


def tokens(generator, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("layer", PROJECTIONS, ids=str)
@pytest.mark.parametrize("scale", [1e-8, 0.1, 1.0, 1e8])
def test_a_projection_is_one_lipschitz_and_stays_within_its_radius(layer, scale, generator):
    x, y = tokens(generator, scale), tokens(generator, scale)
    moved = (layer(x) - layer(y)).norm(dim=-1)
    assert (moved <= (x - y).norm(dim=-1) * (1 + 1e-12)).all()
    assert (layer(x).norm(dim=-1) <= layer.radius * (1 + 1e-12)).all()


def test_layer_project_is_exact_inside_its_ball_and_on_the_sphere_outside(generator):
    layer, x = LayerProject(2.0), tokens(generator)
    inside, outside = x / 10, 100 * x
    assert torch.equal(layer(inside), inside)
    torch.testing.assert_close(layer(outside), 2 * x / x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("layer", PROJECTIONS, ids=str)
def test_projections_have_finite_derivatives_of_second_order_at_zero(layer):
    def total(x: torch.Tensor) -> torch.Tensor:
        return layer(x).sum()

    zero = torch.zeros(1, 1, 7, dtype=torch.float64)
    assert torch.func.jacrev(layer)(zero).isfinite().all()
    assert torch.func.hessian(total)(zero).isfinite().all()


def test_softplus_has_no_jump_where_torchs_has_one():
    x = torch.linspace(19.9, 20.1, 2001, dtype=torch.float64)
    exact = x + torch.log1p(torch.exp(-x))
    torch.testing.assert_close(Softplus()(x), exact, rtol=0, atol=1e-14)
    assert (nn.functional.softplus(x) - exact).abs().max() > 1e-10, "torch's own has the jump that is avoided here"


@pytest.mark.parametrize(
    ("layer", "curvature"),
    [(Softplus(1.0), 1 / 4), (Softplus(3.0), 3 / 4), (Squareplus(4.0), 1 / 4), (Squareplus(0.25), 1.0)],
    ids=str,
)
def test_the_second_derivative_of_a_smooth_activation_is_at_most_its_constant_and_attains_it(layer, curvature):
    far = torch.tensor([-1e4, -1e3, -100, 100, 1e3, 1e4], dtype=torch.float64)
    x = torch.cat([torch.linspace(-9, 9, 20001, dtype=torch.float64), far])
    second = torch.func.vmap(torch.func.grad(torch.func.grad(lambda t: layer(t))))(x)
    assert second.isfinite().all()
    assert second.max() <= curvature * (1 + 1e-9)
    assert second.max() >= curvature * (1 - 1e-5)


def test_residual_scales_its_branch_only(generator):
    x = tokens(generator)
    branch = LayerScale(7, 3.0).double()
    torch.testing.assert_close(Residual(branch, 0.5)(x), x + 0.5 * 3 * x)
    torch.testing.assert_close(Residual(branch)(x), x + 3 * x)


def test_batch_norm_is_affine_in_eval_and_normalizes_every_channel_in_training(generator):
    layer, x = TokenBatchNorm(7).double(), 5 + 3 * tokens(generator)
    y = layer(x).flatten(0, 1)
    torch.testing.assert_close(y.mean(0), torch.zeros(7, dtype=y.dtype), atol=1e-12, rtol=0)
    layer.eval()
    a, b = tokens(generator), tokens(generator)
    torch.testing.assert_close(layer((a + b) / 2), (layer(a) + layer(b)) / 2)


def test_normalize_takes_pixels_to_the_models_units():
    layer = Normalize((0.25, 0.5), (0.5, 0.25))
    image = torch.stack([torch.full((3, 4), 0.75), torch.full((3, 4), 0.25)])[None]
    torch.testing.assert_close(layer(image)[0, :, 0, 0], torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("build", [LayerProject, SmoothProject, Softplus, Squareplus])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_constant_that_is_not_positive_is_refused(build, value):
    with pytest.raises(ConfigError):
        build(value)


def parametrized() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    parametrizations.orthogonal(model[0])
    parametrizations.spectral_norm(model[1])
    model(torch.randn(2, 7))
    return model


def test_materialized_has_plain_layers_the_same_outputs_and_leaves_the_original_alone(generator):
    model = parametrized()
    model[0].eval()
    plain = materialized(model)
    assert [type(m) for m in plain] == [nn.Linear, nn.Linear]
    assert [m.training for m in plain] == [False, True]
    assert all(parametrize.is_parametrized(m) for m in model)
    x = torch.randn(11, 7, generator=generator)
    torch.testing.assert_close(plain.eval()(x), model.eval()(x), rtol=0, atol=0)


def test_a_fingerprint_stands_for_the_folded_weights_and_for_nothing_else():
    model = parametrized().eval()
    assert fingerprint(model) == fingerprint(materialized(model))
    changed = materialized(model)
    with torch.no_grad():
        changed[1].bias[2].add_(1e-7)
    assert fingerprint(changed) != fingerprint(model)


@torch.no_grad()
def test_a_convolution_of_tokens_mixes_a_group_of_channels_over_its_own_reach_and_no_further(generator):
    layer = TokenConvolution(6, (1, 5)).double()
    layer.out.weight.copy_(torch.eye(6))
    for p in layer.kernels.parameters():
        p.copy_(torch.randn(p.shape, generator=generator))
    x = torch.randn(2, 9, 6, generator=generator, dtype=torch.float64)
    moved = x.clone()
    moved[:, 4, :] += 1
    change = (layer(moved) - layer(x)).abs() > 1e-12
    reach = {0: range(4, 5), 1: range(2, 7)}
    for group, tokens in reach.items():
        seen = change[:, :, 3 * group : 3 * group + 3].flatten(2).any(2).all(0)
        assert seen.nonzero().flatten().tolist() == list(tokens)
    single = x.clone()
    single[:, 4, :3] += 1
    assert not ((layer(single) - layer(x))[:, :, 3:].abs() > 1e-12).any(), "groups do not mix before the output map"


@torch.no_grad()
def test_a_convolution_of_tokens_is_the_sum_over_neighbors_that_it_says(generator):
    layer = TokenConvolution(7, (3,)).double()
    x = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    W, b = layer.kernels[0].weight, layer.kernels[0].bias
    padded = torch.cat([torch.zeros(2, 1, 7).double(), x, torch.zeros(2, 1, 7).double()], 1)
    by_hand = sum(padded[:, k : k + 5] @ W[:, :, k].T for k in range(3)) + b
    torch.testing.assert_close(layer(x), layer.out(by_hand), rtol=1e-12, atol=1e-12)


def test_resizing_is_linear_keeps_constants_and_stands_before_everything_else(generator):
    layer, x, y = Resize(10), *torch.rand(2, 1, 3, 6, 6, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(layer(2 * x - 3 * y), 2 * layer(x) - 3 * layer(y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(torch.full_like(x, 0.3)), torch.full((1, 3, 10, 10), 0.3).double())
    model = ViT(ViTConfig(image=6, resize=10, patch=5, dim=8, depth=1, heads=2))
    assert isinstance(next(model.children()), Resize)
    assert model(x.float()).shape == (1, 10)


def test_a_field_that_was_added_to_the_config_later_does_not_change_the_hash_of_old_models(generator):
    model = ViT(ViTConfig(image=6, patch=3, dim=8, depth=1, heads=2, pool="mean"), generator)
    added = {"kernels", "resize", "norm_after_pool"}
    assert added <= set(asdict(model.config))
    before = weights_fingerprint(model)
    known = {k: v for k, v in asdict(model.config).items() if k not in added}
    old = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        old.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        old.update(tensor.numpy().tobytes())
    assert before == old.hexdigest()
    model.config = replace(model.config, resize=9)
    assert fingerprint(model) != before
