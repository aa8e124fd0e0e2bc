"""The wheel, installed where nothing of the source tree can be seen, is the whole program."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def declared(wheel: Path) -> dict[str, Distribution]:
    """What pip would install with the wheel, as it is installed here: its needs, and theirs."""
    (metadata,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA")]
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    waiting = [(line.partition(": ")[2], "") for line in lines if line.startswith("Requires-Dist: ")]
    met, found = set(waiting), dict[str, Distribution]()
    while waiting:
        text, extra = waiting.pop()
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        there = distribution(need.name)
        assert need.specifier.contains(there.version, prereleases=True), f"{text}, and there is {there.version}"
        found[canonicalize_name(need.name)] = there
        for further in ((line, wanted) for line in there.requires or () for wanted in ("", *need.extras)):
            if further not in met:
                met.add(further)
                waiting.append(further)
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of a fresh environment with the wheel and links to what it declares to need, nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    output(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    output(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel,
        cwd=folder,
    )  # fmt: skip
    (place,) = (folder / "venv").glob("lib/python*/site-packages")
    for found in declared(wheel).values():
        for name in {file.parts[0] for file in found.files or () if ".." not in file.parts} - {"__pycache__"}:
            if not (place / name).exists():  # several may share a folder
                (place / name).symlink_to(Path(str(found.locate_file(name))).resolve())
    return python.parent


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    assert wheel.name == f"specguard-{__version__}-py3-none-any.whl"
    source = ROOT / "src" / "specguard"
    files = [
        *source.rglob("*.py"),
        *(path for path in source.glob("report/html/templates/**/*") if path.is_file()),
        *source.glob("zoo/*/*"),
        source / "py.typed",
        source / "cli" / "models.json",
    ]
    expected = {f"specguard/{p.relative_to(source)}" for p in files}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if not name.startswith(f"specguard-{__version__}.dist-info/")} == expected
    assert any(name.endswith("LICENSE") for name in names)
    weights = [item for item in zipfile.ZipFile(wheel).infolist() if item.filename.endswith(".safetensors")]
    assert len(weights) == len(list((source / "zoo").iterdir())) >= 2
    assert sum(item.file_size for item in weights) < 10e6


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
    code = "from importlib.metadata import distributions; [print(found.name) for found in distributions()]"
    names = set(output(installed / "python", "-c", code, cwd=tmp_path).split())
    assert names > {"specguard", "torch", "numpy"}
    assert not {"pytest", "beartype", "timm"} & names


@pytest.mark.slow
def test_the_installed_wheel_has_the_zoo(installed, tmp_path):
    assert "cifar10-certified" in output(installed / "specguard", "zoo", cwd=tmp_path)
    code = "from specguard.models import from_zoo; print(from_zoo('digits-certified').classes)"
    assert output(installed / "python", "-c", code, cwd=tmp_path) == "10\n"


@pytest.mark.slow
def test_an_import_that_is_not_declared_fails_there(installed, tmp_path):
    """Though the tests have these: what is there is decided by what the wheel declares."""
    for name in ("pytest", "beartype", "timm", "foolbox"):
        code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
        assert output(installed / "python", "-c", code, cwd=tmp_path) == "None\n"
        assert output(sys.executable, "-c", code, cwd=tmp_path) != "None\n"


@pytest.mark.slow
def test_the_installed_command_says_its_version_and_trains(installed, tmp_path):
    assert output(installed / "specguard", "--version", cwd=tmp_path) == f"specguard {__version__}\n"
    options = ("--run", "run", "--epochs", "1", "--device", "cpu", "--penalty", "msvp")
    assert "test accuracy" in output(installed / "specguard", "train", *options, cwd=tmp_path)
    result = read_json(tmp_path / "run" / "result.json")
    assert result["test_accuracy"]["n"] == 360
    assert result["environment"]["versions"]["specguard"] == __version__
    assert "commit" not in result["environment"]  # outside a source tree there is none to name
