"""An evaluation on disk: every attack on every image, killed at any moment and continued.

evaluation.json     what is attacked, with what; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per attack, ball and image
flags.json          signs of obfuscated gradients
shards/             records of processes that share the work, see studies/shards.py
images/             adversarial images, on request
summary.json        the numbers; its presence means that the evaluation is complete
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from specguard.attacks import Adversarial, Suite, find_flags
from specguard.attacks.base import Attack
from specguard.attacks.model import Model, Precision
from specguard.data import Split
from specguard.errors import ConfigError, RunError
from specguard.geometry import Ball
from specguard.records.files import folder_below
from specguard.records.store import (
    Json,
    append_lines,
    described,
    read_json,
    record_start,
    rewrite_lines,
    write_json,
    write_tensors,
)
from specguard.studies.chosen import labels_by_sample, samples_settings
from specguard.studies.folder import Progress, Watcher, as_stored, nearly_equal
from specguard.studies.samples import Group, attacked, most_alike, subject
from specguard.studies.shards import WHOLE, Place, Shard, opened
from specguard.studies.summary import summary

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
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Attack `model` on every image of `split`, leave records in `folder`, and return the summary.

    `identity` says which model and which data this is; a folder that holds an evaluation of another, or with other
    settings, is refused, and one of the same is continued. Batches are the same whether or not it was interrupted,
    so the records are too. A `shard` attacks its own batches, and while others have some to do, returns how many
    are `pending`, of how many, in place of a summary.
    """
    settings = as_stored({**identity, **samples_settings(split), **evaluation.settings()})
    path = folder / "summary.json"
    with opened(folder, "evaluation", settings, shard) as place:
        if path.exists():
            return _stored_summary(path, settings)
        record_start(place.own, device)
        state = _State(place, split, evaluation)
        work = _Work(model, split.to(device), evaluation, folder, watch)
        if shard.index == 0:
            work.diagnose(place)
        work.complete(state)
        if not place.alone:
            state = _State(place, split, evaluation)
            if left := state.pending:
                return {"pending": left, "of": state.total}
        work.diagnose(place)  # if no first shard has done it
        with place.together():
            if path.exists():  # two shards may be the last at once
                return _stored_summary(path, settings)
            return _finish(state, settings, classes, device)


class _Work:
    """The model at work on the batches that are missing."""

    def __init__(self, model: Model, split: Split, evaluation: Evaluation, folder: Path, watch: Watcher) -> None:
        self.subject, self.split, self.evaluation, self.folder = subject(model, split), split, evaluation, folder
        self.watch = watch

    def diagnose(self, place: Place) -> None:
        """Leave the signs of obfuscated gradients in the folder of the study, unless they are there."""
        path = self.folder / "flags.json"
        if self.evaluation.diagnose and not path.exists():
            self.watch(Progress(0, 1, "looking for obfuscated gradients"))
            first = torch.arange(min(len(self.split), 1000), device=self.split.labels.device)
            seen, ball = most_alike(self.subject, first), self.evaluation.balls[-1]
            found = find_flags(seen.form.model, seen.inputs, seen.labels, ball, seed=self.evaluation.seed)
            with place.together():
                write_json(path, {"flags": [asdict(flag) for flag in found]})

    def complete(self, state: "_State") -> None:
        """Attack what is missing."""
        evaluation, begins = self.evaluation, state.begins
        total = len(begins) * len(state.keys)
        for number, (ball, (name, attack)) in enumerate(product(evaluation.balls, evaluation.suite.attacks)):
            key = (name, ball.norm, ball.radius)
            for done, start in enumerate(begins, number * len(begins)):
                self.watch(Progress(done, total, f"{name}, {ball.norm} {ball.radius:.4g}"))
                if positions := state.missing(key, start):
                    index = torch.tensor(positions, device=self.split.labels.device)
                    adversarial, labels = attacked(self.subject, index, self._search(attack, ball))
                    state.add(key, start, positions, labels, adversarial)
        self.watch(Progress(total, total, "done"))

    def _search(self, attack: Attack, ball: Ball) -> Callable[[Group], Adversarial]:
        settings = self.evaluation
        return lambda group: attack(
            group.form.model,
            group.inputs,
            group.labels,
            ball,
            ids=group.samples,
            seed=settings.seed,
            precision=settings.precision,
        )


class _State:
    """What is on disk, of all processes, and which images of a batch are still to be attacked."""

    def __init__(self, place: Place, split: Split, evaluation: Evaluation) -> None:
        self.place, self.evaluation, self.count = place, evaluation, len(split)
        self.labels = labels_by_sample(split)
        self.samples = list(self.labels)
        self.path = place.own / "records.jsonl"
        self.begins = place.shard.begins(len(split), evaluation.batch)
        self.keys: list[Key] = [
            (name, ball.norm, ball.radius) for ball in evaluation.balls for name, _ in evaluation.suite.attacks
        ]
        self.total = math.ceil(len(split) / evaluation.batch) * len(self.keys)
        self.records: dict[Key, dict[int, Json]] = {key: {} for key in self.keys}
        self.broken: dict[Key, set[int]] = {key: set() for key in self.keys}
        self.lines = dict(place.lines("records.jsonl"))
        for path, lines in self.lines.items():
            for record in lines:
                self._take(record, path)
        self._drop_partial_batches()

    @property
    def pending(self) -> int:
        """How many batches are yet to be done, by any process."""
        begins = range(0, self.count, self.evaluation.batch)
        return sum(bool(self.missing(key, begin)) for key in self.keys for begin in begins)

    def merged(self) -> list[Json]:
        """All records, attack by attack and in order, which then are on disk in the folder of the study itself."""
        kept = [(key, sample) for key in self.keys for sample in self.samples if sample in self.records[key]]
        found = [self.records[key][sample] for key, sample in kept]
        path = self.place.folder / "records.jsonl"
        if self.lines.get(path) != found:
            rewrite_lines(path, found)
        return found

    def missing(self, key: Key, start: int) -> list[int]:
        """Where the images of a batch stand that this attack has yet to see; all that are wanted, or none."""
        wanted = self._wanted(key, start)
        if wanted <= self.records[key].keys():
            return []
        return [place for place, sample in enumerate(self._batch(start), start) if sample in wanted]

    def add(self, key: Key, start: int, positions: list[int], labels: Tensor, found: Adversarial) -> None:
        """Write the records of a batch; the images first, so that a record promises its image."""
        name, norm, radius = key
        ids = [self.samples[position] for position in positions]
        if self.evaluation.save_images:
            images = folder_below(self.place.folder, "images")
            path = images / f"{name}-{norm}-{radius!r}-{start:08d}.safetensors"
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
        self.lines.setdefault(self.path, []).extend(records)
        for record in records:
            self._take(record, self.path)

    def _wanted(self, key: Key, start: int) -> set[int]:
        """The images of a batch; in a cascade, those that the attacks before have not broken."""
        wanted = set(self._batch(start))
        if self.evaluation.suite.cascade:
            for earlier in self.keys[: self.keys.index(key)]:
                if earlier[1:] == key[1:]:
                    wanted -= self.broken[earlier]
        return wanted

    def _batch(self, start: int) -> list[int]:
        return self.samples[start : start + self.evaluation.batch]

    def _take(self, record: Json, path: Path) -> None:
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
                (name, norm, radius) in self.records
                and label == self.labels.get(sample)
                and (closest is None or closest >= 0)
                and all(isinstance(text, str) for text in _listed(record.get("warnings", [])))
            ):
                key: Key = (name, norm, radius)
            case _:
                raise RunError(f"{path} holds a record that does not belong to this evaluation")
        if not nearly_equal(self.records[key].setdefault(sample, record), record):
            raise RunError(f"{path} holds two records of image {sample} that contradict each other")
        if broken:
            self.broken[key].add(sample)

    def _drop_partial_batches(self) -> None:
        """A batch whose records were cut short is attacked again as a whole: its company may matter."""
        for key in self.keys:
            parts = [self._wanted(key, start) for start in range(0, self.count, self.evaluation.batch)]
            whole = set().union(*(part for part in parts if part <= self.records[key].keys()))
            self.records[key] = {s: record for s, record in self.records[key].items() if s in whole}
            self.broken[key] &= whole
        kept = [
            record
            for record in self.lines.get(self.path, [])
            if record["sample"] in self.records[record["attack"], record["norm"], record["radius"]]
        ]
        if self.path.exists():  # also because a line cut short must not be written on
            rewrite_lines(self.path, kept)
        self.lines[self.path] = kept


def _stored_summary(path: Path, settings: Json) -> Json:
    result = read_json(path)
    match result:
        case {
            "clean": clean,
            "attacks": [_, *_] as attacks,
            "worst_case": [_, *_] as worst,
            "flags": list(flags),
            "warnings": list(warnings),
            "cascade": bool(),
            "settings": stored,
        } if stored == settings and _is_share(clean):
            named = all(isinstance(row, dict) and isinstance(row.get("attack"), str) for row in attacks)
            texts = all(isinstance(text, str) for text in warnings)
            if named and texts and all(map(_is_row, (*attacks, *worst))) and all(map(_is_flag, flags)):
                return result
    raise RunError(f"{path} does not hold the summary of this evaluation")


def _is_share(value: object) -> bool:
    match value:
        case {"count": int(count), "n": int(n)}:
            return 0 <= count <= n and n > 0
    return False


def _is_row(row: object) -> bool:
    match row:
        case {"norm": str(), "radius": float() | int(), "accuracy": accuracy}:
            return _is_share(accuracy)
    return False


def _is_flag(flag: object) -> bool:
    return isinstance(flag, dict) and {"name", "message"} <= flag.keys()


def _stored_flags(path: Path) -> list[Json]:
    match read_json(path):
        case {"flags": list(flags)} if all(map(_is_flag, flags)):
            return flags
    raise RunError(f"{path} does not hold the flags of an evaluation")


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _finish(state: _State, settings: Json, classes: tuple[str, ...], device: torch.device) -> Json:
    folder, records = state.place.folder, state.merged()
    warnings = {text: None for record in records for text in record.get("warnings", ())}
    result = {
        **summary(records, settings, list(classes)),
        "warnings": list(warnings),
        "flags": _stored_flags(folder / "flags.json") if state.evaluation.diagnose else [],
        "settings": settings,
    }
    return state.place.summarised(result, device)
