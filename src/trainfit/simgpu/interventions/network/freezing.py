"""Intervention: a frozen backbone."""

from __future__ import annotations

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.base import Intervention
from trainfit.simgpu.interventions.script_state import Scene
from trainfit.simgpu.interventions.step.optimizers import lines_of
from trainfit.torch_private.modules import Convolution

#: Share of the spatial convolutions' parameters that a trunk holds.
_TRUNK = 0.9


class FreezeBackbone(Intervention):
    """``requires_grad_(False)`` for the backbone before the optimizer is made.

    The backbone is, by rule, the smallest module that holds 90% of the parameters of the
    convolutions larger than 1x1; in a model without such a module, all of its parts but the
    last one that has parameters (behind wrappers that hold a single part).
    """

    name = "freeze-backbone"

    def finding(self) -> Applicability:
        scene = self.scene
        if not scene.models:
            return self.no("no model was found behind the optimizer's parameters")
        model = scene.models[0]
        parts = backbone_of(model)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        chosen = {id(p): p.numel() for part in parts for p in part.parameters() if p.requires_grad}
        if not parts:
            return self.no("the model has no distinguishable backbone")
        if not chosen:
            return self.no("its backbone is already frozen")
        if sum(chosen.values()) >= trained:
            return self.no("nothing would be left to train")
        targets = tuple(path for part in parts if (path := scene.path_of(part)))
        names = ", ".join(target.partition(":")[2] for target in targets)
        return Applicability(self.name, True, targets=targets, places=lines_of(scene), detail=names)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_model.append(self._freeze)

    def _freeze(self, model: torch.nn.Module) -> None:
        if len(self.scene.models) != 1:
            return
        for module in self.scene.modules_at(self.targets):
            module.requires_grad_(False)
            self.changed += 1


def backbone_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The backbone's modules by the rule of :class:`FreezeBackbone`; empty if there is none."""
    total = _spatial(model)
    if total:
        trunks = [
            module
            for module in model.modules()
            if module is not model and _spatial(module) >= _TRUNK * total
        ]
        trunks = [t for t in trunks if _elements(t) < _elements(model)]
        if trunks:
            return [min(trunks, key=_elements)]
    parts = _parts(model)
    while len(parts) == 1:
        parts = _parts(parts[0])
    return parts[:-1]


def _parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [child for child in module.children() if _elements(child)]


def _elements(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _spatial(module: torch.nn.Module) -> int:
    """Parameters of the convolutions that look at more than one place."""
    return sum(
        conv.weight.numel()
        for conv in module.modules()
        if isinstance(conv, Convolution) and max(conv.kernel_size) > 1
    )
