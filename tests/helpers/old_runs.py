"""Studies of three images as version 0.1.0 has left them, file by file."""

import json
from pathlib import Path
from typing import Any

STUDIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def write(name: str, folder: Path) -> Path:
    """The folder of a study."""
    folder.mkdir(parents=True)
    for file, content in STUDIES[name].items():
        if file.endswith(".jsonl"):
            (folder / file).write_text("".join(json.dumps(line) + "\n" for line in content))
        else:
            (folder / file).write_text(json.dumps(content, indent=2) + "\n")
    return folder
