"""What a sample needs to be loaded on this machine, in one short real run."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Final

from trainfit.loader.measure.instrument import WALL
from trainfit.loader.measure.running import run_loader
from trainfit.loader.measure.workload import Workload
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.runs.loading import LoadingRequest

#: Seconds of the run, and the most that it may take.
_RUN_S: Final = 0.3
_LIMIT_S: Final = 20.0


@dataclasses.dataclass(frozen=True)
class SampleCost:
    """Seconds that a worker needs for a sample (``None``: its run failed, or batches have no
    known size)."""

    sample_s: float | None


def time_samples(workload: Workload, request: LoadingRequest) -> SampleCost:
    """Of the batches of one worker, after its first, which finds cold caches: the median."""
    start = workload.present.start_method
    settings = LoaderSettings(1, start_method=start)
    run = run_loader(workload, settings, seconds=_RUN_S, limit_s=_LIMIT_S)
    size, took = workload.batch_size, [each for rows in run.fetches for each in rows[:, WALL]]
    if run.failure is not None or not size or not took:
        return SampleCost(None)
    return SampleCost(statistics.median(took[1:] or took) / size)
