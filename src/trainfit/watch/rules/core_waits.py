"""What a run would be without the other programs on its machine: by how long its threads were ready
to run and had no core, which the kernel counts for each of them.

CPU time does not depend on what else runs. Time without a core does, and so do waits for a thread
that has none; where nothing else wants the cores, neither is there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from trainfit.results.runs.tables import Table
from trainfit.watch import checks, thresholds
from trainfit.watch.checks import Seconds
from trainfit.watch.view import RankView, known, median

_TRAINING, _WORKER, _OTHER = 0, 1, 2


@dataclass(frozen=True)
class CoreWaits:
    """The waits for a core in one rank's steady part; ``None`` is not measured."""

    rank: RankView

    @functools.cached_property
    def by_others(self) -> float | None:
        """The share of the busy cores that processes outside the run have: of the time without a
        core, the part that is theirs."""
        rows = self.rank.machine
        rows = rows[np.isfinite(rows["cores_busy"]) & np.isfinite(rows["cores_ours"])]
        if not checks.are_enough_samples(rows):
            return None
        busy, ours = (float(np.mean(rows[name])) for name in ("cores_busy", "cores_ours"))
        return max(0.0, 1 - ours / busy) if busy > 0 else 0.0

    @functools.cached_property
    def of_programs(self) -> float:
        """Cores that programs keep busy which the script has started, on average."""
        first, last = self.rank.window
        every = self.rank.run.processes
        rows = every[(every["role"] == _OTHER) & (every["rank"] == self.rank.header.rank)]
        rows = rows[(rows["time_s"] >= first) & (rows["time_s"] <= last)]
        looks = len(np.unique(self.rank.main_process["time_s"]))
        return float(np.nansum(rows["cpu_cores"])) / looks if looks else 0.0

    @property
    def lost_to_programs(self) -> float | None:
        """The share of the time in which the training has no core while programs that the script
        has started have it; ``None``: not measured. Where several threads compute, each operator
        waits for all of them."""
        busy, main = known(self.rank.machine["cores_busy"]), self.main_thread
        if main is None or not len(busy) or not busy.mean() > 0:
            return None
        part = min(1.0, self.of_programs / float(busy.mean()))
        waits, cpu = (self._mean(self._of(_TRAINING), name) for name in ("threads", "cpu_cores"))
        several = part * (waits or 0.0) / cpu if cpu and checks.several_compute(self.rank) else 0.0
        return max(main * part, 1 - 1 / (1 + several))

    @functools.cached_property
    def main_thread(self) -> float | None:
        """The share of the time in which the training's main thread was ready and had no core."""
        return self._mean(self._of(_TRAINING), "main_thread")

    @property
    def threads(self) -> float | None:
        """The share of the time in which threads of the training process were ready and had no
        core, all of them together: more than 1 where several were."""
        return self._mean(self._of(_TRAINING), "threads")

    @property
    def held_up_by_others(self) -> float | None:
        """The share of the time in which the main thread was ready and other programs had the
        cores."""
        if self.main_thread is None or self.by_others is None:
            return None
        return self.main_thread * self.by_others

    def alone(self, ends_s: Seconds, seconds: Seconds) -> Seconds:
        """The length of spans of the main thread that end then, without other programs, by how it
        was held up around that time; as they are where that was not counted."""
        rows = self._of(_TRAINING)
        rows = rows[np.isfinite(rows["main_thread"])]
        if self.held_up_by_others is None:
            return seconds
        waits = np.interp(ends_s, rows["time_s"], np.asarray(rows["main_thread"], dtype=np.float64))
        found: Seconds = seconds * (1 - (self.by_others or 0.0) * np.minimum(1.0, waits))
        return found

    @functools.cached_property
    def training_stretch(self) -> float | None:
        """The factor by which other programs make the training's work on cores last longer."""
        return self._stretch(self._of(_TRAINING))

    @functools.cached_property
    def workers_stretch(self) -> float | None:
        """The factor by which other programs make the workers' work on cores last longer."""
        return self._stretch(self._of(_WORKER))

    def _of(self, role: int) -> Table:
        every = self.rank.core_waits
        rows: Table = every[every["role"] == role]
        return rows

    def _stretch(self, rows: Table) -> float | None:
        waits, cpu = self._mean(rows, "threads"), self._mean(rows, "cpu_cores")
        if waits is None or not cpu or self.by_others is None:
            return None
        return 1 + self.by_others * waits / cpu

    def _mean(self, rows: Table, column: str) -> float | None:
        """The mean over the samples of a process; ``None``: they are too few, and cover too
        little."""
        values = rows[column][np.isfinite(rows[column])]
        # Processes are read at most as often as the machine.
        covered = len(values) * (median(self.rank.machine["interval_s"]) or 0.0)
        is_enough = (
            len(values) >= thresholds.LEAST_WAIT_SAMPLES or covered >= thresholds.LEAST_COVERED_S
        )
        return float(np.mean(values)) if is_enough and len(values) else None

    # --- Batches ----------------------------------------------------------------------------------
    @functools.cached_property
    def fetch_s(self) -> Seconds | None:
        """Seconds of each of the fetches in a worker without those in which it had no core, shared
        out by the time off it. One that lived too shortly to be counted by itself had none as often
        as all of them together."""
        fetches, rows = self.rank.fetches, self._of(_WORKER)
        first, last = self.rank.window
        of_all = self._mean(rows, "main_thread")
        found = np.asarray(fetches["fetch_s"], dtype=np.float64)
        off = np.maximum(0.0, found - np.asarray(fetches["cpu_s"], dtype=np.float64))
        for worker in np.unique(fetches["pid"]):
            waits = self._mean(rows[rows["pid"] == worker], "main_thread")
            own = fetches["pid"] == worker
            total, lived = float(np.nansum(off[own])), last - first
            if waits is None:
                ends = fetches["end_s"][own]
                waits, lived = of_all, float(ends[-1] - ends[0]) + float(found[own][0])
            if waits is None:
                return None
            if total > 0:
                found[own] -= off[own] * min(1.0, waits * lived / total)
        return found if len(found) else None

    def input_share(self, every_s: float, waited_s: Seconds, per_step: float) -> float | None:
        """Share of the time that waiting for batches would cost with no other program on the cores.

        A batch then comes as soon as the training asks for it, the workers have made it, and the
        cores have done what all of this needs. One that is ready comes as much sooner as other
        programs hold up whoever gives it; and it takes no longer than the CPU time that workers
        spend on giving it, next to which the training takes it.

        Args:
            every_s: seconds that the training needs for a batch, without waiting.
            waited_s: for one, on average, by step.
            per_step: batches of a step.
        """
        fetches, usable = self.rank.fetches, checks.usable_cores(self.rank.header)
        training, workers = self.training_stretch, self.workers_stretch
        if training is None or workers is None or self.fetch_s is None or not usable:
            return None
        if not checks.has_gpu(self.rank):  # which no other program holds up
            every_s /= training
        makers = np.unique(fetches["pid"])
        # Batches are given in turns: the slowest worker sets the pace.
        slowest = max(float(np.mean(self.fetch_s[fetches["pid"] == maker])) for maker in makers)
        cpu_s = self._cpu_s(_TRAINING) / per_step + float(np.mean(fetches["cpu_s"]))
        on_cores = max(1, checks.local_ranks(self.rank)) * cpu_s / usable
        least = max(every_s, slowest / len(makers), on_cores)
        handed = min(
            self._waited_for_ready(waited_s) / max(training, workers),
            max(0.0, self._cpu_s(_WORKER) / per_step - float(np.mean(fetches["cpu_s"]))),
        )
        return (least - every_s + handed) / (least + handed)

    def input_share_in_turn(self, every_s: float, waited_s: float) -> float | None:
        """Share of the time that waiting would cost (:meth:`input_share`) where the training makes
        its batches itself, ``waited_s`` each: its thread waits for a core there as it does
        elsewhere, by its time off the cores."""
        training, waits = self.training_stretch, self.main_thread
        off_s = self.rank.seconds - float(np.nansum(self.rank.steps["cpu_s"], dtype=np.float64))
        cpu_s = known(self.rank.fetches["cpu_s"])
        if training is None or waits is None or off_s <= 0 or not len(cpu_s):
            return None
        if not checks.has_gpu(self.rank):
            every_s /= training
        of_others = min(1.0, waits * self.rank.seconds / off_s)
        alone_s = waited_s - max(0.0, waited_s - float(np.mean(cpu_s))) * of_others
        return alone_s / (every_s + alone_s)

    def _cpu_s(self, role: int) -> float:
        """CPU seconds of a step in all of these processes together."""
        rows = self._of(role)
        cores = sum(
            self._mean(rows[rows["pid"] == each], "cpu_cores") or 0.0
            for each in np.unique(rows["pid"])
        )
        return cores * self.rank.seconds / max(1, len(self.rank.steps))

    def _waited_for_ready(self, waited_s: Seconds) -> float:
        """Mean seconds of waits for batches that were ready."""
        queued = self.rank.steps["queued"]
        told = queued >= 0
        return float(np.mean(np.where(queued >= 1, waited_s, 0.0)[told])) if told.any() else 0.0
