"""What the page shows of each run, as values that a template can print: no HTML here, no decision there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specguard.records.accuracy import Proportion
from specguard.records.base import Json
from specguard.report.export import class_rows
from specguard.report.studies import Attacked, Certified, Checked, Looked, Run, Training

_BALLS, _CLASSES, _COMMANDS = 4, 100, 20  # of each, so many are shown
_Share = tuple[tuple[str, float], Proportion, Attacked | Certified]


@dataclass(frozen=True)
class Bar:
    """One share of a run, and what it is a share of."""

    kind: str  # clean, attacked or certified
    name: str
    share: Proportion


@dataclass(frozen=True)
class Stage:
    """What was done, how long it took, and with which commands, where."""

    name: str
    place: str
    seconds: float | None
    commands: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class ClassTable:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, int, tuple[Proportion | None, ...]], ...]
    left_out: int


def radius_text(radius: float) -> str:
    """8/255 where it is that, else a few digits."""
    steps = round(255 * radius)
    return f"{steps}/255" if steps > 0 and abs(255 * radius - steps) < 1e-6 else f"{radius:.4g}"


def ball_text(norm: str, radius: float) -> str:
    return f"{norm} {radius_text(radius)}"


def clean_share(run: Run) -> Proportion | None:
    """The clean accuracy on as many images as anything was measured on; of as many, on a stratified subset."""
    studies: list[Attacked | Certified] = [*run.attacked, *run.certified]
    found = [study.clean for study in sorted(studies, key=_stratified, reverse=True)]
    if run.training is not None:
        found.append(run.training.accuracy)
    return max(found, key=lambda share: share.total, default=None)


def attacked_shares(run: Run) -> dict[tuple[str, float], Proportion]:
    """By ball, what stands every attack that was tried; of several evaluations the one with most images."""
    rows: list[_Share] = [((row.norm, row.radius), row.accuracy, hit) for hit in run.attacked for row in hit.worst]
    rows += [((study.norm, row.radius), row.attacked, study) for study in run.certified for row in study.rows]
    return _foremost(rows, lambda share: -share.count)


def proved_shares(run: Run) -> dict[tuple[str, float], Proportion]:
    """By ball, what is certified; of several studies, on most images."""
    rows: list[_Share] = [((s.norm, row.radius), row.certified, s) for s in run.certified for row in s.rows]
    return _foremost(rows, lambda share: share.count)


def _foremost(rows: list[_Share], better: Callable[[Proportion], int]) -> dict[tuple[str, float], Proportion]:
    """By ball, the share of most images; of as many, that of a stratified subset, and then the better one."""
    ordered = sorted(rows, key=lambda row: (row[1].total, _stratified(row[2]), better(row[1])))
    return dict(sorted({ball: share for ball, share, _ in ordered}.items()))


def _stratified(study: Attacked | Certified) -> bool:
    return study.origin.subset_of is not None


def bars(run: Run) -> list[Bar]:
    """Clean, attacked and certified, a few of each."""
    clean = clean_share(run)
    found = [] if clean is None else [Bar("clean", "classified right", clean)]
    for kind, shares in (("attacked", attacked_shares(run)), ("certified", proved_shares(run))):
        word = "stands attacks" if kind == "attacked" else "certified"
        found += [Bar(kind, f"{word}, {ball_text(*ball)}", shares[ball]) for ball in chosen(list(shares))]
    return found


def chosen(balls: Sequence[tuple[str, float]], most: int = _BALLS) -> list[tuple[str, float]]:
    """A few of many, evenly, with the last."""
    if len(balls) <= most:
        return list(balls)
    step = (len(balls) - 1) / (most - 1)
    return [balls[round(i * step)] for i in range(most)]


def verdict(run: Run) -> str:
    """The run in one or two sentences."""
    if not run.certified:
        shares = attacked_shares(run)
        if not shares:
            return ""
        ball, share = min(shares.items(), key=lambda item: item[1].value)
        return (
            f"Of {share.total:,} images, {share.count:,} stand every attack tried at {ball_text(*ball)}. "
            "Nothing is proved about them."
        )
    study = max(run.certified, key=lambda study: (study.n, _stratified(study)))
    proved = [row for row in study.rows if row.certified.count]
    row = proved[-1] if proved else study.rows[0]
    place = ball_text(study.norm, row.radius)
    rest = f"{row.broken:,} are broken or wrong from the start; {row.unknown:,} are neither."
    if not proved:
        return f"Of {study.n:,} images, none is certified, even at {place}. {rest}"
    return (
        f"Of {study.n:,} images, {row.certified.count:,} are certified at {place}: "
        f"no attack of that size can change their class. {rest}"
    )


def images_text(study: Attacked | Certified | Looked) -> str:
    """How many images a study is about, and how they were chosen where they are not the first."""
    of = study.origin.subset_of
    return f"{study.n:,} images" + ("" if of is None else f", a stratified subset of {of:,}")


def subsets(run: Run) -> list[str]:
    """One sentence for every choice of images that are not the first of the data set."""
    places: dict[str, list[str]] = {}
    studies: list[Attacked | Certified | Looked] = [*run.attacked, *run.looked, *run.certified]
    for study in studies:
        if study.origin.subset_of is not None:
            places.setdefault(images_text(study), []).append(study.origin.place)
    return [f"In {' and '.join(at)}: {text}, in which every class has its share." for text, at in places.items()]


def median_radius(run: Run) -> tuple[str, float] | None:
    """The best family's median certified radius, over the images that are right."""
    known = [
        (median, family)
        for study in run.certified
        if study.searched
        for family, median in study.medians.items()
        if median is not None
    ]
    best = max(known, default=None)
    return None if best is None else (best[1], best[0])


def stages(run: Run) -> list[Stage]:
    """All work on a run, in the order in which it is usually done."""
    studies: list[tuple[str, Training | Attacked | Looked | Certified | Checked]] = []
    if run.training is not None:
        studies.append(("training", run.training))
    studies += [("attack", study) for study in run.attacked]
    studies += [("spectra", study) for study in run.looked]
    studies += [("proofs", study) for study in run.certified]
    studies += [("check of the proofs", study) for study in run.checked]
    found = []
    for name, study in studies:
        seconds = study.origin.seconds
        if seconds is None and isinstance(study, Certified) and study.per_image:
            seconds = study.n * sum(study.per_image.values())
        found.append(_stage(name, study.origin.place, seconds, study.origin.environments))
    found += [
        _stage(f"{study.kind}, unfinished", study.origin.place, None, study.origin.environments)
        for study in run.unfinished
    ]
    return found


def _stage(name: str, place: str, seconds: float | None, environments: Sequence[Json]) -> Stage:
    commands = dict.fromkeys(str(e["command"])[:2000] for e in environments if isinstance(e.get("command"), str))
    return Stage(name, place, seconds, tuple(commands)[-_COMMANDS:], described_environment(environments))


def described_environment(environments: Sequence[Json]) -> str:
    """Hardware, versions and commit of the last start."""
    if not environments:
        return ""
    last = environments[-1]
    hardware, versions = (last[k] if isinstance(last.get(k), dict) else {} for k in ("hardware", "versions"))
    words = []
    if isinstance(gpu := hardware.get("gpu"), str):
        words.append(gpu)
    else:
        words += [f"{hardware['cpu']} CPU"] if isinstance(hardware.get("cpu"), str) else []
        words += [f"{hardware['threads']} threads"] if isinstance(hardware.get("threads"), int) else []
    words += [f"{name} {version}" for name, version in versions.items() if isinstance(version, str)]
    if isinstance(commit := last.get("commit"), str):
        words.append(f"commit {commit[:12]}{'+' if commit.endswith('+') else ''}")
    return ", ".join(words)[:400]


def class_table(run: Run) -> ClassTable | None:
    """Classes by rows, a column for every study and ball; of very many, the weakest."""
    columns: dict[tuple[str, str], None] = {}
    cells: dict[str, dict[tuple[str, str], Proportion]] = {}
    for row in class_rows(run, 0):
        what = "stands attacks" if row.what == "worst case" else row.what
        ball = "" if row.radius is None else ball_text(row.norm, row.radius)
        column = (row.study if row.what == "clean" else "", f"{what} {ball}".strip())
        columns[column] = None
        cells.setdefault(row.class_, {})[column] = row.accuracy
    if not cells:
        return None
    shown = _without_repeated_clean(list(columns))
    rows = [
        (name, max(share.total for share in found.values()), tuple(found.get(column) for column in shown))
        for name, found in cells.items()
    ]
    if len(rows) > _CLASSES:
        rows = sorted(rows, key=lambda row: min(share.value for share in row[2] if share is not None))[:_CLASSES]
    return ClassTable(tuple(name for _, name in shown), tuple(rows), len(cells) - len(rows))


def _without_repeated_clean(columns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One clean column: that of the first study that has one."""
    clean = [column for column in columns if column[1] == "clean"]
    return [column for column in columns if column[1] != "clean" or column == clean[0]]


def checks(run: Run) -> dict[str, Checked]:
    """By the place of a certification, the check of the very file that lies there."""
    by_digest = {study.records: study for study in run.checked}
    return {
        study.origin.place: by_digest[study.margins.digest]
        for study in run.certified
        if study.margins is not None and study.margins.digest in by_digest
    }


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
