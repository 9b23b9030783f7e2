"""The training stands still while checkpoints are written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "checkpoint_stalls"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    lost = gpu_time.column(rank, "checkpoint_s")
    share = checks.share_of(rank, lost)
    places = np.flatnonzero(lost > 0)
    if share < thresholds.NOTICEABLE:
        return
    if len(places) < thresholds.LEAST_EVENTS:
        yield Unknown(KIND, "only one checkpoint was written", "watch two checkpoints")
        return
    every = float(np.median(np.diff(places)))
    wanted = math.ceil(
        every
        * share
        * (1 - thresholds.CHECKPOINTS_WANTED)
        / (thresholds.CHECKPOINTS_WANTED * max(1 - share, 1e-3))
    )
    seconds = float(np.median(lost[places]))
    yield Finding(
        KIND,
        severity(share),
        f"Writing checkpoints costs {checks.in_percent(share)} of the time",
        (
            Evidence("a checkpoint", seconds, "s"),
            Evidence("checkpoints", float(len(places))),
            Evidence("steps between them", every),
        ),
        "torch.save copies from the GPU and writes while the training waits",
        f"write a checkpoint every {wanted} steps ({thresholds.CHECKPOINTS_WANTED:.0%} of the "
        "time), write to a local disk, or write in the background "
        "(torch.distributed.checkpoint.async_save)",
        "certain",
        share,
        {"checkpoint_every_steps": str(wanted)},
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
