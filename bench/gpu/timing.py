"""How long steps of a job take, at several batch sizes; in a process of its own.

Each step is timed to the GPU's end of it, as a loop that reads its loss is. The first steps at a
batch size (choosing kernels, growing memory, clocks that rise) do not count.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from gpu import machine
from gpu.training import Job

#: Steps that do not count; then so many, for as long as this (s), whichever is more, and at most.
WARM_UP, LEAST, SECONDS, MOST = 4, 8, 1.5, 60


class TimedSteps:
    """One job at its batch sizes, prepared on the CPU."""

    def __init__(self, job: Job, batches: tuple[int, ...]) -> None:
        self._job, self._batches = job, batches

    def measure(self, simulated: bool) -> dict[str, Any]:
        """What a truth file says of it; running out of memory ends it, and is no failure."""
        # Not under the simulation, which makes operators slower than PyTorch does.
        host = None if simulated else machine.attempt(_operator_seconds)
        self._job.begin()
        rows: list[dict[str, Any]] = []
        for batch in self._batches:
            rows.append(self._at(batch))
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

    def _at(self, batch: int) -> dict[str, Any]:
        self._job.batch = self._job.model.batch(batch)
        seconds: list[float] = []
        try:
            for _ in range(WARM_UP):
                self._job.step()
            while len(seconds) < LEAST or (sum(seconds) < SECONDS and len(seconds) < MOST):
                seconds.append(round(self._job.step(), 7))
        except torch.cuda.OutOfMemoryError as error:
            error.__traceback__ = None
            return {"batch": batch, "status": "out_of_memory", "seconds": []}
        finally:
            self._job.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        return {"batch": batch, "status": "ran", "seconds": seconds}


def _operator_seconds() -> float:
    """What an operator takes this core, by trainfit's probe; it needs no GPU."""
    from trainfit.speed.dispatch_probe import operator_seconds

    return operator_seconds()
