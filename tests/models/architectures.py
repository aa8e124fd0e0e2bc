"""Small models of timm, one for each thing that conversion must know, and one for each that it must refuse."""

import importlib
from functools import partial

from torch import nn

SMALL = {"img_size": 20, "patch_size": 5, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7}


def named(name, **options):
    """The architecture of that name, made small."""
    return lambda timm: timm.create_model(name, **SMALL | options)


def vit(**options):
    return lambda timm: vit_module().VisionTransformer(**SMALL | options)


def eva(**options):
    return lambda timm: importlib.import_module("timm.models.eva").Eva(**SMALL | options)


def vit_module():
    return importlib.import_module("timm.models.vision_transformer")


def layer(name, **options):
    """A layer type of timm with options, looked up when it is made."""
    return lambda *args, **kwargs: getattr(importlib.import_module("timm.layers"), name)(*args, **kwargs | options)


def block(name):
    return lambda *args, **kwargs: getattr(vit_module(), name)(*args, **kwargs)


def gated(timm):
    model = vit()(timm)
    model.blocks[0].attn.gate = nn.Linear(24, 24)
    return model


KNOWN = {
    "vit": named("vit_tiny_patch16_224"),
    "deit": named("deit_small_patch16_224"),
    "deit distilled": named("deit_tiny_distilled_patch16_224"),
    "deit 3 with layer scale": named("deit3_small_patch16_224"),
    "dinov2 with registers": named("vit_small_patch14_reg4_dinov2"),
    "dinov2 giant with packed swiglu": named("vit_giant_patch14_dinov2", mlp_ratio=2.5),
    "siglip with mean": named("vit_base_patch16_siglip_gap_224"),
    "registers with positions": vit(reg_tokens=2),
    "packed swiglu with the gate last": vit(mlp_layer=layer("GluMlp", act_layer=nn.SiLU, gate_last=True)),
    "swiglu in two with a norm": vit(mlp_layer=layer("SwiGLU", act_layer=nn.SiLU), scale_mlp_norm=True),
    "mean and fc norm": vit(global_pool="avg", reg_tokens=1, class_token=False, pre_norm=True),
    "mean of all tokens": vit(global_pool="avg", pool_include_prefix=True, fc_norm=False),
    "qk norm": vit(qk_norm=True, qkv_bias=False, proj_bias=False),
    "qk norm and inner norms": vit(qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True),
    "rms norms": vit(qk_norm=True, norm_layer="rmsnorm"),
    "no biases": vit(qkv_bias=False, proj_bias=False),
    "gelu by tanh": vit(pre_norm=True, act_layer="gelu_tanh"),
    "gelu of torch by tanh": vit(act_layer=partial(nn.GELU, approximate="tanh")),
    "relu": vit(act_layer="relu"),
    "no positions": vit(pos_embed="none"),
    "post norm": vit(block_fn=block("ResPostBlock"), init_values=0.5),
    "any image size": vit(dynamic_img_size=True, embed_norm_layer="layernorm"),
    "oblong images and patches": vit(img_size=(20, 30), patch_size=(4, 5)),
    "image with a margin": vit(img_size=22),
    "one channel": vit(in_chans=1),
    "dropout": vit(drop_rate=0.5, pos_drop_rate=0.5, patch_drop_rate=0.5, proj_drop_rate=0.5, drop_path_rate=0.5),
    "eva": eva(num_reg_tokens=2, init_values=0.5),
    "eva with separate qkv": eva(qkv_fused=False, swiglu_mlp=True, scale_mlp=True, scale_attn_inner=True),
    "eva with packed swiglu": eva(swiglu_mlp=True, global_pool="token", qkv_bias=False),
    "eva with post norm": eva(use_post_norm=True, no_embed_class=True),
    "eva with qk norm": eva(attn_type="rope", qk_norm=True, qkv_fused=False),
}

# what, and what the error says
REFUSED = {
    "attention pooling": (
        vit(global_pool="map"),
        r"attn_pool is a timm\.layers\.attention_pool\.AttentionPoolLatent",
    ),
    "max pooling": (vit(global_pool="max"), "pools its tokens by 'max'"),
    "no classes": (vit(num_classes=0), r"head is a \S+Identity, so that the model has no classes"),
    "rotary embeddings": (eva(use_rot_pos_emb=True), r"^rope is a \S+RotaryEmbeddingCat"),
    "shared keys": (eva(attn_type="rope", num_kv_heads=1, qkv_fused=False), r"^blocks\.0\.attn is .* share keys"),
    "parallel block": (vit(block_fn=block("ParallelScalingBlock")), r"^blocks\.0 is a \S+ParallelScalingBlock"),
    "parallel things": (vit(block_fn=block("ParallelThingsBlock")), r"^blocks\.0 is a \S+ParallelThingsBlock"),
    "differential": (vit(attn_layer="diff"), r"^blocks\.0\.attn is a \S+DiffAttention"),
    "gated attention": (gated, r"^blocks\.0\.attn\.gate is a \S+Linear"),
    "activation": (vit(act_layer="quick_gelu"), r"^blocks\.0\.mlp\.act is a \S+QuickGELU"),
    "gate": (
        vit(mlp_layer=layer("GluMlp")),
        r"^blocks\.0\.mlp\.act is a \S+GELU, and only gates with SiLU are supported",
    ),
    "feed-forward part": (vit(mlp_layer=layer("GatedMlp")), r"^blocks\.0\.mlp is a \S+GatedMlp"),
    "norm": (vit(norm_layer="layernormfp32"), r"^blocks\.0\.norm1 is a \S+LayerNormFp32"),
    "padding": (vit(img_size=22, dynamic_img_pad=True), "^patch_embed is a .* pads the image"),
    "hybrid": (
        lambda timm: timm.create_model("vit_tiny_r_s16_p8_224", num_classes=7),
        r"^patch_embed is a \S+HybridEmbed",
    ),
    "another model": (lambda timm: timm.create_model("resnet10t"), r"^the model is a timm\.models\.resnet\.ResNet"),
}
