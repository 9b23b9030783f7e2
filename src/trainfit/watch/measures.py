"""A run in numbers: phases, rates, its ranks, a timeline, and a GPU's memory over the run."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.runs.tables import Table
from trainfit.results.watch import (
    HostMemory,
    LedgerPoint,
    MemoryLedger,
    Phase,
    RankSummary,
    TimelinePoint,
)
from trainfit.watch import checks
from trainfit.watch.view import PHASES, RankView, RunView, known, median

#: Points of a timeline at most: a terminal has fewer columns, and a page shows no more.
MOST_POINTS: Final = 400
#: Phases that have CUDA events.
_ON_GPU: Final = ("copy", "forward", "backward", "optimizer")


def phases(rank: RankView) -> tuple[Phase, ...]:
    """Mean seconds of a steady step in each phase that was measured; ``other`` is the rest."""
    count, total = len(rank.steps), rank.seconds
    waited = _waits_in_copies(rank)
    moved = {"copy": -waited, "sync": waited}
    found: list[Phase] = []
    for name in PHASES:
        spent = rank.seconds_in(name)
        if spent is None:
            continue
        spent += moved.get(name, 0.0)
        on_gpu = checks.column(rank, f"gpu_{name}_s") if name in _ON_GPU else np.zeros(0)
        measured = on_gpu[np.isfinite(on_gpu)]
        gpu_s = float(np.mean(measured)) if len(measured) else None
        found.append(Phase(name, spent / count, spent / total, gpu_s))
    if found:
        rest = max(0.0, total - sum(phase.host_s for phase in found) * count)
        found.append(Phase("other", rest / count, rest / total))
    return tuple(found)


def _waits_in_copies(rank: RankView) -> float:
    """Seconds in which a copy from pageable memory waited for the work before it, not for itself.

    Only where waits for the GPU are a phase of their own.
    """
    lost, host = checks.lost_to_copies(rank), checks.column(rank, "copy_s")
    if lost is None or rank.seconds_in("sync") is None or not checks.has_gpu(rank):
        return 0.0
    return float(np.nansum(np.maximum(0.0, host - lost)))


def samples_per_s(view: RunView) -> float | None:
    """The samples/s of all recorded ranks; ``None`` where one of them does not tell."""
    rates = [_rate(rank) for rank in view.ranks]
    values = [rate for rate in rates if rate is not None]
    return sum(values) if values and len(values) == len(rates) else None


def _rate(rank: RankView) -> float | None:
    step = rank.steps[rank.steps["samples"] >= 0]
    seconds = float(np.sum(step["step_s"], dtype=np.float64))
    return float(np.sum(step["samples"], dtype=np.float64)) / seconds if seconds else None


def mfu(rank: RankView) -> float | None:
    """Model FLOP utilization: FLOP/s of the model over the GPU's peak of dense 16-bit matmuls."""
    header, rate = rank.header, _rate(rank)
    if header.gpu is None or not 0 <= header.gpu < len(header.gpus):
        return None
    peak = header.gpus[header.gpu].tensor_flops_per_s
    if rate is None or not peak or header.flops_per_sample is None:
        return None
    return header.flops_per_sample * rate / peak


def input_share(rank: RankView) -> float | None:
    """The share of the time that is lost by waiting for batches; ``None``: not measured."""
    lost = checks.input_lost(rank)
    return checks.share_of(rank, lost) if np.isfinite(lost).any() else None


def samples_per_step(rank: RankView) -> float | None:
    """The median of the steady steps."""
    return median(rank.steps["samples"])


def exposed_s(rank: RankView) -> float | None:
    """Seconds of a step in collectives that nothing hides, waiting for other ranks among them.

    On a GPU what DDP's CUDA events say: the host does not wait in a call there. Elsewhere DDP waits
    within the backward pass: its mean of few passes, of which the first sets up connections, is at
    most that one's median. ``None``: not measured.
    """
    communication = rank.header.communication
    gradients = communication.gradients
    if checks.has_gpu(rank):
        on_gpu = gradients is not None and gradients.by == "CUDA events"
        return gradients.exposed_s if gradients is not None and on_gpu else None
    passes = median(rank.steps["backward_s"])
    if gradients is None or passes is None:
        return communication.exposed_s
    return min(gradients.exposed_s, passes) + (communication.called_s or 0.0)


def exposed_share(rank: RankView) -> float | None:
    """The exposed seconds (:func:`exposed_s`) as a share of the median step."""
    seconds, step_s = exposed_s(rank), median(rank.steps["step_s"])
    return min(1.0, seconds / step_s) if seconds is not None and step_s else None


def peak_reserved(rank: RankView) -> float | None:
    """Bytes that PyTorch reserved at most."""
    reserved = known(rank.record.steps["reserved_bytes"])
    return float(reserved.max()) if len(reserved) else None


def summary(rank: RankView) -> RankSummary:
    """One rank in a line."""
    reserved = peak_reserved(rank)
    return RankSummary(
        rank=rank.header.rank,
        host=rank.header.host,
        steps=len(rank.record.steps),
        step_s=median(rank.steps["step_s"]),
        input_share=input_share(rank),
        gpu_busy=checks.busy(rank),
        samples_per_step=samples_per_step(rank),
        collectives_share=exposed_share(rank),
        reserved_bytes=None if reserved is None else int(reserved),
    )


def timeline(rank: RankView) -> tuple[TimelinePoint, ...]:
    """All steps of a rank, warm-up included, in at most :data:`MOST_POINTS` runs of equal length;
    ``step`` and ``time_s`` are those of the last of each."""
    steps = rank.record.steps
    if not len(steps):
        return ()
    length = -(-len(steps) // MOST_POINTS)
    starts = np.arange(0, len(steps), length)
    ends = np.append(starts[1:], len(steps)) - 1
    seconds = np.add.reduceat(np.asarray(steps["step_s"], dtype=np.float64), starts)
    shares = {}
    for name in PHASES:
        values = np.asarray(steps[f"{name}_s"], dtype=np.float64)
        if np.isfinite(values).any():
            shares[name] = np.add.reduceat(np.nan_to_num(values), starts) / seconds
    if shares:
        shares["other"] = np.maximum(0.0, 1 - np.sum(list(shares.values()), axis=0))
    sampled = _sampled(rank, steps, starts, ends)
    return tuple(
        TimelinePoint(
            step=int(steps["step"][end]),
            time_s=float(steps["end_s"][end]),
            step_s=float(seconds[index] / (end - start + 1)),
            phases={name: float(values[index]) for name, values in shares.items()},
            **{name: values[index] for name, values in sampled.items()},
        )
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


def _sampled(
    rank: RankView, steps: Table, starts: NDArray[np.intp], ends: NDArray[np.intp]
) -> dict[str, list[float | None]]:
    edges = np.append(steps["end_s"][starts[0]] - steps["step_s"][starts[0]], steps["end_s"][ends])
    gpus = rank.every_gpu_sample
    return {
        "gpu_utilization": _means(gpus, "utilization", edges),
        "cores_busy": _means(rank.run.machine, "cores_busy", edges),
        "sm_hz": _means(gpus, "sm_hz", edges),
    }


def _means(samples: Table, column: str, edges: NDArray[np.float64]) -> list[float | None]:
    """Means of a column between the edges; ``None`` where there is no sample."""
    rows = samples[np.isfinite(samples[column])]
    places = np.searchsorted(edges, rows["time_s"], side="left") - 1
    within = (places >= 0) & (places < len(edges) - 1)
    counts = np.bincount(places[within], minlength=len(edges) - 1)
    sums = np.bincount(places[within], np.asarray(rows[column][within], np.float64), len(edges) - 1)
    return [float(total / n) if n else None for total, n in zip(sums, counts, strict=True)]


# ---
# A GPU's memory over a run: who holds it, whether it grows, and when it would be full.


#: Points that are kept, and points whose pairs give the slope (45,000 pairs).
_POINTS: Final = 400
_SLOPE_POINTS: Final = 300
#: A sample of the GPU belongs to a step that ended no further away than this.
_NEAR_S: Final = 2.0
#: Normal quantile of a two-sided 90% interval.
_Z: Final = 1.645


def ledger(view: RankView) -> MemoryLedger | None:
    """The memory ledger of the GPU that a rank computes on; ``None`` where nothing of it was
    measured."""
    steps, gpu = view.record.steps, view.every_gpu_sample
    step = steps[steps["reserved_bytes"] >= 0]
    if view.header.gpu is None or not len(step):
        return None
    total = _total(view)
    points = tuple(_point(row, gpu, total) for row in _spread(step, _POINTS))
    peak_reserved = int(step["reserved_bytes"].max())
    peaks = step[step["peak_allocated_bytes"] >= 0]["peak_allocated_bytes"]
    peak = int(peaks.max()) if len(peaks) else None
    growth = growth_per_step(view)
    at_peak = step[int(np.argmax(step["reserved_bytes"]))]
    held = max(int(at_peak["allocated_bytes"]), int(at_peak["peak_allocated_bytes"]))
    return MemoryLedger(
        points=points,
        total_bytes=total,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak_reserved,
        growth_bytes_per_step=None if growth is None else growth[0],
        growth_interval=None if growth is None else growth[1:],
        fragmentation=1 - min(1.0, held / peak_reserved) if peak_reserved and held >= 0 else None,
        out_of_memory_step=_full_at(view, points, peak, growth),
    )


def growth_per_step(view: RankView) -> tuple[float, float, float] | None:
    """Bytes of allocated memory that each step adds, with a 90% interval; ``None``: not measured.

    Theil and Sen's slope (the median of all pairs' slopes) with Sen's interval (1968), which
    single steps that hold more (an evaluation) do not move.
    """
    steps = view.steps
    return robust_slope(steps["step"], steps["allocated_bytes"])


def robust_slope(
    at: NDArray[np.generic], values: NDArray[np.generic], least: int = 8
) -> tuple[float, float, float] | None:
    """Theil and Sen's slope of the measured values (-1 and NaN are left out), and its 90%
    interval; ``None`` with fewer than ``least`` of them (of 4 it is that of all pairs)."""
    x, y = np.asarray(at, np.float64), np.asarray(values, np.float64)
    measured = np.isfinite(y) & (y >= 0)
    x, y = x[measured], y[measured]
    if len(x) < least or x[0] == x[-1]:
        return None
    chosen = np.unique(np.linspace(0, len(x) - 1, _SLOPE_POINTS).astype(int))
    x, y = x[chosen], y[chosen]
    count = len(x)
    first, second = np.triu_indices(count, 1)
    apart = x[second] - x[first]
    kept = apart > 0
    slopes = np.sort((y[second] - y[first])[kept] / apart[kept])
    spread = _Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(slopes) - spread) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))
    return float(np.median(slopes)), float(slopes[low]), float(slopes[high])


def host_memory(view: RankView) -> tuple[HostMemory, ...]:
    """RAM of a rank's processes by kind, at the moment at which they held most."""
    table = view.memory
    held = sum(table[name] for name in ("anonymous_bytes", "shared_bytes", "file_bytes"))
    if not len(table):
        return ()
    times, places = np.unique(table["time_s"], return_inverse=True)
    worst = table[places == np.argmax(np.bincount(places, held, len(times)))]
    memory = []
    for role, who in enumerate(("training", "workers", "others")):
        rows = worst[worst["role"] == role]
        if len(rows):
            memory.append(
                HostMemory(
                    who,  # type: ignore[arg-type]
                    len(rows),
                    int(rows["anonymous_bytes"].sum()),
                    int(rows["shared_bytes"].sum()),
                    int(rows["file_bytes"].sum()),
                )
            )
    return tuple(memory)


def _total(view: RankView) -> int | None:
    gpu = view.header.gpu
    if gpu is None or gpu >= len(view.header.gpus):
        return None
    return view.header.gpus[gpu].memory_bytes


def _spread(table: Table, limit: int) -> Table:
    """The rows, thinned to so many at most, evenly, the last among them."""
    chosen = np.unique(np.linspace(0, len(table) - 1, limit).astype(int))
    rows: Table = table[chosen]
    return rows


def _point(row: Table, gpu: Table, total: int | None) -> LedgerPoint:
    """A step's memory with the nearest sample of the GPU."""
    allocated, reserved = _known(row["allocated_bytes"]), _known(row["reserved_bytes"])
    end_s = float(row["end_s"])
    ours = others = used = None
    if len(gpu):
        near = gpu[int(np.argmin(np.abs(gpu["time_s"] - end_s)))]
        if abs(float(near["time_s"]) - end_s) <= _NEAR_S:
            used, ours = _known(near["used_bytes"]), _known(near["ours_bytes"])
            others = _known(near["others_bytes"])
    cached = None if reserved is None or allocated is None else reserved - allocated
    beyond = None if ours is None or reserved is None else max(0, ours - reserved)
    free = None if total is None or used is None else max(0, total - used)
    return LedgerPoint(int(row["step"]), end_s, allocated, cached, beyond, others, free)


def _known(value: Any) -> int | None:
    number = int(value)
    return None if number < 0 else number


def _full_at(
    view: RankView,
    points: tuple[LedgerPoint, ...],
    peak: int | None,
    growth: tuple[float, float, float] | None,
) -> int | None:
    """The step at which allocated memory reaches what is left of the GPU, if it goes on so."""
    total = _total(view)
    if growth is None or growth[1] <= 0 or total is None or peak is None:
        return None
    last = points[-1]
    limit = total - (last.beyond or 0) - (last.others or 0)
    return last.step + math.ceil(max(0, limit - peak) / growth[0])


def peak_share(view: RankView) -> float | None:
    """The share of the GPU's memory that the process reserves at its peak."""
    gpu, reserved = view.header.gpu, peak_reserved(view)
    if gpu is None or gpu >= len(view.header.gpus) or reserved is None:
        return None
    total = view.header.gpus[gpu].memory_bytes
    return reserved / total if total else None
