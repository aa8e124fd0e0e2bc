#!/usr/bin/env bash
# The eight tiny models of "ViT as a Cauchy problem" on CIFAR-10: SAM on SGD with a one-cycle schedule, flips, crops and
# color jitter as there; then PGD-20 in l2 on all test images, and the spectra of all blocks at 500 of them. When all rows
# are done, it prints what of the paper shows at 32 pixels.
# Usage: run.sh DATA_ROOT [RUNS [ROW...]]     a ROW is MODEL-SEED, such as vit_t1_patch4_32-0; none: all of them.
# DATA_ROOT holds cifar-10-batches-py. Rows may run side by side. PYTHON names the interpreter that has specguard.
# Killed, it continues where it was when started again. It wants a GPU; EPOCHS=2 COMPILE= tries a row on a CPU.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1 runs=${2:-runs/cifar10_cauchy}
rows=("${@:3}")
compile=${COMPILE-reduce-overhead}
if [ ${#rows[@]} = 0 ]; then
    for seed in 0 1; do
        for net in vit_t1 vit_t2 vit_t3 vit_t4 covit_t1 covit_t2 covit_t3 covit_t4; do rows+=("${net}_patch4_32-$seed"); done
    done
    rows+=(vit_t3_patch16_224-0 covit_t3_patch16_224-0)
fi
for row in "${rows[@]}"; do
    run=$runs/$row epochs=${EPOCHS:-100}
    case $row in *_224-*) epochs=${EPOCHS:-30} ;; esac
    resume=$([ -e "$run/run.json" ] && echo --resume || true)
    specguard train --run "$run" $resume --model "${row%-*}" --seed "${row##*-}" \
        --data cifar10 --data-root "$data" --epochs $epochs --batch 256 \
        --optimizer sgd --lr 0.1 --weight-decay 5e-4 --schedule onecycle --sam 0.05 \
        --crop 4 --flip --jitter 0.2 --precision bfloat16 ${compile:+--compile "$compile"}
    specguard attack "$run" --data-root "$data" --attack pgd --steps 20 --norm l2 --radius 0.25 --radius 0.5 \
        --batch 1000 --out "$run/pgd"
    specguard spectrum "$run" --data-root "$data" --images 500 --batch 500 --directions 4 --out spectrum
done
if [ $# -lt 3 ]; then
    python -m cauchy.claims "$runs" "*_32-*"
fi
