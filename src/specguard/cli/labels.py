"""What several runs are called beside each other."""

import os
from pathlib import Path

from specguard.errors import ConfigError
from specguard.printable import printable


def labeled(runs: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    resolved = [Path(os.path.realpath(run)) for run in runs]  # a link that leads to itself is refused when read
    if len(set(resolved)) < len(resolved):
        raise ConfigError("the same run was given twice")
    for length in range(1, max(len(run.parts) for run in resolved) + 1):
        labels = [printable("/".join(run.parts[-length:])) for run in resolved]
        if len(set(labels)) == len(labels):
            break
    return labels
