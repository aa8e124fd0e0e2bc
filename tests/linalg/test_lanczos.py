"""The laws of singular values found from below, run over matrices of every kind, and over wrong versions."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from helpers.registry import MODELS
from specguard.linalg import (
    LinearOperator,
    SingularTriplets,
    dense_operator,
    identity,
    jacobian,
    kronecker,
    lower_singular_values,
)
from specguard.nn import ViT, unfuse_attention

Find = Callable[..., SingularTriplets]
DTYPES = (torch.float32, torch.float64)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal(stack: int, rows: int, columns: int, g: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(stack, rows, columns, generator=g, dtype=torch.float64))[0]


def with_values(rows: int, columns: int, values: list[float], g: torch.Generator, stack: int = 3) -> Tensor:
    """Matrices with these singular values, up to the rounding of two products."""
    r = len(values)
    U, V = orthogonal(stack, rows, r, g), orthogonal(stack, columns, r, g)
    return U * torch.tensor(values, dtype=torch.float64) @ V.mT


def placed(rows: int, columns: int, entries: dict[tuple[int, int], float]) -> Tensor:
    """Matrices of zeros but for a few entries: products with them are exact, and so are their breakdowns."""
    A = torch.zeros(2, rows, columns, dtype=torch.float64)
    for (i, j), value in entries.items():
        A[:, i, j] = value
    A[1] *= -2
    return A


@cache
def matrices() -> dict[str, Tensor]:
    g = seeded(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    dead = normal(3, 11, 9)
    dead[:, :, 2:7] = 0  # units of a ReLU that are off
    dead[:, 4:] = 0
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(3):
        hadamard = torch.kron(hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return {
        "wide": normal(4, 7, 11),
        "tall": normal(4, 11, 7),
        "square": normal(4, 9, 9),
        "one row": normal(4, 1, 5),
        "one column": normal(4, 5, 1),
        "one entry": normal(4, 1, 1),
        "larger": normal(2, 40, 30),
        "rank one": normal(3, 7, 1) @ normal(3, 1, 5),
        "rank two": normal(3, 7, 2) @ normal(3, 2, 9),
        "orthogonal": orthogonal(3, 8, 8, g),
        "repeated": with_values(12, 10, [2.0, 2, 2, 1, 1, 0.5], g),
        "nearly repeated": with_values(13, 13, torch.linspace(1, 0.999, 13).tolist(), g),
        "tiny gap at the top": with_values(13, 11, [1.0, 1 - 1e-6, 0.5, 0.25], g),
        "graded": with_values(12, 12, torch.logspace(0, -11, 12, dtype=torch.float64).tolist(), g),
        "large": 1e8 * normal(2, 9, 13),
        "small": 1e-8 * normal(2, 9, 13),
        "mixed scales": normal(5, 7, 11) * torch.logspace(-8, 8, 5, dtype=torch.float64).view(-1, 1, 1),
        "one of a batch is zero": normal(3, 7, 5) * torch.tensor([1.0, 0.0, 1e-8]).view(-1, 1, 1),
        "scales within a matrix": torch.logspace(-4, 4, 9, dtype=torch.float64).view(-1, 1) * normal(2, 9, 9),
        "zero": torch.zeros(2, 5, 7, dtype=torch.float64),
        "identity": torch.eye(6, dtype=torch.float64).expand(2, 6, 6),
        "hadamard": torch.stack([hadamard, 3 * hadamard]),
        "diagonal": torch.diag(torch.arange(7, 0, -1).double()).expand(2, 7, 7),
        "single entry": placed(5, 5, {(0, 0): 1.0}),
        "single entry far off": placed(6, 4, {(5, 3): 3.0}),
        "two entries": placed(7, 5, {(3, 2): 1.0, (1, 1): 2.0}),
        "diagonal with zeros": placed(6, 6, {(0, 0): 3.0, (1, 1): 2.0, (2, 2): 1.0}),
        "ones in a corner": placed(8, 6, {(i, j): 1.0 for i in range(3) for j in range(2)}),
        "units that are off": dead,
    }  # fmt: skip


@cache
def stacks(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: A.to(dtype) for name, A in matrices().items()}


def exact(A: Tensor) -> Tensor:
    return torch.linalg.svdvals(A.double())


def error(A: Tensor) -> Tensor:
    """What the arithmetic of an iteration may add, absolutely: some roundings of the largest value."""
    return 1000 * torch.finfo(A.dtype).eps * exact(A)[:, :1]


def numbers(A: Tensor) -> Iterator[int]:
    """How many values to ask for: one, some, all."""
    yield from sorted({k for k in (1, 2, 3, min(A.shape[1:])) if k <= min(A.shape[1:])})


def flat(vectors: Tensor) -> Tensor:
    return vectors.flatten(2).double()


# The laws. Each takes a function and a stack of matrices, and fails by assertion.


@cache
def found(find: Find, A: Tensor) -> list[tuple[int, SingularTriplets]]:
    """What a function finds: to convergence, before and beyond it, with blocks larger and smaller than k."""
    ways = ({}, {"tolerance": 0.0}, {"most": 2}, {"block": 1, "most": 20}, {"block": 4})
    usual = {"tolerance": TOLERANCE[A.dtype]}
    return [(k, find(dense_operator(A), seeded(k), k, **(usual | way))) for k in numbers(A) for way in ways]


def law_no_value_is_above_the_exact_one(find: Find, A: Tensor) -> None:
    for k, triplets in found(find, A):
        assert (triplets.values.double() <= exact(A)[:, :k] + error(A)).all()


def law_values_are_sorted_and_not_negative(find: Find, A: Tensor) -> None:
    for k, triplets in found(find, A):
        assert triplets.values.shape == (len(A), k)
        assert triplets.values.dtype == A.dtype
        assert (triplets.values >= 0).all()
        assert (triplets.values.diff(dim=1) <= 0).all()


def law_what_has_converged_is_within_the_tolerance(find: Find, A: Tensor) -> None:
    """A block of k vectors cannot miss any of k values, however often they are repeated."""
    for k in numbers(A):
        for tolerance in (TOLERANCE[A.dtype], 1e-2):
            triplets = find(dense_operator(A), seeded(k), k, tolerance=tolerance)
            wrong = (triplets.values.double() - exact(A)[:, :k]).abs()
            close = (wrong <= tolerance * exact(A)[:, :1] + error(A)).all(1)
            assert close[triplets.converged].all()


def law_everything_is_found_when_the_space_is_exhausted(find: Find, A: Tensor) -> None:
    for k in numbers(A):
        triplets = find(dense_operator(A), seeded(k), k, tolerance=0.0, most=1000)
        assert triplets.steps <= math.ceil(min(A.shape[1:]) / k)
        assert ((triplets.values.double() - exact(A)[:, :k]).abs() <= error(A)).all()


def law_the_usual_call_converges(find: Find, A: Tensor) -> None:
    for k in numbers(A):
        assert find(dense_operator(A), seeded(k), k).converged.all()


def recomputed(A: Tensor, triplets: SingularTriplets) -> Tensor:
    """The residuals, in float64, from the values and vectors alone."""
    A, sigma, U, V = A.double(), triplets.values.double(), flat(triplets.left), flat(triplets.right)
    forth, back = V @ A.mT - sigma.unsqueeze(2) * U, U @ A - sigma.unsqueeze(2) * V
    return (forth.square().sum(2) + back.square().sum(2)).sqrt()


def law_residuals_are_what_they_are_said_to_be(find: Find, A: Tensor) -> None:
    for _, triplets in found(find, A):
        known = triplets.residuals.isfinite()
        wrong = (triplets.residuals.double() - recomputed(A, triplets)).abs()
        assert (wrong <= error(A))[known].all()
        assert not (triplets.values + flat(triplets.left).norm(dim=2))[~known].any(), (
            "a place that is not filled yet"
        )


def law_a_singular_value_lies_within_a_residual(find: Find, A: Tensor) -> None:
    for _, triplets in found(find, A):
        nearest = (triplets.values.double().unsqueeze(2) - exact(A).unsqueeze(1)).abs().amin(2)
        assert (nearest <= triplets.residuals.double() + error(A)).all()


def law_vectors_are_orthonormal(find: Find, A: Tensor) -> None:
    for k, triplets in found(find, A):
        assert (triplets.left.shape, triplets.right.shape) == ((len(A), k, A.shape[1]), (len(A), k, A.shape[2]))
        filled = triplets.residuals.isfinite()
        both = (filled.unsqueeze(1) & filled.unsqueeze(2)).double()
        for vectors in (flat(triplets.left), flat(triplets.right)):
            gram = vectors @ vectors.mT * both
            assert ((gram - torch.eye(k) * both).abs() <= 1000 * torch.finfo(A.dtype).eps).all()


def law_convergence_is_residuals_below_the_tolerance(find: Find, A: Tensor) -> None:
    for tolerance in (0.0, 1e-9, 1e-4, 1e-1):
        for most in (1, 2, 100):
            triplets = find(dense_operator(A), seeded(), 1, tolerance=tolerance, most=most)
            assert triplets.steps <= most
            small = (recomputed(A, triplets) <= tolerance * triplets.values.double()[:, :1] + error(A)).all(1)
            assert small[triplets.converged].all()
            assert triplets.converged.tolist() == (
                (triplets.residuals <= tolerance * triplets.values[:, :1]).all(1).tolist()
            )


def law_the_same_generator_gives_the_same_result(find: Find, A: Tensor) -> None:
    first, second = (find(dense_operator(A), seeded(7), 1) for _ in range(2))
    for name in ("values", "right", "left", "residuals", "converged"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert first.steps == second.steps


def law_the_transpose_has_the_same_values_and_the_vectors_swapped(find: Find, A: Tensor) -> None:
    k = min(2, *A.shape[1:])
    forth = find(dense_operator(A), seeded(), k, tolerance=0.0)
    back = find(dense_operator(A.mT), seeded(), k, tolerance=0.0)
    assert ((forth.values - back.values).double().abs() <= error(A)).all()
    assert (recomputed(A.mT, back) <= 4 * error(A)).all()
    assert (recomputed(A, replace(back, left=back.right, right=back.left)) <= 4 * error(A)).all()


LAWS = {name.removeprefix("law_"): law for name, law in list(globals().items()) if name.startswith("law_")}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", matrices())
@pytest.mark.parametrize("law", LAWS)
def test_values_from_below_obey_the_law_that(law, name, dtype):
    LAWS[law](lower_singular_values, stacks(dtype)[name])


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1e-25), (torch.float32, 1e25), (torch.float64, 1e-200), (torch.float64, 1e200)],
)
@pytest.mark.parametrize("name", ["square", "wide", "repeated"])
def test_scales_whose_squares_vanish_or_overflow_change_nothing(name, dtype, scale):
    """Of the residuals above all: one that vanishes in its square would call anything converged."""
    A = stacks(dtype)[name]
    plain = lower_singular_values(dense_operator(A), seeded(), 2, most=2)
    assert not plain.converged.any()
    scaled = lower_singular_values(dense_operator(A * scale), seeded(), 2, most=2)
    assert not scaled.converged.any()
    torch.testing.assert_close(scaled.residuals / scale, plain.residuals, rtol=1e-3, atol=0)
    full = lower_singular_values(dense_operator(A * scale), seeded(), 2)
    assert full.converged.all()
    torch.testing.assert_close((full.values / scale).double(), exact(A)[:, :2], rtol=1e-3, atol=0)


def test_a_block_sees_as_many_equal_values_as_it_is_wide():
    """Of a value repeated three times, a Krylov space of one vector sees one copy, until rounding finds more."""
    A = with_values(40, 30, [2.0] * 3 + [1.0] * 5, seeded(1))
    for k in (1, 2, 3, 4):
        found = lower_singular_values(dense_operator(A), seeded(), k, tolerance=1e-8)
        assert found.converged.all()
        expected = torch.tensor([2.0, 2, 2, 1], dtype=torch.float64)[:k]
        torch.testing.assert_close(found.values, expected.expand(3, k), rtol=1e-10, atol=0)


def test_too_few_blocks_are_admitted():
    A = dense_operator(torch.randn(3, 60, 50, generator=seeded(3), dtype=torch.float64))
    few = lower_singular_values(A, seeded(), 3, tolerance=1e-8, most=3)
    assert not few.converged.any()
    assert few.steps == 3
    assert (few.residuals.amax(1) > 1e-8 * few.values[:, 0]).all()
    # More values than vectors: the places that are left have no vector, and a residual that says so.
    fewer = lower_singular_values(A, seeded(), 5, block=2, most=2)
    assert not fewer.converged.any()
    assert fewer.residuals.isinf().tolist() == [[False] * 4 + [True]] * 3
    assert not fewer.values[:, 4].any()


def test_each_of_a_batch_converges_or_not_on_its_own():
    """A rank of one is exhausted at once; a full one is not."""
    g = seeded(3)
    easy, hard = with_values(30, 20, [1.0], g, 1), torch.randn(1, 30, 20, generator=g, dtype=torch.float64)
    found = lower_singular_values(dense_operator(torch.cat([easy, hard])), seeded(), 1, tolerance=1e-8, most=3)
    assert found.converged.tolist() == [True, False]


def test_a_tighter_tolerance_takes_more_steps_and_no_more_than_the_space_has():
    A = dense_operator(torch.randn(2, 40, 50, generator=seeded(3), dtype=torch.float64))
    steps = [lower_singular_values(A, seeded(), 1, tolerance=t).steps for t in (1e-1, 1e-3, 1e-6, 0.0)]
    assert steps == sorted(steps)
    assert len(set(steps)) == 4
    assert steps[-1] == 40


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (1, 4)])
def test_more_values_than_there_are_are_refused(shape):
    with pytest.raises(ValueError, match="singular values"):
        lower_singular_values(dense_operator(torch.ones(2, *shape)), seeded(), min(shape) + 1)


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": -1}, {"most": 0}, {"block": 0}, {"block": -1}])
def test_numbers_below_one_are_refused(wrong):
    with pytest.raises(ValueError):
        lower_singular_values(dense_operator(torch.ones(2, 5, 7)), seeded(), **wrong)


def test_vectors_have_the_shapes_of_the_spaces():
    """A Kronecker product: the singular values are all the products of two, the vectors matrices."""
    A, B = (torch.randn(2, *s, generator=seeded(1), dtype=torch.float64) for s in ((2, 3), (5, 4)))
    for operator, domain, codomain in ((kronecker(A, B), (3, 4), (2, 5)), (kronecker(A, B).T, (2, 5), (3, 4))):
        found = lower_singular_values(operator, seeded(), 2, tolerance=1e-10)
        assert (found.right.shape, found.left.shape) == ((2, 2, *domain), (2, 2, *codomain))
        products = exact(A).unsqueeze(2) * exact(B).unsqueeze(1)
        expected = products.flatten(1).sort(descending=True).values[:, :2]
        torch.testing.assert_close(found.values, expected)
        for i in range(2):
            image = operator.matvec(found.right[:, i])
            torch.testing.assert_close(image, found.values[:, i].view(-1, 1, 1) * found.left[:, i])


def test_a_space_may_be_that_of_single_numbers():
    found = lower_singular_values(identity(4, (), torch.float64, torch.device("cpu")), seeded())
    torch.testing.assert_close(found.values, torch.ones(4, 1, dtype=torch.float64))
    assert (found.left.shape, found.right.shape) == ((4, 1), (4, 1))


def test_values_of_sums_and_compositions_are_those_of_the_matrices():
    A, B = (torch.randn(2, 6, 6, generator=seeded(s), dtype=torch.float64) for s in (1, 2))
    operator = identity(2, (6,), torch.float64, torch.device("cpu")) + dense_operator(A) @ dense_operator(B).T
    found = lower_singular_values(operator, seeded(), 3, tolerance=1e-10)
    torch.testing.assert_close(found.values, exact(torch.eye(6) + A @ B.mT)[:, :3])


def test_nothing_keeps_a_graph_and_no_parameter_is_moved():
    A = torch.randn(2, 6, 5, generator=seeded(1)).requires_grad_()
    found = lower_singular_values(dense_operator(A), seeded(), 2)
    assert not any(t.requires_grad for t in (found.values, found.left, found.right, found.residuals))
    assert A.grad is None


# Jacobians of models, which is what all this is for.


def block_jacobians(name: str, dtype: torch.dtype) -> tuple[LinearOperator, Tensor]:
    """The Jacobian of a model's first block at a few random inputs, and its matrices, by reverse mode."""
    cfg = MODELS[name]
    model = ViT(cfg, seeded())
    g = seeded(17)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the start, where a block is nearly the identity
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
    twin = unfuse_attention(model.to(dtype).eval())
    local = cfg.local_blocks > 0
    block = (twin.local_blocks if local else twin.blocks)[0]
    tokens = cfg.side**2 + (cfg.pool != "mean" and not local)
    x = torch.randn(2, tokens, cfg.dim, generator=g, dtype=dtype)
    size = x[0].numel()
    alone = [jacrev(lambda z: block(z.unsqueeze(0)).squeeze(0))(sample) for sample in x]
    return jacobian(block, x), torch.stack([J.detach().reshape(size, size) for J in alone])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_the_largest_values_of_a_blocks_jacobian_are_those_of_its_matrix(name, dtype):
    A, matrix = block_jacobians(name, dtype)
    found = lower_singular_values(A, seeded(), 2, tolerance=1e-4 if dtype == torch.float32 else 1e-6)
    assert found.converged.all()
    torch.testing.assert_close(found.values.double(), exact(matrix)[:, :2], rtol=1e-4, atol=0)
    assert (found.values.double() <= exact(matrix)[:, :2] + error(matrix)).all()


def test_a_network_whose_units_are_off_has_the_values_of_its_matrix():
    """Exact zeros are where an iteration breaks down: the Jacobian of a ReLU network is full of them."""
    g = seeded(2)
    f = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU()).double()
    with torch.no_grad():
        for parameter in f.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g))
        f[2].bias -= 5
    x = torch.randn(25, 6, generator=g, dtype=torch.float64)
    matrix = torch.stack([jacrev(f)(sample).detach() for sample in x])
    ranks = torch.linalg.matrix_rank(matrix)
    assert {0, 1, 2, 3} <= set(ranks.tolist()), "every degree of deadness"
    for k in (1, 2, 4):
        found = lower_singular_values(jacobian(f, x), seeded(), k, tolerance=1e-9)
        assert (found.values <= exact(matrix)[:, :k] + error(matrix)).all()
        torch.testing.assert_close(found.values, exact(matrix)[:, :k])


# The testers, tested: each wrong version differs from the right one in one place, and a law must say so.


def changed(**change: Callable[[SingularTriplets], object]) -> Find:
    """The right function, whose results are changed on the way out."""

    def find(*args, **kwargs) -> SingularTriplets:
        triplets = lower_singular_values(*args, **kwargs)
        return replace(triplets, **{name: value(triplets) for name, value in change.items()})

    return find


def without_reorthogonalization(A: LinearOperator, generator: torch.Generator, k: int = 1, **kwargs):
    """As textbooks write it: each vector is made orthogonal to the one before, which in exact arithmetic is all.

    In floating point it is not: what has converged comes back, and is counted twice.
    """
    v = torch.randn(A.batch, *A.domain, generator=generator, dtype=A.dtype)
    v = v / v.norm(dim=1, keepdim=True)
    u, beta = torch.zeros(A.batch, *A.codomain, dtype=A.dtype), torch.zeros(A.batch, 1, dtype=A.dtype)
    U, V, steps = [], [], 3 * A.columns
    B = torch.zeros(A.batch, steps, steps, dtype=A.dtype)
    for i in range(steps):
        u = A.matvec(v) - beta * u
        alpha = u.norm(dim=1, keepdim=True)
        u = u / alpha
        U, V = [*U, u], [*V, v]
        B[:, i, i] = alpha.squeeze(1)
        v = A.rmatvec(u) - alpha * v
        beta = v.norm(dim=1, keepdim=True)
        v = v / beta
        if i + 1 < steps:
            B[:, i, i + 1] = beta.squeeze(1)
    P, sigma, Qt = torch.linalg.svd(B)
    left, right = P[:, :, :k].mT @ torch.stack(U, 1), Qt[:, :k] @ torch.stack(V, 1)
    found = lower_singular_values(A, generator, k, **kwargs)
    return replace(found, values=sigma[:, :k], left=left, right=right, residuals=torch.zeros_like(found.residuals))


def with_ghosts(A: LinearOperator, generator: torch.Generator, k: int = 1, **kwargs):
    """The largest value found over and over again, as if it were the next ones."""
    found = lower_singular_values(A, generator, k, **kwargs)
    return replace(found, **{name: getattr(found, name)[:, :1].expand_as(getattr(found, name))
                             for name in ("values", "left", "right", "residuals")})  # fmt: skip


def from_one_vector(A: LinearOperator, generator: torch.Generator, k: int = 1, **kwargs):
    """A single block, called converged."""
    found = lower_singular_values(A, generator, k, **(kwargs | {"most": 1}))
    return replace(found, converged=torch.ones_like(found.converged))


PLANTED: list[tuple[Find, str, Callable[[Find, Tensor], None]]] = [
    (changed(values=lambda t: 1.001 * t.values), "tall", law_no_value_is_above_the_exact_one),
    (changed(values=lambda t: 1.001 * t.values), "tall", law_residuals_are_what_they_are_said_to_be),
    (changed(values=lambda t: 0.999 * t.values), "tall", law_everything_is_found_when_the_space_is_exhausted),
    (changed(values=lambda t: 0.999 * t.values), "tall", law_what_has_converged_is_within_the_tolerance),
    (changed(values=lambda t: t.values.flip(1)), "tall", law_values_are_sorted_and_not_negative),
    (changed(values=lambda t: t.values.flip(0)), "mixed scales", law_no_value_is_above_the_exact_one),
    (changed(values=lambda t: -t.values), "tall", law_values_are_sorted_and_not_negative),
    (changed(left=lambda t: -t.left), "tall", law_residuals_are_what_they_are_said_to_be),
    (changed(left=lambda t: t.right, right=lambda t: t.left), "square", law_residuals_are_what_they_are_said_to_be),
    (changed(residuals=lambda t: t.residuals / 2), "larger", law_residuals_are_what_they_are_said_to_be),
    (changed(residuals=lambda t: 0 * t.residuals), "larger", law_a_singular_value_lies_within_a_residual),
    (changed(converged=lambda t: t.converged | True), "larger", law_convergence_is_residuals_below_the_tolerance),
    (changed(converged=lambda t: t.converged & False), "larger", law_the_usual_call_converges),
    (changed(right=lambda t: 1.001 * t.right), "tall", law_vectors_are_orthonormal),
    (with_ghosts, "larger", law_no_value_is_above_the_exact_one),
    (with_ghosts, "larger", law_vectors_are_orthonormal),
    (with_ghosts, "tiny gap at the top", law_vectors_are_orthonormal),
    (from_one_vector, "larger", law_what_has_converged_is_within_the_tolerance),
    (without_reorthogonalization, "larger", law_no_value_is_above_the_exact_one),
    (without_reorthogonalization, "larger", law_vectors_are_orthonormal),
]


def test_a_planted_generator_that_is_ignored_is_caught():
    def ignores(A, generator, k=1, **kwargs):
        return lower_singular_values(A, shared, k, **kwargs)

    shared = seeded(1)
    with pytest.raises(AssertionError):
        law_the_same_generator_gives_the_same_result(ignores, stacks(torch.float64)["tall"])


@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_a_planted_wrong_version_is_caught(number):
    wrong, name, law = PLANTED[number]
    A = stacks(torch.float64)[name]
    law(lower_singular_values, A)
    with pytest.raises(AssertionError):
        law(wrong, A)


class Detached(torch.autograd.Function):
    """3 x, with a backward pass that is right and whose own derivative is silently zero."""

    @staticmethod
    def forward(x):
        return 3 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient.detach()


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_that_do_not_belong_to_one_matrix_are_refused(dtype):
    A = torch.randn(3, 9, 7, generator=seeded(), dtype=torch.float64).to(dtype)
    true = dense_operator(A)
    wrong = {
        "a transpose of another matrix": replace(true, rmatvec=dense_operator(A.flip(1)).rmatvec),
        "twice as large from one side": replace(true, rmatvec=lambda u: 2 * true.rmatvec(u)),
        "zero from one side": replace(true, matvec=lambda v: 0 * true.matvec(v)),
        "wrong for one image of three": replace(
            true, matvec=dense_operator(A * A.new_tensor([1, 1, -1])[:, None, None]).matvec
        ),
        "no second derivative": jacobian(Detached.apply, torch.ones(2, 5, dtype=dtype)),
    }
    for name, operator in wrong.items():
        with pytest.raises(ValueError, match="do not belong to one matrix"):
            print(name, lower_singular_values(operator, seeded()))
    assert lower_singular_values(true, seeded()).converged.all()
