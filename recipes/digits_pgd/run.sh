#!/usr/bin/env bash
# Embedded digits, the tiny ViT: standard training and PGD adversarial training at linf 0.1, then PGD-20 and the full
# suite on all 360 test images. A few minutes on two cores.
# Usage: run.sh [RUNS]     PYTHON names the interpreter that has specguard.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
runs=${1:-runs/digits_pgd}
for row in plain pgd; do
    resume=$([ -e "$runs/$row/run.json" ] && echo --resume || true)
    objective=$([ "$row" = pgd ] && echo "--objective pgd --radius 0.1 --inner-steps 5 --ramp 10 --validate 100" || true)
    specguard train --run "$runs/$row" $resume $objective --model tiny --data digits --epochs 40 --batch 64 --lr 1e-3 \
        --warmup 5 --device cpu --seed 0
    specguard attack "$runs/$row" --attack pgd --steps 20 --radius 0.1 --device cpu --out "$runs/$row/pgd"
    specguard attack "$runs/$row" --suite full --radius 0.1 --device cpu --out "$runs/$row/full"
done
