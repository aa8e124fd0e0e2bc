"""Where timm has the same architecture, its weights give the same logits here."""

import pytest
import torch

from specguard.nn import GatedPositionalAttention, ViT, preset

# ours, timm's constructor arguments
PLAIN = {
    "deit_tiny_patch16_224": ("deit_tiny_patch16_224", {}),
    "deit_small_patch16_224": ("deit_small_patch16_224", {}),
    "vit_base_patch16_224": ("vit_base_patch16_224", {}),
    "vit_small_patch4_32": (
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 4, "embed_dim": 768, "depth": 8, "num_heads": 8, "mlp_ratio": 3.0},
    ),
    "convit_tiny_patch16_224": ("convit_tiny", {}),
}


def renamed(state: dict[str, torch.Tensor], local: int) -> dict[str, torch.Tensor]:
    """timm's weights under our names: its ConViT keeps q and k apart from v."""
    result = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            index = int(parts[1])
            place = f"local_blocks.{index}" if index < local else f"blocks.{index - local}"
            rest = ".".join(parts[2:])
            for old, new in (
                ("norm1", "attention.branch.norm"),
                ("attn.qkv", "attention.branch.inner.qkv"),
                ("attn.proj", "attention.branch.inner.out"),
                ("attn.pos_proj", "attention.branch.inner.position"),
                ("attn.gating_param", "attention.branch.inner.gate"),
                ("norm2", "mlp.branch.norm"),
                ("mlp.fc1", "mlp.branch.inner.expand"),
                ("mlp.fc2", "mlp.branch.inner.contract"),
            ):
                rest = rest.replace(old, new)
            if rest.startswith("attn.v."):
                continue
            if rest.startswith("attn.qk."):
                kind = parts[-1]
                tensor = torch.cat([tensor, state[f"blocks.{index}.attn.v.{kind}"]])
                rest = f"attention.branch.inner.qkv.{kind}"
            result[f"{place}.{rest}"] = tensor
        else:
            for old, new in (
                ("cls_token", "class_token.token"),
                ("pos_embed", "positions.table"),
                ("patch_embed.proj", "patches.map"),
            ):
                name = name.replace(old, new)
            result[name] = tensor
    return result


@pytest.mark.parametrize("name", PLAIN)
def test_timms_weights_give_timms_logits(name, timm, generator):
    theirs_name, options = PLAIN[name]
    config = preset(name, mean=(0.0,) * 3, std=(1.0,) * 3)
    theirs = timm.create_model(theirs_name, num_classes=config.classes, **options).double().eval()
    with torch.no_grad():
        for p in theirs.parameters():  # timm starts biases and tokens at zero, which would hide a swap
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.02)
    ours = ViT(config).double().eval()
    missing, unexpected = ours.load_state_dict(renamed(theirs.state_dict(), config.local_blocks), strict=False)
    assert not unexpected
    assert set(missing) == {"normalise.mean", "normalise.std"}
    images = torch.rand(2, 3, config.image, config.image, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-9, atol=1e-9)


def test_local_heads_start_as_timms_do(timm):
    config = preset("convit_tiny_patch16_224")
    ours = ViT(config).local_blocks[0].attention.branch.inner
    theirs = timm.create_model("convit_tiny").blocks[0].attn
    assert isinstance(ours, GatedPositionalAttention)
    torch.testing.assert_close(ours.position.weight, theirs.pos_proj.weight)
    torch.testing.assert_close(ours.qkv.weight[2 * config.dim :], theirs.v.weight)
    torch.testing.assert_close(ours.gate, theirs.gating_param)
