"""The next command for a model, ready to be pasted: made from the run, or from the command that studied it."""

import shlex
from typing import Any

from specguard.records.base import Norm
from specguard.report.evidence import radius_text
from specguard.report.run import Run

_KINDS = ("timm:", "torchvision:", "hf:", "zoo:")
_KEPT = ("--weights", "--data", "--data-root", "--classes", "--image-size", "--mean", "--std", "--model-arg")
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
        self.is_run = run.model is not None and run.path is not None
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

    def train_longer(self) -> str:
        """More epochs, for certificates where the architecture is one that is trained for them."""
        return self._train("longer", *(self._certifiable() if self.is_certifiable else ("--epochs", "40")))

    def finetune(self, norm: Norm, radius: float) -> str:
        """Adversarial training that begins with the weights there are."""
        if self.is_certifiable:
            return self.train_longer()
        ball = ("--norm", norm, "--radius", radius_text(radius))
        return self._train("robust", "--recipe", "robust-finetune", *ball)

    def train_for_certificates(self) -> str:
        """Training of a network whose Lipschitz constants are known, or more of it.

        What the recipe is depends on the data: on digits, it is the network with shifts.
        """
        if self.is_certifiable:
            return self.train_longer()
        return _joined("train", *_CERTIFIABLE, *self._data(), "--run", "runs/certifiable")

    def _train(self, suffix: str, *settings: str) -> str:
        place = self.words[0] if self.is_run else f"runs/{self.words[0].partition(':')[2] or 'model'}"
        return _joined("train", *self.words, *settings, "--run", f"{place.rstrip('/')}-{suffix}")

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
        """The options that name the data."""
        words = list(self.words)
        found = [w for flag in ("--data", "--data-root") if flag in words for w in _option(words, flag)]
        return tuple(found) or self._named_data()

    def _named_data(self) -> tuple[str, ...]:
        """The options for the data of the studies."""
        if (dataset := self._dataset()) is None:
            return ()
        return ("--data", dataset) if dataset == "digits" else ("--data", dataset, "--data-root", "DATA_ROOT")


_CERTIFIABLE = ("--recipe", "certifiable")


def _joined(*words: str) -> str:
    """A command with its words quoted where a shell needs it."""
    return shlex.join(("specguard", *words))


def _option(words: list[str], flag: str) -> list[str]:
    place = words.index(flag)
    return words[place : place + 2]


def _recorded_words(run: Run) -> tuple[str, ...]:
    """The model and its options as the command of a study named them; nothing where none did."""
    commands: list[Any] = [e.command for study in run.studies for e in study.environments if e.command]
    commands += [c for s in run.studies if (c := s.summary.environment.command)]
    for command in commands:
        try:
            words = shlex.split(command)
        except ValueError:  # no closing quotation
            continue
        names = [word for word in words[2:] if word.startswith(_KINDS)]
        if words[:1] != ["specguard"] or len(names) != 1:
            continue
        return (names[0], *_kept(words))
    return ()


def _kept(words: list[str]) -> list[str]:
    """The options among the words that say which model and data are meant."""
    kept: list[str] = []
    for place, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if flag in _KEPT:
            kept += [word] if equals else words[place : place + 2]
    return kept
