"""Run directories: written whole or not at all, read back exactly or refused with one sentence."""

import copy
import json
import math
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from specguard.data import Augmentation, Data, Dataset, digits
from specguard.errors import CheckpointError, RunError, SpecGuardError
from specguard.geometry import Ball
from specguard.models import from_run, untrained
from specguard.nn import ViT, fingerprint, preset
from specguard.penalties import MSVP
from specguard.records import base, files, io, store
from specguard.train import (
    AWP,
    SAM,
    SGD,
    CrossEntropy,
    OneCycle,
    PGDTraining,
    Training,
    Validation,
    train,
)

CPU = torch.device("cpu")


class Death(BaseException):
    """Stands for SIGKILL: no handler of the package catches it."""


def dying(monkeypatch, at: int, error: BaseException) -> None:
    """Let the `at`-th rename, flush or removal that follows raise instead of taking place, a removal half-way."""
    done = 0

    def wrapped(real):
        def call(*arguments, **options):
            nonlocal done
            done += 1
            if done == at:
                if real is removed:
                    next(Path(arguments[0]).glob("*"), Path("nothing")).unlink(missing_ok=True)
                raise error
            return real(*arguments, **options)

        return call

    removed = shutil.rmtree
    for module, name in ((os, "replace"), (os, "rename"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, wrapped(getattr(module, name)))


def one_sentence(error: BaseException, *named: object) -> None:
    """What every error of the package promises."""
    assert isinstance(error, SpecGuardError)
    assert "\n" not in str(error)
    for name in named:
        assert str(name) in str(error)


# Atomic files ------------------------------------------------------------------------------------------------

WRITERS = {
    "write_file": (files.write_file, b"old", b"new"),
    "write_json": (io.write_json, {"a": 1}, {"a": 2}),
    "rewrite_lines": (io.rewrite_records, [{"a": 1}], [{"a": 2}, {"a": 3}]),
    "write_tensors": (store.write_tensors, {"a": torch.zeros(3)}, {"a": torch.ones(5)}),
}


@pytest.mark.parametrize("error", [Death(), OSError(28, "No space left on device")], ids=["killed", "disk full"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_that_fails_anywhere_leaves_the_old_content_or_the_new_and_can_be_repeated(
    tmp_path, monkeypatch, writer, error
):
    write, old, new = WRITERS[writer]
    path, other = tmp_path / "file", tmp_path / "other"
    write(other, new)
    expected = other.read_bytes()
    write(path, old)
    before = path.read_bytes()
    seen = []
    for at in range(1, 10):
        write(path, old)
        with monkeypatch.context() as patch:
            dying(patch, at, error)
            try:
                write(path, new)
            except (Death, RunError) as caught:
                if isinstance(caught, RunError):
                    one_sentence(caught, path, "No space left on device")
            else:
                break
        seen.append(path.read_bytes())
        write(path, new)
        assert path.read_bytes() == expected
    # Before the flush and before the rename: old. After the rename, before its flush: new.
    assert seen == [before, before, expected]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_record_with_a_number_that_is_not_finite_is_never_written(tmp_path, number):
    path = tmp_path / "record"
    for write, record in (
        (io.write_json, {"loss": number}),
        (io.append_records, [{"loss": number}]),
        (io.rewrite_records, [{"loss": 1.0}, {"loss": number}]),
    ):
        path.write_bytes(b'{"loss": 0.5}\n')
        with pytest.raises(ValueError, match="JSON"):
            write(path, record)
        assert path.read_bytes() == b'{"loss": 0.5}\n'


def test_json_comes_back_as_it_was_written(tmp_path):
    record = {"text": "σ \n \u2028", "float": 0.1 + 0.2, "none": None, "nested": [{"a": True}], "big": 2**70}
    io.write_json(tmp_path / "a.json", record)
    assert io.read_json(tmp_path / "a.json") == record


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a": 1', b"[1, 2]", b"null", b"\xff\xfe\x00", b"[" * 200_000, b'{"a": 1}{"b": 2}'],
    ids=["empty", "open", "cut", "list", "null", "not text", "deep", "two"],
)
def test_a_file_that_holds_no_json_object_is_refused_by_name(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(RunError) as caught:
        io.read_json(path)
    one_sentence(caught.value, path)


def test_a_missing_file_and_a_folder_in_place_of_a_file_are_refused_by_name(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        for read in (io.read_json, store.read_tensors):
            with pytest.raises(RunError) as caught:
                read(path)
            one_sentence(caught.value, path)


# Lines -------------------------------------------------------------------------------------------------------


def test_a_file_of_lines_cut_at_any_byte_yields_its_complete_records(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"epoch": 1, "loss": 0.25}, {"epoch": 2, "text": "ü\n"}, {"epoch": 3}]
    for record in records:
        io.append_records(path, [record])
    content = path.read_bytes()
    assert content.count(b"\n") == len(records)
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        assert io.read_lines(path) == records[: content[:length].count(b"\n")]


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"7", b"\xff\xfe", b'{"a": 1}{"a": 2}', b'{"a": 1}\r{"a": 2}'])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_broken_line_is_refused_by_its_number_wherever_it_is(tmp_path, line, place):
    path = tmp_path / "a.jsonl"
    lines = [b'{"n": 1}', b'{"n": 2}']
    lines.insert(place, line)
    path.write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(RunError) as caught:
        io.read_lines(path)
    one_sentence(caught.value, path, f"line {place + 1}")


def test_lines_of_a_missing_file_are_none_and_a_folder_is_refused(tmp_path):
    assert io.read_lines(tmp_path / "missing") == []
    with pytest.raises(RunError) as caught:
        io.read_lines(tmp_path)
    one_sentence(caught.value, tmp_path)


def test_rewritten_lines_replace_the_file_as_a_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    for records in ([{"a": 1}, {"a": 2}], [{"b": 3}], []):
        io.rewrite_records(path, records)
        assert io.read_lines(path) == records
        assert path.read_bytes().count(b"\n") == len(records)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


# Tensors -----------------------------------------------------------------------------------------------------

TENSORS = {
    "float32": torch.tensor([[1.5, -0.0, math.inf], [math.nan, 1e-45, 3e38]]),
    "float64": torch.tensor([1 / 3, math.pi], dtype=torch.float64),
    "bfloat16": torch.tensor([1 / 3, -2.0, 1e-3], dtype=torch.bfloat16),
    "int64": torch.tensor([[-(2**63), 2**63 - 1]]),
    "uint8": torch.arange(256, dtype=torch.uint8),
    "0-dim": torch.tensor(7.25),
    "0-dim int64": torch.tensor(2**40),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "a slice": torch.arange(10.0)[3:7],
    "a parameter": nn.Parameter(torch.ones(2)),
}


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_come_back_bit_for_bit(tmp_path, kind):
    store.write_tensors(tmp_path / "a", {"name/with.dots": TENSORS[kind], "other": torch.ones(1)})
    back = store.read_tensors(tmp_path / "a")
    assert set(back) == {"name/with.dots", "other"}
    assert bits(back["name/with.dots"]) == bits(TENSORS[kind])


def safetensors_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], end: int) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


class Bomb:
    """Whoever unpickles it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


HOSTILE = {
    "empty": b"",
    "zeros": bytes(64),
    "a header longer than the file": struct.pack("<Q", 100) + b"{}",
    "a header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header of 2**64 - 1 bytes": struct.pack("<Q", 2**64 - 1) + b"{}",
    "2**40 numbers without data": safetensors_file(entry("F32", [2**40], 2**42)),
    "2**62 numbers": safetensors_file(entry("F32", [2**62], 0)),
    "an axis of 2**63 beside an axis of 0": safetensors_file(entry("F32", [0, 2**63], 0)),
    "an axis of 2**64 - 1": safetensors_file(entry("F32", [0, 2**64 - 1], 0)),
    "a negative axis": safetensors_file(entry("F32", [-1], 4), bytes(4)),
    "offsets beyond the end": safetensors_file(entry("F32", [2], 8), bytes(4)),
    "bytes that belong to nothing": safetensors_file(entry("F32", [1], 4), bytes(8)),
    "an unknown type": safetensors_file(entry("F7", [1], 4), bytes(4)),
    "an unknown type of two lines": safetensors_file(entry("F\n7", [1], 4), bytes(4)),
    "a type torch lacks": safetensors_file(entry("F4", [8], 4), bytes(4)),
    "a list": safetensors_file([]),
    "no entry": safetensors_file({"a": None}),
    "not JSON": safetensors_file(b"{" * 50),
    "deep": safetensors_file(b"[" * 100_000),
    "not text": safetensors_file(b"\xff" * 20),
}


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        store.read_tensors(path)
    one_sentence(caught.value, path)
    return caught.value


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_safetensors_file_is_refused_with_one_sentence(tmp_path, kind):
    path = tmp_path / "a.safetensors"
    path.write_bytes(HOSTILE[kind])
    refusal(path)


def test_a_safetensors_file_cut_at_any_byte_or_lengthened_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    store.write_tensors(path, {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refusal(path)
    path.write_bytes(content + b"\0")
    refusal(path)


def test_random_bytes_are_refused(tmp_path):
    chance = random.Random(5)
    for length in (1, 7, 8, 9, 64, 1000, 10_000):
        path = tmp_path / f"{length}.safetensors"
        path.write_bytes(chance.randbytes(length))
        refusal(path)


def test_a_changed_byte_is_refused_or_read_but_never_anything_else(tmp_path):
    path = tmp_path / "a.safetensors"
    store.write_tensors(path, {"w": torch.arange(4.0), "n": torch.tensor(3)})
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        for mask in (0x01, 0x10, 0x80, 0xFF):
            path.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
            try:
                assert isinstance(store.read_tensors(path), dict)
            except CheckpointError as error:
                one_sentence(error, path)
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("save", ["torch.save", "pickle"])
def test_a_pickle_under_the_name_of_a_safetensors_file_is_refused_and_not_run(tmp_path, save):
    path, trace = tmp_path / "a.safetensors", tmp_path / "trace"
    if save == "pickle":
        path.write_bytes(pickle.dumps({"w": Bomb(trace)}))
    else:
        torch.save({"w": torch.ones(2), "bomb": Bomb(trace)}, path)
    refusal(path)
    assert not trace.exists()


# Checkpoints -------------------------------------------------------------------------------------------------


def test_only_the_newest_checkpoint_stays_and_it_comes_back_exactly(tmp_path):
    assert store.checkpoint_steps(tmp_path) == []
    for step in (3, 7, 12):
        store.write_checkpoint(tmp_path, step, {"w": torch.full((2,), float(step))}, {"step": step})
        assert store.checkpoint_steps(tmp_path) == [step]
    tensors, state = store.read_checkpoint(tmp_path, 12)
    assert (bits(tensors["w"]), state) == (bits(torch.full((2,), 12.0)), {"step": 12})


def test_a_checkpoint_that_fails_anywhere_leaves_the_old_one_or_the_new_one_complete(tmp_path, monkeypatch):
    newest = []
    for at in range(1, 30):
        run = tmp_path / str(at)
        store.write_checkpoint(run, 1, {"w": torch.full((2,), 1.0)}, {"step": 1})
        with monkeypatch.context() as patch:
            dying(patch, at, Death())
            try:
                store.write_checkpoint(run, 2, {"w": torch.full((2,), 2.0)}, {"step": 2})
            except Death:
                pass
            else:
                break
        for step in store.checkpoint_steps(run):
            tensors, state = store.read_checkpoint(run, step)
            assert (tensors["w"].tolist(), state) == ([float(step)] * 2, {"step": step})
        newest.append(step)
        store.write_checkpoint(run, 3, {"w": torch.full((2,), 3.0)}, {"step": 3})
        assert store.checkpoint_steps(run) == [3]
    assert newest == sorted(newest)
    assert set(newest) == {1, 2}


def test_only_folders_named_by_a_step_count_as_checkpoints(tmp_path):
    store.write_checkpoint(tmp_path, 5, {"w": torch.ones(1)}, {"step": 5})
    for name in (".draft", "notes", "5.old", "²"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert store.checkpoint_steps(tmp_path) == [5]


# The lock ----------------------------------------------------------------------------------------------------


def test_a_run_directory_in_use_is_refused_and_free_again_afterwards(tmp_path):
    run = tmp_path / "new" / "run"
    with files.locked(run), pytest.raises(RunError) as caught, files.locked(run):
        pass
    one_sentence(caught.value, run, "in use")
    with pytest.raises(Death), files.locked(run):
        raise Death
    with files.locked(run):
        pass


def test_a_run_directory_is_held_by_another_process_only_while_that_lives(tmp_path):
    hold = (
        "import fcntl, sys, time; handle = open(sys.argv[1], 'w'); fcntl.flock(handle, fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, tmp_path / ".lock"], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunError, match="in use by another process"), files.locked(tmp_path):
            pass
        other.kill()
    with files.locked(tmp_path):
        pass


# Settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    names: tuple[str, ...] = ("a", "b")


@dataclass(frozen=True)
class Outer:
    inner: Inner | None = Inner()
    flag: bool = True


def test_settings_are_described_by_type_and_fields():
    inner = {"type": "Inner", "rate": 0.1, "names": ["a", "b"]}
    assert store.described(Outer()) == {"type": "Outer", "inner": inner, "flag": True}
    assert store.described((Inner(), None, 3)) == [inner, None, 3]


@pytest.mark.parametrize("value", [object(), {1: 2}, Inner, torch.ones(1), {1}])
def test_what_is_no_setting_is_refused_by_its_kind(value):
    with pytest.raises(RunError) as caught:
        store.described((Inner(), value))
    one_sentence(caught.value, type(value).__name__)


OTHER = Training(
    epochs=21,
    batch=127,
    accumulate=2,
    optimizer=SGD(),
    schedule=OneCycle(),
    sam=SAM(),
    augmentation=Augmentation(flip=True),
    objective=CrossEntropy(0.1),
    penalties=(MSVP(),),
    ema=0.99,
    validation=Validation(9, Ball("l2", 0.5)),
    clip=None,
    precision="bfloat16",
    compile="default",
    checkpoint_steps=7,
    seed=1,
)


ADVERSARIAL = Training(objective=PGDTraining(Ball("linf", 0.1)))  # which AWP needs


@pytest.mark.parametrize("name", [f.name for f in fields(Training)])
def test_every_training_setting_is_part_of_the_description_and_named_when_it_differs(name):
    before = ADVERSARIAL if name == "awp" else Training()
    after = AWP() if name == "awp" else getattr(OTHER, name)
    old, new = (
        json.loads(json.dumps(store.described(each))) for each in (before, replace(before, **{name: after}))
    )
    assert base.difference(old, old) is None
    found = base.difference({"training": old}, {"training": new})
    assert found is not None
    assert found.startswith(f"training.{name}")


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, "a.c: 2 before, 3 now"),
        ({"a": 1}, {}, "a: 1 before, null now"),
        ({}, {"a": [1]}, "a: null before, [1] now"),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, "a: 1 before, 2 now"),
        ({"a": {"b": 1}}, {"a": None}, 'a: {"b": 1} before, null now'),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}, None),
        ({}, {}, None),
    ],
)
def test_the_first_difference_of_settings_is_named_with_both_values(old, new, found):
    assert base.difference(old, new) == found


# Seeds -------------------------------------------------------------------------------------------------------


def test_derived_seeds_never_change():
    assert store.derived_seed(0, "weights") == 133441691874178746
    assert store.derived_seed(7, "augment", 123) == 2986823514240868165


def test_derived_seeds_of_different_purposes_differ_and_fit_a_generator():
    purposes = [("weights",), *(("order", e) for e in range(50)), *(("penalty", i) for i in range(3))]
    purposes += [(kind, step) for kind in ("augment", "objective 0", "objective 1") for step in range(500)]
    seeds = [store.derived_seed(seed, *purpose) for seed in (0, 1, -1, 11) for purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert max(seeds) < 2**63
    assert torch.Generator().manual_seed(max(seeds)).initial_seed() == max(seeds)


# A full disk -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


TOO_LARGE = {
    "write_file": lambda run: files.write_file(run / "record", bytes(100_000)),
    "append_lines": lambda run: io.append_records(run / "record", [{"text": "x" * 100_000}]),
    "write_checkpoint": lambda run: store.write_checkpoint(run, 2, {"w": torch.ones(100_000)}, {"step": 2}),
}


@pytest.mark.parametrize("writer", TOO_LARGE)
def test_a_full_disk_is_one_sentence_and_what_was_written_stays(small_disk, writer):
    path = small_disk / "record"
    io.append_records(path, [{"epoch": 1}])
    before = path.read_bytes()
    store.write_checkpoint(small_disk, 1, {"w": torch.ones(9)}, {"step": 1})
    with pytest.raises(RunError) as caught:
        TOO_LARGE[writer](small_disk)
    one_sentence(
        caught.value,
        small_disk / ("checkpoints" if writer == "write_checkpoint" else "record"),
        "No space left on device",
    )
    assert path.read_bytes().startswith(before)
    assert io.read_lines(path) == [{"epoch": 1}]
    assert store.checkpoint_steps(small_disk) == [1]
    assert bits(store.read_checkpoint(small_disk, 1)[0]["w"]) == bits(torch.ones(9))


# The model a run leaves behind -------------------------------------------------------------------------------


def small_data() -> Data:
    full = digits()
    train_split = Dataset(full.train.images[:96], full.train.labels[:96])
    return Data("digits", train_split, Dataset(full.test.images[:40], full.test.labels[:40]), full.classes)


def trained(run: Path, **changes: object) -> ViT:
    model = ViT(preset("tiny", dim=8, depth=1, heads=2), torch.Generator().manual_seed(3))
    train(model, small_data(), run, Training(epochs=1, batch=32, **changes), device=CPU)
    return model.eval()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, ViT]:
    run = tmp_path_factory.mktemp("finished") / "run"
    return run, trained(run)


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of a finished run that a test may spoil."""
    return shutil.copytree(finished[0], tmp_path / "copy")


def test_the_model_of_a_run_has_exactly_the_logits_of_the_trained_one(finished):
    run, model = finished
    images, _ = small_data().test.batch(slice(None))
    loaded = from_run(run)
    assert not any(layer.training for layer in loaded.modules())
    assert torch.equal(loaded(images), model(images))


def test_the_model_of_a_run_with_averaging_is_the_average(tmp_path):
    raw, images = trained(tmp_path / "run", ema=0.9), small_data().test.batch(slice(None))[0]
    loaded = from_run(tmp_path / "run")
    assert not torch.equal(loaded(images), raw(images))
    tensors, _ = store.read_checkpoint(tmp_path / "run", 3)
    prefix = "average/module."
    average = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    raw.load_state_dict(average)
    assert torch.equal(loaded(images), raw(images))


def spoilt(run: Path) -> SpecGuardError:
    with pytest.raises(SpecGuardError) as caught:
        from_run(run)
    one_sentence(caught.value)
    return caught.value


@pytest.mark.parametrize("file", ["model.json", "model.safetensors"])
def test_a_run_without_one_of_the_model_files_is_refused_by_name(copied, file):
    (copied / file).unlink()
    assert str(copied / file) in str(spoilt(copied))


@pytest.mark.parametrize("change", [1e-7, 1.0, math.nan])
def test_weights_that_were_changed_are_refused_by_their_fingerprint(copied, change):
    tensors = store.read_tensors(copied / "model.safetensors")
    tensors["head.bias"][4] += change
    store.write_tensors(copied / "model.safetensors", tensors)
    assert "fingerprint" in str(spoilt(copied))


@pytest.mark.parametrize(
    "change", [{"dim": 16}, {"depth": 2}, {"pool": "mean"}, {"classes": 11}, {"qkv_bias": False}, {"patch": 4}]
)
def test_weights_of_another_architecture_are_refused_by_the_name_of_a_weight(copied, change):
    record = io.read_json(copied / "model.json")
    io.write_json(copied / "model.json", {**record, "config": {**record["config"], **change}})
    assert "another architecture" in str(spoilt(copied))


@pytest.mark.parametrize(
    "change", [{"heads": 1}, {"activation": "relu"}, {"residual_scale": 0.5}, {"mean": [0.5]}, {"norm_eps": 0.1}]
)
def test_a_config_changed_where_the_weights_still_fit_is_refused(copied, change):
    record = io.read_json(copied / "model.json")
    io.write_json(copied / "model.json", {**record, "config": {**record["config"], **change}})
    spoilt(copied)


@pytest.mark.parametrize(
    "change",
    [
        {"dim": "8"}, {"dim": 8.0}, {"dim": None}, {"dim": [8]}, {"depth": True}, {"depth": -1}, {"heads": 3},
        {"norm": 5}, {"norm": "nonorm"}, {"norm": ["layernorm"]}, {"mean": "abc"}, {"mean": [0.1, 0.2]},
        {"mean": ["x"]}, {"std": [0.0]}, {"std": []}, {"layer_scale": "x"}, {"unknown": 1}, {"patch": 3},
        {"mlp_ratio": 0.0}, {"mlp_ratio": 1e308}, {"mean": [2**70]}, {"dim": 2**40}, {"classes": 2**62},
        {"image": 2**70},
    ],
    ids=str,
)  # fmt: skip
def test_a_hostile_model_config_is_refused_with_one_sentence(copied, change):
    record = io.read_json(copied / "model.json")
    config = {**record["config"], **change}
    (copied / "model.json").write_text(json.dumps({**record, "config": config}))
    spoilt(copied)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b'{"config": null}', b'{"config": []}', b'{"config": "tiny"}'],
)
def test_a_model_record_that_is_no_record_is_refused_with_one_sentence(copied, content):
    (copied / "model.json").write_bytes(content)
    spoilt(copied)


@pytest.mark.parametrize("value", [None, 5, "", "0" * 64, ["x"]])
def test_a_model_record_with_another_fingerprint_is_refused(copied, value):
    record = io.read_json(copied / "model.json")
    io.write_json(copied / "model.json", {**record, "fingerprint": value})
    assert "fingerprint" in str(spoilt(copied))


# The model before training -----------------------------------------------------------------------------------


def begun(run: Path, seed: int = 5, **changes: object) -> ViT:
    """Train for an epoch as the command does, from the weights of the run's own seed; the model before that."""
    generator = torch.Generator().manual_seed(store.derived_seed(seed, "weights"))
    model = ViT(preset("tiny", dim=8, depth=1, heads=2), generator)
    before = copy.deepcopy(model)
    train(model, small_data(), run, Training(epochs=1, batch=32, seed=seed, **changes), device=CPU)
    return before


@pytest.fixture(scope="module")
def seeded_run(tmp_path_factory) -> tuple[Path, ViT]:
    run = tmp_path_factory.mktemp("seeded") / "run"
    return run, begun(run)


@pytest.fixture
def damaged(seeded_run, tmp_path) -> Path:
    return shutil.copytree(seeded_run[0], tmp_path / "damaged")


def test_the_untrained_model_of_a_run_has_the_very_weights_it_began_with(seeded_run):
    run, before = seeded_run
    made = untrained(run)
    assert made is not None
    assert made.config == before.config
    assert not any(layer.training for layer in made.modules())
    weights = made.state_dict()
    assert weights.keys() == before.state_dict().keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in before.state_dict().items())
    assert fingerprint(made) != fingerprint(from_run(run))


def test_a_run_that_began_with_other_weights_has_no_untrained_model(finished):
    assert untrained(finished[0]) is None


@pytest.mark.parametrize(
    "change",
    [{"initial_weights": "0" * 64}, {"initial_weights": ""}, {"training": {"seed": 6}}, {"training": {"seed": -1}}],
    ids=str,
)
def test_a_run_whose_record_says_otherwise_has_no_untrained_model(damaged, change):
    io.write_json(damaged / "run.json", io.read_json(damaged / "run.json") | change)
    assert untrained(damaged) is None


DAMAGED = [
    {"model": None}, {"model": "tiny"}, {"model": []}, {"training": None}, {"training": {}}, {"training": []},
    {"training": {"seed": "5"}}, {"training": {"seed": 5.0}}, {"training": {"seed": None}},
    {"initial_weights": None}, {"initial_weights": 5}, {"initial_weights": ["x"]},
]  # fmt: skip


@pytest.mark.parametrize("change", DAMAGED, ids=str)
def test_a_damaged_record_of_a_run_is_refused_with_one_sentence(damaged, change):
    io.write_json(damaged / "run.json", io.read_json(damaged / "run.json") | change)
    with pytest.raises(RunError) as caught:
        untrained(damaged)
    one_sentence(caught.value, damaged / "run.json")


@pytest.mark.parametrize("key", ["model", "training", "initial_weights"])
def test_a_record_of_a_run_that_lacks_something_is_refused_with_one_sentence(damaged, key):
    record = io.read_json(damaged / "run.json")
    del record[key]
    io.write_json(damaged / "run.json", record)
    with pytest.raises(RunError) as caught:
        untrained(damaged)
    one_sentence(caught.value, damaged / "run.json")


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_record_of_a_run_is_refused_with_one_sentence(damaged, content):
    (damaged / "run.json").unlink()
    if content is not None:
        (damaged / "run.json").write_bytes(content)
    with pytest.raises(RunError) as caught:
        untrained(damaged)
    one_sentence(caught.value, damaged / "run.json")


@pytest.mark.parametrize("change", [{"dim": "8"}, {"unknown": 1}, {"heads": 3}, {"depth": 2**40}], ids=str)
def test_a_run_whose_record_holds_no_possible_model_is_refused_with_one_sentence(damaged, change):
    record = io.read_json(damaged / "run.json")
    io.write_json(damaged / "run.json", {**record, "model": {**record["model"], **change}})
    with pytest.raises(SpecGuardError) as caught:
        untrained(damaged)
    one_sentence(caught.value)


def test_a_config_that_is_not_the_trained_models_is_refused_before_it_takes_memory(damaged, monkeypatch):
    """A stranger's record may ask for a model of any size; the weights beside it say what is meant."""
    record = io.read_json(damaged / "run.json")
    io.write_json(damaged / "run.json", {**record, "model": {**record["model"], "dim": 1024, "depth": 2}})
    made = []
    empty = torch.empty

    def counted(*sizes, **options):
        tensor = empty(*sizes, **options)
        made.append(0 if tensor.is_meta else tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    try:
        assert untrained(damaged) is None
    except SpecGuardError as error:
        one_sentence(error)
    assert sum(made) < 10**6
