"""A pickle is a program. The reader of CIFAR pickles must run none of them, and survive all of them."""

import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specguard
from specguard.data.unpickle import read_pickle
from specguard.errors import DataError

FILE = Path("some") / "data_batch_1"


def text(value: str) -> bytes:
    """The instruction that pushes a text."""
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def name(module: str, attribute: str) -> bytes:
    """The instruction that pushes an imported object."""
    return f"c{module}\n{attribute}\n".encode()


def entry(value: bytes) -> bytes:
    """A whole pickle: a dictionary with one entry, whose value a piece of program makes."""
    return b"\x80\x02}" + text("data") + value + b"s."


def stacked(value: bytes) -> bytes:
    return b"\x80\x04}" + text("data") + value + b"s."


# Each makes, from a shell command and a Python expression of the same effect, a pickle that wants to run one.
# These do run it under the pickle module of the standard library: a test below shows that.
LOADED: dict[str, Callable[[str, str], bytes]] = {
    "REDUCE of os.system": lambda shell, _: entry(name("os", "system") + text(shell) + b"\x85R"),
    "REDUCE of builtins.eval": lambda _, python: entry(name("builtins", "eval") + text(python) + b"\x85R"),
    "REDUCE outside any dictionary": lambda shell, _: name("os", "system") + text(shell) + b"\x85R.",
    "REDUCE whose result is dropped": lambda shell, _: name("os", "system") + text(shell) + b"\x85R0}.",
    "builtins.getattr": lambda shell, _: entry(
        name("builtins", "getattr")
        + (name("builtins", "__import__") + text("os") + b"\x85R" + text("system") + b"\x86R")
        + (text(shell) + b"\x85R")
    ),
    "STACK_GLOBAL": lambda _, python: stacked(text("builtins") + text("exec") + b"\x93" + text(python) + b"\x85R"),
    "STACK_GLOBAL with a dotted name": lambda shell, _: stacked(
        text("shlex") + text("os.system") + b"\x93" + text(shell) + b"\x85R"
    ),
    "INST": lambda shell, _: entry(b"(" + text(shell) + b"ios\nsystem\n"),
    "OBJ": lambda shell, _: entry(b"(" + name("os", "system") + text(shell) + b"o"),
    "BUILD with a planted __setstate__": lambda shell, _: entry(
        name("argparse", "Namespace") + b")R"
        b"}" + text("__setstate__") + name("os", "system") + b"sb" + text(shell) + b"b"
    ),
    "copyreg and EXT1": lambda shell, _: entry(
        name("copyreg", "add_extension")
        + (b"(" + text("os") + text("system") + b"K\xc8tR0")
        + (b"\x82\xc8" + text(shell) + b"\x85R")
    ),
}
# These only try; what they would do depends on what else is there.
ATTEMPTS: dict[str, Callable[[str, str], bytes]] = {
    "NEWOBJ": lambda shell, _: entry(name("subprocess", "Popen") + text(shell) + b"\x85\x81"),
    "NEWOBJ_EX": lambda shell, _: stacked(name("subprocess", "Popen") + text(shell) + b"\x85}\x92"),
    "copyreg.__newobj__": lambda shell, _: entry(
        name("copyreg", "__newobj__") + name("subprocess", "Popen") + text(shell) + b"\x86R"
    ),
    "copyreg._reconstructor": lambda *_: entry(
        name("copyreg", "_reconstructor")
        + (b"(" + name("argparse", "Namespace") + name("builtins", "object") + b"NtR")
    ),
    "PERSID": lambda shell, _: entry(b"P" + shell.encode() + b"\n"),
    "BINPERSID": lambda shell, _: entry(text(shell) + b"Q"),
    "EXT1": lambda *_: entry(b"\x82\x01"),
    "EXT2": lambda *_: entry(b"\x83\x01\x00"),
    "EXT4": lambda *_: entry(b"\x84\x01\x00\x00\x00"),
    "a bare import": lambda *_: entry(name("os", "system")),
    "an attribute of an allowed name": lambda *_: stacked(text("numpy") + text("dtype.mro") + b"\x93"),
    "an allowed name from another module": lambda *_: entry(name("builtins", "encode")),
    "text that is called": lambda shell, _: entry(text("eval") + text(shell) + b"\x85R"),
    "numpy.ndarray called": lambda *_: entry(name("numpy", "ndarray") + b")R"),
    "_codecs.encode without text": lambda *_: entry(name("_codecs", "encode") + b"K\x05\x85R"),
    "_codecs.encode of what latin1 lacks": lambda *_: entry(name("_codecs", "encode") + text("€") + b"\x85R"),
    "BUILD of a stand-in's attributes": lambda *_: entry(name("_codecs", "encode") + b"}" + text("a") + b"Nsb"),
    "BUILD of a stand-in's defaults": lambda *_: entry(
        name("_codecs", "encode") + b"N}" + text("__defaults__") + text("x") + b"\x85s\x86b"
    ),
    "BUILD of a stand-in class": lambda *_: entry(name("numpy", "dtype") + b"}b"),
    "BUILD of a dictionary": lambda *_: entry(b"}}b"),
    "a huge memo index": lambda *_: entry(b"Nr\xff\xff\xff\x7f"),
    "a huge memo index in digits": lambda *_: entry(b"Np2147483647\n"),
    "a negative memo index": lambda *_: entry(b"Np-7\n"),
    "a memo entry that is not there": lambda *_: entry(b"h\x07"),
    "an unhashable key": lambda *_: b"}]Ns.",
    "an empty stack": lambda *_: b"\x80\x02.",
    "a number": lambda *_: b"\x80\x02K\x07.",
    "a list": lambda *_: b"\x80\x02].",
    "an unknown instruction": lambda *_: b"\x80\x02}\xff.",
    "a text that is too long": lambda *_: b"\x80\x02}X\xff\xff\xff\xffs.",
    "bytes that are too long": lambda *_: b"\x80\x04}\x8e\xff\xff\xff\xff\xff\xff\xff\x7fs.",
    "a number of too many digits": lambda *_: entry(b"L" + b"7" * 10_000 + b"L\n"),
    "a future protocol": lambda *_: b"\x80\xff}.",
    "nothing": lambda *_: b"",
}
HOSTILE = LOADED | ATTEMPTS


def payload(hostile: str, sentinel: Path) -> bytes:
    """The hostile pickle; if anything of it runs, the file `sentinel` appears."""
    return HOSTILE[hostile](f"touch {shlex.quote(str(sentinel))}", f"open({str(sentinel)!r}, 'w').close()")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_pickle_that_calls_anything_is_refused_and_nothing_runs(tmp_path, hostile):
    with pytest.raises(DataError) as caught:
        read_pickle(FILE, payload(hostile, tmp_path / "sentinel"))
    assert str(FILE) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("hostile", LOADED)
def test_the_standard_pickle_module_does_run_the_same_file(tmp_path, hostile):
    """The planted bug: were the reader to fall back on pickle.loads, the test above would fail."""
    script = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], input=payload(hostile, tmp_path / "sentinel"))
    assert [p.name for p in tmp_path.iterdir()] == ["sentinel"]


def tuple_key(key: bytes) -> bytes:
    return b"\x80\x02})" + key + b"Ns."


BOMBS = {
    # Hashing walks down a tuple on the C stack, without asking Python's limit on recursion.
    "a key nested 1,000,000 deep": tuple_key(b"\x85" * 1_000_000),
    "a key nested 300,000 deep, old style": b"}" + b"(" * 300_000 + b"t" * 300_000 + b"Ns.",
    # Hashing walks through a shared tuple once for every way that leads to it.
    "a key doubled 60 times by DUP": tuple_key(b"2\x86" * 60),
    "a key doubled 60 times by the memo": tuple_key(b"q\x01h\x01\x86" * 60),
    "a key made 100 times as wide 20 times": tuple_key((b"q\x010(" + b"h\x01" * 100 + b"t") * 20),
    "a list nested 300,000 deep": b"\x80\x02}" + text("data") + b"]" * 300_000 + b"a" * 299_999 + b"s.",
    "a dictionary nested 100,000 deep": b"\x80\x02}" + (text("a") + b"}") * 100_000 + b"s" * 100_000 + b".",
    "a dictionary within itself": b"\x80\x02}q\x00" + text("data") + b"h\x00s.",
    "a frame longer than memory": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
    "300,000 open marks": b"\x80\x02}" + b"(" * 300_000 + b".",
}
ISOLATED = """
import runpy, sys, types
from pathlib import Path
package = types.ModuleType("specguard")  # without its __init__, which imports torch and takes seconds
package.__path__ = [sys.argv[1]]
sys.modules["specguard"] = package
from specguard.errors import DataError
read_pickle = runpy.run_path(sys.argv[1] + "/data/unpickle.py")["read_pickle"]
try:
    print(type(read_pickle(Path("bomb"), sys.stdin.buffer.read())).__name__)
except DataError:
    print("DataError")
"""


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_made_to_exhaust_stack_or_time_is_answered_at_once_and_the_interpreter_lives(bomb):
    assert len(BOMBS[bomb]) < 4_000_000
    folder = str(Path(specguard.__file__).parent)
    try:
        done = subprocess.run(
            [sys.executable, "-c", ISOLATED, folder], input=BOMBS[bomb], capture_output=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        pytest.fail("the reader was still busy after 10 seconds")
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert done.stdout.decode().strip() in ("dict", "DataError")


MATRIX = np.random.default_rng(3).integers(256, size=(5, 7), dtype=np.uint8)
RECORD = {"batch_label": "batch 1 of 1", "labels": [3, 0, 9, 300, -70_000], "data": MATRIX, "filenames": ["a.png"]}


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("keys", [str, str.encode])
def test_a_harmless_pickle_of_any_protocol_is_read_as_it_was_written(protocol, order, keys):
    record = {keys(key): value for key, value in (RECORD | {"data": np.asarray(MATRIX, order=order)}).items()}
    loaded = read_pickle(FILE, pickle.dumps(record, protocol=protocol))
    assert {**loaded, "data": None} == {**RECORD, "data": None}
    np.testing.assert_array_equal(loaded["data"], MATRIX)
    assert loaded["data"].dtype == np.uint8


OTHER_ARRAYS = {
    "objects": np.array([["a", None]], dtype=object),
    "signed bytes": MATRIX.astype(np.int8),
    "booleans": MATRIX > 9,
    "wide integers": MATRIX.astype(np.int64),
    "real numbers": MATRIX / 255,
    "text": np.array([["a", "b"]]),
    "a record type": np.zeros((2, 3), dtype=[("a", "u1")]),
    "dates": np.zeros((2, 3), dtype="M8[s]"),
    "one axis": MATRIX[0],
    "three axes": MATRIX[None],
    "no axis": np.array(7, dtype=np.uint8),
    "a masked array": np.ma.array(MATRIX, mask=MATRIX > 9),
    "a matrix object of a subclass": MATRIX.view(np.recarray),
    "a number of numpy": np.uint8(7),
}


@pytest.mark.parametrize("kind", OTHER_ARRAYS)
def test_an_array_that_is_no_matrix_of_bytes_is_refused(kind):
    with pytest.raises(DataError) as caught:
        read_pickle(FILE, pickle.dumps({"data": OTHER_ARRAYS[kind]}, protocol=2))
    assert str(FILE) in str(caught.value)


WHOLE = pickle.dumps(RECORD, protocol=2)
STATE = [1, (5, 7), np.dtype(np.uint8), False, MATRIX.tobytes()]


class Forged:
    """Pickles like an array, with a state of its own choice."""

    def __init__(self, state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, arguments, _ = MATRIX.__reduce__()
        return rebuild, arguments, self.state


FORGERIES = {
    "a row too many": [1, (6, 7), *STATE[2:]],
    "negative edges": [1, (-5, -7), *STATE[2:]],
    "edges that overflow": [1, (2**62, 2**62), *STATE[2:]],
    "edges as text": [1, ("5", "7"), *STATE[2:]],
    "no type": [1, (5, 7), None, *STATE[3:]],
    "type as text": [1, (5, 7), "u1", *STATE[3:]],
    "no order": [1, (5, 7), STATE[2], None, STATE[4]],
    "pixels as a list": [*STATE[:4], list(STATE[4])],
    "text beyond latin1": [*STATE[:4], "€" * 35],
    "too short": STATE[1:],
    "too long": [*STATE, 0],
    "not a sequence": 7,
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_array_whose_parts_do_not_fit_is_refused(forgery):
    state = FORGERIES[forgery]
    assert isinstance(read_pickle(FILE, pickle.dumps({"data": Forged(tuple(STATE))}, 2))["data"], np.ndarray)
    with pytest.raises(DataError):
        read_pickle(FILE, pickle.dumps({"data": Forged(tuple(state) if isinstance(state, list) else state)}, 2))


def test_every_truncation_of_a_whole_pickle_is_refused():
    for length in range(len(WHOLE)):
        with pytest.raises(DataError):
            read_pickle(FILE, WHOLE[:length])


def answered(content: bytes) -> bool:
    """Whether the reader gives a dictionary with names as keys, or DataError; all else is raised."""
    try:
        loaded = read_pickle(FILE, content)
    except DataError as error:
        return str(FILE) in str(error)
    return all(type(key) is str for key in loaded)


@given(st.binary(max_size=200))
def test_random_bytes_are_answered(content):
    assert answered(content)
    assert answered(b"\x80\x02}" + content + b".")


edits = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6)


def edited(content: bytes, changes: list[tuple[int, int]]) -> bytes:
    changed = bytearray(content)
    for place, byte in changes:
        changed[place % len(changed)] = byte
    return bytes(changed)


@given(edits)
def test_a_whole_pickle_with_some_bytes_changed_is_answered(changes):
    assert answered(edited(WHOLE, changes))


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    return tmp_path_factory.mktemp("arena")


@given(st.sampled_from(sorted(LOADED)), edits)
def test_a_hostile_pickle_with_some_bytes_changed_is_answered_and_nothing_runs(arena, hostile, changes):
    assert answered(edited(payload(hostile, arena / "sentinel"), changes))
    assert not list(arena.iterdir())


INSTRUCTIONS = [
    *(bytes([byte]) for byte in b"().012NRab]}deltsuo\x81\x85\x86\x87\x88\x89\x93\x94\x92Q"),
    *(b"K\x01", b"h\x00", b"h\x01", b"q\x00", b"q\x01", b"I7\n", b"S'a'\n", b"Vb\n", b"U\x01c", b"C\x01d"),
    *(text("latin1"), text("numpy"), text("dtype"), text("__class__"), text("__defaults__")),
    *(name("numpy", "dtype"), name("numpy", "ndarray"), name("_codecs", "encode"), name("os", "system")),
    name("numpy.core.multiarray", "_reconstruct"),
]


@given(st.lists(st.sampled_from(INSTRUCTIONS), max_size=18))
def test_a_random_program_of_pickle_instructions_is_answered(program):
    assert answered(b"\x80\x04}" + b"".join(program) + b".")
    assert answered(b"\x80\x04}" + text("data") + b"".join(program) + b"s.")


# Files that would grow -----------------------------------------------------------------------------------------


def test_a_pickle_cannot_make_more_bytes_than_it_holds():
    """One text, kept and turned into bytes again and again."""
    long = b"X" + (10**4).to_bytes(4, "little") + b"a" * 10**4 + b"q\x00"
    again = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    content = b"\x80\x02](" + long + again * 300 + b"e."
    with pytest.raises(DataError, match="more bytes than it holds"):
        read_pickle(Path("x"), content)


def test_a_pickle_cannot_name_one_array_many_times():
    matrix = np.zeros((9, 1000), np.uint8)
    with pytest.raises(DataError, match="hold more bytes than it"):
        read_pickle(Path("x"), pickle.dumps({f"a{i}": matrix for i in range(9)}, protocol=4))
