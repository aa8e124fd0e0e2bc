"""The notebooks run, their stored outputs are those of their code, and the site shows them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from helpers.documentation import module_of

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]


def read(path: Path):
    return nbformat.read(path, as_version=4)


def code_of(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(notebook) -> list[list[str]]:
    """The kinds of the outputs of every cell: text, or a figure."""
    return [
        sorted({"figure" if "image/png" in output.get("data", {}) else "text" for output in cell.outputs})
        for cell in code_of(notebook)
    ]


@pytest.fixture(scope="module")
def execute():
    return module_of("../notebooks/execute")


def test_there_are_the_four_notebooks():
    assert NAMES == ["attack_and_judge", "certify_my_timm_vit", "lofast_figures", "train_for_certificates"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_the_stored_outputs_are_those_of_the_code(path, execute):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata["specguard"]["sources"] == execute.sources(notebook), "execute it again"
    assert [cell.execution_count for cell in code_of(notebook)] == list(range(1, len(code_of(notebook)) + 1))
    assert any("figure" in kind for kind in kinds(notebook))
    changed = read(path)
    code_of(changed)[-1].source += "\nprint(1)"
    assert execute.sources(changed) != execute.sources(notebook)


def test_outputs_are_old_when_a_model_of_the_zoo_is_another(execute, monkeypatch):
    notebook = read(ROOT / "notebooks/attack_and_judge.ipynb")
    before = execute.sources(notebook)
    monkeypatch.setattr(execute, "zoo_card", lambda name: SimpleNamespace(fingerprint=f"another {name}"))
    assert execute.sources(notebook) != before


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_has_short_cells_no_errors_and_no_paths_of_a_machine(path):
    notebook, text = read(path), path.read_text()
    assert all(len(cell.source.splitlines()) <= 45 for cell in notebook.cells)
    assert notebook.cells[0].cell_type == "markdown"
    assert len(text) < 600_000
    for cell in code_of(notebook):
        for output in cell.outputs:
            assert output.output_type in ("stream", "display_data"), output
            shown = json.dumps(output if output.output_type == "stream" else output.data.get("text/plain", ""))
            assert output.get("name") != "stderr", output.text
            assert not re.search(r"/(tmp|home|root|work|usr|Users)\b", shown)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_runs_and_its_small_version_has_outputs_of_the_same_kinds(path, tmp_path):
    target = tmp_path / path.name
    command = [sys.executable, str(ROOT / "notebooks/execute.py"), "--small", "--to", str(target), path.stem]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    assert kinds(read(target)) == kinds(read(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_page_of_the_site_has_the_text_the_code_and_the_figures(path):
    notebook = read(path)
    text, figures = module_of("notebooks").page(path)
    assert text.startswith(notebook.cells[0].source.splitlines()[0])
    for cell in code_of(notebook):
        assert cell.source in text
    assert len(figures) == sum("figure" in kind for kind in kinds(notebook))
    assert all(f"]({name})" in text for name in figures)
    assert not re.search(r"\]\([^)]*(\.ipynb|\.\./docs/)", text)
    assert f"notebooks/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_links_of_a_notebook_lead_somewhere(path):
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#]+)\)", cell.source):
                assert (path.parent / target).exists(), target
