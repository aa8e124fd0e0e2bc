"""An extension of the reference: the paragraphs of a theorem's docstring stand apart, each under its name."""

import re
from typing import Any

from griffe import Extension, Object

_PARAGRAPH = re.compile(r"^(Guarantee|Cost|Reference): ", re.MULTILINE)


class Theorems(Extension):
    """Guarantee, Cost and Reference as paragraphs of their own."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _PARAGRAPH.sub(r"\n**\1.** ", obj.docstring.value)
