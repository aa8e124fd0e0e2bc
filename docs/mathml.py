"""A hook of the site: formulas between dollar signs become MathML, which browsers draw without a script.

`pymdownx.arithmatex` finds the formulas in a page, `latex2mathml` translates them when the site is built. A command
that it does not know is an error.
"""

import html
import re
from itertools import zip_longest
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
_FENCES = re.compile(r"\\([lr])(Vert|vert|angle|ceil|floor)(?![A-Za-z])")
_SIDES = {"l": "left", "r": "right"}
_LIMITS = {"∑", "∏", "max", "min", "sup", "argmax"}  # what stands below them in a line of their own
_UNDER = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
_SPACE = "http://www.w3.org/1998/Math/MathML"
_WIDE = 24  # signs of an inline formula that a phone may have to scroll


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """The page with its formulas as MathML."""
    content = _BLOCK.sub(lambda found: mathml(html.unescape(found[1]), page.file.src_uri, display=True), content)
    return _INLINE.sub(lambda found: mathml(html.unescape(found[1]), page.file.src_uri), content)


def mathml(latex: str, place: str, *, display: bool = False) -> str:
    """A formula as MathML. Norms and brackets come in pairs, so that their signs stand close to their content."""
    fenced = _FENCES.sub(lambda found: rf"\{_SIDES[found[1]]}\{found[1]}{found[2]} ", latex)
    try:
        drawn = convert(fenced.strip(), display="block" if display else "inline")
        tree = ElementTree.fromstring(drawn)
    except Exception as error:
        raise PluginError(f"{place}: the formula {latex!r} cannot be drawn: {error!r}") from error
    _set(tree)
    text = "".join(tree.itertext())
    if unknown := re.search(r"\\[A-Za-z]*|&", text):
        raise PluginError(f"{place}: the formula {latex!r} has {unknown[0]!r}, which cannot be drawn")
    drawn = ElementTree.tostring(tree, encoding="unicode")
    if display:
        return f'<div class="formula" data-search-exclude>{drawn}</div>'
    return f'<span class="wide">{drawn}</span>' if len(text) > _WIDE else drawn


def _set(tree: ElementTree.Element) -> None:
    """Limits below their operators; names of functions and transposition without the space of an operator."""
    for node in tree.iter():
        node.tag = node.tag.removeprefix(f"{{{_SPACE}}}")
    for node in tree.iter():
        parts = list(node)
        if parts and (parts[0].text or "") in _LIMITS and node.tag in _UNDER:
            node.tag = _UNDER[node.tag]
            parts[0].set("movablelimits", "true")
        for part, following in zip_longest(parts, parts[1:]):
            text = part.text or ""
            name = len(text) > 1 and text.isalpha() and (text not in _LIMITS or _opens(following))
            if part.tag == "mo" and (name or text == "⊤"):
                part.tag = "mi"
    tree.set("xmlns", _SPACE)


def _opens(node: ElementTree.Element | None) -> bool:
    return node is not None and next(iter(node.itertext()), "") == "("
