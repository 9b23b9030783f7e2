"""Entries of a report page, from result files of every kind."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers_pace import ACT, FREQUENCY, measured
from helpers_watch import run
from trainfit.plan.job_detail import explained
from trainfit.report.blocks import Entry
from trainfit.results.files.documents import ResultFile
from trainfit.results.kinds import read
from trainfit.results.memory import Owner, StepMoment
from trainfit.results.runs.recording import FREE, MALLOC, STEP_END, Recording
from trainfit.results.speed import OperatorTime
from trainfit.watch.judge import judge

RESULTS = Path(__file__).parent / "fixtures" / "results"
#: One file of each kind, of its present version.
FILES = (
    *("plan-v1.json", "gpu-comparison-v1.json", "recording-v1.trainfit", "loader-v1.json"),
    *("rehearsal-v1.json", "watch-v1.json", "watch-comparison-v1.json"),
    *("watch-verification-v1.json", "pace-v1.json", "batch-v1.json", "noise-scale-v1.json"),
    *("doctor-v1.json", "profile-v1.json", "gpus-v1.json"),
)


#: Texts of which only certain ones exist, though their type does not say so.
_OURS = {
    *((OperatorTime, name) for name in ("dtype", "phase")),
    *((StepMoment, "phase"), (Owner, "kind")),
}


@functools.cache
def entry(name: str) -> Entry:
    """The result in one of the fixtures, as a report has it."""
    return Entry(name, *explained(read(RESULTS / name), name))


@functools.cache
def made() -> tuple[Entry, ...]:
    """Results that no fixture is like: paced calls with a cause and its fix, a run on a GPU whose
    memory grows."""
    paced = measured(FREQUENCY, ACT, hz=(15.0, 30.0), fix="spin")
    watched = judge(run(input_s=0.06))
    return Entry("fixed.json", paced), Entry("gpu.json", watched)


def entries() -> list[Entry]:
    """One of each kind, and two more."""
    return [*map(entry, FILES), *made()]


def tainted(result: Any, markup: str) -> Any:
    """The same result with ``markup`` at the end of every text in it.

    Empty ones stay empty, and so do those of which only certain ones are allowed.
    """
    return _tainted(type(result), result, markup)


def _tainted(kind: Any, value: Any, markup: str) -> Any:
    if value is None:
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        changed = {
            field.name: _tainted(hints[field.name], getattr(value, field.name), markup)
            for field in dataclasses.fields(value)
            if (type(value), field.name) not in _OURS
        }
        return dataclasses.replace(value, **changed)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        kinds = [argument for argument in arguments if argument is not type(None)]
        return _tainted(str if isinstance(value, str) else kinds[0], value, markup)
    if origin is tuple:
        each = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_tainted(k, v, markup) for k, v in zip(each, value, strict=True))
    if origin is Mapping:
        return {key: _tainted(arguments[1], each, markup) for key, each in value.items()}
    return value + markup if kind is str and value else value


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a result."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from texts_of(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)


def large_recording(allocations: int, modules: int = 5000) -> Recording:
    """A recording of two steps with so many allocations.

    Every other one is freed at once, the rest in reverse order at the end of its step.
    """
    small = read(RESULTS / "recording-v1.trainfit")
    assert isinstance(small, Recording)
    each = allocations // 2
    numbers = np.arange(2 * each)
    events = []
    for step in range(2):
        made = numbers[step * each : (step + 1) * each].reshape(-1, 2)
        kept, freed = made[:, 0], made[:, 1]
        forward = np.stack([kept * 4 + MALLOC, freed * 4 + MALLOC, freed * 4 + FREE], axis=1)
        events += [forward.ravel(), kept[::-1] * 4 + FREE, np.array([STEP_END])]
    names = tuple(f"Net.block{n // 50}.layer{n % 50}" for n in range(modules))
    none = np.zeros(0, dtype=np.int64)
    columns = {
        field.name: none
        for field in dataclasses.fields(Recording)
        if field.name.startswith("kernel_") or field.name.startswith("workspace_")
    }
    columns["workspace_start"] = np.zeros(1, dtype=np.int64)
    header = {**small.header, "parameters": None, "step": None, "gpu_memory_bytes": 1 << 40}
    return Recording(
        header=header,
        strings=("aten.mm.default", *names),
        op_name=np.zeros(2 * each, dtype=np.int64),
        op_phase=2 + (numbers % each >= each // 2).astype(np.int64),
        op_module=1 + numbers % modules,
        op_step=numbers // each,
        alloc_bytes=512 * (1 + numbers % 977),
        alloc_op=numbers,
        alloc_kind=numbers % 8,
        alloc_module=1 + numbers % modules,
        alloc_stream=np.zeros(2 * each, dtype=np.int64),
        alloc_line=np.full(2 * each, -1),
        events=np.concatenate(events),
        **columns,
    )


def is_result(value: Any) -> bool:
    """Is it a result with a file of its own?"""
    return isinstance(value, ResultFile)
