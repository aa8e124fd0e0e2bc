"""Everything that ends in a proof: rules for layers, radii and adjoints for networks, certificates for images."""

from specguard.certify.certificate import Certificate, certify
from specguard.certify.families import FAMILIES, Family
from specguard.certify.node import Node, Pull, length, up
from specguard.certify.rules import program, register_rule

__all__ = [
    "FAMILIES",
    "Certificate",
    "Family",
    "Node",
    "Pull",
    "certify",
    "length",
    "program",
    "register_rule",
    "up",
]
