"""Sentences as numbers of words, and the vocabulary that makes them so; SST-2 from its official files.

A text is cut at white space and lower-cased, as the files of SST-2 are tokenized already. Words that stand
fewer than `least` times in the training sentences are unknown words, all alike. A sentence has at most `tokens`
words; what comes behind is cut off.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from specguard.data.dataset import Data, Dataset
from specguard.data.files import read_verified
from specguard.errors import ConfigError, DataError

PADDING, UNKNOWN = 0, 1  # what words have larger numbers than
_HEADER = "sentence\tlabel"
_LEAST = 2
_MOST_TOKENS = 2**12
_LARGEST = 2**28  # bytes of a file; that of SST-2 has 4 MB


@dataclass(frozen=True)
class Vocabulary:
    """The words that are known, the most frequent first; the i-th has the number i + 2."""

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.words)) < len(self.words) or not all(self.words):
            raise DataError("a vocabulary holds every word once, and no empty one")

    @classmethod
    def of(cls, sentences: Iterable[str], least: int = _LEAST) -> "Vocabulary":
        """All words that stand in these sentences at least so often; of equally frequent ones, by the alphabet."""
        counts = Counter(word for sentence in sentences for word in split(sentence))
        kept = [(-count, word) for word, count in counts.items() if count >= least]
        return cls(tuple(word for _, word in sorted(kept)))

    def __len__(self) -> int:
        """How many numbers there are, those of padding and of unknown words included."""
        return len(self.words) + 2

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, start=2)}

    def encoded(self, sentences: Sequence[str], tokens: int) -> Int64[Tensor, "sample token"]:
        """The numbers of the first `tokens` words of every sentence, padding behind them."""
        rows = [[self._numbers.get(word, UNKNOWN) for word in split(text)[:tokens]] for text in sentences]
        return torch.tensor([row + [PADDING] * (tokens - len(row)) for row in rows], dtype=torch.int64)

    def record(self) -> dict[str, Any]:
        """As JSON, for the disk."""
        return {"words": list(self.words)}

    @classmethod
    def from_record(cls, record: dict[str, Any], source: Path) -> "Vocabulary":
        match record:
            case {"words": [*words]} if len(record) == 1 and all(isinstance(word, str) for word in words):
                return cls(tuple(words))
        raise DataError(f"{source} does not hold a vocabulary")

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the words, in order."""
        return hashlib.sha256(json.dumps(self.record()).encode()).hexdigest()


def split(sentence: str) -> list[str]:
    """The words of a sentence."""
    return sentence.lower().split()


@dataclass(frozen=True)
class Sentences:
    """One split: the words of every sentence by number, `PADDING` behind the last, and the labels."""

    words: Int64[Tensor, "sample token"]
    labels: Int64[Tensor, " sample"]

    def __post_init__(self) -> None:
        if self.words.ndim != 2 or self.labels.shape != self.words.shape[:1]:
            shapes = f"{tuple(self.words.shape)} and {tuple(self.labels.shape)}"
            raise DataError(f"sentences and labels of shapes {shapes} do not belong together")
        if self.words.dtype != torch.int64 or self.labels.dtype != torch.int64:
            raise DataError(f"words and labels must be int64, not {self.words.dtype} and {self.labels.dtype}")
        if self.words.numel() == 0:
            raise DataError("a data set needs at least one sentence")
        lengths(self.words)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def samples(self) -> Int64[Tensor, " sample"]:
        """The number by which records, and random numbers, know each sentence."""
        return torch.arange(len(self), device=self.labels.device)

    def batch(
        self, index: Int64[Tensor, " batch"] | slice
    ) -> tuple[Int64[Tensor, "batch token"], Int64[Tensor, " batch"]]:
        """Words and labels, on the device where the data set lives."""
        return self.words[index], self.labels[index]

    def first(self, count: int) -> "Sentences":
        return Sentences(self.words[:count], self.labels[:count])

    def to(self, device: torch.device) -> "Sentences":
        return Sentences(self.words.to(device), self.labels.to(device))


def lengths(words: Int64[Tensor, "sample token"]) -> Int64[Tensor, " sample"]:
    """How many words every sentence has; one without words, or with padding between words, is refused."""
    present = words != PADDING
    count = present.sum(1)
    if (words < 0).any() or not present[:, 0].all() or (present[:, 1:] & ~present[:, :-1]).any():
        raise DataError("a sentence is one word or more, by their numbers, and padding behind the last")
    return count


@dataclass(frozen=True)
class Text:
    """A named pair of splits of sentences, with the vocabulary that their numbers are of."""

    name: str
    train: Sentences
    test: Sentences
    classes: tuple[str, ...]
    vocabulary: Vocabulary

    def __post_init__(self) -> None:
        if self.train.words.shape[1] != self.test.words.shape[1]:
            raise DataError(f"{self.name}: training and test sentences differ in their most words")
        for part in (self.train, self.test):
            low, high = part.labels.aminmax()
            if low < 0 or high >= len(self.classes):
                raise DataError(f"{self.name}: labels must lie in 0..{len(self.classes) - 1}")
            if int(part.words.max()) >= len(self.vocabulary):
                raise DataError(f"{self.name}: there are words beyond the vocabulary")

    @property
    def shape(self) -> tuple[int]:
        """Of one sample: the most words that a sentence has."""
        return (self.train.words.shape[1],)

    def held_out(self, count: int, generator: torch.Generator) -> tuple["Text", Sentences]:
        """The training loop asks for this where an attack chooses the weights, which attacks pixels."""
        raise ConfigError("sentences cannot be held out for an attack: words are not pixels")

    def fingerprint(self) -> str:
        """SHA-256 over the vocabulary, the words and the labels of both splits."""
        digest = hashlib.sha256(self.vocabulary.fingerprint.encode())
        for part in (self.train, self.test):
            for tensor in (part.words, part.labels):
                digest.update(f"{tuple(tensor.shape)}\n".encode())
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()


Split = Dataset | Sentences
AnyData = Data | Text


def sst2(root: Path, tokens: int = 32, vocabulary: Vocabulary | None = None) -> Text:
    """The Stanford sentiment treebank in two classes, from `root`/train.tsv and `root`/dev.tsv as GLUE has them.

    The official test labels are not public: the dev sentences are the test split, as everywhere. Without a
    `vocabulary`, that of the training sentences is made.
    """
    if not 1 <= tokens <= _MOST_TOKENS:
        raise ConfigError(f"a sentence has between 1 and {_MOST_TOKENS} tokens, not {tokens}")
    (train, train_labels), (test, test_labels) = (_rows(root / name) for name in ("train.tsv", "dev.tsv"))
    known = Vocabulary.of(train) if vocabulary is None else vocabulary
    return Text(
        "sst2",
        Sentences(known.encoded(train, tokens), torch.tensor(train_labels, dtype=torch.int64)),
        Sentences(known.encoded(test, tokens), torch.tensor(test_labels, dtype=torch.int64)),
        ("negative", "positive"),
        known,
    )


def _rows(path: Path) -> tuple[list[str], list[int]]:
    """Sentences and labels of a file with one of each in a line, a tab between them; quotes are letters."""
    try:
        text = read_verified(path, None, _LARGEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the data file {path} is not UTF-8: {error.reason}") from error
    header, *lines = text.replace("\r\n", "\n").split("\n")
    if header != _HEADER:
        raise DataError(f"the data file {path} does not begin with the line 'sentence TAB label'")
    sentences, labels = [], []
    if lines and not lines[-1]:
        lines.pop()  # behind the last line's end
    for number, line in enumerate(lines, start=2):
        sentence, tab, label = line.rpartition("\t")
        if not tab or "\t" in sentence or label not in ("0", "1") or not split(sentence):
            raise DataError(f"line {number} of {path} is not a sentence, a tab, and 0 or 1")
        sentences.append(sentence)
        labels.append(int(label))
    if not sentences:
        raise DataError(f"the data file {path} holds no sentences")
    return sentences, labels
