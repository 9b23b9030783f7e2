"""A run in numbers: phases, rates, its ranks, and a timeline for pictures."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.watch.result import Phase, RankSummary, TimelinePoint
from trainfit.results.watch.tables import Table
from trainfit.watch.figures import checks, gpu_time
from trainfit.watch.figures.view import PHASES, RankView, RunView, median

#: Points of a timeline at most: a terminal has fewer columns, and a page shows no more.
MOST_POINTS: Final = 400
#: Phases that have CUDA events.
_ON_GPU: Final = ("copy", "forward", "backward", "optimizer")


def phases(rank: RankView) -> tuple[Phase, ...]:
    """Mean seconds of a steady step in each phase that was measured; ``other`` is the rest."""
    count, total = len(rank.steps), rank.seconds
    found: list[Phase] = []
    for name in PHASES:
        spent = rank.seconds_in(name)
        if spent is None:
            continue
        on_gpu = gpu_time.column(rank, f"gpu_{name}_s") if name in _ON_GPU else np.zeros(0)
        measured = on_gpu[np.isfinite(on_gpu)]
        gpu_s = float(np.mean(measured)) if len(measured) else None
        found.append(Phase(name, spent / count, spent / total, gpu_s))
    if found:
        rest = max(0.0, total - sum(each.host_s for each in found) * count)
        found.append(Phase("other", rest / count, rest / total))
    return tuple(found)


def samples_per_s(view: RunView) -> float | None:
    """Of all recorded ranks; ``None`` where one of them does not tell."""
    rates = [_rate(rank) for rank in view.ranks]
    told = [rate for rate in rates if rate is not None]
    return sum(told) if told and len(told) == len(rates) else None


def _rate(rank: RankView) -> float | None:
    told = rank.steps[rank.steps["samples"] >= 0]
    seconds = float(np.sum(told["step_s"], dtype=np.float64))
    return float(np.sum(told["samples"], dtype=np.float64)) / seconds if seconds else None


def mfu(rank: RankView) -> float | None:
    """Model FLOP utilization: FLOP/s of the model over the GPU's peak of dense 16-bit matmuls."""
    header, rate = rank.header, _rate(rank)
    if header.gpu is None or not 0 <= header.gpu < len(header.gpus):
        return None
    peak = header.gpus[header.gpu].tensor_flops_per_s
    if rate is None or not peak or header.flops_per_sample is None:
        return None
    return header.flops_per_sample * rate / peak


def summary(rank: RankView) -> RankSummary:
    """One rank in a line."""
    lost = gpu_time.input_lost(rank)
    return RankSummary(
        rank=rank.header.rank,
        host=rank.header.host,
        steps=len(rank.record.steps),
        step_s=median(rank.steps["step_s"]),
        input_share=checks.share_of(rank, lost) if np.isfinite(lost).any() else None,
        gpu_busy=gpu_time.busy_by_events(rank),
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
            step_s=float(seconds[at] / (end - start + 1)),
            phases={name: float(values[at]) for name, values in shares.items()},
            **{name: values[at] for name, values in sampled.items()},
        )
        for at, (start, end) in enumerate(zip(starts, ends, strict=True))
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
