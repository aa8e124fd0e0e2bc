"""The memory of a computation is what its tensors hold at once, and as many images are taken as fit."""

import pytest
import torch

from specguard.errors import ConfigError
from specguard.studies.memory import images_within, peak_bytes


def work(count: int) -> torch.Tensor:
    x = torch.zeros(count, 1000, dtype=torch.float64)
    y = x + 1
    total = (y * 2).sum(1)  # here x, y and 2 y are alive, and the sum
    del y
    return total + (x * 3).sum(1)


def test_the_peak_is_what_lives_at_once():
    assert peak_bytes(lambda: work(1)) == 3 * 8000 + 8
    assert peak_bytes(lambda: work(5)) == 5 * (3 * 8000 + 8)
    assert peak_bytes(lambda: None) == 0
    x = torch.zeros(1000)
    assert peak_bytes(lambda: x.view(10, 100).mT) == 4000  # a view makes its storage known, once


def test_as_many_images_as_fit():
    assert images_within(round(1.5 * 10 * 24008), work) == 10
    with pytest.raises(ConfigError, match="one image alone takes about"):
        images_within(30000, work)
