"""A mutant: one small change of the source that makes a proof, or a check of one, wrong."""

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "specguard"


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file` and becomes `new`; `breaks` says what is then wrong.

    `equivalent`, where it is given, is the argument that nothing is: why every claim still holds with the change.
    """

    file: str  # below src/specguard
    old: str
    new: str
    breaks: str
    equivalent: str = ""

    def applied(self, text: str) -> str:
        """The source with the change; an old text that is not there exactly once is an error."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)

    @property
    def of_checker(self) -> bool:
        return self.file.startswith("checker/")


def mutants(file: str, *rows: tuple[str, ...]) -> tuple[Mutant, ...]:
    """Those of one file: old text, new text, what is then wrong and, where it is known, why nothing is."""
    return tuple(Mutant(file, *row) for row in rows)
