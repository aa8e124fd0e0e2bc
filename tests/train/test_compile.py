"""Compiled training is the same training. In processes of its own: torch.compile cannot trace the type checker."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONS = (  # three whole batches, which accumulated are of 240 and 239; all that a step can have
    "--epochs 2 --batch 479 --lr 3e-3 --warmup 0 --set dim=24 --set depth=1 --sam 0.05 --ema 0.9 "
    "--penalty msvp --lambda-q 1e-2 --lambda-o 1e-3 --penalty spectral --spectral 1e-4 --device cpu"
)


def metrics(run: Path, *extra: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "specguard", "train", "--run", str(run), *OPTIONS.split(), *extra]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> list[dict[str, float]]:
    return metrics(tmp_path_factory.mktemp("eager") / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra", [("--compile", "default", "--accumulate", "2"), ("--compile", "reduce-overhead")], ids=" ".join
)
def test_compiled_training_gives_the_metrics_of_eager_training(extra, eager, tmp_path):
    compiled = metrics(tmp_path / "compiled", *extra)
    assert len(eager) == len(compiled) == 2
    for a, b in zip(eager, compiled, strict=True):
        for name in ("loss", "penalty", "test_loss", "ema_test_loss"):
            assert a[name] == pytest.approx(b[name], rel=1e-3), name
