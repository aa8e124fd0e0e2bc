"""Flags for obfuscated gradients fire on planted defenses, and stay silent on honest models."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from specguard.attacks import Flag, find_flags
from specguard.data import digits
from specguard.errors import InputWarning
from specguard.geometry import Ball
from specguard.nn import ViT, preset
from specguard.penalties import MSVP
from specguard.train import AdamW, Cosine, Objective, PGDTraining, Training, train
from specguard.train.objectives.base import CrossEntropy

CPU = torch.device("cpu")
BALLS = {"linf": Ball("linf", 0.1), "l2": Ball("l2", 0.5)}
TRAININGS: dict[str, tuple[Objective, tuple[MSVP, ...]]] = {
    "plain": (CrossEntropy(), ()),
    "msvp": (CrossEntropy(), (MSVP(1e-3, 1e-3, 1e-3),)),
    "pgd": (PGDTraining(BALLS["linf"], steps=2, ramp=3), ()),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Callable[[str], nn.Module]:
    """Models of about 80 % accuracy, each trained when it is first asked for."""
    trained: dict[str, nn.Module] = {}

    def of(name: str) -> nn.Module:
        if name not in trained:
            objective, penalties = TRAININGS[name]
            training = Training(
                epochs=6,
                batch=32,
                seed=1,
                optimizer=AdamW(lr=4e-3),
                schedule=Cosine(warmup=1),
                objective=objective,
                penalties=penalties,
            )
            model = ViT(preset("tiny", depth=1, heads=2, pool="mean"), torch.Generator().manual_seed(1))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SPECGUARD_COMMIT", "test")
                result = train(model, digits(), tmp_path_factory.mktemp(name) / "run", training, device=CPU)
            assert result.test_accuracy.value > 0.7
            trained[name] = model.eval().requires_grad_(False)
        return trained[name]

    return of


@pytest.fixture(scope="module")
def some_digits() -> tuple[Tensor, Tensor]:
    return digits().test.batch(slice(0, 360))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """What defenses are planted on: as honest, and faster."""
    generator = torch.Generator().manual_seed(0)
    found = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    images, labels = digits().train.batch(slice(0, None))
    optimizer = torch.optim.Adam(found.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(found(images), labels).backward()
        optimizer.step()
    return found.eval().requires_grad_(False)


def one_sentence(flag: Flag) -> None:
    """A clause that a command line can put behind 'warning:'."""
    assert flag.name
    assert re.fullmatch(r"[a-z0-9][^\n]*[^.\s]", flag.message)
    assert ". " not in flag.message


def linear(classes: int = 4, size: int = 36, seed: int = 0) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(classes, size, generator=torch.Generator().manual_seed(seed))
    return lambda x: (x.flatten(1) - 0.5) @ weight.T.to(x.dtype)


def pictures(count: int = 20, *shape: int, seed: int = 1) -> Tensor:
    return torch.rand(count, *(shape or (1, 6, 6)), generator=torch.Generator().manual_seed(seed))


# Silence -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("norm", BALLS)
@pytest.mark.parametrize("name", TRAININGS)
def test_no_flag_is_raised_over_an_honest_model(honest, some_digits, name, norm):
    assert find_flags(honest(name), *some_digits, BALLS[norm], max_images=60) == ()


@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_the_scale_of_the_logits_is_no_sign_as_long_as_the_cross_entropy_has_a_slope(scale):
    model, x = linear(), pictures()
    found = find_flags(lambda v: scale * model(v), x, model(x).argmax(1), Ball("linf", 0.02))
    assert {flag.name for flag in found} <= {"saturation"}
    assert all("no slope at 0 of 20 images" in flag.message for flag in found)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_a_few_images_of_an_honest_model_are_no_reason_for_a_flag(count, seed):
    """One image that one attack breaks and the other does not says nothing."""
    first, second = linear(24, 36, seed), linear(4, 24, seed + 4)

    def smooth(v: Tensor) -> Tensor:
        return second(torch.tanh(first(v) / 6) + 0.5) / 5

    x = pictures(count, seed=seed + 10)
    assert find_flags(smooth, x, smooth(x).argmax(1), Ball("linf", 0.03)) == ()


def test_log_probabilities_are_logits():
    model, x = linear(), pictures()
    found = find_flags(lambda v: model(v).log_softmax(1), x, model(x).argmax(1), Ball("linf", 0.02))
    assert "probabilities" not in {flag.name for flag in found}


def test_without_an_image_that_is_classified_rightly_there_is_nothing_to_say():
    model, x = linear(), pictures()
    assert find_flags(lambda v: model(v).softmax(1), x, (model(x).argmax(1) + 1) % 4, Ball("linf", 0.02)) == ()


@pytest.mark.parametrize("norm", BALLS)
def test_the_diagnosis_itself_warns_of_nothing(norm):
    """It looks at a large radius on purpose; pictures as large as CIFAR's are no exception."""
    model, x = linear(size=3 * 32 * 32), pictures(3, 3, 32, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        find_flags(model, x, model(x).argmax(1), Ball(norm, 0.05))
    assert [str(w.message) for w in caught] == []


# Planted defenses --------------------------------------------------------------------------------------------


def straight_through(x: Tensor) -> Tensor:
    """Rounded, with the gradient of the identity."""
    return x + ((4 * x).round() / 4 - x).detach()


def noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


GENERATOR = torch.Generator()
# The defense, and the flags of which one must be raised.
PLANTED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], set[str]]] = {
    "logits times 1e4": (lambda f, x: 1e4 * f(x), {"saturation"}),
    "logits times 100": (lambda f, x: 100 * f(x), {"saturation"}),
    "sigmoid of 100 z": (lambda f, x: torch.sigmoid(100 * f(x)), {"saturation", "zero gradients"}),
    "noise on the pixels": (lambda f, x: f(x + 0.05 * noise(x.shape, GENERATOR)), {"randomness"}),
    "noise on the logits": (
        lambda f, x: (z := f(x)) + 0.01 * noise(z.shape, GENERATOR),
        {"randomness"},
    ),
    "rounded pixels": (lambda f, x: f((4 * x).round() / 4), {"zero gradients"}),
    "finely rounded pixels": (lambda f, x: f((16 * x).round() / 16), {"zero gradients"}),
    "rounded logits": (lambda f, x: f(x).round(), {"zero gradients"}),
    "straight-through rounding": (lambda f, x: f(straight_through(x)), {"gradient mismatch"}),
    "softmax": (lambda f, x: f(x).softmax(1), {"probabilities"}),
    "detached pixels": (lambda f, x: f(x.detach()), {"no gradients"}),
    "detached logits": (lambda f, x: f(x).detach(), {"no gradients"}),
}
ALSO_L2 = ("logits times 1e4", "noise on the pixels", "rounded pixels", "straight-through rounding", "softmax")


@pytest.mark.parametrize("norm", BALLS)
def test_the_model_that_defenses_are_planted_on_raises_no_flag(model, some_digits, norm):
    assert find_flags(model, *some_digits, BALLS[norm], max_images=60) == ()


@pytest.mark.filterwarnings("ignore:the model seems to return probabilities")
@pytest.mark.parametrize(
    ("name", "norm"), [(name, norm) for name in PLANTED for norm in BALLS if norm == "linf" or name in ALSO_L2]
)
def test_a_planted_defense_is_flagged_in_one_sentence(model, some_digits, name, norm):
    defense, wanted = PLANTED[name]
    GENERATOR.manual_seed(7)
    found = find_flags(lambda x: defense(model, x), *some_digits, BALLS[norm], max_images=20)
    assert wanted & {flag.name for flag in found}, found
    for flag in found:
        one_sentence(flag)
    assert len({flag.name for flag in found}) == len(found)


def test_what_only_random_squares_break_is_flagged(model, some_digits):
    found = find_flags(lambda x: model((4 * x).round() / 4), *some_digits, BALLS["l2"], max_images=20)
    (flag,) = [flag for flag in found if flag.name == "black box"]
    broken, count = map(int, re.findall(r"\d+", flag.message)[:2])
    assert 1 < broken <= count == 20


def test_a_model_that_stands_even_in_the_largest_ball_is_flagged():
    """It looks at the sign of a pixel that no small step changes, and its slope leads nowhere."""
    model, x = linear(), pictures()
    labels = model(x).argmax(1)

    def stubborn(v: Tensor) -> Tensor:
        return nn.functional.one_hot(labels[: len(v)], 4).to(v) + 1e-3 * model(v)

    found = {flag.name: flag.message for flag in find_flags(stubborn, x, labels, Ball("linf", 0.02))}
    assert "resist PGD even at linf 0.5" in found["large radius"]
    unboxed = find_flags(stubborn, x, labels, Ball("linf", 0.02, box=False))
    assert "large radius" not in {flag.name for flag in unboxed}


# What it looks at --------------------------------------------------------------------------------------------


def test_only_so_many_images_are_looked_at_and_only_those_classified_rightly():
    model, x = linear(), pictures(30)
    labels = model(x).argmax(1)
    labels[:5] = (labels[:5] + 1) % 4
    seen: list[Tensor] = []

    def rounded(v: Tensor) -> Tensor:
        seen.append(v)
        return model((4 * v).round() / 4)

    wrong = rounded(x).argmax(1) != labels
    seen.clear()
    (flag,) = [
        f for f in find_flags(rounded, x, labels, Ball("linf", 0.02), max_images=7) if f.name == "zero gradients"
    ]
    assert flag.message == "the margin has no slope at 7 of 7 images"
    assert [len(v) for v in seen[:2]] == [30, 7]
    assert torch.equal(seen[1], x[~wrong][:7])


def test_samples_that_are_no_images_are_diagnosed_without_squares():
    model, x = linear(size=9), pictures(20, 9)
    found = find_flags(lambda v: model((4 * v).round() / 4), x, model((4 * x).round() / 4).argmax(1), BALLS["l2"])
    assert "zero gradients" in {flag.name for flag in found}
    assert "black box" not in {flag.name for flag in found}


def test_the_same_seed_gives_the_same_flags_and_leaves_the_model_as_it_was(some_digits):
    vit = ViT(preset("tiny", depth=1, dim=8, heads=2), torch.Generator().manual_seed(0))
    images, _ = some_digits
    labels = vit.eval()(images).argmax(1)
    vit.train()
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    state = torch.random.get_rng_state()
    with pytest.warns(InputWarning, match="train mode"):
        first, again = (find_flags(vit, images, labels, BALLS["linf"], max_images=5, seed=3) for _ in range(2))
    assert first == again
    assert vit.training
    assert all(p.requires_grad and p.grad is None for p in vit.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in vit.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
