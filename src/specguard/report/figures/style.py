"""Colors of all figures, and text that a figure can show."""

import re

_UNREADABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]"
)  # neither XML nor people can read these
RUN_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568", "#b7791f", "#2c7a7b")
CERTIFIED, ATTACKED, CLEAN, UNKNOWN = "#0f766e", "#c2410c", "#475569", "#94a3b8"
# All different: `inline` identifies colors by value.
METHOD_COLOURS = ("#0f766f", "#1d4ed8", "#7e22ce", "#be185d", "#a16207", "#57534e", "#0369a1")


def plain(text: str) -> str:
    """The text with characters that cannot be shown replaced."""
    return _UNREADABLE.sub("\ufffd", text)
