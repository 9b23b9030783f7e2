"""GPUs of a run that are not used alike: memory, utilization ("90 against 50%"), DataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainfit.findings.habits import DATA_PARALLEL
from trainfit.results.findings import Confidence, Evidence, Finding, Fix, Unknown
from trainfit.results.text import GIB, percent
from trainfit.watch import checks, thresholds
from trainfit.watch.measures import exposed_s, input_share, peak_reserved, samples_per_step
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RankView, RunView, known, median

_MEMORY_KIND: Final = "uneven_memory"
_USE_KIND: Final = "uneven_utilization"
_DATA_PARALLEL_KIND: Final = "data_parallel"


# ---
# DataParallel: one process, whose first GPU has more to do and to hold than the others.


@dataclass(frozen=True)
class _GpuUse:
    """A GPU that the process uses, by the sampler: means over the steady steps."""

    number: int
    utilization: float | None
    held_bytes: float | None


def _uses(view: RankView) -> list[_GpuUse]:
    first, last = view.window
    every = view.run.gpus
    rows = every[(every["time_s"] >= first) & (every["time_s"] <= last)]
    found = []
    for number in np.unique(rows["gpu"]):
        of_gpu = rows[rows["gpu"] == number]
        held, used = median(of_gpu["ours_bytes"]), known(of_gpu["utilization"])
        enough = len(used) >= thresholds.LEAST_SAMPLES
        if held:
            mean = float(np.mean(used)) if enough else None
            found.append(_GpuUse(int(number), mean, held))
    return found


def _find_data_parallel(run: RunView) -> Iterator[Finding | Unknown]:
    header = run.run.header
    if header.distributed != "data_parallel" or header.gpu is None:
        return
    yield Finding(
        _DATA_PARALLEL_KIND,
        "warning",
        "DataParallel drives all GPUs from one process",
        tuple(_first_and_others(_uses(run.judged))),
        DATA_PARALLEL.cause,
        (Fix(DATA_PARALLEL.action),),
        "certain",
    )


def _first_and_others(uses: Sequence[_GpuUse]) -> Iterator[Evidence]:
    if len(uses) < 2:
        return
    first, others = uses[0], uses[1:]
    held = [each.held_bytes for each in others if each.held_bytes is not None]
    if first.held_bytes is not None and held:
        yield Evidence(f"memory of GPU {first.number}", first.held_bytes / GIB, "GiB")
        yield Evidence("memory of the others, most", max(held) / GIB, "GiB")
    used = [each.utilization for each in others if each.utilization is not None]
    if first.utilization is not None and used:
        yield Evidence(f"utilization of GPU {first.number}", first.utilization)
        yield Evidence("utilization of the others, mean", float(np.mean(used)))


# ---
# Memory of ranks: the fullest GPU decides which batch size fits.


def _find_uneven_memory(run: RunView) -> Iterator[Finding | Unknown]:
    ranks = [view for view in run.ranks if view.header.gpu is not None]
    held = [(_held(view), view) for view in ranks]
    if len(ranks) < 2 or any(bytes_ is None for bytes_, _ in held):
        return
    most, full = max(((bytes_ or 0.0, view) for bytes_, view in held), key=lambda each: each[0])
    others = [view for view in ranks if view is not full]
    usual = float(np.median([_held(view) or 0.0 for view in others]))
    total = _total(full)
    if total is None or most - usual < thresholds.UNEVEN_MEMORY * total:
        return
    rank = full.header.rank
    cause, fix, sure = _why_fuller(full, others, most - usual)
    yield Finding(
        _MEMORY_KIND,
        "warning" if most > thresholds.ROOMY * total else "info",
        f"Rank {rank}'s GPU holds {(most - usual) / GIB:.1f} GiB more than the others'",
        (
            Evidence(f"rank {rank}", most / GIB, "GiB"),
            Evidence("the others, median", usual / GIB, "GiB"),
            Evidence("of the GPU", most / total),
        ),
        f"{cause}; the fullest GPU decides which batch size fits on all",
        (Fix(fix),),
        sure,
        rank=rank,
    )


def _held(view: RankView) -> float | None:
    """The most bytes that the run holds of the rank's GPU: by NVML, else PyTorch's reserved
    memory."""
    ours = known(view.every_gpu_sample["ours_bytes"])
    return float(ours.max()) if len(ours) else peak_reserved(view)


def _outside(view: RankView) -> float | None:
    """The bytes of :func:`_held` that are not the rank's own PyTorch's: contexts, also of other
    ranks."""
    held, reserved = _held(view), peak_reserved(view)
    return None if held is None or reserved is None else held - reserved


def _total(view: RankView) -> int | None:
    gpu, gpus = view.header.gpu, view.header.gpus
    return gpus[gpu].memory_bytes if gpu is not None and gpu < len(gpus) else None


def _why_fuller(
    full: RankView, others: Sequence[RankView], more: float
) -> tuple[str, str, Confidence]:
    outside = [each for view in others if (each := _outside(view)) is not None]
    ours = _outside(full)
    if ours is not None and outside and ours - float(np.median(outside)) >= more / 2:
        return (
            "Most of it is outside its PyTorch: other ranks hold a context, or tensors, on its GPU",
            "call torch.cuda.set_device(local_rank) before anything else uses CUDA, and load "
            "checkpoints with map_location",
            "likely",
        )
    samples, usual = samples_per_step(full), _median_samples(others)
    if samples is not None and usual and samples > _MORE * usual:
        return (
            f"It has {samples:g} samples in a step, the others {usual:g}",
            "give all ranks batches of the same size",
            "likely",
        )
    if full.header.rank == 0:
        return (
            "Rank 0 keeps what the others do not: gathered states, an evaluation, outputs of all "
            "ranks",
            "`trainfit memory` names what is held; move it to the CPU, or divide it among ranks",
            "possible",
        )
    return (
        "Its batches hold longer samples, or its part of the model is larger",
        "bucket samples by length across ranks, or divide the model evenly",
        "possible",
    )


#: Samples of a step over the others' that are more.
_MORE: Final = 1.1


def _median_samples(ranks: Sequence[RankView]) -> float | None:
    found = [each for view in ranks if (each := samples_per_step(view)) is not None]
    return float(np.median(found)) if found else None


# ---
# Utilization of ranks' GPUs. A kernel of NCCL that waits for another rank counts as work: the rank
# with less to do shows no less than the others, and a GPU that shows less waits for something else.


def _find_uneven_utilization(run: RunView) -> Iterator[Finding | Unknown]:
    ranks = [view for view in run.ranks if view.header.gpu is not None]
    used = [(share, view) for view in ranks if (share := checks.utilization(view)) is not None]
    if len(used) < 2:
        return
    least, idle = min(used, key=lambda each: each[0])
    most, busy = max(used, key=lambda each: each[0])
    if most - least < thresholds.UNEVEN_UTILIZATION:
        return
    cause, fix, sure = _why_less(idle, busy)
    in_collectives = ((view, exposed_s(view)) for view in (busy, idle))
    yield Finding(
        _USE_KIND,
        "info",
        f"The GPU of rank {idle.header.rank} is used {percent(least)} of the time, that of rank "
        f"{busy.header.rank} {percent(most)}",
        (
            Evidence(f"utilization of rank {idle.header.rank}'s GPU", least),
            Evidence(f"utilization of rank {busy.header.rank}'s GPU", most),
            *(
                Evidence(f"rank {view.header.rank} in collectives", seconds, "s/step")
                for view, seconds in in_collectives
                if seconds is not None
            ),
        ),
        f"{cause}. A kernel that waits for other ranks counts as use, so more of it is not more "
        "work",
        (Fix(fix),),
        sure,
        rank=idle.header.rank,
    )


def _why_less(idle: RankView, busy: RankView) -> tuple[str, str, Confidence]:
    """Why one is used less than another."""
    names = [_gpu_name(view) for view in (idle, busy)]
    if all(names) and names[0] != names[1]:
        return (
            f"The GPUs differ: {names[0]} and {names[1]}; with equal batches the faster one waits",
            "give the faster GPU larger batches, or train on equal GPUs",
            "likely",
        )
    waits, theirs = input_share(idle), input_share(busy)
    if waits is not None and waits - (theirs or 0.0) >= thresholds.NOTICEABLE:
        return (
            f"Its rank waits for batches {percent(waits)} of the time, the other "
            f"{percent(theirs or 0.0)}: its data is slower, and the others wait for it",
            "fix that rank's DataLoader, storage or cores: see the other findings of this rank",
            "likely",
        )
    samples, usual = samples_per_step(idle), samples_per_step(busy)
    if samples is not None and usual is not None and usual > _MORE * samples:
        return (
            f"It has {samples:g} samples in a step, the other {usual:g}",
            "give all ranks batches of the same size",
            "likely",
        )
    return (
        "Neither its data, its samples nor its kind of GPU tell why",
        "compare traces of torch.profiler of both ranks",
        "possible",
    )


def _gpu_name(view: RankView) -> str:
    gpu, gpus = view.header.gpu, view.header.gpus
    return gpus[gpu].name if gpu is not None and gpu < len(gpus) else ""


RULES: Final = (
    Rule((_DATA_PARALLEL_KIND,), _find_data_parallel),
    Rule((_MEMORY_KIND,), _find_uneven_memory),
    Rule((_USE_KIND,), _find_uneven_utilization),
)
