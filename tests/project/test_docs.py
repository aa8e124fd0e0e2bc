"""The documentation says what the program does: its commands exist, with these options; its pages are found."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from mkdocs.exceptions import PluginError

from helpers.documentation import module_of
from specguard.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md"))
GROUP = typer.main.get_command(app)
VERBS = {name: GROUP.resolve_command(typer.Context(GROUP), [name])[1] for name in GROUP.list_commands(None)}


def commands(text: str) -> list[list[str]]:
    """Every call of the program within blocks of code and within a line, as words."""
    blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`(specguard [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = [shlex.split(line) for line in blocks + inline if line.startswith("specguard ")]
    return [words for words in found if words[1].split("|")[0] in VERBS or words[1].islower()]


def options(verb: str) -> set[str]:
    return {flag for parameter in VERBS[verb].params for flag in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_is_shown_exists_with_its_options(path):
    for words in commands(path.read_text()):
        for verb in words[1].split("|"):
            if verb.startswith("-"):  # of the program itself, such as --install-completion
                continue
            assert verb in VERBS, verb
            flags = {flag for word in words[2:] for flag in re.findall(r"--[a-z][a-z-]*", word)}
            assert flags <= options(verb), (verb, flags - options(verb))


def test_there_are_commands_to_check_and_a_wrong_one_is_noticed():
    assert sum(len(commands(path.read_text())) for path in PAGES) > 8
    assert "--radios" not in options("attack")


def test_theory_pages_show_every_row_of_the_ledger_and_refuse_others():
    hook = module_of("ledger")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a page"))
    texts = [hook.on_page_markdown(path.read_text(), page) for path in sorted((ROOT / "docs/theory").glob("*.md"))]
    shown = re.findall(r"^\*\*(\S+)\*\*\n\n:   ", "\n".join(texts), re.MULTILINE)
    assert sorted(shown) == sorted(hook.ledger())
    with pytest.raises(PluginError, match="names 'nothing', which is not in the ledger"):
        hook.on_page_markdown("<!-- ledger: nothing -->", page)


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {str(path.relative_to(ROOT / "docs")) for path in PAGES} | notebooks == listed


def test_the_page_of_formats_is_that_of_the_types():
    formats = module_of("formats")
    assert formats.PAGE.read_text() == formats.page(), "python docs/formats.py writes it anew"
