"""Hooks of the fetcher, which makes batches in a DataLoader's workers: a row a batch.

Collation is timed. What the rest of a batch's time went to is told by a thread that looks at the
fetching thread's stack 20 times a second (:mod:`trainfit.scripts.cost_rules`); a batch gets the
shares of the last looks. In the training process itself (no workers) nobody looks: that would take
the interpreter's lock from the training.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import math
import multiprocessing
import multiprocessing.util
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, Final, NoReturn, Protocol

import numpy as np
import torch

from trainfit.results.files.decoding import as_json
from trainfit.results.runs import tables
from trainfit.results.runs.learning import Misuse
from trainfit.results.runs.locked_stacks import locked_path, stacks_of_locked
from trainfit.results.runs.watched import died_path
from trainfit.scripts.call_sites import NOTHING, Callee, called_in, called_now, calls_of, fetchers
from trainfit.scripts.cost_rules import StackFrame, judge
from trainfit.scripts.library_threads import pools
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.data_loading import (
    FETCHERS,
    WorkerError,
    has_worker_init,
    worker_info,
)
from trainfit.watch.recorder.first_batches import MOST_SLOW, FirstBatches, FirstLook, WorkerCode
from trainfit.watch.recorder.guard import in_place_of
from trainfit.watch.recorder.job import script_place
from trainfit.watch.recorder.looks.bad_batches import KeptBatches, WorkerBatches, question
from trainfit.watch.recorder.looks.locked import LockedStack
from trainfit.watch.recorder.looks.stacks import (
    StackCounts,
    at_any_line,
    fetched_index,
    in_fetch,
    stack_text,
    users_stack,
)
from trainfit.watch.recorder.looks.variables import VariableLooks, parts_of
from trainfit.watch.recorder.own_frames import without_ours
from trainfit.watch.recorder.rank_files import INTERVAL_S, RankFiles, Ring, UnlistedThread

#: Seconds between two looks: at first, so that a short run shows its lines; and then at most.
_LOOK_S: Final = 0.05
_SELDOM_S: Final = 0.5
_AT_FIRST: Final = 100
#: Of a core, what looks may cost after these: one costs 0.2 ms, 0.9 ms of a worker that has a third
#: of a core (measured).
_COST: Final = 0.004
#: Of a look's weight, what is left after the next one: about the last ten seconds count.
_KEPT: Final = 1 - 1 / 200
#: Looks that make shares.
_LEAST_LOOKS: Final = 8.0
#: Frames of a stack that are judged, the innermost.
_DEEPEST: Final = 60
_KINDS: Final = ("read", "decode", "transform")
_ROWS: Final = 512
_NAN: Final = float("nan")
_UNKNOWN: Final = (_NAN,) * len(_KINDS)


#: Looks that the first lines are written after; a batch is slow that takes so long, and so many
#: times the usual; lengths of batches that are kept.
_FIRST_TOLD: Final = 8
_SLOW_S: Final = 0.08
_TIMES_USUAL: Final = 3.0
_LENGTHS: Final = 64
_LEAST_LENGTHS: Final = 4
#: … and it hangs that takes so long, and so many times the longest before.
_HANGS_S: Final = 2.5
#: Seconds between two looks at what grows, at least, and the share of the time that they may take.
_GROWTH_S: Final = 0.5
_MOST_TIME: Final = 0.001
_TIMES_LONGEST: Final = 5.0


class Rows(Protocol):
    """Takes rows of :data:`trainfit.results.runs.tables.FETCHES`."""

    def append(self, row: Any, /) -> None: ...


class Home(Protocol):
    """The destination of the rows of this process."""

    origin: float

    def stem_for_workers(self) -> Path | None:
        """Path of the rank's files without their endings; ``None``: nobody records."""

    def main_fetches(self) -> Rows | None:
        """The rows in which the training process itself puts batches that it makes."""

    def failed(self, where: str, error: Exception) -> None: ...


class CostShares:
    """Shares of the fetching thread's time, by looks at its stack."""

    def __init__(self, known: frozenset[int]) -> None:
        self._fetchers = known
        self._seconds = dict.fromkeys((*_KINDS, "other"), 0.0)
        self._callees: dict[tuple[CodeType, int], Callee] = {}

    def look(self, thread: int) -> None:
        stack = calls_of(thread)
        inside = next((n for n, (code, _, _) in enumerate(stack) if id(code) in self._fetchers), 0)
        if not inside:
            return
        calls = stack[: min(inside, _DEEPEST)]
        places = []
        inner = self._called(thread, *calls[0][:2])
        if inner is not NOTHING:
            places.append(StackFrame(inner.module, inner.name, mapped=inner.mapped))
        for code, lasti, names in calls:
            name = str(names.get("__name__", ""))
            if not name.startswith("trainfit."):
                places.append(StackFrame(name, code.co_qualname, called_in(code, lasti)))
        kind = judge(places).kind if places else None
        for each in self._seconds:
            self._seconds[each] *= _KEPT
        self._seconds[kind if kind in _KINDS else "other"] += 1.0

    def _called(self, thread: int, code: CodeType, lasti: int) -> Callee:
        """What is called at a place; asked until it is known."""
        place = code, lasti
        if place not in self._callees:
            called_in(code, lasti)  # what reads the source is not asked with a frame in hand
            if (callee := called_now(thread, code, lasti)) is None:
                return NOTHING
            self._callees[place] = callee
        return self._callees[place]

    def shares(self) -> tuple[float, ...]:
        """The shares of reading, decoding and transforms; NaN after too few looks."""
        looks = sum(self._seconds.values())
        if looks < _LEAST_LOOKS:
            return _UNKNOWN
        return tuple(self._seconds[kind] / looks for kind in _KINDS)


class WorkerSink:
    """Rows of a worker process, written by the thread that looks."""

    def __init__(self, stem: Path, known: frozenset[int]) -> None:
        path = stem.with_name(f"{stem.name}.fetches.{os.getpid()}.bin")
        self.ring = Ring(path, tables.FETCHES, _ROWS)
        self.shares = CostShares(known)
        self.code = FetchCode(stem)
        self.fetching = self.collating = False
        self.began = 0.0
        """When the batch that is being made was begun."""
        self._written = 0.0
        self._looks = 0
        self._target = threading.get_ident()
        self._stop = threading.Event()
        self._death = WorkerDeath(stem, lambda: self.fetching)
        self._locked = LockedStack(locked_path(stem, os.getpid()))
        # Workers end without Python's atexit; this is what multiprocessing calls.
        multiprocessing.util.Finalize(None, self.close, exitpriority=10)
        self._thread = UnlistedThread(self._run)
        self._thread.start()

    def _run(self) -> None:
        chance = random.Random(os.getpid())  # not the script's own
        while not self._stop.wait(self.code.pause_s):
            # A look that fails only misses what it would have seen: what is recorded is written,
            # and the timer is put off.
            with contextlib.suppress(Exception):
                self._locked.put_off()
                self._look_around(chance.random())
            if self.ring.waiting and time.monotonic() - self._written >= INTERVAL_S:
                self._written = time.monotonic()
                self.ring.write()

    def _look_around(self, share: float) -> None:
        if self.fetching:
            self._looks += 1
            with at_any_line(share):
                self._look()
            self.code.pause_s = pause_s(self._looks, time.thread_time())
        self.code.look_for_growth(time.monotonic())
        self.code.bad.look_for_question()
        self.code.write()

    def _look(self) -> None:
        if not self.fetching:
            return  # the batch is there meanwhile
        if not self.collating:  # which is timed
            self.shares.look(self._target)
        self.code.look(self._target, self.began, time.monotonic(), self.collating)

    def close(self) -> None:
        """The worker ends."""
        self._stop.set()
        self._thread.join(timeout=5.0)  # it may be in a write
        self._locked.close()
        self.ring.write()
        self.code.write(whole=True)
        self._death.close()


def pause_s(looks: int, cpu_s: float) -> float:
    """Seconds until the next look, after so many that cost their thread ``cpu_s``."""
    if looks < _AT_FIRST:
        return _LOOK_S
    return min(_SELDOM_S, max(_LOOK_S, cpu_s / looks / _COST))


class WorkerDeath:
    """Leaves the stack that a worker ends in when it crashes in native code, or when what makes a
    batch calls ``os._exit()``: the training process only sees that it is gone."""

    def __init__(self, stem: Path, fetching: Callable[[], bool]) -> None:
        self._path = died_path(stem, os.getpid())
        self._file = self._path.open("w", encoding="utf-8")
        self._mine = not faulthandler.is_enabled()
        if self._mine:  # PyTorch's own handlers of a worker come after it
            faulthandler.enable(self._file, all_threads=False)
        original = self._exit = os._exit

        @in_place_of(original)
        def _exit(status: int) -> NoReturn:
            if fetching():
                with contextlib.suppress(Exception):
                    stack = users_stack(threading.get_ident())
                    self._path.write_text(stack_text(stack), encoding="utf-8")
            original(status)

        os._exit = _exit

    def close(self) -> None:
        """The worker ends as it should."""
        os._exit = self._exit
        if self._mine:
            faulthandler.disable()
        self._file.close()
        self._path.unlink(missing_ok=True)


def deaths(stem: Path) -> Iterator[str]:
    """The stacks that workers of a rank have ended in."""
    yield from _texts(stem, "died")


def hanging_by_pid(stem: Path) -> dict[int, str]:
    """The stacks that workers of a rank hang in, by their PIDs."""
    paths = sorted(stem.parent.glob(f"{stem.name}.stack.*"))
    found = {int(file.suffix[1:]): file for file in paths if file.suffix[1:].isdecimal()}
    texts = {}
    for pid, path in found.items():
        with contextlib.suppress(OSError):
            if text := path.read_text(encoding="utf-8", errors="replace"):
                texts[pid] = text
    return texts


def hanging(stem: Path) -> Iterator[str]:
    """The stacks that workers of a rank hang in."""
    yield from _texts(stem, "stack")
    yield from filter(None, map(stacks_of_locked, _texts(stem, "locked")))


def _texts(stem: Path, kind: str) -> Iterator[str]:
    for path in sorted(stem.parent.glob(f"{stem.name}.{kind}.*")):
        with contextlib.suppress(OSError):
            if text := path.read_text(encoding="utf-8", errors="replace"):
                yield text


class FetchCode:
    """Lines of the data set at which a worker was found, and the stack that it hangs in."""

    def __init__(self, stem: Path) -> None:
        self._code = stem.with_name(f"{stem.name}.code.{os.getpid()}")
        self._stack = stem.with_name(f"{stem.name}.stack.{os.getpid()}")
        self._counts = StackCounts()
        self._slow: dict[str, float] = {}
        self._lengths: collections.deque[float] = collections.deque(maxlen=_LENGTHS)
        self._longest = 0.0
        self._hangs = False
        self._told, self._told_bad = _FIRST_TOLD, 0
        self.first: FirstLook | None = None
        """What is looked at in the first batches; it is not there any more once that is told."""
        self._first: FirstBatches | None = None
        self.bad = WorkerBatches(question(stem))
        self.dataset: Any = None
        self.pause_s = _LOOK_S
        """Seconds between two looks."""
        self.threads_at = ""
        """The line that set PyTorch's number of threads last."""
        self._made = 0
        self._variables = VariableLooks()
        self._growth_due = 0.0
        self._grows = self._told_growth = 0
        self._looked_at = -1

    def look_for_growth(self, now: float) -> None:
        """Look at what the data set keeps, where that has come to its turn."""
        if self.dataset is None or now < self._growth_due or self._made == self._looked_at:
            return  # what has not grown without a batch may still be one that grows
        self._looked_at = self._made
        began = time.thread_time()
        with contextlib.suppress(Exception):  # objects of the script may be of any kind
            self._variables.look_at(self._made, parts_of(self.dataset))
            self._grows = self._variables.grows
        # The first look reads what later ones know: which modules are the script's.
        cost = time.thread_time() - began if self._growth_due else 0.0
        self._growth_due = now + max(_GROWTH_S, cost / _MOST_TIME)

    def look(self, thread: int, began: float, now: float, collating: bool = False) -> None:
        """While a batch is made that was begun at ``began``, or while its samples are collated."""
        stack = users_stack(thread)
        made = in_fetch(stack)
        if made is None:
            return
        self._counts.look(self._made)
        self._counts.count(made)
        length = now - began
        if not collating and length > _SLOW_S and length > _TIMES_USUAL * self._usual_s:
            index = fetched_index(thread, stack)
            if index and (index in self._slow or len(self._slow) < MOST_SLOW):
                self._slow[index] = self._slow.get(index, 0.0) + self.pause_s
        if not self._hangs and length > max(_HANGS_S, _TIMES_LONGEST * self._longest):
            self._hangs = True
            self._stack.write_text(stack_text(stack), encoding="utf-8")

    @property
    def _usual_s(self) -> float:
        """Median seconds of a batch; infinite until some were made."""
        lengths = list(self._lengths)
        return statistics.median(lengths) if len(lengths) >= _LEAST_LENGTHS else math.inf

    def ended(self, seconds: float) -> None:
        """A batch was made, in so long; called by the thread that makes them."""
        self._lengths.append(seconds)
        self._made += 1
        self._longest = max(self._longest, seconds)
        if self._hangs:
            self._hangs = False
            self._stack.unlink(missing_ok=True)

    def write(self, *, whole: bool = False) -> None:
        """Now and then, as much as there is; ``whole``: the worker ends."""
        self._counts.settle(self._made)
        looks = self._counts.looks
        is_new = self.first is not None and (self.first.is_over or whole)
        if is_new and self.first is not None:
            self._first, self.first = self.first.found, None
        is_new = is_new or len(self.bad.found) > self._told_bad or self._grows != self._told_growth
        if not is_new and (not looks or (looks < self._told and not whole)):
            return
        self._told, self._told_bad = int(1.5 * looks), len(self.bad.found)
        self._told_growth = self._grows
        with contextlib.suppress(OSError):
            code = WorkerCode(
                self._counts.summary(),
                dict(self._slow),
                self._first,
                self._variables.found(),
                self.threads_at,
                dict(self.bad.found),
            )
            temporary = self._code.with_name(f"new.{self._code.name}")
            temporary.write_text(as_json(code), encoding="utf-8")
            os.replace(temporary, self._code)


class FetchHooks:
    """Times every batch that is made in a process of the run."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._known: frozenset[int] = frozenset()
        self._sink: WorkerSink | None = None
        self._pid = -1
        self._collate_s = 0.0
        self._samples = -1
        self._threads_at = ""
        self._times_collation = True
        self.kept = KeptBatches()
        """Of the training process, where it makes them itself."""

    def install(self, patches: PatchSet) -> None:
        """Patch the fetchers of batches, until ``patches`` is restored."""
        self._known = fetchers()
        patches.hook(torch, "set_num_threads", self._set_threads)
        for kind in FETCHERS:
            patches.hook(kind, "fetch", self._fetch)
        patches.hook(WorkerError, "__init__", self._telling)

    def suspect(self, files: RankFiles | None) -> Misuse | None:
        """The loss is not finite: the sample that may have made it so, of batches that were made
        here; workers of a rank, which has these files, look at all theirs from now on."""
        if files is not None:
            with contextlib.suppress(OSError):
                question(files.stem).touch()
        return self.kept.first_bad()

    def _set_threads(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @in_place_of(original)
        def set_num_threads(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                # PyTorch's own call in each worker comes before there is this.
                if worker_info() is not None:
                    self._threads_at = script_place()
                    if self._sink is not None and self._pid == os.getpid():
                        self._sink.code.threads_at = self._threads_at
            return original(*args, **kwargs)

        return set_num_threads

    def _telling(self, construct: Callable[..., Any]) -> Callable[..., Any]:
        @in_place_of(construct)
        def __init__(told: Any, *args: Any, **kwargs: Any) -> None:
            with contextlib.suppress(Exception):  # its traceback is the one of what is handled now
                if not args and (error := sys.exception()) is not None:
                    without_ours(error)
            construct(told, *args, **kwargs)

        return __init__

    def _fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @in_place_of(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            ring, began, cpu = None, 0.0, _NAN
            try:
                ring = self._ring(fetcher)
                self._times_collation = ring is not None
                if ring is not None:
                    self._time_collation(fetcher)
                    began = time.monotonic()
                    # In the training process others compute, too.
                    cpu = time.thread_time() if self._sink is None else time.process_time()
            except Exception as error:
                self._home.failed("fetch", error)
                ring = None
            try:
                if self._sink is not None:
                    self._sink.began = began
                    self._sink.fetching = True
                batch = original(fetcher, index)
            except StopIteration:
                self._look_at_end()
                raise
            finally:
                if self._sink is not None:
                    self._sink.fetching = False
            try:
                if ring is not None:
                    self._add(ring, batch, index, began, cpu)
                elif self.kept.keeps:
                    self.kept.add((index, batch))
            except Exception as error:
                self._home.failed("fetch", error)
            return batch

        return fetch

    def _look_at_end(self) -> None:
        """A data set that is iterated has no more for this worker."""
        first = None if self._sink is None else self._sink.code.first
        if first is not None:
            first.ended()

    def _ring(self, fetcher: Any) -> Rows | None:
        info = worker_info()
        if info is None:
            return self._home.main_fetches()
        if self._pid != os.getpid():  # the first batch of a worker
            self._pid, self._sink = os.getpid(), None
            stem = self._home.stem_for_workers()
            if stem is not None:
                self._sink = WorkerSink(stem, self._known)
                _note_threads(stem, info.id)
                self._sink.code.dataset = fetcher.dataset
                self._sink.code.threads_at = self._threads_at
                iterates = hasattr(fetcher, "dataset_iter")
                # What worker_init_fn or __iter__ has opened is the worker's own.
                inherited = not iterates and not has_worker_init()
                self._sink.code.first = FirstLook(
                    info.id, fetcher.dataset, iterates=iterates, inherited=inherited
                )
        return None if self._sink is None else self._sink.ring

    def _time_collation(self, fetcher: Any) -> None:
        self._collate_s, self._samples = _NAN, -1
        collate = fetcher.collate_fn
        if getattr(collate, "_trainfit_watch", None) is self:
            return

        def timed(samples: Any) -> Any:
            if not self._times_collation:
                return collate(samples)
            began = time.monotonic()
            if fetcher.auto_collation and isinstance(samples, list | tuple):
                self._samples = len(samples)
            if self._sink is not None:
                self._sink.collating = True
            try:
                return collate(samples)
            finally:
                self._collate_s = time.monotonic() - began
                if self._sink is not None:
                    self._sink.collating = False

        timed._trainfit_watch = self  # type: ignore[attr-defined]
        fetcher.collate_fn = timed

    def _add(self, ring: Rows, batch: Any, index: Any, began: float, cpu: float) -> None:
        now = time.monotonic()
        took, info = now - began, worker_info()
        nbytes = bytes_of(batch)
        if self._sink is None:
            self.kept.looked_at(batch, nbytes)
        else:
            self._sink.code.ended(took)
            self._sink.code.bad.made(batch, index, took, now - self._home.origin)
            if (first := self._sink.code.first) is not None and not first.is_over:
                first.made(batch, nbytes)
        shares = _UNKNOWN if self._sink is None else self._sink.shares.shares()
        rest = took - (self._collate_s if self._collate_s == self._collate_s else 0.0)
        ring.append(
            (
                now - self._home.origin,
                -1 if info is None else info.id,
                os.getpid(),
                took,
                (time.thread_time() if self._sink is None else time.process_time()) - cpu,
                *(share * rest for share in shares),
                self._collate_s,
                self._samples,
                nbytes,
            )
        )


#: Entries of a list, a dictionary or an object of a batch that are looked at.
_ENTRIES: Final = 64
#: Bytes that a number in a list needs on its way to the training, at least.
_NUMBER: Final = 2
_SINGLE: Final = (int, float, bool, str, bytes, type(None))


def bytes_of(batch: Any, depth: int = 2) -> int:
    """Bytes of the tensors and arrays in a batch that are found in ``depth`` levels of lists,
    dictionaries and objects, and of long lists of numbers."""
    kind = type(batch)
    if issubclass(kind, torch.Tensor | np.ndarray):
        return int(batch.nbytes)
    if not depth or kind in _SINGLE:
        return 0
    if issubclass(kind, Mapping):
        batch = list(batch.values())
    elif not issubclass(kind, list | tuple):
        # By what it holds alone: an attribute may be anyone's code. One with slots tells nothing.
        with contextlib.suppress(AttributeError):
            return bytes_of(object.__getattribute__(batch, "__dict__"), depth)
        return 0
    if batch and type(batch[0]) in (int, float):
        return _NUMBER * len(batch)
    return sum(bytes_of(part, depth - 1) for part in batch[:_ENTRIES])


def _note_threads(stem: Path, worker: int) -> None:
    """Leave the libraries' threads of this worker for the header, which the parent writes."""
    path = stem.with_name(f"{stem.name}.worker-threads.{worker}")
    if not path.exists():
        found = {"torch": torch.get_num_threads(), **pools()}
        path.write_text("".join(f"{name} {threads}\n" for name, threads in found.items()))


def parent_pid() -> int | None:
    """The process that started this one through multiprocessing."""
    parent = multiprocessing.parent_process()
    return None if parent is None else parent.pid
