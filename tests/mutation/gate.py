"""The mutation gate: every small change that makes a proof unsound must make a test fail.

    python tests/mutation/gate.py --jobs 1

Every mutant is a copy of the source with one change. The test files run in order, each in a process of its own,
until one fails (`--all` runs all of them). The test that failed is written to `docs/mutants.json` and
`docs/mutants.md`. Verdicts are cached in `.mutants/` by the texts of the mutant, of the source and of the tests, so
an interrupted run continues. The gate fails if a mutant survives without an argument why every claim still holds.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutation.attention import ATTENTION  # noqa: E402
from mutation.checker import CHECKER  # noqa: E402
from mutation.checker_zonotope import CHECKER_ZONOTOPE  # noqa: E402
from mutation.distances import DISTANCES  # noqa: E402
from mutation.layers import LAYERS  # noqa: E402
from mutation.linalg import LINALG  # noqa: E402
from mutation.mutant import SOURCE, Mutant  # noqa: E402
from mutation.prover import CORE  # noqa: E402
from mutation.warm import Warm  # noqa: E402
from mutation.zonotope import ZONOTOPE  # noqa: E402

EVERY: tuple[Mutant, ...] = (
    *LINALG,
    *CORE,
    *LAYERS,
    *ATTENTION,
    *ZONOTOPE,
    *CHECKER,
    *CHECKER_ZONOTOPE,
    *DISTANCES,
)
TABLE = ROOT / "docs" / "mutants.json"
UNJUDGED = ROOT / "tests" / "mutation" / "unjudged.json"  # keys of mutants that no whole run has judged yet
_own = threading.local()
_KEPT = ROOT / ".mutants"
_UNKNOWN = 4  # exit code of pytest if a test does not exist
_LIMIT = 900  # seconds; a mutant that makes the tests exceed it is killed
_EXACT = (
    "test_formulas.py",
    "test_linalg.py",
    "test_networks.py",
    "test_layers.py",
    "test_attention.py",
)  # of the prover
_LAWS = (
    "certificates/test_rules.py",
    "certificates/test_activations.py",
    "certificates/test_planted.py",
    "certificates/test_linear.py",
    "certificates/zonotope/test_distances.py",
)
_FORMS = tuple(f"tests/checker/zonotope/test_{name}.py" for name in ("formulas", "distances", "contains"))
_ZONOTOPES = tuple(  # the cheapest first
    f"tests/certificates/zonotope/test_{name}.py"
    for name in (
        "norms",
        "formulas",
        "ranges",
        "inexact",
        "folding",
        "search",
        "margins",
        "method",
        "distances",
        "contains",
    )
)
_EXACT_ZONOTOPES = ("tests/exact/test_zonotope_maps.py", "tests/exact/test_zonotopes.py")
_PROVER, _CHECKER = ("certificates", "linalg", "nn"), ("nn", "checker")  # folders of the source
_HELPERS = (
    "tests/exact/numbers.py",
    "tests/exact/reference.py",
    "tests/exact/laws.py",
    "tests/exact/networks.py",
    "tests/exact/boxes.py",
    "tests/exact/checker.py",
    "tests/exact/zonotopes.py",
    "tests/certificates/layers.py",
    "tests/certificates/zonotope/balls.py",
    "tests/certificates/zonotope/inputs.py",
    "tests/certificates/zonotope/laws.py",
    "tests/certificates/zonotope/networks.py",
    "tests/certificates/zonotope/values.py",
    "tests/checker/zonotope/forms.py",
)
_NEAR = {"linalg": "test_linalg.py"}  # run first; the others in their order
_CORE = ("node", "propagate", "problem", "methods/radii", "methods/adjoint")
_NEAR |= {f"certificates/{name}.py": "test_networks.py" for name in _CORE}
_ATTENTION = ("forward", "point", "softmax", "rule", "weights", "remainder", "quadratic_form", "local", "lofast")
_NEAR |= {f"certificates/attention/{name}.py": "test_attention.py" for name in _ATTENTION}
_NEAR |= {"certificates/methods/zonotope.py": "test_method.py"}
_NEAR |= {
    f"certificates/zonotope/{name}.py": f"test_{name}.py" for name in ("folding", "margins", "norms", "search")
}
_INTRODUCTION = """
Every row is one small change of the source that would make a proof, or the check of one, unsound: a rounding left
out, a constant too small, a term dropped. It is killed when a test fails with it. A change that leaves every claim
true is equivalent, and its row says why. `python tests/mutation/gate.py` writes this page and fails if a mutant
survives; tests run in the order exact, checker, laws (of zonotopes: laws, exact, networks), until one fails.
"""


def killers(mutant: Mutant) -> dict[str, list[str]]:
    """The tests to run, in this order, by kind; for an equivalent mutant, only the nearest."""
    if mutant.of_zonotopes:
        near = f"tests/certificates/zonotope/{_NEAR.get(mutant.file, 'test_contains.py')}"
        laws = sorted(_ZONOTOPES, key=lambda name: name != near)
        networks = ["tests/certificates/zonotope/test_networks.py"]
        whole = {"laws": laws, "exact": list(_EXACT_ZONOTOPES), "networks": networks}
        return {"laws": [near]} if mutant.equivalent else whole
    if mutant.file.startswith("checker/zonotope/"):
        exact = ["tests/exact/test_checker_zonotopes.py"]
        networks = [f"tests/checker/zonotope/test_{name}.py" for name in ("margins", "networks")]
        whole = {"checker": list(_FORMS), "exact": exact, "networks": networks}
        return {"checker": [_FORMS[0]]} if mutant.equivalent else whole
    if mutant.of_checker:
        names = ["test_checker_layers.py", "test_checker_networks.py", "test_enclosure.py"]
        near = "test_enclosure.py" if mutant.file.endswith("enclosure.py") else "test_checker_layers.py"
        others = {"checker": ["tests/checker/test_checker.py", _FORMS[1]]}
    else:
        names, near = list(_EXACT), _NEAR.get(mutant.file.split("/")[0], _NEAR.get(mutant.file, "test_layers.py"))
        laws = [*(f"tests/{name}" for name in _LAWS), "tests/linalg/test_norms.py"]
        others = {"checker": ["tests/mutation/checked.py"], "laws": laws}
    if mutant.equivalent:
        return {"exact": [f"tests/exact/{near}"]}
    return {"exact": [f"tests/exact/{name}" for name in sorted(names, key=lambda name: name != near)], **others}


def key(mutant: Mutant) -> str:
    """A hash of the mutant, which identifies its row."""
    return _hash("\0".join((mutant.file, mutant.old, mutant.new, mutant.equivalent)))


def judged() -> tuple[Mutant, ...]:
    """The mutants of the table."""
    unjudged = set(json.loads(UNJUDGED.read_text()))
    return tuple(mutant for mutant in EVERY if key(mutant) not in unjudged)


def source_hash(kind: str, tests: list[str], of_checker: bool) -> str:
    """A hash of the source and the tests that a verdict depends on."""
    folders = _CHECKER if of_checker else (*_PROVER, *_CHECKER) if kind == "checker" else _PROVER
    files = [path for folder in folders for path in sorted((SOURCE / folder).rglob("*.py"))]
    files += [ROOT / path for path in (*_HELPERS, *tests)]
    return _hash("\0".join(f"{path.relative_to(ROOT)}\0{path.read_text()}" for path in files))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _warm() -> Warm:
    """The process that runs the tests of this thread."""
    if not hasattr(_own, "warm"):
        _own.warm = Warm(ROOT)
    return _own.warm


def run_tests(mutant: Mutant | None, tests: list[str]) -> str:
    """The first test that fails for a mutant, or for the unchanged source if None; empty if all pass."""
    if not tests:
        return ""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "specguard"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            changed = copy / mutant.file
            changed.write_text(mutant.apply(changed.read_text()))
        run = _warm().run(folder, tests, _LIMIT)
    if run.code is None:
        return "no end"
    if run.code == 0:
        return ""
    failed = [line.split()[1] for line in run.output.splitlines() if line.startswith("FAILED ")]
    if run.code == _UNKNOWN and len(tests) == 1:
        return ""  # the test was renamed or removed
    if run.code != 1 or not failed:
        raise RuntimeError(f"the tests did not run:\n{run.output[-4000:]}")
    return failed[0].removeprefix("tests/")


def verdict(mutant: Mutant | None, kind: str, tests: list[str], of_checker: bool, before: str = "") -> str:
    """The first test that fails, cached on disk; the one that failed `before` runs first."""
    name = "as it is" if mutant is None else key(mutant)
    path = _KEPT / f"{_hash(f'{name} {kind} {source_hash(kind, tests, of_checker)}')}.json"
    if path.exists():
        return json.loads(path.read_text())["noticed"]
    known = before.partition("::")[0] in [test.removeprefix("tests/") for test in tests]
    found = (run_tests(mutant, [f"tests/{before}"]) if known else "") or run_tests(mutant, tests)
    path.write_text(json.dumps({"noticed": found}))
    return found


def load_previous() -> dict[str, dict[str, str]]:
    """The tests that failed when the table was written: they run first."""
    return {row["key"]: row["noticed"] for row in json.loads(TABLE.read_text())} if TABLE.exists() else {}


def judge(mutant: Mutant, every: bool, before: dict[str, str]) -> dict[str, str]:
    """The first failing test of every kind that ran; empty if none of that kind failed."""
    found: dict[str, str] = {}
    for kind, tests in killers(mutant).items():
        found[kind] = verdict(mutant, kind, tests, mutant.of_checker, before.get(kind, ""))
        if not every and (found[kind] or mutant.equivalent):  # for an equivalent mutant, only the first kind runs
            break
    return found


def row(mutant: Mutant, verdicts: dict[str, str]) -> dict[str, object]:
    """The row of a mutant in the table."""
    fate = "killed" if any(verdicts.values()) else "equivalent" if mutant.equivalent else "survived"
    return {
        "key": key(mutant),
        "file": mutant.file,
        "breaks": mutant.breaks,
        "equivalent": mutant.equivalent,
        "fate": fate,
        "noticed": {kind: test for kind, test in verdicts.items() if test},
    }


def page(rows: list[dict[str, object]]) -> str:
    """The table as Markdown."""
    count = {fate: sum(r["fate"] == fate for r in rows) for fate in ("killed", "equivalent", "survived")}
    lines = [
        "# Mutants",
        "",
        *_INTRODUCTION.strip().splitlines(),
        "",
        f"{len(rows)} mutants: "
        + ", ".join(f"{number} {fate}" for fate, number in count.items())
        + "."
        + (f" {more} more are written and not judged yet." if (more := len(EVERY) - len(rows)) else ""),
        "",
        "| file | what is then false | failing test |",
        "|---|---|---|",
    ]
    for r in rows:
        by = "; ".join(f"{kind}: `{test}`" for kind, test in r["noticed"].items())  # type: ignore[attr-defined]
        why = by or (f"equivalent: {r['equivalent']}" if r["fate"] == "equivalent" else "**survived**")
        lines.append(f"| `{r['file']}` | {r['breaks']} | {why} |".replace("||", "\\|\\|"))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--all", action="store_true", help="run all tests, not only until one fails")
    parser.add_argument(
        "--only", default="", help="mutants whose file or description has this text; writes nothing"
    )
    chosen = parser.parse_args()
    mutants = [m for m in EVERY if chosen.only in m.file or chosen.only in m.breaks]
    begun = time.monotonic()
    _KEPT.mkdir(exist_ok=True)
    rows = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        asked = list({(m.of_checker, m.of_zonotopes): m for m in mutants if not m.equivalent}.values())
        plain = [(None, kind, tests, m.of_checker) for m in asked for kind, tests in killers(m).items()]
        unchanged = pool.map(lambda question: verdict(*question), plain)
        before = load_previous()
        verdicts = pool.map(lambda mutant: judge(mutant, chosen.all, before.get(key(mutant), {})), mutants)
        for number, (mutant, found) in enumerate(zip(mutants, verdicts, strict=True), 1):
            rows.append(row(mutant, found))
            by = "; ".join(f"{kind}: {test}" for kind, test in found.items() if test)
            spent = time.monotonic() - begun
            print(
                f"{number}/{len(mutants)} {spent:.0f} s  {rows[-1]['fate']}  {mutant.file}: {mutant.breaks}  {by}",
                flush=True,
            )
    if failed := [test for test in unchanged if test]:
        print(f"{failed[0]} fails without any change")
        return 2
    if not chosen.only:
        UNJUDGED.write_text("[]\n")
        TABLE.write_text(json.dumps(rows, indent=1) + "\n")
        TABLE.with_suffix(".md").write_text(page(rows))
    survivors = [r for r in rows if r["fate"] == "survived"]
    print(f"{len(rows)} mutants, {len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
