"""What commands print: nothing that a terminal would obey, and one sentence where nobody takes it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.table import Table

from helpers.sample_runs import sample_run
from specguard.cli import console
from specguard.cli.console import Terminal, study_bar
from specguard.records.study import Progress

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def shown(*objects: object, **options: object) -> str:
    file = io.StringIO()
    Terminal(file=file, highlight=False, markup=False, emoji=False, width=200).print(*objects, **options)
    return file.getvalue()


def harmless(text: str) -> bool:
    return not set(text) & set("\x1b\x07\x9b\r")


def test_names_in_sentences_and_tables_tell_a_terminal_nothing():
    table = Table(f"head {ESCAPE}", title=f"title {ESCAPE}", caption=f"caption {ESCAPE}")
    table.add_row(f"cell {ESCAPE}")
    for text in (shown(f"name {ESCAPE}"), shown(table), shown(f"name {ESCAPE}", soft_wrap=True, style="red")):
        assert harmless(text)
        assert r"\x1b" in text
    assert all(f"{word} \\x1b" in shown(table) for word in ("head", "title", "caption", "cell"))


def test_a_name_cannot_begin_a_line_of_its_own():
    assert shown("class a\nError: forged").count("\n") == 1


def test_the_name_of_a_part_that_is_under_way_tells_a_terminal_nothing(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(console, "err", Terminal(file=file, force_terminal=True, no_color=True, width=200))
    with study_bar("parts") as watch:
        watch(Progress(1, 2, f"blocks.0 {ESCAPE}"))
    assert r"blocks.0 \x1b]0;owned" in file.getvalue()
    assert "\x1b]0;owned" not in file.getvalue()


def test_the_names_of_files_and_classes_in_sentences_tell_a_terminal_nothing(specguard, tmp_path):
    folder = tmp_path / f"data {ESCAPE.replace('/', '')}"
    for split in ("train", "val"):
        (folder / split / f"class {ESCAPE}").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / split / f"class {ESCAPE}" / "0.png")
    (folder / "train" / f"class {ESCAPE}" / f"{ESCAPE}.png").write_bytes(b"none")
    for arguments in (
        ("train", "--run", tmp_path / "run", "--data", folder),
        ("report", tmp_path / f"none {ESCAPE}"),
        ("certify", tmp_path / f"none {ESCAPE}"),
        ("attack", f"hf:{tmp_path / ESCAPE}", "--data", "digits"),
    ):
        ended = specguard(*arguments)
        ended.refuses(r"\x1b]0;owned\x07\x1b[2J\x9b31m")
        assert harmless(ended.out + ended.err)
    run = sample_run(tmp_path / f"run {ESCAPE}", n=20)
    ended = specguard("report", run)
    ended.succeeds()
    assert harmless(ended.out + ended.err)


# Nobody takes it -------------------------------------------------------------------------------------------------


def command(*arguments: object, out: int, unbuffered: str) -> tuple[int, str]:
    """Exit code and complaints of a real process with this standard output."""
    words = [sys.executable, "-m", "specguard", *map(str, arguments)]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    return ended.returncode, ended.stderr


@pytest.fixture
def full() -> Path:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    return Path("/dev/full")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", ["models", "report", "--help", "--version"])
def test_a_full_standard_output_is_one_sentence(tmp_path, full, verb, unbuffered):
    arguments = (verb, sample_run(tmp_path / "run", n=20)) if verb == "report" else (verb,)
    with open(full, "w") as out:
        code, said = command(*arguments, out=out.fileno(), unbuffered=unbuffered)
    assert (code, said) == (2, "Error: the standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", ["models", "--help"])
def test_a_reader_that_has_seen_enough_hears_nothing_more(verb, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert command(verb, out=writer, unbuffered=unbuffered) == (1, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_where_nobody_reads_the_sentence_the_exit_code_still_tells(tmp_path, full, unbuffered):
    words = [sys.executable, "-m", "specguard", "report", str(tmp_path / "none")]
    with open(full, "w") as nobody:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        assert subprocess.run(words, stderr=nobody, env=environment, check=False).returncode == 2
