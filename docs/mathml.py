"""A hook of the site: formulas between dollar signs become MathML, which browsers draw without a script.

`pymdownx.arithmatex` finds the formulas in a page, `latex2mathml` translates them when the site is built. A command
that it does not know is an error.
"""

import html
import re
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
        return f'<div class="formula">{drawn}</div>'
    return f'<span class="wide">{drawn}</span>' if len(text) > _WIDE else drawn


def _set(tree: ElementTree.Element) -> None:
    """Limits below their operators; names of functions and transposition without the space of an operator."""
    for node in tree.iter():
        node.tag = node.tag.removeprefix(f"{{{_SPACE}}}")
        text, first = node.text or "", next(iter(node), None)
        if first is not None and (first.text or "") in _LIMITS and node.tag in _UNDER:
            node.tag = _UNDER[node.tag]
            first.set("movablelimits", "true")
        elif node.tag == "mo" and (text == "⊤" or (text.isalpha() and len(text) > 1 and text not in _LIMITS)):
            node.tag = "mi"
    tree.set("xmlns", _SPACE)
