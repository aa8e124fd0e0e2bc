"""Proofs about sentences are about their words alone; treating padding as words, in any of its ways, is caught.

A proof of a sentence of n words is one of the network for n words. The planted errors are what a proof with masks
could get wrong: keys that are padding in the softmax, padding in the mean, padding that moves while the proof takes
it to stand still.
"""

import math
from dataclasses import replace

import pytest
import torch
from jaxtyping import config
from torch.nn.functional import pad

from certificates.test_planted import equal_logits
from helpers.sentences import CONFIG, small_encoder, small_sentences
from specguard.attacks import APGD
from specguard.certificates import certify
from specguard.certificates.attention import point as attention
from specguard.certificates.layers import affine
from specguard.geometry import Ball
from specguard.nn import MeanPool, group_by_length
from specguard.testing import BrokenLawError, check_rule


@pytest.fixture
def as_shipped(monkeypatch):
    """Planted functions need not obey the types of those they stand for."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


def groups():
    """The small encoder's sentences by length: network in float64, embeddings, labels."""
    model, sentences = small_encoder(), small_sentences()
    for count, members in group_by_length(sentences.words):
        with torch.no_grad():
            inputs = model.embedded(sentences.words[members, :count]).double()
            network = model.network(count).double()
            yield count, network, inputs, network(inputs).argmax(1)


def worst_margins(network, inputs, labels, ball):
    """What an attack without a box leaves of the margins."""
    found = APGD(steps=30, restarts=2, loss="margin")(network, inputs, labels, ball).images
    with torch.no_grad():
        logits = network(found)
    other_classes = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return logits.gather(1, labels[:, None])[:, 0] - other_classes


@pytest.mark.parametrize("count", [1, 5])
def test_the_network_of_every_length_obeys_the_laws(count):
    model = small_encoder()
    words = torch.arange(1, 2 * count + 1).remainder(CONFIG.words - 1).add(1).view(2, count)
    check_rule(model.network(count), model.embedded(words), radii=(1e-2, 0.3), steps=5)


def test_no_attack_on_the_embeddings_goes_below_what_is_proved_at_any_length():
    for _, network, inputs, labels in groups():
        for radius in (0.02, 0.1, 0.4):
            ball = Ball("l2", radius, box=False)
            proof = certify(network, inputs, labels, ball, search=False)
            attacked = worst_margins(network, inputs, labels, ball)
            for method, lower in proof.lower.items():
                assert (attacked >= lower.amin(1) - 1e-9).all(), (method, radius)


def test_without_blocks_the_certified_radius_is_that_of_a_linear_classifier():
    """`margin sqrt(n) / |w_y - w_j|`, exactly, by every method that looks at the other classes one by one."""
    model, sentences = small_encoder(replace(CONFIG, depth=0)), small_sentences()
    W = model.head.weight.detach().double()
    for count, members in group_by_length(sentences.words):
        with torch.no_grad():
            inputs = model.embedded(sentences.words[members, :count]).double()
            network = model.network(count).double()
            logits = network(inputs)
        labels = logits.argmax(1)
        margins = logits.gather(1, labels[:, None]) - logits
        exact = (margins * count**0.5 / (W[labels][:, None] - W).norm(dim=-1)).nan_to_num(nan=torch.inf).amin(1)
        proof = certify(network, inputs, labels, Ball("l2", 0.1, box=False), ("local", "adjoint", "mixed"))
        for largest in proof.largest.values():
            assert ((largest <= exact) & (largest > 0.998 * exact)).all()


def test_padding_among_the_keys_of_a_softmax_is_caught(as_shipped, monkeypatch):
    case, true = equal_logits(), attention.upper_softmax_slope
    case.check()

    def padded(S, error, length_a, length_b, *rest):
        words = S.shape[-1]
        found = true(pad(S, (0, 1, 0, 1)), error, pad(length_a, (0, 1)), pad(length_b, (0, 1)), *_last(rest))
        return found[..., :words]

    def _last(rest):
        both, *others = rest
        return pad(both, (0, 1)), *others

    monkeypatch.setattr(attention, "upper_softmax_slope", padded)
    assert "the radius by local" in case.caught()


def test_padding_in_the_mean_over_the_words_is_caught(as_shipped, monkeypatch):
    layer, X = MeanPool().eval(), torch.zeros(1, 3, 4, dtype=torch.float64)
    check_rule(layer, X, radii=(0.1,), methods=("local",))
    true = math.sqrt
    monkeypatch.setattr(affine.math, "sqrt", lambda n: true(CONFIG.tokens) if n == 3 else true(n))
    with pytest.raises(BrokenLawError, match="the radius by local"):
        check_rule(layer, X, radii=(0.1,), methods=("local",))


def test_padding_that_moves_is_not_what_is_proved():
    """Where a network sees padding, moving it does more harm than moving the words alone: neither is left out."""
    gone_below = False
    for count, _, inputs, _ in groups():
        seeing = small_encoder().network(CONFIG.tokens).double()
        padded = pad(inputs, (0, 0, 0, CONFIG.tokens - count))
        with torch.no_grad():
            labels = seeing(padded).argmax(1)
        for radius in (0.1, 0.4):
            ball = Ball("l2", radius, box=False)
            still = certify(seeing, padded, labels, ball, ("adjoint",), search=False)
            attacked = worst_margins(seeing, padded, labels, ball)
            assert (attacked >= still.lower["adjoint"].amin(1) - 1e-9).all()  # all tokens in it, it holds

            class Words(torch.nn.Module):
                """The words alone may move."""

                def forward(self, x, padded=padded, count=count, seeing=seeing):
                    return seeing(torch.cat([x, padded[: len(x), count:]], 1))

            alone = worst_margins(Words(), padded[:, :count], labels, ball)
            gone_below |= bool((attacked < alone - 1e-6).any())
    assert gone_below


def test_centering_over_padded_keys_would_be_sound_only_looser(generator):
    """Rows of dP sum to zero, so any vector may be taken off all values; the mean of the words is a good one."""
    V = torch.randn(5, 3, generator=generator, dtype=torch.float64) + 2
    dP = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    dP = dP - dP.mean(1, keepdim=True)
    padded = V - V.sum(0) / CONFIG.tokens
    torch.testing.assert_close(dP @ padded, dP @ V)
    centered = V - V.mean(0)
    assert torch.linalg.matrix_norm(padded, 2) > torch.linalg.matrix_norm(centered, 2)
