#!/usr/bin/env bash
# The eight tiny models of "ViT as a Cauchy problem" on the embedded digits: 16 patches of 2 x 2 pixels, SAM on SGD with a
# one-cycle schedule as there, two seeds; PGD-20 in l2 and the spectra of all blocks on all 360 test images. Last it prints
# what of the paper shows. An hour on two cores, where cifar10_cauchy needs a GPU.
# Usage: run.sh [RUNS [ROW...]]     a ROW is MODEL-SEED, such as vit_t1-0; none: all of them, and then the claims.
# Rows may run side by side. PYTHON names the interpreter that has specguard. Killed, it continues.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
runs=${1:-runs/digits_cauchy}
rows=("${@:2}")
if [ ${#rows[@]} = 0 ]; then
    for seed in 0 1; do
        for net in vit_t1 vit_t2 vit_t3 vit_t4 covit_t1 covit_t2 covit_t3 covit_t4; do rows+=("$net-$seed"); done
    done
fi
for row in "${rows[@]}"; do
    run=$runs/$row
    resume=$([ -e "$run/run.json" ] && echo --resume || true)
    specguard train --run "$run" $resume --model "${row%-*}_patch4_32" --set image=8 --set patch=2 --seed "${row##*-}" \
        --data digits --epochs 200 --batch 64 --optimizer sgd --lr 0.1 --weight-decay 5e-4 --schedule onecycle \
        --sam 0.05 --crop 1 --precision bfloat16 --device cpu
    specguard attack "$run" --attack pgd --steps 20 --norm l2 --radius 0.25 --radius 0.5 --device cpu --out "$run/pgd"
    specguard spectrum "$run" --images 360 --batch 120 --device cpu --out spectrum
done
if [ $# -lt 2 ]; then
    python -m cauchy.claims "$runs"
fi
