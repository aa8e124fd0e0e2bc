"""The built site: every mark and formula is rendered, names are documented, and it works from a disk."""

import html
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

from helpers.chromium import CHROMIUM, FLAGS
from helpers.documentation import module_of

ROOT = Path(__file__).parents[2]
BROWSER = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium, as CI does"
)
# Modules whose public names the reference documents, and names that are constants or aliases of types.
DOCUMENTED = ("specguard", *(f"specguard.{name}" for name in (
    "attacks", "certificates", "checker", "data", "evaluation", "inputs", "linalg", "models", "nn",
    "report", "spectrum", "studies", "train",
)))  # fmt: skip
PLAIN = {
    "__version__", "AnyData", "BallLike", "CERTIFIABLE", "Classifier", "ImagesLike", "LabelsLike", "METHODS",
    "PRESETS", "Split", "TEXT_PRESETS", "UNIT",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("built") / "site"
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def article(page: str) -> str:
    """What a page says, without its navigation."""
    return page.partition("<article")[2].partition("</article>")[0]


def prose(page: str) -> str:
    """The text of a page without its code."""
    bare = re.sub(r"<(pre|code|script|style)\b.*?</\1>", " ", article(page), flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", bare))


def unrendered(page: str) -> list[str]:
    """Marks that a reader should not see: of snippets, formulas, the ledger, or Markdown's own."""
    marks = re.findall(r"<!-- ledger[^>]*>|arithmatex|--8\s?<|-{3}8<|\\[()\[\]]", article(page))
    text = prose(page)
    marks += re.findall(r"\$[^$\n]{1,200}\$|\\(?:lVert|frac|sqrt|sum|operatorname|varepsilon)\b", text)
    return marks + re.findall(r"^\s*(?:```|:::|!!!|#{2,} ).*", text, re.MULTILINE)


@pytest.mark.slow
def test_no_page_shows_a_mark_that_should_have_been_rendered(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for path in pages:
        found = unrendered(path.read_text())
        assert found == [], (path.name, found[:3])


def test_every_kind_of_unrendered_mark_is_noticed():
    for mark in (
        '--8<-- "examples/a.py"',
        '--8 < --"examples/a.py"',
        r"<span>\(x\)</span>",
        r"$\lVert W \rVert$",
        "the norm $x$ is",
        "<!-- ledger: t1 -->",
        '<span class="arithmatex">',
        "\n::: specguard.nn",
    ):
        assert unrendered(f"<article>{mark}</article>"), mark
        assert not unrendered(f"<article></article>{mark}")
    assert not unrendered("<article><p>of 5 $ and more, <code>$OUT</code> <math><mi>x</mi></math></p></article>")


@pytest.mark.slow
def test_theory_has_formulas_in_mathematical_notation(site):
    for path in sorted((site / "theory").glob("*.html")):
        page = path.read_text()
        assert page.count("<math") > 5, path.name
        formulas = re.findall(r"<code>([^<]*(?:sqrt|sum_|\^|&lt;=|sup_)[^<]*)</code>", article(page))
        assert formulas == [], path.name
    assert (site / "theorems.html").read_text().count("<math") > 40


def test_a_formula_with_an_unknown_command_is_an_error():
    hook = module_of("mathml")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a page"))
    assert "<math" in hook.on_page_content(r'<span class="arithmatex">\(\lVert x \rVert &lt; 1\)</span>', page)
    with pytest.raises(PluginError, match="a page: the formula"):
        hook.on_page_content(r'<span class="arithmatex">\(\nosuchcommand x\)</span>', page)
    with pytest.raises(PluginError, match="cannot be drawn"):
        hook.on_page_content(r'<div class="arithmatex">\[\begin{aligned} a &amp;= b \end{aligned}\]</div>', page)


@pytest.mark.slow
def test_guides_show_the_examples_as_they_stand(site):
    shown = {"quickstart": "train_attack_certify_report", "certify-timm": "certify_timm",
             "train-robust": "msvp_in_your_script", "models": "msvp_in_your_script"}  # fmt: skip
    for page, example in shown.items():
        text = html.unescape(re.sub(r"<[^>]+>", "", article((site / f"{page}.html").read_text())))
        for line in (ROOT / "examples" / f"{example}.py").read_text().splitlines():
            assert line in text, (page, line)


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    pages = [path.read_text() for path in (site / "api").glob("*.html")]
    ids = {name for page in pages for name in re.findall(r'id="(specguard[\w.]+)"', page)}
    last = {name.rpartition(".")[2] for name in ids}
    for module in DOCUMENTED:
        missing = set(importlib.import_module(module).__all__) - last - PLAIN
        assert not missing, (module, missing)


@pytest.mark.slow
def test_sections_of_docstrings_are_rendered_as_sections(site):
    page = (site / "api" / "certificates.html").read_text()
    assert "Parameters:" in prose(page)
    assert "<strong>Guarantee.</strong>" in page
    for path in sorted((site / "api").glob("*.html")):
        text = prose(path.read_text())
        assert not re.search(r"\b(Args|Returns|Raises|Example):\s*\w+: ", text), path.name
        assert "Guarantee: " not in text, path.name


def test_docstrings_are_prepared_for_the_reference():
    rendered = module_of("docstrings").rendered
    assert rendered("The norm.\n\nGuarantee: upper bound.\nCost: one pass.") == (
        "The norm.\n\n\n**Guarantee.** upper bound.\n\n**Cost.** one pass."
    )
    assert rendered("max <g, d>, `<g, d>`, 1 < 2") == "max &lt;g, d>, `<g, d>`, 1 < 2"
    example = "Example:\n    >>> thing()\n    <thing>\n\nthe <end>"
    assert rendered(example) == "Examples:\n    >>> thing()\n    <thing>\n\nthe &lt;end>"
    assert rendered("Example: a word") == "Example: a word"


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere_and_every_local_file_is_there(site):
    for path in sorted(site.rglob("*.html")):
        page = path.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="?([^">\s]+)', page)
        loaded += re.findall(r'<link[^>]*rel="?(?:stylesheet|icon|preload)"?[^>]*href="?([^">\s]+)', page)
        loaded += re.findall(r'<link[^>]*href="?([^">\s]+)"?[^>]*rel="?(?:stylesheet|icon|preload)', page)
        assert loaded
        if path.name == "404.html":  # its addresses are those of a server
            continue
        for target in loaded:
            if not target.startswith("data:"):
                assert (path.parent / target.partition("?")[0]).exists(), (path.name, target)


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, site) -> Iterator[object]:
    """Opens a page by file://; at the end, no page has complained or asked for anything that is not in the site."""
    said, asked, contexts = [], [], []

    def visit(name: str = "index", theme: str = "light", width: int = 1200):
        context = chromium.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / f"{name}.html").as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert said == []
    assert len(asked) > 3
    assert [url for url in asked if not url.startswith(("data:", "blob:", site.as_uri()))] == []


@BROWSER
@pytest.mark.slow
def test_a_search_from_a_disk_finds_pages_and_leads_to_them(opened):
    page = opened()
    page.locator("input.md-search__input").click()
    page.keyboard.type("clopper")
    results = page.locator("a.md-search-result__link")
    results.first.wait_for(timeout=20_000)
    assert any("smoothing.html" in (link.get_attribute("href") or "") for link in results.all())
    first = results.first.get_attribute("href").partition("?")[0]
    results.first.click()
    page.wait_for_url(lambda url: first.rpartition("/")[2] in url)


@BROWSER
@pytest.mark.slow
def test_the_theme_follows_the_system_and_can_be_chosen(opened):
    page = opened(theme="dark")

    def scheme() -> str:
        return page.evaluate("document.body.dataset.mdColorScheme")

    assert scheme() == "slate"  # that of the system
    found = [scheme()]
    for _ in range(3):
        page.locator("form[data-md-component=palette] label:visible").click()
        found.append(scheme())
    assert found == ["slate", "default", "slate", "slate"]  # system, light, dark, system again
    page.locator("form[data-md-component=palette] label:visible").click()
    page.reload()
    assert scheme() == "default", "the choice is kept"


@BROWSER
@pytest.mark.slow
def test_a_phone_scrolls_formulas_and_tables_but_never_the_page(opened, site):
    names = [
        str(path.relative_to(site).with_suffix("")) for path in sorted(site.rglob("*.html")) if path.stem != "404"
    ]
    page = opened(width=390)
    for name in names:
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name


@BROWSER
@pytest.mark.slow
def test_formulas_and_figures_are_drawn(opened):
    page = opened("theory/attention")
    boxes = page.locator("math").evaluate_all("all => all.map((m) => m.getBoundingClientRect().height)")
    assert len(boxes) > 50
    assert min(boxes) > 5
    assert max(boxes) > 30, "a fraction is higher than a line"
    page = opened("results/cifar10_certified", theme="dark")
    figure = page.locator("article img").first
    assert figure.evaluate("image => image.complete && image.naturalWidth > 0")
    assert figure.bounding_box()["width"] > 400
    assert "invert" in figure.evaluate("image => getComputedStyle(image).filter")
