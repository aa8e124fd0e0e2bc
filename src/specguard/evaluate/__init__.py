"""What was found out about a model: a record per image, and numbers with their uncertainty."""

from specguard.evaluate.baseline import linear_baseline, stored_baseline
from specguard.evaluate.cascade_summary import cascade_summary
from specguard.evaluate.cascading import Cascading, cascading
from specguard.evaluate.cauchy import Diagnosis, cauchy_claims, diagnoses
from specguard.evaluate.certification import Certification, certification
from specguard.evaluate.certified_summary import certified_summary
from specguard.evaluate.correlation import RankCorrelation, rank_correlation
from specguard.evaluate.folder import Progress, identity
from specguard.evaluate.gallery import gallery
from specguard.evaluate.rollout import attention_rollout
from specguard.evaluate.run import Evaluation, evaluate
from specguard.evaluate.sensitivity import Sensitivity, sensitivity
from specguard.evaluate.shards import Shard
from specguard.evaluate.smoothing import SmoothingStudy, smoothing, smoothing_summary
from specguard.evaluate.spectra import Spectra, spectra
from specguard.evaluate.spectral_summary import spectral_summary
from specguard.evaluate.subjects import balls_of
from specguard.evaluate.summary import summary
from specguard.evaluate.timing import timed
from specguard.evaluate.verification import claimed_samples, verification

__all__ = [
    "Cascading",
    "Certification",
    "Diagnosis",
    "Evaluation",
    "Progress",
    "RankCorrelation",
    "Sensitivity",
    "Shard",
    "SmoothingStudy",
    "Spectra",
    "attention_rollout",
    "balls_of",
    "cascade_summary",
    "cascading",
    "cauchy_claims",
    "certification",
    "certified_summary",
    "claimed_samples",
    "diagnoses",
    "evaluate",
    "gallery",
    "identity",
    "linear_baseline",
    "rank_correlation",
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
