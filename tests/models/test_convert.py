"""Conversion finds the way that belongs to a model's exact type, and a user may add one."""

import copy
import importlib
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn

from models.architectures import vit
from specguard.errors import CheckpointError, ConfigError
from specguard.models import Pair, View, Wrapped, check_equal, convert, register_converter, timm_model
from specguard.nn import ClassPool, Network, Normalize, PatchEmbedding

HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


class Small(nn.Module):
    """A user's own model: patches of 2 x 2 pixels, and the first one's logits."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 5, 2, 2)
        self.last = nn.Linear(5, 4)

    def forward(self, x):
        return self.last(self.cut(x).flatten(2).mT[:, 0])


class Smaller(Small):
    pass


def small_network(model, mean=(0.1, 0.2, 0.3)):
    patches, head = PatchEmbedding(3, 2, 5), nn.Linear(5, 4)
    patches.map.load_state_dict(model.cut.state_dict())
    head.load_state_dict(model.last.state_dict())
    layers = OrderedDict(normalise=Normalize(mean, (0.5,) * 3), patches=patches, pool=ClassPool(), head=head)
    return Network("small", (3, 4, 4), 4, layers)


@pytest.fixture
def registered(monkeypatch):
    module = importlib.import_module("specguard.models.convert")  # the package has a function of that name
    monkeypatch.setattr(module, "_BY_TYPE", {})
    register_converter(Small, small_network, view=lambda model: View((Pair("cut", "patches.map"),)))


def test_importing_the_adapters_imports_no_library_of_models():
    code = "import specguard.models, sys; print({'timm', 'transformers', 'torchvision'} & sys.modules.keys())"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


@pytest.mark.usefixtures("registered")
def test_a_registered_conversion_serves_its_exact_type_and_is_checked():
    model = Small()
    network = convert(model, mean=(0.2, 0.3, 0.4))
    assert network.normalise.mean.flatten().tolist() == pytest.approx([0.2, 0.3, 0.4])
    with pytest.raises(ConfigError, match=r"^the model is a \S+Smaller, which cannot be converted"):
        convert(Smaller())
    with pytest.raises(ConfigError, match="does not take 'tokens'"):
        convert(model, tokens=4)
    with torch.no_grad():
        network.patches.map.bias[1].add_(1e-3)
    with pytest.raises(ConfigError, match=r"'patches\.map', which is 'cut' of the original"):
        check_equal(model, network)


@pytest.mark.usefixtures("registered")
def test_a_wrong_registered_conversion_is_refused():
    register_converter(Small, lambda model: small_network(Small()))
    with pytest.raises(ConfigError, match="differs from its original at the logits"):
        convert(Small())
    register_converter(Small, lambda model: model)
    with pytest.raises(ConfigError, match="returned a Small, not a Network"):
        convert(Small())
    for kind, function in ((Small(), small_network), (int, small_network), (Small, None)):
        with pytest.raises(ConfigError, match=r"must be a function|is registered for a type of model"):
            register_converter(kind, function)


class Summed(Small):
    """Has a second bias, so that its network must combine weights."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, x):
        return super().forward(x) + self.extra


@pytest.mark.usefixtures("registered")
def test_a_registered_conversion_is_given_a_copy_in_float64_and_may_combine_its_weights():
    def summed(model):
        network = small_network(model).double()
        with torch.no_grad():
            network.head.bias.add_(model.extra)
        model.last.bias.data.zero_()
        return network

    register_converter(Summed, lambda model: summed(copy.deepcopy(model)))
    model = Summed()
    before = copy.deepcopy(model.state_dict())
    network = convert(model)
    assert torch.equal(network.head.bias, (model.last.bias.double() + model.extra.double()).float())
    assert not network.training
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: m.cut.register_forward_hook(lambda _, x, y: None), "cut has a forward hook"),
        (lambda m: m.last.register_forward_pre_hook(lambda _, x: None), "last has a forward hook"),
        (lambda m: setattr(m.cut, "forward", m.cut.forward), "cut has a replaced forward function"),
        (lambda m: setattr(m, "float", lambda: m), "the model has a replaced float function"),
    ],
)
def test_hooks_and_replaced_functions_are_refused(change, what, timm):
    model = Small()
    change(model)
    with pytest.raises(ConfigError, match=f"^{what}; a conversion cannot see what it does"):
        convert(model)


def test_hooks_in_a_model_of_a_library_are_refused_though_they_seldom_do_anything(timm, monkeypatch):
    model = vit()(timm)
    handle = model.blocks[1].mlp.register_forward_hook(lambda _, x, y: 2 * y if y.abs().max() > 1e3 else y)
    with pytest.raises(ConfigError, match=r"^blocks\.1\.mlp has a forward hook"):
        convert(model, **HALF)
    handle.remove()
    forget = nn.modules.module.register_module_forward_hook(lambda _, x, y: None)
    try:
        with pytest.raises(ConfigError, match="hooks are set on all modules"):
            convert(model, **HALF)
    finally:
        forget.remove()
    model.compile()  # the same function
    assert convert(model, **HALF).classes == 7


def test_a_model_that_was_asked_for_its_hidden_states_still_is_itself(transformers):
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=6, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    model = transformers.ViTForImageClassification(config)
    model(torch.rand(1, 3, 8, 8), output_hidden_states=True)
    assert any(m._forward_hooks for m in model.modules())  # that of transformers, which only records
    assert convert(model).classes == 3
    assert any(m._forward_hooks for m in model.modules())


def test_the_inputs_of_the_check_are_drawn_with_the_generator_that_is_given(timm):
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    convert(vit()(timm), **HALF, generator=generator)
    assert not torch.equal(generator.get_state(), before)


def test_a_model_that_returns_no_logits_is_refused():
    model = Small()
    network = small_network(model)
    model.forward = lambda x: [x]
    with pytest.raises(ConfigError, match=r"must return a tensor of logits, .* not a list"):
        check_equal(model, network)
    model.forward = lambda x: x.half() @ x
    with pytest.raises(ConfigError, match="cannot be run in float64 for comparison"):
        check_equal(model, network)


def test_anything_that_can_be_called_is_wrapped(transformers):
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=6, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    model = transformers.ViTForImageClassification(config)
    images = torch.rand(2, 3, 8, 8, requires_grad=True)
    normalized = (images - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    for training in (False, True):
        wrapped = Wrapped(model.train(training), mean, std)
        assert wrapped.training is training
    wrapped.eval()
    torch.testing.assert_close(wrapped(images), model(normalized).logits)
    wrapped(images).sum().backward()
    assert images.grad.any()
    assert torch.equal(Wrapped(lambda x: x.flatten(1))(images), images.flatten(1))
    with pytest.raises(ConfigError, match="not a tuple"):
        Wrapped(lambda x: (x, x))(images)
    with pytest.raises(ConfigError, match="belong together"):
        Wrapped(model, mean)
    with pytest.raises(ConfigError, match="cannot be called"):
        Wrapped(3)


def test_timms_models_are_made_by_name_with_local_weights(timm, tmp_path, randomized):
    model = randomized(timm_model("vit_tiny_patch16_224", classes=5, image=32))
    assert not model.training
    path = tmp_path / "w.pt"
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, path)
    again = timm_model("vit_tiny_patch16_224", path, 5, 32)
    assert not again.training
    assert all(torch.equal(again.state_dict()[k], v) for k, v in model.state_dict().items())
    with pytest.raises(CheckpointError, match=r"of a model with 5 classes, not 7: head\.bias says so"):
        timm_model("vit_tiny_patch16_224", path, 7, 32)
    with pytest.raises(CheckpointError, match="for images of size 32, not 224: pos_embed says so"):
        timm_model("vit_tiny_patch16_224", path, 5)
    with pytest.raises(CheckpointError, match=r"lacks 'dist_token'"):
        timm_model("deit_tiny_distilled_patch16_224", path, 5, 32)
    with pytest.raises(CheckpointError, match="does not exist"):
        timm_model("vit_tiny_patch16_224", tmp_path / "none.pt", 5, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vit_of_nobody",), "timm has no architecture 'vit_of_nobody'"),
        (("hf-hub:timm/vit_tiny_patch16_224",), "timm has no architecture"),
        (("local-dir:/tmp",), "timm has no architecture"),
        (("vit_tiny_patch16_224.of_nobody",), "timm cannot make 'vit_tiny_patch16_224.of_nobody'"),
        (("resnet10t", None, 5, 32), "timm cannot make 'resnet10t' for images of size 32"),
        (("resnet10t", None, 0), "classes must be at least 1"),
        (("resnet10t", None, 5, -1), "image must be at least 1"),
    ],
)
def test_what_timm_cannot_make_is_said_in_one_sentence(arguments, message, timm):
    with pytest.raises(ConfigError, match=message) as caught:
        timm_model(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "cannot be imported, as happens beside"),
        ("import a_module_that_is_not_there", "this needs timm, which is not installed"),
    ],
)
def test_a_library_that_is_missing_or_broken_is_an_error_that_says_so(source, message, tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.split(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=message):
        timm_model("vit_tiny_patch16_224")
