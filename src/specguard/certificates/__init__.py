"""Robustness certificates: rules for layers, radii and adjoints for networks, certificates for images."""

from specguard.certificates.certificate import certify
from specguard.certificates.crown import CROWN
from specguard.certificates.linear import fit_linear, lower_linear_radii
from specguard.certificates.methods import METHODS, Method, named_methods
from specguard.certificates.node import VJP, Node, length, up
from specguard.certificates.rules import program, register_rule
from specguard.certificates.smoothing import Smoothed, certify_smoothed
from specguard.certificates.value import Certificate
from specguard.certificates.verifier import Attempt, Verifier
from specguard.records.smoothing import Smoothing

__all__ = [
    "CROWN",
    "METHODS",
    "VJP",
    "Attempt",
    "Certificate",
    "Method",
    "Node",
    "Smoothed",
    "Smoothing",
    "Verifier",
    "certify",
    "certify_smoothed",
    "fit_linear",
    "length",
    "lower_linear_radii",
    "named_methods",
    "program",
    "register_rule",
    "up",
]
