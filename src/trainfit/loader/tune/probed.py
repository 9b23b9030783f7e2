"""What a probe's runs say of a loader, in figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from trainfit.loader.calibration.fitting import Fitted
from trainfit.loader.calibration.probe_runs import KINDS, TITLES, Readings, mean, start_s
from trainfit.loader.measure.instrument import COLUMNS, CPU, TOOK, WALL, collected
from trainfit.loader.measure.run import Run
from trainfit.loader.measure.workload import Workload
from trainfit.results.loader.probe import Probe


def probe_of(workload: Workload, readings: Readings, fitted: Fitted | None) -> Probe:
    """The probe's result, without what is looked at after its runs."""
    runs = readings.of(*KINDS)
    ones = readings.of("one")
    fetched = np.concatenate([run.fetched for run in ones]) if ones else np.zeros((0, COLUMNS))
    wall, cpu = fetched[:, WALL], fetched[:, CPU]
    alone = [run.fetched[:, WALL] for run in readings.of("alone")]
    one, two = readings.rate("one"), readings.rate("two")
    transfer = fitted.transfer if fitted is not None and ones else None
    busy = [run.received[run.warm :, TOOK] for run in ones]
    start = start_s(readings)
    private = [size for run in runs for size in run.private_bytes]
    sampler = workload.sampler_seconds
    return Probe(
        dataset=workload.name,
        kind=workload.kind,
        batch_size=workload.batch_size,
        samples=workload.samples,
        batch_bytes=max((run.batch_bytes for run in runs), default=0),
        batch_tensors=max((run.batch_tensors for run in runs), default=0),
        float_bytes=max((run.float_bytes for run in runs), default=None),
        batches=sum(len(run.handed) for run in runs),
        fetch_s=float(wall.mean()) if len(wall) else None,
        fetch_cpu_s=float(cpu.mean()) if len(cpu) else None,
        variation=float(wall.std() / wall.mean()) if len(wall) > 1 else None,
        alone_s=mean(alone) if alone else None,
        threads=float(np.maximum(1.0, cpu / wall).mean()) if len(wall) else None,
        receive_s=transfer.receive_s if transfer else None,
        receive_busy_s=mean(busy) if ones else None,
        pin_s=transfer.pin_s if transfer and readings.of("pinned") else None,
        next_s=transfer.next_s if transfer else None,
        latency_s=transfer.latency_s if transfer and readings.of("turn") else None,
        sampler_s=statistics.fmean(sampler) if sampler else None,
        start_s={ones[0].settings.start_method: start} if ones and start else {},
        worker_private_bytes=int(statistics.median(private)) if private else None,
        scaling=two / one if one and two else None,
        contention=fitted.cores.contention if fitted is not None and two else None,
        core_speed=_mean_told(run.core_speed.speed if run.core_speed else None for run in runs),
        others_cores=_mean_told(run.others_cores for run in runs),
        disturbed={TITLES[name]: cores for name, cores in readings.disturbed().items()},
        collecting=_collecting(runs),
    )


def _collecting(runs: Sequence[Run]) -> float | None:
    """Of the workers' CPU time for batches, what garbage collections take."""
    records = [each for run in runs if run.settings.num_workers for each in run.fetches]
    spent = sum(float(collected(each).sum()) for each in records)
    worked = sum(float(each[:, CPU].sum()) for each in records)
    return min(1.0, spent / worked) if worked > 0 else None


def _mean_told(values: Iterable[float | None]) -> float | None:
    """Of those that were seen."""
    seen = [value for value in values if value is not None]
    return statistics.fmean(seen) if seen else None
