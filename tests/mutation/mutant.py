"""A mutant: one small change of the source that makes a proof, or a check of one, unsound."""

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "specguard"

_OF_ZONOTOPES = tuple(
    f"certificates/{name}.py" for name in ("methods/zonotope", "methods/base", "every_method", "stop_early")
)


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `file` and becomes `new`; `breaks` says what is then false.

    `equivalent`, if given, is the argument why every claim still holds with the change.
    """

    file: str  # below src/specguard
    old: str
    new: str
    breaks: str
    equivalent: str = ""

    def apply(self, text: str) -> str:
        """Apply the change to the source; raise if the old text does not occur exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)

    @property
    def of_checker(self) -> bool:
        return self.file.startswith("checker/")

    @property
    def of_zonotopes(self) -> bool:
        """Of the prover's, or of what takes their distances."""
        return self.file.startswith("certificates/zonotope/") or self.file in _OF_ZONOTOPES


def mutants(file: str, *rows: tuple[str, ...]) -> tuple[Mutant, ...]:
    """The mutants of one file: old text, new text, what is then false and, if equivalent, why nothing is."""
    return tuple(Mutant(file, *row) for row in rows)
