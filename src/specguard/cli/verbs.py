"""The commands by name, with what help lists of them, and the spellings of the version before."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """A command: its module, one line of help, an example, whether several processes can share its work."""

    module: str
    summary: str
    example: str
    shared: bool = True


VERBS = {
    "diagnose": Verb(
        "diagnose",
        "Answer whether a model is robust: attacks, fragile blocks, proofs, and what to do next.",
        "specguard diagnose runs/plain --minutes 10",
        shared=False,
    ),
    "train": Verb(
        "train",
        "Train a model.",
        "specguard train --model tiny_smooth --penalty spectral --spectral 0.03 --epochs 60 --run runs/certifiable",
    ),
    "attack": Verb(
        "attack",
        "Attack a trained model and measure its robust accuracy.",
        "specguard attack runs/certifiable --norm l2 --radius 0.05,0.1",
    ),
    "spectrum": Verb(
        "spectrum",
        "Compute the singular values of every block's Jacobian.",
        "specguard spectrum runs/plain runs/certifiable --images 100 --figure blocks",
    ),
    "sensitivity": Verb(
        "sensitivity",
        "Compare bounds on one attention layer with the largest change found.",
        "specguard sensitivity runs/certifiable --layer 0 --figure layer",
    ),
    "certify": Verb(
        "certify",
        "Certify a trained model: prove for which images no perturbation changes the class.",
        "specguard certify runs/certifiable --radius 0.05,0.1 --methods local,adjoint",
    ),
    "smooth": Verb(
        "smooth",
        "Certify the model under noise, with a failure probability.",
        "specguard smooth runs/plain --sigma 0.25 --samples 10000",
    ),
    "check": Verb(
        "check",
        "Check certificates with the independent checker.",
        "specguard check runs/certifiable/certificates/360-0123abcd --model runs/certifiable",
        shared=False,
    ),
    "export": Verb(
        "export",
        "Write the trained weights of a run to a file, for timm or for torch.",
        "specguard export runs/tuned --to timm tuned.safetensors",
        shared=False,
    ),
    "report": Verb(
        "report",
        "Write one self-contained HTML report of runs.",
        "specguard report runs/plain runs/certifiable --out report.html",
    ),
    "demo": Verb(
        "demo",
        "Train, attack and certify ViTs on real digits, and write a report.",
        "specguard demo --run runs/demo",
        shared=False,
    ),
    "models": Verb("models", "List the models that can be trained by name.", "specguard models"),
    "zoo": Verb(
        "zoo",
        "List the trained models that come with the package.",
        "specguard zoo cifar10-certified",
        shared=False,
    ),
}
# Spellings of version 0.2, which still work in this version.
OLD_VERBS = {"verify-certificates": "check"}
OLD_FLAGS = {
    "certify": {"--families": "--methods", "--cascade": "--stop-early", "--no-cascade": "--no-stop-early"},
    "train": {"--clean-share": "--clean-fraction"},
}
