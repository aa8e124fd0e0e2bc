"""The independent checker of certificates: the same theorems implemented again, in NumPy, one image at a time."""

from specguard.checker.image import IDENTITIES, METHODS, Image, Proof
from specguard.checker.network import read
from specguard.checker.propagate import Position
from specguard.checker.reading import Reading
from specguard.checker.zonotope.walk import Enclosed

__all__ = ["IDENTITIES", "METHODS", "Enclosed", "Image", "Position", "Proof", "Reading", "read"]
