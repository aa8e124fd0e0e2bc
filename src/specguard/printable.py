"""Untrusted names as text that terminals show without interpreting it."""

import re

# Control characters, and those that change the text direction or end a line in some programs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(name: object) -> str:
    """A name with control characters, and bytes that are not text, escaped as `\\x1b` or `\\u2028`."""
    return _CONTROL.sub(lambda found: _escape(ord(found[0])), str(name))


def _escape(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00  # how Python stores bytes of file names that are not text
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
