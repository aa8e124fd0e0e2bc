"""Optional libraries beside a torchvision that was built for another torch."""

import os
import subprocess
import sys

import pytest

BUILT_FOR_ANOTHER = """
import torch
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    pass
"""


def imported(code, folder, source):
    """What a new process prints that imports this torchvision."""
    (folder / "torchvision.py").write_text(source)
    whole = f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("source", ["", BUILT_FOR_ANOTHER, "raise RuntimeError('of its own')"])
def test_a_torchvision_without_its_operators_is_repaired_once_with_a_warning(source, tmp_path):
    code = "from specguard.models.library import library; library('numpy'); library('scipy'); import torchvision"
    ended = imported(code, tmp_path, source)
    fits = "of its own" not in source
    assert (ended.returncode == 0) == fits, ended.stderr
    repaired = source == BUILT_FOR_ANOTHER
    assert ended.stderr.count("torchvision does not fit this torch") == repaired
    assert fits or "of its own" in ended.stderr


def test_a_command_says_so_in_one_line_and_once(tmp_path):
    (tmp_path / "torchvision.py").write_text(BUILT_FOR_ANOTHER)
    (tmp_path / "mine.py").write_text("import torchvision\n")
    words = ["-m", "specguard", "attack", "mine:build", "--data", "digits"]
    ended = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    first, second = ended.stderr.splitlines()
    assert first == "warning: torchvision does not fit this torch: its own operators cannot be used"
    assert second.startswith("Error: mine has no 'build'")
