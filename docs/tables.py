"""Write the tables and figures of the README and of docs/results from the committed results; --check compares them.

A table stands in one file, between the marks `<!-- name -->` and `<!-- end of name -->`.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from published import attacked, cauchy, certified, speed
from published.added import added
from published.cells import ROOT
from published.figures import FIGURES
from published.finetuned import timm_finetune
from published.headlines import headline_list, headline_table
from published.relational import relational
from published.smoothed import digits_smoothing

README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results"
STUDIES: dict[str, Callable[[], str]] = {
    "digits_certified": certified.digits_certified,
    "digits_shift": certified.digits_shift,
    "cifar10_certified": certified.cifar10_certified,
    "cifar10_lofast": certified.cifar10_lofast,
    "sst2_certified": certified.sst2_certified,
    "relational": relational,
    "cifar10_deit_tiny": attacked.cifar10_deit_tiny,
    "cifar10_deit_tiny_pgd": attacked.cifar10_deit_tiny_pgd,
    "digits_pgd": attacked.digits_pgd,
    "digits_smoothing": digits_smoothing,
    "timm_finetune": timm_finetune,
    "cifar10_cauchy": cauchy.cifar10_cauchy,
    "digits_cauchy": cauchy.digits_cauchy,
    "attack_throughput": speed.attack_throughput,
    "msvp_overhead": speed.msvp_overhead,
    "certify_speed": speed.certify_speed,
    "jacobian_norm": speed.jacobian_norm,
    "scale_out": speed.scale_out,
}
OF_README = ("relational", "digits_certified", "cifar10_certified", "sst2_certified", "cifar10_deit_tiny_pgd")
PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"headlines": partial(headline_list, OF_README, "docs/results/")},
    RESULTS / "index.md": {"headlines": partial(headline_table, STUDIES, "")},
    **{RESULTS / f"{name}.md": {name: table} for name, table in STUDIES.items()},
    RESULTS / "relational.md": {"relational": relational, "added": added},
}


def with_tables(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """The text with everything between the two marks of every table replaced."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"there is not one place for the table {name}")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{table()}\n\n{end}{after}"
    return text


def stale() -> list[str]:
    """The files that no longer show the committed results."""
    texts = {page: page.read_text() for page in PAGES}
    pages = [page for page, tables in PAGES.items() if with_tables(texts[page], tables) != texts[page]]
    figures = [figure.path for figure in FIGURES if not figure.current()]
    return [str(path.relative_to(ROOT)) for path in (*pages, *figures)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(f"not current: {', '.join(old)}; run make tables" if (old := stale()) else 0)
    for page, tables in PAGES.items():
        page.write_text(with_tables(page.read_text(), tables))
    for figure in FIGURES:
        if not figure.current():
            figure.write()
