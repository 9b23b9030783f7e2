"""Intervention: gradients freed between steps instead of filled with zeros."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.base import Intervention
from trainfit.simgpu.interventions.script_state import Scene
from trainfit.simgpu.recording.user_location import user_frame

_OWNERS = (torch.optim.Optimizer, torch.nn.Module)


class SetToNone(Intervention):
    """``zero_grad(set_to_none=True)`` where the script says False."""

    name = "set-to-none"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._places: dict[str, None] = {}
        self._calls = 0

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        self._patch(scene, keep=True)

    def finding(self) -> Applicability:
        if self._places:
            return Applicability(self.name, True, places=tuple(self._places))
        if not self._calls:
            return self.no("no call of zero_grad was observed")
        return self.no("zero_grad already sets gradients to None")

    def apply(self, scene: Scene) -> None:
        self._patch(scene, keep=False)

    def _patch(self, scene: Scene, *, keep: bool) -> None:
        for owner in _OWNERS:
            scene.patches.set(owner, "zero_grad", self._wrapped(owner.zero_grad, keep=keep))

    def _wrapped(self, zero_grad: Any, *, keep: bool) -> Any:
        def wrapped(owner: Any, set_to_none: bool = True) -> None:
            self._calls += 1
            if not set_to_none:
                self._places.setdefault(user_frame() or "")
                self.changed += 1
            zero_grad(owner, set_to_none=set_to_none if keep else True)

        return wrapped
