"""The report as a file: complete, small, the same every time, sealed, and honest about what it was made from."""

import base64
import csv
import hashlib
import html
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from helpers.sample_runs import (
    METHODS,
    RADII,
    changed,
    layer_sensitivity,
    sample_run,
    smoothed,
    stop_early,
    training,
)
from specguard.errors import ConfigError
from specguard.records.accuracy import Accuracy
from specguard.records.base import Json
from specguard.records.io import rewrite_records
from specguard.report import read_run, report, write_report
from specguard.report.accuracies import certificate_accuracies, clean_accuracy, robust_accuracies
from specguard.report.html.sections import subsets, verdict
from specguard.report.verdict import verdict as judged

HOSTILE = "\"'></script><script>alert(1)</script>\x00\u202e<b onmouseover=alert(1)>"


def accuracy(count: int, n: int) -> Json:
    return msgspec.to_builtins(Accuracy.of(count, n))


class Elements(HTMLParser):
    """Every element of a page with its attributes, and all of its text."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page.decode())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return sample_run(tmp_path_factory.mktemp("page") / "run")


@pytest.fixture(scope="module")
def made(run):
    return report({"a run": run})


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


def test_ten_thousand_images_are_read_without_torch_and_stay_below_three_megabytes(tmp_path):
    """In a process of its own, as a user has it: the type checker of the tests would take most of the time."""
    runs = [sample_run(tmp_path / str(k), n=10_000, seed=k) for k in range(2)]
    code = (
        "import sys; sys.argv = ['specguard', 'report', *sys.argv[1:]]\n"
        "from specguard.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'specguard.studies' in sys.modules)"
    )
    place = tmp_path / "report.html"
    command = [sys.executable, "-c", code, *runs, "--out", place]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines()[-1] == "0 False False", ended.stderr
    assert 50_000 < place.stat().st_size < 3_000_000
    assert b"n&nbsp;=&nbsp;10,000" in place.read_bytes()


def test_the_same_records_make_the_same_bytes(run, made):
    assert report({"a run": run}) == made


def test_every_accuracy_has_its_interval_and_its_n(made):
    page = made.html.decode().replace("&nbsp;", " ")
    cells = re.findall(r'<td class="num" data-value="0?1?\.\d+">.*?</td>', page)
    bars = re.findall(r'<div class="bar"><span>(?:clean|robust|certified) accuracy.*?</div>', page)
    assert len(cells) > 30
    assert len(bars) == 1 + 2 * len(RADII)
    for text in (*cells, *bars):
        assert re.search(r"\d %.*\[\d+\.\d, \d+\.\d\], n = \d+", text), text


def test_accuracies_are_those_of_the_records_and_one_that_contradicts_itself_is_never_shown(copy):
    path = copy / "result.json"
    changed(path, test_accuracy=accuracy(7, 9))
    low, high = Accuracy.of(7, 9).interval95
    page = report({"a run": copy}).html.decode().replace("&nbsp;", " ")
    assert f'77.8 % <span class="interval">[{100 * low:.1f}, {100 * high:.1f}], n = 9</span>' in page
    for wrong in ({"value": 0.123}, {"interval95": [0.0, 1.0]}, {"count": 8}, {"n": 10}, {"count": 10}):
        changed(path, test_accuracy=accuracy(7, 9) | wrong)
        page = report({"a run": copy}).html.decode()
        assert "12.3 %" not in page
        assert "77.8 %" not in page
        assert "result.json is malformed: " in page


def test_nothing_is_loaded_sent_or_run_but_its_own(made):
    found = Elements(made.html).elements
    assert [tag for tag, _ in found].count("script") == 1
    assert not {"link", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in found}
    for tag, attributes in found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        for name in ("src", "href", "xlink:href", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/")), (tag, value)
    (policy,) = (a["content"] for tag, a in found if a.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*)</script>", made.html.decode(), re.DOTALL)[1]
    digest = hashlib.sha256(script.encode()).digest()
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert base64.b64encode(digest).decode() in policy
    assert "unsafe" not in policy
    assert "http://" not in made.html.decode().replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in made.html.decode()


def test_hostile_names_are_text_wherever_they_stand(tmp_path):
    run = sample_run(tmp_path / "run", name=HOSTILE)
    other = sample_run(tmp_path / "other")
    page = Elements(report({HOSTILE: run, "b": other}, title=HOSTILE).html)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "b" not in {tag for tag, _ in page.elements}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count("<b onmouseover=alert(1)>") > 20
    assert "\x00" not in page.text


def test_a_certification_counts_as_checked_only_if_its_very_file_was(copy, made):
    assert b'<span class="badge">checked</span>' in made.html
    lines = copy / "certificates" / "proofs" / "records.jsonl"
    content = lines.read_bytes()
    lines.write_bytes(content.replace(b'"margin": 1.0', b'"margin": 2.0'))
    assert lines.read_bytes() != content
    page = report({"a run": copy}).html
    assert b'<span class="badge">checked</span>' not in page
    assert b"checked, but not this file" in page
    shutil.rmtree(copy / "verification")
    assert b"not checked</span>" in report({"a run": copy}).html


def test_the_verdict_speaks_of_the_largest_radius_at_which_something_is_proved(copy):
    path = copy / "certificates" / "proofs" / "summary.json"
    rows = json.loads(path.read_text())["radii"]
    none = accuracy(0, 40)
    rows[2] |= {"certified": none, "unknown": 38}
    changed(path, radii=rows)
    count = rows[1]["certified"]["count"]
    assert f"{count} are certified at l2 0.05: no perturbation" in verdict(read_run(copy, "a"))
    changed(path, radii=[row | {"certified": none} for row in rows])
    assert "none is certified, even at l2 0.02." in verdict(read_run(copy, "a"))


def of_subset(path: Path, count: int) -> None:
    """The study in this folder is now of a stratified subset, on which so many images are right, or certified."""
    stored = json.loads((path / "summary.json").read_text())
    found = accuracy(count, stored["n"])
    for name, column in (("worst_case", "accuracy"), ("radii", "certified"), ("radii", "robust")):
        for row in stored.get(name, []):
            row[column] = found
    stored["study"]["about"]["subset"] = {"rule": "stratified", "seed": 0, "of": 1000}
    changed(path / "summary.json", **stored | {"clean": found})


@pytest.mark.parametrize("count", [1, 39])
def test_of_as_many_images_a_stratified_subset_is_shown_before_the_first(copy, count):
    first = read_run(copy, "a")
    shutil.rmtree(copy / "verification")
    for study in ("attacks/quick", "certificates/proofs"):
        for name in ("a", "z"):  # before and behind it
            shutil.copytree(copy / study, copy / study.replace("/", f"/{name}-"))
            of_subset(copy / study.replace("/", f"/{name}-"), count)
    found = read_run(copy, "a")
    for accuracies in (robust_accuracies, certificate_accuracies):
        assert accuracies(first).keys() == accuracies(found).keys()
        assert {each.count for each in accuracies(found).values()} == {count}
        assert {each.count for each in accuracies(first).values()} != {count}
    clean = clean_accuracy(found)
    assert clean is not None
    assert clean.count == count
    assert f"Of 40 images, {count} are certified" in verdict(found)
    places = "attacks/a-quick and attacks/z-quick and certificates/a-proofs and certificates/z-proofs"
    said = f"In {places}: 40 images, a subset of 1,000 stratified by class."
    assert subsets(found) == [said]
    assert subsets(first) == []
    assert said in Elements(report({"a run": copy}).html).text


@pytest.mark.parametrize("subset", [7, [], {}, {"of": "all"}, {"of": -1}, {"of": True}], ids=str)
def test_a_subset_that_is_none_is_a_sentence_of_the_report(copy, subset):
    path = copy / "certificates" / "proofs" / "summary.json"
    study = json.loads(path.read_text())["study"]
    changed(path, study=study | {"about": study["about"] | {"subset": subset}})
    found = read_run(copy, "a")
    assert not found.certificates
    assert any("certificates/proofs/summary.json" in problem for problem in found.problems)


def test_commands_times_and_flags_are_shown(made):
    text = Elements(made.html).text
    for verb in ("train", "attack", "certify", "spectrum", "check"):
        assert f"specguard {verb} " in text
    assert "most gradients of plain vanish" in text
    assert "commit 0123456789ab+" in text
    assert "1 min" in text  # the training
    assert "2.0 s" in text


def test_the_spreadsheet_has_every_accuracy_and_no_formula(tmp_path):
    run = sample_run(tmp_path / "run", name="=cmd|'/c calc'!A1")
    rows = list(csv.DictReader(io.StringIO(report({"@run": run}).csv.decode())))
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@"))]
    certified = {(row["what"], row["radius"]) for row in rows if not row["class"] and row["norm"] == "l2"}
    assert {(f"certified by {method}", str(radius)) for method in METHODS for radius in RADII} <= certified
    for row in rows:
        found = Accuracy.of(int(row["count"]), int(row["n"]))
        assert float(row["accuracy"]) == pytest.approx(found.value, abs=1e-6)
        assert float(row["low95"]) == pytest.approx(found.interval95[0], abs=1e-6)
        assert float(row["high95"]) == pytest.approx(found.interval95[1], abs=1e-6)
    assert {row["class"] for row in rows} > {"'=cmd|'/c calc'!A1 0"}


NAMES = (
    "=1+1",
    "+1",
    "-1",
    "@x",
    "\t=1",
    "\r=1",
    "\n=1",
    "a\r=cmd()",
    "a\n=cmd()",
    'a","=1',
    " =1",
    "＝1",
    "\x85=1",
)


@pytest.mark.parametrize("name", NAMES)
def test_no_name_starts_a_row_or_a_formula_of_the_spreadsheet(tmp_path, name):
    run = sample_run(tmp_path / "run", name=name)
    text = report({name: run}).csv.decode()
    table = list(csv.reader(io.StringIO(text, newline="")))
    assert text.count("\n") == len(table) == len(text.splitlines())
    assert {len(row) for row in table} == {11}
    for line, row in zip(text.splitlines()[1:], table[1:], strict=True):
        assert line.startswith('"')
        assert not [cell for cell in row[:5] if cell.lstrip()[:1] in tuple("=+-@＝＋－＠")]
        assert all(cell == "" or float(cell) >= 0 for cell in row[5:])  # numbers stay numbers
        assert line.endswith(",".join(row[6:]))  # and stand without quotes


def test_leaderboard_entries_are_those_of_the_evaluations(made):
    (entry,) = made.robustbench
    assert entry["name"] == "a run"
    assert entry["dataset"] == "digits"
    assert entry["eps"] == "0.1"
    assert entry["threat_model"] == "L2"
    assert entry["unreliable"] is True


def test_three_files_are_written_and_only_html_is_called_a_report(run, tmp_path):
    write_report({"a": run}, tmp_path / "x.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.csv", "x.html", "x.robustbench.json"]
    with pytest.raises(ConfigError, match=r"a report is an \.html file"):
        write_report({"a": run}, tmp_path / "x.pdf")


def test_sizes_that_no_model_has_are_drawn_or_named(copy):
    """Numbers near the ends of the range, settings nested deeply, and radii of methods that differ."""
    lines = copy / "spectrum" / "looked" / "records.jsonl"
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    for number, record in enumerate(records):
        record["parts"]["blocks.0"] |= {"sigma": [1e-200 * (1 + number)], "step": 1e149}
    rewrite_records(lines, records)
    nested = json.loads("[" * 400 + "]" * 400)
    settings = json.loads((copy / "result.json").read_text())["settings"]
    changed(copy / "result.json", settings=settings | {"training": {"deep": nested}})
    path = copy / "certificates" / "proofs" / "summary.json"
    rows = json.loads(path.read_text())["radii"]
    del rows[0]["by"]["lofast"]
    changed(path, radii=rows)
    text = Elements(report({"a": copy}).html).text
    assert "certificates/proofs/summary.json: its radii are certified by different methods" in text
    assert "a at 40 images" in text  # the spectra


def test_settings_nested_beyond_what_can_be_written_are_left_out(copy):
    settings = json.loads((copy / "result.json").read_text())["settings"]
    nested = "[" * 900 + "]" * 900
    text = json.dumps(
        json.loads((copy / "result.json").read_text()) | {"settings": settings | {"training": "HERE"}}
    )
    (copy / "result.json").write_text(text.replace('"HERE"', f'{{"deep": {nested}}}'))
    assert b"Summary" in report({"a": copy}).html


def test_an_unfinished_study_is_named_with_what_there_is_of_it(copy):
    (copy / "attacks" / "quick" / "summary.json").unlink()
    lines = copy / "attacks" / "quick" / "records.jsonl"
    kept = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(b"".join(kept[:2]) + kept[2][:9])
    text = Elements(report({"a": copy}).html).text
    assert "the attack in attacks/quick is unfinished: 2 records of 40 images" in re.sub(r"\s+", " ", text)
    assert "attack, unfinished attacks/quick" in re.sub(r"\s+", " ", text)
    assert "attacks/quick" not in report({"a": copy}).csv.decode()
    shard = copy / "attacks" / "quick" / "shards" / "1-of-2"
    shard.mkdir(parents=True)
    (shard / "records.jsonl").write_bytes(b"".join(kept[3:8]))
    (shard.parent / "2-of-2").symlink_to(shard)
    assert [(study.done, study.n) for study in read_run(copy, "a").unfinished] == [(7, 40)]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("attacks/quick", "attack"),
        ("certificates/proofs", "certification"),
        ("spectrum/looked", "spectrum"),
        ("verification/again", "verification"),
        ("smooth/quarter", "smoothing"),
        ("sensitivity/first", "sensitivity"),
    ],
)
def test_the_kind_of_an_unfinished_study_is_that_of_its_header(copy, place, name):
    smoothed(copy / "smooth" / "quarter", 40)
    layer_sensitivity(copy / "sensitivity" / "first", 40)
    (copy / place / "summary.json").unlink()
    found = read_run(copy, "a")
    assert [(study.place, study.kind, study.done, study.n) for study in found.unfinished] == [(place, name, 40, 40)]
    assert found.problems == ()
    (copy / place / "study.json").write_text('{"kind": "attack"}')
    found = read_run(copy, "a")
    assert found.unfinished == ()
    assert len(found.problems) == 1
    assert f"{place}/study.json is malformed" in found.problems[0]


def test_smoothing_is_shown_apart_from_proofs(copy, made):
    """Nothing of it is in the curves, the summary, the CSV or the table of all accuracies."""
    assert b'id="smoothing"' not in made.html
    smoothed(copy / "smooth" / "quarter", 40)
    both = report({"a run": copy})
    assert both.csv == made.csv
    page = both.html.decode().replace("&nbsp;", " ")
    section = page[page.index('<section id="smoothing">') : page.index('<section id="classes">')]
    assert "They are not proofs" in section
    assert "fails with probability at most 0.001, any of the 40 with probability at most 0.04." in section
    found = Accuracy.of(20, 40)
    low, high = (f"{100 * end:.1f}" for end in found.interval95)
    for name in ("correct", "abstains", "correct within l2 0.1", "correct within l2 0.25"):
        assert re.search(rf">{name}</th><td class=\"num\" data-value=\"0.500000\">50.0 %", section), name
    assert section.count(f"[{low}, {high}], n = 40") == 4
    assert '>correct within l2 0.5</th><td class="num" data-value="0.000000">0.0 %' in section
    without = page.replace(section, "").replace('<a href="#smoothing">Smoothing</a>', "")
    assert "correct within" not in without


def test_a_verdict_and_the_next_command_come_first(copy, made):
    page = made.html.decode()
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections[:2] == ["verdict", "summary"]  # there is nothing to compare a single run with
    told = judged(read_run(copy, "a run"))
    assert told is not None
    shown = Elements(page[page.index('<section id="verdict">') : page.index('<section id="summary">')].encode())
    places = [shown.text.index(text) for text in (told.headline, *told.sentences)]
    assert places == sorted(places)
    assert told.command is not None
    assert shlex.split(told.command)[0] == "specguard"
    ((_, command),) = re.findall(r"<span>(Next)</span><pre>(.*?)</pre>", page)
    assert shlex.split(html.unescape(command))[:2] == shlex.split(told.command)[:2]
    shutil.rmtree(copy)
    training(copy, ["a"], 40, "plain")
    (copy / "result.json").unlink()
    page = Elements(report({"a": copy}).html).text
    assert page.index("no study of it has finished") < page.index("the training has not finished")


def test_runs_on_other_images_are_never_in_one_table_or_figure(copy, tmp_path):
    """Of three runs two are of 40 images, and one is of 20."""
    two = sample_run(tmp_path / "two", n=40, seed=1)
    few = sample_run(tmp_path / "few", n=20, seed=2)
    page = report({"a run": copy, "two": two, "few": few}).html.decode()
    section = page[page.index('<section id="compare">') : page.index('<section id="summary">')]
    (table,) = re.findall(r'<table class="sortable sticky" id="runs">.*?</table>', section, re.DOTALL)
    assert "n = 40 in every cell" in table
    assert "few" not in table
    assert 'id="all-l2-figure_1"' in section
    assert 'data-run="2"' not in section[: section.index("Set apart")]
    apart = Elements(section[section.index("Set apart") :].encode()).text
    assert "few: its l2 results are of 20 images of digits, those of other runs of 40 images of digits." in apart
    cells = re.findall(r'<td class="num" data-value="[01]\.\d{6}">.*?</td>', table)
    assert len(cells) == 2 * (1 + 2 * len(RADII))
    for cell in cells:
        assert re.search(r"\d %.*\[\d+\.\d,&nbsp;\d+\.\d\]", cell), cell
    assert "Comparison" not in report({"a run": copy}).html.decode()


def test_runs_that_share_nothing_are_said_to_share_nothing(copy, tmp_path):
    few = sample_run(tmp_path / "few", n=20)
    page = report({"a run": copy, "few": few}).html.decode()
    section = page[page.index('<section id="compare">') : page.index('<section id="summary">')]
    assert "<table" not in section
    assert "<svg" not in section
    assert "none are compared" in section
    assert section.count("<li data-run=") == 2


def test_a_study_of_other_images_has_a_figure_of_its_own(copy, tmp_path):
    few = sample_run(tmp_path / "few", n=20)
    shutil.copytree(few / "attacks" / "quick", copy / "attacks" / "few")
    page = report({"a run": copy}).html.decode()
    assert "l2, 40 images" in page
    assert "l2, 20 images" in page
    first = page[page.index('id="curve-0-l2-figure_1"') : page.index('id="curve-0-l2-1-figure_1"')]
    assert "on 40 images" in first
    assert "on 20 images" not in first


def test_sentences_stand_only_where_there_is_what_they_speak_of(copy, made):
    page = made.html.decode()
    for text in ("shaded gap", "certified accuracy is proved", "What a certificate says", "attention rollout"):
        assert text in page
    shutil.rmtree(copy / "certificates")
    shutil.rmtree(copy / "verification")
    page = report({"a run": copy}).html.decode()
    for text in ("shaded gap", "certified accuracy is proved", "What a certificate says"):
        assert text not in page
    assert "Whiskers" in page
    shutil.rmtree(copy / "attacks")
    page = report({"a run": copy}).html.decode()
    for text in ("Robust accuracy is measured", "Whiskers", "attention rollout", 'id="radius"'):
        assert text not in page


def test_where_nothing_is_certified_the_figure_says_so(copy):
    path = copy / "certificates" / "proofs" / "summary.json"
    rows = json.loads(path.read_text())["radii"]
    changed(path, radii=[row | {"certified": accuracy(0, 40)} for row in rows])
    assert b"No image is certified at any of these radii." in report({"a run": copy}).html


def test_smoothing_of_several_runs_is_drawn_by_images(copy, tmp_path):
    few = sample_run(tmp_path / "few", n=20)
    smoothed(copy / "smooth" / "quarter", 40)
    smoothed(few / "smooth" / "quarter", 20)
    page = report({"a run": copy, "few": few}).html.decode()
    assert 'id="smoothing-figure_1"' in page
    assert 'id="smoothing-1-figure_1"' in page
    assert page.count("Each certificate fails with probability at most 0.001. Whiskers are") == 2


def test_radii_of_smoothing_that_contradict_their_summary_are_not_drawn(copy):
    smoothed(copy / "smooth" / "quarter", 40)
    lines = copy / "smooth" / "quarter" / "records.jsonl"
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    rewrite_records(lines, [record | {"radius": 0.9} if record["radius"] else record for record in records])
    found = read_run(copy, "a")
    assert found.smoothing[0].radii == ()
    (problem,) = found.problems
    assert "its certified radii do not give the accuracies of its summary" in problem
    rewrite_records(lines, records[:-1])
    assert "it holds 39 of 40 images" in read_run(copy, "a").problems[0]


def test_what_rests_on_verifiers_of_others_is_said_to_and_never_counted_as_ours(copy):
    shutil.rmtree(copy / "certificates" / "proofs")
    stop_early(copy / "certificates" / "early", 40)
    made = report({"a run": copy})
    rows = list(csv.DictReader(io.StringIO(made.csv.decode())))
    found = {row["what"]: row["count"] for row in rows if row["radius"] == "0.1" and not row["class"]}
    assert (found["certified"], found["certified, with verifiers of others"]) == ("10", "20")
    assert found["attacked"] == "30"
    run = read_run(copy, "a")
    assert run.problems == ()
    assert verdict(run) == (
        "Of 40 images, 10 are certified at l2 0.1: no perturbation of that size changes their class. "
        "10 are misclassified, clean or under attack; 10 are unknown. "
        "10 more are certified by third-party verifiers alone."
    )
    assert {each.count for each in certificate_accuracies(run).values()} == {10}


def test_the_page_of_a_damaged_run_says_so(copy):
    for path in copy.rglob("*.json"):
        path.write_bytes(path.read_bytes()[:50])
    page = Elements(report({"a": copy}).html)
    assert "some results are missing" in page.text
    assert "No accuracy has been measured yet." in page.text
    for name in ("result.json", "attacks/quick/summary.json", "certificates/proofs/summary.json"):
        assert f"{name} is not valid JSON" in page.text
