"""The README and the pages of results: their numbers are the committed ones, code runs, links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from helpers.documentation import module_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
HEADS = ("The number", "What it is compared with", "What was won, and what was lost", "The command")


def tables():
    return module_of("tables")


def test_all_tables_and_figures_are_those_of_the_committed_results():
    assert tables().stale() == [], "run make tables"


def test_a_number_that_was_changed_by_hand_is_noticed_on_every_page():
    module = tables()
    for page, parts in module.PAGES.items():
        text = page.read_text()
        assert module.with_tables(text, parts) == text
        for name in parts:
            begin = text.index(f"<!-- {name} -->")
            digit = re.compile(r"\d").search(text, begin + len(name) + 9)
            changed = f"{text[: digit.start()]}{(int(digit[0]) + 1) % 10}{text[digit.end() :]}"
            assert module.with_tables(changed, parts) != changed, (page.name, name)


def test_every_page_of_results_says_what_was_compared_won_and_lost_and_by_which_command():
    module = tables()
    pages = set((ROOT / "docs" / "results").glob("*.md"))
    assert pages == {page for page in module.PAGES if page != module.README}
    for page in pages - {module.RESULTS / "index.md"}:
        text = page.read_text()
        places = [text.index(f"## {head}") for head in HEADS]
        assert places == sorted(places)
        assert "**Won.**" in text
        assert "**Lost.**" in text
        (command,) = re.findall(r"## The command\n\n```\n(.+?)\n```", text)
        script = next(word for word in command.split() if word.startswith(("recipes/", "benchmarks/")))
        assert (ROOT / script).exists(), script


def test_every_figure_of_a_page_is_drawn_from_results_and_every_drawn_one_is_shown():
    drawn = {figure.path.name for figure in tables().FIGURES}
    shown = {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"figures/(\w+\.svg)", page.read_text())
    }
    assert drawn == shown == {path.name for path in (ROOT / "docs" / "figures").iterdir()}


def test_it_can_be_read_as_text():
    lines = TEXT.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120


def test_its_python_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})
    assert (tmp_path / "runs" / "python" / "result.json").exists()


def test_its_links_to_files_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT) + re.findall(r"^\[\w+\]: (\S+)$", TEXT, re.MULTILINE)
    assert len(targets) > 20
    for target in targets:
        assert target.startswith("http") or (ROOT / target).exists(), target


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*/*/result.json")), ids=lambda p: p.parent.name)
def test_every_recipes_result_says_where_and_how_it_was_measured(path):
    record = json.loads(path.read_text())
    assert record["environment"]["hardware"]
    assert record["environment"]["versions"]["torch"]
    assert re.fullmatch(r"[0-9a-f]{40}\+?", record["environment"]["commit"])
    assert record["settings"]["training"]["seed"] is not None
    assert record["test_accuracy"]["n"] > 0
    metrics = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
    assert record["metrics"] == metrics[record["best"]["epoch"] - 1 if "best" in record else -1]


# A whole run may be kept, to be looked at again: these files are its own.
OF_RUNS = {"result.json", "run.json", "arguments.json", "model.json"}
STUDIES = [p for p in sorted(ROOT.glob("recipes/*/*/*.json")) if p.name not in OF_RUNS]


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_study_of_a_recipe_says_where_and_how_it_was_made(path):
    record = json.loads(path.read_text())
    result = json.loads((path.parent / "result.json").read_text())
    assert record["environment"]["hardware"]
    assert re.fullmatch(r"[0-9a-f]{40}\+?", record["environment"]["commit"])
    study = record.get("study", {})  # earlier versions had all of it in the settings
    about, settings = study.get("about", record.get("settings")), study.get("settings", record.get("settings"))
    assert about["model"] == result["fingerprint"], "the model that was trained is the one studied"
    assert settings["seed"] is not None
    assert record["n"] == record.get("clean", record)["n"] > 0
    assert record["n"] == sum(row["n"] for row in record.get("per_class", [{"n": record["n"]}]))
