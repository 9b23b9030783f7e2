"""Intervention: autograd disabled or enabled around forward passes."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.base import Intervention
from trainfit.simgpu.interventions.script_state import Scene
from trainfit.simgpu.recording.user_location import user_frame


class NoGradInEvaluation(Intervention):
    """``torch.no_grad()`` around calls of models in evaluation mode."""

    name = "no-grad-eval"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}
        self._evaluations = 0
        self._before: list[bool] = []

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.on_call.append(self._note)

    def _note(self, module: torch.nn.Module) -> None:
        if module.training:
            return
        self._evaluations += 1
        if torch.is_grad_enabled():
            self._places.setdefault(user_frame() or "")

    def finding(self) -> Applicability:
        if self._places:
            return Applicability(self.name, True, places=tuple(filter(None, self._places)))
        if self._evaluations:
            return self.no("evaluation already runs without gradients")
        return self.no("no evaluation pass in the simulated steps")

    def apply(self, scene: Scene) -> None:
        scene.on_call.append(self._enter)
        scene.after_call.append(self._leave)

    def _enter(self, module: torch.nn.Module) -> None:
        self._before.append(torch.is_grad_enabled())
        if not module.training and torch.is_grad_enabled():
            torch.set_grad_enabled(False)
            self.changed += 1

    def _leave(self, module: torch.nn.Module) -> None:
        if self._before:
            torch.set_grad_enabled(self._before.pop())


class ForwardGrad(Intervention):
    """Every outermost call with gradients on or off (``targets[0]``): what an inference
    script needs with and without ``torch.no_grad``."""

    name = "forward-grad"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._before: list[bool] = []

    def finding(self) -> Applicability:
        return self.no("it applies only to scripts that do not train")

    def apply(self, scene: Scene) -> None:
        self._on = self.targets[0] == "on"
        if self._on:
            # Tensors of inference mode can never be saved for a backward pass.
            mode = torch.autograd.grad_mode.inference_mode
            enter: Any = mode.__enter__

            def without_mode(context: Any) -> Any:
                context.mode = False
                return enter(context)

            scene.patches.set(mode, "__enter__", without_mode)
        scene.on_call.append(self._enter)
        scene.after_call.append(self._leave)

    def _enter(self, module: torch.nn.Module) -> None:
        self._before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(self._on)
        self.changed += 1

    def _leave(self, module: torch.nn.Module) -> None:
        if self._before:
            torch.set_grad_enabled(self._before.pop())
