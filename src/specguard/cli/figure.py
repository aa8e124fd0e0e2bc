"""Figures that a command writes: their names, and both of their files."""

from pathlib import Path

from matplotlib.figure import Figure

from specguard.cli.console import out
from specguard.errors import ConfigError
from specguard.records.files import write_file
from specguard.report import save_figure


def check_figure(path: Path | None) -> None:
    """Refuse what is not the name of a file."""
    if path is not None and path.name in ("", ".."):
        raise ConfigError(f"--figure takes the name of a file, not {str(path)!r}")


def write_figure(figure: Figure, path: Path) -> None:
    """PATH.svg and PATH.png, also where one of them was named, and a line that says so."""
    base = path.with_suffix("") if path.suffix in (".svg", ".png") else path
    for suffix, content in save_figure(figure).items():
        write_file(base.with_name(f"{base.name}.{suffix}"), content)
    out.print(f"figure in {base}.svg and {base}.png", soft_wrap=True)
