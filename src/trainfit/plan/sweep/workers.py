"""Who runs the cells of a sweep: processes of this machine, or the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Final

from trainfit.hardware.machine.processor import read_cpu
from trainfit.hardware.machine.system import System
from trainfit.plan.runs.processes import GaveWay, RamGate, RamShort, available_ram
from trainfit.plan.sweep.cell_run import CellEnd, CellJob, run_cell
from trainfit.results.files.errors import TrainfitError

#: A plan makes two simulated runs at a time.
_CORES_OF_CELL: Final = 2
#: RAM of the processes of a small plan; who needs more gives way where it runs short.
_RAM_OF_CELL: Final = 3 << 30

#: Cells by their key, in the order in which they are run.
Jobs = Mapping[str, CellJob]
Ends = Generator[tuple[str, CellEnd], None, None]


class RayError(TrainfitError):
    """Ray is not installed, or its cluster cannot be reached."""


def cells_at_once() -> int:
    """As many as this machine's cores and RAM allow, at least one."""
    cores = read_cpu(System()).usable_cores.value or 1
    ram = available_ram()
    by_ram = cores if ram is None else ram // _RAM_OF_CELL
    return max(1, min(int(cores) // _CORES_OF_CELL, int(by_ram)))


def run_here(jobs: Jobs, at_once: int, warn: Callable[[str], None]) -> Ends:
    """Each cell's end, as they come.

    Closing the iterator ends the cells that go on; where RAM runs short, the youngest of them is
    ended and run later.
    """
    stop, gate = threading.Event(), RamGate(warn)

    def run(number: int, job: CellJob) -> CellEnd:
        while True:
            try:
                with gate.turn(number, stop.is_set):
                    return run_cell(job, stop.is_set, lambda: gate.look(number))
            except GaveWay:
                continue
            except RamShort as error:
                return CellEnd(None, str(error))

    with ThreadPoolExecutor(at_once) as pool:
        waiting: dict[Future[CellEnd], str] = {}
        try:
            for number, (key, job) in enumerate(jobs.items()):
                waiting[pool.submit(run, number, job)] = key
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future), future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


# ---
# Ray: chosen for its retries on another node when a worker or a node dies, and as what clusters for
# training have already. Nothing but the cell's words goes to a node: the user's files are to be
# there, at the same place, as on a shared file system.

#: Times that a cell is begun once more after its worker or its node was lost.
_RETRIES: Final = 2
_POLL_S: Final = 0.5


def run_on_ray(jobs: Jobs, address: str) -> Ends:
    """Each cell's end, as they come, run on the cluster at ``address`` with a CPU of Ray's each.

    Raises :class:`RayError`.
    """
    # Ray prints what becomes of its workers; standard output is the result's alone.
    with contextlib.redirect_stdout(sys.stderr):
        yield from _on_ray(_ray(address), jobs)


def _on_ray(ray: Any, jobs: Jobs) -> Ends:
    try:
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(
            run_cell
        )
        waiting: dict[Any, str] = {remote.remote(job): key for key, job in jobs.items()}
        try:
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=_POLL_S)
                for each in done:
                    yield waiting.pop(each), _end_of(ray, each)
        finally:
            for each in waiting:
                ray.cancel(each)
            if waiting:
                ray.wait(list(waiting), num_returns=len(waiting), timeout=10 * _POLL_S)
    finally:
        ray.shutdown()


def _ray(address: str) -> Any:
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to its makers
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise RayError(
            f"--ray {address}: Ray is not installed; pip install 'trainfit[ray]', or leave --ray "
            "out to run the cells on this machine"
        ) from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # what is not reached has many ways to say so
        said = " ".join(str(error).split())[:160]
        raise RayError(
            f"--ray {address}: no cluster is reached there ({type(error).__name__}: {said}); start "
            "one with `ray start --head`, or give its address"
        ) from None
    return ray


def _end_of(ray: Any, reference: Any) -> CellEnd:
    try:
        end: CellEnd = ray.get(reference)
    except Exception as error:  # a lost worker, or what a node lacks
        words = [line for line in str(error).splitlines() if line.strip()]
        said = words[-1].strip()[:200] if words else "no reason was given"
        return CellEnd(None, f"Ray could not run it ({type(error).__name__}: {said})")
    return end
