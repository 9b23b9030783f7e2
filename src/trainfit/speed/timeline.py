"""Timeline of kernels: GPUs with their streams, and the CPU that launches for them."""

from __future__ import annotations

from collections import deque
from itertools import product
from typing import Final

import numpy as np

from trainfit.results.runs.recording import gpu_of
from trainfit.results.runs.steps import LAUNCH_QUEUE, MARKS, PAGEABLE_COPIES, TRANSFERS
from trainfit.speed.work import CODES, Floats, Work

#: Kinds after which the CPU goes on when the GPU has come to a point.
WAITS: Final = (*PAGEABLE_COPIES, "wait", "stream_wait", "event_synchronize")
_ALL, _EVENT, _EVENT_WAIT = CODES["wait"], CODES["event"], CODES["event_wait"]
_SYNCHRONIZE: Final = CODES["event_synchronize"]
_MARKS: Final = frozenset(CODES[name] for name in MARKS)
#: What carries kinds out at the same time as the multiprocessors do the others.
_ENGINES: Final = {
    CODES["upload"]: "up",
    CODES["upload_pinned"]: "up",
    CODES["download"]: "down",
    CODES["download_pinned"]: "down",
    **dict.fromkeys((CODES[name] for name in TRANSFERS), "links"),
}


class Timeline:
    """GPUs that run kernels, each when it is launched and the one before in its stream is done.

    Where the CPU waits for the GPU (for its data, or for a place in the launch queue), all that
    follows is launched later. Kernels of several streams of a GPU take turns: each is taken to fill
    it. Copies from and to the host run concurrently, one at a time in each direction, and so do
    collectives, over the links between GPUs.

    ``host_s`` is what the CPU took to launch and for pauses, ``waited_s`` its waits.
    """

    def __init__(self, queue: int = LAUNCH_QUEUE) -> None:
        self.host_s = self.waited_s = 0.0
        self._queue = queue
        #: Of the latest kernels, when each is done.
        self._ends = np.full(queue, -np.inf)
        #: When each stream and each engine is done with what was added, and when events came.
        self._free: dict[int, float] = {}
        self._engines: dict[tuple[str, int], float] = {}
        self._events: dict[int, float] = {}
        #: When each stream was done with what was added before the present work.
        self._before: dict[int, float] = {}

    @property
    def cpu_s(self) -> float:
        """When the CPU has launched all that was added."""
        return self.host_s + self.waited_s

    @property
    def end_s(self) -> float:
        """When all that was added is done, and the CPU has launched it."""
        return max(self.cpu_s, *self._free.values(), 0.0)

    @property
    def several(self) -> bool:
        """Was there more than one stream?"""
        return len(self._free) > 1

    def end_of(self, stream: int) -> float:
        """When a stream is done with what was added, and the CPU has launched it."""
        return max(self._free.get(stream, 0.0), self.cpu_s)

    def pause(self, seconds: float) -> None:
        """The CPU launches nothing for so long."""
        self.host_s += seconds

    def add(
        self, work: Work, seconds: Floats, issued: Floats, host_s: float
    ) -> tuple[Floats, Floats]:
        """What comes next; when each kernel of it is launched, and when it is done.

        ``seconds`` is what each kernel takes, ``issued`` when it is launched if the CPU never
        waits, ``host_s`` what the CPU takes for all of it; both from now.
        """
        issued = issued + self.host_s
        self._before = dict(self._free)
        waits = work.is_kind(*WAITS)
        cuts = {len(seconds), *range(0, len(seconds), self._queue)}
        cuts.update((np.flatnonzero(waits) + 1).tolist())
        ready, ends, first = np.empty(len(seconds)), np.empty(len(seconds)), 0
        for last in sorted(cuts):
            if last > first:
                part = work.part(first, last)
                ready[first:last], ends[first:last] = self._launch(
                    part, seconds[first:last], issued[first:last]
                )
                if waits[last - 1]:
                    late = self._awaited(part) - float(issued[last - 1])
                    self.waited_s = max(self.waited_s, late)
            first = last
        self.host_s += host_s
        return ready, ends

    def _launch(self, work: Work, took: Floats, issued: Floats) -> tuple[Floats, Floats]:
        """No more kernels than the queue holds; rows count as one each."""
        # Each takes the place of one that many kernels before, which has to be done.
        behind = self._ends[: len(took)] - issued
        waited = np.maximum(np.maximum.accumulate(behind), self.waited_s)
        self.waited_s = float(waited[-1])
        streams = self._free.keys() | set(np.unique(work.stream).tolist())
        run = self._in_order if len(streams) == 1 else self._in_turns
        ready: Floats = issued + waited
        ends = run(work, took, ready)
        self._ends = np.concatenate((self._ends, ends))[-self._queue :]
        return ready, ends

    def _in_order(self, work: Work, took: Floats, ready: Floats) -> Floats:
        """When kernels of the one stream that there is are done."""
        stream = int(work.stream[0])
        passed = np.cumsum(took)
        # end[i] = max(end[i-1], ready[i]) + took[i], solved for all i at once
        starts = np.maximum(ready, self._free.get(stream, 0.0)) - (passed - took)
        ends: Floats = np.maximum.accumulate(starts) + passed
        self._free[stream] = float(ends[-1])
        # Whatever other stream may come: nothing of this one runs any longer.
        of_gpu = product(("up", "down", "links", "kernels"), (gpu_of(stream),))
        self._engines |= dict.fromkeys(of_gpu, float(ends[-1]))
        for at in np.flatnonzero(work.is_kind("event")).tolist():
            self._events[int(work.column("rows")[at])] = float(ends[at])
        return ends

    def _in_turns(self, work: Work, took: Floats, ready: Floats) -> Floats:
        """When kernels of several streams are done: of those that are next in their stream, the one
        that can begin first does."""
        kinds, numbers = work.column("kind").tolist(), work.column("rows").tolist()
        recorded_on = work.column("columns").tolist()
        streams: list[int] = work.stream.tolist()
        seconds: list[float] = took.tolist()
        launched: list[float] = ready.tolist()
        by = [
            (_ENGINES.get(kind, "kernels"), gpu)
            for kind, gpu in zip(kinds, gpu_of(work.stream).tolist(), strict=True)
        ]
        to_come = {number for kind, number in zip(kinds, numbers, strict=True) if kind == _EVENT}
        lines: dict[int, deque[int]] = {}
        for place, stream in enumerate(streams):
            lines.setdefault(stream, deque()).append(place)

        def begins(place: int) -> float:
            at = max(launched[place], self._free.get(streams[place], 0.0))
            kind = kinds[place]
            if kind == _EVENT_WAIT:
                if numbers[place] in to_come:
                    return float("inf")
                return max(at, self._event(numbers[place], recorded_on[place]))
            if kind in _MARKS:
                return at
            return max(at, self._engines.get(by[place], 0.0))

        ends = np.empty(len(seconds))
        while lines:
            at, place = min((begins(line[0]), line[0]) for line in lines.values())
            kind, stream = kinds[place], streams[place]
            end = ends[place] = self._free[stream] = at + seconds[place]
            if kind == _EVENT:
                self._events[numbers[place]] = end
                to_come.discard(numbers[place])
            elif kind not in _MARKS:
                self._engines[by[place]] = end
            lines[stream].popleft()
            if not lines[stream]:
                del lines[stream]
        return ends

    def _event(self, number: int, stream: int) -> float:
        """When an event came; one that was recorded before the work that is known: when its stream
        was done with what is known before the present work."""
        return self._events.get(number, self._before.get(stream, 0.0))

    def _awaited(self, work: Work) -> float:
        """When that is done for which the CPU waits after the last row."""
        kind, stream = int(work.column("kind")[-1]), int(work.stream[-1])
        if kind == _ALL:  # of its GPU
            gpu = gpu_of(stream)
            return max(end for each, end in self._free.items() if gpu_of(each) == gpu)
        if kind == _SYNCHRONIZE:
            return self._event(int(work.column("rows")[-1]), stream)
        return self._free[stream]
