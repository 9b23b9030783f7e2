"""The user's loop over a DataLoader, a step's time per batch, and what disturbs it meanwhile."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from torch.utils.data import IterableDataset

from trainfit.findings.facts import Failure
from trainfit.hardware.machine.cgroup import shared_quota
from trainfit.hardware.machine.system import System
from trainfit.hardware.machine.topology import busy_seconds
from trainfit.loader.measure.records import warm_up
from trainfit.results.dataloader import DISTURBED_CORES, SAVE_BYTES, LoaderSettings
from trainfit.results.runs.measurement import Consumer
from trainfit.simgpu.device.user_location import locals_of
from trainfit.torch_private.data_loading import LoaderIterator, shutdown_of, workers_of
from trainfit.torch_private.needed import FETCH_FILE

# ---
# Time of saving a checkpoint while workers are busy with their next batches.
#
# The main process saves, and takes no batch meanwhile; each worker goes on until its queue is full.


#: Of the consumer's time, what it waits at least where batches are not ready ahead of it.
_WAITS: Final = 0.02


def save_seconds(nbytes: int = SAVE_BYTES) -> float | None:
    """Save so many bytes with ``torch.save`` to a temporary file; ``None`` where that fails."""
    state = {"weight": torch.ones(nbytes // 4)}
    try:
        with tempfile.TemporaryFile(prefix="trainfit-save-") as file:
            began = time.monotonic()
            torch.save(state, file)
            file.flush()
            return time.monotonic() - began
    except (OSError, RuntimeError):  # PyTorch's writer raises the latter, on a full disk
        return None


def predicted_save_s(
    alone_s: float, settings: LoaderSettings, waiting_share: float, batch_s: float, cores: float
) -> float:
    """What takes ``alone_s`` seconds of a core without workers.

    A loader that the consumer waits for has all of its batches still to make, ``batch_s`` of work
    each; the workers share the cores with the main process until these are made. One that is
    waited for by nobody has them ready, and its workers idle.
    """
    if not settings.num_workers or waiting_share < _WAITS:
        return alone_s
    at_once = min(float(settings.num_workers), cores)
    busy_s = settings.tokens * batch_s / at_once
    share = min(1.0, cores / (settings.num_workers + 1))
    return alone_s / share if alone_s <= share * busy_s else alone_s + busy_s * (1 - share)


# ---
# CPU time that other processes used while a loader ran: rates measured meanwhile reflect both.


#: Measurements in a row that others disturb before no more are made: the machine stays busy.
MOST_DISTURBED: Final = 3
#: Cores that a process has to keep busy to be named.
_WORTH_NAMING: Final = 0.1
#: Processes that are named at most.
_NAMED: Final = 3
#: Seconds in a nanosecond.
_NS: Final = 1e-9


def is_disturbed(cores: float | None) -> bool:
    """Did other processes that took so many cores disturb? (``None``, not told, is no.)"""
    return (cores or 0.0) > DISTURBED_CORES


def stays_busy(cores: Sequence[float | None]) -> bool:
    """Were the last measurements disturbed, one after the other, by what took so many cores?"""
    last = cores[-MOST_DISTURBED:]
    return len(last) == MOST_DISTURBED and all(map(is_disturbed, last))


def waits_for_cores(
    processes: Sequence[psutil.Process], root: Path = Path("/")
) -> tuple[float, ...]:
    """Seconds that each process' first thread, which makes a worker's batches, has waited for a
    core although it could have run (Documentation/scheduler/sched-stats); empty where that is not
    told of all of them."""
    found = []
    for process in processes:
        try:
            text = (root / f"proc/{process.pid}/schedstat").read_text()
            on_core, waited, times = map(int, text.split())
        except (OSError, ValueError):
            return ()
        if not on_core and not times:  # some kernels have a file of zeros
            return ()
        found.append(waited * _NS)
    return tuple(found)


class OtherProcessLoad:
    """Counts from when it is made: others are all but the process ``root`` (by default this one)
    and what it has started.

    They are in the way on the cores that may be used, and in the quota of a container that they
    share.
    """

    def __init__(self, root: int | None = None, system: System | None = None) -> None:
        self._root, self._system = root, system or System()
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._quota = shared_quota(self._system)
        self._before = self._now()

    def cores(self) -> float | None:
        """The cores that others kept busy since, on average, beyond those that idled: where as many
        idle, nobody is in the way. ``None`` where unknown."""
        now, before = self._now(), self._before
        if now is None or before is None or now.at <= before.at:
            return None
        seconds, mine = now.at - before.at, now.mine - before.mine
        shares = [(float(len(self._cpus)), now.everyone - before.everyone)]
        if self._quota is not None and now.in_quota is not None and before.in_quota is not None:
            shares.append((self._quota.cores, now.in_quota - before.in_quota))
        found = []
        for cores, everyone in shares:
            idle = max(0.0, cores - everyone / seconds)
            found.append(max(0.0, (everyone - mine) / seconds - idle))
        return max(found)

    def _now(self) -> _CpuSeconds | None:
        """What has been used so far."""
        if not self._cpus:  # a system that does not tell which cores may be used
            return None
        with contextlib.suppress(Exception):  # no /proc, or a worker dies just now: nobody knows
            everyone = busy_seconds(self._cpus)
            in_quota = self._quota.used_s(self._system) if self._quota is not None else None
            me = psutil.Process()
            mine = sum(map(_worked_s, (me, *me.children(recursive=True))))
            return _CpuSeconds(time.monotonic(), everyone, mine, in_quota)
        return None


class OtherProcesses:
    """A watch of the processes that are busy, from when it is made: all but this one and what it
    has started."""

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), _worked_by_process()

    def busiest(self) -> dict[str, float]:
        """Cores that each kept busy since, by name, the busiest first: those with a tenth of a core
        or more. Empty where that cannot be told."""
        seconds = time.monotonic() - self._began
        found: dict[str, float] = {}
        with contextlib.suppress(psutil.Error):
            me = psutil.Process()
            mine = {me.pid, *(child.pid for child in me.children(recursive=True))}
            for key, (name, worked_s) in _worked_by_process().items():
                if key[0] not in mine and seconds > 0:
                    used = worked_s - self._before.get(key, (name, 0.0))[1]
                    found[name] = found.get(name, 0.0) + used / seconds
        busy = sorted(found.items(), key=lambda each: -each[1])
        return {name: cores for name, cores in busy[:_NAMED] if cores >= _WORTH_NAMING}


def _worked_by_process() -> dict[tuple[int, float], tuple[str, float]]:
    """Name and CPU seconds of each process, by its number and when it began."""
    found = {}
    for each in psutil.process_iter(["name", "cpu_times", "create_time"]):
        times = each.info["cpu_times"]
        if times is not None:
            key = each.pid, float(each.info["create_time"] or 0.0)
            found[key] = str(each.info["name"] or each.pid), float(times.user + times.system)
    return found


@dataclass(frozen=True)
class _CpuSeconds:
    """CPU seconds until the time ``at``: of the cores that may be used by ``everyone``, of our own
    processes (``mine``), and of all in our quota."""

    at: float
    everyone: float
    mine: float
    in_quota: float | None


def _worked_s(process: psutil.Process) -> float:
    """CPU seconds of a process, and of those of its own that have ended."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


#: Batches that a run waits for at least, however long they take: fewer give no rate.
_LEAST_BATCHES: Final = 4
#: Seconds until a process that was killed is seen as dead: at most that long where an error may
#: come of it, and where one broke off while it was asked (it may write its memory down first).
_DYING_S, _SURELY_DYING_S = 0.5, 5.0
#: What a sleep takes longer than it should, on an idle machine with default timer slack.
_OVERSLEEP_S: Final = 6e-5


class PacedLoop:
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
                workers = [psutil.Process(worker.pid) for worker in workers_of(batches)]
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
            except StopIteration as stopped:
                if self._is_of_sample(stopped):
                    raise
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

    def _is_of_sample(self, stopped: StopIteration) -> bool:
        """Did a sample raise it, which ends a user's loop as well? An iterable data set ends so."""
        if isinstance(self._loader.dataset, IterableDataset):
            return False
        frames = traceback.extract_tb(stopped.__traceback__)
        return any(frame.filename.endswith(FETCH_FILE) for frame in frames) or "Caught" in str(
            stopped
        )

    def _look_at(self, workers: list[psutil.Process], before: list[int]) -> None:
        """What the workers hold and did, while they still live."""
        with contextlib.suppress(psutil.Error):
            self.context_switches = tuple(
                now - then for now, then in zip(_switches(workers), before, strict=True)
            )
            self.private_bytes = tuple(worker.memory_full_info().uss for worker in workers)


def take_step(consumer: Consumer, pinned: bool) -> float:
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
    visited: set[int] = set()
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
        elif id(item) in visited or isinstance(item, str | int | float | type(None)):
            continue
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif hasattr(item, "__dict__"):
            stack += vars(item).values()
        visited.add(id(item))
    return nbytes, count, floats


def _more(now: Sequence[float], before: Sequence[float]) -> tuple[float, ...]:
    """The growth of each since ``before``; empty where one of them is not told."""
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

    ``batches`` may be ``None``, of an iterator that was still being made. PyTorch's handler of
    SIGCHLD raises once for an iterator, wherever the main thread is: here, too, if a worker dies
    while it is waited for.
    """
    try:
        return _failure(error, batches)
    except RuntimeError as late:
        return _failure(late, batches)


def _failure(error: Exception, batches: Any) -> Failure:
    """One attempt at :func:`failure_of`.

    A worker that dies while its batch is taken over is seen as a connection that broke, or by
    PyTorch's handler of signals: it gets a moment to be seen as dead.
    """
    workers = workers_of(_being_made(error) if batches is None else batches)
    text = "".join(traceback.format_exception(error))
    if isinstance(error, OSError | EOFError) or "killed by signal" in str(error):
        broke_off = "multiprocessing/" in text or "killed by signal" in str(error)
        limit_s = _SURELY_DYING_S if broke_off else _DYING_S
        dying = multiprocessing.connection.wait([worker.sentinel for worker in workers], limit_s)
        # A process closes its files, the sentinel among them, before its exit code can be read.
        for worker in workers:
            if worker.sentinel in dying:
                worker.join(limit_s)
    exits = [worker.exitcode for worker in workers]
    return Failure(
        type(error).__name__,
        str(error),
        text,
        worker_exits=tuple(code for code in exits if code is not None),
    )


def _being_made(error: Exception) -> Any:
    """The iterator in whose constructor, which asks workers for their first batches, ``error``
    was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    objects = (locals_of(frame).get("self") for frame, _ in frames)
    return next((item for item in objects if isinstance(item, LoaderIterator)), None)


def shut_down(batches: Any) -> None:
    """End the workers now, not when the iterator is collected."""
    end = shutdown_of(batches)
    if end is not None:
        with contextlib.suppress(Exception):
            end()
