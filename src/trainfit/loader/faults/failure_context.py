"""Context of a failed run: settings, limits and exit codes."""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.hardware.host.oom_kills import OomKills
from trainfit.loader.measure.instrument import BEGAN, WALL
from trainfit.loader.measure.run import Run


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
        batch_bytes: of a batch's tensors.
        batch_tensors: how many they are.
        shm_free_bytes: of /dev/shm.
        open_files: how many this process may have open.
        oom_kills: processes that the kernel killed during the run because memory ran out.
        output: what the run's processes wrote to stderr.
    """

    fetched: tuple[int, ...] | None = None
    longest_s: float | None = None
    silent_s: float | None = None
    started: int | None = None
    limit_s: float | None = None
    alone_s: float | None = None
    batch_bytes: int | None = None
    batch_tensors: int | None = None
    shm_free_bytes: int | None = None
    open_files: int | None = None
    oom_kills: OomKills | None = None
    output: str = ""

    @property
    def made(self) -> int:
        """Batches that were made, as far as it is known."""
        return sum(self.fetched or ())

    @classmethod
    def of(
        cls,
        run: Run,
        *,
        limit_s: float | None = None,
        alone_s: float | None = None,
        batch_bytes: int | None = None,
        batch_tensors: int | None = None,
        shm_free_bytes: int | None = None,
        open_files: int | None = None,
        oom_kills: OomKills | None = None,
        output: str = "",
    ) -> FailureContext:
        """The context of a run, with what the caller knows in addition."""
        records = [each for each in run.fetches if len(each)]
        started = [at for at in run.started if at]
        silent = None
        if records and started and limit_s is not None:
            last = max(float((each[:, BEGAN] + each[:, WALL]).max()) for each in records)
            # The time limit ran from before the first worker had started.
            silent = max(0.0, min(started) + limit_s - last)
        return cls(
            fetched=tuple(len(each) for each in run.fetches) or None,
            longest_s=max((float(each[:, WALL].max()) for each in records), default=None),
            silent_s=silent,
            started=len(started) if run.settings.num_workers else None,
            limit_s=limit_s,
            alone_s=alone_s,
            batch_bytes=run.batch_bytes or batch_bytes,
            batch_tensors=run.batch_tensors or batch_tensors,
            shm_free_bytes=shm_free_bytes,
            open_files=open_files,
            oom_kills=oom_kills,
            output=output,
        )
