"""Colors and line styles, the same in every figure for the same run, method or kind; and text that can be drawn."""

import re
from collections.abc import Mapping
from typing import Any

from specguard.records.certificate import METHOD_NAMES

_UNREADABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]"
)  # neither XML nor people can read these
RUN_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568", "#b7791f", "#2c7a7b")
CERTIFIED, ATTACKED, CLEAN, UNKNOWN = "#0f766e", "#c2410c", "#475569", "#94a3b8"
# All different: `inline` identifies colors by value.
METHOD_COLOURS = ("#0f766f", "#1d4ed8", "#7e22ce", "#be185d", "#a16207", "#57534e", "#0369a1")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (4, 1, 1, 1)), "-", (0, (3, 1, 1, 1, 1, 1)), "-", (0, (2, 2)))
_MARKERS = ("o", "s", "^", "v", "P", "X")
# The line of each kind of accuracy: certified ones are solid, under attack they are dashed.
LINES: Mapping[str, dict[str, Any]] = {
    "clean": {"linestyle": (0, (1, 2)), "linewidth": 1.3},
    "certified": {"linestyle": "-", "linewidth": 2.0, "marker": "D", "markersize": 3.6},
    "robust": {"linestyle": (0, (4, 2)), "linewidth": 1.5, "marker": "o", "markersize": 3.6},
    "robust in certify": {"linestyle": (0, (1, 1)), "linewidth": 1.5, "marker": "s", "markersize": 3.6},
    "smoothed": {"linestyle": (0, (6, 1.5, 1.5, 1.5)), "linewidth": 1.5, "marker": "v", "markersize": 4.5},
}


def plain(text: str) -> str:
    """The text with characters that cannot be shown replaced."""
    return _UNREADABLE.sub("\ufffd", text)


def brief(text: str, most: int = 30) -> str:
    """The beginning of a text, for the legend of a figure."""
    return plain(text if len(text) <= most else f"{text[: most - 3]}...")


def run_color(number: int) -> str:
    """The color of a run by its place in the report; after eight runs the colors repeat."""
    return RUN_COLOURS[number % len(RUN_COLOURS)]


def run_marker(number: int) -> str:
    """The marker of a run, which tells runs of the same color apart."""
    return _MARKERS[number // len(RUN_COLOURS) % len(_MARKERS)]


def method_line(method: str) -> dict[str, Any]:
    """Color and style of the line of a certification method, by its name alone."""
    known: tuple[str, ...] = METHOD_NAMES
    number = known.index(method) if method in known else len(method) % len(METHOD_COLOURS)
    width = 2.6 if _DASHES[number] == "-" else 1.5  # a line below a dashed one is seen between its dashes
    return {"color": METHOD_COLOURS[number], "linestyle": _DASHES[number], "linewidth": width}
