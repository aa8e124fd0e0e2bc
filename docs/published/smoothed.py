"""Certified accuracy of randomized smoothing after training with and without noise."""

from published.cells import RECIPES, Record, interval, percent, read, table

DIGITS = RECIPES / "digits_smoothing"
ROWS = {"plain": "standard training", "noise": "Gaussian noise", "consistency": "noise and consistency"}


def smoothing_records() -> dict[str, Record]:
    """The study of every network, by the folder of its training."""
    return {folder: read(DIGITS / folder / "smooth.json") for folder in ROWS}


def digits_smoothing() -> str:
    """Clean accuracy of the network, and what is certified of the smoothed classifier."""
    records = smoothing_records()
    first = next(iter(records.values()))
    radii = [row["radius"] for row in first["radii"]]
    sigma = first["study"]["settings"]["smoothing"]["sigma"]
    head = [
        f"sigma {sigma:g}",
        "network, clean",
        "abstains",
        *(f"correct within l2 {radius:g}" for radius in radii),
    ]
    rows = [
        [
            label,
            percent(read(DIGITS / folder / "result.json")["test_accuracy"]),
            percent(records[folder]["abstained"]),
            *(interval(row["certified"]) for row in records[folder]["radii"]),
        ]
        for folder, label in ROWS.items()
    ]
    return "\n".join(table(head, rows))


def certified_at(record: Record, radius: float) -> Record:
    """The certified accuracy at a radius."""
    found: Record = next(row["certified"] for row in record["radii"] if row["radius"] == radius)
    return found
