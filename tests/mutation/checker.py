"""Mutants of the checker."""

from mutation.mutant import Mutant

CHECKER: tuple[Mutant, ...] = ()
