"""AutoAttack by adapter: either package, its result verified, its warnings heard, nothing left behind."""

import builtins
import importlib
import logging
import random
import sys
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from specguard.attacks import Adversarial, AutoAttack, Suite, named_suite
from specguard.data import Dataset
from specguard.errors import AttackError, ConfigError, DataError, InputWarning, SpecGuardError
from specguard.geometry import Ball
from specguard.records.attack import AttackSettings, AttackSummary
from specguard.records.base import About
from specguard.studies import run_attack

COUNT = 10
BALLS = {"linf": Ball("linf", 0.02), "l2": Ball("l2", 0.1)}  # some images fall, some stand
LARGE = Ball("linf", 0.3)  # all fall to the first attack, which is quick
NORMS = {"linf": "Linf", "l2": "L2"}

KNOWN = pytest.mark.filterwarnings("ignore:the model seems to return probabilities")


class Smooth(nn.Module):
    """Two small layers; as many classes as asked for."""

    def __init__(self, classes: int = 5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(6, 36, generator=generator).to(dtype))
        self.second = nn.Parameter(torch.randn(classes, 6, generator=generator).to(dtype))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x.flatten(1) - 0.5) @ self.first.T) @ self.second.T


def pictures(count: int = COUNT, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def labels_of(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """What the model sees, but for the last image."""
    with torch.no_grad():
        logits = model(images)
    labels = logits.argmax(1)
    labels[-1] = (labels[-1] + 1) % logits.shape[1]
    return labels


def attacked(model: Callable[[Tensor], Tensor], ball: Ball = LARGE, **options: Any) -> Adversarial:
    images = pictures(dtype=options.pop("dtype", torch.float32))
    return AutoAttack()(model, images, labels_of(model, images), ball, **options)


def verified(found: Adversarial, model: Callable[[Tensor], Tensor], images: Tensor, ball: Ball) -> None:
    """In the ball and the box, and every claim true."""
    labels = labels_of(model, images)
    assert found.images.dtype == images.dtype
    assert ball.contains(found.images, images).all()
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    with torch.no_grad():
        predicted = model(found.images).argmax(1)
    assert torch.equal(found.predicted, predicted)
    assert torch.equal(found.success, predicted != labels)
    assert torch.equal(found.before == labels, torch.arange(len(labels)) < len(labels) - 1)
    assert found.success[-1]
    assert torch.equal(found.images[-1], images[-1])  # wrong from the start, it is left alone


@pytest.fixture(scope="module")
def real() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("pyautoattack")


@pytest.fixture
def short(real, monkeypatch) -> None:
    """200 random squares instead of 5,000."""
    square = importlib.import_module("pyautoattack.square").SquareAttack
    monkeypatch.setattr(square, "n_queries", property(lambda _: 200, lambda _, value: None), raising=False)


# The package that is installed -------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", BALLS)
def test_the_result_lies_in_the_ball_and_is_verified(short, norm):
    model, ball = Smooth(), BALLS[norm]
    found = attacked(model, ball)
    verified(found, model, pictures(), ball)
    assert 2 <= int(found.success.sum()) < COUNT
    assert found.warnings == ()  # also: the number of targets is that of the classes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("classes", [4, 5, 12])
def test_any_number_of_classes_from_four_on_will_do(short, classes):
    """With fewer than ten there are fewer targets than the nine of the original."""
    found = attacked(Smooth(classes), Ball("linf", 0.05))
    verified(found, Smooth(classes), pictures(), Ball("linf", 0.05))
    assert found.warnings == ()


def test_a_model_in_float64_is_attacked_and_verified_in_float64(short):
    model, ball = Smooth(dtype=torch.float64), BALLS["linf"]
    found = attacked(model, ball, dtype=torch.float64)
    verified(found, model, pictures(dtype=torch.float64), ball)
    assert 2 <= int(found.success.sum()) < COUNT


def test_a_search_in_bfloat16_is_verified_in_full(real):
    model = Smooth()
    found = attacked(model, LARGE, precision="bfloat16")
    verified(found, model, pictures(), LARGE)
    assert int(found.success.sum()) > 2


def test_a_single_image_and_no_image_that_stands_are_no_special_cases(short):
    model, images = Smooth(), pictures()
    labels = labels_of(model, images)
    one = AutoAttack()(model, images[:1], labels[:1], BALLS["linf"])
    assert one.images.shape == images[:1].shape
    wrong = AutoAttack()(model, images, (labels_of(model, images) + 2) % 5, BALLS["linf"])
    assert int(wrong.success.sum()) >= COUNT - 1
    nothing = AutoAttack()(model, images[:0], labels[:0], BALLS["linf"])
    assert len(nothing.images) == 0


def test_the_result_depends_on_the_seed_and_on_nothing_else(short):
    found = []
    for state in (0, 99):
        torch.manual_seed(state)
        found.append(attacked(Smooth(), LARGE, seed=5))
    assert torch.equal(found[0].images, found[1].images)
    other = attacked(Smooth(), LARGE, seed=6)
    assert not torch.equal(other.images, found[0].images)


# What it leaves behind ---------------------------------------------------------------------------------------


@KNOWN
def test_generators_and_filters_of_warnings_are_as_they_were(real):
    torch.manual_seed(3)
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    filters, shown = list(warnings.filters), warnings.showwarning
    handlers, level = list(logging.getLogger("auto-attack").handlers), logging.getLogger("auto-attack").level
    found = attacked(lambda x: Smooth()(x).softmax(1))
    assert found.warnings
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert warnings.filters == filters
    assert warnings.showwarning is shown
    assert logging.getLogger("auto-attack").handlers == handlers
    assert logging.getLogger("auto-attack").level == level


def test_generators_and_filters_are_as_they_were_even_after_a_failure(real):
    calls = 0

    def failing(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise KeyboardInterrupt
        return Smooth()(x)

    torch.manual_seed(3)
    state, filters = torch.random.get_rng_state(), list(warnings.filters)
    handlers = list(logging.getLogger("auto-attack").handlers)
    with pytest.raises(KeyboardInterrupt):
        attacked(failing, BALLS["linf"])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert warnings.filters == filters
    assert logging.getLogger("auto-attack").handlers == handlers


@KNOWN
def test_nothing_is_printed(real, capfd):
    assert attacked(lambda x: Smooth()(x).softmax(1)).warnings
    assert capfd.readouterr() == ("", "")


# What it warns of --------------------------------------------------------------------------------------------


def test_a_randomized_model_is_warned_of(real):
    model, generator = Smooth(), torch.Generator().manual_seed(0)
    images = pictures()
    found = AutoAttack()(
        lambda x: model(x) + 0.1 * torch.randn(len(x), 5, generator=generator),
        images,
        labels_of(model, images),
        LARGE,
    )
    assert [text for text in found.warnings if "randomized defense" in text]


def test_probabilities_in_place_of_logits_are_warned_of(real):
    with pytest.warns(InputWarning, match="seems to return probabilities"):
        found = attacked(lambda x: Smooth()(x).softmax(1))
    assert [text for text in found.warnings if "probability distribution" in text]
    assert [text for text in found.warnings if "seems to return probabilities" in text]


def test_zero_gradients_and_a_black_box_that_beats_the_white_ones_are_warned_of(short):
    model, ball = Smooth(), Ball("linf", 0.05)

    def rounded(x: Tensor) -> Tensor:
        return model((8 * x).round() / 8)

    found = attacked(rounded, ball)
    verified(found, rounded, pictures(), ball)
    assert [text for text in found.warnings if "zero gradient" in text]
    assert [text for text in found.warnings if "Square Attack has decreased the robust accuracy" in text]
    assert len(set(found.warnings)) == len(found.warnings)


@KNOWN
def test_a_warning_is_one_line(real):
    for text in attacked(lambda x: Smooth()(x).softmax(1)).warnings:
        assert "\n" not in text
        assert text.strip() == text


@KNOWN
@pytest.mark.parametrize("silenced", ["root", "logger"])
def test_warnings_are_heard_whatever_the_application_wants_to_see_of_logs(real, silenced):
    """An application that logs errors only must not turn an unreliable result into a reliable one."""
    logger = logging.getLogger("auto-attack" if silenced == "logger" else None)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        found = attacked(lambda x: Smooth()(x).softmax(1))
    finally:
        logger.setLevel(level)
    assert [text for text in found.warnings if "probability distribution" in text]


# What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_fewer_than_four_classes_are_refused(real, classes):
    with pytest.raises(AttackError, match=f"at least 4 classes, not {classes}") as caught:
        attacked(Smooth(classes))
    assert "full suite" in str(caught.value)


def test_targets_and_a_ball_without_a_box_are_refused(real):
    model, images = Smooth(), pictures()
    labels = labels_of(model, images)
    with pytest.raises(ConfigError, match="neither targets nor balls without the box"):
        AutoAttack()(model, images, labels, LARGE, targets=(labels + 1) % 5)
    with pytest.raises(ConfigError, match="neither targets nor balls without the box"):
        AutoAttack()(model, images, labels, Ball("linf", 0.1, box=False))


def test_a_model_without_gradients_is_one_sentence(real):
    """As it is for this package's own attacks."""
    model = Smooth()
    with pytest.raises(AttackError) as caught:
        attacked(lambda x: model(x.detach()).detach())
    assert "\n" not in str(caught.value)
    assert "no gradient" in str(caught.value)


def test_samples_that_are_no_images_are_one_sentence(real):
    """As they are for this package's own square attack."""
    model, samples = Smooth(), pictures().flatten(1)
    with pytest.raises((DataError, AttackError)) as caught:
        AutoAttack()(model, samples, labels_of(model, samples), BALLS["linf"])
    assert isinstance(caught.value, SpecGuardError)
    assert "\n" not in str(caught.value)


def test_without_either_package_one_sentence_says_what_to_install(monkeypatch):
    for name in ("pyautoattack", "autoattack"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        attacked(Smooth())
    assert "pip install pyautoattack" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_package_that_lacks_a_package_of_its_own_is_not_called_missing(monkeypatch):
    def imported(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'something'", name="something")

    monkeypatch.setattr(importlib, "import_module", imported)
    with pytest.raises(ModuleNotFoundError, match="something"):
        attacked(Smooth())


# The original package ----------------------------------------------------------------------------------------


class Original:
    """What the adapter knows of fra31/auto-attack: its signatures, and that it returns the images alone."""

    made: "list[Original]" = []  # noqa: RUF012 - cleared by the fixture
    says: tuple[str, ...] = ()
    how: Callable[[str], None] = print

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        norm: str = "Linf",
        eps: float = 0.3,
        seed: int | None = None,
        verbose: bool = True,
        attacks_to_run: list[str] = [],  # noqa: B006
        version: str = "standard",
        is_tf_model: bool = False,
        device: str = "cuda",
        log_path: str | None = None,
    ) -> None:
        self.model, self.norm, self.eps, self.seed, self.verbose = model, norm, eps, seed, verbose
        self.version, self.device, self.batches = version, device, list[int]()
        self.fab, self.apgd_targeted = SimpleNamespace(n_target_classes=9), SimpleNamespace(n_target_classes=9)
        assert (attacks_to_run, is_tf_model, log_path) == ([], False, None)
        if verbose:
            print(f"setting parameters for {version} version")
        self.made.append(self)

    def run_standard_evaluation(
        self,
        x_orig: Tensor,
        y_orig: Tensor,
        bs: int = 250,
        return_labels: bool = False,
        state_path: str | None = None,
    ) -> Any:
        assert (return_labels, state_path) == (False, None)
        self.batches.append(bs)
        torch.manual_seed(self.seed or 0)
        for text in self.says:
            type(self).how(text)
        with torch.enable_grad():
            x = x_orig.clone().requires_grad_()
            logits = self.model(x)
            nn.functional.cross_entropy(logits, y_orig, reduction="sum").backward()
        assert logits.dtype == x_orig.dtype == torch.float32
        assert x.grad is not None
        noise = 1 + 0.1 * torch.rand(x_orig.shape)
        step = x.grad.sign() if self.norm == "Linf" else x.grad / x.grad.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        found = (x_orig + self.eps * step * (noise / 1.1)).clamp(0, 1)
        with torch.no_grad():
            still = self.model(found).argmax(1) == y_orig
        return torch.where(still.view(-1, 1, 1, 1), x_orig, found)


@pytest.fixture
def original(monkeypatch) -> type[Original]:
    """The original installed, the other one not."""
    package = ModuleType("autoattack")
    package.AutoAttack = Original  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    monkeypatch.setitem(sys.modules, "autoattack", package)
    monkeypatch.setattr(Original, "made", [])
    return Original


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", BALLS)
def test_the_original_is_called_as_it_wants_to_be(original, capsys, norm, dtype):
    model, ball = Smooth(dtype=dtype), BALLS[norm]
    found = attacked(model, ball, dtype=dtype, seed=4)
    verified(found, model, pictures(dtype=dtype), ball)
    assert 2 <= int(found.success.sum()) < COUNT
    (made,) = original.made
    assert made.norm == NORMS[norm]
    assert made.eps == ball.radius
    assert isinstance(made.seed, int)
    assert 0 <= made.seed < 2**31
    assert (made.verbose, made.version, made.device) == (False, "standard", "cpu")
    assert made.batches == [COUNT - 1]  # the image that is wrong already is not attacked
    assert made.fab.n_target_classes == made.apgd_targeted.n_target_classes == 4
    assert capsys.readouterr().out == ""


def test_the_global_generator_is_as_it_was_after_the_original(original):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    attacked(Smooth(), BALLS["linf"])
    assert torch.equal(torch.random.get_rng_state(), state)


RANDOM = 'it seems to be a randomized defense! Please use version="rand". See flags_doc.md for details.'


@pytest.mark.parametrize(
    "how",
    [lambda text: warnings.warn(Warning(text), stacklevel=1), lambda text: builtins.print(f"Warning: {text}")],
    ids=["by a warning", "by its own logger, which prints"],
)
def test_what_the_original_warns_of_is_repeated(original, monkeypatch, how):
    """Its checks call `logger.log('Warning: ...')`, and the logger it makes for itself prints."""
    monkeypatch.setattr(original, "says", (RANDOM,))
    monkeypatch.setattr(original, "how", staticmethod(how))
    found = attacked(Smooth(), BALLS["linf"])
    assert len(found.warnings) == 1
    assert found.warnings[0].removeprefix("Warning: ") == RANDOM


@pytest.fixture
def warned(original, monkeypatch, tmp_path) -> AttackSummary:
    """A study under AutoAttack, which warns of something."""
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")
    monkeypatch.setattr(original, "says", (RANDOM,))
    monkeypatch.setattr(original, "how", staticmethod(lambda text: warnings.warn(Warning(text), stacklevel=1)))
    model, images = Smooth(), pictures()
    suite = named_suite("autoattack", 5)
    assert suite == Suite((("autoattack", AutoAttack()),))
    found = run_attack(
        model,
        Dataset(images, labels_of(model, images)),
        tuple("abcde"),
        tmp_path,
        suite,
        (BALLS["linf"],),
        AttackSettings(batch=4, diagnose=False),
        about=About(model="m", data="d", dataset="noise", n=len(images)),
        device=torch.device("cpu"),
    )
    assert isinstance(found, AttackSummary)
    return found


def test_a_study_under_autoattack_carries_its_warnings_and_every_batch_has_a_seed_of_its_own(original, warned):
    assert warned.warnings == (RANDOM,)
    assert [made.batches for made in original.made] == [[4], [4], [1]]
    assert len({made.seed for made in original.made}) == 3


def test_what_autoattack_warns_of_makes_an_entry_of_the_leaderboard_unreliable(warned):
    from specguard.report import robustbench_record

    entry = robustbench_record(warned, name="a", architecture="b", dataset="c")
    assert entry["unreliable"] is True
    assert entry["autoattack_acc"] == f"{100 * warned.attacks[0].accuracy.value:.2f}"
