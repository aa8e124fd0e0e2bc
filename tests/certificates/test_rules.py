"""Every rule obeys the laws; what has no rule, or is not what it seems, is refused by name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from certificates.layers import LAYERS, made
from helpers.registry import MODELS
from specguard.certificates import program
from specguard.errors import ConfigError
from specguard.nn import Attention, Residual, ViT
from specguard.testing import check_rule


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_obeys_the_laws(name):
    check_rule(*made(name))


@pytest.mark.parametrize("scale", [0.0, 0.1, 6.0])
@pytest.mark.parametrize(
    "name", ["attention", "residual attention", "skip attention", "layer norm", "neurons, gelu"]
)
def test_layers_with_no_small_and_large_weights_obey_the_laws(name, scale):
    check_rule(*made(name, scale, seed=1), radii=(1e-2, 1.0))


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_obey_the_laws(name):
    config = MODELS[name]
    model = ViT(config, torch.Generator().manual_seed(1)).eval()
    images = torch.rand(2, config.channels, config.image, config.image, generator=torch.Generator().manual_seed(2))
    check_rule(model, images, radii=(0.1,), methods=("lofast", "local"), functionals=1, steps=6)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_has_no_rule():
    with pytest.raises(ConfigError, match=r"^1 is a Doubled, for which there is no rule"):
        program(nn.Sequential(nn.Identity(), Doubled(3, 3)).eval())


def test_a_subclass_inside_a_layer_is_refused():
    layer = Attention(6, 2).eval()
    layer.out = Doubled(6, 6).eval()
    with pytest.raises(ConfigError, match="is a Doubled, which its rule does not cover"):
        program(nn.Sequential(Residual(layer)).eval())


def test_train_mode_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    model[1].train()
    with pytest.raises(ConfigError, match=r"^1 is in train mode"):
        program(model)


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_hooks_are_refused(kind):
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    register = model[0].register_forward_hook if kind == "forward" else model[0].register_forward_pre_hook
    register(lambda *_: None)
    with pytest.raises(ConfigError, match=r"^0 has a forward hook"):
        program(model)


def test_a_replaced_forward_is_refused(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    model[0].forward = lambda x: x
    with pytest.raises(ConfigError, match="replaced forward"):
        program(model)
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    with pytest.raises(ConfigError, match="class whose forward was replaced"):
        program(model)


def test_weights_that_are_not_finite_are_refused():
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    model[0].weight.data[0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"0\.weight has entries that are not finite"):
        program(model)


def test_parametrized_weights_are_folded_in():
    layer = parametrizations.orthogonal(nn.Linear(5, 5)).eval()
    check_rule(nn.Sequential(layer).eval(), torch.randn(2, 5, generator=torch.Generator().manual_seed(0)))


def test_the_model_is_left_as_it_was():
    model, points = made("attention")
    before = copy.deepcopy(model.state_dict())
    check_rule(model, points, radii=(0.1,))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.fused
    assert model.qkv.weight.dtype == torch.float32
