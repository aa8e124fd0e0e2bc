"""Attention alone: the papers' errata as counterexamples, the sizes of Table 3, norms against dense SVDs."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from jaxtyping import config
from torch.func import jacrev

from specguard.certificates import program
from specguard.certificates.attention import local as local_bounds
from specguard.certificates.attention import lofast, remainder
from specguard.certificates.attention import point as attention
from specguard.certificates.attention.softmax import upper_softmax_slope
from specguard.nn import Attention, GatedPositionalAttention, Residual, SkipAttention, unfuse_attention
from specguard.testing import max_change


@pytest.fixture
def as_shipped(monkeypatch):
    """Users run without the type checks of the tests."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


def filled(layer, scale=1.0, seed=0):
    """The layer in eval mode and float64, its weights random: matrices of norm about `2 scale`, biases smaller."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator) / max(1, p.shape[-1]) ** 0.5)
    return layer.eval().double()


def tokens(*shape, size=None, seed=0):
    """Random tokens, every one of length `size` if that is given."""
    X = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return X if size is None else X * (size / X.norm(dim=-1, keepdim=True))


def node_of(layer, X):
    (step,) = program(layer).steps
    return step.rule(X)


def full(radius, count=1):
    return torch.full((count,), radius, dtype=torch.float64)


def found(layer, X, radius, seed=0):
    """A change of the layer's output that is attained, from below."""
    function = unfuse_attention(layer).requires_grad_(False)
    return max_change(function, X, radius, torch.Generator().manual_seed(seed))


def identity_attention(dim, q=1.0, k=1.0, v=1.0, bq=None):
    """One head, no residual, W^Q = q I, W^K = k I, W^V = v I, W^O = I."""
    layer = Attention(dim, 1).eval().double()
    eye = torch.eye(dim, dtype=torch.float64)
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.cat([q * eye, k * eye, v * eye]))
        layer.qkv.bias.zero_()
        layer.out.weight.copy_(eye)
        layer.out.bias.zero_()
        if bq is not None:
            layer.qkv.bias[:dim] = torch.tensor(bq, dtype=torch.float64)
    return layer


def logit_operator(a, b):
    """D -> D a^T + b D^T as a dense matrix, column by column."""
    n, d = a.shape
    columns = []
    for entry in range(n * d):
        D = torch.zeros(n * d, dtype=torch.float64)
        D[entry] = 1
        D = D.view(n, d)
        columns.append((D @ a.mT + b @ D.mT).flatten())
    return torch.stack(columns, 1)


def dense_norm(A):
    return float(torch.linalg.matrix_norm(A, 2))


# Errata ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(2, 3), (4, 2), (5, 6)])
def test_the_norm_of_the_change_of_logits_is_never_below_the_truth_but_eq_25_as_printed_is(n, d):
    below = 0
    for seed in range(25):
        layer = filled(Attention(d, 1, bias=False), seed=seed)
        X = tokens(1, n, d, seed=1000 + seed)
        node = node_of(layer, X)
        Wq, Wk = node.w.Wq[0], node.w.Wk[0]
        a, b = X[0] @ Wk @ Wq.mT, X[0] @ Wq @ Wk.mT
        true = dense_norm(logit_operator(a, b))
        printed = dense_norm(logit_operator(a, a))  # Eq. (25) has x_i^T W^K (W^Q)^T in both of its terms
        assert true <= float(node.mu_uncentered[0, 0]) <= true * 1.01
        assert float(node.mu[0, 0]) <= float(node.mu_uncentered[0, 0]) * (1 + 1e-9)
        assert true <= float(node.xi[0, 0])
        below += printed < true * (1 - 1e-6)
    assert below >= 2


def test_the_centered_norm_of_the_change_of_logits_is_that_of_the_centered_operator_with_biases():
    layer, X = filled(Attention(6, 2), seed=3), tokens(3, 5, 6, seed=4)
    node = node_of(layer, X)
    C = torch.eye(5, dtype=torch.float64) - 1 / 5
    for image in range(3):
        for head in range(2):
            q, k = node.q[image, head], node.k[image, head]
            a, b = k @ node.w.Wq[head].mT, q @ node.w.Wk[head].mT
            center = torch.kron(torch.eye(5, dtype=torch.float64), C)
            true = dense_norm(center @ logit_operator(a, b))
            assert true <= float(node.mu[image, head]) <= true * 1.01


def test_the_norms_for_too_many_tokens_to_be_dense_are_still_above_the_dense_ones(monkeypatch):
    layer, X = filled(Residual(Attention(6, 3)), 2.0, seed=5), tokens(2, 4, 6, seed=6)
    dense = node_of(layer, X)
    monkeypatch.setattr(attention, "DENSE", 1)
    factored = node_of(layer, X)
    assert factored.derivative_norm is None
    for name in ("mu", "mu_uncentered", "zeta"):
        assert (getattr(factored, name) >= getattr(dense, name) * (1 - 1e-3)).all()
    for method in ("naive", "lofast", "local"):
        assert (found(layer, X, 0.3) <= factored.propagate(full(0.3, 2), method)).all()


def test_a_query_bias_breaks_the_printed_bound_and_not_ours():
    layer = identity_attention(2, q=0.01, bq=(1.0, 0.0))
    X = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], dtype=torch.float64)
    radius = 0.1
    node = node_of(layer, X)
    true = float(found(layer, X, radius)[0])
    assert true == pytest.approx(0.1465, abs=2e-4)
    Wq, Wk = node.w.Wq[0], node.w.Wk[0]
    xi = dense_norm(Wq @ Wk.mT @ X[0].mT) + dense_norm(X[0] @ Wq @ Wk.mT)  # without the bias, as printed
    move = radius / math.sqrt(2) * (xi + radius * dense_norm(Wq @ Wk.mT))
    printed = dense_norm(node.P[0, 0]) * radius + move * (dense_norm(X[0]) + radius)
    assert printed == pytest.approx(0.1202, abs=2e-4)
    assert printed < true
    for method in ("naive", "specformer", "lofast", "lofast2", "local"):
        assert float(node.propagate(full(radius), method)[0]) >= true


def test_a_key_bias_and_a_value_bias_change_no_difference_that_a_bound_may_miss():
    layer = identity_attention(3)
    with torch.no_grad():
        layer.qkv.bias[3:] = torch.tensor([5.0, -4, 3, 20, -30, 10])
    X = tokens(1, 4, 3, seed=8)
    node = node_of(layer, X)
    true = float(found(layer, X, 0.5)[0])
    for method in ("naive", "specformer", "lofast", "lofast2", "local"):
        assert float(node.propagate(full(0.5), method)[0]) >= true


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "residual", "skip"])
def test_the_corrected_specformer_bounds_hold_with_biases_heads_and_large_inputs(heads, kind, as_shipped):
    made = {
        "plain": lambda: Attention(6, heads),
        "residual": lambda: Residual(Attention(6, heads), 0.7),
        "skip": lambda: SkipAttention(6, heads, 0.4),
    }[kind]
    for seed, size in enumerate((0.1, 1.0, 4.0)):
        layer, X = filled(made(), seed=seed), tokens(2, 4, 6, seed=seed) * size
        node = node_of(layer, X)
        for radius in (1e-2, 0.5):
            true = found(layer, X, radius)
            for tight in (True, False):
                assert (true <= lofast.specformer(node, full(radius, 2), tight=tight)).all()


def test_centering_the_queries_side_is_false():
    layer = identity_attention(2).requires_grad_(False)
    X = torch.ones(1, 2, 2, dtype=torch.float64)
    G = torch.tensor([[0.1, 0.0], [0.0, 0.0]], dtype=torch.float64)
    true = float((layer.probabilities(X + G) - layer.probabilities(X)).norm())
    assert true == pytest.approx(0.0371, abs=1e-4)
    C = torch.eye(2, dtype=torch.float64) - 0.5
    tau = 2**-0.5
    a, b = X[0], X[0]
    wrong = 0.5 * tau * float((G @ (C @ a).mT + (C @ b) @ G.mT + G @ G.mT).norm())
    assert wrong == pytest.approx(0.0035, abs=2e-4)
    node = node_of(layer, X)
    right = float((node.lam(full(0.1)).amax(-1) * node.logit_move(full(0.1), node.mu))[0, 0])
    assert right >= true > wrong


# Table 3 --------------------------------------------------------------------------------------------------------


def controlled(dim, heads, seed):
    """A residual layer as LoFAST trains them: small queries and keys, values and outputs of norm one."""
    layer = filled(Residual(Attention(dim, heads, bias=False)), seed=seed)
    q, k, v = layer.branch.qkv.weight.data.chunk(3)
    for W, norm in ((q, 0.3), (k, 0.3), (v, 1.0), (layer.branch.out.weight.data, 1.0)):
        W.mul_(norm / torch.linalg.matrix_norm(W, 2))
    layer.branch.out.bias.data.zero_()
    return layer


@pytest.mark.parametrize(("dim", "heads", "seed"), [(16, 2, 1), (18, 3, 2), (24, 4, 3)])
def test_one_residual_layer_has_the_sizes_of_lofasts_table_3(dim, heads, seed, as_shipped):
    layer, X = controlled(dim, heads, seed), tokens(1, 5, dim, size=1.0, seed=seed)
    node = node_of(layer, X)
    for radius in (0.01, 0.03, 0.05, 0.07, 0.1):
        true = float(found(layer, X, radius)[0])
        sizes = {m: float(node.propagate(full(radius), m)[0]) / true for m in ("specformer", "lofast", "local")}
        assert 1 <= sizes["local"] < 1.05
        assert sizes["local"] <= sizes["lofast"] < 1.1
        assert sizes["specformer"] > 20
        literal = float(lofast.specformer(node, full(radius), tight=False)[0]) / true
        assert literal == pytest.approx(sizes["specformer"])


def test_specformers_bound_is_hundreds_of_times_what_is_found_for_seventeen_tokens(as_shipped):
    layer, X = controlled(16, 2, 4), tokens(1, 17, 16, size=1.0, seed=4)
    node = node_of(layer, X)
    for radius in (0.01, 0.1):
        true = float(found(layer, X, radius)[0])
        assert float(node.propagate(full(radius), "specformer")[0]) > 200 * true
        assert true <= float(node.propagate(full(radius), "lofast")[0]) < 1.1 * true


# The smallest of all bounds --------------------------------------------------------------------------------------

KINDS = {
    "plain": lambda: Attention(6, 3),
    "one head": lambda: Attention(6, 1, bias=False),
    "residual": lambda: Residual(Attention(6, 2), 0.5),
    "negative residual": lambda: Residual(Attention(6, 2), -1.3),
    "skip": lambda: SkipAttention(6, 2, 0.3),
    "all skip": lambda: SkipAttention(6, 2, 0.0),
    "no skip": lambda: SkipAttention(6, 2, 1.0),
    "gated": lambda: GatedPositionalAttention(6, 2, 2, bias=True),
}


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_local_bound_is_never_above_lofasts_and_never_below_what_is_found(kind, scale, as_shipped):
    layer, X = filled(KINDS[kind](), scale, seed=11), tokens(2, 4, 6, seed=12)
    node = node_of(layer, X)
    for radius in (1e-2, 0.2, 2.0):
        eps = full(radius, 2)
        local, first, second = (node.propagate(eps, m) for m in ("local", "lofast", "lofast2"))
        true = found(layer, X, radius)
        assert (local <= first).all()
        assert (first <= second * (1 + 1e-3)).all()  # the dense norms are known to a thousandth only
        assert (second <= node.propagate(eps, "naive") * (1 + 1e-3)).all()
        for bound in (local, local_bounds.upper_t1(node, eps), local_bounds.upper_t2(node, eps)):
            assert (true <= bound * (1 + 1e-12)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_norms_of_the_linear_part_and_of_the_derivative_are_those_of_dense_svds(kind):
    for seed, scale in enumerate((0.5, 1.0, 2.0)):
        layer, X = filled(KINDS[kind](), scale, seed=seed), tokens(1, 4, 6, seed=seed + 20)
        node = node_of(layer, X)
        function = unfuse_attention(layer).requires_grad_(False)
        true = dense_norm(jacrev(function)(X).reshape(24, 24))
        assert true <= float(node.derivative_norm[0]) <= true * 1.005
        P, W = node.P[0], node.w.Wv @ node.w.Wo
        part = sum(torch.kron(P[head], W[head].mT.contiguous()) for head in range(P.shape[0]))
        true = dense_norm(part + (torch.eye(24, dtype=torch.float64) if "residual" in kind else 0.0))
        assert true <= float(node.zeta[0]) <= true * 1.005


def test_the_norms_of_the_weights_are_those_of_dense_svds():
    node = node_of(filled(Attention(6, 3), seed=2), tokens(1, 4, 6))
    w = node.w
    whole_v = w.Wv.transpose(0, 1).flatten(1)
    pairs = [
        *((w.norm_q[h], w.Wq[h]) for h in range(3)),
        *((w.norm_k[h], w.Wk[h]) for h in range(3)),
        *((w.norm_v[h], w.Wv[h]) for h in range(3)),
        *((w.norm_b[h], w.Wq[h] @ w.Wk[h].mT) for h in range(3)),
        *((w.norm_vo[h], w.Wv[h] @ w.Wo[h]) for h in range(3)),
        *((node.norm_xvo[0, h], node.X[0] @ w.Wv[h] @ w.Wo[h]) for h in range(3)),
        *((node.norm_cv[0, h], node.v[0, h] - node.v[0, h].mean(0)) for h in range(3)),
        (w.norm_all_v, whole_v),
        (w.norm_o, w.Wo.flatten(0, 1)),
        (node.norm_x[0], node.X[0]),
    ]
    for bound, matrix in pairs:
        assert dense_norm(matrix) * (1 - 1e-12) <= float(bound) <= dense_norm(matrix) * 1.005


# Probabilities over a ball --------------------------------------------------------------------------------------


def log_probability(P, place):
    head, row, key = place
    return P[:, head, row, key].log()


def ascended(layer, X, objective, radius, starts, seed):
    """Perturbations within the ball under which `objective` is large, by normalized gradients."""
    generator = torch.Generator().manual_seed(seed)
    D = torch.randn(starts, *X.shape[1:], generator=generator, dtype=torch.float64)
    step = radius
    for _ in range(25):
        D = (D * (radius / D.flatten(1).norm(dim=1))[:, None, None]).requires_grad_()
        (slope,) = torch.autograd.grad(objective(layer.probabilities(X + D)).sum(), D)
        size = slope.flatten(1).norm(dim=1).clamp(min=1e-300)
        D = (D + slope * (step / size)[:, None, None]).detach()
        step *= 0.85
    return D * (radius / D.flatten(1).norm(dim=1).clamp(min=radius))[:, None, None]


def check_slope(p, lam):
    """No softmax with these probabilities is steeper than lam; `1 - p` is off by a rounding where p is nearly 1."""
    steepness = torch.linalg.eigvalsh(torch.diag_embed(p) - p[..., :, None] * p[..., None, :]).amax(-1)
    assert (steepness <= lam * (1 + 1e-12) + 1e-15).all()


@pytest.mark.parametrize("scale", [0.5, 1.5, 4.0, 6.0])
@pytest.mark.parametrize("radius", [0.03, 0.3, 3.0])
def test_no_perturbation_makes_a_softmax_steeper_than_its_bound(scale, radius):
    layer, X = filled(Attention(6, 2), scale, seed=21).requires_grad_(False), tokens(1, 4, 6, seed=22)
    lam = node_of(layer, X).lam(full(radius))[0]
    for head, row, key in product(range(2), range(4), range(4)):
        D = ascended(layer, X, partial(log_probability, place=(head, row, key)), radius, 3, head + row + key)
        check_slope(layer.probabilities(X + D), lam)


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_the_slope_of_a_softmax_comes_from_its_largest_probability_where_nothing_can_move(scale):
    S = scale * torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros(2, 3, dtype=torch.float64)
    lam = upper_softmax_slope(
        S, zero, *[zero[..., None].expand(-1, -1, 5)] * 3, torch.ones(3, dtype=torch.float64), 0.4, full(0.0, 2)
    )
    p = S.softmax(-1)
    missing = 2 * p.sort(-1).values[..., :-1].sum(-1)
    torch.testing.assert_close(lam, torch.minimum(p.amax(-1), missing).clamp(max=0.5), rtol=1e-11, atol=0)
    check_slope(p, lam)


@pytest.mark.parametrize("logit", [1.0, 5.0, 20.0, 40.0, 600.0, 800.0])
def test_a_sharp_softmax_is_hardly_steep_and_half_of_its_bound_is_caught(logit):
    S = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    S[..., 0] = logit
    zero = torch.zeros(1, 1, dtype=torch.float64)
    lam = upper_softmax_slope(
        S, zero, *[zero[..., None].expand(-1, -1, 2)] * 3, torch.ones(1, dtype=torch.float64), 0.4, full(0.0)
    )
    t = math.exp(-logit) / (1 + math.exp(-logit))
    exact = 2 * t * (1 - t)  # of two keys
    assert (lam >= exact).all()
    assert (lam <= max(2 * t * (1 + 1e-9), 1e-130)).all()
    if 2 * t < 0.5 and logit < 600:
        assert (lam / 2 < exact).all()


@pytest.mark.parametrize("width", [60.0, 700.0, 1e4, 1e8])
def test_the_slope_of_a_softmax_survives_logits_of_any_width(width):
    generator = torch.Generator().manual_seed(1)
    S = width * torch.randn(1, 2, 5, 5, generator=generator, dtype=torch.float64)
    lengths = torch.rand(3, 1, 2, 5, generator=generator, dtype=torch.float64)
    error, norm_b = torch.zeros(1, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    before = torch.zeros(1, 2, 5, dtype=torch.float64)
    for radius in (0.0, 1e-3, 1.0, 1e3, 1e9):
        lam = upper_softmax_slope(S, error, *lengths, norm_b, 0.5, full(radius))
        assert lam.isfinite().all()
        assert (lam >= before).all()
        check_slope(S.softmax(-1), lam)
        assert (lam <= 0.5).all()
        before = lam


def test_one_token_has_no_softmax_to_move():
    layer, X = filled(Attention(6, 2), 3.0, seed=5), tokens(2, 1, 6, seed=6)
    node = node_of(layer, X)
    true = found(layer, X, 0.5)
    exact = 0.5 * dense_norm(layer.out.weight @ layer.qkv.weight[12:])
    assert (true >= exact * 0.99).all()
    for method in ("naive", "specformer", "lofast", "lofast2", "local"):
        assert (true <= node.propagate(full(0.5, 2), method)).all()
    tiny = node.propagate(full(1e-6, 2), "local")
    assert (tiny <= 2e-6 * exact * 1.005).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_a_zero_or_a_rank_one_weight_breaks_no_bound(name, as_shipped):
    for rank in (0, 1):
        layer = filled(Residual(Attention(6, 2)), 2.0, seed=7)
        inner = layer.branch
        W = inner.out.weight.data if name == "o" else inner.qkv.weight.data["qkv".index(name) * 6 :][:6]
        W.copy_(rank * torch.outer(torch.linspace(-1, 2, 6), torch.linspace(3, 1, 6)).double())
        X = tokens(2, 4, 6, seed=9)
        node = node_of(layer, X)
        for radius in (0.05, 1.0):
            true = found(layer, X, radius)
            for method in ("naive", "specformer", "lofast", "lofast2", "local"):
                assert (true <= node.propagate(full(radius, 2), method) * (1 + 1e-12)).all()


def test_equal_tokens_and_a_sink_break_no_bound(as_shipped):
    layer = filled(Attention(6, 2), 2.0, seed=13)
    equal = tokens(1, 1, 6, seed=14).expand(1, 4, 6).contiguous()
    sink = tokens(1, 4, 6, seed=15)
    sink[:, 2] *= 30
    for X in (equal, sink):
        node = node_of(layer, X)
        for radius in (1e-2, 0.3):
            true = found(layer, X, radius)
            for method in ("naive", "specformer", "lofast", "lofast2", "local"):
                assert (true <= node.propagate(full(radius), method) * (1 + 1e-12)).all()


# The remainders together ------------------------------------------------------------------------------------------


def second_order(node, g, D, sign):
    """Curvature, values and product of one functional, as bounded row by row, to second order in D; one image."""
    w, tau, total = node.w, node.w.tau, 0.0
    C = torch.eye(node.X.shape[1], dtype=torch.float64) - 1 / node.X.shape[1]
    for head in range(w.Wq.shape[0]):
        G = g @ w.Wo[head].mT
        M, N, P = G @ node.v[0, head].mT * w.mix[head], G @ w.Wv[head].mT * w.mix[head], node.softmax[0, head]
        K = P * (M - (P * M).sum(-1, keepdim=True))
        q, k = D @ w.Wq[head], D @ w.Wk[head]
        moves = tau * (q @ node.k[0, head].mT + node.q[0, head] @ k.mT) @ C
        weights = torch.minimum((M.amax(-1) - M.amin(-1)) / 4, math.sqrt(6) / 18 * (M @ C).norm(dim=-1))
        total += (weights * moves.square().sum(-1)).sum() + sign * tau * (K * (q @ k.mT)).sum()
        total += (moves.norm(dim=-1) * (N @ D.mT @ C).norm(dim=-1)).sum() / 2
    return float(total)


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_of_attentions_remainders_is_above_them_in_every_direction(kind, monkeypatch, as_shipped):
    layer, X = filled(KINDS[kind](), 1.5, seed=3), tokens(1, 4, 6, seed=4)
    forms, true = [], remainder.upper_form
    monkeypatch.setattr(remainder, "upper_form", lambda *given: forms.append(true(*given)) or forms[-1])
    node = node_of(layer, X)
    generator = torch.Generator().manual_seed(5)
    g = torch.randn(1, 1, 4, 6, generator=generator, dtype=torch.float64)
    node.vjp(g)
    largest = 0.0
    for _ in range(200):
        D = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        largest = max(largest, *(second_order(node, g[0, 0], D / D.norm(), sign) for sign in (1, -1)))
    assert largest <= float(forms[0][0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_remainders_together_are_never_more_than_one_by_one(kind, monkeypatch, as_shipped):
    layer, X = filled(KINDS[kind](), seed=6), tokens(2, 4, 6, seed=7)
    g = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    together = node_of(layer, X).vjp(g)
    monkeypatch.setattr(remainder, "FORMED", 0)
    alone = node_of(layer, X).vjp(g)
    smaller = 0
    for radius in (1e-3, 0.1, 1.0, 30.0):
        new, old = (sum(vjp.remainder(full(radius, 2)).values()) for vjp in (together, alone))
        assert (new <= old * (1 + 1e-9)).all()
        smaller += int((new < 0.8 * old).sum())
    assert smaller or kind == "all skip"
