"""docs/theorems.md is true: its functions and tests exist, and no guarantee is missing from it."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import specguard

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "docs" / "theorems.md"
STATES_A_SIDE = ("upper_", "lower_", "exact_", "certified")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the ledger's table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if not row[0].startswith("---")]


def named(path: str) -> object:
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def guarantees() -> set[str]:
    """Every public function or class of the package that states a guarantee, in its docstring or by its name."""
    found = set()
    for module_info in pkgutil.walk_packages(specguard.__path__, "specguard."):
        if module_info.name.endswith("__main__"):
            continue
        module = importlib.import_module(module_info.name)
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", None) != module.__name__ or name.startswith("_"):
                continue
            if inspect.isfunction(thing) or inspect.isclass(thing):
                stated = "Guarantee:" in (inspect.getdoc(thing) or "")
                if stated or name.startswith(STATES_A_SIDE):
                    found.add(f"{module.__name__}.{name}")
    return found


def problems(text: str) -> list[str]:
    """Everything that is wrong with a ledger."""
    wrong = []
    table = rows(text)
    keys = [row[0] for row in table]
    wrong += [f"the key {key} appears twice" for key in set(keys) if keys.count(key) > 1]
    for row in table:
        if len(row) != 5 or not all(row):
            wrong.append(f"row {row[0]} has an empty cell or another number of cells")
            continue
        key, _, _, function, test = row
        try:
            named(function.strip("`"))
        except (ImportError, AttributeError):
            wrong.append(f"row {key} names {function}, which does not exist")
        file, _, name = test.strip("`").partition("::")
        if not (ROOT / file).is_file() or not re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE):
            wrong.append(f"row {key} names {test}, which does not exist")
    recorded = {row[3].strip("`") for row in table if len(row) == 5}
    wrong += [f"{function} states a guarantee and has no row" for function in sorted(guarantees() - recorded)]
    return wrong


def test_the_ledger_is_true_and_complete():
    assert not problems(LEDGER.read_text())


def test_a_missing_row_a_wrong_function_and_a_wrong_test_are_all_noticed():
    text = LEDGER.read_text()
    without = "\n".join(line for line in text.splitlines() if not line.startswith("| power-lower"))
    assert problems(without) == ["specguard.linalg.power.power_step states a guarantee and has no row"]
    assert any("which does not exist" in p for p in problems(text.replace("power.power_step", "power.power_stop")))
    assert any("which does not exist" in p for p in problems(text.replace("::test_any_vector", "::test_no_vector")))
    assert any("twice" in p for p in problems(text.replace("| msvp-1 |", "| msvp-2 |")))
