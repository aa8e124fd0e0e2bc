"""Figures are the same bytes every time, say what the records say, and take every label as plain text."""

import ast
import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from helpers.sample_runs import sample_run
from specguard import report
from specguard.records.spectrum import PartRecord, SpectrumRecord
from specguard.report import direction_figure, save_figure, violin_figure

PACKAGE = Path(report.__file__).parent


def records(
    parts: tuple[str, ...] = ("embedding", "blocks.0", "blocks.0.mlp", "blocks.1", "head"),
    count: int = 12,
    seed: int = 0,
    **fixed: float,
) -> list[SpectrumRecord]:
    """Records as a study writes them; `fixed` gives every image the same value."""
    rng = np.random.default_rng(seed)
    found = []
    for sample in range(count):
        rows = {}
        for name in parts:
            last = name.rpartition(".")[2]
            sigma, step = fixed.get("sigma", rng.gamma(4.0)), fixed.get("step", 1 + rng.gamma(4.0))
            rows[name] = PartRecord(
                group="block" if last.isdigit() else last,
                kind="residual" if "." in name else "map",
                sigma=(float(sigma), float(sigma) / 2),
                residual=(0.0, 0.0),
                converged=True,
                step=float(step),
                entering=1.0,
                leaving=2.0,
                row_column=None,
            )
        found.append(SpectrumRecord(sample=sample, label=0, parts=rows))
    return found


def violins(figure: Figure) -> list[int]:
    """How many violins each axis has."""
    return [len([c for c in axis.collections if type(c).__name__ != "LineCollection"]) for axis in figure.axes]


def labels(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [shown(text) for text in legend.get_texts()]


def shown(text: Text) -> str:
    """What is drawn: a text that is not read as mathematics is drawn as it is."""
    assert not text.get_parse_math()
    return text.get_text()


def parsed(figure: Figure) -> ElementTree.Element:
    """The SVG, which is well-formed, without scripts, links or events; and the PNG beside it."""
    files = save_figure(figure)
    assert list(files) == ["svg", "png"]
    assert files["png"].startswith(b"\x89PNG\r\n")
    root = ElementTree.fromstring(files["svg"])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    for element in root.iter():
        assert element.tag.rpartition("}")[2] not in ("script", "foreignObject", "a")
        assert not any(key.lower().startswith("on") for key in element.attrib)
    return root


def hashed(runs: dict[str, list[SpectrumRecord]]) -> str:
    return " ".join(hashlib.sha256(content).hexdigest() for content in save_figure(violin_figure(runs)).values())


# The same bytes ----------------------------------------------------------------------------------------------


def test_the_same_records_give_the_same_bytes():
    runs = {"first": records(), "second": records(seed=1)}
    assert save_figure(violin_figure(runs)) == save_figure(violin_figure(runs))


def test_a_figure_saved_twice_gives_the_same_bytes():
    figure = violin_figure({"first": records(), "second": records(seed=1)})
    assert save_figure(figure) == save_figure(figure)


def test_directions_give_the_same_bytes():
    rng = np.random.default_rng(0)
    images, found = rng.random((2, 3, 8, 8)), {"network": rng.standard_normal((2, 3, 8, 8))}
    one, other = (save_figure(direction_figure(images, found, ["cat", "dog"])) for _ in range(2))
    assert one == other


def test_another_process_gives_the_same_bytes():
    """With another seed of hashes, as every process has."""
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); from report.test_figures import *;"
        "print(hashed({'a': records(), 'b': records(seed=1)}), end='')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[1])],
        env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert found == hashed({"a": records(), "b": records(seed=1)})


def test_no_date_is_in_the_files():
    for content in save_figure(violin_figure({"a": records()})).values():
        assert b"dc:date" not in content
        assert b"Creation Time" not in content


def test_other_records_give_other_bytes():
    assert save_figure(violin_figure({"a": records()})) != save_figure(violin_figure({"a": records(seed=1)}))


# What is drawn -----------------------------------------------------------------------------------------------


def test_there_is_a_violin_for_every_run_and_part_of_the_groups_in_both_axes():
    figure = violin_figure({"a": records(), "b": records(seed=1), "c": records(seed=2)})
    assert violins(figure) == [12, 12]  # embedding, two blocks and head: not the branch
    assert violins(violin_figure({"a": records()}, groups=("mlp",))) == [1, 1]
    assert [t.get_text() for t in figure.axes[1].get_xticklabels()] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert labels(figure) == ["a", "b", "c"]


def test_the_median_that_is_drawn_is_that_of_the_values():
    found = records(count=9)
    figure = violin_figure({"a": found})
    for axis, values in (
        (figure.axes[0], [r.parts["head"].sigma[0] for r in found]),
        (figure.axes[1], [r.parts["head"].step for r in found]),
    ):
        (medians,) = [c for c in axis.collections if type(c).__name__ == "LineCollection"]
        assert medians.get_segments()[-1][0, 1] == pytest.approx(np.median(values))


def test_no_violin_is_cut_at_either_end():
    """The outline is narrow where it ends, and ends beyond all values."""
    found = records(count=40)
    figure = violin_figure({"a": found, "b": records(count=40, seed=1)})
    for axis, key in zip(figure.axes, ("sigma", "step"), strict=True):
        bodies = [c for c in axis.collections if type(c).__name__ != "LineCollection"]
        for body in bodies:
            outline = body.get_paths()[0].vertices
            widths = {y: np.ptp(outline[outline[:, 1] == y, 0]) for y in set(outline[:, 1])}
            widest = max(widths.values())
            assert widths[min(widths)] < 0.05 * widest
            assert widths[max(widths)] < 0.05 * widest
            low, high = axis.get_ylim()
            assert low < min(widths) < max(widths) < high
        values = [r.parts["head"].sigma[0] if key == "sigma" else r.parts["head"].step for r in found]
        outline = bodies[3].get_paths()[0].vertices[:, 1]
        assert outline.min() < min(values) < max(values) < outline.max()


@pytest.mark.parametrize(("runs", "parts"), [(1, 14), (6, 14), (6, 50), (70, 3)])
def test_every_part_of_every_run_has_a_place_and_rows_are_not_too_full(runs, parts):
    names = tuple(f"blocks.{place}" for place in range(parts))
    figure = violin_figure({f"run {k}": records(names, count=1) for k in range(runs)})
    shown = [[t.get_text() for t in axis.get_xticklabels()] for axis in figure.axes[1::2]]
    assert [name for row in shown for name in row] == list(names)
    assert all(len(row) * runs <= 64 or len(row) == 1 for row in shown)
    assert sum(violins(figure)) == 2 * runs * parts
    assert figure.get_figwidth() <= 14


def test_runs_of_different_depth_leave_places_empty_whichever_comes_first():
    deep = records(("embedding", "blocks.0", "blocks.1", "blocks.2", "head"))
    flat, local = records(("embedding", "blocks.0", "head")), records(("embedding", "local_blocks.0", "head"))
    for runs in ({"deep": deep, "flat": flat, "local": local}, {"local": local, "flat": flat, "deep": deep}):
        figure = violin_figure(runs)
        names = [t.get_text() for t in figure.axes[1].get_xticklabels()]
        assert names[:5] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
        assert sorted(names[5:]) == ["local_blocks.0"]
        assert violins(figure) == [11, 11]
        parsed(figure)


@pytest.mark.parametrize(
    "found",
    [
        records(sigma=1.5, step=2.0),
        records(sigma=0.0),
        records(sigma=0.0, step=0.0),
        records(count=1),
        records(count=2),
        records(count=1, sigma=1.0, step=1.0),
        records(sigma=1e-30, step=1e30),
        records(sigma=math.nan),
        records(sigma=math.inf),
        [*records(count=3), *records(count=1, sigma=0.0, step=0.0)],
        [*records(count=3, sigma=1e-12, step=1e-12), *records(count=3, sigma=1e12, step=1e12)],
        [*records(count=3, sigma=1.0, step=1.0), *records(count=3, sigma=1 + 2e-16, step=1 + 2e-16)],
    ],
    ids=["constant", "zero", "all zero", "one image", "two images", "one constant", "far apart", "NaN", "infinite",
         "one zero", "24 decades", "equal but for rounding"],
)  # fmt: skip
def test_values_of_every_kind_can_be_drawn(found):
    parsed(violin_figure({"run": found, "other": records(("head",), count=3)}))


@pytest.mark.parametrize("count", [9, 30])
def test_many_runs_can_be_drawn(count):
    figure = violin_figure({f"run {i}": records(("blocks.0", "head"), count=3, seed=i) for i in range(count)})
    assert violins(figure) == [2 * count, 2 * count]
    assert len(labels(figure)) == count
    parsed(figure)


def test_many_parts_can_be_drawn():
    names = ("embedding", *(f"blocks.{i}" for i in range(48)), "head")
    parsed(violin_figure({"a": records(names, count=3), "b": records(names, count=3, seed=1)}))


@pytest.mark.parametrize("runs", [{}, {"a": []}, {"a": records(("blocks.0.mlp",))}])
def test_a_figure_of_nothing_is_refused(runs):
    with pytest.raises(ValueError, match="no part"):
        violin_figure(runs)


def test_a_run_without_records_leaves_its_place_empty():
    figure = violin_figure({"a": records(), "b": []})
    parsed(figure)
    assert violins(figure) == [4, 4]


# Labels ------------------------------------------------------------------------------------------------------

LABELS = [
    "<script>alert(1)</script>", "]]><script>", "--><script>alert(1)</script><!--", "-", "--", "a--b-->",
    "&lt;&amp;&", '"><a href="javascript:alert(1)">', "$x$", "$\\frac{", "a $ b", r"\$5", "$", "\\", "100 %", "{x}",
    "Größe, naïve", "α = 0.5 ± ∞", " ", "_private", "__", "a\nb", "https://example.org/",
]  # fmt: skip


@pytest.mark.parametrize("label", LABELS)
def test_the_label_of_a_run_is_inert_text_and_is_in_the_legend(label):
    figure = violin_figure({label: records(("head",), count=2), "other": records(("head",), count=2, seed=1)})
    parsed(figure)
    assert labels(figure) == [label, "other"]


@pytest.mark.parametrize("label", LABELS)
def test_the_labels_of_directions_are_inert_text(label):
    images = np.random.default_rng(0).random((1, 1, 4, 4))
    figure = direction_figure(images, {label: images - 0.5}, [label])
    parsed(figure)
    first, second = figure.axes
    assert shown(first.yaxis.label) == shown(second.title) == label


@pytest.mark.parametrize("name", ["$x$", "$\\frac$", "<script>", "a&b", "_x"])
def test_the_name_of_a_part_is_inert_text(name):
    found = [
        msgspec.structs.replace(record, parts={name: record.parts["head"]})
        for record in records(("head",), count=3)
    ]
    figure = violin_figure({"a": found})
    parsed(figure)
    assert [shown(t) for t in figure.axes[1].get_xticklabels()] == [name]


@pytest.mark.parametrize("label", ["bell\x07", "nul\x00", "escape\x1b[31m", "\udcff", "実験"], ids=ascii)
def test_a_label_that_no_xml_or_no_font_can_hold_still_gives_a_file_that_can_be_read(label):
    """Folders may be called anything, and a run is labeled by its folder."""
    parsed(violin_figure({label: records(("head",), count=2)}))


def test_the_long_names_of_many_runs_leave_room_for_the_figure():
    runs = {f"cifar10-vit-small-msvp-0.01-seed-{i}-2024-05-0{i}": records(seed=i, count=3) for i in range(8)}
    figure = violin_figure(runs)
    parsed(figure)
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0
    assert legend.x1 <= figure.bbox.x1
    assert legend.y0 >= figure.axes[0].get_window_extent().y1  # above the violins


# Directions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_directions_are_shown_beside_their_image_with_gray_where_nothing_changes(channels):
    images = np.full((2, channels, 4, 4), 0.25)
    direction = np.zeros((2, channels, 4, 4))
    direction[1, :, 0, 0], direction[1, :, 3, 3] = 0.01, -0.02
    figure = direction_figure(images, {"network": direction}, ["cat", "dog"])
    shown = [axis.images[0].get_array() for axis in figure.axes]
    assert len(shown) == 4
    np.testing.assert_allclose(shown[0], 0.25)
    np.testing.assert_allclose(shown[1], 0.5)  # no change at all, and no division by zero
    np.testing.assert_allclose(shown[3][0, 0], 0.75)
    np.testing.assert_allclose(shown[3][3, 3], 0.0)
    np.testing.assert_allclose(shown[3][1, 1], 0.5)
    assert [axis.get_ylabel() for axis in figure.axes] == ["cat", "", "dog", ""]
    parsed(figure)


def test_images_without_directions_are_images():
    parsed(direction_figure(np.zeros((3, 1, 4, 4), dtype=np.float32), {}, ["a", "b", "c"]))


@pytest.mark.parametrize("channels", [2, 4])
def test_images_that_are_neither_gray_nor_colored_are_refused(channels):
    """Four channels are not three and a transparency."""
    images = np.zeros((1, channels, 4, 4))
    with pytest.raises(ValueError):
        direction_figure(images, {}, ["a"])


# Imports -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_no_module_of_reports_imports_torch_or_what_imports_it(path):
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            named.add(node.module)
    ours = {name for name in named if name.split(".")[0] == "specguard"}
    free = ("report", "records", "errors", "printable", "version")
    assert all(name.split(".")[1] in free for name in ours)
    assert "specguard.records.store" not in ours  # which handles tensors
    assert not {"torch", "jaxtyping", "torchvision", "timm"} & {n.split(".")[0] for n in named}
    assert "safetensors.torch" not in named


def test_reports_are_made_where_there_is_no_torch(tmp_path):
    code = """
import sys
class NoTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTorch())
from pathlib import Path
from specguard.report import report, run_directories
(run,) = run_directories(Path(sys.argv[1]))
page = report({"a": run}).html
assert b'id="violin-' in page and b'id="proofs"' in page and b"some results are missing" not in page
"""
    sample_run(tmp_path / "run", n=20)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
