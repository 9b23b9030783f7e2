"""Watched runs that are made by hand: a healthy one, and changes of it.

``run(steps=200, input_s=0.04)`` is a healthy run on a GPU in which each step waits 40 ms for its
batch; the step becomes that much longer, and the GPU's stream is empty meanwhile (``gpu_gap_s``)
unless that is given, too. Columns of steps are given by their names, as a number or as an array;
other tables by ``machine=``, ``gpus=``, ``processes=``, ``fetches=``; the header by ``header=``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from trainfit.report.layout import Line
from trainfit.report.sections.watch import watch_subject
from trainfit.report.writers.terminal import screen
from trainfit.results.findings import Finding
from trainfit.results.runs import tables
from trainfit.results.runs.tables import Table
from trainfit.results.runs.watched import (
    Event,
    RankRecord,
    RunHeader,
    RunRecord,
    WatchedGpu,
    WatchedLoader,
)
from trainfit.results.watch import WatchResult

Columns = Mapping[str, Any]
#: First line of a child's program: the kernel kills it when who started it ends, even by a signal
#: (prctl(2), PR_SET_PDEATHSIG).
ENDS_WITH_US: Final = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"
GIB: Final = 1 << 30
CORES: Final = 8
WORKERS: Final = 4
BATCH: Final = 32

LOADER: Final = WatchedLoader(
    role="training",
    place="train.py:41",
    num_workers=WORKERS,
    prefetch_factor=2,
    pin_memory=True,
    persistent_workers=True,
    batch_size=BATCH,
    batches=1000,
)
GPU: Final = WatchedGpu("NVIDIA GPU", "GPU-0", 24 * GIB, (8, 9), 165e12)
HEADER: Final = RunHeader(
    command="python train.py",
    rank=0,
    world_size=1,
    pid=100,
    host="here",
    started_unix=0.0,
    started_monotonic=0.0,
    trainfit="0",
    python="3.11",
    torch="2.8",
    gpu=0,
    gpus=(GPU,),
    usable_cores=float(CORES),
    ram_bytes=64 * GIB,
    loaders=(LOADER,),
    parameters=10_000_000,
    trained_parameters=10_000_000,
    optimizer="AdamW",
    precision="bfloat16",
    autocast="bfloat16",
    flops_per_sample=2e11,  # 39% of the peak at 320 samples/s
    threads={"torch": 8},
    worker_threads={"torch": 1},
    ending="finished",
)
#: Host seconds of a step of a healthy run: it launches ahead and then waits for the GPU.
STEP: Final = {
    "input_s": 0.001,
    "copy_s": 0.001,
    "forward_s": 0.030,
    "backward_s": 0.050,
    "optimizer_s": 0.015,
    "sync_s": 0.002,
    "checkpoint_s": 0.0,
    "evaluation_s": 0.0,
}
#: … and outside of all phases.
OTHER_S: Final = 0.001
ON_GPU: Final = {
    "gpu_gap_s": 0.0005,
    "gpu_copy_s": 0.001,
    "gpu_forward_s": 0.032,
    "gpu_backward_s": 0.052,
    "gpu_optimizer_s": 0.014,
    "gpu_s": 0.0995,
}


def loader(**changes: Any) -> tuple[WatchedLoader, ...]:
    """The healthy run's loader with changes."""
    return (dataclasses.replace(LOADER, **changes),)


def table(kind: Any, columns: Columns, count: int) -> Table:
    """``count`` rows of a table with these columns; the others are not measured."""
    rows = tables.empty_rows(kind, count)
    for name, values in columns.items():
        rows[name] = values
    return rows


def step_rows(steps: int = 200, *, on_gpu: bool = True, seed: int = 0, **columns: Any) -> Table:
    """Rows of steps with 2% noise. ``step_s``, where it is not given, is the sum of the phases."""
    noise = np.random.default_rng(seed).normal(1.0, 0.02, steps).clip(0.9, 1.1)
    values: dict[str, Any] = {name: seconds * noise for name, seconds in STEP.items()}
    values.update({name: columns[name] for name in STEP if name in columns})
    if not on_gpu:
        values["copy_s"] = values["sync_s"] = np.nan
    other = columns.pop("other_s", OTHER_S)
    spent = sum(np.nan_to_num(np.broadcast_to(each, steps)) for each in values.values())
    values["step_s"] = spent + other
    if on_gpu:
        values |= {name: seconds * noise for name, seconds in ON_GPU.items()}
        waited = np.maximum(0.0, np.broadcast_to(values["input_s"], steps) - 2 * STEP["input_s"])
        values["gpu_gap_s"] = values["gpu_gap_s"] + waited
        more = {"syncs": 0, "copied_bytes": 20_000_000, "unpinned_bytes": 0}
        values |= more | {"allocated_bytes": 8 * GIB, "peak_allocated_bytes": 10 * GIB}
        values |= {"reserved_bytes": 11 * GIB, "alloc_retries": 0}
    values |= {"samples": BATCH, "batches": 1, "queued": 4, "loss": 1.0 * noise}
    values |= {"flags": tables.LOSS_FINITE, "step": np.arange(steps)}
    values["cpu_s"] = 0.9 * np.asarray(values["step_s"])
    values |= columns
    rows = table(tables.STEPS, values, steps)
    lost = (rows["flags"] & tables.LOSS_NOT_FINITE) != 0
    rows["flags"][~lost] |= tables.LOSS_FINITE
    rows["end_s"] = columns.get("end_s", 5.0 + np.cumsum(rows["step_s"], dtype=np.float64))
    return rows


def machine_rows(times: Any, **columns: Any) -> Table:
    values: dict[str, Any] = {"time_s": times, "interval_s": 0.1, "cores_busy": 3.0}
    values |= {"cores_ours": 2.8, "iowait_cores": 0.0, "runnable": 3.0}
    values |= {"ram_used_bytes": 16 * GIB, "ram_available_bytes": 48 * GIB, "swap_in_bytes": 0}
    values |= {"swap_out_bytes": 0, "shm_used_bytes": GIB, "shm_free_bytes": 31 * GIB}
    values |= {"disk_read_bytes": 0, "disk_written_bytes": 0, "memory_pressure": 0.0}
    values |= {"io_pressure": 0.0, "cpu_hz": 3e9}
    return table(tables.MACHINE, values | columns, len(times))


def gpu_rows(times: Any, **columns: Any) -> Table:
    values: dict[str, Any] = {"time_s": times, "gpu": 0, "utilization": 0.97}
    values |= {"memory_utilization": 0.5, "used_bytes": 12 * GIB, "ours_bytes": 12 * GIB}
    values |= {"others_bytes": 0, "sm_hz": 2.5e9, "max_sm_hz": 2.6e9, "memory_hz": 1e10}
    values |= {"clock_reasons": 0, "temperature_c": 65.0, "power_w": 300.0}
    values |= {"power_limit_w": 450.0}
    return table(tables.GPUS, values | columns, len(times))


def process_rows(
    times: Any, workers: int = WORKERS, main: Columns | None = None, **columns: Any
) -> Table:
    """The training process (``main``) and its workers (``columns``) at each sample."""
    common = {"rank": 0, "threads": 10, "voluntary_switches": 100.0, "read_bytes": 0}
    common |= {"involuntary_switches": 2.0, "waits_for_io": 0.0}
    first: Any = common | {"time_s": times, "pid": 100, "role": 0, "cpu_cores": 0.9}
    first |= {"hottest_thread": 0.97, "rss_bytes": 4 * GIB}
    rows = [table(tables.PROCESSES, first | dict(main or {}), len(times))]
    for worker in range(workers):
        values: Any = common | {"time_s": times, "pid": 101 + worker, "role": 1, "worker": worker}
        values |= {"cpu_cores": 0.4, "hottest_thread": 0.4, "rss_bytes": GIB}
        rows.append(table(tables.PROCESSES, values | columns, len(times)))
    return np.concatenate(rows)


def fetch_rows(times: Any, workers: int = WORKERS, **columns: Any) -> Table:
    """A batch at each of ``times``, in turns by the workers."""
    count = len(times)
    noise = np.random.default_rng(1).normal(1.0, 0.05, count).clip(0.8, 1.2)
    turns = np.arange(count) % max(1, workers) if workers else -1
    values: dict[str, Any] = {"end_s": times, "worker": turns, "pid": 101 + np.asarray(turns)}
    values |= {"fetch_s": 0.2 * noise, "cpu_s": 0.19 * noise, "read_s": 0.02 * noise}
    values |= {"decode_s": 0.1 * noise, "transform_s": 0.05 * noise, "collate_s": 0.02 * noise}
    return table(tables.FETCHES, values | {"samples": BATCH} | columns, count)


def run(
    steps: int | Table = 200,
    *,
    header: Columns | None = None,
    machine: Columns | None = None,
    gpus: Columns | None = None,
    processes: Columns | None = None,
    fetches: Columns | None = None,
    events: Iterable[Event] = (),
    **columns: Any,
) -> RunRecord:
    """A healthy run on one GPU with changes; ``columns`` are those of its steps."""
    told = dataclasses.replace(HEADER, **(header or {}))
    on_gpu = told.gpu is not None
    rows = steps if not isinstance(steps, int) else step_rows(steps, on_gpu=on_gpu, **columns)
    end = float(rows["end_s"][-1]) if len(rows) else 0.0
    times = np.arange(0.0, end, 0.1)
    workers = told.loaders[0].num_workers if told.loaders else 0
    return RunRecord(
        (
            RankRecord(
                told, rows, fetch_rows(rows["end_s"], workers, **(fetches or {})), tuple(events)
            ),
        ),
        machine_rows(times, **(machine or {})),
        gpu_rows(times if on_gpu else times[:0], **(gpus or {})),
        process_rows(times, **({"workers": workers} | dict(processes or {}))),
    )


def run_on_cpu(steps: int = 200, **changes: Any) -> RunRecord:
    """The same without a GPU."""
    header = {"gpu": None, "gpus": (), "precision": "float32", "autocast": ""}
    return run(steps, **(changes | {"header": header | dict(changes.get("header", {}))}))


def kinds(result: WatchResult) -> list[str]:
    return [each.kind for each in result.findings]


def unknown_kinds(result: WatchResult) -> list[str]:
    return [each.kind for each in result.unknown]


def finding(result: WatchResult, kind: str) -> Finding:
    """The only finding of a kind."""
    (found,) = [each for each in result.findings if each.kind == kind]
    return found


def watch_screen(result: WatchResult) -> list[Line]:
    """The lines that a terminal has of a watched run."""
    return screen(watch_subject(result))
