"""The summaries that studies leave behind, read into values. Pure functions of JSON."""

from collections.abc import Callable
from typing import Any

from specguard.records.accuracy import Proportion
from specguard.records.base import Json
from specguard.report.fields import Malformed, count, field, many, norm, number, optional, share, size, table, text
from specguard.report.studies import (
    Attacked,
    AttackRow,
    Certified,
    Checked,
    ClassRow,
    Looked,
    Origin,
    RadiusRow,
    Training,
    WeightNorms,
)

Summary = Training | Attacked | Certified | Checked | Looked


def kind_of(record: Json) -> Callable[[Json, Origin], Summary] | None:
    """Which study a JSON object is the summary of, told by its fields; None if of none."""
    for marks, reader in _KINDS.items():
        if record.keys() >= set(marks):
            return reader
    return None


def trained(record: Json, origin: Origin) -> Training:
    return Training(
        origin, field(record, "test_accuracy", share), table(record.get("settings", {}), "settings"), epochs=()
    )


def attacked(record: Json, origin: Origin) -> Attacked:
    clean = field(record, "clean", share)
    found = Attacked(
        origin,
        clean.total,
        clean,
        rows=field(record, "attacks", many(_attack_row)),
        worst=field(record, "worst_case", many(_worst_row)),
        cascade=record.get("cascade") is True,
        classes=field(record, "per_class", many(_class_row)),
        flags=tuple(
            (field(flag, "name", text), field(flag, "message", text))
            for flag in field(record, "flags", many(table))
        ),
        warnings=field(record, "warnings", many(text)),
    )
    if not found.worst:
        raise Malformed("'worst_case' is empty")
    return found


def proved(record: Json, origin: Origin) -> Certified:
    settings = field(record, "settings", table)
    largest = {shown(name): table(entry, name) for name, entry in field(record, "largest", table).items()}
    rows = field(record, "radii", many(_radius_row))
    if not rows or not rows[0].by:
        raise Malformed("'radii' is empty")
    if any(row.by.keys() != rows[0].by.keys() for row in rows):
        raise Malformed("its radii are certified by different families")
    clean = field(record, "clean", share)
    return Certified(
        origin,
        clean.total,
        field(settings, "norm", norm),
        clean,
        tuple(sorted(rows, key=lambda row: row.radius)),
        medians={name: field(entry, "median", optional(size)) for name, entry in largest.items()},
        vacuous={name: field(entry, "vacuous", count) for name, entry in largest.items()},
        limits=tuple(
            (field(entry, "term", text), field(entry, "images", count))
            for entry in field(record, "limits", many(table))
        ),
        per_image={shown(k): size(v, k) for k, v in table(record.get("seconds_per_image", {}), "seconds").items()},
        searched=settings.get("search") is True,
    )


def checked(record: Json, origin: Origin) -> Checked:
    digest = field(field(record, "settings", table), "records", text)
    return Checked(
        origin, field(record, "n", count), field(record, "claims", count), field(record, "attacked", count), digest
    )


def looked(record: Json, origin: Origin) -> Looked:
    weights = field(record, "weights", table)
    spreads = {key: table(record[key], key) for key in ("exponent", "log_product", "growth") if key in record}
    return Looked(
        origin,
        field(record, "n", count),
        {key: number(spread["mean"], key) for key, spread in spreads.items() if spread.get("mean") is not None},
        after=field(weights, "after", many(_weight)),
        before=() if weights.get("before") is None else field(weights, "before", many(_weight)),
    )


_KINDS: dict[tuple[str, ...], Callable[[Json, Origin], Summary]] = {
    ("test_accuracy", "settings"): trained,
    ("worst_case", "attacks"): attacked,
    ("limits", "largest", "radii"): proved,
    ("claims", "least_room"): checked,
    ("parts", "weights"): looked,
}


def shown(name: Any) -> str:
    return text(name, "a name")


def _attack_row(value: Any, name: str) -> AttackRow:
    record = table(value, name)
    return _row(record, field(record, "attack", text))


def _worst_row(value: Any, name: str) -> AttackRow:
    return _row(table(value, name), "worst case")


def _row(record: Json, attack: str) -> AttackRow:
    return AttackRow(
        attack, field(record, "norm", norm), field(record, "radius", size), field(record, "accuracy", share)
    )


def _class_row(value: Any, name: str) -> ClassRow:
    record = table(value, name)
    label = field(record, "class", text)
    if field(record, "n", count) == 0:
        return ClassRow(label, Proportion(0, 0), ())
    return ClassRow(label, field(record, "clean", share), field(record, "worst_case", many(_worst_row)))


def _radius_row(value: Any, name: str) -> RadiusRow:
    record = table(value, name)
    return RadiusRow(
        field(record, "radius", size),
        field(record, "attacked", share),
        field(record, "certified", share),
        {shown(family): share(found, family) for family, found in field(record, "by", table).items()},
        field(record, "broken", count),
        field(record, "unknown", count),
    )


def _weight(value: Any, name: str) -> WeightNorms:
    record = table(value, name)
    sigma = field(record, "sigma", many(size))
    if not sigma:
        raise Malformed("'sigma' is empty")
    return WeightNorms(field(record, "layer", text), field(record, "kind", text), sigma)
