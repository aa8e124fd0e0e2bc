"""The checker's interface of a layer at one image, in boxes.

A `Point` is a layer at the exact clean activation of an image, which a box encloses. `propagate` bounds the change
of its output when its input moves by r; `vjp` takes functionals of the output back to the input and bounds the
remainder. The formulas are those of the ledger (docs/theorems.md), implemented again for distances from the exact
clean values; errors are part of the boxes. Norms of matrices come from `enclosure.spectral_norm_above`. Nothing is
shared with `specguard.certificates`.
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
