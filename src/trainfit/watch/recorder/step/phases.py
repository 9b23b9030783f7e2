"""Host time of a step, divided among phases that exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: Phases; ``OTHER`` is what lies between them.
OTHER, INPUT, COPY, FORWARD, BACKWARD, OPTIMIZER, SYNC, CHECKPOINT, EVALUATION = range(9)
COUNT: Final = 9
#: What :meth:`PhaseClock.enter` returns where no phase was entered.
NOT_ENTERED: Final = -1


class PhaseClock:
    """Seconds by phase since the last :meth:`reset`. Phases nest; only the innermost counts, but
    a checkpoint or an evaluation takes all that happens within it.

    Args:
        clock: seconds, monotonic.
    """

    __slots__ = ("_stack", "clock", "current", "seconds", "since")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds = [0.0] * COUNT
        self.current = OTHER
        self.since = clock()
        """When ``current`` was entered or last brought up to date."""
        self._stack: list[int] = []

    @property
    def depth(self) -> int:
        """Phases that are entered now."""
        return len(self._stack)

    def enter(self, phase: int) -> int:
        """Begin ``phase``; what is returned ends it (:meth:`leave`)."""
        if self.current >= CHECKPOINT and phase != CHECKPOINT:
            return NOT_ENTERED
        self.update()
        self._stack.append(self.current)
        self.current = phase
        return len(self._stack) - 1

    def leave(self, token: int) -> None:
        """End the phase that ``enter`` returned ``token`` for, and any left open within it."""
        if token < 0 or token >= len(self._stack):
            return
        self.update()
        self.current = self._stack[token]
        del self._stack[token:]

    def carve(self, phase: int, seconds: float) -> None:
        """Of the time of the current phase, the last ``seconds`` were ``phase``'s."""
        if self.current < CHECKPOINT:
            self.update()
            self.seconds[self.current] -= seconds
            self.seconds[phase] += seconds

    def update(self) -> float:
        """Count up to now; returns the time."""
        now = self.clock()
        self.seconds[self.current] += now - self.since
        self.since = now
        return now

    def reset(self) -> None:
        """Start to count again; the phases that are entered stay so."""
        self.seconds = [0.0] * COUNT
