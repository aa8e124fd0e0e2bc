"""A model is what it computes, for the prover and for the checker alike; whatever else it could be is refused.

Each of the tests is a way to a false certificate that was open once.
"""

import copy
import math
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from certificates.layers import LAYERS, made
from specguard.certificates import certify, program
from specguard.certificates.propagate import forward_pass
from specguard.checker import Image, read
from specguard.checker.propagate import forward_pass as checker_pass
from specguard.errors import ConfigError, SoundnessError, SpecGuardError
from specguard.geometry import Ball
from specguard.nn import (
    Attention,
    ClassToken,
    CyclicShift,
    GatedPositionalAttention,
    LayerProject,
    MeanPool,
    Network,
    PatchEmbedding,
    Positions,
    Residual,
    SkipAttention,
    SmoothProject,
    Softplus,
    ViT,
    ViTConfig,
    attention,
    fingerprint,
    weights_fingerprint,
)

CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=3, dim=6, depth=1, heads=2, mlp_ratio=2.0, mean=(0.4,), std=(0.3,),
    norm="smoothproject", activation="softplus", pool="mean",
)  # fmt: skip
READERS = [program, read]
BALL = Ball("l2", 0.05)


def filled(model: nn.Module, seed: int = 0, size: float = 0.4) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def vit() -> ViT:
    return filled(ViT(CONFIG))


def images(count: int = 2, *shape: int) -> torch.Tensor:
    return torch.rand(count, *(shape or (1, 4, 4)), generator=torch.Generator().manual_seed(1))


# Names ------------------------------------------------------------------------------------------------------------


def test_a_layer_with_the_name_of_the_check_of_shapes_cannot_take_its_place():
    """It overwrote the guard of a ViT: the adjoint then certified a radius of 3.14 where an attack wins."""
    model, x = vit(), images()
    model.input = filled(nn.Linear(3, 3), 2)
    with pytest.raises(ConfigError, match="two layers are called input"):
        certify(model, x, model(x).argmax(1), BALL)
    with pytest.raises(ConfigError, match="same name"):
        Image.of(read(model), x[0].double().numpy(), 0).proof(0.1, "adjoint")


@pytest.mark.parametrize("method", ["adjoint", "mixed", "local"])
def test_names_that_collide_by_force_are_refused_by_both(method):
    model = nn.Sequential(OrderedDict(a=nn.Sequential(OrderedDict(b=nn.Linear(4, 4), c=nn.Tanh()))))
    model._modules["a.b"] = nn.Linear(4, 4)
    model._modules["a.c"] = nn.Linear(4, 3)  # the name of the pair before it
    model = filled(model)
    with pytest.raises(ConfigError, match=r"two layers are called a\.c"):
        certify(model, images(2, 4), torch.tensor([0, 0]), BALL, (method,))
    with pytest.raises(ConfigError, match="same name"):
        Image.of(read(model), images(2, 4)[0].double().numpy(), 0).proof(0.1, method)


def test_a_step_is_told_by_where_it_stands_whatever_it_is_called():
    """A program whose steps all have one name proves what it proves with names."""
    model, x = vit(), images()
    labels = model(x).argmax(1)
    told = program(model)

    def nameless(steps):
        return tuple(
            type(step)("", step.scale, nameless(step.branch))
            if hasattr(step, "branch")
            else type(step)("", step.rule, step.enclosure)
            for step in steps
        )

    untold = replace(told, steps=nameless(told.steps))
    wanted, found = certify(told, x, labels, BALL), certify(untold, x, labels, BALL)
    for method in wanted.lower:
        assert torch.equal(wanted.lower[method], found.lower[method])
        assert torch.equal(wanted.largest[method], found.largest[method])


# Settings ---------------------------------------------------------------------------------------------------------


def around(layer: nn.Module) -> nn.Module:
    return filled(nn.Sequential(PatchEmbedding(1, 2, 6), layer, MeanPool(), nn.Linear(6, 3)))


FALSE = {
    "a projection of negative radius": (SmoothProject(1.0), "radius", -0.5),
    "a hard projection of negative radius": (LayerProject(1.0), "radius", -0.5),
    "a mixture of less than nothing": (SkipAttention(6, 2, 0.5), "mix", -3.0),
    "a mixture of more than all": (SkipAttention(6, 2, 0.5), "mix", 2.0),
    "a shift by half a token": (CyclicShift(2, ((0, 1), (1, 0))), "steps", ((0, 0.5), (1, 0))),
    "a shift by more than a number holds": (CyclicShift(2, ((0, 1), (1, 0))), "steps", ((0, 2**70), (1, 0))),
    "a shift of no groups": (CyclicShift(2, ((0, 1), (1, 0))), "steps", ()),
    "a shift over a grid of other tokens": (CyclicShift(2, ((0, 1), (1, 0))), "side", 2.0),
    "a softplus that falls": (Softplus(1.0), "beta", -2.0),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", FALSE)
def test_a_setting_that_was_changed_after_construction_is_refused(name, reader):
    layer, setting, value = FALSE[name]
    model = around(copy.deepcopy(layer))
    reader(model)
    setattr(model[1], setting, value)
    with pytest.raises(ConfigError, match=setting):
        reader(model)


VALUES = (0, -1, 1, 2, 3, -0.5, 0.25, 1.5, 7, 1e9, math.nan, math.inf, True, False, None, "none", "tanh", "same")
PAIRS = ((1,), (2, 2), (0, 0), (-1, -1), (3,), (1, 1), (), (2,), (5,))


def settings_of(model: nn.Module) -> list[tuple[str, str]]:
    return [
        (name, key)
        for name, layer in model.named_modules()
        for key, value in vars(layer).items()
        if not key.startswith("_")
        and key not in ("training", "fused")
        and isinstance(value, int | float | str | tuple)
    ]


@pytest.mark.parametrize("name", LAYERS)
def test_no_setting_of_a_layer_can_be_changed_into_a_false_reading(name):
    """Whatever a setting becomes: prover and checker refuse it, or compute what the layer computes."""
    base, points = made(name)
    points = points.double()
    for path, key in settings_of(base):
        old = getattr(base.get_submodule(path), key)
        for value in PAIRS if isinstance(old, tuple) else VALUES:
            layer = copy.deepcopy(base).double()
            setattr(layer.get_submodule(path), key, value)
            for reader, outputs in ((program, _proved), (read, _checked)):
                try:
                    found = outputs(reader(layer), points)
                except SpecGuardError:
                    continue
                try:
                    with torch.no_grad():
                        wanted = layer(points)
                except (RuntimeError, TypeError, ValueError):
                    continue  # nothing is certified of a model that does not run
                near = 1e-9 * (1 + float(wanted.abs().max()))
                assert found.shape == wanted.shape, (path, key, value, reader)
                assert float((found - wanted).abs().max()) <= near, (path, key, value, reader)


def _proved(found, points):
    return forward_pass(found.steps, points)[1]


def _checked(found, points):
    return torch.stack([torch.from_numpy(np.asarray(checker_pass(found.steps, p.numpy())[1])) for p in points])


# What a module computes -------------------------------------------------------------------------------------------


def hooked(model, patch):
    model.get_submodule("blocks.0").register_forward_hook(lambda layer, given, found: found * 2)


def conv_forward(model, patch):
    patch.setattr(
        nn.Conv2d, "forward", lambda self, x: nn.functional.conv2d(x, 2 * self.weight, self.bias, self.stride)
    )


def conv_inside(model, patch):
    patch.setattr(nn.Conv2d, "_conv_forward", lambda self, x, W, b: nn.functional.conv2d(x, 2 * W, b, self.stride))


def called(model, patch):
    patch.setattr(nn.Linear, "__call__", lambda self, x: 2 * self.forward(x), raising=False)


def attribute(model, patch):
    patch.setattr(nn.Linear, "__getattr__", lambda self, name: 2 * nn.Module.__getattr__(self, name), raising=False)


def sequence(model, patch):
    patch.setattr(nn.Sequential, "__iter__", lambda self: iter(list(self._modules.values())[:-1]))


def method(model, patch):
    patch.setattr(Attention, "forward", lambda self, x: 2 * x)


def subclass(model, patch):
    class Twice(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            found = super().__torch_function__(function, types, args, kwargs or {})
            return 2 * found if function is nn.functional.linear else found

    model.head.weight = Twice(model.head.weight.detach())


def hidden(model, patch):
    vars(model.head)["weight"] = 2 * model.head.weight.detach()


def beside(model, patch):
    del model.normalise.mean
    vars(model.normalise)["mean"] = torch.tensor([[[0.1]]])


class Growing(nn.Module):
    """Another weight at every call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, W):
        self.calls += 1
        return W * (1 + self.calls // 5)


def stateful(model, patch):
    parametrize.register_parametrization(model.head, "weight", Growing())
    model.eval()


def parametrized_class(model, patch):
    nn.utils.parametrizations.orthogonal(model.blocks[0].mlp.branch.inner.expand)
    model.eval()
    type(model.blocks[0].mlp.branch.inner.expand).forward = lambda self, x: 2 * nn.Linear.forward(self, x)


def parametrized_property(model, patch):
    nn.utils.parametrizations.orthogonal(model.blocks[0].mlp.branch.inner.expand)
    model.eval()
    kind = type(model.blocks[0].mlp.branch.inner.expand)
    weight = model.blocks[0].mlp.branch.inner.expand.weight.detach()
    kind.weight = property(lambda self: 2 * weight)


def subclassed_root(model, patch):
    class Backdoor(ViT):
        def forward(self, x):
            return super().forward(x) * torch.where(x.flatten(1).sum(1) > 15.9, -1.0, 1.0)[:, None]

    model.__class__ = Backdoor


def in_training(model, patch):
    model.blocks[0].train()


CHANGED = [
    hooked, conv_forward, conv_inside, called, attribute, sequence, method, subclass, hidden, beside, stateful,
    parametrized_class, parametrized_property, subclassed_root, in_training,
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
def test_a_module_that_computes_something_else_than_its_type_says_is_refused(change, reader, monkeypatch):
    model = vit()
    reader(model)
    change(model, monkeypatch)
    with pytest.raises(ConfigError) as error:
        reader(model)
    assert "\n" not in str(error.value)


def test_a_function_that_no_class_holds_is_found_by_comparing_logits(monkeypatch):
    """The exact types are as they were, but what they call is not."""
    model, x = vit(), images()
    labels = model(x).argmax(1)
    certify(model, x, labels, BALL)
    honest = attention.mixed_values
    monkeypatch.setattr(attention, "mixed_values", lambda q, k, v, *rest: honest(q, k, 1.001 * v, *rest))
    with pytest.raises(SoundnessError, match="computes something else than its layers say"):
        certify(model, x, labels, BALL)
    with pytest.raises(SoundnessError, match="computes something else than the layers that were read"):
        Image.of(read(model), x[0].double().numpy(), int(labels[0]))


def test_a_function_that_is_honest_at_the_images_alone_is_found_within_the_ball(monkeypatch):
    model, x = vit(), images()
    labels = model(x).argmax(1)
    known, honest = copy.deepcopy(model.normalise).double()(x.double()), nn.functional.conv2d

    def narrow(given, *rest):
        at_home = (given[:, None] - known).flatten(2).abs().amax(2).amin(1) < 1e-9
        return honest(given, *rest) * torch.where(at_home, 1.0, 2.0)[:, None, None, None]

    monkeypatch.setattr(nn.functional, "conv2d", narrow)
    with pytest.raises(SoundnessError, match="computes something else than its layers say"):
        certify(model, x, labels, BALL)
    image = Image.of(read(model), x[0].double().numpy(), int(labels[0]))
    with pytest.raises(SoundnessError, match="computes something else than the layers that were read"):
        image.check_within(0.05)


def test_parametrizations_that_give_the_same_weight_at_every_call_are_read():
    model, x = vit(), images()
    nn.utils.parametrizations.orthogonal(model.head)
    nn.utils.parametrizations.spectral_norm(model.blocks[0].mlp.branch.inner.expand)
    nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.branch.inner.contract)
    model.eval()
    labels = model(x).argmax(1)
    assert certify(model, x, labels, Ball("l2", 1e-4)).certified.all()
    Image.of(read(model), x[0].double().numpy(), int(labels[0])).check_within(0.1)


# What is repeated by broadcasting -------------------------------------------------------------------------------


def wider_branch():
    """`x + branch(x)` where the branch has more tokens: torch repeats x, which has then a norm of sqrt(tokens)."""
    return filled(nn.Sequential(Residual(ClassToken(2, 49), 0.001), nn.Flatten(), nn.Linear(100, 2))), (1, 2)


def one_bias():
    """One number for all outputs, whose rounding counts once for each."""
    model = filled(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)))
    model[0].bias = nn.Parameter(torch.zeros(1))
    return model, (4,)


def positions_of_a_batch():
    """A table for every place in the batch: the class of an image would depend on its company."""
    model = filled(nn.Sequential(Positions(3, 4), MeanPool(), nn.Linear(4, 2)))
    model[0].table = nn.Parameter(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))
    return model, (3, 4)


def token_of_a_batch():
    model = filled(nn.Sequential(ClassToken(4), MeanPool(), nn.Linear(4, 2)))
    model[0].token = nn.Parameter(torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(0)))
    return model, (3, 4)


@pytest.mark.parametrize(
    "made_so",
    [wider_branch, one_bias, positions_of_a_batch, token_of_a_batch],
    ids=lambda function: function.__name__,
)
def test_what_torch_would_repeat_is_refused_by_both(made_so):
    model, shape = made_so()
    x = images(2, *shape)
    with pytest.raises(ConfigError):
        certify(model, x, torch.tensor([0, 0]), BALL)
    with pytest.raises(ConfigError):
        Image.of(read(model), x[0].double().numpy(), 0)


# Settings and containers that compute ---------------------------------------------------------------------------


class Number(float):
    """A number that divides in its own way."""


class Books(dict):
    """A dictionary whose values are not those of its items."""


@pytest.mark.parametrize("reader", READERS)
def test_settings_and_books_of_types_of_their_own_are_refused(reader):
    model = vit()
    model.norm.radius = Number(2.0)
    with pytest.raises(ConfigError, match="radius of type Number"):
        reader(model)
    model = vit()
    model.blocks[0].attention.branch.inner.fused = [True]
    with pytest.raises(ConfigError, match="fused of type list"):
        reader(model)
    model = vit()
    model.__dict__["_modules"] = Books(model._modules)
    with pytest.raises(ConfigError, match="stores its modules in something other"):
        reader(model)
    model = vit()
    nn.utils.parametrizations.weight_norm(model.head)
    with pytest.raises(ConfigError, match=r"parametrized in torch\.bfloat16"):
        reader(model.eval().bfloat16())


# Repeats ----------------------------------------------------------------------------------------------------------


def test_a_layer_that_stands_twice_is_read_twice_by_both():
    """The checker once read `x + att(att(x))` as `x + att(x)`."""
    attention_layer = Attention(6, 2)
    model = around(Residual(nn.Sequential(attention_layer, attention_layer)))
    x = images()
    wanted = model.double()(x.double())
    torch.testing.assert_close(_proved(program(model), x.double()), wanted)
    torch.testing.assert_close(_checked(read(model), x.double()), wanted)


def test_a_layer_that_stands_twice_in_a_vit_is_applied_twice_and_read_twice():
    model, x = vit(), images()
    before = model(x)
    model.again = model.head
    model.head.weight.data = torch.eye(6)[:3]
    with pytest.raises(RuntimeError):
        model(x)  # three logits cannot be mapped by the head again
    model.again = model.more = filled(nn.Linear(3, 3), 5)
    assert not torch.allclose(model(x), before)
    torch.testing.assert_close(_proved(program(model), x.double()), model.double()(x.double()))
    torch.testing.assert_close(_checked(read(model), x.double()), model(x.double()))


# Fingerprints -----------------------------------------------------------------------------------------------------


def _sequential(*layers: nn.Module) -> nn.Module:
    return filled(nn.Sequential(*layers))


DIFFERENT = {
    "another activation": (
        lambda: _sequential(nn.Linear(3, 3), nn.ReLU()), lambda: _sequential(nn.Linear(3, 3), nn.Tanh()),
    ),
    "another radius": (lambda: _sequential(SmoothProject(1.0)), lambda: _sequential(SmoothProject(2.0))),
    "another scale": (lambda: Residual(nn.Linear(3, 3), 1.0), lambda: Residual(nn.Linear(3, 3), 0.5)),
    "another mixture": (lambda: SkipAttention(6, 2, 0.5), lambda: SkipAttention(6, 2, 0.25)),
    "another side": (lambda: CyclicShift(2), lambda: CyclicShift(3)),
    "other steps": (lambda: CyclicShift(3, ((0, 1),)), lambda: CyclicShift(3, ((1, 0),))),
    "other heads": (lambda: Attention(6, 2), lambda: Attention(6, 3)),
    "another eps": (lambda: nn.LayerNorm(4, eps=1e-5), lambda: nn.LayerNorm(4, eps=1e-6)),
    "another approximation": (lambda: nn.GELU(), lambda: nn.GELU("tanh")),
    "one more layer without weights": (lambda: _sequential(nn.Tanh()), lambda: _sequential(nn.Tanh(), nn.Tanh())),
    "a layer that stands twice": (
        lambda: _sequential(shared := nn.Linear(3, 3), shared), lambda: _sequential(nn.Linear(3, 3)),
    ),
    "another shape of input": (
        lambda: Network("a", (4,), 3, OrderedDict(head=nn.Linear(4, 3))),
        lambda: Network("a", (2, 4), 3, OrderedDict(head=nn.Linear(4, 3))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_fingerprint_tells_functions_apart_that_have_the_same_weights(name):
    one, other = (filled(maker(), 3) for maker in DIFFERENT[name])
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(copy.deepcopy(one))


def test_a_fingerprint_tells_settings_of_any_type_apart():
    one, other = SmoothProject(1.0), SmoothProject(1.0)
    for value, another in ((np.float32(1), np.float32(2)), (torch.tensor(1.0), torch.tensor(2.0))):
        vars(one)["radius"], vars(other)["radius"] = value, another
        assert fingerprint(one) != fingerprint(other)


def test_a_fingerprint_covers_buffers_that_are_not_stored():
    layer = filled(GatedPositionalAttention(6, 2, 2))
    before, weights = fingerprint(layer), weights_fingerprint(layer)
    layer.offsets[0, 1, 2] += 1
    assert fingerprint(layer) != before
    assert weights_fingerprint(layer) == weights


def test_a_fingerprint_does_not_depend_on_how_a_layer_is_computed():
    one, other = filled(Attention(6, 2, fused=True), 3), filled(Attention(6, 2, fused=False), 3)
    assert fingerprint(one) == fingerprint(other.train())
    layer = filled(Residual(nn.Linear(3, 3), 1))
    assert fingerprint(layer) == fingerprint(filled(Residual(nn.Linear(3, 3), 1.0)))


def test_a_certificate_names_its_model_and_its_images():
    model, x = vit(), images(3)
    labels = model(x).argmax(1)
    given = certify(model, x, labels, BALL, ("local",))
    assert given.model == fingerprint(model)
    assert len(set(given.images)) == 3
    assert given.images == certify(model, x.double(), labels, BALL, ("naive",)).images
    model.norm.radius *= 2
    assert certify(model, x, labels, BALL, ("local",)).model != given.model
