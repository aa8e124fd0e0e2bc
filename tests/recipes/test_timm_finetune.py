"""The user of timm in `recipes/timm_finetune`: a checkpoint that timm loads, and numbers that say what was won."""

import json
from pathlib import Path

import torch

import timm_finetune
from specguard.records.store import write_tensors

RESULTS = Path(timm_finetune.__file__).parent


def test_the_checkpoint_is_the_converted_network_under_the_names_of_timm(timm, tmp_path):
    from relational.converted import LIBRARIES, converted_vit
    from specguard.models import timm_weights
    from specguard.nn import Normalize
    from timm_finetune.__main__ import in_timm

    network = converted_vit("timm")
    write_tensors(tmp_path / "checkpoint.safetensors", timm_weights(network.float(), LIBRARIES["timm"]()))
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    first = next(layer for layer in network.children() if isinstance(layer, Normalize))
    normal = (images - first.mean.view(1, 3, 1, 1)) / first.std.view(1, 3, 1, 1)
    torch.testing.assert_close(
        in_timm(tmp_path / "checkpoint.safetensors")(normal), network(images), rtol=1e-4, atol=1e-4
    )


def test_fine_tuning_made_it_robust_and_the_exported_checkpoint_is_the_run():
    before, after = (
        json.loads((RESULTS / f"{name}.json").read_text())["worst_case"][0]["accuracy"]
        for name in ("before", "robust/after")
    )
    compared = json.loads((RESULTS / "compared.json").read_text())
    clean = {name: found["count"] for name, found in compared["clean_in_timm"].items()}
    assert before["n"] == after["n"] == compared["images"] == 500
    assert after["interval95"][0] > before["interval95"][1]
    assert compared["logits_apart"] < 1e-9
    assert clean["robust"] == json.loads((RESULTS / "robust" / "result.json").read_text())["test_accuracy"]["count"]
    assert clean["checkpoint"] == json.loads((RESULTS / "before.json").read_text())["clean"]["count"]
