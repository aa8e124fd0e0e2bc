"""Statements of the papers that are false as printed, kept for the tests that show it."""
