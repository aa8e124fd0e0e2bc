"""Attention as the checker bounds it, in NumPy boxes."""
