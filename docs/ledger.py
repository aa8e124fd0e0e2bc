"""A hook of the site: theory pages show rows of the ledger, by key, so that they say what it says.

A line `<!-- ledger: key, key -->` becomes a list of these rows. On the ledger's own page the table becomes such a
list, with the tests. An unknown key is an error, and a test fails when a row is on no page.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

DOCS = Path(__file__).resolve().parent
PAGE = "theorems.md"
_CODE = re.compile(r"`[^`\n]+`")
_MARK = re.compile(r"<!-- ledger: (.+?) -->")
_TABLE = re.compile(r"^\| key \|(?:.*\n?)(?:^\|.*\n?)+", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its rows in place. Bars in the code of tables, escaped for other readers, are plain bars."""
    place = page.file.src_uri
    if place == PAGE:
        markdown = _TABLE.sub(lambda _: _list(list(ledger()), place, tests=True), markdown)
    whole = _MARK.sub(lambda found: _list(found[1].split(", "), place), markdown)
    return _CODE.sub(lambda code: code[0].replace(r"\|", "|"), whole)


@cache
def ledger() -> dict[str, list[str]]:
    """The cells of every row, by key."""
    lines = [line for line in (DOCS / PAGE).read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    return {row[0]: row for row in cells}


def _list(keys: list[str], place: str, *, tests: bool = False) -> str:
    if unknown := [key for key in keys if key not in ledger()]:
        raise PluginError(f"{place} names {unknown[0]!r}, which is not in the ledger")
    return "\n\n".join(_entry(*ledger()[key], tests=tests) for key in keys)


def _entry(key: str, statement: str, reference: str, function: str, test: str, *, tests: bool) -> str:
    """One row. A statement may begin with a formula, and so has no capital letter."""
    origin = f"*Reference:* {reference}. *Function:* {function}."
    return f"**{key}**\n\n:   {statement}.\n\n    {origin}{f' *Test:* {test}.' if tests else ''}"
