"""A hook of the site: theory pages show rows of the ledger, by key, so that they say what it says.

A line `<!-- ledger: key, key -->` becomes a table of these rows, `<!-- ledger: rest -->` one of the others.
A key that is not in the ledger is an error.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

DOCS = Path(__file__).resolve().parent
_CODE = re.compile(r"`[^`\n]+`")
_MARK = re.compile(r"<!-- ledger: (.+?) -->")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its rows in place. Bars in the code of tables, escaped for other readers, are plain bars."""
    whole = _MARK.sub(lambda found: _table(_keys(found[1]), page.file.src_uri), markdown)
    return _CODE.sub(lambda code: code[0].replace(r"\|", "|"), whole)


@cache
def ledger() -> dict[str, list[str]]:
    """The cells of every row, by key."""
    lines = [line for line in (DOCS / "theorems.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    return {row[0]: row for row in cells}


def named() -> set[str]:
    """The keys that any theory page names."""
    texts = [path.read_text() for path in sorted((DOCS / "theory").glob("*.md"))]
    return {key for text in texts for mark in _MARK.findall(text) for key in mark.split(", ") if key != "rest"}


def _keys(text: str) -> list[str]:
    return [key for key in ledger() if key not in named()] if text == "rest" else text.split(", ")


def _table(keys: list[str], place: str) -> str:
    if unknown := [key for key in keys if key not in ledger()]:
        raise PluginError(f"{place} names {unknown[0]!r}, which is not in the ledger")
    rows = [f"| **{key}** | {ledger()[key][1]} | {ledger()[key][2]} | {ledger()[key][3]} |" for key in keys]
    return "\n".join(("| | statement | reference | function |", "| --- | --- | --- | --- |", *rows)) if rows else ""
