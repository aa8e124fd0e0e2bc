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


ROBUST = {
    "mart": ("--radius", "0.1", "--inner-steps", "1", "--beta", "2", "--awp", "0.01"),
    "trades": ("--radius", "0.1", "--inner-steps", "1", "--awp", "0.01"),
    "noise": ("--sigma", "0.5", "--label-smoothing", "0.1"),
    "consistency": ("--sigma", "0.5", "--noisy-copies", "3", "--consistency", "4", "--entropy", "0.1"),
}


@pytest.mark.parametrize("name", ROBUST)
def test_objectives_for_robustness_have_the_numbers_of_their_options_and_resume(specguard, tmp_path, name):
    run, tiny = tmp_path / "run", ("--set", "dim=8", "--set", "depth=1", "--epochs", "1", "--batch", "600")
    specguard("train", "--run", run, *tiny, "--objective", name, *ROBUST[name]).succeeds()
    training = json.loads((run / "run.json").read_text())["training"]
    objective = {key: value for key, value in training["objective"].items() if key != "ball"}
    shared = {"steps": 1, "step_size": None, "ramp": 5.0, "label_smoothing": 0.0}
    assert objective == {
        "mart": {"type": "MART", "beta": 2.0, **shared},
        "trades": {"type": "TRADES", "beta": 6.0, **shared},
        "noise": {"type": "NoiseTraining", "sigma": 0.5, "label_smoothing": 0.1},
        "consistency": {
            "type": "Consistency", "sigma": 0.5, "copies": 3, "weight": 4.0, "entropy": 0.1, "label_smoothing": 0.0,
        },
    }[name]  # fmt: skip
    assert training["awp"] == ({"type": "AWP", "gamma": 0.01} if "--awp" in ROBUST[name] else None)
    specguard("train", "--run", run, "--resume").succeeds()
    if name == "noise":
        words = ("--samples", "20", "--select", "5", "--images", "3", "--sigma", "0.5", "--device", "cpu")
        specguard("smooth", run, *words).succeeds()


def test_mart_and_trades_have_weights_of_their_own_and_old_runs_keep_theirs(specguard, tmp_path):
    run, tiny = tmp_path / "run", ("--set", "dim=8", "--set", "depth=1", "--epochs", "1", "--batch", "600")
    options = ("--radius", "0.1", "--inner-steps", "1")
    for name, beta in (("mart", 5.0), ("trades", 6.0)):
        specguard("train", "--run", run / name, *tiny, "--objective", name, *options).succeeds()
        assert json.loads((run / name / "run.json").read_text())["training"]["objective"]["beta"] == beta
    path = run / "trades" / "arguments.json"
    new = {"recipe", "tensorboard", "awp", "sigma", "noisy_copies", "consistency", "entropy"}
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in new}
    path.write_text(json.dumps({**kept, "beta": 6.0}))  # as an earlier version wrote them
    settings = json.loads((run / "trades" / "run.json").read_text())
    del settings["training"]["awp"]
    (run / "trades" / "run.json").write_text(json.dumps(settings))
    (run / "trades" / "result.json").unlink()
    specguard("train", "--run", run / "trades", "--resume").succeeds()


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
        (("--awp", "0.01"), "--awp has no effect without --objective pgd, trades, mart or nfgsm"),
        (("--objective", "pgd", "--awp", "0.01", "--sam", "0.1"), "use one"),
        (("--objective", "pgd", "--awp", "0"), "gamma must be positive"),
        (
            ("--objective", "pgd", "--sigma", "0.1"),
            "--sigma has no effect without --objective noise or consistency",
        ),
        (("--objective", "noise", "--entropy", "1"), "--entropy has no effect without --objective consistency"),
        (("--objective", "noise", "--sigma", "0"), "sigma of the noise must be positive"),
        (("--objective", "consistency", "--noisy-copies", "1"), "--noisy-copies must be at least 2"),
        (("--objective", "noise", "--norm", "l2"), "--norm has no effect"),
        (("--objective", "mart", "--beta", "-1"), "beta of MART"),
        (("--set", "mixing=magic"), "mixing 'magic' is unknown"),
        (("--set", "norm=rmsnorm"), "unknown field 'norm'"),
        (("--set", "std=1"), "comes from the data"),
    ],
)
def test_what_cannot_be_meant_is_refused(specguard, tmp_path, options, named):
    specguard("train", "--run", tmp_path / "run", *START, *options).refuses(named)
    assert not (tmp_path / "run").exists()
