"""CROWN by auto_LiRPA, an optional dependency: a verifier for what our own methods leave open.

auto_LiRPA bounds a traced graph by linear relaxations, does not account for rounding, and some of its operators
have unsound bounds. Its use is therefore guarded: it runs in float64, on a graph lowered to few operations
(`lowering`) whose logits must equal the model's; its bounds must be finite and exceed a tolerance; any failure
counts as "unknown"; and its bounds must first hold on a set of small test networks, the canaries. Its certificates
still rest on a third party, state so and are counted separately.
"""

import copy
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specguard.certificates.lowering import lower
from specguard.certificates.verifier import Attempt
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.nn import Attention, LayerProject, MeanPool, SmoothProject, materialized

Method = Literal["CROWN", "CROWN-IBP"]
_SAME_LOGITS = 1e-6  # of the logits' scale: allowed difference between the graph's output and the model's
_TOLERANCE = 1e-5  # of the logits' scale: subtracted from every bound
_UNSOUND = ("BoundPow",)  # nodes with unsound bounds under current torch
_OPTIONS = {"conv_mode": "matrix", "compare_crown_with_ibp": True}


class CROWN:
    """auto_LiRPA's bounds for one model, one image at a time, as a `Verifier`.

    The bounds rest on auto_LiRPA, guarded as the module describes.

    Cost: seconds to minutes per image.

    Args:
        model: the classifier; a layer without a lowering is an error.
        shape: shape of one image.
        method: "CROWN" or the cheaper, looser "CROWN-IBP".

    Raises:
        ConfigError: if auto_LiRPA is not installed or fails a canary.

    Example:
        >>> from specguard.certificates import CROWN, certify
        >>> CROWN.name, CROWN.deterministic
        ('crown', True)
        >>> verifier = CROWN(model, (3, 32, 32))  # doctest: +SKIP
        >>> certify(model, images, labels, ball, stop_early=True, verifiers=[verifier])  # doctest: +SKIP
    """

    name = "crown"
    deterministic = True

    def __init__(self, model: nn.Module, shape: tuple[int, ...], method: Method = "CROWN") -> None:
        if method not in get_args(Method):
            raise ConfigError(f"method {method!r} is unknown; choose one of {', '.join(get_args(Method))}")
        library = _library()
        _check_canaries(library, method)
        version = getattr(library, "__version__", "of unknown version")
        self.rests_on = f"auto_LiRPA {version}, {method}, in float64 without an account of its rounding"
        self._bounds = _Bounds(library, model, shape, method)

    def attempt(
        self,
        images: Float[Tensor, "batch *shape"],
        labels: Int[Tensor, " batch"],
        ball: Ball,
        wanted: Bool[Tensor, "batch class_"],
    ) -> Attempt:
        """Lower bounds on the wanted margins, minus the tolerance; an image that fails has -inf and a reason."""
        lower = torch.full(wanted.shape, -torch.inf, dtype=torch.float64, device=images.device)
        reasons: list[str | None] = []
        for number, image in enumerate(images.double()):
            other_classes = wanted[number].nonzero()[:, 0]
            try:
                lower[number, other_classes] = self._bounds.margins(
                    image[None], int(labels[number]), other_classes, ball
                )
                reasons.append(None)
            except Exception as error:  # noqa: BLE001 - any failure of third-party code means "unknown"
                reasons.append(f"{type(error).__name__}: {error}".partition("\n")[0])
        return Attempt(lower, tuple(reasons))


class _Bounds:
    """The lowered model and its auto_LiRPA graph, which is built on first use."""

    def __init__(self, library: Any, model: nn.Module, shape: tuple[int, ...], method: Method) -> None:
        self.library, self.method = library, method
        self.exact = materialized(model).eval().requires_grad_(False).double()
        self.lowered = lower(model, shape)
        self._graph: Any = None

    def margins(self, x: Float[Tensor, "1 *shape"], label: int, other_classes: Tensor, ball: Ball) -> Tensor:
        """Lower bounds on `f_label - f_j` over the ball for each other class; raises if a guard fails."""
        with _float64(), torch.no_grad():
            graph = self._build_graph(x)
            logits = self.exact.to(x.device)(x)
            scale = float(logits.abs().max())
            # NaN compares false.
            if not float((graph(x) - logits).abs().max()) <= _SAME_LOGITS * scale:
                raise ConfigError("the graph does not compute what the model computes")
            eye = torch.eye(logits.shape[1], dtype=x.dtype, device=x.device)
            C = (eye[label] - eye[other_classes])[None]
            norm = 2.0 if ball.norm == "l2" else float("inf")
            perturbed = self.library.BoundedTensor(x, self.library.PerturbationLpNorm(norm=norm, eps=ball.radius))
            lower, _ = graph.compute_bounds(x=(perturbed,), C=C, method=self.method, bound_upper=False)
            lower = lower.detach().reshape(-1)
            if lower.dtype != torch.float64 or lower.shape != other_classes.shape or not lower.isfinite().all():
                raise ConfigError("the bounds are not finite numbers in float64, one for every other class")
            return lower - _TOLERANCE * scale

    def _build_graph(self, x: Tensor) -> Any:
        if self._graph is None:
            model = copy.deepcopy(self.lowered).to(x.device)
            graph = self.library.BoundedModule(model, x, bound_opts=dict(_OPTIONS), device=x.device)
            nodes = graph.nodes() if callable(getattr(graph, "nodes", None)) else graph._modules.values()
            if bad := [type(node).__name__ for node in nodes if type(node).__name__ in _UNSOUND]:
                raise ConfigError(f"the graph has a {bad[0]}, whose bounds are unsound")
            self._graph = graph
        return self._graph


def _library() -> Any:
    """Import auto_LiRPA and check that it has the names used here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = importlib.import_module("auto_LiRPA")
    except ModuleNotFoundError as error:
        if error.name != "auto_LiRPA":
            raise ConfigError(f"auto_LiRPA cannot be imported: it needs {error.name}") from None
        raise ConfigError("crown needs auto_LiRPA (0.7.1, from its source), which is not installed") from None
    except Exception as error:  # noqa: BLE001 - old releases fail to import in many ways
        raise ConfigError(f"auto_LiRPA cannot be imported: {error}") from None
    for name in ("BoundedModule", "BoundedTensor", "PerturbationLpNorm"):
        if not hasattr(library, name):
            raise ConfigError(f"auto_LiRPA has no {name}; crown was made for 0.7.1")
    return library


@contextmanager
def _float64() -> Iterator[None]:
    """Set the default dtype, in which auto_LiRPA creates tensors, to float64, and silence its warnings."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


# Canaries ---------------------------------------------------------------------------------------------------------

_PASSED: list[tuple[object, Method]] = []  # libraries and methods that passed in this process
_BALLS = (Ball("l2", 0.3, box=False), Ball("linf", 0.1, box=False), Ball("l2", 1e-3, box=False))
_CANARIES: dict[str, tuple[tuple[int, ...], Any]] = {
    "a linear map": ((6,), lambda: nn.Sequential(nn.Linear(6, 3))),
    "relu": ((6,), lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))),
    "tanh": ((6,), lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))),
    "a projection": ((2, 4), lambda: nn.Sequential(LayerProject(1.0), nn.Flatten(), nn.Linear(8, 3))),
    "a norm": ((2, 4), lambda: nn.Sequential(SmoothProject(1.0), nn.LayerNorm(4), MeanPool(), nn.Linear(4, 3))),
    "attention": ((3, 4), lambda: nn.Sequential(Attention(4, 2, fused=False), MeanPool(), nn.Linear(4, 3))),
}


def _check_canaries(library: Any, method: Method) -> None:
    """Refuse a library whose lower bound exceeds a margin found by an attack, on any of a few small networks."""
    if any(passed is library and passed_method == method for passed, passed_method in _PASSED):
        return
    for name, (shape, make) in _CANARIES.items():
        g = torch.Generator().manual_seed(len(name))
        with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global generator; replaced below
            model = make().eval().requires_grad_(False)
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
        x = torch.randn(1, *shape, generator=g).double()
        for ball in _BALLS:
            _check_canary(_Bounds(library, model, shape, method), name, x, ball)
    _PASSED.append((library, method))


def _check_canary(bounds: _Bounds, name: str, x: Tensor, ball: Ball) -> None:
    other_classes, name = torch.tensor([1, 2]), f"{name} ({ball.norm} {ball.radius:g})"
    try:
        lower = bounds.margins(x, 0, other_classes, ball)
    except Exception as error:  # noqa: BLE001 - any failure of third-party code
        raise ConfigError(f"auto_LiRPA failed a canary, {name}, and is not used: {error}") from None
    if bool((lower > _attack_margins(bounds.exact, x, ball)).any()):
        raise ConfigError(
            f"auto_LiRPA's bounds on a canary, {name}, exceed margins found by an attack; it is not used"
        )


def _attack_margins(model: nn.Module, x: Tensor, ball: Ball) -> Float[Tensor, " other"]:
    """The smallest value of each margin found in the ball by gradient steps."""
    found = []
    for other in (1, 2):
        perturbed = x.clone()
        values = []
        for step in range(12):
            point = perturbed.requires_grad_()
            logits = model(point)[0]
            margin = logits[0] - logits[other]
            values.append(margin.detach())
            (gradient,) = torch.autograd.grad(margin, point)
            perturbed = ball.project(point.detach() - ball.steepest(gradient) * ball.radius * 2 * 0.7**step, x)
        found.append(torch.stack(values).amin())
    return torch.stack(found)
