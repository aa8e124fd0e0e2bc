"""The report in a real browser: complete, quiet, sealed, usable, and readable in the light and in the dark."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.chromium import CHROMIUM, FLAGS
from helpers.sample_runs import sample_run
from specguard.report import write_report

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium, as CI does"
)
HOSTILE = "</text><script>window.taken=1</script><img src=x onerror=window.taken=1>"
FIGURES = (
    *(f"curve-{run}-l2" for run in range(3)), "all-l2", "violin", "weights", "epochs",
    *(f"methods-{run}-0" for run in range(3)),
)  # fmt: skip
SECTIONS = (
    "verdict",
    "compare",
    "summary",
    "radius",
    "images",
    "blocks",
    "weights",
    "proofs",
    "classes",
    "flags",
    "work",
)
# For every text that can be seen: the contrast of its color with what is behind it, by WCAG 2.
CONTRASTS = """() => {
  const number = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (c) => { const x = c / 255; return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const c = number(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element), drawn = element instanceof SVGElement;
    const [x, y] = [luminance(number(drawn ? style.fill : style.color)), luminance(behind(element))];
    found.push([(Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05), text.slice(0, 40)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """Three runs: one of plain names, one that attacks whoever reads it, and one of a third kind."""
    folder = tmp_path_factory.mktemp("report")
    names = {"first": "plain", HOSTILE: HOSTILE, "third": "=SUM(A1)"}
    runs = {
        label: sample_run(folder / str(number), name=name, seed=number)
        for number, (label, name) in enumerate(names.items())
    }
    return write_report(runs, folder / "report.html", title="A report")


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, file) -> Iterator[object]:
    """Opens the page in a theme; at the end, nothing was said on the console and nothing left the page."""
    said, asked, contexts = [], [], []

    def visit(theme: str = "light", width: int = 1200):
        context = chromium.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append("a dialog"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        return page

    visit.said = said
    yield visit
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", file.as_uri()))] == []


def test_every_section_and_figure_is_there_and_seen(opened):
    page = opened()
    assert page.title() == "A report"
    for name in SECTIONS:
        assert page.locator(f"section#{name}").is_visible(), name
        assert page.locator(f"nav a[href='#{name}']").count() == 1, name
    drawn = page.locator("svg.figure")
    assert drawn.count() == len(FIGURES)
    for name in FIGURES:
        box = page.locator(f"svg.figure:has(#{name}-figure_1)").bounding_box()
        assert box["width"] > 200, name
        assert box["height"] > 100, name
    pictures = page.locator(".adversarial img")
    assert pictures.count() == 3 * 2 * 6
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")


def test_names_that_hold_scripts_are_shown_and_do_nothing(opened):
    page = opened()
    assert page.locator("bdi", has_text=HOSTILE).count() > 3
    assert page.evaluate("window.taken") is None
    assert page.locator("script").count() == 1
    assert page.locator("img[src='x']").count() == 0
    assert page.locator("svg text", has_text="<script>").count() > 0  # of the legend of the violins


def test_the_policy_forbids_whatever_is_not_the_pages_own(opened):
    page = opened()
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.taken = 1';"
        " document.body.append(s); }"
    )
    assert page.evaluate("window.taken") is None
    (complaint,) = opened.said
    assert "Content Security Policy" in complaint
    opened.said.clear()


def test_a_column_is_sorted_by_value_down_and_up(opened):
    page = opened()
    table = page.locator("table#accuracies")
    page.locator("details.long summary").first.click()
    button = table.locator("thead button", has_text="accuracy")

    def values() -> list[float]:
        return [
            float(v) for v in table.locator("tbody td:last-child").evaluate_all("t => t.map(c => c.dataset.value)")
        ]

    before = values()
    button.click()
    assert values() == sorted(before, reverse=True)
    assert table.locator("th[aria-sort='descending']").inner_text() == button.inner_text()
    button.click()
    assert values() == sorted(before)
    assert before not in (sorted(before), sorted(before, reverse=True))


def test_cells_without_a_value_come_last_either_way(opened):
    page = opened()
    page.locator("details.long summary").first.click()
    button = page.locator("table#accuracies thead button", has_text="ball")
    for _ in range(2):
        button.click()
        cells = page.locator("table#accuracies tbody td:nth-child(4)").all_inner_texts()
        assert cells[-1] == ""
        assert cells[0] != ""


def test_a_run_that_is_not_chosen_disappears_from_tables_and_figures(opened):
    page = opened()
    parts = page.locator("[data-run='0']:not(.off)")
    kinds = set(parts.evaluate_all("found => found.map((part) => part.tagName.toLowerCase())"))
    assert {"tr", "article", "figure", "g", "section", "details", "div"} <= kinds | {"section"}
    box = page.locator(".chooser input").first
    box.uncheck()
    assert parts.count() == 0
    assert not page.locator("#curve-0-l2-figure_1").is_visible()
    assert page.locator("#curve-1-l2-figure_1").is_visible()
    assert page.locator("#violin-figure_1").is_visible()
    box.check()
    assert page.locator("#curve-0-l2-figure_1").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_is_readable_in_both_themes(opened, theme):
    page = opened(theme)
    page.evaluate("for (const folded of document.querySelectorAll('details')) folded.open = true")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 300
    assert min(contrasts)[0] >= 4.5, min(contrasts)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark.removeprefix("rgb(").removesuffix(")").split(","))) < 100) == (theme == "dark")


def test_the_measure_of_contrast_finds_text_that_cannot_be_read(opened):
    page = opened()
    page.evaluate("document.querySelector('.lead').style.color = '#cccccc'")
    assert min(page.evaluate(CONTRASTS))[0] < 2


def test_a_phone_scrolls_tables_but_never_the_page(opened):
    page = opened(width=380)
    page.evaluate("for (const folded of document.querySelectorAll('details')) folded.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    assert page.locator("svg.figure").first.bounding_box()["width"] > 250


def test_a_table_wider_than_the_phone_says_that_it_scrolls_and_keeps_its_first_column(opened):
    page = opened(width=380)
    region = page.locator(".scroll:has(table#runs)")
    assert region.evaluate("table => table.scrollWidth > table.clientWidth")
    assert "scroll sideways" in region.evaluate("table => getComputedStyle(table, '::before').content")
    head = page.locator("table#runs tbody th").first
    before = head.bounding_box()["x"]
    region.evaluate("table => { table.scrollLeft = 200; }")
    assert region.evaluate("table => table.scrollLeft") > 100
    assert abs(head.bounding_box()["x"] - before) <= 2
    assert (
        opened(width=1600)
        .locator(".scroll:has(table#growth)")
        .evaluate("t => getComputedStyle(t, '::before').content")
        == "none"
    )


def test_the_legend_of_a_figure_has_the_colors_of_its_lines(opened):
    page = opened()
    for number in range(3):
        swatch = page.locator(f"#compare .legend [data-run='{number}'] .swatch")
        line = page.locator(f"#all-l2-run-{number}-certified-0 path").first
        assert swatch.evaluate("e => getComputedStyle(e).backgroundColor") == line.evaluate(
            "e => getComputedStyle(e).stroke"
        )
    for path in page.locator("svg.figure path[stroke]").all():
        assert path.evaluate("e => getComputedStyle(e).stroke") != "none", path.get_attribute("stroke")


def test_paper_is_wide_enough(opened):
    page = opened(width=690)
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= 690


def test_it_prints_without_what_only_a_screen_needs(opened):
    page = opened("dark")
    page.emulate_media(media="print")
    assert not page.locator(".chooser").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert min(page.evaluate(CONTRASTS))[0] >= 4.5
