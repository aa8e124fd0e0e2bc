"""How far one attention layer can move, and how far bounds say: LoFAST's Figures 1, 3 and 4 and Table 3, on disk.

sensitivity.json      which layer of what, and how; written once, at the start
environment.jsonl     versions, commit, hardware and command of every start
result.json           the numbers; its presence means that the study is complete
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.certificates.attention import local as tightened
from specguard.certificates.attention import lofast
from specguard.certificates.attention.rule import AnyAttention, AttentionNode
from specguard.data import Dataset
from specguard.errors import ConfigError, RunError, SoundnessError
from specguard.records.store import Json, derived_seed, locked, read_json, read_lines, record_start, write_json
from specguard.rng import Noise
from specguard.studies.attention_change import (
    BOUNDS,
    MATRICES,
    Points,
    attention_name,
    bounds_at,
    changed_layer,
    double_copy,
    exceeded,
    first_head,
    largest_change,
    layer_inputs,
    lengths,
    node_at,
    starting_directions,
    with_skip,
)
from specguard.studies.chosen import samples_settings
from specguard.studies.folder import Progress, Watcher, as_stored, open_folder

ELEMENTS = (*MATRICES, "x")  # what is changed in the third study: a matrix, or the input
WEIGHT_BOUNDS = ("lofast2", "t1")
_COLUMNS = ("found", *BOUNDS)
_FORMER = {"specformer_printed", "exceeded"}  # columns of older results, which are left out when these are read
HEAD = {"maps": ("found", "lofast1", "lofast2", "ours"), "values": ("found", "lofast1", "naive")}


@dataclass(frozen=True)
class Sensitivity:
    """What to look at: the attention layer of that number, at what the first `images` give it.

    Four studies: the change of the output over `radii`; the two factors of LoFAST's second part, for the first
    head, over the same radii; the first with inputs brought to the spectral norms `input_norms`; and bounds at
    `weight_radius`, at the first image, where a matrix or the input has moved in `samples` random directions by the
    shares `weight_changes` of its Frobenius norm. The largest change is sought
    in `steps` steps from the most fragile direction, from its opposite and from `starts` random ones.
    """

    layer: int = 0
    radii: tuple[float, ...] = (0.01, 0.02, 0.03, 0.05, 0.07, 0.09, 0.1)
    input_norms: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)
    weight_changes: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0)
    weight_radius: float = 0.1
    images: int = 8
    samples: int = 10
    steps: int = 60
    starts: int = 2
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("images", 1), ("samples", 1), ("steps", 1), ("starts", 0), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.radii:
            raise ConfigError("at least one radius is needed")
        for name in ("radii", "input_norms", "weight_changes"):
            values = getattr(self, name)
            if not all(0 < value < math.inf for value in values):  # NaN compares false
                raise ConfigError(f"{name} must be positive and finite, not {', '.join(map(str, values))}")
            if list(values) != sorted(set(values)):
                raise ConfigError(f"{name} must increase, unlike {', '.join(map(str, values))}")
        if not 0 < self.weight_radius < math.inf:
            raise ConfigError(f"weight_radius must be positive and finite, not {self.weight_radius}")


def sensitivity(
    model: nn.Module,
    split: Dataset,
    folder: Path,
    settings: Sensitivity,
    *,
    identity: Json,
    device: torch.device,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Look at one layer at the first images of `split`, leave the numbers in `folder`, and return them.

    `identity` says which model and which data this is; a folder that holds a study of another is refused, and the
    result of one that is complete is returned as it is.
    """
    name = attention_name(model, settings.layer)
    if len(split) < settings.images:
        raise ConfigError(f"there are {len(split)} images, not {settings.images}")
    subset = {key: value for key, value in samples_settings(split).items() if key == "subset"}
    stored, path = as_stored({**identity, **subset, **asdict(settings)}), folder / "result.json"
    with locked(folder):
        open_folder(folder, "sensitivity", stored)
        if path.exists():
            return _stored_result(path, name, stored, settings)
        record_start(folder, device)
        images = split.batch(slice(0, settings.images))[0]
        result = {
            **layer_sensitivity(model, images, settings, device, watch),
            "settings": stored,
            "environment": read_lines(folder / "environment.jsonl")[-1],
        }
        write_json(path, result)
        return result


def layer_sensitivity(
    model: nn.Module,
    images: Float[Tensor, "batch channel height width"],
    settings: Sensitivity,
    device: torch.device,
    watch: Watcher = lambda progress: None,
) -> Json:
    """The studies of one layer: found changes and bounds, each as mean, min and max over images or samples.

    What is not finite, and T2 where it cannot be formed, is None. A change beyond a bound raises
    `SoundnessError`.
    """
    name = attention_name(model, settings.layer)
    exact = double_copy(model, device)
    layer = cast(AnyAttention, exact.get_submodule(name))
    study = _Study(name, layer, settings, watch)
    inputs = [layer_inputs(exact, layer, part.to(device).double()) for part in images.split(settings.batch)]
    X = torch.cat(inputs)
    if not X.isfinite().all():
        raise ConfigError(f"the input of {name} is not finite")
    try:
        rows = study.over_radii(X, "radii")
        head = study.of_one_head(X)
        scaled = [
            {"input_norm": norm, **row}
            for norm in settings.input_norms
            for row in study.over_radii(_scaled(X, norm, name), f"input norm {norm:g}")
        ]
        weights = study.over_weights(X[:1])
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the bounds of {name} cannot be computed: {error}") from error
    return {
        "layer": name,
        "n": len(X),
        "tokens": X.shape[1],
        "dim": X.shape[2],
        "heads": layer.heads,
        "input_norm": _extent(torch.linalg.matrix_norm(X, 2)),
        "radii": rows,
        "head": head,
        "input_norms": scaled,
        **weights,
    }


class _Study:
    """The pieces of a study of one layer, told to a watcher one by one."""

    def __init__(self, name: str, layer: AnyAttention, settings: Sensitivity, watch: Watcher) -> None:
        self.name, self.layer, self.settings, self.watch = name, layer, settings, watch
        batches = math.ceil(settings.images / settings.batch)
        self.done = 0
        self.total = batches * (2 + len(settings.input_norms)) + len(ELEMENTS) * len(settings.weight_changes)

    def over_radii(self, X: Points, doing: str) -> list[Json]:
        """One row per radius: what was found and what is bounded, over all points."""
        s, found = self.settings, []
        for begin in range(0, len(X), s.batch):
            self._tell(doing)
            samples = torch.arange(begin, min(begin + s.batch, len(X)), device=X.device)
            noise = Noise.of(samples, derived_seed(s.seed, "starts"))
            found.append(self._measured(X[begin : begin + s.batch], noise))
        return [self._row(radius, [part[i] for part in found]) for i, radius in enumerate(s.radii)]

    def of_one_head(self, X: Points) -> list[Json]:
        """One row per radius and factor of the first head."""
        s = self.settings
        found: dict[tuple[float, str], list[dict[str, Tensor]]] = {}
        for begin in range(0, len(X), s.batch):
            self._tell("one head")
            samples = torch.arange(begin, min(begin + s.batch, len(X)), device=X.device)
            node = node_at(self.layer, X[begin : begin + s.batch])
            noise = Noise.of(samples, derived_seed(s.seed, "starts"))
            directions = starting_directions(with_skip(self.layer), node.X, noise, s.starts)
            for radius in s.radii:
                for factor, values in first_head(node, radius, directions, s.steps).items():
                    if exceeded(
                        values["found"], {n: b for n, b in values.items() if n != "found"}, lengths(node.X)
                    ):
                        raise SoundnessError(f"the {factor} of a head of {self.name} exceed a bound at {radius:g}")
                    found.setdefault((radius, factor), []).append(values)
        return [
            {
                "radius": radius,
                "factor": factor,
                **{name: _extent(torch.cat([part[name] for part in parts])) for name in HEAD[factor]},
            }
            for (radius, factor), parts in found.items()
        ]

    def over_weights(self, X: Points) -> Json:
        """Bounds of the layer as it is, and with every element moved by every share, over the samples."""
        s, rows = self.settings, []
        for which in ELEMENTS:
            seed = derived_seed(s.seed, "weights", which)
            noises = [Noise.of(torch.tensor([k], device=X.device), seed) for k in range(s.samples)]
            for share in s.weight_changes:
                self._tell(f"changed {which}")
                values: dict[str, list[Tensor]] = {name: [] for name in WEIGHT_BOUNDS}
                for noise in noises:
                    for name, bound in self._weight_bounds(X, which, share, noise).items():
                        values[name].append(bound)
                extents = {name: _extent(torch.cat(parts)) for name, parts in values.items()}
                rows.append({"which": which, "change": share, **extents})
        self._tell("done")
        as_it_is = _weight_bounds(node_at(self.layer, X), s.weight_radius)
        return {"weights": rows, "unchanged": {name: _extent(bound) for name, bound in as_it_is.items()}}

    def _weight_bounds(self, X: Points, which: str, share: float, noise: Noise) -> dict[str, Tensor]:
        if which == "x":
            moved = share * lengths(X)[:, None, None] * noise.directions(X.shape[1:], X.dtype)
            return _weight_bounds(node_at(self.layer, X + moved), self.settings.weight_radius)
        layer = changed_layer(self.layer, which, share, noise)
        return _weight_bounds(node_at(layer, X), self.settings.weight_radius)

    def _measured(self, X: Points, noise: Noise) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
        """For every radius what was found, and the bounds, none of which it exceeds."""
        s, function, node = self.settings, with_skip(self.layer), node_at(self.layer, X)
        directions = starting_directions(function, X, noise, s.starts)
        size = lengths(node.output)
        largest, measured = torch.zeros(len(X), dtype=X.dtype, device=X.device), []
        for radius in s.radii:  # they increase: what was found in a smaller ball is in the larger one
            largest = torch.maximum(largest, largest_change(function, X, radius, directions, s.steps))
            bounds = bounds_at(node, radius)
            for name in exceeded(largest, bounds, size):
                raise SoundnessError(
                    f"{self.name} moves by more than the bound {name} at radius {radius:g}: this bound is wrong"
                )
            measured.append((largest, bounds))
        return measured

    def _row(self, radius: float, parts: list[tuple[Tensor, dict[str, Tensor | None]]]) -> Json:
        columns: dict[str, Json | None] = {"found": _extent(torch.cat([found for found, _ in parts]))}
        for name in BOUNDS:
            values = [bound for _, bounds in parts if (bound := bounds[name]) is not None]
            columns[name] = _extent(torch.cat(values)) if values else None
        return {"radius": radius, **columns}

    def _tell(self, doing: str) -> None:
        self.watch(Progress(self.done, self.total, doing))
        self.done += 1


def _weight_bounds(node: AttentionNode, radius: float) -> dict[str, Tensor]:
    eps = torch.full((len(node.X),), radius, dtype=torch.float64, device=node.X.device)
    return {"lofast2": lofast.lofast(node, eps, node.xi), "t1": tightened.upper_t1(node, eps)}


def _scaled(X: Points, norm: float, name: str) -> Points:
    """X brought to this spectral norm."""
    size = torch.linalg.matrix_norm(X, 2)
    if not (size > 0).all():
        raise ConfigError(f"the input of {name} is zero and cannot be brought to another norm")
    return X * (norm / size)[:, None, None]


def _extent(values: Float[Tensor, " value"]) -> Json | None:
    """Mean, least and largest; None where one is not finite."""
    if not values.isfinite().all():
        return None
    return {"mean": float(values.mean()), "min": float(values.amin()), "max": float(values.amax())}


def _stored_result(path: Path, name: str, stored: Json, settings: Sensitivity) -> Json:
    """The result on disk, which is one of these settings."""
    result = read_json(path)
    for key in ("radii", "input_norms"):
        if isinstance(rows := result.get(key), list) and all(isinstance(row, dict) for row in rows):
            result[key] = [{name: row[name] for name in row if name not in _FORMER} for row in rows]
    radii = [{"radius": radius} for radius in settings.radii]
    scaled = [{"input_norm": norm, **row} for norm in settings.input_norms for row in radii]
    weights = [{"which": which, "change": share} for which in ELEMENTS for share in settings.weight_changes]
    fits = (
        result.get("layer") == name
        and result.get("n") == settings.images
        and result.get("settings") == stored
        and _are_rows(result.get("radii"), radii, _COLUMNS)
        and _are_head_rows(result.get("head"), settings.radii)
        and _are_rows(result.get("input_norms"), scaled, _COLUMNS)
        and _are_rows(result.get("weights"), weights, WEIGHT_BOUNDS)
        and _are_rows([result.get("unchanged")], [{}], WEIGHT_BOUNDS)
        and _is_extent(result.get("input_norm"))
        and all(isinstance(result.get(key), int) for key in ("tokens", "dim", "heads"))
    )
    if not fits:
        raise RunError(f"{path} does not hold the result of this study")
    return result


def _are_head_rows(rows: object, radii: tuple[float, ...]) -> bool:
    keys = [{"radius": radius, "factor": factor} for radius in radii for factor in HEAD]
    if not isinstance(rows, list) or len(rows) != len(keys):
        return False
    return all(_are_rows([row], [key], HEAD[str(key["factor"])]) for row, key in zip(rows, keys, strict=True))


def _are_rows(rows: object, keys: list[Json], columns: tuple[str, ...]) -> bool:
    """Whether these are rows of these keys, in order, with an extent in every column and nothing else."""
    if not isinstance(rows, list) or len(rows) != len(keys):
        return False
    return all(
        isinstance(row, dict)
        and row.keys() == {*key, *columns}
        and all(row[name] == value for name, value in key.items())
        and all(row[name] is None or _is_extent(row[name]) for name in columns)
        for row, key in zip(rows, keys, strict=True)
    )


def _is_extent(value: object) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"mean", "min", "max"}:
        return False
    return all(isinstance(number, float) and 0 <= number < math.inf for number in value.values())
