"""Singular values of a network's weights, and the parts of a network whose Jacobians are studied."""

from specguard.spectrum.parts import Part, blank_parts, part_names, parts
from specguard.spectrum.weights import WeightSpectrum, exact_weight_spectra

__all__ = ["Part", "WeightSpectrum", "blank_parts", "exact_weight_spectra", "part_names", "parts"]
