"""Intervention: activation checkpointing of the model's repeated blocks."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.script_state import Intervention, Scene

#: Blocks of one class from which on they are repeated.
_LEAST_BLOCKS = 2
#: A block that consists of smaller repeated blocks to this share gives way to them.
_MOSTLY = 0.6
#: Children from which on a plain Sequential is worth cutting into segments.
_LEAST_CHILDREN = 8


class Checkpointing(Intervention):
    """``torch.utils.checkpoint`` (not reentrant) around each repeated block.

    Repeated blocks are children of one module with the same class, at least two, that have
    parameters and parts of their own and are called in the forward pass. A model without any
    may be one long ``Sequential``, which is cut into about √n segments.
    """

    name = "checkpoint"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._called: set[int] = set()
        self._is_used = False

    # -- survey --------------------------------------------------------------------------

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        hook = torch.nn.modules.module.register_module_forward_pre_hook(self._note)
        scene.at_end.append(hook.remove)
        for name in ("checkpoint", "checkpoint_sequential"):
            function = getattr(checkpoints, name)
            scene.patches.set(checkpoints, name, self._noted(function))

    def _note(self, module: torch.nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            self._called.add(id(module))

    def _noted(self, function: Any) -> Any:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._is_used = True
            return function(*args, **kwargs)

        return noted

    def finding(self) -> Applicability:
        scene = self.scene
        if self._is_used:
            return self.no("the script checkpoints activations already")
        groups = [g for model in scene.models for g in repeated_blocks(model, self._called)]
        blocks = [block for group in groups for block in group]
        if not blocks:
            return self._segments()
        targets = tuple(path for block in blocks if (path := scene.path_of(block)))
        detail = ", ".join(self._words(group) for group in groups)
        return Applicability(self.name, True, targets=targets, detail=detail)

    def _words(self, group: list[torch.nn.Module]) -> str:
        path = (self.scene.path_of(group[0]) or "").partition(":")[2].rpartition(".")[0]
        where = f" in {path}" if path else ""
        return f"{len(group)} blocks of {type(group[0]).__name__}{where}"

    def _segments(self) -> Applicability:
        scene = self.scene
        long = [
            module
            for model in scene.models
            for module in model.modules()
            if type(module) is torch.nn.Sequential
            and len(module) >= _LEAST_CHILDREN
            and id(module) in self._called
        ]
        if not long:
            return self.no("the model has no repeated blocks that are called in the forward pass")
        longest = max(long, key=len)
        count = round(math.sqrt(len(longest)))
        path = scene.path_of(longest) or ""
        name = path.partition(":")[2] or "the model"
        detail = f"{count} segments of {name} ({len(longest)} layers)"
        return Applicability(self.name, True, targets=(path, str(count)), detail=detail)

    # -- trial ---------------------------------------------------------------------------

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_call.append(self._wrap)

    def _wrap(self, module: torch.nn.Module) -> None:
        """Before a forward pass: by now the model's parts are what they stay."""
        if self.changed:
            return
        path, *segments = self.targets
        is_cut = len(segments) == 1 and segments[0].isdigit()
        for block in self.scene.modules_at((path,) if is_cut else self.targets):
            forward = _segmented(block, int(segments[0])) if is_cut else _checkpointed(block)
            block.forward = forward
            self.changed += 1


def _checkpointed(block: torch.nn.Module) -> Any:
    forward = block.forward

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and block.training):
            return forward(*args, **kwargs)
        return checkpoints.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


def _segmented(block: Any, segments: int) -> Any:
    forward = block.forward

    @functools.wraps(forward)
    def segmented(value: Any) -> Any:
        if not (torch.is_grad_enabled() and block.training):
            return forward(value)
        layers = list(block)
        return checkpoints.checkpoint_sequential(layers, segments, value, use_reentrant=False)

    return segmented


def repeated_blocks(model: torch.nn.Module, called: set[int]) -> list[list[torch.nn.Module]]:
    """Groups of repeated blocks, as :class:`Checkpointing` has them; none inside another."""
    groups: list[list[torch.nn.Module]] = []
    by_kind: dict[tuple[type, ...], list[torch.nn.Module]] = {}
    for child in model.children():
        by_kind.setdefault(_kind(child), []).append(child)
    for children in by_kind.values():
        blocks = [child for child in children if id(child) in called and _is_block(child)]
        if len(blocks) >= _LEAST_BLOCKS:
            inner = [group for block in blocks for group in repeated_blocks(block, called)]
            groups += inner if _elements(inner) > _MOSTLY * _elements([blocks]) else [blocks]
        else:
            groups += [group for child in children for group in repeated_blocks(child, called)]
    return groups


def _kind(module: torch.nn.Module) -> tuple[type, ...]:
    """Its class; of a plain ``Sequential`` also those of its layers."""
    if type(module) is torch.nn.Sequential:
        return (torch.nn.Sequential, *map(type, module))
    return (type(module),)


def _is_block(module: torch.nn.Module) -> bool:
    """Has it parameters, and at least two parts?"""
    parts = sum(1 for _ in module.modules()) - 1
    return parts >= 2 and any(True for _ in module.parameters())


def _elements(groups: list[list[torch.nn.Module]]) -> int:
    return sum(p.numel() for group in groups for block in group for p in block.parameters())
