"""The laws of an attack, run over every attack of a registry, and over wrong attacks, which they must catch.

The models are small and random; the radii are such that some images break and some stand.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

from helpers.registry import SMALL
from specguard.attacks import APGD, CWL2, FAB, FGSM, PGD, Adversarial, Attack, Square
from specguard.attacks.losses import Goal
from specguard.attacks.model import QueriedModel
from specguard.errors import AttackError, ConfigError, DataError, SpecGuardError
from specguard.geometry import Ball, Norm
from specguard.nn import ViT
from specguard.rng import Noise

ATTACKS: dict[str, Attack] = {
    "fgsm": FGSM,
    "pgd": PGD(steps=4),
    "pgd center margin": PGD(steps=4, start="center", loss="margin"),
    "pgd dlr restarts": PGD(steps=3, loss="dlr", restarts=2),
    "pgd stays": PGD(steps=4, leave=False),
    "pgd margin restarts stays": PGD(steps=3, step_size=0.05, loss="margin", restarts=2, leave=False),
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
    "cw": CWL2(steps=12, searches=3, lr=0.02),
    "cw leaves": CWL2(steps=12, searches=3, lr=0.02, leave=True),
}
SOME = {name: ATTACKS[name] for name in ("pgd", "apgd dlr stays", "square", "fab", "cw")}  # one of each kind
ORDER = {"l2": 2, "linf": np.inf}
DUAL_ORDER = {"l2": 2, "linf": 1}
NORMS: tuple[Norm, ...] = ("l2", "linf")
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

    @property
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


def seeks_the_closest(attack: Attack) -> bool:
    """Whatever the ball: those that leave are content with its radius, and restarts begin within it."""
    return attack.minimal and not attack.leave and getattr(attack, "restarts", 1) == 1


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
    for other in (start(seed=1), start(ids=torch.arange(COUNT) + 1)):
        if starts_at_random(attack):
            assert (other != first).flatten(1).any(1).all()
        else:
            assert torch.equal(other, first)


def law_neither_the_batch_nor_its_order_matters(attack: Attack, case: Case) -> None:
    """In pieces of one, two and four, in another order, the numbers of the images passed along."""
    order = torch.tensor([5, 2, 0, 6, 1, 4, 3])
    whole = attack(case.model, case.images, case.labels, case.ball, ids=IDS)
    for part in order.split([1, 2, 4]):
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
    model, state = case.model, torch.get_rng_state()
    result = attack(model, images, labels, case.ball, targets=targets, ids=ids)
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
    for targets in (None, case.targets):
        expected = attack(case.model, case.images, case.labels, case.ball, targets=targets)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                enabled = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
                images, labels, ids = case.images.clone(), case.labels.clone(), torch.arange(COUNT)
                aims = None if targets is None else targets.clone()
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
        assert torch.equal(result.success, result.closest <= case.ball.radius * (1 + 1e-9))


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


def closest_of_all(attack: Attack, case: Case) -> Tensor:
    """In a ball that nothing lies outside of."""
    widest = {"l2": 6.0, "linf": 1.0}[case.ball.norm]
    return found(attack, replace(case, ball=replace(case.ball, radius=widest))).closest


def law_at_the_closest_distance_there_is_a_broken_image(attack: Attack, case: Case) -> None:
    closest = closest_of_all(attack, case)
    for i in range(1, COUNT, 2):
        image, label, radius = case.images[i : i + 1], case.labels[i : i + 1], closest[i].item()
        result = attack(case.model, image, label, replace(case.ball, radius=radius * (1 + 1e-9)))
        assert result.success.all()
        assert predictions(case.model, result.images) != label
        np.testing.assert_allclose(lengths(result.images, image, case.ball.norm), radius, rtol=1e-9)


def law_the_closest_distance_does_not_depend_on_the_radius(attack: Attack, case: Case) -> None:
    closest = closest_of_all(attack, case)
    for radius in (0.0, case.ball.radius / 7, case.ball.radius, 3 * case.ball.radius):
        other = found(attack, replace(case, ball=replace(case.ball, radius=radius)))
        torch.testing.assert_close(other.closest, closest, rtol=1e-12, atol=0)
        assert torch.equal(other.success, other.closest <= radius)


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
    """Where images are large, float32 is coarse: to round them is not to leave the ball."""
    inner = copy.deepcopy(case.model).float()

    def model(x: Tensor) -> Tensor:
        return inner(x - 700)

    images, ball = case.images.float() + 700, replace(case.ball, box=False)
    labels = predictions(model, images)
    result = attack(model, images, labels, ball)
    assert torch.equal(result.success, predictions(model, result.images) != labels)
    assert (lengths(result.images, images, ball.norm) <= ball.radius + math.sqrt(72) * 2.0**-15).all()


def law_images_in_half_precision_are_attacked_or_refused(attack: Attack, case: Case) -> None:
    def model(x: Tensor) -> Tensor:
        return case.model(x.to(case.dtype))

    for dtype in (torch.float16, torch.bfloat16):
        images = case.images.to(dtype)
        labels = predictions(model, images)
        try:
            result = attack(model, images, labels, case.ball)
        except DataError:
            continue
        assert torch.equal(result.success, predictions(model, result.images) != labels)
        rounding = math.sqrt(72) * torch.finfo(dtype).eps / 2
        assert (lengths(result.images, images, case.ball.norm) <= case.ball.radius + rounding).all()


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
    norms: tuple[Norm, ...] = NORMS,
) -> list[Case]:
    return [
        Case(kind, dtype, Ball(norm, RADII[kind, norm][size], box))
        for kind in kinds
        for dtype in dtypes
        for norm in norms
        for box in boxes
        for size in sizes
    ]


SINGLE, DOUBLE = torch.float32, torch.float64
ALL = [
    *cases(("vit",), (DOUBLE,)),
    *cases(("vit",), (SINGLE,), (False,), (1,)),
    *cases(("mlp",), (SINGLE,), (True,), (0, 1)),
    *cases(("mlp",), (SINGLE,), (False,)),
]
ON: dict[Callable[[Attack, Case], None], list[Case]] = {
    law_radius_zero_is_the_identity: [
        *cases(("mlp",), norms=("l2",)),
        *cases(("mlp",), (SINGLE,), (False,), norms=("linf",)),
    ],
    law_the_result_lies_in_the_ball_and_in_the_box: ALL,
    law_success_is_to_be_misclassified_and_nothing_else_is: ALL,
    law_the_distances_are_true: ALL,
    law_what_was_broken_before_is_left_as_it_was: ALL,
    law_more_effort_never_loses_a_broken_image: [
        *cases(norms=("l2",)),
        *cases(("mlp",), boxes=(False,), norms=("linf",)),
    ],
    law_the_seed_and_the_ids_decide_on_all_that_is_random: cases(("mlp",)),
    law_neither_the_batch_nor_its_order_matters: [*cases(("vit",)), *cases(("mlp",), boxes=(False,), sizes=(1,))],
    law_the_number_of_threads_does_not_matter: cases(("mlp",), norms=("l2",)),
    law_the_layout_in_memory_does_not_matter: cases(("mlp",)),
    law_the_model_is_evaluated_and_left_as_it_was: cases(("mlp",)),
    law_the_model_is_left_as_it_was_also_when_it_raises: cases(("mlp",)),
    law_inputs_and_generators_are_left_as_they_were: cases(("mlp",)),
    law_no_grad_and_inference_mode_do_not_matter: cases(("mlp",)),
    law_with_targets_success_is_to_be_taken_for_the_target: [
        *cases(("vit",), sizes=(1,)),
        *cases(("mlp",), boxes=(False,)),
    ],
    law_what_bfloat16_claims_is_verified_in_full_precision: cases(("mlp",), (SINGLE,)),
    law_at_the_closest_distance_there_is_a_broken_image: [*cases(), *cases(("mlp",), boxes=(False,))],
    law_the_closest_distance_does_not_depend_on_the_radius: [*cases(), *cases(("mlp",), boxes=(False,))],
    law_the_model_is_shown_nothing_but_images: cases(("mlp",), boxes=(True, False)),
    law_a_model_whose_gradients_are_not_numbers_is_refused_not_called_robust: cases(("mlp",)),
    law_a_model_may_compute_in_another_precision_than_its_images: cases(("mlp",), (SINGLE, DOUBLE)),
    law_without_the_box_pixels_may_have_any_scale: cases(("mlp",)),
    law_images_in_half_precision_are_attacked_or_refused: cases(("mlp",)),
    law_a_model_that_writes_on_its_input_writes_on_a_copy: cases(("mlp",)),
}
OF: dict[Callable[[Attack, Case], None], Callable[[Attack], bool]] = {
    law_the_number_of_threads_does_not_matter: lambda attack: attack in SOME.values(),  # threads are slow here
    law_at_the_closest_distance_there_is_a_broken_image: seeks_the_closest,
    law_the_closest_distance_does_not_depend_on_the_radius: seeks_the_closest,
    law_a_model_whose_gradients_are_not_numbers_is_refused_not_called_robust: needs_gradients,
    # Autograd itself refuses to differentiate what was overwritten.
    law_a_model_that_writes_on_its_input_writes_on_a_copy: lambda attack: not needs_gradients(attack),
}
LAWS = [law for name, law in list(globals().items()) if name.startswith("law_")]
CASES = [
    pytest.param(law, attack, id=f"{law.__name__.removeprefix('law_')}-{name}")
    for law in LAWS
    for name, attack in ATTACKS.items()
    if OF.get(law, lambda attack: True)(attack)
]


@pytest.fixture
def as_shipped(monkeypatch):
    """Users run without the type checks of the tests, which would come first, and cost half of the time."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.mark.parametrize(("law", "attack"), CASES)
def test_every_attack_obeys_the_law_that(law, attack, monkeypatch):
    for case in (case for case in ON[law] if fits(attack, case)):
        typed = ON[law] is ALL and case.kind == "mlp"  # every attack in every kind of ball; more would tell no more
        monkeypatch.setattr(config, "jaxtyping_disable", not typed)
        try:
            law(attack, case)
        except BaseException as error:
            error.add_note(f"for {attack} in the case {case}")
            raise


@pytest.mark.parametrize("name", ATTACKS)
def test_the_laws_are_not_empty_some_images_break_and_some_stand(name, as_shipped):
    attack = ATTACKS[name]
    for case in (case for case in cases() if fits(attack, case)):
        small = found(attack, case)
        assert 1 < small.success.sum() < COUNT, case
        large = replace(case, ball=replace(case.ball, radius=RADII[case.kind, case.ball.norm][1]))
        assert found(attack, large).success.sum() > small.success.sum(), case
        aimed = attack(case.model, case.images, case.labels, large.ball, targets=case.targets)
        assert aimed.success.sum() > 2, case


# Where the optimum is known: linear models of two classes.


def straight(seed: int = 3) -> tuple[nn.Module, Tensor, Tensor, np.ndarray, np.ndarray]:
    """A linear model of two classes, images, labels, the margins, and the weight that they fall along."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 2)).double().eval()
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    images = torch.rand(6, 2, 6, 6, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        logits = model(images).numpy()
    labels = logits.argmax(1)
    weight = model[1].weight.detach().numpy()
    slope = np.stack([weight[1 - label] - weight[label] for label in labels])
    return model, images, torch.from_numpy(labels), np.abs(logits[:, 0] - logits[:, 1]), slope


STRAIGHT = {
    "fgsm": FGSM,
    "pgd": PGD(steps=3, start="center"),
    "pgd margin": PGD(steps=3, start="center", loss="margin"),
    "pgd random stays": PGD(steps=3, step_size=1e6, leave=False),
    "apgd": APGD(steps=40),
    "apgd margin stays": APGD(steps=40, loss="margin", leave=False),
}


@pytest.mark.parametrize("name", STRAIGHT)
@pytest.mark.parametrize("norm", NORMS)
def test_on_a_straight_line_the_margin_falls_by_the_radius_times_the_dual_norm(name, norm, as_shipped):
    model, images, labels, margins, slope = straight()
    rate = np.linalg.norm(slope, DUAL_ORDER[norm], axis=1)
    reach = np.sort(margins / rate)
    assert (np.diff(reach) > 0.03 * reach[:-1]).all(), "images that can be told apart"
    for radius in (0.5 * reach[0], *(0.99 * reach), *(1.01 * reach)):
        result = STRAIGHT[name](model, images, labels, Ball(norm, float(radius), box=False))
        assert result.success.tolist() == (margins / rate < radius).tolist()
        with torch.no_grad():
            logits = model(result.images).numpy()
        own, other = logits[range(6), labels], logits[range(6), 1 - labels]
        stands = ~result.success.numpy()
        fall = (margins - (own - other))[stands]
        np.testing.assert_allclose(fall, (radius * rate)[stands], rtol=1e-3 if name.startswith("apgd") else 1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_on_a_straight_line_fgsm_moves_every_pixel_as_far_as_ball_and_box_allow(norm):
    model, images, labels, margins, slope = straight()
    radius = 0.3 * float((margins / np.linalg.norm(slope, DUAL_ORDER[norm], axis=1)).min())
    result = FGSM(model, images, labels, Ball(norm, radius))
    step = np.sign(slope) if norm == "linf" else slope / np.linalg.norm(slope, axis=1, keepdims=True)
    expected = np.clip(images.numpy() + radius * step.reshape(images.shape), 0, 1)
    np.testing.assert_allclose(result.images.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize(
    ("attack", "norm"),
    [(FAB(steps=15), "l2"), (FAB(steps=15), "linf"), (CWL2(steps=120, searches=8), "l2")],
    ids=["fab-l2", "fab-linf", "cw-l2"],
)
def test_on_a_straight_line_the_closest_point_is_at_the_margin_over_the_dual_norm(attack, norm, leave, as_shipped):
    model, images, labels, margins, slope = straight()
    nearest = margins / np.linalg.norm(slope, DUAL_ORDER[norm], axis=1)
    attack = replace(attack, leave=leave)
    for radius in (1e-3, 1.02 * np.sort(nearest)[2]):
        result = attack(model, images, labels, Ball(norm, float(radius), box=False))
        assert result.success.tolist() == (nearest < radius).tolist()
        closest = result.closest.numpy()
        assert (closest >= nearest * (1 - 1e-9)).all()
        assert (closest <= (np.maximum(1.01 * nearest, radius) if leave else 1.01 * nearest)).all()


@pytest.mark.parametrize("norm", NORMS)
def test_on_a_straight_line_fab_finds_the_closest_point_of_the_box(norm):
    """Every pixel moves at its speed until it meets the border; how long, by bisection."""
    model, images, labels, margins, slope = straight()
    pixels = images.flatten(1).numpy()
    room = np.where(slope > 0, 1 - pixels, pixels)
    # Boundaries so far away that most pixels meet the border: at 0.8 of all that the box allows.
    shift = 0.8 * (np.abs(slope) * room).sum(1) - margins
    speed = np.ones_like(slope) if norm == "linf" else np.abs(slope)
    for i in range(len(images)):
        moved = copy.deepcopy(model)
        moved[1].bias.data[labels[i]] += shift[i]
        low, high, wanted = 0.0, 1e3, margins[i] + shift[i]
        for _ in range(200):
            middle = (low + high) / 2
            fall = (np.abs(slope[i]) * np.minimum(middle * speed[i], room[i])).sum()
            low, high = (middle, high) if fall < wanted else (low, middle)
        nearest = np.linalg.norm(np.minimum(high * speed[i], room[i]), ORDER[norm])
        assert nearest > 1.04 * wanted / np.linalg.norm(slope[i], DUAL_ORDER[norm]), "the box is in the way"
        result = FAB(steps=25)(moved, images[i : i + 1], labels[i : i + 1], Ball(norm, 0.1))
        assert nearest * (1 - 1e-9) <= result.closest.item() <= 1.02 * nearest


# Models that are no modules, have no gradients, or return what Hugging Face does.


def no_gradients(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    def without_grad(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    return {
        "detached input": lambda x: model(x.detach()),
        "detached output": lambda x: model(x).detach(),
        "no_grad inside": without_grad,
        "numpy": lambda x: torch.from_numpy(model(torch.from_numpy(x.detach().numpy().copy())).detach().numpy()),
        "constant": lambda x: torch.arange(5.0, dtype=x.dtype).repeat(len(x), 1),
    }


@pytest.mark.parametrize("kind", ["detached input", "detached output", "no_grad inside", "numpy"])
@pytest.mark.parametrize("name", ["square", "square stays"])
def test_the_square_attack_needs_no_gradients(name, kind):
    for case in cases(("mlp",), sizes=(1,)):
        result = ATTACKS[name](no_gradients(case.model)[kind], case.images, case.labels, case.ball)
        same(result, found(ATTACKS[name], case))
        assert result.success.sum() > 1


@pytest.mark.parametrize("kind", no_gradients(mlp()))
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if needs_gradients(attack)])
def test_all_others_say_that_there_are_none_and_name_the_one_that_needs_none(name, kind, as_shipped):
    case = cases(("mlp",))[0]
    with refused(AttackError, "square"):
        ATTACKS[name](no_gradients(case.model)[kind], case.images, case.labels, case.ball)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_object_with_logits_is_as_good_as_logits(name, as_shipped):
    case = cases(("mlp",))[0]
    result = ATTACKS[name](lambda x: SimpleNamespace(logits=case.model(x)), case.images, case.labels, case.ball)
    same(result, found(ATTACKS[name], case))


# Bad input. Every message is one sentence on one line.


class refused:  # noqa: N801
    """Asserts that an error is raised whose message is one sentence that says `about`."""

    def __init__(self, kind: type[SpecGuardError], about: str) -> None:
        self.raises, self.about = pytest.raises(kind), about

    def __enter__(self) -> None:
        self.info = self.raises.__enter__()

    def __exit__(self, *error: object) -> bool:
        swallowed = bool(self.raises.__exit__(*error))
        message = str(self.info.value)
        assert self.about in message
        assert "\n" not in message
        assert ". " not in message
        assert 10 < len(message) < 250
        return swallowed


IMAGES = torch.rand(3, 2, 6, 6, generator=seeded(1))
BALL = Ball("l2", 0.1)
MODEL = mlp().eval()
LABELS = predictions(MODEL, IMAGES)


def spoiled(value: float) -> Tensor:
    images = IMAGES.clone()
    images[1, 0, 2, 3] = value
    return images


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("value", [1.001, -0.001, 255.0, math.nan, math.inf, -math.inf])
def test_pixels_outside_the_box_or_not_finite_are_a_data_error(name, value, as_shipped):
    with refused(DataError, "pixels" if math.isfinite(value) else "NaN"):
        SOME[name](MODEL, spoiled(value), LABELS, BALL)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_without_the_box_pixels_must_still_be_finite(value, as_shipped):
    FGSM(MODEL, spoiled(-3.0), LABELS, replace(BALL, box=False))
    with refused(DataError, "NaN"):
        FGSM(MODEL, spoiled(value), LABELS, replace(BALL, box=False))


@pytest.mark.parametrize("name", SOME)
def test_integer_images_that_are_not_bytes_are_a_data_error(name, as_shipped):
    with refused(DataError, "float32 or float64"):
        SOME[name](MODEL, torch.ones(3, 2, 6, 6, dtype=torch.int64), LABELS, BALL)


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 1, 5]), torch.tensor([-1, 0, 1]), torch.tensor([0, 1]), torch.tensor([0, 1, 2, 3]),
        torch.tensor([[0], [1], [2]]), torch.tensor(1), torch.tensor([0.0, 1.0, 2.0]), torch.eye(3, 5),
    ],
    ids=["too large", "negative", "too few", "too many", "column", "scalar", "floats", "one hot"],
)  # fmt: skip
@pytest.mark.parametrize("name", SOME)
def test_labels_and_targets_out_of_range_or_of_another_shape_or_kind_are_a_data_error(name, labels, as_shipped):
    with refused(DataError, "labels"):
        SOME[name](MODEL, IMAGES, labels, BALL)
    with refused(DataError, "targets"):
        SOME[name](MODEL, IMAGES, LABELS, BALL, targets=labels)


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([4]), torch.arange(4), torch.arange(3).view(3, 1), torch.arange(3.0)],
    ids=["one for all", "too many", "column", "floats"],
)
@pytest.mark.parametrize("name", ["fgsm", "pgd stays", "square"])
def test_ids_of_another_shape_or_kind_are_a_data_error(name, ids, as_shipped):
    with refused(DataError, "ids"):
        ATTACKS[name](MODEL, IMAGES, LABELS, BALL, ids=ids)


@pytest.mark.parametrize(
    ("spoil", "about"),
    [
        (lambda z: (z, z), "tuple"),
        (lambda z: [z], "list"),
        (lambda z: None, "NoneType"),
        (lambda z: SimpleNamespace(logits=(z,)), "SimpleNamespace"),
        (lambda z: z.sum(1), "(3,)"),
        (lambda z: z.sum(), "()"),
        (lambda z: z[:, :1], "(3, 1)"),
        (lambda z: z[:2], "(2, 5)"),
        (lambda z: z.mean(0, keepdim=True), "(1, 5)"),
        (lambda z: z.unsqueeze(1), "(3, 1, 5)"),
        (lambda z: z.argmax(1), "(3,)"),
        (lambda z: z.long(), "int64"),
        (lambda z: z > 0, "bool"),
        (lambda z: z * math.nan, "finite"),
        (lambda z: torch.cat([z[:2], z[2:] * math.nan]), "finite"),
    ],
)
@pytest.mark.parametrize("name", SOME)
def test_a_model_that_returns_anything_but_logits_is_an_attack_error(name, spoil, about, as_shipped):
    with refused(AttackError, about):
        SOME[name](lambda x: spoil(MODEL(x)), IMAGES, LABELS, BALL)


@pytest.mark.parametrize("name", ATTACKS)
def test_logits_that_are_no_numbers_beside_the_clean_images_are_an_attack_error(name, as_shipped):
    """Finite on the clean images, and nowhere else; argmax would take NaN for the largest."""
    case = cases(("mlp",))[0]

    def model(x: Tensor) -> Tensor:
        clean = (x[:, None] == case.images[None]).flatten(2).all(2).any(1)
        return torch.where(clean.unsqueeze(1), case.model(x), case.model(x) * math.nan)

    with refused(AttackError, "finite"):
        ATTACKS[name](model, case.images, case.labels, case.ball)


@pytest.mark.parametrize("loss", [PGD(loss="dlr"), APGD(loss="dlr"), APGD(loss="dlr", targets=2)])
def test_there_may_be_too_few_classes_for_the_dlr_loss(loss, as_shipped):
    loss = replace(loss, steps=2)
    for classes, aims, about in ((2, False, "3 classes"), (3, True, "4 classes")):
        model = mlp(classes).eval()
        labels = predictions(model, IMAGES)
        needed = "4 classes" if getattr(loss, "targets", 0) else about
        with refused(AttackError, needed):
            loss(model, IMAGES, labels, BALL, targets=(labels + 1) % classes if aims else None)


@pytest.mark.parametrize(
    ("make", "about"),
    [
        (lambda: Ball("l2", -0.1), "radius"),
        (lambda: Ball("linf", math.nan), "radius"),
        (lambda: Ball("l1", 0.1), "l1"),
        (lambda: PGD(loss="hinge"), "hinge"),
        (lambda: APGD(loss=""), "loss"),
        (lambda: PGD(start="corner"), "corner"),
        (lambda: PGD(steps=0), "steps"),
        (lambda: PGD(steps=-1), "steps"),
        (lambda: PGD(steps=2.5), "steps"),
        (lambda: PGD(restarts=0), "restarts"),
        (lambda: PGD(step_size=-0.1), "step size"),
        (lambda: PGD(step_size=0.0), "step size"),
        (lambda: PGD(step_size=math.nan), "step size"),
        (lambda: PGD(step_size=math.inf), "step size"),
        (lambda: APGD(steps=0), "steps"),
        (lambda: APGD(restarts=0), "restarts"),
        (lambda: APGD(targets=-1), "targets"),
        (lambda: APGD(targets=1.0), "targets"),
        (lambda: Square(queries=0), "queries"),
        (lambda: Square(area=0.0), "area"),
        (lambda: Square(area=1.5), "area"),
        (lambda: Square(area=math.nan), "area"),
        (lambda: FAB(steps=0), "steps"),
        (lambda: FAB(restarts=0), "restarts"),
        (lambda: FAB(targets=0), "target"),
        (lambda: CWL2(steps=0), "steps"),
        (lambda: CWL2(searches=0), "searches"),
        (lambda: CWL2(lr=0.0), "lr"),
        (lambda: CWL2(first=-1.0), "first"),
        (lambda: CWL2(confidence=-1.0), "confidence"),
        (lambda: CWL2(confidence=math.nan), "confidence"),
        (lambda: CWL2()(MODEL, IMAGES, LABELS, Ball("linf", 0.1)), "linf"),
        (lambda: FGSM(MODEL, IMAGES, LABELS, BALL, precision="float16"), "float16"),
    ],
)
def test_a_setting_that_is_unknown_or_out_of_range_is_a_config_error(make, about, as_shipped):
    with refused(ConfigError, about):
        make()


def test_cw_refuses_linf_also_where_there_is_nothing_to_break(as_shipped):
    """Whether a setting is wrong does not depend on the images."""
    for images, labels in ((IMAGES, (LABELS + 1) % 5), (IMAGES[:0], LABELS[:0])):
        with refused(ConfigError, "linf"):
            CWL2()(MODEL, images, labels, Ball("linf", 0.1))


@pytest.mark.parametrize("name", ATTACKS)
def test_the_square_attack_alone_needs_images_that_are_images(name, as_shipped):
    rows, attack = IMAGES.flatten(1), ATTACKS[name]
    model = MODEL[1:].eval()  # a slice is a new container, in train mode
    labels = predictions(model, rows)
    if isinstance(attack, Square):
        with refused(DataError, "images"):
            attack(model, rows, labels, BALL)
    else:
        assert attack(model, rows, labels, BALL).images.shape == rows.shape


@pytest.mark.parametrize("name", SOME)
def test_a_radius_of_8_is_probably_meant_to_be_8_of_255(name, as_shipped):
    norm, radius = ("l2", 9.0) if name == "cw" else ("linf", 8.0)
    attack = SOME[name]
    with pytest.warns(UserWarning, match=f"{radius:g}/255") as caught:
        attack(MODEL, IMAGES, LABELS, Ball(norm, radius))
    assert ["\n" in str(warning.message) for warning in caught] == [False]
    attack(MODEL, IMAGES, LABELS, Ball(norm, radius, box=False))  # no warning: here a unit may be anything
    attack(MODEL, IMAGES, LABELS, Ball(norm, 8 / 255))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_empty_batch_has_an_empty_result(name):
    def model(x: Tensor) -> Tensor:
        raise AssertionError("a model need not know what to do with no images")

    for targets in (None, LABELS[:0]):
        result = ATTACKS[name](model, IMAGES[:0], LABELS[:0], BALL, targets=targets, ids=LABELS[:0])
        assert result.images.shape == (0, 2, 6, 6)
        for field in ("success", "distance", "closest", "before", "predicted"):
            assert getattr(result, field).shape == (0,)
        assert (result.success.dtype, result.before.dtype) == (torch.bool, torch.int64)


# The testers, tested: each wrong attack differs from a right one in one place, and a law must say so.


class LeavesTheBall(PGD):
    """By a thousandth."""

    def __call__(self, model, images, labels, ball, **more):
        result = super().__call__(model, images, labels, ball, **more)
        return replace(result, images=images + 1.001 * (result.images - images))


class LeavesTheBox(PGD):
    def __call__(self, model, images, labels, ball, **more):
        return super().__call__(model, images, labels, replace(ball, box=False), **more)


class MovesAtRadiusZero(PGD):
    def __call__(self, model, images, labels, ball, **more):
        return super().__call__(model, images, labels, replace(ball, radius=max(ball.radius, 1e-7)), **more)


class ClaimsSuccess(PGD):
    """Believes that every goal is reached."""

    def __call__(self, *given, **more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Goal, "reached", lambda goal, logits: torch.ones_like(goal.labels, dtype=torch.bool))
            return super().__call__(*given, **more)


class OverlooksSuccess(PGD):
    def __call__(self, *given, **more):
        result = super().__call__(*given, **more)
        return replace(result, success=result.success & (torch.arange(len(result.success)) == WRONG))


class MeasuresInAnotherNorm(PGD):
    def __call__(self, model, images, labels, ball, **more):
        result = super().__call__(model, images, labels, ball, **more)
        other = Ball({"l2": "linf", "linf": "l2"}[ball.norm], ball.radius)
        return replace(result, distance=other.distance(result.images, images))


class ActsOnTheBroken(PGD):
    def __call__(self, *given, **more):
        return PGD.__call__(replace(self, leave=False), *given, **more)


class TiresOut(PGD):
    def search(self, state):
        if self.steps < 5:
            super().search(state)


class InBatchOrder(Noise):
    """Numbers of a generator, in the order of the batch."""

    def uniform(self, shape, dtype):
        return torch.rand(len(self), *shape, generator=seeded(len(self)), dtype=dtype)

    def directions(self, shape, dtype):
        drawn = torch.randn(len(self), *shape, generator=seeded(len(self)), dtype=dtype)
        return drawn / drawn.flatten(1).norm(dim=1).view(-1, *[1] * len(shape))

    def fold(self, number):
        return InBatchOrder(super().fold(number).keys)

    def __getitem__(self, index):
        return InBatchOrder(self.keys[index])


class DrawsInBatchOrder(PGD):
    def search(self, state):
        state.rng = InBatchOrder(state.rng.keys)
        super().search(state)


class ForgetsTheIds(PGD):
    def __call__(self, *given, ids=None, **more):
        return super().__call__(*given, **more)


class IgnoresTheSeed(PGD):
    def __call__(self, *given, seed=0, **more):
        return super().__call__(*given, **more)


class StepsTogether(PGD):
    """Normalizes the gradient over the batch instead of the image."""

    def search(self, state):
        gradient, _, _ = state.gradient(state.center, self.loss)
        step = gradient / gradient.norm()
        state.store_iterates(state.ball.project(state.center + state.ball.radius * step, state.center))


class StaysInEval(PGD):
    def __call__(self, model, *given, **more):
        if isinstance(model, nn.Module):
            model.eval()
        return super().__call__(model, *given, **more)


class PutsAllInTraining(PGD):
    """Restores one mode for all layers."""

    def __call__(self, model, *given, **more):
        result = super().__call__(model, *given, **more)
        return result if not isinstance(model, nn.Module) else (model.train(), result)[1]


class TidiesUpUnlessItFails(PGD):
    def __call__(self, model, *given, **more):
        result = super().__call__(lambda x: _evaluated(model, x), *given, **more)
        model.train()
        return result


def _evaluated(model, x):
    return model.eval()(x)


class AttacksInTraining(PGD):
    def __call__(self, model, *given, **more):
        twice = lambda x: model(x.repeat(2, 1, 1, 1))[: len(x)]  # noqa: E731  # one image alone has no statistics
        return super().__call__(twice, *given, **more)


class FillsGradients(PGD):
    def __call__(self, model, images, labels, *given, **more):
        result = super().__call__(model, images, labels, *given, **more)
        with torch.enable_grad():
            model(images).sum().backward()
        return result


class FreezesWeights(PGD):
    def __call__(self, model, *given, **more):
        if isinstance(model, nn.Module):
            model.requires_grad_(False)
        return super().__call__(model, *given, **more)


class ThawsWeights(PGD):
    def __call__(self, model, *given, **more):
        result = super().__call__(model, *given, **more)
        if isinstance(model, nn.Module):
            model.requires_grad_(True)
        return result


class WorksInPlace(PGD):
    def __call__(self, model, images, *given, **more):
        result = super().__call__(model, images, *given, **more)
        with torch.no_grad():
            images += 0
        return result


class ReturnsItsInput(PGD):
    def __call__(self, model, images, *given, **more):
        result = super().__call__(model, images, *given, **more)
        with torch.no_grad():
            return replace(result, images=images.detach())


class DrawsFromTheGlobalGenerator(PGD):
    def __call__(self, *given, **more):
        torch.rand(1)
        return super().__call__(*given, **more)


class LeavesGradientsOff(PGD):
    def __call__(self, *given, **more):
        enabled = torch.is_grad_enabled()
        result = super().__call__(*given, **more)
        torch.set_grad_enabled(not enabled)
        return result


class NeedsGradMode(PGD):
    def __call__(self, *given, **more):
        assert torch.is_grad_enabled()
        return super().__call__(*given, **more)


class IgnoresTargets(PGD):
    def __call__(self, *given, targets=None, **more):
        return super().__call__(*given, **more)


class BelievesBfloat16(PGD):
    def __call__(self, *given, **more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(QueriedModel, "logits", QueriedModel.search_logits)
            return super().__call__(*given, **more)


class UnderstatesTheClosest(FAB):
    def __call__(self, *given, **more):
        result = super().__call__(*given, **more)
        return replace(result, closest=0.99 * result.closest)


class SeesNoFurtherThanTheBall(FAB):
    def __call__(self, model, images, labels, ball, **more):
        result = super().__call__(model, images, labels, ball, **more)
        return replace(result, closest=torch.where(result.success, result.closest, torch.inf))


class ShowsWhatIsOutsideTheBox(PGD):
    def search(self, state):
        state.model.search_logits(state.center + state.ball.radius)
        super().search(state)


class SwallowsWhatIsNoNumber(PGD):
    def __call__(self, model, images, labels, ball, **more):
        try:
            return super().__call__(model, images, labels, ball, **more)
        except AttackError:
            return PGD(steps=1, step_size=1e-9)(lambda x: x.flatten(1)[:, :5], images, labels, ball)


PLANTED = [
    (LeavesTheBall(steps=3), law_the_result_lies_in_the_ball_and_in_the_box),
    (LeavesTheBox(steps=3), law_the_result_lies_in_the_ball_and_in_the_box),
    (MovesAtRadiusZero(steps=3), law_radius_zero_is_the_identity),
    (ClaimsSuccess(steps=3), law_success_is_to_be_misclassified_and_nothing_else_is),
    (OverlooksSuccess(steps=3), law_success_is_to_be_misclassified_and_nothing_else_is),
    (MeasuresInAnotherNorm(steps=3), law_the_distances_are_true),
    (ActsOnTheBroken(steps=3, start="center"), law_what_was_broken_before_is_left_as_it_was),
    (TiresOut(steps=3), law_more_effort_never_loses_a_broken_image),
    (DrawsInBatchOrder(steps=1), law_neither_the_batch_nor_its_order_matters),
    (ForgetsTheIds(steps=1), law_neither_the_batch_nor_its_order_matters),
    (ForgetsTheIds(steps=3), law_the_seed_and_the_ids_decide_on_all_that_is_random),
    (IgnoresTheSeed(steps=3), law_the_seed_and_the_ids_decide_on_all_that_is_random),
    (StepsTogether(steps=3), law_neither_the_batch_nor_its_order_matters),
    (StaysInEval(steps=3), law_the_model_is_evaluated_and_left_as_it_was),
    (StaysInEval(steps=3), law_the_model_is_left_as_it_was_also_when_it_raises),
    (PutsAllInTraining(steps=3), law_the_model_is_evaluated_and_left_as_it_was),
    (TidiesUpUnlessItFails(steps=3), law_the_model_is_left_as_it_was_also_when_it_raises),
    (AttacksInTraining(steps=3), law_the_model_is_evaluated_and_left_as_it_was),
    (FillsGradients(steps=3), law_the_model_is_evaluated_and_left_as_it_was),
    (FreezesWeights(steps=3), law_the_model_is_evaluated_and_left_as_it_was),
    (FreezesWeights(steps=3), law_the_model_is_left_as_it_was_also_when_it_raises),
    (ThawsWeights(steps=3), law_the_model_is_evaluated_and_left_as_it_was),
    (WorksInPlace(steps=3), law_inputs_and_generators_are_left_as_they_were),
    (ReturnsItsInput(steps=3), law_inputs_and_generators_are_left_as_they_were),
    (DrawsFromTheGlobalGenerator(steps=3), law_inputs_and_generators_are_left_as_they_were),
    (LeavesGradientsOff(steps=3), law_no_grad_and_inference_mode_do_not_matter),
    (NeedsGradMode(steps=3), law_no_grad_and_inference_mode_do_not_matter),
    (IgnoresTargets(steps=3), law_with_targets_success_is_to_be_taken_for_the_target),
    (BelievesBfloat16(steps=3), law_what_bfloat16_claims_is_verified_in_full_precision),
    (UnderstatesTheClosest(steps=4, targets=3), law_at_the_closest_distance_there_is_a_broken_image),
    (SeesNoFurtherThanTheBall(steps=4, targets=3), law_the_closest_distance_does_not_depend_on_the_radius),
    (ShowsWhatIsOutsideTheBox(steps=3), law_the_model_is_shown_nothing_but_images),
    (SwallowsWhatIsNoNumber(steps=3), law_a_model_whose_gradients_are_not_numbers_is_refused_not_called_robust),
]


@pytest.mark.parametrize(
    ("wrong", "law"), PLANTED, ids=[f"{type(w).__name__}-{law.__name__}" for w, law in PLANTED]
)
def test_a_planted_wrong_attack_is_caught(wrong, law, as_shipped):
    """On the very cases on which the right one of the same settings is not."""
    right = type(wrong).__mro__[1]
    right = right(**{name: getattr(wrong, name) for name in (field.name for field in fields(right))})
    case = next(case for case in ON[law] if case.ball.norm == "l2" and case.ball.box)
    enabled = torch.is_grad_enabled()
    law(right, case)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            law(wrong, case)
    finally:
        torch.set_grad_enabled(enabled)
        _model.cache_clear()  # which a wrong attack may have spoiled
        found.cache_clear()


@pytest.mark.parametrize("norm", NORMS)
def test_a_search_that_strays_is_noticed(norm):
    class Strays(PGD):
        def search(self, state):
            state.store_iterates(state.center + 1.001 * state.ball.radius * state.ball.steepest(0.3 - state.center))

    for case in (case for case in ALL if case.ball.norm == norm and case.ball.radius > 0):
        with pytest.raises(AssertionError, match="an attack left its ball"):
            Strays(leave=False)(case.model, case.images, case.labels, case.ball)
