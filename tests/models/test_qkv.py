"""The q, k, v and o of attention are found in the models of other libraries as they are."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from models.architectures import eva, named, vit
from specguard import nn as own
from specguard.errors import ConfigError
from specguard.models import attention_weights, convert, from_timm
from specguard.nn import AttentionWeights, ViT, ViTConfig
from specguard.penalties import MSVP, SpectralNorm

DIM, HEADS, DEPTH = 24, 3, 2
SIZES = {"hidden_size": DIM, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}


def huggingface(family, task, **options):
    def make(transformers):
        config = getattr(transformers, f"{family}Config")(**options)
        return getattr(transformers, f"{family}For{task}Classification")(config)

    return make


TIMM = {
    "timm": (vit(), "blocks.1.attn", ("qkv", "proj")),
    "timm's qk norm": (vit(qk_norm=True), "blocks.1.attn", ("qkv", "proj")),
    "timm's eva": (eva(), "blocks.1.attn", ("qkv", "proj")),
    "timm's eva, separate": (eva(qkv_fused=False), "blocks.1.attn", ("q_proj", "k_proj", "v_proj", "proj")),
    "timm's beit": (named("beit_base_patch16_224"), "blocks.1.attn", ("qkv", "proj")),
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NAMES = ("self.query", "self.key", "self.value", "output.dense")
HF = {
    "vit": (
        huggingface("ViT", "Image", image_size=20, patch_size=5, **SIZES),
        "vit.layers.1.attention",
        PROJECTIONS,
    ),
    "dinov2": (
        huggingface("Dinov2", "Image", image_size=20, patch_size=5, **SIZES),
        "dinov2.encoder.layer.1.attention",
        PROJECTIONS,
    ),
    "bert": (huggingface("Bert", "Sequence", vocab_size=9, **SIZES), "bert.encoder.layer.1.attention", NAMES),
    "roberta": (
        huggingface("Roberta", "Sequence", vocab_size=9, **SIZES),
        "roberta.encoder.layer.1.attention",
        NAMES,
    ),
    "distilbert": (
        huggingface("DistilBert", "Sequence", vocab_size=9, dim=DIM, n_layers=DEPTH, n_heads=HEADS, hidden_dim=31),
        "distilbert.transformer.layer.1.attention",
        ("q_lin", "k_lin", "v_lin", "out_lin"),
    ),
}


def heads_taken_by_hand(model, layer, names):
    """The weights of every head of q, k, v and o of one layer, by slices of the named modules."""
    *inputs, output = (model.get_submodule(f"{layer}.{name}").weight for name in names)
    q, k, v = (inputs[0][i * DIM : (i + 1) * DIM] for i in range(3)) if len(inputs) == 1 else inputs
    size = DIM // HEADS
    blocks = [slice(h * size, (h + 1) * size) for h in range(HEADS)]
    rows = {which: [W[block] for block in blocks] for which, W in zip("qkv", (q, k, v), strict=True)}
    return rows | {"o": [output[:, block] for block in blocks]}


def check(model, layer, names):
    found = attention_weights(model)
    assert len(found) == DEPTH
    assert found[1].layer == layer
    assert found[1].heads == HEADS
    for which, expected in heads_taken_by_hand(model, layer, names).items():
        per_head = found[1].per_head(which)
        assert len(per_head) == HEADS
        for mine, wanted in zip(per_head, expected, strict=True):
            torch.testing.assert_close(torch.linalg.svdvals(mine), torch.linalg.svdvals(wanted))
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("name", TIMM)
def test_heads_are_those_of_timms_layers(name, timm, randomized):
    make, layer, names = TIMM[name]
    check(randomized(make(timm)), layer, names)


@pytest.mark.parametrize("name", HF)
def test_heads_are_those_of_transformers_layers(name, transformers, randomized):
    make, layer, names = HF[name]
    check(randomized(make(transformers)), layer, names)


def test_heads_are_those_of_torchvisions_layers(torchvision, randomized):
    model = randomized(torchvision.models.VisionTransformer(20, 5, DEPTH, HEADS, DIM, 31, num_classes=7))
    found = attention_weights(model)
    assert [w.layer for w in found] == [f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(DEPTH)]
    theirs = model.encoder.layers[1].self_attention
    assert found[1].rows[0][1] is theirs.in_proj_weight
    assert torch.equal(found[1].per_head("v")[2], theirs.in_proj_weight[64:72])
    assert torch.equal(found[1].per_head("o")[1], theirs.out_proj.weight[:, 8:16])
    with pytest.raises(ConfigError, match="inputs of different sizes"):
        attention_weights(nn.MultiheadAttention(DIM, HEADS, kdim=5, vdim=7))


def test_a_converted_model_has_the_weights_of_its_original(timm, randomized):
    for options in ({}, {"qk_norm": True, "scale_attn_norm": True}):
        model = randomized(vit(**options)(timm))
        network = convert(model, mean=(0.5,) * 3, std=(0.5,) * 3)
        pairs = list(zip(attention_weights(network), attention_weights(model), strict=True))
        assert [ours.layer for ours, _ in pairs] == [f"blocks.{i}.attention.branch.inner" for i in range(DEPTH)]
        for ours, theirs in pairs:
            assert ours.heads == theirs.heads
            assert all(torch.equal(ours.matrix(which), theirs.matrix(which)) for which in "qkvo")


def test_a_model_of_our_own_is_read_as_ever():
    model = ViT(ViTConfig(image=8, dim=24, depth=2, local_blocks=1))
    ours, known = attention_weights(model), own.attention_weights(model)
    assert [w.layer for w in ours] == [w.layer for w in known]
    assert all(a.o is b.o and a.rows[0][1] is b.rows[0][1] for a, b in zip(ours, known, strict=True))


def test_attention_pooling_is_attention_too(timm):
    model = vit(global_pool="map")(timm)
    pool = attention_weights(model)[-1]
    assert pool.layer == "attn_pool"
    assert torch.equal(pool.matrix("q"), model.attn_pool.q.weight)
    assert torch.equal(torch.cat([pool.matrix("k"), pool.matrix("v")]), model.attn_pool.kv.weight)


@pytest.mark.parametrize("name", [*TIMM, *HF])
def test_a_penalty_on_an_original_is_that_of_its_heads_and_its_gradients_reach_them(
    name, timm, transformers, randomized, generator
):
    make, layer, names = (TIMM | HF)[name]
    model = randomized(make(timm if name in TIMM else transformers))
    penalty = MSVP(q=2.0, k=3.0, v=5.0, o=7.0)
    value, _ = penalty(model, penalty.start(model, generator))
    value.backward()
    layers = [layer.replace(".1.", f".{i}.") for i in range(DEPTH)]
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {f"{place}.{part}.weight" for place in layers for part in names}
    expected = sum(
        getattr(penalty, which) * torch.linalg.svdvals(W)[0] ** 2
        for place in layers
        for which, heads in heads_taken_by_hand(model, place, names).items()
        for W in heads
    )
    torch.testing.assert_close(value, expected, rtol=1e-3, atol=0)


def test_the_spectral_penalty_sees_all_maps_of_torchs_attention(torchvision, generator):
    model = torchvision.models.VisionTransformer(20, 5, DEPTH, HEADS, DIM, 31, num_classes=7)
    penalty = SpectralNorm(1.0)
    value, _ = penalty(model, penalty.start(model, generator))
    weights = [p.flatten(1) for n, p in model.named_parameters() if n.endswith("weight") and p.ndim > 1]
    expected = sum(torch.linalg.svdvals(W)[0] ** 2 for W in weights)
    torch.testing.assert_close(value, expected, rtol=1e-2, atol=0)


def test_matrices_need_not_be_of_one_size():
    q, k, v, o = (torch.randn(shape) for shape in ((6, 5), (6, 5), (8, 5), (5, 8)))
    weights = AttentionWeights("any", 2, (("q", q), ("k", k), ("v", v)), o)
    assert weights.per_head("v").shape == (2, 4, 5)
    assert weights.per_head("o").shape == (2, 5, 4)
    assert torch.equal(weights.matrix("k"), k)


def test_parametrized_weights_are_found_and_pass_gradients_on(timm):
    model = vit()(timm)
    parametrizations.weight_norm(model.blocks[0].attn.qkv)
    attention_weights(model)[0].matrix("q").sum().backward()
    assert model.blocks[0].attn.qkv.parametrizations.weight.original1.grad.any()


def test_unknown_attention_is_an_error_and_other_models_have_none(timm):
    assert attention_weights(nn.Sequential(nn.Linear(3, 3), nn.ReLU())) == ()
    with pytest.raises(ConfigError, match=r"^blocks\.0\.attn is a \S+DiffAttention, an attention layer whose"):
        attention_weights(vit(attn_layer="diff")(timm))
    with pytest.raises(ConfigError, match="share keys and values"):
        attention_weights(eva(attn_type="rope", num_kv_heads=1, qkv_fused=False)(timm))


def test_a_subclass_of_attention_is_an_error(timm):
    model = vit()(timm)
    kind = type(model.blocks[1].attn)
    model.blocks[1].attn.__class__ = type("QuietAttention", (kind,), {})
    with pytest.raises(ConfigError, match=r"^blocks\.1\.attn is a \S+QuietAttention"):
        attention_weights(model)
    with pytest.raises(ConfigError, match=r"^blocks\.1\.attn is a \S+QuietAttention"):
        from_timm(model, mean=(0.5,) * 3, std=(0.5,) * 3)
