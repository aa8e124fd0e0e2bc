"""A layer once more, in NumPy boxes: what the checker of certificates knows of it at one image.

A `Point` is a layer at the exact clean activation of an image, of which only a box is known. `spread` bounds how
far its output moves when its input moves by r; `pull` takes functionals of the output back to the input, and bounds
what that linear part leaves out. The formulas are those of the ledger (docs/theorems.md), written down a second
time, for distances from the exact clean values: no slack is passed on, for boxes hold it. Norms of matrices come
from `enclosure.spectral`. Nothing is shared with `specguard.certificates`.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specguard.checker.enclosure import Box

Terms = dict[str, NDArray[np.float64]]  # per rival
Remainder = Callable[[float], Terms]


class Point(Protocol):
    """A layer at one image's activation."""

    affine: bool

    @property
    def output(self) -> Box: ...

    def spread(self, radius: float, method: str) -> float: ...

    def pull(self, g: Box) -> tuple[Box, Remainder]: ...


Maker = Callable[[Box], Point]
