"""A transformer for sentences, built to be certified on its word embeddings.

Sentences have as many tokens as they have words. Padding is how a batch is stored, not part of the function: it is
cut off before the first layer, so that there is nothing to mask, in attention or in the mean over the words. For
every number of words the rest is a plain sequence of layers of the closed set, and proofs need no other rules.
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
_LARGEST, _DEEPEST = 2**20, 2**10  # far beyond any real model: a config may come from a stranger


@dataclass(frozen=True)
class TextConfig:
    """Everything that determines a text encoder but its weights.

    `words` numbers of words, of which 0 is padding; at most `tokens` of them in a sentence. `value_norm` is the
    norm of W^V and of W^O, `query_norm` that of W^Q and of W^K, in every block; tokens are projected onto the unit
    ball before attention. Without blocks it is a linear classifier of the mean embedding. `vocabulary` is the hash
    of the words that the numbers stand for.
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
    """Numbers of words, padding behind them, to logits: embeddings, blocks, the mean over the words, a linear map.

    A block projects every token onto the unit ball, adds attention, and sorts pairs of channels behind an
    orthogonal map. The embedding of a word lies in the unit ball, so that a radius of 1 is the length of a word.
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
        """Of one sentence: the most words it can have."""
        return (self.config.tokens,)

    @property
    def classes(self) -> int:
        return self.config.classes

    def embedded(self, words: Int64[Tensor, "batch word"]) -> Float[Tensor, "batch word dim"]:
        """The embeddings of sentences without padding: what a ball of perturbations is around."""
        return self.ball(self.words(words))

    def encoded(self, x: Float[Tensor, "batch word dim"]) -> Float[Tensor, "batch class_"]:
        """Logits for the embeddings of sentences of as many words each."""
        return self.head(self.pool(self.blocks(x + self.positions.table[:, : x.shape[1]])))

    def forward(self, words: Int64[Tensor, "batch token"]) -> Float[Tensor, "batch class_"]:
        if words.shape[1:] != self.shape:
            raise ConfigError(f"the model takes sentences of shape {self.shape}, not {tuple(words.shape[1:])}")
        logits = self.head.weight.new_zeros(len(words), self.config.classes)
        with parametrize.cached():  # every length meets the same weights
            for count, members in by_length(words):
                found = self.encoded(self.embedded(words[members, :count]))
                logits = logits.index_put((members,), found.to(logits.dtype))
        return logits

    def network(self, words: int) -> Network:
        """The function of the embeddings of sentences of so many words, as a network with copied weights."""
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


def by_length(words: Int64[Tensor, "batch token"]) -> "list[tuple[int, Int64[Tensor, ' member']]]":
    """Every number of words that occurs among the sentences, and which of them have it."""
    present = words != 0
    counts = present.sum(1)
    if not present[:, 0].all() or (present[:, 1:] & ~present[:, :-1]).any():
        raise ConfigError("a sentence is one word or more, and padding, of number 0, behind the last")
    return [(int(count), (counts == count).nonzero().squeeze(1)) for count in counts.unique()]


def text_encoder(config: TextConfig, generator: torch.Generator | None = None) -> TextEncoder:
    """An untrained encoder whose maps, but for the last, keep their norms whatever training does."""
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
    """The config that `text_record` and JSON wrote; anything else is refused by name."""
    if not isinstance(record, dict) or record.get("kind") != "text":
        raise ConfigError("the config of an encoder of text must be a JSON object that says so")
    if wrong := sorted(set(record) ^ {"kind", *(f.name for f in fields(TextConfig))}):
        what = "has the unknown" if wrong[0] in record else "lacks the"
        raise ConfigError(f"the model config {what} field {wrong[0]!r}")
    return dataclass_from_json(TextConfig, {name: value for name, value in record.items() if name != "kind"})


def text_record(config: TextConfig) -> dict[str, object]:
    """A config as JSON that cannot be taken for that of another kind of model."""
    return {"kind": "text", **asdict(config)}
