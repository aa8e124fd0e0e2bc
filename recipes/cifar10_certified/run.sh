#!/usr/bin/env bash
# CIFAR-10, 64 tokens, three blocks of dot-product attention whose skip lies inside the value space, orthogonal maps and
# MaxMin, trained by EMMA: certified on the first 1,000 test images and checked by the independent checker. Beside it the
# same network without attention, and the trained one with every attention map replaced by its mean over the data.
# Usage: run.sh DATA_ROOT [RUNS [ROW...]]     a ROW is attention or none; none given: both.
# DATA_ROOT holds cifar-10-batches-py. PYTHON names the interpreter that has specguard. Killed, it continues.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1 runs=${2:-runs/cifar10_certified}
rows=("${@:3}")
[ ${#rows[@]} = 0 ] && rows=(attention none)
for row in "${rows[@]}"; do
    run=$runs/$row
    mixing=$([ "$row" = none ] && echo none || echo skip)
    resume=$([ -e "$run/run.json" ] && echo --resume || true)
    specguard train --run "$run" $resume --model certifiable_patch4_32 --set mixing=$mixing \
        --data cifar10 --data-root "$data" --epochs 30 --batch 256 --optimizer adamw --lr 2e-3 --weight-decay 0 \
        --objective emma --norm l2 --radius 0.2 --ramp 15 --lipschitz local --crop 2 --flip --seed 0
    specguard certify "$run" --data-root "$data" --curve 0.02,0.05,0.1,36/255,0.25 --methods lofast,local \
        --no-search --baseline linear --images 1000 --batch 100 --out proofs
    again=$([ -e "$run/checked/records.jsonl" ] && echo --resume || true)
    specguard check "$run/proofs" --model "$run" --data-root "$data" --out "$run/checked" $again
done
if [[ -e $runs/attention/result.json || (-n $dry && " ${rows[*]} " = *" attention "*) ]]; then
    python "$here/attention_use.py" "$runs/attention" "$data" "$runs/mean_attention"
fi
