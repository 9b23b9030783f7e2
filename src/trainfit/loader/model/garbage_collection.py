"""Pauses of Python's garbage collection, which recur with a worker's count of batches.

CPython starts a full collection when enough objects were made since the last: a data set that
makes many of them for each sample sets one off every so many batches. Workers that are forked
from one process begin with the same count, so theirs come at the same batch of each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pauses:
    """Seconds of CPU time for collections in each batch of a worker, by how many it made before.

    After the last of ``seconds``, the last ``period`` of them come again and again.
    """

    seconds: tuple[float, ...] = ()
    period: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.period <= len(self.seconds) or not self.seconds):
            raise ValueError("expected a period from 1 to the number of pauses")

    def of(self, number: int) -> float:
        """In a worker's batch ``number``; its first is number 0."""
        if not self.seconds:
            return 0.0
        if number >= len(self.seconds):
            first = len(self.seconds) - self.period
            number = first + (number - first) % self.period
        return self.seconds[number]

    @property
    def mean(self) -> float:
        """Of a batch, in the long run."""
        return sum(self.seconds[-self.period :]) / self.period if self.seconds else 0.0

    def scaled(self, factor: float) -> Pauses:
        """The same, so many times as long."""
        return Pauses(tuple(each * factor for each in self.seconds), self.period)
