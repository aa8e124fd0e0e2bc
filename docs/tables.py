"""Write the README's tables and its figure from the committed results; --check says whether they are current."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))

from cauchy.claims import Diagnosis, cauchy_claims, diagnoses  # noqa: E402
from cauchy.correlation import RankCorrelation  # noqa: E402

README, FIGURE = ROOT / "README.md", ROOT / "docs" / "figures" / "digits_certified.svg"
RECIPES = ROOT / "recipes"
RECIPE = RECIPES / "cifar10_deit_tiny"
CERTIFIED = RECIPES / "digits_certified"
ROWS = {"plain": "standard training", "msvp": "with MSVP 1e-4"}


def cifar10_deit_tiny() -> str:
    lines = [
        "| DeiT-Ti, 32 px, from scratch, 100 epochs | clean accuracy, 95 % interval | seconds |",
        "|---|---|---|",
    ]
    for folder, label in ROWS.items():
        record = json.loads((RECIPE / folder / "result.json").read_text())
        lines.append(f"| {label} | {interval(record['test_accuracy'])} | {record['seconds']:.0f} |")
    return "\n".join(lines)


def cifar10_deit_tiny_pgd() -> str:
    rows = {"plain": "PGD training", "msvp": "PGD training with MSVP 1e-4"}
    return attacked(RECIPES / "cifar10_deit_tiny_pgd", rows, {"pgd": ("pgd", "cw"), "autoattack": ("autoattack",)})


def digits_certified() -> str:
    """Certified accuracy per family at a few radii, with the attack above and the linear classifier below."""
    shown = (0.02, 0.05, 0.1, 0.15)
    lines = [
        f"| l2 radius | clean | {' | '.join(f'{radius:g}' for radius in shown)} |",
        "|---" * (2 + len(shown)) + "|",
    ]
    for folder, label in {"weak": "penalty 0.03", "strong": "penalty 0.1"}.items():
        record = json.loads((CERTIFIED / folder / "certificates.json").read_text())
        found = {row["radius"]: row for row in record["radii"]}
        clean = interval(record["clean"])
        lines.append(f"| {label}, attacked | {clean} | {percents(found[r]['attacked'] for r in shown)} |")
        for family in ("lofast", "local", "adjoint"):
            lines.append(f"| certified by {family} | | {percents(found[r]['by'][family] for r in shown)} |")
    record = json.loads((CERTIFIED / "linear.json").read_text())
    found = {row["radius"]: row for row in record["radii"]}
    cells = percents(found[r]["certified"] for r in shown)
    lines.append(f"| linear classifier, certified | {interval(record['clean'])} | {cells} |")
    checked = [json.loads((CERTIFIED / folder / "checked.json").read_text()) for folder in ("weak", "strong")]
    claims, images = (sum(record[key] for record in checked) for key in ("claims", "attacked"))
    lines += ["", f"The second program proved all {claims:,} claims again and attacked {images} certified images,"]
    lines += ["of which none broke."]
    return "\n".join(lines)


def sst2_certified() -> str:
    """Certified accuracy on sentences, by the number of blocks and the norm of W^V and W^O: those that were run."""
    folders = sorted((RECIPES / "sst2_certified").glob("*/certificates.json"))
    records = {path.parent.name: json.loads(path.read_text()) for path in folders}
    lines = head(next(iter(records.values())))
    for name, record in records.items():
        depth, norm, heads = name.split("-")
        label = f"{depth} blocks, norm {norm}, {heads} heads" if depth != "0" else "linear, no blocks"
        lines += certified(record, label, record["radii"][0]["by"])
    checked = [json.loads(path.read_text()) for path in (RECIPES / "sst2_certified").glob("*/checked.json")]
    n, claims, attacked_again = (sum(record[key] for record in checked) for key in ("n", "claims", "attacked"))
    lines += ["", f"Of {n} records the second program proved all {claims:,} claims again, and attacked the"]
    lines += [f"{attacked_again} certified sentences among them; none broke."]
    return "\n".join(lines)


def cifar10_certified() -> str:
    """64 tokens: with attention, with every map of it put to its mean, without it, and a linear classifier."""
    recipe = RECIPES / "cifar10_certified"
    files = {
        "attention": "attention/proofs/summary.json",
        "mean": "mean_attention.json",
        "none": "none/certificates.json",
    }
    records = {name: json.loads((recipe / file).read_text()) for name, file in files.items()}
    straight = json.loads((recipe / "attention" / "proofs" / "baseline.json").read_text())
    entropy = json.loads((recipe / "entropy.json").read_text())
    lines = head(records["attention"])
    lines += certified(records["attention"], "dot-product attention", ("lofast", "local"))
    rows = percents(row["by"]["local"] for row in records["mean"]["radii"])
    lines.append(
        f"| every attention map put to its mean, certified | {interval(records['mean']['clean'])} | {rows} |"
    )
    lines += certified(records["none"], "without attention", ("lofast", "local"))
    shares = percents(row["certified"] for row in straight["radii"])
    lines.append(f"| linear classifier, certified | {interval(straight['clean'])} | {shares} |")
    checked = json.loads((recipe / "attention" / "checked.json").read_text())
    n, claims, images = (checked[key] for key in ("n", "claims", "attacked"))
    median, most = entropy["median_entropy"], entropy["largest_possible_entropy"]
    lines += [
        "",
        f"The median entropy of attention maps is {median:.2f}, of {most:.2f} at most. With attention the second",
    ]
    lines += [
        f"program proved all {claims:,} claims of {n:,} records again, and attacked the {images:,} images that are"
    ]
    lines += ["certified at some radius; none broke."]
    return "\n".join(lines)


def cifar10_lofast() -> str:
    """LoFAST's Table 1, with what the paper reports below."""
    recipe = RECIPES / "cifar10_lofast"
    records = {depth: json.loads((recipe / depth / "certificates.json").read_text()) for depth in ("3", "4", "5")}
    lines = head(records["3"])
    for depth, record in records.items():
        lines += certified(record, f"{depth} layers", ("lofast", "local"))
        if (path := recipe / depth / "adjoint.json").exists():
            rows = json.loads(path.read_text())["radii"]
            lines.append(f"| certified by adjoint | | {percents(row['by']['adjoint'] for row in rows)} |")
    lines.append("| reported: LoFAST, 3 layers | | 29.1 % | 16.0 % | 3.0 % | |")
    lines.append("| reported: alpha,beta-CROWN, 3 layers | | 41.2 % | 14.1 % | | |")
    return "\n".join(lines)


def cifar10_cauchy() -> str:
    """The rows of "ViT as a Cauchy problem" that were run on CIFAR-10, and at 32 pixels what of the paper shows."""
    recipe = RECIPES / "cifar10_cauchy"
    return "\n".join([*cauchy_rows(recipe), *cauchy_shown(diagnoses(recipe, "*_32-*"))])


def digits_cauchy() -> str:
    """The same models on the embedded digits."""
    recipe = RECIPES / "digits_cauchy"
    return "\n".join([*cauchy_rows(recipe), *cauchy_shown(diagnoses(recipe))])


def cauchy_rows(recipe: Path) -> list[str]:
    """Accuracy, what PGD-20 leaves of it and, where they were computed, the spectra of the blocks."""
    known = {found.name: found for found in diagnoses(recipe)}
    files = {path.parent.name: path for path in recipe.glob("*/pgd.json")}
    names = ["model, seed", "clean", "PGD-20, l2 0.25", "0.5"]
    if known:
        names += ["sigma(J_F), mean (spread)", "sigma(I + J_F)", "exponent of Eq. 15", "log growth of PGD"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for name in sorted(files, key=lambda name: ("_224" in name, "covit" in name, name)):
        record = json.loads(files[name].read_text())
        found = {attack["radius"]: attack["accuracy"]["value"] for attack in record["attacks"]}
        cells = [cauchy_label(name), interval(record["clean"])]
        cells += [f"{100 * found[radius]:.1f} %" for radius in (0.25, 0.5)]
        if name in known:
            of = known[name].measures
            cells += [f"{of['sigma']:.2f} ({known[name].spread:.2f})", f"{of['step']:.2f}"]
            cells += [f"{of[key]:.2f}" for key in ("exponent", "growth")]
        lines.append(f"| {' | '.join(cells + [''] * (len(names) - len(cells)))} |")
    return lines


def cauchy_label(name: str) -> str:
    """covit_t1_patch4_32-0 as CoViT-T1, 32 px, 0."""
    model, _, seed = name.rpartition("-")
    kind, size, *rest = model.split("_")
    pixels = f", {rest[-1]} px" if rest else ""
    return f"{'CoViT' if kind == 'covit' else 'ViT'}-{size.upper()}{pixels}, {seed}"


CAUCHY = {
    "sigma": "mean sigma(J_F) of the blocks",
    "step": "mean sigma(I + J_F) of the blocks",
    "largest": "sigma(J_F) of the largest block",
    "exponent": "exponent of Eq. 15, sum of sigma(J_F)",
    "log_product": "log of the product of sigma(I + J_F)",
    "growth": "log growth of a PGD perturbation",
    "network": "sigma of the whole network",
}


def cauchy_shown(found: Sequence[Diagnosis]) -> list[str]:
    """Rank correlations with robustness, CoViT beside ViT, and the block that stands out; nothing of no rows."""
    if not found:
        return []
    claims = cauchy_claims(found)
    kinds = {
        "networks": "all networks",
        "models": "means over seeds",
        "vits": "ViTs alone",
        "covits": "CoViTs alone",
    }
    lines = ["", f"| rank correlation with accuracy under PGD-20, l2 | {' | '.join(kinds.values())} |"]
    lines += ["|---" * (1 + len(kinds)) + "|"]
    for row in claims["correlations"]:
        cells = ["" if row[kind] is None else str(RankCorrelation(**row[kind])) for kind in kinds]
        lines.append(f"| {CAUCHY[row['measure']]}, {row['radius']:g} | {' | '.join(cells)} |")
    lines += [
        "",
        "| accuracy of CoViT less that of its ViT, points | networks | means over seeds |",
        "|---|---|---|",
    ]
    for row in claims["covit_minus_vit"]:
        where = f"PGD-20, l2 {row['radius']:g}" if row["radius"] else "clean"
        lines.append(f"| {where} | {points(row['networks'])} | {points(row['models'])} |")
    ends = claims["largest_block"]
    counts = f"the largest sigma(J_F) in {ends['first']}, the last in {ends['last']}"
    lines += ["", f"Of {claims['n']} networks, the first block has {counts};"]
    lines += [f"in {ends['both_above_all_others']} these two are above all others."]
    if claims["unconverged"]:
        lines += [f"Singular values that did not converge: {claims['unconverged']}."]
    return lines


def points(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = (100 * end for end in found["interval95"])
    return f"{100 * found['mean']:+.1f} [{low:+.1f}, {high:+.1f}], n = {found['n']}"


def head(record: dict[str, Any]) -> list[str]:
    radii = [row["radius"] for row in record["radii"]]
    names = ("36/255" if radius == 36 / 255 else f"{radius:g}" for radius in radii)
    return [f"| l2 radius | clean | {' | '.join(names)} |", "|---" * (2 + len(radii)) + "|"]


def certified(record: dict[str, Any], label: str, families: Iterable[str]) -> list[str]:
    """What an attack leaves standing, and what is certified by each family, over the radii."""
    rows = record["radii"]
    lines = [f"| {label}, attacked | {interval(record['clean'])} | {percents(row['attacked'] for row in rows)} |"]
    return lines + [f"| certified by {name} | | {percents(row['by'][name] for row in rows)} |" for name in families]


def percents(shares: Iterable[dict[str, Any]]) -> str:
    return " | ".join(f"{100 * share['value']:.1f} %" for share in shares)


def digits_pgd() -> str:
    rows = {"plain": "standard training", "pgd": "PGD training"}
    return attacked(RECIPES / "digits_pgd", rows, {"pgd": ("pgd",), "full": ("worst case",)})


NAMES = {"pgd": "PGD-20", "cw": "CW-20", "autoattack": "AutoAttack", "worst case": "full suite"}


def attacked(recipe: Path, rows: dict[str, str], files: dict[str, tuple[str, ...]]) -> str:
    """Clean accuracy and that under each attack; the radius and the norm are those of the records."""
    first = json.loads((recipe / next(iter(rows)) / f"{next(iter(files))}.json").read_text())
    ball = first["worst_case"][0]
    steps = round(255 * ball["radius"])
    radius = f"{steps}/255" if abs(255 * ball["radius"] - steps) < 1e-6 else f"{ball['radius']:g}"
    names = [NAMES[attack] for attacks in files.values() for attack in attacks]
    lines = [f"| {ball['norm']} {radius} | clean | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for folder, label in rows.items():
        cells = [interval(json.loads((recipe / folder / "result.json").read_text())["test_accuracy"])]
        for file, attacks in files.items():
            record = json.loads((recipe / folder / f"{file}.json").read_text())
            found = {row["attack"]: row["accuracy"] for row in record["attacks"]}
            found["worst case"] = record["worst_case"][0]["accuracy"]
            cells += [interval(found[attack]) for attack in attacks]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def attack_throughput() -> str:
    record = json.loads((ROOT / "benchmarks" / "attack_throughput.json").read_text())
    lines = ["| images per second (relative to torchattacks) | " + " | ".join(map(where, record.values())) + " |"]
    lines.append("|---" * (1 + len(record)) + "|")
    labels = {
        "pgd/plain": "PGD-20, all images take all steps",
        "pgd/leaving": "PGD-20, broken images leave",
        "pgd/bfloat16": "PGD-20, broken images leave, search in bfloat16",
        "pgd/torchattacks": "PGD-20, torchattacks",
        "pgd/foolbox": "PGD-20, foolbox",
        "apgd/plain": "APGD-50, all images take all steps",
        "apgd/leaving": "APGD-50, broken images leave",
        "apgd/torchattacks": "APGD-50, torchattacks",
    }
    for side, label in labels.items():
        cells = []
        for r in record.values():
            ratio = r["over_torchattacks"].get(side)
            speed = f"{r['images_per_second'][side]:,.0f}"
            cells.append(f"{speed} ({ratio['median']:.2f})" if ratio else speed)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def where(r: dict[str, Any]) -> str:
    hardware = r["environment"]["hardware"]
    place = hardware.get("gpu", f"{hardware['threads']} CPU threads")
    return f"{r['model']}, {place}, {100 * r['standing_under_pgd20']:.0f} % of {r['images']:,} stand"


def interval(share: dict[str, Any]) -> str:
    low, high = (100 * x for x in share["interval95"])
    return f"{100 * share['value']:.1f} % [{low:.1f}, {high:.1f}], n = {share['n']:,}"


def msvp_overhead() -> str:
    record = json.loads((ROOT / "benchmarks" / "msvp_overhead.json").read_text())
    cells = (
        "ViT-S, batch 128, bf16",
        "step without",
        "with MSVP, relative (quartiles)",
        "loop's cost / MSVP's cost",
    )
    lines = [f"| {' | '.join(cells)} |", "|---|---|---|---|"]
    for mode in ("eager", "default", "reduce-overhead"):
        r = record[mode]
        name = mode if mode == "eager" else f"compiled, {mode}"
        low, high = r["msvp_over_plain_quartiles"]
        ratio = f"{r['msvp_over_plain']:.3f} ({low:.3f} to {high:.3f})"
        lines.append(f"| {name} | {r['plain_ms']:.1f} ms | {ratio} | {r['loop_cost_over_msvp_cost']:.0f} |")
    return "\n".join(lines)


def certify_speed() -> str:
    record = json.loads((ROOT / "benchmarks" / "certify_speed.json").read_text())
    names = ("lofast", "local", "adjoint", "mixed")
    lines = [f"| tokens x dim x blocks | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for r in record.values():
        hardware = r["environment"]["hardware"]
        place = hardware.get("gpu", f"CPU, {hardware['threads']} threads")
        for size, found in r["sizes"].items():
            cells = " | ".join(f"{found['milliseconds_per_image'][name]:.3g} ms" for name in names)
            lines.append(f"| {size.replace('x', ' x ')}, {place} | {cells} |")
    return "\n".join(lines)


def jacobian_norm() -> str:
    record = json.loads((ROOT / "benchmarks" / "jacobian_norm.json").read_text())
    cells = (
        "tokens x dim",
        "a batch, per image",
        "one image",
        "its memory",
        "dense Jacobian and SVD",
        "its memory",
    )
    lines = [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]
    for r in record.values():
        hardware = r["environment"]["hardware"]
        place = hardware.get("gpu", f"CPU, {hardware['threads']} threads")
        for size, found in r["sizes"].items():
            ms, memory = found["milliseconds"], found["bytes"]
            row = [f"{size.replace('x', ' x ')}, {place}", f"{found['milliseconds_per_image']:.3g} ms"]
            row += [f"{ms['ours_one']:.0f} ms", megabytes(memory["ours_one"])]
            if "dense" in ms:
                ratio = found["dense_over_ours"]
                faster = f"{ratio['seconds']:.0f} x, per batch {ratio['seconds_batched']:.0f} x"
                row.append(f"{ms['dense'] / 1e3:.3g} s ({faster})")
                row.append(f"{megabytes(memory['dense'])} ({ratio['bytes']:.0f} x)")
            else:
                row += ["", ""]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.3g} MB" if count < 1e9 else f"{count / 1e9:,.3g} GB"


TABLES: dict[str, Callable[[], str]] = {
    "cifar10_deit_tiny": cifar10_deit_tiny,
    "cifar10_deit_tiny_pgd": cifar10_deit_tiny_pgd,
    "digits_certified": digits_certified,
    "cifar10_certified": cifar10_certified,
    "cifar10_lofast": cifar10_lofast,
    "cifar10_cauchy": cifar10_cauchy,
    "digits_cauchy": digits_cauchy,
    "digits_pgd": digits_pgd,
    "sst2_certified": sst2_certified,
    "attack_throughput": attack_throughput,
    "msvp_overhead": msvp_overhead,
    "certify_speed": certify_speed,
    "jacobian_norm": jacobian_norm,
}


def with_tables(text: str) -> str:
    """The text with everything between a table's two markers replaced."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"there is not one place for the table {name}")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


def source_hash() -> str:
    """What the figure was drawn from."""
    files = (CERTIFIED / "strong" / "certificates.json", CERTIFIED / "linear.json")
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "specguard", "font.size": 9})
    import matplotlib.pyplot as plt

    record = json.loads((CERTIFIED / "strong" / "certificates.json").read_text())
    linear = json.loads((CERTIFIED / "linear.json").read_text())
    rows, clean = record["radii"], 100 * record["clean"]["value"]
    radii = [0.0, *(row["radius"] for row in rows)]
    series = {"attacked (PGD-40)": [row["attacked"] for row in rows]}
    series |= {f"certified: {name}": [row["by"][name] for row in rows] for name in ("adjoint", "local", "lofast")}
    figure, axes = plt.subplots(figsize=(6.4, 2.9), layout="constrained")
    axes.axhline(clean, color="0.6", linewidth=1, linestyle=":", label="clean")
    for label, shares in series.items():
        style = "--" if label.startswith("attacked") else "-"
        axes.plot(radii, [clean, *(100 * share["value"] for share in shares)], style, marker=".", label=label)
    straight = [100 * linear["clean"]["value"], *(100 * row["certified"]["value"] for row in linear["radii"])]
    axes.plot(radii, straight, color="0.6", linewidth=1, label="linear classifier, certified")
    axes.set(xlabel="l2 radius", ylabel="accuracy, %", title=f"Digits, dot-product attention, n = {record['n']}")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None, "Description": f"source sha256 {source_hash()}"})


def stale() -> list[str]:
    """The files that no longer show the committed results."""
    text = README.read_text()
    readme = [] if with_tables(text) == text else [str(README.relative_to(ROOT))]
    drawn = FIGURE.exists() and source_hash() in FIGURE.read_text()
    return readme + ([] if drawn else [str(FIGURE.relative_to(ROOT))])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(f"not current: {', '.join(old)}; run make tables" if (old := stale()) else 0)
    README.write_text(with_tables(README.read_text()))
    draw()
