"""Clean and robust accuracy after training: CIFAR-10 and digits."""

from pathlib import Path

from published.cells import RECIPES, interval, read, table

DEIT, DEIT_PGD, DIGITS_PGD = (
    RECIPES / name for name in ("cifar10_deit_tiny", "cifar10_deit_tiny_pgd", "digits_pgd")
)
STANDARD = {"plain": "standard training", "msvp": "with MSVP 1e-4"}
ADVERSARIAL = {"plain": "PGD training", "msvp": "PGD training with MSVP 1e-4"}
DIGITS = {"plain": "standard training", "pgd": "PGD training"}
NAMES = {"pgd": "PGD-20", "cw": "CW-20", "autoattack": "AutoAttack", "worst case": "full suite"}
Files = dict[str, tuple[str, ...]]
PGD_FILES: Files = {"pgd": ("pgd", "cw"), "autoattack": ("autoattack",)}
DIGITS_FILES: Files = {"pgd": ("pgd",), "full": ("worst case",)}


def cifar10_deit_tiny() -> str:
    """Clean accuracy and the time of training."""
    records = {label: read(DEIT / folder / "result.json") for folder, label in STANDARD.items()}
    rows = [[label, interval(r["test_accuracy"]), f"{r['seconds']:.0f}"] for label, r in records.items()]
    head = ("DeiT-Ti, 32 px, from scratch, 100 epochs", "clean accuracy, 95 % interval", "seconds")
    return "\n".join(table(head, rows))


def cifar10_deit_tiny_pgd() -> str:
    """Robust accuracy after adversarial training on CIFAR-10."""
    return robust(DEIT_PGD, ADVERSARIAL, PGD_FILES)


def digits_pgd() -> str:
    """Robust accuracy after adversarial training on digits."""
    return robust(DIGITS_PGD, DIGITS, DIGITS_FILES)


def robust(recipe: Path, rows: dict[str, str], files: Files) -> str:
    """Clean accuracy and that under each attack; the radius and the norm are those of the records."""
    ball = read(recipe / next(iter(rows)) / f"{next(iter(files))}.json")["worst_case"][0]
    steps = round(255 * ball["radius"])
    radius = f"{steps}/255" if abs(255 * ball["radius"] - steps) < 1e-6 else f"{ball['radius']:g}"
    found = {label: accuracies(recipe / folder, files) for folder, label in rows.items()}
    head = [f"{ball['norm']} {radius}", *next(iter(found.values()))]
    return "\n".join(table(head, ([label, *map(interval, cells.values())] for label, cells in found.items())))


def accuracies(folder: Path, files: Files) -> dict[str, dict[str, float]]:
    """The fractions of a network, by the name of their column."""
    cells = {"clean": read(folder / "result.json")["test_accuracy"]}
    for file, attacks in files.items():
        record = read(folder / f"{file}.json")
        found = {row["attack"]: row["accuracy"] for row in record["attacks"]}
        found["worst case"] = record["worst_case"][0]["accuracy"]
        cells |= {NAMES[attack]: found[attack] for attack in attacks}
    return cells
