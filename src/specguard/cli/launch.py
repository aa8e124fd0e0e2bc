"""Which of how many processes this is: by `--shard`, or as a launcher such as torchrun says it."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specguard.cli.console import chosen_device, err
from specguard.errors import ConfigError
from specguard.records.shards import Shard
from specguard.records.study import Pending

if TYPE_CHECKING:  # a command that refuses torchrun is explained without importing torch
    import torch

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Launched:
    """This process among those of a launcher; `local` counts those of the same machine."""

    rank: int
    count: int
    local: int


def launched() -> Launched | None:
    """What the launcher says, if there is one and it started more than one process."""
    texts = [os.environ.get(name) for name in _VARIABLES]
    if None in texts:
        return None
    try:
        found = Launched(*(int(text or "") for text in texts))
    except ValueError:
        raise ConfigError(f"{', '.join(_VARIABLES)} must be numbers, as torchrun sets them") from None
    if not (0 <= found.rank < found.count and found.local >= 0):
        raise ConfigError(
            f"the environment says that this is process {found.rank} of {found.count}, which cannot be"
        )
    return found if found.count > 1 else None


def chosen_shard(text: str | None) -> Shard:
    """The part of a study that this process does."""
    launch = launched()
    if launch is None:
        return Shard() if text is None else Shard.parsed(text)
    if text is not None:
        raise ConfigError("--shard says which part to do, and so does torchrun: leave out one of them")
    return Shard(launch.rank, launch.count)


def own_device(name: str) -> "torch.device":
    """The device of this process: the processes of one machine take its GPUs in turn."""
    import torch

    device, launch = chosen_device(name), launched()
    if launch is None or device.type != "cuda" or ":" in name:
        return device
    return torch.device("cuda", launch.local % torch.cuda.device_count())


def only_one_process(verb: str) -> None:
    """Refuse to run a command of one process in several."""
    if launched() is not None:
        raise ConfigError(f"{verb} runs in one process; start it without torchrun")


def print_pending(result: Pending, shard: Shard) -> None:
    """Say that a study waits for other shards."""
    err.print(
        f"shard {shard.index}/{shard.count} is done; {result.left} of {result.of} batches are left to the "
        "others, and the last to finish summarizes",
        soft_wrap=True,
    )
