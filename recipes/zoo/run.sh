#!/usr/bin/env bash
# The ordinary ViT of timm in the zoo, which recipes/relational/converted.py trains: PGD-20 in l2 on all test images of
# CIFAR-10, and certificates by zonotope of the first 50, all proved again by the independent checker.
# Usage: run.sh DATA_ROOT [RUNS]     DATA_ROOT holds cifar-10-batches-py.
# PYTHON names the interpreter that has specguard. Killed, it continues.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1 runs=${2:-runs/zoo}
name=cifar10-timm
given=(--data-root "$data" --device cpu)
specguard attack "zoo:$name" "${given[@]}" --attack pgd --steps 20 --norm l2 --radius 0.005,0.01,0.1 \
    --no-diagnose --batch 500 --out "$runs/$name/attack"
specguard certify "zoo:$name" "${given[@]}" --radius 0.005,0.01 --methods zonotope --no-search \
    --images 50 --batch 10 --out "$runs/$name/proofs"
again=$([ -e "$runs/$name/checked/records.jsonl" ] && echo --resume || true)
specguard check "$runs/$name/proofs" --model "zoo:$name" "${given[@]}" --out "$runs/$name/checked" $again
run cp "$runs/$name/attack/summary.json" "$here/$name-attack.json"
run cp "$runs/$name/proofs/summary.json" "$here/$name-certificates.json"
run cp "$runs/$name/checked/summary.json" "$here/$name-checked.json"
