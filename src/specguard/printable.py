"""Names of strangers as text that does nothing but be read."""

import re

# Control characters, and those that turn the direction of what follows or end a line in some programs.
_ACTIVE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(name: object) -> str:
    """A name that any terminal can show: what it would obey, and bytes that are no text, are written out."""
    return _ACTIVE.sub(lambda found: _written_out(ord(found[0])), str(name))


def _written_out(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00  # how Python keeps a byte of a file's name that is no text
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
