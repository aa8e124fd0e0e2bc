"""The classifiers of transformers become networks of this package's layers, and stay the same function."""

import types

import pytest
import torch
from torch import nn

from specguard.errors import ConfigError
from specguard.models import attention_weights, check_equal, convert, from_huggingface
from specguard.nn import Attention, Network

IMAGE = {"image_size": 20, "patch_size": 5, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
TEXT = {"vocab_size": 30, "num_labels": 4, "max_position_embeddings": 17}
BERT = {**TEXT, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 31}
DISTIL = {**TEXT, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 31}

# the model's family, what its config is, and the suffix of its class
IMAGES = {
    "vit": ("ViT", {"intermediate_size": 31}, ""),
    "vit with tanh and without biases": (
        "ViT",
        {"intermediate_size": 31, "hidden_act": "gelu_pytorch_tanh", "qkv_bias": False},
        "",
    ),
    "vit with relu and eager attention": (
        "ViT",
        {"intermediate_size": 31, "hidden_act": "relu", "attn_implementation": "eager"},
        "",
    ),
    "deit": ("DeiT", {"intermediate_size": 31}, ""),
    "deit with a teacher": ("DeiT", {"intermediate_size": 31}, "WithTeacher"),
    "dinov2": ("Dinov2", {"mlp_ratio": 2, "drop_path_rate": 0.5}, ""),
    "dinov2 with swiglu": ("Dinov2", {"mlp_ratio": 2, "use_swiglu_ffn": True}, ""),
    "dinov2 with registers": ("Dinov2WithRegisters", {"mlp_ratio": 2, "num_register_tokens": 3}, ""),
}
TEXTS = {
    "bert": ("Bert", BERT),
    "bert with gelu_new": ("Bert", {**BERT, "hidden_act": "gelu_new"}),
    "roberta": ("Roberta", {**BERT, "pad_token_id": 1}),
    "distilbert": ("DistilBert", DISTIL),
}


def image_model(transformers, family, options, suffix=""):
    config = getattr(transformers, f"{family}Config")(**IMAGE, **options, num_labels=7)
    return getattr(transformers, f"{family}ForImageClassification{suffix}")(config)


def text_model(transformers, family, options):
    return getattr(transformers, f"{family}ForSequenceClassification")(
        getattr(transformers, f"{family}Config")(**options)
    )


def agree(found, wanted):
    assert found.shape == wanted.shape
    assert wanted.std() > 1e-3
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", IMAGES)
def test_a_converted_image_model_gives_the_originals_logits(name, transformers, randomized, generator):
    family, options, suffix = IMAGES[name]
    model = randomized(image_model(transformers, family, options, suffix)).double()
    network = from_huggingface(model, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    assert isinstance(network, Network)
    assert network.shape == (3, 20, 20)
    assert not network.training
    images = torch.rand(3, 3, 20, 20, generator=generator, dtype=torch.float64)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = model(network.normalise(images)).logits
        agree(network(images), wanted)


@pytest.mark.parametrize("name", TEXTS)
def test_a_converted_text_model_gives_the_originals_logits(name, transformers, randomized, generator):
    model = randomized(text_model(transformers, *TEXTS[name])).double()
    network = from_huggingface(model, tokens=9)
    assert network.shape == (9, 24)
    words = torch.randint(2, 30, (3, 9), generator=generator)
    embeddings = model.get_input_embeddings()(words)
    with torch.no_grad():
        agree(network(embeddings), model(words).logits)
        assert type(network.blocks[1].attention.branch) is Attention


def test_pixels_are_normalized_by_one_half_unless_told(transformers):
    network = convert(image_model(transformers, *IMAGES["vit"]))
    assert network.normalise.mean.unique().tolist() == network.normalise.std.unique().tolist() == [0.5]


@pytest.mark.parametrize("name", ["vit", "deit", "deit with a teacher", "dinov2", "dinov2 with registers"])
@pytest.mark.parametrize("image", [13, 35])
def test_a_model_is_read_at_another_image_size(name, image, transformers, randomized, generator):
    model = randomized(image_model(transformers, *IMAGES[name])).double()
    network = from_huggingface(model, image=image)
    assert network.shape == (3, image, image)
    images = torch.rand(2, *network.shape, generator=generator, dtype=torch.float64)
    asked = {} if "dinov2" in name else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        agree(network(images), model(network.normalise(images), **asked).logits)


def test_a_spoiled_conversion_is_caught_and_the_module_named(transformers, randomized):
    model = randomized(image_model(transformers, *IMAGES["vit"]))
    network = from_huggingface(model)
    check_equal(model, network)
    with torch.no_grad():
        network.blocks[1].mlp.branch.inner.expand.bias[0].add_(1e-4)
    with pytest.raises(ConfigError, match=r"'blocks\.1\.mlp\.branch\.inner', which is 'vit\.layers\.1\.mlp'"):
        check_equal(model, network)
    model = randomized(text_model(transformers, *TEXTS["bert"])).double()
    network = from_huggingface(model, tokens=5)
    with torch.no_grad():
        network.blocks[0].attention_norm.bias[0].add_(1e-4)
    with pytest.raises(
        ConfigError, match=r"'blocks\.0\.attention_norm', which is 'bert\.encoder\.layer\.0\.attention'"
    ):
        check_equal(model, network)


def test_the_original_is_left_as_it_was(transformers, randomized):
    options = {"intermediate_size": 31, "attn_implementation": "eager"}
    model = randomized(image_model(transformers, "ViT", options)).train()
    from_huggingface(model)
    assert all(m.training for m in model.modules())
    assert model.config._attn_implementation == "eager"
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_cannot_be_converted_is_refused(transformers):
    vit = image_model(transformers, *IMAGES["vit"])
    bert = text_model(transformers, *TEXTS["bert"])
    for model, options, message in (
        (vit, {"tokens": 5}, "its patches determine their number"),
        (vit, {"image": 4}, "an image of size 4 holds no patch"),
        (vit, {"mean": (0.5,), "std": (0.5,)}, "each of the model's 3 channels"),
        (bert, {}, "needs tokens, the number"),
        (bert, {"tokens": 18}, "between 1 and 17 tokens, not 18"),
        (bert, {"tokens": 5, "image": 20}, "does not take mean, std or image"),
        (bert.bert, {"tokens": 5}, r"^the model is a \S+BertModel, which is not a model of transformers"),
        (text_model(transformers, "Bert", {**BERT, "is_decoder": True}), {"tokens": 5}, "set up as a decoder"),
        (image_model(transformers, "ViT", {"hidden_act": "quick_gelu"}), {}, r"activation_fn is a \S+QuickGELU"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            from_huggingface(model, **options)
        assert "\n" not in str(caught.value)
    vit.classifier = nn.Identity()
    with pytest.raises(ConfigError, match=r"^classifier is a \S+Identity, so that the model has no classes"):
        from_huggingface(vit)
    vit.vit.layers[1] = nn.Tanh()
    with pytest.raises(ConfigError, match=r"^vit\.layers\.1 is a torch\.nn\.modules\.activation\.Tanh"):
        from_huggingface(vit)


class Parts(nn.Module):
    """A module that is nothing but its parts, with a forward that is given."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def older(kind, forward, **parts):
    """A module as transformers 4 had it, under its name there."""
    family = kind[:3].lower()
    module = f"transformers.models.{family}.modeling_{family}"
    made = Parts(**parts)
    made.__class__ = type(kind, (Parts,), {"forward": forward, "__module__": module})
    return made


def older_vit():
    """transformers 4's ViTForImageClassification, in the layout that its checkpoints have."""

    def heads(x):
        return x.unflatten(-1, (3, 8)).transpose(1, 2)

    def mix(self, x):
        q, k, v = (heads(part(x)) for part in (self.query, self.key, self.value))
        return (nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2),)

    def layer():
        inner = older("ViTSelfAttention", mix, **{name: nn.Linear(24, 24) for name in ("query", "key", "value")})
        inner.num_attention_heads = 3
        dense = older("ViTSelfOutput", lambda self, x, _: self.dense(x), dense=nn.Linear(24, 24))
        attention = older(
            "ViTAttention", lambda self, x: (self.output(self.attention(x)[0], x),), attention=inner, output=dense
        )
        act = nn.GELU()
        expand = older(
            "ViTIntermediate",
            lambda self, x: self.intermediate_act_fn(self.dense(x)),
            dense=nn.Linear(24, 31),
            intermediate_act_fn=act,
        )
        contract = older("ViTOutput", lambda self, x, skip: self.dense(x) + skip, dense=nn.Linear(31, 24))

        def forward(self, x):
            x = self.attention(self.layernorm_before(x))[0] + x
            return (self.output(self.intermediate(self.layernorm_after(x)), x),)

        return older(
            "ViTLayer",
            forward,
            attention=attention,
            intermediate=expand,
            output=contract,
            layernorm_before=nn.LayerNorm(24),
            layernorm_after=nn.LayerNorm(24),
        )

    def embed(self, x):
        x = self.patch_embeddings(x)
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.position_embeddings

    patches = older(
        "ViTPatchEmbeddings", lambda self, x: self.projection(x).flatten(2).mT, projection=nn.Conv2d(3, 24, 5, 5)
    )
    patches.image_size = (20, 20)
    embeddings = older(
        "ViTEmbeddings",
        embed,
        cls_token=nn.Parameter(torch.zeros(1, 1, 24)),
        position_embeddings=nn.Parameter(torch.zeros(1, 17, 24)),
        patch_embeddings=patches,
        dropout=nn.Dropout(0.1),
    )

    def encode(self, x):
        for layer in self.layer:
            x = layer(x)[0]
        return x

    encoder = older("ViTEncoder", encode, layer=nn.ModuleList([layer(), layer()]))
    body = older(
        "ViTModel",
        lambda self, x: self.layernorm(self.encoder(self.embeddings(x))),
        embeddings=embeddings,
        encoder=encoder,
        layernorm=nn.LayerNorm(24),
    )
    model = older(
        "ViTForImageClassification",
        lambda self, pixel_values: types.SimpleNamespace(logits=self.classifier(self.vit(pixel_values)[:, 0])),
        vit=body,
        classifier=nn.Linear(24, 7),
    )
    model.config = types.SimpleNamespace()
    return model


def test_the_layout_of_transformers_4_is_read_too(randomized):
    model = randomized(older_vit())
    network = from_huggingface(model)
    check_equal(model, network)
    weights = attention_weights(model)
    assert [w.layer for w in weights] == ["vit.encoder.layer.0.attention", "vit.encoder.layer.1.attention"]
    assert weights[1].matrix("k") is not None
    assert torch.equal(weights[1].matrix("k"), model.vit.encoder.layer[1].attention.attention.key.weight)
