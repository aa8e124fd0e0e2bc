"""Lines of JSON, written as a stranger would."""

import json
from pathlib import Path
from typing import Any


def append_lines(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as handle:
        handle.writelines(json.dumps(record) + "\n" for record in records)


def rewrite_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
