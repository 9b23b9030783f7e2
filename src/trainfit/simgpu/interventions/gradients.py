"""Interventions on gradients: autograd's mode, freed instead of zeroed, a frozen backbone."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.interventions.optimizers import lines_of
from trainfit.simgpu.interventions.script_state import Intervention, Scene
from trainfit.torch_private.modules import Convolution


class NoGradInEvaluation(Intervention):
    """``torch.no_grad()`` around calls of models in evaluation mode, and around those at lines that
    are ``targets``: an evaluation may leave its model in training mode."""

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
        if not torch.is_grad_enabled():
            return
        if not module.training or (self.targets and user_frame() in self.targets):
            torch.set_grad_enabled(False)
            self.changed += 1

    def _leave(self, module: torch.nn.Module, _: Any) -> None:
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

    def _leave(self, module: torch.nn.Module, _: Any) -> None:
        if self._before:
            torch.set_grad_enabled(self._before.pop())


# ---
# Intervention: gradients freed between steps instead of filled with zeros.


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


# ---
# Intervention: a frozen backbone.


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
