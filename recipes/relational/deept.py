"""DeepT's vision transformer for MNIST as layers of this package.

Its normalization subtracts the mean of every token and applies gains and shifts, without dividing by a standard
deviation: two linear maps. Queries, keys and values have four heads of as many channels as a token.

Source: Bonaert et al. 2021, https://github.com/eth-sri/DeepT
"""

from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from specguard.errors import CheckpointError
from specguard.models import load_weights
from specguard.nn import (
    Block,
    ClassPool,
    ClassToken,
    CoreAttention,
    Network,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
)

_DIM, _HEADS, _HEAD_DIM, _HIDDEN, _PATCH, _SIDE = 64, 4, 64, 128, 7, 4
_ATTENTION, _MLP = "transformer.layers.0.0.fn", "transformer.layers.0.1.fn"
PUBLISHED = MappingProxyType(
    {
        "cls_token": (1, 1, _DIM),
        "pos_embedding": (1, _SIDE**2 + 1, _DIM),
        "to_patch_embedding.1.weight": (_DIM, _PATCH**2),
        "to_patch_embedding.1.bias": (_DIM,),
        f"{_ATTENTION}.norm.weight": (_DIM,),
        f"{_ATTENTION}.norm.bias": (_DIM,),
        f"{_ATTENTION}.fn.to_q.weight": (_HEADS * _HEAD_DIM, _DIM),
        f"{_ATTENTION}.fn.to_k.weight": (_HEADS * _HEAD_DIM, _DIM),
        f"{_ATTENTION}.fn.to_v.weight": (_HEADS * _HEAD_DIM, _DIM),
        f"{_ATTENTION}.fn.to_out.0.weight": (_DIM, _HEADS * _HEAD_DIM),
        f"{_ATTENTION}.fn.to_out.0.bias": (_DIM,),
        f"{_MLP}.norm.weight": (_DIM,),
        f"{_MLP}.norm.bias": (_DIM,),
        f"{_MLP}.fn.net.0.weight": (_HIDDEN, _DIM),
        f"{_MLP}.fn.net.0.bias": (_HIDDEN,),
        f"{_MLP}.fn.net.3.weight": (_DIM, _HIDDEN),
        f"{_MLP}.fn.net.3.bias": (_DIM,),
        "mlp_head.0.weight": (_DIM,),
        "mlp_head.0.bias": (_DIM,),
        "mlp_head.1.weight": (10, _DIM),
        "mlp_head.1.bias": (10,),
    }
)
_MEAN, _STD = (0.1307,), (0.3081,)


def deept_mnist(file: Path) -> Network:
    """The network with the published weights, in float64 and eval mode; it takes pixels in [0, 1].

    Args:
        file: The weights, under the names of the published code.

    Raises:
        CheckpointError: If a tensor is missing, unknown, or of another shape.
    """
    network = _network().double()
    network.load_state_dict(_renamed(_published(file)), strict=False)  # Normalize has its own statistics
    return network.eval()


def _network() -> Network:
    """The layers, whose weights are replaced."""
    qkv = nn.Linear(_DIM, 3 * _HEADS * _HEAD_DIM, bias=False)
    out = nn.Linear(_HEADS * _HEAD_DIM, _DIM)
    attention = OrderedDict(**_norm(), qkv=qkv, core=CoreAttention(_HEADS), out=out)
    mlp = OrderedDict(
        **_norm(), expand=nn.Linear(_DIM, _HIDDEN), activation=nn.ReLU(), contract=nn.Linear(_HIDDEN, _DIM)
    )
    branches = {"attention": attention, "mlp": mlp}
    block = Block(OrderedDict((name, Residual(nn.Sequential(layers))) for name, layers in branches.items()))
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        normalise=Normalize(_MEAN, _STD),
        patches=PatchEmbedding(1, _PATCH, _DIM),
        class_token=ClassToken(_DIM),
        positions=Positions(_SIDE**2 + 1, _DIM),
        blocks=nn.Sequential(block),
        pool=ClassPool(),
        **_norm(),
        head=nn.Linear(_DIM, 10),
    )
    return Network("deept_mnist", (1, _PATCH * _SIDE, _PATCH * _SIDE), 10, layers)


def _norm() -> dict[str, nn.Module]:
    return {"center": nn.Linear(_DIM, _DIM, bias=False), "affine": nn.Linear(_DIM, _DIM)}


def _published(file: Path) -> dict[str, Tensor]:
    """The tensors of the file in float64; it must hold exactly those that are published."""
    tensors = load_weights(file)
    for name in sorted(tensors.keys() | PUBLISHED.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "nothing"
        if found != PUBLISHED.get(name, "nothing"):
            wanted = PUBLISHED.get(name, "nothing")
            raise CheckpointError(f"{file} is not DeepT's network for MNIST: {name!r} is {found}, not {wanted}")
    return {name: tensor.double() for name, tensor in tensors.items()}


def _renamed(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published tensors as those of the layers here."""
    first, second = "blocks.0.attention.branch", "blocks.0.mlp.branch"
    patches = theirs["to_patch_embedding.1.weight"].view(_DIM, 1, _PATCH, _PATCH)
    ours = {
        "patches.map.weight": patches,
        "patches.map.bias": theirs["to_patch_embedding.1.bias"],
        "class_token.token": theirs["cls_token"],
        "positions.table": theirs["pos_embedding"],
        f"{first}.qkv.weight": torch.cat([theirs[f"{_ATTENTION}.fn.to_{each}.weight"] for each in "qkv"]),
    }
    copies = {
        f"{_ATTENTION}.fn.to_out.0": f"{first}.out",
        f"{_MLP}.fn.net.0": f"{second}.expand",
        f"{_MLP}.fn.net.3": f"{second}.contract",
        "mlp_head.1": "head",
    }
    for their_name, name in copies.items():
        ours |= {f"{name}.{key}": theirs[f"{their_name}.{key}"] for key in ("weight", "bias")}
    for norm, place in ((f"{_ATTENTION}.norm", f"{first}."), (f"{_MLP}.norm", f"{second}."), ("mlp_head.0", "")):
        ours[f"{place}center.weight"] = torch.eye(_DIM, dtype=torch.float64) - 1 / _DIM
        ours[f"{place}affine.weight"] = theirs[f"{norm}.weight"].diag()
        ours[f"{place}affine.bias"] = theirs[f"{norm}.bias"]
    return ours
