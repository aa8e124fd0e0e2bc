"""Is this model robust, how do I know, how do I make it so? Ordinary studies within a time, and a verdict."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from specguard.data import Data, Dataset
from specguard.data.dataset import AbsentSplit
from specguard.diagnosis.plan import Clock, Plan, allotment
from specguard.diagnosis.result import Diagnosis, stage_line
from specguard.diagnosis.stages import Stage, stages_of
from specguard.diagnosis.subject import Subject, described, measure
from specguard.errors import ConfigError
from specguard.geometry import as_norm
from specguard.inputs import as_device, as_samples, dtype_of, eval_mode, warn_of_normalization, warn_of_train_mode
from specguard.models import Wrapped
from specguard.models.convert import convert_as_given, is_convertible
from specguard.models.wrapped import logits_of
from specguard.nn import TextEncoder
from specguard.records.diagnosis import Decision, DiagnosisHeader, DiagnosisSettings, Measured, Spent
from specguard.records.files import check_below, locked
from specguard.records.study import Progress, Watcher
from specguard.report import Verdict, read_run, verdict, write_report
from specguard.report.evidence import evidence
from specguard.report.next_command import Commands
from specguard.report.verdict import NotTried

Say = Callable[[str], None]
_STEPS = 1000  # of the progress bar
_READ = 1000  # images, at most, of data that are no data set


def diagnose(
    model: nn.Module | Callable[..., Any],
    data: Any,
    labels: Any = None,
    *,
    minutes: float = 10.0,
    norm: str | None = None,
    radii: float | Sequence[float] = (),
    images: int | None = None,
    first: bool = False,
    memory: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    out: Path | str | None = None,
    place: Path | None = None,
    label: str = "model",
    say: Say = lambda text: None,
    watch: Watcher = lambda progress: None,
    clock: Clock = time.perf_counter,
) -> Diagnosis:
    """Attack a model, look for its fragile blocks, certify it by all methods that fit, and judge its robustness.

    Every stage is an ordinary study, in a folder below `out`. How many images, radii and methods it has is planned
    from costs that are measured on the first images, and written down before it begins: a diagnosis that was
    interrupted, started again with the same `out`, comes to the same result.

    Args:
        model: a classifier of images in [0, 1]; a model of timm, torchvision or transformers is converted as a
            function of what it is given, without normalization. Any callable can be attacked but not certified.
        data: a data set, whose test images are taken, or anything that `specguard.inputs.as_samples` takes: a pair
            (images, labels), a DataLoader, an iterable of batches; of these the first 1,000 images.
        labels: of images that are given without them.
        minutes: for all of it, about.
        norm: "l2" or "linf"; both by default.
        radii: of attacks and proofs, with `norm`; chosen from the model by default.
        images: the largest number of images of a stage; 200 by default, and as many as fit the time.
        first: whether to take the first images also of data sorted by class, instead of a stratified subset.
        memory: GiB for certificates.
        seed: of all random numbers.
        device: where the model is evaluated; that of its weights by default.
        out: the folder of the studies and the report; by default they are not kept.
        place: the run directory above `out`, whose other studies count too, and are in the report.
        label: the name of the model in the report.
        say: called with sentences on what every stage was given.
        watch: called with the progress of the whole.
        clock: tells seconds.

    Returns:
        The verdict with its numbers.

    Raises:
        ConfigError: settings that contradict each other.

    Example:
        >>> import specguard
        >>> from specguard.data import digits
        >>> from specguard.nn import ViT, preset
        >>> model = ViT(preset("tiny_smooth", dim=8, heads=2), torch.Generator().manual_seed(0)).eval()
        >>> specguard.diagnose(model, digits(), minutes=0.05, norm="l2", images=2).stages[0].stage
        'gradients'
    """
    settings = DiagnosisSettings(
        minutes=_number("minutes", minutes),
        norm=None if norm is None else as_norm(norm),
        radii=_radii(radii),
        images=None if images is None else _whole("images", images),
        first=first,
        memory=None if memory is None else _number("memory", memory),
        seed=_whole("seed", seed),
    )
    if isinstance(model, TextEncoder):
        raise ConfigError("diagnose takes models of images; attack and certify also take models of text")
    if not callable(model):
        raise ConfigError(f"a {type(model).__name__} cannot be called and is no model; from_run(PATH) loads a run")
    network = model if isinstance(model, nn.Module) else Wrapped(model).eval()
    warn_of_normalization(network)
    warn_of_train_mode(network)
    target = _device(network, device)
    network.to(target)
    with ExitStack() as stack:
        stack.enter_context(eval_mode(network))
        named = data if isinstance(data, Data) else _named(network, data, labels, target)
        network = _converted(network, named, target, say)
        about = described(network, named)
        folder = stack.enter_context(TemporaryDirectory()) if out is None else out
        subject = Subject(network, named, about, settings, Path(folder), target, clock)
        return _diagnosed(subject, None if out is None else Path(place or out), label, say, watch)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    return float(value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    return value


def _radii(radii: Any) -> tuple[float, ...]:
    """One radius or several, in ascending order."""
    several = radii if isinstance(radii, tuple | list) else (radii,)
    return tuple(sorted(_number("a radius", radius) for radius in several))


def _diagnosed(subject: Subject, run: Path | None, label: str, say: Say, watch: Watcher) -> Diagnosis:
    """Do what is left of the stages, and judge what is there; `run` is None where nothing is kept."""
    with locked(subject.folder):
        plan = Plan(subject.folder, DiagnosisHeader(about=subject.about, settings=subject.settings))
        measured = _work(subject, plan, say, watch)
    place = run or subject.folder
    found = read_run(place, label)
    decisions = tuple(plan.decisions.values())
    judged = verdict(found, _not_tried(decisions), measured.clean)
    judged = judged or _without_studies(measured, decisions, Commands(found))
    judged = _with_needs(judged, subject.data, Commands(found))
    return Diagnosis(
        judged,
        evidence(found),
        measured.clean,
        decisions,
        None if run is None else subject.folder,
        None
        if run is None
        else write_report({label: place}, subject.folder / "report.html", verdicts={label: judged}),
    )


def _with_needs(judged: Verdict, data: Data, commands: Commands) -> Verdict:
    """The verdict, which says of a command that trains on this data that there are no images for it yet."""
    trains = judged.command is not None and judged.command.startswith("specguard train ")
    if not trains or commands.is_run or not isinstance(data.train, AbsentSplit):
        return judged
    need = f"The next command needs training images, and the folder {data.train.where} does not exist."
    return replace(judged, sentences=(*judged.sentences[:-1], " ".join((*judged.sentences[-1:], need))))


def _without_studies(measured: Measured, decisions: Sequence[Decision], commands: Commands) -> Verdict:
    """The verdict where there was no time for any study."""
    text = f"Open: {measured.clean} are classified correctly, and no study fits the time."
    return Verdict(text, (), commands.diagnose("--minutes", str(max(d.minutes or 1 for d in decisions))))


def _not_tried(decisions: Sequence[Decision]) -> NotTried | None:
    """Why no proof was tried, where none was."""
    proofs = [decision for decision in decisions if decision.stage.startswith("certificates")]
    if not proofs or any(decision.run for decision in proofs):
        return None
    return NotTried(proofs[0].reason, max((d.minutes for d in proofs if d.minutes is not None), default=None))


def _device(model: nn.Module, chosen: torch.device | str | None) -> torch.device:
    """The device that was chosen, or that of the weights."""
    if chosen is not None:
        return as_device(chosen)
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _converted(model: nn.Module, data: Data, device: torch.device, say: Say) -> nn.Module:
    """A model of another library as a network of this package, whose proofs, blocks and smoothing are known.

    It is the same function of the images as they are given, which is checked, up to the rounding of combined
    weights, as of `convert`; attacks and proofs are about it. One that cannot be converted is attacked as it is.
    """
    if not is_convertible(model):
        return model
    images = data.take(1, first=True).batch(slice(None))[0].to(device)
    try:
        network = convert_as_given(model, images)
    except ConfigError as error:
        say(f"the {type(model).__name__} is attacked as it is, and nothing is proved: {error}")
        return model
    return network.to(dtype_of(model) or torch.float32).eval()


@torch.no_grad()
def _named(model: nn.Module, data: Any, labels: Any, device: torch.device) -> Data:
    """The first images as a data set, with as many classes as the model has logits."""
    found, classes = as_samples(data, labels, _READ, model=model)
    split = Dataset(found.cpu(), classes.cpu())
    count = logits_of(model(found[:1].to(device))).shape[-1]
    return Data("images", split, split, tuple(map(str, range(count))))


def _work(subject: Subject, plan: Plan, say: Say, watch: Watcher) -> Measured:
    """Do what is left of all stages."""
    measured = plan.measured
    watch(Progress(0, _STEPS, "clean accuracy"))
    if measured is None:
        measured = measure(subject)
        plan.add(measured)
    say(f"clean accuracy {measured.clean}")
    stages = stages_of(subject.settings)
    whole, gone = sum(stage.share for stage in stages), 0.0
    for number, stage in enumerate(stages):
        begin, part = int(_STEPS * gone / whole), _STEPS * stage.share / whole
        watch(Progress(begin, _STEPS, f"planning: {stage.title}"))
        decision = plan.decisions.get(stage.name)
        if decision is None:
            later = [each.share for each in stages[number + 1 :]]
            seconds = allotment(subject.budget, plan.spent, stage.share, later)
            decision = stage.decide(subject, measured, seconds, stage.share / whole)
            plan.add(decision)
        say(stage_line(decision))
        if decision.run:
            _run(subject, plan, stage, decision, _part(watch, begin, part, stage.title))
        gone += stage.share
    watch(Progress(_STEPS, _STEPS, "done"))
    return measured


def _run(subject: Subject, plan: Plan, stage: Stage, decision: Decision, watch: Watcher) -> None:
    """Run the study of a stage, or continue it; what it takes is written down even if it is interrupted."""
    complete = any(
        isinstance(line, Spent) and line.stage == f"{stage.name}, complete" for line in plan.file.records
    )
    begun, name = subject.clock(), stage.name
    check_below(subject.folder, subject.folder / stage.name)
    try:
        stage.run(subject, decision, watch)
        name += ", complete"
    finally:
        if not complete:
            plan.add(Spent(stage=name, seconds=max(0.0, subject.clock() - begun)))


def _part(watch: Watcher, begin: int, part: float, title: str) -> Watcher:
    """The progress of one stage as a part of the whole."""

    def of_stage(piece: Progress) -> None:
        watch(Progress(begin + int(part * piece.done / max(piece.total, 1)), _STEPS, f"{title}: {piece.doing}"))

    return of_stage
