"""The last minute of a run that goes on, for a live view: only the end of each file is read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainfit.results.files.errors import ResultFileError
from trainfit.results.watch import tables
from trainfit.results.watch.run import (
    SAMPLER_EVENTS,
    Event,
    RankRecord,
    RunHeader,
    RunRecord,
    load_events,
)
from trainfit.results.watch.tables import Table

#: Rows of each table at most: some minutes of steps, a minute of samples.
_ROWS: Final = 4000


def tail_run(folder: Path, seconds: float = 60.0) -> RunRecord | None:
    """What was recorded in the last ``seconds``; ``None`` as long as there is no header.

    The ranks' events are left out. Never raises for a file that is being written.
    """
    ranks = []
    for path in sorted(folder.glob("rank*.json")):
        with contextlib.suppress(ResultFileError, OSError):
            ranks.append(_rank(path, seconds))
    if not ranks:
        return None
    ranks.sort(key=lambda each: each.header.rank)
    now = max((float(each.steps["end_s"][-1]) for each in ranks if len(each.steps)), default=0.0)
    machine, gpus, processes = (
        _last(folder / f"{name}.bin", tables.BY_NAME[name], "time_s", now - seconds)
        for name in ("machine", "gpus", "processes")
    )
    events: tuple[Event, ...] = ()
    with contextlib.suppress(ResultFileError, OSError):
        events = load_events(folder / SAMPLER_EVENTS)
    return RunRecord(tuple(ranks), machine, gpus, processes, str(folder), events)


def _rank(path: Path, seconds: float) -> RankRecord:
    header = RunHeader.load(path)
    steps = _last(path.parent / f"{path.stem}.steps.bin", tables.STEPS, "end_s", -np.inf)
    if len(steps):
        recent: Table = steps[steps["end_s"] >= steps["end_s"][-1] - seconds]
        steps = recent
    since = float(steps["end_s"][0]) if len(steps) else -np.inf
    made = [
        _last(each, tables.FETCHES, "end_s", since)
        for each in sorted(path.parent.glob(f"{path.stem}.fetches.*.bin"))
    ]
    return RankRecord(header, steps, np.concatenate([np.zeros(0, tables.FETCHES), *made]))


def _last(path: Path, kind: np.dtype[Any], column: str, since: float) -> Table:
    """Whole rows of the file's end, those later than ``since``."""
    try:
        with path.open("rb") as file:
            whole = path.stat().st_size // kind.itemsize
            file.seek(max(0, whole - _ROWS) * kind.itemsize)
            data = file.read(min(whole, _ROWS) * kind.itemsize)
    except OSError:
        return np.zeros(0, kind)
    rows: Table = np.frombuffer(data, kind, count=len(data) // kind.itemsize)
    recent: Table = rows[rows[column] >= since]
    return recent
