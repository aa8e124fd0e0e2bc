"""Every recipe has --help, a dry run and an estimate of its time; a dry run prints what is run, and runs none."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import estimate
from specguard.cli import app

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/run.sh"))
GROUP = typer.main.get_command(app)
PLAIN = ("digits_pgd", "digits_certified", "cifar10_lofast")  # whose commands are all of Python


def called(name: str, *words: str, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess:
    """The script of a recipe, run in an empty folder."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": python}
    command = ["bash", str(ROOT / "recipes" / name / "run.sh"), *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", RECIPES)
def test_help_says_what_the_recipe_does_and_how_long_it_takes(name, tmp_path):
    ended = called(name, "--help", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    head = (ROOT / "recipes" / name / "run.sh").read_text().splitlines()[1].removeprefix("# ")
    assert ended.stdout.startswith(head)
    for text in ("Usage: run.sh ", "--dry-run", "Time estimate"):
        assert text in ended.stdout
    if any((ROOT / "recipes" / name).rglob("*.json")):
        assert re.search(r"^  together: \d[\d.]* (s|min|h) on ", ended.stdout, re.MULTILINE)
    else:
        assert "no result of this recipe is committed yet" in ended.stdout
    assert "set -e" not in ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_prints_commands_that_exist_without_data_and_leaves_nothing(name, tmp_path):
    ended = called(name, "--dry-run", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Time estimate" in ended.stderr
    lines = [shlex.split(line) for line in ended.stdout.splitlines()]
    assert {words[0] for words in lines} <= {"specguard", "env", "cp", "mkdir", "rm"}
    for words in lines:
        if words[0] == "specguard":
            _, verb, _ = GROUP.resolve_command(typer.Context(GROUP), [words[1]])
            known = {flag for one in verb.params for flag in (*one.opts, *one.secondary_opts)}
            assert {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)} <= known, words
        elif "bash" in words:
            assert Path(words[words.index("bash") + 1]).exists()
        elif words[0] == "env":
            script = words[words.index(sys.executable) + 1 :]
            place = ROOT / "recipes" / script[1].replace(".", "/") if script[0] == "-m" else Path(script[0])
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", PLAIN)
def test_what_a_dry_run_prints_is_what_is_run(name, tmp_path):
    log, stand_in = tmp_path / "log", tmp_path / "python"
    stand_in.write_text(f'#!/usr/bin/env bash\nprintf "%s\\0" "$@" >>{log}; printf "\\n" >>{log}\n')
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    words = ("data here",) if name.startswith("cifar10") else ("my runs",)
    dry = called(name, *words, "--dry-run", cwd=tmp_path, python=str(stand_in))
    log.unlink()
    ended = called(name, *words, cwd=tmp_path, python=str(stand_in))
    assert ended.returncode == 0, ended.stderr
    ran = [line.split("\0")[:-1] for line in log.read_text().splitlines()]
    ran = [
        ["specguard", *line[2:]] if line[:2] == ["-m", "specguard"] else line for line in ran[1:]
    ]  # the estimate
    printed = [shlex.split(line) for line in dry.stdout.splitlines()]
    assert [line[3:] if line[0] == "env" else line for line in printed] == ran


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_its_usage_where_an_argument_is_missing_or_an_option_unknown(name, tmp_path):
    ended = called(name, "--nothing", cwd=tmp_path)
    assert ended.returncode == 2
    assert "--nothing is no option; usage: run.sh" in ended.stderr
    usage = re.search(r"^# Usage: run.sh (\S+)", (ROOT / "recipes" / name / "run.sh").read_text(), re.MULTILINE)
    if not usage[1].startswith("["):
        ended = called(name, cwd=tmp_path)
        assert ended.returncode == 2
        assert ended.stderr.startswith("usage: run.sh ")


@pytest.mark.parametrize("name", RECIPES)
def test_an_estimate_has_every_row_with_its_committed_seconds(name):
    text = "\n".join(estimate.lines(ROOT / "recipes" / name))
    for path in (ROOT / "recipes" / name).glob("*/result.json"):
        assert f"  {path.parent.name}: " in text


def test_seconds_are_those_of_the_record_in_any_form():
    assert estimate.seconds({"seconds": 5}) == 5
    assert estimate.seconds({"seconds": {"total": 7.5, "attack": 2}}) == 7.5
    assert estimate.seconds({"n": 10, "seconds_per_image": {"lofast": 0.1, "local": 0.2}}) == pytest.approx(3)
    assert estimate.seconds({"n": 10}) is None
    assert [estimate.in_words(amount) for amount in (0.25, 59.4, 90, 5400, 100_000)] == [
        "0.25 s", "59 s", "1.5 min", "1.5 h", "28 h",
    ]  # fmt: skip
    assert estimate.hardware({"cpu": "x86_64", "threads": 2}) == "2 CPU threads"
