"""A leaderboard entry in the form RobustBench collects them."""

from typing import Any

from specguard.errors import ConfigError

Json = dict[str, Any]
_NORMS = {"linf": "Linf", "l2": "L2"}


def robustbench_record(summary: Json, *, name: str, architecture: str, dataset: str) -> Json:
    """The entry of the largest radius evaluated. Only an accuracy under AutoAttack is called that.

    What an evaluation cannot know (authors, venue, link, extra data) is null, to be filled in by a person.
    """
    if not summary["worst_case"]:
        raise ConfigError("a leaderboard entry needs an evaluation under attack")
    worst = max(summary["worst_case"], key=lambda row: row["radius"])
    auto = [
        row["accuracy"]["value"]
        for row in summary["attacks"]
        if (row["attack"], row["norm"], row["radius"]) == ("autoattack", worst["norm"], worst["radius"])
    ]
    return {
        "link": None,
        "name": name,
        "authors": None,
        "additional_data": None,
        "number_forward_passes": 1,
        "dataset": dataset,
        "venue": None,
        "architecture": architecture,
        "threat_model": _NORMS[worst["norm"]],
        "eps": _fraction(worst["radius"]) if worst["norm"] == "linf" else f"{worst['radius']:g}",
        "n": summary["n"],
        "clean_acc": f"{100 * summary['clean']['value']:.2f}",
        "autoattack_acc": f"{100 * auto[0]:.2f}" if auto else None,
        "best_known_acc": f"{100 * worst['accuracy']['value']:.2f}",
        "unreliable": bool(summary["flags"] or summary["warnings"]),
    }


def _fraction(radius: float) -> str:
    """8/255 rather than 0.0313725, where it is that."""
    steps = round(255 * radius)
    return f"{steps}/255" if steps and abs(255 * radius - steps) < 1e-6 else f"{radius:g}"
