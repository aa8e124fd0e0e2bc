"""The model of a finished run is trained further, from exactly where it ended."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parametrize

from specguard.data import Data, Dataset, digits
from specguard.errors import CheckpointError, RunError
from specguard.models import ModelSource, from_run, untrained, warm_start
from specguard.models.warm_start import begun_model
from specguard.nn import (
    CertifiableConfig,
    ViT,
    certifiable,
    fingerprint,
    lipschitz_constant,
    materialized,
    preset,
    weights_fingerprint,
)
from specguard.records import io, store
from specguard.records.training import Origin, TrainingSettings
from specguard.train import AdamW, Training, train

CPU = torch.device("cpu")
FEW = Training(epochs=1, batch=40, optimizer=AdamW(lr=1e-2))
SOURCE = ModelSource("timm", "test_vit", 10, 1, 32, (0.3,), (0.4,), pixels=8)
SMALL = {"image": 8, "patch": 4, "channels": 1, "dim": 8, "depth": 1, "heads": 2, "mean": (0.3,), "std": (1.0,)}


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")


def some_digits():
    full = digits()
    small = Dataset(full.train.images[:80], full.train.labels[:80])
    return Data("some digits", small, Dataset(full.test.images[:40], full.test.labels[:40]), full.classes)


def vit():
    return ViT(preset("tiny", dim=8, depth=1, heads=2), torch.Generator().manual_seed(1))


def network(**changes):
    return certifiable(CertifiableConfig(**SMALL | changes), torch.Generator().manual_seed(1))


MODELS = {
    "vit": vit,
    "timm": lambda: SOURCE.fresh(1),
    "certifiable with skips": lambda: network(own_bias=1.0),
    "certifiable with residuals": lambda: network(mixing="residual", value_norm=0.7),
    "certifiable with sll": lambda: network(mixing="none", feedforward="sll", hidden=11),
}
EXACT = ("vit", "timm")  # whose weights are stored as they are trained


@pytest.fixture(scope="module")
def runs(timm, tmp_path_factory):
    """A finished run of every kind of model, made when it is first asked for."""
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("runs") / "first"
            train(MODELS[kind](), some_digits(), made[kind], FEW, device=CPU)
        return made[kind]

    return of


@pytest.mark.parametrize("kind", MODELS)
def test_the_model_is_the_function_that_the_run_ended_with(kind, runs, generator):
    run = runs(kind)
    trained, start = from_run(run), warm_start(run)
    assert start.origin == Origin(
        run="first", fingerprint=fingerprint(trained), weights_fingerprint=weights_fingerprint(trained)
    )
    assert start.origin.fingerprint == io.read_json(run / "result.json")["fingerprint"]
    images = torch.rand(5, 1, 8, 8, generator=generator)
    torch.testing.assert_close(start.model(images), trained(images), rtol=0, atol=1e-6)
    assert (fingerprint(start.model) == fingerprint(trained)) == (kind in EXACT)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in EXACT])
def test_the_constraints_of_the_training_hold_again(kind, runs):
    model = warm_start(runs(kind)).model
    begun = MODELS[kind]()
    layers = {name for name, layer in begun.named_modules() if parametrize.is_parametrized(layer)}
    assert layers
    assert {name for name, layer in model.named_modules() if parametrize.is_parametrized(layer)} == layers
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3)
    for name in layers:
        norm = torch.linalg.matrix_norm(model.get_submodule(name).weight.flatten(1), 2)
        assert norm <= lipschitz_constant(begun.get_submodule(name)) * (1 + 1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_a_second_run_says_where_its_weights_come_from_and_begins_with_them(kind, runs, tmp_path):
    start, first = warm_start(runs(kind)), runs(kind)
    began = weights_fingerprint(start.model)
    train(start.model, some_digits(), tmp_path / "second", FEW, device=CPU, origin=start.origin)
    settings = io.read_record(tmp_path / "second" / "run.json", TrainingSettings)
    assert settings.origin == start.origin
    assert settings.initial_weights == began
    assert (began == io.read_json(first / "model.json")["weights_fingerprint"]) == (kind in EXACT)
    assert io.read_json(first / "run.json").get("origin") is None
    assert untrained(tmp_path / "second") is None
    assert fingerprint(from_run(tmp_path / "second")) != start.origin.fingerprint


def test_training_twice_from_one_run_gives_the_same_bytes(runs, tmp_path):
    for name in ("one", "two"):
        start = warm_start(runs("certifiable with skips"))
        train(start.model, some_digits(), tmp_path / name, FEW, device=CPU, origin=start.origin)
    for file in ("run.json", "metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_run_that_has_not_begun_is_resumed_only_from_the_same_weights(runs, tmp_path):
    def stop(progress):
        raise KeyboardInterrupt

    start = warm_start(runs("vit"))
    with pytest.raises(KeyboardInterrupt):
        train(start.model, some_digits(), tmp_path / "run", FEW, device=CPU, origin=start.origin, watch=stop)
    with pytest.raises(RunError, match="initial_weights"):
        train(vit(), some_digits(), tmp_path / "run", FEW, device=CPU, origin=start.origin, resume=True)
    with pytest.raises(RunError, match=r"origin"):
        train(warm_start(runs("vit")).model, some_digits(), tmp_path / "run", FEW, device=CPU, resume=True)
    start = warm_start(runs("vit"))
    train(start.model, some_digits(), tmp_path / "run", FEW, device=CPU, origin=start.origin, resume=True)


@pytest.mark.parametrize("kind", ["vit", "certifiable with skips"])
def test_a_run_in_double_precision_is_resumed_in_double_precision(kind, runs, tmp_path):
    """An interrupted training ends with the bytes of one that was not interrupted."""
    first, training = in_precision(runs, kind, torch.float64, tmp_path), replace(FEW, checkpoint_steps=1)

    def stop(progress):
        raise KeyboardInterrupt

    start = warm_start(first)
    train(start.model, some_digits(), tmp_path / "whole", training, device=CPU, origin=start.origin)
    start = warm_start(first)
    with pytest.raises(KeyboardInterrupt):
        train(start.model, some_digits(), tmp_path / "cut", training, device=CPU, origin=start.origin, watch=stop)
    train(begun_model(tmp_path / "cut"), some_digits(), tmp_path / "cut", training, device=CPU, resume=True)
    whole, cut = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    assert from_run(tmp_path / "cut").state_dict()["head.weight"].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_trained_in_single_precision(dtype, runs, tmp_path):
    first = in_precision(runs, "vit", dtype, tmp_path)
    trained, start = from_run(first), warm_start(first)
    assert start.origin.fingerprint == fingerprint(trained)
    for name, tensor in start.model.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name].float())
    train(start.model, some_digits(), tmp_path / "second", FEW, device=CPU, origin=start.origin)
    with pytest.raises(CheckpointError, match="is no longer orthogonal"):
        warm_start(in_precision(runs, "certifiable with skips", torch.bfloat16, tmp_path))


def in_precision(runs, kind, dtype, place):
    """The run with its weights in another precision."""
    run = shutil.copytree(runs(kind), place / f"{kind} in {dtype}")
    tensors = {name: tensor.to(dtype) for name, tensor in store.read_tensors(run / "model.safetensors").items()}
    respelled(run, tensors)
    return run


# What is refused ---------------------------------------------------------------------------------------------


def respelled(run, tensors):
    """Write other weights to a run, with the fingerprint that goes with them."""
    store.write_tensors(run / "model.safetensors", tensors)
    model = MODELS["vit"]() if "class_token.token" in tensors else materialized(MODELS["certifiable with skips"]())
    model = model.to(tensors["head.weight"].dtype)
    model.load_state_dict(tensors)
    io.write_json(run / "model.json", io.read_json(run / "model.json") | {"fingerprint": fingerprint(model)})


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("vit", "head.weight", torch.nan, "entries that are not finite, in 'head.weight'"),
        ("certifiable with skips", "blocks.0.map.weight", 0.3, "'blocks.0.map.weight' is no longer orthogonal"),
    ],
)
def test_weights_that_no_training_leaves_are_refused(runs, tmp_path, kind, key, value, message):
    run = shutil.copytree(runs(kind), tmp_path / "run")
    tensors = store.read_tensors(run / "model.safetensors")
    tensors[key][0] = value
    respelled(run, tensors)
    with pytest.raises(CheckpointError, match=message):
        warm_start(run)


def test_a_run_that_was_tampered_with_is_refused(runs, tmp_path):
    run = shutil.copytree(runs("vit"), tmp_path / "run")
    tensors = store.read_tensors(run / "model.safetensors")
    store.write_tensors(run / "model.safetensors", tensors | {"head.bias": tensors["head.bias"] + 1})
    with pytest.raises(CheckpointError, match="does not match the fingerprint"):
        warm_start(run)
    store.write_tensors(run / "model.safetensors", tensors | {"head.bias": torch.zeros(11)})
    with pytest.raises(CheckpointError, match=r"'head.bias' has shape \(11,\), not \(10,\)"):
        warm_start(run)
    (run / "model.json").unlink()
    with pytest.raises(RunError, match=r"model\.json does not exist"):
        warm_start(run)
