"""A layer once more, in NumPy boxes: what the checker of certificates knows of it at one image.

A `Point` is a layer at the exact clean activation of an image, of which only a box is known. `propagate` bounds how
far its output moves when its input moves by r; `vjp` takes functionals of the output back to the input, and bounds
what that linear part leaves out. The formulas are those of the ledger (docs/theorems.md), written down a second
time, for distances from the exact clean values: no error is passed on, for boxes hold it. Norms of matrices come
from `enclosure.upper_spectral`. Nothing is shared with `specguard.certificates`.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specguard.checker.enclosure import Box

Terms = dict[str, NDArray[np.float64]]  # per other class
Remainder = Callable[[float], Terms]


class Point(Protocol):
    """A layer at one image's activation."""

    affine: bool

    @property
    def output(self) -> Box: ...

    def propagate(self, radius: float, method: str) -> float: ...

    def vjp(self, g: Box) -> tuple[Box, Remainder]: ...


Maker = Callable[[Box], Point]
