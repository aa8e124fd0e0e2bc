"""The cards of the zoo, made from committed results, and the page that shows them."""

from dataclasses import dataclass
from pathlib import Path

from published.cells import ROOT, radius_name, table
from specguard.models import from_run
from specguard.nn import fingerprint, matches_fingerprint
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackSummary
from specguard.records.certificate import CertificateSummary
from specguard.records.check import CheckSummary
from specguard.records.legacy import read_summary
from specguard.records.training import TrainingSummary
from specguard.records.zoo import Card, CardRadius, Checked

FOLDER = ROOT / "src" / "specguard" / "zoo"
_CIFAR10 = ("cifar10", "no license stated by its authors", "Krizhevsky 2009, Learning Multiple Layers of Features")
_DIGITS = (
    "digits",
    "CC BY 4.0",
    "Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, UCI, as in scikit-learn",
)


@dataclass(frozen=True)
class Entry:
    """What a person says about a model of the zoo; its numbers are read from the files of a recipe.

    Args:
        title: One line.
        architecture: The preset, or the architecture of a library.
        data: Name, license and citation of its data.
        training: The command or the code that trains it.
        recipe: Its folder in recipes.
        shown: The radius that lists show.
        result: The result of its training, or of an attack on all test images, with its clean accuracy.
        certificates: The summary of its certificates, at whose radii it was attacked too.
        checked: The summary of the independent check.
        needs: The library that it is loaded with.
    """

    title: str
    architecture: str
    data: tuple[str, str, str]
    training: str
    recipe: str
    shown: float
    result: str
    certificates: str
    checked: str
    needs: str | None = None


ENTRIES = {
    "cifar10-certified": Entry(
        title="three blocks of dot-product attention on 64 tokens, trained for certificates",
        architecture="certifiable_patch4_32",
        data=_CIFAR10,
        training="recipes/cifar10_certified/run.sh DATA_ROOT RUNS attention",
        recipe="recipes/cifar10_certified",
        shown=36 / 255,
        result="attention/result.json",
        certificates="attention/proofs/summary.json",
        checked="attention/checked.json",
    ),
    "digits-certified": Entry(
        title="four blocks of orthogonal maps whose tokens exchange channels by shifts, trained for certificates",
        architecture="digits_shift",
        data=_DIGITS,
        training="recipes/digits_shift/run.sh RUNS shift-0",
        recipe="recipes/digits_shift",
        shown=0.15,
        result="shift-0/result.json",
        certificates="shift-0/certificates.json",
        checked="shift-0/checked.json",
    ),
    "cifar10-timm": Entry(
        title="an ordinary ViT of timm of three blocks, trained plainly",
        architecture="timm:vit_tiny_patch16_224",
        data=_CIFAR10,
        training="recipes/relational/converted.py DATA_ROOT RUNS",
        recipe="recipes/zoo",
        shown=0.01,
        result="cifar10-timm-attack.json",
        certificates="cifar10-timm-certificates.json",
        checked="cifar10-timm-checked.json",
        needs="timm",
    ),
}


def card(name: str) -> Card:
    """The card of a model, from its weights and from the results of its recipe."""
    entry, folder = ENTRIES[name], FOLDER / name
    model, recipe = from_run(folder), ROOT / entry.recipe
    result, certificates, checked = (
        read_summary(recipe / file) for file in (entry.result, entry.certificates, entry.checked)
    )
    assert isinstance(result, TrainingSummary | AttackSummary), entry.result
    assert isinstance(certificates, CertificateSummary), entry.certificates
    assert isinstance(checked, CheckSummary), entry.checked
    for known in (
        result.fingerprint if isinstance(result, TrainingSummary) else result.study.about.model,
        certificates.study.about.model,
        checked.study.about.model,
    ):
        assert matches_fingerprint(model, known), f"{name}: the results of {entry.recipe} are of another model"
    data, license_, citation = entry.data
    settings, norm = certificates.study.settings, certificates.study.settings.norm
    return Card(
        name=name,
        title=entry.title,
        architecture=entry.architecture,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes=(folder / "model.safetensors").stat().st_size,
        data=data,
        data_license=license_,
        data_citation=citation,
        training=entry.training,
        recipe=entry.recipe,
        clean=result.test_accuracy if isinstance(result, TrainingSummary) else result.clean,
        radii=tuple(
            CardRadius(norm=norm, radius=row.radius, robust=row.robust, certified=row.certified)
            for row in certificates.radii
        ),
        shown=entry.shown,
        attack=_attack(certificates),
        methods=settings.methods,
        checked=Checked(n=checked.n, claims=checked.claims, attacked=checked.attacked),
        fingerprint=fingerprint(model),
        license="MIT",
        results=tuple(f"{entry.recipe}/{file}" for file in (entry.result, entry.certificates, entry.checked)),
        needs=entry.needs,
    )


def _attack(certificates: CertificateSummary) -> str:
    attack = certificates.study.attack
    return f"{attack['type']}, {attack['steps']} steps, success judged in float64"


def page(cards: list[Card]) -> str:
    """docs/zoo.md."""
    head = ("name", "data", "clean", "robust", "certified", "at", "checked", "size")
    rows = [_row(one) for one in cards]
    size = sum(one.bytes for one in cards) / 1e6
    return "\n".join([INTRODUCTION.format(size=size), *table(head, rows), "", *(_section(one) for one in cards)])


def _row(one: Card) -> list[str]:
    at = one.headline
    return [
        f"[`{one.name}`](#{one.name})",
        one.data,
        _interval(one.clean),
        _interval(at.robust),
        _interval(at.certified),
        f"{at.norm}\u00a0{radius_name(at.radius)}",
        f"{one.checked.claims:,} claims",
        f"{one.bytes / 1e6:.2f}\u00a0MB",
    ]


def _interval(accuracy: Accuracy) -> str:
    low, high = accuracy.interval95
    return (
        f"{100 * accuracy.value:.1f}\u00a0% [{100 * low:.1f},\u00a0{100 * high:.1f}], n\u00a0=\u00a0{accuracy.n:,}"
    )


def _section(one: Card) -> str:
    rows = [
        [f"{row.norm} {radius_name(row.radius)}", _interval(row.robust), _interval(row.certified)]
        for row in one.radii
    ]
    needs = [] if one.needs is None else [f"- **Needs**: {one.needs}."]
    results = ", ".join(f"`{file}`" for file in one.results)
    return "\n".join(
        [
            f"## {one.name}",
            "",
            f"{one.title[0].upper()}{one.title[1:]}. Clean accuracy {_interval(one.clean)}.",
            "",
            *table(("radius", "robust", "certified"), rows),
            "",
            f"- **Architecture**: `{one.architecture}`, {one.parameters:,} parameters.",
            f"- **Data**: {one.data}; {one.data_license}; {one.data_citation}.",
            f"- **Training**: `{one.training}`",
            f"- **Robust**: {one.attack}.",
            f"- **Certified**: by {', '.join(one.methods)}, deterministic, in float64 with rounding included.",
            f"- **Checked**: the independent checker proved {one.checked.claims:,} claims of "
            f"{one.checked.n:,} images again, and attacked {one.checked.attacked:,} certified images; none was "
            "misclassified.",
            *needs,
            f"- **Results**: {results}.",
            f"- **Fingerprint**: `{one.fingerprint}`",
            f"- **License** of the weights: {one.license}.",
            "",
        ]
    )


INTRODUCTION = """# The zoo

Trained models that come with the package, {size:.1f} MB in all. `zoo:NAME` is a model wherever a run is: `attack`,
`certify`, `smooth`, `spectrum`, `sensitivity`, `check --model`, `export` and, to train it further, `train`. Loading
verifies the fingerprint on the card.

```
specguard zoo
specguard zoo cifar10-certified
specguard attack zoo:digits-certified --norm l2 --radius 0.1
specguard certify zoo:cifar10-certified --data-root DATA_ROOT --radius 36/255 --methods local --images 100
specguard train zoo:digits-certified --run runs/further --epochs 5
```

From Python:

```python
from specguard.models import from_zoo

model = from_zoo("digits-certified")  # takes pixels in [0, 1]
```

A model brings no data: `--data` is that of its card unless another is named, and CIFAR-10 needs `--data-root`.
Results go to `runs/zoo-NAME-...`. The numbers are those of committed results of the recipe named below; this page
and the cards are written by `make tables`.
"""


def weights_of(run: Path, name: str) -> None:
    """Take the weights of a run into the package, in place of those that were there."""
    for file in ("model.json", "model.safetensors"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        (FOLDER / name / file).write_bytes((run / file).read_bytes())
