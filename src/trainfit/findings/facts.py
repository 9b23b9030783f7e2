"""What is known of a run that failed: what it raised, how its processes ended, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainfit.hardware.machine.cgroup import OomKills
from trainfit.results.runs.operands import NO_CALL, FailedCall


@dataclass(frozen=True)
class Failure:
    """Why a run came to nothing.

    ``error_type``, ``message`` and ``traceback`` are what iterating raised; ``exit_code`` is of
    the process that iterated, if it died (negative: signal); ``worker_exits`` of its workers,
    as far as they had ended. ``hung``: no end within the time limit; ``stacks`` are then those
    of all threads of all processes (faulthandler's format).
    """

    error_type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    worker_exits: tuple[int, ...] = ()
    hung: bool = False
    stacks: str = ""


@dataclass(frozen=True)
class FailureContext:
    """Context of a failure; ``None``: unknown.

    Attributes:
        fetched: batches that each worker made (without workers: that the main process made).
        longest_s: of those batches, what the longest took.
        silent_s: from the last of them to the end of the run, at most.
        started: workers that had started.
        limit_s: the run's time limit.
        alone_s: what a batch takes without workers.
        idle: had the workers next to no CPU time since then?
        threads: of PyTorch in a worker.
        batch_bytes: of a batch's tensors.
        batch_tensors: how many they are.
        shm_free_bytes: of /dev/shm.
        ram_free_bytes: of memory, before the run.
        open_files: how many this process may have open.
        oom_kills: processes that the kernel killed during the run because memory ran out.
        output: what the run's processes wrote to stderr.
        tokens: of the longest text that the script's models were given.
        positions: that these are made for.
        handles: objects that the data set holds of libraries whose files and connections must
            not cross a fork: path → type.
        call: what the call was given that raised an exception.
        epoch_batches: of a DataLoader's epoch, where one has just come to its end.
    """

    fetched: tuple[int, ...] | None = None
    longest_s: float | None = None
    silent_s: float | None = None
    started: int | None = None
    limit_s: float | None = None
    alone_s: float | None = None
    idle: bool | None = None
    threads: int | None = None
    batch_bytes: int | None = None
    batch_tensors: int | None = None
    shm_free_bytes: int | None = None
    ram_free_bytes: int | None = None
    open_files: int | None = None
    oom_kills: OomKills | None = None
    output: str = ""
    tokens: int | None = None
    positions: int | None = None
    handles: Mapping[str, str] = field(default_factory=dict)
    call: FailedCall = NO_CALL
    epoch_batches: int | None = None

    @property
    def made(self) -> int:
        """Batches that were made, as far as it is known."""
        return sum(self.fetched or ())
