"""Real runs of a DataLoader: of one training process, of several, and of a few samples."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import statistics
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from trainfit.findings.facts import Failure
from trainfit.loader.measure import processes
from trainfit.loader.measure.loop import PacedLoop, shut_down, take_step
from trainfit.loader.measure.records import (
    COLUMNS,
    STACKS_SIGNAL,
    WALL,
    Run,
    TransferTimes,
    WorkerRecords,
    time_fetches,
)
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.measurement import Consumer

# ---
# Pinned memory where there is no accelerator: the same thread, the same copies.
#
# PyTorch leaves ``pin_memory=True`` out on a machine without one. Here the DataLoader's own
# pinning thread runs, and copies each tensor into a buffer that was used before, as the caching
# host allocator gives it (sizes rounded up to powers of two, `ATen/core/CachingHostAllocator.h`).
# What a GPU's driver does in addition to pin a new buffer is paid once and is left out.


#: Bytes a second at which a driver copies what is not pinned to a GPU, through buffers of its
#: own, while the main thread waits. An assumption: 3 to 9 GB/s over PCIe 3 and 4, by the
#: core's speed; what is pinned goes at the bus' speed and needs no core.
PAGEABLE_BYTES_PER_S: Final = 6e9


@contextlib.contextmanager
def emulated_pinning(*, always: bool = False) -> Iterator[None]:
    """Let DataLoaders pin in this process; nothing changes where there is an accelerator.

    With ``always``, and in a process that uses CUDA already, it is emulated all the same: CUDA
    does not survive a fork, neither one that comes later nor one that was.
    """
    may_pin = not (always or torch.cuda.is_initialized()) and torch.accelerator.is_available()
    if may_pin and _pins():
        yield
        return
    accelerator: Any = torch.accelerator
    names = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "set_device_index": lambda *_: None,
    }
    former = {name: getattr(accelerator, name) for name in names}
    pin = torch.Tensor.pin_memory
    staging = _Staging()
    tensor_type: Any = torch.Tensor
    try:
        for name, function in names.items():
            setattr(accelerator, name, function)
        tensor_type.pin_memory = lambda tensor, *_, **__: staging.copy(tensor)
        yield
    finally:
        tensor_type.pin_memory = pin
        for name, function in former.items():
            setattr(accelerator, name, function)


def _pins() -> bool:
    """Can this process pin memory? Not if it was forked off one that asked the driver before."""
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        return False
    return True


class _Staging:
    """Buffers that come back when the tensors in them are freed."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in such a buffer."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0 or tensor.layout != torch.strided:
            return tensor.clone()
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            free = self._free[size]
            buffer = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        staged = buffer[:nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        weakref.finalize(staged, self._return, size, buffer).atexit = False
        return staged

    def _return(self, size: int, buffer: torch.Tensor) -> None:
        # Without the lock: a finalizer may run in the midst of copy, in the same thread.
        self._free[size].append(buffer)


def pinning(settings: LoaderSettings) -> contextlib.AbstractContextManager[None]:
    """Pinned memory for a loader of these settings in this process, as far as they ask for it."""
    if not settings.pin_memory:
        return contextlib.nullcontext()
    # Without workers it happens in this process, from which others are forked later.
    return emulated_pinning(always=not settings.num_workers)


_T = TypeVar("_T")
#: Seconds beyond a run's own after which it is taken to hang.
PATIENCE_S: Final = 20.0


def run_loader(
    workload: Workload,
    settings: LoaderSettings,
    *,
    consumer: Consumer | None = None,
    seconds: float = 2.0,
    limit_s: float | None = None,
    most_batches: int | None = None,
    saves: bool = False,
) -> Run:
    """Run the workload's loader with these settings for so many seconds of counted batches.

    The run ends sooner after ``most_batches`` batches. It never raises for what the loader
    does: that is the result's ``failure``.

    Args:
        consumer: what happens between two batches; by default nothing does.
        limit_s: until it is taken to hang; by default 20 s more than ``seconds``.
        saves: save a checkpoint at the end, while the workers go on.
    """
    consumer = consumer or Consumer(0.0)
    limit_s = seconds + PATIENCE_S if limit_s is None else limit_s
    with tempfile.TemporaryDirectory(prefix="trainfit-loader-") as folder:
        notebook = WorkerRecords(Path(folder), max(1, settings.num_workers))
        # Other ranks' loaders and who watches the cores are this process', not others'.
        function = functools.partial(
            _run, workload, settings, consumer, seconds, most_batches, saves, notebook, os.getpid()
        )
        value, failure = watched(function, settings, limit_s, notebook)
        if value is not None:
            return value
        fetches = tuple(notebook.batches(worker) for worker in range(settings.num_workers))
        started = tuple(notebook.started())
        return Run(settings, consumer.step_s, fetches=fetches, started=started, failure=failure)


def watched(
    function: Callable[[], _T], settings: LoaderSettings, limit_s: float, notebook: WorkerRecords
) -> tuple[_T | None, Failure]:
    """Call what iterates a loader of these settings: in a forked process with workers, here
    without. Its value, or why there is none."""
    if settings.num_workers:
        ended = processes.call(function, limit_s, STACKS_SIGNAL)
    else:
        ended = processes.call_here(function, limit_s)
    return ended.value, Failure(
        ended.error_type,
        ended.message,
        ended.traceback,
        ended.exit_code,
        hung=ended.hung,
        stacks=notebook.stacks() if ended.failed else "",
    )


def _run(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    seconds: float,
    most_batches: int | None,
    saves: bool,
    notebook: WorkerRecords,
    root: int,
) -> Run:
    if settings.num_workers:
        notebook.watch_stacks()
    records = np.zeros((1 << 14, COLUMNS))
    restore = None if settings.num_workers else time_fetches(records)
    try:
        with pinning(settings), TransferTimes() as receipts:
            loader = workload.loader(settings, notebook.init)
            loop = PacedLoop(loader, settings, consumer, seconds, most_batches, saves, root)
            failure = loop.run()
        alone = records[records[:, WALL] > 0]
        count = settings.num_workers
        return Run(
            settings,
            consumer.step_s,
            began=loop.began,
            handed=np.array(loop.handed),
            waited=np.array(loop.waited),
            next_cpu=np.array(loop.next_cpu),
            steps=np.array(loop.steps),
            fetches=tuple(notebook.batches(w) for w in range(count)) if count else (alone,),
            received=receipts.taken,
            pinned=receipts.pinned,
            started=tuple(notebook.started())[:count],
            batch_bytes=loop.batch_bytes,
            batch_tensors=loop.batch_tensors,
            float_bytes=loop.float_bytes,
            private_bytes=loop.private_bytes,
            context_switches=loop.context_switches,
            core_waits_s=loop.core_waits_s,
            save_s=loop.save_s,
            others_cores=loop.others_cores,
            exhausted=loop.exhausted,
            failure=failure,
        )
    finally:
        if restore is not None:
            restore()


# ---
# Several training processes with a loader each on one machine: the rate of one of them.
#
# The probe has the whole machine; what it finds is brought to one rank's share of the cores for the
# model. A real run that confirms is made alongside as many copies of the same loader as there are
# other ranks, all running: they use their share of the cores, the caches and the storage, and no
# division has to be assumed.


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
    """Wait until each rank has told of its first batch, or has ended."""
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


# ---
# What a sample needs to be loaded on this machine, in one short real run.


#: Seconds of the run, and the most that it may take.
_RUN_S: Final = 0.3
_LIMIT_S: Final = 20.0


@dataclasses.dataclass(frozen=True)
class SampleCost:
    """Seconds that a worker needs for a sample (``None``: its run failed, or batches have no
    known size)."""

    sample_s: float | None


def time_samples(workload: Workload) -> SampleCost:
    """The median cost of a sample in the batches of one worker, after its first, which finds cold
    caches."""
    start = workload.present.start_method
    settings = LoaderSettings(1, start_method=start)
    run = run_loader(workload, settings, seconds=_RUN_S, limit_s=_LIMIT_S)
    size, took = workload.batch_size, [each for rows in run.fetches for each in rows[:, WALL]]
    if run.failure is not None or not size or not took:
        return SampleCost(None)
    return SampleCost(statistics.median(took[1:] or took) / size)
