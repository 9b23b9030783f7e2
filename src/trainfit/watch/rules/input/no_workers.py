"""Batches are made in the process that trains, which waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Confidence, Evidence, Finding, Unknown
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.input.fetching import Fetching, is_measured
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "no_workers"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few or not is_measured(rank):
        return
    fetching = Fetching(rank)
    most = fetching.most_workers
    if fetching.workers != 0 or most == 0 or fetching.is_cheap:
        return  # where workers would not help, input_bound says what is left to do
    share = checks.share_of(rank, fetching.lost)
    if share < thresholds.NOTICEABLE or not checks.lasts(rank, fetching.lost):
        return
    value, confidence = _value(fetching)
    evidence = [
        Evidence("making batches", share * rank.seconds / len(rank.steps), "s/step"),
        Evidence("num_workers", 0.0),
    ]
    step_s = gpu_time.step_without_input(rank)
    if step_s is not None:
        evidence.append(Evidence("step without that", step_s, "s"))
    if fetching.cores is not None:
        evidence.append(Evidence("idle cores", fetching.cores.idle, "cores"))
    yield Finding(
        KIND,
        severity(share),
        f"The main process loads the batches itself, {checks.in_percent(share)} of the time",
        tuple(evidence),
        "num_workers=0: the training waits while each batch is loaded",
        f"set num_workers={value} and persistent_workers=True",
        confidence,
        share,
        {"num_workers": str(value), "persistent_workers": "True"},
    )


def _value(fetching: Fetching) -> tuple[int, Confidence]:
    needed, most = fetching.needed_workers, fetching.most_workers
    if needed is None:
        return 1, "possible"
    return (needed, "likely") if most is None else (min(needed, most), "certain")


RULE: Final = Rule((KIND,), _look, each_rank=True)
