"""Measures one thing in this process, which is fresh: a case or step times.

Started by campaign.py with a request (a JSON file); not meant to be run by hand. It prepares
everything that needs no GPU, prints "ready", waits for a line on standard input, and only
then touches the GPU, so that several such processes can be kept ready at no cost to what is
measured. The result file is written whole, whatever happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FORMAT = "trainfit-gpu-truth"
VERSION = 1

#: Events that are kept at most; a file with so many is some 300 KB.
MOST_EVENTS = 150_000


def main(path: str) -> int:
    request = json.loads(Path(path).read_text())
    result: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    target = Path(request["output"])
    with simulation(request["simulate"]):
        try:
            work = prepare(request)
            ready(request["waits"])
            result |= work()
        except Exception as error:
            result |= failure(request, error)
    write(target, result)
    return 0


def failure(request: dict[str, Any], error: Exception) -> dict[str, Any]:
    """A result that says what went wrong; the campaign goes on with the next case."""
    lines = traceback.format_exception(error)
    # A package that is there may lack another one that it needs.
    absent = isinstance(error, ModuleNotFoundError)
    return {
        "status": "skipped" if absent else "failed",
        "message": f"{type(error).__name__}: {error}"[:2000],
        "traceback": "".join(lines)[-6000:],
        "case": request.get("case"),
        "simulated": bool(request["simulate"]),
    }


@contextlib.contextmanager
def simulation(gpu: str | None) -> Any:
    """The simulated GPU of that name, where asked for; needs trainfit."""
    if gpu is None:
        yield
        return
    from gpu.simulated import simulated

    with simulated(gpu):
        yield


def ready(waits: bool) -> None:
    print("ready", flush=True)
    if waits and not sys.stdin.readline():
        sys.exit(3)  # the campaign is gone


def write(path: Path, result: dict[str, Any]) -> None:
    """The file appears whole or not at all; gzip where its name says so."""
    text = json.dumps(result, separators=(",", ":"), allow_nan=False)
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, 9, mtime=0)
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(data)
    os.replace(scratch, path)


def prepare(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Everything that needs no GPU; returns what to do on it."""
    from gpu.cases import Case
    from gpu.training import prepared

    case = Case(**request["case"])
    job = prepared(case)
    if request["kind"] == "timed":
        from gpu.timing import StepTimer

        timed = StepTimer(job, tuple(request["batches"]))
        return lambda: timed.measure(bool(request["simulate"]))
    events = request.get("events", MOST_EVENTS)
    return lambda: measure_case(job, bool(request["simulate"]), request["profile"], events)


# -- one case --------------------------------------------------------------------------------------


def measure_case(
    job: Any, simulated: bool, profile: bool, most_events: int = MOST_EVENTS
) -> dict[str, Any]:
    """Train as the case says, and everything that is known of memory then."""
    measurement = CaseMeasurement(job, simulated, profile, most_events)
    measurement.begin()
    measurement.train()
    return measurement.result()


class CaseMeasurement:
    """The steps of one measurement, in order."""

    def __init__(self, job: Any, simulated: bool, profile: bool, most_events: int) -> None:
        from gpu.machine import MemoryStages

        self._job = job
        self._simulated = simulated
        self._profile = profile
        self._most_events = most_events
        self._memory = MemoryStages(simulated)
        self._marks: list[dict[str, Any]] = []
        self._noted: set[str] = set()
        self._status, self._message = "ran", ""
        self._profiled: Any = None
        self._events_in: list[int] = []
        self._profile_error: str | None = None

    def begin(self) -> None:
        """The CUDA context, the limit, and the history; nothing is allocated yet."""
        import torch

        from gpu import machine

        self._memory.note("before", context=False)
        torch.cuda.init()
        self._memory.note("context")
        self._machine = machine.describe(self._simulated)
        cap = self._job.case.cap_bytes
        self._allowed = None
        if cap is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            fraction = cap / total
            if fraction >= 1:
                raise ValueError(f"the limit of {cap} bytes is no less than the GPU's {total}")
            torch.cuda.set_per_process_memory_fraction(fraction)
            self._allowed = int(fraction * total)
        start_history()

    def train(self) -> None:
        """The steps; running out of memory is a result, not a failure."""
        import torch

        try:
            self._job.run(self._mark, self._last_step)
        except torch.cuda.OutOfMemoryError as error:
            self._status, self._message = "out_of_memory", str(error)[:1000]
            # The frames hold tensors that a script which ended would have let go.
            error.__traceback__ = None
        self._memory.note("end")

    def _mark(self, name: str) -> None:
        import torch

        stats = torch.cuda.memory_stats()
        self._marks.append(
            {
                "name": name,
                "allocations": stats["allocation.all.allocated"],
                "frees": stats["allocation.all.freed"],
                "allocated_bytes": stats["allocated_bytes.all.current"],
                "reserved_bytes": stats["reserved_bytes.all.current"],
                "active_bytes": stats["active_bytes.all.current"],
                "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
                "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
            }
        )
        # Once each: asking the driver takes milliseconds.
        if name in ("moved", "forward", "step") and name not in self._noted:
            self._noted.add(name)
            self._memory.note(name)

    @contextlib.contextmanager
    def _last_step(self) -> Any:
        """Profile the last step, where that works; a failing profiler costs only its rows."""
        from gpu import reports

        profile = None
        if self._profile:
            try:
                profile = reports.profiler()
                profile.__enter__()
            except Exception as error:
                profile, self._profile_error = None, repr(error)
        self._events_in.append(count_events())
        try:
            yield
        finally:
            self._events_in.append(count_events())
            if profile is not None:
                try:
                    profile.__exit__(None, None, None)
                    self._profiled = reports.read(profile)
                except Exception as error:
                    self._profile_error = repr(error)

    def result(self) -> dict[str, Any]:
        import torch

        stats = torch.cuda.memory_stats()
        return {
            "status": self._status,
            "message": self._message,
            "simulated": self._simulated,
            "case": dataclasses.asdict(self._job.case),
            "machine": self._machine,
            "memory": {
                "max_allocated_bytes": stats["allocated_bytes.all.peak"],
                "max_reserved_bytes": stats["reserved_bytes.all.peak"],
                "allocated_bytes": stats["allocated_bytes.all.current"],
                "reserved_bytes": stats["reserved_bytes.all.current"],
                "retries": stats["num_alloc_retries"],
                "ooms": stats["num_ooms"],
            },
            "stats": {
                name: value
                for name, value in sorted(stats.items())
                if isinstance(value, int) and ".all." in name
            },
            "device_memory": self._memory.stages,
            "step_seconds": [round(each, 6) for each in self._job.step_seconds],
            "trace": self._trace(),
            **self._of_profile(),
            "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _trace(self) -> dict[str, Any]:
        from gpu import events

        snapshot = read_history()
        entries = snapshot["device_traces"][0] if snapshot["device_traces"] else []
        columns = events.compact(entries)
        whole = len(columns["kinds"]) <= self._most_events
        if not whole:
            columns = events.compact(events.beginning(entries, self._most_events))
        return {
            "settings": self._job.case.alloc_conf,
            "allowed_bytes": self._allowed,
            **columns,
            "whole": whole,
            "marks": self._marks,
            "segments": events.segments(snapshot) if whole else [],
        }

    def _of_profile(self) -> dict[str, Any]:
        reports = self._profiled
        if reports is not None:
            if len(reports["block_bytes"]) == 0:
                reports = None
            else:
                reports["events"] = list(self._events_in)
        return {"reports": reports, "profile_error": self._profile_error}


def start_history() -> None:
    """Record every event of the allocator from here on, without stacks."""
    import torch

    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=2_000_000
    )


def read_history() -> dict[str, Any]:
    import torch

    return torch.cuda.memory._snapshot()


def count_events() -> int:
    """Allocations and frees asked for since the process began."""
    import torch

    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"] + stats["allocation.all.freed"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
