"""Weights that nearly fit: for other classes, for no classes, and for images of another size."""

import pytest
import torch
from safetensors.torch import save_file

from models.architectures import SMALL, eva, named, vit
from specguard.errors import CheckpointError
from specguard.models import convert
from specguard.models.load import Fitted, load_into

HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


@pytest.fixture
def saved(tmp_path):
    def save(model, *without):
        tensors = {k: v for k, v in model.state_dict().items() if not k.startswith(without or ("none",))}
        save_file(tensors, tmp_path / "w.safetensors")
        return tmp_path / "w.safetensors"

    return save


TABLES = {  # how a model is made, and for how many tokens in front of the patches its table has rows
    "class token": (vit, 1),
    "registers with positions": (lambda **o: vit(reg_tokens=2, **o), 3),
    "registers without": (lambda **o: vit(reg_tokens=2, no_embed_class=True, **o), 0),
    "distilled": (lambda **o: named("deit_tiny_distilled_patch16_224", **o), 2),
    "eva": (lambda **o: eva(num_reg_tokens=1, **o), 2),
}


@pytest.mark.parametrize("size", [10, 35])
@pytest.mark.parametrize("name", TABLES)
def test_positions_for_another_image_size_are_resized_as_timm_does(name, size, timm, randomized, saved):
    make, tokens = TABLES[name]
    model, other = randomized(make()(timm)), make(img_size=size)(timm)
    with pytest.raises(CheckpointError, match=rf"images of size 20, not {size}: pos_embed says so; positions are"):
        load_into(other, saved(model))
    assert load_into(other, saved(model), resize=True) == Fitted(sizes=(20, size))
    edge = size // SMALL["patch_size"]
    wanted = timm.layers.resample_abs_pos_embed(model.pos_embed.detach(), [edge, edge], [4, 4], tokens)
    assert torch.equal(other.pos_embed, wanted)
    assert torch.equal(other.pos_embed[:, :tokens], model.pos_embed[:, :tokens])
    assert torch.equal(other.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)
    assert convert(other, **HALF).shape == (3, size, size)
    assert load_into(other, saved(other), resize=True) == Fitted()


def test_positions_for_another_image_size_are_resized_as_torchvision_does(torchvision, randomized, saved):
    def make(size):
        return torchvision.models.VisionTransformer(size, 5, 1, 3, 24, 31, num_classes=7)

    model, other = randomized(make(20)), make(35)
    path = saved(model)
    with pytest.raises(CheckpointError, match=r"size 20, not 35: encoder\.pos_embedding says so"):
        load_into(other, path)
    assert load_into(other, path, resize=True) == Fitted(sizes=(20, 35))
    module = torchvision.models.vision_transformer
    wanted = module.interpolate_embeddings(35, 5, model.state_dict())["encoder.pos_embedding"]
    assert torch.equal(other.encoder.pos_embedding, wanted)


def test_positions_that_are_of_no_square_are_not_resized(timm, saved):
    for options in ({"img_size": (20, 15)}, {"embed_dim": 48}):
        with pytest.raises(CheckpointError, match=r"'[a-z_.0-9]+' has shape"):
            load_into(vit()(timm), saved(vit(**options)(timm)), resize=True)


@pytest.mark.parametrize("make", [named("vit_tiny_patch16_224"), named("deit_tiny_distilled_patch16_224")])
def test_a_head_for_other_classes_or_none_is_new_where_that_is_allowed(make, timm, randomized, saved):
    model, more = randomized(make(timm)), randomized(make(timm))
    more.reset_classifier(11)
    for given, without, said in (
        (model, ("head",), r"holds the weights of no head: 'head\S*\.weight' is missing"),
        (more, (), "a model with 11 classes, not 7"),
    ):
        path, mine = saved(given, *without), randomized(make(timm))
        before = mine.head.weight.clone()
        with pytest.raises(CheckpointError, match=said):
            load_into(mine, path)
        assert load_into(mine, path, new_head=True) == Fitted(new_head=True)
        assert torch.equal(mine.head.weight, before)
        assert torch.equal(mine.norm.weight, given.norm.weight)
    with pytest.raises(CheckpointError, match=r"lacks 'blocks\.1"):
        load_into(make(timm), saved(model, "head", "blocks.1"), new_head=True)
    with pytest.raises(CheckpointError, match=r"lacks 'head\.bias'"):
        load_into(make(timm), saved(model, "head.bias"), new_head=True)


def test_a_model_without_positions_or_of_another_kind_is_loaded_as_it_is(timm, randomized, saved):
    for make in (vit(pos_embed="none"), lambda timm: timm.create_model("resnet10t", num_classes=7)):
        model = randomized(make(timm))
        other = make(timm)
        assert load_into(other, saved(model), resize=True) == Fitted()
        assert all(torch.equal(other.state_dict()[k], v) for k, v in model.state_dict().items())


def test_weights_of_another_patch_or_depth_say_what_they_look_like(timm, saved):
    """A table of other patches is also one of another image size, which alone would mislead."""
    path = saved(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2))
    looks = "look like those of timm:vit_tiny_patch16_224 --model-arg patch_size=4,depth=2 --image-size 32"
    for other in ({}, {"img_size": 32, "patch_size": 4, "depth": 1}):
        with pytest.raises(CheckpointError, match=looks):
            load_into(timm.create_model("vit_tiny_patch16_224", **other), path)
