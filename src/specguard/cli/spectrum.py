"""`specguard spectrum`: run directories become singular values of every block, and a figure that compares them."""

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from specguard.adapt import from_run, untrained
from specguard.cli.console import chosen_device, err, interruptible, option, out, plain_warnings, study_bar
from specguard.cli.names import DataName, first_images, number, run_data
from specguard.errors import ConfigError
from specguard.evaluate import Spectra, spectra
from specguard.evaluate.spectra import Precision
from specguard.geometry import Ball, Norm
from specguard.nn import fingerprint
from specguard.report import direction_figure, save_figure, violin_figure
from specguard.runs import read_lines, read_tensors, write_file

_WHAT, _HOW, _WHERE = "Spectra", "Images and arithmetic", "Output"
_GROUPS = ("embedding", "block", "head")
_ROWS = 8  # of the figure of directions


def spectrum_command(
    runs: Annotated[list[Path], typer.Argument(help="directories of finished training runs")],
    blocks: Annotated[
        str, option("all, or a list with commas of names (blocks.0) and groups (block, attention, mlp, ...)", _WHAT)
    ] = "all",
    top: Annotated[int, option("singular values of each part", _WHAT, min=1)] = 1,
    tolerance: Annotated[float, option("residual at which a value is good, relative to the largest", _WHAT)] = 1e-3,
    most: Annotated[int, option("products with a Jacobian after which to give up", _WHAT, min=1)] = 100,
    dense: Annotated[
        int, option("also sqrt(|J|_1 |J|_inf), for parts of at most so many input entries", _WHAT, min=0)
    ] = 0,
    norm: Annotated[Norm, option("of the PGD-20 perturbation followed through the blocks", _WHAT)] = "l2",
    radius: Annotated[str, option("of that perturbation, in pixels of [0, 1]", _WHAT)] = "0.25",
    images: Annotated[int, option("the first N test images", _HOW, min=1)] = 500,
    data: Annotated[DataName | None, option("data set [default: the one trained on]", _HOW)] = None,
    data_root: Annotated[Path | None, option("where the data set lies [default: as in training]", _HOW)] = None,
    verify_data: Annotated[bool, option("check the official checksums", _HOW)] = True,
    batch: Annotated[int, option("images looked at together", _HOW, min=1)] = 50,
    precision: Annotated[Precision, option("arithmetic", _HOW)] = "float32",
    seed: Annotated[int, option("the only source of randomness", _HOW)] = 0,
    device: Annotated[str, option("auto, cpu, cuda or cuda:N", _HOW)] = "auto",
    out_name: Annotated[
        str | None, option("folder for the records, within each run [default: spectrum/...]", _WHERE, "--out")
    ] = None,
    figure: Annotated[
        Path | None, option("write the figure as FIGURE.svg and FIGURE.png [default: beside the records]", _WHERE)
    ] = None,
    directions: Annotated[
        int, option("keep and show the most fragile directions of the first N images", _WHERE, min=0)
    ] = 0,
) -> None:
    """Measure the singular values of every block at every image; started again, it continues where it was."""
    ball = Ball(norm, number(radius, "--radius"))
    settings = Spectra(blocks, top, tolerance, most, dense, ball, directions, batch, seed, precision)
    labels = _labels(runs)
    if figure is None and len(runs) > 1:
        raise ConfigError("a comparison of several runs needs --figure, the name of the figure's files")
    target = chosen_device(device)
    found: dict[str, list[dict[str, Any]]] = {}
    for run, label in zip(runs, labels, strict=True):
        model, start = from_run(run), untrained(run)
        loaded = run_data(run, model, data, data_root, verify_data)
        split = first_images(loaded, min(images, len(loaded.test)))
        folder = run / (out_name or f"spectrum/{_folder_name(settings, len(split))}")
        identity = {"model": fingerprint(model), "data": loaded.fingerprint(), "dataset": loaded.name}
        err.print(f"{run} on {len(split)} images, {target}, records in {folder}", markup=False, soft_wrap=True)
        advice = f"continue with: {shlex.join(['specguard', *sys.argv[1:]])}"
        with interruptible(advice), plain_warnings(), study_bar("parts") as watch:
            result = spectra(
                model, split, folder, settings, identity=identity, device=target, untrained=start, watch=watch
            )
        _print(label, result)
        found[label] = read_lines(folder / "records.jsonl")
        if directions:
            _write_directions(folder, loaded.classes, directions, found[label])
    _write_figure(violin_figure(found, _shown(found)), figure or folder / "violin")


def _write_figure(figure: Any, path: Path) -> None:
    for suffix, content in save_figure(figure).items():
        write_file(path.with_name(f"{path.name}.{suffix}"), content)
    out.print(f"figure in {path}.svg and {path}.png", markup=False, soft_wrap=True)


def _write_directions(folder: Path, classes: tuple[str, ...], count: int, records: list[dict[str, Any]]) -> None:
    """The directions of the first images, of the whole network and of the embedding, blocks and head."""
    files = sorted((folder / "directions").glob("*.safetensors"))
    tensors = [read_tensors(path) for path in files]
    shown = [n for n, part in records[0]["parts"].items() if part["group"] in (*_GROUPS, "network")]
    most = min(count, len(records), _ROWS)
    images, *directions = (
        torch.cat([part[name] for part in tensors])[:most].numpy() for name in ("images", *shown)
    )
    labels = [classes[record["label"]] for record in records[:most]]
    figure = direction_figure(images, dict(zip(shown, directions, strict=True)), labels)
    _write_figure(figure, folder / "directions")


def _shown(found: dict[str, list[dict[str, Any]]]) -> tuple[str, ...]:
    """The parts of a figure: embedding, blocks and head, or whatever there is if none of these was asked for."""
    groups = dict.fromkeys(part["group"] for records in found.values() for part in records[0]["parts"].values())
    return tuple(g for g in groups if g in _GROUPS) or tuple(groups)


def _labels(runs: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    resolved = [run.resolve() for run in runs]
    if len(set(resolved)) < len(resolved):
        raise ConfigError("the same run was given twice")
    for length in range(1, max(len(run.parts) for run in resolved) + 1):
        labels = ["/".join(run.parts[-length:]) for run in resolved]
        if len(set(labels)) == len(labels):
            break
    return labels


def _folder_name(settings: Spectra, count: int) -> str:
    text = json.dumps([str(settings), count])
    return f"{count}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _print(label: str, result: dict[str, Any]) -> None:
    title = f"{label}: largest singular values, n = {result['n']}"
    table = Table("part", "J_F, mean ± std", "median", "I + J_F", title=title)
    for part in result["parts"]:
        sigma, step = part["sigma"][0], part["step"]
        both = f"{step['mean']:.3g}" if part["kind"] == "residual" else ""
        row = (f"{sigma['mean']:.3g} ± {sigma['std']:.2g}", f"{sigma['quantiles']['50']:.3g}", both)
        table.add_row(part["name"], *row)
    out.print(table)
    if "exponent" in result and result["growth"]["n"]:
        lines = {"exponent": "Eq. 15", "log_product": "product of the steps", "growth": "PGD-20"}
        text = ", ".join(f"{name} {result[key]['mean']:.3g}" for key, name in lines.items())
        out.print(f"logarithm of the growth through the blocks: {text}")
    if lost := sum(part["unconverged"] for part in result["parts"]):
        err.print(f"warning: {lost} values did not converge; --most allows more products", style="yellow")
