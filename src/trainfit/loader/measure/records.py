"""What is recorded of a real run: each batch in workers and main process, and what the run took."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainfit.findings.facts import Failure
from trainfit.hardware.machine.core_speed import CoreSpeed
from trainfit.results.dataloader import LoaderSettings
from trainfit.simgpu.patching import CollectionTimes, PatchSet

#: Columns of a worker's record of one batch.
BEGAN, WALL, CPU, PROCESS_CPU, CORE, COLLECTED = range(6)
COLUMNS: Final = 6
#: A column more, of runs that were brought to full speed
#: (:mod:`trainfit.loader.measure.noise_correction`): what
#: the batch's work is also to be multiplied by.
LOCAL: Final = 6
#: Columns of a receipt (:class:`TransferTimes`).
TOOK, WORKED, CLOCK, DONE, PLACE = range(5)
_RECEIPT: Final = 5
_Receipt = tuple[float, float, float, float, float]
#: Batches a worker can note down; later ones are not.
CAPACITY: Final = 1 << 14
#: With this signal each process writes the stacks of its threads (see :class:`WorkerRecords`).
STACKS_SIGNAL: Final = signal.SIGUSR2

Records = NDArray[np.float64]


class WorkerRecords:
    """The workers' records, in a folder that the caller removes.

    As ``notebook.init(user's worker_init_fn)`` it goes to the workers by whatever start method.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self._path, self._stacks = str(folder / "records"), str(folder / "stacks")
        self._shape = (workers, CAPACITY + 1, COLUMNS)
        np.memmap(self._path, np.float64, "w+", shape=self._shape)

    def init(self, inner: Callable[[int], None] | None) -> Callable[[int], None]:
        """The ``worker_init_fn`` that begins a worker's record."""
        return _Begin(self._path, self._shape, self._stacks, inner)

    def started(self) -> list[float]:
        """When each worker had started, on the monotonic clock; 0: it has not."""
        return [float(at) for at in self._map()[:, 0, BEGAN]]

    def batches(self, worker: int) -> Records:
        """The worker's batches so far: began, wall, CPU, CPU of the process until it began, the
        core that made it (-1: several, or not told), and what of CPU was garbage collection."""
        records = self._map()[worker, 1:]
        return np.array(records[records[:, WALL] > 0])

    def watch_stacks(self) -> None:
        """Let this process write its stacks with :data:`STACKS_SIGNAL`."""
        _watch_stacks(self._stacks)

    def stacks(self) -> str:
        """What was written so far, one process after the other."""
        folder = Path(self._stacks).parent
        written = (path.read_text(errors="replace") for path in sorted(folder.glob("stacks.*")))
        return "\n".join(text for text in written if text)

    def _map(self) -> Any:
        return np.memmap(self._path, np.float64, "r", shape=self._shape)


class _Begin:
    """A ``worker_init_fn``: times every fetch of its worker from now on.

    The first row of a worker's records is about itself: when it was ready.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, int, int],
        stacks: str,
        inner: Callable[[int], None] | None,
    ) -> None:
        self._path, self._shape, self._stacks, self._inner = path, shape, stacks, inner

    def __call__(self, worker: int) -> None:
        _watch_stacks(self._stacks)
        records = np.memmap(self._path, np.float64, "r+", shape=self._shape)[worker]
        time_fetches(records[1:])
        if self._inner is not None:
            self._inner(worker)
        records[0, BEGAN] = time.monotonic()


class _Collections:
    """Adds up what Python's garbage collection takes this process, in seconds of CPU time."""

    def __init__(self) -> None:
        self._patches, self._times = PatchSet(), CollectionTimes()
        self._patches.see_collections(time.thread_time, self._times.starts, self._times.stops)

    def take(self) -> float:
        """What those since the last such look have taken."""
        return self._times.take()

    def stop(self) -> None:
        self._patches.restore()


def collected(records: Records) -> Records:
    """What of each batch's CPU time was garbage collection; 0 where that was not noted."""
    return records[:, COLLECTED] if records.shape[1] > COLLECTED else np.zeros(len(records))


def local(records: Records) -> Records:
    """What each batch's work is to be multiplied by; 1 where that was not told."""
    return records[:, LOCAL] if records.shape[1] > LOCAL else np.ones(len(records))


def time_fetches(records: Any) -> Callable[[], None]:
    """Time every fetch of a batch in this process; returns what puts PyTorch back."""
    from trainfit.torch_private.data_loading import FETCHERS as kinds

    former = [kind.fetch for kind in kinds]
    core_now, collections = _core_now(), _Collections()
    count = 0

    def timed(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def fetch(self: Any, indices: Any) -> Any:
            nonlocal count
            core = core_now()
            collections.take()
            began, cpu = time.monotonic(), time.process_time()
            batch = original(self, indices)
            if count < len(records):
                now, spent = time.monotonic(), time.process_time()
                # The wall time last: a record with one is whole.
                records[count, BEGAN], records[count, CPU] = began, spent - cpu
                records[count, PROCESS_CPU] = cpu
                records[count, COLLECTED] = collections.take()
                records[count, CORE] = core if core_now() == core else -1
                records[count, WALL] = max(now - began, 1e-9)
                count += 1
            return batch

        return fetch

    def restore() -> None:
        collections.stop()
        for kind, original in zip(kinds, former, strict=True):
            kind.fetch = original

    for kind, original in zip(kinds, former, strict=True):
        kind.fetch = timed(original)
    return restore


def _core_now() -> Callable[[], int]:
    """What tells the core that the calling thread is on; -1 where the C library cannot."""
    with contextlib.suppress(OSError, AttributeError):
        getcpu: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
        return getcpu
    return lambda: -1


class TransferTimes:
    """Times of taking batches from the workers' queue, and of copies to pinned memory.

    A context manager; columns are wall seconds and CPU seconds of the thread that did it, that
    thread's CPU clock when it was done, when that was (:data:`DONE`), and the batch's place in
    the order (:data:`PLACE`; nan: not told, as of copies).
    """

    def __init__(self) -> None:
        self._taken: list[_Receipt] = []
        self._pinned: list[_Receipt] = []

    @property
    def taken(self) -> Records:
        return np.array(self._taken).reshape(-1, _RECEIPT)

    @property
    def pinned(self) -> Records:
        return np.array(self._pinned).reshape(-1, _RECEIPT)

    def __enter__(self) -> TransferTimes:
        from trainfit.torch_private.data_loading import PIN_MEMORY

        self._queues: Any = _module("multiprocessing.queues")
        self._pinning = PIN_MEMORY
        self._pickler, self._pin = self._queues._ForkingPickler, self._pinning.now
        receipts, pickler, pin = self, self._pickler, self._pin

        class Pickler(pickler):  # type: ignore[misc, valid-type]
            @staticmethod
            def loads(data: Any) -> Any:
                return _timed(receipts._taken, pickler.loads, data)

        depth = 0

        def pin_memory_of(data: Any, device: Any = None) -> Any:
            nonlocal depth
            if depth:  # it calls itself for what the batch consists of
                return pin(data, device)
            depth += 1
            try:
                return _timed(receipts._pinned, pin, data, device)
            finally:
                depth -= 1

        self._queues._ForkingPickler = Pickler
        setattr(*self._pinning, pin_memory_of)
        return self

    def __exit__(self, *_: Any) -> None:
        self._queues._ForkingPickler = self._pickler
        setattr(*self._pinning, self._pin)


def _timed(into: list[_Receipt], function: Callable[..., Any], *args: Any) -> Any:
    began, cpu = time.monotonic(), time.thread_time()
    result = function(*args)
    now, done = time.thread_time(), time.monotonic()
    # A worker sends its batches as (place, batch).
    sent = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], int)
    into.append((done - began, now - cpu, now, done, result[0] if sent else math.nan))
    return result


def _module(name: str) -> Any:
    """A module whose attributes are replaced."""
    return importlib.import_module(name)


def _watch_stacks(path: str) -> None:
    """The file stays open for the life of the process: a handler writes to its descriptor."""
    stream = open(f"{path}.{os.getpid()}", "a")  # noqa: SIM115
    faulthandler.register(STACKS_SIGNAL, file=stream, all_threads=True)


# ---
# What a real run of a DataLoader took, or why it came to nothing.


#: Batches of each worker until it is as fast as it will be: memory is touched, and taken from the
#: system, for the first time. The ACT example's take 33, 23, 23, 20, 20 ms and then 18.5
#: (docs/figures.md).
_SETTLING: Final = 4


def _no_records() -> Records:
    return np.empty((0, 2))


@dataclass(frozen=True)
class Run:
    """What a run took; times on the monotonic clock, in seconds.

    ``handed`` is when each batch was returned, ``waited`` how long ``next`` took for it and
    ``next_cpu`` the main thread's CPU time meanwhile, ``steps`` how long the consumer's step
    took. ``fetches`` are each worker's records (:mod:`trainfit.loader.measure.records`; without
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
    """What saving a checkpoint took at the end (:mod:`trainfit.loader.measure.loop`)."""
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
        """The first batch that counts: as in :class:`trainfit.loader.measure.model.Outcome`."""
        return min(warm_up(self.settings), len(self.handed) // 2)

    @property
    def counted(self) -> int:
        """Batches that count."""
        return max(0, len(self.handed) - 1 - self.warm)

    @property
    def seconds(self) -> float:
        """The seconds in which the counted batches were returned."""
        return float(self.handed[-1] - self.handed[self.warm]) if self.counted else 0.0

    @property
    def batches_per_s(self) -> float | None:
        """The rate in the steady state; ``None`` where too few batches came."""
        return self.counted / self.seconds if self.seconds > 0 else None

    @property
    def waiting_share(self) -> float | None:
        """The share of the counted time in which the consumer waited for batches."""
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
