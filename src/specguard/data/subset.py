"""A subset of images in which every class has its share: the beginning of an order of the whole data set.

Files of a folder stand class by class, so that the first of them are all of one class. Here images are put into an
order of which every beginning is stratified: of the first N, a class of the share p of all images has floor(N p) or
ceil(N p), so that fewer images are always among more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from jaxtyping import Int64
from torch import Tensor

from specguard.records.base import Subset as SubsetRecord
from specguard.rng import Noise

_PURPOSE = int.from_bytes(b"subset")  # random numbers that nothing else uses


@dataclass(frozen=True)
class Subset:
    """The images of a split by their `index` in the data set, the first `len(index)` of `stratified_order`."""

    index: Int64[Tensor, " sample"]
    seed: int
    of: int  # how many images the data set has

    def record(self) -> SubsetRecord:
        """For the header of a study."""
        return SubsetRecord(rule="stratified", seed=self.seed, of=self.of)


def stratified_order(labels: Sequence[int], seed: int) -> list[int]:
    """All places of `labels` in an order of which every beginning is stratified: a function of nothing else.

    Images of a class come in a random order. The j-th of a class of n_c among n images, from 1 on, belongs into the
    places from floor((j - 1) n / n_c) + 1 to ceil(j n / n_c): these windows say that a class has floor or ceil of
    its share in every beginning. Each place goes to an image whose window has begun, and whose end is nearest.

    So |count - N n_c / n| < 1 for every N and every class. That no image misses its window: done by n_c / n of a
    place at a time, all images keep theirs; unit jobs with whole windows that can be done in fractions can be done
    in whole places, and the earliest deadline first finds how (Baruah, Cohen, Plaxton and Varvel 1996, with one
    processor).
    """
    n = len(labels)
    bits = Noise.of(torch.arange(n), seed).fold(_PURPOSE).bits(()).tolist()
    classes: dict[int, list[tuple[int, int]]] = {}
    for image, label in enumerate(labels):
        classes.setdefault(label, []).append((bits[image], image))
    beginning: list[list[tuple[int, int, int]]] = [[] for _ in labels]  # last place, random bits, image
    for members in classes.values():
        for j, member in enumerate(sorted(members)):
            beginning[j * n // len(members)].append((-(-(j + 1) * n // len(members)), *member))
    order: list[int] = []
    waiting: list[tuple[int, int, int]] = []
    for begun in beginning:
        for job in begun:
            heappush(waiting, job)
        order.append(heappop(waiting)[-1])
    return order
