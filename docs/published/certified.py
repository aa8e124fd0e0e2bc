"""Certified accuracy over radii, beside robust accuracy: digits, CIFAR-10 and SST-2."""

from collections.abc import Sequence

from published.cells import RECIPES, Record, curve_head, curve_rows, interval, linear_row, percents, read, table

DIGITS, CIFAR10 = RECIPES / "digits_certified", RECIPES / "cifar10_certified"
SHIFT = RECIPES / "digits_shift"
LOFAST, SST2 = RECIPES / "cifar10_lofast", RECIPES / "sst2_certified"
REPORTED = {  # by Havens et al. 2024, Table 1
    "reported: LoFAST, 3 layers": {0.02: 29.1, 0.05: 16.0, 0.1: 3.0},
    "reported: alpha,beta-CROWN, 3 layers": {0.02: 41.2, 0.05: 14.1},
}


def digits_certified() -> str:
    """By each method at a few radii, with the attack above and the linear classifier below."""
    shown = (0.02, 0.05, 0.1, 0.15)
    rows = []
    for folder, label in {"weak": "penalty 0.03", "strong": "penalty 0.1"}.items():
        record = read(DIGITS / folder / "certificates.json")
        rows += curve_rows(record, label, ("lofast", "local", "adjoint"), shown)
    rows.append(linear_row(read(DIGITS / "linear.json"), shown))
    checked = [read(DIGITS / folder / "checked.json") for folder in ("weak", "strong")]
    claims, images = (sum(record[key] for record in checked) for key in ("claims", "attacked"))
    said = f"The independent checker proved all {claims:,} claims again and attacked {images} certified images;\n"
    return "\n".join([*table(curve_head(shown), rows), "", f"{said}none was misclassified."])


MIXING = {
    "shift": "a shift",
    "none": "no mixing",
    "wide": "a shift, 72 channels",
    "attention": "attention that starts as the shift, 72 channels",
}


def digits_shift() -> str:
    """The mean of the seeds, and the least and the largest, by what mixes the tokens."""
    rows = []
    for mixing, label in MIXING.items():
        if not (records := digits_shift_records(mixing)):
            continue
        certified = zip(*([row["certified"] for row in record["radii"]] for record in records), strict=True)
        robust = zip(*([row["robust"] for row in record["radii"]] for record in records), strict=True)
        clean = _spread([record["clean"] for record in records])
        seeds = f"{len(records)} seeds" if len(records) > 1 else "1 seed"
        rows.append([f"{label}, {seeds}, robust accuracy", clean, *map(_spread, robust)])
        rows.append(["certified", "", *map(_spread, certified)])
    linear = read(SHIFT / "linear.json")
    rows.append(linear_row(linear))
    checked = [read(path) for path in sorted(SHIFT.glob("*/checked.json"))]
    n, claims, images = (sum(record[key] for record in checked) for key in ("n", "claims", "attacked"))
    said = (
        f"Means over seeds, with the least and the largest, of {linear['n']} images each. The independent checker\n"
        f"proved all {claims:,} claims of {n:,} records again and attacked {images:,} certified images;\n"
        "none was misclassified."
    )
    return "\n".join([*table(curve_head(row["radius"] for row in linear["radii"]), rows), "", said])


def digits_shift_records(mixing: str) -> list[Record]:
    """The summaries of all seeds that were run with this mixing of tokens."""
    return [read(path) for path in sorted(SHIFT.glob(f"{mixing}-*/certificates.json"))]


def _spread(fractions: Sequence[Record]) -> str:
    """The mean of fractions of equally many images, and their range if there are several."""
    values = [100 * fraction["value"] for fraction in fractions]
    ends = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.1f}\u00a0%{ends}"


def cifar10_certified() -> str:
    """64 tokens: with attention, with every map replaced by its mean, without it, and a linear classifier."""
    records = cifar10_records()
    rows = curve_rows(records["attention"], "dot-product attention", ("lofast", "local"))
    mean = records["mean"]
    certified = percents(row["by"]["local"] for row in mean["radii"])
    rows.append(["every attention map replaced by its mean, certified", interval(mean["clean"]), *certified])
    rows += curve_rows(records["none"], "without attention", ("lofast", "local"))
    rows.append(linear_row(records["linear"]))
    checked, entropy = read(CIFAR10 / "attention" / "checked.json"), read(CIFAR10 / "entropy.json")
    n, claims, images = (checked[key] for key in ("n", "claims", "attacked"))
    median, most = entropy["median_entropy"], entropy["largest_possible_entropy"]
    said = (
        f"The median entropy of the attention maps is {median:.2f}; the largest possible is {most:.2f}. For the\n"
        f"network with attention, the independent checker proved all {claims:,} claims of {n:,} records again,\n"
        f"and attacked the {images:,} images that are certified at some radius; none was misclassified."
    )
    radii = [row["radius"] for row in records["attention"]["radii"]]
    return "\n".join([*table(curve_head(radii), rows), "", said])


def cifar10_records() -> dict[str, Record]:
    """The summaries of the study of CIFAR-10, by network."""
    files = {
        "attention": "attention/proofs/summary.json",
        "mean": "mean_attention.json",
        "none": "none/certificates.json",
        "linear": "attention/proofs/baseline.json",
    }
    return {name: read(CIFAR10 / file) for name, file in files.items()}


def cifar10_lofast() -> str:
    """LoFAST's Table 1, with what the paper reports below."""
    records = {depth: read(LOFAST / depth / "certificates.json") for depth in ("3", "4", "5")}
    radii = [row["radius"] for row in records["3"]["radii"]]
    rows = []
    for depth, record in records.items():
        rows += curve_rows(record, f"{depth} layers", ("lofast", "local"))
        if (path := LOFAST / depth / "adjoint.json").exists():
            found = read(path)["radii"]
            rows.append(["certified by adjoint", "", *percents(row["by"]["adjoint"] for row in found)])
    for label, numbers in REPORTED.items():
        rows.append([label, "", *(f"{numbers[radius]}\u00a0%" if radius in numbers else "" for radius in radii)])
    return "\n".join(table(curve_head(radii), rows))


def sst2_certified() -> str:
    """Sentences, by the number of blocks and the norm of W^V and W^O: those that were run."""
    records = sst2_records()
    radii = [row["radius"] for row in next(iter(records.values()))["radii"]]
    rows = []
    for name, record in records.items():
        rows += curve_rows(record, sst2_label(name), record["radii"][0]["by"])
    checked = [read(path) for path in SST2.glob("*/checked.json")]
    n, claims, attacked = (sum(record[key] for record in checked) for key in ("n", "claims", "attacked"))
    said = (
        f"The independent checker proved all {claims:,} claims of {n} records again, and attacked the {attacked}\n"
    )
    return "\n".join(
        [*table(curve_head(radii), rows), "", f"{said}certified sentences among them; none was misclassified."]
    )


def sst2_records() -> dict[str, Record]:
    """The summaries of the encoders that were run."""
    return {path.parent.name: read(path) for path in sorted(SST2.glob("*/certificates.json"))}


def sst2_label(name: str) -> str:
    """3-0.25-4 in words."""
    depth, norm, heads = name.split("-")
    return f"{depth} blocks, norm {norm}, {heads} heads" if depth != "0" else "linear, no blocks"
