"""Every layer but attention as the checker bounds it, in NumPy boxes."""
