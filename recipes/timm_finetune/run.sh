#!/usr/bin/env bash
# The way of a user of timm, on photos of CIFAR-10: from a checkpoint, a vision transformer of three blocks, over an attack,
# robust fine-tuning and an attack again to a checkpoint that timm loads. Some minutes on two cores.
# Usage: run.sh DATA [RUNS]     DATA holds cifar-10-batches-py; PYTHON names the interpreter that has specguard.
set -euo pipefail
. "$(dirname "$0")/../common.sh"
data=$1
runs=${2:-runs/timm_finetune}
recipe() { python -m timm_finetune "$@"; }
vit=(--model-arg patch_size=8 --model-arg embed_dim=64 --model-arg depth=3 --model-arg num_heads=4
    --model-arg mlp_ratio=2 --image-size 32 --mean 0.4914,0.4822,0.4465 --std 0.247,0.2435,0.2616)
attack=(--attack pgd,apgd-ce --norm linf --radius 2/255 --device cpu)

recipe begin "$data" "$runs"
specguard attack timm:vit_tiny_patch16_224 "${vit[@]}" --weights "$runs/checkpoint.safetensors" \
    --data "$runs/photos" "${attack[@]}" --out "$runs/before"
resume=$([ -e "$runs/robust/run.json" ] && echo --resume || true)
specguard train --run "$runs/robust" $resume --model timm:vit_tiny_patch16_224 "${vit[@]}" \
    --weights "$runs/checkpoint.safetensors" --data "$runs/photos" --recipe robust-finetune --radius 2/255 --epochs 6 \
    --flip --crop 4 --device cpu
specguard attack "$runs/robust" "${attack[@]}" --out "$runs/after"
run rm -f "$runs/robust.safetensors"
specguard export "$runs/robust" --to timm "$runs/robust.safetensors"
recipe compare "$runs" "$runs/compared.json"
