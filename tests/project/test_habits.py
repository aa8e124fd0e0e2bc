"""The files beside the code that other programs read: citation, hooks, workflow, image and templates."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from specguard import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def loaded(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def uncommented(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


# Citation --------------------------------------------------------------------------------------------------------

REQUIRED = {"cff-version", "message", "title", "authors"}
OPTIONAL = {"abstract", "type", "version", "license", "keywords", "date-released", "doi", "url", "repository-code"}


def test_the_citation_has_the_fields_of_the_citation_file_format():
    citation = loaded("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation.keys() >= REQUIRED
    assert citation.keys() <= REQUIRED | OPTIONAL
    assert citation["type"] == "software"
    assert all(isinstance(citation[name], str) for name in citation.keys() - {"authors", "keywords"})


def test_the_citation_agrees_with_the_package():
    citation, project = loaded("CITATION.cff"), PROJECT["project"]
    assert citation["version"] == __version__
    assert citation["authors"] == project["authors"]
    assert citation["license"] == project["license"]
    assert citation["keywords"] == project["keywords"]
    assert citation["abstract"] == project["description"]


# Continuous integration and hooks --------------------------------------------------------------------------------


def test_the_workflow_runs_what_continuous_integration_runs_and_nothing_else():
    workflow = loaded(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as true
    assert job["runs-on"].startswith("ubuntu")
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    actions = [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
    assert actions == ["actions/checkout", "actions/setup-python"]
    (python,) = [step["with"] for step in job["steps"] if "with" in step]
    assert python["python-version"] == PROJECT["project"]["requires-python"].removeprefix(">=")
    assert python["cache"] == "pip"
    assert all((ROOT / name).exists() for name in python["cache-dependency-path"].split())


def test_ci_checks_and_tests():
    assert uncommented(".ci/run")[-3:] == ["make browser", "make check", "make test"]


def test_hooks_run_the_pinned_ruff_as_make_check_does():
    (repository,) = loaded(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: shlex.split(hook["entry"]) for hook in repository["hooks"]}
    assert {name: words[:2] for name, words in hooks.items()} == {
        "ruff-format": [".venv/bin/ruff", "format"],
        "ruff-check": [".venv/bin/ruff", "check"],
    }
    makefile = (ROOT / "Makefile").read_text()
    assert "BIN    := .venv/bin\n" in makefile
    assert {f"ruff {words[1]}" for words in hooks.values()} == set(re.findall(r"\$\(BIN\)/(ruff \w+)", makefile))
    assert any(line.startswith("ruff==") for line in uncommented("constraints.txt"))


# The image -------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in uncommented("Dockerfile"))]


def copied() -> list[str]:
    """What the image takes from the repository, to a place of the same name."""
    names = []
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = [word for word in rest.split() if not word.startswith("--")]
            assert target == "./" or [target] == [f"./{source}" for source in sources]
            names += sources
    return names


def test_the_image_runs_the_demo_as_an_ordinary_user():
    found = instructions()
    assert found[0][0] == "FROM"
    assert re.fullmatch(r"python:3\.11-slim", found[0][1])
    assert found[-1] == ("CMD", '["make", "demo"]')
    (user,) = [rest for name, rest in found if name == "USER"]
    assert user != "root"
    assert ("RUN", f"useradd --create-home {user}") in found
    assert [name for name, _ in found].index("USER") < [name for name, _ in found].index("COPY")


def test_the_image_holds_all_that_the_package_is_built_from():
    project, build = PROJECT["project"], PROJECT["tool"]["hatch"]
    (package,) = build["build"]["targets"]["wheel"]["packages"]
    needed = [project["readme"], *project["license-files"], build["version"]["path"], package, "pyproject.toml"]
    for name in needed:
        assert any(Path(name).is_relative_to(source) for source in copied()), name
    assert [line for line in uncommented(".dockerignore") if line.startswith("!")] == [f"!{n}" for n in copied()]
    assert uncommented(".dockerignore")[0] == "*"


@pytest.mark.parametrize("lost", [None, "Makefile", "pyproject.toml", "constraints.txt"])
def test_make_knows_how_to_run_the_demo_from_what_the_image_holds(lost, tmp_path):
    for name in copied():
        if (ROOT / name).is_file() and name != lost:
            shutil.copy(ROOT / name, tmp_path / name)
    words = ["make", "--no-print-directory", "-n", "demo"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode == 0) == (lost is None), ended.stderr
    if lost is None:
        assert ended.stdout.splitlines()[-1] == ".venv/bin/specguard demo"


# Templates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bug", "question"])
def test_a_template_of_an_issue_has_a_name_and_a_purpose(name):
    _, head, body = (ROOT / f".github/ISSUE_TEMPLATE/{name}.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head).keys() == {"name", "about", "labels"}
    assert 1 <= len(body.strip().splitlines()) <= 12


def test_the_template_of_a_pull_request_asks_for_what_contributing_asks_for():
    text = (ROOT / ".github/pull_request_template.md").read_text()
    for named in ("`make check`", "`make test`", "CHANGELOG"):
        assert named in text
        assert named in (ROOT / "CONTRIBUTING.md").read_text()
