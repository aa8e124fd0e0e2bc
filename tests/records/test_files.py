"""Files are opened in one place: regular ones of a stated size are read, and none is written through a link."""

import ast
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import specguard as package
from helpers import companions
from helpers.sample_runs import sample_run
from helpers.studies import STUDIES
from specguard.cli.source import Source
from specguard.data import cifar10, image_folder, mnist, sst2, svhn
from specguard.data.lazy_images import LazyImages
from specguard.errors import RunError, SpecGuardError
from specguard.models import from_run
from specguard.models.checkpoint import load_weights
from specguard.models.pretrained import huggingface_config, huggingface_statistics
from specguard.records import files, io, store
from specguard.records.ledger import Ledger
from specguard.records.shards import Shard, StudyFolder
from specguard.records.spectrum import SpectrumRecord
from specguard.report import read_run, write_report

SOURCE = Path(package.__file__).parent


def one_sentence(error: BaseException, *named: object) -> None:
    assert isinstance(error, SpecGuardError)
    assert "\n" not in str(error)
    for name in named:
        assert str(name) in str(error)


# One place --------------------------------------------------------------------------------------------------

# Calls that open, make or remove what is on a disk; by their last name, but for those that others share.
OPENING = {
    "open", "fdopen", "openpty", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "makedirs",
    "touch", "symlink", "symlink_to", "link", "hardlink_to", "mkfifo", "unlink", "rmdir", "rmtree", "removedirs",
    "truncate", "rename", "renames", "copyfile", "copytree", "copy2", "safe_open", "load_file", "save_file",
    "from_file", "fromfile", "tofile", "memmap", "loadtxt", "genfromtxt", "savetxt", "savez", "savez_compressed",
    "ZipFile", "TarFile", "mmap", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "mkdtemp", "mkstemp",
    "imread", "imsave", "loadmat", "savemat", "DictReader", "open_code", "FileIO",
}  # fmt: skip
SHARED = {"os.replace", "os.remove", "shutil.move",
          "torch.load", "torch.save", "np.load", "np.save", "numpy.load", "pickle.load", "json.load",
          "json.dump", "csv.reader", "csv.writer", "pickle.dump"}  # fmt: skip
ALLOWED = {
    "records/files.py": None,  # the one place
    "records/store.py": {
        "os.mkdir",
        "os.rename",
        "shutil.rmtree",
    },  # of checkpoints, below a folder that `folder_below` made
    "train/tensorboard.py": {"earlier.unlink"},  # event files below a folder that `folder_below` made
    "models/checkpoint.py": {"torch.load", "zipfile.ZipFile", "mmap.mmap"},  # of files that `open_file` has opened
    "data/lazy_images.py": {"Image.open"},  # likewise
    "report/html/page.py": {".read_text"},  # of the package's own templates
    "cli/console.py": {"os.open"},  # of /dev/null
    "diagnosis/probe.py": {"TemporaryDirectory"},  # of trials, where nobody else can write
    "diagnosis/work.py": {"TemporaryDirectory"},  # of studies that are not kept, likewise
}


def called(node: ast.Call) -> str:
    """`module.function`, `.method` of anything else, or a plain name."""
    match node.func:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name(owner), name):
            return f"{owner}.{name}"
        case ast.Attribute(_, name):
            return f".{name}"
    return ""


def opened_in(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        name = called(node) if isinstance(node, ast.Call) else ""
        if name in SHARED or name.rpartition(".")[2] in OPENING:
            yield name


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_but_one_opens_makes_or_removes_files(path):
    allowed = ALLOWED.get(str(path.relative_to(SOURCE)), set())
    if allowed is not None:
        assert set(opened_in(path.read_text())) - allowed == set()


def test_the_list_of_exceptions_has_none_that_is_not_needed():
    for name, allowed in ALLOWED.items():
        if allowed is not None:
            assert set(opened_in((SOURCE / name).read_text())) == allowed


@pytest.mark.parametrize(
    "text",
    ["open(p)", "p.open('rb')", "(a / b).read_text()", "x.read_bytes()", "Image.open(p)", "torch.load(p)",
     "with p.open() as f: pass", "json.load(f)", "os.open(p, 0)", "p.mkdir()", "np.load(p)", "io.open(p)"],
)  # fmt: skip
def test_a_planted_call_is_found(text):
    assert list(opened_in(text))


def test_pictures_are_opened_by_a_list_of_formats():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and called(node) == "Image.open":
                assert "formats" in [keyword.arg for keyword in node.keywords], path


# Readers that wait for nobody -------------------------------------------------------------------------------


@contextmanager
def no_hang(seconds: float = 20.0) -> Iterator[None]:
    """A reader that waits is a failure of the test, not its end."""

    def late(*_: object) -> None:
        raise AssertionError("the reader hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pictures(folder: Path) -> object:
    for split in ("train", "val"):
        (folder / split / "a").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / split / "a" / "0.png")
    os.rename(folder / "x", folder / "train" / "a" / "1.png")
    return image_folder(folder, 4)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "json": ("x.json", lambda folder: io.read_json(folder / "x.json")),
    "lines": ("x.jsonl", lambda folder: io.read_lines(folder / "x.jsonl")),
    "the hash of lines": ("x.jsonl", lambda folder: store.file_digest(folder / "x.jsonl")),
    "safetensors": ("x.safetensors", lambda folder: store.read_tensors(folder / "x.safetensors")),
    "weights": ("x.safetensors", lambda folder: load_weights(folder / "x.safetensors")),
    "weights of torch": ("x.pt", lambda folder: load_weights(folder / "x.pt")),
    "the model of a run": ("model.json", from_run),
    "a config of transformers": ("config.json", huggingface_config),
    "statistics of transformers": ("preprocessor_config.json", huggingface_statistics),
    "CIFAR": ("data_batch_1", lambda folder: cifar10(folder, verify=False)),
    "SVHN": ("train_32x32.mat", lambda folder: svhn(folder, verify=False)),
    "MNIST": ("train-images-idx3-ubyte", lambda folder: mnist(folder, verify=False)),
    "packed MNIST": ("train-images-idx3-ubyte.gz", lambda folder: mnist(folder, verify=False)),
    "SST-2": ("train.tsv", sst2),
    "a picture": ("x", pictures),
    "the hash of pictures": ("x.png", lambda folder: LazyImages((folder / "x.png",), 4).digest()),
    "a shard": (
        "shards/0-of-2/records.jsonl",
        lambda folder: Ledger(StudyFolder(folder), {0: 0}, 1, SpectrumRecord, lambda record: True).read(),
    ),
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    """A socket, whose name must be short."""
    command = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    subprocess.run([sys.executable, "-c", command, path.name], cwd=path.parent, check=True)


@pytest.mark.parametrize("made", [pipe, device, listening])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_by_name_and_not_waited_for(tmp_path, reader, made):
    name, read = READERS[reader]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    made(tmp_path / name)
    with no_hang(), pytest.raises(SpecGuardError) as caught:
        read(tmp_path)
    one_sentence(caught.value, "1.png" if reader == "a picture" else name, "cannot be read")


def gallery_of(run: Path) -> Path:
    return run / "attacks" / "quick" / "gallery"


REPORTED = [
    "result.json", "model.json", "metrics.jsonl", "attacks/quick/summary.json",
    "attacks/quick/gallery/pictures.json", "attacks/quick/gallery/images.safetensors",
    "certificates/proofs/records.jsonl", "certificates/proofs/environment.jsonl", "spectrum/looked/records.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("made", [pipe, device])
@pytest.mark.parametrize("name", REPORTED)
def test_a_report_names_what_is_no_file_and_waits_for_none(tmp_path, name, made):
    run = sample_run(tmp_path / "run", n=20)
    (run / name).unlink()
    made(run / name)
    with no_hang():
        problems = read_run(run, "a").problems
    place = name.removesuffix("/summary.json").removesuffix("/pictures.json").removesuffix("/images.safetensors")
    assert any(place in problem and "cannot be read" in problem for problem in problems), problems


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_does_not_follow_links_out_of_a_run(tmp_path, name):
    run = sample_run(tmp_path / "run", n=20)
    os.rename(run / name, tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    problems = read_run(run, "a").problems
    assert any("it is a link, which is not followed" in problem for problem in problems), problems


def test_a_report_does_not_follow_a_gallery_that_is_a_link(tmp_path):
    run = sample_run(tmp_path / "run", n=20)
    os.rename(gallery_of(run), tmp_path / "elsewhere")
    gallery_of(run).symlink_to(tmp_path / "elsewhere")
    found = read_run(run, "a")
    assert found.attacks[0].gallery is None
    assert any("gallery" in problem and "link" in problem for problem in found.problems)


# Readers that do not fill the memory ------------------------------------------------------------------------


@contextmanager
def little_memory(most: int = 200 * 2**20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def sparse(path: Path, size: int = 3 * 2**30) -> None:
    """A file of so many zeros, which take no room on the disk."""
    path.touch()
    os.truncate(path, size)


@pytest.mark.parametrize("name", [name for name in REPORTED if "images" not in name])
def test_a_report_says_that_a_file_is_too_large_and_does_not_read_it(tmp_path, name):
    run = sample_run(tmp_path / "run", n=20)
    sparse(run / name)
    with little_memory():
        problems = read_run(run, "a").problems
    place = name.removesuffix("/summary.json").removesuffix("/pictures.json")
    assert any(place in problem and "too many to be read" in problem for problem in problems), problems


@pytest.mark.parametrize(
    "reader", sorted(set(READERS) - {"safetensors", "weights", "weights of torch", "the hash of lines"})
)
def test_a_file_too_large_to_be_meant_is_refused_and_not_read(tmp_path, reader):
    name, read = READERS[reader]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    sparse(tmp_path / name)
    with little_memory(), pytest.raises(SpecGuardError) as caught:
        read(tmp_path)
    one_sentence(caught.value, "too many to be read")


def test_a_size_is_that_of_the_caller(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert files.read_file(tmp_path / "x", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        files.read_file(tmp_path / "x", 4)


def test_a_file_that_does_not_say_its_size_is_refused():
    with pytest.raises(OSError, match="grown"):
        files.read_file(Path("/proc/self/status"), 10**6)


def test_links_are_followed_to_be_read_where_the_caller_allows_it(tmp_path):
    (tmp_path / "x").write_bytes(b"5")
    (tmp_path / "link").symlink_to("x")
    assert files.read_file(tmp_path / "link", 9) == b"5"
    with pytest.raises(OSError, match="it is a link"):
        files.read_file(tmp_path / "link", 9, links=False)


def test_a_report_elsewhere_leaves_the_run_as_it_is(tmp_path):
    run = sample_run(tmp_path / "run", n=20)

    def state() -> dict[str, tuple[int, int]]:
        found = {str(path): path.stat() for path in (run, *run.rglob("*"))}
        return {name: (known.st_mtime_ns, known.st_size) for name, known in found.items()}

    before = state()
    write_report({"a": run}, tmp_path / "x.html")
    assert state() == before


# Nothing is written through a link --------------------------------------------------------------------------

OLD_DRAFTS = ("report.html", "report.csv", "report.robustbench.json")


@pytest.fixture
def precious(tmp_path) -> Path:
    (tmp_path / "precious").write_bytes(b"precious\n")
    return tmp_path / "precious"


def test_a_report_of_a_prepared_run_writes_nothing_outside_of_it(tmp_path, precious, specguard):
    run = sample_run(tmp_path / "run", n=20)
    for name in OLD_DRAFTS:
        (run / f".{name}.draft").symlink_to(precious)
        (run / name).symlink_to(precious)
    specguard("report", run).succeeds()
    assert precious.read_bytes() == b"precious\n"
    assert not (run / "report.html").is_symlink()


WRITERS: dict[str, Callable[[Path], None]] = {
    "write_file": lambda path: files.write_file(path, b"5"),
    "write_json": lambda path: io.write_json(path, {"a": 5}),
    "rewrite_lines": lambda path: io.rewrite_records(path, [{"a": 5}]),
    "write_tensors": lambda path: store.write_tensors(path, {"a": torch.ones(2)}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_that_is_a_link_is_replaced(tmp_path, precious, writer):
    (tmp_path / "x").symlink_to(precious)
    (tmp_path / ".x.draft").symlink_to(precious)
    WRITERS[writer](tmp_path / "x")
    assert precious.read_bytes() == b"precious\n"
    assert not (tmp_path / "x").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.draft", "precious", "x"]


@pytest.mark.parametrize("links", [True, False], ids=["with hard links", "without hard links"])
def test_a_file_that_must_be_new_replaces_nothing(tmp_path, precious, monkeypatch, links):
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(files.os, "link", refused)
    files.write_file(tmp_path / "new", b"5", replace=False)
    assert (tmp_path / "new").read_bytes() == b"5"
    assert (tmp_path / "new").stat().st_nlink == 1
    (tmp_path / "soft").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for name in ("new", "precious", "soft", "dangling"):
        before = os.lstat(tmp_path / name)
        with pytest.raises(RunError) as caught:
            files.write_file(tmp_path / name, b"6", replace=False)
        one_sentence(caught.value, tmp_path / name, "File exists")
        assert os.lstat(tmp_path / name).st_ino == before.st_ino
    assert precious.read_bytes() == b"precious\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "new", "precious", "soft"]


def test_nothing_is_added_through_a_link_to_another_name_or_to_a_pipe(tmp_path, precious):
    (tmp_path / "soft").symlink_to(precious)
    os.link(precious, tmp_path / "hard")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name in ("soft", "hard", "pipe", "dangling"):
        with no_hang(), pytest.raises(RunError) as caught:
            io.append_records(tmp_path / name, [{"a": 5}])
        one_sentence(caught.value, tmp_path / name)
    assert precious.read_bytes() == b"precious\n"
    assert not (tmp_path / "new").exists()


def test_a_lock_is_neither_emptied_nor_followed(tmp_path, precious):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    with pytest.raises(RunError) as caught, files.locked(tmp_path / "run"):
        pass
    one_sentence(caught.value, tmp_path / "run" / ".lock", "it is a link")
    assert precious.read_bytes() == b"precious\n"
    (tmp_path / "run" / ".lock").unlink()
    os.link(precious, tmp_path / "run" / ".lock")
    with files.locked(tmp_path / "run"):
        assert precious.read_bytes() == b"precious\n"


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir])
def test_a_lock_that_is_no_file_is_refused_and_not_waited_for(tmp_path, made):
    made(tmp_path / ".lock")
    with no_hang(), pytest.raises(RunError) as caught, files.locked(tmp_path):
        pass
    one_sentence(caught.value, tmp_path / ".lock")


FOLDERS = {
    "shards": ("attack", Shard(0, 2)),
    "shards/0-of-2": ("certify", Shard(0, 2)),
    "shards/1-of-2": ("spectrum", Shard(1, 2)),
    "images": ("attack", Shard()),
    "directions": ("spectrum", Shard()),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_study_writes_into_no_folder_that_is_a_link(tmp_path, name):
    study, shard = FOLDERS[name]
    (tmp_path / "outside").mkdir()
    (tmp_path / "study" / name).parent.mkdir(parents=True)
    (tmp_path / "study" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(RunError) as caught:
        STUDIES[study](tmp_path / "study", shard=shard)
    one_sentence(caught.value, tmp_path / "study" / name, "link")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_training_writes_and_removes_nothing_through_a_link(tmp_path):
    outside = tmp_path / "outside"
    for name in (".draft", ".retired", "00000001"):
        (outside / name).mkdir(parents=True)
        (outside / name / "precious").write_bytes(b"precious")
    (tmp_path / "sgd").mkdir()
    (tmp_path / "sgd" / "checkpoints").symlink_to(outside)
    with pytest.raises(RunError) as caught:
        store.write_checkpoint(tmp_path / "sgd", 2, {"w": torch.ones(2)}, {"step": 2})
    one_sentence(caught.value, tmp_path / "sgd" / "checkpoints", "link")
    assert len(list(outside.glob("*/precious"))) == 3
    with pytest.raises(RunError):
        companions.trained(tmp_path, "sgd")
    assert len(list(outside.glob("*/precious"))) == len(list(outside.iterdir())) == 3


@pytest.mark.parametrize("name", [".draft", ".retired"])
def test_a_checkpoint_is_not_written_through_a_left_over_that_is_a_link(tmp_path, name):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / name).symlink_to(tmp_path / "outside")
    for step in (1, 2):
        try:
            store.write_checkpoint(tmp_path / "run", step, {"w": torch.ones(2)}, {"step": step})
        except RunError as error:
            one_sentence(error)
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["precious"]


@pytest.mark.parametrize("chosen", [None, "attacks/mine", "attacks"])
@pytest.mark.parametrize("link", ["attacks", "attacks/mine"])
def test_no_folder_of_results_lies_behind_a_link_below_the_run(tmp_path, chosen, link):
    nothing: Any = None
    about = Source("run", "ViT", nothing, nothing, tmp_path / "run", tmp_path / "run")
    wanted = about.folder("attacks/mine", chosen)
    assert wanted == tmp_path / "run" / (chosen or "attacks/mine")
    (tmp_path / "run" / link).parent.mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / link).symlink_to(tmp_path / "outside")
    if link == "attacks/mine" and chosen == "attacks":
        assert about.folder("attacks/mine", chosen) == wanted
        return
    with pytest.raises(RunError) as caught:
        about.folder("attacks/mine", chosen)
    one_sentence(caught.value, tmp_path / "run" / link)


def test_links_in_the_path_that_was_typed_are_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    STUDIES["attack"](tmp_path / "runs" / "study", shard=Shard(0, 2))
    assert (tmp_path / "disk" / "study" / "shards" / "0-of-2" / "records.jsonl").is_file()
    (tmp_path / "here").symlink_to(tmp_path / "disk" / "study")
    STUDIES["attack"](tmp_path / "here", shard=Shard(1, 2))
    assert (tmp_path / "disk" / "study" / "summary.json").is_file()
    nothing: Any = None
    about = Source("run", "ViT", nothing, nothing, tmp_path / "here", tmp_path / "here")
    assert about.folder("attacks/mine", None) == tmp_path / "here" / "attacks" / "mine"


# Drafts -----------------------------------------------------------------------------------------------------


def test_many_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    wrong: list[Exception] = []
    contents = [f'{{"writer": {number}}}\n'.encode() * 200 for number in range(4)]

    def write(content: bytes) -> None:
        try:
            for _ in range(60):
                files.write_file(tmp_path / "report.html", content)
                assert (tmp_path / "report.html").read_bytes() in contents
        except (AssertionError, SpecGuardError) as error:
            wrong.append(error)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert wrong == []
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


KILLED = """
import os, signal, sys
from pathlib import Path
from specguard.records import files
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
files.write_file(Path(sys.argv[1]), b"new")
"""
WAITING = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "(print(flush=True), sys.stdin.read())")


def test_the_draft_of_a_killed_process_goes_and_that_of_a_living_one_stays(tmp_path):
    path = tmp_path / "record"
    path.write_bytes(b"old")
    assert subprocess.run([sys.executable, "-c", KILLED, path], check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*.draft"))) == 1
    assert path.read_bytes() == b"old"
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WAITING, path], **streams) as living:
        assert living.stdout is not None
        living.stdout.readline()
        (own,) = tmp_path.glob(".*.draft")  # the dead one's has gone
        with files.locked(tmp_path):
            pass
        files.write_file(tmp_path / "other", b"5")
        assert own.exists()
        living.communicate(b"")
    assert living.returncode == 0
    assert path.read_bytes() == b"new"
    assert list(tmp_path.glob(".*.draft")) == []


def test_a_lock_removes_dead_drafts_and_nothing_else(tmp_path):
    dead, others = (
        f".specguard-{'0' * 16}.draft",
        (".thesis.draft", ".record.draft", f".specguard-{'1' * 15}.draft"),
    )
    for name in (dead, *others):
        (tmp_path / name).touch()
    (tmp_path / f".specguard-{'2' * 16}.draft").mkdir()
    (tmp_path / f".specguard-{'3' * 16}.draft").symlink_to(tmp_path / ".thesis.draft")
    with files.locked(tmp_path):
        pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, ".lock", f".specguard-{'2' * 16}.draft", f".specguard-{'3' * 16}.draft"}


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127])
def test_the_longest_name_can_be_written(tmp_path, name):
    files.write_file(tmp_path / name, b"5")
    assert (tmp_path / name).read_bytes() == b"5"


def test_a_disk_that_fills_up_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    files.write_file(tmp_path / "record", b"old")
    refusal = OSError(errno.ENOSPC, "No space left on device")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(refusal))
            with pytest.raises(RunError, match="No space left"):
                files.write_file(tmp_path / "record", b"new")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"record": b"old"}


def test_a_file_keeps_the_rights_that_the_user_gives_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        io.write_json(tmp_path / "x.json", {})
        io.append_records(tmp_path / "x.jsonl", [{}])
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
    assert json.loads((tmp_path / "x.json").read_bytes()) == {}
