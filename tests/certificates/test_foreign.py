"""Layers that models from elsewhere are made of: their rules hold, are tight where they say so, or refuse."""

from collections import OrderedDict

import mpmath
import pytest
import torch
from jaxtyping import config
from torch import nn

from certificates.layers import made
from certificates.test_certificate import sound
from specguard.certificates import program
from specguard.certificates.attention.rule import AttentionNode
from specguard.certificates.attention.weights import Weights
from specguard.certificates.layers import curves
from specguard.certificates.propagate import backward_pass, forward_pass, upper_radii
from specguard.errors import ConfigError
from specguard.nn import (
    Attention,
    ClassAndMean,
    ClassPool,
    ClassToken,
    CoreAttention,
    FirstTokens,
    GatedUnit,
    HeadNorm,
    LayerScale,
    MeanPool,
    Network,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
)
from specguard.testing import check_rule

pytestmark = pytest.mark.usefixtures("as_shipped")


@pytest.fixture
def as_shipped(monkeypatch):
    """Users run without the type checks of the tests, which would come first."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


def points(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(model, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator, dtype=torch.float64) / p.shape[-1] ** 0.5)
    return model.eval().requires_grad_(False)


def node_of(layer, x):
    """The node of a layer that is one step."""
    (place,) = forward_pass(program(layer).steps, x)[0]
    return place.node


# Laws, where they are hard --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-3, 8.0])
@pytest.mark.parametrize("name", ["neurons, silu", "gated neurons", "head norm", "normalized attention"])
def test_layers_with_small_and_large_weights_obey_the_laws(name, scale):
    layer, x = made(name, scale, seed=1)
    check_rule(layer, x, radii=(1e-2, 1.0), methods=("lofast", "local"), functionals=1, steps=12)


def uneven(*shape):
    """Rows of zeros, and entries of sizes 1e-3 to 1e3."""
    x = points(*shape) * 10 ** (3 * points(*shape, seed=1).clamp(-1, 1))
    x[:, 0] = 0.0
    return x


HARD = {
    "saturated gates": (GatedUnit(), torch.cat([50 * points(2, 3, 4).sign(), 30 * points(2, 3, 4)], -1)),
    "gates at rest": (GatedUnit(), torch.cat([torch.zeros(2, 3, 4), 100 * points(2, 3, 4)], -1).double()),
    "values at rest": (GatedUnit(), torch.cat([3 * points(2, 3, 4), torch.zeros(2, 3, 4)], -1)),
    "uneven gates": (GatedUnit(), uneven(2, 3, 8)),
    "no gates and no values": (GatedUnit(), torch.zeros(2, 3, 8)),
    "small eps": (HeadNorm(6, 2, eps=1e-10), uneven(2, 3, 18)),
    "small eps without center": (HeadNorm(6, 2, eps=1e-10, centered=False), uneven(2, 3, 18)),
    "heads of zeros": (HeadNorm(6, 3, eps=1e-2), torch.zeros(2, 3, 18)),
    "head norm of one channel": (HeadNorm(3, 3, eps=1e-1), points(2, 4, 9)),
    "heads of one channel": (CoreAttention(3, fused=False), points(2, 4, 9)),
    "heads of one token": (CoreAttention(2, fused=False), 1e4 * points(2, 1, 12)),
    "uneven heads": (CoreAttention(2, fused=False), uneven(2, 3, 18)),
    "sharp heads": (CoreAttention(2, fused=False), 8 * points(2, 4, 12)),
    "heads of zeros, attending": (CoreAttention(2, fused=False), torch.zeros(2, 3, 12)),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_points_obey_the_laws(name):
    layer, x = HARD[name]
    check_rule(layer.eval(), x, radii=(1e-2, 3.0), methods=("naive", "local"), functionals=1, steps=12)


@pytest.mark.parametrize("layer", [GatedUnit(), CoreAttention(2, fused=False), HeadNorm(4, 2, eps=1e-2)])
def test_bounds_hold_for_many_radii_at_once_and_are_those_of_each(layer):
    x = points(2, 3, 12)
    (place,) = forward_pass(program(layer.eval()).steps, x)[0]
    radii = torch.tensor([[0.1, 0.2], [1.0, 3.0], [0.0, 9.0]], dtype=torch.float64)
    vjp = place.node.vjp(points(5, *place.node.output.shape))
    for number, radius in enumerate(radii):
        assert torch.equal(place.node.propagate(radii, "local")[number], place.node.propagate(radius, "local"))
        for name, term in vjp.remainder(radii).items():
            assert torch.equal(term[number], vjp.remainder(radius)[name])


# Constants and norms --------------------------------------------------------------------------------------------


def test_the_constants_of_silu_are_its_largest_slope_and_curvature_rounded_up():
    with mpmath.workdps(40):

        def slope(t):
            s = 1 / (1 + mpmath.exp(-t))
            return s * (1 + t * (1 - s))

        def curvature(t):
            s = 1 / (1 + mpmath.exp(-t))
            return s * (1 - s) * (2 + t * (1 - 2 * s))

        steepest = slope(mpmath.findroot(curvature, 2.4))
        assert steepest < curves._SILU_SLOPE < steepest * (1 + mpmath.mpf("1e-7"))
        assert curvature(mpmath.mpf(0)) == curves._SILU_CURVATURE == 0.5
        grid = [mpmath.mpf(k) / 50 for k in range(-2500, 2501)]
        assert all(abs(slope(t)) <= steepest and abs(curvature(t)) <= 0.5 for t in grid)


@pytest.mark.parametrize("skip", [0, 1, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_the_norm_of_the_class_token_and_a_mean_is_exact(tokens, skip):
    layer, x = ClassAndMean(skip).eval(), points(1, tokens, 1)
    if skip >= tokens:
        with pytest.raises(ConfigError, match="there is no mean"):
            node_of(layer, x)
        return
    A = torch.autograd.functional.jacobian(layer, x).reshape(2, tokens)
    norm = float(torch.linalg.matrix_norm(A, 2))
    assert norm <= node_of(layer, x).norm * (1 + 1e-15) <= norm * (1 + 1e-13)


def all_channels(heads, x):
    """The same attention as one layer of all channels, by selecting matrices, padded to its input's size."""
    size = x.shape[-1]
    eye = torch.eye(size, dtype=torch.float64)
    Wq, Wk, Wv = eye.view(size, 3, heads, -1).permute(1, 2, 0, 3)
    width = Wq.shape[2]
    Wo = eye[: size // 3].view(heads, width, size)
    none = torch.zeros(heads, width, dtype=torch.float64)
    ones = torch.ones(heads, dtype=torch.float64)
    return AttentionNode(
        Weights(Wq, Wk, Wv, Wo, none, none, none, torch.zeros(size).double(), False, ones, None, 0.0), x
    )


def test_heads_taken_apart_are_bounded_no_worse_than_one_layer_of_all_channels():
    x, heads = points(2, 4, 18), 2
    whole, apart = all_channels(heads, x), node_of(CoreAttention(heads).eval(), x)
    torch.testing.assert_close(apart.output, whole.output[..., :6])
    g = points(3, 2, 4, 6)
    vjp = apart.vjp(g)
    reference = whole.vjp(nn.functional.pad(g, (0, 12)))
    torch.testing.assert_close(vjp.adjoint, reference.adjoint)
    for radius in (torch.full((2,), size, dtype=torch.float64) for size in (1e-3, 0.1, 1.0, 10.0)):
        for method in ("naive", "specformer", "lofast", "lofast2", "local"):
            assert (apart.propagate(radius, method) <= whole.propagate(radius, method) * (1 + 1e-9)).all()
        found, wanted = (sum(each.remainder(radius).values()) for each in (vjp, reference))
        assert (found <= wanted * 1.05).all()  # the eigenvalues of forms are known to a few per cent


def test_the_change_of_logits_of_a_head_that_is_given_its_queries_and_keys_is_exact():
    x = points(2, 4, 9)
    node = node_of(CoreAttention(1).eval(), x).inner
    C = torch.eye(4, dtype=torch.float64) - 0.25
    for number in range(2):

        def logits(D, number=number):
            q, k, _ = (x[number] + D).chunk(3, 1)
            return q @ k.mT @ C

        J = torch.autograd.functional.jacobian(logits, torch.zeros_like(x[number])).reshape(16, -1)
        exact = float(torch.linalg.matrix_norm(J, 2))
        assert exact <= float(node.mu[number, 0]) <= exact * (1 + 1e-2)


@pytest.mark.parametrize("size", [0.0, 0.3, 2.0])
def test_no_perturbation_makes_the_softmax_of_a_head_steeper_than_its_bound(size):
    x = size * points(1, 3, 6)
    node = node_of(CoreAttention(1).eval(), x).inner
    for radius in (0.3, 0.8, 1.5):
        bound = node.lam(torch.tensor([radius], dtype=torch.float64))[0, 0]
        best = torch.zeros(3, dtype=torch.float64)
        for row in range(3):
            D = points(64, 3, 6, seed=row)
            for _ in range(30):
                D = (radius * D / D.flatten(1).norm(dim=1)[:, None, None]).requires_grad_()
                q, k, _ = (x + D).chunk(3, 2)
                p = (q @ k.mT / 2**0.5).softmax(-1)[:, row]
                steepness = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])[:, -1]
                best[row] = torch.maximum(best[row], steepness.detach().max())
                (slope,) = torch.autograd.grad(steepness.sum(), D)
                D = D.detach() + radius * slope / slope.flatten(1).norm(dim=1).clamp(min=1e-300)[:, None, None]
        assert (best <= bound * (1 + 1e-12)).all()
        assert size > 0 or (bound <= 1.4 * best).all()


def test_attention_in_three_parts_is_attention():
    layer = filled(Attention(6, 2))
    parts = nn.Sequential(layer.qkv, CoreAttention(2, fused=False), layer.out).eval()
    x, g = points(2, 4, 6), points(3, 2, 4, 6)
    (path, output), (whole, wanted) = (forward_pass(program(each).steps, x) for each in (parts, layer))
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(backward_pass(path, g).adjoint, backward_pass(whole, g).adjoint)


def test_head_norms_that_share_a_radius_leave_out_no_more_than_those_that_have_one_each():
    layer = filled(HeadNorm(6, 2, eps=1e-2))
    x, g = 0.3 * points(2, 4, 18), points(3, 2, 4, 18)
    node = node_of(layer, x)
    gq, gk, _ = g.unflatten(3, (3, 2, 3)).unbind(3)
    for radius in (torch.full((2,), size, dtype=torch.float64) for size in (1e-2, 0.3, 5.0)):
        apart = node.q.vjp(gq).remainder(radius)["bend"] + node.k.vjp(gk).remainder(radius)["bend"]
        assert (node.vjp(g).remainder(radius)["bend"] <= apart).all()


def test_a_gated_unit_behind_its_map_is_bounded_no_worse_than_the_two_apart():
    model = filled(nn.Sequential(nn.Linear(7, 22), GatedUnit()), scale=2.0)
    x, g = points(2, 5, 7), points(3, 2, 5, 11)
    together = forward_pass(program(model).steps, x)[0]
    apart = (*forward_pass(program(model[0]).steps, x)[0], *forward_pass(program(model[1]).steps, model[0](x))[0])
    radius = torch.full((2,), 0.3, dtype=torch.float64)
    first = upper_radii(apart[:1], radius, "local").out
    (pair,) = backward_pass(together, g).vjps.values()
    (alone,) = backward_pass(apart[1:], g).vjps.values()
    assert (pair.remainder(radius)["bend"] <= alone.remainder(first)["bend"] * (1 + 1e-9)).all()
    bound = upper_radii(apart[1:], first, "local").out
    assert (upper_radii(together, radius, "local").out <= bound * (1 + 1e-9)).all()


# Rounding -------------------------------------------------------------------------------------------------------


def exact_gated(W, b, x, g):
    """silu(h1) h2 and its adjoint for one row x, in 60 digits."""
    rows = [mpmath.fdot(row, x) + c for row, c in zip(W, b, strict=True)]
    half = len(rows) // 2
    gate, value = rows[:half], rows[half:]
    s = [1 / (1 + mpmath.exp(-t)) for t in gate]
    output = [t * p * v for t, p, v in zip(gate, s, value, strict=True)]
    back = [c * p * (1 + t * (1 - p)) * v for c, p, t, v in zip(g, s, gate, value, strict=True)]
    back += [c * t * p for c, p, t in zip(g, s, gate, strict=True)]
    return output, [mpmath.fdot(back, [row[j] for row in W]) for j in range(len(x))]


def distance(exact, given):
    return mpmath.norm([e - mpmath.mpf(float(v)) for e, v in zip(exact, given, strict=True)])


def test_a_gated_unit_behind_a_map_that_cancels_is_right_to_its_slack():
    for seed in range(20):
        W, x, g = 1e8 * points(8, 5, seed=seed), points(1, 5, seed=seed + 50), points(1, 1, 4, seed=seed + 90)
        model = nn.Sequential(nn.Linear(5, 8), GatedUnit()).double().eval()
        with torch.no_grad():
            model[0].weight.copy_(W)
            model[0].bias.copy_(points(8, seed=seed + 70) - (W @ x[0]))
        node = node_of(model, x)
        vjp = node.vjp(g)
        with mpmath.workdps(60):
            numbers = [[mpmath.mpf(v) for v in row] for row in W.tolist()]
            bias = [mpmath.mpf(v) for v in model[0].bias.tolist()]
            output, adjoint = exact_gated(
                numbers, bias, [mpmath.mpf(v) for v in x[0].tolist()], [mpmath.mpf(v) for v in g[0, 0].tolist()]
            )
            assert distance(output, node.output[0]) <= float(node.error[0])
            assert distance(adjoint, vjp.adjoint[0, 0]) <= float(vjp.error[0, 0])


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_a_head_norm_is_right_to_its_slack(centered, shift):
    layer = filled(HeadNorm(5, 1, eps=1e-6, centered=centered))
    x = 1e-3 * points(2, 1, 15) + shift
    node = node_of(layer, x)
    with mpmath.workdps(60):
        for image in range(2):
            wrong = []
            for part in range(2):
                z = [mpmath.mpf(v) for v in x[image, 0, 5 * part : 5 * part + 5].tolist()]
                mean = mpmath.fsum(z) / 5 if centered else 0
                size = mpmath.sqrt(mpmath.fsum((t - mean) ** 2 for t in z) / 5 + mpmath.mpf(layer.eps))
                gain, offset = layer.gain[part].tolist(), layer.shift[part].tolist()
                exact = [a * (t - mean) / size + c for a, t, c in zip(gain, z, offset, strict=True)]
                wrong.append(distance(exact, node.output[image, 0, 5 * part : 5 * part + 5]))
            assert mpmath.norm(wrong) <= float(node.error[image])
    assert torch.equal(node.output[..., 10:], x[..., 10:])


@pytest.mark.parametrize("size", [1.0, 20.0, 1e3])
def test_attention_without_its_maps_is_right_to_its_slack(size):
    x = size * points(2, 4, 3, 2, 3)  # batch, token, part, head, channel
    node = node_of(CoreAttention(2).eval(), x.flatten(2))
    with mpmath.workdps(60):
        for image in range(2):
            wrong = []
            for head in range(2):
                q, k, v = (mpmath.matrix(x[image, :, part, head].tolist()) for part in range(3))
                S = q * k.T / mpmath.sqrt(3)
                for token in range(4):
                    weights = [mpmath.exp(S[token, j] - max(S[token, :])) for j in range(4)]
                    exact = [mpmath.fdot(weights, v[:, c]) / mpmath.fsum(weights) for c in range(3)]
                    wrong.append(distance(exact, node.output[image, token, 3 * head : 3 * head + 3]))
            assert mpmath.norm(wrong) <= float(node.error[image])


# Whole networks -------------------------------------------------------------------------------------------------


def embedding(dim, count=1):
    """8 x 8 pixels to 4 patches, behind `count` tokens that are learned."""
    tokens = {"tokens": ClassToken(dim, count)} if count else {}
    return {
        "normalise": Normalize((0.4,), (0.3,)), "patches": PatchEmbedding(1, 4, dim), **tokens,
        "positions": Positions(4 + count, dim),
    }  # fmt: skip


def normalized_attention(dim, heads, centered=True):
    """Queries and keys normalized, as in models of 22 billion parameters."""
    return nn.Sequential(
        nn.Linear(dim, 3 * dim), HeadNorm(dim, heads, 1e-2, centered), CoreAttention(heads), nn.Linear(dim, dim)
    )


def swiglu(dim, hidden):
    return nn.Sequential(nn.Linear(dim, 2 * hidden), GatedUnit(), nn.Linear(hidden, dim))


def residual(dim, *branch, eps=0.1):
    return Residual(nn.Sequential(nn.LayerNorm(dim, eps), *branch), 0.7)


def network(*parts, out):
    layers = OrderedDict((name, layer) for part in parts for name, layer in part.items())
    return Network("a test", (1, 8, 8), out.out_features, OrderedDict([*layers.items(), ("head", out)]))


NETWORKS = {
    "normalized queries and keys": lambda: network(
        embedding(6), {"blocks": nn.Sequential(residual(6, normalized_attention(6, 2)))}, {"pool": ClassPool()},
        out=nn.Linear(6, 4),
    ),
    "gated units": lambda: network(
        embedding(6, 0),
        {"blocks": nn.Sequential(residual(6, swiglu(6, 5), LayerScale(6, 1.0)), residual(6, swiglu(6, 7)))},
        {"pool": ClassAndMean(1)}, out=nn.Linear(12, 3),
    ),
    "registers": lambda: network(
        embedding(6, 3),
        {"first": residual(6, normalized_attention(6, 3, False)), "second": residual(6, swiglu(6, 5))},
        {"pool": MeanPool(3)}, out=nn.Linear(6, 3),
    ),
    "two tokens read": lambda: network(
        embedding(4, 2), {"block": residual(4, nn.Linear(4, 9), nn.SiLU(), nn.Linear(9, 4))},
        {"pool": FirstTokens(2), "act": nn.SiLU()}, out=nn.Linear(8, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("scale", [0.5, 2.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_image_of_a_network_is_both_certified_and_broken(name, scale):
    model = filled(NETWORKS[name](), seed=2, scale=scale)
    for layer in model.modules():
        if isinstance(layer, CoreAttention):
            layer.fused = False
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = model(images).argmax(1)
    given = sound(model, images, labels, (0.01, 0.3), starts=1, steps=15)
    assert (given.radius > 0).all()


# Refusals -------------------------------------------------------------------------------------------------------


def test_a_network_takes_inputs_of_its_shape_only():
    model = filled(NETWORKS["gated units"]())
    with pytest.raises(ConfigError, match=r"^input: .* of shape \(1, 8, 8\), not \(1, 8, 12\)"):
        forward_pass(program(model).steps, points(1, 1, 8, 12))


def test_an_unknown_layer_in_a_network_is_named():
    model = Network("a test", (5,), 2, OrderedDict(first=nn.Linear(5, 2), last=nn.Softmax(1))).eval()
    with pytest.raises(ConfigError, match=r"^last is a Softmax, for which there is no rule"):
        program(model)


def test_a_network_with_a_layer_of_the_name_of_its_check_is_refused():
    with pytest.raises(ConfigError, match="two layers are called input"):
        program(Network("a test", (5,), 2, OrderedDict(input=nn.Linear(5, 5), last=nn.Linear(5, 2))).eval())


class Reversed(Network):
    def forward(self, x):
        return -super().forward(x)


def test_a_network_that_is_not_what_it_seems_is_refused(monkeypatch):
    layers = OrderedDict(head=nn.Linear(5, 2))
    with pytest.raises(ConfigError, match="is a Reversed, for which there is no rule"):
        program(Reversed("a test", (5,), 2, layers).eval())
    model = Network("a test", (5,), 2, layers).eval()
    program(model)
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: x)
    with pytest.raises(ConfigError, match="a class whose forward was replaced"):
        program(model)


REFUSED = {
    "a gated unit of three channels": (GatedUnit(), (1, 4, 3), "even number"),
    "a gated unit behind a map to three": (nn.Sequential(nn.Linear(2, 3), GatedUnit()), (1, 4, 2), "even number"),
    "more first tokens than there are": (FirstTokens(3), (1, 2, 4), "first 3 tokens"),
    "no first tokens": (FirstTokens(0), (1, 2, 4), "count must be a whole number, at least 1"),
    "all tokens but the last": (FirstTokens(-1), (1, 2, 4), "count must be a whole number, at least 1"),
    "a mean of the last tokens": (ClassAndMean(-1), (1, 2, 4), "skip must be a whole number"),
    "heads of no size": (CoreAttention(2), (1, 4, 9), "2 heads"),
    "a core of images": (CoreAttention(1), (1, 4, 9, 9), "1 heads"),
    "heads of another size": (HeadNorm(6, 2), (1, 4, 12), "18 entries"),
    "head norm of pooled tokens": (HeadNorm(6, 2), (1, 18), "18 entries"),
    "head norm without eps": (HeadNorm(6, 2, eps=0.0), (1, 4, 18), "eps must be positive"),
    "silu in place": (nn.SiLU(inplace=True), (1, 4), "overwrites its input"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_proof_is_refused_in_one_line(name):
    layer, shape, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as error:
        forward_pass(program(nn.Sequential(layer).eval()).steps, points(*shape))
    assert "\n" not in str(error.value)
