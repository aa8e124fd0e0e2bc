"""Sentences as token indices, the vocabulary that defines them, and SST-2 from its official files.

A text is lower-cased and split at white space, because the files of SST-2 are already tokenized. Words that occur
fewer than `least` times in the training sentences share one token for unknown words. A sentence is truncated to
`tokens` words.
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

PADDING, UNKNOWN = 0, 1  # words have larger indices
_HEADER = "sentence\tlabel"
_LEAST = 2
_MOST_TOKENS = 2**12
_LARGEST = 2**28  # bytes of a file; that of SST-2 has 4 MB


@dataclass(frozen=True)
class Vocabulary:
    """The known words; word i has the index i + 2, after padding (0) and unknown words (1).

    Args:
        words: most frequent first

    Example:
        >>> from specguard.data import Vocabulary
        >>> vocabulary = Vocabulary.of(["a fine film", "a film"])
        >>> vocabulary.words
        ('a', 'film')
        >>> vocabulary.encode(["A fine film"], tokens=4)
        tensor([[2, 1, 3, 0]])
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.words)) < len(self.words) or not all(self.words):
            raise DataError("a vocabulary holds every word once, and no empty one")

    @classmethod
    def of(cls, sentences: Iterable[str], least: int = _LEAST) -> "Vocabulary":
        """The words that occur at least `least` times, most frequent first, ties in alphabetical order."""
        counts = Counter(word for sentence in sentences for word in split(sentence))
        kept = [(-count, word) for word, count in counts.items() if count >= least]
        return cls(tuple(word for _, word in sorted(kept)))

    def __len__(self) -> int:
        """The number of indices, including those of padding and unknown words."""
        return len(self.words) + 2

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words, start=2)}

    def encode(self, sentences: Sequence[str], tokens: int) -> Int64[Tensor, "sample token"]:
        """The indices of the first `tokens` words of every sentence, then padding."""
        rows = [[self._indices.get(word, UNKNOWN) for word in split(text)[:tokens]] for text in sentences]
        return torch.tensor([row + [PADDING] * (tokens - len(row)) for row in rows], dtype=torch.int64)

    def record(self) -> dict[str, Any]:
        """The vocabulary as JSON."""
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
    """One split of a data set of sentences.

    Args:
        words: token indices of every sentence, then padding (0)
        labels: class indices

    Example:
        >>> import torch
        >>> from specguard.data import Sentences
        >>> len(Sentences(torch.tensor([[2, 3, 0], [4, 0, 0]]), torch.tensor([1, 0])))
        2
    """

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
        """The index of each sentence in records and random numbers."""
        return torch.arange(len(self), device=self.labels.device)

    def batch(
        self, index: Int64[Tensor, " batch"] | slice
    ) -> tuple[Int64[Tensor, "batch token"], Int64[Tensor, " batch"]]:
        """Token indices and labels, on the device of the data set."""
        return self.words[index], self.labels[index]

    def first(self, count: int) -> "Sentences":
        return Sentences(self.words[:count], self.labels[:count])

    def to(self, device: torch.device) -> "Sentences":
        return Sentences(self.words.to(device), self.labels.to(device))


def lengths(words: Int64[Tensor, "sample token"]) -> Int64[Tensor, " sample"]:
    """The number of words of every sentence; DataError for none, or for padding between words."""
    present = words != PADDING
    count = present.sum(1)
    if (words < 0).any() or not present[:, 0].all() or (present[:, 1:] & ~present[:, :-1]).any():
        raise DataError("a sentence is the indices of at least one word, with padding behind the last")
    return count


@dataclass(frozen=True)
class Text:
    """A named training and test split of sentences.

    Args:
        name: of the data set
        train: training split
        test: test split, with as many tokens
        classes: names of the classes
        vocabulary: of the token indices

    Example:
        >>> from specguard.data import Sentences, Text, Vocabulary
        >>> import torch
        >>> split = Sentences(torch.tensor([[2, 1, 0]]), torch.tensor([1]))
        >>> Text("one", split, split, ("negative", "positive"), Vocabulary(("film",))).shape
        (3,)
    """

    name: str
    train: Sentences
    test: Sentences
    classes: tuple[str, ...]
    vocabulary: Vocabulary

    def __post_init__(self) -> None:
        if self.train.words.shape[1] != self.test.words.shape[1]:
            raise DataError(f"{self.name}: training and test sentences differ in their number of tokens")
        for part in (self.train, self.test):
            low, high = part.labels.aminmax()
            if low < 0 or high >= len(self.classes):
                raise DataError(f"{self.name}: labels must lie in 0..{len(self.classes) - 1}")
            if int(part.words.max()) >= len(self.vocabulary):
                raise DataError(f"{self.name}: there are words beyond the vocabulary")

    @property
    def shape(self) -> tuple[int]:
        """The shape of a sample: the number of tokens, padding included."""
        return (self.train.words.shape[1],)

    def held_out(self, count: int, generator: torch.Generator) -> tuple["Text", Sentences]:
        """Always ConfigError: validation by attack perturbs pixels."""
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


def sst2(root: Path | str, tokens: int = 32, vocabulary: Vocabulary | None = None) -> Text:
    """The Stanford Sentiment Treebank with two classes, from the files of GLUE.

    The official test labels are not public: the dev sentences are the test split, as is usual.

    Args:
        root: folder with train.tsv and dev.tsv
        tokens: length to which sentences are padded and truncated
        vocabulary: by default that of the training sentences

    Returns:
        Both splits, with the vocabulary.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from specguard.data import sst2
        >>> with TemporaryDirectory() as root:
        ...     for name in ("train.tsv", "dev.tsv"):
        ...         _ = (Path(root) / name).write_text("sentence\\tlabel\\na fine film\\t1\\na dull film\\t0\\n")
        ...     data = sst2(Path(root), tokens=4)
        >>> data.train.words
        tensor([[2, 1, 3, 0],
                [2, 1, 3, 0]])
    """
    root = Path(root)
    if not 1 <= tokens <= _MOST_TOKENS:
        raise ConfigError(f"a sentence has between 1 and {_MOST_TOKENS} tokens, not {tokens}")
    (train, train_labels), (test, test_labels) = (_rows(root / name) for name in ("train.tsv", "dev.tsv"))
    vocabulary = Vocabulary.of(train) if vocabulary is None else vocabulary
    return Text(
        "sst2",
        Sentences(vocabulary.encode(train, tokens), torch.tensor(train_labels, dtype=torch.int64)),
        Sentences(vocabulary.encode(test, tokens), torch.tensor(test_labels, dtype=torch.int64)),
        ("negative", "positive"),
        vocabulary,
    )


def _rows(path: Path) -> tuple[list[str], list[int]]:
    """Sentences and labels of a file, one of each per line with a tab between; quotes have no special meaning."""
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
