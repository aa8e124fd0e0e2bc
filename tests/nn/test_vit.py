"""Laws over every model of the registry, and the facts that presets must keep."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from helpers.registry import MODELS, SMALL
from specguard.errors import ConfigError
from specguard.nn import PRESETS, Attention, ViT, attention_maps, config_from_json, preset, unfuse_attention
from specguard.nn.dot_product import mixed_values


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request, generator) -> ViT:
    torch.manual_seed(0)
    built = ViT(request.param, generator).double()
    with torch.no_grad():
        for p in built.parameters():  # wide weights, so that nothing is accidentally linear or uniform
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return built


@pytest.fixture
def images(model, generator) -> torch.Tensor:
    c = model.config
    return torch.rand(5, c.channels, c.image, c.image, generator=generator, dtype=torch.float64)


def test_logits_are_the_only_return_value_in_train_and_in_eval_mode(model, images):
    for mode in (True, False):
        logits = model.train(mode)(images)
        assert isinstance(logits, torch.Tensor)
        assert logits.shape == (5, model.config.classes)
        assert logits.isfinite().all()


def test_logits_depend_on_every_image_and_on_every_patch_of_it(model, images):
    model.eval()
    x = images.clone().requires_grad_()
    gradient = torch.autograd.grad(model(x).square().sum(), x)[0]
    patches = gradient.unflatten(2, (-1, model.config.patch)).unflatten(4, (-1, model.config.patch))
    assert (patches.abs().amax((1, 3, 5)) > 0).all()


def test_fused_and_explicit_attention_agree_in_value_and_gradient(model, images):
    model.eval()
    weights = torch.linspace(-1, 1, model.config.classes, dtype=images.dtype)
    results = []
    for variant in (model, unfuse_attention(model)):
        x = images.clone().requires_grad_()
        value = (variant(x) * weights).sum()
        results.append((value, torch.autograd.grad(value, x)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_attention_in_bfloat16_on_a_cpu_is_that_of_float32_rounded_once(generator, biased, autocast):
    q, k, v = (3 * torch.randn(2, 3, 5, 7, generator=generator).bfloat16() for _ in range(3))
    bias = torch.randn(1, 3, 5, 5, generator=generator).bfloat16() if biased else None
    exact = mixed_values(*(x.double() for x in (q, k, v)), False, None if bias is None else bias.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = mixed_values(q, k, v, True, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)  # half a unit in the last place


def test_the_explicit_copy_shares_every_weight_and_leaves_the_original_fused(model):
    twin = unfuse_attention(model)
    for (name, p), (_, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert p is q, name
    assert not any(m.fused for m in twin.modules() if hasattr(m, "fused"))
    assert all(m.fused for m in model.modules() if hasattr(m, "fused"))


def test_the_explicit_path_has_forward_mode_and_second_order_derivatives(model, images):
    twin = unfuse_attention(model.eval())
    direction = torch.ones_like(images)
    _, forward = torch.func.jvp(twin, (images,), (direction,))
    x = images.clone().requires_grad_()
    backward = torch.autograd.functional.jvp(twin, x, direction)[1]  # double backward
    torch.testing.assert_close(forward, backward, rtol=1e-9, atol=1e-9)


def test_attention_maps_are_probabilities_one_for_every_layer_and_head(model, images):
    maps = attention_maps(model.eval(), images)
    assert len(maps) == (0 if model.config.kernels else model.config.depth)
    for P in maps:
        assert P.shape[:2] == (5, model.config.heads)
        assert (P >= 0).all()
        torch.testing.assert_close(P.sum(-1), torch.ones_like(P[..., 0]), rtol=1e-12, atol=1e-12)
    assert not any(m._forward_pre_hooks for m in model.modules()), "no hook may stay on the user's model"


def test_the_same_generator_gives_the_same_weights_and_the_global_one_is_not_used_for_them():
    states = []
    for world in (1, 2):
        torch.manual_seed(world)
        states.append(ViT(SMALL, torch.Generator().manual_seed(7)).state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    other = ViT(SMALL, torch.Generator().manual_seed(8)).state_dict()
    assert any((states[0][k] != other[k]).any() for k in other)


def test_a_config_survives_json(subtests):
    for name, config in (MODELS | dict(PRESETS)).items():
        with subtests.test(name):
            assert config_from_json(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch": 4}, "not divisible by patch size 4"),
        ({"heads": 4}, "cannot be divided among 4 heads"),
        ({"kernels": (3,)}, "needs pool 'mean'"),
        ({"kernels": (3, 3), "pool": "mean"}, "cannot be divided among 2 kernels"),
        ({"kernels": (4,), "pool": "mean"}, "must be of odd size, not 4"),
        ({"resize": 7}, "image size 7 is not divisible by patch size 2"),
        ({"resize": 0}, "resize must be at least 1"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"norm": "groupnorm"}, "norm 'groupnorm' is unknown"),
        ({"activation": "swish"}, "activation 'swish' is unknown"),
        ({"pool": "max"}, "pool 'max' is unknown"),
        ({"local_blocks": 2}, "local_blocks must lie between 0 and 1, not 2"),
        ({"local_blocks": 2, "pool": "all"}, "local_blocks must lie between 0 and 1, not 2"),
        ({"kernels": (3,), "pool": "all"}, "needs pool 'mean'"),
        ({"local_blocks": 3, "pool": "mean"}, "local_blocks must lie between 0 and 2, not 3"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
        ({"dim": 60000, "heads": 1, "mlp_ratio": 4.0, "depth": 12}, "too many weights"),
        ({"mean": (0.5,)}, "one value for each of the 2 channels"),
        ({"std": (0.5, 0.0)}, "std be positive"),
        ({"mlp_ratio": 0.0}, "mlp_ratio 0.0"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio must be finite"),
        ({"norm": "layerproject", "attention_radius": -1.0}, "radius must be positive"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        ViT(replace(SMALL, **change))


@pytest.mark.parametrize(
    "record",
    [
        [],
        None,
        {"dim": "21"},
        {"dim": 2.5},
        {"dim": True},
        {"depht": 3},
        {"mean": "0.5"},
        {"mean": [None]},
        {"norm": 3},
        {"norm_after_pool": 1},
    ],
)
def test_a_stored_config_of_the_wrong_type_is_refused(record):
    with pytest.raises(ConfigError):
        config_from_json(record)


def test_an_image_of_another_size_is_refused_with_both_shapes():
    with pytest.raises(ConfigError, match=r"\(2, 6, 6\), not \(2, 8, 6\)"):
        ViT(SMALL)(torch.zeros(1, 2, 8, 6))


def test_an_unknown_preset_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'deit_tiny_patch16_224'"):
        preset("deit_tiny_patch16_242")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vit_small", (768, 8, 8, 3.0)),
        ("vit_base", (768, 12, 12, 4.0)),
        ("deit_tiny", (192, 12, 3, 4.0)),
        ("deit_small", (384, 12, 6, 4.0)),
        ("convit_tiny", (192, 12, 4, 4.0)),
    ],
)
def test_presets_have_the_papers_shapes_at_both_sizes(name, shape):
    for suffix, image, patch in (("patch4_32", 32, 4), ("patch16_224", 224, 16)):
        c = preset(f"{name}_{suffix}")
        assert (c.dim, c.depth, c.heads, c.mlp_ratio) == shape
        assert (c.image, c.patch) == (image, patch)


def test_deit_tiny_at_224_has_as_many_parameters_as_timms():
    with torch.device("meta"):
        model = ViT(preset("deit_tiny_patch16_224"))
    assert sum(p.numel() for p in model.parameters()) == 5_717_416


def test_every_layer_of_a_model_is_of_the_closed_set(model):
    """Rules dispatch on exact types: a type that is not listed here has no rule."""
    containers = {"ViT", "Block", "Sequential", "Residual", "PatchEmbedding", "TokenBatchNorm", "ModuleList"}
    leaves = {
        "Resize", "Normalize", "Conv1d", "Conv2d", "TokenConvolution", "ClassToken", "Positions", "Linear",
        "LayerNorm", "RMSNorm", "BatchNorm1d",
        "LayerProject", "SmoothProject", "Identity", "GELU", "ReLU", "Softplus", "Squareplus", "LayerScale",
        "Attention", "GatedPositionalAttention", "ClassPool", "MeanPool",
    }  # fmt: skip
    assert {type(m).__name__ for m in model.modules()} <= containers | leaves


def test_the_mean_of_all_tokens_includes_the_class_token(generator):
    model = ViT(replace(SMALL, pool="all"), generator).eval()
    X = torch.randn(1, 10, 21, generator=generator)
    assert model.positions.table.shape[1] == 10
    torch.testing.assert_close(model.pool(X), X.sum(1) / 10)


def test_a_norm_behind_pooling_reads_one_vector_per_image(generator):
    config = replace(SMALL, pool="all", norm="batchnorm", norm_after_pool=True)
    model = ViT(config, generator).train()
    assert list(model._modules)[-3:] == ["pool", "norm", "head"]
    seen = []
    model.norm.register_forward_hook(lambda layer, inputs, output: seen.extend([*inputs, output]))
    model(torch.rand(5, 2, 6, 6, generator=generator))
    before, after = seen
    assert before.shape == (5, 21)
    torch.testing.assert_close(after.mean(0), torch.zeros(21), rtol=0, atol=1e-5)


def test_heads_that_do_not_divide_the_dimension_are_refused_by_the_layer_itself():
    with pytest.raises(ConfigError):
        Attention(dim=7, heads=2)


def test_biases_start_at_zero_and_weights_within_two_widths(generator):
    for name, p in ViT(SMALL, generator).named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif p.ndim > 1:
            assert 0 < p.abs().max() <= 2, name
