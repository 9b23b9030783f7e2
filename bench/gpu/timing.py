"""How long steps of a job take, at several batch sizes.

Each step is timed to the GPU's end of it, as a loop that reads its loss is; on the way the CPU's
clock is read at the end of each part, and at the first and the last batch size one step more is
profiled for its kernels. The first
steps at a batch size (choosing kernels, growing memory, clocks that rise) do not count.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch

from gpu import machine
from gpu.training import TrainingJob

#: Of a kernel's name, which may be a page of C++ templates.
_NAME = 160


@dataclasses.dataclass(frozen=True)
class TimingRepeats:
    """Steps that do not count, and their least seconds; then so many, for as long as this (s),
    whichever is more, and at most."""

    warm_up: int = 4
    warm_up_s: float = 0.0
    least: int = 8
    seconds: float = 1.5
    most: int = 60


#: Where many jobs are to be timed in little time.
SHORT = TimingRepeats(warm_up=3, warm_up_s=0.05, least=4, seconds=0.2, most=30)


class StepTimer:
    """One job at its batch sizes, prepared on the CPU."""

    def __init__(
        self, job: TrainingJob, batches: tuple[int, ...], repeats: TimingRepeats | None = None
    ) -> None:
        self._job, self._batches = job, batches
        self._repeats = repeats or TimingRepeats()

    def measure(self, simulated: bool, host: float | None = None) -> dict[str, Any]:
        """What a truth file says of it; running out of memory ends it, and is no failure.

        ``host`` is what an operator takes a core, where that is known.
        """
        if host is None and not simulated:
            # Not under the simulation, which makes operators slower than PyTorch does.
            host = machine.attempt(operator_seconds)
        self._job.begin()
        rows: list[dict[str, Any]] = []
        for batch in self._batches:
            # The profiler takes longer than a few steps.
            profiled = not simulated and batch in (self._batches[0], self._batches[-1])
            rows.append(self._at(batch, profiled))
            if rows[-1]["status"] != "ran":
                break
        return {
            "status": "ran",
            "message": "",
            "simulated": simulated,
            "case": dataclasses.asdict(self._job.case),
            "machine": machine.describe(simulated),
            "operator_s": host,
            "timed": rows,
            "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _at(self, batch: int, profiled: bool) -> dict[str, Any]:
        self._job.batch = self._job.model.batch(batch)
        seconds: list[float] = []
        parts: dict[str, list[float]] = {}
        kernels: list[tuple[str, int, float]] = []
        try:
            self._warm_up()
            while not self._enough(seconds):
                seconds.append(round(self._step(parts), 7))
            if profiled:
                kernels = machine.attempt(self._kernels) or []
        except torch.cuda.OutOfMemoryError as error:
            error.__traceback__ = None
            return {"batch": batch, "status": "out_of_memory", "seconds": []}
        finally:
            self._job.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        host = {name: round(statistics.median(each), 7) for name, each in parts.items()}
        return {
            "batch": batch, "status": "ran", "seconds": seconds, "host_s": host, "kernels": kernels,
        }  # fmt: skip

    def _warm_up(self) -> None:
        began = time.perf_counter()
        for _ in range(self._repeats.warm_up):
            self._job.step()
        while time.perf_counter() - began < self._repeats.warm_up_s:
            self._job.step()

    def _enough(self, seconds: list[float]) -> bool:
        repeats = self._repeats
        if len(seconds) < repeats.least:
            return False
        return sum(seconds) >= repeats.seconds or len(seconds) >= repeats.most

    def _step(self, parts: dict[str, list[float]]) -> float:
        began = time.perf_counter()

        def mark(name: str) -> None:
            parts.setdefault(name, []).append(time.perf_counter() - began)

        return self._job.step(mark)

    def _kernels(self) -> list[tuple[str, int, float]]:
        """Name, launches and seconds of the kernels and copies of one step."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self._job.step()
        found: dict[str, list[float]] = {}
        for event in profile.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA:
                found.setdefault(event.name()[:_NAME], []).append(event.duration_ns() / 1e9)
        return [(name, len(each), round(sum(each), 9)) for name, each in sorted(found.items())]


def operator_seconds() -> float:
    """What an operator takes this core, by trainfit's probe; it needs no GPU."""
    from trainfit.speed import dispatch_probe

    return dispatch_probe.operator_seconds()
