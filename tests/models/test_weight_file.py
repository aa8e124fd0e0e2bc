"""Files of weights: what one says about itself is believed only where it is true, and names tell the rest."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specguard.errors import CheckpointError, ConfigError, RunError, SpecGuardError
from specguard.models import ModelSource, WeightFile, model_of_file, read_weight_file
from specguard.models.recognize import recognize
from specguard.nn import CERTIFIABLE, PRESETS, ViT, ViTConfig, fingerprint, materialized, preset
from specguard.nn.vit import config_from_json
from specguard.records.base import encode
from specguard.records.export import ExportRecord
from specguard.records.store import tensor_bytes

TINY = ViTConfig(image=8, patch=4, channels=1, dim=8, depth=1, heads=2, mean=(0.3,), std=(0.4,))
MODEL = ViT(TINY, torch.Generator().manual_seed(0)).eval()


def config() -> dict:
    return json.loads(json.dumps(TINY.__dict__))


def written(path, **changes):
    record = {
        "layout": "state_dict",
        "version": "0",
        "fingerprint": fingerprint(MODEL),
        "classes": [],
        "config": config(),
    } | changes
    path.write_bytes(tensor_bytes(MODEL.state_dict(), json.dumps(record).encode()))
    return path


def test_a_file_that_says_what_it_is_is_that_model(tmp_path):
    file = read_weight_file(written(tmp_path / "w.safetensors"))
    assert config_from_json(file.record.config) == TINY
    assert fingerprint(model_of_file(file)) == fingerprint(MODEL)
    assert fingerprint(model_of_file(file, config())) == fingerprint(MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "0" * 64}, "of another function"),
        ({"config": {**config(), "activation": "relu"}}, "of another function"),
        ({"config": {**config(), "dim": 2**16, "heads": 1}}, "of another architecture"),
        ({"config": {**config(), "depth": 10**9}}, "depth must be"),
        ({"config": {"source": {"kind": "function", "name": "os:system"}}}, "invalid classes|models come from"),
        ({"config": {"source": None}}, "does not say how its network is made"),
        ({"config": None}, "does not say of which architecture"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, changes, message):
    with pytest.raises(SpecGuardError, match=message):
        model_of_file(read_weight_file(written(tmp_path / "w.safetensors", **changes)))


@pytest.mark.parametrize("note", [b"", b"[]", b"{", b'{"layout": "x"}', b"[" * 5000, b'"\\ud800"'])
def test_a_malformed_note_is_one_sentence(tmp_path, note):
    path = tmp_path / "w.safetensors"
    path.write_bytes(tensor_bytes(MODEL.state_dict(), note))
    with pytest.raises(CheckpointError, match="malformed about itself"):
        read_weight_file(path)


def test_a_file_without_a_note_needs_an_architecture(tmp_path):
    torch.save(MODEL.state_dict(), tmp_path / "w.pt")
    file = read_weight_file(tmp_path / "w.pt")
    assert file.record is None
    with pytest.raises(RunError, match="does not say of which architecture"):
        model_of_file(file)
    assert fingerprint(model_of_file(file, config())) == fingerprint(MODEL)


def test_a_record_of_export_is_read_as_it_was_written(tmp_path):
    record = ExportRecord(layout="state_dict", version="1", fingerprint="c0", classes=("a",), config={"dim": 8})
    (tmp_path / "w.safetensors").write_bytes(tensor_bytes({"a": torch.zeros(1)}, encode(record)))
    assert read_weight_file(tmp_path / "w.safetensors").record == record


@pytest.mark.parametrize("name", ["tiny", "tiny_smooth", "certifiable_digits"])
def test_presets_are_recognized_by_their_sizes(name):
    model = ViT(preset(name)) if name in PRESETS else materialized(CERTIFIABLE[name].fresh(0))
    assert recognize(model.state_dict()).options == name


def test_models_of_libraries_are_recognized_with_the_arguments_that_make_them_again(timm, tmp_path):
    three = (0.5, 0.5, 0.5)
    small = {"patch_size": 4, "hidden_dim": 64, "num_heads": 1, "mlp_dim": 96, "num_layers": 1}
    for kind, name, image, arguments in (
        ("timm", "vit_small_patch16_224", 32, {"patch_size": 8, "depth": 2}),
        ("timm", "deit_tiny_distilled_patch16_224", 32, {"depth": 1}),
        ("timm", "vit_tiny_patch16_224", 8, {"patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3}),
        ("torchvision", "vit_b_16", 8, small),
    ):
        theirs = ModelSource(kind, name, 10, 3, image, three, three, arguments=arguments).original()
        save_file(theirs.state_dict(), tmp_path / "w.safetensors")
        found = recognize(read_weight_file(tmp_path / "w.safetensors").tensors)
        assert (found.name, found.image) == (f"{kind}:{name}", image)
        again = ModelSource(kind, name, 10, 3, image, three, three, arguments=found.arguments)
        again.loaded(tmp_path / "w.safetensors")
        assert bool(found.open_question) == ("embed_dim" in arguments or "hidden_dim" in arguments)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"patch_embed.proj.weight": torch.zeros(0, 3, 2, 2), "blocks.0.attn.qkv.weight": torch.zeros(1)},
        {"conv_proj.weight": torch.zeros(0, 1, 1, 1), "encoder.layers.x": torch.zeros(1)},
        {"patches.map.weight": torch.zeros(0, 0, 0, 0), "normalise.mean": torch.zeros(0)},
        {"pos_embed": torch.zeros(1), "cls_token": torch.zeros(())},
    ],
)
def test_odd_weights_are_recognized_as_something_or_nothing(tensors):
    found = recognize(tensors)
    assert found is None or found.options


def test_another_architecture_than_the_library_has_is_one_sentence():
    with pytest.raises(ConfigError, match="dim"):
        model_of_file(WeightFile(Path("w"), {"a": torch.zeros(1)}), {"dim": -1})
