"""Files and words from strangers: whatever they hold, one sentence or a value; nothing runs, nothing is left.

`SPECGUARD_FUZZ=10000 pytest tests/test_fuzz.py` tries so many cases of each kind; the default is for every day.
"""

import contextlib
import copy
import gzip
import io
import itertools
import json
import os
import pickle
import random
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

import helpers.studies
from helpers import companions, old_runs
from helpers.studies import CPU, STUDIES, model
from helpers.studies import data as images_of_studies
from specguard.cli import main
from specguard.cli.launch import chosen_shard
from specguard.data import image_folder, mnist, sst2, svhn
from specguard.data.unpickle import read_pickle
from specguard.diagnosis.plan import Plan
from specguard.errors import SpecGuardError
from specguard.models import ModelSource, from_run, model_of_file, read_weight_file, untrained
from specguard.models.checkpoint import load_weights
from specguard.models.source import source_from_json
from specguard.nn import ViT, ViTConfig, fingerprint
from specguard.records import io as records_io
from specguard.records import store
from specguard.records.attack import AttackRecord, Gallery
from specguard.records.base import About, plain
from specguard.records.baseline import LinearBaseline
from specguard.records.certificate import CertificateRecord, CertifyStudy
from specguard.records.check import CheckRecord, CheckSettings
from specguard.records.diagnosis import PLAN, Decision, DiagnosisHeader, DiagnosisSettings, Spent
from specguard.records.io import RecordFile, read_lines, read_record
from specguard.records.legacy import (
    OLD_STUDIES,
    old_records,
    read_certificates,
    read_study,
    read_summary,
    study_records,
)
from specguard.records.sensitivity import SensitivityRecord
from specguard.records.smoothing import SmoothRecord
from specguard.records.spectrum import SpectrumRecord
from specguard.records.study import Timing
from specguard.records.training import EpochRecord
from specguard.records.zoo import Card, zoo_folder
from specguard.studies import checked_study, run_check
from specguard.train.state import TrainingState

PLANNED = DiagnosisHeader(about=About(model="abc", data="def", dataset="noise", n=0), settings=DiagnosisSettings())
CASES = int(os.environ.get("SPECGUARD_FUZZ", "40"))

# What strangers write ------------------------------------------------------------------------------------------

ODD = [
    None, True, False, 0, -1, 1, 2**63, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "\x00", "\ud800",
    "../../etc/passwd", "<script>alert(1)</script>", "[bold]", "é" * 300, [], {}, [[]], [None], {"a": {}},
    [[[[[[]]]]]],
]  # fmt: skip
values = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value, with every key of it."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [found for key in keys for found in ((value, key), *places(value[key]))]


@st.composite
def changed_json(draw: Any, records: list[Any]) -> bytes:
    """Lines of JSON of which some numbers, texts, lists or keys are others, missing or there twice."""
    found = json.loads(json.dumps(records))
    for _ in range(draw(st.integers(0, 3))):
        spots = places(found)
        if not spots:
            break
        container, key = spots[draw(st.integers(0, len(spots) - 1))]
        match draw(st.sampled_from(["change", "change", "lose", "add", "again"])):
            case "lose":
                del container[key]
            case "add" if isinstance(container, dict):
                container[draw(st.text(max_size=5))] = copy.deepcopy(draw(values))
            case "again" if isinstance(container, list):
                container.append(copy.deepcopy(container[key]))
            case _:
                container[key] = copy.deepcopy(draw(values))
    return b"".join(json.dumps(record).encode() + b"\n" for record in found)


@st.composite
def changed_bytes(draw: Any, content: bytes) -> bytes:
    """Bytes of which some are others, cut out, there twice, or missing at the end."""
    found = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        at, length = draw(st.integers(0, len(found))), draw(st.integers(1, 9))
        match draw(st.sampled_from(["set", "set", "flip", "cut", "insert", "again", "end"])):
            case "set":
                found[at : at + length] = draw(st.binary(min_size=1, max_size=length))
            case "flip" if at < len(found):
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del found[at : at + length]
            case "insert":
                found[at:at] = draw(st.binary(max_size=length) | st.just(b"\xff" * 8) | st.just(b"[" * 5000))
            case "again":
                found[at:at] = found[at : at + 50 * length]
            case "end":
                del found[at:]
    return bytes(found)


# Who reads it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """A parser, given a folder with the file in it, and the files it may be given."""

    cases: Callable[[], st.SearchStrategy[bytes]]
    name: str
    parse: Callable[[Path], object]


RECORDS: dict[str, Any] = {
    "attack": AttackRecord,
    "spectrum": SpectrumRecord,
    "certify": CertificateRecord,
    "stop early": CertificateRecord,
    "smooth": SmoothRecord,
    "sensitivity": SensitivityRecord,
    "check": CheckRecord,
}
OLD_RECORDS: dict[str, Any] = {
    "attack": AttackRecord,
    "cascade of attacks": AttackRecord,
    "certify": CertificateRecord,
    "cascade": CertificateRecord,
    "spectrum": SpectrumRecord,
    "smooth": SmoothRecord,
    "check": CheckRecord,
}
CERTIFIED = "certify"
PICTURES = {
    "pictures": [
        {
            "sample": 3,
            "attack": "pgd",
            "norm": "l2",
            "radius": 0.1,
            "distance": 0.05,
            "label": "a",
            "predicted": "b",
            "confidence": [0.9, 0.6],
        }
    ]
}
BASELINE = Path(__file__).parent.parent / "recipes" / "digits_certified" / "linear.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return originals(tmp_path_factory.mktemp("originals"))


@cache
def originals(folder: Path) -> Path:
    """A file of every kind, as the package writes it."""
    os.environ["SPECGUARD_COMMIT"] = "test"
    known = About(model=fingerprint(model()), data="def", dataset="noise", n=11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(helpers.studies.ABOUT, "about", known)
        for name, study in STUDIES.items():
            study(folder / name)
    checked(folder, folder / "check")
    old(folder)
    companions.trained(folder, "everything")
    plan = Plan(folder, PLANNED)
    plan.add(Decision(stage="spectrum", run=True, reason="blocks", images=3, radii=(0.1,), seconds=0.5))
    plan.add(Spent(stage="spectrum", seconds=4.0))
    torch.save({"state_dict": model().state_dict()}, folder / "weights.pt")
    matrix = {"data": np.zeros((3, 3072), np.uint8), "labels": [0, 1, 2], "filenames": ["a.png"] * 3}
    (folder / "batch").write_bytes(pickle.dumps(matrix, protocol=2))
    savemat(folder / "x.mat", {"X": np.zeros((4, 4, 3, 2), np.uint8), "y": np.array([[1], [10]], np.uint8)})
    (folder / "idx-images").write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 3, *range(24)]))
    (folder / "idx-labels").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))
    (folder / "idx-images.gz").write_bytes(gzip.compress((folder / "idx-images").read_bytes(), mtime=0))
    torch.save(model().state_dict(), folder / "weights.pth", _use_new_zipfile_serialization=False)
    (folder / "train.tsv").write_bytes(b"sentence\tlabel\na good film\t1\nnot a good one\t0\n")
    for suffix in ("png", "jpg", "webp", "bmp", "ppm"):
        Image.new("RGB", (5, 4), (9, 99, 199)).save(folder / f"picture.{suffix}")
    return folder


def checked(source: Path, folder: Path, **options: bool) -> object:
    """The check of the certificates, at a place of its own."""
    return run_check(
        checked_study(source / CERTIFIED / "records.jsonl"),
        model(),
        images_of_studies(),
        folder,
        data="def",
        device=CPU,
        settings=CheckSettings(),
        **options,
    )


def old(folder: Path) -> None:
    """Studies as versions before 0.2 have left them."""
    for name in old_runs.STUDIES:
        old_runs.write(name, folder / "old" / name)


def lines(path: Path) -> st.SearchStrategy[bytes]:
    content = path.read_bytes()
    return changed_json([json.loads(line) for line in content.splitlines()]) | changed_bytes(content)


def document(path: Path) -> st.SearchStrategy[bytes]:
    return changed_json([json.loads(path.read_bytes())]) | changed_bytes(path.read_bytes())


def beside(name: str, folder: Path) -> Path:
    """A study of which one file is that of a stranger, which lies in `folder`, and the others are the originals."""
    place = shutil.copytree(ORIGINALS / name, folder / "study")
    for path in [path for path in folder.iterdir() if path.is_file()]:
        shutil.copy(path, place / path.name)
    return place


def continued(name: str, without: tuple[str, ...]) -> Callable[[Path], object]:
    """Who goes on with a study in which a stranger has changed a file: `without` these, so that it is read."""

    def parse(folder: Path) -> object:
        place = beside(name, folder)
        for file in without:
            (place / file).unlink()
        if name == "check":
            return checked(ORIGINALS, place, resume=True)
        with pytest.MonkeyPatch.context() as patch:
            known = About(model=fingerprint(model()), data="def", dataset="noise", n=11)
            patch.setitem(helpers.studies.ABOUT, "about", known)
            return STUDIES[name](place)

    return parse


def written_again(value: Any) -> object:
    """What has been read can be written, and read again."""
    again = [plain(each) for each in value] if isinstance(value, list) else plain(value)
    return json.dumps(again, allow_nan=False)


def of_a_study(name: str) -> dict[str, Reader]:
    """Every file of a study, as it is read on its own and by the study itself."""
    at = lambda file: ORIGINALS / name / file  # noqa: E731
    kind = RECORDS[name]
    return {
        f"study.json of {name}": Reader(
            lambda: document(at("study.json")),
            "study.json",
            lambda folder: written_again(read_study(folder)),
        ),
        f"summary.json of {name}": Reader(
            lambda: document(at("summary.json")),
            "summary.json",
            lambda folder: written_again(read_summary(folder / "summary.json")),
        ),
        f"records.jsonl of {name}": Reader(
            lambda: lines(at("records.jsonl")),
            "records.jsonl",
            lambda folder: written_again(RecordFile(folder / "records.jsonl", kind).read()),
        ),
        f"records.jsonl of {name}, continued": Reader(
            lambda: lines(at("records.jsonl")), "records.jsonl", continued(name, ("summary.json",))
        ),
        f"summary.json of {name}, continued": Reader(
            lambda: document(at("summary.json")), "summary.json", continued(name, ())
        ),
    }


def with_study_beside(name: str, parse: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: parse(beside(name, folder))


def certificates(folder: Path) -> object:
    study, records = read_certificates(folder / "records.jsonl")
    assert isinstance(study, CertifyStudy)
    return written_again(list(records))


def of_an_old_study(name: str) -> dict[str, Reader]:
    """Every file of a study of an earlier version."""
    at = lambda file: ORIGINALS / "old" / name / file  # noqa: E731
    readers = {
        f"{file} of an old {name}": Reader(
            lambda file=file: document(at(file)), file, lambda folder: written_again(read_study(folder))
        )
        for file in old_runs.STUDIES[name]
        if file in OLD_STUDIES
    }
    if "summary.json" in old_runs.STUDIES[name]:
        readers[f"summary.json of an old {name}"] = Reader(
            lambda: document(at("summary.json")),
            "summary.json",
            lambda folder: written_again(read_summary(folder / "summary.json")),
        )
    if "records.jsonl" in old_runs.STUDIES[name]:
        readers[f"records.jsonl of an old {name}"] = Reader(
            lambda: lines(at("records.jsonl")),
            "records.jsonl",
            lambda folder: written_again(list(old_records(folder / "records.jsonl", OLD_RECORDS[name]))),
        )
    return readers


def checkpoint(folder: Path) -> None:
    """Both files of a checkpoint; the one that is not there is the original."""
    training = companions.SETTINGS["everything"]
    state = TrainingState(companions.model(training), training, 3, torch.device("cpu"))
    place = folder / "checkpoints" / "00000006"
    place.mkdir(parents=True, exist_ok=True)
    (source,) = (ORIGINALS / "everything" / "checkpoints").iterdir()
    for name in ("tensors.safetensors", "state.json"):
        here = folder / name
        (place / name).write_bytes((here if here.exists() else source / name).read_bytes())
    state.load(folder, 6)


def finished_run(folder: Path) -> object:
    for name in ("model.json", "run.json", "model.safetensors"):
        if not (folder / name).exists():
            (folder / name).write_bytes((ORIGINALS / "everything" / name).read_bytes())
    untrained(folder)
    return from_run(folder)


def picture(folder: Path) -> object:
    for split in ("train", "val"):
        (folder / split / "a").mkdir(parents=True, exist_ok=True)
    (file,) = folder.glob("picture.*")
    (folder / "train" / "a" / file.name).write_bytes(file.read_bytes())
    (folder / "val" / "a" / file.name).write_bytes(file.read_bytes())
    return image_folder(folder, 4)


def mat(folder: Path) -> object:
    content = (folder / "x.mat").read_bytes()
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (folder / name).write_bytes(content)
    return svhn(folder, verify=False)


def idx(folder: Path) -> object:
    """The changed file in place of one of the four."""
    whole = {"images-idx3": ORIGINALS / "idx-images", "labels-idx1": ORIGINALS / "idx-labels"}
    (file,) = folder.glob("idx-*")
    kind = "images-idx3" if "images" in file.name else "labels-idx1"
    for part, each in itertools.product(("train", "t10k"), whole):
        if (part, each) != ("train", kind):
            (folder / f"{part}-{each}-ubyte").write_bytes(whole[each].read_bytes())
    (folder / f"train-{kind}-ubyte{file.suffix}").write_bytes(file.read_bytes())
    return mnist(folder, verify=False)


def sentences(folder: Path) -> object:
    (folder / "dev.tsv").write_bytes((folder / "train.tsv").read_bytes())
    return sst2(folder, 4)


@cache
def sample(folder: Path) -> Path:
    """A run with most kinds of studies, made once."""
    from helpers.sample_runs import sample_run

    return sample_run(folder / "reported", n=20)


def reported(place: str) -> Reader:
    """A report says what is wrong with a file of a run, and what is right; it never ends with an error."""

    def parse(folder: Path) -> object:
        from specguard.report import read_run

        (file,) = folder.iterdir()
        shutil.copytree(sample(ORIGINALS), folder / "run")
        shutil.move(file, folder / "run" / place)
        return read_run(folder / "run", "a")

    source = lambda: (lines if place.endswith(".jsonl") else document)(sample(ORIGINALS) / place)  # noqa: E731
    changed = lambda: changed_bytes((sample(ORIGINALS) / place).read_bytes())  # noqa: E731
    return Reader(changed if place.endswith(".safetensors") else source, Path(place).name, parse)


ORIGINALS = Path()  # set below, once the files are there
SIZES = {"image": 8, "patch": 4, "channels": 1, "dim": 4, "depth": 1, "heads": 1}
TENSORS = ViT(ViTConfig(**SIZES, mean=(0.3,), std=(1.0,))).state_dict()
EXPORTED = {
    "layout": "state_dict", "version": "1", "fingerprint": "c0", "classes": ["a"], "mean": [0.3], "std": [1.0],
    "config": {**SIZES, "mean": [0.3], "std": [1.0]},
}  # fmt: skip
SOURCE = ModelSource(
    "timm", "test_vit", 10, 1, 32, (0.3,), (0.4,), arguments={"depth": 1, "patch_size": [4, 4], "act_layer": "relu"}
).record()
READERS: dict[str, Reader] = {
    **{kind: reader for name in RECORDS for kind, reader in of_a_study(name).items()},
    **{kind: reader for name in old_runs.STUDIES for kind, reader in of_an_old_study(name).items()},
    "certificates": Reader(
        lambda: lines(ORIGINALS / CERTIFIED / "records.jsonl"),
        "records.jsonl",
        with_study_beside(CERTIFIED, certificates),
    ),
    "certificates that are checked": Reader(
        lambda: lines(ORIGINALS / CERTIFIED / "records.jsonl"),
        "records.jsonl",
        with_study_beside(CERTIFIED, lambda folder: checked(folder.parent, folder.parent / "checked")),
    ),
    "records of any version": Reader(
        lambda: lines(ORIGINALS / "attack" / "records.jsonl"),
        "records.jsonl",
        with_study_beside("attack", lambda folder: written_again(list(study_records(folder, AttackRecord)))),
    ),
    "timing.jsonl": Reader(
        lambda: lines(ORIGINALS / "attack" / "timing.jsonl"),
        "timing.jsonl",
        lambda folder: written_again(RecordFile(folder / "timing.jsonl", Timing).read()),
    ),
    "timing.jsonl, continued": Reader(
        lambda: lines(ORIGINALS / "attack" / "timing.jsonl"),
        "timing.jsonl",
        continued("attack", ("summary.json",)),
    ),
    "environment.jsonl, continued": Reader(
        lambda: lines(ORIGINALS / "attack" / "environment.jsonl"),
        "environment.jsonl",
        continued("attack", ("summary.json",)),
    ),
    "study.json, continued": Reader(
        lambda: document(ORIGINALS / "attack" / "study.json"), "study.json", continued("attack", ())
    ),
    "a card of the zoo": Reader(
        lambda: changed_json([json.loads((zoo_folder("digits-certified") / "card.json").read_text())]),
        "card.json",
        lambda folder: written_again(read_record(folder / "card.json", Card)),
    ),
    "the plan of a diagnosis": Reader(
        lambda: lines(ORIGINALS / PLAN),
        PLAN,
        lambda folder: written_again(Plan(folder, PLANNED).file.records),
    ),
    "a gallery": Reader(
        lambda: changed_json([PICTURES]),
        "pictures.json",
        lambda folder: written_again(read_record(folder / "pictures.json", Gallery)),
    ),
    "what a file of weights says about itself": Reader(
        lambda: changed_json([EXPORTED]).map(lambda note: store.tensor_bytes(TENSORS, note)),
        "w.safetensors",
        lambda folder: model_of_file(read_weight_file(folder / "w.safetensors")),
    ),
    "the source of a model with arguments": Reader(
        lambda: changed_json([SOURCE]),
        "source.json",
        lambda folder: source_from_json(records_io.read_json(folder / "source.json")).record(),
    ),
    "a linear baseline": Reader(
        lambda: document(BASELINE),
        "linear.json",
        lambda folder: written_again(read_record(folder / "linear.json", LinearBaseline)),
    ),
    "epochs": Reader(
        lambda: lines(ORIGINALS / "everything" / "metrics.jsonl"),
        "metrics.jsonl",
        lambda folder: RecordFile(folder / "metrics.jsonl", EpochRecord).read(),
    ),
    "lines": Reader(
        lambda: lines(ORIGINALS / "attack" / "records.jsonl"),
        "x.jsonl",
        lambda folder: read_lines(folder / "x.jsonl"),
    ),
    "result.json": Reader(
        lambda: document(ORIGINALS / "everything" / "result.json"),
        "result.json",
        lambda folder: read_summary(folder / "result.json"),
    ),
    "json": Reader(
        lambda: document(ORIGINALS / "everything" / "run.json") | st.binary(max_size=20),
        "x.json",
        lambda folder: records_io.write_json(folder / "y.json", records_io.read_json(folder / "x.json")),
    ),
    "state of a checkpoint": Reader(
        lambda: document(next((ORIGINALS / "everything" / "checkpoints").iterdir()) / "state.json"),
        "state.json",
        checkpoint,
    ),
    "tensors of a checkpoint": Reader(
        lambda: changed_bytes(
            next((ORIGINALS / "everything" / "checkpoints").iterdir()).joinpath("tensors.safetensors").read_bytes()
        ),
        "tensors.safetensors",
        checkpoint,
    ),
    "model.json": Reader(lambda: document(ORIGINALS / "everything" / "model.json"), "model.json", finished_run),
    "run.json": Reader(lambda: document(ORIGINALS / "everything" / "run.json"), "run.json", finished_run),
    "weights of torch": Reader(
        lambda: changed_bytes((ORIGINALS / "weights.pt").read_bytes()),
        "weights.pt",
        lambda folder: load_weights(folder / "weights.pt"),
    ),
    "weights of torch before 1.6": Reader(
        lambda: changed_bytes((ORIGINALS / "weights.pth").read_bytes()),
        "weights.pth",
        lambda folder: load_weights(folder / "weights.pth"),
    ),
    "sentences": Reader(lambda: changed_bytes((ORIGINALS / "train.tsv").read_bytes()), "train.tsv", sentences),
    **{
        f"{place} in a report": reported(place)
        for place in (
            "metrics.jsonl",
            "attacks/quick/gallery/pictures.json",
            "attacks/quick/gallery/images.safetensors",
            "certificates/proofs/records.jsonl",
            "spectrum/looked/records.jsonl",
        )
    },
    "weights": Reader(
        lambda: changed_bytes((ORIGINALS / "everything" / "model.safetensors").read_bytes()),
        "x.safetensors",
        lambda folder: load_weights(folder / "x.safetensors"),
    ),
    "a CIFAR pickle": Reader(
        lambda: changed_bytes((ORIGINALS / "batch").read_bytes()) | st.binary(max_size=60),
        "batch",
        lambda folder: read_pickle(folder / "batch", (folder / "batch").read_bytes()),
    ),
    **{
        f"MNIST, {name}": Reader(lambda name=name: changed_bytes((ORIGINALS / name).read_bytes()), name, idx)
        for name in ("idx-images", "idx-labels", "idx-images.gz")
    },
    "SVHN": Reader(lambda: changed_bytes((ORIGINALS / "x.mat").read_bytes()), "x.mat", mat),
    **{
        f"a {suffix}": Reader(
            lambda suffix=suffix: changed_bytes((ORIGINALS / f"picture.{suffix}").read_bytes()),
            f"picture.{suffix}",
            picture,
        )
        for suffix in ("png", "jpg", "webp", "bmp", "ppm")
    },
}


def outlived(reader: Reader, content: bytes, folder: Path) -> None:
    """The law: a value, or one sentence; and no file that was not asked for."""
    for old in sorted(folder.rglob("*"), reverse=True):
        old.unlink() if old.is_file() else old.rmdir()
    (folder / reader.name).write_bytes(content)
    around = set(folder.parent.iterdir())
    try:
        reader.parse(folder)
    except SpecGuardError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert str(error).encode(errors="surrogateescape")  # noqa: PT017
    assert set(folder.parent.iterdir()) == around


def tried(reader: Reader, folder: Path, cases: int = CASES, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    @settings(
        max_examples=cases, phases=phases, suppress_health_check=list(HealthCheck), database=None, deadline=None
    )
    @seed(int(os.environ.get("SPECGUARD_FUZZ_SEED", "0")))
    @given(reader.cases())
    def case(content: bytes) -> None:
        outlived(reader, content, folder)

    case()


@pytest.mark.filterwarnings("ignore")  # of the libraries, about files that are refused afterwards
@pytest.mark.parametrize("kind", READERS)
def test_a_file_from_a_stranger_is_a_value_or_one_sentence(tmp_path, made, monkeypatch, kind):
    monkeypatch.setattr(sys.modules[__name__], "ORIGINALS", made)
    (tmp_path / "here").mkdir()
    tried(READERS[kind], tmp_path / "here")


# The fuzzer bites ----------------------------------------------------------------------------------------------


def trusting(folder: Path) -> object:
    """As a parser is written in a hurry."""
    found = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return {record["sample"]: [row["verdict"] for row in record["radii"]] for record in found}


def half_trusting(folder: Path) -> object:
    """As one is written with some care: that bytes may be no text was forgotten."""
    for line in (folder / "records.jsonl").read_bytes().splitlines():
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            json.loads(line)
    return None


@pytest.mark.parametrize("planted", [trusting, half_trusting])
def test_a_planted_bug_of_a_parser_is_found(tmp_path, made, monkeypatch, planted):
    monkeypatch.setattr(sys.modules[__name__], "ORIGINALS", made)
    (tmp_path / "here").mkdir()
    reader = Reader(READERS["certificates"].cases, "records.jsonl", planted)
    with pytest.raises((Exception, ExceptionGroup)) as caught:
        tried(reader, tmp_path / "here", 1000, (Phase.generate,))  # that it is found, not how small it can be
    assert not isinstance(caught.value, SpecGuardError)


# The command line ----------------------------------------------------------------------------------------------

VERBS = (
    "train",
    "attack",
    "spectrum",
    "certify",
    "sensitivity",
    "check",
    "models",
    "--version",
    "xx",
)
WORDS = [
    "--radius", "--curve", "--norm", "--methods", "--shard", "--images", "--batch", "--seed", "--device", "--out",
    "--memory", "--data", "--data-root", "--set", "--epochs", "--lr", "--run", "--resume", "--model", "--weights",
    "--mean", "--std", "--layer", "--attack", "--suite", "--penalty", "--figure", "--blocks", "--classes",
    "8/255", "1/0", "nan", "1e999", "-1", "0", "3", "0/2", "2/2", "linf", "l2", "all", "local", "digits", "folder",
    "tiny", "dim=x", "norm=5", "=", "../..", "/dev/null", "/", "", "timm:x", "hf:", "torchvision:vit_b_16", "cpu",
    "--model-arg", "depth=9", "a=[1", "x=1,y=2", "w.safetensors", "os:getpid", "a b:c",
    "\x00", "é", "\udcff", "[bold]", "--", "-h", "$(touch x)", "; touch x",
]  # fmt: skip
words = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=6)


@pytest.mark.filterwarnings("ignore")
def test_words_from_a_stranger_are_an_exit_code_and_never_a_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_bytes(b"precious")
    nothing_trained: Any = lambda *_, **__: (_ for _ in ()).throw(SpecGuardError("would have been trained"))  # noqa: E731
    monkeypatch.setattr("specguard.cli.training.train", nothing_trained)

    @settings(max_examples=CASES, suppress_health_check=list(HealthCheck), database=None, deadline=None)
    @seed(0)
    @given(st.sampled_from(VERBS), words)
    def case(verb: str, arguments: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["specguard", verb, *arguments])
        said, complained = (
            io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")
        )
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(complained),
            pytest.raises(SystemExit) as end,
        ):
            main()
        assert end.value.code in (0, 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["precious"]

    case()


@given(
    st.sampled_from([*WORDS, "٣/٤", "1/2"]) | st.text(max_size=8), st.none() | st.sampled_from(["0", "1", "x", ""])
)
def test_a_shard_from_a_stranger_is_a_shard_or_one_sentence(text, rank):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.setenv(name, rank) if rank is not None else patch.delenv(name, raising=False)
        with contextlib.suppress(SpecGuardError):
            shard = chosen_shard(text)
            assert 0 <= shard.index < shard.count


# Payloads ------------------------------------------------------------------------------------------------------


class Payload:
    """What unpickling it would do."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def payloads(folder: Path, trace: Path) -> list[Path]:
    """The same payload in every kind of file that is read."""
    bomb = pickle.dumps({"data": Payload(trace), "labels": [1]})
    made = []
    for name in ("x.pt", "x.bin", "x.safetensors", "x.jsonl", "x.json", "x.mat", "x.png", "x.jpg", "batch"):
        (folder / name).write_bytes(bomb)
        made.append(folder / name)
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": Payload(trace)}, folder / "zipped.pt")
    with zipfile.ZipFile(folder / "own.pt", "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
        archive.writestr("archive/version", "3\n")
        archive.writestr("../../escaped", b"x")
    return [*made, folder / "zipped.pt", folder / "own.pt"]


@pytest.mark.filterwarnings("ignore")
def test_a_payload_is_never_run_whatever_file_it_is_in(tmp_path):
    (tmp_path / "files").mkdir()
    trace = tmp_path / "executed"
    for path in payloads(tmp_path / "files", trace):
        place = tmp_path / "place"
        for split in ("train", "val"):
            (place / split / "a").mkdir(parents=True, exist_ok=True)
            (place / split / "a" / "x.png").write_bytes(path.read_bytes())
        for name in ("train_32x32.mat", "test_32x32.mat"):
            (place / name).write_bytes(path.read_bytes())
        for read in (
            lambda path=path: load_weights(path),
            lambda path=path: store.read_tensors(path),
            lambda path=path: records_io.read_json(path),
            lambda path=path: read_pickle(path, path.read_bytes()),
            lambda place=place: svhn(place, verify=False),
            lambda place=place: image_folder(place, 4),
        ):
            with pytest.raises(SpecGuardError):
                read()
    assert not trace.exists()
    assert not (tmp_path.parent / "escaped").exists()
    torch.save({"x": Payload(trace)}, tmp_path / "real.pt")
    torch.load(tmp_path / "real.pt", weights_only=False)  # the payload is a real one
    assert trace.exists()


def png_bomb(width: int, height: int) -> bytes:
    """A PNG that says it is of this size, in a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    pixels = zlib.compress(bytes(10_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height"), [(50_000, 50_000), (2**31 - 1, 2**31 - 1), (10_000, 10_000), (3, 2**30)]
)
def test_a_picture_that_would_fill_the_memory_is_refused_by_name(tmp_path, width, height):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "bomb.png").write_bytes(png_bomb(width, height))
    with pytest.raises(SpecGuardError, match=r"bomb\.png"):
        image_folder(tmp_path, 4)


def test_a_text_chunk_that_would_fill_the_memory_is_refused_or_passed_over(tmp_path):
    content = png_bomb(5, 4)
    text = zlib.compress(bytes(200_000_000), 9)
    body = b"zTXt" + b"key\0\0" + text
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "bomb.png").write_bytes(content[:33] + chunk + content[33:])
    with contextlib.suppress(SpecGuardError):
        image_folder(tmp_path, 4)


NAMES = ("<script>alert(1)</script>", "..", "a' onload='x", "[red]b[/red]", "é\u202e", "-rf", "$(x)", "%s", "{0}")


def test_class_names_with_html_and_paths_are_names_and_nothing_else(tmp_path, specguard):
    """They come from folders that somebody else has named; a slash cannot be in them, dots alone are hidden."""
    random.seed(1)
    names = [name for name in NAMES if name != ".."]
    for split, number in (("train", 2), ("val", 1)):
        for label, name in enumerate([*names, "x"]):
            folder = tmp_path / "photos" / split / (name.replace("/", "\u2215"))
            folder.mkdir(parents=True)
            for i in range(number):
                Image.new("RGB", (8, 8), (9 * label, 9 * i, 0)).save(folder / f"{i}.png")
    run = tmp_path / "run"
    options = (
        "--set",
        "dim=8",
        "--set",
        "depth=1",
        "--set",
        "heads=2",
        "--epochs",
        1,
        "--batch",
        8,
        "--device",
        "cpu",
    )
    specguard("train", "--run", run, "--data", "folder", "--data-root", tmp_path / "photos", *options).succeeds()
    before = {path for path in tmp_path.rglob("*") if run not in path.parents}
    ended = specguard("attack", run, "--attack", "fgsm", "--images", 3, "--no-diagnose", "--device", "cpu")
    ended.succeeds()
    assert "<script>" not in ended.out
    assert {path for path in tmp_path.rglob("*") if run not in path.parents} == before
    assert json.loads((run / "model.json").read_text())["classes"] == sorted(
        [*(n.replace("/", "∕") for n in names), "x"]
    )
