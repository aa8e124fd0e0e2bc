"""Attention against exact arithmetic: every tensor within its error, every norm above that of the exact tensor."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exact.laws import bounds_norm, check_adjoint, check_identity, check_value, full, matrix, one_step, upper
from exact.numbers import exact, length, like, mp, mpf, real, sigmoid, within
from exact.reference import _softmax
from specguard.certificates.attention import remainder
from specguard.nn import Attention, GatedPositionalAttention, Residual, SkipAttention

TOKENS, DIM, HEADS = 4, 4, 2
KINDS = {
    "plain": lambda: Attention(DIM, HEADS),
    "residual": lambda: Residual(Attention(DIM, HEADS), 0.3),
    "skip, positions": lambda: SkipAttention(DIM, HEADS, 0.3, position_bias=True, tokens=TOKENS),
    "gated": lambda: GatedPositionalAttention(DIM, HEADS, 2, bias=True),
}
SIZES = (1.0, 1e-8, 1e-4, 1e3, 1e8)
NAMES = ("X", "Wq", "Wk", "Wv", "bq", "bk", "bv", "Wo", "bo")


def randn(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensors(layer):
    """The weights of attention by name, as views."""
    attention = layer.branch if isinstance(layer, Residual) else layer
    parts = dict(zip(("Wq", "Wk", "Wv"), attention.qkv.weight.data.chunk(3), strict=True))
    parts |= dict(zip(("bq", "bk", "bv"), attention.qkv.bias.data.chunk(3), strict=True))
    return parts | {"Wo": attention.out.weight.data, "bo": attention.out.bias.data}


def made(kind, seed, sizes):
    """A layer and a point: every tensor random, times its size."""
    layer, X = KINDS[kind]().double().eval(), randn(seed, 1, TOKENS, DIM)
    for number, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(randn(seed + 100 + number, *parameter.shape))
    for name, tensor in {**tensors(layer), "X": X}.items():
        tensor.mul_(sizes.get(name, 1.0))
    return layer, X


def common(kind, seed):
    """All tokens nearly along one long vector, and maps that are orthogonal to it but for rounding."""
    layer, X = made(kind, seed, {})
    base = randn(seed + 7, DIM)
    for name in ("Wq", "Wk", "Wv"):
        W = tensors(layer)[name]
        W.sub_(torch.outer(W @ base, base) / (base @ base))
    return layer, 1e8 * randn(seed + 8, 1, TOKENS, 1) * base + X


def opposed(kind, seed):
    """Products of two maps that are nothing but what rounding leaves of large numbers."""
    layer, X = made(kind, seed, {})
    parts = tensors(layer)
    for name in ("Wq", "Wv"):
        parts[name][1::2] = parts[name][::2]
    parts["Wk"][1::2] = -parts["Wk"][::2] * (1 + 3e-16)
    parts["Wo"][:, 1::2] = -parts["Wo"][:, ::2] * (1 + 3e-16)
    return layer, X


def one_common(kind, seed, names, sizes=None):
    """As `common`, but for some of the maps; the others are short, so that q, k and v are of one size."""
    layer, X = common(kind, seed)
    fresh = tensors(made(kind, seed, {})[0])
    for name in {"Wq", "Wk", "Wv"} - set(names):
        tensors(layer)[name].copy_(1e-8 * fresh[name])
    for name, size in (sizes or {}).items():
        tensors(layer)[name].mul_(size)
    return layer, X


def small_logits(kind, seed):
    """Short queries and keys that are mostly rounding, maps of them that are not short."""
    layer, X = made(kind, seed, {"X": 1e-6, "bq": 1e-6, "bk": 1e-6})
    small = X.clone()
    layer, X = common(kind, seed)
    parts, fresh = tensors(layer), tensors(made(kind, seed, {"bq": 1e-6, "bk": 1e-6, "Wv": 1e-8})[0])
    for name in ("bq", "bk", "Wv"):
        parts[name].copy_(fresh[name])
    return layer, X - randn(seed, 1, TOKENS, DIM) + small


def canceling_skip(kind, seed):
    """A last bias that takes away nearly all of the point."""
    layer, X = made(kind, seed, {"Wo": 1e-9})
    scale = layer.scale if isinstance(layer, Residual) else 1.0
    return layer, 1e-6 * X - scale * tensors(layer)["bo"]


def shifted(kind, seed, by):
    """Logits with a large bias, nearly the same everywhere, or with a gate that lets little of the softmax pass."""
    layer, X = made(kind, seed, {})
    if isinstance(layer, SkipAttention):
        layer.bias.data.add_(by)
    if isinstance(layer, GatedPositionalAttention):
        layer.gate.data.fill_(30.0)
        layer.position.bias.data.add_(by)
    return layer, X


CASES = {
    "of one size": lambda kind: made(kind, 0, {}),
    "long biases": lambda kind: made(kind, 1, {"bq": 1e4, "bk": 1e4, "bv": 1e8, "Wq": 1e-5, "Wk": 1e-5}),
    "a long query bias": lambda kind: made(kind, 2, {"bq": 1e8, "Wk": 1e-8, "bk": 1e-8, "Wv": 1e-6}),
    "a long key bias": lambda kind: made(kind, 3, {"bk": 1e8, "Wq": 1e-8, "bq": 1e-8, "bv": 1e-6}),
    "long values": lambda kind: made(kind, 4, {"Wv": 1e8, "bv": 1e8, "Wo": 1e-8, "bo": 1e-9}),
    "a long last bias": lambda kind: made(kind, 5, {"bo": 1e8, "Wo": 1e-3}),
    "a long point": lambda kind: made(kind, 6, {"X": 1e7, "Wq": 1e-7, "Wk": 1e-7, "Wv": 1e-9, "Wo": 1e-9}),
    "large logits": lambda kind: made(kind, 7, {"Wq": 1e7, "Wk": 1e7}),
    "small logits": lambda kind: made(kind, 8, {"Wq": 1e-9, "bq": 1e-9, "bv": 1e5}),
    "common direction": lambda kind: common(kind, 9),
    "opposed maps": lambda kind: opposed(kind, 10),
    "other opposed maps": lambda kind: opposed(kind, 15),
    "more opposed maps": lambda kind: opposed(kind, 16),
    "values lost beside their bias": lambda kind: made(kind, 17, {"Wv": 1e-9, "bv": 1e8, "Wq": 3.0, "Wk": 3.0}),
    "short queries and keys that cancel": lambda kind: small_logits(kind, 18),
    "a skip that cancels": lambda kind: canceling_skip(kind, 19),
    "queries that cancel": lambda kind: one_common(kind, 11, ["Wq"]),
    "keys that cancel": lambda kind: one_common(kind, 12, ["Wk"]),
    "values that cancel": lambda kind: one_common(kind, 13, ["Wv"], {"Wo": 1e4}),
    "values that cancel, long keys": lambda kind: one_common(kind, 13, ["Wv"], {"bk": 1e6, "bq": 1e-8}),
    "shifted logits": lambda kind: shifted(kind, 14, 1e6),
}


def at_random(kind, seed):
    """Every tensor of a size of its own."""
    chosen = torch.randint(len(SIZES), (len(NAMES),), generator=torch.Generator().manual_seed(seed)).tolist()
    return made(kind, seed, {name: SIZES[number] for name, number in zip(NAMES, chosen, strict=True)})


CASES |= {f"sizes at random, {seed}": lambda kind, seed=seed: at_random(kind, seed) for seed in range(20, 23)}


SOME = ("of one size", "long biases", "a long last bias", "a skip that cancels", "shifted logits")
BOTH = [("plain", case) for case in CASES] + [(kind, case) for kind in list(KINDS)[1:] for case in SOME]


def exactly(layer, X):
    """Every tensor of attention, head by head, in reals."""
    scale, attention = (layer.scale, layer.branch) if isinstance(layer, Residual) else (1.0, layer)
    parts = {name: real(exact(tensor)) for name, tensor in tensors(layer).items()}
    x, width = real(exact(X[0])), DIM // HEADS
    heads = []
    for h in range(HEADS):
        rows = slice(h * width, (h + 1) * width)
        Wq, Wk, Wv = (parts[name][rows].T for name in ("Wq", "Wk", "Wv"))
        q, k, v = (x @ W + parts[b][rows] for W, b in ((Wq, "bq"), (Wk, "bk"), (Wv, "bv")))
        S = q @ k.T / mp.sqrt(width)
        if getattr(attention, "bias", None) is not None:
            S = S + real(exact(attention.bias[h]))
        softmax = _softmax(S)
        P, mix = softmax, mpf(1)
        if isinstance(attention, SkipAttention):
            mix = real(exact(attention.mix))
            P = mix * softmax + (1 - mix) * real(np.eye(TOKENS, dtype=object))
        if isinstance(attention, GatedPositionalAttention):
            gate, position = sigmoid(exact(attention.gate))[h], attention.position
            positional = real(exact(attention.offsets)) @ real(exact(position.weight[h])) + real(
                exact(position.bias[h : h + 1])
            )
            P, mix = (1 - gate) * softmax + gate * _softmax(positional), 1 - gate
        Wo = parts["Wo"][:, rows].T * real(exact(scale))
        C = real(np.eye(TOKENS, dtype=object)) - mpf(1) / TOKENS
        a, b = k @ Wq.T, q @ Wk.T
        heads.append(
            SimpleNamespace(**{name: value for name, value in locals().items() if name not in ("heads", "parts")})
        )
    return heads


def operator(h, centered):
    """`D -> D a^T + b D^T`, centered or not, as a matrix on the entries of D."""
    rows = []
    for i in range(TOKENS):
        for j in range(TOKENS):
            D = real(np.zeros((TOKENS, DIM), dtype=object))
            D[i] = D[i] + ((h.C @ h.a)[j] if centered else h.a[j])
            for m in range(TOKENS):
                D[m] = D[m] + (h.C[j, m] if centered else (1 if j == m else 0)) * h.b[i]
            rows.append(D.ravel())
    return np.stack(rows)


def slope(p):
    """The Jacobian of the softmax at probabilities p."""
    return np.diag(p) - np.outer(p, p)


@pytest.mark.parametrize(("kind", "case"), BOTH)
def test_every_tensor_is_within_its_slack_and_every_norm_above_the_exact_one(kind, case):
    layer, X = CASES[case](kind)
    node = one_step(layer, X)
    assert not any(name for name in ("q", "k", "v") if getattr(node, name).isnan().any())
    exact_heads = exactly(layer, X)
    for number, h in enumerate(exact_heads):
        for name in ("q", "k", "v", "P"):
            assert within(
                getattr(node, name)[0, number], getattr(h, name), getattr(node, f"error_{name}")[0, number]
            ), name
        off = abs(like(node.S[0, number], h.S) - h.S).max()
        assert off <= mpf(float(node.logit_error[0, number])), "logits"
        share = mpf(float(node.probability_error[0, number]))
        assert (abs(like(node.softmax[0, number], h.S) - h.softmax) <= share * h.softmax + mpf(1e-300)).all(), (
            "softmax"
        )
        norms = {
            "norm_p": h.P,
            "norm_cv": h.C @ h.v,
            "norm_xvo": h.x @ h.Wv @ h.Wo,
            "mu": operator(h, centered=True),
            "mu_uncentered": operator(h, centered=False),
        }
        for name, A in norms.items():
            assert bounds_norm(float(getattr(node, name)[0, number]), A), name
        for name, A in {"norm_b": h.Wq @ h.Wk.T, "norm_vo": h.Wv @ h.Wo, "norm_v": h.Wv}.items():
            assert bounds_norm(float(getattr(node.w, name)[number]), A), name
        centered = h.C @ h.a
        for i in range(TOKENS):
            wanted = (centered[i], h.b[i], centered[i] + h.b[i])
            for found, row in zip(node.row_lengths, wanted, strict=True):
                assert mpf(float(found[0, number, i])) >= length(row), "rows"
            steep = float(node.lam(full(X, 0.0))[0, number, i])
            for bound in (steep, float(node.lam_clean[0, number])):
                assert bounds_norm(bound, slope(h.softmax[i])), "slope"
    whole = sum(np.kron(h.P, (h.Wv @ h.Wo).T) for h in exact_heads)
    whole = whole + real(np.eye(TOKENS * DIM, dtype=object)) if isinstance(layer, Residual) else whole
    assert bounds_norm(float(node.zeta[0]), whole), "zeta"
    assert bounds_norm(float(node.derivative_norm[0]), matrix(layer, X)), "derivative"


@pytest.mark.parametrize(("kind", "case"), BOTH)
def test_outputs_adjoints_and_remainders_hold(kind, case):
    layer, X = CASES[case](kind)
    g = randn(3, 1, 1, TOKENS, DIM)
    check_value(layer, X)
    check_adjoint(layer, X, g)
    D = real(exact(randn(4, TOKENS, DIM)))
    for radius in (1e-12, 1e-3, 1.0):
        check_identity(layer, X, g, D * (mpf(radius) / length(D)), ("naive", "specformer", "lofast", "local"))


def test_centering_many_keys_loses_more_than_centering_few():
    node = one_step(Attention(2, 1).double().eval(), randn(0, 1, 300, 2))
    assert mpf(float(node._a_and_b[2][0, 0])) >= 300 * mpf(2) ** -53 * length(exact(node._uncentered))


def test_the_slope_of_a_peaked_softmax_is_that_at_the_exact_logits():
    """Two keys that count, logits whose rounding is more than the second one's probability."""
    for seed in range(12):
        layer, X = made("skip, positions", seed, {})
        layer.bias.data.fill_(-1e3)
        layer.bias.data[:, :, 0], layer.bias.data[:, :, 1] = 0.0, -21.0 - randn(seed, HEADS, TOKENS).abs()
        layer.bias.data.add_(1e10)
        node = one_step(layer, X)
        for number, h in enumerate(exactly(layer, X)):
            for i in range(TOKENS):
                assert bounds_norm(float(node.lam_clean[0, number]), slope(h.softmax[i]))


def test_remainders_are_not_below_their_formulas_at_exact_tensors(monkeypatch):
    """The three terms, with the exact functional on the maps; not all of them as one form."""
    monkeypatch.setattr(remainder, "FORMED", 0)
    for case in ("values lost beside their bias", "values that cancel", "of one size"):
        layer, X = CASES[case]("plain")
        g, delta = randn(3, 1, 1, TOKENS, DIM), 1e-6
        node = one_step(layer, X)
        terms = node.vjp(g).remainder(full(X, delta))
        product = curvature = mpf(0)
        for number, h in enumerate(exactly(layer, X)):
            M = real(exact(g[0, 0])) @ h.Wo.T @ h.v.T
            K = h.softmax * (M - (h.softmax * M).sum(-1, keepdims=True))
            steep = real(exact(node.lam(full(X, 0.0))[0, number]))
            move = real(exact(node.logit_move(full(X, delta), node.mu)[0, number].reshape(1)))[0]
            bent = max(
                min(lam * (row.max() - row.min()) / 2, mp.sqrt(6) / 18 * length(row - row.sum() / TOKENS))
                for lam, row in zip(steep, M, strict=True)
            )
            curvature += bent * move**2
            product += norm_from_below(K) * norm_from_below(h.Wq @ h.Wk.T) * mpf(delta) ** 2 / mp.sqrt(DIM // HEADS)
        assert mpf(float(terms["curvature"][0, 0])) >= curvature
        assert mpf(float(terms["product"][0, 0])) >= product


def norm_from_below(A):
    """By thirty steps of power iteration."""
    x = A.sum(0) + real(exact(randn(0, A.shape[1]))) * length(A)
    for _ in range(30):
        x = A.T @ (A @ x) / length(A.T @ (A @ x))
    return length(A @ x) / length(x)


def test_logits_that_move_to_second_order_alone_make_a_softmax_steeper():
    """All is zero at the point, and no token looks at itself; one query and one key move, and so one logit."""
    layer = SkipAttention(1, 1, 0.5, position_bias=True, tokens=TOKENS).double().eval()
    for name, tensor in tensors(layer).items():
        tensor.fill_(0.0 if name.startswith("b") else 1.0)
    layer.bias.data.copy_(torch.diag(torch.full((TOKENS,), -50.0))[None])
    X = torch.zeros(1, TOKENS, 1).double()
    D = real(np.zeros((TOKENS, 1), dtype=object))
    D[0], D[1] = mpf(0.83), mpf(0.83)
    p = _softmax(D @ D.T + real(exact(layer.bias[0])))[0]
    assert bounds_norm(float(one_step(layer, X).lam(full(X, upper(length(D))))[0, 0, 0]), slope(p))
