#!/usr/bin/env bash
# Embedded digits, one smooth block of dot-product attention with its spectral norms penalized, weakly and strongly:
# proofs of every method beside an attack on all 360 test images, all of them checked by the independent checker, and a
# linear classifier, certified exactly, as the baseline that a certificate has to beat. Some minutes on two cores,
# most of them the checker's.
# Usage: run.sh [RUNS]     PYTHON names the interpreter that has specguard.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
runs=${1:-runs/digits_certified}
curve=0.01,0.02,0.035,0.05,0.075,0.1,0.125,0.15,0.2,0.25
for row in weak strong; do
    resume=$([ -e "$runs/$row/run.json" ] && echo --resume || true)
    spectral=$([ "$row" = weak ] && echo 0.03 || echo 0.1)
    specguard train --run "$runs/$row" $resume --model tiny_smooth --data digits --epochs 60 --batch 64 --lr 3e-3 \
        --penalty spectral --spectral "$spectral" --device cpu --seed 0
    specguard certify "$runs/$row" --curve "$curve" --device cpu --out proofs
    again=$([ -e "$runs/$row/checked/records.jsonl" ] && echo --resume || true)
    specguard check "$runs/$row/proofs" --model "$runs/$row" --device cpu --out "$runs/$row/checked" $again
done
python "$here/linear.py" "$curve" "$runs/linear.json"
