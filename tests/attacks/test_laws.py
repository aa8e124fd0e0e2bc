"""The laws of an attack, run over every attack of a registry, and over wrong attacks, which they must catch.

The models are small and random; the radii are such that some images break and some stand.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jaxtyping import config
from registry import SMALL
from torch import Tensor, nn

from specguard.attacks import APGD, CWL2, FAB, FGSM, PGD, Adversarial, Attack, Square
from specguard.attacks.losses import Goal
from specguard.attacks.victim import Victim
from specguard.errors import AttackError, ConfigError, DataError, SpecGuardError
from specguard.geometry import Ball
from specguard.nn import ViT
from specguard.noise import Noise

pytestmark = pytest.mark.usefixtures("one_thread")

ATTACKS: dict[str, Attack] = {
    "fgsm": FGSM,
    "pgd": PGD(steps=4),
    "pgd center margin": PGD(steps=4, start="center", loss="margin"),
    "pgd dlr restarts": PGD(steps=3, loss="dlr", restarts=2),
    "pgd stays": PGD(steps=4, leave=False),
    "pgd margin restarts stays": PGD(steps=3, step_size=0.02, loss="margin", restarts=2, leave=False),
    "apgd": APGD(steps=6),
    "apgd margin restarts": APGD(steps=4, loss="margin", restarts=2),
    "apgd dlr": APGD(steps=6, loss="dlr"),
    "apgd dlr stays": APGD(steps=5, loss="dlr", restarts=2, leave=False),
    "apgd targets": APGD(steps=5, loss="dlr", targets=3),
    "square": Square(queries=15),
    "square stays": Square(queries=12, area=0.3, leave=False),
    "fab": FAB(steps=4, targets=3),
    "fab leaves": FAB(steps=4, targets=3, leave=True),
    "fab restarts": FAB(steps=3, targets=2, restarts=2),
    "cw": CWL2(steps=8, searches=3),
    "cw leaves": CWL2(steps=8, searches=3, leave=True),
}
ORDER = {"l2": 2, "linf": np.inf}
DUAL_ORDER = {"l2": 2, "linf": 1}
NORMS = ("l2", "linf")
COUNT, WRONG = 7, 2  # images, and the one whose label the model does not share
IDS = torch.tensor([100, 3, -7, 2**40, 5, 12, 0])
RADII = {  # (some break, most break)
    ("vit", "l2"): (0.08, 0.6),
    ("vit", "linf"): (0.015, 0.08),
    ("mlp", "l2"): (0.2, 1.5),
    ("mlp", "linf"): (0.05, 0.3),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(classes: int = 5, seed: int = 5) -> nn.Module:
    """With everything that behaves otherwise in training: statistics of the batch and dropout."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(72, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, classes)
    )
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        model[2].weight.add_(1.0)
        model[2].running_mean.copy_(torch.randn(16, generator=generator))
        model[2].running_var.copy_(0.5 + torch.rand(16, generator=generator))
    return model


def vit() -> nn.Module:
    generator = seeded(5)
    model = ViT(SMALL, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@dataclass(frozen=True)
class Case:
    """A model, the images it is attacked on, and a ball."""

    kind: str
    dtype: torch.dtype
    ball: Ball

    @cached_property
    def model(self) -> nn.Module:
        return _model(self.kind, self.dtype)

    @cached_property
    def images(self) -> Tensor:
        """Some of whose pixels lie on the border of the box."""
        images = torch.rand(COUNT, 2, 6, 6, generator=seeded(6), dtype=torch.float64)
        return (1.2 * images - 0.1).clamp(0, 1).to(self.dtype)

    @cached_property
    def labels(self) -> Tensor:
        labels = predictions(self.model, self.images)
        labels[WRONG] = (labels[WRONG] + 1) % 5
        return labels

    @cached_property
    def targets(self) -> Tensor:
        """The second choice of the model; one image is taken for its target already."""
        with torch.no_grad():
            top = self.model(self.images).topk(2, 1).indices
        return torch.cat([top[:1, 0], top[1:, 1]])

    def __str__(self) -> str:
        box = "box" if self.ball.box else "free"
        return f"{self.kind}-{str(self.dtype).removeprefix('torch.')}-{self.ball.norm}-{self.ball.radius}-{box}"


@cache
def _model(kind: str, dtype: torch.dtype) -> nn.Module:
    return {"vit": vit, "mlp": mlp}[kind]().to(dtype).eval()


def predictions(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images).argmax(1)


@cache
def found(attack: Attack, case: Case) -> Adversarial:
    """What the attack finds; the laws share it."""
    return attack(case.model, case.images, case.labels, case.ball)


def lengths(x: Tensor, y: Tensor, norm: str) -> np.ndarray:
    """The distance of each sample, by numpy, one at a time."""
    pairs = zip(x.double().flatten(1).numpy(), y.double().flatten(1).numpy(), strict=True)
    return np.array([np.linalg.norm(a - b, ORDER[norm]) for a, b in pairs])


def same(one: Adversarial, other: Adversarial, tolerance: float = 0.0) -> None:
    """Assert that two results agree in everything."""
    for name in ("success", "before", "predicted"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("images", "distance", "closest"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=tolerance)


class Seen:
    """A model that writes down what it is shown."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self.model, self.inputs = model, []

    def __call__(self, x: Tensor) -> Tensor:
        self.inputs.append(x.detach().clone())
        return self.model(x)


def starts_at_random(attack: Attack) -> bool:
    return isinstance(attack, APGD | Square) or (isinstance(attack, PGD) and attack.start == "random")


def lets_go(attack: Attack) -> bool:
    """Whether images that are broken before the attack are left as they are."""
    return attack.leave or attack.minimal


def needs_gradients(attack: Attack) -> bool:
    return not isinstance(attack, Square)


# The laws. Each takes an attack and a case, and fails by assertion.


def law_radius_zero_is_the_identity(attack: Attack, case: Case) -> None:
    result = found(attack, replace(case, ball=replace(case.ball, radius=0.0)))
    assert torch.equal(result.images, case.images)
    assert result.success.tolist() == [i == WRONG for i in range(COUNT)]
    assert (result.distance == 0).all()


def law_the_result_lies_in_the_ball_and_in_the_box(attack: Attack, case: Case) -> None:
    result = found(attack, case)
    assert (result.images.shape, result.images.dtype) == (case.images.shape, case.dtype)
    assert (lengths(result.images, case.images, case.ball.norm) <= case.ball.radius + 1e-6).all()
    assert not case.ball.box or ((result.images >= 0) & (result.images <= 1)).all()


def law_success_is_to_be_misclassified_and_nothing_else_is(attack: Attack, case: Case) -> None:
    result = found(attack, case)
    again = predictions(case.model, result.images)
    assert torch.equal(result.success, again != case.labels)
    assert torch.equal(result.predicted, again)
    assert torch.equal(result.before, predictions(case.model, case.images))


def law_the_distances_are_true(attack: Attack, case: Case) -> None:
    result = found(attack, case)
    rounding = 1e-12 if case.dtype == torch.float64 else 1e-5
    true = lengths(result.images, case.images, case.ball.norm)
    np.testing.assert_allclose(result.distance.double().numpy(), true, rtol=rounding, atol=1e-12)
    closest, success = result.closest.double().numpy(), result.success.numpy()
    assert (closest[success] <= true[success] + 1e-6).all()
    assert (closest[~success] > case.ball.radius).all() if attack.minimal else np.isinf(closest[~success]).all()
    assert closest[WRONG] == 0
    assert (closest[np.arange(COUNT) != WRONG] > 0).all()


def law_what_was_broken_before_is_left_as_it_was(attack: Attack, case: Case) -> None:
    result = found(attack, case)
    assert result.success[WRONG]
    if lets_go(attack):
        assert torch.equal(result.images[WRONG], case.images[WRONG])
        assert result.distance[WRONG] == 0


def law_more_effort_never_loses_a_broken_image(attack: Attack, case: Case) -> None:
    for weak, strong in efforts(attack, case.ball):
        less, more = found(weak, case), found(strong, case)
        assert not (less.success & ~more.success).any(), (weak, strong)
        if attack.minimal and not attack.leave:
            assert (more.closest <= less.closest).all(), (weak, strong)


def efforts(attack: Attack, ball: Ball) -> Iterator[tuple[Attack, Attack]]:
    """Pairs of attacks of which the second does all that the first does, and more."""
    if isinstance(attack, PGD):
        fixed = replace(attack, step_size=ball.radius / 2)
        yield replace(fixed, steps=1), replace(fixed, steps=2)
        yield replace(fixed, steps=2), replace(fixed, steps=7)
    if isinstance(attack, PGD | APGD):  # the step sizes of APGD depend on the number of steps
        yield replace(attack, restarts=1), replace(attack, restarts=3)
    if isinstance(attack, APGD) and attack.targets:
        yield replace(attack, targets=1), replace(attack, targets=3)
    if isinstance(attack, Square):
        yield replace(attack, queries=3), replace(attack, queries=12)
    if isinstance(attack, FAB):
        alone = replace(attack, restarts=1)  # a restart begins where the steps before it ended
        yield replace(alone, steps=1), replace(alone, steps=2)
        yield replace(alone, steps=2), replace(alone, steps=7)
        yield replace(alone, targets=1), replace(alone, targets=4)
        yield alone, replace(attack, restarts=2)
    if isinstance(attack, CWL2):  # the step size depends on the number of steps
        yield replace(attack, searches=1), replace(attack, searches=4)


def law_the_seed_and_the_ids_decide_on_all_that_is_random(attack: Attack, case: Case) -> None:
    def start(seed: int = 0, ids: Tensor | None = None) -> Tensor:
        """What the model is shown after the clean images."""
        seen = Seen(case.model)
        attack(seen, case.images, case.labels, case.ball, seed=seed, ids=ids)
        return seen.inputs[1]

    again = attack(case.model, case.images, case.labels, case.ball, seed=0)
    same(again, found(attack, case))
    first = start()
    for other in (start(seed=1), start(seed=-1), start(ids=torch.arange(COUNT) + 1)):
        if starts_at_random(attack):
            assert (other != first).flatten(1).any(1).all()
        else:
            assert torch.equal(other, first)


def law_neither_the_batch_nor_its_order_matters(attack: Attack, case: Case) -> None:
    """In pieces of one, two and four, in another order, the numbers of the images passed along."""
    order = torch.tensor([5, 2, 0, 6, 1, 4, 3])
    whole = attack(case.model, case.images, case.labels, case.ball, ids=IDS)
    for sizes in ([COUNT], [1, 2, 4]):
        for part in order.split(sizes):
            piece = attack(case.model, case.images[part], case.labels[part], case.ball, ids=IDS[part])
            assert torch.equal(piece.success, whole.success[part])
            assert torch.equal(piece.predicted, whole.predicted[part])
            torch.testing.assert_close(piece.images, whole.images[part], rtol=0, atol=1e-9)
            torch.testing.assert_close(piece.closest, whole.closest[part], rtol=0, atol=1e-9)


def law_the_number_of_threads_does_not_matter(attack: Attack, case: Case) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = attack(case.model, case.images, case.labels, case.ball)
    finally:
        torch.set_num_threads(threads)
    same(two, found(attack, case), 1e-9)


def law_the_layout_in_memory_does_not_matter(attack: Attack, case: Case) -> None:
    wide = torch.zeros(COUNT, 2, 6, 9, dtype=case.dtype)
    wide[..., 2:8] = case.images
    last = case.images.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    for images in (case.images.to(memory_format=torch.channels_last), wide[..., 2:8], last):
        assert torch.equal(images, case.images)
        same(attack(case.model, images, case.labels, case.ball), found(attack, case), 1e-9)


def mixed_up(case: Case) -> nn.Module:
    """A copy of the model in training, but for one layer, with one frozen weight and one that has a gradient."""
    model = copy.deepcopy(case.model).train()
    layers = [layer for layer in model.modules() if not list(layer.children())]
    layers[1].training = False
    weights = list(model.parameters())
    weights[0].requires_grad_(False)
    weights[1].grad = torch.full_like(weights[1], 0.25)
    return model


def snapshot(model: nn.Module) -> dict[str, object]:
    """All that an attack must not touch, as values that can be compared."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "modes": [(name, layer.training) for name, layer in model.named_modules()],
        "flags": [(name, tensor.requires_grad) for name, tensor in tensors],
        "values": [(name, tensor.tolist()) for name, tensor in tensors],
        "gradients": [(n, None if p.grad is None else p.grad.tolist()) for n, p in model.named_parameters()],
        "hooks": [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.modules()],
    }


def law_the_model_is_evaluated_and_left_as_it_was(attack: Attack, case: Case) -> None:
    for of in (lambda m: m, lambda m: m.forward, lambda m: nn.Sequential(m, nn.Identity())):
        model = mixed_up(case)
        before = snapshot(model)
        same(attack(of(model), case.images, case.labels, case.ball), found(attack, case))
        assert snapshot(model) == before


class Raises(nn.Module):
    """Raises when it is called for the n-th time."""

    def __init__(self, inner: nn.Module, left: int) -> None:
        super().__init__()
        self.inner, self.left = inner, left

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyError("planted")
        return self.inner(x)


def law_the_model_is_left_as_it_was_also_when_it_raises(attack: Attack, case: Case) -> None:
    for calls in (1, 2, 3):
        model = Raises(mixed_up(case), calls)
        before, modes = snapshot(model), (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        with pytest.raises(KeyError, match="planted"):
            attack(model, case.images, case.labels, case.ball)
        assert snapshot(model) == before
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == modes


def law_inputs_and_generators_are_left_as_they_were(attack: Attack, case: Case) -> None:
    given = [tensor.clone() for tensor in (case.images, case.labels, case.targets, IDS)]
    images, labels, targets, ids = given
    images.requires_grad_()
    state = torch.get_rng_state()
    result = attack(case.model, images, labels, case.ball, targets=targets, ids=ids)
    for tensor, original in zip(given, (case.images, case.labels, case.targets, IDS), strict=True):
        assert torch.equal(tensor, original)
        assert tensor._version == 0, "written to, if only to write the same"
    assert images.grad is None
    assert images.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(getattr(result, name).requires_grad for name in ("images", "distance", "closest"))
    result.images.fill_(-1.0)  # what is returned is nobody else's memory
    assert torch.equal(images, case.images)


def law_no_grad_and_inference_mode_do_not_matter(attack: Attack, case: Case) -> None:
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        for targets in (None, case.targets):
            expected = attack(case.model, case.images, case.labels, case.ball, targets=targets)
            with mode():
                enabled = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
                own = [t if t is None else t.clone() for t in (case.images, case.labels, targets, torch.arange(COUNT))]
                images, labels, aims, ids = own
                same(attack(case.model, images, labels, case.ball, targets=aims, ids=ids), expected)
                assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == enabled


def law_with_targets_success_is_to_be_taken_for_the_target(attack: Attack, case: Case) -> None:
    result = attack(case.model, case.images, case.labels, case.ball, targets=case.targets)
    again = predictions(case.model, result.images)
    assert torch.equal(result.success, again == case.targets)
    assert torch.equal(result.predicted, again)
    assert (lengths(result.images, case.images, case.ball.norm) <= case.ball.radius + 1e-6).all()
    assert result.success[0]
    assert result.closest[0] == 0
    if lets_go(attack):
        assert torch.equal(result.images[0], case.images[0])
    if attack.minimal:
        assert torch.equal(result.success, result.closest <= case.ball.radius)


def law_what_bfloat16_claims_is_verified_in_full_precision(attack: Attack, case: Case) -> None:
    """Also for a model that is all wrong in bfloat16: whoever believes it stops at once and reports success."""
    for lies in (False, True):
        reduced = []

        def model(x: Tensor, lies: bool = lies, reduced: list[bool] = reduced) -> Tensor:
            reduced.append(torch.is_autocast_enabled("cpu"))
            logits = case.model(x)
            return logits.roll(1, 1) if lies and reduced[-1] else logits

        result = attack(model, case.images, case.labels, case.ball, precision="bfloat16")
        assert any(reduced)
        assert not all(reduced)
        assert not reduced[0], "the clean images are looked at in full precision"
        again = predictions(case.model, result.images)
        assert torch.equal(result.success, again != case.labels)
        assert torch.equal(result.predicted, again)
        assert (lengths(result.images, case.images, case.ball.norm) <= case.ball.radius + 1e-6).all()
        assert torch.equal(result.images[WRONG], case.images[WRONG]) or not lets_go(attack)


def law_at_the_closest_distance_there_is_a_broken_image(attack: Attack, case: Case) -> None:
    """For minimal attacks. A ball of just that radius, and any larger one, is broken; no smaller one is."""
    small = found(attack, case)
    if not attack.leave and getattr(attack, "restarts", 1) == 1:
        for radius in (0.0, case.ball.radius / 7, 3 * case.ball.radius, 6.0):
            other = found(attack, replace(case, ball=replace(case.ball, radius=radius)))
            torch.testing.assert_close(other.closest, small.closest, rtol=1e-12, atol=0)
            assert torch.equal(other.success, other.closest <= radius)
    for i in range(COUNT):
        radius = small.closest[i].item()
        assert math.isfinite(radius) or not small.success[i]
        if math.isfinite(radius) and not attack.leave and getattr(attack, "restarts", 1) == 1:
            one, label = case.images[i : i + 1], case.labels[i : i + 1]
            result = attack(case.model, one, label, replace(case.ball, radius=radius * (1 + 1e-9)))
            assert result.success.all()
            assert predictions(case.model, result.images) != label
            np.testing.assert_allclose(lengths(result.images, one, case.ball.norm), radius, rtol=1e-9, atol=1e-12)


def law_the_model_is_shown_nothing_but_images(attack: Attack, case: Case) -> None:
    """Finite, of the shape and precision of those given, within the box; also where its gradient is zero."""
    for model in (case.model, lambda x: case.model(x) * 0 + torch.arange(5 if case.kind == "mlp" else 13)):
        seen = Seen(model)
        labels = predictions(model, case.images)
        attack(seen, case.images, labels, case.ball)
        for x in seen.inputs:
            assert x.dtype == case.dtype
            assert x.shape[1:] == case.images.shape[1:]
            assert x.isfinite().all()
            assert not case.ball.box or ((x >= 0) & (x <= 1)).all()


class NotANumber(torch.autograd.Function):
    """The identity, with a gradient that is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


def law_a_model_whose_gradients_are_not_numbers_is_refused_not_called_robust(attack: Attack, case: Case) -> None:
    for mask in (torch.ones(COUNT, dtype=torch.bool), torch.arange(COUNT) == 4):

        def model(x: Tensor, mask: Tensor = mask) -> Tensor:
            """Not a number for all images, or for one that stands."""
            alike = (x[:, None].flatten(2) - case.images[None].flatten(2)).abs().amax(2).argmin(1)
            return case.model(torch.where(mask[alike].view(-1, 1, 1, 1), NotANumber.apply(x), x))

        ball = replace(case.ball, radius=case.ball.radius / 100)
        with pytest.raises(AttackError, match="finite"):
            attack(model, case.images, case.labels, ball)


def law_a_model_may_compute_in_another_precision_than_its_images(attack: Attack, case: Case) -> None:
    other = {torch.float32: torch.float64, torch.float64: torch.float32}[case.dtype]
    model = copy.deepcopy(case.model).to(other)
    result = attack(lambda x: model(x.to(other)), case.images, case.labels, case.ball)
    assert result.images.dtype == case.dtype
    assert torch.equal(result.success, predictions(model, result.images.to(other)) != case.labels)
    assert torch.equal(result.success, found(attack, case).success)


def law_without_the_box_pixels_may_have_any_scale(attack: Attack, case: Case) -> None:
    """Where images are large, float32 is coarse: their rounding is nobody's leaving the ball."""
    images, ball = (case.images.float() + 700), replace(case.ball, box=False)
    model = copy.deepcopy(case.model).float()
    labels = predictions(lambda x: model(x - 700), images)
    result = attack(lambda x: model(x - 700), images, labels, ball)
    assert torch.equal(result.success, predictions(lambda x: model(x - 700), result.images) != labels)
    assert (lengths(result.images, images, ball.norm) <= ball.radius + 72 * 2.0**-14).all()


def law_a_model_that_writes_on_its_input_writes_on_a_copy(attack: Attack, case: Case) -> None:
    def model(x: Tensor) -> Tensor:
        return case.model(x.mul_(0.9))

    labels = predictions(model, case.images.clone())
    result = attack(model, case.images, labels, case.ball)
    assert (lengths(result.images, case.images, case.ball.norm) <= case.ball.radius + 1e-6).all()
    assert torch.equal(result.success, predictions(model, result.images.clone()) != labels)
    same(result, attack(lambda x: case.model(x * 0.9), case.images, labels, case.ball))


def fits(attack: Attack, case: Case) -> bool:
    return case.ball.norm == "l2" or not isinstance(attack, CWL2)


def cases(
    kinds: tuple[str, ...] = ("vit", "mlp"),
    dtypes: tuple[torch.dtype, ...] = (torch.float64,),
    boxes: tuple[bool, ...] = (True,),
    sizes: tuple[int, ...] = (0,),
) -> list[Case]:
    return [
        Case(kind, dtype, Ball(norm, RADII[kind, norm][size], box))
        for kind in kinds
        for dtype in dtypes
        for norm in NORMS
        for box in boxes
        for size in sizes
    ]


SINGLE, DOUBLE = torch.float32, torch.float64
ALL = [
    *cases(("vit",), (DOUBLE,), (True, False), (0, 1)),
    *cases(("vit",), (SINGLE,)),
    *cases(("mlp",), (SINGLE,), (True, False), (0, 1)),
]
ON: dict[Callable[[Attack, Case], None], list[Case]] = {
    law_radius_zero_is_the_identity: cases(("mlp",), boxes=(True, False)),
    law_the_result_lies_in_the_ball_and_in_the_box: ALL,
    law_success_is_to_be_misclassified_and_nothing_else_is: ALL,
    law_the_distances_are_true: ALL,
    law_what_was_broken_before_is_left_as_it_was: ALL,
    law_more_effort_never_loses_a_broken_image: [*cases(("vit",)), *cases(("mlp",), boxes=(False,))],
    law_the_seed_and_the_ids_decide_on_all_that_is_random: cases(("mlp",)),
    law_neither_the_batch_nor_its_order_matters: [*cases(("vit",)), *cases(("mlp",), boxes=(False,), sizes=(1,))],
    law_the_number_of_threads_does_not_matter: cases(("mlp",)),
    law_the_layout_in_memory_does_not_matter: cases(("mlp",)),
    law_the_model_is_evaluated_and_left_as_it_was: cases(("mlp",)),
    law_the_model_is_left_as_it_was_also_when_it_raises: cases(("mlp",)),
    law_inputs_and_generators_are_left_as_they_were: cases(("mlp",)),
    law_no_grad_and_inference_mode_do_not_matter: cases(("mlp",)),
    law_with_targets_success_is_to_be_taken_for_the_target: [
        *cases(("vit",), sizes=(0, 1)),
        *cases(("mlp",), boxes=(False,)),
    ],
    law_what_bfloat16_claims_is_verified_in_full_precision: cases(("mlp",), (SINGLE,)),
    law_at_the_closest_distance_there_is_a_broken_image: cases(boxes=(True, False)),
    law_the_model_is_shown_nothing_but_images: cases(("mlp",), boxes=(True, False)),
    law_a_model_whose_gradients_are_not_numbers_is_refused_not_called_robust: cases(("mlp",)),
    law_a_model_may_compute_in_another_precision_than_its_images: cases(("mlp",), (SINGLE, DOUBLE)),
    law_without_the_box_pixels_may_have_any_scale: cases(("mlp",), sizes=(0, 1)),
    law_a_model_that_writes_on_its_input_writes_on_a_copy: cases(("mlp",)),
}
OF: dict[Callable[[Attack, Case], None], Callable[[Attack], bool]] = {
    law_at_the_closest_distance_there_is_a_broken_image: lambda attack: attack.minimal,
    law_a_model_whose_gradients_are_not_numbers_is_refused_not_called_robust: needs_gradients,
    # Autograd itself refuses to differentiate what was overwritten.
    law_a_model_that_writes_on_its_input_writes_on_a_copy: lambda attack: not needs_gradients(attack),
}
LAWS = [law for name, law in list(globals().items()) if name.startswith("law_")]
CASES = [
    pytest.param(law, attack, case, id=f"{law.__name__.removeprefix('law_')}-{name}-{case}")
    for law in LAWS
    for name, attack in ATTACKS.items()
    for case in ON[law]
    if fits(attack, case) and OF.get(law, lambda attack: True)(attack)
]


@pytest.mark.parametrize(("law", "attack", "case"), CASES)
def test_every_attack_obeys_the_law_that(law, attack, case):
    law(attack, case)


@pytest.mark.parametrize("name", ATTACKS)
def test_the_laws_are_not_empty_some_images_break_and_some_stand(name):
    attack = ATTACKS[name]
    for case in filter(lambda case: fits(attack, case), cases()):
        small = found(attack, case)
        assert 1 < small.success.sum() < COUNT, case
        large = found(attack, replace(case, ball=replace(case.ball, radius=RADII[case.kind, case.ball.norm][1])))
        assert large.success.sum() > small.success.sum(), case
        aimed = attack(case.model, case.images, case.labels, large_ball(case), targets=case.targets)
        assert aimed.success.sum() > 2, case


def large_ball(case: Case) -> Ball:
    return replace(case.ball, radius=RADII[case.kind, case.ball.norm][1])
