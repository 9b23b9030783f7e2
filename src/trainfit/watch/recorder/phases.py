"""Host time of a step, divided among phases that exclude each other, and the batches it used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

#: Phases; ``OTHER`` is what lies between them.
OTHER, INPUT, COPY, FORWARD, BACKWARD, OPTIMIZER, SYNC, CHECKPOINT, EVALUATION = range(9)
#: In a collective that Python called: no column of a step, and no other phase's time.
COLLECTIVE: Final = 9
COUNT: Final = 10
#: Steps at the start whose collectives do not count.
WARM_UP: Final = 10
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
        """Move the last ``seconds`` of the current phase to ``phase``."""
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


class CollectiveSeconds:
    """Seconds of steps in :data:`COLLECTIVE`, and the calls; those of the first steps, in which
    groups are made and ranks begin, do not count."""

    __slots__ = ("_seconds", "_steps", "calls")

    def __init__(self) -> None:
        self._seconds, self._steps, self.calls = 0.0, 0, 0

    def add(self, step: int, seconds: float) -> None:
        """A step that was recorded in detail is over."""
        if step >= WARM_UP:
            self._seconds += seconds
            self._steps += 1

    @property
    def mean_s(self) -> float | None:
        """Mean seconds of a step in collectives; ``None`` before there was one."""
        return self._seconds / self._steps if self._steps else None


# ---
# Which batches a step has used, where a loop fetches them ahead.
#
# Accelerate, and Transformers with it, ask for the next batch before they give the last one to the
# training. The first step of an epoch has then fetched one batch more than it used, the last one
# less; each belongs to the step whose backward pass uses it.


class Counts:
    """What a step has had so far; a segment that was an evaluation gives it back.

    ``given`` are the samples of the batches that wait to be used, the oldest first; ``batches`` of
    them were fetched in this step.
    """

    __slots__ = ("batches", "copied", "epoch_s", "given", "queued", "syncs", "unpinned")

    def __init__(self, given: Sequence[int] = ()) -> None:
        self.given = list(given)
        self.batches = self.syncs = self.copied = self.unpinned = 0
        self.queued = -1
        self.epoch_s: float | None = None
        """Seconds that an epoch's first batch took."""

    def begin(self, ahead: list[int]) -> None:
        """A light step begins, with these batches: nothing else than them was counted in one."""
        self.given = ahead
        self.batches = self.syncs = self.copied = self.unpinned = 0

    def add(self, samples: int) -> None:
        """A batch was fetched, of so many samples (-1: not known)."""
        self.given.append(samples)
        self.batches += 1

    def copy(self) -> Counts:
        """A copy of these numbers, to come back to."""
        other = Counts(self.given)
        other.batches, other.queued = self.batches, self.queued
        other.syncs, other.copied, other.unpinned = self.syncs, self.copied, self.unpinned
        other.epoch_s = self.epoch_s
        return other


class UsedBatches:
    """Splits what was fetched at the end of each step."""

    def __init__(self) -> None:
        self._ahead = True

    def split(self, given: list[int], backwards: int) -> tuple[list[int], list[int]]:
        """The batches that a step of so many backward passes has used, and one that was fetched
        ahead. A script that makes one backward pass from several batches leaves more of them, and
        from then on all belong to the step that fetched them."""
        surplus = len(given) - backwards
        if not self._ahead or not backwards or surplus <= 0:
            return given, []
        if surplus > 1:
            self._ahead = False
            return given, []
        return given[:-1], given[-1:]


def total(samples: Sequence[int]) -> int:
    """The samples of several batches; -1 where one of them is not known."""
    if len(samples) == 1:
        return samples[0]
    return -1 if min(samples) < 0 else sum(samples)
