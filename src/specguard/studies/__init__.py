"""What was found out about a model: a record per image, and numbers with their uncertainty."""

from specguard.studies.attack import Evaluation, evaluate
from specguard.studies.baseline import linear_baseline, stored_baseline
from specguard.studies.cascade_summary import cascade_summary
from specguard.studies.cascading import Cascading, cascading
from specguard.studies.certified_summary import certified_summary
from specguard.studies.certify import Certification, certification
from specguard.studies.check import claimed_samples, verification
from specguard.studies.folder import Progress, identity
from specguard.studies.gallery import gallery
from specguard.studies.rollout import attention_rollout
from specguard.studies.samples import balls_of
from specguard.studies.sensitivity import Sensitivity, sensitivity
from specguard.studies.shards import Shard
from specguard.studies.smooth import SmoothingStudy, smoothing, smoothing_summary
from specguard.studies.spectral_summary import spectral_summary
from specguard.studies.spectrum import Spectra, spectra
from specguard.studies.summary import summary
from specguard.studies.timing import timed

__all__ = [
    "Cascading",
    "Certification",
    "Evaluation",
    "Progress",
    "Sensitivity",
    "Shard",
    "SmoothingStudy",
    "Spectra",
    "attention_rollout",
    "balls_of",
    "cascade_summary",
    "cascading",
    "certification",
    "certified_summary",
    "claimed_samples",
    "evaluate",
    "gallery",
    "identity",
    "linear_baseline",
    "sensitivity",
    "smoothing",
    "smoothing_summary",
    "spectra",
    "spectral_summary",
    "stored_baseline",
    "summary",
    "timed",
    "verification",
]
