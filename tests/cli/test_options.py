"""Options are made from the settings they fill; config files; names of the version before; help without torch."""

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.cli import app
from specguard.cli.groups import ModelOptions
from specguard.cli.options import Given, Options, command, options_of
from specguard.cli.verbs import VERBS as CLI_VERBS
from specguard.errors import ConfigError
from specguard.records.attack import AttackSettings
from specguard.records.base import setting
from specguard.records.certificate import CertifySettings
from specguard.records.check import CheckSettings
from specguard.records.io import read_json
from specguard.records.sensitivity import SensitivitySettings
from specguard.records.smoothing import SmoothSettings
from specguard.records.spectrum import SpectrumSettings

VERBS = tuple(CLI_VERBS)
SETTINGS = (AttackSettings, CertifySettings, SmoothSettings, SpectrumSettings, SensitivitySettings, CheckSettings)


def command_of(verb):
    return typer.main.get_command(app).resolve_command(typer.Context(typer.main.get_command(app)), [verb])[1]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_says_what_it_means_and_every_verb_has_an_example(verb):
    found = command_of(verb)
    assert found.help
    assert found.epilog.startswith(f"Example: specguard {verb}")
    for parameter in found.params:
        assert parameter.help, f"{verb} {parameter.name} has no text"
    shown = " ".join(CliRunner().invoke(app, [verb, "--help"]).output.split())
    assert f"specguard {verb}" in shown
    assert "Example:" in shown


@pytest.mark.parametrize("verb", VERBS)
def test_an_example_of_the_help_is_a_command_line_that_is_understood(verb):
    """Every word of it is an option, a value or an argument of the command."""
    words = CLI_VERBS[verb].example.split()[2:]
    found = command_of(verb)
    context = typer.Context(found, info_name=verb, resilient_parsing=True)
    found.parse_args(context, list(words))
    known = {flag for parameter in found.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("struct", SETTINGS)
def test_without_options_the_settings_are_their_own_defaults(struct):
    seen = []

    def work(settings: Annotated[struct, "Settings"]) -> None:
        seen.append(settings)

    work.__annotations__["settings"] = Annotated[struct, "Settings"]
    invoke(command(work), [])
    assert seen == [struct()]


def invoke(function, words):
    alone = typer.Typer()
    alone.command()(function)
    result = CliRunner().invoke(alone, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    depth: Annotated[int, setting("depth", ge=1, le=9)] = 3
    hidden: Annotated[bool, setting("not an option", "")] = True


class Everything(Options, frozen=True):
    """One option of every kind."""

    count: Annotated[int, setting("a count", ge=2)] = 5
    size: Annotated[float, setting("a size", gt=0)] = 0.1
    maybe: Annotated[float | None, setting("a size, or none", le=1)] = None
    name: Annotated[str, setting("a name")] = "x"
    place: Annotated[Path | None, setting("a path")] = None
    kind: Annotated[Literal["one", "two"], setting("a choice")] = "one"
    kinds: Annotated[tuple[Literal["one", "two"], ...], setting("choices")] = ("one", "two")
    radii: Annotated[tuple[float, ...], setting("radii", "--radius", "--curve")] = (8 / 255, 0.3)
    words: Annotated[tuple[str, ...], setting("texts")] = ()
    flag: Annotated[bool, setting("a flag")] = False
    inner: Annotated[Inner, setting("of the inner one")] = Inner()


def filled(*words):
    seen = []

    def work(everything: Annotated[Everything, "All"], given: Given) -> None:
        seen.append((everything, given))

    invoke(command(work), words)
    return seen[0]


def test_every_kind_of_field_is_filled():
    assert filled() == (Everything(), frozenset())
    options = (
        "--count",
        "7",
        "--size",
        "1/4",
        "--maybe",
        "0.5",
        "--name",
        "a,b",
        "--place",
        "here",
        "--kind",
        "two",
    )
    more = ("--kinds", "two", "--curve", "0.5,1/4", "--radius", "1/4", "--words", "a,b", "--words", "c", "--flag")
    found, given = filled(*options, *more, "--depth", "4")
    assert found == Everything(
        count=7,
        size=0.25,
        maybe=0.5,
        name="a,b",
        place=Path("here"),
        kind="two",
        kinds=("two",),
        radii=(0.25, 0.5),
        words=("a,b", "c"),
        flag=True,
        inner=Inner(depth=4),
    )
    assert given == {
        "count", "size", "maybe", "name", "place", "kind", "kinds", "radius", "words", "flag", "depth",
    }  # fmt: skip
    assert filled("--kinds", "all")[0].kinds == ("one", "two")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--count", "1"), "--count must be at least 2, not 1"),
        (("--size", "0"), "--size must be above 0, not 0"),
        (("--size", "1/0"), "--size takes a number or a quotient such as 8/255, not '1/0'"),
        (("--size", "nan"), "--size must be finite, not nan"),
        (("--maybe", "1.5"), "--maybe must be at most 1, not 1.5"),
        (("--radius", "0.1,x"), "--radius or --curve takes a number"),
        (("--kinds", "one,three"), "--kinds: 'three' is unknown; choose all, alone, or among one, two"),
        (("--count", "9" * 400), "--count takes a number of at most 62 bits"),
        (("--kinds", "all,one"), "choose all, alone"),
        (("--depth", "10"), "--depth must be at most 9, not 10"),
    ],
)
def test_a_value_beyond_its_limits_is_one_sentence(words, said):
    with pytest.raises(ConfigError) as caught:
        filled(*words)
    assert said in str(caught.value)


def test_a_field_without_a_meaning_is_refused_when_the_command_is_made():
    class Silent(Options, frozen=True):
        """Its option would have no text."""

        count: int = 3

    with pytest.raises(AssertionError, match="count"):
        options_of(Silent)


def test_option_names_of_one_command_are_all_different():
    for verb in VERBS:
        names = [parameter.name for parameter in command_of(verb).params]
        assert len(set(names)) == len(names), verb


def test_no_command_repeats_a_default_of_its_settings():
    """A default stands in the struct alone: no parameter of a command has one that is not a name's."""
    for verb in VERBS:
        function = getattr(importlib.import_module(f"specguard.cli.{CLI_VERBS[verb].module}"), f"{verb}_command")
        work = inspect.unwrap(function)
        assert all(
            p.default in (inspect.Parameter.empty, None) for p in inspect.signature(work).parameters.values()
        )


# Config files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = ["--epochs", "1", "--batch", "512", "--set", "dim=8", "--set", "depth=1", "--device", "cpu"]
    assert CliRunner().invoke(app, ["train", "--run", str(folder), *words]).exit_code == 0
    return folder


def test_options_come_from_a_file_and_the_command_line_goes_before_it(specguard, run, tmp_path):
    (tmp_path / "few.toml").write_text(
        "images = 3\nsearch = false\n[attack]\nsteps = 3\n[certify]\n"
        'methods = ["local", "naive"]\nradius = [0.01, "2/255"]\n'
    )
    folder = f"proofs-{tmp_path.name}"
    certify = ("certify", run, "--config", tmp_path / "few.toml", "--device", "cpu")
    specguard(*certify, "--radius", "0.5", "--out", folder).succeeds()
    settings = read_json(run / folder / "study.json")["settings"]
    assert settings["radii"] == [0.5]
    assert settings["methods"] == ["local", "naive"]
    assert settings["search"] is False
    assert read_json(run / folder / "study.json")["about"]["n"] == 3
    specguard(*certify, "--out", f"{folder}-2").succeeds()
    assert read_json(run / f"{folder}-2" / "study.json")["settings"]["radii"] == [2 / 255, 0.01]


def test_an_option_from_a_file_counts_as_given(specguard, tmp_path):
    (tmp_path / "odd.toml").write_text("momentum = 0.5\n")
    ended = specguard("train", "--run", tmp_path / "run", "--config", tmp_path / "odd.toml")
    ended.refuses("--momentum has no effect without --optimizer sgd")


BAD_FILES = {
    "misspelled": (b"imges = 3", "certify has no option 'imges'; did you mean 'images'?"),
    "an argument": (b'run = "x"', "certify has no option 'run'"),
    "a file of files": (b'config = "x"', "certify has no option 'config'"),
    "named twice": (b"radius = 1\ncurve = 2", "'radius' twice"),
    "no TOML": (b"images == 3", "is not a TOML file"),
    "no text": (b"a = \xff", "is not a TOML file"),
    "nested deeply": (b"a = " + b"[" * 50_000, "is not a TOML file"),
    "a number of many digits": (b"images = " + b"9" * 5000, "is not a TOML file"),
    "a text for a flag": (b'search = "yes"', "search takes true or false"),
    "a flag for a number": (b"images = true", "images takes a number or a text"),
    "a date": (b"images = 1979-05-27", "images takes a number or a text"),
    "a list for one value": (b"images = [1]", "images takes one value"),
    "a table of tables": (b"[[certify]]\nimages = 1", "has no option 'certify'"),
    "a table of nobody": (b"[cetrify]\nimages = 1", "has no option 'cetrify'"),
    "a number of many bits": (b"seed = 0x" + b"f" * 5000, "64 bits"),
    "a null character": (b'out = "a\\u0000b"', "null characters"),
    "beyond a limit": (b"batch = 0", "--batch must be at least 1"),
    "control characters": (b'"\\u001b[31m" = 1', "has no option"),
    "too large": (b"#" * 2**21, "bytes"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_config_file_is_one_sentence(specguard, run, tmp_path, case):
    content, said = BAD_FILES[case]
    (tmp_path / "bad.toml").write_bytes(content)
    before = contents(run)
    specguard("certify", run, "--config", tmp_path / "bad.toml").refuses(said)
    assert contents(run) == before


def test_a_config_file_that_is_a_pipe_or_missing_is_one_sentence(specguard, run, tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    specguard("certify", run, "--config", tmp_path / "pipe.toml").refuses("pipe.toml", "pipe or a device")
    specguard("certify", run, "--config", tmp_path / "nowhere.toml").refuses("nowhere.toml", "does not exist")


# Names of the version before --------------------------------------------------------------------------------------


def test_flags_of_the_version_before_work_and_warn(specguard, run, tmp_path):
    old = ("certify", run, "--families=local", "--cascade", "--images", "2", "--device", "cpu")
    ended = specguard(*old, "--out", f"old-{tmp_path.name}")
    ended.succeeds()
    assert "--families is now called --methods" in ended.err
    assert "--cascade is now called --stop-early" in ended.err
    settings = read_json(run / f"old-{tmp_path.name}" / "study.json")["settings"]
    assert (settings["methods"], settings["stop_early"]) == (["local"], True)


def test_what_stands_behind_a_double_dash_is_no_old_flag(specguard):
    ended = specguard("certify", "--", "--families")
    assert ended.code == 2
    assert "is now called" not in ended.err


def test_arguments_of_a_run_of_the_version_before_are_resumed(specguard, tmp_path):
    words = ("--objective", "pgd", "--inner-steps", "1", "--clean-share", "0.5", "--epochs", "1", "--batch", "512")
    ended = specguard("train", "--run", tmp_path / "run", *words, "--set", "dim=8", "--set", "depth=1")
    ended.succeeds()
    assert "--clean-share is now called --clean-fraction" in ended.err
    path = tmp_path / "run" / "arguments.json"
    stored = json.loads(path.read_text())
    stored["clean_share"] = stored.pop("clean_fraction")
    path.write_text(json.dumps(stored))
    specguard("train", "--run", tmp_path / "run", "--resume").succeeds()


# Near misses, completion, and what is imported --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("trian",), "'train'"),
        (("certify", "x", "--metods", "all"), "--methods"),
        (("train", "--run", "x", "--data", "cifr10"), "'cifar10'"),
        (("train", "--run", "x", "--model", "tinny"), "'tiny'"),
    ],
)
def test_near_misses_get_a_suggestion(specguard, tmp_path, monkeypatch, words, near):
    monkeypatch.chdir(tmp_path)
    ended = specguard(*words)
    assert ended.code == 2
    assert near in ended.err


HEAVY = ("torch", "numpy", "matplotlib", "scipy", "sklearn", "PIL", "jinja2")
LIGHT = {"help": ["--help"], "models": ["models"], **{f"{verb} --help": [verb, "--help"] for verb in VERBS}}


@pytest.mark.parametrize("case", LIGHT)
def test_help_and_the_list_of_models_import_nothing_heavy(case):
    code = (
        f"import sys; sys.argv = ['specguard', *{LIGHT[case]!r}]\n"
        "import specguard.cli\n"
        "try:\n    specguard.cli.main()\n"
        f"finally:\n    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "cursor", "completed"),
    [
        ("specguard cer", 1, ["certify"]),
        ("specguard certify --norm ", 3, ["l2", "linf"]),
        ("specguard certify --meth", 2, ["--methods"]),
    ],
)
def test_the_shell_completes_commands_options_and_choices(words, cursor, completed):
    place = {"_SPECGUARD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(cursor)}
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['specguard']; import specguard.cli; specguard.cli.main()"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **place},
    )
    assert ended.stdout.split() == completed


def test_the_table_of_models_is_current():
    source = Path(__file__).resolve().parents[2] / "docs" / "models.py"
    spec = importlib.util.spec_from_file_location("table_of_models", source)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.FILE.read_bytes() == tables.table(), "python docs/models.py writes it anew"


def test_options_of_models_are_refused_where_they_have_no_effect(specguard, run):
    values = {
        "weights": "w.pt",
        "classes": "3",
        "image_size": "8",
        "mean": "0.5",
        "std": "0.5",
        "model_arg": "depth=1",
    }
    assert set(values) == set(options_of(ModelOptions))
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        specguard("certify", run, flag, value).refuses(flag, "has no effect on a run directory")
