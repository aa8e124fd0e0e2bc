"""Models from elsewhere go all the way: converted, attacked, taken apart and certified, and no proof is refuted."""

import pytest
import torch
from torch.func import jacrev

from models.architectures import KNOWN, SMALL
from models.test_huggingface import IMAGES, TEXTS, image_model, text_model
from specguard.attacks import APGD, PGD
from specguard.certificates import certify
from specguard.data import Dataset
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.linalg import jacobian, lower_singular_values
from specguard.models import convert
from specguard.nn import attention_maps, fingerprint, unfuse_attention
from specguard.records.base import About
from specguard.records.certificate import CertificateRecord, CertifySettings
from specguard.records.check import CheckSettings
from specguard.records.io import each_record
from specguard.spectrum import exact_weight_spectra, part_names, parts
from specguard.studies import checked_study, run_certify, run_check
from specguard.studies.attention_change import attention_name

TIMM = (
    "deit distilled",
    "deit 3 with layer scale",
    "dinov2 with registers",
    "siglip with mean",
    "qk norm and inner norms",
    "rms norms",
    "swiglu in two with a norm",
    "eva",
    "eva with qk norm",
)
HF = ("vit", "deit with a teacher", "dinov2 with swiglu")
HALF = (0.5, 0.5, 0.5)
CPU = torch.device("cpu")
IMAGE = 10  # four patches: the second program forms every matrix


@pytest.fixture
def seeded():
    """Libraries draw their weights with the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@torch.no_grad()
def stirred(network, generator):
    """In float64, with weights that no start of training leaves at zero."""
    for p in network.parameters():
        p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return network.double()


def goes_all_the_way(network, generator, folder):
    """Attacked, analyzed, certified, and its certificate proved again by the second program and attacked."""
    network = stirred(network, generator)
    pixels = torch.randint(0, 256, (1, *network.shape), generator=generator, dtype=torch.uint8)
    x = pixels.double() / 255
    labels = network(x).argmax(1)
    attack = PGD(steps=10, loss="margin")
    assert attack(network, x, labels, Ball("l2", 30.0, box=False)).success.any()
    analyzed(network, x)
    split = Dataset(pixels, labels)
    about = About(model=fingerprint(network), data="pixels", dataset="noise", n=1)
    settings, quick = CertifySettings((1e-8,), methods=("adjoint",)), PGD(steps=5, loss="margin")
    run_certify(network, split, folder / "proofs", settings, attack=quick, about=about, device=CPU)
    (record,) = each_record(folder / "proofs" / "records.jsonl", CertificateRecord)
    radius = max(record.largest.values())
    assert radius > 0
    assert not attack(network, x, labels, Ball("l2", radius, box=False), seed=1).success.any()
    losses = list(record.losses.values())
    assert losses[0] > 0
    assert losses == sorted(losses, reverse=True)
    assert record.radii[0].lower["adjoint"] <= record.margin
    file = folder / "proofs" / "records.jsonl"
    again = APGD(steps=10, loss="margin")
    result, _ = run_check(
        checked_study(file),
        network,
        split,
        folder / "verified",
        data="pixels",
        device=CPU,
        attack=again,
        settings=CheckSettings(),
    )
    assert result.claims > 50
    assert result.attacked == (radius >= 1e-8)


def analyzed(network, x):
    names = part_names(network)
    depth = len(network.blocks)
    assert [n for n in names if n.endswith(".attention")] == [f"blocks.{i}.attention" for i in range(depth)]
    for part in parts(network, x[:1]):
        if part.name in ("blocks.0.attention", "head"):
            found = lower_singular_values(jacobian(part.function, part.at), torch.Generator().manual_seed(0))
            J = jacrev(part.function)(part.at).reshape(-1, part.at.numel())
            torch.testing.assert_close(found.values[0, 0], torch.linalg.svdvals(J)[0], rtol=1e-3, atol=0)
    maps = attention_maps(network, x)
    assert len(maps) == depth
    for each in maps:
        torch.testing.assert_close(each.sum(-1), torch.ones_like(each[..., 0]))
    torch.testing.assert_close(unfuse_attention(network)(x), network(x), rtol=1e-9, atol=1e-12)
    kinds = [(found.layer, found.kind) for found in exact_weight_spectra(network)]
    assert sum(kind in "qkvo" for _, kind in kinds) == 4 * depth
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("name", TIMM)
def test_timms_models_go_all_the_way(name, timm, seeded, generator, tmp_path):
    model = KNOWN[name](timm)
    model.set_input_size(img_size=(IMAGE, IMAGE))
    goes_all_the_way(convert(model, mean=HALF, std=HALF), generator, tmp_path)
    assert len(model.blocks) == SMALL["depth"]


@pytest.mark.parametrize("name", HF)
def test_transformers_models_go_all_the_way(name, transformers, seeded, generator, tmp_path):
    goes_all_the_way(convert(image_model(transformers, *IMAGES[name]), image=IMAGE), generator, tmp_path)


def test_torchvisions_model_goes_all_the_way(torchvision, seeded, generator, tmp_path):
    model = torchvision.models.VisionTransformer(IMAGE, 5, 2, 3, 24, 31, num_classes=7)
    goes_all_the_way(convert(model), generator, tmp_path)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_encoders_of_text_are_certified_around_embeddings_and_attacked(name, transformers, seeded, generator):
    network = convert(text_model(transformers, *TEXTS[name]), tokens=4).double()
    x = torch.randn(2, *network.shape, generator=generator, dtype=torch.float64)  # embeddings have no box
    labels = network(x).argmax(1)
    attack = PGD(steps=10, loss="margin")
    assert attack(network, x, labels, Ball("l2", 50.0, box=False)).success.all()
    certificate = certify(network, x, labels, Ball("l2", 1e-3, box=False), ("local", "adjoint"))
    assert certificate.certified.all()
    for i, radius in enumerate(certificate.radius.tolist()):
        assert radius >= 1e-3
        ball = Ball("l2", radius, box=False)
        assert not attack(network, x[i : i + 1], labels[i : i + 1], ball, seed=i).success.any()
        assert next(iter(certificate.terms[i].values())) > 0


def test_berts_blocks_are_taken_apart_though_their_norms_are_behind_the_skip(transformers, seeded, generator):
    network = stirred(convert(text_model(transformers, *TEXTS["bert"]), tokens=5), generator)
    x = torch.rand(2, *network.shape, generator=generator, dtype=torch.float64)
    analyzed(network, x)
    found = {part.name: part for part in parts(network, x)}
    block = network.blocks[1]
    torch.testing.assert_close(found["blocks.1"].step(found["blocks.1"].at), block(found["blocks.1"].at))
    between = block.attention_norm(found["blocks.1.attention"].step(found["blocks.1.attention"].at))
    torch.testing.assert_close(found["blocks.1.mlp"].at, between)


def test_the_bounds_of_one_attention_layer_are_refused_where_it_has_norms_within(timm):
    plain, normed = (convert(KNOWN[name](timm), mean=HALF, std=HALF) for name in ("vit", "qk norm"))
    assert attention_name(plain, 1) == "blocks.1.attention.branch.inner"
    with pytest.raises(ConfigError, match=r"^blocks\.0\.attention\.branch\.inner has norms within its attention"):
        attention_name(normed, 0)
    with pytest.raises(ConfigError, match="layers 0 to 1, not 2"):
        attention_name(normed, 2)


def test_the_fingerprint_of_a_network_knows_its_settings_but_not_the_path_of_computation(timm, seeded):
    network = convert(KNOWN["qk norm"](timm), mean=HALF, std=HALF)
    assert "HeadNorm" in network.config.layers
    assert "'eps': 1e-06" in network.config.layers
    assert "fused" not in network.config.layers
