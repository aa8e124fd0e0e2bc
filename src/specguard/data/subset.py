"""Stratified subsets: prefixes of one order of the whole data set.

The files of a folder are sorted by class, so that the first of them are all of one class. Here images are put into
an order of which every prefix is stratified: a class with the fraction p of all images has floor(N p) or ceil(N p)
of the first N. Smaller subsets are contained in larger ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from jaxtyping import Int64
from torch import Tensor

from specguard.records.base import Subset as SubsetRecord
from specguard.rng import Noise

_PURPOSE = int.from_bytes(b"subset")  # selects random numbers of its own


@dataclass(frozen=True)
class Subset:
    """The images of a split by their `index` in the data set: a prefix of `stratified_order`."""

    index: Int64[Tensor, " sample"]
    seed: int
    of: int  # number of images in the data set

    def record(self) -> SubsetRecord:
        """For the header of a study."""
        return SubsetRecord(rule="stratified", seed=self.seed, of=self.of)


def stratified_order(labels: Sequence[int], seed: int) -> list[int]:
    """The indices of `labels` in an order of which every prefix is stratified, determined by labels and seed.

    Images of a class are in random order. Image j = 1, 2, ... of a class of n_c among n images belongs at one of
    the positions floor((j - 1) n / n_c) + 1 to ceil(j n / n_c): a class then has floor or ceil of its fraction in
    every prefix. Each position goes to the image with the nearest end among those whose window has begun.

    So |count - N n_c / n| < 1 for every N and every class. No image misses its window: a fractional schedule, which
    gives each class n_c / n of every position, meets all windows; for unit jobs with integer windows an integral
    schedule then exists, and earliest deadline first finds it (Baruah, Cohen, Plaxton and Varvel 1996, with one
    processor).
    """
    n = len(labels)
    bits = Noise.of(torch.arange(n), seed).fold(_PURPOSE).bits(()).tolist()
    classes: dict[int, list[tuple[int, int]]] = {}
    for image, label in enumerate(labels):
        classes.setdefault(label, []).append((bits[image], image))
    starting: list[list[tuple[int, int, int]]] = [[] for _ in labels]  # last position, random bits, image
    for members in classes.values():
        for j, member in enumerate(sorted(members)):
            starting[j * n // len(members)].append((-(-(j + 1) * n // len(members)), *member))
    order: list[int] = []
    waiting: list[tuple[int, int, int]] = []
    for jobs in starting:
        for job in jobs:
            heappush(waiting, job)
        order.append(heappop(waiting)[-1])
    return order
