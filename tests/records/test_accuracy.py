"""A share is shown with its size and its uncertainty."""

from specguard.records.accuracy import Proportion


def test_the_interval_is_wilsons_and_contains_the_share_also_at_the_edges():
    low, high = Proportion(30, 40).interval
    assert (round(low, 4), round(high, 4)) == (0.5981, 0.8581)
    assert Proportion(0, 10).interval[0] == 0
    assert 0 < Proportion(0, 10).interval[1] < 0.3
    assert Proportion(10, 10).interval[1] == 1


def test_it_reads_as_a_percentage_with_n():
    assert str(Proportion(30, 40)) == "75.0 % [59.8, 85.8], n = 40"
    assert Proportion(30, 40).record()["n"] == 40
