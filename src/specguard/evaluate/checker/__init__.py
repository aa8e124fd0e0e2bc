"""The checker of certificates: the same theorems, written down a second time, in NumPy, one image at a time."""

from specguard.evaluate.checker.image import FAMILIES, Image, Proof
from specguard.evaluate.checker.network import read
from specguard.evaluate.checker.reading import Reading

__all__ = ["FAMILIES", "Image", "Proof", "Reading", "read"]
