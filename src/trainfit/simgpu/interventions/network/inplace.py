"""Intervention: in-place activations."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as nn_module

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.base import Intervention
from trainfit.simgpu.interventions.script_state import Scene
from trainfit.simgpu.launches.lower_bound import tensors_in
from trainfit.simgpu.tensors.tensor import SimulatedTensor
from trainfit.torch_private.modules import Dropout, children_of

aten = torch.ops.aten

#: Backward operators that take an activation's input, or as well its result, which is what
#: they take after an activation in place (``tools/autograd/derivatives.yaml``).
_FROM_RESULT = frozenset(
    {
        *(aten.threshold_backward.default, aten.leaky_relu_backward.default),
        *(aten.elu_backward.default, aten.hardtanh_backward.default),
    }
)


class InplaceActivations(Intervention):
    """``inplace=True`` for activation modules where nobody else reads their input.

    Autograd refuses an overwritten tensor that it needs itself, but not one that the script
    reads again later, which would be silently wrong. So an activation qualifies only if, in
    every call that was watched, no operator of the forward or backward pass but its own took
    the storage of its input afterwards.
    """

    name = "inplace"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._calls: dict[int, torch.nn.Module] = {}
        self._refused: set[int] = set()
        #: By the number of an input's allocation: the modules that took it.
        self._inputs: dict[int, list[int]] = {}
        self._active = 0

    # -- survey --------------------------------------------------------------------------

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        before = nn_module.register_module_forward_pre_hook(self._before)
        after = nn_module.register_module_forward_hook(self._after)
        scene.at_end += [before.remove, after.remove]
        scene.operators.listen(self._look)

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        self._active += _could_be_inplace(module)

    def _after(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not _could_be_inplace(module):
            return
        self._active -= 1
        if not torch.is_grad_enabled() or len(args) != 1:
            return
        value = args[0]
        self._calls[id(module)] = module
        if type(value) is not SimulatedTensor or value._life.number < 0 or value.is_leaf:
            self._refused.add(id(module))
            return
        takers = self._inputs.setdefault(value._life.number, [])
        self._refused.update(takers, [id(module)] if takers else [])
        takers.append(id(module))

    def _look(self, func: Any, args: tuple[Any, ...], _: Any) -> None:
        if self._active or not self._inputs or func in _FROM_RESULT:
            return
        for tensor in tensors_in(args):
            takers = self._inputs.get(tensor._life.number)
            if takers:
                self._refused.update(takers)

    def finding(self) -> Applicability:
        scene = self.scene
        good = [module for key, module in self._calls.items() if key not in self._refused]
        targets = tuple(path for module in good if (path := scene.path_of(module)))
        if targets:
            kinds = dict.fromkeys(type(module).__name__ for module in good)
            names = ", ".join(target.partition(":")[2] for target in targets)
            return Applicability(
                self.name, True, targets=targets, detail=f"{', '.join(kinds)}: {names}"
            )
        if self._calls:
            return self.no("the input of every activation module is used again afterwards")
        return self.no("the model calls no activation module with inplace=False")

    # -- trial ---------------------------------------------------------------------------

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_call.append(self._switch)

    def _switch(self, _: torch.nn.Module) -> None:
        if self.changed:
            return
        modules: list[Any] = self.scene.modules_at(self.targets)
        for module in modules:
            module.inplace = True
            self.changed += 1


def _could_be_inplace(module: Any) -> bool:
    """Is it an activation? (Dropout in place is another kernel, with a larger mask.)"""
    return (
        getattr(module, "inplace", None) is False
        and not children_of(module)
        and not isinstance(module, Dropout)
    )
