"""Small encoders of text and small files of sentences, for the tests that need some."""

from pathlib import Path

import torch

from specguard.data import Sentences
from specguard.nn import TextConfig, TextEncoder, text_encoder

CONFIG = TextConfig(words=11, tokens=7, classes=3, dim=12, depth=2, heads=3, value_norm=0.6, query_norm=1.5)


def small_encoder(config: TextConfig = CONFIG, seed: int = 0) -> TextEncoder:
    """With biases that are not zero, as training leaves them."""
    generator = torch.Generator().manual_seed(seed)
    model = text_encoder(config, generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def small_sentences(lengths: tuple[int, ...] = (3, 1, 7, 3, 5), config: TextConfig = CONFIG) -> Sentences:
    """Of these lengths, words drawn at random; labels are what the small encoder says, but for the second."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, config.words, (len(lengths), config.tokens), generator=generator)
    words[torch.arange(config.tokens) >= torch.tensor(lengths)[:, None]] = 0
    with torch.no_grad():
        labels = small_encoder(config)(words).argmax(1)
    labels[1] = (labels[1] + 1) % config.classes
    return Sentences(words, labels)


def write_sst2(folder: Path, train: int = 80, test: int = 12) -> Path:
    """Sentences that one of their words gives away, in the two files of SST-2."""
    folder.mkdir(parents=True, exist_ok=True)
    telling, rest = (("dull", "awful", "cold"), ("fine", "lovely", "warm")), ("a", "film", "of", "it", "plot")
    for name, count in (("train", train), ("dev", test)):
        lines = ["sentence\tlabel"]
        for i in range(count):
            words = [telling[i % 2][i % 3], *(rest[(i + j) % 5] for j in range(i % 6))]
            lines.append(f"{' '.join(words)} \t{i % 2}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder
