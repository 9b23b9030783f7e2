"""A recorded run as rules look at it: its steady steps, and what was sampled meanwhile."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.watch.run import RankRecord, RunHeader, RunRecord, plain_uuid
from trainfit.results.watch.tables import COMPILED, Table
from trainfit.watch.figures.trainings import judged_steps

#: Phases of a step that are columns of the table, in the order that a step has them.
PHASES: Final = (
    *("input", "copy", "forward", "backward", "optimizer", "sync", "checkpoint", "evaluation"),
)
#: Steps at the start that are never judged: allocator, cuDNN and caches settle in them; of short
#: runs a third.
_WARM_UP: Final = 10


@dataclass(frozen=True)
class RankView:
    """One rank of a run. Tables hold only the steady part: the steps after the warm-up, and the
    samples between the first and the last of them. ``run`` is what its machine recorded."""

    record: RankRecord
    run: RunRecord

    @property
    def header(self) -> RunHeader:
        return self.record.header

    @property
    def rank(self) -> int | None:
        """Its number, where there are several."""
        return self.header.rank if self.header.world_size > 1 else None

    @functools.cached_property
    def steps(self) -> Table:
        """Steady steps of the training that is judged (:mod:`.trainings`): without the warm-up and
        without those that were compiled in."""
        every = judged_steps(self.record)
        later = every[min(_WARM_UP, len(every) // 3) :]
        return _where(later, (later["flags"] & COMPILED) == 0)

    @functools.cached_property
    def window(self) -> tuple[float, float]:
        """Start and end of the steady steps, seconds of the run."""
        steps = self.steps
        if not len(steps):
            return (0.0, 0.0)
        first = float(steps["end_s"][0] - np.nan_to_num(steps["step_s"][0]))
        return first, float(steps["end_s"][-1])

    @property
    def seconds(self) -> float:
        """That the steady steps took, their sum."""
        return float(np.nansum(self.steps["step_s"]))

    @functools.cached_property
    def machine(self) -> Table:
        return self._sampled(self.run.machine)

    @functools.cached_property
    def every_gpu_sample(self) -> Table:
        """Of the GPU that this rank computes on, over the whole run; none where it is not known."""
        header, every = self.header, self.run.gpus
        number = header.gpu
        if number is not None and number < len(header.gpus):
            uuid = plain_uuid(header.gpus[number].uuid)
            number = self.run.gpu_numbers.get(uuid, number)
        return _where(every, every["gpu"] == (-2 if number is None else number))

    @functools.cached_property
    def gpu(self) -> Table:
        """The same within the steady steps."""
        return self._sampled(self.every_gpu_sample)

    @functools.cached_property
    def main_process(self) -> Table:
        return self._processes(0)

    @functools.cached_property
    def workers(self) -> Table:
        """Samples of the DataLoader's workers, all of them."""
        return self._processes(1)

    @functools.cached_property
    def fetches(self) -> Table:
        """Batches that workers made."""
        return self._within(self.record.fetches, "end_s")

    def seconds_in(self, phase: str) -> float | None:
        """Seconds of the steady steps in a phase of :data:`PHASES`; ``None``: not measured."""
        values = self.steps[f"{phase}_s"]
        return float(np.nansum(values)) if np.isfinite(values).any() else None

    def share(self, phase: str) -> float | None:
        """Of the steady steps' time."""
        spent = self.seconds_in(phase)
        return None if spent is None or not self.seconds else spent / self.seconds

    def _processes(self, role: int) -> Table:
        every = self._sampled(self.run.processes)
        return _where(every, (every["role"] == role) & (every["rank"] == self.header.rank))

    def _sampled(self, table: Table) -> Table:
        return self._within(table, "time_s")

    def _within(self, table: Table, column: str) -> Table:
        first, last = self.window
        return _where(table, (table[column] >= first) & (table[column] <= last))


def _where(table: Table, wanted: NDArray[np.bool_]) -> Table:
    chosen: Table = table[wanted]
    return chosen


@dataclass(frozen=True)
class RunView:
    """A whole run: its ranks, in order. ``place`` is that of the rank that is judged."""

    run: RunRecord
    place: int = 0

    @functools.cached_property
    def ranks(self) -> tuple[RankView, ...]:
        every = [RankView(each, run) for run in self.run.machines for each in run.ranks]
        return tuple(sorted(every, key=lambda view: view.header.rank))

    @property
    def judged(self) -> RankView:
        """The rank that rules of one rank look at: the first, or each in turn
        (:mod:`trainfit.watch.rules.each_rank`)."""
        return self.ranks[self.place]


def known(values: NDArray[np.generic]) -> NDArray[np.float64]:
    """The measured ones of a column: without NaN, and without the -1 of integers."""
    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    return found if np.issubdtype(values.dtype, np.floating) else found[found >= 0]


def median(values: NDArray[np.generic]) -> float | None:
    """Of the measured ones; ``None`` where there are none."""
    found = known(values)
    return float(np.median(found)) if len(found) else None


def percentile(values: NDArray[np.generic], percent: float) -> float | None:
    """Of the measured ones; ``None`` where there are none."""
    found = known(values)
    return float(np.percentile(found, percent)) if len(found) else None
