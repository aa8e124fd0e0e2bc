#!/usr/bin/env bash
# Vision transformers as people have them, certified by `zonotope` in l2 and linf: the largest certified radius of
# every image, APGD at that radius, which must fail, the independent checker's proof of the same claim, what limits the
# radius, and the distance at which attacks succeed. The other methods' l2 radii stand beside it.
# The rows digits-weak, digits-strong, cifar10-l2 and cifar10-linf are networks that were trained for certificates, with
# fixed radii: what all methods certify with zonotopes, beside what they certify without.
# A row takes from two minutes (pgd_2_3_16) to some hours (digits-plain, digits-adversarial) on one core. Killed, it
# continues; a row is measured anew in another folder of RUNS. Rows of one network may be divided, see measure.py.
# Usage: run.sh DATA [RUNS [ROW...]]     a ROW is one of those below; none given: all.
# DATA holds cifar-10-batches-py, the files of MNIST in mnist, pgd_2_3_16.onnx of VNN-COMP 2023's ViT benchmark, and
# DeepT's weights for MNIST as mnist_transformer.safetensors. PYTHON names the interpreter that has specguard.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1 runs=${2:-runs/relational}
rows=("${@:3}")
[ ${#rows[@]} -gt 0 ] || rows=(pgd_2_3_16 deept digits-plain digits-adversarial timm-trained timm-initial
    huggingface-trained huggingface-initial digits-weak digits-strong cifar10-l2 cifar10-linf)
for row in "${rows[@]}"; do
    case $row in
        digits-weak | digits-strong | cifar10-*) study=added ;;
        *) study=measure ;;
    esac
    python -m "relational.$study" "$row" "$data" "$runs"
    run cp "$runs/$row/summary.json" "$here/$row.json"
done
