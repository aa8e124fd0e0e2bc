"""Compiled training is the same training. In processes of its own: torch.compile cannot trace the type checker."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONS = (
    "--epochs 2 --batch 256 --lr 3e-3 --warmup 0 --set depth=2 --sam 0.05 --ema 0.9 "
    "--penalty msvp --lambda-q 1e-2 --lambda-o 1e-3 --penalty spectral --spectral 1e-4 --device cpu"
)


def metrics(run: Path, *extra: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "specguard", "train", "--run", str(run), *OPTIONS.split(), *extra]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra", [("--compile", "default", "--accumulate", "2"), ("--compile", "reduce-overhead")], ids=" ".join
)
def test_compiled_training_gives_the_metrics_of_eager_training(extra, tmp_path):
    eager, compiled = metrics(tmp_path / "eager"), metrics(tmp_path / "compiled", *extra)
    assert len(eager) == len(compiled) == 2
    for a, b in zip(eager, compiled, strict=True):
        for name in ("loss", "penalty", "test_loss", "ema_test_loss"):
            assert a[name] == pytest.approx(b[name], rel=1e-3), name
