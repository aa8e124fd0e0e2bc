"""torchvision's vision transformer becomes a network of this package's layers, and stays the same function."""

import pytest
import torch
from torch import nn

from specguard.errors import ConfigError
from specguard.models import check_equal, convert, from_torchvision


def vit(torchvision, **options):
    return torchvision.models.VisionTransformer(
        image_size=20, patch_size=5, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=31, num_classes=7, **options
    )


@pytest.mark.parametrize("options", [{}, {"representation_size": 11, "dropout": 0.5, "attention_dropout": 0.5}])
def test_a_converted_model_gives_torchvisions_logits(options, torchvision, randomized, generator):
    model = randomized(vit(torchvision, **options)).double()
    network = convert(model)
    assert network.normalise.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    images = torch.rand(3, 3, 20, 20, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(network.normalise(images))
        assert wanted.std() > 1e-3
        torch.testing.assert_close(network(images), wanted, rtol=0, atol=1e-9 * float(wanted.abs().max()))


def test_a_head_that_starts_at_zero_hides_no_mistake(torchvision):
    model = vit(torchvision)  # its logits are all zero
    network = from_torchvision(model)
    with torch.no_grad():
        network.blocks[0].attention.branch.inner.qkv.weight[0].add_(1)
    with pytest.raises(ConfigError, match=r"'encoder\.layers\.encoder_layer_0\.self_attention' of the original"):
        check_equal(model, network)


def test_what_has_no_counterpart_is_refused(torchvision):
    stem = torchvision.models.vision_transformer.ConvStemConfig(8, 5, 5)
    with pytest.raises(ConfigError, match=r"^conv_proj is a torch\.nn\.modules\.container\.Sequential"):
        from_torchvision(vit(torchvision, conv_stem_configs=[stem]))
    model = vit(torchvision)
    model.encoder.layers[1].self_attention = nn.MultiheadAttention(24, 3, batch_first=True, add_zero_attn=True)
    with pytest.raises(ConfigError, match=r"^encoder\.layers\.encoder_layer_1\.self_attention is a .* of its own"):
        from_torchvision(model)
    model.encoder.layers[0].mlp[1] = nn.Hardswish()
    with pytest.raises(ConfigError, match=r"^encoder\.layers\.encoder_layer_0\.mlp\.1 is a \S+Hardswish"):
        from_torchvision(model)
    with pytest.raises(ConfigError, match=r"^the model is a \S+ResNet"):
        from_torchvision(torchvision.models.resnet18())
