#!/usr/bin/env bash
# SST-2, LoFAST's appendix D: encoders of 64 dimensions and at most 32 words, 3 and 6 blocks, the norm of W^V and W^O
# held at 0.25, 0.5 and 0.75, trained from scratch with their word embeddings. LoFAST's and the local proofs beside an
# attack on the embeddings of the first IMAGES dev sentences (872, all of them, if not set); then the proofs of the first
# CHECKED sentences (20) once more by the independent checker. METHODS=lofast,local,adjoint,mixed takes four times as long
# and certified no sentence more. Some minutes on one core for each, and as long for the independent checker. Killed, it
# continues where it was.
# Usage: run.sh SST2 [RUNS [NAME...]]     SST2 holds train.tsv and dev.tsv; PYTHON names the interpreter that has
# specguard; a NAME is BLOCKS-NORM-HEADS, such as 3-0.25-4; without blocks it is a linear classifier.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1 runs=${2:-runs/sst2_certified} images=${IMAGES:-872} checked=${CHECKED:-20}
shift $(($# < 2 ? $# : 2))
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(0-0.5-4 3-0.25-4 3-0.5-4 3-0.75-4 6-0.25-4 6-0.5-4 6-0.75-4)
certify() { # RUN SENTENCES
    specguard certify "$1" --data-root "$data" --curve 0.02,0.05,0.1,0.2,0.4 --no-search \
        --methods "${METHODS:-lofast,local}" --images "$2" --batch 218 --out "proofs-$2"
}
for name in "${names[@]}"; do
    IFS=- read -r depth norm heads <<<"$name"
    run=$runs/$name
    resume=$([ -e "$run/run.json" ] && echo --resume || true)
    specguard train --run "$run" $resume --model text_small --data sst2 --data-root "$data" \
        --set "depth=$depth" --set "value_norm=$norm" --set "heads=$heads" \
        --epochs 2 --batch 256 --lr 3e-3 --warmup 0.5 --checkpoint-steps 50 --seed 0
    certify "$run" "$images"
    run mkdir -p "$here/$name"
    run cp "$run/result.json" "$run/metrics.jsonl" "$here/$name/"
    run cp "$run/proofs-$images/summary.json" "$here/$name/certificates.json"
done
for name in "${names[@]}"; do
    run=$runs/$name
    [ "$checked" -gt 0 ] || continue
    certify "$run" "$checked"
    again=$([ -e "$run/checked/records.jsonl" ] && echo --resume || true)
    specguard check "$run/proofs-$checked" --model "$run" --data-root "$data" --out "$run/checked" $again
    run cp "$run/checked/summary.json" "$here/$name/checked.json"
done
