"""What zonotopes add on networks that were trained for certificates."""

from published.cells import Record, radius_name, read, table
from published.relational import RELATIONAL, limits, measured

NETWORKS = {
    "digits-weak": "Digits, one block, penalty 0.03",
    "digits-strong": "the same, penalty 0.1",
    "cifar10-l2": "CIFAR-10, three Lipschitz blocks",
    "cifar10-linf": "the same",
}
METHODS = ("local", "adjoint", "mixed", "zonotope")
COUNTS = ("network", "ball", "n", *METHODS, "without zonotopes", "with them", "lost")
LARGEST = ("network", "norm", "n", *METHODS, "zonotope is the largest", "what limits `zonotope`")


def added() -> str:
    """Images certified at fixed radii, largest radii, and how both were measured."""
    records = added_records()
    counts = table(
        COUNTS, (_counts(name, record, ball) for name, record in records.items() for ball in record["balls"])
    )
    largest = table(LARGEST, (_largest(name, of) for name, record in records.items() for of in record["largest"]))
    return "\n".join([*counts, "", *largest, "", _said(records)])


def added_records() -> dict[str, Record]:
    """The summaries of the rows that were measured."""
    return {name: read(path) for name in NETWORKS if (path := RELATIONAL / f"{name}.json").exists()}


def _counts(name: str, record: Record, ball: Record) -> list[str]:
    box = ", [0, 1]" if ball["box"] else ""
    after = f"**{ball['after']}**" if ball["after"] > ball["before"] else str(ball["after"])
    return [
        NETWORKS[name],
        f"{ball['norm']} {radius_name(ball['radius'])}{box}",
        str(record["n"]),
        *(str(ball["by"].get(method, "")) for method in METHODS),
        str(ball["before"]),
        after,
        str(len(ball["lost"])),
    ]


def _largest(name: str, of: Record) -> list[str]:
    n = of["radii"]["zonotope"]["n"]
    medians = (f"{of['radii'][method]['median']:.3g}" for method in METHODS)
    return [NETWORKS[name], of["norm"], str(n), *medians, f"{of['ahead']} of {n}", limits(of["limits"])]


def _said(records: dict[str, Record]) -> str:
    balls = [ball for record in records.values() for ball in record["balls"]]
    claims, checked, attacked, broken = (
        sum(ball[key] for ball in balls) for key in ("claims", "checked", "attacked", "broken")
    )
    attack = next(iter(records.values()))["study"]["attack"]
    return "\n".join(
        [
            f"APGD with {attack['restarts']} restarts of {attack['steps']} steps attacked every certified image in",
            f"its largest certified ball of each norm, {attacked:,} in all, and misclassified {broken}.",
            f"The independent checker proved {checked:,} of the {claims:,} claims again, one for every image, "
            "ball and method.",
            "",
            measured(records),
        ]
    )
