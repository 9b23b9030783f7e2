"""The price of a remedy, and the order that follows from it.

The price is in percent of a training step's compute:

- 1 for the line to change: nothing is free;
- what the step computes more, by FLOPs or by bytes moved, whichever grew more (a remedy that
  saves compute is not paid for it: it was asked for memory);
- 100 if the training becomes another one (other optimizer, frozen part, smaller images): to
  know whether it is as good, it has to be done once more.

Remedies are ordered by bytes of device memory won for each percent. Where that is equal to
two digits, the order of the project's seed articles decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainfit.results.plan.remedies import Changes, ExtraCompute, Remedy
from trainfit.results.runs.trace import Compute

_A_LINE = 1.0
_ANOTHER_TRAINING = 100.0


def extra_compute(before: Compute | None, after: Compute | None) -> ExtraCompute | None:
    """How much more a step computes; ``None`` where one of both is not known."""
    if before is None or after is None:
        return None
    return ExtraCompute(
        flops_share=_more(before.flops, after.flops),
        traffic_share=_more(before.traffic_bytes, after.traffic_bytes),
        operators_share=_more(before.operators, after.operators),
    )


def cost_percent(extra: ExtraCompute | None, changes: Changes) -> float:
    """The price in percent of a step's compute, by the rule above."""
    more = max(0.0, extra.flops_share, extra.traffic_share) if extra is not None else 0.0
    return _A_LINE + 100 * more + (_ANOTHER_TRAINING if changes == "training" else 0.0)


def ordered(items: Iterable[Remedy], seed_order: Sequence[str]) -> tuple[Remedy, ...]:
    """Best first; then what wins nothing, what failed, and what does not apply."""

    def key(remedy: Remedy) -> tuple[int, float, int]:
        at = seed_order.index(remedy.name)
        if remedy.saved_bytes is None or remedy.cost_percent is None:
            return (2 if remedy.status == "failed" else 3), 0.0, at
        value = remedy.saved_bytes / remedy.cost_percent
        return (0 if value > 0 else 1), -_two_digits(value), at

    return tuple(sorted(items, key=key))


def _more(before: int, after: int) -> float:
    return after / before - 1 if before else 0.0


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")
