"""A matplotlib figure as inline SVG.

The element has no style of its own, which the content security policy would block; its text can be selected; its
colors are variables of the page, so that it is readable in light and dark themes.
"""

import io
import re
import warnings
from collections.abc import Mapping
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from specguard.report.figures.style import ATTACKED, CERTIFIED, CLEAN, METHOD_COLOURS, RUN_COLOURS, UNKNOWN

# Colors of the figures, and the variables of the page that replace them.
_NAMES: Mapping[str, str] = {
    **{color: f"var(--run-{number})" for number, color in enumerate(RUN_COLOURS)},
    **{color: f"var(--method-{number})" for number, color in enumerate(METHOD_COLOURS)},
    CERTIFIED: "var(--certified)",
    ATTACKED: "var(--attacked)",
    CLEAN: "var(--clean)",
    UNKNOWN: "var(--unknown)",
    "#000000": "var(--ink)",
    "#b0b0b0": "var(--line)",
}
_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_REFERENCE = re.compile(r"url\(#([^)]*)\)")
_RUN = re.compile(r"run-(\d+)-")
_DROPPED = ("font-family", "font", "clip-rule")


def inline_svg(figure: Figure, name: str, label: str) -> Markup:
    """The figure as an element of a page; `name` makes ids unique, `label` is for screen readers."""
    root = ElementTree.fromstring(_render(figure))
    for parent in root.iter():
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        _rewrite(element, name)
    for size in ("width", "height"):
        del root.attrib[size]  # set by the page
    root.attrib |= {"class": "figure", "role": "img", "aria-label": label}
    _strip_spaces(root)
    return Markup(ElementTree.tostring(root, encoding="unicode", method="xml"))  # ElementTree escapes text


def _render(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    fixed = matplotlib.rc_context({"svg.hashsalt": "specguard", "svg.fonttype": "none"})
    with fixed, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the page's fonts may have it
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue()


def _rewrite(element: ElementTree.Element, name: str) -> None:
    """Plain tags, unique ids, attributes instead of style, the page's colors, two decimals."""
    tag = element.tag.removeprefix(f"{{{_SVG}}}")
    element.tag = tag
    old = dict(element.attrib)
    element.attrib.clear()
    for key, value in old.items():
        if key == "style":
            pairs = (part.partition(":") for part in value.split(";") if part.strip())
            styles = {style.strip(): setting.strip() for style, _, setting in pairs}
            element.attrib |= {k: _NAMES.get(v, v) for k, v in styles.items() if k not in _DROPPED}
        elif key == f"{{{_LINK}}}href":
            element.set("href", value.replace("#", f"#{name}-", 1))
        elif key == "id":
            if run := _RUN.match(value):
                element.attrib |= {"data-run": run[1], "class": "of-run"}
            element.set("id", f"{name}-{value}")
        elif key in ("d", "x", "y", "width", "height", "transform", "points"):
            element.set(key, _NUMBER.sub(lambda found: f"{float(found[0]):.2f}", value.replace("\n", "")))
        else:
            element.set(key, _REFERENCE.sub(rf"url(#{name}-\1)", value))
    if tag == "text" and "fill" not in element.attrib:
        element.set("fill", "var(--ink)")


def _strip_spaces(root: ElementTree.Element) -> None:
    for element in root.iter():
        if element.tag not in ("text", "tspan"):
            element.text = element.text.strip() if element.text and element.text.strip() else None
        element.tail = None
