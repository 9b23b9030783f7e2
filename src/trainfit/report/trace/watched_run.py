"""A watched run as a trace: a process a rank, a track a worker, samples as counters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, get_args

import numpy as np

from trainfit.report.trace.events import Trace
from trainfit.results.watch.result import Finding, PhaseName
from trainfit.results.watch.run import RankRecord, RunRecord
from trainfit.results.watch.tables import Table

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
    trace = Trace()
    for machine in run.machines:
        for rank in machine.ranks:
            _rank(trace, rank, findings)
        _samples(trace, machine)
    header = run.header
    return trace.to_json(
        {"command": header.command, "host": header.host, "trainfit": header.trainfit}
    )


def _rank(trace: Trace, rank: RankRecord, findings: Iterable[Finding]) -> None:
    process = f"rank {rank.header.rank} on {rank.header.host}"
    ended: dict[str, float] = {}
    for step in rank.steps:
        _step(trace, process, step, ended)
    for finding in findings:
        if finding.rank in (None, rank.header.rank):
            start_s, end_s = _span(rank.steps, finding)
            trace.slice(
                process, f"finding: {finding.kind}", finding.title, start_s, end_s,
                cause=finding.cause, action=finding.action,
            )  # fmt: skip
    for each in rank.fetches:
        _fetch(trace, process, each, ended)
    for event in rank.events:
        trace.instant(process, "events", event.kind, event.time_s, text=event.text)


def _begin(ended: dict[str, float], track: str, end_s: float, took: float) -> float:
    """Of a slice; lengths are of single precision, and slices of a track must not meet."""
    begin = end_s - took
    before, ended[track] = ended.get(track, begin), end_s
    return before if abs(before - begin) < _ROUNDING_S else begin


def _step(trace: Trace, process: str, step: Any, ended: dict[str, float]) -> None:
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


def _fetch(trace: Trace, process: str, fetch: Any, ended: dict[str, float]) -> None:
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


def _samples(trace: Trace, machine: RunRecord) -> None:
    host = machine.header.host
    _counters(trace, f"machine {host}", machine.machine, _MACHINE)
    for number in sorted(set(machine.gpus["gpu"].tolist())):
        rows = machine.gpus[machine.gpus["gpu"] == number]
        _counters(trace, f"GPU {number} of {host}", rows, _GPU)


def _counters(trace: Trace, process: str, rows: Table, of: dict[str, tuple[str, ...]]) -> None:
    for row in rows:
        time_s = float(row["time_s"])
        for name, columns in of.items():
            values = {each: float(row[each]) for each in columns if _is_known(row[each])}
            if values and math.isfinite(time_s):
                trace.counter(process, name, time_s, values)


def _is_known(value: Any) -> bool:
    return bool(np.isfinite(value)) and value >= 0


def _span(steps: Table, finding: Finding) -> tuple[float, float]:
    """From the begin of the first step that it is about to the end of the last; else of all."""
    if not len(steps):
        return 0.0, 0.0
    chosen = steps
    if finding.first_step is not None and finding.last_step is not None:
        inside = (steps["step"] >= finding.first_step) & (steps["step"] <= finding.last_step)
        chosen = steps[inside] if inside.any() else steps
    first, last = chosen[0], chosen[-1]
    return float(first["end_s"] - np.nan_to_num(first["step_s"])), float(last["end_s"])
