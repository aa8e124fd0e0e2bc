"""Lower a model, layer by layer, to primitive operations for a fixed input shape."""

from specguard.certificates.lowering.model import lower

__all__ = ["lower"]
