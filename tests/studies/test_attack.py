"""An evaluation killed at any moment continues, and ends with the bytes of one that was never killed."""

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

import pytest
import torch
from torch import Tensor, nn

from specguard.attacks import APGD, FAB, FGSM, PGD, Attack, Square, Suite
from specguard.attacks.state import AttackState
from specguard.data import Dataset
from specguard.errors import AttackError, ConfigError, RunError
from specguard.geometry import Ball
from specguard.records import store as runs
from specguard.studies import Evaluation, Progress, evaluate, shards
from specguard.studies import attack as run_module
from specguard.studies import summary as summarised

CPU = torch.device("cpu")
CLASSES = ("a", "b", "c", "d")
IDENTITY = {"model": "abc", "data": "def", "dataset": "noise"}
COUNT = 10  # in batches of 4, 4 and 2
SMALL, LARGE = Ball("linf", 0.03), Ball("linf", 0.05)  # some images fall at the first, most at the second
EVALUATIONS = {
    "one by one": Evaluation(
        Suite((("fgsm", FGSM), ("pgd", PGD(steps=3)), ("fab", FAB(steps=2, targets=2)))),
        (LARGE, SMALL),
        batch=4,
        diagnose=False,
        save_images=True,
    ),
    "cascade": Evaluation(
        Suite(
            (
                ("apgd", APGD(steps=2)),
                ("fab", FAB(steps=2, targets=1, leave=True)),
                ("square", Square(queries=4)),
            ),
            cascade=True,
        ),
        (SMALL, LARGE),
        seed=3,
        batch=4,
        diagnose=False,
        save_images=True,
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
    """Images in [0, 1], labelled by the model but for two, which it gets wrong."""
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
    identity: dict[str, Any] = IDENTITY,
    split: Dataset | None = None,
) -> dict[str, Any]:
    """What a new process does."""
    return evaluate(
        model or Model(),
        split or data(),
        CLASSES,
        folder,
        evaluation,
        identity=identity,
        device=CPU,
        watch=watch,
    )


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def numbers(folder: Path) -> dict[str, Any]:
    """The summary without what depends on the start."""
    found = runs.read_json(folder / "summary.json")
    del found["environment"]
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """All that may not depend on how often the evaluation was killed."""
    found: dict[str, Any] = {
        name: content
        for name, content in contents(folder).items()
        if name not in ("summary.json", "environment.jsonl") and not name.endswith(".draft")
    }
    return found | {"summary": numbers(folder)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")  # spares three processes per start
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no machine loses its power here


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of an evaluation that was never killed."""

    @cache
    def of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("finished") / "evaluation"
        start(folder, EVALUATIONS[name])
        return folder

    return of


def difference(folder: Path, name: str, expected: dict[str, Any]) -> str | None:
    """Continue in `folder`; what then differs from an uninterrupted evaluation, or the error that it ends with."""
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


# What an evaluation leaves behind ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVALUATIONS)
def test_there_is_one_record_per_attack_ball_and_image_in_order(finished, name):
    evaluation, folder = EVALUATIONS[name], finished(name)
    records = runs.read_lines(folder / "records.jsonl")
    place = iter(records)
    standing: set[int] = set()
    for ball in evaluation.balls:
        standing = set(range(COUNT))
        for attack, _ in evaluation.suite.attacks:
            expected = sorted(standing) if evaluation.suite.cascade else list(range(COUNT))
            found = [next(place) for _ in expected]
            assert [r["sample"] for r in found] == expected
            assert {(r["attack"], r["norm"], r["radius"]) for r in found} == {(attack, ball.norm, ball.radius)}
            assert [r["label"] for r in found] == data().labels[expected].tolist()
            standing -= {r["sample"] for r in found if r["broken"]}
    assert next(place, None) is None
    assert 0 < len(standing) < COUNT  # the test sees both


@pytest.mark.parametrize("name", EVALUATIONS)
def test_every_record_is_what_the_attack_itself_returns(finished, name):
    """With the images together that were together, so that even rounding is the same."""
    evaluation, model = EVALUATIONS[name], Model()
    records = runs.read_lines(finished(name) / "records.jsonl")
    for ball, (attack, search), first in itertools.product(
        evaluation.balls, evaluation.suite.attacks, range(0, COUNT, evaluation.batch)
    ):
        mine = [
            r
            for r in records
            if (r["attack"], r["radius"]) == (attack, ball.radius) and first <= r["sample"] < first + 4
        ]
        if not mine:
            continue
        ids = torch.tensor([r["sample"] for r in mine])
        images, labels = data().batch(ids)
        found = search(model, images, labels, ball, ids=ids, seed=evaluation.seed)
        for key, column in (
            ("broken", found.success),
            ("before", found.before),
            ("predicted", found.predicted),
            ("distance", found.distance),
        ):
            assert [r[key] for r in mine] == column.tolist()
        assert [r["closest"] for r in mine] == [d if d < float("inf") else None for d in found.closest.tolist()]


def test_the_accuracy_is_that_of_one_call_on_all_images(finished):
    evaluation = EVALUATIONS["one by one"]
    found = numbers(finished("one by one"))
    images, labels = data().batch(slice(0, COUNT))
    assert found["clean"]["count"] == COUNT - 2
    rows = iter(found["attacks"])
    for ball, (name, attack) in itertools.product(evaluation.balls, evaluation.suite.attacks):
        row = next(rows)
        assert (row["attack"], row["norm"], row["radius"]) == (name, ball.norm, ball.radius)
        stood = ~attack(Model(), images, labels, ball, seed=0).success
        assert row["accuracy"]["count"] == int(stood.sum())
    assert len({row["accuracy"]["count"] for row in found["attacks"]}) > 2  # not all alike by accident


@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_summary_is_a_function_of_the_records_and_settings_on_disk(finished, name):
    folder = finished(name)
    settings = runs.read_json(folder / "evaluation.json")
    again = summarised(runs.read_lines(folder / "records.jsonl"), settings, list(CLASSES))
    found = numbers(folder)
    assert {key: found[key] for key in again} == again
    assert found["settings"] == settings == json.loads(json.dumps(settings))
    assert settings.items() >= IDENTITY.items()
    assert settings["n"] == COUNT
    assert len(runs.read_lines(folder / "environment.jsonl")) == 1


@pytest.mark.parametrize("name", EVALUATIONS)
def test_saved_images_lie_in_the_ball_and_are_really_misclassified_where_broken(finished, name):
    folder, evaluation = finished(name), EVALUATIONS[name]
    records = {(r["attack"], r["radius"], r["sample"]): r for r in runs.read_lines(folder / "records.jsonl")}
    seen = set()
    for path in sorted((folder / "images").iterdir()):
        attack, norm, radius, first = path.stem.split("-")
        stored = runs.read_tensors(path)
        (ball,) = [b for b in evaluation.balls if (b.norm, f"{b.radius:.6g}") == (norm, radius)]
        samples, images = stored["samples"], stored["images"]
        assert images.dtype == torch.float64
        clean, labels = data().batch(samples)
        assert (samples >= int(first)).all()
        assert (samples < int(first) + 4).all()
        assert ball.contains(images, clean).all()
        predicted = Model()(images).argmax(1)
        for i, sample in enumerate(samples.tolist()):
            record = records[attack, ball.radius, sample]
            seen.add((attack, ball.radius, sample))
            assert predicted[i] == record["predicted"]
            assert record["broken"] == (predicted[i] != labels[i])
            assert record["distance"] == float(ball.distance(images, clean)[i])
    assert seen == set(records)
    assert {r["broken"] for r in records.values()} == {True, False}


def test_images_are_kept_only_on_request(tmp_path):
    start(tmp_path, replace(EVALUATIONS["one by one"], save_images=False))
    assert not (tmp_path / "images").exists()


def test_pixels_stored_as_bytes_are_attacked_in_0_to_1(tmp_path):
    class Single(Model):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            return super().forward(x.double()).float()

    images = (255 * data().images).round().to(torch.uint8)
    found = start(tmp_path, EVALUATIONS["one by one"], model=Single(), split=Dataset(images, data().labels))
    direct = FGSM(Single(), images / 255, data().labels, LARGE)
    assert found["attacks"][0]["accuracy"]["count"] == int((~direct.success).sum())


@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize("batch", [1, 3, 10, 250])
def test_the_result_does_not_depend_on_how_images_are_put_together(tmp_path, finished, name, batch):
    start(tmp_path, replace(EVALUATIONS[name], batch=batch))
    found, expected = (runs.read_lines(f / "records.jsonl") for f in (tmp_path, finished(name)))
    inexact = ("distance", "closest")
    assert [{k: v for k, v in r.items() if k not in inexact} for r in found] == [
        {k: v for k, v in r.items() if k not in inexact} for r in expected
    ]
    for key in inexact:
        assert [r[key] is None for r in found] == [r[key] is None for r in expected]
        assert [r[key] or 0 for r in found] == pytest.approx([r[key] or 0 for r in expected], abs=1e-9)
    one, other = numbers(tmp_path), numbers(finished(name))
    for key in ("clean", "attacks", "worst_case", "per_class"):
        assert one[key] == other[key]


def test_another_seed_gives_other_records(tmp_path, finished):
    start(tmp_path, replace(EVALUATIONS["one by one"], seed=1))
    found, expected = (runs.read_lines(f / "records.jsonl") for f in (tmp_path, finished("one by one")))
    assert found[:COUNT] == expected[:COUNT]  # FGSM draws nothing
    assert found != expected


@dataclass(frozen=True)
class Anxious(Attack):
    """Finds nothing, and says so of every batch."""

    leave: bool = True

    def search(self, state: AttackState) -> None:
        state.warn("it seems to be a riddle", f"there are {len(state)} images")


def test_what_attacks_warn_of_is_in_the_records_and_once_in_the_summary(tmp_path):
    evaluation = Evaluation(Suite((("anxious", Anxious()), ("fgsm", FGSM))), (SMALL,), batch=4, diagnose=False)
    found = start(tmp_path, evaluation)
    assert found["warnings"] == [
        "it seems to be a riddle",
        "there are 3 images",
        "there are 4 images",
        "there are 1 images",
    ]
    records = runs.read_lines(tmp_path / "records.jsonl")
    assert all(("warnings" in r) == (r["attack"] == "anxious") for r in records)


def test_signs_of_obfuscated_gradients_are_in_the_summary(tmp_path):
    class Rounded(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x * 8).round() / 8)

    evaluation = replace(EVALUATIONS["one by one"], diagnose=True, save_images=False)
    found = start(tmp_path / "rounded", evaluation, model=Rounded())
    assert "zero gradients" in [flag["name"] for flag in found["flags"]]
    assert runs.read_json(tmp_path / "rounded" / "flags.json") == {"flags": found["flags"]}
    assert "zero gradients" not in [flag["name"] for flag in start(tmp_path / "honest", evaluation)["flags"]]


def test_a_watcher_is_told_of_every_batch_and_how_much_is_left(tmp_path):
    told: list[Progress] = []
    evaluation = EVALUATIONS["cascade"]
    start(tmp_path, evaluation, watch=told.append)
    total = 3 * 3 * 2
    assert [p.done for p in told] == [*range(total), total]
    assert {p.total for p in told} == {total}
    assert told[0].doing == "apgd, linf 0.03"
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
def test_an_evaluation_that_makes_no_sense_is_refused(change):
    with pytest.raises(ConfigError) as caught:
        replace(EVALUATIONS["cascade"], **change)
    one_sentence(caught.value)


# Death -------------------------------------------------------------------------------------------------------


def dying_at(call: int) -> Callable[[Progress], None]:
    calls = itertools.count(1)

    def watch(progress: Progress) -> None:
        if next(calls) == call:
            raise Death

    return watch


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_killed_after_any_batch_ends_like_an_uninterrupted_one(tmp_path, finished, name):
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
    assert found == dict.fromkeys(range(1, 20))  # three batches, three attacks, two balls, and the end


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_killed_within_the_model_ends_like_an_uninterrupted_one(tmp_path, finished, name):
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
def test_an_evaluation_killed_again_and_again_ends_like_an_uninterrupted_one(tmp_path, finished, name):
    folder, deaths, done = tmp_path / "evaluation", 0, []

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
    assert len(runs.read_lines(folder / "environment.jsonl")) == deaths + 1
    assert outcome(folder) == outcome(finished(name))


def test_a_resumed_evaluation_does_not_attack_again_what_is_recorded(tmp_path, finished):
    folder, whole = tmp_path / "evaluation", Model()
    start(tmp_path / "whole", EVALUATIONS["cascade"], model=whole)
    first, rest = Model(), Model()
    with pytest.raises(Death):
        start(folder, EVALUATIONS["cascade"], model=first, watch=dying_at(8))
    start(folder, EVALUATIONS["cascade"], model=rest)
    assert first.calls + rest.calls == whole.calls
    assert 0 < first.calls < whole.calls


def test_a_death_while_looking_for_obfuscated_gradients_does_no_harm(tmp_path):
    evaluation = replace(EVALUATIONS["one by one"], diagnose=True)
    start(tmp_path / "whole", evaluation)
    for last in (30, 300):
        with pytest.raises(Death):
            start(tmp_path / str(last), evaluation, model=Model(last))
        assert not (tmp_path / str(last) / "flags.json").exists()
        start(tmp_path / str(last), evaluation)
        assert outcome(tmp_path / str(last)) == outcome(tmp_path / "whole")


def cut_after(folder: Path, source: Path, length: int) -> None:
    """What a machine that lost its power leaves: a prefix of the records."""
    shutil.copytree(source, folder)
    (folder / "summary.json").unlink()
    (folder / "records.jsonl").write_bytes((source / "records.jsonl").read_bytes()[:length])


@pytest.mark.parametrize("name", EVALUATIONS)
def test_records_cut_at_any_byte_are_completed(tmp_path, finished, name):
    content, expected = (finished(name) / "records.jsonl").read_bytes(), outcome(finished(name))
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]
    lengths = {0, 1, *ends[::5], *(end - 1 for end in ends[1::11]), *(end + 40 for end in ends[2::11])}
    found = {}
    for length in sorted(lengths - {len(content) + 40}):
        cut_after(tmp_path / str(length), finished(name), length)
        found[length] = difference(tmp_path / str(length), name, expected)
        shutil.rmtree(tmp_path / str(length))
    assert len(found) > 10
    assert found == dict.fromkeys(found)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_file_of_records_that_never_came_to_be_is_no_harm(tmp_path, finished, name):
    cut_after(tmp_path / "evaluation", finished(name), 0)
    (tmp_path / "evaluation" / "records.jsonl").unlink()
    assert difference(tmp_path / "evaluation", name, outcome(finished(name))) is None


@pytest.mark.parametrize("name", EVALUATIONS)
def test_records_lost_in_the_middle_are_made_again(tmp_path, finished, name):
    """Not what a crash does; the numbers are right all the same."""
    records = runs.read_lines(finished(name) / "records.jsonl")
    for lost in (slice(0, 1), slice(3, 4), slice(5, 15), slice(1, 40)):
        folder = tmp_path / str(lost.start)
        cut_after(folder, finished(name), 0)
        kept = list(records)
        del kept[lost]
        runs.rewrite_lines(folder / "records.jsonl", kept)
        start(folder, EVALUATIONS[name])
        assert numbers(folder) == numbers(finished(name))
        found = runs.read_lines(folder / "records.jsonl")
        assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, records))


@pytest.mark.parametrize("batches", [1, 4, 8])
@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_death_between_the_images_and_their_records_does_no_harm(tmp_path, monkeypatch, finished, name, batches):
    append, calls = run_module.append_lines, itertools.count(1)

    def dying(path: Path, *records: Any) -> None:
        if next(calls) == batches:
            raise Death
        append(path, *records)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "append_lines", dying)
        with pytest.raises(Death):
            start(tmp_path / "evaluation", EVALUATIONS[name])
    images = len(list((tmp_path / "evaluation" / "images").iterdir()))
    assert images == batches  # one more than there are batches of records
    assert difference(tmp_path / "evaluation", name, outcome(finished(name))) is None


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
    [("one by one", Death()), ("cascade", Death()), ("cascade", FULL)],
    ids=["killed", "killed in a cascade", "disk full"],
)
def test_an_evaluation_that_fails_at_any_request_to_the_file_system_ends_like_an_uninterrupted_one(
    tmp_path, monkeypatch, finished, name, error
):
    expected, found = outcome(finished(name)), {}
    with monkeypatch.context() as patch:
        disk = Disk(patch, 0, error)
        start(tmp_path / "whole", EVALUATIONS[name])
    total = disk.requests
    assert total > 100
    # All of the beginning, of the first batches and of the end; between them, one here and there.
    for last in (*range(1, 21), *range(21, total - 5, 23), *range(total - 5, total + 1)):
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


@pytest.mark.parametrize("writer", ["append_lines", "write_json", "write_tensors", "rewrite_lines"])
def test_a_full_disk_is_one_sentence_and_continuing_later_ends_like_an_uninterrupted_one(
    tmp_path, monkeypatch, finished, writer
):
    real, calls = getattr(run_module, writer), itertools.count(1)

    def full(path: Path, *content: Any) -> None:
        if next(calls) == 1:
            with runs.writing(path):
                raise FULL
        real(path, *content)

    with monkeypatch.context() as patch:
        for module in (run_module, shards, runs):
            patch.setattr(module, writer, full, raising=False)
        with pytest.raises(RunError) as caught:
            start(tmp_path / "evaluation", EVALUATIONS["cascade"])
    one_sentence(caught.value, tmp_path, "No space left on device")
    assert difference(tmp_path / "evaluation", "cascade", outcome(finished("cascade"))) is None


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
    class Failing(Model):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return logits * torch.nan if self.calls > 40 else logits

    with pytest.raises(AttackError) as caught:
        start(tmp_path / "evaluation", EVALUATIONS["one by one"], model=Failing())
    one_sentence(caught.value, "not finite")
    assert runs.read_lines(tmp_path / "evaluation" / "records.jsonl")
    assert difference(tmp_path / "evaluation", "one by one", outcome(finished("one by one"))) is None


# Folders that are there already ------------------------------------------------------------------------------


class Untouchable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model was asked")


@pytest.fixture
def complete(finished, tmp_path) -> Path:
    return shutil.copytree(finished("cascade"), tmp_path / "complete")


def test_a_finished_evaluation_is_returned_as_it_is(complete):
    before = contents(complete)
    found = start(complete, EVALUATIONS["cascade"], model=Untouchable())
    assert found == runs.read_json(complete / "summary.json")
    assert contents(complete) == before


OTHER = {
    "seed": ({"seed": 4}, "seed: 3 before, 4 now"),
    "batch": ({"batch": 5}, "batch: 4 before, 5 now"),
    "precision": ({"precision": "bfloat16"}, 'precision: "full" before, "bfloat16" now'),
    "diagnose": ({"diagnose": True}, "diagnose: false before, true now"),
    "save_images": ({"save_images": False}, "save_images: true before, false now"),
    "balls": ({"balls": (SMALL,)}, "balls: "),
    "suite": ({"suite": Suite(EVALUATIONS["cascade"].suite.attacks)}, "cascade: true before, false now"),
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
        start(complete, replace(EVALUATIONS["cascade"], **changes), model=Untouchable())
    one_sentence(caught.value, complete, named, "another folder")
    assert contents(complete) == before


@pytest.mark.parametrize("change", [{"model": "abd"}, {"data": "deg"}, {"dataset": "signal"}], ids=str)
def test_a_folder_of_another_model_or_other_data_is_refused(complete, change):
    (key,) = change
    with pytest.raises(RunError) as caught:
        start(complete, EVALUATIONS["cascade"], identity=IDENTITY | change, model=Untouchable())
    one_sentence(caught.value, f'{key}: "{IDENTITY[key]}" before, "{change[key]}" now')


def test_a_folder_of_more_or_fewer_images_is_refused(complete):
    some = Dataset(data().images[:9], data().labels[:9])
    with pytest.raises(RunError) as caught:
        start(complete, EVALUATIONS["cascade"], split=some, model=Untouchable())
    one_sentence(caught.value, "n: 10 before, 9 now")


def test_a_folder_in_use_is_refused(complete):
    before = contents(complete)
    with runs.locked(complete), pytest.raises(RunError) as caught:
        start(complete, EVALUATIONS["cascade"], model=Untouchable())
    one_sentence(caught.value, complete, "in use by another process")
    assert contents(complete) == before


def test_a_folder_in_use_by_a_real_second_process_is_refused_until_it_ends(complete):
    holding = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    command = [sys.executable, "-c", f"{holding}; sys.stdin.read()", str(complete / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        with pytest.raises(RunError) as caught:
            start(complete, EVALUATIONS["cascade"], model=Untouchable())
        one_sentence(caught.value, "in use by another process")
        other.communicate()
    assert start(complete, EVALUATIONS["cascade"], model=Untouchable())["n"] == COUNT


# Records that are not what they should be ---------------------------------------------------------------------


@pytest.fixture
def spoilt(finished, tmp_path) -> Callable[[Callable[[list[bytes]], list[bytes]]], Path]:
    """An evaluation without its summary, whose lines of records were changed."""

    def of(change: Callable[[list[bytes]], list[bytes]]) -> Path:
        folder = tmp_path / "spoilt"
        cut_after(folder, finished("one by one"), 0)
        lines = (finished("one by one") / "records.jsonl").read_bytes().splitlines()
        (folder / "records.jsonl").write_bytes(b"".join(line + b"\n" for line in change(lines)))
        return folder

    return of


def changed(number: int, **changes: Any) -> Callable[[list[bytes]], list[bytes]]:
    """One record with other values; `...` takes a value away."""

    def change(lines: list[bytes]) -> list[bytes]:
        record = json.loads(lines[number]) | changes
        lines[number] = json.dumps({k: v for k, v in record.items() if v is not ...}).encode()
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
    assert contents(folder) == before | {"environment.jsonl": contents(folder)["environment.jsonl"]}


@pytest.mark.parametrize(
    "change",
    [
        {"attack": "deepfool"}, {"attack": ...}, {"attack": ["pgd"]}, {"norm": "l1"}, {"norm": None},
        {"radius": 0.5}, {"radius": "0.05"}, {"radius": {}}, {"broken": ...}, {"sample": ...}, {"sample": [0]},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_of_another_evaluation_is_refused(spoilt, change):
    folder = spoilt(changed(3, **change))
    with pytest.raises(RunError) as caught:
        start(folder, EVALUATIONS["one by one"])
    one_sentence(caught.value, folder / "records.jsonl", "does not belong to this evaluation")


WRONG = [
    {"sample": "0"}, {"sample": None}, {"sample": 0.5}, {"sample": -1}, {"sample": COUNT}, {"sample": 10**30},
    {"broken": "false"}, {"broken": None}, {"broken": 2}, {"broken": []},
    {"label": ...}, {"label": "a"}, {"label": None}, {"label": [0]},
    {"before": ...}, {"before": "a"}, {"before": None},
    {"closest": ...}, {"closest": "near"}, {"closest": float("nan")}, {"closest": [0.1]},
    {"warnings": 5}, {"warnings": [[1]]},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_record_with_a_value_of_a_wrong_kind_is_refused_or_made_again(spoilt, finished, change):
    """The last record of an image that stands at both radii: what it says is not said by another one."""
    records = runs.read_lines(finished("one by one") / "records.jsonl")
    standing = max(i for i, r in enumerate(records) if r["radius"] == SMALL.radius and not r["broken"])
    folder = spoilt(changed(standing, **change))
    try:
        start(folder, EVALUATIONS["one by one"])
    except RunError as error:
        one_sentence(error, folder)
    else:
        assert numbers(folder) == numbers(finished("one by one"))


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
    standing = next(i for i, line in enumerate(lines) if b'"broken": false' in line)
    folder = spoilt(lambda lines: [*lines, lines[standing].replace(b'"broken": false', b'"broken": true')])
    with pytest.raises(RunError) as caught:
        start(folder, EVALUATIONS["one by one"])
    one_sentence(caught.value, folder / "records.jsonl")


def test_records_whose_labels_are_not_those_of_the_data_are_refused(spoilt):
    label = int(data().labels[3])
    folder = spoilt(changed(3, label=(label + 1) % 4, broken=True))
    with pytest.raises(RunError) as caught:
        start(folder, EVALUATIONS["one by one"])
    one_sentence(caught.value, folder / "records.jsonl")


DIAGNOSED = replace(EVALUATIONS["one by one"], diagnose=True, save_images=False)


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosed") / "evaluation"
    start(folder, DIAGNOSED)
    return folder


def with_file(looked_at: Path, folder: Path, file: str, content: bytes) -> None:
    """A finished evaluation, or one that lacks only its summary, with another content of one file."""
    shutil.copytree(looked_at, folder)
    if file != "summary.json":
        (folder / "summary.json").unlink()
    (folder / file).write_bytes(content)


@pytest.mark.parametrize("file", ["evaluation.json", "flags.json", "summary.json", "environment.jsonl"])
@pytest.mark.parametrize("content", [b"[]\n", b"{\n", b"\xff\xfe\n"])
def test_a_file_of_the_folder_that_is_no_record_is_refused_by_name(looked_at, tmp_path, file, content):
    with_file(looked_at, tmp_path / "spoilt", file, content)
    with pytest.raises(RunError) as caught:
        start(tmp_path / "spoilt", DIAGNOSED)
    one_sentence(caught.value, tmp_path / "spoilt" / file)


@pytest.mark.parametrize("file", ["evaluation.json", "flags.json", "summary.json"])
@pytest.mark.parametrize("content", [b"{}\n", b'{"flags": 3, "clean": [], "attacks": null}\n'])
def test_a_file_of_the_folder_that_is_another_record_is_refused(looked_at, tmp_path, file, content):
    with_file(looked_at, tmp_path / "spoilt", file, content)
    with pytest.raises(RunError) as caught:
        start(tmp_path / "spoilt", DIAGNOSED)
    one_sentence(caught.value, tmp_path / "spoilt")


# The tests above bite ----------------------------------------------------------------------------------------


def test_a_batch_of_which_only_the_rest_is_attacked_is_noticed(tmp_path, monkeypatch, finished):
    """AutoAttack's random numbers belong to the batch and would be others; here it is the images that tell."""
    lines = (finished("one by one") / "records.jsonl").read_bytes().splitlines(keepends=True)
    cut_after(tmp_path / "evaluation", finished("one by one"), len(b"".join(lines[:6])))
    monkeypatch.setattr(run_module._State, "_drop_partial_batches", lambda state: None)
    monkeypatch.setattr(
        run_module._State,
        "missing",
        lambda state, key, first: sorted(state._wanted(key, first) - state.seen[key]),
    )
    expected = outcome(finished("one by one"))
    assert difference(tmp_path / "evaluation", "one by one", expected) is not None


def test_records_that_were_written_before_their_images_are_noticed(tmp_path, monkeypatch, finished):
    tensors = run_module.write_tensors

    def dying(path: Path, content: dict[str, Tensor]) -> None:
        if "00000004" in path.name:
            raise Death
        tensors(path, content)

    def early(state: Any, key: Any, first: int, ids: list[int], *rest: Any) -> None:
        """Records of the whole batch, then its images."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module, "write_tensors", lambda *_: None)
            real(state, key, first, ids, *rest)
        dying(state.place.folder / "images" / f"{key[0]}-{first:08d}", {})

    real = run_module._State.add
    with monkeypatch.context() as patch:
        patch.setattr(run_module._State, "add", early)
        with pytest.raises(Death):
            start(tmp_path / "evaluation", EVALUATIONS["one by one"])
    expected = outcome(finished("one by one"))
    assert "images/" in str(difference(tmp_path / "evaluation", "one by one", expected))
