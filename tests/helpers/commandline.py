"""What tests of the command line share: how a command ended, and what it left on the disk."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """What a process leaves behind."""

    code: int
    out: str
    err: str

    def refuses(self, *named: object) -> None:
        """One sentence, as the last line, and nothing that looks like a program's own failure."""
        assert self.code == 2, self.err
        said = self.err.splitlines()
        assert [line for line in said if line.startswith("Error: ")] == said[-1:]
        assert "Traceback" not in self.err
        for name in named:
            assert str(name) in said[-1]

    def succeeds(self) -> None:
        assert self.code == 0, self.err
        assert "Error" not in self.err

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table."""
        lines = (line for line in self.out.splitlines() if line.startswith("│"))
        return [tuple(cell.strip() for cell in line.strip("│").split("│")) for line in lines]


Command = Callable[..., Ended]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` but the lock, which is empty."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
