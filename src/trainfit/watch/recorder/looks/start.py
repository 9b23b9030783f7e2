"""Looks at the main thread before the first step: which line of the script the start goes to, and
whether it stands still.

From the import of PyTorch on. A look costs some 50 µs, and there are at most ten a second.
"""

from __future__ import annotations

import collections
import contextlib
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from trainfit.results.runs.watched import START_LOOK_S, StackLooks, StartPart
from trainfit.scripts.call_sites import Call
from trainfit.watch.recorder.looks.other_threads import cpu_s_of, stacks_of_script
from trainfit.watch.recorder.looks.stacks import (
    Key,
    key_of,
    most_frequent,
    place_of,
    stack_text,
    users_stack,
)
from trainfit.watch.recorder.rank_files import UnlistedThread

#: Seconds after which one look a second is enough.
_AT_FIRST_S: Final = 120.0
_LATER_S: Final = 1.0
#: Where a DataLoader gives its first batch.
_FIRST_BATCH: Final[StartPart] = "first batch"
#: What a stack is in, by the ends of its files' names, and what stands for all that is within it.
_WITHIN: Final[tuple[tuple[tuple[str, ...], StartPart], ...]] = (
    (("<frozen importlib._bootstrap>",), "import"),
    (("torch/utils/data/dataloader.py",), _FIRST_BATCH),
    (("torch/_dynamo/eval_frame.py", "torch/_dynamo/convert_frame.py"), "torch.compile"),
)


#: Seconds at one line with next to no CPU time, from which that is a standstill, and the share of
#: them; it is told again after twice as many. Programs that a script starts and waits for, and
#: downloads, mostly are over sooner.
_STANDS_S: Final = 60.0
_IDLE: Final = 0.02
#: Seconds in which workers that hang in their first batch have next to no CPU time, from which that
#: is told: no batch came yet to compare them with, and a slow disk mostly is faster.
_WORKERS_STAND_S: Final = 10.0
#: In which a process meets others of its job.
_MEETS: Final = "torch/distributed/"


class StartLooks:
    """Looks from :meth:`start` until ``is_over``, or :meth:`stop`.

    Args:
        is_over: has the first step ended?
        trains: is it known that this process trains?
        stands: is called with the seconds and the stacks of a process that trains, or meets others
            of its job, and stands still, and whether its workers, too, have no CPU time.
        hanging: the stacks of its workers that hang in a batch, by their PIDs.
    """

    def __init__(
        self,
        is_over: Callable[[], bool],
        trains: Callable[[], bool],
        stands: Callable[[float, str, bool], None],
        hanging: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self._is_over, self._trains, self._stands = is_over, trains, stands
        self._at: Key | None = None
        self._since = self._cpu_s = 0.0
        self._told_s = _STANDS_S
        self._hanging = hanging
        #: Since when workers are looked at that hang, and the CPU seconds of each until then.
        self._workers: tuple[float, dict[int, float]] | None = None
        self._told_workers = False
        self._main = threading.main_thread().ident
        self._lines: collections.Counter[Key] = collections.Counter()
        self._looks = 0
        self._around: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._thread = UnlistedThread(self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more; safe to call in a forked child."""
        self._stop.set()

    def is_long(self, seconds: float) -> bool:
        """Was the main thread for so long at one line of the script?"""
        counts: collections.Counter[str] = collections.Counter()
        for key, count in self._lines.copy().items():
            counts[key[0]] += count if key[0] else 0
        return max(counts.values(), default=0) * START_LOOK_S >= seconds

    def summary(self) -> StackLooks:
        """Lines of the script, and how many times :data:`START_LOOK_S` it was at each. Lines that
        the training is called from, as well, are no callers of what came before it."""
        counts: collections.Counter[Key] = collections.Counter()
        for (place, callers, *what), count in self._lines.copy().items():
            own = tuple(caller for caller in callers if caller not in self._around)
            counts[(place, own, *what)] += count  # type: ignore[index]
        return StackLooks(self._looks, most_frequent(counts))

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # it only misses what it would have seen
            began = looked = time.monotonic()
            while not self._stop.wait(START_LOOK_S if looked - began < _AT_FIRST_S else _LATER_S):
                # A worker of a DataLoader does not train; its main thread is in others' hands.
                if multiprocessing.current_process().daemon:
                    return
                if self._is_over():
                    stack = () if self._main is None else users_stack(self._main)
                    self._around = frozenset(map(place_of, stack))
                    return
                now = time.monotonic()
                self._look(now, max(1, round((now - looked) / START_LOOK_S)))
                looked = now

    def _look(self, now: float, times: int) -> None:
        self._looks += times
        if self._main is not None and (stack := users_stack(self._main)):
            key = _key(stack)
            self._lines[key] += times
            self._look_for_standstill(now, key, stack)

    def _look_for_standstill(self, now: float, key: Key, stack: Sequence[Call]) -> None:
        if key != self._at:
            self._at, self._since, self._told_s = key, now, _STANDS_S
            self._cpu_s = _cpu_s()
            self._workers, self._told_workers = None, False
        seconds = now - self._since
        if not key[0]:
            return
        hang = key[3] == _FIRST_BATCH and self._workers_hang(now)
        if hang and not self._told_workers:
            self._told_s, self._told_workers = 2 * seconds, True
        elif seconds < self._told_s:
            return
        else:
            self._told_s *= 2
        meets = any(_MEETS in code.co_filename for code, _, _ in stack)
        if _cpu_s() - self._cpu_s <= _IDLE * seconds and (meets or self._trains()):
            own = (stack_text(stack), *self._hanging().values(), *stacks_of_script(self._main or 0))
            self._stands(seconds, "\n\n".join(own), hang)

    def _workers_hang(self, now: float) -> bool:
        """Have workers that hang in a batch had next to no CPU time for so long?"""
        spent = {pid: _cpu_s(pid) for pid in self._hanging()}
        since, before = self._workers or (now, {})
        is_same = bool(spent) and spent.keys() == before.keys()
        is_idle = is_same and all(
            spent[pid] - before[pid] <= _IDLE * (now - since) for pid in spent
        )
        if not is_same or (not is_idle and now - since >= _WORKERS_STAND_S):
            self._workers = now, spent
        return is_idle and now - since >= _WORKERS_STAND_S


def _cpu_s(pid: int = 0) -> float:
    """CPU seconds of the main thread of a process, whose number is the process's, or of this one;
    infinite where the kernel does not tell: then nothing is known to stand still."""
    pid = pid or os.getpid()
    spent = cpu_s_of(pid, pid)
    return math.inf if spent is None else spent


def _key(stack: Sequence[Call]) -> Key:
    """The key of a stack: its place, with one name for all that an import or a DataLoader does in
    it."""
    place, callers, calls, inner, waits_for, over, function = key_of(stack)
    files = [code.co_filename for code, _, _ in stack]
    for ends, what in _WITHIN:
        if place and any(each.endswith(ends) for each in _inside(files, place)):
            return place, callers, "", what, "", "", function
    return place, callers, calls, inner, waits_for, over, function


def _inside(files: Sequence[str], place: str) -> Sequence[str]:
    """The files of a stack further in than the script's own line."""
    name = place.rpartition(":")[0]
    own = next((n for n, file in enumerate(files) if file.endswith(name)), len(files))
    return files[:own]
