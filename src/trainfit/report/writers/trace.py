"""Traces for Perfetto and chrome://tracing."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, get_args

import numpy as np

from trainfit.results.findings import Finding
from trainfit.results.runs.tables import Table
from trainfit.results.runs.watched import RankRecord, RunRecord
from trainfit.results.speed import OperatorSpan, StepTimeline
from trainfit.results.watch import PhaseName
from trainfit.version import __version__

# ---
# Events in Chrome's trace format, which Perfetto and chrome://tracing open.
#
# The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are
# microseconds; a slice ("X") lies on a track, and slices of a track nest; "C" are counters, "i"
# instants, "M" names of processes and tracks.


Event = dict[str, Any]
_US: Final = 1e6


class TraceEvents:
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


# ---
# A simulated step as a trace: phases, modules and operators, the GPU's streams, memory.


_CPU: Final = "CPU (predicted)"


def step_trace(timeline: StepTimeline, script: str) -> str:
    """One JSON document."""
    trace, operators = TraceEvents(), timeline.operators
    for name, start_s, end_s in _groups(operators, lambda each: each.phase):
        trace.slice(_CPU, "phases", name, start_s, end_s)
    _modules(trace, operators)
    for operator in operators:
        trace.slice(
            _CPU,
            "operators",
            operator.name,
            operator.start_s,
            operator.end_s,
            module=operator.module,
        )
    device = f"{timeline.gpu} (predicted)"
    for kernel in timeline.kernels:
        by = operators[kernel.operator]
        trace.slice(
            device, f"stream {kernel.stream}", kernel.kind, kernel.start_s, kernel.end_s,
            dtype=kernel.dtype, operator=by.name, module=by.module, phase=by.phase,
            flops=kernel.flops, moved_bytes=kernel.moved_bytes,
        )  # fmt: skip
    for point in timeline.memory:
        trace.counter(device, "allocated bytes", point.time_s, point.by_kind_bytes)
    return trace.to_json(
        {
            "script": script,
            "gpu": timeline.gpu,
            "what": f"optimizer step {timeline.step + 1} of a simulated run, all times predicted",
        }
    )


def _groups(
    operators: tuple[OperatorSpan, ...], key: Callable[[OperatorSpan], str]
) -> Iterator[tuple[str, float, float]]:
    """Operators in a row of one key: the key, begin and end."""
    for name, group in itertools.groupby(operators, key):
        first, *rest = group
        yield name, first.start_s, (rest[-1] if rest else first).end_s


def _modules(trace: TraceEvents, operators: tuple[OperatorSpan, ...]) -> None:
    """Slices of modules, those of children within their parents'; of each phase on its own."""
    for _, group in itertools.groupby(operators, lambda each: each.phase):
        open_at: list[tuple[str, float]] = []
        end_s = 0.0
        for each in group:
            path = each.module.split(".") if each.module else []
            same = _common([name for name, _ in open_at], path)
            _close(trace, open_at, same, end_s)
            open_at += [(name, each.start_s) for name in path[same:]]
            end_s = each.end_s
        _close(trace, open_at, 0, end_s)


def _close(trace: TraceEvents, open_at: list[tuple[str, float]], kept: int, end_s: float) -> None:
    while len(open_at) > kept:
        path = ".".join(name for name, _ in open_at)
        name, start_s = open_at.pop()
        trace.slice(_CPU, "modules", name, start_s, end_s, module=path)


def _common(left: list[str], right: list[str]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---
# A watched run as a trace: a process a rank, a track a worker, samples as counters.


#: In the order that a step has them; only their lengths are recorded. "other" is what they leave.
_PHASES: Final = tuple(name for name in get_args(PhaseName) if name != "other")
_ROUNDING_S: Final = 1e-5
_PARTS: Final = ("read", "decode", "transform", "collate")
_MACHINE: Final = {
    "busy cores": ("cores_busy", "cores_ours"),
    "threads that want to run": ("runnable",),
    "available RAM, bytes": ("ram_available_bytes",),
}
_GPU: Final = {
    "utilization": ("utilization",),
    "memory, bytes": ("ours_bytes", "others_bytes"),
    "clock, Hz": ("sm_hz",),
    "temperature, degrees Celsius": ("temperature_c",),
    "power, W": ("power_w",),
}


def run_trace(run: RunRecord, findings: Iterable[Finding] = ()) -> str:
    """One JSON document; times are seconds of the run on its machine's clock."""
    trace = TraceEvents()
    for machine in run.machines:
        for rank in machine.ranks:
            _rank(trace, rank, findings)
        _samples(trace, machine)
    header = run.header
    return trace.to_json(
        {"command": header.command, "host": header.host, "trainfit": header.trainfit}
    )


def _rank(trace: TraceEvents, rank: RankRecord, findings: Iterable[Finding]) -> None:
    process = f"rank {rank.header.rank} on {rank.header.host}"
    ended: dict[str, float] = {}
    for step in rank.steps:
        _step(trace, process, step, ended)
    for finding in findings:
        if finding.rank in (None, rank.header.rank):
            start_s, end_s = _span(rank.steps, finding)
            trace.slice(
                process, f"finding: {finding.kind}", finding.title, start_s, end_s,
                cause=finding.cause, action=finding.fix.action,
            )  # fmt: skip
    for fetch in rank.fetches:
        _fetch(trace, process, fetch, ended)
    for event in rank.events:
        trace.instant(process, "events", event.kind, event.time_s, text=event.text)


def _begin(ended: dict[str, float], track: str, end_s: float, took: float) -> float:
    """The begin of a slice, in seconds; lengths are of single precision, and slices of a track must
    not meet."""
    begin = end_s - took
    before, ended[track] = ended.get(track, begin), end_s
    return before if abs(before - begin) < _ROUNDING_S else begin


def _step(trace: TraceEvents, process: str, step: Any, ended: dict[str, float]) -> None:
    """The phases are put one after the other, as a step usually has them."""
    end_s, took = float(step["end_s"]), float(step["step_s"])
    if not (math.isfinite(end_s) and took > 0):
        return
    now = _begin(ended, "steps", end_s, took)
    loss = float(step["loss"]) if math.isfinite(step["loss"]) else None
    trace.slice(process, "steps", f"step {int(step['step'])}", now, end_s, loss=loss)
    for name in _PHASES:
        seconds = float(np.nan_to_num(step[f"{name}_s"]))
        if seconds > 0:
            until = min(now + seconds, end_s)
            trace.slice(process, "phases (in the usual order)", name, now, until)
            now = until
    busy = float(np.nan_to_num(step["gpu_s"]))
    if busy > 0:
        trace.slice(process, "GPU, by CUDA events", "step", end_s - min(busy, took), end_s)


def _fetch(trace: TraceEvents, process: str, fetch: Any, ended: dict[str, float]) -> None:
    end_s, took = float(fetch["end_s"]), float(fetch["fetch_s"])
    if math.isfinite(end_s) and took > 0:
        parts = {
            f"{name}_s": float(fetch[f"{name}_s"])
            for name in _PARTS
            if math.isfinite(fetch[f"{name}_s"])
        }
        track = f"worker {int(fetch['worker'])}"
        begin = _begin(ended, track, end_s, took)
        trace.slice(process, track, "batch", begin, end_s, **parts)


def _samples(trace: TraceEvents, machine: RunRecord) -> None:
    host = machine.header.host
    _counters(trace, f"machine {host}", machine.machine, _MACHINE)
    for number in sorted(set(machine.gpus["gpu"].tolist())):
        rows = machine.gpus[machine.gpus["gpu"] == number]
        _counters(trace, f"GPU {number} of {host}", rows, _GPU)


def _counters(
    trace: TraceEvents, process: str, rows: Table, of: dict[str, tuple[str, ...]]
) -> None:
    for row in rows:
        time_s = float(row["time_s"])
        for name, columns in of.items():
            values = {column: float(row[column]) for column in columns if _is_known(row[column])}
            if values and math.isfinite(time_s):
                trace.counter(process, name, time_s, values)


def _is_known(value: Any) -> bool:
    return bool(np.isfinite(value)) and value >= 0


def _span(steps: Table, finding: Finding) -> tuple[float, float]:
    """Seconds from the begin of the first step that a finding is about to the end of the last; else
    of the whole run."""
    if not len(steps):
        return 0.0, 0.0
    chosen = steps
    if finding.first_step is not None and finding.last_step is not None:
        inside = (steps["step"] >= finding.first_step) & (steps["step"] <= finding.last_step)
        chosen = steps[inside] if inside.any() else steps
    first, last = chosen[0], chosen[-1]
    return float(first["end_s"] - np.nan_to_num(first["step_s"])), float(last["end_s"])
