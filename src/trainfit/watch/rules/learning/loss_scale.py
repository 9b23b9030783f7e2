"""Steps that GradScaler leaves out because gradients overflowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.results.watch.tables import STEP_SKIPPED
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.view import RunView, known
from trainfit.watch.rules.rule import Rule

#: Skipped steps at the least: the scale starts too high and is halved to its level.
_LEAST: Final = 3


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """After the warm-up, in which the scale finds its level."""
    view = run.judged
    scales = known(view.steps["loss_scale"])
    if not len(scales):
        return  # no GradScaler
    skipped = (view.steps["flags"] & STEP_SKIPPED) != 0
    half = len(skipped) // 2
    share = float(skipped.mean())
    if skipped.sum() < _LEAST or share < thresholds.SKIPPED or not skipped[half:].any():
        return
    yield Finding(
        "skipped_steps",
        "critical" if share >= thresholds.CRITICAL_SHARE else "warning",
        "GradScaler skips optimizer steps again and again",
        (
            Evidence("skipped", share),
            Evidence("loss scale at the end", float(scales[-1])),
            Evidence("largest loss scale", float(np.max(scales))),
        ),
        "gradients overflow in float16: these steps train nothing",
        "use bfloat16 where the GPU has it (Ampere and newer); else lower the learning rate, "
        "clip gradients, or lower GradScaler's growth",
        "certain",
        share,
    )


RULE: Final = Rule(("skipped_steps",), look, each_rank=True)
