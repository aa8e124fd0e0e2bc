"""Names of strangers are text, and tell a terminal nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specguard.printable import printable


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("blocks.0 é 日本 [bold] :smile:", "blocks.0 é 日本 [bold] :smile:"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\r\tc", r"a\x0ab\x0d\x09c"),
        ("\x9b2J", r"\x9b2J"),
        ("\x00\x7f", r"\x00\x7f"),
        ("run\udcff", r"run\xff"),
        ("\ud800", r"\ud800"),
        ("a\u202eb", r"a\u202eb"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(name, shown):
    assert printable(name) == shown


@given(st.text())
def test_what_is_shown_is_one_line_of_text_and_shown_again_the_same(name):
    shown = printable(name)
    assert shown.encode().decode() == shown
    assert len(shown.splitlines()) <= 1
    assert printable(shown) == shown
