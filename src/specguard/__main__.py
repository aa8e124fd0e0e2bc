"""`python -m specguard`, for machines on which the `specguard` command is not on the path."""

from specguard.cli import main

main()
