"""Which steps are recorded in detail: all, unless they are so short that recording would slow them.

A step in detail costs the training some 50 to 200 µs, which nobody notices in one of 100 ms. Of
shorter steps only some are recorded so, the others *lightly*: their length, their samples, their
loss and how long they waited for a batch. The recorder measures what its own calls cost, and after
a step in detail lets so much time pass that all of them together stay within a share of the time.
"""

from __future__ import annotations

import collections
import statistics
from typing import Final

#: Share of the training's time that steps in detail may cost.
SHARE: Final = 0.003
#: The first steps are all recorded in detail: what a script does shows in them.
FIRST: Final = 50
#: Costs whose median is taken: a thread that lost its core in a hook looks expensive.
_REMEMBERED: Final = 15
#: … and more than so many times the median is what others did meanwhile.
_LOST_CORE: Final = 3.0


class Budget:
    """Asked at the end of each step about the next one.

    ``spent_s`` is what recording has cost so far, ``light`` how many steps were light.
    """

    def __init__(self) -> None:
        self._costs: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._seen = 0
        self._due = self._usual = 0.0
        self._draw = 1
        self.spent_s = 0.0
        self.light = 0

    def is_light(self, now: float) -> bool:
        """Shall the step that begins at ``now`` be recorded lightly?"""
        return now < self._due

    def looked(self, began: float, cost_s: float) -> None:
        """A step in detail ended that had begun at ``began``, and recording it took so long."""
        self._seen += 1
        self._costs.append(cost_s)
        self._usual = statistics.median(self._costs)
        self.spent_s += min(cost_s, _LOST_CORE * self._usual)
        if self._seen >= FIRST:
            self._due = began + self._usual / SHARE * self._random()

    def looked_lightly(self, cost_s: float) -> None:
        """A light step ended."""
        self.light += 1
        self.spent_s += min(cost_s, self._usual)

    def share(self, seconds: float) -> float | None:
        """Of the training's ``seconds``, what recording has cost; ``None``: there was none."""
        return self.spent_s / seconds if seconds > 0 else None

    def _random(self) -> float:
        """From 0.5 to 1.5, so that what a script does every tenth step is not always, or never,
        seen. Python's own generator is the script's."""
        self._draw = self._draw * 1103515245 + 12345 & 0x7FFFFFFF
        return 0.5 + self._draw / 0x7FFFFFFF
