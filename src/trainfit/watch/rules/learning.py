"""Rules on the numbers of a training: a loss that is not finite, steps that GradScaler skips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.results.watch.tables import LOSS_FINITE, LOSS_NOT_FINITE, STEP_SKIPPED
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.view import RunView, known
from trainfit.watch.rules.rule import Rule

#: Skipped steps at the least: the scale starts too high and is halved to its level.
_LEAST_SKIPPED: Final = 3


def _loss(run: RunView) -> Iterator[Finding | Unknown]:
    """A loss that is NaN or infinite, from the first step on: the warm-up counts, too."""
    for view in run.ranks:
        steps = view.record.steps
        looked = (steps["flags"] & (LOSS_FINITE | LOSS_NOT_FINITE)) != 0
        if not looked.any():
            if len(steps):
                needs = "a backward() of a single number"
                yield Unknown("loss_not_finite", "no loss was seen", needs)
            continue
        bad = steps[(steps["flags"] & LOSS_NOT_FINITE) != 0]
        if not len(bad):
            continue
        half = view.header.autocast == "float16" or view.header.precision == "float16"
        yield Finding(
            "loss_not_finite",
            "critical",
            f"The loss is NaN or infinite from step {int(bad['step'][0])} on"
            if len(bad) > len(steps) // 2 or bad["step"][-1] == steps["step"][-1]
            else "The loss was NaN or infinite",
            (
                Evidence("first step", int(bad["step"][0])),
                Evidence("steps", len(bad)),
                Evidence("of", int(looked.sum())),
            ),
            "float16 overflows above 65504" if half else "a number overflowed or was divided by 0",
            "use bfloat16, or a GradScaler with float16" if half else
            "find the operator with torch.autograd.set_detect_anomaly(True); lower the learning "
            "rate or clip gradients",
            "certain",
            rank=view.rank,
            first_step=int(bad["step"][0]),
            last_step=int(bad["step"][-1]),
        )  # fmt: skip


def _loss_scale(run: RunView) -> Iterator[Finding | Unknown]:
    """Steps that GradScaler skips after the warm-up, in which the scale finds its level."""
    view = run.judged
    scales = known(view.steps["loss_scale"])
    if not len(scales):
        return  # no GradScaler
    skipped = (view.steps["flags"] & STEP_SKIPPED) != 0
    half = len(skipped) // 2
    share = float(skipped.mean())
    if skipped.sum() < _LEAST_SKIPPED or share < thresholds.SKIPPED or not skipped[half:].any():
        return
    yield Finding(
        "skipped_steps",
        "critical" if share >= thresholds.CRITICAL_SHARE else "warning",
        "GradScaler keeps skipping optimizer steps",
        (
            Evidence("skipped", share),
            Evidence("loss scale at the end", float(scales[-1])),
            Evidence("largest loss scale", float(np.max(scales))),
        ),
        "gradients overflow in float16: skipped steps do not update the weights",
        "use bfloat16 where the GPU has it (Ampere and newer); else lower the learning rate, "
        "clip gradients, or lower GradScaler's growth",
        "certain",
        share,
    )


RULES: Final = (
    Rule(("loss_not_finite",), _loss),
    Rule(("skipped_steps",), _loss_scale, each_rank=True),
)
