"""Ranks that wait for one another: a straggler, uneven work, DataParallel.

Data-parallel ranks all take as long as the slowest: gradients are averaged within the backward
pass, where the others wait. What tells them apart is each one's own work: everything but the
backward pass, and that at the least that any rank needs for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.results.watch.tables import Table
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.view import PHASES, RankView, RunView
from trainfit.watch.rules.rule import Rule, severity

#: Blocks of steps in which a rank must be behind; of these, those in which it may be ahead; and the
#: percentile of its blocks that is its best pace.
_LEAST_BLOCKS: Final = 3
_LEAST: Final = _LEAST_BLOCKS * thresholds.BLOCK_STEPS
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


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """Compare the ranks."""
    header = run.run.header
    if header.distributed == "data_parallel" and header.gpu is not None:
        yield Finding(
            "data_parallel", "warning", "DataParallel drives all GPUs from one process", (),
            "it copies the model to each GPU in every step, and Python launches for all of them",
            "use DistributedDataParallel with torchrun: one process per GPU",
            "certain",
        )  # fmt: skip
    world = run.run.header.world_size
    if world < 2:
        return
    if len(run.ranks) < world:
        reason = f"{len(run.ranks)} of {world} ranks were recorded"
        yield Unknown("straggler", reason, "the folders of the other machines, merged")
    ranks = [view for view in run.ranks if len(view.steps) >= _LEAST]
    if len(ranks) < 2:
        yield Unknown("straggler", "too few steps", f"{_LEAST} steps of two ranks")
        return
    yield from _straggler(ranks)


def _straggler(ranks: list[RankView]) -> Iterator[Finding | Unknown]:
    steps = [_common(view, ranks) for view in ranks]
    if len(steps[0]) < _LEAST:
        yield Unknown("straggler", "too few steps that all ranks have", f"{_LEAST} such steps")
        return
    work = np.array([[_seconds(each, part) for part in _PARTS] for each in steps])
    step_s = max(float(np.nanmedian(each["step_s"])) for each in steps)
    own, mean = work.sum(axis=1), work.mean(axis=2)
    slowest = int(own.mean(axis=1).argmax())
    others = np.delete(np.arange(len(ranks)), slowest)
    lag = float(mean.sum(axis=1)[slowest] - np.median(mean.sum(axis=1)[others]))
    least = thresholds.STRAGGLER * step_s
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
        f"compare {name} of rank {rank}'s machine with the others'; give all ranks as much work",
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


RULE: Final = Rule(("straggler", "data_parallel"), look)
