"""The weights of a converted network go back under timm's names, and are those of the original."""

import pytest
import torch

from models.architectures import KNOWN, eva, vit
from models.test_timm import colors
from specguard.errors import ConfigError
from specguard.models import check_equal, from_timm, timm_weights

ROUNDED = {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}  # a mean of both is all that is kept


def drawn_again(network, generator):
    """The network with other weights, as training leaves them."""
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    return network


def placed(network, model):
    """The network, without what training has given biases for which timm's architecture has no place."""
    with torch.no_grad():
        for theirs, block in zip(model.blocks, network.blocks, strict=True):
            inner = block.attention.branch.inner
            if theirs.attn.proj.bias is None and inner.out.bias is not None:
                inner.out.bias.zero_()
            if hasattr(inner, "norm") and getattr(theirs.attn.q_norm, "bias", None) is None:
                inner.norm.shift.zero_()
    return network


@pytest.mark.parametrize("name", KNOWN)
def test_the_state_dict_is_that_of_the_original(name, timm, randomized):
    model = randomized(KNOWN[name](timm))
    state = timm_weights(from_timm(model, **colors(model)), KNOWN[name](timm))
    wanted = model.state_dict()
    assert list(state) == list(wanted)
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)  # as files need it
    for key in state.keys() - (ROUNDED if hasattr(model, "head_dist") else set()):
        assert torch.equal(state[key], wanted[key]), key


@pytest.mark.parametrize("name", KNOWN)
def test_trained_weights_give_timms_model_the_same_logits(name, timm, randomized, generator):
    model = randomized(KNOWN[name](timm)).double()
    network = placed(drawn_again(from_timm(model, **colors(model)), generator), model)
    fresh = KNOWN[name](timm).double().eval()
    fresh.load_state_dict(timm_weights(network, fresh), strict=True)
    check_equal(fresh, network)
    with pytest.raises(ConfigError, match="differs from its original"):
        check_equal(model, network)


def test_the_model_of_timm_may_have_no_weights_yet(timm):
    model = KNOWN["vit"](timm)
    with torch.device("meta"):
        empty = KNOWN["vit"](timm)
    state = timm_weights(from_timm(model), empty)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


REFUSED = {
    "a bias of the output": (
        vit(qkv_bias=False, proj_bias=False),
        lambda n: n.blocks[1].attention.branch.inner.out.bias,
        r"has changed blocks\.1\.attn\.proj\.bias, which is always zero",
    ),
    "a shift of normalized queries": (
        vit(qk_norm=True, norm_layer="rmsnorm"),
        lambda n: n.blocks[0].attention.branch.inner.norm.shift,
        r"has changed blocks\.0\.attn\.q_norm\.bias",
    ),
    **{
        f"a bias of keys that are normalized, {name}": (
            eva(qk_norm=True, qkv_fused=name == "k_bias"),
            lambda n: n.blocks[0].attention.branch.inner.qkv.bias,
            rf"has changed blocks\.0\.attn\.{name}",
        )
        for name in ("k_bias", "k_proj.bias")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_weight_without_a_place_is_refused_by_name(case, timm, randomized):
    make, spoil, message = REFUSED[case]
    model = randomized(make(timm))
    network = from_timm(model, **colors(model))
    timm_weights(network, model)
    with torch.no_grad():
        spoil(network).add_(0.5)
    with pytest.raises(ConfigError, match=message):
        timm_weights(network, model)


OTHERS = {
    "no class token": vit(class_token=False, global_pool="avg", fc_norm=False),
    "no positions": vit(pos_embed="none"),
    "another depth": vit(depth=3),
    "another width": vit(embed_dim=48),
    "another norm": vit(init_values=0.5),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_model_of_another_structure_is_refused(case, timm):
    ours, theirs = vit()(timm), OTHERS[case](timm)
    for network, model in ((ours, theirs), (theirs, ours)):
        with pytest.raises(ConfigError, match="not of the structure of timm's model") as caught:
            timm_weights(from_timm(network, **colors(network)), model)
        assert "\n" not in str(caught.value)
