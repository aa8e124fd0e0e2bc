"""Adversarial objectives learn from images that lie where they should, and validation keeps the best weights."""

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, softmax

from specguard.attacks import PGD
from specguard.data import Augmentation, Data, Dataset, digits
from specguard.errors import CheckpointError, ConfigError, DataError, RunError
from specguard.geometry import Ball
from specguard.models import from_run
from specguard.nn import ViT, fingerprint, preset
from specguard.penalties import MSVP, SpectralNorm
from specguard.records.base import plain as as_stored
from specguard.records.io import read_json, read_lines, write_json
from specguard.records.store import derived_seed, read_checkpoint, read_tensors, write_tensors
from specguard.train import (
    AWP,
    MART,
    NFGSM,
    SAM,
    SGD,
    TRADES,
    AdamW,
    Cosine,
    CrossEntropy,
    InputGradient,
    PGDTraining,
    StepContext,
    Training,
    Validation,
    train,
)
from specguard.train.loop import Loop
from specguard.train.state import TrainingState

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
CONFIG = preset("tiny", dim=12, depth=1, heads=2, pool="mean")
LINF, L2 = Ball("linf", 0.1), Ball("l2", 0.5)


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")  # spares three processes per start


@cache
def some_digits() -> Data:
    whole = digits()
    some = Dataset(whole.train.images[:120], whole.train.labels[:120])
    return Data("some digits", some, Dataset(whole.test.images[:40], whole.test.labels[:40]), whole.classes)


@cache
def batch(count: int = 24) -> tuple[Tensor, Tensor]:
    images, labels = some_digits().train.batch(slice(0, count))
    return images, one_hot(labels, 10).float()


def mixed(count: int = 24) -> tuple[Tensor, Tensor]:
    images, targets = batch(count)
    return 0.7 * images + 0.3 * images.flip(0), 0.7 * targets + 0.3 * targets.flip(0)


def steep(norm: str = "layernorm", seed: int = 0) -> ViT:
    """A model whose gradients matter: with the usual start, they nearly vanish."""
    model = ViT(replace(CONFIG, norm=norm), torch.Generator().manual_seed(seed))
    for parameter in model.parameters():
        parameter.detach().mul_(4)
    return model.train()


def plain() -> ViT:
    return ViT(CONFIG, torch.Generator().manual_seed(0))


def context(step: int = 0, per_epoch: int = 10, seed: int = 3) -> StepContext:
    return StepContext(step, 10 * per_epoch, per_epoch, torch.Generator().manual_seed(seed))


@dataclass
class Call:
    """One forward pass, as the model saw it."""

    images: Tensor
    training: bool
    weights_learn: bool  # whether any weight asks for a gradient
    recorded: bool


class Spy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, list[Call]()

    def forward(self, x: Tensor) -> Tensor:
        learn = any(p.requires_grad for p in self.inner.parameters())
        assert all(m.training == self.training for m in self.modules())
        self.calls.append(Call(x.detach().clone(), self.training, learn, torch.is_grad_enabled()))
        return self.inner(x)


def watched(
    objective: Any, when: StepContext | None = None, data: tuple[Tensor, Tensor] | None = None
) -> list[Call]:
    """The forward passes of one call of the objective, on a model in training mode."""
    spy = Spy(steep()).train()
    images, targets = data or batch()
    objective(spy, images, targets, when or context()).backward()
    return spy.calls


# Where the images lie -----------------------------------------------------------------------------------------

BALLS = [LINF, L2, replace(LINF, box=False), replace(L2, box=False)]
EVERY_BALL = pytest.mark.parametrize("ball", BALLS, ids=str)


def learned(objective: Any, calls: list[Call]) -> Tensor:
    """The perturbed images of the last forward pass, which is the one that is learned from."""
    images = calls[-1].images
    return images.chunk(2)[1] if isinstance(objective, TRADES | MART) else images


@EVERY_BALL
@pytest.mark.parametrize("kind", [PGDTraining, TRADES, MART])
def test_every_image_the_model_sees_lies_in_the_ball_and_the_box(kind, ball):
    objective, (images, _) = kind(ball, steps=3), batch()
    calls = watched(objective)
    seen = [call.images for call in calls[:-1]] + [learned(objective, calls)]
    assert len(seen) == (5 if kind is TRADES else 4)  # the clean images, the steps, the result
    for x in seen:
        assert ball.contains(x, images, tolerance=1e-6).all()
        assert not ball.box or (x.min() >= 0 and x.max() <= 1)
    assert (ball.distance(seen[-1], images) > 0.7 * ball.radius).all()  # and it is used


@EVERY_BALL
def test_pgd_training_starts_at_random_points_and_takes_steps_of_the_size_asked_for(ball):
    size = 0.2 * ball.radius
    calls = watched(PGDTraining(ball, steps=3, step_size=size))
    images, _ = batch()
    away = ball.distance(calls[0].images, images)
    assert (away > 0.1 * ball.radius).all()
    assert away.unique().numel() > 12
    for before, after in pairwise(calls):
        moved = ball.distance(after.images, before.images)
        assert (moved <= size * (1 + 1e-4)).all()
        whole = 0.8 if ball.norm == "l2" else 0.999  # box and sphere cut something off every step in l2
        assert moved.max() >= whole * size


@pytest.mark.parametrize("objective", [PGDTraining(LINF, steps=4), PGDTraining(L2, steps=4), NFGSM(LINF)], ids=str)
def test_the_images_that_are_learned_from_are_harder_than_random_ones(objective):
    model, calls = steep().eval(), watched(objective)
    _, targets = batch()
    losses = [cross_entropy(model(call.images), targets).item() for call in (calls[0], calls[-1])]
    assert losses[1] > 1.1 * losses[0]


@pytest.mark.parametrize("ball", [LINF, L2], ids=str)
@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
def test_nfgsm_leaves_the_ball_by_its_noise_but_never_the_box(noise, ball):
    images, _ = batch()
    start, end = (call.images for call in watched(NFGSM(ball, noise=noise)))
    for x in (start, end):
        assert x.min() >= 0
        assert x.max() <= 1
    assert replace(ball, radius=noise * ball.radius).contains(start, images).all()
    assert replace(ball, radius=(noise + 1) * ball.radius).contains(end, images).all()
    assert ball.distance(end, start).max() > 0.9 * ball.radius  # a whole step, but for what the box cuts off
    outside = ball.distance(end, images) > 1.01 * ball.radius
    assert outside.all() if noise == 2 and ball is LINF else True
    assert not outside.any() if noise == 0 else outside.any()


def test_nfgsm_without_a_box_is_the_published_formula():
    ball, (images, targets) = Ball("linf", 0.1, box=False), batch()
    start, end = (call.images for call in watched(NFGSM(ball, noise=2.0)))
    assert (start - images).abs().max() == pytest.approx(0.2, rel=0.05)
    x = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(steep().eval()(x), targets), x)
    torch.testing.assert_close(end, start + 0.1 * gradient.sign(), rtol=0, atol=1e-6)


# The ramp and the clean share ---------------------------------------------------------------------------------

KINDS = {
    "pgd": lambda ball, **options: PGDTraining(ball, steps=2, step_size=10.0, **options),
    "trades": lambda ball, **options: TRADES(ball, steps=2, step_size=10.0, **options),
    "mart": lambda ball, **options: MART(ball, steps=2, step_size=10.0, **options),
    "nfgsm": lambda ball, **options: NFGSM(ball, noise=0.0, **options),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ramp", [0.0, 0.5, 3.0])
def test_the_radius_grows_linearly_over_the_ramp_and_is_whole_from_then_on(kind, ramp):
    """In epochs of 10 steps; steps that are far too long end on the boundary."""
    objective, (images, _) = KINDS[kind](Ball("linf", 0.1, box=False), ramp=ramp), batch()
    for step in (0, 4, 5, 10, 28, 29, 30, 99):
        radius = float((learned(objective, watched(objective, context(step))) - images).abs().max())
        share = min((step + 1) / (10 * ramp), 1.0) if ramp else 1.0
        assert radius == pytest.approx(0.1 * share, rel=1e-4)


def test_the_step_size_that_is_not_given_grows_with_the_radius():
    ball = Ball("linf", 0.1, box=False)
    for step, share in ((2, 0.1), (29, 1.0)):
        calls = watched(PGDTraining(ball, steps=5, ramp=3.0), context(step))
        moved = (calls[1].images - calls[0].images).abs().max()
        assert moved == pytest.approx(0.5 * 0.1 * share, rel=1e-3)


@pytest.mark.parametrize("count", [24, 5, 1])
@pytest.mark.parametrize("clean", [0.0, 0.25, 0.5, 0.9])
def test_exactly_the_clean_share_of_a_batch_stays_as_it_is(clean, count):
    images, targets = batch(count)
    calls = watched(PGDTraining(LINF, steps=2, clean=clean), data=(images, targets))
    kept = round(clean * count)
    assert all(len(call.images) == count - kept for call in calls[:-1])
    changed = (calls[-1].images != images).flatten(1).any(1)
    assert changed.tolist() == [False] * kept + [True] * (count - kept)


# What is learned ----------------------------------------------------------------------------------------------

BATCHES = {"labels": batch, "mixed": mixed}
EVERY_BATCH = pytest.mark.parametrize("data", BATCHES.values(), ids=BATCHES.keys())


def soft_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    targets = (1 - smoothing) * targets + smoothing / targets.shape[1]
    return -(targets * softmax(logits, 1).log()).sum(1).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def by_hand(objective: Any, model: ViT, x: Tensor, targets: Tensor) -> Tensor:
    """The outer loss at the images of the last forward pass."""
    smoothing = objective.label_smoothing
    if not isinstance(objective, TRADES | MART):
        return soft_loss(model(x), targets, smoothing)
    clean, moved = (softmax(z, 1) for z in model(x).chunk(2))
    if isinstance(objective, MART):
        return mart_by_hand(objective, clean, moved, targets)
    divergence = (clean * (clean.log() - moved.log())).sum(1).mean()
    return soft_loss(clean.log(), targets, smoothing) + objective.beta * divergence


def mart_by_hand(objective: MART, clean: Tensor, moved: Tensor, targets: Tensor) -> Tensor:
    """The loss of Wang et al. 2020, image by image and label by label; a mixed target is a mean of labels."""
    total = soft_loss(moved.log(), targets, objective.label_smoothing)
    for p, q, t in zip(clean, moved, targets, strict=True):
        for y in range(len(p)):
            worst = max(q[k] for k in range(len(q)) if k != y)
            divergence = sum(p[k] * (p[k] / q[k]).log() for k in range(len(p)))
            each = -(1 - worst).log() + objective.beta * divergence * (1 - p[y])
            total = total + t[y] * each / len(clean)
    return total


OBJECTIVES = {
    "pgd": PGDTraining(LINF, steps=3),
    "pgd with clean images": PGDTraining(L2, steps=2, clean=0.5, label_smoothing=0.1),
    "trades": TRADES(LINF, steps=3),
    "trades, l2": TRADES(L2, beta=0.7, steps=2, label_smoothing=0.2),
    "mart": MART(LINF, steps=3),
    "mart, l2": MART(L2, beta=0.7, steps=2, label_smoothing=0.2),
    "nfgsm": NFGSM(LINF),
    "nfgsm, l2": NFGSM(L2, noise=1.0, label_smoothing=0.1),
}
EVERY_OBJECTIVE = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())


@EVERY_OBJECTIVE
@EVERY_BATCH
@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])
def test_value_and_gradients_are_those_of_the_outer_loss_at_the_images_found(objective, data, norm):
    images, targets = data()
    model, reference = steep(norm), steep(norm)
    spy = Spy(model).train()
    value = objective(spy, images, targets, context())
    value.backward()
    expected = by_hand(objective, reference, spy.calls[-1].images, targets)
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    theirs = gradients(reference)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5, msg=name)
    assert images.grad is None
    assert not images.requires_grad


@EVERY_BATCH
def test_the_first_step_of_pgd_climbs_the_loss_of_these_targets(data):
    """Soft targets too: the step is that of the mixed loss, not of the likelier label."""
    ball, (images, targets) = Ball("linf", 0.1, box=False), data()
    calls = watched(PGDTraining(ball, steps=2, step_size=0.01), data=(images, targets))
    model, x = steep().eval(), calls[0].images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(soft_loss(model(x), targets), x)
    expected = (x.detach() + 0.01 * gradient.sign() - images).clamp(-0.1, 0.1) + images
    near_zero = gradient.abs() < 1e-7
    torch.testing.assert_close(calls[1].images[~near_zero], expected[~near_zero], rtol=0, atol=1e-6)
    assert near_zero.float().mean() < 0.05


def test_the_first_step_of_trades_climbs_the_divergence_from_the_clean_prediction():
    ball, (images, _) = Ball("linf", 0.1, box=False), batch()
    calls = watched(TRADES(ball, steps=2, step_size=0.01))
    assert torch.equal(calls[0].images, images)
    start = calls[1].images - images
    assert 5e-4 < start.std() < 2e-3
    model, x = steep().eval(), calls[1].images.clone().requires_grad_()
    clean = softmax(model(images), 1).detach()
    (gradient,) = torch.autograd.grad(-(clean * softmax(model(x), 1).log()).sum(), x)  # and a constant
    clear = gradient.abs() > 1e-5
    moved = calls[2].images - calls[1].images
    torch.testing.assert_close(moved[clear], 0.01 * gradient.sign()[clear], rtol=0, atol=1e-6)
    assert clear.float().mean() > 0.7


@EVERY_BATCH
def test_trades_without_weight_on_the_divergence_is_cross_entropy(data):
    images, targets = data()
    model, reference = steep(), steep()
    value = TRADES(LINF, beta=0.0, steps=2, label_smoothing=0.1)(model, images, targets, context())
    expected = CrossEntropy(0.1)(reference, images, targets, context())
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected)
    theirs = gradients(reference)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", [PGDTraining, TRADES, NFGSM])
def test_a_ball_without_extent_is_standard_training(kind):
    images, targets = batch()
    for ball in (Ball("linf", 0.0), Ball("l2", 0.0)):
        value = kind(ball)(steep(), images, targets, context())
        torch.testing.assert_close(value, CrossEntropy()(steep(), images, targets, context()))


@EVERY_OBJECTIVE
def test_the_search_sees_a_model_in_eval_mode_whose_weights_do_not_learn(objective):
    calls = watched(objective)
    assert [call.training for call in calls] == [False] * (len(calls) - 1) + [True]
    assert [call.weights_learn for call in calls] == [False] * (len(calls) - 1) + [True]
    assert calls[-1].recorded


@EVERY_OBJECTIVE
@pytest.mark.parametrize("training", [True, False])
def test_mode_weights_and_what_must_not_learn_are_as_they_were(objective, training):
    model = steep("batchnorm").train(training)
    model.blocks.eval()  # a part of its own mind
    frozen = model.patches.map.weight.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    objective(model, *batch(), context()).backward()
    assert [m.training for m in model.modules()] == modes
    assert [p for p in model.parameters() if not p.requires_grad] == [frozen]
    assert frozen.grad is None
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.is_grad_enabled()


class Broken(nn.Module):
    """A model that fails at one of its forward passes."""

    def __init__(self, inner: nn.Module, at: int) -> None:
        super().__init__()
        self.inner, self.left = inner, at

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.inner(x)


@EVERY_OBJECTIVE
@pytest.mark.parametrize("at", [1, 2])
def test_a_search_that_is_interrupted_leaves_the_model_as_it_was(objective, at):
    model = Broken(steep(), at).train()
    with pytest.raises(KeyboardInterrupt):
        objective(model, *batch(), context())
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


@EVERY_OBJECTIVE
def test_running_statistics_are_moved_once_and_only_by_what_is_learned_from(objective):
    model, reference = steep("batchnorm"), steep("batchnorm")
    spy = Spy(model).train()
    objective(spy, *batch(), context())
    reference(spy.calls[-1].images)
    assert model.norm.norm.num_batches_tracked == 1
    for (name, mine), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


@pytest.mark.parametrize("options", [{}, {"sam": SAM(0.05)}, {"awp": AWP()}], ids=["plain", "sam", "awp"])
@EVERY_OBJECTIVE
def test_a_training_step_moves_running_statistics_once(objective, options, tmp_path):
    training = Training(batch=24, objective=objective, **options)
    model = steep("batchnorm")
    loop = Loop(TrainingState(model, training, 5, CPU), training, some_digits(), tmp_path, CPU, lambda p: None)
    loop.step(*batch())
    tracked = [m.num_batches_tracked.item() for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    assert tracked == [1] * len(tracked)


@EVERY_OBJECTIVE
def test_the_generator_alone_decides(objective):
    images, targets = batch()
    values = []
    for world, seed in ((1, 3), (2, 3), (1, 4)):
        torch.manual_seed(world)
        values.append(objective(steep(), images, targets, context(seed=seed)).item())
    assert values[0] == values[1]
    assert values[0] != values[2]


@EVERY_OBJECTIVE
def test_the_world_s_generator_is_left_alone(objective):
    model, before = steep(), torch.random.get_rng_state()
    objective(model, *batch(), context())
    assert torch.equal(torch.random.get_rng_state(), before)


@EVERY_OBJECTIVE
def test_reduced_precision_learns_every_weight_and_nearly_the_same_loss(objective):
    values = []
    for mixed_precision in (False, True):
        model = steep()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision):
            value = objective(model, *batch(), context())
        value.backward()
        assert value.dtype == torch.float32
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert sum(float(p.grad.abs().sum()) > 0 for p in model.parameters()) > 0.9 * len(gradients(model))
        values.append(value.item())
    assert values[0] == pytest.approx(values[1], rel=0.1)


@EVERY_OBJECTIVE
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_another_precision_are_trained_too(objective, dtype):
    images, targets = (t.to(dtype) for t in batch())
    model = steep().to(dtype)
    value = objective(model, images, targets, context())
    value.backward()
    assert value.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_one_batch_is_learned_until_it_resists():
    """Trained on, the model withstands an attack that breaks one which was trained plainly."""
    ball, (images, targets) = Ball("linf", 0.05), batch()
    broken = {}
    for objective in (PGDTraining(ball, steps=3, ramp=3.0), CrossEntropy()):
        model = plain()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(150):
            optimizer.zero_grad()
            objective(model, images, targets, context(step, seed=step)).backward()
            optimizer.step()
        broken[type(objective)] = int(PGD(steps=10)(model, images, targets.argmax(1), ball).success.sum())
    assert broken[PGDTraining] <= 1
    assert broken[CrossEntropy] >= 4


COMBINATIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "penalties": {"penalties": (MSVP(1e-3, 1e-3, 1e-3), SpectralNorm(1e-4))},
    "sam": {"sam": SAM(0.02)},
    "awp": {"awp": AWP(0.01)},
    "ema": {"ema": 0.5},
    "accumulation": {"accumulate": 3},
    "mixup": {"augmentation": Augmentation(mixup=0.2)},
    "bf16": {"precision": "bfloat16"},
    "everything": {
        "sam": SAM(0.02), "ema": 0.9, "accumulate": 2, "precision": "bfloat16", "penalties": (MSVP(),),
        "augmentation": Augmentation(crop=1, cutmix=0.2), "checkpoint_steps": 4,
        "validation": Validation(20, LINF, PGD(steps=2)),
    },
}  # fmt: skip


LEARNED = {
    "pgd": PGDTraining(Ball("linf", 0.02), steps=2, clean=0.5),
    "trades": TRADES(Ball("linf", 0.02), steps=2),
    "mart": MART(Ball("linf", 0.02), steps=2),
    "nfgsm": NFGSM(Ball("linf", 0.02)),
}


@pytest.mark.parametrize(
    ("objective", "options"),
    [("pgd", name) for name in COMBINATIONS]
    + [(objective, name) for objective in ("trades", "mart", "nfgsm") for name in ("alone", "everything")]
    + [(objective, "awp") for objective in ("pgd", "trades", "mart")],
)
def test_every_combination_learns(objective, options, tmp_path):
    """In 48 steps; augmented, sharpness-aware and averaged at once, no more than a little."""
    training = Training(epochs=8, batch=20, objective=LEARNED[objective], schedule=Cosine(warmup=0.5))
    training = replace(training, optimizer=AdamW(lr=2e-2), **COMBINATIONS[options])
    train(plain(), some_digits(), tmp_path / "run", training, device=CPU)
    losses = [r["loss"] for r in read_lines(tmp_path / "run" / "metrics.jsonl")]
    enough = 0.96 if objective == "mart" else 0.92  # its two other terms grow first
    assert losses[-1] < (0.99 if options == "everything" else enough) * losses[0]


def test_sam_climbs_and_descends_on_attacks_from_the_same_start(tmp_path):
    """The gradient of a SAM step is that of the objective, attack and all, at the ascended weights."""
    objective = PGDTraining(LINF, steps=2)
    training = Training(batch=24, objective=objective, sam=SAM(0.05), clip=None, schedule=Cosine(warmup=0))
    training = replace(training, optimizer=SGD(lr=0.1, momentum=0.0, weight_decay=0.0))
    model, reference = steep(), steep()
    loop = Loop(TrainingState(model, training, 5, CPU), training, some_digits(), tmp_path, CPU, lambda p: None)
    loop.step(*batch())

    def there() -> StepContext:
        return StepContext(0, loop.steps, 5, loop.generator("objective 0"))

    objective(reference, *batch(), there()).backward()
    length = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    start = [p.detach().clone() for p in reference.parameters()]
    for p in reference.parameters():
        p.detach().add_(p.grad, alpha=0.05 / float(length))
    reference.zero_grad()
    objective(reference, *batch(), there()).backward()
    pairs = zip(model.named_parameters(), reference.parameters(), start, strict=True)
    for (name, mine), theirs, before in pairs:
        torch.testing.assert_close(mine.detach(), before - 0.1 * theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [PGDTraining, TRADES, MART, NFGSM])
def test_awp_takes_the_step_at_worse_weights_and_at_the_same_examples(tmp_path, kind, accumulate):
    """One step of Wu et al. 2020, in plain loops: every matrix moves by `gamma |W| G / |G|`."""
    objective, gamma = kind(LINF) if kind is NFGSM else kind(LINF, steps=2), 0.05
    training = Training(batch=24, accumulate=accumulate, objective=objective, awp=AWP(gamma), clip=None)
    optimizer, schedule = SGD(lr=0.1, momentum=0.0, weight_decay=0.0), Cosine(warmup=0)
    training = replace(training, optimizer=optimizer, schedule=schedule)
    model, reference = steep(), steep()
    loop = Loop(TrainingState(model, training, 5, CPU), training, some_digits(), tmp_path, CPU, lambda p: None)
    images, targets = batch()
    stored = loop.step(images, targets)

    parts = list(zip(images.tensor_split(accumulate), targets.tensor_split(accumulate), strict=True))
    examples = [
        objective.examples(reference, x, t, StepContext(0, loop.steps, 5, loop.generator(f"objective {i}")))
        for i, (x, t) in enumerate(parts)
    ]

    def loss() -> Tensor:
        each = [objective.loss(reference, *part[:1], x, part[1]) for part, x in zip(parts, examples, strict=True)]
        return sum(each) / accumulate

    value = loss()
    assert stored[0].item() == pytest.approx(value.item(), rel=1e-5)  # at the weights themselves
    value.backward()
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}
    moved = [name for name, p in start.items() if p.ndim > 1 and "token" not in name and "positions" not in name]
    assert 0 < len(moved) < len(start)
    for name, p in reference.named_parameters():
        if name in moved:
            w = sum(float(entry) ** 2 for entry in start[name].flatten()) ** 0.5
            g = sum(float(entry) ** 2 for entry in p.grad.flatten()) ** 0.5
            p.detach().add_(p.grad, alpha=gamma * w / g)
    reference.zero_grad()
    worse = loss()
    assert worse > value
    worse.backward()
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        torch.testing.assert_close(mine.detach(), start[name] - 0.1 * theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_awp_moves_no_matrix_whose_gradient_vanishes_and_restores_all_exactly():
    model = plain()
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    model.head.bias.grad = torch.ones_like(model.head.bias)
    model.patches.map.weight.grad = torch.ones_like(model.patches.map.weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with AWP(0.1).ascend(model):
        changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
        assert changed == ["patches.map.weight"]
        move = model.patches.map.weight - before[changed[0]]
        assert float(move.detach().norm()) == pytest.approx(0.1 * float(before[changed[0]].norm()), rel=1e-5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("objective", [CrossEntropy(), InputGradient(0.1)])
def test_awp_without_adversarial_examples_is_refused_by_name(objective):
    with pytest.raises(ConfigError, match=f"{type(objective).__name__} has none"):
        Training(objective=objective, awp=AWP())


def test_awp_beside_sam_and_a_gamma_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="use one"):
        Training(objective=PGDTraining(LINF), awp=AWP(), sam=SAM())
    for gamma in (0.0, -0.1, NAN, INF):
        with pytest.raises(ConfigError, match="gamma"):
            AWP(gamma)


@pytest.mark.parametrize("kind", [PGDTraining, TRADES, MART, NFGSM])
def test_a_penalty_on_the_input_gradient_of_attacked_images_is_refused(kind):
    with pytest.raises(ConfigError, match=kind.__name__):
        InputGradient(0.1, kind(LINF))


def test_mart_stays_finite_where_a_prediction_is_certain():
    """1 - max p' is zero in single precision, right or wrong."""
    logits = torch.tensor([[200.0, 0.0, 1.0], [200.0, 0.0, 1.0]], requires_grad=True)
    images, targets = torch.zeros(2, 1, 1, 1), torch.eye(3)[[0, 1]]
    value = MART(LINF).loss(lambda x: logits.repeat(2, 1), images, images, targets)
    value.backward()
    assert value.item() == pytest.approx((200 + 199) / 2, rel=1e-3)  # -log p' and -log(1 - max p') of the wrong one
    assert logits.grad.isfinite().all()


# Validation ---------------------------------------------------------------------------------------------------

SEEN: dict[str, list[Tensor]] = {"trained": [], "attacked": []}


@dataclass(frozen=True)
class Noting:
    """An objective that notes what it is given."""

    def __call__(self, model: Any, images: Tensor, targets: Tensor, context: StepContext) -> Tensor:
        SEEN["trained"].append(images.clone())
        return cross_entropy(model(images), targets)


@dataclass(frozen=True)
class NotingAttack(PGD):
    def __call__(self, model: Any, images: Tensor, *arguments: Any, **options: Any) -> Any:
        SEEN["attacked"].append(images.clone())
        return super().__call__(model, images, *arguments, **options)


def rows(images: list[Tensor]) -> set[bytes]:
    return {image.numpy().tobytes() for some in images for image in some}


def test_images_that_are_held_out_are_attacked_after_every_epoch_and_never_trained_on(tmp_path):
    data = some_digits()
    assert len(rows([data.train.images])) == 120
    chosen = []
    for seed in (0, 0, 1):
        for notes in SEEN.values():
            notes.clear()
        validation = Validation(33, LINF, NotingAttack(steps=1))
        training = Training(epochs=6, batch=29, objective=Noting(), validation=validation, seed=seed)
        train(steep(), data, tmp_path / str(len(chosen)), training, device=CPU)
        assert len(SEEN["attacked"]) == 6
        assert {len(images) for images in SEEN["attacked"]} == {33}
        held, used = rows(SEEN["attacked"]), rows(SEEN["trained"])
        assert len(held) == 33  # the same in every epoch
        assert held.isdisjoint(used)
        assert held | used == rows([data.train.images])  # and nothing else is lost
        assert len(SEEN["trained"]) == 6 * 3
        chosen.append(held)
    assert chosen[0] == chosen[1]
    assert chosen[0] != chosen[2]


def test_validation_only_chooses_and_does_not_change_training(tmp_path):
    """The same images without those held out, trained on without validation, give the same weights."""
    validation = Validation(40, LINF, PGD(steps=2))
    training = Training(epochs=3, batch=20, objective=PGDTraining(LINF, steps=1), validation=validation)
    first, second = steep(), steep()
    train(first, some_digits(), tmp_path / "with", training, device=CPU)
    with_tensors, _ = read_checkpoint(tmp_path / "with", 12)
    rest, _ = some_digits().held_out(40, torch.Generator().manual_seed(derived_seed(0, "held out")))
    train(second, rest, tmp_path / "without", replace(training, validation=None), device=CPU)
    without, _ = read_checkpoint(tmp_path / "without", 12)
    assert without.keys() < with_tensors.keys()
    assert all(torch.equal(tensor, with_tensors[name]) for name, tensor in without.items())


def test_validation_says_nothing_of_the_mode_of_the_model_that_is_trained(tmp_path):
    validation = Validation(20, LINF, PGD(steps=1))
    training = Training(epochs=1, batch=50, objective=PGDTraining(LINF, steps=1), validation=validation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(steep().train(), some_digits(), tmp_path / "run", training, device=CPU)


@dataclass(frozen=True)
class Spoiling:
    """Learns for some steps, then unlearns."""

    until: int

    def __call__(self, model: Any, images: Tensor, targets: Tensor, context: StepContext) -> Tensor:
        return cross_entropy(model(images), targets) * (1 if context.step < self.until else -0.1)


def spoiled(**options: Any) -> Training:
    """Sixteen epochs of eight steps, of which the last four make it worse."""
    validation = Validation(40, Ball("linf", 0.01), PGD(steps=2))
    training = Training(epochs=16, batch=10, optimizer=AdamW(lr=1e-2), schedule=Cosine(warmup=0, floor=0.5))
    return replace(training, **{"objective": Spoiling(96), "validation": validation, **options})


@pytest.mark.parametrize("ema", [None, 0.5, 0.9])
def test_the_result_is_the_weights_of_the_epoch_that_stood_up_best(ema, tmp_path):
    run, epochs = tmp_path / "run", []

    def note(progress: Any) -> None:
        if progress.record:
            tensors, _ = read_checkpoint(run, progress.step)
            epochs.append((as_stored(progress.record), tensors))

    model = plain()
    result = train(model, some_digits(), run, spoiled(ema=ema), device=CPU, watch=note)
    candidates = []
    for record, tensors in epochs:
        for weights, prefix, start in (("raw", "", "model/"), ("ema", "ema_", "average/module.")):
            if weights == "ema" and ema is None:
                assert not any(key.startswith("ema") for key in record)
                continue
            score = tuple(record[f"{prefix}validation_{what}"] for what in ("robust_accuracy", "accuracy"))
            assert 0 <= score[0] <= score[1] <= 1
            state = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
            candidates.append((score, weights, record, state))
    score, weights, record, state = max(candidates, key=lambda candidate: candidate[0])  # the first of equals
    assert 1 < record["epoch"] < 16
    assert score[0] > candidates[-1][0][0]
    assert result.best == {
        "weights": weights,
        "epoch": record["epoch"],
        "score": [round(40 * share) for share in score],
    }
    assert result.weights == weights == read_json(run / "model.json")["weights"]
    assert as_stored(result.metrics) == record
    correct = record["test_correct" if weights == "raw" else "ema_test_correct"]
    assert result.test_accuracy.count == correct
    written = read_tensors(run / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in written.items())
    assert read_json(run / "result.json")["best"] == result.best
    assert result.fingerprint == fingerprint(from_run(run))
    images, labels = some_digits().test.batch(slice(None))
    assert int((from_run(run)(images).argmax(1) == labels).sum()) == correct


def test_scores_are_those_of_the_attack_on_the_stored_model(tmp_path):
    for notes in SEEN.values():
        notes.clear()
    attack = NotingAttack(steps=2)
    training = spoiled(validation=Validation(40, Ball("linf", 0.05), attack))
    result = train(plain(), some_digits(), tmp_path / "run", training, device=CPU)
    images = SEEN["attacked"][0]
    labels = torch.cat(
        [some_digits().train.labels[(some_digits().train.images == i).flatten(1).all(1)] for i in images]
    )
    found = PGD(steps=2)(
        from_run(tmp_path / "run"), images, labels, Ball("linf", 0.05), seed=derived_seed(0, "validation")
    )
    clean = (from_run(tmp_path / "run")(images).argmax(1) == labels).sum()
    assert result.best["score"] == [int((~found.success).sum()), int(clean)]


def test_training_leaves_the_best_weights_in_the_model(tmp_path):
    model = plain()
    result = train(model, some_digits(), tmp_path / "run", spoiled(), device=CPU)
    assert fingerprint(model) == result.fingerprint


def test_a_finished_run_that_is_asked_for_again_leaves_the_same_weights_in_the_model(tmp_path):
    train(plain(), some_digits(), tmp_path / "run", spoiled(), device=CPU)
    again = plain()
    result = train(again, some_digits(), tmp_path / "run", spoiled(), device=CPU, resume=True)
    assert fingerprint(again) == result.fingerprint


# Death and damage ---------------------------------------------------------------------------------------------


class Death(BaseException):
    """Stands for SIGKILL: nothing but what is on the disk survives."""


def dying_at(call: int) -> Callable[[Any], None]:
    left = iter(range(call - 1))

    def watch(progress: Any) -> None:
        if next(left, None) is None:
            raise Death

    return watch


RESUMED = {
    "pgd": (
        "layernorm",
        Training(
            epochs=3,
            batch=40,
            accumulate=2,
            optimizer=AdamW(lr=1e-2),
            schedule=Cosine(warmup=1),
            sam=SAM(),
            augmentation=Augmentation(crop=1, mixup=0.5),
            objective=PGDTraining(LINF, steps=2, ramp=2.0, clean=0.25),
            penalties=(MSVP(1e-2, 1e-2, 1e-2),),
            ema=0.5,
            validation=Validation(30, LINF, PGD(steps=2)),
            checkpoint_steps=1,
        ),
    ),
    "trades, batch norm, epochs only": (
        "batchnorm",
        Training(epochs=3, batch=40, objective=TRADES(L2, steps=2), validation=Validation(30, L2, PGD(steps=2))),
    ),
    "spoiled, so that the best is an old one": (
        "layernorm",
        spoiled(ema=0.5, epochs=3, batch=40, checkpoint_steps=1, objective=Spoiling(3)),
    ),
    "mart, awp": (
        "layernorm",
        Training(
            epochs=3,
            batch=40,
            accumulate=2,
            objective=MART(LINF, steps=2, ramp=2.0),
            awp=AWP(),
            penalties=(MSVP(1e-2, 1e-2, 1e-2),),
            ema=0.5,
            validation=Validation(30, LINF, PGD(steps=1)),
            checkpoint_steps=1,
        ),
    ),
    "nfgsm, bfloat16": (
        "layernorm",
        Training(
            epochs=3,
            batch=40,
            objective=NFGSM(LINF),
            precision="bfloat16",
            validation=Validation(30, LINF, PGD(steps=1)),
        ),
    ),
}
FILES = ("metrics.jsonl", "model.safetensors", "model.json", "run.json")


def start(run: Path, name: str, watch: Callable[[Any], None] = lambda progress: None) -> None:
    norm, training = RESUMED[name]
    model = ViT(replace(CONFIG, norm=norm), torch.Generator().manual_seed(0))
    train(model, some_digits(), run, training, device=CPU, resume=True, watch=watch)


def outcome(run: Path) -> dict[str, object]:
    result = read_json(run / "result.json")
    kept = {name: result[name] for name in ("best", "weights", "fingerprint", "metrics", "test_accuracy")}
    return {**{name: (run / name).read_bytes() for name in FILES}, **kept}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_killed_after_any_step_or_epoch_ends_like_an_uninterrupted_one(name, tmp_path):
    start(tmp_path / "whole", name)
    expected = outcome(tmp_path / "whole")
    _, training = RESUMED[name]
    per_epoch = (120 - training.validation.images) // training.batch
    assert per_epoch == 2  # so that every third call tells of an epoch
    for call in range(1, 10) if training.checkpoint_steps else (2, 3, 6):
        with pytest.raises(Death):
            start(tmp_path / str(call), name, dying_at(call))
        start(tmp_path / str(call), name)
        found = outcome(tmp_path / str(call))
        assert [file for file in expected if found[file] != expected[file]] == []


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A run without EMA, killed after its second epoch of three."""
    run = tmp_path_factory.mktemp("killed") / "run"
    with pytest.raises(Death):
        start(run, "trades, batch norm, epochs only", dying_at(6))
    assert read_json(run / "checkpoints" / "00000004" / "state.json")["best"]["epoch"] in (1, 2)
    return run


@pytest.fixture
def damaged(killed, tmp_path) -> Callable[[dict[str, Any]], Path]:
    """That run, with another record of the best weights."""

    def make(changes: dict[str, Any]) -> Path:
        run = shutil.copytree(killed, tmp_path / "run")
        file = run / "checkpoints" / "00000004" / "state.json"
        record = read_json(file)
        write_json(file, {**record, "best": {**record["best"], **changes}})
        return run

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "mean"}, {"weights": None}, {"weights": "ema"}, {"epoch": "2"}, {"epoch": None}, {"epoch": 1.5},
        {"epoch": 0}, {"epoch": -1}, {"epoch": 3}, {"score": 12}, {"score": [1]}, {"score": [1, 2, 3]},
        {"score": [1, "2"]}, {"score": ["a", "b"]}, {"score": None}, {"score": [0.5, 0.5]},
        {"score": [31, 31]}, {"score": [-1, 5]}, {"score": [12, 10]},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_of_the_best_weights_that_makes_no_sense_is_refused(changes, damaged):
    run = damaged(changes)
    with pytest.raises(CheckpointError, match="00000004"):
        start(run, "trades, batch norm, epochs only")


def test_the_record_that_is_not_damaged_is_taken(damaged):
    start(damaged({}), "trades, batch norm, epochs only")


@pytest.mark.parametrize("best", [[], 7, "best", {}, None])
def test_best_weights_without_a_record_are_refused(best, damaged):
    run = damaged({})
    file = run / "checkpoints" / "00000004" / "state.json"
    record = read_json(file)
    record.pop("best")
    write_json(file, record if best is None else {**record, "best": best})
    with pytest.raises(CheckpointError, match="00000004"):
        start(run, "trades, batch norm, epochs only")


@pytest.mark.parametrize("lost", ["best/", "best/head.weight"])
def test_best_weights_that_are_missing_are_refused(lost, damaged):
    run = damaged({})
    tensors, _ = read_checkpoint(run, 4)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    assert len(kept) < len(tensors)
    write_tensors(run / "checkpoints" / "00000004" / "tensors.safetensors", kept)
    with pytest.raises(CheckpointError, match="00000004"):
        start(run, "trades, batch norm, epochs only")


def test_best_weights_that_are_missing_together_with_their_record_are_refused(damaged):
    """After a whole epoch there is a best one."""
    run = damaged({})
    tensors, record = read_checkpoint(run, 4)
    record.pop("best")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("best/")}
    write_tensors(run / "checkpoints" / "00000004" / "tensors.safetensors", kept)
    write_json(run / "checkpoints" / "00000004" / "state.json", record)
    with pytest.raises(CheckpointError, match="00000004"):
        start(run, "trades, batch norm, epochs only")


def test_best_weights_of_another_shape_are_refused(damaged):
    run = damaged({})
    tensors, _ = read_checkpoint(run, 4)
    tensors["best/head.bias"] = torch.zeros(11)
    write_tensors(run / "checkpoints" / "00000004" / "tensors.safetensors", tensors)
    with pytest.raises(CheckpointError, match="00000004"):
        start(run, "trades, batch norm, epochs only")


# Settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PGDTraining, {"steps": 0}), (PGDTraining, {"steps": 1.5}), (PGDTraining, {"step_size": 0.0}),
        (PGDTraining, {"step_size": -0.1}), (PGDTraining, {"step_size": NAN}), (PGDTraining, {"step_size": INF}),
        (PGDTraining, {"ramp": -1.0}), (PGDTraining, {"ramp": NAN}), (PGDTraining, {"ramp": INF}),
        (PGDTraining, {"clean": -0.1}), (PGDTraining, {"clean": 1.0}), (PGDTraining, {"clean": NAN}),
        (PGDTraining, {"label_smoothing": 1.0}), (PGDTraining, {"label_smoothing": NAN}),
        (TRADES, {"beta": -1.0}), (TRADES, {"beta": NAN}), (TRADES, {"beta": INF}), (TRADES, {"steps": 0}),
        (TRADES, {"step_size": 0.0}), (TRADES, {"ramp": -1.0}), (TRADES, {"label_smoothing": -0.1}),
        (MART, {"beta": -1.0}), (MART, {"beta": NAN}), (MART, {"steps": 0}), (MART, {"ramp": INF}),
        (MART, {"step_size": -1.0}), (MART, {"label_smoothing": 1.0}),
        (NFGSM, {"noise": -1.0}), (NFGSM, {"noise": NAN}), (NFGSM, {"noise": INF}), (NFGSM, {"ramp": NAN}),
        (NFGSM, {"label_smoothing": 2.0}),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(kind, options):
    with pytest.raises(ConfigError):
        kind(LINF, **options)


@pytest.mark.parametrize("images", [0, -3])
def test_validation_without_images_is_refused(images):
    with pytest.raises(ConfigError):
        Validation(images, LINF)


@pytest.mark.parametrize("images", [120, 121, 10**9])
def test_validation_that_leaves_nothing_to_train_on_is_refused_before_anything_is_written(images, tmp_path):
    training = Training(epochs=1, batch=40, validation=Validation(images, LINF))
    with pytest.raises(DataError, match=str(images)):
        train(plain(), some_digits(), tmp_path / "run", training, device=CPU)
    assert not (tmp_path / "run" / "run.json").exists()


def test_settings_of_adversarial_training_are_in_the_record_and_are_compared(tmp_path):
    training = spoiled(objective=PGDTraining(LINF, steps=2, ramp=1.5), epochs=1)
    train(plain(), some_digits(), tmp_path / "run", training, device=CPU)
    stored = read_json(tmp_path / "run" / "run.json")["training"]
    assert stored["objective"]["type"] == "PGDTraining"
    assert stored["objective"]["ball"] == {"type": "Ball", "norm": "linf", "radius": 0.1, "box": True}
    assert stored["validation"]["attack"]["steps"] == 2
    for other in (
        replace(training, objective=PGDTraining(LINF, steps=3, ramp=1.5)),
        replace(training, validation=replace(training.validation, ball=Ball("linf", 0.02))),
        replace(training, validation=None),
    ):
        with pytest.raises(RunError, match="other settings"):
            train(plain(), some_digits(), tmp_path / "run", other, device=CPU, resume=True)


# Compiled -----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from functools import partial
from pathlib import Path
from specguard.data import digits
from specguard.geometry import Ball
from specguard.nn import ViT, preset
from specguard.records.store import read_checkpoint
from specguard.train import NFGSM, TRADES, PGDTraining, Training, train
torch.set_num_threads(1)
objective, backend = eval(sys.argv[2]), sys.argv[3]
torch.compile = partial(torch.compile, backend=backend)
for mode in (None, "default"):
    model = ViT(preset("tiny", dim=12, depth=1, heads=2, pool="mean"), torch.Generator().manual_seed(0))
    run = Path(sys.argv[1]) / str(mode)
    training = Training(epochs=1, batch=200, objective=objective, compile=mode)
    train(model, digits(), run, training, device=torch.device("cpu"))
    print(*read_checkpoint(run, 7)[0]["losses"][0].tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "backend"),
    [
        ("PGDTraining(Ball('linf', 0.1), steps=3, clean=0.5)", "inductor"),
        ("TRADES(Ball('l2', 0.5))", "aot_eager"),  # the same graphs, without the time for C++
    ],
)
def test_compiled_adversarial_training_has_the_losses_of_eager_training(objective, backend, tmp_path):
    """In a process of its own: torch.compile cannot trace the type checker."""
    words = [sys.executable, "-c", SCRIPT, tmp_path, objective, backend]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    eager, compiled = ([float(word) for word in line.split()] for line in done.stdout.splitlines())
    assert len(eager) == 7
    assert compiled == pytest.approx(eager, rel=1e-3)
