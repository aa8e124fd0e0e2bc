"""Diagnoses of small models: what is done in which time, what is skipped and said, and that they can be resumed."""

import html
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import specguard
from helpers.studies import data, model, outcome
from specguard.attacks import PGD, Square, Suite
from specguard.data import Data, Dataset
from specguard.data.dataset import AbsentSplit
from specguard.diagnosis import Diagnosis, attacks, others, proofs
from specguard.diagnosis.attacks import decide_attack
from specguard.errors import ConfigError, DataError, RunError
from specguard.nn import TextEncoder
from specguard.records.accuracy import Accuracy
from specguard.records.diagnosis import PLAN, DiagnosisSettings, Measured
from specguard.records.study import Progress
from specguard.report import read_run, verdict

STAGES = (
    "gradients",
    "attacks-linf",
    "attacks-l2",
    "spectrum",
    "certificates-l2",
    "certificates-linf",
    "smoothing",
)


FEW = Suite((("pgd", PGD(steps=3)), ("square", Square(queries=5))), cascade=True)
SUITES = {"quick": FEW, "thorough": FEW, "black box": Suite((("square", Square(queries=5)),))}


class Clock:
    """Time that passes by a fixed amount between two looks at it."""

    def __init__(self, tick: float = 1e-6) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def noise() -> Data:
    """Images with the labels that the model gives them, but for two, whose robust accuracy is not all trivial."""
    split = data()
    with torch.no_grad():
        labels = model()(split.images).argmax(1)
    labels[-2:] = (labels[-2:] + 1) % 5
    given = Dataset(split.images, labels)
    return Data("noise", given, given, tuple("abcde"))


@pytest.fixture(autouse=True)
def small_studies(monkeypatch):
    """Suites, smoothing and proofs of little work, for speed; diagnoses choose among them as ever."""
    monkeypatch.setattr(attacks, "SUITES", SUITES)
    monkeypatch.setattr(others, "_SAMPLES", (20,))
    monkeypatch.setattr(proofs, "METHODS", {"l2": ("local", "adjoint"), "linf": ("adjoint",)})
    monkeypatch.setattr("specguard.studies.attack.find_flags", lambda *images, **more: ())


def diagnosed(**more: Any) -> Diagnosis:
    settings = {"minutes": 1.0, "images": 3, "clock": Clock(), "device": "cpu"} | more
    network, images = settings.pop("model", None), settings.pop("data", None)
    return specguard.diagnose(
        model() if network is None else network, noise() if images is None else images, **settings
    )


def test_every_stage_is_an_ordinary_study_and_the_verdict_follows_from_them(tmp_path, monkeypatch):
    monkeypatch.undo()  # all methods, and the search for signs of obfuscated gradients
    monkeypatch.setattr(attacks, "SUITES", SUITES)
    monkeypatch.setattr(others, "_SAMPLES", (20,))
    found = diagnosed(out=tmp_path, images=2)
    assert [stage.stage for stage in found.stages] == list(STAGES)
    assert all(stage.run for stage in found.stages[:-1])
    run = read_run(tmp_path, "model")
    assert not run.problems
    assert not run.unfinished
    assert verdict(run, clean=found.clean) == found.verdict
    assert len(run.attacks) == 3
    assert len(run.certificates) == 2
    assert len(run.spectra) == 1
    assert {method for stage in found.stages for method in stage.methods} == {"local", "zonotope", "adjoint"}
    assert found.stages[0].flags
    for stage in found.stages:
        assert (tmp_path / stage.stage / "summary.json").exists() == stage.run
    assert found.report is not None
    assert found.report.read_text().startswith("<!DOCTYPE html>")
    assert found.clean.n == 11


def test_the_text_has_what_every_stage_got_all_numbers_and_the_verdict(tmp_path):
    lines: list[str] = []
    found = diagnosed(out=tmp_path, say=lines.append)
    text = str(found)
    assert repr(found) == text
    assert lines == text.splitlines()[: len(lines)]
    assert str(found.verdict) in text
    assert f"report in {tmp_path / 'report.html'}" in text
    for point in found.evidence.proved:
        assert str(point.accuracy) in text


def test_started_again_it_changes_nothing(tmp_path):
    first = diagnosed(out=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*") if "report" not in path.name}
    again = diagnosed(out=tmp_path)
    assert str(again) == str(first)
    assert {path: path.read_bytes() for path in before} == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[], tuple[Path, Diagnosis]]:
    made: list[tuple[Path, Diagnosis]] = []

    def once() -> tuple[Path, Diagnosis]:
        if not made:
            folder = tmp_path_factory.mktemp("whole")
            made.append((folder, diagnosed(out=folder)))
        return made[0]

    return once


@pytest.mark.parametrize("moment", ["clean accuracy", "planning: attacks, l2", "proofs, l2: "])
def test_interrupted_at_any_stage_it_resumes_to_the_same_result(tmp_path, whole, moment):
    def interrupt(progress: Progress) -> None:
        if progress.doing.startswith(moment):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diagnosed(out=tmp_path, watch=interrupt)
    resumed = diagnosed(out=tmp_path)
    folder, expected = whole()
    timeless = {"allotted": 0.0, "per_image": 0.0, "seconds": 0.0}
    plans = [[_without_times(stage, timeless) for stage in each.stages] for each in (resumed, expected)]
    assert plans[0] == plans[1]
    assert resumed.verdict == expected.verdict
    for stage in expected.stages:
        if stage.run:
            assert outcome(tmp_path / stage.stage) == outcome(folder / stage.stage)


def _without_times(stage: Any, timeless: dict[str, float]) -> Any:
    return msgspec.structs.replace(stage, **timeless)


def test_a_decision_that_is_on_the_disk_is_carried_out_whatever_the_time_is_now(tmp_path):
    first = diagnosed(out=tmp_path)
    (tmp_path / "spectrum" / "summary.json").unlink()
    slow = diagnosed(out=tmp_path, clock=Clock(tick=1000.0))
    assert slow.stages == first.stages
    assert (tmp_path / "spectrum" / "summary.json").exists()


def test_without_time_every_stage_is_skipped_with_a_sentence_that_says_how_much_is_enough(tmp_path):
    found = diagnosed(out=tmp_path, clock=Clock(tick=100.0))
    assert not any(stage.run for stage in found.stages)
    assert all(stage.reason for stage in found.stages)
    assert "--minutes" in found.stages[0].reason
    assert found.verdict.headline.startswith("Open: ")
    assert "no study fits the time" in found.verdict.headline
    assert found.verdict.command is not None
    assert "--minutes" in found.verdict.command


def test_more_time_gives_more_images_and_stronger_attacks():
    edge = {"l2": 0.25, "linf": None}
    measured = Measured(clean=Accuracy.of(8, 10), forward=1e-3, gradient=1e-2, probed=8, edge=edge, seconds=0.0)
    subject: Any = SimpleNamespace(settings=DiagnosisSettings(), most=200, pixels=3072)
    little, more, most = (decide_attack(subject, measured, seconds, 0.15, "l2") for seconds in (1.0, 60.0, 1e4))
    assert not little.run
    assert (more.suite, most.suite) == ("quick", "thorough")
    assert 0 < more.images < most.images == 200
    assert more.radii == (0.125, 0.25, 0.5)
    assert more.images * more.per_image <= 60.0


def test_a_callable_is_attacked_and_what_is_not_certified_is_said_by_name():
    network = model()
    found = diagnosed(model=lambda x: network(x))
    by_name = {stage.stage: stage for stage in found.stages}
    assert by_name["attacks-l2"].run
    assert not by_name["certificates-l2"].run
    assert "Wrapped, for which there is no rule" in by_name["certificates-l2"].reason
    assert "Wrapped, for which there is no rule" in found.verdict.sentences[1]
    assert "the model is a Wrapped" in by_name["smoothing"].reason


def test_a_layer_without_a_rule_is_named():
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Hardswish()).eval()
    found = diagnosed(model=network)
    reasons = {stage.stage: stage.reason for stage in found.stages}
    assert "Hardswish" in reasons["certificates-linf"]


class Rounded(nn.Module):
    """A model without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy((x.detach().numpy().reshape(len(x), -1)[:, :5] * 10).round())


def test_a_model_without_gradients_gets_black_box_attacks():
    found = diagnosed(model=Rounded().eval())
    assert {stage.suite for stage in found.stages if stage.suite} == {"black box"}
    assert "no gradients" in found.stages[1].reason


def test_the_norm_and_the_radii_can_be_chosen():
    found = diagnosed(norm="L2", radii=[0.3, 0.05])
    assert [stage.stage for stage in found.stages] == [name for name in STAGES if "linf" not in name]
    assert {stage.radii for stage in found.stages if stage.stage.endswith("-l2")} == {(0.05, 0.3)}
    assert found.stages[0].radii == (0.3,)


def test_the_report_has_the_verdict_of_the_diagnosis_also_where_its_reason_is_not_in_any_study(tmp_path):
    network = model()
    found = diagnosed(out=tmp_path, model=lambda x: network(x), norm="l2", images=1)
    assert found.report is not None
    page = html.unescape(found.report.read_text())
    assert "as no method applies" in found.verdict.sentences[1]
    for sentence in (found.verdict.headline, *found.verdict.sentences, found.verdict.command or ""):
        assert sentence in page


def test_a_next_command_that_trains_says_that_there_are_no_training_images():
    split = noise().test
    wrong = Dataset(split.images, (model()(split.images).argmax(1) + 1) % 5)
    few = diagnosed(data=Data("photos", wrong, wrong, tuple("abcde")), norm="l2")
    absent = Data("photos", AbsentSplit("photos/train"), wrong, tuple("abcde"))
    without = diagnosed(data=absent, norm="l2")
    assert (few.verdict.command or "").startswith("specguard train ")
    need = " The next command needs training images, and the folder photos/train does not exist."
    assert without.verdict.sentences[-1] == few.verdict.sentences[-1] + need
    assert (without.verdict.headline, without.verdict.command) == (few.verdict.headline, few.verdict.command)


def test_nothing_is_kept_without_a_folder():
    found = diagnosed(norm="linf")
    assert found.folder is None
    assert found.report is None
    assert "report in" not in str(found)


def test_arrays_and_batches_are_data_and_the_model_is_left_as_it_was():
    split, network = noise().test, model().train()
    images, labels = split.batch(slice(None))
    with pytest.warns(UserWarning, match="train mode"):
        one = diagnosed(model=network, data=(images.numpy(), labels.tolist()), norm="l2")
    assert network.training
    two = diagnosed(data=[(images[:5], labels[:5]), (images[5:], labels[5:])], norm="l2")
    assert str(one) == str(two)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"minutes": "ten"}, "minutes must be a number, not 'ten'"),
        ({"minutes": -1}, "minutes must be positive"),
        ({"norm": "l1"}, "norm 'l1' is unknown"),
        ({"radii": 0.1}, "--radius needs --norm"),
        ({"images": 2.5}, "images must be a whole number, not 2.5"),
        ({"images": True}, "images must be a whole number, not True"),
        ({"seed": "a"}, "seed must be a whole number, not 'a'"),
        ({"memory": "2"}, "memory must be a number, not '2'"),
        ({"device": "gpu"}, "device 'gpu' is unknown"),
        ({"model": 3}, "a int cannot be called and is no model"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(more, words):
    with pytest.raises(ConfigError, match=words):
        diagnosed(**more)


def test_sentences_and_data_without_labels_are_refused():
    encoder = object.__new__(TextEncoder)
    nn.Module.__init__(encoder)
    with pytest.raises(ConfigError, match="takes models of images"):
        diagnosed(model=encoder)
    with pytest.raises(DataError, match="labels are missing"):
        diagnosed(data=torch.rand(3, 1, 4, 4))


def test_a_folder_with_the_diagnosis_of_another_model_is_refused(tmp_path):
    diagnosed(out=tmp_path, norm="l2", images=1)
    other = model()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(RunError, match=r"another diagnosis \(about.model"):
        diagnosed(out=tmp_path, norm="l2", images=1, model=other)


@pytest.mark.parametrize(
    ("stage", "words"),
    [("gradients", "without a suite of attacks"), ("spectrum", "of a Wrapped"), ("smoothing", "of a Wrapped")],
)
def test_a_plan_with_a_decision_that_no_diagnosis_makes_is_refused(tmp_path, stage, words):
    network = model()
    diagnosed(out=tmp_path, model=lambda x: network(x), norm="l2", images=1)
    kept = [
        record
        for record in map(json.loads, (tmp_path / PLAN).read_text().splitlines())
        if not record.get("stage", "").startswith(stage)
    ]
    planted = {"kind": "decision", "stage": stage, "run": True, "reason": "", "images": 1, "radii": [0.1]}
    lines = [*kept, planted]
    (tmp_path / PLAN).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunError, match=rf"plan.jsonl runs {stage} .*{words}"):
        diagnosed(out=tmp_path, model=lambda x: network(x), norm="l2", images=1)


def test_no_stage_is_written_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gradients").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="gradients"):
        diagnosed(out=tmp_path / "out", norm="l2", images=1)
    assert not list((tmp_path / "elsewhere").iterdir())


class Output(nn.Module):
    """A model whose output holds logits, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.model(x))


def test_an_output_with_logits_is_taken_as_these():
    assert diagnosed(model=Output().eval(), norm="l2").clean == diagnosed(norm="l2").clean


def test_a_model_of_timm_is_proved_smoothed_and_its_blocks_are_known(timm):
    given = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, num_classes=5, embed_dim=12, depth=1, num_heads=3
    )
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = given.eval()(images).argmax(1)
    with pytest.warns(UserWarning, match="gets pixels in"):
        found = diagnosed(model=given, data=(images, labels), norm="l2", images=2, radii=1e-4)
    by_name = {stage.stage: stage for stage in found.stages}
    assert by_name["spectrum"].run
    assert by_name["certificates-l2"].methods
    assert [point.accuracy.count for point in found.evidence.proved] == [2]
    assert all(parameter.requires_grad for parameter in given.parameters())


def test_proofs_are_not_called_vacuous_where_no_image_is_classified_correctly():
    split = noise().test
    images = split.batch(slice(None))[0]
    found = diagnosed(data=(images, (model()(images).argmax(1) + 1) % 5), norm="l2")
    assert "none of the first 3 images is classified correctly" in found.verdict.sentences[1]
    assert "vacuous" not in str(found)


def test_progress_is_of_the_whole_and_never_goes_back():
    seen: list[Progress] = []
    diagnosed(watch=seen.append)
    assert [piece.done for piece in seen] == sorted(piece.done for piece in seen)
    assert seen[-1].done == seen[-1].total
    assert {piece.total for piece in seen} == {1000}


def test_the_plan_is_written_before_the_study_begins(tmp_path):
    def interrupt(progress: Progress) -> None:
        if progress.doing.startswith("attacks, l2: "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diagnosed(out=tmp_path, watch=interrupt)
    assert '"stage": "attacks-l2"' in (tmp_path / PLAN).read_text()
