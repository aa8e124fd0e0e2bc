"""Singular values: of a network's weights, and of the Jacobians of its parts at an image."""

from specguard.spectrum.parts import Part, blank_parts, part_names, parts
from specguard.spectrum.weights import WeightSpectrum, exact_weight_spectra

__all__ = ["Part", "WeightSpectrum", "blank_parts", "exact_weight_spectra", "part_names", "parts"]
