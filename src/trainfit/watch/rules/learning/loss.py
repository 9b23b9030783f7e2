"""A loss that is NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.results.watch.tables import LOSS_FINITE, LOSS_NOT_FINITE
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.rule import Rule


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """From the first step on: a NaN in the warm-up is one, too."""
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


RULE: Final = Rule(("loss_not_finite",), look)
