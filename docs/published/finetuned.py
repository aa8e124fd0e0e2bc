"""A checkpoint of timm before and after robust fine-tuning."""

from published.cells import RECIPES, Record, interval, percent, read, table

RECIPE = RECIPES / "timm_finetune"
FILES = {"checkpoint": "before.json", "fine-tuned": "robust/after.json"}


def checkpoints() -> dict[str, dict[str, Record]]:
    """Clean and robust accuracy of both checkpoints, by column."""
    found = {}
    for label, file in FILES.items():
        record = read(RECIPE / file)
        cells = {"clean": record["clean"]}
        cells |= {row["attack"]: row["accuracy"] for row in record["attacks"]}
        found[label] = cells | {"worst case": record["worst_case"][0]["accuracy"]}
    return found


def timm_finetune() -> str:
    """Both checkpoints under the same attacks, and what timm itself says of the exported one."""
    found = checkpoints()
    ball = read(RECIPE / "before.json")["worst_case"][0]
    compared = read(RECIPE / "compared.json")
    head = [f"{ball['norm']} {round(255 * ball['radius'])}/255", *next(iter(found.values()))]
    rows = table(head, ([label, *map(interval, cells.values())] for label, cells in found.items()))
    clean = compared["clean_in_timm"]["robust"]
    seconds = read(RECIPE / "robust" / "result.json")["seconds"]
    sentence = (
        f"Fine-tuning took {seconds:.0f} seconds on one busy core. Loaded in timm, the exported checkpoint "
        f"classifies {percent(clean)} of the images correctly, and its logits differ from the run's by at most "
        f"{compared['logits_apart']:.1g} in float64."
    )
    return "\n".join((*rows, "", sentence))
