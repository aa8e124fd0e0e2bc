"""The examples run as they stand, and are as short as they say."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = {"certify_timm.py": 40, "msvp_in_your_script.py": 60, "train_attack_certify_report.py": 60}
SAYS = {
    "certify_timm.py": ["image 0: no change of up to", "most is lost by"],
    "msvp_in_your_script.py": ["epoch 2: loss", "largest singular value of q, k and v:"],
    "train_attack_certify_report.py": [" unknown, of 60", "report in runs/example/report.html"],
}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == LINES.keys()


@pytest.mark.parametrize("name", LINES)
def test_an_example_runs(name, timm, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    assert len((EXAMPLES / name).read_text().splitlines()) < LINES[name]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    assert all(text in said for text in SAYS[name])
