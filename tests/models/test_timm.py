"""timm's models become networks of this package's layers, and stay the same function."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from models.architectures import KNOWN, REFUSED, SMALL, vit
from specguard.errors import ConfigError
from specguard.models import check_equal, convert, from_timm
from specguard.nn import Attention, Block, Network

COLOURS = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}


def colors(model):
    """A mean and std for a model's channels: not those of its config, and different for each."""
    channels = model.patch_embed.proj.in_channels
    return {name: values[:channels] for name, values in COLOURS.items()}


def normalized(images, mean, std):
    one, two = (torch.tensor(v).to(images).view(-1, 1, 1) for v in (mean, std))
    return (images - one) / two


@pytest.mark.parametrize("name", KNOWN)
def test_a_converted_model_gives_timms_logits(name, timm, randomized, generator):
    model = randomized(KNOWN[name](timm)).double()
    given = colors(model)
    network = from_timm(model, **given)
    assert isinstance(network, Network)
    assert not network.training
    assert all(type(block) is Block for block in network.blocks)
    assert all(torch.is_tensor(t) and not t.is_meta for t in network.state_dict().values())
    images = torch.rand(3, *network.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        theirs, ours = model(normalized(images, **given)), network(images)
    assert ours.shape == (3, network.classes) == (3, SMALL["num_classes"])
    assert theirs.std() > 1e-3  # they say something
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_path_and_type(name, timm):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        from_timm(make(timm), **COLOURS)
    assert "\n" not in str(caught.value)


def test_the_layers_have_the_names_of_this_package(timm):
    network = from_timm(KNOWN["vit"](timm))
    names = ["normalise", "patches", "class_token", "positions", "blocks", "norm", "pool", "head"]
    assert [name for name, _ in network.named_children()] == names
    assert type(network.blocks[1].attention.branch.inner) is Attention
    normed = from_timm(vit(qk_norm=True, scale_attn_norm=True)(timm), **COLOURS)
    inner = normed.blocks[0].attention.branch.inner
    assert [name for name, _ in inner.named_children()] == ["qkv", "norm", "core", "inner_norm", "out"]


def test_mean_and_std_are_those_of_the_models_config(timm):
    model = KNOWN["deit"](timm)
    network = from_timm(model)
    assert network.config.name == "deit_small_patch16_224"
    assert tuple(network.normalise.mean.flatten().tolist()) == pytest.approx(model.pretrained_cfg["mean"])
    assert tuple(network.normalise.std.flatten().tolist()) == pytest.approx(model.pretrained_cfg["std"])


def test_a_model_that_does_not_say_how_it_normalizes_is_refused(timm):
    with pytest.raises(ConfigError, match="give mean and std"):
        from_timm(vit()(timm))
    with pytest.raises(ConfigError, match="each of the model's 1 channels"):
        from_timm(vit(in_chans=1)(timm), **COLOURS)


def test_the_original_is_left_as_it_was(timm, randomized):
    model = randomized(KNOWN["dropout"](timm)).train()
    model.blocks[0].eval()
    modes = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    network = from_timm(model, **COLOURS)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_parametrized_layers_are_converted_as_plain_ones(timm, randomized):
    model = randomized(vit()(timm))
    parametrizations.spectral_norm(model.blocks[1].attn.qkv)
    network = from_timm(model.eval(), **COLOURS)
    assert not any(parametrize.is_parametrized(layer) for layer in network.modules())
    weight = network.blocks[1].attention.branch.inner.qkv.weight
    torch.testing.assert_close(weight, model.blocks[1].attn.qkv.weight)
    assert torch.linalg.matrix_norm(weight, 2) < 1.1


@pytest.mark.parametrize(
    ("spoil", "place"),
    [
        (lambda n: n.patches.map.weight, r"'patches\.map', which is 'patch_embed\.proj' of the original"),
        (lambda n: n.class_token.token, r"the input of 'blocks', which is 'blocks\.0' of the original"),
        (lambda n: n.positions.table, "the input of 'blocks'"),
        (lambda n: n.blocks[0].attention.branch.norm.weight, r"'blocks\.0\.attention\.branch\.inner'"),
        (lambda n: n.blocks[0].attention.branch.scale.scale, r"'blocks\.0\.mlp\.branch\.inner'"),
        (lambda n: n.blocks[1].attention.branch.inner.qkv.bias, r"'blocks\.1\.attention\.branch\.inner'"),
        (lambda n: n.blocks[1].mlp.branch.inner.contract.weight, r"'blocks\.1\.mlp\.branch\.inner'"),
        (lambda n: n.blocks[1].mlp.branch.scale.scale, r"'blocks\.1', which is 'blocks\.1' of the original"),
        (lambda n: n.norm.bias, "'norm', which is 'norm' of the original"),
        (lambda n: n.head.weight, "the logits"),
    ],
)
def test_a_spoiled_conversion_is_caught_and_the_module_named(spoil, place, timm, randomized):
    model = randomized(vit(init_values=0.5)(timm))
    network = from_timm(model, **COLOURS)
    check_equal(model, network)
    with torch.no_grad():
        spoil(network).view(-1)[3].add_(1e-5)
    with pytest.raises(ConfigError, match=f"differs from its original at {place}"):
        check_equal(model, network)


def test_another_function_with_the_same_weights_is_caught(timm, randomized):
    model = randomized(vit()(timm))
    network = from_timm(model, **COLOURS)
    network.blocks[1].attention.branch.inner.heads = 4
    with pytest.raises(ConfigError, match=r"blocks\.1\.attention"):
        check_equal(model, network)
    model.blocks[0].mlp.act.forward = lambda x: 2 * nn.functional.gelu(x)
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp"):
        from_timm(model, **COLOURS)


def test_a_subclass_is_not_taken_for_its_parent(timm):
    class Louder(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = vit()(timm)
    model.blocks[1].attn.proj = Louder(24, 24)
    with pytest.raises(ConfigError, match=r"^blocks\.1\.attn\.proj is a \S+Louder"):
        from_timm(model, **COLOURS)
    kind = type("Other", (type(model),), {})
    model.__class__ = kind
    with pytest.raises(ConfigError, match="Other, which cannot be converted; add a conversion"):
        convert(model, **COLOURS)


class Blocks(nn.Sequential):
    """Does what its parent does, but for images that no check is likely to draw."""

    def forward(self, x):
        return super().forward(x if x.abs().max() < 1e3 else 2 * x)


def test_a_list_of_blocks_that_is_a_subclass_is_refused_though_its_layers_are_known(timm):
    model = vit()(timm)
    model.blocks = Blocks(*model.blocks)
    with pytest.raises(ConfigError, match=r"^blocks is a \S+Blocks, which is of no library that is known here"):
        from_timm(model, **COLOURS)


def test_a_module_that_was_put_in_is_refused(timm):
    model = vit()(timm)
    model.blocks[0].drop_path1 = nn.Tanh()
    with pytest.raises(ConfigError, match=r"^blocks\.0\.drop_path1 is a \S+Tanh"):
        from_timm(model, **COLOURS)


def test_weights_without_numbers_are_refused_by_name(timm):
    model = vit()(timm)
    with pytest.raises(ConfigError, match=r"cls_token is on the meta device"):
        from_timm(copy.deepcopy(model).to("meta"), **COLOURS)
    with torch.no_grad():
        model.blocks[0].norm1.bias[2] = torch.nan
    with pytest.raises(ConfigError, match=r"blocks\.0\.norm1\.bias holds entries that are not finite"):
        from_timm(model, **COLOURS)


def test_resized_positions_are_converted_as_timm_has_resized_them(timm, randomized):
    model = randomized(vit()(timm))
    model.set_input_size(img_size=(30, 30))
    network = from_timm(model, **COLOURS)
    assert network.shape == (3, 30, 30)
    assert network.positions.table.shape == (1, 37, 24)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_has_the_type_of_its_original(dtype, timm, randomized):
    network = from_timm(randomized(KNOWN["dinov2 with registers"](timm)).to(dtype))
    assert {t.dtype for t in network.state_dict().values()} == {dtype}


def test_only_combined_weights_are_rounded(timm, randomized):
    model = randomized(KNOWN["deit distilled"](timm))
    network = from_timm(model)
    assert torch.equal(network.head.weight, torch.cat([model.head.weight, model.head_dist.weight], 1) / 2)
    check_equal(model, network, tolerance=1e-6)
    check_equal(model.double(), from_timm(model))
