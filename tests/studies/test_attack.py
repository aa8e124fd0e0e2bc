"""A study of attacks killed at any moment continues, and ends with the bytes of one that was never killed."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from specguard.attacks import APGD, FAB, FGSM, PGD, Attack, Square, Suite
from specguard.attacks.state import AttackState
from specguard.data import Dataset
from specguard.errors import AttackError, ConfigError, RunError
from specguard.geometry import Ball
from specguard.records import files, io, store
from specguard.records import io as records_io
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackRecord, AttackSettings, AttackStudy, AttackSummary, Outcome, summarize
from specguard.records.base import About, plain
from specguard.records.io import RecordFile, read_json, read_lines, read_record, rewrite_records
from specguard.records.ledger import Ledger
from specguard.records.study import Progress
from specguard.studies import attack as attack_module
from specguard.studies import run_attack

CPU = torch.device("cpu")
CLASSES = ("a", "b", "c", "d")
COUNT = 10  # in batches of 4, 4 and 2
ABOUT = About(model="abc", data="def", dataset="noise", n=COUNT)
SMALL, LARGE = Ball("linf", 0.03), Ball("linf", 0.05)  # some images fall at the first, most at the second


@dataclass(frozen=True)
class Evaluation:
    """What to attack with, and how."""

    suite: Suite
    balls: tuple[Ball, ...]
    settings: AttackSettings

    def changed(self, **changes: Any) -> "Evaluation":
        """With another suite, other balls, or other settings of these names."""
        parts = {name: changes.pop(name) for name in ("suite", "balls") if name in changes}
        return replace(self, **parts, settings=msgspec.structs.replace(self.settings, **changes))


EVALUATIONS = {
    "one by one": Evaluation(
        Suite((("fgsm", FGSM), ("pgd", PGD(steps=3)), ("fab", FAB(steps=2, targets=2)))),
        (LARGE, SMALL),
        AttackSettings(batch=4, diagnose=False, save_images=True),
    ),
    "stop early": Evaluation(
        Suite(
            (
                ("apgd", APGD(steps=2)),
                ("fab", FAB(steps=2, targets=1, leave=True)),
                ("square", Square(queries=4)),
            ),
            cascade=True,
        ),
        (SMALL, LARGE),
        AttackSettings(seed=3, batch=4, diagnose=False, save_images=True),
    ),
}


class Death(BaseException):
    """Stands for SIGKILL: nothing but what is on the disk survives."""


class Model(nn.Module):
    """Two layers in float64. At the `last` call it dies."""

    def __init__(self, last: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        shapes = ((24, 36), (4, 24))
        self.weights = [torch.randn(s, dtype=torch.float64, generator=generator) / s[1] ** 0.5 for s in shapes]
        self.calls, self.last = 0, last

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.last:
            raise Death
        first, second = self.weights
        return torch.tanh((x.flatten(1) - 0.5) @ first.T) @ second.T


@cache
def data() -> Dataset:
    """Images in [0, 1], labeled by the model but for two, which it gets wrong."""
    images = torch.rand(COUNT, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = Model()(images).argmax(1)
    labels[[2, 8]] = (labels[[2, 8]] + 1) % 4
    return Dataset(images, labels)


def start(
    folder: Path,
    evaluation: Evaluation,
    *,
    model: nn.Module | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    about: About = ABOUT,
    split: Dataset | None = None,
) -> AttackSummary:
    """What a new process does."""
    found = run_attack(
        model or Model(),
        split or data(),
        CLASSES,
        folder,
        evaluation.suite,
        evaluation.balls,
        evaluation.settings,
        about=about,
        device=CPU,
        watch=watch,
    )
    assert isinstance(found, AttackSummary)
    return found


def stored_records(folder: Path) -> list[AttackRecord]:
    return RecordFile(folder / "records.jsonl", AttackRecord).read()


def stored_outcomes(folder: Path) -> list[tuple[AttackRecord, Outcome]]:
    """Every outcome of every image, with the record that it is in."""
    return [(record, outcome) for record in stored_records(folder) for outcome in record.outcomes]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def numbers(folder: Path) -> dict[str, Any]:
    """The summary without what depends on the start."""
    found = read_json(folder / "summary.json")
    del found["environment"], found["seconds"]
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """All that may not depend on how often the study was killed."""
    found: dict[str, Any] = {
        name: content
        for name, content in contents(folder).items()
        if name not in ("summary.json", "environment.jsonl", "timing.jsonl") and not name.endswith(".draft")
    }
    return found | {"summary": numbers(folder)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")  # spares three processes per start
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no machine loses its power here


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a study that was never killed."""

    @cache
    def of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("finished") / "study"
        start(folder, EVALUATIONS[name])
        return folder

    return of


def difference(folder: Path, name: str, expected: dict[str, Any]) -> str | None:
    """Continue in `folder`; what then differs from an uninterrupted study, or the error that it ends with."""
    try:
        start(folder, EVALUATIONS[name])
        found = outcome(folder)
    except (Exception, Death) as error:  # noqa: BLE001 - any error at all is a failure to continue
        return f"{type(error).__name__}: {error}"
    if found.keys() != expected.keys():
        return f"files {sorted(found.keys() ^ expected.keys())}"
    return next((name for name in expected if found[name] != expected[name]), None)


def one_sentence(error: BaseException, *named: object) -> None:
    assert "\n" not in str(error)
    for name in named:
        assert str(name) in str(error)


# What a study leaves behind ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVALUATIONS)
def test_there_is_one_record_per_image_with_one_outcome_per_ball_and_attack_in_order(finished, name):
    evaluation, records = EVALUATIONS[name], stored_records(finished(name))
    assert [record.sample for record in records] == list(range(COUNT))
    assert [record.label for record in records] == data().labels.tolist()
    assert len((finished(name) / "records.jsonl").read_bytes().splitlines()) == COUNT
    standing: set[int] = set()
    for record in records:
        expected = []
        for ball in evaluation.balls:
            for attack, _ in evaluation.suite.attacks:
                expected.append((ball.norm, ball.radius, attack))
                found = record.outcomes[len(expected) - 1]
                if evaluation.suite.cascade and found.success:
                    break
            if not found.success:
                standing.add(record.sample)
        assert [(o.norm, o.radius, o.attack) for o in record.outcomes] == expected
    assert 0 < len(standing) < COUNT  # the test sees both


@pytest.mark.parametrize("name", EVALUATIONS)
def test_every_record_is_what_the_attack_itself_returns(finished, name):
    """With the images together that were together, so that even rounding is the same."""
    evaluation, model = EVALUATIONS[name], Model()
    records, seen = stored_outcomes(finished(name)), 0
    for ball, (attack, search), first in itertools.product(
        evaluation.balls, evaluation.suite.attacks, range(0, COUNT, evaluation.settings.batch)
    ):
        mine = [
            (r, o)
            for r, o in records
            if (o.attack, o.radius) == (attack, ball.radius) and first <= r.sample < first + 4
        ]
        if not mine:
            continue
        ids = torch.tensor([r.sample for r, _ in mine])
        images, labels = data().batch(ids)
        found = search(model, images, labels, ball, ids=ids, seed=evaluation.settings.seed)
        assert [r.clean for r, _ in mine] == found.before.tolist()
        for key in ("success", "predicted", "distance"):
            assert [getattr(o, key) for _, o in mine] == getattr(found, key).tolist()
        assert [o.closest for _, o in mine] == [d if d < float("inf") else None for d in found.closest.tolist()]
        seen += len(mine)
    assert seen == len(records)


def test_the_accuracy_is_that_of_one_call_on_all_images(finished):
    evaluation = EVALUATIONS["one by one"]
    found = read_record(finished("one by one") / "summary.json", AttackSummary)
    images, labels = data().batch(slice(0, COUNT))
    assert found.clean.count == COUNT - 2
    rows = iter(found.attacks)
    for ball, (name, attack) in itertools.product(evaluation.balls, evaluation.suite.attacks):
        row = next(rows)
        assert (row.attack, row.norm, row.radius) == (name, ball.norm, ball.radius)
        stood = ~attack(Model(), images, labels, ball, seed=0).success
        assert row.accuracy.count == int(stood.sum())
    assert len({row.accuracy.count for row in found.attacks}) > 2  # not all alike by accident


@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_summary_is_a_function_of_the_records_and_settings_on_disk(finished, name):
    folder = finished(name)
    study = read_record(folder / "study.json", AttackStudy)
    again = plain(summarize(stored_records(folder), study, CLASSES))
    found = numbers(folder)
    assert {key: found[key] for key in again.keys() - {"environment", "seconds"}} == {
        key: again[key] for key in again.keys() - {"environment", "seconds"}
    }
    assert found["study"] == read_json(folder / "study.json") == plain(study)
    assert study.about == ABOUT
    assert study.about.n == COUNT
    assert len(read_lines(folder / "environment.jsonl")) == 1


@pytest.mark.parametrize("name", EVALUATIONS)
def test_seconds_are_those_of_every_batch_and_attack(finished, name):
    folder = finished(name)
    lines = read_lines(folder / "timing.jsonl")
    assert [line["begin"] for line in lines] == [0, 4, 8]
    names = {"total", *(attack for attack, _ in EVALUATIONS[name].suite.attacks)}
    seconds = read_json(folder / "summary.json")["seconds"]
    assert set(seconds) == names
    for stage in names:
        assert seconds[stage] == pytest.approx(sum(line["seconds"][stage] for line in lines))
    assert 0 < sum(value for stage, value in seconds.items() if stage != "total") <= seconds["total"]


@pytest.mark.parametrize("name", EVALUATIONS)
def test_saved_images_lie_in_the_ball_and_are_really_misclassified_where_broken(finished, name):
    folder, evaluation = finished(name), EVALUATIONS[name]
    records = {(o.attack, o.radius, r.sample): o for r, o in stored_outcomes(folder)}
    seen = set()
    for path in sorted((folder / "images").iterdir()):
        attack, norm, radius, first = path.stem.split("-")
        stored = store.read_tensors(path)
        (ball,) = [b for b in evaluation.balls if (b.norm, f"{b.radius:.6g}") == (norm, radius)]
        samples, images = stored["samples"], stored["images"]
        assert images.dtype == torch.float64
        clean, labels = data().batch(samples)
        assert (samples >= int(first)).all()
        assert (samples < int(first) + 4).all()
        assert ball.contains(images, clean).all()
        predicted = Model()(images).argmax(1)
        for i, sample in enumerate(samples.tolist()):
            found = records[attack, ball.radius, sample]
            seen.add((attack, ball.radius, sample))
            assert predicted[i] == found.predicted
            assert found.success == (predicted[i] != labels[i])
            assert found.distance == float(ball.distance(images, clean)[i])
    assert seen == set(records)
    assert {outcome.success for outcome in records.values()} == {True, False}


def test_images_are_kept_only_on_request(tmp_path):
    start(tmp_path, EVALUATIONS["one by one"].changed(save_images=False))
    assert not (tmp_path / "images").exists()


def test_pixels_stored_as_bytes_are_attacked_in_0_to_1(tmp_path):
    class Single(Model):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            return super().forward(x.double()).float()

    images = (255 * data().images).round().to(torch.uint8)
    found = start(tmp_path, EVALUATIONS["one by one"], model=Single(), split=Dataset(images, data().labels))
    direct = FGSM(Single(), images / 255, data().labels, LARGE)
    assert found.attacks[0].accuracy.count == int((~direct.success).sum())


@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize("batch", [1, 3, 10, 250])
def test_the_result_does_not_depend_on_how_images_are_put_together(tmp_path, finished, name, batch):
    start(tmp_path, EVALUATIONS[name].changed(batch=batch))
    found, expected = (stored_outcomes(folder) for folder in (tmp_path, finished(name)))
    inexact = ("distance", "closest")

    def exactly(pair: tuple[AttackRecord, Outcome]) -> Any:
        record, outcome = map(msgspec.structs.asdict, pair)
        del record["outcomes"]
        return record, {key: value for key, value in outcome.items() if key not in inexact}

    assert list(map(exactly, found)) == list(map(exactly, expected))
    for key in inexact:
        one, other = ([getattr(outcome, key) for _, outcome in pairs] for pairs in (found, expected))
        assert [value is None for value in one] == [value is None for value in other]
        assert [value or 0 for value in one] == pytest.approx([value or 0 for value in other], abs=1e-9)
    one, other = numbers(tmp_path), numbers(finished(name))
    for key in ("clean", "attacks", "worst_case", "per_class"):
        assert one[key] == other[key]


def test_another_seed_gives_other_records(tmp_path, finished):
    start(tmp_path, EVALUATIONS["one by one"].changed(seed=1))
    found, expected = (stored_outcomes(f) for f in (tmp_path, finished("one by one")))
    assert [o for _, o in found if o.attack == "fgsm"] == [o for _, o in expected if o.attack == "fgsm"]
    assert found != expected  # FGSM draws nothing, others do


@dataclass(frozen=True)
class Anxious(Attack):
    """Finds nothing, and says so of every batch."""

    leave: bool = True

    def search(self, state: AttackState) -> None:
        state.warn("it seems to be a riddle", f"there are {len(state)} images")


def test_what_attacks_warn_of_is_in_the_records_and_once_in_the_summary(tmp_path):
    suite = Suite((("anxious", Anxious()), ("fgsm", FGSM)))
    found = start(tmp_path, Evaluation(suite, (SMALL,), AttackSettings(batch=4, diagnose=False)))
    assert found.warnings == (
        "it seems to be a riddle",
        "there are 3 images",
        "there are 4 images",
        "there are 1 images",
    )
    for record in stored_records(tmp_path):
        assert record.warnings == (found.warnings[0], found.warnings[1 + record.sample // 4])
    alone = Evaluation(Suite((("fgsm", FGSM),)), (SMALL,), AttackSettings(diagnose=False))
    assert start(tmp_path / "quiet", alone).warnings == ()
    assert b"warnings" not in (tmp_path / "quiet" / "records.jsonl").read_bytes()


def test_signs_of_obfuscated_gradients_are_in_the_summary(tmp_path):
    class Rounded(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x * 8).round() / 8)

    evaluation = EVALUATIONS["one by one"].changed(diagnose=True, save_images=False)
    found = start(tmp_path / "rounded", evaluation, model=Rounded())
    assert "zero gradients" in [flag.name for flag in found.flags]
    assert read_json(tmp_path / "rounded" / "summary.json")["flags"] == plain(found.flags)
    assert start(tmp_path / "rounded", evaluation, model=Untouchable()).flags == found.flags
    assert "zero gradients" not in [flag.name for flag in start(tmp_path / "honest", evaluation).flags]


def test_a_watcher_is_told_of_every_batch_and_how_much_is_left(tmp_path):
    told: list[Progress] = []
    start(tmp_path, EVALUATIONS["stop early"], watch=told.append)
    total = 3 * 3 * 2
    assert [p.done for p in told if p.doing != "working"] == [*range(total), total]
    assert [p.done for p in told if p.doing == "working"] == [0, 6, 12]
    assert {p.total for p in told} == {total}
    assert [p.doing for p in told[:3]] == ["working", "apgd, linf 0.03", "fab, linf 0.03"]
    assert told[-1].doing == "done"


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"balls": ()},
        {"suite": Suite(())},
        {"balls": (SMALL, SMALL)},
        {"balls": (SMALL, replace(SMALL, box=False))},  # records could not tell them apart
        {"suite": Suite((("pgd", PGD()), ("pgd", PGD(steps=3))))},
    ],
    ids=["no batch", "no ball", "no attack", "ball twice", "ball with and without box", "name twice"],
)
def test_a_study_that_makes_no_sense_is_refused(tmp_path, change):
    with pytest.raises(ConfigError) as caught:
        start(tmp_path / "study", EVALUATIONS["stop early"].changed(**change))
    one_sentence(caught.value)
    assert not (tmp_path / "study").exists()


# Death -------------------------------------------------------------------------------------------------------


def dying_at(call: int) -> Callable[[Progress], None]:
    calls = itertools.count(1)

    def watch(progress: Progress) -> None:
        if next(calls) == call:
            raise Death

    return watch


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_study_killed_after_any_batch_ends_like_an_uninterrupted_one(tmp_path, finished, name):
    expected, found = outcome(finished(name)), {}
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        try:
            start(folder, EVALUATIONS[name], watch=dying_at(call))
        except Death:
            assert not (folder / "summary.json").exists()
            found[call] = difference(folder, name, expected)
        else:
            break
    assert found == dict.fromkeys(range(1, 23))  # three batches: a beginning and 3 x 2 attacks; the end


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_study_killed_within_the_model_ends_like_an_uninterrupted_one(tmp_path, finished, name):
    whole = Model()
    start(tmp_path / "whole", EVALUATIONS[name], model=whole)
    expected, found = outcome(finished(name)), {}
    for last in range(1, whole.calls + 1, 11):
        folder = tmp_path / str(last)
        with pytest.raises(Death):
            start(folder, EVALUATIONS[name], model=Model(last))
        found[last] = difference(folder, name, expected)
        shutil.rmtree(folder)
    assert len(found) > 5
    assert found == dict.fromkeys(found)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_study_killed_again_and_again_ends_like_an_uninterrupted_one(tmp_path, finished, name):
    folder, deaths, done = tmp_path / "study", 0, []

    def watch(progress: Progress) -> None:
        done.append(progress.done)
        if len(done) % 2 == 0 and progress.done < progress.total and progress.done > max(done[:-1]):
            raise Death

    while True:
        try:
            start(folder, EVALUATIONS[name], watch=watch)
        except Death:
            deaths += 1
        else:
            break
    assert deaths >= 4
    assert len(read_lines(folder / "environment.jsonl")) == deaths + 1
    assert outcome(folder) == outcome(finished(name))


def test_a_resumed_evaluation_does_not_attack_again_what_is_recorded(tmp_path, finished):
    folder, whole = tmp_path / "study", Model()
    start(tmp_path / "whole", EVALUATIONS["stop early"], model=whole)
    first, rest = Model(), Model()
    with pytest.raises(Death):
        start(folder, EVALUATIONS["stop early"], model=first, watch=dying_at(8))
    start(folder, EVALUATIONS["stop early"], model=rest)
    assert first.calls + rest.calls == whole.calls
    assert 0 < first.calls < whole.calls


def test_a_death_while_looking_for_obfuscated_gradients_does_no_harm(tmp_path):
    attacking, looking = Model(), Model()
    start(tmp_path / "attacked", EVALUATIONS["one by one"], model=attacking)
    evaluation = EVALUATIONS["one by one"].changed(diagnose=True)
    start(tmp_path / "whole", evaluation, model=looking)
    assert looking.calls > attacking.calls + 100
    for last in (attacking.calls + 1, attacking.calls + 100, looking.calls):
        folder, rest = tmp_path / str(last), Model()
        with pytest.raises(Death):
            start(folder, evaluation, model=Model(last))
        assert not (folder / "summary.json").exists()
        start(folder, evaluation, model=rest)
        assert rest.calls == looking.calls - attacking.calls  # no attack again
        assert outcome(folder) == outcome(tmp_path / "whole")


def cut_after(folder: Path, source: Path, length: int) -> None:
    """What a machine that lost its power leaves: a prefix of the records."""
    shutil.copytree(source, folder)
    (folder / "summary.json").unlink()
    (folder / "records.jsonl").write_bytes((source / "records.jsonl").read_bytes()[:length])


@pytest.mark.parametrize("name", EVALUATIONS)
def test_records_cut_at_any_byte_are_completed(tmp_path, finished, name):
    content, expected = (finished(name) / "records.jsonl").read_bytes(), outcome(finished(name))
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]
    lengths = {0, 1, *ends, *(end - 1 for end in ends[1::3]), *(end + 40 for end in ends[2::3])}
    found = {}
    for length in sorted(lengths - {len(content) + 40}):
        cut_after(tmp_path / str(length), finished(name), length)
        found[length] = difference(tmp_path / str(length), name, expected)
        shutil.rmtree(tmp_path / str(length))
    assert len(found) > 10
    assert found == dict.fromkeys(found)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_file_of_records_that_never_came_to_be_is_no_harm(tmp_path, finished, name):
    cut_after(tmp_path / "study", finished(name), 0)
    (tmp_path / "study" / "records.jsonl").unlink()
    assert difference(tmp_path / "study", name, outcome(finished(name))) is None


@pytest.mark.parametrize("name", EVALUATIONS)
def test_records_lost_in_the_middle_are_made_again(tmp_path, finished, name):
    """Not what a crash does; the numbers are right all the same."""
    records = stored_records(finished(name))
    for lost in (slice(0, 1), slice(3, 4), slice(2, 6), slice(1, 9)):
        folder = tmp_path / f"{lost.start}-{lost.stop}"
        cut_after(folder, finished(name), 0)
        kept = list(records)
        del kept[lost]
        rewrite_records(folder / "records.jsonl", kept)
        start(folder, EVALUATIONS[name])
        assert numbers(folder) == numbers(finished(name))
        assert stored_records(folder) == records


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_death_between_the_images_and_their_records_does_no_harm(tmp_path, monkeypatch, finished, name, batches):
    append, calls = RecordFile.append, itertools.count(1)

    def dying(file: RecordFile[Any], records: list[Any]) -> None:
        if file.path.name == "records.jsonl" and next(calls) == batches:
            raise Death
        append(file, records)

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append", dying)
        with pytest.raises(Death):
            start(tmp_path / "study", EVALUATIONS[name])
    images, whole = (
        {path.name for path in (folder / "images").iterdir()} for folder in (tmp_path / "study", finished(name))
    )
    written = {image for image in whole if int(image.split("-")[-1].split(".")[0]) < 4 * batches}
    assert images == written  # those of one more batch than there are records of
    assert len(stored_records(tmp_path / "study")) == 4 * (batches - 1)
    assert difference(tmp_path / "study", name, outcome(finished(name))) is None


class Disk:
    """The file system as `records.files` sees it: the `last` request half done or not at all, then `error`."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int, error: BaseException) -> None:
        self.last, self.error, self.requests = last, error, 0
        for name in ("replace", "fsync"):
            patch.setattr(os, name, self.all_or_nothing(getattr(os, name)))
        self.fdopen = os.fdopen
        patch.setattr(os, "fdopen", self.opened)

    def due(self) -> bool:
        self.requests += 1
        return self.requests == self.last

    def all_or_nothing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.due():
                raise self.error
            return real(*arguments)

        return call

    def opened(self, descriptor: int, mode: str) -> Any:
        handle = self.fdopen(descriptor, mode)
        return handle if mode == "rb" else _Handle(handle, self)


class _Handle:
    def __init__(self, real: Any, disk: Disk) -> None:
        self.real, self.disk = real, disk

    def write(self, content: bytes) -> int:
        if self.disk.due():
            self.real.write(content[: len(content) // 2])
            raise self.disk.error
        return self.real.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __enter__(self) -> "_Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.real.close()


FULL = OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"),
    [("one by one", Death()), ("stop early", Death()), ("stop early", FULL)],
    ids=["killed", "killed where attacks stop early", "disk full"],
)
def test_a_study_that_fails_at_any_request_to_the_file_system_ends_like_an_uninterrupted_one(
    tmp_path, monkeypatch, finished, name, error
):
    expected, found = outcome(finished(name)), {}
    with monkeypatch.context() as patch:
        disk = Disk(patch, 0, error)
        start(tmp_path / "whole", EVALUATIONS[name])
    total = disk.requests
    assert total > 80
    for last in range(1, total + 1):
        folder = tmp_path / str(last)
        with monkeypatch.context() as patch:
            Disk(patch, last, error)
            with pytest.raises(Death if isinstance(error, Death) else RunError) as caught:
                start(folder, EVALUATIONS[name])
        if error is FULL:
            one_sentence(caught.value, folder, "No space left on device")
        found[last] = difference(folder, name, expected)
        shutil.rmtree(folder)
    assert found == dict.fromkeys(found)


WRITERS = {  # where a file of each kind is written
    "study.json": (records_io, "write_file"),
    "environment.jsonl": (records_io, "append_file"),
    "timing.jsonl": (records_io, "append_file"),
    "images": (store, "write_file"),
    "records.jsonl": (records_io, "append_file"),
    "summary.json": (records_io, "write_file"),
}


def full_once(patch: pytest.MonkeyPatch, module: Any, writer: str, name: str) -> list[Path]:
    """A disk that is full when a file of this name, or below a folder of it, is first written."""
    real, met = getattr(module, writer), list[Path]()

    def full(path: Path, content: bytes) -> None:
        if name in (path.name, path.parent.name) and not met:
            met.append(path)
            with files.writing(path):
                raise FULL
        real(path, content)

    patch.setattr(module, writer, full)
    return met


@pytest.mark.parametrize("file", WRITERS)
def test_a_full_disk_is_one_sentence_and_continuing_later_ends_like_an_uninterrupted_one(
    tmp_path, monkeypatch, finished, file
):
    with monkeypatch.context() as patch:
        met = full_once(patch, *WRITERS[file], file)
        with pytest.raises(RunError) as caught:
            start(tmp_path / "study", EVALUATIONS["stop early"])
    one_sentence(caught.value, *met, "No space left on device")
    assert difference(tmp_path / "study", "stop early", outcome(finished("stop early"))) is None


@pytest.mark.parametrize("cut", [-1, -300], ids=["torn", "a batch cut short"])
def test_a_disk_that_is_full_when_records_are_rewritten_is_no_harm_either(tmp_path, monkeypatch, finished, cut):
    whole = (finished("stop early") / "records.jsonl").read_bytes()
    cut_after(tmp_path / "study", finished("stop early"), len(whole) + cut)
    with monkeypatch.context() as patch:
        met = full_once(patch, records_io, "write_file", "records.jsonl")
        with pytest.raises(RunError) as caught:
            start(tmp_path / "study", EVALUATIONS["stop early"])
    one_sentence(caught.value, *met, "No space left on device")
    assert (tmp_path / "study" / "records.jsonl").read_bytes() == whole[:cut]
    assert difference(tmp_path / "study", "stop early", outcome(finished("stop early"))) is None


def test_a_folder_for_images_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "images").write_bytes(b"precious")
    with pytest.raises(RunError) as caught:
        start(tmp_path, EVALUATIONS["one by one"])
    one_sentence(caught.value, tmp_path / "images")
    assert (tmp_path / "images").read_bytes() == b"precious"


@pytest.mark.parametrize("below", ["file", "file/below", "x" * 300])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, below):
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(RunError) as caught:
        start(tmp_path / below, EVALUATIONS["one by one"])
    one_sentence(caught.value, tmp_path / below)
    assert contents(tmp_path) == {"file": b"precious"}


def test_a_model_that_fails_half_way_leaves_what_was_done(tmp_path, finished):
    whole = Model()
    start(tmp_path / "whole", EVALUATIONS["one by one"], model=whole)

    class Failing(Model):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return logits * torch.nan if self.calls > whole.calls // 2 else logits

    with pytest.raises(AttackError) as caught:
        start(tmp_path / "study", EVALUATIONS["one by one"], model=Failing())
    one_sentence(caught.value, "not finite")
    assert stored_records(tmp_path / "study")
    assert difference(tmp_path / "study", "one by one", outcome(finished("one by one"))) is None


# Folders that are there already ------------------------------------------------------------------------------


class Untouchable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model was asked")


@pytest.fixture
def complete(finished, tmp_path) -> Path:
    return shutil.copytree(finished("stop early"), tmp_path / "complete")


def test_a_finished_evaluation_is_returned_as_it_is(complete):
    before = contents(complete)
    found = start(complete, EVALUATIONS["stop early"], model=Untouchable())
    assert plain(found) == read_json(complete / "summary.json")
    assert contents(complete) == before


OTHER = {
    "seed": ({"seed": 4}, "seed: 3 before, 4 now"),
    "batch": ({"batch": 5}, "batch: 4 before, 5 now"),
    "precision": ({"precision": "bfloat16"}, 'precision: "full" before, "bfloat16" now'),
    "diagnose": ({"diagnose": True}, "diagnose: false before, true now"),
    "save_images": ({"save_images": False}, "save_images: true before, false now"),
    "balls": ({"balls": (SMALL,)}, "balls: "),
    "suite": ({"suite": Suite(EVALUATIONS["stop early"].suite.attacks)}, "stop_early: true before, false now"),
    "attacks": ({"suite": Suite((("apgd", APGD(steps=4)),), cascade=True)}, "attacks: "),
}


@pytest.mark.parametrize("ended", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("kind", OTHER)
def test_a_folder_with_other_settings_is_refused_by_the_difference_and_left_alone(complete, kind, ended):
    changes, named = OTHER[kind]
    if not ended:
        (complete / "summary.json").unlink()
    before = contents(complete)
    with pytest.raises(RunError) as caught:
        start(complete, EVALUATIONS["stop early"].changed(**changes), model=Untouchable())
    one_sentence(caught.value, complete, named, "another folder")
    assert contents(complete) == before


@pytest.mark.parametrize("change", [{"model": "abd"}, {"data": "deg"}, {"dataset": "signal"}], ids=str)
def test_a_folder_of_another_model_or_other_data_is_refused(complete, change):
    (key,) = change
    with pytest.raises(RunError) as caught:
        start(
            complete,
            EVALUATIONS["stop early"],
            about=msgspec.structs.replace(ABOUT, **change),
            model=Untouchable(),
        )
    one_sentence(caught.value, f'about.{key}: "{getattr(ABOUT, key)}" before, "{change[key]}" now')


def test_a_folder_of_more_or_fewer_images_is_refused(complete):
    some = Dataset(data().images[:9], data().labels[:9])
    about = msgspec.structs.replace(ABOUT, n=9)
    with pytest.raises(RunError) as caught:
        start(complete, EVALUATIONS["stop early"], split=some, about=about, model=Untouchable())
    one_sentence(caught.value, "about.n: 10 before, 9 now")


def test_a_folder_in_use_is_refused(complete):
    before = contents(complete)
    with files.locked(complete), pytest.raises(RunError) as caught:
        start(complete, EVALUATIONS["stop early"], model=Untouchable())
    one_sentence(caught.value, complete, "in use by another process")
    assert contents(complete) == before


def test_a_folder_in_use_by_a_real_second_process_is_refused_until_it_ends(complete):
    holding = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    command = [sys.executable, "-c", f"{holding}; sys.stdin.read()", str(complete / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        with pytest.raises(RunError) as caught:
            start(complete, EVALUATIONS["stop early"], model=Untouchable())
        one_sentence(caught.value, "in use by another process")
        other.communicate()
    assert start(complete, EVALUATIONS["stop early"], model=Untouchable()).n == COUNT


# Records that are not what they should be ---------------------------------------------------------------------


@pytest.fixture
def spoilt(finished, tmp_path) -> Callable[[Callable[[list[bytes]], list[bytes]]], Path]:
    """A study without its summary, whose lines of records were changed."""

    def of(change: Callable[[list[bytes]], list[bytes]]) -> Path:
        folder = tmp_path / "spoilt"
        cut_after(folder, finished("one by one"), 0)
        lines = (finished("one by one") / "records.jsonl").read_bytes().splitlines()
        (folder / "records.jsonl").write_bytes(b"".join(line + b"\n" for line in change(lines)))
        return folder

    return of


def changed(number: int, place: int | None = None, **changes: Any) -> Callable[[list[bytes]], list[bytes]]:
    """One record, or the outcome at a place of it, with other values; `...` takes a value away."""

    def change(lines: list[bytes]) -> list[bytes]:
        record = json.loads(lines[number])
        inner = record if place is None else record["outcomes"][place]
        inner |= changes
        for name in [name for name, value in inner.items() if value is ...]:
            del inner[name]
        lines[number] = json.dumps(record).encode()
        return lines

    return change


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"7", b"\xff\xfe", b'{"a": 1}{"a": 2}', b"[" * 100_000])
@pytest.mark.parametrize("place", [0, 7])
def test_a_line_that_is_no_record_is_refused_by_its_number(spoilt, line, place):
    folder = spoilt(lambda lines: [*lines[:place], line, *lines[place:]])
    before = contents(folder)
    with pytest.raises(RunError) as caught:
        start(folder, EVALUATIONS["one by one"])
    one_sentence(caught.value, folder / "records.jsonl", f"line {place + 1}")
    assert contents(folder) == before


@pytest.mark.parametrize(
    "change", [{"attack": "deepfool"}, {"attack": "pgd"}, {"norm": "l2"}, {"radius": 0.5}], ids=str
)
def test_an_outcome_of_another_study_is_refused(spoilt, change):
    folder = spoilt(changed(3, 0, **change))
    before = contents(folder)
    with pytest.raises(RunError) as caught:
        start(folder, EVALUATIONS["one by one"])
    one_sentence(caught.value, folder / "records.jsonl", "does not belong to this study", "image 3")
    assert contents(folder) == before


@pytest.mark.parametrize("change", [[], [0, 1], [1, 0, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 0]])
def test_outcomes_that_are_missing_too_many_or_in_another_order_are_refused(spoilt, finished, change):
    outcomes = read_lines(finished("one by one") / "records.jsonl")[3]["outcomes"]
    folder = spoilt(changed(3, outcomes=[outcomes[place] for place in change]))
    with pytest.raises(RunError) as caught:
        start(folder, EVALUATIONS["one by one"])
    one_sentence(caught.value, folder / "records.jsonl", "does not belong to this study", "image 3")


def test_outcomes_that_contradict_an_early_stop_are_refused(finished, tmp_path):
    """An attack that was tried behind a success, or none behind a failure."""
    evaluation = EVALUATIONS["stop early"]
    for number, record in enumerate(stored_records(finished("stop early"))):
        for place, found in enumerate(record.outcomes):
            flipped = msgspec.structs.replace(found, success=not found.success)
            if found.attack == evaluation.suite.attacks[-1][0]:
                continue  # the last of its ball may have ended either way
            outcomes = (*record.outcomes[:place], flipped, *record.outcomes[place + 1 :])
            folder = tmp_path / f"{number}-{place}"
            cut_after(folder, finished("stop early"), 0)
            records = stored_records(finished("stop early"))
            records[number] = msgspec.structs.replace(record, outcomes=outcomes)
            rewrite_records(folder / "records.jsonl", records)
            with pytest.raises(RunError) as caught:
                start(folder, evaluation, model=Untouchable())
            one_sentence(caught.value, folder / "records.jsonl", f"image {number}")
    assert len(list(tmp_path.iterdir())) > COUNT


WRONG = [
    *({"sample": value} for value in ("0", None, 0.5, -1, COUNT, 10**30, ..., [0])),
    *({"label": value} for value in (..., "a", None, [0], -1)),
    *({"clean": value} for value in (..., "a", None, -1)),
    *({"outcomes": value} for value in (..., None, {}, "a", [None])),
    *({"warnings": value} for value in (5, [[1]], "a")),
    {"later": 1},
]
WRONG_OUTCOME = [
    *({"attack": value} for value in (..., ["pgd"], None)),
    *({"norm": value} for value in ("l1", None, ...)),
    *({"radius": value} for value in ("0.05", {}, ..., -1, float("nan"))),
    *({"success": value} for value in ("false", None, 2, [], ...)),
    *({"predicted": value} for value in ("a", None, ..., -1)),
    *({"distance": value} for value in ("far", None, ..., -1, float("inf"))),
    *({"closest": value} for value in (..., "near", float("nan"), [0.1], -1)),
    {"later": 1},
]


@pytest.mark.parametrize(
    ("place", "change"), [*((None, wrong) for wrong in WRONG), *((5, wrong) for wrong in WRONG_OUTCOME)], ids=str
)
def test_a_record_with_a_value_of_a_wrong_kind_is_refused(spoilt, place, change):
    folder = spoilt(changed(COUNT - 1, place, **change))
    before = contents(folder)
    with pytest.raises(RunError) as caught:
        start(folder, EVALUATIONS["one by one"], model=Untouchable())
    one_sentence(caught.value, folder / "records.jsonl")
    assert contents(folder) == before


@pytest.mark.parametrize("number", [0, 3, -1])
@pytest.mark.parametrize("times", [1, 2])
def test_a_record_that_is_there_twice_is_refused_or_counted_once(spoilt, finished, number, times):
    folder = spoilt(lambda lines: [*lines, *[lines[number]] * times])
    try:
        start(folder, EVALUATIONS["one by one"])
    except RunError as error:
        one_sentence(error, folder / "records.jsonl")
    else:
        assert numbers(folder) == numbers(finished("one by one"))


def test_two_records_of_one_image_that_contradict_each_other_are_refused(spoilt, finished):
    lines = (finished("one by one") / "records.jsonl").read_bytes().splitlines()
    standing = next(i for i, line in enumerate(lines) if b'"success": false' in line)
    folder = spoilt(lambda lines: [*lines, lines[standing].replace(b'"success": false', b'"success": true')])
    with pytest.raises(RunError) as caught:
        start(folder, EVALUATIONS["one by one"])
    one_sentence(caught.value, folder / "records.jsonl", f"image {standing} again")


def test_records_whose_labels_are_not_those_of_the_data_are_refused(spoilt):
    label = int(data().labels[3])
    folder = spoilt(changed(3, label=(label + 1) % 4))
    with pytest.raises(RunError) as caught:
        start(folder, EVALUATIONS["one by one"])
    one_sentence(caught.value, folder / "records.jsonl", "image 3")


@pytest.mark.parametrize(
    "key", ["n", "clean", "attacks", "worst_case", "distances", "per_class", "warnings", "study"]
)
def test_a_summary_that_was_changed_by_hand_is_refused(complete, key):
    path = complete / "summary.json"
    found = read_json(path)
    better = plain(Accuracy.of(COUNT, COUNT))
    match key:
        case "n":
            found["n"] += 1
        case "clean":
            found["clean"] = better
        case "attacks" | "worst_case":
            found[key][0]["accuracy"] = better
        case "distances":
            found["distances"]["linf"]["known"] -= 1
        case "per_class":
            found["per_class"][0]["name"] = "z"
        case "warnings":
            found["warnings"] = ["none"]
        case "study":
            found["study"]["settings"]["seed"] += 1
    io.write_json(path, found)
    before = contents(complete)
    with pytest.raises(RunError) as caught:
        start(complete, EVALUATIONS["stop early"], model=Untouchable())
    one_sentence(caught.value, path)
    assert contents(complete) == before


def test_a_summary_of_which_records_were_lost_or_changed_is_refused(complete):
    path, whole = complete / "records.jsonl", (complete / "records.jsonl").read_bytes()
    lines = whole.splitlines()
    other = changed(3, clean=(stored_records(complete)[3].clean + 1) % 4)(lines[:])
    for kept in (lines[:-1], [], [*lines[:-1], lines[-1][:-9]], other):
        path.write_bytes(b"\n".join(kept))  # the last line is torn
        if kept is other:
            path.write_bytes(b"".join(line + b"\n" for line in kept))
        before = contents(complete)
        with pytest.raises(RunError) as caught:
            start(complete, EVALUATIONS["stop early"], model=Untouchable())
        one_sentence(caught.value, complete)
        assert contents(complete) == before


DIAGNOSED = EVALUATIONS["one by one"].changed(diagnose=True, save_images=False)


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosed") / "study"
    start(folder, DIAGNOSED)
    return folder


def with_file(looked_at: Path, folder: Path, file: str, content: bytes) -> None:
    """A finished study, or one that lacks only its summary, with another content of one file."""
    shutil.copytree(looked_at, folder)
    if file != "summary.json":
        (folder / "summary.json").unlink()
    (folder / file).write_bytes(content)


@pytest.mark.parametrize("file", ["study.json", "summary.json", "environment.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("content", [b"[]\n", b"{\n", b"\xff\xfe\n"])
def test_a_file_of_the_folder_that_is_no_record_is_refused_by_name(looked_at, tmp_path, file, content):
    with_file(looked_at, tmp_path / "spoilt", file, content)
    with pytest.raises(RunError) as caught:
        start(tmp_path / "spoilt", DIAGNOSED)
    one_sentence(caught.value, tmp_path / "spoilt" / file)


@pytest.mark.parametrize("file", ["study.json", "summary.json"])
@pytest.mark.parametrize("content", [b"{}\n", b'{"flags": 3, "clean": [], "attacks": null}\n'])
def test_a_file_of_the_folder_that_is_another_record_is_refused(looked_at, tmp_path, file, content):
    with_file(looked_at, tmp_path / "spoilt", file, content)
    with pytest.raises(RunError) as caught:
        start(tmp_path / "spoilt", DIAGNOSED)
    one_sentence(caught.value, tmp_path / "spoilt")


# The tests above bite ----------------------------------------------------------------------------------------


def test_batches_that_begin_where_the_records_end_are_noticed(tmp_path, monkeypatch, finished):
    """AutoAttack's random numbers belong to the batch and would be others; here it is the images that tell."""
    lines = (finished("one by one") / "records.jsonl").read_bytes().splitlines(keepends=True)
    cut_after(tmp_path / "study", finished("one by one"), len(b"".join(lines[:6])))

    def rest(ledger: Ledger[Any], begins: range) -> list[tuple[int, int]]:
        return list(enumerate(range(len(ledger.records), COUNT, ledger.batch)))

    monkeypatch.setattr(Ledger, "missing", rest)
    expected = outcome(finished("one by one"))
    assert "images/" in str(difference(tmp_path / "study", "one by one", expected))


def test_records_that_were_written_before_their_images_are_noticed(tmp_path, monkeypatch, finished):
    tensors, append = attack_module.write_tensors, RecordFile.append
    waiting: list[tuple[Path, dict[str, Tensor]]] = []

    def late(file: RecordFile[Any], records: list[Any]) -> None:
        """Records of the whole batch, then its images."""
        append(file, records)
        if file.path.name == "records.jsonl":
            for path, content in waiting:
                if "00000004" in path.name:
                    raise Death
                tensors(path, content)
            waiting.clear()

    with monkeypatch.context() as patch:
        patch.setattr(attack_module, "write_tensors", lambda path, content: waiting.append((path, content)))
        patch.setattr(RecordFile, "append", late)
        with pytest.raises(Death):
            start(tmp_path / "study", EVALUATIONS["one by one"])
    expected = outcome(finished("one by one"))
    assert "images/" in str(difference(tmp_path / "study", "one by one", expected))
