"""Arguments of constructors: what they change, and that a stranger's can neither take memory nor run code."""

import json
import time

import pytest
import torch

from specguard.errors import CheckpointError, ConfigError
from specguard.models import ModelSource, timm_model
from specguard.models.pretrained import huggingface_config
from specguard.models.run import stored_model
from specguard.models.source import source_from_json
from specguard.nn import fingerprint

HALF = (0.5, 0.5, 0.5)
SIZES = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
SOURCE = ModelSource("timm", "vit_tiny_patch16_224", 10, 3, 8, HALF, HALF, arguments=SIZES)
PLAIN = ModelSource("timm", "test_vit", 10, 3, 32, HALF, HALF)


def test_a_source_with_arguments_goes_to_json_and_back_and_makes_what_create_model_makes(timm):
    again = source_from_json(json.loads(json.dumps(SOURCE.record())))
    assert again == SOURCE
    one, same = SOURCE.fresh(3), again.fresh(3)
    assert fingerprint(one) == fingerprint(same)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        theirs = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=8, in_chans=3, **SIZES)
    assert torch.equal(theirs.pos_embed, SOURCE.fresh(3).positions.table)
    assert SOURCE.weights() == sum(parameter.numel() for parameter in theirs.parameters())


def test_a_record_without_arguments_is_as_it_was(timm):
    assert "arguments" not in PLAIN.record()
    assert fingerprint(PLAIN.fresh(0)) == fingerprint(ModelSource(**{**PLAIN.record(), "arguments": {}}).fresh(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "an invalid arguments"),
        ("depth=1", "an invalid arguments"),
        ({"depth": 10**9}, "'depth' of the model must be at most 1024"),
        ({"depth": 10**400}, "a number of more than 64 bits"),
        ({"embed_dim": 2**17}, "'embed_dim' of the model must be at most 65536"),
        ({"mlp_ratio": float("nan")}, "must be finite"),
        ({"mlp_ratio": 1e300}, "must be at most"),
        ({"patch_size": [[4]]}, "a number, a text or a list"),
        ({"patch_size": {"a": 1}}, "a number, a text or a list"),
        ({"patch_size": [4] * 33}, "more than 32 entries"),
        ({"act_layer": "x" * 65}, "a short text"),
        ({"act_layer": "re\nlu"}, "a short text"),
        ({"de pth": 1}, "cannot be named"),
        ({"\x00": 1}, "cannot be named"),
        ({f"a{i}": 1 for i in range(33)}, "at most 32 arguments"),
        ({"pretrained": True}, "weights are read from a local file"),
        ({"checkpoint_path": "/etc/passwd"}, "weights are read from a local file"),
        ({"device": "cuda"}, "on the CPU"),
    ],
)
def test_arguments_of_a_stranger_are_refused_before_a_library_sees_them(arguments, message):
    with pytest.raises(ConfigError, match=message):
        source_from_json(PLAIN.record() | {"arguments": arguments})


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit_tiny_patch16_224", {"depht": 1}, "did you mean 'depth'"),
        ("vit_tiny_patch16_224", {"pretrained_cfg": "x"}, "takes no argument 'pretrained_cfg'"),
        (
            "vit_tiny_patch16_224",
            {"depth": 1, "embed_dim": 49152, "mlp_ratio": 9e3},
            "weights with these arguments",
        ),
        (
            "vit_tiny_patch16_224",
            {"depth": 0, "embed_dim": 49152, "patch_size": 1, "pos_embed": "none", "num_heads": 1},
            "tokens of 49,152 numbers",
        ),
        ("resnet10t", {"depth": 1}, "only vision transformers do"),
        ("vit_tiny_patch16_224", {"norm_layer": "os.system"}, "cannot make"),
        ("vit_tiny_patch16_224", {"num_heads": 0}, "cannot make"),
    ],
)
def test_a_model_that_is_none_is_refused_without_its_memory(timm, name, arguments, message):
    source, begun = ModelSource("timm", name, 10, 3, 64, HALF, HALF, arguments=arguments), time.process_time()
    with pytest.raises(ConfigError, match=message):
        source.fresh(0)
    assert time.process_time() - begun < 60


def test_weights_that_are_far_smaller_than_the_arguments_say_are_refused(timm, tmp_path):
    tensors = {name: tensor.clone() for name, tensor in SOURCE.fresh(0).state_dict().items()}
    large = SOURCE.record() | {"arguments": SIZES | {"embed_dim": 3072}}
    with pytest.raises(CheckpointError, match="vit_tiny_patch16_224 has"):
        stored_model({"source": large}, tensors, tmp_path / "w", tmp_path / "m")
    other = SOURCE.record() | {"arguments": SIZES | {"num_heads": 2}}
    assert stored_model({"source": other}, tensors, tmp_path / "w", tmp_path / "m").classes == 10


def test_torchvisions_transformers_take_other_sizes(timm):
    sizes = {"patch_size": 4, "num_layers": 2, "hidden_dim": 24, "mlp_dim": 31, "num_heads": 3}
    network = ModelSource("torchvision", "vit_b_16", 10, 3, 8, HALF, HALF, arguments=sizes).fresh(0)
    assert (len(network.blocks), network.shape) == (2, (3, 8, 8))
    for changed, message in (({"num_layer": 1}, "did you mean 'num_layers'"), ({"patch_size": 5}, "cannot make")):
        with pytest.raises(ConfigError, match=message):
            ModelSource("torchvision", "vit_b_16", 10, 3, 8, HALF, HALF, arguments=changed).fresh(0)
    with pytest.raises(ConfigError, match="did you mean 'vit_b_16'"):
        ModelSource("torchvision", "vit_b16", 10, 3, 8, HALF, HALF).fresh(0)


def test_entries_of_a_config_of_transformers_are_replaced(timm, tmp_path):
    config = {"model_type": "vit", "image_size": 8, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 3}))
    assert huggingface_config(tmp_path, {"num_hidden_layers": 1})["num_hidden_layers"] == 1
    with pytest.raises(ConfigError, match="did you mean 'num_hidden_layers'"):
        huggingface_config(tmp_path, {"num_hidden_layer": 1})
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(ConfigError, match="num_hidden_layers of the model must be at most 1024"):
        huggingface_config(tmp_path)


def test_a_model_of_timm_is_made_with_arguments_from_python(timm):
    model = timm_model("vit_tiny_patch16_224", image=8, arguments=SIZES)
    assert len(model.blocks) == 2
    with pytest.raises(ConfigError, match="takes no argument"):
        timm_model("vit_tiny_patch16_224", arguments={"depths": 1})
