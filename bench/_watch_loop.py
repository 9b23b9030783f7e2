"""A training loop in simulated time: workers, the main thread, a GPU that works behind it.

The main thread takes a batch, copies it, launches the step's kernels and goes on; it waits for the
GPU only where the script synchronises or where it is too far ahead. Everything that a watched run
records of a step follows from these few times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainfit.results.runs import tables
from trainfit.results.runs.tables import Table

#: Steps that the main thread may be ahead of the GPU (its queue of launches is then full).
AHEAD = 2
#: Of the main thread's time for a step, what passes before it launches.
PYTHON = 0.4
MIB = 2**20


@dataclass(frozen=True)
class WatchedScript:
    """A script on a machine. Times are seconds; of a batch (``*_s`` of the data) or a step.

    ``launch_s`` is what the main thread needs to launch a step's kernels, ``gpu_s`` what the GPU
    needs for them. ``syncs`` are places in the step at which the main thread waits for the GPU,
    ``sync_every`` steps one reads the loss. ``slow_worker`` multiplies the time of worker 0.
    """

    steps: int = 400
    batch: int = 32
    cores: float = 16.0
    workers: int = 6
    prefetch: int = 2
    persistent: bool = True
    epoch: int = 150
    worker_start_s: float = 0.3
    fetch_cpu_s: float = 0.12
    fetch_wait_s: float = 0.0
    parts: tuple[float, float, float, float] = (0.1, 0.6, 0.2, 0.1)
    threads: float = 1.0
    slow_worker: float = 1.0
    hand_off_s: float = 0.0004
    batch_bytes: int = 20 * MIB
    pinned: bool = True
    gpu_s: float = 0.08
    launch_s: float = 0.03
    noise: float = 0.03
    syncs: int = 0
    sync_every: int = 20
    checkpoint_every: int = 0
    checkpoint_s: float = 0.0
    slowdown: float = 1.0
    """Of everything on the CPU: a quota, neighbours, swap."""
    clock: float = 1.0
    crowded: float = 1.0
    """By how much threads that take turns on the cores prolong a batch."""
    seed: int = 0


@dataclass
class WatchedLoop:
    """Runs a job; ``steps`` and ``fetches`` are its tables, ``work`` seconds of kernels a step."""

    job: WatchedScript
    steps: Table = dataclasses.field(default_factory=lambda: np.zeros(0, tables.STEPS))
    fetches: Table = dataclasses.field(default_factory=lambda: np.zeros(0, tables.FETCHES))
    work: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))

    def run(self) -> WatchedLoop:
        job = self.job
        self._random = np.random.default_rng(job.seed)
        self.steps = tables.empty_rows(tables.STEPS, job.steps)
        self.work = np.zeros(job.steps)
        made: list[tuple[float, int, float, float]] = []
        now, gpu_free, epoch_from = 0.0, 0.0, 0
        ends: list[float] = []
        for step in range(job.steps):
            began, row = now, self.steps[step]
            row["flags"] = tables.LOSS_FINITE
            if step % job.epoch == 0:
                epoch_from = step
                row["flags"] |= tables.EPOCH_START
                start = now + (0.0 if job.persistent and step else job.worker_start_s)
                count = min(job.epoch, job.steps - step)
                takes = self._takes(count)
                workers = _Workers(job, start)
            if job.workers:
                index = step - epoch_from
                done, by = workers.done(index, takes)
                made.append((done, by, *takes[index]))
                row["queued"] = workers.ready(now)
                waited = max(0.0, done - now) + job.hand_off_s * job.slowdown
            else:
                index = step - epoch_from
                waited = sum(takes[index])
                row["queued"] = -1
            row["input_s"] = waited
            now += waited
            now, gpu_free = self._compute(row, now, gpu_free, step, ends)
            row["step"], row["end_s"], row["step_s"] = step, now, now - began
            if job.workers:
                workers.took(now)
        self._keep(made)
        return self

    def _takes(self, count: int) -> list[tuple[float, float]]:
        """CPU seconds and waiting of each batch of an epoch."""
        job = self.job
        spread = self._random.lognormal(0.0, 0.15, count)
        return [(job.fetch_cpu_s * job.slowdown * s, job.fetch_wait_s * s) for s in spread]

    def _compute(
        self, row: np.void, now: float, gpu_free: float, step: int, ends: list[float]
    ) -> tuple[float, float]:
        """The step on the host and on the GPU; returns both times."""
        job = self.job
        host = job.launch_s * job.slowdown * self._random.lognormal(0.0, job.noise)
        work = job.gpu_s / job.clock * self._random.lognormal(0.0, job.noise)
        row["copied_bytes"] = job.batch_bytes
        row["unpinned_bytes"] = 0 if job.pinned else job.batch_bytes
        copy = 5e-5 if job.pinned else job.batch_bytes / 3e9
        gpu_copy = job.batch_bytes / 2e10 if job.pinned else copy
        if not job.pinned:  # cudaMemcpy of pageable memory waits for what was launched before
            copy += max(0.0, gpu_free - now)
        row["copy_s"], row["gpu_copy_s"] = copy, gpu_copy
        now += copy
        self.work[step] = work
        first = max(now + PYTHON * host / (job.syncs + 1), gpu_free)
        # A copy is on the stream as well: it is not empty meanwhile.
        row["gpu_gap_s"] = max(0.0, first - gpu_free - gpu_copy) if step else 0.0
        sync = 0.0
        shares = {"forward": 0.35, "backward": 0.55, "optimizer": 0.1}
        pieces = job.syncs + 1
        gpu_now, launched = first, now
        for _ in range(pieces):  # a synchronisation empties the GPU's queue
            # Python runs before the first kernel of a piece is launched; that shows only where
            # the GPU has nothing left from before.
            begins = max(gpu_now, launched + PYTHON * host / pieces)
            launched += host / pieces
            gpu_now = max(begins + work / pieces, launched)
            if job.syncs:
                wait = max(0.0, gpu_now - launched)
                sync += wait
                launched += wait
        now = launched
        gpu_free = gpu_now
        row["syncs"] = job.syncs
        span = gpu_free - first
        row["gpu_s"] = span + (gpu_copy if not job.pinned else 0.0)
        for name, share in shares.items():
            row[f"{name}_s"], row[f"gpu_{name}_s"] = share * host, share * span
        if step % job.sync_every == 0:
            sync += max(0.0, gpu_free - now)
            now = max(now, gpu_free)
            row["syncs"] = job.syncs + 1
        elif len(ends) >= AHEAD and ends[-AHEAD] > now:  # the launch queue is full
            row["backward_s"] += ends[-AHEAD] - now
            now = ends[-AHEAD]
        ends.append(gpu_free)
        row["sync_s"] = sync
        row["cpu_s"] = host + copy
        row["samples"], row["batches"], row["loss"] = (
            job.batch,
            1,
            1.0 + 0.1 * self._random.random(),
        )
        row["checkpoint_s"] = row["evaluation_s"] = 0.0
        if job.checkpoint_every and step % job.checkpoint_every == job.checkpoint_every - 1:
            row["checkpoint_s"] = job.checkpoint_s
            row["flags"] |= tables.CHECKPOINT
            now = max(now, gpu_free) + job.checkpoint_s
        return now, gpu_free

    def _keep(self, made: Sequence[tuple[float, int, float, float]]) -> None:
        self.fetches = tables.empty_rows(tables.FETCHES, len(made))
        for row, (end, worker, cpu, waits) in zip(self.fetches, made, strict=True):
            slow = self.job.slow_worker if worker == 0 else 1.0
            whole = slow * (cpu / self.job.threads + waits)
            row["end_s"], row["worker"], row["pid"] = end, worker, 100 + worker
            row["fetch_s"], row["cpu_s"] = whole, slow * cpu
            row["read_s"] = whole * self.job.parts[0] + waits * slow * (1 - self.job.parts[0])
            for name, share in zip(
                ("decode", "transform", "collate"), self.job.parts[1:], strict=True
            ):
                row[f"{name}_s"] = share * (whole - waits * slow)
            row["samples"], row["bytes"] = self.job.batch, self.job.batch_bytes


class _Workers:
    """The DataLoader's: batch n goes to worker n mod W, ``prefetch`` of them ahead each."""

    def __init__(self, job: WatchedScript, start: float) -> None:
        self._job, self._free = job, [start] * job.workers
        self._done: list[float] = []
        self._taken: list[float] = []
        self._start = start

    def done(self, at: int, takes: Sequence[tuple[float, float]]) -> tuple[float, int]:
        """When batch ``at`` is ready, and by whom: all that were asked for by then are made."""
        ahead = self._job.workers * self._job.prefetch
        while len(self._done) <= min(len(takes) - 1, at + ahead - 1):
            number = len(self._done)
            asked = self._start if number < ahead else self._taken[number - ahead]
            worker = number % self._job.workers
            cpu, waits = takes[number]
            slow = self._job.slow_worker if worker == 0 else 1.0
            takes_s = slow * (cpu / self._job.threads + waits)
            self._free[worker] = max(self._free[worker], asked) + takes_s * self._job.crowded
            self._done.append(self._free[worker])
        self._at = at
        return self._done[at], at % self._job.workers

    def took(self, now: float) -> None:
        """The main thread came for another batch."""
        self._taken.append(now)

    def ready(self, now: float) -> int:
        """Batches that lie ready."""
        return sum(done <= now for done in self._done[self._at :])
