"""The public calls: ``trainfit.loader.probe`` and ``trainfit.loader.tune``."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset

from trainfit.hardware.machine.survey import survey
from trainfit.hardware.machine.system import System
from trainfit.loader.local_tuning import tune_here
from trainfit.loader.measure.machine_limits import loader_machine
from trainfit.loader.measure.processes import MeasurementProgress
from trainfit.loader.measure.workload import Workload
from trainfit.loader.probe import SECONDS, probe_workload
from trainfit.loader.tuner import CONFIRM
from trainfit.results.dataloader import Probe
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.measurement import AS_FAST, Consumer
from trainfit.results.runs.spec import TuningSpec


def probe(
    source: DataLoader[Any] | Dataset[Any],
    *,
    batch_size: int | None = 1,
    seconds: float = SECONDS,
    progress: MeasurementProgress | None = None,
) -> Probe:
    """What batches of a DataLoader, or of a data set with this batch size, cost here.

    It takes about so many seconds and changes neither the loader nor the data. Batches are made
    in processes of its own, at the end some in this one, too (as without workers). Call it under
    ``if __name__ == "__main__":``.

    Raises :class:`~trainfit.loader.measure.workload.LoaderError` for what is neither.
    """
    workload = Workload.of(source, batch_size)
    return probe_workload(
        workload, loader_machine(survey(System(), imports_torch=False)), seconds, progress
    ).probe


def tune(
    source: DataLoader[Any] | Dataset[Any],
    *,
    step_s: float = 0.0,
    batch_size: int | None = 1,
    seconds: float = SECONDS,
    confirm: int = CONFIRM,
    max_workers: int | None = None,
    any_order: bool = False,
    ranks: int = 1,
    progress: MeasurementProgress | None = None,
) -> LoaderResult:
    """The settings that suit a DataLoader (or a data set) whose batches a step takes ``step_s``
    seconds to train on; 0: as fast as the loader can.

    As ``trainfit loader`` does for a script. ``ranks`` processes share the machine; with
    ``any_order`` batches may come in another order than the sampler's.
    """
    workload = Workload.of(source, batch_size)
    return tune_here(
        workload,
        TuningSpec(
            Consumer(step_s, source="given" if step_s else AS_FAST),
            seconds=seconds,
            confirm=confirm,
            max_workers=max_workers,
            any_order=any_order,
            ranks=ranks,
        ),
        loader=workload.name,
        progress=progress,
    )
