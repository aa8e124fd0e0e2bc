"""SpecFormer's bound as printed is exceeded for small inputs, and the corrected ones are not."""

import pytest
import torch
from torch.func import jacrev

from certificates.test_attention import dense_norm, filled, found, full, identity_attention, node_of, tokens
from errata.specformer_printed import printed_specformer
from specguard.certificates.attention import lofast
from specguard.nn import Attention, unfuse_attention


@pytest.mark.parametrize("size", [0.0, 1e-3, 1e-2])
def test_specformers_printed_bound_is_false_for_small_inputs_and_the_corrected_ones_hold(size):
    layer = filled(Attention(6, 1, bias=False), seed=1)
    X = tokens(1, 4, 6, seed=2) * size
    radius = full(1e-3)
    node = node_of(layer, X)
    true = float(found(layer, X, 1e-3)[0])
    assert float(printed_specformer(node, radius)[0]) < true
    assert true <= float(lofast.specformer(node, radius, tight=True)[0])
    assert float(lofast.specformer(node, radius, tight=True)[0]) <= float(lofast.specformer(node, radius)[0])


def test_at_zero_the_printed_specformer_bound_is_a_thousandth_of_the_norm_of_the_derivative():
    layer = identity_attention(2, v=2.65)
    X = torch.zeros(1, 3, 2, dtype=torch.float64)
    true = dense_norm(jacrev(unfuse_attention(layer).requires_grad_(False))(X).reshape(6, 6))
    assert true == pytest.approx(2.65, rel=1e-9)
    node = node_of(layer, X)
    assert float(printed_specformer(node, full(1e-3))[0]) < 1e-3 * true * 0.1
    assert float(lofast.specformer(node, full(1e-3), tight=True)[0]) >= 1e-3 * true
