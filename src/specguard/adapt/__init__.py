"""Models from elsewhere as models of this package."""

from specguard.adapt.checkpoint import load_weights
from specguard.adapt.convert import check_equal, convert, register_converter
from specguard.adapt.create import timm_model
from specguard.adapt.equality import Pair, View
from specguard.adapt.huggingface import from_huggingface
from specguard.adapt.origin import Origin
from specguard.adapt.run import from_run, untrained
from specguard.adapt.timm import from_timm
from specguard.adapt.torchvision import from_torchvision
from specguard.adapt.weights import attention_weights
from specguard.adapt.wrapped import Wrapped

__all__ = [
    "Origin",
    "Pair",
    "View",
    "Wrapped",
    "attention_weights",
    "check_equal",
    "convert",
    "from_huggingface",
    "from_run",
    "from_timm",
    "from_torchvision",
    "load_weights",
    "register_converter",
    "timm_model",
    "untrained",
]
