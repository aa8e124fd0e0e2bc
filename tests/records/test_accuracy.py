"""A fraction is shown with its size and its uncertainty, and a record that contradicts itself is refused."""

import msgspec
import pytest

from specguard.records.accuracy import Accuracy
from specguard.records.base import encode


def test_the_interval_is_wilsons_and_contains_the_fraction_also_at_the_edges():
    low, high = Accuracy.of(30, 40).interval95
    assert (round(low, 4), round(high, 4)) == (0.5981, 0.8581)
    assert Accuracy.of(0, 10).interval95[0] == 0
    assert 0 < Accuracy.of(0, 10).interval95[1] < 0.3
    assert Accuracy.of(10, 10).interval95[1] == 1


def test_it_reads_as_a_percentage_with_n():
    assert str(Accuracy.of(30, 40)) == "75.0 % [59.8, 85.8], n = 40"
    assert Accuracy.of(30, 40).n == 40


@pytest.mark.parametrize(
    "change",
    [{"count": 31}, {"n": 41}, {"n": 0}, {"value": 0.76}, {"interval95": (0.5, 0.9)}, {"count": 41}, {"more": 1}],
)
def test_what_contradicts_itself_is_refused(change):
    record = msgspec.to_builtins(Accuracy.of(30, 40))
    assert msgspec.json.decode(encode(record), type=Accuracy) == Accuracy.of(30, 40)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(encode({**record, **change}), type=Accuracy)
