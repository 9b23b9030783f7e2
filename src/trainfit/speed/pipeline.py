"""The step of a pipeline: its stages' kernels, and what one waits for that another sends.

Each rank's kernels run in the order of their launches, on one GPU each; a receive is over when what
it brings was sent and has come over the link. Ranks only meet there: what several pipelines do
together is no part of it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from trainfit.results.runs.steps import MARKS, TRANSFERS
from trainfit.speed.step import HostedGpu, TimedWork
from trainfit.speed.timeline import WAITS
from trainfit.speed.work import CODES, Work

_SEND_RECEIVE, _EVENT = CODES["send_receive"], CODES["event"]
_EVENT_WAIT: Final = CODES["event_wait"]
_MARKS: Final = frozenset(CODES[name] for name in MARKS)
_WAITS: Final = frozenset(CODES[name] for name in WAITS)
_TRANSFERS: Final = frozenset(CODES[name] for name in TRANSFERS)


@dataclasses.dataclass(frozen=True)
class PipelineStep:
    """``seconds`` of a step, and of each rank those in which its GPU computes."""

    seconds: float
    computing_s: Mapping[int, float]


def pipeline_step(works: Mapping[int, Work], machine: HostedGpu) -> PipelineStep | None:
    """The step of a pipeline from those of all stages, by rank; ``None`` where what is sent and
    what is received in them do not belong together."""
    stages = {rank: _Stage(rank, work, machine) for rank, work in works.items()}
    first = _run(stages)
    second = None if first is None else _run(stages)
    if first is None or second is None:
        return None
    return PipelineStep(second - first, {rank: each.computes_s for rank, each in stages.items()})


def _run(stages: Mapping[int, _Stage]) -> float | None:
    """One step of all; when the last of them is done."""
    sent: dict[tuple[int, int], list[float]] = defaultdict(list)
    going = {rank: stage.step(sent) for rank, stage in stages.items()}
    while going:
        went_on = False
        for rank, stage in list(going.items()):
            before = stages[rank].at
            if next(stage, False):
                went_on |= stages[rank].at != before
            else:
                del going[rank]
                went_on = True
        if not went_on:
            return None
    return max(stage.end_s for stage in stages.values())


class _Stage:
    """One rank: its rows in order, and when what it has launched is done."""

    def __init__(self, rank: int, work: Work, machine: HostedGpu) -> None:
        timed = TimedWork(work, machine)
        issued, self._host_s = timed.issued()
        self._rank = rank
        self._rows = list(
            zip(
                *(work.column(name).tolist() for name in ("kind", "rows", "depth", "written")),
                work.stream.tolist(),
                (timed.seconds + timed.copies + timed.links).tolist(),
                issued.tolist(),
                strict=True,
            )
        )
        self.computes_s = float(timed.seconds.sum()) / work.steps
        self._began = self._late = self._computed = 0.0
        self._free: dict[object, float] = {}
        #: When an event came, or the receive that it comes after: from whom, and which.
        self._events: dict[int, float | tuple[int, int, float]] = {}
        self.at = 0

    @property
    def end_s(self) -> float:
        return max(self._began + self._late, self._computed, *self._free.values(), 0.0)

    def step(self, sent: dict[tuple[int, int], list[float]]) -> Iterator[bool]:
        """Goes on as far as it can; each value is a wait for what others have yet to send."""
        received: dict[int, int] = defaultdict(int)
        last: dict[int, float | tuple[int, int, float]] = {}
        self.at = 0
        for kind, number, depth, written, stream, seconds, issued in self._rows:
            self.at += 1
            launched = issued + self._began + self._late
            if kind == _EVENT_WAIT:
                event = self._events.get(number, 0.0)
                while isinstance(event, tuple):
                    source, which, least = event
                    come = sent[source, self._rank]
                    if which < len(come):
                        event = self._events[number] = max(least, come[which])
                    else:
                        yield True
                self._free[stream] = max(self._free.get(stream, 0.0), event)
            elif kind == _EVENT:
                self._events[number] = last.pop(stream, self._free.get(stream, launched))
            elif kind == _SEND_RECEIVE and depth:
                # Each direction of a pair of ranks has a connection of its own.
                peer, begins = depth - 1, max(launched, self._free.get(stream, 0.0))
                if written:
                    last[stream] = (peer, received[peer], begins)
                    received[peer] += 1
                else:
                    way = (stream, peer)
                    end = self._free[way] = max(begins, self._free.get(way, 0.0)) + seconds
                    sent[self._rank, peer].append(end)
                    last[stream] = end
            elif kind in _MARKS and kind not in _WAITS:
                continue
            else:
                computes = kind not in _TRANSFERS and kind not in _WAITS
                begins = max(launched, self._free.get(stream, 0.0))
                if computes:
                    begins = max(begins, self._computed)
                end = self._free[stream] = begins + seconds
                if computes:
                    self._computed = end
                elif kind in _WAITS:  # the host goes on when the GPU has come so far
                    self._late += end - launched
        self._began += self._host_s
