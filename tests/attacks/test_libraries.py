"""Our attacks are the attacks of torchattacks, foolbox and AutoAttack."""

import importlib
import warnings
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from conftest import repaired_torchvision
from helpers.registry import SMALL
from specguard.attacks import APGD, FAB, FGSM, PGD, Adversarial, Square
from specguard.data import digits
from specguard.geometry import Ball
from specguard.nn import ViT, preset
from specguard.rng import Noise
from specguard.train import AdamW, OneCycle, PGDTraining, Training, train

pytestmark = [
    # What pyautoattack has to say about images without gradients.
    pytest.mark.filterwarnings("ignore::Warning:pyautoattack"),
]
CPU = torch.device("cpu")
COUNT = 64  # a power of 2: the mean of the losses then has the sum's gradient, up to an exact factor
BALLS = {"linf": Ball("linf", 0.015), "l2": Ball("l2", 0.1)}
TOLERANCE = {"linf": 1e-12, "l2": 1e-7}  # in float64: seven steps up steep hills make much of what is rounded
STEPS, SIZE, SEED = 7, 0.25, 11  # the step size is in radii
IDS = torch.arange(100, 100 + COUNT)


def imported(name: str) -> ModuleType:
    repaired_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they import is deprecated
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def torchattacks() -> ModuleType:
    return imported("torchattacks")


@pytest.fixture(scope="module")
def foolbox() -> ModuleType:
    return imported("foolbox")


@pytest.fixture(scope="module")
def autoattack() -> ModuleType:
    return imported("pyautoattack")


@dataclass(frozen=True)
class Case:
    """Images on all sides of a model's boundaries; every eighth label is wrong from the start."""

    model: ViT
    images: Tensor
    labels: Tensor
    targets: Tensor


@pytest.fixture(scope="module")
def case() -> Case:
    generator = torch.Generator().manual_seed(5)
    model = ViT(replace(SMALL, channels=3, mean=(0.4, 0.6, 0.5), std=(0.3, 0.2, 0.25)), generator).eval()
    for parameter in model.parameters():
        parameter.detach().mul_(6)  # far from linear
    images = torch.rand(COUNT, 3, 6, 6, generator=generator).mul(1.4).sub(0.2).clamp(0, 1)  # some on the box
    ranks = model(images).detach().argsort(1, descending=True)
    labels, targets = ranks[:, 0].clone(), ranks[:, 2]
    labels[::8] = ranks[::8, 1]
    return Case(model.double(), images.double(), labels, targets)


def pgd(case: Case, norm: str, targeted: bool, **changes: object) -> Adversarial:
    """Ours, all steps taken by all images."""
    ball = BALLS[norm]
    attack = PGD(**{"steps": STEPS, "step_size": SIZE * ball.radius, "leave": False, **changes})  # type: ignore[arg-type]
    targets = case.targets if targeted else None
    return attack(case.model, case.images, case.labels, ball, targets=targets, ids=IDS, seed=SEED)


def offsets(case: Case, norm: str) -> Tensor:
    """Where a random start lies, seen from the image, before it is clamped to the box."""
    noise = Noise.of(IDS, SEED).fold(0)
    return replace(BALLS[norm], box=False).sample(torch.zeros_like(case.images), noise)


def agree(case: Case, norm: str, targeted: bool, ours: Adversarial, theirs: Tensor) -> None:
    """The same images, but for those whose last iterate lost what an earlier one, which we return, had broken."""

    def broken(images: Tensor) -> Tensor:
        predicted = case.model(images).argmax(1)
        return predicted == case.targets if targeted else predicted != case.labels

    same = (ours.images - theirs).abs().flatten(1).amax(1) <= TOLERANCE[norm]
    assert torch.equal(ours.success, broken(ours.images))
    assert ours.success[~same].all()
    assert not broken(theirs)[~same].any()
    assert (~same).sum() <= COUNT // 8
    assert 0 < broken(theirs).sum() < COUNT  # a test in which all or none break would say little
    assert (BALLS[norm].distance(theirs, case.images) > 0.5 * BALLS[norm].radius).all()


EVERY_PGD = pytest.mark.parametrize(
    ("norm", "start", "targeted"),
    [(norm, start, targeted) for norm in BALLS for start in ("center", "random") for targeted in (False, True)],
)


@EVERY_PGD
def test_pgd_finds_the_images_of_torchattacks(norm, start, targeted, case, torchattacks, monkeypatch):
    ball, kind = BALLS[norm], torchattacks.PGD if norm == "linf" else torchattacks.PGDL2
    random = start == "random"
    attack = kind(case.model, ball.radius, alpha=SIZE * ball.radius, steps=STEPS, random_start=random)
    if targeted:
        attack.set_mode_targeted_by_label(quiet=True)
    offset = offsets(case, norm)
    draws = [offset]
    if norm == "l2":  # a normal vector, whose length goes, and then a share of the radius
        draws.append(ball.distance(offset, 0 * offset).view(-1, 1, 1, 1) / ball.radius)
    with monkeypatch.context() as patch:
        for name in ("normal_", "uniform_"):
            patch.setattr(torch.Tensor, name, lambda *_: draws.pop(0).clone())
        theirs = attack(case.images, case.targets if targeted else case.labels)
    assert not draws or not random
    agree(case, norm, targeted, pgd(case, norm, targeted, start=start), theirs)


@EVERY_PGD
def test_pgd_finds_the_images_of_foolbox(norm, start, targeted, case, foolbox):
    ball = BALLS[norm]
    kind = foolbox.attacks.LinfPGD if norm == "linf" else foolbox.attacks.L2PGD
    attack = kind(abs_stepsize=SIZE * ball.radius, steps=STEPS, random_start=start == "random")
    offset = offsets(case, norm)
    attack.get_random_start = lambda x0, epsilon: x0 + type(x0)(offset)
    wish = foolbox.criteria.Misclassification(case.labels)
    if targeted:
        wish = foolbox.criteria.TargetedMisclassification(case.targets)
    wrapped = foolbox.PyTorchModel(case.model, bounds=(0, 1), device="cpu")
    theirs = attack.run(wrapped, case.images, wish, epsilon=ball.radius)
    agree(case, norm, targeted, pgd(case, norm, targeted, start=start), theirs)


@pytest.mark.parametrize("norm", BALLS)
def test_the_step_size_of_foolbox_relative_to_the_radius_is_ours_in_pixels(norm, case, foolbox):
    kind = foolbox.attacks.LinfPGD if norm == "linf" else foolbox.attacks.L2PGD
    attack = kind(rel_stepsize=2.5 / STEPS, steps=STEPS, random_start=False)
    wrapped = foolbox.PyTorchModel(case.model, bounds=(0, 1), device="cpu")
    theirs = attack.run(wrapped, case.images, case.labels, epsilon=BALLS[norm].radius)
    agree(case, norm, False, pgd(case, norm, False, start="center", step_size=None), theirs)


def test_fgsm_finds_the_images_of_torchattacks_and_foolbox(case, torchattacks, foolbox):
    ball = BALLS["linf"]
    ours = FGSM(case.model, case.images, case.labels, ball)
    wrapped = foolbox.PyTorchModel(case.model, bounds=(0, 1), device="cpu")
    found = {
        "torchattacks": torchattacks.FGSM(case.model, ball.radius)(case.images, case.labels),
        "foolbox": foolbox.attacks.LinfFastGradientAttack().run(
            wrapped, case.images, case.labels, epsilon=ball.radius
        ),
    }
    stood = ours.before == case.labels  # those that did not are left as they are
    assert stood.sum() == COUNT - COUNT // 8
    assert torch.equal(ours.images[~stood], case.images[~stood])
    for name, theirs in found.items():
        torch.testing.assert_close(ours.images[stood], theirs[stood], rtol=0, atol=1e-12, msg=name)
        assert torch.equal(ours.predicted[stood], case.model(theirs).argmax(1)[stood]), name
    assert 0 < ours.success[stood].sum() < stood.sum()


def test_fast_gradient_steps_in_l2_are_those_of_foolbox(case, foolbox):
    ball = BALLS["l2"]
    wrapped = foolbox.PyTorchModel(case.model, bounds=(0, 1), device="cpu")
    theirs = foolbox.attacks.L2FastGradientAttack().run(wrapped, case.images, case.labels, epsilon=ball.radius)
    ours = FGSM(case.model, case.images, case.labels, ball)
    stood = ours.before == case.labels
    torch.testing.assert_close(ours.images[stood], theirs[stood], rtol=0, atol=1e-7)


@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("norm", BALLS)
def test_pgd_on_the_margin_is_a_loop_written_by_hand(norm, targeted, case):
    ball, rows = BALLS[norm], torch.arange(COUNT)
    wanted = case.targets if targeted else case.labels
    x = (case.images + offsets(case, norm)).clamp(0, 1)
    for _ in range(STEPS):
        x.requires_grad_()
        logits = case.model(x)
        other_classes = logits.clone()
        other_classes[rows, wanted] = -1e9
        margin = other_classes.max(1).values - logits[rows, wanted]
        (gradient,) = torch.autograd.grad((-margin if targeted else margin).sum(), x)
        if norm == "linf":
            moved = x.detach() + SIZE * ball.radius * gradient.sign()
            x = torch.clamp(moved, case.images - ball.radius, case.images + ball.radius).clamp(0, 1)
        else:
            moved = x.detach() + SIZE * ball.radius * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            length = (moved - case.images).flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            x = (case.images + (moved - case.images) * (ball.radius / length).clamp(max=1)).clamp(0, 1)
    ours = pgd(case, norm, targeted, loss="margin")
    agree(case, norm, targeted, ours, x)
    assert not torch.allclose(
        ours.images, pgd(case, norm, targeted).images, atol=1e-3
    )  # another loss, other images


# On trained models --------------------------------------------------------------------------------------------

RADIUS = 0.1
OBJECTIVES = {"plain": {}, "adversarial": {"objective": PGDTraining(Ball("linf", RADIUS), steps=3, ramp=5)}}


@pytest.fixture(scope="module", params=OBJECTIVES)
def trained(request, tmp_path_factory) -> ViT:
    """A model that reads digits: 95 % of the test images trained plainly, 91 % adversarially."""
    model = ViT(preset("tiny", depth=1, pool="mean"), torch.Generator().manual_seed(0))
    training = Training(epochs=12, batch=64, optimizer=AdamW(lr=1e-2), schedule=OneCycle())
    training = replace(training, **OBJECTIVES[request.param])
    result = train(model, digits(), tmp_path_factory.mktemp("run") / "run", training, device=CPU)
    assert result.test_accuracy.count > 0.8 * result.test_accuracy.n
    return model.eval().requires_grad_(False)


def right(model: ViT, images: Tensor, labels: Tensor) -> int:
    return int((model(images).argmax(1) == labels).sum())


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ce", "dlr"])
@pytest.mark.parametrize("ball", [Ball("linf", RADIUS), Ball("l2", 0.4)], ids=lambda ball: ball.norm)
def test_auto_pgd_breaks_as_many_images_as_autoattacks(ball, loss, trained, autoattack):
    """Of 120, in the mean over three seeds: within 2 images."""
    images, labels = digits().test.batch(slice(0, 120))
    ours, theirs = 0, 0
    for seed in range(3):
        ours += int((~APGD(steps=50, loss=loss)(trained, images, labels, ball, seed=seed).success).sum())
        norm = {"linf": "Linf", "l2": "L2"}[ball.norm]
        base = importlib.import_module(f"{autoattack.__name__}.autopgd_base")
        attack = base.APGDAttack(trained, 50, norm, eps=ball.radius, seed=seed, loss=loss, device="cpu")
        theirs += right(trained, attack.perturb(images, labels), labels)
    assert abs(ours - theirs) <= 3 * 2
    assert 3 * 20 < theirs < 3 * right(trained, images, labels)


@pytest.mark.slow
@pytest.mark.parametrize("ball", [Ball("linf", RADIUS), Ball("l2", 0.4)], ids=lambda ball: ball.norm)
def test_auto_pgd_climbs_as_high_as_autoattacks_from_the_same_start(ball, trained, autoattack):
    images, labels = digits().test.batch(slice(0, 120))
    base = importlib.import_module(f"{autoattack.__name__}.autopgd_base")
    attack = base.APGDAttack(trained, 50, {"linf": "Linf", "l2": "L2"}[ball.norm], eps=ball.radius, device="cpu")
    attack.init_hyperparam(images)
    ours = APGD(steps=50, leave=False)(trained, images, labels, ball)
    start = ball.sample(images, Noise.of(torch.arange(120), 0).fold(0))
    theirs = attack.attack_single_run(images, labels, x_init=start)[2]
    reached = cross_entropy(trained(ours.images), labels)
    assert reached.item() == pytest.approx(theirs.mean().item(), rel=0.02)
    assert reached > 1.5 * cross_entropy(trained(start), labels)


@pytest.mark.slow
def test_our_own_suite_is_as_strong_as_autoattack(trained, autoattack):
    """Robust accuracy on 100 test images, linf 0.1: within one point, which is one image; random searches of both
    sides ask as often.
    """
    ball, count, queries = Ball("linf", RADIUS), 100, 500
    images, labels = digits().test.batch(slice(0, count))
    stand = torch.arange(count)
    suite = (APGD(loss="ce"), APGD(loss="dlr", targets=9), FAB(leave=True, targets=9), Square(queries))
    for attack in suite:
        found = attack(trained, images[stand], labels[stand], ball, ids=stand)
        stand = stand[~found.success]
    runner = autoattack.AutoAttack(trained, norm="Linf", eps=ball.radius, version="standard", seed=0, device="cpu")
    runner.square.n_queries = queries
    theirs, _ = runner.run_standard_evaluation(images, labels, batch_size=count)
    robust = right(trained, theirs, labels)
    assert ball.contains(theirs, images).all()
    assert abs(len(stand) - robust) <= 1, (
        f"of {count}, {len(stand)} stand after our suite, {robust} after AutoAttack"
    )
    assert 0 < robust < right(trained, images, labels)
