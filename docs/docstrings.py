"""An extension of the reference, for docstrings that are written to be read as text.

The paragraphs of a theorem stand apart, each under its name; an example is code; and `<g, d>` is a product, not a
tag of HTML.
"""

import re
from typing import Any

from griffe import Extension, Object

_PARAGRAPH = re.compile(r"^(Guarantee|Cost|Reference): ", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example:(?=\s*\n\s+>>>)", re.MULTILINE)
_TAG = re.compile(r"(`[^`\n]*`)|<(?=[\w/!])")


class Docstrings(Extension):
    """Guarantee, Cost and Reference as paragraphs, and Example as the section that Griffe calls Examples."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = rendered(obj.docstring.value)


def rendered(text: str) -> str:
    """A docstring as Griffe and Markdown understand it."""
    text = _PARAGRAPH.sub(r"\n**\1.** ", _EXAMPLE.sub("Examples:", text))
    lines, code = [], False
    for line in text.split("\n"):
        code = line.lstrip().startswith(">>>") or (code and bool(line.strip()))
        lines.append(line if code else _TAG.sub(lambda found: found[1] or "&lt;", line))
    return "\n".join(lines)
