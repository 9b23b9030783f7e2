"""Intervention: gradient accumulation, several backward passes per optimizer step."""

from __future__ import annotations

import types
from typing import Any

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.base import Intervention
from trainfit.simgpu.interventions.script_state import MadeOptimizer, Scene
from trainfit.simgpu.recording.user_location import user_frame


class Accumulation(Intervention):
    """Only every ``targets[0]``-th call of ``optimizer.step`` and ``zero_grad`` counts.

    The micro-batch itself comes from the command or the DataLoader, whose batch size is
    divided by the same number.
    """

    name = "accumulate"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.on_optimizer.append(self._note_steps)

    def _note_steps(self, made: MadeOptimizer) -> None:
        optimizer: Any = made.optimizer

        def note(*_: Any) -> None:
            place = user_frame()
            if place is not None:
                self._places.setdefault(place)

        optimizer.register_step_pre_hook(note)

    def finding(self) -> Applicability:
        if not self.scene.optimizers:
            return self.no("the script creates no torch.optim optimizer")
        norms = sum(
            "BatchNorm" in type(module).__name__ and module.training
            for model in self.scene.models
            for module in model.modules()
            if any(True for _ in module.parameters(recurse=False))
        )
        return Applicability(
            self.name, True, places=tuple(self._places), detail="batch norm" if norms else ""
        )

    def apply(self, scene: Scene) -> None:
        scene.on_optimizer.append(self._gate)

    def _gate(self, made: MadeOptimizer) -> None:
        every = int(self.targets[0])
        optimizer: Any = made.optimizer
        step, zero_grad = optimizer.step, optimizer.zero_grad
        calls = 0

        def gated_step(outer: Any, closure: Any = None) -> Any:
            nonlocal calls
            if (calls + 1) % every == 0:
                result = step(closure) if closure is not None else step()
            else:
                result = closure() if closure is not None else None
            calls += 1
            return result

        def gated_zero_grad(outer: Any, *args: Any, **kwargs: Any) -> None:
            if calls % every == 0:
                zero_grad(*args, **kwargs)

        optimizer.step = types.MethodType(gated_step, optimizer)
        optimizer.zero_grad = types.MethodType(gated_zero_grad, optimizer)
        self.changed += 1
