"""A recorded run as it is read: cleaned, its steady steps, and its last minute while it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.files.errors import ResultFileError
from trainfit.results.runs import tables
from trainfit.results.runs.tables import CHECKPOINT, COMPILED, EPOCH_START, EVALUATION, LIGHT, Table
from trainfit.results.runs.watched import (
    SAMPLER_EVENTS,
    Event,
    RankRecord,
    RunHeader,
    RunRecord,
    load_events,
    locked_of,
    plain_uuid,
)
from trainfit.watch import thresholds

# ---
# Several trainings of one script, one after the other: one median of all would be of none.


#: Median steps of trainings that differ by less than this factor are judged together: folds of a
#: cross-validation.
_ALIKE_LENGTHS: Final = 1.25


@dataclass(frozen=True)
class Training:
    """Steps from ``first`` to ``last``; ``step_s`` is their median, seconds."""

    first: int
    last: int
    step_s: float
    seconds: float


def trainings(rank: RankRecord) -> tuple[Training, ...]:
    """Trainings of a script, as its events "restart" tell, in order; those of too few steps to
    judge are left out."""
    starts = sorted({event.step for event in rank.events if event.kind == "restart"})
    edges = [-np.inf, *starts, np.inf]
    found = []
    for first, end in itertools.pairwise(edges):
        steps = _between(rank.steps, first, end)
        if len(steps) >= thresholds.LEAST_STEPS:
            lengths = np.asarray(steps["step_s"], dtype=np.float64)
            numbers = steps["step"]
            median, total = float(np.median(lengths)), float(np.sum(lengths))
            found.append(Training(int(numbers.min()), int(numbers.max()), median, total))
    return tuple(found)


def judged(trainings: Sequence[Training]) -> Training | None:
    """The longest of trainings whose steps differ; ``None``: all steps are judged together."""
    if len(trainings) < 2:
        return None
    lengths = [training.step_s for training in trainings]
    if max(lengths) <= _ALIKE_LENGTHS * min(lengths):
        return None
    return max(trainings, key=lambda each: each.seconds)


def judged_steps(rank: RankRecord) -> Table:
    """The rows of the training that is judged."""
    training = judged(trainings(rank))
    if training is None:
        return rank.steps
    return _between(rank.steps, training.first, training.last + 1)


def _between(steps: Table, first: float, end: float) -> Table:
    chosen: Table = steps[(steps["step"] >= first) & (steps["step"] < end)]
    return chosen


#: Phases of a step that are columns of the table, in the order that a step has them.
PHASES: Final = (
    *("input", "copy", "forward", "backward", "optimizer", "sync", "checkpoint", "evaluation"),
)
#: Steps at the start that are never judged: allocator, cuDNN and caches settle in them; of short
#: runs a third.
_WARM_UP: Final = 10


@dataclass(frozen=True)
class RankView:
    """One rank of a run. Tables hold only the steady part: the steps after the warm-up, and the
    samples between the first and the last of them. ``run`` is what its machine recorded."""

    record: RankRecord
    run: RunRecord

    @property
    def header(self) -> RunHeader:
        return self.record.header

    @property
    def rank(self) -> int | None:
        """The rank's number, where there are several."""
        return self.header.rank if self.header.world_size > 1 else None

    @functools.cached_property
    def steps(self) -> Table:
        """Steady steps of the training that is judged (:mod:`.trainings`): without the warm-up and
        without those that were compiled in."""
        later = self.after_warm_up
        return _where(later, (later["flags"] & COMPILED) == 0)

    @functools.cached_property
    def after_warm_up(self) -> Table:
        """The steady steps, with those that were compiled in."""
        every = judged_steps(self.record)
        later: Table = every[min(_WARM_UP, len(every) // 3) :]
        return later

    @functools.cached_property
    def window(self) -> tuple[float, float]:
        """Start and end of the steady steps, seconds of the run."""
        steps = self.steps
        if not len(steps):
            return (0.0, 0.0)
        first = float(steps["end_s"][0] - np.nan_to_num(steps["step_s"][0]))
        return first, float(steps["end_s"][-1])

    @property
    def seconds(self) -> float:
        """The seconds that the steady steps spent, their sum."""
        return float(np.nansum(self.steps["step_s"]))

    @functools.cached_property
    def machine(self) -> Table:
        return self._sampled(self.run.machine)

    @functools.cached_property
    def every_gpu_sample(self) -> Table:
        """The samples of the GPU that this rank computes on, over the whole run; none where it is
        not known."""
        header, every = self.header, self.run.gpus
        number = header.gpu
        if number is not None and number < len(header.gpus):
            uuid = plain_uuid(header.gpus[number].uuid)
            number = self.run.gpu_numbers.get(uuid, number)
        return _where(every, every["gpu"] == (-2 if number is None else number))

    @functools.cached_property
    def gpu(self) -> Table:
        """The samples of the rank's GPU within the steady steps."""
        return self._sampled(self.every_gpu_sample)

    @functools.cached_property
    def main_process(self) -> Table:
        return self._processes(0)

    @functools.cached_property
    def workers(self) -> Table:
        """Samples of the DataLoader's workers, all of them."""
        return self._processes(1)

    @functools.cached_property
    def children(self) -> Table:
        """Samples of all processes that the rank has started."""
        every = self._sampled(self.run.processes)
        return _where(every, (every["role"] != 0) & (every["rank"] == self.header.rank))

    @functools.cached_property
    def memory(self) -> Table:
        """The memory by kind, of the rank's processes."""
        every = self._sampled(self.run.memory)
        return _where(every, every["rank"] == self.header.rank)

    @functools.cached_property
    def core_waits(self) -> Table:
        """How long the rank's processes waited for a core."""
        every = self._sampled(self.run.core_waits)
        return _where(every, every["rank"] == self.header.rank)

    @functools.cached_property
    def fetches(self) -> Table:
        """Batches that workers made, or the training itself. What has a number that no worker of
        the training's DataLoader has is another one's, an evaluation's."""
        table = self._within(self.record.fetches, "end_s")
        of_training = [loader for loader in self.header.loaders if loader.role == "training"]
        workers = of_training[-1].num_workers if of_training else 0
        if not workers:
            return table
        numbers = table["worker"]
        return _where(table, (numbers >= 0) & (numbers < workers))

    def seconds_in(self, phase: str) -> float | None:
        """Seconds of the steady steps in a phase of :data:`PHASES`; ``None``: not measured."""
        values = self.steps[f"{phase}_s"]
        return float(np.nansum(values)) if np.isfinite(values).any() else None

    def share(self, phase: str) -> float | None:
        """The share of the steady steps' time that a phase spends."""
        spent = self.seconds_in(phase)
        return None if spent is None or not self.seconds else spent / self.seconds

    def _processes(self, role: int) -> Table:
        every = self._sampled(self.run.processes)
        return _where(every, (every["role"] == role) & (every["rank"] == self.header.rank))

    def _sampled(self, table: Table) -> Table:
        return self._within(table, "time_s")

    def _within(self, table: Table, column: str) -> Table:
        first, last = self.window
        return _where(table, (table[column] >= first) & (table[column] <= last))


def _where(table: Table, wanted: NDArray[np.bool_]) -> Table:
    chosen: Table = table[wanted]
    return chosen


@dataclass(frozen=True)
class RunView:
    """A whole run: its ranks, in order. ``place`` is that of the rank that is judged."""

    run: RunRecord
    place: int = 0

    @functools.cached_property
    def ranks(self) -> tuple[RankView, ...]:
        every = [RankView(rank, run) for run in self.run.machines for rank in run.ranks]
        return tuple(sorted(every, key=lambda view: view.header.rank))

    @property
    def judged(self) -> RankView:
        """The rank that rules of one rank look at: the first, or each in turn
        (:mod:`trainfit.watch.rules.rule`)."""
        return self.ranks[self.place]


def known(values: NDArray[np.generic]) -> NDArray[np.float64]:
    """The measured ones of a column: without NaN, and without the -1 of integers."""
    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    return found if np.issubdtype(values.dtype, np.floating) else found[found >= 0]


def median(values: NDArray[np.generic]) -> float | None:
    """The median of the measured values; ``None`` where there are none."""
    found = known(values)
    return float(np.median(found)) if len(found) else None


def percentile(values: NDArray[np.generic], percent: float) -> float | None:
    """A percentile of the measured values; ``None`` where there are none."""
    found = known(values)
    return float(np.percentile(found, percent)) if len(found) else None


# ---
# Steps that were recorded lightly, completed by those that were recorded in detail.
#
# Of a light step (:mod:`trainfit.watch.recorder.current_step`) only its length and its wait for
# batches are known. The rest of its time is divided among the phases as in the nearest step in
# detail, of those in which nothing rare happened: what is rare is always recorded in detail, and
# stands for itself. Sums and shares over all steps are then estimates of what all would have shown.


_RARE: Final = EPOCH_START | EVALUATION | CHECKPOINT | COMPILED
#: Seconds, which grow with the step. The gap before one is left to what its length tells.
_SECONDS: Final = (
    *("copy_s", "forward_s", "backward_s", "optimizer_s", "sync_s", "cpu_s", "gpu_s"),
    *("gpu_copy_s", "gpu_forward_s", "gpu_backward_s", "gpu_optimizer_s"),
)
#: What a script does in each step alike.
_ALIKE_COLUMNS: Final = ("syncs", "copied_bytes", "unpinned_bytes")


def is_light(steps: Table) -> NDArray[np.bool_]:
    """A mask of the rows of steps that were recorded lightly."""
    found: NDArray[np.bool_] = (steps["flags"] & LIGHT) != 0
    return found


def completed(steps: Table) -> Table:
    """A copy, in which light steps have what they have most likely spent their time on."""
    light = is_light(steps)
    told = np.flatnonzero(~light & ((steps["flags"] & _RARE) == 0) & np.isfinite(steps["step_s"]))
    steps = steps.copy()
    if not light.any() or not len(told):
        return steps
    at = np.flatnonzero(light)
    after = np.minimum(np.searchsorted(told, at), len(told) - 1)
    before = np.maximum(after - 1, 0)
    nearer = np.abs(told[before] - at) <= np.abs(told[after] - at)
    like = told[np.where(nearer, before, after)]
    own = _without_input(steps[at])
    theirs = _without_input(steps[like])
    scale = np.divide(own, theirs, out=np.ones(len(at)), where=theirs > 0)
    for name in _SECONDS:
        steps[name][at] = steps[name][like] * scale
    for name in _ALIKE_COLUMNS:
        steps[name][at] = steps[name][like]
    steps["checkpoint_s"][at] = steps["evaluation_s"][at] = 0.0
    return steps


def _without_input(steps: Table) -> NDArray[np.float64]:
    length = np.asarray(steps["step_s"], dtype=np.float64)
    waited = np.nan_to_num(np.asarray(steps["input_s"], dtype=np.float64))
    return np.maximum(0.0, np.nan_to_num(length) - waited)


# ---
# A recorded run without rows and values that no training can have had.
#
# A file that was damaged, a clock that jumped or a second training in one script leave such rows;
# rules look at what is left and need not check again.


#: Columns in which infinite and negative values are findings themselves.
_AS_THEY_ARE: Final = frozenset(("loss", "loss_scale", "gradient_norm"))
#: Larger than any second, byte or hertz of a run; sums of what is below stay exact enough.
_LARGEST: Final = 1e18


def clean(run: RunRecord) -> RunRecord:
    """Leave out steps without a length or an end and samples without a time; order the rest by
    time; infinite and negative numbers count as not measured; light steps are completed."""
    ranks = tuple(
        dataclasses.replace(rank, steps=_steps(rank), fetches=_rows(rank.fetches, "end_s"))
        for rank in run.ranks
    )
    return dataclasses.replace(
        run,
        ranks=ranks,
        machine=_rows(run.machine, "time_s"),
        gpus=_rows(run.gpus, "time_s"),
        processes=_rows(run.processes, "time_s"),
        memory=_rows(run.memory, "time_s"),
        folders=_rows(run.folders, "time_s"),
        core_waits=_rows(run.core_waits, "time_s"),
        elsewhere=tuple(map(clean, run.elsewhere)),
    )


def _steps(rank: RankRecord) -> Table:
    steps = _rows(rank.steps, "end_s")
    return completed(steps[steps["step_s"] > 0])


def _rows(table: Table, time: str) -> Table:
    rows = table.copy()
    for name in rows.dtype.names or ():
        kind = rows[name].dtype.kind
        if kind == "f":
            right = (rows[name] >= 0) & (rows[name] < _LARGEST)
            wrong = np.isnan(rows[name]) if name in _AS_THEY_ARE else ~right
            rows[name][wrong] = np.nan  # one NaN for all: others trap in conversions
        elif kind == "i":
            wrong = (rows[name] < 0) | (rows[name] >= _LARGEST)
            rows[name][wrong] = -1
    rows = rows[np.isfinite(rows[time])]
    ordered: Table = rows[np.argsort(rows[time], kind="stable")]
    return ordered


# ---
# The last minute of a run that goes on, for a live view: only the end of each file is read.


#: Events that say what the script did once and is so from then on.
_LASTING: Final = ("child", "never_steps", "threads")
#: Of a rank's events, the bytes that are read.
_EVENT_BYTES: Final = 1 << 16
#: Rows of each table at most: some minutes of steps, a minute of samples.
_ROWS: Final = 4000


def tail_run(folder: Path, seconds: float = 60.0) -> RunRecord | None:
    """What was recorded in the last ``seconds``; ``None`` as long as there is no header.

    Never raises for a file that is being written.
    """
    ranks = []
    for path in sorted(folder.glob("rank*.json")):
        with contextlib.suppress(ResultFileError, OSError):
            ranks.append(_rank(path, seconds))
    if not ranks:
        return None
    ranks.sort(key=lambda each: each.header.rank)
    now = max((float(rank.steps["end_s"][-1]) for rank in ranks if len(rank.steps)), default=0.0)
    machine, gpus, processes, memory, filled, waits = (
        _last(folder / f"{name}.bin", tables.BY_NAME[name], "time_s", now - seconds)
        for name in tables.SAMPLED
    )
    events: tuple[Event, ...] = ()
    with contextlib.suppress(ResultFileError, OSError):
        events = load_events(folder / SAMPLER_EVENTS)
    return RunRecord(
        *(tuple(ranks), machine, gpus, processes, str(folder), events),
        memory=memory,
        folders=filled,
        core_waits=waits,
    )


def _rank(path: Path, seconds: float) -> RankRecord:
    header = RunHeader.load(path)
    steps = _last(path.parent / f"{path.stem}.steps.bin", tables.STEPS, "end_s", -np.inf)
    if len(steps):
        recent: Table = steps[steps["end_s"] >= steps["end_s"][-1] - seconds]
        steps = recent
    since = float(steps["end_s"][0]) if len(steps) else -np.inf
    made = [
        _last(file, tables.FETCHES, "end_s", since)
        for file in sorted(path.parent.glob(f"{path.stem}.fetches.*.bin"))
    ]
    fetches = np.concatenate([np.zeros(0, tables.FETCHES), *made])
    told = _last_events(path, since) + locked_of(path.with_suffix(""), header, steps)
    return RankRecord(header, steps, fetches, told)


def _last_events(path: Path, since: float) -> tuple[Event, ...]:
    """The events in the last bytes of a rank's file."""
    events = path.parent / f"{path.stem}.events.jsonl"
    try:
        with events.open("rb") as file:
            file.seek(max(0, events.stat().st_size - _EVENT_BYTES))
            lines = file.read(_EVENT_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, DecodingError):  # cut off, or being written
            found.append(decode(Event, json.loads(line)))
    return tuple(each for each in found if each.time_s >= since or each.kind in _LASTING)


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
