"""The headline numbers, each with what it is compared with and the page of its study."""

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill

from published import attacked, certified
from published.cauchy import CIFAR10 as CIFAR10_CAUCHY
from published.cauchy import claims_on_digits, points
from published.cells import BENCHMARKS, Record, interval, percent, read, table
from published.finetuned import checkpoints
from published.relational import ELSEWHERE, relational_records
from published.smoothed import certified_at, smoothing_records


@dataclass(frozen=True)
class Headline:
    """A number of a study."""

    page: str  # of docs/results, without .md
    what: str
    number: str
    beside: str


def headlines() -> dict[str, Headline]:
    """The headline of every study, by its page."""
    found = (*_certificates(), *_training(), *_smoothing(), *_finetuning(), *_spectra(), *_benchmarks())
    return {each.page: each for each in found}


def headline_table(pages: Iterable[str], folder: str) -> str:
    """A table of some headlines, whose links begin with `folder`."""
    known = headlines()
    rows = [
        [f"[{h.what}]({folder}{h.page}.md)", f"**{h.number}**", h.beside] for h in (known[page] for page in pages)
    ]
    return "\n".join(table(("study", "result", "compared with"), rows))


def headline_list(pages: Iterable[str], folder: str) -> str:
    """The same as a list, in lines that can be read as text."""
    known = headlines()
    items = [
        f"- **{h.number}**: {h.what}. Compared with: {h.beside}. [The study]({folder}{h.page}.md)."
        for h in (known[page] for page in pages)
    ]
    return "\n".join(
        fill(item, 116, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) for item in items
    )


def _at(record: Record, radius: float) -> Record:
    row: Record = next(row for row in record["radii"] if row["radius"] == radius)
    return row


def _certificates() -> Iterable[Headline]:
    weak = _at(read(certified.DIGITS / "weak" / "certificates.json"), 0.05)
    straight = _at(read(certified.DIGITS / "linear.json"), 0.05)["certified"]
    beside = f"LoFAST's bound {percent(weak['by']['lofast'])}, under PGD {percent(weak['attacked'])}, "
    yield Headline(
        "digits_certified",
        "Digits, one block of attention, certified at l2 0.05",
        interval(weak["by"]["adjoint"]),
        f"{beside}a linear classifier {percent(straight)}",
    )
    shifts = [_at(record, 0.1) for record in certified.digits_shift_records("shift")]
    exact = _at(read(certified.SHIFT / "linear.json"), 0.1)
    ends = (end(shifts, key=lambda row: row["certified"]["value"])["certified"] for end in (min, max))
    yield Headline(
        "digits_shift",
        "Digits, four blocks and cyclic shifts, certified at l2 0.1, seed 0",
        interval(shifts[0]["certified"]),
        f"{' to '.join(map(percent, ends))} over {len(shifts)} seeds, seed 0 under PGD "
        f"{percent(shifts[0]['robust'])}, a linear classifier {percent(exact['certified'])}",
    )
    cifar10 = {name: _at(record, 36 / 255) for name, record in certified.cifar10_records().items()}
    yield Headline(
        "cifar10_certified",
        "CIFAR-10, three blocks of attention, certified at l2 36/255",
        interval(cifar10["attention"]["certified"]),
        f"under PGD {percent(cifar10['attention']['attacked'])}, "
        f"every attention map at its mean {percent(cifar10['mean']['certified'])}, "
        f"without attention {percent(cifar10['none']['certified'])}, "
        f"a linear classifier {percent(cifar10['linear']['certified'])}",
    )
    lofast = _at(read(certified.LOFAST / "3" / "certificates.json"), 0.1)
    reported = certified.REPORTED["reported: LoFAST, 3 layers"][0.1]
    yield Headline(
        "cifar10_lofast",
        "CIFAR-10 in LoFAST's setting, 3 layers, certified at l2 0.1",
        interval(lofast["by"]["local"]),
        f"LoFAST's bound on the same weights {percent(lofast['by']['lofast'])}, "
        f"reported in its paper, for its own weights, {reported} %",
    )
    sst2 = certified.sst2_records()
    text, words = _at(sst2["3-0.25-4"], 0.1), _at(sst2["0-0.5-4"], 0.1)
    yield Headline(
        "sst2_certified",
        "SST-2, three blocks of attention, certified at l2 0.1 of the embeddings",
        interval(text["by"]["local"]),
        f"LoFAST's bound {percent(text['by']['lofast'])}, under PGD {percent(text['attacked'])}, a linear "
        f"classifier {percent(words['by']['local'])}",
    )
    ordinary = relational_records()["pgd_2_3_16"]
    ball = next(ball for ball in ordinary["balls"] if (ball["norm"], ball["box"]) == ("l2", False))
    others = max(found["median"] for found in ordinary["others"].values())
    yield Headline(
        "relational",
        "CIFAR-10, VNN-COMP's pgd_2_3_16, median certified l2 radius",
        f"{ball['certified']['median']:.3g}, n\u00a0=\u00a0{ordinary['n']}",
        f"{ELSEWHERE['pgd_2_3_16', 'l2']}; without zonotopes {others:.2g}; attacks reach "
        f"{ball['attacked']['median']:.2g}",
    )


def _training() -> Iterable[Headline]:
    plain, msvp = (read(attacked.DEIT / folder / "result.json")["test_accuracy"] for folder in ("plain", "msvp"))
    yield Headline(
        "cifar10_deit_tiny",
        "CIFAR-10, DeiT-Ti with MSVP, clean accuracy",
        interval(msvp),
        f"standard training {percent(plain)}",
    )
    found = attacked.accuracies(attacked.DEIT_PGD / "plain", attacked.PGD_FILES)
    msvp = attacked.accuracies(attacked.DEIT_PGD / "msvp", attacked.PGD_FILES)["AutoAttack"]
    yield Headline(
        "cifar10_deit_tiny_pgd",
        "CIFAR-10, DeiT-Ti, PGD training, AutoAttack at linf 8/255",
        interval(found["AutoAttack"]),
        f"clean {percent(found['clean'])}; with MSVP {percent(msvp)}",
    )
    standard, adversarial = (
        attacked.accuracies(attacked.DIGITS_PGD / folder, attacked.DIGITS_FILES) for folder in ("plain", "pgd")
    )
    yield Headline(
        "digits_pgd",
        "Digits, PGD training, full suite at linf 0.1",
        interval(adversarial["full suite"]),
        f"standard training {percent(standard['full suite'])}",
    )


def _finetuning() -> Iterable[Headline]:
    found = checkpoints()
    before, after = found["checkpoint"], found["fine-tuned"]
    yield Headline(
        "timm_finetune",
        "CIFAR-10 photos, a checkpoint of timm after fine-tuning, PGD and APGD at linf 2/255",
        interval(after["worst case"]),
        f"before {percent(before['worst case'])}; clean {percent(before['clean'])} and {percent(after['clean'])}",
    )


def _smoothing() -> Iterable[Headline]:
    found = {name: certified_at(record, 0.5) for name, record in smoothing_records().items()}
    yield Headline(
        "digits_smoothing",
        "Digits, noise and consistency, smoothed classifier at l2 0.5, probabilistic",
        interval(found["consistency"]),
        f"noise alone {percent(found['noise'])}, standard training {percent(found['plain'])}",
    )


def _spectra() -> Iterable[Headline]:
    found = {}
    for kind in ("vit", "covit"):
        record = read(CIFAR10_CAUCHY / f"{kind}_t1_patch4_32-0" / "pgd.json")
        found[kind] = next(row["accuracy"] for row in record["attacks"] if row["radius"] == 0.25)
    yield Headline(
        "cifar10_cauchy",
        "CIFAR-10, CoViT-T1, PGD-20 at l2 0.25",
        interval(found["covit"]),
        f"ViT-T1 {percent(found['vit'])}",
    )
    claims = claims_on_digits()
    gain = next(row["networks"] for row in claims["covit_minus_vit"] if row["radius"] == 0.25)
    yield Headline(
        "digits_cauchy",
        "Digits, accuracy of CoViT less that of its ViT, PGD-20 at l2 0.25, points",
        points(gain),
        "the same, clean: " + points(next(r["networks"] for r in claims["covit_minus_vit"] if not r["radius"])),
    )


def _benchmarks() -> Iterable[Headline]:
    gpu = next(
        r for r in read(BENCHMARKS / "attack_throughput.json").values() if "gpu" in r["environment"]["hardware"]
    )
    rate = {side: f"{gpu['images_per_second'][f'pgd/{side}']:,.0f}" for side in ("leaving", "torchattacks")}
    yield Headline(
        "attack_throughput",
        "PGD-20, images per second on a GPU",
        rate["leaving"],
        f"torchattacks {rate['torchattacks']}",
    )
    msvp = read(BENCHMARKS / "msvp_overhead.json")["reduce-overhead"]["msvp_over_plain"]
    yield Headline("msvp_overhead", "A training step with MSVP, relative", f"{msvp:.3f}", "1 without the penalty")
    sizes = next(
        r["sizes"]
        for r in read(BENCHMARKS / "certify_speed.json").values()
        if "gpu" in r["environment"]["hardware"]
    )
    ms = sizes["64x256x6"]["milliseconds_per_image"]
    yield Headline(
        "certify_speed",
        "A proof by the adjoint, 64 x 256 x 6, per image on a GPU",
        f"{ms['adjoint']:.3g} ms",
        f"LoFAST's bound {ms['lofast']:.3g} ms",
    )
    ratio = next(iter(read(BENCHMARKS / "jacobian_norm.json").values()))["sizes"]["197x128"]["dense_over_ours"]
    yield Headline(
        "jacobian_norm",
        "The norm of a block's Jacobian at 197 x 128",
        f"{ratio['seconds']:.0f} times as fast",
        f"the dense SVD, with {ratio['bytes']:.0f} times the memory",
    )
    yield Headline("scale_out", "Certification by two processes, 2 cores", _ratio(), "one process")


def _ratio() -> str:
    return f"{read(BENCHMARKS / 'scale_out.json')['seconds']['ratio']:.2f} times as fast"
