"""A hook of the site: formulas between dollar signs become MathML, which browsers draw without a script.

`pymdownx.arithmatex` finds the formulas in a page, `latex2mathml` translates them when the site is built. A command
that it does not know is an error.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
_SIDES = {"l": "left", "r": "right"}
_FENCES = re.compile(r"\\([lr])(Vert|vert|angle|ceil|floor)(?![A-Za-z])")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """The page with its formulas as MathML."""
    content = _BLOCK.sub(lambda found: mathml(html.unescape(found[1]), page.file.src_uri, display=True), content)
    return _INLINE.sub(lambda found: mathml(html.unescape(found[1]), page.file.src_uri), content)


def mathml(latex: str, place: str, *, display: bool = False) -> str:
    """A formula as MathML. Norms and brackets come in pairs, so that their signs stand close to what they enclose."""
    fenced = _FENCES.sub(lambda found: rf"\{_SIDES[found[1]]}\{found[1]}{found[2]} ", latex)
    try:
        drawn = convert(fenced.strip(), display="block" if display else "inline")
    except Exception as error:
        raise PluginError(f"{place}: the formula {latex!r} cannot be drawn: {error!r}") from error
    if unknown := re.search(r"\\[A-Za-z]+|<mi>&</mi>|<mi>&amp;</mi>", drawn):
        raise PluginError(f"{place}: the formula {latex!r} has {unknown[0]!r}, which cannot be drawn")
    drawn = re.sub(r"(<mo)(>(?:&#x027E8;|&#x027E9;|&lang;))", r'\1 stretchy="false"\2', drawn)
    return f'<div class="formula">{drawn}</div>' if display else drawn
