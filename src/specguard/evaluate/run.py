"""An evaluation on disk: every attack on every image, killed at any moment and continued.

evaluation.json     what is attacked, with what; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per attack, ball and image
flags.json          signs of obfuscated gradients
images/             adversarial images, on request
summary.json        the numbers; its presence means that the evaluation is complete
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from specguard.attacks import Adversarial, Suite, diagnosed
from specguard.attacks.hunt import Attack
from specguard.attacks.victim import Model, Precision
from specguard.data import Split
from specguard.errors import ConfigError, RunError
from specguard.evaluate.folder import Progress, Watcher, as_stored, open_folder
from specguard.evaluate.subjects import Group, attacked, most_alike, subject
from specguard.evaluate.summary import summary
from specguard.geometry import Ball
from specguard.runs import (
    Json,
    append_lines,
    described,
    locked,
    read_json,
    read_lines,
    record_start,
    rewrite_lines,
    write_json,
    write_tensors,
    writing,
)

Key = tuple[str, str, float]  # attack, norm, radius


@dataclass(frozen=True)
class Evaluation:
    """What to attack with. `batch` images are attacked, and recorded, together."""

    suite: Suite
    balls: tuple[Ball, ...]
    seed: int = 0
    batch: int = 250
    precision: Precision = "full"
    diagnose: bool = True
    save_images: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, not {self.batch}")
        if not self.balls or not self.suite.attacks:
            raise ConfigError("an evaluation needs at least one attack and one radius")
        names, sizes = [name for name, _ in self.suite.attacks], [(ball.norm, ball.radius) for ball in self.balls]
        if len(set(names)) < len(names) or len(set(sizes)) < len(sizes):
            raise ConfigError("the same attack or radius was given twice")

    def settings(self) -> Json:
        """As JSON, for the disk."""
        return {
            "attacks": [{"name": name, "settings": described(attack)} for name, attack in self.suite.attacks],
            "cascade": self.suite.cascade,
            "balls": [asdict(ball) for ball in self.balls],
            "seed": self.seed,
            "batch": self.batch,
            "precision": self.precision,
            "diagnose": self.diagnose,
            "save_images": self.save_images,
        }


def evaluate(
    model: Model,
    split: Split,
    classes: tuple[str, ...],
    folder: Path,
    evaluation: Evaluation,
    *,
    identity: Json,
    device: torch.device,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Attack `model` on every image of `split`, leave records in `folder`, and return the summary.

    `identity` says which model and which data this is; a folder that holds an evaluation of another, or with other
    settings, is refused, and one of the same is continued. Batches are the same whether or not it was interrupted,
    so the records are too.
    """
    settings = as_stored({**identity, "n": len(split), **evaluation.settings()})
    with locked(folder):
        open_folder(folder, "evaluation", settings)
        if (folder / "summary.json").exists():
            return _stored_summary(folder / "summary.json", settings)
        record_start(folder, device)
        state = _State(folder, split, evaluation)
        about = subject(model, split.to(device))
        if evaluation.diagnose and not (folder / "flags.json").exists():
            watch(Progress(0, state.total, "looking for obfuscated gradients"))
            seen = most_alike(about, torch.arange(min(len(split), 1000), device=device))
            found = diagnosed(seen.form.model, seen.inputs, seen.labels, evaluation.balls[-1], seed=evaluation.seed)
            write_json(folder / "flags.json", {"flags": [asdict(flag) for flag in found]})

        def search(attack: Attack, ball: Ball) -> Callable[[Group], Adversarial]:
            return lambda group: attack(
                group.form.model,
                group.inputs,
                group.labels,
                ball,
                ids=group.samples,
                seed=evaluation.seed,
                precision=evaluation.precision,
            )

        for ball in evaluation.balls:
            for name, attack in evaluation.suite.attacks:
                key = (name, ball.norm, ball.radius)
                for start in range(0, len(split), evaluation.batch):
                    watch(Progress(state.done, state.total, f"{name}, {ball.norm} {ball.radius:.4g}"))
                    if ids := state.missing(key, start):
                        adversarial, labels = attacked(
                            about, torch.tensor(ids, device=device), search(attack, ball)
                        )
                        state.add(key, start, ids, labels, adversarial)
                    state.done += 1
        watch(Progress(state.total, state.total, "done"))
        return _finish(folder, state, settings, classes)


class _State:
    """What is on disk, and which images of a batch are still to be attacked."""

    def __init__(self, folder: Path, split: Split, evaluation: Evaluation) -> None:
        self.folder, self.evaluation, self.count = folder, evaluation, len(split)
        self.labels = split.labels.tolist()
        self.path = folder / "records.jsonl"
        batches = math.ceil(len(split) / evaluation.batch)
        self.total, self.done = batches * len(evaluation.balls) * len(evaluation.suite.attacks), 0
        self.keys: list[Key] = [
            (name, ball.norm, ball.radius) for ball in evaluation.balls for name, _ in evaluation.suite.attacks
        ]
        self.records: list[Json] = []
        self.broken: dict[Key, set[int]] = {key: set() for key in self.keys}
        self.seen: dict[Key, set[int]] = {key: set() for key in self.keys}
        for record in read_lines(self.path):
            self._take(record)
        self._drop_partial_batches()

    def missing(self, key: Key, start: int) -> list[int]:
        """The images of a batch that this attack has yet to see; all that are wanted, or none."""
        wanted = self._wanted(key, start)
        return [] if wanted and wanted <= self.seen[key] else sorted(wanted)

    def add(self, key: Key, start: int, ids: list[int], labels: Tensor, found: Adversarial) -> None:
        """Write the records of a batch; the images first, so that a record promises its image."""
        name, norm, radius = key
        if self.evaluation.save_images:
            path = self.folder / "images" / f"{name}-{norm}-{radius!r}-{start:08d}.safetensors"
            with writing(path.parent):
                path.parent.mkdir(exist_ok=True)
            write_tensors(path, {"images": found.images, "samples": torch.tensor(ids)})
        columns = (labels, found.before, found.predicted, found.success, found.distance, found.closest)
        records = []
        for sample, row in zip(ids, zip(*(c.tolist() for c in columns), strict=True), strict=True):
            label, before, predicted, broken, distance, closest = row
            record: Json = {"sample": sample, "attack": name, "norm": norm, "radius": radius, "label": label}
            record |= {"before": before, "predicted": predicted, "broken": broken, "distance": distance}
            record["closest"] = closest if math.isfinite(closest) else None
            if found.warnings:
                record["warnings"] = list(found.warnings)
            records.append(record)
        append_lines(self.path, *records)
        for record in records:
            self._take(record)

    def _wanted(self, key: Key, start: int) -> set[int]:
        """The images of a batch; in a cascade, those that the attacks before have not broken."""
        wanted = set(range(start, min(start + self.evaluation.batch, self.count)))
        if self.evaluation.suite.cascade:
            for earlier in self.keys[: self.keys.index(key)]:
                if earlier[1:] == key[1:]:
                    wanted -= self.broken[earlier]
        return wanted

    def _take(self, record: Json) -> None:
        """Believe a record that can be true; one that is there already says nothing new."""
        match record:
            case {
                "attack": str(name),
                "norm": str(norm),
                "radius": float() | int() as radius,
                "sample": int(sample),
                "label": int(label),
                "before": int(),
                "predicted": int(),
                "broken": bool(broken),
                "distance": float() | int(),
                "closest": None | float() | int() as closest,
            } if (
                (name, norm, radius) in self.seen
                and 0 <= sample < self.count
                and label == self.labels[sample]
                and (closest is None or closest >= 0)
                and all(isinstance(text, str) for text in _listed(record.get("warnings", [])))
            ):
                key: Key = (name, norm, radius)
            case _:
                raise RunError(f"{self.path} holds a record that does not belong to this evaluation")
        if sample in self.seen[key]:
            if record not in (r for r in self.records if r["sample"] == sample):
                raise RunError(f"{self.path} holds two records of image {sample} that contradict each other")
            return
        self.seen[key].add(sample)
        if broken:
            self.broken[key].add(sample)
        self.records.append(record)

    def _drop_partial_batches(self) -> None:
        """A batch whose records were cut short is attacked again as a whole: its company may matter."""
        whole: dict[Key, set[int]] = {}
        for key in self.keys:
            parts = [self._wanted(key, start) for start in range(0, self.count, self.evaluation.batch)]
            whole[key] = set().union(*(part for part in parts if part <= self.seen[key]))
        kept = [r for r in self.records if r["sample"] in whole[r["attack"], r["norm"], r["radius"]]]
        if self.path.exists():  # also because a line cut short must not be written on
            rewrite_lines(self.path, kept)
        self.records = kept
        for key in self.keys:
            self.seen[key] &= whole[key]
            self.broken[key] &= whole[key]


def _stored_summary(path: Path, settings: Json) -> Json:
    result = read_json(path)
    match result:
        case {"clean": {"count": int(), "n": int()}, "attacks": [_, *_], "worst_case": [_, *_], "flags": list()}:
            if result.get("settings") == settings:
                return result
    raise RunError(f"{path} does not hold the summary of this evaluation")


def _stored_flags(path: Path) -> list[Json]:
    match read_json(path):
        case {"flags": list(flags)} if all(
            isinstance(flag, dict) and {"name", "message"} <= flag.keys() for flag in flags
        ):
            return flags
    raise RunError(f"{path} does not hold the flags of an evaluation")


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _finish(folder: Path, state: _State, settings: Json, classes: tuple[str, ...]) -> Json:
    warnings = {text: None for record in state.records for text in record.get("warnings", ())}
    flags = _stored_flags(folder / "flags.json") if state.evaluation.diagnose else []
    result = {
        **summary(state.records, settings, list(classes)),
        "warnings": list(warnings),
        "flags": flags,
        "settings": settings,
        "environment": read_lines(folder / "environment.jsonl")[-1],
    }
    write_json(folder / "summary.json", result)
    return result
