"""Shares of a batch's time for reading, decoding, transforms and collation.

A thread looks at the stack of the thread that makes the batches, every 2 ms or so, and
each look stands for the time since the last one. Nothing is wrapped and no tracing is on: the
data set runs as it always does. What is looked at is judged afterwards
(:mod:`trainfit.scripts.cost_rules`).

While C code keeps the interpreter's lock nobody can look; the next look finds the thread at the
end of that very call, and stands for all of its time. So that this also holds for Python code,
which gives up the lock only after the switch interval (5 ms) or where it calls something that
does, the interval is short while we look: else Python's time would go to the next file opened.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from trainfit.loader.measure import processes
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import CostPart, LoaderSettings
from trainfit.scripts.call_sites import NOTHING, Callee, called_in, called_now, calls_of, fetchers
from trainfit.scripts.cost_rules import StackFrame, judge

#: Between two looks, in seconds, on average; drawn from half to one and a half of it, so that
#: they do not fall into step with the batches.
_LOOK_S: Final = 2e-3
#: ``sys.setswitchinterval`` while we look (the default is 5 ms): decision 21's study sees
#: file calls, which give up the lock, get too much with ten times that.
_SWITCH_S: Final = 5e-6
#: Of deeper stacks, those between are left out.
_DEEPEST: Final = 200
#: Looks that make shares: fewer say nothing (each is about 2 ms).
LEAST_LOOKS: Final = 20
#: Functions that a part names, and the least share of the part that one is named for.
_NAMED: Final = 3
_LEAST_NAMED: Final = 0.05
#: By how much longer batches are made on a machine so busy that there were fewer looks.
_LONGER: Final = 1.8
#: Seconds beyond its own time until a run that hangs is ended.
_PATIENCE_S: Final = 3.0

PARTS: Final = ("read", "decode", "transform", "collate", "unknown")


@dataclass(frozen=True)
class StackSample:
    """A stack, the innermost place first, and the seconds that it was met for.

    ``collating`` is whether the fetcher was in the loader's ``collate_fn``.
    """

    stack: tuple[StackFrame, ...]
    seconds: float
    collating: bool = False


@dataclass(frozen=True)
class StackSamples:
    """What was seen of whole batches (of a part of one, if none came to its end)."""

    weighed: tuple[StackSample, ...]
    looks: int
    batches: int


def split(workload: Workload, seconds: float = 2.0) -> tuple[CostPart, ...]:
    """The parts of a batch's time, produced as a worker does; empty where unknown.

    Batches are made for about ``seconds`` (twice that at most, for one that takes long) in a
    fork of this process with one thread of PyTorch's, as in a worker; if that fails, in this
    process. It never raises for what the data set does.

    The parts come in the order of :data:`PARTS`, without those of no time, and their shares
    add up to 1. "unknown" is also what is waited for other threads and processes.
    """
    return parts_of(look_at(workload, seconds))


def parts_of(looks: StackSamples | None) -> tuple[CostPart, ...]:
    """The parts that looks make; none from fewer than :data:`LEAST_LOOKS` looks."""
    if looks is None or looks.looks < LEAST_LOOKS:
        return ()
    by_part: dict[str, dict[str, float]] = {name: {} for name in PARTS}
    for sample in looks.weighed:
        judged = judge(sample.stack, sample.collating)
        kind = judged.kind if judged.kind in PARTS else "unknown"
        functions = by_part[str(kind)]
        functions[judged.what] = functions.get(judged.what, 0.0) + sample.seconds
    total = sum(sum(functions.values()) for functions in by_part.values())
    if total <= 0:
        return ()
    return tuple(
        CostPart(name, sum(functions.values()) / total, _longest(functions))
        for name, functions in by_part.items()
        if functions
    )


def _longest(functions: dict[str, float]) -> tuple[str, ...]:
    total = sum(functions.values())
    order = sorted(functions, key=lambda name: (-functions[name], name))
    kept = [name for name in order if name and functions[name] >= _LEAST_NAMED * total]
    return tuple(kept[:_NAMED])


# --- Making batches ---------------------------------------------------------------------------
def look_at(workload: Workload, seconds: float) -> StackSamples | None:
    """What a worker's thread is seen doing; ``None`` where no batch could be made.

    In a fork first, then here: data sets that do not bear a fork (CUDA) still have a cost.
    """
    function = functools.partial(_watched, workload, seconds)
    ended = processes.call(function, 2 * seconds + _PATIENCE_S)
    if ended.error_type:  # what kills a process or hangs is not tried again in this one
        ended = processes.call_here(function, 2 * seconds)
    return ended.value


def _watched(workload: Workload, seconds: float) -> StackSamples:
    watcher = Watcher()
    # The sampler's time is not the batch's: looks outside of the fetcher are not counted.
    batches = iter(workload.loader(LoaderSettings(num_workers=0)))
    with watcher:
        ended = processes.call_here(lambda: _make(batches, watcher, seconds), 2 * seconds)
    looks = watcher.looks()
    if ended.failed and not ended.hung and not looks.batches:
        raise RuntimeError(f"no batch was produced: {ended.error_type}: {ended.message}")
    return looks


def _make(batches: Iterable[Any], watcher: Watcher, seconds: float) -> None:
    began = time.monotonic()
    batch = None
    for count, batch in enumerate(batches):  # noqa: B007  # the former is freed as in a loop
        watcher.batch_made()
        took = time.monotonic() - began
        if took >= (seconds if watcher.count >= LEAST_LOOKS else _LONGER * seconds):
            break
        if count == 0 and 2 * took < seconds:
            watcher.forget()  # files are opened and modules imported in the first
    del batch


# --- Looking ----------------------------------------------------------------------------------
_Frames = tuple[tuple[int, int], ...]  # of code object (by its id) and instruction


class Watcher:
    """Looks at the thread that enters it, as a context manager.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._target = threading.get_ident()
        self._pause = threading.Event()
        self._pending: list[tuple[_Frames, float]] = []
        self._made: list[tuple[_Frames, float]] = []
        self._batches = 0
        self._codes: dict[int, tuple[types.CodeType, str]] = {}
        self._callees: dict[tuple[int, int], Callee] = {}
        self._fetchers = fetchers()
        self._thread = threading.Thread(target=self._run, name="trainfit split", daemon=True)

    def __enter__(self) -> Watcher:
        self._target = threading.get_ident()
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._pause.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    @property
    def count(self) -> int:
        """Looks at whole batches so far."""
        return len(self._made)

    def batch_made(self) -> None:
        """The looks so far are of a whole batch."""
        pending, self._pending = self._pending, []
        self._made += pending
        self._batches += 1

    def forget(self) -> None:
        """What was seen until now does not count."""
        self._made = []

    def looks(self) -> StackSamples:
        """What was seen of whole batches, or else of the one that was begun."""
        seen = self._made or self._pending
        weights: dict[_Frames, float] = {}
        for frames, seconds in seen:
            weights[frames] = weights.get(frames, 0.0) + seconds
        weighed = tuple(self._weighed(frames, seconds) for frames, seconds in weights.items())
        return StackSamples(weighed, len(seen), self._batches)

    def _run(self) -> None:
        chance = random.Random(0)  # not the user's generator
        last = self._clock()
        while not self._pause.wait(_LOOK_S * (0.5 + chance.random())):
            now = self._clock()
            frames = self._look()
            if frames:
                self._pending.append((frames, now - last))
            last = self._clock()  # our own look is nobody's time

    def _look(self) -> _Frames:
        """The stack as far as the fetcher; empty where it is not below one."""
        stack = calls_of(self._target)
        fetching = (index for index, (code, _, _) in enumerate(stack) if id(code) in self._fetchers)
        outermost = next(fetching, None)
        if outermost is None:
            return ()
        kept = [*stack[: min(outermost, _DEEPEST)], stack[outermost]]
        for code, _, names in kept:
            if id(code) not in self._codes:
                self._codes[id(code)] = code, str(names.get("__name__", ""))
        frames = tuple((id(code), lasti) for code, lasti, _ in kept)
        if frames[0] not in self._callees:
            self._remember(*stack[0][:2])
        return frames

    def _remember(self, code: types.CodeType, lasti: int) -> None:
        """What the innermost frame calls at a place of the source; asked until it is known: one
        that went on meanwhile may have lost the variable that would tell."""
        called_in(code, lasti)  # what reads the source is not asked with a frame in hand
        called = called_now(self._target, code, lasti)
        if called is not None:
            self._callees[id(code), lasti] = called

    def _weighed(self, frames: _Frames, seconds: float) -> StackSample:
        places: list[StackFrame] = []
        inner = self._callees.get(frames[0], NOTHING)
        if inner.module or inner.mapped:
            places.append(StackFrame(inner.module, inner.name, mapped=inner.mapped))
        for key, lasti in frames[:-1]:
            code, module = self._codes[key]
            places.append(StackFrame(module, code.co_qualname, called_in(code, lasti)))
        code, lasti = self._codes[frames[-1][0]][0], frames[-1][1]
        collating = called_in(code, lasti) == "self.collate_fn"
        if not places:
            places.append(StackFrame("torch.utils.data", "fetch"))
        return StackSample(tuple(places), seconds, collating)
