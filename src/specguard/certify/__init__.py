"""Everything that ends in a proof: rules for layers, radii and adjoints for networks, certificates for images."""

from specguard.certify.cascade import Cascade, Stage, cascade
from specguard.certify.certificate import Certificate, certify
from specguard.certify.crown import CROWN
from specguard.certify.families import FAMILIES, Family
from specguard.certify.linear import fitted_linear, lower_linear_radii
from specguard.certify.node import Node, Pull, length, up
from specguard.certify.rules import program, register_rule
from specguard.certify.smoothing import Smoothed, Smoothing, smoothed
from specguard.certify.verifier import Attempt, Verifier

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
