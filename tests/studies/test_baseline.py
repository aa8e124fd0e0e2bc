"""The linear baseline in a study: the numbers of the committed recipe, fitted once and kept."""

import json
import sys
from pathlib import Path

import pytest

from specguard.data import digits
from specguard.errors import RunError
from specguard.studies import linear_baseline, stored_baseline

COMMITTED = Path(__file__).parent.parent.parent / "recipes" / "digits_certified" / "linear.json"


def test_it_gives_the_numbers_of_the_committed_recipe():
    """Up to a digit or two: another build of the solver may end a little elsewhere."""
    committed, data = json.loads(COMMITTED.read_text()), digits()
    found = linear_baseline(data, data.test, [row["radius"] for row in committed["radii"]])
    assert found.n == committed["n"]
    assert abs(found.clean.count - committed["clean"]["count"]) <= 2
    for row, wanted in zip(found.radii, committed["radii"], strict=True):
        assert abs(row.certified.count - wanted["certified"]["count"]) <= 2


def test_it_is_fitted_once_and_another_one_is_refused(tmp_path, monkeypatch):
    data, path = digits(), tmp_path / "baseline.json"
    first = stored_baseline(path, data, data.test, (0.1,), "l2")
    monkeypatch.setattr(sys.modules[linear_baseline.__module__], "linear_baseline", None)  # not called again
    assert stored_baseline(path, data, data.test, (0.1,), "l2") == first
    with pytest.raises(RunError, match="another baseline"):
        stored_baseline(path, data, data.test, (0.1,), "linf")
