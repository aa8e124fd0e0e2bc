"""Figures of accuracy with their captions: of each run, of compared runs, of smoothing, and of training."""

from collections.abc import Sequence
from types import SimpleNamespace as View
from typing import Any

from markupsafe import Markup

from specguard.report.comparison import Comparison
from specguard.report.figures.accuracy import comparison_figure, curve_figure, norms_of
from specguard.report.figures.inline import inline_svg
from specguard.report.figures.smoothing import smoothing_figure
from specguard.report.figures.style import plain
from specguard.report.figures.training import training_figure
from specguard.report.images import Images, image_sets, images_of, norms, on_images
from specguard.report.run import Run


def draw(figure: Any, name: str, label: str) -> Markup:
    """A figure as part of the page; `name` begins its ids, `label` describes it."""
    return inline_svg(figure, name, plain(label))


def curves(runs: Sequence[Run], views: Sequence[View]) -> list[View]:
    """Accuracy by radius: a figure for each run, norm and set of images."""
    return [
        _curve(on_images(run, images), view, norm, images, place)
        for run, view in zip(runs, views, strict=True)
        for norm in norms_of(run)
        for place, images in enumerate(image_sets(run, norm))
    ]


def _curve(run: Run, view: View, norm: str, images: Images, place: int) -> View:
    name = f"curve-{view.number}-{norm}" + (f"-{place}" if place else "")
    svg = draw(curve_figure(run, norm), name, f"accuracy of {run.label} by {norm} radius")
    return View(run=view, norm=norm, images=images, svg=svg, caption=_caption(run, norm))


def _caption(run: Run, norm: str) -> str:
    proofs = [study for study in run.certificates if study.norm == norm]
    words = [f"certified and attacked on {images_of(study).text}" for study in proofs]
    words += [
        f"attacked by {', '.join(dict.fromkeys(row.attack for row in study.summary.attacks))} "
        f"on {images_of(study).text}"
        for study in run.attacks
        if norm in norms(study)
    ]
    how = [study.summary.study.settings.through for study in proofs]
    through = "".join(f" Certified {each}." for each in dict.fromkeys(how) if each)
    none = " No image is certified at any of these radii." if proofs and not _any_certified(run, norm) else ""
    text = "; ".join(dict.fromkeys(words))
    return f"{text}. Whiskers are 95 % intervals.{through}{none}"


def _any_certified(run: Run, norm: str) -> bool:
    return any(row.certified.count for study in run.certificates if study.norm == norm for row in study.rows)


def compared(runs: Sequence[Run], views: Sequence[View], found: Sequence[Comparison]) -> list[View]:
    """The comparisons with their figures; without a norm there is nothing to draw."""
    known: dict[str, int] = {}
    shown: list[View] = []
    broad = max(found, key=lambda each: len(each.rows), default=None)  # its table has what is not about images too
    for each in found:
        svg = None
        if each.norm is not None:
            place = known[each.norm] = known.get(each.norm, -1) + 1
            name = f"all-{each.norm}" + (f"-{place}" if place else "")
            figure = comparison_figure([on_images(run, each.images) for run in runs], each.norm, named=False)
            svg = draw(figure, name, f"accuracy of {len(each.rows)} runs by {each.norm} radius")
        shown.append(
            View(
                of=each,
                svg=svg,
                runs=[views[row.number] for row in each.rows],
                with_times=each is broad,
                with_medians=any(row.median for row in each.rows),
                certified=any(row.certified for row in each.rows),
                attacks=tuple(dict.fromkeys(row.attacks for row in each.rows)),
            )
        )
    return shown


def smoothed(runs: Sequence[Run], views: Sequence[View]) -> list[View]:
    """Studies of randomized smoothing, those of the same images in one figure."""
    sets = dict.fromkeys(images_of(study) for run in runs for study in run.smoothing)
    found = []
    for place, images in enumerate(sets):
        selected = [on_images(run, images) for run in runs]
        name = "smoothing" + (f"-{place}" if place else "")
        svg = draw(smoothing_figure(selected), name, "accuracy of smoothed classifiers by l2 radius")
        pairs = [(view, study) for view, run in zip(views, selected, strict=True) for study in run.smoothing]
        alphas = dict.fromkeys(f"{study.summary.failure_probability.per_image:g}" for _, study in pairs)
        found.append(View(images=images, svg=svg, studies=pairs, alphas=tuple(alphas)))
    return found


def training(runs: Sequence[Run], views: Sequence[View]) -> View | None:
    """Test accuracy over the epochs, of the runs of more than one epoch."""
    epochs = {
        number: [(record.epoch, record.test_accuracy) for record in run.training.epochs]
        for number, run in enumerate(runs)
        if run.training is not None and len(run.training.epochs) > 1
    }
    if not epochs:
        return None
    return View(
        svg=draw(training_figure(epochs), "epochs", "test accuracy over the epochs"),
        runs=[views[number] for number in epochs],
    )
