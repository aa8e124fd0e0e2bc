"""A study by many processes is the study by one: the same records, whoever did what and however often one died."""

import json
import math
from collections.abc import Callable, Iterator

import msgspec
import pytest

from helpers.studies import ABOUT, BATCH, IMAGES, STUDIES, looked_at, outcome
from specguard.errors import ConfigError, RunError
from specguard.records import files
from specguard.records.base import Json, plain
from specguard.records.io import RecordFile, read_json, read_lines, rewrite_records
from specguard.records.shards import Shard
from specguard.records.study import Pending, Timing

BATCHES = dict.fromkeys(STUDIES, BATCH) | {"smooth": 1}  # noise belongs to the image alone


class Death(BaseException):
    """Stands for SIGKILL."""


def dying_at(call: int) -> Callable[[object], None]:
    calls = iter(range(1, call + 1))

    def watch(progress: object) -> None:
        if next(calls) == call:
            raise Death

    return watch


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict[str, object]]:
    found = {}
    for name, study in STUDIES.items():
        folder = tmp_path_factory.mktemp(name) / "study"
        study(folder)
        found[name] = outcome(folder)
    return found


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("count", [7])  # more than there are batches
def test_any_number_of_shards_in_any_order_leave_what_one_process_leaves(tmp_path, alone, study, count):
    order = [*range(1, count), 0]
    results = [STUDIES[study](tmp_path, shard=Shard(index, count)) for index in order]
    waiting = [result.left for result in results if isinstance(result, Pending)]
    batches = math.ceil(IMAGES / BATCHES[study])
    assert {result.of for result in results if isinstance(result, Pending)} == {batches}
    assert waiting == sorted(waiting, reverse=True)
    assert waiting[0] == batches - len(Shard(1, count).begins(IMAGES, BATCHES[study]))
    assert len(waiting) >= count - max(1, count - batches)
    assert outcome(tmp_path) == alone[study]
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert plain(results[-1]) == stored
    assert plain(STUDIES[study](tmp_path, shard=Shard(0, count))) == stored  # started again, it is what it was
    assert plain(STUDIES[study](tmp_path)) == stored


@pytest.mark.parametrize("study", STUDIES)
def test_every_shard_writes_its_own_images_only_and_none_is_counted_twice(tmp_path, study):
    for index in range(3):
        STUDIES[study](tmp_path, shard=Shard(index, 3))
    seen: list[set[int]] = []
    for index in range(3):
        records = read_lines(tmp_path / "shards" / f"{index}-of-3" / "records.jsonl")
        seen.append({record["sample"] for record in records})
        assert len(seen[-1]) == len(records)
    alone = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]  # image by image
    together = [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10]]
    assert [sorted(s) for s in seen] == (together if BATCHES[study] == 2 else alone)


@pytest.mark.parametrize("study", STUDIES)
def test_seconds_are_those_of_all_shards(tmp_path, study):
    for index in range(3):
        STUDIES[study](tmp_path, shard=Shard(index, 3))
    lines = [
        line
        for index in range(3)
        for line in RecordFile(tmp_path / "shards" / f"{index}-of-3" / "timing.jsonl", Timing).read()
    ]
    assert sorted(line.begin for line in lines) == list(range(0, IMAGES, BATCHES[study]))
    seconds = read_json(tmp_path / "summary.json")["seconds"]
    assert seconds["total"] > 0
    assert set(seconds) == {name for line in lines for name in line.seconds}
    for name, value in seconds.items():
        assert value == pytest.approx(sum(line.seconds.get(name, 0.0) for line in lines))


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("call", [1, 3])
def test_shards_that_died_are_finished_by_another_number_of_them(tmp_path, alone, study, call):
    for index in range(2):
        with pytest.raises(Death):
            STUDIES[study](tmp_path, shard=Shard(index, 2), watch=dying_at(call + index))
        path = tmp_path / "shards" / f"{index}-of-2" / "records.jsonl"
        with open(path, "ab") as handle:
            handle.write(b'{"sample": 1, "la')  # cut short
    with pytest.raises(Death):
        STUDIES[study](tmp_path, watch=dying_at(2))  # one process goes on, and dies too
    for index in (2, 0, 1):
        STUDIES[study](tmp_path, shard=Shard(index, 3))
    assert outcome(tmp_path) == alone[study]


@pytest.mark.parametrize("study", STUDIES)
def test_what_shards_have_done_is_not_done_again(tmp_path, monkeypatch, alone, study):
    for index in range(2):
        STUDIES[study](tmp_path, shard=Shard(index, 2))
    (tmp_path / "summary.json").unlink()
    (tmp_path / "records.jsonl").unlink()

    append = RecordFile.append

    def never(file: RecordFile[object], records: list[object]) -> None:
        assert file.path.name == "environment.jsonl", "a batch was done again"
        append(file, records)

    monkeypatch.setattr(RecordFile, "append", never)
    assert not isinstance(STUDIES[study](tmp_path), Pending)
    assert outcome(tmp_path) == alone[study]


@pytest.mark.parametrize("study", STUDIES)
def test_shards_and_one_process_alone_keep_out_of_each_others_way(tmp_path, study):
    with files.locked(tmp_path, shared=True), files.locked(tmp_path / "shards" / "0-of-2"):
        for more in ({}, {"shard": Shard(0, 2)}):
            with pytest.raises(RunError, match="in use by another process"):
                STUDIES[study](tmp_path, **more)
        assert STUDIES[study](tmp_path, shard=Shard(1, 2)).left
    with files.locked(tmp_path), pytest.raises(RunError, match="in use by another process"):
        STUDIES[study](tmp_path, shard=Shard(0, 2))


@pytest.mark.parametrize("study", STUDIES)
def test_a_shard_with_other_settings_is_refused(tmp_path, study):
    STUDIES[study](tmp_path, shard=Shard(1, 2))
    changed = msgspec.structs.replace(ABOUT["about"], model="xyz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ABOUT, "about", changed)
        with pytest.raises(RunError, match='model: "abc" before, "xyz" now'):
            STUDIES[study](tmp_path, shard=Shard(0, 2))


def contradictions(study: str, record: Json) -> Iterator[Json]:
    """Records that could each be true, but not beside the true one."""
    match study:
        case "attack":
            *others, last = record["outcomes"]
            yield record | {"outcomes": [*others, last | {"success": not last["success"]}]}
            yield record | {"outcomes": [*others, last | {"distance": last["distance"] + 1e-3}]}
            yield record | {"clean": record["clean"] + 1}
            yield record | {"warnings": ["there is more"]}
        case "certify" | "stop early":
            yield record | {"margin": record["margin"] + 1e-3}
            yield record | {"input": "0" * 64}
        case "smooth":
            yield record | {"input": "0" * 64}
        case "sensitivity":
            yield record | {"input_norm": record["input_norm"] + 1e-3}
            (row,) = record["radii"]
            yield record | {"radii": [row | {"found": row["found"] + 1e-3}]}
        case "spectrum":
            part = record["parts"]["head"]
            yield record | {"parts": {"head": part | {"step": part["step"] + 1e-3}}}


@pytest.mark.parametrize("study", STUDIES)
def test_shards_that_contradict_each_other_are_refused(tmp_path, study):
    STUDIES[study](tmp_path, shard=Shard(0, 2))
    theirs = tmp_path / "shards" / "1-of-2" / "records.jsonl"
    theirs.parent.mkdir(exist_ok=True)
    first = read_lines(tmp_path / "shards" / "0-of-2" / "records.jsonl")[0]
    for number, record in enumerate(contradictions(study, first)):
        rewrite_records(theirs, [record])
        with pytest.raises(RunError, match=r"1-of-2.records\.jsonl holds .* image 0 again"):
            STUDIES[study](tmp_path, shard=Shard(1, 2))
        assert read_lines(theirs) == [record], number
    rewrite_records(theirs, [first])  # what is said twice is no contradiction
    STUDIES[study](tmp_path, shard=Shard(1, 2))


def test_planted_shards_that_cut_batches_are_noticed(tmp_path, monkeypatch):
    """The start of an iteration belongs to its batch: in another one, an image ends with other digits."""
    monkeypatch.setattr(Shard, "begins", lambda shard, count, batch: range(shard.index, count, batch))
    looked_at(tmp_path, shard=Shard(1, 2))
    with pytest.raises(RunError, match="does not belong to this study"):
        looked_at(tmp_path, shard=Shard(0, 2))


@pytest.mark.parametrize("text", ["", "1", "/", "1/", "/2", "2/2", "-1/2", "0/0", "1.0/2", "a/b", "0/2/3", "٣/٤"])
def test_a_shard_that_cannot_be_is_one_sentence(text):
    with pytest.raises(ConfigError):
        Shard.parsed(text)


def test_a_shard_is_counted_from_zero():
    assert Shard.parsed("0/8") == Shard(0, 8)
    assert Shard.parsed("7/8") == Shard(7, 8)
    for count, batch, shards_ in ((11, 2, 3), (1, 5, 4), (100, 7, 1)):
        begins = [begin for index in range(shards_) for begin in Shard(index, shards_).begins(count, batch)]
        assert sorted(begins) == list(range(0, count, batch))
