"""Folders of transformers in every form that they have, and in some that they must not have."""

import importlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specguard.errors import CheckpointError, ConfigError
from specguard.models import check_equal
from specguard.models.pretrained import huggingface_config, load_folder

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 31}
IMAGE = {"image_size": 20, "patch_size": 5, "num_labels": 7}


@pytest.fixture
def model(transformers, randomized):
    return randomized(transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, **IMAGE)))


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def loaded(folder, classes=7, **options):
    return load_folder(folder, huggingface_config(folder), classes, **options)


def bare(folder, name):
    """A folder beside this one, with the same config and no weights."""
    (folder.parent / name).mkdir()
    shutil.copy(folder / "config.json", folder.parent / name)
    return folder.parent / name


def same(found, model):
    return all(torch.equal(found.state_dict()[k], v) for k, v in model.state_dict().items())


def test_the_names_of_weights_are_those_of_transformers_4_or_5(folder, model):
    names = load_file(folder / "model.safetensors").keys()
    assert "vit.encoder.layer.0.attention.attention.query.weight" in names  # written as 4 wrote it
    assert same(loaded(folder)[0], model)
    assert "vit.layers.0.attention.q_proj.weight" in model.state_dict()
    newer = bare(folder, "newer")
    save_file(model.state_dict(), newer / "model.safetensors")
    assert same(loaded(newer)[0], model)


def test_weights_may_be_torchs_or_in_parts(folder, model):
    torchs = bare(folder, "torchs")
    torch.save(load_file(folder / "model.safetensors"), torchs / "pytorch_model.bin")
    assert same(loaded(torchs)[0], model)
    parts = folder.parent / "parts"
    model.save_pretrained(parts, max_shard_size="10KB")
    assert not (parts / "model.safetensors").exists()
    assert same(loaded(parts)[0], model)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    for changes, said in (
        ({"weight_map": {}}, "does not say in which files"),
        ({"weight_map": {"a": 3}}, "does not say in which files"),
        ({"weight_map": index["weight_map"] | {"a": "../plain/model.safetensors"}}, "is no file beside it"),
        ({"weight_map": index["weight_map"] | {"a": "/etc/passwd"}}, "is no file beside it"),
        ({"weight_map": index["weight_map"] | {"a": "none.safetensors"}}, "does not exist"),
        ({"weight_map": index["weight_map"] | {"a": next(iter(index["weight_map"].values()))}}, "lists 'a'"),
    ):
        (parts / "model.safetensors.index.json").write_text(json.dumps(index | changes))
        with pytest.raises(CheckpointError, match=said):
            loaded(parts)


def test_weights_keep_the_type_that_they_are_stored_in_whatever_the_config_says(folder, model):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16", "torch_dtype": "bfloat16"}))
    assert same(loaded(folder)[0], model)


def test_a_model_without_a_head_begins_training_with_a_new_one(transformers, randomized, tmp_path):
    body = randomized(transformers.ViTModel(transformers.ViTConfig(**SIZES, **IMAGE)))
    body.save_pretrained(tmp_path)  # with a pooler, which a classifier does not have
    with pytest.raises(CheckpointError, match="holds the weights of no head"):
        loaded(tmp_path)
    found, new = loaded(tmp_path, 5, new_head=True)
    assert new
    assert found.classifier.out_features == 5
    assert torch.equal(found.vit.layernorm.weight, body.layernorm.weight)


def test_other_classes_need_a_new_head(folder, model):
    with pytest.raises(CheckpointError, match="a model with 7 classes, not 5"):
        loaded(folder, 5)
    found, new = loaded(folder, 5, new_head=True)
    assert new
    assert found.classifier.out_features == 5
    assert torch.equal(found.vit.layernorm.weight, model.vit.layernorm.weight)
    assert not loaded(folder, 7, new_head=True)[1]


def test_a_folder_of_a_distilled_model_is_the_class_that_its_config_names(transformers, randomized, tmp_path):
    model = randomized(
        transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**SIZES, **IMAGE))
    )
    model.save_pretrained(tmp_path)
    found, _ = loaded(tmp_path)
    assert type(found) is type(model)
    check_equal(found, importlib.import_module("specguard.models").convert(model), tolerance=1e-6)


def test_what_a_torchvision_that_does_not_fit_does_to_transformers_is_said(folder, monkeypatch):
    pretrained = importlib.import_module("specguard.models.pretrained")

    def broken(transformers):
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'ViT'. Are this object's ...") from error

    monkeypatch.setattr(pretrained, "_auto", broken)
    with pytest.raises(ConfigError, match=r"a torchvision that does not fit this torch: operator torchvision::nms"):
        loaded(folder)
