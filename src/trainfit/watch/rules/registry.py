"""All rules, from the tuples of their rooms."""

from __future__ import annotations

from typing import Final

from trainfit.watch.rules import gpu, host, input, learning, memory
from trainfit.watch.rules.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    *input.RULES,
    *host.RULES,
    *gpu.RULES,
    *memory.RULES,
    *learning.RULES,
)
