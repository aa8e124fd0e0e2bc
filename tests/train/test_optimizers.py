"""Schedules against torch's own, SAM against its definition, weight decay where it belongs."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from helpers.registry import SMALL
from specguard.errors import ConfigError
from specguard.nn import TokenBatchNorm, ViT
from specguard.train import AWP, SAM, SGD, AdamW, Cosine, OneCycle
from specguard.train.optimizers import parameter_groups


def rates_of(scheduler_of, steps: int) -> list[float]:
    """The learning rates of a torch scheduler with peak 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = scheduler_of(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_one_cycle_has_the_rates_of_torchs_one_cycle():
    steps = 97
    theirs = rates_of(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, steps, cycle_momentum=False), steps - 1)
    ours = [OneCycle().factor(step, steps, 7) for step in range(steps - 1)]
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_cosine_without_warm_up_has_the_rates_of_torchs_cosine():
    steps = 53
    theirs = rates_of(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps), steps)
    assert [Cosine(warmup=0).factor(s, steps, 7) for s in range(steps)] == pytest.approx(
        theirs, rel=1e-9, abs=1e-12
    )


def test_warm_up_rises_in_equal_steps_from_above_zero_to_the_peak_and_then_falls():
    rates = [Cosine(warmup=2.0, floor=0.1).factor(s, 50, 5) for s in range(50)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a >= b for a, b in pairwise(rates[9:]))
    assert 0.1 <= rates[-1] < 0.12


def test_one_cycle_copes_with_training_of_few_steps():
    for steps in range(1, 12):
        assert all(0 <= OneCycle(rise=0.1).factor(step, steps, 1) <= 1 for step in range(steps))


def test_a_warm_up_longer_than_training_never_exceeds_the_peak():
    assert max(Cosine(warmup=100).factor(s, 7, 1) for s in range(7)) == 1


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_ascends_by_rho_along_the_gradient_and_comes_back_exactly(adaptive):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    model(torch.randn(7, 5)).square().sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters()]
    with SAM(rho=0.05, adaptive=adaptive).ascend(model):
        moves = [p.detach() - w for p, w in zip(model.parameters(), before, strict=True)]
    # e = rho T^2 g / ||T g||, with T = |w| if adaptive and 1 otherwise: ||T^-1 e|| = rho.
    scales = [w.abs() if adaptive else torch.ones_like(w) for w in before]
    length = math.sqrt(sum(float((t * g).square().sum()) for t, g in zip(scales, gradients, strict=True)))
    for move, t, g in zip(moves, scales, gradients, strict=True):
        torch.testing.assert_close(move, 0.05 * t * t * g / length, rtol=1e-3, atol=1e-7)
    for p, w in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, w)


def test_sam_comes_back_when_the_inner_step_fails_and_leaves_weights_without_gradient_alone():
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    before = [p.detach().clone() for p in model.parameters()]
    model[0](torch.ones(7, 5)).sum().backward()

    def look_and_fail() -> None:
        moved = [not torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True)]
        raise ArithmeticError(moved)

    with pytest.raises(ArithmeticError, match=r"\[True, True, False, False\]"), SAM().ascend(model):
        look_and_fail()
    for p, w in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, w)


@pytest.mark.parametrize("method", [SAM(0.1), AWP(0.1)])
def test_an_interrupt_in_the_middle_of_the_move_leaves_no_weight_moved(method, monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model(torch.rand(4, 3)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    add = torch._foreach_add_

    def interrupted(weights, moves):
        add(weights, moves)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_add_", interrupted)
    with pytest.raises(KeyboardInterrupt), method.ascend(model):
        raise AssertionError("the body must not run")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[1].track_running_stats


def test_sam_counts_every_batch_once_in_batch_norm():
    model = nn.Sequential(nn.Linear(5, 3), TokenBatchNorm(3))
    model(torch.randn(7, 5)).square().sum().backward()
    mean = model[1].norm.running_mean.clone()
    with SAM().ascend(model):
        model(torch.randn(7, 5))
    assert torch.equal(model[1].norm.running_mean, mean)
    assert model[1].norm.num_batches_tracked == 1
    model(torch.randn(7, 5))
    assert not torch.equal(model[1].norm.running_mean, mean)


def test_a_zero_gradient_moves_nothing():
    model = nn.Linear(3, 2)
    (model(torch.zeros(1, 3)).sum() * 0).backward()
    before = model.weight.detach().clone()
    with SAM().ascend(model):
        assert torch.equal(model.weight, before)


def test_weight_decay_is_for_matrices_only_and_no_weight_is_forgotten():
    model = ViT(SMALL)
    model.head.requires_grad_(False)
    decayed, spared = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    assert all(names[id(p)].endswith(("weight",)) and p.ndim > 1 for p in decayed["params"])
    assert {"class_token.token", "positions.table", "norm.weight"} <= {names[id(p)] for p in spared["params"]}
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters())) - 2


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (SGD, {"lr": -1.0}),
        (SGD, {"lr": float("nan")}),
        (SGD, {"momentum": 1.0}),
        (SGD, {"momentum": 0.0, "nesterov": True}),
        (AdamW, {"weight_decay": float("inf")}),
        (AdamW, {"betas": (1.5, 0.9)}),
        (OneCycle, {"start": 2.0}),
        (OneCycle, {"end": -1.0}),
        (Cosine, {"warmup": float("inf")}),
        (SAM, {"rho": 0.0}),
        (Cosine, {"warmup": -1.0}),
        (Cosine, {"floor": 2.0}),
        (OneCycle, {"rise": 1.0}),
    ],
)
def test_settings_that_make_no_sense_are_refused(build, options):
    with pytest.raises(ConfigError):
        build(**options)
