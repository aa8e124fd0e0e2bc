#!/usr/bin/env bash
# LoFAST's Table 1 as far as the paper states it: 128 channels, patches of 16 (four tokens), 3, 4 and 5 layers of residual
# attention behind LayerProject, v and o held at norm 0.5, SLL as feed-forward part; certified by LoFAST and by the other
# methods on the same weights, first 1,000 test images of CIFAR-10. The adjoint, which takes longest, comes last.
# Usage: run.sh DATA_ROOT [RUNS [LAYERS...]]     DATA_ROOT holds cifar-10-batches-py. Killed, it continues.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1 runs=${2:-runs/cifar10_lofast}
layers=("${@:3}")
[ ${#layers[@]} = 0 ] && layers=(3 4 5)
certify() { # RUN METHODS OUT
    specguard certify "$1" --data-root "$data" --curve 0.02,0.05,0.1,36/255 --methods "$2" --no-search \
        --images 1000 --batch 100 --out "$3"
}
for depth in "${layers[@]}"; do
    run=$runs/$depth
    resume=$([ -e "$run/run.json" ] && echo --resume || true)
    specguard train --run "$run" $resume --model "lofast_${depth}_patch16_32" --data cifar10 --data-root "$data" \
        --epochs 30 --batch 256 --optimizer adamw --lr 2e-3 --weight-decay 0 \
        --objective emma --norm l2 --radius 0.1 --ramp 15 --lipschitz local --crop 2 --flip --seed 0
    certify "$run" lofast,local proofs
    certify "$run" adjoint adjoint
done
