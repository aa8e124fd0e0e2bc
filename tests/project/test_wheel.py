"""The wheel, installed where nothing of the source tree can be seen, is the whole program."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specguard import __version__
from specguard.records.io import read_json

ROOT = Path(__file__).resolve().parents[2]


def output(*command: object, cwd: Path) -> str:
    """What a command prints; its failure is the test's."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "SPECGUARD_COMMIT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = [str(word) for word in command]
    ended = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, f"{' '.join(words)} failed:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    output(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Iterator[Path]:
    """The bin folder of a fresh environment with the wheel and what it declares to need."""
    folder = tmp_path_factory.mktemp("installed")
    output(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    output(folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    yield folder / "venv" / "bin"
    shutil.rmtree(folder)  # more than a gigabyte


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    assert wheel.name == f"specguard-{__version__}-py3-none-any.whl"
    source = ROOT / "src" / "specguard"
    files = [*source.rglob("*.py"), *source.glob("report/html/templates/*"), source / "py.typed"]
    expected = {f"specguard/{p.relative_to(source)}" for p in files}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if not name.startswith(f"specguard-{__version__}.dist-info/")} == expected
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.slow
def test_the_installed_wheel_is_itself_typed_and_declares_all_it_imports(installed, tmp_path):
    """The tests' own packages are not there, so an import that is not declared fails."""
    code = (
        "import importlib, pkgutil, specguard, pathlib; "
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(specguard.__path__, 'specguard.') "
        "if not m.name.endswith('__main__')]; "
        "print(pathlib.Path(specguard.__file__).parent)"
    )
    package = Path(output(installed / "python", "-W", "error::ImportWarning", "-c", code, cwd=tmp_path).strip())
    assert package.is_relative_to(installed.parent)
    assert (package / "py.typed").exists()
    freeze = output(installed / "python", "-m", "pip", "list", "--format", "freeze", cwd=tmp_path)
    assert not {"pytest", "beartype", "timm"} & {line.partition("==")[0] for line in freeze.splitlines()}


@pytest.mark.slow
def test_the_installed_command_says_its_version_and_trains(installed, tmp_path):
    assert output(installed / "specguard", "--version", cwd=tmp_path) == f"specguard {__version__}\n"
    options = ("--run", "run", "--epochs", "1", "--device", "cpu", "--penalty", "msvp")
    assert "test accuracy" in output(installed / "specguard", "train", *options, cwd=tmp_path)
    result = read_json(tmp_path / "run" / "result.json")
    assert result["test_accuracy"]["n"] == 360
    assert result["environment"]["versions"]["specguard"] == __version__
    assert "commit" not in result["environment"]  # outside a source tree there is none to name
