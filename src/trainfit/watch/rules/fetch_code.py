"""What those who make batches wait for, by looks at their stacks."""

from __future__ import annotations

from collections import Counter
from typing import Final

from trainfit.results.runs.watched import CodeLine, StackLooks, WaitsFor
from trainfit.watch import thresholds

#: Looks that tell what batches wait for; of them, those at a lock from which it is what holds
#: batches up.
LEAST_LOOKS: Final = 10
_LOCKED: Final = 0.2


def waits_for(looks: StackLooks) -> tuple[WaitsFor, float, CodeLine | None]:
    """What batches wait for most: its share of the looks, and the line. "" where too few looks
    found them waiting."""
    if looks.looks < LEAST_LOOKS:
        return "", 0.0, None
    counts: Counter[WaitsFor] = Counter()
    for line in looks.lines:
        counts[line.waits_for] += line.count
    # Whoever holds a lock computes, reads or sleeps: the others' wait is what limits.
    if counts["lock"] >= _LOCKED * looks.looks:
        kind: WaitsFor = "lock"
    else:
        waits: list[WaitsFor] = ["sleep", "network", "disk", "lock"]
        kind = max(waits, key=lambda each: counts[each])
    share = counts[kind] / looks.looks
    if share < thresholds.CRITICAL_SHARE and kind != "lock":
        return "", 0.0, None
    lines = [each for each in looks.lines if each.waits_for == kind]
    return kind, share, max(lines, key=lambda each: each.count, default=None)
