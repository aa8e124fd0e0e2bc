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
from specguard.records.attack import AttackSettings
from specguard.records.base import About, BallRecord
from specguard.records.certificate import CertifySettings
from specguard.records.check import CheckSettings
from specguard.studies import balls_of, checked_study, run_attack, run_certify, run_check
from specguard.studies.samples import attack_batches, largest_batch, samples_of

CPU = torch.device("cpu")
ABOUT = About(model=fingerprint(small_encoder()), data="the data", dataset="noise", n=5)
SETTINGS = CertifySettings((1e-3, 0.3), methods=("lofast", "local", "adjoint"), batch=3)


def certified(folder: Path, **changes) -> Path:
    run_certify(
        small_encoder(),
        small_sentences(),
        folder,
        SETTINGS,
        about=ABOUT,
        device=CPU,
        attack=PGD(steps=5),
        **changes,
    )
    return folder / "records.jsonl"


@pytest.fixture(scope="module")
def proofs(tmp_path_factory) -> Path:
    return certified(tmp_path_factory.mktemp("proofs") / "study")


def checked(file: Path, folder: Path):
    found, believed = run_check(
        checked_study(file),
        small_encoder(),
        small_sentences(),
        folder,
        data="the data",
        device=CPU,
        settings=CheckSettings(),
    )
    assert believed == 0
    return found


def test_every_sample_is_in_one_batch_with_the_network_of_its_length():
    model, split = small_encoder(), small_sentences()
    about, asked = samples_of(model, split), torch.tensor([4, 0, 3])
    assert not about.box
    batches = list(about.batches(asked))
    assert sorted(int(place) for batch in batches for place in batch.places) == [0, 1, 2]
    for batch in batches:
        assert torch.equal(asked[batch.places], batch.samples)
        assert torch.equal(split.labels[batch.samples], batch.labels)
        words = split.words[batch.samples]
        assert batch.inputs.shape[1:] == (int((words[0] != 0).sum()), CONFIG.dim) == batch.prepared.model.shape
        with torch.no_grad():
            torch.testing.assert_close(batch.prepared.model(batch.inputs), model(words), rtol=1e-5, atol=1e-6)
    assert largest_batch(about, asked).samples.tolist() == [0, 3]


def test_images_are_one_batch_and_sentences_need_an_encoder():
    images = Dataset(torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 0]))
    (batch,) = samples_of(lambda x: x, images).batches(torch.tensor([2, 0]))
    assert torch.equal(batch.inputs, images.images[[2, 0]])
    for model, split in ((small_encoder(), images), (lambda x: x, small_sentences())):
        with pytest.raises(ConfigError, match="encoders of text"):
            samples_of(model, split)


def test_what_an_attack_finds_comes_back_in_order_with_zeros_for_padding():
    model, split = small_encoder(), small_sentences()
    about, samples, ball = samples_of(model, split), torch.arange(5), Ball("l2", 2.0, box=False)
    found, labels = attack_batches(
        about, samples, lambda b: PGD(steps=5)(b.prepared.model, b.inputs, b.labels, ball, ids=b.samples)
    )
    assert torch.equal(labels, split.labels)
    assert found.images.shape == (5, CONFIG.tokens, CONFIG.dim)
    assert not found.images[split.words == 0].any()
    with torch.no_grad():
        assert torch.equal(found.before, model(split.words).argmax(1))
    assert found.success[1]  # it was wrong before
    clean = torch.zeros_like(found.images)
    for batch in about.batches(samples):
        clean[batch.places, : batch.inputs.shape[1]] = batch.inputs
    torch.testing.assert_close((found.images - clean).flatten(1).norm(dim=1), found.distance)


def test_attacks_on_sentences_go_through_and_continue(tmp_path):
    suite, balls = Suite((("pgd", PGD(steps=3)),)), balls_of(small_encoder(), "l2", (0.5,))

    def run(folder):
        return run_attack(
            small_encoder(),
            small_sentences(),
            ("a", "b", "c"),
            folder,
            suite,
            balls,
            AttackSettings(batch=3, save_images=True),
            about=ABOUT,
            device=CPU,
        )

    whole = run(tmp_path / "whole")
    assert (whole.clean.count, whole.clean.n) == (4, 5)
    assert whole.study.balls == (BallRecord(norm="l2", radius=0.5, box=False),)
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
    assert result.n == 5
    assert result.attacked == 4
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
