"""A process in which a launch line's DataLoader is run: its script up to the first step, in the
line's real environment, then the loader with any settings, as often as it is asked to.

    python _launch_place.py FILE_DESCRIPTOR      a pipe to _launch_rig.py
"""

from __future__ import annotations

import sys
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
# Behind the script's own folder, which takes the first place.
sys.path.insert(1, str(SOURCE))

from trainfit.results.dataloader import LoaderSettings  # noqa: E402
from trainfit.results.gpus import GpuSpec  # noqa: E402
from trainfit.results.runs.measurement import Consumer  # noqa: E402
from trainfit.results.runs.trace import Target  # noqa: E402


@dataclass(frozen=True)
class Asked:
    """The script to run on a simulated GPU until its first step, in so many seconds at most."""

    target: Target
    gpu: GpuSpec
    limit_s: float


@dataclass(frozen=True)
class Ready:
    """What the script's loader has: its settings, batch size, and threads by library."""

    present: LoaderSettings
    batch_size: int | None
    pools: dict[str, int]


@dataclass(frozen=True)
class Failed:
    """The script came to no loader; why, and the traceback if there is one."""

    why: str
    details: str = ""


@dataclass(frozen=True)
class Job:
    """One run of the loader."""

    settings: LoaderSettings
    consumer: Consumer
    seconds: float
    seed: int


def main() -> None:
    from trainfit.loader.script import Script
    from trainfit.simgpu.cuda import clocks
    from trainfit.speed.step import StepClock

    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    asked: Asked = connection.recv()
    sys.argv = [sys.argv[0]]
    clocks.use(StepClock)
    warnings.filterwarnings("ignore", "This DataLoader will create")

    def late(trace: Any) -> None:
        connection.send(Failed(f"{trace.status}: {trace.message or 'no step in time'}"))

    Script(
        asked.target,
        asked.gpu,
        asked.target.name,
        asked.limit_s,
        records=False,
        late=late,
        use=lambda found: _serve(connection, found),
    ).run()


def _serve(connection: Connection[Any, Any], found: Any) -> None:
    import torch

    from trainfit.loader.measure.running import run_loader
    from trainfit.loader.script import workload_of
    from trainfit.scripts.library_threads import pools

    if found.trace.status not in ("finished", "ended"):
        text = f"{found.trace.status}: {found.trace.message}"
        connection.send(Failed(text, found.trace.traceback or ""))
        return
    try:
        workload = workload_of(found)
        connection.send(Ready(workload.present, workload.batch_size, pools()))
    except Exception as error:
        connection.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return
    while (job := _next(connection)) is not None:
        torch.manual_seed(job.seed)  # the same order of samples for all settings
        run = run_loader(workload, job.settings, consumer=job.consumer, seconds=job.seconds)
        connection.send(run)


def _next(connection: Connection[Any, Any]) -> Job | None:
    try:
        job: Job | None = connection.recv()
    except EOFError:  # who asked is gone
        return None
    return job


if __name__ == "__main__":
    # What is sent has to be of the module's own name, not of __main__, which the script will be.
    import _launch_place

    _launch_place.main()
