"""A transformer for sentences, built to be certified on its word embeddings.

A sentence has one token per word. Padding is a storage format and not part of the function: it is removed before
the first layer, so that neither attention nor the mean over the words needs a mask. For each sentence length the
rest is a plain sequence of layers of the closed set, and proofs need no other rules.
"""

from collections import OrderedDict
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specguard.errors import ConfigError
from specguard.nn.attention import Attention
from specguard.nn.layers import LayerProject, MaxMin, Positions, Residual, SmoothProject
from specguard.nn.lipschitz import orthogonal
from specguard.nn.network import Network
from specguard.nn.pooling import MeanPool
from specguard.nn.vit import Block, ViT, dataclass_from_json
from specguard.nn.weights import materialized

Projection = Literal["layerproject", "smoothproject"]
_LARGEST, _DEEPEST = 2**20, 2**10  # far beyond any real model: a config may come from an untrusted file


@dataclass(frozen=True)
class TextConfig:
    """The architecture of a text encoder.

    In every block, tokens are projected onto the unit ball before attention.

    Args:
        words: Number of word ids, including 0 for padding.
        tokens: Largest number of words in a sentence.
        classes: Number of classes.
        dim: Channels of an embedding, even.
        depth: Number of blocks; 0 gives a linear classifier of the mean embedding.
        heads: Heads of attention; divides `dim`.
        value_norm: Spectral norm of W^V and of W^O.
        query_norm: Spectral norm of W^Q and of W^K.
        projection: "smoothproject" or "layerproject".
        vocabulary: Hash of the vocabulary to which the word ids belong.

    Example:
        >>> TextConfig(words=100, dim=8, depth=1, heads=2).tokens
        32
    """

    words: int = 2
    tokens: int = 32
    classes: int = 2
    dim: int = 64
    depth: int = 3
    heads: int = 4
    value_norm: float = 0.5
    query_norm: float = 1.0
    projection: Projection = "smoothproject"
    vocabulary: str = ""

    def __post_init__(self) -> None:
        for name in ("words", "tokens", "classes", "dim", "depth", "heads"):
            least, most = (0, _DEEPEST) if name == "depth" else (1, _LARGEST)
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be at least {least} and at most {most}, not {getattr(self, name)}")
        if self.dim % self.heads or self.dim % 2:
            raise ConfigError(f"dim {self.dim} must be even, and divide among {self.heads} heads")
        for name in ("value_norm", "query_norm"):
            if not 0 < getattr(self, name) <= 1e3:  # NaN compares false
                raise ConfigError(f"{name} must be positive and at most 1000, not {getattr(self, name)}")
        if self.projection not in get_args(Projection):
            options = ", ".join(get_args(Projection))
            raise ConfigError(f"projection {self.projection!r} is unknown; choose one of {options}")


class TextEncoder(nn.Module):
    """Word ids, followed by padding, to logits: embeddings, blocks, the mean over the words, a linear map.

    A block projects every token onto the unit ball, adds attention, applies an orthogonal map and sorts pairs of
    channels. Word embeddings lie in the unit ball, so a radius of 1 is the largest norm of an embedding.
    `text_encoder` creates an initialized one.

    Args:
        config: The architecture.

    Example:
        >>> model = TextEncoder(TextConfig(words=10, tokens=4, dim=8, depth=1, heads=2))
        >>> model(torch.tensor([[3, 7, 1, 0], [2, 0, 0, 0]])).shape
        torch.Size([2, 2])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.words, config.dim)
        self.ball = LayerProject(1.0)
        self.positions = Positions(config.tokens, config.dim)
        self.blocks = nn.Sequential(*(_block(config) for _ in range(config.depth)))
        self.pool = MeanPool()
        self.head = nn.Linear(config.dim, config.classes)

    @property
    def shape(self) -> tuple[int]:
        """The shape of one input: the largest number of words."""
        return (self.config.tokens,)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.config.classes

    def embedded(self, words: Int64[Tensor, "batch word"]) -> Float[Tensor, "batch word dim"]:
        """The embeddings of sentences without padding: the centers of balls of perturbations."""
        return self.ball(self.words(words))

    def encoded(self, x: Float[Tensor, "batch word dim"]) -> Float[Tensor, "batch class_"]:
        """The logits of embedded sentences of equal length."""
        return self.head(self.pool(self.blocks(x + self.positions.table[:, : x.shape[1]])))

    def forward(self, words: Int64[Tensor, "batch token"]) -> Float[Tensor, "batch class_"]:
        if words.shape[1:] != self.shape:
            raise ConfigError(f"the model takes sentences of shape {self.shape}, not {tuple(words.shape[1:])}")
        logits = self.head.weight.new_zeros(len(words), self.config.classes)
        with parametrize.cached():  # compute parametrized weights once for all lengths
            for count, members in group_by_length(words):
                found = self.encoded(self.embedded(words[members, :count]))
                logits = logits.index_put((members,), found.to(logits.dtype))
        return logits

    def network(self, words: int) -> Network:
        """The map from embeddings to logits for sentences of this many words, as a network with copied weights."""
        if not 1 <= words <= self.config.tokens:
            raise ConfigError(f"a sentence has between 1 and {self.config.tokens} words, not {words}")
        plain = materialized(self)
        assert isinstance(plain, TextEncoder)
        positions = Positions(words, self.config.dim).to(plain.head.weight)
        positions.table.data = plain.positions.table.data[:, :words].clone()
        layers = OrderedDict[str, nn.Module](positions=positions, blocks=plain.blocks, pool=plain.pool)
        network = Network("text", (words, self.config.dim), self.classes, layers | {"head": plain.head})
        return network.train(self.training)


Classifier = ViT | Network | TextEncoder


TEXT_PRESETS: MappingProxyType[str, TextConfig] = MappingProxyType(
    {"text_small": TextConfig(), "text_lofast": TextConfig(projection="layerproject")}
)


def group_by_length(words: Int64[Tensor, "batch token"]) -> "list[tuple[int, Int64[Tensor, ' member']]]":
    """Group sentences by their number of words.

    Args:
        words: Word ids, at least one per sentence, followed by padding of id 0.

    Returns:
        For every length that occurs: the length and the indices of the sentences of that length.

    Example:
        >>> group_by_length(torch.tensor([[5, 2], [4, 0], [3, 1]]))
        [(1, tensor([1])), (2, tensor([0, 2]))]
    """
    present = words != 0
    counts = present.sum(1)
    if not present[:, 0].all() or (present[:, 1:] & ~present[:, :-1]).any():
        raise ConfigError("a sentence must consist of at least one word id, followed only by padding of id 0")
    return [(int(count), (counts == count).nonzero().squeeze(1)) for count in counts.unique()]


def text_encoder(config: TextConfig, generator: torch.Generator | None = None) -> TextEncoder:
    """An untrained encoder; all linear maps but the head keep their norms during training.

    Args:
        config: The architecture.
        generator: Source of the initial weights; torch's global generator by default.

    Returns:
        The encoder, in train mode, with orthogonal maps as parametrizations.

    Example:
        >>> model = text_encoder(TextConfig(words=10, tokens=4, dim=8, depth=1, heads=2))
        >>> model(torch.tensor([[3, 7, 1, 0]])).shape
        torch.Size([1, 2])
    """
    model = TextEncoder(config)
    with torch.no_grad():
        nn.init.normal_(model.words.weight, std=config.dim**-0.5 / 2, generator=generator)
        nn.init.normal_(model.positions.table, std=0.02, generator=generator)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
                nn.init.zeros_(layer.bias)
    for block in model.blocks:
        for name, norms in (
            ("attention.branch.qkv", (config.query_norm, config.query_norm, config.value_norm)),
            ("attention.branch.out", (config.value_norm,)),
            ("map", (1.0,)),
        ):
            layer = block.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            orthogonal(layer, norms)
    return model


def _block(config: TextConfig) -> Block:
    hard = config.projection == "layerproject"
    parts = OrderedDict[str, nn.Module](
        project=LayerProject(1.0) if hard else SmoothProject(1.0),
        attention=Residual(Attention(config.dim, config.heads)),
        map=nn.Linear(config.dim, config.dim),
        activation=MaxMin(),
    )
    return Block(parts)


def text_config_from_json(record: object) -> TextConfig:
    """The config of a text encoder from its JSON record; missing and unknown fields raise a `ConfigError`.

    Args:
        record: A JSON object written by `text_config_to_json`.

    Returns:
        The config.

    Example:
        >>> text_config_from_json(text_config_to_json(TextConfig(dim=8))).dim
        8
    """
    if not isinstance(record, dict) or record.get("kind") != "text":
        raise ConfigError("the config of a text encoder must be a JSON object of kind 'text'")
    if mismatched := sorted(set(record) ^ {"kind", *(f.name for f in fields(TextConfig))}):
        what = "has the unknown" if mismatched[0] in record else "lacks the"
        raise ConfigError(f"the model config {what} field {mismatched[0]!r}")
    return dataclass_from_json(TextConfig, {name: value for name, value in record.items() if name != "kind"})


def text_config_to_json(config: TextConfig) -> dict[str, object]:
    """A config as a JSON object, marked as that of a text encoder.

    Args:
        config: The config.

    Returns:
        Its fields, and "kind" = "text".

    Example:
        >>> text_config_to_json(TextConfig())["kind"]
        'text'
    """
    return {"kind": "text", **asdict(config)}
