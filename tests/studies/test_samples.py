"""Sentences in studies: each once, with its own network, without a box; proofs and attacks never contradict."""

import json
from pathlib import Path

import pytest
import torch

from helpers.commandline import contents
from helpers.sentences import CONFIG, small_encoder, small_sentences
from specguard.attacks import PGD, Suite
from specguard.data import Dataset
from specguard.errors import ConfigError, SoundnessError
from specguard.geometry import Ball
from specguard.nn import fingerprint
from specguard.studies import Certification, Evaluation, balls_of, certification, evaluate, verification
from specguard.studies.samples import attacked, most_alike, subject

CPU = torch.device("cpu")
IDENTITY = {"model": fingerprint(small_encoder()), "data": "the data", "dataset": "noise"}
SETTINGS = Certification(radii=(1e-3, 0.3), families=("lofast", "local", "adjoint"), batch=3, attack=PGD(steps=5))


def certified(folder: Path, **changes) -> Path:
    certification(small_encoder(), small_sentences(), folder, SETTINGS, identity=IDENTITY, device=CPU, **changes)
    return folder / "records.jsonl"


@pytest.fixture(scope="module")
def proofs(tmp_path_factory) -> Path:
    return certified(tmp_path_factory.mktemp("proofs") / "study")


def checked(file: Path, folder: Path):
    return verification(file, small_encoder(), small_sentences(), folder, data="the data", device=CPU)


def test_every_sample_is_in_one_group_with_the_network_of_its_length():
    model, split = small_encoder(), small_sentences()
    about, asked = subject(model, split), torch.tensor([4, 0, 3])
    assert not about.box
    groups = list(about.groups(asked))
    assert sorted(int(place) for group in groups for place in group.places) == [0, 1, 2]
    for group in groups:
        assert torch.equal(asked[group.places], group.samples)
        assert torch.equal(split.labels[group.samples], group.labels)
        words = split.words[group.samples]
        assert group.inputs.shape[1:] == (int((words[0] != 0).sum()), CONFIG.dim) == group.form.model.shape
        with torch.no_grad():
            torch.testing.assert_close(group.form.model(group.inputs), model(words), rtol=1e-5, atol=1e-6)
    assert most_alike(about, asked).samples.tolist() == [0, 3]


def test_images_are_one_group_and_sentences_need_an_encoder():
    images = Dataset(torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 0]))
    (group,) = subject(lambda x: x, images).groups(torch.tensor([2, 0]))
    assert torch.equal(group.inputs, images.images[[2, 0]])
    for model, split in ((small_encoder(), images), (lambda x: x, small_sentences())):
        with pytest.raises(ConfigError, match="encoders of text"):
            subject(model, split)


def test_what_an_attack_finds_comes_back_in_order_with_zeros_for_padding():
    model, split = small_encoder(), small_sentences()
    about, samples, ball = subject(model, split), torch.arange(5), Ball("l2", 2.0, box=False)
    found, labels = attacked(
        about, samples, lambda g: PGD(steps=5)(g.form.model, g.inputs, g.labels, ball, ids=g.samples)
    )
    assert torch.equal(labels, split.labels)
    assert found.images.shape == (5, CONFIG.tokens, CONFIG.dim)
    assert not found.images[split.words == 0].any()
    with torch.no_grad():
        assert torch.equal(found.before, model(split.words).argmax(1))
    assert found.success[1]  # it was wrong before
    clean = torch.zeros_like(found.images)
    for group in about.groups(samples):
        clean[group.places, : group.inputs.shape[1]] = group.inputs
    torch.testing.assert_close((found.images - clean).flatten(1).norm(dim=1), found.distance)


def test_an_evaluation_of_sentences_goes_through_and_continues(tmp_path):
    suite = Suite((("pgd", PGD(steps=3)),))
    settings = Evaluation(suite, balls_of(small_encoder(), "l2", (0.5,)), batch=3, save_images=True)

    def run(folder):
        return evaluate(
            small_encoder(), small_sentences(), ("a", "b", "c"), folder, settings, identity=IDENTITY, device=CPU
        )

    whole = run(tmp_path / "whole")
    assert whole["clean"] == {**whole["clean"], "count": 4, "n": 5}
    assert whole["settings"]["balls"] == [{"norm": "l2", "radius": 0.5, "box": False}]
    run(tmp_path / "cut")
    records = (tmp_path / "whole" / "records.jsonl").read_bytes()
    (tmp_path / "cut" / "summary.json").unlink()
    (tmp_path / "cut" / "records.jsonl").write_bytes(records[: len(records) // 2])
    run(tmp_path / "cut")
    assert (tmp_path / "cut" / "records.jsonl").read_bytes() == records


def test_a_certification_of_sentences_has_them_in_order_and_continues(proofs, tmp_path):
    records = [json.loads(line) for line in proofs.read_text().splitlines()]
    assert [record["sample"] for record in records] == [0, 1, 2, 3, 4]
    verdicts = [row["verdict"] for record in records for row in record["radii"]]
    assert verdicts.count("certified") >= 4
    assert records[1]["radii"][0]["verdict"] == "broken"
    folder = tmp_path / "cut"
    again = certified(folder)
    (folder / "summary.json").unlink()
    again.write_bytes(proofs.read_bytes()[: len(proofs.read_bytes()) * 4 // 5])
    assert certified(folder).read_bytes() == proofs.read_bytes()


def test_the_second_program_agrees_and_a_claim_that_is_too_good_is_an_error(proofs, tmp_path):
    result = checked(proofs, tmp_path / "checked")
    assert result["n"] == 5
    assert result["attacked"] == 4
    records = [json.loads(line) for line in proofs.read_text().splitlines()]
    records[4]["radii"][1]["lower"]["local"] = 9.0
    records[4]["radii"][1]["verdict"] = "certified"
    forged = tmp_path / "forged"
    forged.mkdir()
    for name, content in contents(proofs.parent).items():
        (forged / name).write_bytes(content)
    (forged / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(SoundnessError, match="image 4"):
        checked(forged / "records.jsonl", tmp_path / "caught")


def test_a_budget_of_memory_is_refused_for_it_depends_on_the_length(tmp_path):
    with pytest.raises(ConfigError, match="depends on their length"):
        certified(tmp_path / "study", memory=10**9)
