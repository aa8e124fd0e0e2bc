#!/usr/bin/env bash
# The networks of the zoo that no other recipe has committed results of: digits-certified, the row shift-0 of digits_shift;
# and cifar10-timm, an ordinary ViT of timm that recipes/relational/converted.py trains, under PGD-20 in l2 on all test
# images of CIFAR-10 and certified by zonotope on the first 50. All claims are proved again by the independent checker.
# Usage: run.sh DATA_ROOT [RUNS [NAME...]]     a NAME is digits-certified or cifar10-timm; none given: both.
# DATA_ROOT holds cifar-10-batches-py. PYTHON names the interpreter that has specguard. Killed, it continues.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1 runs=${2:-runs/zoo}
names=("${@:3}")
[ ${#names[@]} -gt 0 ] || names=(digits-certified cifar10-timm)
for name in "${names[@]}"; do
    if [ "$name" = digits-certified ]; then
        run env "PYTHON=${PYTHON:-python3}" bash "$here/../digits_shift/run.sh" "$runs/digits" shift-0
        place=$runs/digits/shift-0 first=result
    else
        given=(--data-root "$data" --device cpu)
        specguard attack "zoo:$name" "${given[@]}" --attack pgd --steps 20 --norm l2 --radius 0.005,0.01,0.1 \
            --no-diagnose --batch 500 --out "$runs/$name/attack"
        specguard certify "zoo:$name" "${given[@]}" --radius 0.005,0.01 --methods zonotope --no-search \
            --images 50 --batch 10 --out "$runs/$name/proofs"
        again=$([ -e "$runs/$name/checked/records.jsonl" ] && echo --resume || true)
        specguard check "$runs/$name/proofs" --model "zoo:$name" "${given[@]}" --out "$runs/$name/checked" $again
        place=$runs/$name first=attack/summary
    fi
    run cp "$place/$first.json" "$here/$name-${first%/summary}.json"
    run cp "$place/proofs/summary.json" "$here/$name-certificates.json"
    run cp "$place/checked/summary.json" "$here/$name-checked.json"
done
