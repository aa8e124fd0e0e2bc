"""Matrix-free linear algebra: it knows tensors, not networks, and imports nothing of ours."""

from specguard.linalg.power import power_step, top_right_vectors

__all__ = ["power_step", "top_right_vectors"]
