#!/usr/bin/env bash
# Embedded digits, the tiny ViT: standard training, training under Gaussian noise, and noise with consistency
# regularization, each certified by randomized smoothing with the noise of the training, on all 360 test images.
# Some ten minutes on two cores.
# Usage: run.sh [RUNS]     PYTHON names the interpreter that has specguard.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
runs=${1:-runs/digits_smoothing}
for row in plain noise consistency; do
    resume=$([ -e "$runs/$row/run.json" ] && echo --resume || true)
    objective=$([ "$row" = plain ] && echo "--objective standard" || echo "--objective $row --sigma 0.25")
    specguard train --run "$runs/$row" $resume $objective --model tiny --data digits --epochs 40 --batch 64 --lr 1e-3 \
        --warmup 5 --device cpu --seed 0
    specguard smooth "$runs/$row" --sigma 0.25 --samples 1000 --radius 0,0.1,0.25,0.4,0.5 --device cpu --out smooth
done
