"""Every layer of the closed set is in each of the six tables, or refused there with a reason.

The closed set is what `specguard.nn` exports, and the layers of torch that the prover knows. A new layer fails here
until each of the prover, the checker, their enclosures, the lowering and the training bound has a rule for it or
refuses it.
"""

import pytest
from torch import nn

from specguard import nn as own
from specguard.certificates import rules as prover
from specguard.certificates.lowering import model as lowering
from specguard.certificates.zonotope import rules as enclosures
from specguard.checker import network, rules
from specguard.checker.zonotope import rules as checked_enclosures
from specguard.train.objectives import feature_radius

SEQUENCES = {own.ViT, own.Block, own.Network, nn.Sequential}
CONTAINERS = SEQUENCES | {own.Residual, own.TextEncoder}  # walked by each table's user, or turned into a network
_UNUSED = "Margin losses are for certifiable networks, which have no such layer."
_STEEP = "Its slope grows as tokens shrink, so certifiable networks project instead."
REFUSALS: dict[str, dict[type[nn.Module], str]] = {
    "certificates/rules.py": {},
    "checker/rules.py": {},
    "certificates/zonotope/rules.py": {},
    "checker/zonotope/rules.py": {},
    "certificates/lowering/model.py": {},
    "train/objectives/feature_radius.py": {
        nn.Dropout: "A bound on the layer in eval mode does not hold for the random masks of training.",
        nn.LayerNorm: _STEEP,
        nn.RMSNorm: _STEEP,
        own.HeadNorm: _STEEP,
        nn.SiLU: _UNUSED,
        own.Softplus: _UNUSED,
        own.Squareplus: _UNUSED,
        own.GatedUnit: "A product of two functions of its input has no global slope.",
        own.TokenBatchNorm: "Its slope depends on the batch during training.",
        own.Resize: _UNUSED,
        own.ClassToken: _UNUSED,
        own.ClassPool: _UNUSED,
        own.FirstTokens: _UNUSED,
        own.ClassAndMean: _UNUSED,
        own.LayerScale: _UNUSED,
        own.TokenConvolution: _UNUSED,
        own.CoreAttention: _UNUSED,
        own.GatedPositionalAttention: _UNUSED,
    },
}


def shipped(table) -> set[type[nn.Module]]:
    """The layers of a table, but for those that tests have registered."""
    return {kind for kind in table if kind.__module__.startswith(("torch.", "specguard."))}


TABLES = {
    "certificates/rules.py": shipped(prover._RULES),
    "checker/rules.py": shipped(rules.RULES),
    "certificates/zonotope/rules.py": shipped(enclosures.ENCLOSURES),
    "checker/zonotope/rules.py": shipped(checked_enclosures.ENCLOSURES),
    "certificates/lowering/model.py": shipped(lowering.LOWERINGS),
    "train/objectives/feature_radius.py": shipped(feature_radius.BOUNDS),
}


def closed_set() -> set[type[nn.Module]]:
    exported = {thing for name in own.__all__ if isinstance(thing := getattr(own, name), type)}
    layers = {thing for thing in exported if issubclass(thing, nn.Module)}
    return (
        layers | {kind for kind in TABLES["certificates/rules.py"] if kind.__module__.startswith("torch.")}
    ) - CONTAINERS


def gaps(
    table: str, closed: set[type[nn.Module]], known: set[type[nn.Module]], refused: set[type[nn.Module]]
) -> list[str]:
    """Every layer that is missing, in both lists, or of neither kind, in a sentence."""
    found = [(kind, "is neither in the table nor among its refusals") for kind in closed - known - refused]
    found += [(kind, "is in the table and among its refusals") for kind in known & refused]
    found += [(kind, "is not a layer of the closed set") for kind in (known | refused) - closed]
    return sorted(f"{table}: {kind.__name__} {what}" for kind, what in found)


@pytest.mark.parametrize("table", TABLES)
def test_every_layer_of_the_closed_set_is_in_the_table_or_refused(table):
    missing = gaps(table, closed_set(), TABLES[table], set(REFUSALS[table]))
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("table", TABLES)
def test_a_refusal_is_one_sentence(table):
    for reason in REFUSALS[table].values():
        assert reason.endswith(".")
        assert ". " not in reason


def test_containers_are_walked_and_have_no_rule_of_their_own():
    assert set(prover._SEQUENCES) == set(network._SEQUENCES) == set(lowering._SEQUENCES) == SEQUENCES
    assert set(feature_radius._SEQUENCES) == SEQUENCES - {own.ViT}  # which is walked where it is the whole model
    assert not CONTAINERS & set().union(*TABLES.values(), *REFUSALS.values())


def test_a_layer_that_no_table_knows_is_named():
    class Novel(nn.Module):
        pass

    for table, known in TABLES.items():
        refused = set(REFUSALS[table])
        (missing,) = gaps(table, closed_set() | {Novel}, known, refused)
        assert missing == f"{table}: Novel is neither in the table nor among its refusals"
        (twice,) = gaps(table, closed_set() | {Novel}, known | {Novel}, refused | {Novel})
        assert twice == f"{table}: Novel is in the table and among its refusals"
        (strange,) = gaps(table, closed_set(), known | {Novel}, refused)
        assert strange == f"{table}: Novel is not a layer of the closed set"
