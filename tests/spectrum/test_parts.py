"""A network cut into parts is still the network, and a part's Jacobian is that of what its block adds."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from helpers.registry import MODELS, SMALL
from specguard.errors import ConfigError
from specguard.linalg import jacobian, lower_singular_values
from specguard.nn import Block, Residual, ViT, unfuse_attention
from specguard.spectrum import Part, part_names, parts

BATCH = 2


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def strewn(model: nn.Module) -> nn.Module:
    """Weights and running statistics far from the start of training, where a block is nearly the identity."""
    g = seeded(17)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.running_mean.copy_(torch.randn(layer.running_mean.shape, generator=g))
                layer.running_var.copy_(0.5 + torch.rand(layer.running_var.shape, generator=g))
    return model.double().eval()


def made(name: str) -> tuple[ViT, Tensor]:
    cfg = MODELS[name]
    images = torch.rand(BATCH, cfg.channels, cfg.image, cfg.image, generator=seeded(5), dtype=torch.float64)
    return strewn(ViT(cfg, seeded())), images


@pytest.fixture(scope="module")
def cut() -> Callable[[str], tuple[ViT, Tensor, dict[str, Part]]]:
    """A model of the registry, images, and its parts by name."""

    @cache
    def of(name: str) -> tuple[ViT, Tensor, dict[str, Part]]:
        model, images = made(name)
        return model, images, {part.name: part for part in parts(model, images)}

    return of


def close(found: Tensor, expected: Tensor) -> None:
    size = expected.detach().abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11 * size)


def dense(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Jacobian of every sample, by reverse mode, without the code under test."""
    alone = [jacrev(lambda z: function(z.unsqueeze(0)).squeeze(0))(sample) for sample in x]
    return torch.stack([J.detach().reshape(-1, x[0].numel()) for J in alone])


def holder(model: ViT, name: str) -> nn.Module:
    """The block or branch of a model that a part is named after."""
    return model.get_submodule(name)


def named_blocks(model: ViT) -> list[str]:
    cfg = model.config
    local = [f"local_blocks.{i}" for i in range(cfg.local_blocks)]
    return local + [f"blocks.{i}" for i in range(cfg.depth - cfg.local_blocks)]


# Order and chain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_parts_come_in_order_and_are_of_their_group(name, cut):
    model, _, found = cut(name)
    expected = ["embedding"]
    for block in named_blocks(model):
        expected += [block, f"{block}.attention", f"{block}.mlp"]
    assert list(found) == [*expected, "head", "network"]
    for part in found.values():
        last = part.name.rpartition(".")[2]
        assert part.group == ("block" if last.isdigit() else last)
        assert part.kind == ("residual" if "." in part.name else "map")


@pytest.mark.parametrize("name", MODELS)
def test_every_part_begins_where_the_one_before_it_ends(name, cut):
    model, images, found = cut(name)
    value = found["embedding"].step(images)
    close(found["embedding"].at, images)
    for block in named_blocks(model):
        if block == "blocks.0" and model.config.local_blocks and model.config.pool != "mean":
            value = model.class_token(value)  # joins here, and belongs to no part
        attention, mlp = found[f"{block}.attention"], found[f"{block}.mlp"]
        close(found[block].at, value)
        close(attention.at, value)
        close(mlp.at, attention.step(attention.at))
        value = found[block].step(found[block].at)
        close(mlp.step(mlp.at), value)
    close(found["head"].at, value)
    for last in ("head", "network"):
        close(found[last].step(found[last].at), model(images))


@pytest.mark.parametrize("name", MODELS)
def test_images_meet_a_part_where_the_model_itself_takes_them(name):
    """Seen by hooks on the model as it is, whose attention is fused."""
    model, images = made(name)
    found = {part.name: part for part in parts(model, images)}
    seen: dict[str, Tensor] = {}
    for inner in (n for n in found if "." in n):
        holder(model, inner).register_forward_pre_hook(
            lambda layer, inputs, inner=inner: seen.update({inner: inputs[0]})
        )
    model(images)
    assert seen.keys() == {n for n in found if "." in n}
    for inner, x in seen.items():
        close(found[inner].at, x.detach())


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_before_a_part_takes_images_to_it(name, cut):
    _, images, found = cut(name)
    other = torch.rand(images.shape, generator=seeded(9), dtype=torch.float64)
    for part in found.values():
        close(part.before(images), part.at)
        close(part.step(part.before(images)), part.step(part.at))
        assert not torch.equal(part.before(other), part.at)


# F and I + J_F -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_residual_part_is_what_a_block_adds_and_its_step_is_the_block(name, cut):
    model, _, found = cut(name)
    for part in (p for p in found.values() if p.kind == "residual"):
        layer = holder(unfuse_attention(model), part.name)
        z = torch.randn(part.at.shape, generator=seeded(3), dtype=torch.float64)
        close(part.function(z), layer(z) - z)
        close(part.step(z), layer(z))
        some = part.at[:1]
        J, whole = dense(part.function, some), dense(part.step, some)
        close(whole, torch.eye(J.shape[1]).double() + J)


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_singular_value_of_every_part_is_that_of_its_matrix(name, cut):
    for part in cut(name)[2].values():
        expected = torch.linalg.svdvals(dense(part.function, part.at[1:]))[:, 0]
        J = jacobian(part.function, part.at[1:])
        found = lower_singular_values(J, seeded(), tolerance=1e-5, most=300)
        assert found.converged.all()
        torch.testing.assert_close(found.values[:, 0], expected, rtol=1e-4, atol=0)


def law_sigma_is_of_what_the_layer_adds(part: Part, layer: nn.Module, at: Tensor) -> None:
    """Both singular values, F's and the step's, against the layer itself and where the model meets it."""
    close(part.at, at)
    whole = dense(layer, at)
    for function, matrix in ((part.function, whole - torch.eye(whole.shape[1]).double()), (part.step, whole)):
        found = lower_singular_values(jacobian(function, part.at), seeded(), tolerance=1e-5, most=300)
        torch.testing.assert_close(found.values[:, 0], torch.linalg.svdvals(matrix)[:, 0], rtol=1e-4, atol=0)


PLANTED: dict[str, Callable[[Part, dict[str, Part]], Part]] = {
    "I + J_F as J_F": lambda part, _: replace(part, function=part.step),
    "J_F as I + J_F": lambda part, _: replace(part, kind="map"),
    "at the next block": lambda part, found: replace(part, at=found["blocks.1"].at),
    "attention alone": lambda part, found: replace(part, function=found["blocks.0.attention"].function),
    "the mlp where the block begins": lambda part, found: replace(part, function=found["blocks.0.mlp"].function),
    "the sum of both branches": lambda part, found: replace(
        part, function=lambda z: found["blocks.0.attention"].function(z) + found["blocks.0.mlp"].function(z)
    ),
    "a branch without its scale": lambda part, _: replace(part, function=lambda z: 2 * part.function(z)),
}


@pytest.mark.parametrize("wrong", PLANTED)
def test_a_planted_confusion_of_what_is_looked_at_is_caught(wrong, cut):
    model, _, found = cut("scaled residuals")
    part, layer = found["blocks.0"], unfuse_attention(model).blocks[0]
    law_sigma_is_of_what_the_layer_adds(part, layer, part.at)
    with pytest.raises(AssertionError):
        law_sigma_is_of_what_the_layer_adds(PLANTED[wrong](part, found), layer, part.at)


# What may not change -----------------------------------------------------------------------------------------


def state(model: nn.Module) -> list[object]:
    """All that looking may not change, as values that compare."""
    tensors = [(n, t.clone().numpy().tobytes()) for n, t in model.state_dict().items()]
    modes = [(n, layer.training) for n, layer in model.named_modules()]
    grads = [(n, None if p.grad is None else p.grad.tolist(), p.requires_grad) for n, p in model.named_parameters()]
    return [tensors, modes, grads]


@pytest.mark.parametrize("name", ["norm=batchnorm", "norm=layernorm", "pool=class local=1", "spectral norm"])
def test_a_model_in_training_is_looked_at_in_eval_mode_and_not_changed(name):
    model, images = made(name if name in MODELS else "norm=layernorm")
    if name == "spectral norm":
        torch.nn.utils.parametrizations.spectral_norm(model.blocks[0].mlp.branch.inner.expand)
    expected = {part.name: part.step(part.at) for part in parts(model.eval(), images)}
    model.train()
    model.blocks[0].eval()  # a mode of its own
    model.head.bias.grad = torch.full_like(model.head.bias, 7)
    model.head.weight.requires_grad_(False)
    before, pixels = state(model), images.clone()
    for part in parts(model, images):
        assert torch.is_grad_enabled()
        close(part.step(part.at), expected[part.name])
        lower_singular_values(jacobian(part.function, part.at), seeded(), most=3)
    part_names(model, "block")
    assert state(model) == before
    assert torch.equal(images, pixels)


def test_a_walk_through_the_parts_may_end_early():
    model, images = made("norm=layernorm")
    for part in parts(model, images):
        if part.name == "blocks.0":
            break
    assert torch.is_grad_enabled()


def test_a_part_of_one_image_is_that_image_s_row_of_the_batch(cut):
    model, images, found = cut("norm=batchnorm")
    for part in parts(model, images[1:]):
        close(part.at, found[part.name].at[1:])


# Names -------------------------------------------------------------------------------------------------------

BLOCKS = [f"blocks.{i}{branch}" for i in (0, 1) for branch in ("", ".attention", ".mlp")]
NAMED = {
    "all": ["embedding", *BLOCKS, "head", "network"],
    "block": ["blocks.0", "blocks.1"],
    "attention": ["blocks.0.attention", "blocks.1.attention"],
    "mlp": ["blocks.0.mlp", "blocks.1.mlp"],
    "head": ["head"],
    "blocks.1": ["blocks.1"],
    "blocks.1.mlp": ["blocks.1.mlp"],
    "head,embedding": ["embedding", "head"],  # in the network's order, whatever was asked
    " network , blocks.0 ,block,block": ["blocks.0", "blocks.1", "network"],
    "mlp,all": ["embedding", *BLOCKS, "head", "network"],
}


@pytest.mark.parametrize("wanted", NAMED)
def test_parts_are_named_by_all_by_group_by_name_and_in_lists(wanted):
    assert list(part_names(made("norm=layernorm")[0], wanted)) == NAMED[wanted]


@pytest.mark.parametrize("name", MODELS)
def test_without_a_wish_all_parts_are_named(name, cut):
    model, _, found = cut(name)
    assert part_names(model) == tuple(found)


def test_the_names_of_a_local_model_have_both_kinds_of_blocks(cut):
    assert part_names(cut("pool=class local=1")[0], "block") == ("local_blocks.0", "blocks.0")
    assert part_names(cut("pool=mean local=2")[0], "block") == ("local_blocks.0", "local_blocks.1")


@pytest.mark.parametrize(
    "wanted", ["", " ", ",", "blocks", "blocks.2", "blocks.-1", "blocks.00", "ALL", "head,", "all,tail", "residual"]
)
def test_an_unknown_part_is_refused_with_one_sentence(wanted):
    with pytest.raises(ConfigError) as caught:
        part_names(made("norm=layernorm")[0], wanted)
    assert "\n" not in str(caught.value)
    assert "embedding, block, attention, mlp, head, network" in str(caught.value)
    assert "embedding to blocks.1.mlp" in str(caught.value)


# Models that are not what they seem --------------------------------------------------------------------------


def with_a_third_branch(model: ViT) -> None:
    model.blocks[0].add_module("extra", Residual(nn.Linear(SMALL.dim, SMALL.dim)))


def with_a_layer_between_blocks(model: ViT) -> None:
    model.blocks.insert(1, nn.Linear(SMALL.dim, SMALL.dim))


def with_branches_in_another_order(model: ViT) -> None:
    first = model.blocks[0]
    model.blocks[0] = Block(OrderedDict(mlp=first.mlp, attention=first.attention))


@pytest.mark.parametrize("change", [with_a_third_branch, with_a_layer_between_blocks])
def test_a_model_with_more_than_blocks_of_two_branches_is_refused_with_one_sentence(change):
    model, images = made("norm=layernorm")
    change(model)
    with pytest.raises(ConfigError, match="cannot be divided into parts") as caught:
        list(parts(model, images))
    assert "\n" not in str(caught.value)


def test_branches_in_another_order_are_cut_in_theirs():
    model, images = made("norm=layernorm")
    with_branches_in_another_order(model)
    strewn(model)
    found = {part.name: part for part in parts(model, images)}
    close(found["head"].step(found["head"].at), model(images))
    assert list(found)[1:4] == ["blocks.0", "blocks.0.mlp", "blocks.0.attention"]
