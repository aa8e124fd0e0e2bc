"""Training under noise: its loss is that of the papers, its noise the image's own, and it resumes exactly."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from specguard.data import Augmentation, Data, Dataset, digits
from specguard.errors import ConfigError
from specguard.nn import ViT, preset
from specguard.penalties import MSVP
from specguard.records.io import read_json, read_lines
from specguard.train import (
    SAM,
    AdamW,
    Consistency,
    Cosine,
    CrossEntropy,
    InputGradient,
    NoiseTraining,
    StepContext,
    Training,
    train,
)

CPU = torch.device("cpu")
CONFIG = preset("tiny", dim=12, depth=1, heads=2, pool="mean")
NAN, INF = float("nan"), float("inf")
OBJECTIVES = {
    "noise": NoiseTraining(0.25),
    "noise, smoothed labels": NoiseTraining(0.5, label_smoothing=0.1),
    "consistency": Consistency(0.25),
    "consistency, four copies": Consistency(0.5, copies=4, weight=3.0, entropy=0.2, label_smoothing=0.1),
}
EVERY_OBJECTIVE = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")  # spares three processes per start


def some_digits() -> Data:
    whole = digits()
    some = Dataset(whole.train.images[:120], whole.train.labels[:120])
    return Data("some digits", some, Dataset(whole.test.images[:40], whole.test.labels[:40]), whole.classes)


def batch(count: int = 24) -> tuple[Tensor, Tensor]:
    images, labels = digits().train.batch(slice(0, count))
    targets = one_hot(labels, 10).float()
    return images, 0.7 * targets + 0.3 * targets.flip(0)


def model() -> ViT:
    made = ViT(CONFIG, torch.Generator().manual_seed(0))
    for parameter in made.parameters():
        parameter.detach().mul_(4)
    return made.train()


def context(before: int = 0, after: int = 0, seed: int = 3) -> StepContext:
    return StepContext(0, 100, 10, torch.Generator().manual_seed(seed), before, after)


class Spy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = model(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.inner(x)


def noisy_images(objective: Any, images: Tensor, targets: Tensor, when: StepContext) -> Tensor:
    """What the model sees in its one forward pass: copies, images, pixels."""
    spy = Spy()
    objective(spy, images, targets, when).backward()
    (seen,) = spy.seen
    return seen.view(-1, *images.shape)


@EVERY_OBJECTIVE
def test_the_noise_is_gaussian_independent_and_not_clamped(objective):
    images = torch.full((64, 1, 8, 8), 0.5)
    seen = noisy_images(objective, images, torch.eye(10)[torch.arange(64) % 10], context())
    assert len(seen) == getattr(objective, "copies", 1)
    noise = (seen - images) / objective.sigma
    count = noise.numel()
    assert abs(float(noise.mean())) < 4 / count**0.5
    assert abs(float(noise.var()) - 1) < 4 * (2 / count) ** 0.5
    assert abs(float(noise.pow(4).mean()) - 3) < 4 * (96 / count) ** 0.5
    assert seen.min() < 0
    assert seen.max() > 1
    rows = noise.flatten(2).flatten(0, 1)  # one for every copy of every image
    products = rows @ rows.T / rows.shape[1]
    apart = products[~torch.eye(len(rows), dtype=torch.bool)]
    assert float(apart.abs().max()) < 6 / rows.shape[1] ** 0.5


@EVERY_OBJECTIVE
def test_the_noise_of_an_image_does_not_depend_on_the_process_that_holds_it(objective):
    images, targets = batch()
    whole = noisy_images(objective, images, targets, context())
    for begin, end in itertools.pairwise((0, 7, 12, 24)):
        own = slice(begin, end)
        part = noisy_images(objective, images[own], targets[own], context(begin, 24 - end))
        assert torch.equal(part, whole[:, own])


def by_hand(objective: Any, network: nn.Module, copies: Tensor, targets: Tensor) -> Tensor:
    """The loss of Jeong and Shin 2020, image by image in float64; noise training is the first term alone."""
    smoothing, total = objective.label_smoothing, torch.zeros((), dtype=torch.float64)
    targets = ((1 - smoothing) * targets + smoothing / targets.shape[1]).double()
    for i, t in enumerate(targets):
        p = [torch.softmax(network(copy[i : i + 1])[0].double(), 0) for copy in copies]
        total = total - sum((t * each.log()).sum() for each in p) / len(p)
        if isinstance(objective, Consistency):
            q = sum(p) / len(p)
            divergence = sum((q * (q / each).log()).sum() for each in p) / len(p)
            total = total + objective.weight * divergence - objective.entropy * (q * q.log()).sum()
    return total / len(targets)


@EVERY_OBJECTIVE
def test_value_and_gradients_are_those_of_the_formula_at_the_noise_drawn(objective):
    images, targets = batch()
    mine, reference = model(), model()
    value = objective(mine, images, targets, context())
    value.backward()
    expected = by_hand(objective, reference, noisy_images(objective, images, targets, context()), targets)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, p), theirs in zip(mine.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_consistency_without_weights_is_cross_entropy_and_each_weight_counts():
    images, targets = batch()
    values = {}
    for weight, entropy in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (2.0, 3.0)):
        objective = Consistency(0.25, copies=3, weight=weight, entropy=entropy)
        values[weight, entropy] = objective(model(), images, targets, context()).item()
    fit, kl, entropy, both = values.values()
    copies = noisy_images(Consistency(0.25, copies=3), images, targets, context())
    whole = CrossEntropy()(model(), copies.flatten(0, 1), targets.repeat(3, 1), context()).item()
    assert fit == pytest.approx(whole, rel=1e-5)
    assert kl > fit + 0.01
    assert entropy > fit + 0.01
    assert both == pytest.approx(fit + 2 * (kl - fit) + 3 * (entropy - fit), rel=1e-4)


@EVERY_OBJECTIVE
def test_the_generator_alone_decides(objective):
    images, targets = batch()
    network, values = model(), []
    before = torch.random.get_rng_state()
    for seed in (3, 3, 4):
        values.append(objective(network, images, targets, context(seed=seed)).item())
    assert values[0] == values[1] != values[2]
    assert torch.equal(torch.random.get_rng_state(), before)


@EVERY_OBJECTIVE
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_another_precision_are_trained_too(objective, dtype):
    images, targets = (t.to(dtype) for t in batch())
    network = model().to(dtype)
    objective(network, images, targets, context()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_predictions_that_are_certain_have_finite_gradients():
    logits = torch.tensor([[300.0, 0.0], [0.0, 300.0]], requires_grad=True)
    value = Consistency(0.25)(lambda x: logits, torch.zeros(1, 1, 1, 1), torch.tensor([[1.0, 0.0]]), context())
    value.backward()
    assert value.isfinite()
    assert logits.grad.isfinite().all()


def test_it_combines_with_a_penalty_on_the_input_gradient():
    images, targets = batch(6)
    plain = NoiseTraining(0.25)(model(), images, targets, context())
    value = InputGradient(0.1, NoiseTraining(0.25))(model(), images, targets, context())
    assert value > plain


@pytest.mark.parametrize("kind", [NoiseTraining, Consistency])
@pytest.mark.parametrize("sigma", [0.0, -1.0, NAN, INF])
def test_a_sigma_out_of_range_is_refused(kind, sigma):
    with pytest.raises(ConfigError, match="sigma"):
        kind(sigma)


@pytest.mark.parametrize(
    "options",
    [
        {"copies": 1}, {"copies": 2.5}, {"weight": -1.0}, {"weight": INF}, {"entropy": NAN}, {"entropy": -0.1},
        {"label_smoothing": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        Consistency(0.25, **options)


class Death(BaseException):
    """Stands for SIGKILL: nothing but what is on the disk survives."""


def start(run: Path, training: Training, dies_at: int | None = None) -> None:
    calls = itertools.count(1)

    def watch(progress: object) -> None:
        if next(calls) == dies_at:
            raise Death

    network = ViT(CONFIG, torch.Generator().manual_seed(0))
    train(network, some_digits(), run, training, device=CPU, resume=True, watch=watch)


RESUMED = {
    "noise": Training(
        epochs=2, batch=40, objective=NoiseTraining(0.25), checkpoint_steps=1, precision="bfloat16", sam=SAM()
    ),
    "consistency": Training(
        epochs=2, batch=40, accumulate=2, objective=Consistency(0.25), checkpoint_steps=1, ema=0.5,
        optimizer=AdamW(lr=1e-2), augmentation=Augmentation(crop=1, mixup=0.5), penalties=(MSVP(),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_killed_after_any_step_ends_like_an_uninterrupted_one(name, tmp_path):
    start(tmp_path / "whole", RESUMED[name])
    for call in (1, 3, 4, 7):  # after a step, the third and last of an epoch, its record, and in the next one
        with pytest.raises(Death):
            start(tmp_path / str(call), RESUMED[name], call)
        start(tmp_path / str(call), RESUMED[name])
        for file in ("metrics.jsonl", "model.safetensors", "model.json", "run.json"):
            assert (tmp_path / str(call) / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("objective", [NoiseTraining(0.1), Consistency(0.1, weight=1.0)])
def test_it_learns_and_is_in_the_settings(objective, tmp_path):
    training = Training(epochs=8, batch=20, objective=objective, schedule=Cosine(warmup=0.5))
    network = ViT(CONFIG, torch.Generator().manual_seed(0))
    train(network, some_digits(), tmp_path / "run", replace(training, optimizer=AdamW(lr=2e-2)), device=CPU)
    losses = [r["loss"] for r in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < 0.95 * losses[0]
    stored = read_json(tmp_path / "run" / "run.json")["training"]["objective"]
    assert (stored["type"], stored["sigma"]) == (type(objective).__name__, objective.sigma)
