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
    yield Finding(
        KIND,
        "info",
        f"Evaluation uses {checks.in_percent(share)} of the time",
        (
            Evidence("an evaluation", float(np.median(spent[places])), "s"),
            Evidence("evaluations", float(len(places))),
            Evidence("steps between them", float(np.median(np.diff(places)))),
        ),
        "The training waits while the model is evaluated",
        "evaluate less often or on fewer samples, if that is more than you want; a larger batch "
        "fits without gradients",
        "certain",
        share,
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
