"""The user's loop over a DataLoader, a step's time per batch, and what it notes down."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import psutil
import torch

from trainfit.loader.measure.run import Failure, warm_up
from trainfit.loader.measure.saving import save_seconds
from trainfit.loader.processes.other_processes import OtherProcessLoad, waits_for_cores
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.runs.loading import Consumer
from trainfit.torch_private.data_loading import shutdown_of, workers_of

#: Batches that a run waits for at least, however long they take: fewer give no rate.
_LEAST_BATCHES: Final = 4
#: Seconds until a process that was killed is seen as dead: at most that long where an error may
#: come of it, and where one broke off while it was asked (it may write its memory down first).
_DYING_S, _SURELY_DYING_S = 0.5, 5.0
#: What a sleep takes longer than it should, on an idle machine with default timer slack.
_OVERSLEEP_S: Final = 6e-5


class Loop:
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
                workers = [psutil.Process(each.pid) for each in workers_of(batches)]
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
    workers, text = workers_of(batches), traceback.format_exc()
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
    end = shutdown_of(batches)
    if end is not None:
        with contextlib.suppress(Exception):
            end()
