"""Events in Chrome's trace format, which Perfetto and chrome://tracing open.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are
microseconds; a slice ("X") lies on a track, and slices of a track nest; "C" are counters, "i"
instants, "M" names of processes and tracks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from trainfit.version import __version__

Event = dict[str, Any]
_US: Final = 1e6


class Trace:
    """Collects events; processes and tracks get their numbers in the order they are named."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}

    def slice(
        self, process: str, track: str, name: str, start_s: float, end_s: float, **args: Any
    ) -> None:
        """Something that takes a time; ``args`` are shown when it is selected."""
        pid = self._process(process)
        event = {
            "ph": "X", "name": name, "pid": pid, "tid": self._track(pid, track),
            "ts": start_s * _US, "dur": max(0.0, end_s - start_s) * _US,
        }  # fmt: skip
        self._add(event, args)

    def instant(self, process: str, track: str, name: str, time_s: float, **args: Any) -> None:
        """Something that happens at a moment."""
        pid = self._process(process)
        event = {
            "ph": "i", "s": "p", "name": name, "pid": pid, "tid": self._track(pid, track),
            "ts": time_s * _US,
        }  # fmt: skip
        self._add(event, args)

    def counter(self, process: str, name: str, time_s: float, values: Mapping[str, float]) -> None:
        """Figures from this time on, stacked."""
        pid = self._process(process)
        self._events.append(
            {"ph": "C", "name": name, "pid": pid, "ts": time_s * _US, "args": dict(values)}
        )

    def to_json(self, about: Mapping[str, str]) -> str:
        """The document; ``about`` is kept in it."""
        document = {
            # First, so that the head of the file says who made it: such a file may be replaced.
            "otherData": {"generator": f"trainfit {__version__}", **about},
            "displayTimeUnit": "ms",
            "traceEvents": [*self._names(), *self._events],
        }
        return json.dumps(document, allow_nan=False)

    def _add(self, event: Event, args: Mapping[str, Any]) -> None:
        told = {name: value for name, value in args.items() if value not in (None, "")}
        self._events.append({**event, "args": told} if told else event)

    def _process(self, name: str) -> int:
        return self._processes.setdefault(name, len(self._processes) + 1)

    def _track(self, pid: int, name: str) -> int:
        return self._tracks.setdefault((pid, name), len(self._tracks) + 1)

    def _names(self) -> Iterable[Event]:
        for name, pid in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for (pid, name), tid in self._tracks.items():
            place = {"pid": pid, "tid": tid}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}
