"""The memory that a computation takes, measured on one image and on two, and how it is kept, on any device."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specguard.certificates import certify
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.studies.samples import Samples, TextSamples

_ROOM = 1.5  # for temporary memory of kernels, and for memory that allocators reserve
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # parameters of glibc's mallopt


class _Meter(TorchDispatchMode):
    """Record the peak number of bytes of the tensors that are created in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def peak_bytes(work: Callable[[], object]) -> int:
    """The peak number of bytes of the tensors that `work` creates."""
    meter = _Meter()
    with meter, torch.no_grad():
        work()
    return meter.peak


def images_within(budget: int, work: Callable[[int], object]) -> int:
    """The number of images that `work(count)` can process at once within `budget` bytes.

    The memory is extrapolated linearly from one and two images.
    """
    one, two = (peak_bytes(lambda count=count: work(count)) * _ROOM for count in (1, 2))  # type: ignore[misc]
    if one > budget:
        raise ConfigError(f"one image alone takes about {one / 2**30:.2g} GiB, more than {budget / 2**30:.2g} GiB")
    return 1 + int((budget - one) / max(two - one, 1.0))


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next tensors, where its C library is glibc.

    Tensors of megabytes otherwise come from the kernel page by page, at every operation: two thirds of the CPU time
    of a large enclosure.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 2**26)):
        mallopt(parameter, value)


def proof_of_first(samples: Samples, count: int, methods: Sequence[str], ball: Ball) -> None:
    """Certify `count` copies of the first image at once, to measure the memory."""
    if isinstance(samples, TextSamples):
        raise ConfigError("the memory of sentences depends on their length; use a smaller batch instead")
    for batch in samples.batches(torch.zeros(count, dtype=torch.long)):
        certify(batch.prepared.program, batch.inputs, batch.labels, ball, methods, search=False)
