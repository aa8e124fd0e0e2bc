"""Cyclic shifts: which entry goes where, that distances are kept, and what is refused."""

import pytest
import torch
from torch import nn

from specguard.certificates import certify, program
from specguard.checker import rules as checked
from specguard.checker.enclosure import Box
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.nn import CertifiableConfig, CyclicShift, SkipAttention, attention_maps
from specguard.nn.shift import NEIGHBORS


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_every_group_moves_by_its_step_around_the_edges():
    x, side = tokens(2, 25, 16), 5
    y = CyclicShift(side)(x)
    for group, (down, right) in enumerate(NEIGHBORS):
        channels = slice(2 * group, 2 * group + 2)
        for row in range(side):
            for column in range(side):
                new = (row + down) % side * side + (column + right) % side
                assert torch.equal(y[:, new, channels], x[:, row * side + column, channels])


def test_a_shift_permutes_entries_and_the_opposite_shift_takes_it_back():
    x = tokens(2, 9, 8)
    y = CyclicShift(3)(x)
    assert torch.equal(y.flatten(1).sort(1).values, x.flatten(1).sort(1).values)
    assert not torch.equal(y, x)
    assert torch.equal(CyclicShift(3, tuple((-down, -right) for down, right in NEIGHBORS))(y), x)


def test_a_step_around_the_whole_grid_is_none():
    x = tokens(1, 9, 4)
    assert torch.equal(CyclicShift(3, ((3, -6), (0, 2**16 // 3 * 3)))(x), x)


def test_a_shift_costs_nothing_of_a_certified_radius():
    x, labels = tokens(3, 9, 8), torch.tensor([0, 1, 2])
    ends = nn.Flatten(), nn.Linear(72, 3)
    with torch.no_grad():
        ends[1].weight.copy_(tokens(3, 72))
    shift = CyclicShift(3)
    moved = nn.Sequential(shift, *ends).eval().requires_grad_(False)
    ball = Ball("l2", 0.1, box=False)
    plain = certify(nn.Sequential(*ends).eval().requires_grad_(False), shift(x), labels, ball)
    given = certify(moved, x, labels, ball)
    for method in plain.lower:
        torch.testing.assert_close(given.lower[method], plain.lower[method], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("side", "steps", "message"),
    [
        (0, NEIGHBORS, "side must be a whole number, at least 1, not 0"),
        (2.0, NEIGHBORS, "side must be a whole number"),
        (2, (), "steps must be a tuple of at least one"),
        (2, [(0, 1)], "steps must be a tuple"),
        (2, ((0, 1, 2),), "pairs of whole numbers"),
        (2, ((0, True),), "pairs of whole numbers"),
        (2, ((0, 2**16 + 1),), "none of them beyond 65536"),
        (2, ((0, 1),) * (2**16 + 1), "at most 65536 pairs"),
    ],
)
def test_settings_that_say_no_shift_are_refused(side, steps, message):
    with pytest.raises(ConfigError, match=message):
        CyclicShift(side, steps)


@pytest.mark.parametrize("shape", [(1, 5, 8), (1, 4, 7), (1, 4, 0), (1, 16, 8)])
def test_points_that_are_no_such_grid_are_refused_by_layer_prover_and_checker(shape):
    layer, x = CyclicShift(2), torch.zeros(shape, dtype=torch.float64)
    for call in (
        lambda: layer(x),
        lambda: program(layer.eval()).steps[0].rule(x),
        lambda: checked.rule("", layer)(Box.exact(x[0].numpy())),
    ):
        with pytest.raises(ConfigError, match="it shifts 8 groups of channels over 2 x 2 tokens"):
            call()


def test_attention_that_starts_at_neighbors_is_nearly_the_shift():
    config = CertifiableConfig(
        image=8, patch=2, channels=1, dim=16, depth=1, heads=8, mix=1.0, neighbor_bias=40.0, mean=(0.5,), std=(1.0,)
    )
    attention, x = config.fresh(0).blocks[0].attention, tokens(2, 16, 16)
    assert type(attention) is SkipAttention
    (maps,) = attention_maps(attention, x)
    mixed = (maps @ x.unflatten(2, (8, 2)).transpose(1, 2)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixed, CyclicShift(4)(x))


def test_the_bias_towards_neighbors_is_put_where_it_is_asked_for():
    config = CertifiableConfig(
        image=8,
        patch=2,
        channels=1,
        dim=20,
        depth=1,
        heads=10,
        neighbor_bias=3.0,
        own_bias=2.0,
        mean=(0.5,),
        std=(1.0,),
    )
    bias = config.fresh(0).blocks[0].attention.bias
    assert torch.equal(bias[8], bias[0])  # ten heads take the eight neighbors in turn
    assert torch.equal((bias == 3).sum((1, 2)), torch.full((10,), 16))
    assert torch.equal((bias == 2).sum((1, 2)), torch.full((10,), 16))
    assert bias[4, 5, 4] == 3  # the fifth head looks one token to the left, so channels move to the right
