"""An encoder of text: leaving padding out is what masking it would give, and norms stay what they are."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from helpers.sentences import CONFIG, small_encoder, small_sentences
from specguard.errors import ConfigError
from specguard.nn import (
    TEXT_PRESETS,
    TextConfig,
    TextEncoder,
    fingerprint,
    group_by_length,
    lipschitz_constant,
    text_config_from_json,
    text_config_to_json,
    text_encoder,
)


def masked(model: TextEncoder, words: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """The same function written with masks: padded places hold `padding`, no key and no mean sees them."""
    present = words != 0
    x = torch.where(present[..., None], model.embedded(words), padding) + model.positions.table
    for block in model.blocks:
        x = block.project(x)
        attention, head = block.attention.branch, CONFIG.dim // CONFIG.heads
        q, k, v = attention.qkv(x).unflatten(-1, (3, CONFIG.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = (q @ k.mT / head**0.5).masked_fill(~present[:, None, None], -torch.inf)
        x = x + attention.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = block.activation(block.map(x))
    mean = (x * present[..., None]).sum(1) / present.sum(1, keepdim=True)
    return model.head(mean)


def test_leaving_padding_out_is_masking_it_whatever_stands_in_its_place(generator):
    model, words = small_encoder().double(), small_sentences().words
    padding = 10 * torch.randn(*words.shape, CONFIG.dim, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(words), masked(model, words, padding), rtol=1e-12, atol=1e-12)


def test_a_network_for_so_many_words_is_the_encoder_on_their_embeddings():
    model, words = small_encoder(), small_sentences().words
    with torch.no_grad():
        logits = model(words)
        seen = 0
        for count, members in group_by_length(words):
            network = model.network(count)
            assert network.shape == (count, CONFIG.dim)
            assert not network.training
            found = network(model.embedded(words[members, :count]))
            torch.testing.assert_close(found, logits[members], rtol=1e-5, atol=1e-6)
            seen += len(members)
    assert seen == len(words)


def test_a_sentence_does_not_depend_on_its_neighbors(generator):
    model, words = small_encoder().double(), small_sentences().words
    order = torch.randperm(len(words), generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(model(words)[order], model(words[order]), rtol=1e-12, atol=1e-12)


def test_a_network_has_weights_of_its_own():
    model = small_encoder()
    before = fingerprint(model)
    network = model.network(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert fingerprint(model) == before
    for count in (0, CONFIG.tokens + 1):
        with pytest.raises(ConfigError, match="words"):
            model.network(count)


def test_norms_stay_what_the_config_says_after_a_step_and_words_stay_in_the_unit_ball():
    model = text_encoder(CONFIG, torch.Generator().manual_seed(0))
    words = small_sentences().words
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(words).square().sum().backward()
        optimizer.step()
    assert float(model.embedded(words).detach().norm(dim=-1).max()) <= 1 + 1e-6
    for block in model.blocks:
        attention = block.attention.branch
        for layer, blocks in ((attention.qkv, (1.5, 1.5, 0.6)), (attention.out, (0.6,)), (block.map, (1.0,))):
            found = [float(torch.linalg.matrix_norm(W, 2)) for W in layer.weight.detach().chunk(len(blocks))]
            assert found == pytest.approx(blocks, rel=1e-4)
            assert lipschitz_constant(layer) == pytest.approx(sum(norm**2 for norm in blocks) ** 0.5)


def test_every_weight_is_trained():
    model = text_encoder(CONFIG, torch.Generator().manual_seed(0))
    model(small_sentences().words).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_sentences_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match="shape"):
        small_encoder()(torch.ones(2, CONFIG.tokens + 1, dtype=torch.int64))
    for hole in (0, 2):  # no word at all, or padding between words
        words = torch.ones(1, CONFIG.tokens, dtype=torch.int64)
        words[0, hole] = 0
        with pytest.raises(ConfigError, match="at least one word id"):
            small_encoder()(words)


def test_a_config_comes_back_from_json_and_anything_else_is_refused():
    record = text_config_to_json(CONFIG)
    assert text_config_from_json(record) == CONFIG
    for change in (
        {"dim": 12.0},
        {"value_norm": "0.5"},
        {"vocabulary": 3},
        {"depth": True},
        {"more": 1},
        {"projection": "layernorm"},
        {"words": 10**9},
    ):
        with pytest.raises(ConfigError):
            text_config_from_json(record | change)
    with pytest.raises(ConfigError):
        text_config_from_json(asdict(CONFIG))


@pytest.mark.parametrize(
    "change", [{"heads": 5}, {"dim": 9}, {"value_norm": 0.0}, {"query_norm": float("nan")}, {"depth": -1}]
)
def test_an_impossible_config_is_refused(change):
    with pytest.raises(ConfigError):
        replace(CONFIG, **change)


def test_the_presets_are_of_layers_that_rules_know():
    kinds = {nn.Embedding, nn.Linear, nn.Sequential}
    for config in TEXT_PRESETS.values():
        with torch.device("meta"):
            model = TextEncoder(replace(config, words=5))
        assert {type(layer) for layer in model.modules() if type(layer).__module__.startswith("torch")} <= kinds
    assert TEXT_PRESETS["text_small"] == TextConfig()
