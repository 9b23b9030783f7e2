"""Detects, while a script runs, whether it trains at all, and with an optimizer."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from trainfit.simgpu.interventions import Interventions
from trainfit.simgpu.recording.recorder import BACKWARD
from trainfit.simgpu.session import Simulation

#: Calls of models without an optimizer or a backward pass after which a script is taken not
#: to train.
_CALLS: Final = 100
#: Backward passes without an optimizer after which a script is taken to do without.
_BACKWARDS: Final = 20
#: Calls in a row that distinguish a growing cache from mere variation.
_GROWTHS: Final = 4


class InferenceWatch:
    """Sees scripts that only infer; what has trained once is not looked at again."""

    def __init__(self, simulation: Simulation, interventions: Interventions) -> None:
        self._simulation, self._interventions = simulation, interventions
        self._trains = False
        self._backwards = 0

    def only_infers(self) -> bool:
        """Were there many calls of models, and no optimizer and no backward pass so far?"""
        if self._interventions.forward_calls().calls < _CALLS:
            return False
        if self._interventions.optimizers or self._trains:
            return False
        self._trains = bool((self._simulation.recording.op_phase == BACKWARD).any())
        return not self._trains

    def updates_by_itself(self) -> bool:
        """A backward pass is over: were there some by now, and no optimizer?"""
        self._backwards += 1
        return self._backwards >= _BACKWARDS and not self._interventions.optimizers


class CacheWatch:
    """Does memory grow from call to call of a model, as with the KV cache of ``generate()``?

    Its peak is at the end of the growth, however many calls that takes.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._ends: list[int] = []
        self._grew = False

    def note_call(self) -> None:
        """A call has ended: what it left in use counts."""
        stats = self._simulation.allocator.memory_stats()
        self._ends.append(int(stats["allocated_bytes"]["all"]["current"]))
        self._grew = self._grew or self.grows()

    def grows(self) -> bool:
        """Did the last calls leave more and more behind, and never less?"""
        last = self._ends[-_GROWTHS - 1 :]
        rises = all(after >= before for before, after in pairwise(last))
        return len(last) > _GROWTHS and rises and last[-1] > last[0]

    def released(self) -> bool:
        """Has what had grown been let go with the last call?"""
        return self._grew and self._ends[-1] < self._ends[-2]
