"""Compare a converted model with its original, and locate the first difference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.models.wrapped import logits_of
from specguard.nn import Network

TOLERANCE = 1e-9  # as a fraction of the largest entry; rounding in float64 is far smaller


@dataclass(frozen=True)
class Pair:
    """A module of the original and one of the network whose outputs, or inputs, must be equal.

    Args:
        theirs: Path of the module in the original.
        ours: Path of the module in the network.
        inputs: Whether inputs are compared instead of outputs.

    Example:
        >>> print(Pair("encoder.ln", "norm"))
        'norm', which is 'encoder.ln' of the original
    """

    theirs: str
    ours: str
    inputs: bool = False

    def __str__(self) -> str:
        place = "the input of " if self.inputs else ""
        return f"{place}{self.ours!r}, which is {self.theirs!r} of the original"


def _plain_call(model: nn.Module, x: Tensor) -> Any:
    return model(x)


@dataclass(frozen=True)
class View:
    """How an original is called on a normalized batch, and which of its modules correspond to layers of a network.

    Args:
        pairs: Corresponding modules, in the order of evaluation; pairs with a missing module are ignored.
        call: `call(model, x)` returns the output of the model; `model(x)` by default.

    Example:
        >>> view = View((Pair("ln", "norm"),), call=lambda model, x: model(inputs_embeds=x))
    """

    pairs: tuple[Pair, ...] = ()
    call: Callable[[nn.Module, Tensor], Any] = _plain_call


def compare(
    theirs: nn.Module,
    ours: Network,
    view: View,
    generator: torch.Generator | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Raise a `ConfigError` that names the first module where a network differs from its original.

    Both must be copies in float64 and eval mode, as they may be changed. They are compared on two random inputs in
    [0, 1].
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    x = torch.rand(2, *ours.shape, generator=generator, dtype=torch.float64, device=generator.device)
    x = x.to(next(ours.parameters()).device)
    first = ours.get_submodule("normalise") if _has(ours, "normalise") else nn.Identity()
    pairs = [p for p in view.pairs if _has(theirs, p.theirs) and _has(ours, p.ours)]
    with torch.no_grad():
        with _record(theirs, {(p.theirs, p.inputs) for p in pairs}) as original_values:
            expected = _logits(theirs, first(x), view)
        with _record(ours, {(p.ours, p.inputs) for p in pairs}) as network_values:
            found = ours(x)
    for pair in pairs:
        wanted = original_values.get((pair.theirs, pair.inputs))
        if wanted is not None:  # a module may exist without being called
            check_same(str(pair), wanted, network_values[pair.ours, pair.inputs], tolerance)
    check_same("the logits", expected, found, tolerance)


def _logits(model: nn.Module, x: Tensor, view: View) -> Tensor:
    try:
        output = view.call(model, x)
    except Exception as error:  # third-party code may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"the original cannot be run in float64 for comparison: {reason}") from error
    return logits_of(output)


def check_same(place: str, wanted: Tensor, found: Tensor, tolerance: float) -> None:
    if wanted.shape != found.shape and wanted.numel() == found.numel():
        wanted = wanted.reshape(found.shape)  # the original's patches may still form a grid
    if wanted.shape != found.shape:
        shapes = f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
        raise ConfigError(f"the converted model differs from its original at {place}: its shape is {shapes}")
    size, gap = wanted.abs().amax(), (wanted - found).abs().amax()
    if not wanted.isfinite().all():
        raise ConfigError(f"the original has values that are not finite at {place} and cannot be compared")
    if not gap <= tolerance * size:  # NaN compares false
        raise ConfigError(
            f"the converted model differs from its original at {place}: "
            f"by {gap:.1e}, at a largest entry of {size:.1e}"
        )


@contextmanager
def _record(model: nn.Module, places: set[tuple[str, bool]]) -> Iterator[dict[tuple[str, bool], Tensor]]:
    """Record the inputs or outputs of these modules while the model runs."""
    values: dict[tuple[str, bool], Tensor] = {}
    handles = []
    for name, inputs in places:
        module = model.get_submodule(name)

        def keep_input(_: nn.Module, args: Any, kwargs: Any, place: tuple[str, bool] = (name, inputs)) -> None:
            values.setdefault(place, _tensor((*args, *kwargs.values())))

        def keep_output(_: nn.Module, args: Any, output: Any, place: tuple[str, bool] = (name, inputs)) -> None:
            values[place] = _tensor(output)

        if inputs:
            handles.append(module.register_forward_pre_hook(keep_input, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(keep_output))
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def _tensor(output: Any) -> Tensor:
    """A copy of the first tensor of a module's inputs or output, since the next layer may work in place."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output.clone()


def _has(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
