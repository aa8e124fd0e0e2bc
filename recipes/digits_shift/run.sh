#!/usr/bin/env bash
# Embedded digits, 16 tokens of 64 channels and four blocks of an orthogonal map, a bias per token and MaxMin, trained by
# EMMA: tokens exchange channels by a cyclic shift, by dot-product attention that starts as this shift, or not at all.
# Three seeds each, certified on all 360 test images beside an attack and a linear classifier, and checked by the
# independent checker. A minute a row on two cores without attention; proofs through attention take longer.
# Usage: run.sh [RUNS [ROW...]]     a ROW is MIXING-SEED, such as shift-0; MIXING is none, shift or attention; none: all.
# PYTHON names the interpreter that has specguard. Killed, it continues.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
runs=${1:-runs/digits_shift}
rows=("${@:2}")
[ ${#rows[@]} = 0 ] && rows=({shift,none,attention}-{0,1,2})
for row in "${rows[@]}"; do
    run=$runs/$row mixing=${row%-*} seed=${row#*-}
    model=digits_shift change=()
    [ "$mixing" = none ] && change=(--set mixing=none)
    [ "$mixing" = attention ] && model=digits_attention
    resume=$([ -e "$run/run.json" ] && echo --resume || true)
    specguard train --run "$run" $resume --model "$model" "${change[@]}" --data digits --epochs 90 --batch 128 \
        --optimizer adamw --lr 1e-2 --weight-decay 0 --schedule onecycle --clip 0 --objective emma --norm l2 \
        --radius 0.2 --ramp 30 --lipschitz 1 --device cpu --seed "$seed"
    specguard certify "$run" --curve 0.05,0.1,0.15,0.2,0.3 --stop-early --methods lofast,local --baseline linear \
        --device cpu --out proofs
    again=$([ -e "$run/checked/records.jsonl" ] && echo --resume || true)
    specguard check "$run/proofs" --model "$run" --device cpu --out "$run/checked" $again
done
