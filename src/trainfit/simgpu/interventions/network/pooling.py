"""Intervention: global pooling instead of a fully connected head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.base import Intervention
from trainfit.simgpu.interventions.script_state import Scene
from trainfit.torch_private.modules import children_of

#: Share of the model's parameters from which on a head is worth removing.
_LARGE = 0.1


class GlobalPooling(Intervention):
    """The mean over the feature map, and one linear layer, for a head on the flattened map.

    Found where a ``Linear`` takes exactly the elements (C·h·w, h·w > 1) of the feature map
    that was made last, and it with what follows in its ``Sequential`` holds a tenth of the
    model's parameters. The head's last ``Linear`` says how many outputs there are.
    """

    name = "global-pooling"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._map: tuple[int, ...] | None = None
        self._found: dict[int, tuple[torch.nn.Linear, int]] = {}

    # -- survey --------------------------------------------------------------------------

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        before = nn_module.register_module_forward_pre_hook(self._before)
        after = nn_module.register_module_forward_hook(self._after)
        scene.at_end += [before.remove, after.remove]

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if type(module) is not torch.nn.Linear or self._map is None or not args:
            return
        channels, *sides = self._map
        flat = isinstance(args[0], torch.Tensor) and args[0].dim() == 2
        if flat and module.in_features == channels * math.prod(sides) and math.prod(sides) > 1:
            self._found[id(module)] = (module, channels)

    def _after(self, module: torch.nn.Module, _: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result.dim() == 4:
            self._map = tuple(result.shape[1:])

    def finding(self) -> Applicability:
        for linear, channels in self._found.values():
            path = self.scene.path_of(linear)
            if path is None:
                continue
            model = self.scene.models[int(path.partition(":")[0])]
            head = _head(model, path.partition(":")[2])
            size = sum(p.numel() for layer in head for p in layer.parameters())
            if size >= _LARGE * sum(p.numel() for p in model.parameters()):
                outputs = _outputs(head)
                detail = f"{linear.in_features} inputs, {channels} channels, {outputs} outputs"
                return Applicability(self.name, True, targets=(path, str(channels)), detail=detail)
        return self.no("no large Linear layer has a flattened feature map as input")

    # -- trial ---------------------------------------------------------------------------

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_parameters.append(self._replace)

    def _replace(self, given: list[Any]) -> list[Any]:
        """Put the pooled layer into the model and into what the optimizer is given."""
        path, channels = self.targets
        linear = next(iter(self.scene.modules_at((path,))), None)
        if self.changed or not isinstance(linear, torch.nn.Linear):
            return given
        model = self.scene.models[int(path.partition(":")[0])]
        inner = path.partition(":")[2]
        head = _head(model, inner)
        gone = {id(p) for layer in head for p in layer.parameters()}
        pooled = _Pooled(int(channels), _outputs(head), linear.weight)
        parent, name = _parent(model, inner)
        children_of(parent)[name] = pooled
        if type(parent) is torch.nn.Sequential:
            later = list(children_of(parent))[list(children_of(parent)).index(name) + 1 :]
            for each in later:
                children_of(parent)[each] = torch.nn.Identity()
        self.changed += 1
        return _exchanged(given, gone, list(pooled.parameters()))


class _Pooled(torch.nn.Module):
    """(B, C·h·w) -> (B, outputs) through the mean of each channel."""

    def __init__(self, channels: int, outputs: int, like: torch.Tensor) -> None:
        super().__init__()
        self.channels = channels
        self.linear = torch.nn.Linear(channels, outputs, device=like.device, dtype=like.dtype)

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(flat.view(len(flat), self.channels, -1).mean(-1))
        return result


def _parent(model: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    before, _, name = path.rpartition(".")
    return model.get_submodule(before), name


def _head(model: torch.nn.Module, path: str) -> list[torch.nn.Module]:
    """The layer at ``path`` and, in a ``Sequential``, those behind it."""
    parent, name = _parent(model, path)
    if type(parent) is not torch.nn.Sequential:
        return [children_of(parent)[name]]
    return list(parent)[list(children_of(parent)).index(name) :]


def _outputs(head: list[torch.nn.Module]) -> int:
    linears = [layer for layer in head if isinstance(layer, torch.nn.Linear)]
    return int(linears[-1].out_features)


def _exchanged(given: list[Any], gone: set[int], new: list[Any]) -> list[Any]:
    """The optimizer's argument with ``new`` where the first of ``gone`` was."""
    left = list(new)

    def exchange(params: list[Any]) -> list[Any]:
        kept: list[Any] = []
        for each in params:
            is_named = isinstance(each, tuple)
            if id(each[1] if is_named else each) not in gone:
                kept.append(each)
                continue
            kept += [(f"pooled{i}", p) for i, p in enumerate(left)] if is_named else left
            left.clear()
        return kept

    if given and isinstance(given[0], dict):
        return [{**group, "params": exchange(list(group["params"]))} for group in given]
    return exchange(given)
