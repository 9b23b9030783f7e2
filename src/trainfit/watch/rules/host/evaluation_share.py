"""How much of the time evaluation takes: no fault, but often a surprise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.rule import Rule

KIND: Final = "evaluation_share"
#: Steps between evaluations up to which they are hardly any: nobody evaluates after each step.
_NEARLY_EACH: Final = 3


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    spent = gpu_time.column(rank, "evaluation_s")
    share = checks.share_of(rank, spent)
    places = np.flatnonzero(spent > 0)
    if share < thresholds.WARNING_SHARE:
        return
    if len(places) < thresholds.LEAST_EVENTS:
        yield Unknown(KIND, "only one evaluation ran", "watch two evaluations")
        return
    between = float(np.median(np.diff(places)))
    if between <= _NEARLY_EACH:
        yield _within_training(share, spent[places], between)
        return
    yield Finding(
        KIND,
        "info",
        f"Evaluation uses {checks.in_percent(share)} of the time",
        (
            Evidence("an evaluation", float(np.median(spent[places])), "s"),
            Evidence("evaluations", float(len(places))),
            Evidence("steps between them", between),
        ),
        "The training waits while the model is evaluated",
        "evaluate less often or on fewer samples, if that is more than you want; a larger batch "
        "fits without gradients",
        "certain",
        share,
    )


def _within_training(share: float, seconds: gpu_time.Seconds, between: float) -> Finding:
    """Rollouts of reinforcement learning, or a teacher's or target network's outputs."""
    return Finding(
        KIND,
        "info",
        f"Forward passes without gradients use {checks.in_percent(share)} of the time",
        (
            Evidence("those between two training steps", float(np.median(seconds)), "s"),
            Evidence("steps between them", between),
        ),
        "Nearly every training step waits for a model in evaluation mode, and for what follows "
        "from its outputs: a rollout, a teacher's or a target's outputs, or an evaluation",
        "run more samples in each such pass, or train more steps between them if the method allows",
        "likely",
        share,
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
