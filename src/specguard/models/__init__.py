"""Models of other libraries, of files and of runs, as models of this package.

`convert` turns a model of timm, torchvision or transformers into a `Network`, `from_run` loads a trained model, and
`ModelSource` describes how the architecture of another library can be rebuilt.
"""

from specguard.models.checkpoint import load_weights
from specguard.models.convert import check_equal, convert, register_converter
from specguard.models.equality import Pair, View
from specguard.models.export import Exported, export
from specguard.models.huggingface import from_huggingface
from specguard.models.packaged import from_zoo
from specguard.models.qkv import attention_weights
from specguard.models.run import from_run, untrained
from specguard.models.source import ModelSource
from specguard.models.timm import from_timm
from specguard.models.timm_weights import timm_weights
from specguard.models.torchvision import from_torchvision
from specguard.models.warm_start import WarmStart, warm_start
from specguard.models.weight_file import WeightFile, model_of_file, read_weight_file
from specguard.models.wrapped import Wrapped
from specguard.models.zoo import timm_model

__all__ = [
    "Exported",
    "ModelSource",
    "Pair",
    "View",
    "WarmStart",
    "WeightFile",
    "Wrapped",
    "attention_weights",
    "check_equal",
    "convert",
    "export",
    "from_huggingface",
    "from_run",
    "from_timm",
    "from_torchvision",
    "from_zoo",
    "load_weights",
    "model_of_file",
    "read_weight_file",
    "register_converter",
    "timm_model",
    "timm_weights",
    "untrained",
    "warm_start",
]
