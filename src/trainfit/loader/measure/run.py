"""One real run of a DataLoader with a consumer that waits a step's time per batch.

A run with workers happens in a forked process of its own, which may crash, be killed or hang;
one without workers happens here, with all threads that PyTorch has.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import psutil
import torch

from trainfit.hardware.cpu.core_speed import CoreSpeed
from trainfit.loader.measure import isolated
from trainfit.loader.measure.instrument import (
    COLUMNS,
    STACKS_SIGNAL,
    WALL,
    Records,
    TransferTimes,
    WorkerRecords,
    time_fetches,
)
from trainfit.loader.measure.other_processes import OtherProcessLoad, waits_for_cores
from trainfit.loader.measure.pinning import emulated_pinning
from trainfit.loader.measure.saving import save_seconds
from trainfit.loader.measure.workload import Workload
from trainfit.loader.model.dataloader import Consumer
from trainfit.results.loader import LoaderSettings

_T = TypeVar("_T")

#: Batches that a run waits for at least, however long they take: fewer give no rate.
_LEAST_BATCHES: Final = 4
#: Batches of each worker until it is as fast as it will be: memory is touched, and taken from the
#: system, for the first time. The ACT example's take 33, 23, 23, 20, 20 ms and then 18.5
#: (docs/figures.md).
_SETTLING: Final = 4
#: Seconds beyond a run's own after which it is taken to hang.
PATIENCE_S: Final = 20.0
#: Seconds until a process that was killed is seen as dead: at most that long where an error may
#: come of it, and where one broke off while it was asked (it may write its memory down first).
_DYING_S, _SURELY_DYING_S = 0.5, 5.0
#: What a sleep takes longer than it should, on an idle machine with default timer slack.
_OVERSLEEP_S: Final = 6e-5


@dataclass(frozen=True)
class Failure:
    """Why a run came to nothing.

    ``error_type``, ``message`` and ``traceback`` are what iterating raised; ``exit_code`` is of
    the process that iterated, if it died (negative: signal); ``worker_exits`` of its workers,
    as far as they had ended. ``hung``: no end within the time limit; ``stacks`` are then those
    of all threads of all processes (faulthandler's format).
    """

    error_type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    worker_exits: tuple[int, ...] = ()
    hung: bool = False
    stacks: str = ""


def _no_records() -> Records:
    return np.empty((0, 2))


@dataclass(frozen=True)
class Run:
    """What a run took; times on the monotonic clock, in seconds.

    ``handed`` is when each batch was returned, ``waited`` how long ``next`` took for it and
    ``next_cpu`` the main thread's CPU time meanwhile, ``steps`` how long the consumer's step
    took. ``fetches`` are each worker's records (:mod:`trainfit.loader.measure.instrument`; without
    workers those of the main process), ``received`` and ``pinned`` wall and CPU of taking a
    batch over and of pinning it. ``began`` is when ``iter`` was called, ``started`` when each
    worker was ready.
    """

    settings: LoaderSettings
    step_s: float
    began: float = 0.0
    handed: Records = field(default_factory=_no_records)
    waited: Records = field(default_factory=_no_records)
    next_cpu: Records = field(default_factory=_no_records)
    steps: Records = field(default_factory=_no_records)
    fetches: tuple[Records, ...] = ()
    received: Records = field(default_factory=_no_records)
    pinned: Records = field(default_factory=_no_records)
    started: tuple[float, ...] = ()
    batch_bytes: int = 0
    batch_tensors: int = 0
    float_bytes: int = 0
    """Of them, those of floating-point tensors."""
    private_bytes: tuple[int, ...] = ()
    """Of each worker: memory that it shares with no other process (USS)."""
    context_switches: tuple[int, ...] = ()
    core_waits_s: tuple[float, ...] = ()
    """Of each worker (without any, of the main thread): how long it waited for a core that others
    had, although it could have run; empty where the kernel does not say."""
    save_s: float | None = None
    """What saving a checkpoint took at the end (:mod:`trainfit.loader.measure.saving`)."""
    exhausted: bool = False
    """Did the loader end by itself, which it never should?"""
    failure: Failure | None = None
    others_cores: float | None = None
    """Cores that other processes kept busy meanwhile, beyond those that idled; ``None``: not
    told."""
    core_speed: CoreSpeed | None = None
    """Of the cores while batches were counted, where that was watched."""
    full_speed_batches_per_s: float | None = None
    """The rate that it would have had at the cores' full speed, where that was worked out."""
    ranks: int = 1
    """Copies of the loader that ran until its end, this one among them."""

    @property
    def warm(self) -> int:
        """The first batch that counts: as in :class:`trainfit.loader.model.dataloader.Outcome`."""
        return min(warm_up(self.settings), len(self.handed) // 2)

    @property
    def counted(self) -> int:
        """Batches that count."""
        return max(0, len(self.handed) - 1 - self.warm)

    @property
    def seconds(self) -> float:
        """In which the counted batches were returned."""
        return float(self.handed[-1] - self.handed[self.warm]) if self.counted else 0.0

    @property
    def batches_per_s(self) -> float | None:
        """In the steady state; ``None`` where too few batches came."""
        return self.counted / self.seconds if self.seconds > 0 else None

    @property
    def waiting_share(self) -> float | None:
        """Of the counted time, what the consumer waited for batches."""
        if self.seconds <= 0:
            return None
        return min(1.0, float(self.waited[self.warm + 1 :].sum()) / self.seconds)

    @property
    def fetched(self) -> Records:
        """All workers' records of batches that count (:meth:`settled`)."""
        rows = [records[self.settled(records) :] for records in self.fetches if len(records) > 1]
        return np.concatenate(rows) if rows else np.empty((0, COLUMNS))

    def settled(self, records: Records) -> int:
        """The first of a worker's records that counts.

        Its first batch never does (imports, caches, files that are opened once), nor those that
        it made before the batches that count were returned, if others are left.
        """
        early = self.warm // max(1, self.settings.num_workers)
        return max(1, min(early, len(records) // 2))


def warm_up(settings: LoaderSettings) -> int:
    """Batches of a run that do not count: what was prefetched, and some rounds of the workers."""
    return settings.tokens + _SETTLING * max(1, settings.num_workers) + 1


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
        ended = isolated.call(function, limit_s, STACKS_SIGNAL)
    else:
        ended = isolated.call_here(function, limit_s)
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
            loop = _Loop(loader, settings, consumer, seconds, most_batches, saves, root)
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


def pinning(settings: LoaderSettings) -> contextlib.AbstractContextManager[None]:
    """Pinned memory for a loader of these settings in this process, as far as they ask for it."""
    if not settings.pin_memory:
        return contextlib.nullcontext()
    # Without workers it happens in this process, from which others are forked later.
    return emulated_pinning(always=not settings.num_workers)


class _Loop:
    """The user's loop: ``for batch in loader: step``."""

    def __init__(
        self,
        loader: Any,
        settings: LoaderSettings,
        consumer: Consumer,
        seconds: float,
        most_batches: int | None,
        saves: bool,
        root: int,
    ) -> None:
        self._loader, self._settings, self._consumer = loader, settings, consumer
        self._seconds, self._most, self._saves = seconds, most_batches, saves
        self._root = root
        self.began = 0.0
        self.handed: list[float] = []
        self.waited: list[float] = []
        self.next_cpu: list[float] = []
        self.steps: list[float] = []
        self.batch_bytes = self.batch_tensors = self.float_bytes = 0
        self.exhausted = False
        self.private_bytes: tuple[int, ...] = ()
        self.context_switches: tuple[int, ...] = ()
        self.core_waits_s: tuple[float, ...] = ()
        self.save_s: float | None = None
        self.others_cores: float | None = None

    def run(self) -> Failure | None:
        """Iterate until there are enough batches; why that went wrong, if it did."""
        workers: list[psutil.Process] = []
        before: list[int] = []
        self.began = time.monotonic()
        batches: Iterator[Any] | None = None
        try:
            batches = iter(self._loader)
            with contextlib.suppress(psutil.Error):  # one that died at once: it will be seen
                workers = [psutil.Process(each.pid) for each in getattr(batches, "_workers", ())]
                before = _switches(workers)
            others = OtherProcessLoad(self._root)
            makers = workers or [psutil.Process()]
            waited = waits_for_cores(makers)
            self._iterate(batches)
            self.others_cores = others.cores()
            self.core_waits_s = _more(waits_for_cores(makers), waited)
            if self._saves:
                self.save_s = save_seconds()
            self._look_at(workers, before)
        except Exception as error:
            return failure_of(error, batches)
        finally:
            shut_down(batches)
        return None

    def _iterate(self, batches: Iterator[Any]) -> None:
        warm, end, batch = warm_up(self._settings), float("inf"), None
        while True:
            asked, cpu = time.monotonic(), time.thread_time()
            try:
                # The former batch is freed here, as in a user's loop.
                batch = next(batches)
            except StopIteration:
                self.exhausted = True
                return
            now = time.monotonic()
            self.next_cpu.append(time.thread_time() - cpu)
            self.waited.append(now - asked)
            self.handed.append(now)
            count = len(self.handed)
            if count == 1:
                self.batch_bytes, self.batch_tensors, self.float_bytes = weigh(batch)
                # A loader too slow to warm up counts what there is in the end.
                end = now + 2 * self._seconds
            if count == warm + 1:
                end = now + self._seconds
            if count == self._most or (now >= end and count >= _LEAST_BATCHES):
                return
            self.steps.append(take_step(self._consumer, self._settings.pin_memory))

    def _look_at(self, workers: list[psutil.Process], before: list[int]) -> None:
        """What the workers hold and did, while they still live."""
        with contextlib.suppress(psutil.Error):
            self.context_switches = tuple(
                now - then for now, then in zip(_switches(workers), before, strict=True)
            )
            self.private_bytes = tuple(each.memory_full_info().uss for each in workers)


def take_step(consumer: Consumer, pinned: bool = True) -> float:
    """Take the time of a training step; how long that was, in seconds.

    Of a batch that is not ``pinned`` the copy comes on top, at which the main thread works.
    """
    copy_s = 0.0 if pinned else consumer.pageable_s
    if not consumer.step_s + copy_s:
        return 0.0
    began = time.monotonic()
    while time.monotonic() - began < consumer.work_s + copy_s:
        pass
    left = consumer.step_s + copy_s - (time.monotonic() - began) - _OVERSLEEP_S
    if left > 0:
        time.sleep(left)
    return time.monotonic() - began


def weigh(batch: Any) -> tuple[int, int, int]:
    """Bytes and number of the tensors of a batch (arrays and bytes count as tensors do), and
    the bytes of those of them that are floating-point."""
    nbytes = count = floats = 0
    seen: set[int] = set()
    stack = [batch]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            size = item.numel() * item.element_size()
            nbytes, count = nbytes + size, count + 1
            floats += size if item.is_floating_point() else 0
        elif isinstance(item, np.ndarray):
            nbytes, count = nbytes + item.nbytes, count + 1
            floats += item.nbytes if item.dtype.kind == "f" else 0
        elif isinstance(item, bytes | bytearray):
            nbytes, count = nbytes + len(item), count + 1
        elif id(item) in seen or isinstance(item, str | int | float | type(None)):
            continue
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif hasattr(item, "__dict__"):
            stack += vars(item).values()
        seen.add(id(item))
    return nbytes, count, floats


def _more(now: Sequence[float], before: Sequence[float]) -> tuple[float, ...]:
    """By how much each has grown; empty where one of them is not told."""
    pairs = zip(now, before, strict=False)
    return tuple(after - then for after, then in pairs) if len(now) == len(before) else ()


def _switches(workers: list[psutil.Process]) -> list[int]:
    counts = []
    for worker in workers:
        switches = worker.num_ctx_switches()
        counts.append(switches.voluntary + switches.involuntary)
    return counts


def failure_of(error: Exception, batches: Any) -> Failure:
    """What iterating raised, with the exit codes of ``batches``' workers.

    A worker that dies while its batch is taken over is seen as a connection that broke, or by
    PyTorch's handler of signals: it gets a moment to be seen as dead.
    """
    workers, text = getattr(batches, "_workers", ()), traceback.format_exc()
    if isinstance(error, OSError | EOFError) or "killed by signal" in str(error):
        broke_off = "multiprocessing/" in text or "killed by signal" in str(error)
        limit_s = _SURELY_DYING_S if broke_off else _DYING_S
        multiprocessing.connection.wait([worker.sentinel for worker in workers], limit_s)
    exits = [worker.exitcode for worker in workers]
    return Failure(
        type(error).__name__,
        str(error),
        text,
        worker_exits=tuple(code for code in exits if code is not None),
    )


def shut_down(batches: Any) -> None:
    """End the workers now, not when the iterator is collected."""
    end: Callable[[], None] | None = getattr(batches, "_shutdown_workers", None)
    if end is not None:
        with contextlib.suppress(Exception):
            end()
