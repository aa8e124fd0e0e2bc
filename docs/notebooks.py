"""A hook of mkdocs: the notebooks with their stored outputs as pages, through nbconvert; nothing is executed."""

from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page notebooks/NAME.md for every notebook, and its figures."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        text, figures = page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in figures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its figures by name; links lead to the pages of the site."""
    notebook: Any = nbformat.read(path, as_version=4)
    resources = {"unique_key": path.stem, "output_files_dir": "."}
    text, found = MarkdownExporter().from_notebook_node(notebook, resources)
    text = text.replace("](../docs/", "](../").replace(".ipynb)", ".md)").replace("![png](./", "![figure](")
    figures = {name.removeprefix("./"): content for name, content in found["outputs"].items()}
    return text, figures
