"""Where a network comes from goes to disk and back, and a stranger's file can do no harm."""

import json
import shutil

import pytest
import torch

from specguard.data import digits
from specguard.errors import CheckpointError, ConfigError, RunError
from specguard.models import ModelSource, from_run, untrained
from specguard.models.source import source_from_json
from specguard.nn import Resize, fingerprint
from specguard.penalties import MSVP
from specguard.records import io, store
from specguard.train import Training, train

SOURCE = ModelSource("timm", "test_vit", 10, 1, 32, (0.3,), (0.4,), pixels=8)
CONFIG = {
    "model_type": "vit",
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 31,
    "num_channels": 1,
}
FOLDER = ModelSource("hf", "vit", 10, 1, 8, (0.5,), (0.5,), config=CONFIG)


def test_an_origin_is_read_back_from_json_as_it_was():
    for source in (SOURCE, FOLDER):
        assert source_from_json(json.loads(json.dumps(source.record()))) == source


HOSTILE = {
    "a list": ([], "a JSON object"),
    "unknown field": (SOURCE.record() | {"code": "x"}, "unknown field 'code'"),
    "another library": (SOURCE.record() | {"kind": "pickle"}, "not from 'pickle'"),
    "no name": (SOURCE.record() | {"name": None}, "an invalid name"),
    "text as number": (SOURCE.record() | {"classes": "10"}, "an invalid classes"),
    "truth as number": (SOURCE.record() | {"image": True}, "an invalid image"),
    "endless images": (SOURCE.record() | {"image": 10**9}, "image must be at least 1"),
    "no channels": (SOURCE.record() | {"channels": 0}, "channels must be at least 1"),
    "other channels": (SOURCE.record() | {"channels": 3}, "each of the 3 channels"),
    "statistics that are no numbers": (SOURCE.record() | {"mean": ["x"]}, "an invalid mean"),
    "statistics that are not finite": (SOURCE.record() | {"std": [float("nan")]}, "must be finite"),
    "a config that is none": (SOURCE.record() | {"config": 3}, "an invalid config"),
    "a config where none belongs": (SOURCE.record() | {"config": {}}, "for a model of transformers, and only then"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_spoilt_origin_is_refused_by_name(case):
    record, message = HOSTILE[case]
    with pytest.raises(ConfigError, match=message):
        source_from_json(record)


def test_a_fresh_network_is_the_same_for_the_same_seed_and_the_global_generator_is_left_alone(timm):
    before = torch.get_rng_state()
    one, same, other = (SOURCE.fresh(seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
    assert one.shape == (1, 8, 8)
    assert type(one[0]) is Resize
    assert one.source == SOURCE.record()
    assert SOURCE.weights() == sum(p.numel() for p in SOURCE.original().parameters())


@pytest.fixture(scope="module")
def finished(timm, tmp_path_factory):
    """A run of one step, with weights that are not the first ones."""
    place = tmp_path_factory.mktemp("finished") / "run"
    training = Training(epochs=1, batch=1437, penalties=(MSVP(),))
    network = SOURCE.fresh(store.derived_seed(training.seed, "weights"))
    train(network, digits(), place, training, device=torch.device("cpu"))
    return place


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def changed(run, file, **changes):
    record = io.read_json(run / file)
    part = record["config" if file == "model.json" else "model"]
    part["source"] = None if changes == {"source": None} else part["source"] | changes
    io.write_json(run / file, record)


def test_a_run_is_read_back_with_its_weights_its_origin_and_its_beginning(run):
    network, begun = from_run(run), untrained(run)
    assert fingerprint(network) == io.read_json(run / "result.json")["fingerprint"]
    assert fingerprint(begun) == fingerprint(SOURCE.fresh(store.derived_seed(0, "weights")))
    assert fingerprint(begun) != fingerprint(network)
    assert source_from_json(network.source) == SOURCE
    assert not network.training


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"source": None}, RunError, "does not say how its network is made"),
        ({"name": "nope"}, ConfigError, "no architecture 'nope'"),
        ({"name": "hf-hub:someone/something"}, ConfigError, "no architecture 'hf-hub"),
        ({"name": "vit_giant_patch14_dinov2"}, CheckpointError, "vit_giant_patch14_dinov2 has 1,"),
        ({"name": "test_vit2"}, CheckpointError, "of another architecture"),
        ({"classes": 11}, CheckpointError, r"'head.bias' has shape \(10,\), not \(11,\)"),
        ({"pixels": 16}, CheckpointError, "does not match the fingerprint"),
    ],
)
def test_a_run_that_says_something_else_is_refused(run, changes, error, message):
    changed(run, "model.json", **changes)
    with pytest.raises(error, match=message):
        from_run(run)


def test_a_run_whose_two_files_differ_is_refused(run):
    changed(run, "run.json", name="test_vit2")
    with pytest.raises(RunError, match="of different models"):
        untrained(run)


def test_transformers_models_are_made_from_their_config_alone(timm):
    one, same = FOLDER.fresh(0), FOLDER.fresh(0)
    assert fingerprint(one) == fingerprint(same)
    assert one.shape == (1, 8, 8)
    assert FOLDER.weights() == sum(p.numel() for p in FOLDER.original().parameters())
    for changes, message in (
        ({"model_type": "bert"}, "a bert of transformers is no classifier of images"),
        ({"model_type": "nothing"}, "no kind of model 'nothing'"),
        ({"num_hidden_layers": "many"}, "cannot make a vit of this config"),
        ({"hidden_act": "no such"}, "cannot make this model"),
        ({"quantization_config": {}}, "quantized"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            ModelSource("hf", "vit", 10, 1, 8, (0.5,), (0.5,), config=CONFIG | changes).fresh(0)
        assert "\n" not in str(caught.value)


def test_torchvisions_models_are_made_by_name(timm):
    three = (0.5, 0.5, 0.5)
    with pytest.raises(ConfigError, match="torchvision has no architecture 'vit_x'"):
        ModelSource("torchvision", "vit_x", 10, 3, 224, three, three).fresh(0)
    with pytest.raises(ConfigError, match="images of 3 channels, not of 1"):
        ModelSource("torchvision", "vit_b_16", 10, 1, 224, (0.5,), (0.5,))
    assert ModelSource("torchvision", "vit_b_16", 1000, 3, 224, three, three).weights() == 86_567_656
