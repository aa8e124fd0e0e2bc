#!/usr/bin/env bash
# Embedded digits, 16 tokens and four blocks of an orthogonal map, a bias per token and MaxMin, trained by EMMA: tokens of 64
# channels exchange channels by a cyclic shift or not at all, three seeds each; those of 72 by dot-product attention that
# starts as the shift, beside the shift, one seed. Certified on all 360 test images beside an attack and a linear
# classifier, and checked by the independent checker. A minute or two a row. Beyond 1024 entries, tokens x channels, bounds
# of attention form no matrices of that size, which 64 channels reach: there a proof takes seconds an image.
# Usage: run.sh [RUNS [ROW...]]     a ROW is MIXING-SEED, such as shift-0; MIXING is shift, none, wide or attention.
# PYTHON names the interpreter that has specguard. Killed, it continues.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
runs=${1:-runs/digits_shift}
rows=("${@:2}")
[ ${#rows[@]} = 0 ] && rows=({shift,none}-{0,1,2} {wide,attention}-0)
for row in "${rows[@]}"; do
    run=$runs/$row mixing=${row%-*} seed=${row#*-}
    model=digits_shift change=()
    [ "$mixing" = none ] && change=(--set mixing=none)
    [ "$mixing" = wide ] && change=(--set dim=72)
    [ "$mixing" = attention ] && model=digits_attention change=(--set dim=72)
    resume=$([ -e "$run/run.json" ] && echo --resume || true)
    specguard train --run "$run" $resume --model "$model" "${change[@]}" --data digits --epochs 90 --batch 128 \
        --optimizer adamw --lr 1e-2 --weight-decay 0 --schedule onecycle --clip 0 --objective emma --norm l2 \
        --radius 0.2 --ramp 30 --lipschitz 1 --device cpu --seed "$seed"
    specguard certify "$run" --curve 0.05,0.1,0.15,0.2,0.3 --stop-early --methods lofast,local --baseline linear \
        --device cpu --out proofs
    again=$([ -e "$run/checked/records.jsonl" ] && echo --resume || true)
    specguard check "$run/proofs" --model "$run" --device cpu --out "$run/checked" $again
done
