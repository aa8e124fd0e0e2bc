"""Which architecture weights are of, as far as their names and shapes show it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from specguard.nn import CERTIFIABLE, PRESETS, CertifiableConfig, ViTConfig

_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}  # by embed_dim, as timm names them
_TIMM_DEPTH = {"tiny": 12, "small": 12, "base": 12, "large": 24, "huge": 32}
_TIMM_HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16}


@dataclass(frozen=True)
class Recognized:
    """The options of the command line that name an architecture, and what the weights do not show.

    Args:
        name: The model, such as timm:vit_tiny_patch16_224.
        arguments: Those of its constructor that differ from its own.
        image: Size of the images; None for that of the architecture.
        open_question: What else has to be known, in words.

    Example:
        >>> Recognized("tiny", {"depth": 2}).options
        'tiny --model-arg depth=2'
    """

    name: str
    arguments: dict[str, int]
    image: int | None = None
    open_question: str = ""

    @property
    def options(self) -> str:
        """The words of a command."""
        size = () if self.image is None else (f"--image-size {self.image}",)
        given = ",".join(f"{name}={value}" for name, value in self.arguments.items())
        return " ".join((self.name, *([f"--model-arg {given}"] if given else []), *size))


def recognize(tensors: Mapping[str, Tensor]) -> Recognized | None:
    """The architecture of weights by their names and shapes; None where these are of no known kind.

    Args:
        tensors: Tensors by name.

    Returns:
        A suggestion, which is not certain: weights do not show the number of heads of attention.

    Example:
        >>> import torch
        >>> recognize({"vit.embeddings.cls_token": torch.zeros(1, 1, 8)}).name
        'hf:FOLDER'
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(shapes.get("patch_embed.proj.weight", ())) == 4 and "blocks.0.attn.qkv.weight" in shapes:
        return _timm(shapes)
    if len(shapes.get("conv_proj.weight", ())) == 4 and any(n.startswith("encoder.layers.") for n in shapes):
        return _torchvision(shapes)
    if any(name.startswith(("vit.embeddings.", "deit.embeddings.", "dinov2.embeddings.")) for name in shapes):
        return Recognized("hf:FOLDER", {}, open_question="where FOLDER also holds its config.json")
    if len(shapes.get("patches.map.weight", ())) == 4 and "normalise.mean" in shapes:
        return _own(shapes)
    return None


def _timm(shapes: dict[str, tuple[int, ...]]) -> Recognized:
    dim, _, patch, _ = shapes["patch_embed.proj.weight"]
    depth = _count(shapes, "blocks.")
    size = _SIZES.get(dim) or min(_SIZES.items(), key=lambda known: abs(known[0] - dim))[1]
    name = f"deit_{size}_distilled" if "dist_token" in shapes and size != "large" else f"vit_{size}"
    usual = 14 if size == "huge" else 16
    arguments = {"patch_size": patch} if patch != usual else {}
    if dim not in _SIZES:
        arguments["embed_dim"] = dim
    if depth != _TIMM_DEPTH[size]:
        arguments["depth"] = depth
    if dim not in _SIZES:
        arguments["num_heads"] = max(dim // 64, 1) if dim % 64 == 0 else _TIMM_HEADS[size]
    question = "where num_heads is a guess, since weights do not show it" if dim not in _SIZES else ""
    prefix = sum(token in shapes for token in ("cls_token", "dist_token"))
    return Recognized(
        f"timm:{name}_patch{usual}_224", arguments, _image(shapes.get("pos_embed"), prefix, patch), question
    )


def _torchvision(shapes: dict[str, tuple[int, ...]]) -> Recognized:
    dim, _, patch, _ = shapes["conv_proj.weight"]
    names = {"b": 768, "l": 1024, "h": 1280}
    letter = next((letter for letter, width in names.items() if width == dim), "b")
    depth = _count(shapes, "encoder.layers.encoder_layer_")
    usual = {"b": 16, "l": 16, "h": 14}[letter]
    arguments = {"patch_size": patch} if patch != usual and not (letter != "h" and patch == 32) else {}
    if dim not in names.values():
        arguments |= {"hidden_dim": dim}
        arguments |= {"num_heads": max(dim // 64, 1)}
        arguments |= {"mlp_dim": shapes.get("encoder.layers.encoder_layer_0.mlp.0.weight", (4 * dim,))[0]}
    if depth != {"b": 12, "l": 24, "h": 32}[letter]:
        arguments["num_layers"] = depth
    question = "where num_heads is a guess, since weights do not show it" if "num_heads" in arguments else ""
    known = 32 if patch == 32 and letter != "h" else usual
    image = _image(shapes.get("encoder.pos_embedding"), 1, patch)
    return Recognized(f"torchvision:vit_{letter}_{known}", arguments, image, question)


def _own(shapes: dict[str, tuple[int, ...]]) -> Recognized | None:
    """The presets of this package that have this width and this number of blocks."""
    dim, _, patch, _ = shapes["patches.map.weight"]
    ordinary = "blocks.0.attention.branch.inner.qkv.weight" in shapes
    presets: Mapping[str, ViTConfig | CertifiableConfig] = PRESETS if ordinary else CERTIFIABLE
    sizes = (dim, patch, _count(shapes, "blocks."))
    near = [name for name, config in presets.items() if (config.dim, config.patch, config.depth) == sizes]
    return Recognized(near[0], {}) if near else None


def _count(shapes: dict[str, tuple[int, ...]], prefix: str) -> int:
    """How many blocks there are."""
    return len({name.removeprefix(prefix).partition(".")[0] for name in shapes if name.startswith(prefix)})


def _image(table: tuple[int, ...] | None, prefix: int, patch: int) -> int | None:
    """The size of the images for which there are positions, unless it is the usual one."""
    if table is None or len(table) != 3 or table[1] <= prefix:
        return None
    side = math.isqrt(table[1] - prefix)
    size = side * patch
    return None if side * side != table[1] - prefix or size == 224 else size
