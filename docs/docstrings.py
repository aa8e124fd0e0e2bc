"""An extension of the reference, for docstrings that are written to be read as text.

The paragraphs of a theorem stand apart, each under its name, and `<g, d>` is a product, not a tag of HTML.
"""

import re
from typing import Any

from griffe import Extension, Object

_TAG = re.compile(r"(`[^`\n]*`)|<(?=[\w/!])")
_PARAGRAPH = re.compile(r"^(Guarantee|Cost|Reference): ", re.MULTILINE)


class Theorems(Extension):
    """Guarantee, Cost and Reference as paragraphs of their own."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _PARAGRAPH.sub(r"\n**\1.** ", obj.docstring.value)
            obj.docstring.value = _TAG.sub(lambda found: found[1] or "&lt;", text)
