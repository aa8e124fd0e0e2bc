#!/usr/bin/env bash
# CIFAR-10, DeiT-Ti at 32 pixels, patch 4, from scratch, standard training: plain, and with MSVP 1e-4 on q, k and v.
# Usage: run.sh DATA_ROOT [RUNS]     DATA_ROOT holds cifar-10-batches-py; about 3 minutes a row on an H200.
# PYTHON names the interpreter that has specguard. Killed, it continues where it was when started again.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1 runs=${2:-runs/cifar10_deit_tiny}
for row in plain msvp; do
    resume=$([ -e "$runs/$row/run.json" ] && echo --resume || true)
    penalty=$([ "$row" = msvp ] && echo "--penalty msvp --lambda-q 1e-4 --lambda-k 1e-4 --lambda-v 1e-4" || true)
    specguard train --run "$runs/$row" $resume $penalty \
        --model deit_tiny_patch4_32 --data cifar10 --data-root "$data" --epochs 100 --batch 512 \
        --optimizer adamw --lr 1e-3 --weight-decay 0.05 --warmup 5 --label-smoothing 0.1 \
        --crop 4 --flip --mixup 0.8 --cutmix 1.0 --mix-probability 0.5 \
        --precision bfloat16 --compile reduce-overhead --seed 0
done
