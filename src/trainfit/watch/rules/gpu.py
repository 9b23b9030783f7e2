"""What keeps a GPU below its speed: clocks, precision, small batches, uneven ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.findings.habits import DATA_PARALLEL, FLOAT32, autocast
from trainfit.results.findings import Confidence, Evidence, Finding, Fix, Unknown
from trainfit.results.runs.tables import Table
from trainfit.watch import checks, thresholds
from trainfit.watch.measures import mfu, peak_share
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import PHASES, RankView, RunView, known, median, percentile

# ---
# A GPU that runs below its clock while it is at work: heat, the power limit, clocks that were set.
#
# A GPU that waits for input lowers its clocks by itself: only samples in which it is at work count.


#: Samples of a busy GPU that a verdict needs: two seconds.
_LEAST_SAMPLES: Final = 20
_KINDS: Final = ("thermal_throttling", "power_throttling", "clocks_set")


def _find_low_clocks(run: RunView) -> Iterator[Finding | Unknown]:
    """Of each rank's GPU."""
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
    """Of the clock, in the samples that show the reason: against those that do not, or the
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
    """Of the judged rank."""
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
# Ranks that wait for one another: a straggler, uneven work, DataParallel.
#
# Data-parallel ranks all take as long as the slowest: gradients are averaged within the backward
# pass, where the others wait. What tells them apart is each one's own work: everything but the
# backward pass, and that at the least that any rank needs for it.


#: Blocks of steps in which a rank must be behind; of these, those in which it may be ahead; and the
#: percentile of its blocks that is its best pace.
_LEAST_BLOCKS: Final = 3
_LEAST_STEPS: Final = _LEAST_BLOCKS * thresholds.BLOCK_STEPS
_IN_TURNS: Final = 0.25
_AT_BEST: Final = 25
_PARTS: Final = {
    "input": "its DataLoader",
    "copy": "copies to the GPU",
    "forward": "the forward pass",
    "optimizer": "the optimizer",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations",
    "other": "Python code between the phases",
}


def _find_uneven_ranks(run: RunView) -> Iterator[Finding | Unknown]:
    """Compare the ranks."""
    header = run.run.header
    if header.distributed == "data_parallel" and header.gpu is not None:
        yield Finding(
            "data_parallel",
            "warning",
            "DataParallel drives all GPUs from one process",
            (),
            DATA_PARALLEL.cause,
            (Fix(DATA_PARALLEL.action),),
            "certain",
        )
    world = run.run.header.world_size
    if world < 2:
        return
    if len(run.ranks) < world:
        reason = f"{len(run.ranks)} of {world} ranks were recorded"
        yield Unknown("straggler", reason, "the folders of the other machines, merged")
    ranks = [view for view in run.ranks if len(view.steps) >= _LEAST_STEPS]
    if len(ranks) < 2:
        yield Unknown("straggler", "too few steps", f"{_LEAST_STEPS} steps of two ranks")
        return
    yield from _straggler(ranks)


def _straggler(ranks: list[RankView]) -> Iterator[Finding | Unknown]:
    steps = [_common(view, ranks) for view in ranks]
    if len(steps[0]) < _LEAST_STEPS:
        yield Unknown(
            "straggler", "too few steps that all ranks have", f"{_LEAST_STEPS} such steps"
        )
        return
    work = np.array([[_seconds(each, part) for part in _PARTS] for each in steps])
    step_s = max(float(np.nanmedian(each["step_s"])) for each in steps)
    own, mean = work.sum(axis=1), work.mean(axis=2)
    slowest = int(own.mean(axis=1).argmax())
    others = np.delete(np.arange(len(ranks)), slowest)
    lag = float(mean.sum(axis=1)[slowest] - np.median(mean.sum(axis=1)[others]))
    least = thresholds.STRAGGLER * step_s
    held_up = np.array([CoreWaits(view).held_up_by_others or 0.0 for view in ranks])
    # By what other programs take of its core more than of the others' it is not slower itself.
    lag -= step_s * max(0.0, float(held_up[slowest] - np.median(held_up[others])))
    if lag < least or not _lasting(own, slowest, least):
        return
    part = int((mean[slowest] - np.median(mean[others], axis=0)).argmax())
    name = list(_PARTS.values())[part]
    rank, share = ranks[slowest].header.rank, lag / step_s
    yield Finding(
        "straggler",
        severity(share),
        f"Rank {rank} is slower than the others, which wait for it",
        (
            Evidence(f"own work of rank {rank}", float(mean[slowest].sum()), "s/step"),
            Evidence(
                "own work of the others, median",
                float(np.median(mean.sum(axis=1)[others])),
                "s/step",
            ),
        ),
        f"most of the difference is {name}",
        (
            Fix(
                f"compare {name} of rank {rank}'s machine with the others'; give all ranks as "
                "much work"
            ),
        ),
        "likely",
        share,
        rank=rank,
    )


def _common(view: RankView, ranks: list[RankView]) -> Table:
    """Its steady steps that all ranks have."""
    shared = functools.reduce(np.intersect1d, [each.steps["step"] for each in ranks])
    _, places = np.unique(view.steps["step"], return_index=True)
    steps: Table = view.steps[places]
    steps = steps[np.isin(steps["step"], shared)]
    return steps


def _lasting(own: NDArray[np.float64], slowest: int, least: float) -> bool:
    """Is a rank ``least`` seconds a step behind the others' median, and not by chance? ``own`` is
    each rank's own work in each step (a row a rank).

    Other programs hold up one rank or the other, for a while, and only ever make its work longer:
    a rank that is slow by itself is so in its best blocks of steps, too, and hardly ever ahead.
    """
    length = thresholds.BLOCK_STEPS
    starts = np.arange(0, own.shape[1] - length + 1, length)
    blocks = np.add.reduceat(own[:, : len(starts) * length], starts, axis=1) / length
    others = np.delete(blocks, slowest, axis=0)
    behind = blocks[slowest] - np.median(others, axis=0)
    at_best = np.percentile(blocks, _AT_BEST, axis=1)
    gap = at_best[slowest] - np.median(np.delete(at_best, slowest))
    later, earlier = int(np.sum(behind >= least)), int(np.sum(behind <= -least))
    often = max(_LEAST_BLOCKS, thresholds.LASTING * len(starts))
    return bool(gap >= least and later >= often and earlier <= _IN_TURNS * later)


def _seconds(steps: Table, part: str) -> NDArray[np.float64]:
    """Of a part in each of the steps; those of the GPU where they are longer. "other" is what no
    phase covers, waiting for the GPU or in the backward pass included among the phases."""
    if part == "other":
        covered = np.sum([_column(steps, f"{name}_s") for name in PHASES], axis=0)
        rest: NDArray[np.float64] = np.maximum(0.0, _column(steps, "step_s") - covered)
        return rest
    host = _column(steps, f"{part}_s")
    if part in ("forward", "optimizer", "copy"):
        host = np.fmax(host, _column(steps, f"gpu_{part}_s"))
    return host


def _column(steps: Table, name: str) -> NDArray[np.float64]:
    return np.nan_to_num(np.asarray(steps[name], dtype=np.float64))


RANKS: Final = Rule(("straggler", "data_parallel"), _find_uneven_ranks)


# ---
# Other processes on the run's GPU.


def _find_shared_gpu(run: RunView) -> Iterator[Finding | Unknown]:
    """Of each rank's GPU; silent where NVML does not tell processes apart."""
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
    """Of the judged rank."""
    view = run.judged
    if view.header.gpu is None or not len(view.steps):
        return
    idle = checks.idle_share(view)
    if idle is None or 1 - idle < thresholds.GPU_BOUND:
        return  # something else is the limit, and has rules of its own
    if any(isinstance(each, Finding) for each in _find_uneven_ranks(run)):
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


RULES = (CLOCKS, PRECISION, UTILIZATION, RANKS, SHARING)
