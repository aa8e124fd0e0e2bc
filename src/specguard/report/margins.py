"""The records of single images, line by line: ten thousand certificates are too many to be held at once."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specguard.records.base import Json
from specguard.records.files import file_lines, reading
from specguard.records.store import LARGEST_LINES
from specguard.report.fields import Malformed, count, field, many, optional, size, table, text
from specguard.report.studies import Certified, Looked, Margins

_TERMS = 8  # that are shown


def margins_of(path: Path, study: Certified) -> Margins:
    """Radii, limiting terms and classes of all images of a certification."""
    digest = hashlib.sha256()
    largest: dict[str, list[float]] = {family: [] for family in study.medians}
    best: list[float] = []
    limiting: Counter[str] = Counter()
    shares: dict[str, float] = defaultdict(float)
    classes: dict[int, list[Any]] = {}
    seen = 0
    for record in _each(path, digest):
        seen += 1
        label, verdicts = field(record, "label", count), field(record, "radii", many(_verdict))
        right = field(record, "predicted", count) == label
        if len(verdicts) != len(study.rows):
            raise Malformed("a record has other radii than the study")
        row = classes.setdefault(label, [0, 0, [0] * len(verdicts)])
        row[0], row[1] = row[0] + 1, row[1] + right
        row[2] = [known + (verdict == "certified") for known, verdict in zip(row[2], verdicts, strict=True)]
        if right:
            found = field(record, "largest", table)
            radii = {family: field(found, family, size) for family in largest}
            for family, radius in radii.items():
                largest[family].append(radius)
            best.append(max(radii.values(), default=0.0))
            losses = {text(k, "a term"): optional(size)(v, k) for k, v in field(record, "loses", table).items()}
            _add_losses(losses, limiting, shares)
    if seen != study.n:
        raise Malformed(f"it holds {seen} of {study.n} images")
    terms = tuple((term, images, shares[term] / images) for term, images in limiting.most_common(_TERMS))
    return Margins(
        tuple(sorted(best)),
        {family: tuple(sorted(radii)) for family, radii in largest.items()},
        terms,
        tuple((label, row[0], row[1], tuple(row[2])) for label, row in sorted(classes.items())),
        digest.hexdigest(),
    )


def _add_losses(losses: dict[str, float | None], limiting: Counter[str], shares: dict[str, float]) -> None:
    """Which term takes most of a margin, and which share; None is infinite, and takes all."""
    if not losses:
        limiting["rounding"] += 1
        return
    first = next(iter(losses))
    limiting[first] += 1
    known = [value for value in losses.values() if value is not None]
    value = losses[first]
    shares[first] += 1.0 if value is None or sum(known) == 0 else value / sum(known)


def looked_records(path: Path, study: Looked) -> tuple[Json, ...]:
    """Of every image, the singular values of every part; no more of a record than figures draw."""
    found = []
    for record in _each(path, hashlib.sha256()):
        parts = {
            text(name, "a part"): _part(table(part, name)) for name, part in field(record, "parts", table).items()
        }
        found.append({"parts": parts})
    if len(found) != study.n:
        raise Malformed(f"it holds {len(found)} of {study.n} images")
    return tuple(found)


def _part(record: Json) -> Json:
    sigma = field(record, "sigma", many(size))
    if not sigma:
        raise Malformed("'sigma' is empty")
    return {"group": field(record, "group", text), "sigma": [sigma[0]], "step": field(record, "step", size)}


def _verdict(value: Any, name: str) -> str:
    return field(table(value, name), "verdict", text)


def _each(path: Path, digest: Any) -> Iterator[Json]:
    """The complete lines of a file, one at a time; `digest` takes in all of its bytes."""
    with reading(path):
        for place, line in enumerate(file_lines(path, LARGEST_LINES, links=False), start=1):
            digest.update(line)
            if not line.endswith(b"\n"):
                return  # cut short: it was never complete
            yield _parsed(line, place)


def _parsed(line: bytes, place: int) -> Json:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise Malformed(f"line {place} is not valid JSON") from None
    if not isinstance(record, dict):
        raise Malformed(f"line {place} does not hold a JSON object")
    return record
