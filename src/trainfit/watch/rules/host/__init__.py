"""Rules about the host: its threads, launches, synchronisations, stalls, and its other users."""

from __future__ import annotations

from typing import Final

from trainfit.watch.rules.host import (
    cgroup_throttling,
    checkpoint_stalls,
    copies,
    cpu_contention,
    evaluation_share,
    hidden_syncs,
    host_bound_launches,
    one_hot_thread,
    script_waits,
    swapping,
    thread_oversubscription,
)
from trainfit.watch.rules.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    thread_oversubscription.RULE,
    host_bound_launches.RULE,
    hidden_syncs.RULE,
    copies.RULE,
    checkpoint_stalls.RULE,
    evaluation_share.RULE,
    cgroup_throttling.RULE,
    swapping.RULE,
    cpu_contention.RULE,
    one_hot_thread.RULE,
    script_waits.RULE,
)
