"""Ranks that wait for one another: a straggler, uneven work, DataParallel.

Data-parallel ranks all take as long as the slowest: gradients are averaged within the backward
pass, where the others wait. What tells them apart is each one's own work: everything but the
backward pass, and that at the least that any rank needs for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.view import PHASES, RankView, RunView, median
from trainfit.watch.rules.rule import Rule, severity

#: Steps that a rank must have.
_LEAST: Final = 20
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


def _straggler(ranks: list[RankView]) -> Iterator[Finding]:
    work = np.array([[_mean(view, part) for part in _PARTS] for view in ranks])
    step_s = max(median(view.steps["step_s"]) or 0.0 for view in ranks)
    own = work.sum(axis=1)
    slowest = int(own.argmax())
    others = np.delete(np.arange(len(ranks)), slowest)
    lag = float(own[slowest] - np.median(own[others]))
    if not step_s or lag < thresholds.STRAGGLER * step_s:
        return
    part = int((work[slowest] - np.median(work[others], axis=0)).argmax())
    name = list(_PARTS.values())[part]
    rank, share = ranks[slowest].header.rank, lag / step_s
    yield Finding(
        "straggler",
        severity(share),
        f"Rank {rank} is slower than the others, which wait for it",
        (
            Evidence(f"own work of rank {rank}", float(own[slowest]), "s/step"),
            Evidence("own work of the others, median", float(np.median(own[others])), "s/step"),
        ),
        f"most of the difference is {name}",
        f"compare {name} of rank {rank}'s machine with the others'; give all ranks as much work",
        "likely",
        share,
        rank=rank,
    )


def _mean(view: RankView, part: str) -> float:
    """Seconds of a part in the steps; those of the GPU where they are longer. "other" is what no
    phase covers, waiting for the GPU or in the backward pass included among the phases."""
    if part == "other":
        covered = sum(np.nan_to_num(view.steps[f"{name}_s"]) for name in PHASES)
        return float(np.maximum(0.0, np.nan_to_num(view.steps["step_s"]) - covered).mean())
    host = np.nan_to_num(view.steps[f"{part}_s"])
    if part in ("forward", "optimizer", "copy"):
        host = np.fmax(host, np.nan_to_num(view.steps[f"gpu_{part}_s"]))
    return float(host.mean())


RULE: Final = Rule(("straggler", "data_parallel"), look)
