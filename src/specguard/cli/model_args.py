"""`--model-arg patch_size=4`: arguments of a model's constructor, read as literals; nothing is executed."""

import json
import re
from typing import Any, NoReturn

from specguard.errors import ConfigError

_FLAG, _LONGEST = "--model-arg", 4096
_NAMED = re.compile(r"\s*[A-Za-z_]\w*\s*=", re.ASCII)
_NUMBER = re.compile(r"[-+.\d]")  # what a number begins with, and a word does not
_WORDS = {"True": True, "False": False, "None": None}  # as Python writes them


def model_arguments(words: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that `--model-arg` names: numbers, truth values and lists as in JSON, words as they are."""
    found: dict[str, Any] = {}
    for word in words:
        if len(word) > _LONGEST:
            raise ConfigError(f"{_FLAG} takes at most {_LONGEST} characters")
        for part in _parts(word):
            name, equals, text = (piece.strip() for piece in part.partition("="))
            if not equals or not (name.isascii() and name.isidentifier()):
                raise ConfigError(f"{_FLAG} takes name=value, such as patch_size=4, not {part.strip()!r}")
            if name in found:
                raise ConfigError(f"{_FLAG} names {name!r} twice")
            found[name] = _value(name, text)
    return found


def _parts(word: str) -> list[str]:
    """The parts between commas that are followed by another name=; other commas belong to a value."""
    cuts, quoted, depth = [0], False, 0
    for place, letter in enumerate(word):
        if letter == '"' and word[max(place - 1, 0)] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and depth == 0 and _NAMED.match(word, place + 1):
                cuts.append(place + 1)
    ends = [cut - 1 for cut in cuts[1:]] + [len(word)]
    return [word[begin:end] for begin, end in zip(cuts, ends, strict=True)]


def _value(name: str, text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if not text or _NUMBER.match(text) or text[0] in '[{"' or text in ("NaN", "Infinity"):
            short = text if len(text) <= 40 else f"{text[:40]}..."
            raise ConfigError(
                f"{_FLAG} {name} takes a number, true, false, a text or a list of them, not {short!r}"
            ) from None
        return text
    entries = value if isinstance(value, list) else [value]
    if any(isinstance(entry, list | dict) for entry in entries):
        raise ConfigError(f"{_FLAG} {name} takes a number, true, false, a text or a flat list of them")
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)
