"""Certifiable networks: what their configs say, what they keep, and that they can be trained, stored and proved."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from specguard.attacks import PGD
from specguard.certificates import certify, program
from specguard.certificates.propagate import forward_pass, names, upper_radii
from specguard.checker import Image, read
from specguard.data import digits
from specguard.errors import CheckpointError, ConfigError
from specguard.geometry import Ball
from specguard.models import from_run, untrained
from specguard.nn import CERTIFIABLE, CertifiableConfig, dataclass_from_json, fingerprint, materialized
from specguard.testing import check_rule
from specguard.train import EMMA, AdamW, StepContext, Training, train

SMALL = {"image": 8, "patch": 2, "channels": 1, "dim": 16, "heads": 2, "mean": (0.5,), "std": (0.5,)}


def small(**changes: float) -> nn.Module:
    return CertifiableConfig(**{**SMALL, **changes}).fresh(0)


def some_digits(count: int) -> tuple[Tensor, Tensor]:
    return digits().train.batch(slice(0, count))


def attention_growth(radii: dict[str, Tensor]) -> Tensor:
    """By how much attention, without the projections that shorten them, stretches distances over all blocks."""
    grown = [radii[f"blocks.{i}.activation"] / radii[f"blocks.{i}.attention"] for i in range(3)]
    return torch.stack(grown).prod(0)


def radii_by_name(path):
    at = upper_radii(path, torch.full((2,), 0.1, dtype=torch.float64), "local").at
    return {names(path)[step]: radius for step, radius in at.items()}


def test_distances_grow_by_less_than_half_over_three_blocks():
    images, _ = some_digits(2)
    path, _ = forward_pass(program(small()).steps, images.double())
    at = radii_by_name(path)
    assert (at["head"] < 1.5 * at["blocks.0.project"]).all()
    assert (attention_growth(at) < 1.5).all()
    steep, _ = forward_pass(program(small(query_norm=3.0)).steps, images.double())
    more = radii_by_name(steep)
    assert (attention_growth(more) > attention_growth(at)).all()


def test_a_certifiable_model_obeys_the_laws():
    model, (images, _) = small(patch=4, depth=2), some_digits(2)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.bias.normal_(0, 3, generator=torch.Generator().manual_seed(0))
    check_rule(model, images, radii=(0.1,), methods=("lofast", "local"), functionals=1, steps=5)


def test_the_same_seed_gives_the_same_model():
    assert fingerprint(small()) == fingerprint(small())
    assert fingerprint(small()) != fingerprint(small(mix=0.4))


def test_a_certifiable_model_learns_and_what_is_certified_is_not_broken():
    model, (images, labels) = small(), some_digits(120)
    few, theirs, ball = images[:6], labels[:6], Ball("l2", 0.05)
    assert certify(model, few, model(few).argmax(1), ball, search=False).certified_by("adjoint").shape == (6,)
    optimizer, objective = torch.optim.AdamW(model.parameters(), 0.01), EMMA(0.1, lipschitz=2.0)
    first = materialized(model).state_dict()
    for step in range(40):
        context = StepContext(step, 40, 10, torch.Generator().manual_seed(0))
        loss = objective(model.train(), images, one_hot(labels, 10).float(), context)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    for name, tensor in materialized(model).state_dict().items():
        assert name.startswith("normalise") or not torch.equal(first[name], tensor), name
    given = certify(model, few, theirs, ball, search=False)
    assert int(given.certified.sum()) >= 4
    broken = PGD(steps=10)(model, few, theirs, ball).success
    assert not (broken & given.certified).any()
    image = Image.of(read(model), few[0].double().numpy(), int(theirs[0]))
    assert image.proof(0.05, "local").losses.min() > 0


def test_patches_must_divide_the_image():
    with pytest.raises(ConfigError, match="8 is not divisible by patch size 3"):
        small(patch=3)


# Other designs, and the disk --------------------------------------------------------------------------------------

LOFAST = {"mixing": "residual", "projection": "layer", "feedforward": "sll", "value_norm": 0.5, "hidden": 11}
DESIGNS = {"skip": {}, "lofast": LOFAST, "none": {"mixing": "none"}, "smooth sll": {"feedforward": "sll"}}


@pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)
def test_every_design_obeys_the_laws(design):
    images, _ = some_digits(1)
    model = small(patch=4, depth=1, classes=3, **design)
    check_rule(model, images, radii=(0.1,), methods=("lofast", "local"), functionals=1, steps=5)


@pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)
def test_a_config_counts_the_numbers_of_its_plain_network(design):
    config = CertifiableConfig(**{**SMALL, **design})
    tensors = materialized(config.fresh(0)).state_dict()
    assert config.weights == sum(tensor.numel() for tensor in tensors.values())


def test_values_and_outputs_have_the_norms_asked_for_and_patches_have_one():
    model = materialized(small(**LOFAST, query_norm=0.7)).requires_grad_(False)
    attention = model.blocks[0].attention.branch.inner
    norms = [float(torch.linalg.matrix_norm(W, 2)) for W in attention.qkv.weight.chunk(3)]
    assert norms == pytest.approx([0.7, 0.7, 0.5], rel=1e-5)
    assert float(torch.linalg.matrix_norm(attention.out.weight, 2)) == pytest.approx(0.5, rel=1e-5)
    assert float(torch.linalg.matrix_norm(model.patches.map.weight.flatten(1), 2)) == pytest.approx(1, rel=1e-5)


def test_a_trained_run_is_read_back_and_so_is_its_beginning(tmp_path):
    config, run = CertifiableConfig(**{**SMALL, "patch": 4, "depth": 1}), tmp_path / "run"
    start = config.fresh(5)
    training = Training(epochs=1, batch=360, optimizer=AdamW(), objective=EMMA(0.1))
    train(config.fresh(5), digits(), run, training, device=torch.device("cpu"))
    model = from_run(run)
    assert "parametrizations" not in " ".join(model.state_dict())
    assert fingerprint(model) == json.loads((run / "result.json").read_text())["fingerprint"] != fingerprint(start)
    assert untrained(run) is None  # its weights did not come from the run's own seed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 2**15, "heads": 2}, "another architecture"),
        ({"depth": 2}, "another architecture"),
        ({"mixing": "magic"}, "mixing 'magic' is unknown"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"dim": "many"}, "'dim' cannot be 'many'"),
    ],
)
def test_a_run_whose_architecture_was_changed_is_refused(tmp_path, change, message):
    config, run = CertifiableConfig(**{**SMALL, "patch": 4, "depth": 1}), tmp_path / "run"
    train(config.fresh(0), digits(), run, Training(epochs=1, batch=1437), device=torch.device("cpu"))
    record = json.loads((run / "model.json").read_text())
    record["config"]["source"] |= change
    (run / "model.json").write_text(json.dumps(record))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        from_run(run)


def test_configs_go_through_json_and_presets_can_be_made():
    for config in CERTIFIABLE.values():
        assert dataclass_from_json(CertifiableConfig, json.loads(json.dumps(asdict(config)))) == config
    model = CERTIFIABLE["certifiable_digits"].fresh(0)
    assert model(digits().test.images[:2]).shape == (2, 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth must be at least 1"),
        ({"query_norm": 0.0}, "query_norm must be positive"),
        ({"value_norm": math.nan}, "value_norm must be positive"),
        ({"mix": 1.5}, "mix must lie between 0 and 1"),
        ({"dim": 15}, "cannot be divided among 2 heads"),
        ({"dim": 15, "heads": 3}, "dim 15 is odd"),
        ({"std": (1.0, 1.0)}, "one value for each of the 1 channels"),
        ({"mean": (math.inf,)}, "finite"),
        ({"dim": 2**16, "depth": 2**10}, "too large for any machine"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        CertifiableConfig(**{**SMALL, **change})
