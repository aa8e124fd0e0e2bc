"""Certificates are checked: true ones pass, and a claim that is too good is an error that names its image."""

import copy
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specguard.certify import activations, affine, attention, families, tightened
from specguard.data import Dataset
from specguard.errors import RunError, SoundnessError
from specguard.evaluate import Certification, certification, verification
from specguard.nn import ViT, ViTConfig, fingerprint

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=4, dim=6, depth=2, heads=2, mlp_ratio=2.0, mean=(0.4,), std=(0.3,),
    norm="smoothproject", activation="squareplus", pool="mean",
)  # fmt: skip
SETTINGS = Certification(radii=(0.001, 0.03), batch=4)


def model() -> ViT:
    made, g = ViT(CONFIG), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.35 * torch.randn(parameter.shape, generator=g))
    return made.eval()


def data(count: int = 5) -> Dataset:
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        labels = model()(images).argmax(1)
    labels[1] = (labels[1] + 1) % 4  # one is wrong
    return Dataset((images * 255).round().to(torch.uint8), labels)


def certified(folder: Path, settings: Certification = SETTINGS) -> Path:
    identity = {"model": fingerprint(model()), "data": "the data", "dataset": "noise"}
    certification(model(), data(), folder, settings, identity=identity, device=CPU)
    return folder / "records.jsonl"


def verified(file: Path, **changes):
    options = {"data": "the data", "device": CPU} | changes
    folder = options.pop("folder", file.parent / "checked")
    return verification(file, options.pop("model", model()), options.pop("split", data()), folder, **options)


@pytest.fixture(scope="module")
def true(one_thread, tmp_path_factory) -> Path:
    return certified(tmp_path_factory.mktemp("true") / "study").parent


@pytest.fixture
def study(true, tmp_path) -> Path:
    return shutil.copytree(true, tmp_path / "study")


def changed(study: Path, change) -> Path:
    """The records with something done to that of image 0, which is certified."""
    file = study / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert records[0]["radii"][0]["verdict"] == "certified"
    change(records[0])
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_true_certificates_are_right(study):
    result = verified(study / "records.jsonl")
    records = [json.loads(line) for line in (study / "records.jsonl").read_text().splitlines()]
    certified = sum(record["radii"][0]["verdict"] == "certified" for record in records)
    assert certified >= 3
    assert (result["n"], result["attacked"]) == (5, certified)
    assert result["claims"] > 100 * certified
    assert result["least_room"] > 0
    again = verified(study / "records.jsonl")
    assert again == result


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_linf_balls_and_single_families_too(norm, tmp_path):
    settings = Certification(radii=(0.002,), norm=norm, families=("adjoint",), search=norm == "l2", batch=5)
    assert verified(certified(tmp_path / "study", settings))["claims"] > 0


def first(record, *path):
    for key in path[:-1]:
        record = record[key]
    return record, path[-1]


CLAIMS = {
    "a lower bound": ("radii", 0, "lower", "local"),
    "a lower bound of the adjoint": ("radii", 0, "lower", "adjoint"),
    "a largest radius": ("largest", "local"),
    "the radius of a proof": ("proofs", "local", "radius"),
    "a margin": ("margin",),
    "the margin of a proof": ("proofs", "adjoint", "margin"),
}
SIZES = {
    "a norm": ("norms", "head", "norm"),
    "zeta": ("norms", "blocks.0.attention.branch.inner", "zeta"),
    "the derivative's norm": ("norms", "blocks.0.attention.branch.inner", "derivative_norm"),
    "a radius": ("proofs", "local", "radii", "blocks.1.mlp"),
    "a fall": ("proofs", "adjoint", "fall"),
    "a remainder": ("proofs", "adjoint", "terms", "blocks.0.mlp.branch.inner.activation: bend"),
    "attention's remainder": ("proofs", "adjoint", "terms", "blocks.1.attention.branch.inner: product"),
    "the first order": ("proofs", "adjoint", "terms", "first order"),
}


@pytest.mark.parametrize("name", CLAIMS | SIZES)
def test_a_claim_that_is_too_good_is_an_error(name, study):
    def change(record):
        holder, key = first(record, *{**CLAIMS, **SIZES}[name])
        factor = 1.01 if name in CLAIMS else 0.99
        assert holder[key] > 0
        holder[key] *= factor

    with pytest.raises(SoundnessError, match="image 0"):
        verified(changed(study, change))


def other_pixels(record):
    record["input"] = "0" * 64


def other_class(record):
    record["predicted"] = (record["predicted"] + 1) % 4


def larger_radius(record):
    """Certified at the second radius by word alone."""
    record["radii"][1] = {**copy.deepcopy(record["radii"][0]), "radius": record["radii"][1]["radius"]}
    record["proofs"] = {}
    record["largest"] = dict.fromkeys(record["largest"], 0.0)


def no_such_rival(record):
    record["proofs"]["local"]["rival"] = record["label"]


def a_layer_less(record):
    record["proofs"]["local"]["radii"].popitem()


def a_term_less(record):
    record["proofs"]["adjoint"]["terms"].pop("blocks.0.mlp.branch.inner.activation: bend")


def fewer_heads(record):
    record["norms"]["blocks.0.attention.branch.inner"]["mu"].pop()


@pytest.mark.parametrize(
    "change", [other_pixels, other_class, larger_radius, no_such_rival, a_layer_less, a_term_less, fewer_heads]
)
def test_a_record_that_was_forged_is_an_error(change, study):
    with pytest.raises(SoundnessError, match="image 0"):
        verified(changed(study, change))


def test_a_record_of_another_form_is_an_error(study):
    with pytest.raises(RunError, match="image 0"):
        verified(changed(study, lambda record: record.pop("norms")))


def half(function):
    return lambda *arguments, **options: function(*arguments, **options) * 0.5


PLANTED = {
    "a norm of weights": (affine, "upper_norm", lambda old: lambda W: 0.9 * old(W)),
    "the softmax's constant": (attention, "upper_probability", half),
    "T1": (tightened, "upper_t1", half),
    "spectral norms of activations": (attention, "upper_spectral", half),
    "sqrt 2": (families, "_at_the_output", lambda old: lambda p, radii: families.Fall(
        radii.out[..., None, :].expand(p.margins.shape), {})),
    "a curvature": (activations, "Activation", lambda old: lambda *a, **k: old(*a[:3], a[3] / 2, *a[4:], **k)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_prover_that_is_wrong_is_found_out(name, tmp_path, monkeypatch):
    where, attribute, planted = PLANTED[name]
    monkeypatch.setattr(where, attribute, planted(getattr(where, attribute)))
    file = certified(tmp_path / "study", replace(SETTINGS, search=False))
    monkeypatch.undo()
    with pytest.raises(SoundnessError, match="image"):
        verified(file)


def test_an_image_that_breaks_is_found_by_the_attack_alone(study):
    """The attack comes first, so that it is heard although the proof of such a claim would fail as well."""
    file = changed(study, lambda record: record["radii"][1].update(copy.deepcopy(record["radii"][0])))
    settings = study / "certification.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"radii": [0.001, 3.0]}))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        record["radii"][1]["radius"] = 3.0
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(SoundnessError, match="image 0 is certified at radius 3, and an attack breaks it"):
        verified(file)


def test_another_model_other_data_and_missing_records_are_refused(study):
    other = model()
    with torch.no_grad():
        other.head.bias[0] += 1e-6
    file = study / "records.jsonl"
    with pytest.raises(SoundnessError, match="another model"):
        verified(file, model=other)
    with pytest.raises(SoundnessError, match="other data"):
        verified(file, data="other")
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(RunError, match="4 records of 5"):
        verified(file)
    (study / "certification.json").write_text("{}")
    with pytest.raises(RunError, match="does not say"):
        verified(file)


def test_killed_it_continues(study, monkeypatch):
    whole = verified(study / "records.jsonl")
    module = sys.modules[verification.__module__]
    monkeypatch.setattr(module, "_BATCH", 2)

    def dying(progress):
        if progress.done == 4:
            raise KeyboardInterrupt

    folder = study / "other"
    with pytest.raises(KeyboardInterrupt):
        verified(study / "records.jsonl", folder=folder, watch=dying)
    assert len((folder / "records.jsonl").read_text().splitlines()) == 4
    again = verified(study / "records.jsonl", folder=folder)
    assert {k: again[k] for k in ("n", "claims", "attacked", "least_room")} == {
        k: whole[k] for k in ("n", "claims", "attacked", "least_room")
    }
