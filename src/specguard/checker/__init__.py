"""The independent checker of certificates: the same theorems implemented again, in NumPy, one image at a time."""

from specguard.checker.image import METHODS, Image, Proof
from specguard.checker.network import read
from specguard.checker.reading import Reading

__all__ = ["METHODS", "Image", "Proof", "Reading", "read"]
