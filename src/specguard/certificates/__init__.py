"""Everything that ends in a proof: rules for layers, radii and adjoints for networks, certificates for images."""

from specguard.certificates.cascade import Cascade, Stage, cascade
from specguard.certificates.certificate import Certificate, certify
from specguard.certificates.crown import CROWN
from specguard.certificates.linear import fitted_linear, lower_linear_radii
from specguard.certificates.node import Node, Pull, length, up
from specguard.certificates.problem import FAMILIES, Family
from specguard.certificates.rules import program, register_rule
from specguard.certificates.smoothing import Smoothed, Smoothing, smoothed
from specguard.certificates.verifier import Attempt, Verifier

__all__ = [
    "CROWN",
    "FAMILIES",
    "Attempt",
    "Cascade",
    "Certificate",
    "Family",
    "Node",
    "Pull",
    "Smoothed",
    "Smoothing",
    "Stage",
    "Verifier",
    "cascade",
    "certify",
    "fitted_linear",
    "length",
    "lower_linear_radii",
    "program",
    "register_rule",
    "smoothed",
    "up",
]
