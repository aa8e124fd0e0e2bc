"""The laws of bounds from above, run over every bound and matrices of every kind, and over unsound bounds.

What a bound is compared with must be right to the last bit, or below the norm for certain: integers of any length
give `|A v|^2 / |v|^2` without any rounding, mpmath gives singular values to fifty digits, and some norms are known.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from specguard.linalg import (
    LinearOperator,
    dense_operator,
    eigenvalue_range,
    identity,
    kronecker,
    power_step,
    top_right_vectors,
    upper_cholesky,
    upper_eigenvalue,
    upper_frobenius,
    upper_gram,
    upper_randomized,
    upper_row_column,
    upper_svd,
)

Bound = Callable[[Tensor], Tensor]
BOUNDS: dict[str, Bound] = {
    "frobenius": upper_frobenius,
    "row_column": upper_row_column,
    "svd": upper_svd,
    "gram": upper_gram,
    "gram, one squaring": lambda A: upper_gram(A, 1),
    "gram, three squarings": lambda A: upper_gram(A, 3),
    "gram, 16 squarings": lambda A: upper_gram(A, 16),
    "gram, 60 squarings": lambda A: upper_gram(A, 60),  # nothing is left but rounding
    "cholesky": upper_cholesky,
    "cholesky, no excess to speak of": lambda A: upper_cholesky(A, 1e-16),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def double(rows: list[list[float]]) -> Tensor:
    return torch.tensor([rows], dtype=torch.float64)


def shifted(x: Tensor, exponent: Tensor) -> Tensor:
    """x 2^exponent, exactly; torch's own forms the power first, which may be out of range."""
    return torch.from_numpy(np.ldexp(x.numpy(), exponent.int().numpy()))


def hadamard(order: int) -> Tensor:
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < order:
        H = torch.kron(H, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return H


def hilbert(n: int) -> Tensor:
    i = torch.arange(n, dtype=torch.float64)
    return 1 / (i[:, None] + i + 1)


def kahan(n: int, angle: float = 1.2) -> Tensor:
    """Triangular and graded, on which algorithms that reveal ranks fail."""
    upper = torch.eye(n, dtype=torch.float64) - math.cos(angle) * torch.ones(n, n, dtype=torch.float64).triu(1)
    return math.sin(angle) ** torch.arange(n, dtype=torch.float64)[:, None] * upper


@cache
def matrices() -> dict[str, Tensor]:
    g = seeded(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def orthogonal(*shape: int) -> Tensor:
        return torch.linalg.qr(normal(*shape))[0]

    def spread(low: float, high: float, n: int) -> Tensor:
        return torch.logspace(low, high, n, dtype=torch.float64)

    mixed = normal(4, 5, 7) * torch.tensor([1e300, 1.0, 0.0, 1e-300], dtype=torch.float64).view(-1, 1, 1)
    corner = torch.zeros(1, 4, 6, dtype=torch.float64)
    corner[0, 2, 3] = -1 / 3
    least = 5e-324
    repeated = orthogonal(2, 8, 5) * torch.tensor([2.0, 2, 2, 1, 1], dtype=torch.float64) @ orthogonal(2, 5, 5).mT
    whole = {
        "square": normal(3, 6, 6),
        "tall": normal(3, 9, 4),
        "wide": normal(3, 4, 9),
        "one row": normal(3, 1, 7),
        "one column": normal(3, 7, 1),
        "one entry": normal(3, 1, 1),
        "products": normal(3, 7, 5) @ normal(3, 5, 6) @ normal(3, 6, 4),
        "orthogonal": orthogonal(3, 6, 6),
        "orthonormal columns": orthogonal(3, 8, 3),
        "rank one": normal(3, 6, 1) @ normal(3, 1, 5),
        "rank two": normal(3, 6, 2) @ normal(3, 2, 5),
        "repeated": repeated,
        "zero": torch.zeros(2, 4, 3, dtype=torch.float64),
        "one entry that is not zero": corner,
        "ones": torch.ones(1, 7, 5, dtype=torch.float64),
        "thirds": torch.full((1, 7, 5), 1 / 3, dtype=torch.float64),
        "identity": torch.eye(7, dtype=torch.float64).unsqueeze(0) * 0.1,
        "diagonal": torch.diag(normal(6)).unsqueeze(0),
        "hadamard": hadamard(8).unsqueeze(0) / 3,
        "hilbert": hilbert(8).unsqueeze(0),
        "kahan": kahan(8).unsqueeze(0),
        "triangular": normal(2, 6, 6).triu(),
        "vandermonde": (torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None] ** torch.arange(6)).unsqueeze(0),
        "almost canceling": double([[1.0, 1.0, 1.0], [1.0, 1.0 + 2**-52, 1.0], [1.0, 1.0, 1.0 - 2**-53]]),
        "graded columns": normal(2, 7, 9) * spread(-8, 8, 9),
        "graded rows": normal(2, 9, 7) * spread(-8, 8, 9)[:, None],
        "graded values": orthogonal(2, 8, 8) * spread(-8, 8, 8) @ orthogonal(2, 8, 8),
        "graded beyond all squares": normal(2, 5, 5) * spread(-300, 0, 5),
        "from the least to the largest": normal(2, 5, 5) * spread(-300, 300, 5),
        "1e150": 1e150 * normal(2, 5, 6),
        "1e300": 1e300 * normal(2, 5, 6),
        "1e-150": 1e-150 * normal(2, 5, 6),
        "1e-300": 1e-300 * normal(2, 6, 5),
        "near the smallest normal": 2.0**-1022 * normal(2, 6, 5),
        "denormal": 1e-315 * normal(2, 6, 5),
        "the smallest number": torch.full((1, 3, 2), least, dtype=torch.float64),
        "the smallest number alone": double([[0.0, 0.0], [0.0, -least]]),
        "one and the smallest number": double([[1.0, least], [least, 1.0]]),
        "the largest number": double([[1.7976931348623157e308]]),
        "an overflowing norm": torch.full((1, 3, 4), 1.7e308, dtype=torch.float64),
        "mixed scales": mixed,
        "float32": normal(3, 6, 5).float(),
        "float32, one row": normal(3, 1, 9).float(),
        "float32, largest": torch.full((1, 4, 5), 3.4e38),
        "float32, denormal": 1e-41 * torch.rand(2, 5, 4, generator=g),
        "bfloat16": normal(3, 6, 5).bfloat16(),
        "float16": normal(3, 5, 6).half(),
        "float16, denormal": (1e-6 * normal(3, 5, 6)).half(),
    }  # fmt: skip
    return whole


# Arithmetic without rounding.


def whole_numbers(x: Tensor) -> tuple[np.ndarray, int]:
    """Integers n, of any length, and an exponent e, with x = n 2^e exactly."""
    mantissa, exponent = np.frexp(x.double().numpy())
    exponent = exponent.astype(np.int64) - 53
    least = int(exponent[mantissa != 0].min()) if mantissa.any() else 0
    digits = np.ldexp(mantissa, 53).astype(np.int64).astype(object)
    return digits * 2 ** np.maximum(exponent - least, 0).astype(object), least


@dataclass(frozen=True)
class Witness:
    """For every matrix of a stack, `|A v|^2 = above 2^(2 exponent)` and `|v|^2 = below`, as exact integers."""

    above: np.ndarray
    below: np.ndarray
    exponent: int

    def contradicts(self, bound: Tensor) -> np.ndarray:
        """Where `bound |v| < |A v|`: where it cannot be a bound, without any doubt or tolerance."""
        assert bound.shape == self.above.shape
        if bound.isnan().any():
            return np.isnan(bound.numpy())
        size, least = whole_numbers(torch.where(bound.isinf(), 0.0, bound))
        size = np.where(bound.numpy() < 0, 0, size)
        left, right = size * size * self.below, self.above
        shift = 2 * (least - self.exponent)
        short = left * 2**shift < right if shift >= 0 else left < right * 2**-shift
        return short.astype(bool) & bound.isfinite().numpy()


def witness(A: Tensor) -> Witness:
    """The computed top singular vector: wrong by u, it makes |A v| / |v| smaller than the norm by about u^2."""
    A = A.double()
    size = A.abs().amax((1, 2), keepdim=True)
    _, exponent = torch.frexp(torch.where(size > 0, size, 1.0))
    v = torch.linalg.svd(shifted(A, -exponent), full_matrices=False)[2][:, 0]
    v = torch.where(v.abs() > 1e-40, v, 0.0)  # any vector will do; short integers will do sooner
    entries, least = whole_numbers(A)
    vector, _ = whole_numbers(v)
    image = (entries * vector[:, None, :]).sum(2)
    return Witness((image * image).sum(1), (vector * vector).sum(1), least)


@cache
def witness_of(name: str) -> Witness:
    return witness(matrices()[name])


@cache
def fifty_digits(name: str) -> list[mpmath.mpf]:
    """The norms of small matrices, from mpmath's singular value decomposition."""
    with mpmath.workdps(50):
        norms = []
        for A in matrices()[name].double().tolist():
            size = max(abs(x) for row in A for x in row)
            scale = mpmath.ldexp(1, math.frexp(size)[1])
            M = mpmath.matrix(A) / scale
            norms.append(max(mpmath.svd_r(M, compute_uv=False)) * scale if size else mpmath.mpf(0))
        return norms


def known_norms() -> dict[str, tuple[Tensor, list[Fraction]]]:
    """Stacks of matrices whose entries are what they seem, and the squares of their norms."""
    g = seeded(23)
    signs = torch.randint(0, 2, (20, 16), generator=g).double() * 2 - 1
    permutation = torch.eye(16, dtype=torch.float64)[torch.randperm(16, generator=g)]
    exponents = torch.randint(-500, 500, (20,), generator=g)
    column, row = (torch.randint(-(2**25), 2**25, (200, n), generator=g).double() for n in (5, 3))
    whole = [[int(x) for x in r] for r in torch.cat([column, row], 1).tolist()]
    numbers = torch.rand(500, generator=g, dtype=torch.float64)
    pairs = torch.randint(1, 2**26, (200, 2), generator=g).double()
    a, b = pairs.unbind(1)
    return {
        "signed permutations times a power of two": (
            shifted(signs[:, None, :] * permutation, exponents.view(-1, 1, 1)),
            [Fraction(2) ** (2 * int(e)) for e in exponents],
        ),
        "Hadamard matrices with signs": (signs[:, :, None] * hadamard(16), [Fraction(16)] * 20),
        "Hadamard matrices of every order": (hadamard(32).unsqueeze(0), [Fraction(32)]),
        "the first columns of a Hadamard matrix": (hadamard(16)[None, :, :5], [Fraction(16)]),
        "rank one, of integers": (
            column[:, :, None] * row[:, None, :],  # below 2^53: exact
            [Fraction(sum(x * x for x in r[:5]) * sum(x * x for x in r[5:])) for r in whole],
        ),
        "all ones": (torch.ones(1, 7, 5, dtype=torch.float64), [Fraction(35)]),
        "the same number everywhere": (
            numbers.view(-1, 1, 1).expand(-1, 3, 5),
            [Fraction(x) ** 2 * 15 for x in numbers.tolist()],
        ),
        # Sums of equal terms, whose roundings do not cancel.
        "a long row": (
            numbers[:10].view(-1, 1, 1).expand(-1, 1, 30_000),
            [Fraction(x) ** 2 * 30_000 for x in numbers[:10].tolist()],
        ),
        "a long column": (
            numbers[:10].view(-1, 1, 1).expand(-1, 30_000, 1),
            [Fraction(x) ** 2 * 30_000 for x in numbers[:10].tolist()],
        ),
        "one number": (numbers.view(-1, 1, 1), [Fraction(x) ** 2 for x in numbers.tolist()]),
        "diagonal": (torch.diag_embed(numbers.view(-1, 5)), [
            max(Fraction(x) ** 2 for x in r) for r in numbers.view(-1, 5).tolist()
        ]),
        "a turn and a stretch": (  # [[a, b], [-b, a]]
            torch.stack([torch.stack([a, b], 1), torch.stack([-b, a], 1)], 1),
            [Fraction(int(x)) ** 2 + Fraction(int(y)) ** 2 for x, y in pairs.tolist()],
        ),
        "a symmetric pair": (  # [[a, b], [b, a]]: a + b
            torch.stack([torch.stack([a, b], 1), torch.stack([b, a], 1)], 1),
            [Fraction(int(x) + int(y)) ** 2 for x, y in pairs.tolist()],
        ),
    }  # fmt: skip


@cache
def crowd() -> list[tuple[Tensor, Witness]]:
    """Ten thousand small matrices, of kinds for which one bound or another has nothing to spare, with witnesses."""
    g = seeded(37)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def signs(*shape: int) -> Tensor:
        return torch.randint(0, 2, shape, generator=g).double() * 2 - 1

    stacks = [
        normal(1000, 1, 1),
        normal(500, 1, 7),
        normal(500, 5, 1),
        normal(1000, 2, 2),
        normal(1000, 3, 5),
        normal(500, 6, 4),
        normal(500, 8, 8),
        normal(1000, 4, 1) * normal(1000, 1, 3),
        normal(500, 5, 1) @ signs(500, 1, 5),
        normal(1000, 1, 1) * signs(1000, 4, 1) * signs(1000, 1, 3),
        torch.diag_embed(normal(500, 3)),
        torch.linalg.qr(normal(500, 4, 4))[0] * normal(500, 1, 1),
        normal(500, 4, 3) @ normal(500, 3, 5),
        normal(500, 4, 4) * torch.logspace(0, -6, 4, dtype=torch.float64),
        (normal(500, 5, 4).float() * 3).double(),
    ]
    assert sum(map(len, stacks)) == 10_000
    scaled = [shifted(A, torch.randint(-30, 30, (len(A), 1, 1), generator=g)) for A in stacks]
    return [(A, witness(A)) for A in scaled]


# The laws. Each takes a bound and fails by assertion.


def law_no_vector_is_stretched_by_more(bound: Bound) -> None:
    for name, A in matrices().items():
        assert not witness_of(name).contradicts(bound(A)).any(), name


def law_no_vector_of_ten_thousand_matrices_is_stretched_by_more(bound: Bound) -> None:
    below = {tuple(A.shape): int(seen.contradicts(bound(A)).sum()) for A, seen in crowd()}
    assert not any(below.values()), below


def law_it_is_at_least_the_norm_to_fifty_digits(bound: Bound) -> None:
    for name, A in matrices().items():
        with mpmath.workdps(50):
            for value, norm in zip(bound(A).tolist(), fifty_digits(name), strict=True):
                assert mpmath.mpf(value) >= norm * (1 - mpmath.mpf(10) ** -40), name


def law_it_is_at_least_a_norm_that_is_known(bound: Bound) -> None:
    for name, (A, squares) in known_norms().items():
        for value, square in zip(bound(A).tolist(), squares, strict=True):
            assert Fraction(value) ** 2 >= square, name


def law_it_holds_for_matrices_that_are_not_small(bound: Bound) -> None:
    for shape in ((1, 120, 90), (1, 3, 4000), (1, 60, 60)):
        A = torch.randn(shape, generator=seeded(shape[1]), dtype=torch.float64)
        for B in (A, torch.linalg.qr(A)[0], A[:, :, :1] @ A[:, :1], A.mT):
            assert not witness(B).contradicts(bound(B)).any()


def law_nothing_but_zero_has_the_norm_zero(bound: Bound) -> None:
    for A in matrices().values():
        assert (bound(A) == 0).tolist() == (A == 0).all(2).all(1).tolist()


def law_it_is_finite_where_the_norm_is_far_from_overflow(bound: Bound) -> None:
    for A in matrices().values():
        if A.double().abs().max() < 1e305:
            assert bound(A).isfinite().all()


def law_it_is_no_more_than_a_frobenius_norm_or_two(bound: Bound) -> None:
    """A bound that is always infinite would obey all of the above. Row and column sums may be (mn)^(1/4) norms."""
    for A in matrices().values():
        size = A.double().abs().amax((1, 2))
        if size.max() < 1e305:
            unit = A.double() / torch.where(size > 0, size, 1.0)[:, None, None]
            most = size * unit.square().sum((1, 2)).sqrt() * math.prod(A.shape[1:]) ** 0.25
            assert (bound(A) <= 1.0001 * most + 1e-307).all()


def law_every_matrix_of_a_stack_is_treated_as_if_it_were_alone(bound: Bound) -> None:
    """Up to 1e-7: where one needs another try, all may be given another excess."""
    for A in matrices().values():
        alone = torch.cat([bound(A[i : i + 1]) for i in range(len(A))])
        torch.testing.assert_close(bound(A), alone, rtol=1e-7, atol=0)


def law_a_power_of_two_passes_through(bound: Bound) -> None:
    A = torch.randn(5, 6, 4, generator=seeded(1), dtype=torch.float64)
    for exponent in (-900, -400, -60, 60, 400, 900):
        scale = 2.0**exponent
        torch.testing.assert_close(bound(A * scale) / scale, bound(A), rtol=1e-12, atol=0)


def law_a_transpose_and_signs_change_little(bound: Bound) -> None:
    A = torch.randn(5, 6, 4, generator=seeded(1), dtype=torch.float64)
    for B in (A.mT, -A, A.flip(1), A.flip(2), A.mT.contiguous().mT, A[:, :, None].expand(5, 6, 1, 4).squeeze(2)):
        torch.testing.assert_close(bound(B), bound(A), rtol=1e-9, atol=0)


def law_narrow_types_are_taken_as_they_are(bound: Bound) -> None:
    for A in matrices().values():
        before = A.clone()
        found = bound(A)
        assert (found.dtype, found.shape) == (torch.float64, A.shape[:1])
        assert torch.equal(A, before), "what is measured must not be changed"
        assert torch.equal(found, bound(A.double()))


def law_no_graph_is_kept(bound: Bound) -> None:
    assert not bound(torch.ones(2, 3, 4, requires_grad=True)).requires_grad


def law_what_is_not_finite_is_refused(bound: Bound) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            A = torch.ones(3, 4, 5, dtype=dtype)
            A[1, 2, 3] = bad
            with pytest.raises(ValueError, match="finite"):
                bound(A)


def law_a_stack_of_none_is_a_stack(bound: Bound) -> None:
    for shape in ((0, 3, 2), (0, 2, 3), (0, 1, 1)):
        assert bound(torch.ones(shape, dtype=torch.float64)).shape == (0,)


LAWS = {name.removeprefix("law_"): law for name, law in list(globals().items()) if name.startswith("law_")}


def by_dilation(A: Tensor, excess: float = 1e-9) -> Tensor:
    """`[[0, A], [A^T, 0]]` has the singular values of A, and their opposites, as eigenvalues."""
    A = A.double()
    rows, columns = A.shape[1:]
    whole = torch.zeros(len(A), rows + columns, rows + columns, dtype=torch.float64)
    whole[:, :rows, rows:], whole[:, rows:, :rows] = A, A.mT
    return upper_eigenvalue(whole, excess)


def test_no_eigenvalue_is_larger_than_its_bound_and_a_bound_a_millionth_too_small_is_caught():
    law_no_vector_is_stretched_by_more(by_dilation)
    law_it_is_at_least_a_norm_that_is_known(lambda A: by_dilation(A) if max(A.shape[1:]) < 99 else upper_gram(A))
    with pytest.raises(AssertionError):
        law_no_vector_is_stretched_by_more(lambda A: by_dilation(A, 1e-12) * (1 - 1e-6))


def test_the_largest_eigenvalue_of_a_symmetric_matrix_is_nearly_attained_and_never_negative():
    S = torch.randn(9, 7, 7, generator=seeded(3), dtype=torch.float64)
    S = S @ S.mT - 0.5 * torch.eye(7, dtype=torch.float64)
    true = torch.linalg.eigvalsh(S)[:, -1]
    assert (true <= upper_eigenvalue(S)).all()
    assert (upper_eigenvalue(S) <= true * 1.05).all()
    turned = S + torch.randn(9, 7, 7, generator=seeded(4), dtype=torch.float64)
    assert (upper_eigenvalue(turned) >= torch.linalg.eigvalsh((turned + turned.mT) / 2)[:, -1]).all()
    assert (upper_eigenvalue(-torch.eye(3, dtype=torch.float64)[None]) >= 0).all()
    assert upper_eigenvalue(torch.zeros(1, 3, 3)).item() == 0
    with pytest.raises(ValueError, match="excess"):
        upper_eigenvalue(S, 0.0)


def integers(side: int, seed: int) -> Tensor:
    """Matrices of whole numbers, not symmetric; the last ones of rank one, with one sign."""
    S = torch.randint(-9, 10, (6, side, side), generator=seeded(seed)).double()
    x = torch.randint(1, 10, (2, side), generator=seeded(seed + 1)).double()
    return torch.cat([S, x[:1, :, None] * x[:1, None], -x[1:, :, None] * x[1:, None]])


def check_range(S: Tensor) -> None:
    """`low |x|^2 <= x^T S x <= high |x|^2` exactly, for eigenvectors to fifty digits; both ends nearly attained."""
    low, high = eigenvalue_range(S)
    assert (low <= 0).all()
    assert (high >= 0).all()
    with mpmath.workdps(50):
        for number, matrix in enumerate(S.tolist()):
            M = mpmath.matrix(matrix)
            values = mpmath.eigsy((M + M.T) / 2, eigvals_only=True)
            least, most, size = min(0, *values), max(0, *values), mpmath.mnorm(M, "f")
            assert low[number].item() <= least + 1e-40 * size
            assert high[number].item() >= most - 1e-40 * size
            assert low[number].item() >= least - 1e-7 * size
            assert high[number].item() <= most + 1e-7 * size


@pytest.mark.parametrize("side", [1, 2, 3, 6])
def test_the_range_of_a_form_holds_its_eigenvalues_and_zero(side):
    for size in (1.0, 1e-140, 1e140):
        check_range(size * integers(side, side))


def test_eigenvalues_are_candidates_only(monkeypatch):
    """Computed eigenvalues may be anything: what they say is verified."""
    S = integers(4, 7)
    true = torch.linalg.eigvalsh((S + S.mT) / 2)
    for wrong in (lambda x: 0.3 * x, lambda x: 0 * x, lambda x: torch.full_like(x, torch.nan), lambda x: x.flip(1)):
        computed = torch.linalg.eigvalsh
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "eigvalsh", lambda B, wrong=wrong, computed=computed: wrong(computed(B)))
            low, high = eigenvalue_range(S)
        assert (low <= true[:, 0].clamp(max=0)).all()
        assert (high >= true[:, -1].clamp(min=0)).all()


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("law", LAWS)
def test_every_bound_obeys_the_law_that(law, name):
    LAWS[law](BOUNDS[name])


@pytest.mark.parametrize("name", BOUNDS)
def test_where_the_processor_drops_denormal_numbers_they_are_not_taken_for_zero(name):
    """`torch.set_flush_denormal` makes arithmetic, and even comparison, see zero. Refusing is right as well."""
    stacks = [torch.full((1, 3, 2), 1e-40), torch.full((1, 3, 2), 1e-310, dtype=torch.float64)]
    seen = [witness(A) for A in stacks]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        bounds = [BOUNDS[name](A) for A in stacks]
    except ValueError:
        return
    finally:
        torch.set_flush_denormal(False)
    for bound, one in zip(bounds, seen, strict=True):
        assert not one.contradicts(bound).any()


# How close the bounds are.


def exact(A: Tensor) -> Tensor:
    return torch.linalg.svdvals(A.double())[:, 0]


USUAL = [
    name
    for name, A in matrices().items()
    if A.dtype == torch.float64 and 1e-200 < A.abs().max() < 1e200 and A.abs().amax((1, 2)).min() > 0
]


@pytest.mark.parametrize("name", USUAL)
def test_svd_and_cholesky_are_within_their_excess(name):
    A = matrices()[name]
    assert (upper_svd(A) <= exact(A) * (1 + 2e-13)).all()
    assert (upper_cholesky(A) <= exact(A) * (1 + 1.001e-9)).all()
    assert (upper_cholesky(A, 1e-4) <= exact(A) * (1 + 1.001e-4)).all()
    assert (upper_cholesky(A, 1e-16) <= exact(A) * (1 + 1e-12)).all()


@pytest.mark.parametrize("squarings", [1, 2, 3, 6, 12, 16, 40])
@pytest.mark.parametrize("name", USUAL)
def test_gram_is_within_the_excess_of_its_rank(name, squarings):
    A = matrices()[name]
    rank = torch.linalg.matrix_rank(A).double()
    assert (upper_gram(A, squarings) <= exact(A) * rank ** (0.5 ** (squarings + 1)) * (1 + 1e-12)).all()


def test_gram_attains_its_excess_where_all_singular_values_are_equal():
    for order in (2, 8, 32):
        for squarings in (1, 4, 12):
            bound = upper_gram(hadamard(order).unsqueeze(0), squarings).item()
            assert bound == pytest.approx(math.sqrt(order) * order ** (0.5 ** (squarings + 1)), rel=1e-12)


def test_the_excess_of_a_large_matrix_is_what_the_account_says():
    A = torch.randn(1, 192, 192, generator=seeded(3), dtype=torch.float64)
    assert (upper_svd(A) <= exact(A) * (1 + 1e-10)).all()
    assert (upper_cholesky(A) <= exact(A) * (1 + 1e-8)).all()
    assert (upper_gram(A) <= exact(A) * 192 ** (0.5**13) * (1 + 1e-10)).all()
    assert (upper_gram(A, 16) <= exact(A) * (1 + 1e-8)).all(), "a random matrix has a gap"


def test_row_and_column_sums_are_tight_for_diagonal_matrices_and_permutations_of_them():
    D = torch.diag_embed(torch.randn(20, 7, generator=seeded(3), dtype=torch.float64))
    for A in (D, D.flip(1), D[:, :, torch.randperm(7, generator=seeded(4))]):
        torch.testing.assert_close(upper_row_column(A), D.abs().amax((1, 2)), rtol=1e-14, atol=0)


def test_the_frobenius_norm_is_tight_for_rank_one():
    g = seeded(3)
    u, v = (torch.randn(20, *s, generator=g, dtype=torch.float64) for s in ((6, 1), (1, 5)))
    norms = u.flatten(1).norm(dim=1) * v.flatten(1).norm(dim=1)
    torch.testing.assert_close(upper_frobenius(u * v), norms, rtol=1e-13, atol=0)
    for order in (2, 8, 32):  # and sqrt(rank) too large at worst
        assert upper_frobenius(hadamard(order).unsqueeze(0)).item() == pytest.approx(order, rel=1e-12)


@pytest.mark.parametrize("squarings", [0, -1])
def test_less_than_one_squaring_is_refused(squarings):
    with pytest.raises(ValueError):
        upper_gram(torch.ones(1, 3, 3), squarings)


@pytest.mark.parametrize("excess", [0.0, -1e-9, math.nan])
def test_an_excess_that_tenfold_is_no_larger_is_refused(excess, monkeypatch):
    real, tries = torch.linalg.cholesky_ex, []

    def counted(A):
        tries.append(A)
        assert len(tries) < 100, "it would never end"
        return real(A)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    with pytest.raises(ValueError):
        upper_cholesky(hadamard(8).unsqueeze(0), excess)


# What the bounds say they do not assume.


def upside_down(U: Tensor, S: Tensor, Vt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return U.flip(2), S.flip(1), Vt.flip(1)


WRONG_FACTORS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "values too small": lambda U, S, Vt: (U, 0.9 * S, Vt),
    "values of zero": lambda U, S, Vt: (U, 0 * S, Vt),
    "values a little too small": lambda U, S, Vt: (U, S * (1 - 1e-14), Vt),
    "values in the wrong order": upside_down,
    "values of the wrong sign": lambda U, S, Vt: (-U, -S, Vt),
    "left vectors too short": lambda U, S, Vt: (0.9 * U, S, Vt),
    "right vectors too long": lambda U, S, Vt: (U, S / 2, 2 * Vt),
    "vectors that are not orthogonal": lambda U, S, Vt: (U + 1e-6, S, Vt - 1e-7),
    "vectors of another matrix": lambda U, S, Vt: (U.roll(1, 0), S.roll(1, 0), Vt.roll(1, 0)),
    "ones": lambda U, S, Vt: (torch.ones_like(U), torch.ones_like(S), torch.ones_like(Vt)),
}


@pytest.mark.parametrize("wrong", WRONG_FACTORS)
def test_the_bound_by_svd_holds_whatever_the_factors_are(wrong, monkeypatch):
    A = torch.cat([matrices()[name] for name in ("square", "orthogonal", "triangular")])
    seen, real = witness(A), torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda B, full_matrices: WRONG_FACTORS[wrong](*real(B, full_matrices)))
    assert not seen.contradicts(upper_svd(A)).any()


@pytest.mark.parametrize("factor", [0.0, 1e-3, 0.5, 1 - 1e-7, 1 + 1e-3, 1e3, math.nan, -1.0])
def test_the_bound_by_cholesky_holds_whatever_the_candidate_is(factor, monkeypatch):
    A = torch.cat([matrices()[name] for name in ("square", "orthogonal", "triangular")])
    seen, real = witness(A), torch.linalg.svdvals
    monkeypatch.setattr(torch.linalg, "svdvals", lambda B: factor * real(B))
    bound = upper_cholesky(A)
    assert not seen.contradicts(bound).any()
    assert (bound <= upper_frobenius(A) * (1 + 1e-12)).all(), "the trivial bound is always there"


def test_a_candidate_too_small_by_some_roundings_is_not_let_through(monkeypatch):
    """Where the factorization cannot tell, the shift must: the product of a long column is itself too small."""
    A = known_norms()["a long column"][0][:4]
    seen, real = witness(A), torch.linalg.svdvals
    for roundings in range(0, 40_000, 100):  # as many as there are rows, and more
        factor = 1 - roundings * 2.0**-53
        monkeypatch.setattr(torch.linalg, "svdvals", lambda B, factor=factor: factor * real(B))
        assert not seen.contradicts(upper_cholesky(A, 1e-17)).any(), roundings


# The testers, tested: each unsound bound differs from a sound one in one place, and a law must say so.


def gram(A: Tensor, sign: float, dtype: torch.dtype = torch.float64, squarings: int = 12) -> Tensor:
    """`upper_gram`, with a guard of this sign: 1 is right, -1 is wrong and 0 forgets it."""
    G = (A if A.shape[1] >= A.shape[2] else A.mT).to(dtype)
    u = torch.finfo(dtype).eps / 2
    sizes = []
    for _ in range(squarings):
        sizes.append(torch.linalg.matrix_norm(G) * (1 + sign * 2 * G[0].numel() * u))
        H = G / torch.where(sizes[-1] > 0, sizes[-1], 1.0)[:, None, None]
        G = H.mT @ H
    bound = torch.linalg.matrix_norm(G) * (1 + sign * 2 * G[0].numel() * u)
    for size in reversed(sizes):
        inside = bound + sign * (A.shape[1] + A.shape[2] + 3) * u
        bound = size * (inside.clamp(min=0).sqrt() + sign * u) * (1 + sign * 8 * u)
    return bound.double()


def frobenius(A: Tensor, rounded: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    return rounded(torch.linalg.matrix_norm(A.double()))


def down(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.zeros_like(x))


def power_iteration(A: Tensor) -> Tensor:
    A = A.double()
    return power_step(A, top_right_vectors(A, seeded()))[1].norm(dim=1)


def svd_of_orthogonal_factors(A: Tensor) -> Tensor:
    """The residual is accounted for, the defect of the factors is not."""
    U, S, Vt = torch.linalg.svd(A.double(), full_matrices=False)
    return S[:, 0] + upper_frobenius(A.double() - (U * S[:, None]) @ Vt)


def row_column(A: Tensor) -> Tensor:
    A = A.double().abs()
    return A.sum(1).amax(1).sqrt() * A.sum(2).amax(1).sqrt()


def smaller_sums(A: Tensor) -> Tensor:
    A = A.double().abs()
    return torch.minimum(A.sum(1).amax(1), A.sum(2).amax(1))


def unscaled(A: Tensor) -> Tensor:
    return A.double().square().sum((1, 2)).sqrt() * (1 + 1e-9)


UNSOUND: dict[str, Bound] = {
    "the largest computed singular value": exact,
    "the same, rounded up once": lambda A: torch.nextafter(exact(A), torch.tensor(math.inf).double()),
    "a millionth off, of svd": lambda A: 0.999999 * upper_svd(A),
    "a millionth off, of frobenius": lambda A: 0.999999 * upper_frobenius(A),
    "a millionth off, of row_column": lambda A: 0.999999 * upper_row_column(A),
    "a millionth off, of gram": lambda A: 0.999999 * upper_gram(A),
    "a millionth off, of cholesky": lambda A: 0.999999 * upper_cholesky(A),
    "gram in float32 without an account of rounding": lambda A: gram(A, 0.0, torch.float32),
    "gram in float32 with an account of float64": lambda A: gram(A, 0.0, torch.float32) * (1 + 1e-12),
    "gram without an account of rounding": lambda A: gram(A, 0.0),
    "gram with a guard of the wrong sign": lambda A: gram(A, -1.0),
    "frobenius, not rounded": frobenius,
    "frobenius, rounded down": lambda A: frobenius(A, down),
    "frobenius in float32": lambda A: torch.linalg.matrix_norm(A.float()).double(),
    "row_column, not rounded": row_column,
    "the smaller of the row and column sums": smaller_sums,
    "power iteration": power_iteration,
    "power iteration, one per cent up": lambda A: 1.01 * power_step(A.double(), A.double().mean(1))[1].norm(dim=1),
    "svd, whose factors are taken to be orthogonal": svd_of_orthogonal_factors,
    "the largest entry": lambda A: A.double().abs().amax((1, 2)),
    "the spectral radius": lambda A: torch.linalg.eigvals(
        torch.nn.functional.pad(A.double(), (0, max(A.shape[1:]) - A.shape[2], 0, max(A.shape[1:]) - A.shape[1]))
    ).abs().amax(1),
    "the norm of another matrix of the stack": lambda A: upper_svd(A).roll(1, 0),
    "not a number": lambda A: upper_svd(A) * math.nan,
    "a number of the wrong sign": lambda A: -upper_svd(A),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSOUND)
def test_a_planted_unsound_bound_is_caught_by_ten_thousand_matrices(name):
    with pytest.raises(AssertionError):
        law_no_vector_of_ten_thousand_matrices_is_stretched_by_more(UNSOUND[name])


def test_the_planted_guard_of_the_right_sign_is_not_caught():
    """So that it is the sign which is caught above."""
    law_no_vector_of_ten_thousand_matrices_is_stretched_by_more(lambda A: gram(A, 1.0))


def test_a_planted_bound_that_is_wrong_for_tiny_matrices_alone_is_caught():
    law_no_vector_of_ten_thousand_matrices_is_stretched_by_more(unscaled)
    with pytest.raises(AssertionError, match="1e-"):
        law_no_vector_is_stretched_by_more(unscaled)


PLANTED: list[tuple[str, Bound, Callable[[Bound], None]]] = [
    ("svdvals", exact, law_no_vector_is_stretched_by_more),
    ("svdvals", exact, law_it_is_at_least_the_norm_to_fifty_digits),
    ("svdvals", exact, law_it_is_at_least_a_norm_that_is_known),
    ("frobenius, not rounded", frobenius, law_it_is_at_least_a_norm_that_is_known),
    ("row_column, not rounded", row_column, law_it_is_at_least_a_norm_that_is_known),
    ("gram, not rounded", lambda A: gram(A, 0.0), law_it_is_at_least_a_norm_that_is_known),
    ("gram, wrong sign", lambda A: gram(A, -1.0), law_it_is_at_least_the_norm_to_fifty_digits),
    ("squares that vanish", unscaled, law_it_is_at_least_the_norm_to_fifty_digits),
    ("squares that vanish", unscaled, law_nothing_but_zero_has_the_norm_zero),
    ("squares that overflow", unscaled, law_it_is_finite_where_the_norm_is_far_from_overflow),
    ("never zero", lambda A: upper_svd(A) + 1e-300, law_nothing_but_zero_has_the_norm_zero),
    ("twice as much", lambda A: 2 * upper_frobenius(A), law_it_is_no_more_than_a_frobenius_norm_or_two),
    ("the largest of the stack", lambda A: upper_svd(A).amax().expand(len(A)),
     law_every_matrix_of_a_stack_is_treated_as_if_it_were_alone),
    ("no scale", lambda A: upper_svd(A) + 1e-9, law_a_power_of_two_passes_through),
    ("columns only", lambda A: upper_row_column(A) + A.double().abs().sum(1).amax(1),
     law_a_transpose_and_signs_change_little),
    ("by way of bfloat16", lambda A: upper_svd(A if A.dtype == torch.float64 else A.bfloat16()),
     law_narrow_types_are_taken_as_they_are),
    ("in its own type", lambda A: upper_svd(A).to(A.dtype), law_narrow_types_are_taken_as_they_are),
    ("with a graph", lambda A: torch.linalg.matrix_norm(A), law_no_graph_is_kept),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "law"), [p[1:] for p in PLANTED], ids=[f"{p[0]}-{p[2].__name__}" for p in PLANTED]
)
def test_a_planted_wrong_bound_is_caught(wrong, law):
    with pytest.raises(AssertionError):
        law(wrong)


def test_a_planted_bound_that_takes_anything_is_caught():
    with pytest.raises(pytest.fail.Exception):
        law_what_is_not_finite_is_refused(lambda A: torch.linalg.matrix_norm(A))


def test_the_arithmetic_of_the_tests_is_exact():
    """A witness contradicts one unit in the last place less than the norm, and not the norm."""
    for A, squares in known_norms().values():
        if A.shape[1:] != (1, 1):
            continue
        seen, norms = witness(A), A.flatten().abs()
        assert not seen.contradicts(norms).any()
        assert seen.contradicts(down(norms)).all()
        assert [Fraction(x) ** 2 for x in norms.tolist()] == squares
    for name in matrices():
        gap = name in (
            "square",
            "tall",
            "wide",
            "one row",
            "rank one",
            "graded values",
            "1e300",
            "1e-300",
            "bfloat16",
        )
        short = mpmath.mpf(10) ** (
            -28 if gap else -15
        )  # a vector from anywhere among equal values may be wrong by u
        for i, norm in enumerate(fifty_digits(name)):
            seen = witness_of(name)
            with mpmath.workdps(50):
                below = mpmath.sqrt(mpmath.mpf(seen.above[i]) / seen.below[i]) * mpmath.mpf(2) ** seen.exponent
                assert norm * (1 - short) <= below <= norm * (1 + mpmath.mpf(10) ** -40), name


# The bound that holds with a probability.


@cache
def maps() -> dict[str, Tensor]:
    g = seeded(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "rank one": normal(6, 1) @ normal(1, 5),
        "one entry": torch.tensor([[-3.0]], dtype=torch.float64),
        "one row": normal(1, 7),
        "one column": normal(7, 1),
        "tall": normal(9, 4),
        "wide": 100 * normal(4, 9),
        "identity": torch.eye(5, dtype=torch.float64) / 100,
        "graded": torch.diag(torch.logspace(0, -8, 6, dtype=torch.float64)),
    }


DRAWS = 2000
WAYS = [  # failure, probes, powers
    (0.2, 1, 0), (0.5, 1, 0), (0.9, 1, 1), (0.2, 1, 3), (0.2, 2, 0), (0.05, 3, 1), (0.01, 2, 2),
]  # fmt: skip


def failures(
    find: Callable[..., Tensor], A: Tensor, failure: float, probes: int, powers: int, seed: int = 41
) -> float:
    """The share of draws, one for each of many equal maps, whose bound is below the norm."""
    operator = dense_operator(A.expand(DRAWS, *A.shape))
    found = find(operator, seeded(seed), failure=failure, probes=probes, powers=powers)
    assert (found.shape, found.dtype) == ((DRAWS,), torch.float64)
    return float((found < exact(A.unsqueeze(0))).double().mean())


def law_it_fails_no_more_often_than_it_says(find: Callable[..., Tensor]) -> None:
    for A in maps().values():
        for failure, probes, powers in WAYS:
            sigma = math.sqrt(failure * (1 - failure) / DRAWS)
            assert failures(find, A, failure, probes, powers) <= failure + 3 * sigma


@pytest.mark.parametrize("failure", [0.2, 0.02])
@pytest.mark.parametrize("probes", [1, 2])
@pytest.mark.parametrize("powers", [0, 2])
def test_for_rank_one_the_stated_probability_is_nearly_that_of_failure(failure, probes, powers):
    """The probability that |g| < t is `t sqrt(2 / pi)` for small t, so a law that counts failures has teeth."""
    sigma = math.sqrt(failure / DRAWS)
    assert failures(upper_randomized, maps()["rank one"], failure, probes, powers) >= 0.85 * failure - 3 * sigma


def test_it_fails_no_more_often_than_it_says():
    law_it_fails_no_more_often_than_it_says(upper_randomized)


@pytest.mark.parametrize("name", maps())
def test_it_never_fails_where_failure_is_a_millionth(name):
    """In these draws: of 48,000, one seed in twenty has one that does."""
    for probes, powers in ((1, 0), (1, 4), (10, 8)):
        assert failures(upper_randomized, maps()[name], 1e-6, probes, powers, seed=43) == 0


def test_the_usual_call_is_within_a_half():
    for A in maps().values():
        found = upper_randomized(dense_operator(A.expand(50, *A.shape)), seeded())
        assert (found <= 1.5 * exact(A.unsqueeze(0))).all()
        better = upper_randomized(dense_operator(A.expand(50, *A.shape)), seeded(), powers=60)
        assert (better <= 1.06 * exact(A.unsqueeze(0))).all()


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-160, 1e-100, 1e100, 1e160, 1e200, 1e300])
@pytest.mark.parametrize("powers", [0, 1, 8])
def test_a_scale_passes_through_the_randomized_bound(scale, powers):
    """As it does through the maps; lengths whose squares vanish or overflow are lengths still."""
    A = maps()["tall"].unsqueeze(0).expand(20, 9, 4)
    plain = upper_randomized(dense_operator(A), seeded(), powers=powers)
    scaled = upper_randomized(dense_operator(A * scale), seeded(), powers=powers)
    torch.testing.assert_close(scaled / scale, plain, rtol=1e-10, atol=0)


def test_maps_of_a_batch_are_bounded_each_for_itself():
    scales = torch.tensor([1.0, 0.0, 1e-100, 1e100], dtype=torch.float64)
    A = maps()["wide"] * scales.view(-1, 1, 1)
    found = upper_randomized(dense_operator(A), seeded())
    norms = exact(A[:1]) * scales
    assert (found >= norms).all()
    assert (found <= 1.5 * norms).all()
    assert found[1] == 0


def test_spaces_of_any_shape_are_taken():
    A, B = torch.randn(3, 2, 3, generator=seeded(1)).double(), torch.randn(3, 5, 4, generator=seeded(2)).double()
    for operator in (kronecker(A, B), kronecker(A, B).T):
        found = upper_randomized(operator, seeded())
        assert (found >= exact(A) * exact(B)).all()
        assert (found <= 1.5 * exact(A) * exact(B)).all()


def test_maps_of_single_numbers_are_taken():
    found = upper_randomized(identity(4, (), torch.float64, torch.device("cpu")), seeded())
    assert (found >= 1).all()


def test_the_same_generator_gives_the_same_bound_and_every_map_has_draws_of_its_own():
    operator = dense_operator(maps()["tall"].expand(20, 9, 4))
    first, second, third = (upper_randomized(operator, seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert len(first.unique()) == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_operator_in_a_narrow_type_is_refused(dtype):
    with pytest.raises(ValueError, match="float64"):
        upper_randomized(dense_operator(torch.ones(2, 3, 4, dtype=dtype)), seeded())


@pytest.mark.parametrize(
    "wrong",
    [{"failure": f} for f in (0.0, 1.0, -0.1, 1.5, math.nan, math.inf)]
    + [{"probes": 0}, {"probes": -1}, {"powers": -1}],
)
def test_arguments_without_a_meaning_are_refused(wrong):
    with pytest.raises(ValueError):
        upper_randomized(dense_operator(torch.ones(2, 3, 4, dtype=torch.float64)), seeded(), **wrong)


@pytest.mark.parametrize("powers", [0, 1, 8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_map_that_is_not_finite_is_refused(bad, powers):
    A = torch.ones(3, 4, 5, dtype=torch.float64)
    A[1, 2, 3] = bad
    with pytest.raises(ValueError, match="finite"):
        upper_randomized(dense_operator(A), seeded(), powers=powers)


def randomized(
    A: LinearOperator, generator: torch.Generator, *, failure: float, probes: int, powers: int, **wrong
) -> Tensor:
    """`upper_randomized` as it reads on paper, for maps of ordinary size, with a place for an error or two."""
    lengths = []
    for _ in range(probes):
        x = torch.randn(A.batch, *A.domain, generator=generator, dtype=A.dtype)
        if wrong.get("unit"):
            x = x / x.flatten(1).norm(dim=1, keepdim=True)
        for power in range(2 * powers + 1):
            x = A.matvec(x) if power % 2 == 0 else A.rmatvec(x)
        lengths.append(x.flatten(1).norm(dim=1))
    largest = torch.stack(lengths).mean(0) if wrong.get("mean") else torch.stack(lengths).amax(0)
    factor = failure ** (-wrong.get("root", 1.0) / probes) * math.sqrt(2 / math.pi) * wrong.get("factor", 1.0)
    return (factor * largest) ** (1 / (2 * powers + wrong.get("power", 1)))


def test_the_randomized_bound_is_what_is_on_paper():
    for A in maps().values():
        for failure, probes, powers in WAYS:
            exactly = partial(upper_randomized, accuracy=0.0)
            ours, theirs = (
                find(dense_operator(A.expand(9, *A.shape)), seeded(), failure=failure, probes=probes, powers=powers)
                for find in (exactly, randomized)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)


@pytest.mark.parametrize("accuracy", [1e-10, 1e-6, 1e-4])
def test_products_that_are_too_small_by_the_accuracy_move_the_bound_by_no_less(accuracy):
    """The randomized bound of the true map and of one whose products all lost that much: the account covers it."""
    for A in maps().values():
        operator = dense_operator(A.expand(9, *A.shape))
        loss = accuracy * exact(A.unsqueeze(0)).item()

        def short(product: Callable[[Tensor], Tensor], loss: float = loss) -> Callable[[Tensor], Tensor]:
            def shortened(x: Tensor) -> Tensor:
                y, most = product(x), loss * x.norm(dim=1, keepdim=True)
                length = y.norm(dim=1, keepdim=True)
                return y * ((length - most).clamp(min=0) / length.clamp(min=1e-300))

            return shortened

        coarse = replace(operator, matvec=short(operator.matvec), rmatvec=short(operator.rmatvec))
        true = upper_randomized(operator, seeded(), accuracy=0.0)
        assert (upper_randomized(coarse, seeded(), accuracy=accuracy) >= true * (1 - 1e-13)).all()


def test_products_that_are_too_coarse_for_a_bound_are_refused():
    with pytest.raises(ValueError, match="coarse"):
        upper_randomized(dense_operator(maps()["tall"].expand(2, 9, 4)), seeded(), accuracy=0.1)


@pytest.mark.parametrize(
    "wrong",
    [{"unit": True}, {"root": 0.5}, {"root": -1.0}, {"factor": 0.8}, {"power": 0.5}, {"power": 2}, {"mean": True}],
    ids=lambda w: next(iter(w)),
)
def test_a_planted_randomized_bound_that_fails_too_often_is_caught(wrong):
    if "mean" in wrong:  # the mean of two is below the larger: wrong, but not by enough to count everywhere
        wrong = {"mean": True, "factor": 0.9}
    with pytest.raises(AssertionError):
        law_it_fails_no_more_often_than_it_says(lambda A, g, **kwargs: randomized(A, g, **kwargs, **wrong))


def test_a_planted_probe_that_is_used_twice_is_caught():
    """Two probes that are one fail together."""

    def repeated(A: LinearOperator, generator: torch.Generator, *, probes: int, **kwargs) -> Tensor:
        state = generator.get_state()

        def once(_: int) -> Tensor:
            generator.set_state(state)
            single = kwargs | {"failure": kwargs["failure"] ** (1 / probes)}
            return upper_randomized(A, generator, probes=1, **single)

        return torch.stack([once(i) for i in range(probes)]).amax(0)

    with pytest.raises(AssertionError):
        law_it_fails_no_more_often_than_it_says(repeated)


def test_an_operator_whose_adjoint_is_wrong_is_beyond_the_randomized_bound_with_powers():
    """Products are taken on trust: this is what the laws of operators are for."""
    operator = dense_operator(maps()["identity"].expand(DRAWS, 5, 5))
    wrong = replace(operator, rmatvec=lambda y: 1e-9 * y)
    assert (upper_randomized(wrong, seeded()) < exact(maps()["identity"].unsqueeze(0))).all()
