"""Encoders of text by name, with their data: what `specguard train` makes new, and what a run has kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specguard.data import Text, Vocabulary, sst2
from specguard.errors import ConfigError, RunError
from specguard.nn import TEXT_PRESETS, TextEncoder, text_config_from_json, text_config_to_json, text_encoder
from specguard.records import io

TEXT_DATA = ("sst2",)
_FROM_DATA = ("kind", "words", "classes", "vocabulary")


def new_text(model: str, changes: list[str], data: str, root: Path | None, seed: int) -> tuple[TextEncoder, Text]:
    """An untrained encoder with the vocabulary and the classes of its data."""
    config = text_config_from_json(changed_fields(text_config_to_json(TEXT_PRESETS[model]), changes, _FROM_DATA))
    loaded = _data(data, root, config.tokens, None)
    known = loaded.vocabulary
    config = replace(config, words=len(known), classes=len(loaded.classes), vocabulary=known.fingerprint)
    return text_encoder(config, torch.Generator().manual_seed(seed)), loaded


def changed_fields(record: dict[str, Any], changes: list[str], from_data: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a config, changed as --set says: numbers and lists as in JSON, words as they are."""
    changed = dict(record)
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"--set takes field=value, not {change!r}")
        if name in from_data:
            raise ConfigError(f"the model's {name} comes from the data and cannot be set")
        try:
            changed[name] = json.loads(text)
        except (ValueError, RecursionError):
            changed[name] = text
    return changed


def run_text(run: Path, model: TextEncoder, name: str, root: Path | None) -> Text:
    """Data in the numbers of the words that the run was trained with, which it has kept."""
    path = run / "vocabulary.json"
    vocabulary = Vocabulary.from_record(io.read_json(path), path)
    if vocabulary.fingerprint != model.config.vocabulary:
        raise RunError(f"{path} is not the vocabulary that the model was trained with")
    return _data(name, root, model.config.tokens, vocabulary)


def _data(name: str, root: Path | None, tokens: int, vocabulary: Vocabulary | None) -> Text:
    if name not in TEXT_DATA:
        raise ConfigError(f"a model of text needs --data {' or '.join(TEXT_DATA)}, not {name}")
    if root is None:
        raise ConfigError(f"data {name!r} needs --data-root, the folder where it lies")
    return sst2(Path(root), tokens, vocabulary)
