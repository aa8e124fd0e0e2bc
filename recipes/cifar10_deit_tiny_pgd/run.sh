#!/usr/bin/env bash
# CIFAR-10, DeiT-Ti at 32 pixels, patch 4, from scratch, PGD adversarial training at linf 8/255: plain, and with
# MSVP 1e-4 on q, k and v. Then PGD-20 and CW-20 on all test images, and with AutoAttack on the first 1000.
# Usage: run.sh DATA_ROOT [RUNS [ROW...]]     DATA_ROOT holds cifar-10-batches-py.
# PYTHON names the interpreter that has specguard. Killed, it continues where it was when started again.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1 runs=${2:-runs/cifar10_deit_tiny_pgd}
rows=("${@:3}")
for row in "${rows[@]:-plain msvp}"; do for row in $row; do
    resume=$([ -e "$runs/$row/run.json" ] && echo --resume || true)
    penalty=$([ "$row" = msvp ] && echo "--penalty msvp --lambda-q 1e-4 --lambda-k 1e-4 --lambda-v 1e-4" || true)
    specguard train --run "$runs/$row" $resume $penalty \
        --model deit_tiny_patch4_32 --data cifar10 --data-root "$data" --epochs 60 --batch 512 \
        --objective pgd --norm linf --radius 8/255 --inner-steps 5 --inner-step-size 2.5/255 --ramp 10 \
        --optimizer adamw --lr 1e-3 --weight-decay 0.05 --warmup 5 --ema 0.999 --validate 1000 \
        --crop 4 --flip --precision bfloat16 --compile reduce-overhead --seed 0
    attack=(attack "$runs/$row" --data-root "$data" --norm linf --radius 8/255)
    specguard "${attack[@]}" --attack pgd --attack cw --steps 20 --step-size 2/255 --batch 1000 --out "$runs/$row/pgd"
    specguard "${attack[@]}" --suite autoattack --images 1000 --batch 500 --no-diagnose --out "$runs/$row/autoattack"
done; done
