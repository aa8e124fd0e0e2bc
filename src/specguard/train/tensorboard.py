"""The metrics of a run as an event file of TensorBoard: a copy of metrics.jsonl, which stays the record."""

from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from specguard.errors import ConfigError
from specguard.records.files import folder_below, writing
from specguard.records.io import RecordFile
from specguard.records.training import EpochRecord
from specguard.train.loop import Progress

FOLDER = "tensorboard"


class EventFile:
    """A `watch` of `train` that copies the metrics of every epoch to the folder `tensorboard` of the run.

    The event files of the folder are made anew from metrics.jsonl by every process that trains the run, so that an
    interrupted run has every epoch once; other files in it are kept. The package `tensorboard` is needed:
    `pip install 'specguard[tensorboard]'`.

    Args:
        run: directory of the run

    Example:
        >>> from specguard.train import EventFile
        >>> event_file = EventFile("runs/robust")  # doctest: +SKIP
        >>> train(model, data, Path("runs/robust"), training, watch=event_file)  # doctest: +SKIP
    """

    def __init__(self, run: Path | str) -> None:
        self.run, self._writer = Path(run), _writer_class()
        self._metrics = RecordFile(self.run / "metrics.jsonl", EpochRecord)
        self._open: Any = None

    def __call__(self, progress: Progress) -> None:
        if progress.record is not None:
            self.update()

    def update(self) -> None:
        """Copy what metrics.jsonl has gained."""
        found = self._metrics.read()
        if not found:
            return
        folder = self.run / FOLDER
        with writing(folder):
            if self._open is None:
                for earlier in folder_below(self.run, FOLDER).glob("events.out.tfevents.*"):
                    earlier.unlink()
                # A TensorBoard that has shown an earlier file drops its steps from this one on.
                self._open = self._writer(str(folder_below(self.run, FOLDER)), purge_step=0)
            for record in found:
                for name, value in asdict(record).items():
                    if value is not None and name not in ("epoch", "step"):
                        self._open.add_scalar(name, value, record.step)
            self._open.flush()

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            self._open.close()


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "event files need the package tensorboard: pip install 'specguard[tensorboard]'"
        ) from None
    return SummaryWriter
