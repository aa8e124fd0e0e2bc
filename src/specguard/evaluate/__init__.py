"""What was found out about a model: a record per image, and numbers with their uncertainty."""

from specguard.evaluate.certification import Certification, certification
from specguard.evaluate.certified_summary import certified_summary
from specguard.evaluate.correlation import RankCorrelation, rank_correlation
from specguard.evaluate.folder import Progress, identity
from specguard.evaluate.gallery import gallery
from specguard.evaluate.rollout import attention_rollout
from specguard.evaluate.run import Evaluation, evaluate
from specguard.evaluate.sensitivity import Sensitivity, sensitivity
from specguard.evaluate.spectra import Spectra, spectra
from specguard.evaluate.spectral_summary import spectral_summary
from specguard.evaluate.summary import summary
from specguard.evaluate.timing import timed
from specguard.evaluate.verification import verification

__all__ = [
    "Certification",
    "Evaluation",
    "Progress",
    "RankCorrelation",
    "Sensitivity",
    "Spectra",
    "attention_rollout",
    "certification",
    "certified_summary",
    "evaluate",
    "gallery",
    "identity",
    "rank_correlation",
    "sensitivity",
    "spectra",
    "spectral_summary",
    "summary",
    "timed",
    "verification",
]
