"""Execute notebooks and store them with their outputs, or a small version of one elsewhere.

python notebooks/execute.py                            all of them, in place
python notebooks/execute.py --small --to FILE NAME     one of them, on less, into another file
"""

import argparse
import hashlib
import os
import re
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

from specguard.records.zoo import zoo_card

FOLDER = Path(__file__).resolve().parent
# What libraries say about the machine is no part of a notebook.
QUIET = "ignore:torchvision does not fit this torch:UserWarning,ignore:IProgress not found"


def sources(notebook: Any) -> str:
    """A hash of all code and of the models of the zoo in it, which the metadata of an executed notebook hold."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    code += [zoo_card(name).fingerprint for name in re.findall(r'from_zoo\("([^"]+)"\)', "\n".join(code))]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def executed(path: Path, *, small: bool = False) -> Any:
    """The notebook with the outputs of a fresh kernel; a cell that raises is an error."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "SPECGUARD_SMALL"}
        environment |= {"PYTHONWARNINGS": QUIET, "IPYTHONDIR": folder, "JUPYTER_RUNTIME_DIR": folder}
        if small:
            environment["SPECGUARD_SMALL"] = "1"
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources=resources, coalesce_streams=True
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata["specguard"] = {"sources": sources(notebook)}
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks, by the names of their files")
    parser.add_argument("--small", action="store_true", help="on less data, as the tests do")
    parser.add_argument("--to", type=Path, help="the file for the result, of one notebook")
    options = parser.parse_args()
    paths = [FOLDER / f"{name}.ipynb" for name in options.names] or sorted(FOLDER.glob("*.ipynb"))
    if options.to is not None and len(paths) != 1:
        sys.exit("--to takes one notebook")
    if options.small and options.to is None:
        sys.exit("--small needs --to: the outputs in the repository are those of the whole")
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of the libraries that run notebooks
    for path in paths:
        nbformat.write(executed(path, small=options.small), options.to or path)
        print(f"executed {path.name}", flush=True)


if __name__ == "__main__":
    main()
