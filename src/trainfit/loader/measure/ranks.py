"""Several training processes with a loader each on one machine: the rate of one of them.

The probe has the whole machine; what it finds is brought to one rank's share of the cores for the
model. A real run that confirms is made alongside as many copies of the same loader as there are
other ranks, all running: they use their share of the cores, the caches and the storage, and no
division has to be assumed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from trainfit.loader.measure.loop import shut_down, take_step
from trainfit.loader.measure.pinning import pinning
from trainfit.loader.measure.run import Run
from trainfit.loader.measure.workload import Workload
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.runs.loading import Consumer

#: Seconds between looks at whether the process that started this one still lives, at the least.
_TICK_S: Final = 0.05


def alone_note(runs: Iterable[Run], ranks: int) -> str:
    """What is to be said of runs whose other ranks broke off; empty: nothing."""
    fewest = min((run.ranks for run in runs if run.failure is None), default=ranks)
    if fewest >= ranks:
        return ""
    return (
        f"of {ranks} copies of the loader, one for each rank, {fewest} ran to the end of a "
        "real run: measured rates may be too high; check RAM and /dev/shm, or use fewer --ranks"
    )


class OtherRanks:
    """The processes of the other ranks, while they run."""

    def __init__(self, processes: list[Any]) -> None:
        self._processes = processes

    def working(self) -> int:
        """How many of them live."""
        return sum(process.is_alive() for process in self._processes)


@contextlib.contextmanager
def others(
    workload: Workload, settings: LoaderSettings, consumer: Consumer, count: int, limit_s: float
) -> Iterator[OtherRanks]:
    """``count`` running copies of the loader, each in its own processes, until the end of the
    context; they have got their first batch when it begins, or it is ``limit_s`` seconds later.

    Each draws an order of batches of its own, as ranks do. Without workers each works with one
    thread of PyTorch's (a pool of threads does not outlive a fork).
    """
    context = multiprocessing.get_context("fork")
    processes, receivers = [], []
    try:
        for rank in range(1, count + 1):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_work,
                args=(workload, settings, consumer, rank, os.getpid(), sender),
                daemon=False,
            )
            process.start()
            sender.close()
            with contextlib.suppress(OSError):  # the child was faster
                os.setpgid(process.pid or 0, process.pid or 0)
            processes.append(process)
            receivers.append(receiver)
        _await_first(receivers, limit_s)
        yield OtherRanks(processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        for receiver in receivers:
            receiver.close()


def _await_first(receivers: list[Any], limit_s: float) -> None:
    """Until each rank has told of its first batch, or has ended."""
    left, deadline = list(receivers), time.monotonic() + limit_s
    while left and (remaining := deadline - time.monotonic()) > 0:
        for receiver in multiprocessing.connection.wait(left, remaining):
            left.remove(receiver)


def _work(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    rank: int,
    parent: int,
    sender: Any,
) -> None:
    """A rank's loop, until it is killed or the parent is gone."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    torch.manual_seed(torch.initial_seed() + rank)
    for generator in workload.generators:
        generator.manual_seed(generator.initial_seed() + rank)
    batches: Iterator[Any] | None = None
    try:
        with pinning(settings):
            batches = iter(workload.loader(settings))
            looked = time.monotonic()
            for number, _ in enumerate(batches):
                if not number:
                    sender.send_bytes(b"1")
                take_step(consumer, settings.pin_memory)
                if time.monotonic() > looked + _TICK_S:
                    looked = time.monotonic()
                    if os.getppid() != parent:
                        break
    finally:
        shut_down(batches)
