"""Why a batch size is recommended, in words that a launch command and a report share."""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.results.format import count, percent
from trainfit.results.plan.configuration import BatchLimits
from trainfit.results.plan.result import PlanResult
from trainfit.results.plan.speed import KNEE


def batch_reasons(result: PlanResult, best: int, limits: BatchLimits) -> Iterator[str]:
    """Why this one, what else bounds it, and what it makes of an epoch."""
    memory, data_set = limits.memory, limits.data_set
    if limits.reason:
        yield limits.reason
    elif best == data_set:
        yield "the whole data set"
    elif memory is None or best >= memory:
        yield f"largest batch {_margin(result)}"
    elif limits.trains is not None:
        yield f"smallest that trains {percent(KNEE)} as fast as any at this noise scale"
    else:
        yield f"smallest with {percent(KNEE)} of the best throughput"
    if data_set is not None and (memory is None or data_set <= memory):
        yield f"the data set has {data_set} samples"
    elif memory is not None and best < memory:
        at_least = "at least " if limits.at_least else ""
        yield f"largest batch {_margin(result)}: {at_least}{memory}"
    if limits.epoch_steps is not None:
        yield f"an epoch is then {count(limits.epoch_steps, 'step')}"


def _margin(result: PlanResult) -> str:
    share = percent(result.headroom_share, decimals=1)
    if result.headroom_is_set:
        return f"with {share} of the GPU left free, as set"
    return f"with a {share} safety margin"
