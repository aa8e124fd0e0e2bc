"""Models of the zoo are the functions on their cards, and nothing else is loaded under their names."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specguard.data import digits
from specguard.errors import CheckpointError, ConfigError
from specguard.models import from_zoo
from specguard.nn import matches_fingerprint
from specguard.records import zoo
from specguard.records.zoo import zoo_card, zoo_folder, zoo_names


@pytest.mark.parametrize("name", zoo_names())
def test_a_model_of_the_zoo_is_the_function_on_its_card(name, request):
    card = zoo_card(name)
    if card.needs is not None:
        request.getfixturevalue("timm")
    model = from_zoo(f"zoo:{name}")
    assert matches_fingerprint(model, card.fingerprint)
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == card.parameters
    assert (zoo_folder(name) / "model.safetensors").stat().st_size == card.bytes


def test_the_digits_model_has_the_clean_accuracy_of_its_card():
    model, data, card = from_zoo("digits-certified"), digits(), zoo_card("digits-certified")
    images, labels = data.test.batch(slice(0, None))
    with torch.no_grad():
        correct = int((model(images).argmax(1) == labels).sum())
    assert (correct, len(labels)) == (card.clean.count, card.clean.n)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A zoo that may be spoiled."""
    shutil.copytree(zoo_folder("digits-certified"), tmp_path / "digits-certified")
    monkeypatch.setattr(zoo, "_FOLDER", tmp_path)
    return tmp_path / "digits-certified"


def test_other_weights_under_a_name_of_the_zoo_are_refused(copied):
    from_zoo("digits-certified")
    tensors = load_file(copied / "model.safetensors")
    save_file(tensors | {"head.bias": tensors["head.bias"] + 1e-3}, copied / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not match the fingerprint"):
        from_zoo("digits-certified")


def test_a_model_that_is_not_the_one_of_its_card_is_refused(copied):
    card = json.loads((copied / "card.json").read_text())
    (copied / "card.json").write_text(json.dumps(card | {"fingerprint": "0" * 64}))
    with pytest.raises(CheckpointError, match="does not hold the model of its card"):
        from_zoo("digits-certified")


def test_a_name_that_is_nearly_right_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"the zoo has no 'cifar-certified', .*did you mean 'cifar10-certified'"):
        from_zoo("cifar-certified")
    with pytest.raises(ConfigError, match=r"the zoo has no '\.\./zoo/digits-certified'"):
        from_zoo("../zoo/digits-certified")
