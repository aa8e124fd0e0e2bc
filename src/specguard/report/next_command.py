"""The next command for a model, ready to be pasted: made from the run, or from the command that studied it."""

import shlex
import sys
from pathlib import PurePath
from typing import Any

from specguard.records.base import Norm
from specguard.report.evidence import radius_text
from specguard.report.run import Run

_KINDS = ("timm:", "torchvision:", "hf:", "zoo:")
_KEPT = (
    *("--weights", "--data", "--data-root", "--classes", "--image-size", "--mean", "--std", "--model-arg"),
    "--config",
)
_NAMED = ("digits", "cifar10", "cifar100", "svhn", "mnist", "fashion_mnist", "sst2")  # data that --data names
_VERBS = ("diagnose", "attack", "certify", "smooth", "spectrum", "sensitivity")  # which are followed by a model
_UNKNOWN = ("MODEL", "--data", "DATA")  # of a model that no command line named


class Commands:
    """Commands about the model of a run.

    Args:
        run: as `read_run` returns it.

    Example:
        >>> from specguard.report.examples import example_run
        >>> from specguard.report.next_command import Commands
        >>> Commands(example_run()).attack("l2", 0.25, "full")
        'specguard attack MODEL --data DATA --norm l2 --radius 0.25 --suite full'
    """

    is_run: bool
    """Whether the model is that of a training run, so that its weights can be exported and trained further."""

    def __init__(self, run: Run) -> None:
        self.run = run
        trained = run.model is not None and run.path is not None
        function = _function(run) if trained else None
        self.is_run = trained and function is None
        if function is not None:
            self.words: tuple[str, ...] = (function, "--weights", str(run.path))
        else:
            self.words = self._of_run() if self.is_run else _recorded_words(run) or _UNKNOWN

    @property
    def is_certifiable(self) -> bool:
        """Whether the model is of the architecture that is trained for certificates."""
        return self._source().get("kind") == "certifiable"

    def diagnose(self, *more: str) -> str:
        return _joined("diagnose", *self.words, *more)

    def attack(self, norm: Norm, radius: float, suite: str) -> str:
        return _joined("attack", *self.words, "--norm", norm, "--radius", radius_text(radius), "--suite", suite)

    def certify(self, norm: Norm, radius: float) -> str:
        return _joined("certify", *self.words, "--norm", norm, "--radius", radius_text(radius))

    def smooth(self) -> str:
        return _joined("smooth", *self.words, "--sigma", "0.25")

    def check(self, place: str) -> str | None:
        """The independent check of certificates, whose command takes runs."""
        if not self.is_run or self.run.path is None:
            return None
        return _joined("check", str(self.run.path / place), "--model", *self.words)

    def export(self) -> str | None:
        """The export of the weights of a run."""
        if not self.is_run:
            return None
        return _joined("export", self.words[0], f"{self.words[0]}.safetensors", "--to", "state_dict")

    def train_longer(self) -> str | None:
        """More epochs, for certificates where the architecture is one that is trained for them."""
        return self._train("longer", *(self._certifiable() if self.is_certifiable else ("--epochs", "40")))

    def finetune(self, norm: Norm, radius: float) -> str | None:
        """Adversarial training that begins with the weights there are."""
        if self.is_certifiable:
            return self.train_longer()
        ball = ("--norm", norm, "--radius", radius_text(radius))
        return self._train("robust", "--recipe", "robust-finetune", *ball)

    def train_for_certificates(self) -> str | None:
        """Training of a network whose Lipschitz constants are known, or more of it.

        What the recipe is depends on the data: on digits, it is the network with shifts.
        """
        if self.is_certifiable:
            return self.train_longer()
        return _joined("train", *_CERTIFIABLE, *self._data(), "--run", "runs/certifiable")

    def _train(self, suffix: str, *settings: str) -> str | None:
        if not self.is_run and self.run.model is not None:
            return None  # of a model that a function makes, runs are not trained further
        if not self.is_run and self.words != _UNKNOWN and ":" not in self.words[0]:
            return None  # the weights of a file are trained further where they are a library's or a run's
        kind, _, rest = self.words[0].partition(":")
        name = PurePath(rest or kind).name
        place = self.words[0].rstrip("/") if self.is_run else f"runs/{name if name != 'MODEL' else 'model'}"
        return _joined("train", *self.words, *settings, "--run", f"{place}-{suffix}")

    def _source(self) -> dict[str, Any]:
        """What the network was made from, as its record says."""
        source = None if self.run.model is None else self.run.model.config.get("source")
        return source if isinstance(source, dict) else {}

    def _certifiable(self) -> tuple[str, ...]:
        """The recipe, with T1 at every image where there is attention: on digits it takes a constant of 1."""
        attends = self._source().get("mixing") in ("skip", "residual")
        return (*_CERTIFIABLE, "--lipschitz", "local") if attends else _CERTIFIABLE

    def _of_run(self) -> tuple[str, ...]:
        """The run, with its data where Python trained it: then only its studies say which data they are."""
        path = self.run.path
        assert path is not None
        silent = (path / "run.json").exists() and not (path / "arguments.json").exists()
        return (str(path), *(self._named_data() if silent else ()))

    def _dataset(self) -> str | None:
        return next((name for study in self.run.studies if (name := study.dataset) is not None), None)

    def _data(self) -> tuple[str, ...]:
        """The options that name the data: those of the model, else of a recorded command of the run."""
        for words in (list(self.words), *_recorded_commands(self.run)):
            if found := [w for flag in ("--data", "--data-root") if flag in words for w in _option(words, flag)]:
                return tuple(found)
        return self._named_data()

    def _named_data(self) -> tuple[str, ...]:
        """The options for the data of the studies."""
        if (dataset := self._dataset()) is None:
            return ()
        if dataset == "digits":
            return ("--data", dataset)
        return ("--data", dataset, "--data-root", "DATA_ROOT") if dataset in _NAMED else ("--data", "DATA")


_CERTIFIABLE = ("--recipe", "certifiable")


def _joined(*words: str) -> str:
    """A command with its words quoted where a shell needs it."""
    return shlex.join(("specguard", *words))


def _option(words: list[str], flag: str) -> list[str]:
    place = words.index(flag)
    return words[place : place + 2]


def _function(run: Run) -> str | None:
    """The function that makes the model of a run, for those who have just written it; None of other models."""
    config = {} if run.model is None else run.model.config
    name = config.get("name")
    if not (isinstance(name, str) and ":" in name and config.get("source", "") is None):
        return None
    return name if name in sys.argv else "PACKAGE.MODULE:FUNCTION"


def _recorded_commands(run: Run) -> list[list[str]]:
    """The words of the commands that made the studies of a run."""
    commands: list[Any] = [e.command for study in run.studies for e in study.environments if e.command]
    commands += [c for s in run.studies if (c := s.summary.environment.command)]
    found = []
    for command in commands:
        try:
            words = shlex.split(command)
        except ValueError:  # no closing quotation
            continue
        if words[:1] == ["specguard"] and len(words) > 2:
            found.append(words)
    return found


def _recorded_words(run: Run) -> tuple[str, ...]:
    """The model and its options as the command of a study named them; nothing where none did."""
    for words in _recorded_commands(run):
        names = [word for word in words[2:] if word.startswith(_KINDS)]
        if not names and words[1] in _VERBS and not words[2].startswith("-"):
            names = [words[2]]
        if len(names) == 1 and _is_safe(names[0]):
            return (names[0], *_kept(words))
    return ()


def _is_safe(name: str) -> bool:
    """Whether a recorded name may be repeated: one that runs code is, to the person who has just written it."""
    return ":" not in name or name.startswith(_KINDS) or name in sys.argv


def _kept(words: list[str]) -> list[str]:
    """The options among the words that say which model and data are meant."""
    kept: list[str] = []
    for place, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if flag in _KEPT:
            kept += [word] if equals else words[place : place + 2]
    return kept
