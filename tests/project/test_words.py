"""The words of the project are the field's: what once read as a private language does not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLD = {  # what is refused: what to say
    r"second program": "independent checker",
    r"\brivals?\b": "other class",
    r"\bstrangers?\b": "untrusted, third-party",
    r"stands? attacks|stood up|still stand\b": "robust accuracy",
    r"classified right": "clean accuracy, classified correctly",
    r"none broke\b|\bbreaks? no\b": "misclassified, attacked successfully",
    r"stops asking|tells? it\b|are believed|is believed": "say who does what",
    r"\bposed\b|\blocated\b|\bpulled\b|thinned|carried_out": "a noun for a value, a verb for work",
    r"verify-certificates|--families|--cascade": "check, --methods, --stop-early",
    r"behaviour|\bcolour|neighbour|\bcentre\b|\bgrey\b|penalis|optimis|initialis": "American spelling, as torch's",
}
KEPT = {  # where an old word is what the text is about
    "src/specguard/cli/verbs.py": r"verify-certificates|--families|--cascade",  # the old spellings, which warn
}
HISTORY = ("docs/decisions.md", "docs/mutants.md", "src/specguard/records/legacy.py")
FILES = sorted(
    path
    for top, pattern in (
        ("src", "*.py"),
        ("src", "*.html"),
        ("docs", "*.md"),
        ("examples", "*.py"),
        (".", "README.md"),
        (".", "CONTRIBUTING.md"),
    )
    for path in ((ROOT / top).rglob(pattern) if top != "." else [ROOT / pattern])
    if str(path.relative_to(ROOT)) not in HISTORY
)


def found_in(text: str, kept: str | None = None) -> list[str]:
    """The old words of a text, with what to say in their place."""
    matches = ((match[0], say) for old, say in OLD.items() for match in re.finditer(old, text, re.IGNORECASE))
    return [f"{word!r}: {say}" for word, say in matches if kept is None or not re.fullmatch(kept, word)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_speaks_the_old_language(path):
    assert not found_in(path.read_text(), KEPT.get(str(path.relative_to(ROOT))))


@pytest.mark.parametrize(
    "text", ["a Second program", "all rivals", "images that stood up", "the Behaviour", "posed = 3", "`--cascade`"]
)
def test_an_old_word_is_found(text):
    assert found_in(text)


def test_there_are_files_to_read():
    assert len(FILES) > 250
