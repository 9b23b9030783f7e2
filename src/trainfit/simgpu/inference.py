"""Does a script train at all? Told while it runs."""

from __future__ import annotations

from typing import Final

from trainfit.simgpu.interventions import Interventions
from trainfit.simgpu.recorder import BACKWARD
from trainfit.simgpu.session import Simulation

#: Calls of models without an optimizer or a backward pass after which a script is taken not
#: to train.
_CALLS: Final = 100


class InferenceWatch:
    """Sees scripts that only infer; what has trained once is not looked at again."""

    def __init__(self, simulation: Simulation, interventions: Interventions) -> None:
        self._simulation, self._interventions = simulation, interventions
        self._trains = False

    def only_infers(self) -> bool:
        """Were there many calls of models, and no optimizer and no backward pass so far?"""
        if self._interventions.forward_calls().calls < _CALLS:
            return False
        if self._interventions.optimizers or self._trains:
            return False
        self._trains = bool((self._simulation.recording.op_phase == BACKWARD).any())
        return not self._trains
