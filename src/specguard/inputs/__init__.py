"""What users of Python pass, as what the package computes with: one place for every public function.

What is unambiguous is accepted, with an `InputWarning` where values are scaled, rounded or reordered. All else is
refused in one sentence that says what to write.
"""

from specguard.inputs.balls import BallLike, as_ball, refuse_unknown
from specguard.inputs.images import ImagesLike, as_images
from specguard.inputs.labels import LabelsLike, as_integers, as_labels
from specguard.inputs.models import as_device, dtype_of, eval_mode, warn_of_normalization, warn_of_train_mode
from specguard.inputs.samples import Chunk, Stream, as_samples, as_stream

__all__ = [
    "BallLike",
    "Chunk",
    "ImagesLike",
    "LabelsLike",
    "Stream",
    "as_ball",
    "as_device",
    "as_images",
    "as_integers",
    "as_labels",
    "as_samples",
    "as_stream",
    "dtype_of",
    "eval_mode",
    "refuse_unknown",
    "warn_of_normalization",
    "warn_of_train_mode",
]
