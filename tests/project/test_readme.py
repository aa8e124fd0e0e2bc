"""The README tells the truth: its numbers are the committed ones, its code runs, its links lead somewhere."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def tables():
    specification = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_its_tables_and_its_figure_are_those_of_the_committed_results():
    assert tables().stale() == [], "run make tables"


def test_a_number_that_was_changed_by_hand_is_noticed():
    changed = TEXT.replace("n = 10,000", "n = 10,001", 1)
    assert changed != TEXT
    assert tables().with_tables(changed) != changed


def test_its_python_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})
    assert (tmp_path / "runs" / "first" / "result.json").exists()


def test_its_links_to_files_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
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
    assert record["settings"]["model"] == result["fingerprint"], "the model that was trained is the one studied"
    assert record["settings"]["seed"] is not None
    assert record["n"] == record.get("clean", record)["n"] > 0
    assert record["n"] == sum(row["n"] for row in record.get("per_class", [{"n": record["n"]}]))
