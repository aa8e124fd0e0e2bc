"""The laws of a linear operator, run over every way to make one, and over wrong ones, which they must catch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn
from torch.func import jacrev

from helpers.registry import MODELS, SMALL
from specguard.linalg import LinearOperator, dense_operator, exact_row_column, identity, jacobian, kronecker
from specguard.nn import ViT, unfuse_attention

BATCH = 3
CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def rounding(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 1e-11


def flat(x: Tensor) -> Tensor:
    """One row for each sample, which may be a single number."""
    return x.reshape(len(x), -1)


def close(found: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of the dtype, relative to the largest entry."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    size = expected.detach().abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding(found.dtype) * size)


# An operator beside its matrices, which are made without the code under test.
Known = tuple[LinearOperator, Tensor]


def dense(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float64) -> Known:
    A = normal(BATCH, rows, columns, seed=seed, dtype=dtype)
    return dense_operator(A), A


def krons(A: Tensor, B: Tensor) -> Tensor:
    return torch.stack([torch.kron(a, b) for a, b in zip(A, B, strict=True)])


def kron(p: int, q: int, r: int, s: int, dtype: torch.dtype = torch.float64) -> Known:
    A, B = normal(BATCH, p, q, seed=p, dtype=dtype), normal(BATCH, r, s, seed=r, dtype=dtype)
    return kronecker(A, B), krons(A, B)


def derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Known:
    """The Jacobian, and the matrices that reverse mode gives for every sample on its own."""
    size = x[0].numel()
    alone = [jacrev(lambda z: function(z.unsqueeze(0)).squeeze(0))(sample) for sample in x]
    return jacobian(function, x), torch.stack([J.detach().reshape(-1, size) for J in alone])


def perceptron(dtype: torch.dtype = torch.float64) -> nn.Module:
    return strewn(nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 7), nn.GELU(), nn.Linear(7, 2)), dtype)


def strewn(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Weights far from the start of training, where a block is nearly the identity and hides every bug."""
    g = seeded(17)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
    return model.to(dtype).eval()


def block(name: str, dtype: torch.dtype = torch.float64, which: str = "blocks") -> tuple[nn.Module, Tensor]:
    """The first block of a model of the registry, on the explicit path, and a batch of tokens."""
    cfg = MODELS[name]
    model = unfuse_attention(strewn(ViT(cfg, seeded()), dtype))
    tokens = cfg.side**2 + (cfg.pool != "mean" and which == "blocks")
    return model.get_submodule(which)[0], normal(BATCH, tokens, cfg.dim, seed=3, dtype=dtype)


def first_and_second() -> tuple[Known, Known]:
    return dense(7, 5, 1), dense(5, 3, 2)


def composed() -> Known:
    (f, A), (g, B) = first_and_second()
    return f @ g, A @ B


def composed_of_three() -> Known:
    """Matrices to matrices by a Kronecker product, after one and before another."""
    (f, A), (g, B), (h, C) = kron(2, 3, 5, 4), kron(3, 6, 4, 7), kron(6, 1, 7, 2)
    return f @ g @ h, A @ B @ C


def added() -> Known:
    (f, A), (g, B) = dense(7, 5, 1), dense(7, 5, 2)
    return f + g, A + B


def residual() -> Known:
    shape = (3, 5)
    A, B = normal(BATCH, 3, 3, seed=1), normal(BATCH, 5, 5, seed=2)
    return identity(BATCH, shape, torch.float64, CPU) + kronecker(A, B), torch.eye(15).double() + krons(A, B)


def transposed(known: Known) -> Known:
    return known[0].T, known[1].mT


def whole_model() -> Known:
    return derivative(
        unfuse_attention(strewn(ViT(SMALL, seeded()))), torch.rand(BATCH, 2, 6, 6, generator=seeded()).double()
    )


OPERATORS: dict[str, Callable[[], Known]] = {
    "dense tall": lambda: dense(7, 5, 0),
    "dense wide": lambda: dense(5, 7, 0),
    "dense square": lambda: dense(5, 5, 0),
    "dense one row": lambda: dense(1, 5, 0),
    "dense one column": lambda: dense(5, 1, 0),
    "dense one entry": lambda: dense(1, 1, 0),
    "dense float32": lambda: dense(7, 5, 0, torch.float32),
    "transpose": lambda: transposed(dense(7, 5, 0)),
    "transpose of a transpose": lambda: transposed(transposed(dense(7, 5, 0))),
    "composition": composed,
    "composition of three": composed_of_three,
    "transpose of a composition": lambda: transposed(composed_of_three()),
    "sum": added,
    "sum with the identity": residual,
    "transpose of a sum": lambda: transposed(residual()),
    "identity": lambda: (
        identity(BATCH, (2, 3), torch.float64, CPU),
        torch.eye(6, dtype=torch.float64).repeat(BATCH, 1, 1),
    ),
    "identity of a number": lambda: (
        identity(BATCH, (), torch.float32, CPU),
        torch.ones(BATCH, 1, 1),
    ),
    "kronecker": lambda: kron(2, 3, 5, 4),
    "kronecker square": lambda: kron(3, 3, 3, 3),
    "kronecker of a row and a column": lambda: kron(1, 3, 5, 1),
    "kronecker float32": lambda: kron(2, 3, 5, 4, torch.float32),
    "transpose of a kronecker": lambda: transposed(kron(2, 3, 5, 4)),
    "jacobian of a perceptron": lambda: derivative(perceptron(), normal(BATCH, 5)),
    "jacobian in float32": lambda: derivative(perceptron(torch.float32), normal(BATCH, 5, dtype=torch.float32)),
    "jacobian of one number": lambda: derivative(torch.sin, normal(BATCH, 1)),
    "transpose of a jacobian": lambda: transposed(derivative(perceptron(), normal(BATCH, 5))),
    "jacobian of a model": whole_model,
    "jacobian of a local block": lambda: derivative(*block("pool=mean local=1", which="local_blocks")),
    "jacobian of a block in float32": lambda: derivative(*block("one head", torch.float32)),
    **{f"jacobian of a block, {name}": lambda name=name: derivative(*block(name)) for name in sorted(MODELS)
       if MODELS[name].local_blocks < MODELS[name].depth},
}  # fmt: skip


# The laws. Each takes an operator and its matrices, and fails by assertion.


def law_shapes_and_dtypes_are_as_stated(A: LinearOperator, matrices: Tensor) -> None:
    assert (A.batch, A.rows, A.columns) == matrices.shape
    assert (A.dtype, A.device) == (matrices.dtype, matrices.device)
    forth = A.matvec(normal(A.batch, *A.domain, dtype=A.dtype))
    back = A.rmatvec(normal(A.batch, *A.codomain, dtype=A.dtype))
    assert (forth.shape, forth.dtype) == ((A.batch, *A.codomain), A.dtype)
    assert (back.shape, back.dtype) == ((A.batch, *A.domain), A.dtype)


def law_the_adjoint_is_the_adjoint_for_every_sample(A: LinearOperator, matrices: Tensor) -> None:
    """<A x, y> = <x, A^T y>, which no matrix is needed for."""
    for seed in range(3):
        x = normal(A.batch, *A.domain, seed=seed, dtype=A.dtype)
        y = normal(A.batch, *A.codomain, seed=seed + 10, dtype=A.dtype)
        forth, back = A.matvec(x), A.rmatvec(y)
        left, right = flat(forth * y).sum(1), flat(x * back).sum(1)
        scale = flat(forth).norm(dim=1) * flat(y).norm(dim=1)
        assert ((left - right).abs() <= rounding(A.dtype) * scale).all()


def law_a_product_is_that_of_the_matrix(A: LinearOperator, matrices: Tensor) -> None:
    x = normal(A.batch, *A.domain, seed=1, dtype=A.dtype)
    y = normal(A.batch, *A.codomain, seed=2, dtype=A.dtype)
    close(flat(A.matvec(x)), (matrices @ x.view(A.batch, -1, 1)).squeeze(2))
    close(flat(A.rmatvec(y)), (matrices.mT @ y.view(A.batch, -1, 1)).squeeze(2))


def law_the_dense_matrices_are_those_it_stands_for(A: LinearOperator, matrices: Tensor) -> None:
    close(A.dense(), matrices)


def law_the_transpose_has_the_transposed_matrices(A: LinearOperator, matrices: Tensor) -> None:
    close(A.T.dense(), matrices.mT)
    assert (A.T.domain, A.T.codomain, A.T.rows, A.T.columns) == (A.codomain, A.domain, A.columns, A.rows)


def law_products_are_linear(A: LinearOperator, matrices: Tensor) -> None:
    for shape, product in ((A.domain, A.matvec), (A.codomain, A.rmatvec)):
        x, y = (normal(A.batch, *shape, seed=seed, dtype=A.dtype) for seed in (1, 2))
        close(product(3 * x - y), 3 * product(x) - product(y))
        assert not product(torch.zeros_like(x)).any()


def law_samples_do_not_mix(A: LinearOperator, matrices: Tensor) -> None:
    """What is put into one sample comes out of that one alone."""
    for shape, product in ((A.domain, A.matvec), (A.codomain, A.rmatvec)):
        x = normal(A.batch, *shape, seed=1, dtype=A.dtype)
        together = product(x)
        for i in range(A.batch):
            only = torch.zeros_like(x)
            only[i] = x[i]
            expected = torch.zeros_like(together)
            expected[i] = together[i]
            close(product(only), expected)


def law_a_product_changes_nothing(A: LinearOperator, matrices: Tensor) -> None:
    """Neither the vector it is given nor the operator: the second time is like the first."""
    for shape, product in ((A.domain, A.matvec), (A.codomain, A.rmatvec)):
        x = normal(A.batch, *shape, seed=4, dtype=A.dtype)
        before = x.clone()
        first = product(x).clone()
        assert torch.equal(x, before)
        with torch.no_grad():
            close(product(x), first.detach())


# A whole matrix is as many derivatives as it has columns: for some blocks only.
WHOLE = (law_the_dense_matrices_are_those_it_stands_for, law_the_transpose_has_the_transposed_matrices)
WHOLE_BLOCKS = ("norm=layernorm", "activation=relu", "one token")
LAWS = {name.removeprefix("law_"): law for name, law in list(globals().items()) if name.startswith("law_")}


@pytest.fixture(scope="module")
def known():
    """Every operator of the registry, made once."""
    made: dict[str, Known] = {}

    def get(name: str) -> Known:
        if name not in made:
            made[name] = OPERATORS[name]()
        return made[name]

    return get


CASES = [
    (law, name)
    for law in LAWS
    for name in OPERATORS
    if LAWS[law] not in WHOLE or "jacobian of a block, " not in name or name.endswith(WHOLE_BLOCKS)
]


@pytest.mark.parametrize(("law", "name"), CASES)
def test_every_operator_obeys_the_law_that(law, name, known):
    LAWS[law](*known(name))


def test_a_kronecker_product_maps_matrices_as_its_name_says():
    A, B, X = normal(BATCH, 2, 3, seed=1), normal(BATCH, 5, 4, seed=2), normal(BATCH, 3, 4, seed=3)
    found = kronecker(A, B).matvec(X)
    for a, b, x, y in zip(A, B, X, found, strict=True):
        close(y.flatten(), torch.kron(a, b) @ x.flatten())
        close(y, a @ x @ b.T)


def test_the_derivative_of_a_composition_is_the_composition_of_the_derivatives():
    first, x = block("activation=gelu")
    second = perceptron()
    f, g = (lambda z: first(z)[:, 0, :5]), second
    law_a_product_is_that_of_the_matrix(jacobian(g, f(x)) @ jacobian(f, x), derivative(lambda z: g(f(z)), x)[1])


def test_the_derivative_of_a_residual_branch_is_the_identity_and_that_of_the_branch():
    layer, x = block("activation=softplus")
    branch = jacobian(lambda z: layer(z) - z, x)
    both = identity(BATCH, tuple(x.shape[1:]), x.dtype, x.device) + branch
    v = normal(*x.shape, seed=8)
    close(both.matvec(v), jacobian(layer, x).matvec(v))
    close(both.rmatvec(v), jacobian(layer, x).rmatvec(v))


def test_a_jacobian_agrees_with_torchs_own_and_with_differences():
    f, x = perceptron(), normal(BATCH, 5)
    found = jacobian(f, x).dense()
    own = torch.autograd.functional.jacobian(f, x)  # sample by sample: all blocks off the diagonal are zero
    for i in range(BATCH):
        close(found[i].detach(), own[i, :, i])
    step = 1e-6 * normal(BATCH, 5, seed=2)
    torch.testing.assert_close(
        jacobian(f, x).matvec(step), (f(x + step / 2) - f(x - step / 2)), rtol=1e-6, atol=1e-12
    )


def widening(x: Tensor) -> Tensor:
    """From 2 x 3 to 4 x 1 x 5 entries, of every sample on its own."""
    first, second = normal(6, 20, seed=1), normal(6, 20, seed=2)
    return (torch.sin(x.flatten(1) @ first) * (x.flatten(1) @ second)).view(-1, 4, 1, 5)


SUMMED: dict[str, Callable[[], tuple[Callable[[Tensor], Tensor], Tensor]]] = {
    "perceptron": lambda: (perceptron(), normal(BATCH, 5)),
    "several axes": lambda: (widening, normal(BATCH, 2, 3)),
    "one entry": lambda: (lambda x: x**3, normal(BATCH, 1)),
    "constant": lambda: (lambda x: 0 * x, normal(BATCH, 4)),
    "block": lambda: block("one token"),
    "model": lambda: (unfuse_attention(strewn(ViT(SMALL, seeded()))), normal(2, 2, 6, 6)),
    "float32": lambda: (perceptron(torch.float32), normal(BATCH, 5, dtype=torch.float32)),
    "one sample": lambda: (widening, normal(1, 2, 3)),
    "no sample": lambda: (widening, normal(0, 2, 3)),
}


@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
@pytest.mark.parametrize("name", SUMMED)
def test_the_row_and_column_sums_of_a_jacobian_are_those_of_its_matrix(name, chunk):
    function, x = SUMMED[name]()
    found = exact_row_column(function, x, chunk)
    if not len(x):
        assert (found.shape, found.dtype) == ((0,), x.dtype)
        return
    _, matrices = derivative(function, x)
    sizes = matrices.abs()
    close(found, (sizes.sum(1).amax(1) * sizes.sum(2).amax(1)).sqrt())
    assert (found >= torch.linalg.svdvals(matrices)[:, 0] * (1 - rounding(x.dtype))).all()
    assert not found.requires_grad


def test_the_row_and_column_sums_of_a_function_to_single_numbers_are_those_of_its_matrix():
    function, x = (lambda z: (z**2).sum((1, 2))), normal(BATCH, 2, 3)
    sizes = (2 * x).flatten(1).abs()
    close(exact_row_column(function, x), (sizes.amax(1) * sizes.sum(1)).sqrt())


@pytest.mark.parametrize("chunk", [0, -1])
def test_sums_of_no_columns_at_once_are_refused(chunk):
    with pytest.raises(ValueError):
        exact_row_column(widening, normal(BATCH, 2, 3), chunk)


def test_planted_sums_of_one_kind_or_of_all_samples_together_are_told_from_the_right_ones():
    _, matrices = derivative(widening, normal(BATCH, 2, 3))
    found, sizes = exact_row_column(widening, normal(BATCH, 2, 3)), matrices.abs()
    columns, rows = sizes.sum(1).amax(1), sizes.sum(2).amax(1)
    for wrong in (columns, rows, columns * rows, (columns.max() * rows.max()).sqrt().expand(BATCH)):
        with pytest.raises(AssertionError):
            close(found, wrong)


@pytest.mark.parametrize("inside", [torch.no_grad, torch.enable_grad])
def test_a_jacobian_made_where_gradients_are_off_is_the_same(inside):
    f, x = perceptron(), normal(BATCH, 5)
    expected = jacobian(f, x).dense().detach()
    with inside():
        made = jacobian(f, x.clone().requires_grad_())
        close(made.dense().detach(), expected)
        close(made.T.dense().detach().mT, expected)
    close(made.dense().detach(), expected)
    close(made.T.dense().detach().mT, expected)
    assert all(parameter.grad is None for parameter in f.parameters())


def test_a_jacobian_stays_where_it_was_taken_when_the_input_is_overwritten():
    f, x = perceptron(), normal(BATCH, 5)
    expected = jacobian(f, x.clone()).dense().detach()
    moved = x.clone()
    A = jacobian(f, moved)
    v, u = normal(BATCH, 5, seed=1), normal(BATCH, 2, seed=2)
    moved += 1
    close(A.matvec(v).detach(), (expected @ v.unsqueeze(2)).squeeze(2))
    close(A.rmatvec(u).detach(), (expected.mT @ u.unsqueeze(2)).squeeze(2))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (dense(7, 5, 0)[0], dense(7, 5, 0)[0]),
        (dense(5, 7, 0)[0], dense(5, 7, 0)[0]),
        (kron(2, 3, 5, 4)[0], dense(12, 3, 0)[0]),  # as many entries, but of another shape
        (dense(5, 5, 0)[0], dense_operator(normal(BATCH + 1, 5, 5))),
        (dense(5, 5, 0)[0], dense_operator(normal(1, 5, 5))),
    ],
)
def test_operators_that_do_not_meet_cannot_be_composed(left, right):
    with pytest.raises(ValueError, match="composed"):
        left @ right


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (dense(7, 5, 0)[0], dense(5, 7, 0)[0]),
        (dense(7, 5, 0)[0], dense(7, 1, 0)[0]),  # which torch would broadcast
        (dense(7, 5, 0)[0], dense(1, 5, 0)[0]),
        (dense(10, 12, 0)[0], kron(2, 3, 5, 4)[0]),
        (dense(5, 5, 0)[0], dense_operator(normal(1, 5, 5))),
    ],
)
def test_operators_of_different_shapes_cannot_be_added(left, right):
    for first, second in ((left, right), (right, left)):
        with pytest.raises(ValueError, match="added"):
            first + second


@pytest.mark.parametrize("batches", [(3, 2), (1, 3), (3, 1)])
def test_a_kronecker_product_of_different_batches_is_refused(batches, monkeypatch):
    # As it is shipped: users run without the type checks of the tests, which would come first.
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    first, second = batches
    with pytest.raises(ValueError):
        kronecker(normal(first, 2, 3), normal(second, 5, 4))


def objects(law: Callable[[LinearOperator, Tensor], None], A: LinearOperator, matrices: Tensor) -> bool:
    try:
        law(A, matrices)
    except (AssertionError, RuntimeError):  # a wrong shape may already be more than torch can take
        return True
    return False


# The testers, tested: each wrong operator differs from a right one in one place, and a law must say so.


def forgets_the_transpose_on_the_right(A: Tensor, B: Tensor) -> LinearOperator:
    return replace(kronecker(A, B), rmatvec=lambda Y: A.mT @ Y @ B.mT)


def forgets_the_transpose_on_the_left(A: Tensor, B: Tensor) -> LinearOperator:
    return replace(kronecker(A, B), rmatvec=lambda Y: A @ Y @ B)


def multiplies_from_the_right_without_a_transpose(A: Tensor, B: Tensor) -> LinearOperator:
    return replace(kronecker(A, B), matvec=lambda X: A @ X @ B, rmatvec=lambda Y: A.mT @ Y @ B.mT)


def counts_entries_column_by_column(A: Tensor, B: Tensor) -> LinearOperator:
    right = kronecker(B, A)
    return replace(
        right,
        matvec=lambda X: right.matvec(X.mT).mT,
        rmatvec=lambda Y: right.rmatvec(Y.mT).mT,
        domain=right.domain[::-1],
        codomain=right.codomain[::-1],
    )


def swaps_the_factors(A: Tensor, B: Tensor) -> LinearOperator:
    return kronecker(B, A)


@pytest.mark.parametrize("sizes", [(2, 3, 5, 4), (3, 3, 3, 3)], ids=["distinct", "all equal"])
@pytest.mark.parametrize(
    "wrong",
    [
        forgets_the_transpose_on_the_right,
        forgets_the_transpose_on_the_left,
        multiplies_from_the_right_without_a_transpose,
        swaps_the_factors,
    ],
)
def test_a_planted_wrong_kronecker_product_is_caught(wrong, sizes):
    p, q, r, s = sizes
    A, B = normal(BATCH, p, q, seed=p), normal(BATCH, r, s, seed=r + 1)
    for law in LAWS.values():
        law(kronecker(A, B), krons(A, B))
    assert any(objects(law, wrong(A, B), krons(A, B)) for law in LAWS.values())


def test_entries_column_by_column_are_the_same_product_as_row_by_row_with_the_factors_swapped():
    """Not an error, but the other convention: the same maps of matrices, and so the same operator."""
    A, B = normal(BATCH, 2, 3, seed=1), normal(BATCH, 5, 4, seed=2)
    close(counts_entries_column_by_column(A, B).dense(), krons(A, B))


def with_a_wrong_axis(A: LinearOperator) -> LinearOperator:
    """An adjoint that returns the transposed matrix: a square domain hides it from every check of shapes."""
    return replace(A, rmatvec=lambda y: A.rmatvec(y).mT)


def with_itself_as_adjoint(A: LinearOperator) -> LinearOperator:
    return replace(A, rmatvec=A.matvec)


def with_the_samples_of_the_adjoint_rolled(A: LinearOperator) -> LinearOperator:
    return replace(A, rmatvec=lambda y: A.rmatvec(y.roll(1, 0)))


def with_the_mean_of_the_batch_added(A: LinearOperator) -> LinearOperator:
    """Its adjoint is right; only the samples mix."""
    return replace(
        A,
        matvec=lambda x: (z := A.matvec(x)) + z.mean(0),
        rmatvec=lambda y: A.rmatvec(y + y.mean(0)),
    )


def with_an_offset(A: LinearOperator) -> LinearOperator:
    return replace(A, matvec=lambda x: A.matvec(x) + 1e-3)


def with_an_adjoint_a_thousandth_too_long(A: LinearOperator) -> LinearOperator:
    return replace(A, rmatvec=lambda y: 1.001 * A.rmatvec(y))


def in_single_precision(A: LinearOperator) -> LinearOperator:
    return replace(A, matvec=lambda x: A.matvec(x).float().double())


def overwriting_its_vector(A: LinearOperator) -> LinearOperator:
    return replace(A, matvec=lambda x: A.matvec(x.mul_(2)) / 2)


PLANTED = [
    (with_a_wrong_axis, law_the_adjoint_is_the_adjoint_for_every_sample),
    (with_itself_as_adjoint, law_the_adjoint_is_the_adjoint_for_every_sample),
    (with_itself_as_adjoint, law_the_transpose_has_the_transposed_matrices),
    (with_the_samples_of_the_adjoint_rolled, law_the_adjoint_is_the_adjoint_for_every_sample),
    (with_the_samples_of_the_adjoint_rolled, law_samples_do_not_mix),
    (with_the_mean_of_the_batch_added, law_samples_do_not_mix),
    (with_the_mean_of_the_batch_added, law_the_dense_matrices_are_those_it_stands_for),
    (with_an_offset, law_products_are_linear),
    (with_an_adjoint_a_thousandth_too_long, law_the_adjoint_is_the_adjoint_for_every_sample),
    (with_an_adjoint_a_thousandth_too_long, law_a_product_is_that_of_the_matrix),
    (in_single_precision, law_the_dense_matrices_are_those_it_stands_for),
    (overwriting_its_vector, law_a_product_changes_nothing),
]


@pytest.mark.parametrize(("wrong", "law"), PLANTED, ids=[f"{w.__name__}-{law.__name__}" for w, law in PLANTED])
def test_a_planted_wrong_operator_is_caught(wrong, law):
    right, matrices = kron(3, 3, 3, 3)
    law(right, matrices)
    with pytest.raises(AssertionError):
        law(wrong(right), matrices)


def test_a_planted_composition_whose_adjoint_is_in_the_wrong_order_is_caught():
    (f, A), (g, B) = dense(5, 5, 1), dense(5, 5, 2)
    wrong = replace(f @ g, rmatvec=lambda y: f.rmatvec(g.rmatvec(y)))
    with pytest.raises(AssertionError):
        law_the_adjoint_is_the_adjoint_for_every_sample(wrong, A @ B)


def test_a_planted_sum_whose_adjoint_forgets_a_term_is_caught():
    (f, A), (g, B) = dense(7, 5, 1), dense(7, 5, 2)
    with pytest.raises(AssertionError):
        law_the_adjoint_is_the_adjoint_for_every_sample(replace(f + g, rmatvec=f.rmatvec), A + B)


def test_a_planted_jacobian_at_another_point_is_caught():
    f, x = perceptron(), normal(BATCH, 5)
    _, matrices = derivative(f, x)
    with pytest.raises(AssertionError):
        law_the_dense_matrices_are_those_it_stands_for(jacobian(f, x + 1e-3), matrices)
    mixed = replace(jacobian(f, x), rmatvec=jacobian(f, x + 1e-3).rmatvec)
    with pytest.raises(AssertionError):
        law_the_adjoint_is_the_adjoint_for_every_sample(mixed, matrices)


def test_a_planted_function_whose_samples_mix_is_caught():
    """Normalization over the batch, as in training, is no function of each sample."""
    norm = nn.BatchNorm1d(5, track_running_stats=False).double()
    with pytest.raises(AssertionError):
        law_samples_do_not_mix(jacobian(norm, normal(BATCH, 5)), torch.empty(0))
    law_samples_do_not_mix(jacobian(nn.BatchNorm1d(5).double().eval(), normal(BATCH, 5)), torch.empty(0))
