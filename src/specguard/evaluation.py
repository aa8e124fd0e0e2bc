"""Questions about a model, each in one call: attack it, or evaluate it by attacks and certificates.

Data come in batches, of which one is in memory at a time. Nothing is stored: studies that are stored, and continued
after an interruption, are those of the command line, in `specguard.studies`.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from specguard.attacks import Adversarial, Attack, Suite, named_attack, named_suite
from specguard.attacks.model import Model, Precision, QueriedModel
from specguard.certificates import METHODS, Method, certify, named_methods
from specguard.certificates.certificate import program_of
from specguard.certificates.rules import Program
from specguard.errors import ConfigError, each_warning_once, suggestion
from specguard.geometry import Ball
from specguard.inputs import BallLike, Chunk, Stream, as_ball, as_device, as_stream, eval_mode
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackName, SuiteName

__all__ = ["AttackResult", "Evaluation", "attack", "evaluate"]

Watcher = Callable[[int, int | None], None]  # the number of images done, and of all, where it is known


@dataclass(frozen=True)
class AttackResult:
    """What the attacks of a suite found, together.

    Args:
        ball: the perturbations.
        clean: accuracy without them.
        robust: accuracy under all attacks: an image that one of them has changed the class of counts as wrong.
        by_attack: accuracy under each attack; of a cascade, on the images that the attacks before it left.
        adversarial: for every image the first success, or else what the last attack has found.
        labels: of the images.

    Example:
        >>> import torch, specguard
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> data = torch.tensor([0.1, 0.48, 0.9]).view(3, 1, 1, 1).expand(3, 1, 4, 4), [0, 0, 1]
        >>> specguard.attack(brightness, data, "linf", 0.1, attack="pgd")
        AttackResult of 3 images in linf 0.1
          clean   100.0 % [43.9, 100.0]
          robust  66.7 % [20.8, 93.9] under pgd
    """

    ball: Ball
    clean: Accuracy
    robust: Accuracy
    by_attack: tuple[tuple[str, Accuracy], ...]
    adversarial: Adversarial
    labels: Int64[Tensor, " sample"]

    def __repr__(self) -> str:
        """The accuracies, without the tensors."""
        names = ", ".join(name for name, _ in self.by_attack)
        lines = [
            f"AttackResult of {self.clean.n} images in {self.ball.norm} {self.ball.radius:.4g}",
            f"clean   {self.clean.brief()}",
            f"robust  {self.robust.brief()} under {names}",
            *(f"warning: {sentence}" for sentence in self.adversarial.warnings),
        ]
        return "\n  ".join(lines)


@dataclass(frozen=True)
class Evaluation:
    """Clean, robust and certified accuracy in one ball.

    Every image has one of three verdicts: certified, misclassified under attack, or unknown.

    Args:
        ball: the perturbations.
        clean: accuracy without them.
        robust: accuracy under attack, which is at least that under the worst perturbation.
        certified: accuracy that no perturbation lowers; None if no method was asked for.
        certified_images: the index of every image that is certified.
        misclassified_images: that of every image that is misclassified, as it is or under attack.
        unknown_images: that of every other image.
        attacks: the names of the attacks.
        methods: the names of the methods.
        warnings: reasons to doubt the attacks.

    Example:
        >>> import torch, specguard
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)).eval()
        >>> model[1].weight.data, model[1].bias.data = torch.tensor([[-1.0] * 4, [1.0] * 4]), torch.tensor([4.0, 0])
        >>> data = torch.tensor([0.1, 0.48, 0.9]).view(3, 1, 1, 1).expand(3, 1, 2, 2), [0, 0, 1]
        >>> specguard.evaluate(model, data, "linf", 0.1)
        Evaluation of 3 images in linf 0.1
          clean      100.0 % [43.9, 100.0]
          robust     66.7 % [20.8, 93.9] under fgsm, pgd, cw
          certified  66.7 % [20.8, 93.9] by naive, specformer, lofast, local, zonotope, adjoint, mixed
          2 certified, 1 misclassified under attack, 0 unknown
    """

    ball: Ball
    clean: Accuracy
    robust: Accuracy
    certified: Accuracy | None
    certified_images: tuple[int, ...]
    misclassified_images: tuple[int, ...]
    unknown_images: tuple[int, ...]
    attacks: tuple[str, ...]
    methods: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The accuracies and the number of images with each verdict."""
        lines = [
            f"Evaluation of {self.clean.n} images in {self.ball.norm} {self.ball.radius:.4g}",
            f"clean      {self.clean.brief()}",
            f"robust     {self.robust.brief()} under {', '.join(self.attacks)}",
        ]
        if self.certified is not None:
            lines.append(f"certified  {self.certified.brief()} by {', '.join(self.methods)}")
        lines.append(
            f"{len(self.certified_images)} certified, {len(self.misclassified_images)} misclassified under attack, "
            f"{len(self.unknown_images)} unknown"
        )
        return "\n  ".join((*lines, *(f"warning: {sentence}" for sentence in self.warnings)))


def attack(
    model: Model,
    data: Any,
    norm: BallLike | str,
    radius: float | None = None,
    *,
    attack: str | Attack | Suite = "quick",
    n: int | None = None,
    batch: int = 250,
    seed: int = 0,
    precision: Precision = "full",
    device: torch.device | str | None = None,
    watch: Watcher = lambda done, count: None,
) -> AttackResult:
    """Attack a model on data, batch by batch. The adversarial examples of all images are in the result.

    Args:
        model: any callable from images in [0, 1] to logits; a module is attacked in eval mode and left as it was.
        data: a pair (images, labels) of tensors, arrays or lists; a DataLoader or another iterable of such batches,
            or of single pairs; a torch data set; a `Dataset`, or a `Data`, whose test images are taken.
        norm: "linf" or "l2"; or a `Ball`, without a radius.
        radius: in pixels of images in [0, 1]: 8 / 255, not 8.
        attack: a suite or an attack, or the name of one: "quick" (FGSM, PGD and CW), "full", "autoattack", "pgd"...
        n: at most this many images.
        batch: images attacked together.
        seed: of the random numbers, which do not depend on the batches.
        precision: "bfloat16" searches under autocast; success is verified in the model's own precision.
        device: where a copy of the model is attacked; where the model is by default.
        watch: called with the number of images done, and of all where it is known.

    Returns:
        The accuracies with and without attack, and the adversarial examples, on the CPU.

    Example:
        >>> import torch, specguard
        >>> from specguard.data import digits
        >>> model = specguard.ViT(specguard.preset("tiny"), torch.Generator().manual_seed(0)).eval()
        >>> result = specguard.attack(model, digits(), "linf", 8 / 255, attack="pgd", n=20)
        >>> result.adversarial.images.shape, result.robust.n
        (torch.Size([20, 1, 8, 8]), 20)
    """
    ball = as_ball(norm, radius)
    model = _on(model, device)
    parts: list[tuple[Adversarial, Tensor]] = []
    tally = _Tally()
    with each_warning_once():
        stream = as_stream(data, n=n, batch=batch, model=model, box=ball.box)
        suite: Suite | None = None
        for chunk in _on_device(stream, device):
            suite = suite or _suite(attack, model, chunk)
            worst = tally.add(_attack(model, chunk, suite, ball, seed, precision), chunk.labels)
            parts.append((replace(worst, images=worst.images.cpu()), chunk.labels.cpu()))
            watch(tally.n, stream.count)
    adversarial = _joined([found for found, _ in parts])
    labels = torch.cat([labels for _, labels in parts])
    return AttackResult(ball, tally.clean, tally.robust, tally.by_attack, adversarial, labels)


def evaluate(
    model: Model,
    data: Any,
    norm: BallLike | str,
    radius: float | None = None,
    *,
    attack: str | Attack | Suite = "quick",
    methods: Sequence[Method | str] = METHODS,
    n: int | None = None,
    batch: int = 250,
    seed: int = 0,
    device: torch.device | str | None = None,
    watch: Watcher = lambda done, count: None,
) -> Evaluation:
    """Clean, robust and certified accuracy of a model on data, with 95 % intervals, batch by batch.

    Images are attacked, and those whose class no attack has changed are certified, by methods that stop early. Both
    are about the same images: of float64 data, for a model in float32, those rounded to float32.

    Args:
        model: a module that can be certified, see `specguard.certify`; without `methods`, any callable.
        data: see `specguard.attack`, like all others.
        norm: "linf" or "l2"; or a `Ball`, without a radius.
        radius: in pixels of images in [0, 1].
        attack: a suite or an attack, or the name of one.
        methods: of certificates, or their names; all by default, and () for attacks alone.
        n: at most this many images.
        batch: images attacked together; certified are at most 25 of them together.
        seed: of the random numbers.
        device: where a copy of the model is evaluated; where the model is by default.
        watch: called with the number of images done, and of all where it is known.

    Returns:
        The accuracies, and the verdict of every image.

    Example:
        >>> import torch, specguard
        >>> from specguard.data import digits
        >>> model = specguard.ViT(specguard.preset("tiny_smooth"), torch.Generator().manual_seed(0)).eval()
        >>> found = specguard.evaluate(model, digits(), "l2", 0.01, methods=["local"], n=10)
        >>> found.clean.n == len(found.certified_images + found.misclassified_images + found.unknown_images)
        True
    """
    ball, chosen = as_ball(norm, radius), (methods,) if isinstance(methods, str) else tuple(methods)
    names = tuple(method.name for method in named_methods([_name(method) for method in chosen])) if chosen else ()
    model = _on(model, device)
    tally, network = _Tally(), None
    verdicts: dict[str, list[int]] = {"certified": [], "misclassified": [], "unknown": []}
    warnings: dict[str, None] = {}
    with each_warning_once():
        stream = as_stream(data, n=n, batch=batch, model=model, box=ball.box)
        suite: Suite | None = None
        for chunk in _on_device(stream, device):
            if chosen and network is None:
                network = program_of(model, chunk.images)  # refused before time is spent on attacks
            suite = suite or _suite(attack, model, chunk)
            worst = tally.add(_attack(model, chunk, suite, ball, seed, "full"), chunk.labels)
            warnings |= dict.fromkeys(worst.warnings)
            certified = torch.zeros_like(worst.success)
            if network is not None:
                certified = _certified(network, chunk, ~worst.success, ball, chosen)
            ids = chunk.ids.tolist()
            for i, (proved, broken) in enumerate(zip(certified.tolist(), worst.success.tolist(), strict=True)):
                verdicts["certified" if proved else "misclassified" if broken else "unknown"].append(ids[i])
            watch(tally.n, stream.count)
    certified_images, misclassified_images, unknown_images = (tuple(found) for found in verdicts.values())
    return Evaluation(
        ball=ball,
        clean=tally.clean,
        robust=tally.robust,
        certified=Accuracy.of(len(certified_images), tally.n) if chosen else None,
        certified_images=certified_images,
        misclassified_images=misclassified_images,
        unknown_images=unknown_images,
        attacks=tuple(name for name, _ in tally.by_attack),
        methods=names,
        warnings=tuple(warnings),
    )


class _Tally:
    """How many images are classified correctly: as they are, under each attack, and under all of them."""

    def __init__(self) -> None:
        self.n = self._clean = self._robust = 0
        self._by_attack: dict[str, tuple[int, int]] = {}

    def add(self, found: "list[tuple[str, Adversarial, Tensor]]", labels: Tensor) -> Adversarial:
        """Count one batch, and return the worst case of its attacks."""
        worst = _worst(found, len(labels))
        self.n += len(labels)
        self._clean += int((worst.before == labels).sum())
        self._robust += int((~worst.success).sum())
        for name, each, _ in found:
            right, of = self._by_attack.get(name, (0, 0))
            self._by_attack[name] = right + int((~each.success).sum()), of + len(each.success)
        return worst

    @property
    def clean(self) -> Accuracy:
        return Accuracy.of(self._clean, self.n)

    @property
    def robust(self) -> Accuracy:
        return Accuracy.of(self._robust, self.n)

    @property
    def by_attack(self) -> tuple[tuple[str, Accuracy], ...]:
        return tuple((name, Accuracy.of(right, of)) for name, (right, of) in self._by_attack.items() if of)


def _attack(
    model: Model, chunk: Chunk, suite: Suite, ball: Ball, seed: int, precision: Precision
) -> list[tuple[str, Adversarial, Tensor]]:
    """The attacks of a suite on one batch: by name, what was found, and for which images."""
    found: list[tuple[str, Adversarial, Tensor]] = []
    left = torch.arange(len(chunk.labels), device=chunk.labels.device)
    for name, each in suite.attacks:
        result = each(
            model, chunk.images[left], chunk.labels[left], ball, ids=chunk.ids[left], seed=seed, precision=precision
        )
        found.append((name, result, left))
        if suite.cascade:
            left = left[~result.success]
            if not len(left):
                break
    return found


def _worst(found: list[tuple[str, Adversarial, Tensor]], count: int) -> Adversarial:
    """For every image the first success, or else what the last attack has found; the closest of any attack."""
    _, worst, at = found[0]
    for _, each, where in found[1:]:
        closest = worst.closest.clone()
        closest[where] = torch.minimum(closest[where], each.closest)
        taken = ~worst.success[where]
        columns = {name: getattr(worst, name).clone() for name in ("images", "success", "distance", "predicted")}
        for name, column in columns.items():
            column[where[taken]] = getattr(each, name)[taken]
        messages = tuple(dict.fromkeys((*worst.warnings, *each.warnings)))
        worst = replace(worst, closest=closest, warnings=messages, **columns)
    assert len(at) == count
    return worst


def _joined(parts: Sequence[Adversarial]) -> Adversarial:
    """The results of batches, on the CPU."""
    names = ("images", "success", "distance", "closest", "before", "predicted")
    columns = {name: torch.cat([getattr(part, name).cpu() for part in parts]) for name in names}
    return Adversarial(**columns, warnings=tuple(dict.fromkeys(text for part in parts for text in part.warnings)))


def _certified(network: Program, chunk: Chunk, mask: Tensor, ball: Ball, methods: Sequence[Method | str]) -> Tensor:
    """Which images of the mask are certified."""
    certified = torch.zeros_like(mask)
    if mask.any():
        images, labels = chunk.images[mask], chunk.labels[mask]
        certified[mask] = certify(network, images, labels, ball, methods, stop_early=True, batch=25).certified
    return certified


def _suite(attack: str | Attack | Suite, model: Model, chunk: Chunk) -> Suite:
    if isinstance(attack, Suite):
        return attack
    if isinstance(attack, Attack):
        return Suite(((type(attack).__name__.lower(), attack),))
    suites, names = get_args(SuiteName), (*get_args(SuiteName), *get_args(AttackName))
    if attack not in names:
        raise ConfigError(
            f"attack {attack!r} is unknown; choose one of {', '.join(names)}{suggestion(str(attack), names)}"
        )
    with torch.no_grad(), eval_mode(model):
        classes = QueriedModel(model).clean_logits(chunk.images[:1]).shape[1]
    return named_suite(attack, classes) if attack in suites else Suite(((attack, named_attack(attack, classes)),))


def _name(method: Method | str) -> str:
    return method if isinstance(method, str) else method.name


def _on(model: Model, device: torch.device | str | None) -> Model:
    """A copy of the module on another device; the model as it is, if none is named."""
    if device is None:
        return model
    device = as_device(device)
    return copy.deepcopy(model).to(device) if isinstance(model, nn.Module) else model


def _on_device(stream: Stream, device: torch.device | str | None) -> Iterator[Chunk]:
    for chunk in stream:
        if device is None:
            yield chunk
        else:
            yield Chunk(chunk.images.to(device), chunk.labels.to(device), chunk.ids.to(device))
