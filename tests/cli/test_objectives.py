"""`specguard train` for margins: certifiable networks by name, and objectives with their numbers."""

import json

import pytest

from specguard.nn import CERTIFIABLE, Network

SMALL = (
    "--model",
    "certifiable_digits",
    "--set",
    "patch=4",
    "--set",
    "dim=8",
    "--set",
    "depth=1",
    "--set",
    "heads=2",
)
START = ("--device", "cpu", "--epochs", "2", "--batch", "480", *SMALL)
OBJECTIVES = {
    "emma": ("--radius", "0.2", "--lipschitz", "local", "--ramp", "1"),
    "la": ("--temperature", "0.5", "--offset", "1", "--focus", "2"),
    "certified": ("--radius", "0.1", "--input-gradient", "0.01"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_certifiable_network_is_trained_for_margins_and_looked_at_by_every_verb(specguard, tmp_path, name):
    run = tmp_path / name
    specguard("train", "--run", run, *START, "--objective", name, "--norm", "l2", *OBJECTIVES[name]).succeeds()
    settings = json.loads((run / "run.json").read_text())
    kind = settings["training"]["objective"]["type"]
    assert kind == {"emma": "EMMA", "la": "LA", "certified": "InputGradient"}[name]
    assert settings["model"]["source"]["std"] == [1.0]
    few = ("--images", "3", "--device", "cpu")
    specguard("certify", run, *few, "--radius", "0.01", "--methods", "local", "--out", "proofs").succeeds()
    if name == "emma":
        assert settings["training"]["objective"]["ramp"] == 0.5
        specguard("check", run / "proofs", "--model", run, "--device", "cpu").succeeds()
        specguard("attack", run, *few, "--attack", "fgsm", "--norm", "l2", "--radius", "0.1").succeeds()
        specguard("spectrum", run, *few).succeeds()


def test_certifiable_networks_are_listed_and_close_names_are_offered(specguard, tmp_path):
    listed = specguard("models").out
    assert all(name in listed for name in CERTIFIABLE)
    refused = specguard("train", "--run", tmp_path / "run", "--model", "certifiable_digit")
    refused.refuses("did you mean 'certifiable_digits'?")
    assert isinstance(CERTIFIABLE["certifiable_digits"].fresh(0), Network)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--objective", "emma"), "say so with --norm l2"),
        (("--lipschitz", "2"), "--lipschitz has no effect without --objective emma or la"),
        (("--objective", "pgd", "--focus", "2"), "--focus has no effect without --objective la"),
        (("--objective", "emma", "--norm", "l2", "--lipschitz", "near"), "--lipschitz"),
        (("--objective", "la", "--norm", "l2", "--label-smoothing", "0.1"), "--label-smoothing has no effect"),
        (("--objective", "pgd", "--input-gradient", "0.1"), "has no gradient at those given"),
        (("--set", "mixing=magic"), "mixing 'magic' is unknown"),
        (("--set", "norm=rmsnorm"), "unknown field 'norm'"),
        (("--set", "std=1"), "comes from the data"),
    ],
)
def test_what_cannot_be_meant_is_refused(specguard, tmp_path, options, named):
    specguard("train", "--run", tmp_path / "run", *START, *options).refuses(named)
    assert not (tmp_path / "run").exists()
