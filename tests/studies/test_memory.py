"""The memory of a computation is what its tensors hold at once, and as many images are taken as fit."""

import platform
import subprocess
import sys

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


FAULTS = """
import resource, torch
from specguard.studies.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory by other rules")
def test_memory_that_was_freed_is_used_again_without_asking_the_kernel():
    """In a process of its own, since the change lasts."""
    printed = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    before, after = map(int, printed.split())
    assert before > 1000
    assert after < before / 10
