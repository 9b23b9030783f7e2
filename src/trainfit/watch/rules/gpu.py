"""What keeps GPUs below their speed: clocks, precision, small batches, and GPUs of a run that are
not used alike: memory, utilization ("90 against 50%"), DataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainfit.findings.habits import DATA_PARALLEL, FLOAT32, autocast
from trainfit.results.findings import Confidence, Evidence, Finding, Fix, Unknown
from trainfit.results.runs.tables import Table
from trainfit.results.text import GIB, percent
from trainfit.watch import checks, thresholds
from trainfit.watch.measures import (
    exposed_s,
    input_share,
    mfu,
    peak_reserved,
    peak_share,
    samples_per_step,
)
from trainfit.watch.rules.ranks import find_uneven_ranks
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import RankView, RunView, known, median, percentile

# ---
# A GPU that runs below its clock while it is at work: heat, the power limit, clocks that were set.
#
# A GPU that waits for input lowers its clocks by itself: only samples in which it is at work count.


#: Samples of a busy GPU that a verdict needs: two seconds.
_LEAST_SAMPLES: Final = 20
_KINDS: Final = ("thermal_throttling", "power_throttling", "clocks_set")


def _find_low_clocks(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on the clocks of each rank's GPU."""
    for view in run.ranks:
        if view.header.gpu is None:
            continue
        busy = _at_work(view)
        if len(busy) < _LEAST_SAMPLES:
            if len(view.steps):
                reason, needs = _missing(view)
                yield from (Unknown(kind, reason, needs) for kind in _KINDS)
            continue
        yield from _judged(view, busy)


def _missing(view: RankView) -> tuple[str, str]:
    if not len(known(view.gpu["utilization"])):
        return "NVML was not readable", "the NVIDIA driver's NVML in the container"
    return "the GPU was idle in most samples", "a run that keeps the GPU busy"


def _at_work(view: RankView) -> Table:
    table: Table = view.gpu[view.gpu["utilization"] >= thresholds.BUSY_SAMPLE]
    rows: Table = table[table["clock_reasons"] >= 0]
    return rows


def _judged(view: RankView, busy: Table) -> Iterator[Finding]:
    reasons = busy["clock_reasons"]
    found = (
        ("thermal_throttling", thresholds.THERMAL),
        ("power_throttling", thresholds.POWER_CAP),
        ("clocks_set", thresholds.SET_CLOCKS),
    )
    for kind, bits in found:
        slowed = busy[(reasons & bits) != 0]
        if len(slowed) < thresholds.REASON_SHARE * len(busy):
            continue
        loss = _loss(busy, slowed)
        if loss is not None and loss >= thresholds.CLOCK_LOSS:
            yield _finding(kind, view, busy, slowed, loss)
            return  # heat first: a hot GPU meets its power limit, too


def _loss(busy: Table, slowed: Table) -> float | None:
    """The loss of clock, in the samples that show the reason: against those that do not, or the
    GPU's largest clock where all do; weighted by how many they are."""
    ours = known(slowed["sm_hz"])
    free = known(busy[~np.isin(busy["time_s"], slowed["time_s"])]["sm_hz"])
    full = known(busy["max_sm_hz"])
    best = float(np.median(free)) if len(free) >= _LEAST_SAMPLES else None
    if best is None:
        best = float(full.max()) if len(full) else None
    if best is None or not len(ours) or best <= 0:
        return None
    return max(0.0, 1 - float(ours.mean()) / best) * len(slowed) / len(busy)


def _finding(kind: str, view: RankView, busy: Table, slowed: Table, loss: float) -> Finding:
    evidence = [
        Evidence("clock while slowed", float(known(slowed["sm_hz"]).mean()) / 1e6, "MHz"),
        Evidence("share of busy samples with the reason", len(slowed) / len(busy)),
    ]
    heat = percentile(slowed["temperature_c"], 95)
    if heat is not None:
        evidence.append(Evidence("temperature, 95th percentile", heat, "°C"))
    power = percentile(slowed["power_w"], 50)
    if power is not None:
        evidence.append(Evidence("power, median", power, "W"))
    words = {
        "thermal_throttling": (
            "The GPU lowers its clock because it is hot",
            "cooling does not remove enough heat",
            "improve the airflow, clean the fans, or lower the power limit (nvidia-smi -pl WATTS)",
        ),
        "power_throttling": (
            "The power limit lowers the GPU's clock",
            "the GPU draws as much power as its limit allows",
            "raise the limit where the board allows it (nvidia-smi -q -d POWER shows the range)",
        ),
        "clocks_set": (
            "Clocks were set below what the GPU can do",
            "application clocks or a clock lock (nvidia-smi -ac, -lgc)",
            "reset them: nvidia-smi -rac; nvidia-smi -rgc",
        ),
    }
    title, cause, action = words[kind]
    sure: Confidence = "certain" if len(slowed) > 0.5 * len(busy) else "likely"
    return Finding(
        kind,
        severity(loss),
        title,
        tuple(evidence),
        cause,
        (Fix(action),),
        sure,
        loss,
        rank=view.rank,
    )


CLOCKS: Final = Rule(_KINDS, _find_low_clocks)


# ---
# Training in 32 bits on a GPU with Tensor cores that is the limit of the run.


#: Tensor cores begin with Volta, bfloat16 with Ampere.
_TENSOR_CORES: Final = (7, 0)
_BFLOAT16: Final = (8, 0)


def _find_amp_off(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on the precision of the judged rank."""
    view = run.judged
    gpu = view.header.gpu
    if gpu is None or gpu >= len(view.header.gpus) or not len(view.steps):
        return
    capability = view.header.gpus[gpu].capability
    if capability is None or view.header.precision == "unknown":
        yield Unknown("amp_off", "precision or GPU is not known", "a run with steps on a GPU")
        return
    full = view.header.precision in ("float32", "tf32") and not view.header.autocast
    if capability < _TENSOR_CORES or not full:
        return
    idle = checks.idle_share(view)
    if idle is None or 1 - idle < thresholds.GPU_BOUND:
        return  # a faster GPU would wait longer
    kind = "bfloat16" if capability >= _BFLOAT16 else "float16"
    scaler = "" if kind == "bfloat16" else ", with torch.amp.GradScaler"
    yield Finding(
        "amp_off",
        "warning",
        f"The GPU is the limit and computes in {view.header.precision}",
        (Evidence("GPU busy", 1 - idle), Evidence("compute capability", _number(capability))),
        FLOAT32.cause,
        (
            Fix(
                f"{FLOAT32.action}, in {kind}{scaler}; "
                "`trainfit plan` says what it saves for this script",
                line=autocast(kind),
            ),
        ),
        "likely",
    )


def _number(capability: tuple[int, int]) -> float:
    return capability[0] + capability[1] / 10


PRECISION: Final = Rule(("amp_off",), _find_amp_off, each_rank=True)


# ---
# Other processes on the run's GPU.


def _find_shared_gpu(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on other processes on each rank's GPU; silent where NVML does not tell processes
    apart."""
    for view in run.ranks:
        gpu = view.header.gpu
        if gpu is None or gpu >= len(view.header.gpus):
            continue
        total, others = view.header.gpus[gpu].memory_bytes, median(view.gpu["others_bytes"])
        if not total or others is None or others < thresholds.OTHERS_MEMORY * total:
            continue
        yield Finding(
            "gpu_shared",
            "warning",
            "Other processes are on this GPU",
            (Evidence("memory of other processes", others / 2**30, "GiB"),),
            "their kernels compete with this run's, and they use memory that it may need",
            (
                Fix(
                    "list them with nvidia-smi; stop them or choose another GPU with "
                    "CUDA_VISIBLE_DEVICES"
                ),
            ),
            "certain",
            rank=view.rank,
        )


SHARING: Final = Rule(("gpu_shared",), _find_shared_gpu)


# ---
# A GPU that is always at work and does little: small kernels, small batches.
#
# NVML's utilisation is the share of time in which at least one kernel runs: 100% is not full.


def _find_low_utilization(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on the FLOPs of the judged rank."""
    view = run.judged
    if view.header.gpu is None or not len(view.steps):
        return
    idle = checks.idle_share(view)
    if idle is None or 1 - idle < thresholds.GPU_BOUND:
        return  # something else is the limit, and has rules of its own
    if any(isinstance(rank, Finding) for rank in find_uneven_ranks(run)):
        return  # the time that ranks wait for one another says nothing of their batches
    used, active = mfu(view), median(view.gpu["sm_active"])
    if used is None and active is None:
        reason = "neither the model's FLOPs nor counters of the multiprocessors were measured"
        yield Unknown("low_mfu", reason, "a GPU in the catalogue, or GPM (Hopper and newer)")
        return
    low = used is not None and used < thresholds.LOW_MFU
    small = active is not None and active < thresholds.SMALL_KERNELS
    if not (low or small):
        return
    evidence = [Evidence("GPU busy", 1 - idle)]
    evidence += [] if used is None else [Evidence("MFU", used)]
    evidence += [] if active is None else [Evidence("multiprocessors busy", active)]
    room = peak_share(view)
    if room is not None and room < thresholds.ROOMY:
        evidence.append(Evidence("GPU memory reserved at the peak", room))
        yield Finding(
            "small_batch",
            "warning",
            "The batch is too small to fill the GPU",
            tuple(evidence),
            "kernels are too small for its multiprocessors, and memory is left for a larger batch",
            (
                Fix(
                    "run `trainfit plan` on this command: it gives the batch size at which the "
                    "GPU is saturated, and what fits"
                ),
            ),
            "likely" if small else "possible",
        )
    else:
        yield Finding(
            "low_mfu",
            "info",
            "The GPU is always busy and far from its peak",
            tuple(evidence),
            "its time goes to kernels that move memory or are small, not to matmuls",
            (
                Fix(
                    "try torch.compile, fused optimizers and channels-last convolutions; a profile "
                    "(torch.profiler) names the kernels"
                ),
            ),
            "possible",
        )


UTILIZATION: Final = Rule(("small_batch", "low_mfu"), _find_low_utilization, each_rank=True)


RULES = (CLOCKS, PRECISION, UTILIZATION, SHARING)


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
    uses = []
    for number in np.unique(rows["gpu"]):
        of_gpu = rows[rows["gpu"] == number]
        held, used = median(of_gpu["ours_bytes"]), known(of_gpu["utilization"])
        enough = len(used) >= thresholds.LEAST_SAMPLES
        if held:
            mean = float(np.mean(used)) if enough else None
            uses.append(_GpuUse(int(number), mean, held))
    return uses


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
    held = [use.held_bytes for use in others if use.held_bytes is not None]
    if first.held_bytes is not None and held:
        yield Evidence(f"memory of GPU {first.number}", first.held_bytes / GIB, "GiB")
        yield Evidence("memory of the others, most", max(held) / GIB, "GiB")
    used = [use.utilization for use in others if use.utilization is not None]
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
    values = [each for view in ranks if (each := samples_per_step(view)) is not None]
    return float(np.median(values)) if values else None


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


UNEVEN_GPUS: Final = (
    Rule((_DATA_PARALLEL_KIND,), _find_data_parallel),
    Rule((_MEMORY_KIND,), _find_uneven_memory),
    Rule((_USE_KIND,), _find_uneven_utilization),
)
