"""Intervention: activation checkpointing, a model's own or of its repeated blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.utils import checkpoint as checkpoints

from trainfit.results.changes import OWN_CHECKPOINTING
from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.script_state import Intervention, Scene

#: By the method that switches on a model's own checkpointing: where its class says that it can, and
#: the arguments that old versions need (Transformers before 5 is reentrant by default).
_OWN: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    OWN_CHECKPOINTING[0]: ("supports_gradient_checkpointing", {}),
    OWN_CHECKPOINTING[1]: (
        "supports_gradient_checkpointing",
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    OWN_CHECKPOINTING[2]: ("_supports_gradient_checkpointing", {}),
}
#: Blocks of one class from which on they are repeated.
_LEAST_BLOCKS = 2
#: A block that consists of smaller repeated blocks to this share gives way to them.
_MOSTLY = 0.6
#: Children from which on a plain Sequential is worth cutting into segments.
_LEAST_CHILDREN = 8
#: What holds modules that are called one after the other.
_IN_ORDER = (torch.nn.Sequential, torch.nn.ModuleList)


class Checkpointing(Intervention):
    """``torch.utils.checkpoint`` (not reentrant) around each repeated block.

    A model that has a method for that is asked by it, as users do: it knows its blocks, and what
    goes with them (no cache of keys and values, embeddings whose output requires gradients).

    Repeated blocks of others are children of one module with the same class, at least two, that
    have parameters and parts of their own and are called in the forward pass. A model without any
    may be one long ``Sequential``, which is cut into about √n segments.
    """

    name = "checkpoint"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._called: set[int] = set()
        self._trains = False
        self._is_used = False

    # -- survey --------------------------------------------------------------------------

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        hook = torch.nn.modules.module.register_module_forward_pre_hook(self._note)
        scene.patches.on_restore(hook.remove)
        for name in ("checkpoint", "checkpoint_sequential"):
            function = getattr(checkpoints, name)
            scene.patches.set(checkpoints, name, self._noted(function))

    def _note(self, module: torch.nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            self._called.add(id(module))
            self._trains = self._trains or module.training

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
        if self._called and not self._trains:
            return self.no("the model is in evaluation mode, in which nothing is checkpointed: "
                           "model.train() before the loop")  # fmt: skip
        own = [
            f"{before}{method}"
            for model in scene.models
            for module, method in _own_ways(model, self._called)
            if (before := _prefix(scene.path_of(module)))
        ]
        groups = [g for model in scene.models for g in repeated_blocks(model, self._called)]
        blocks = [block for group in groups for block in group]
        if not own and not blocks:
            return self._segments()
        targets = (*own, *(path for block in blocks if (path := scene.path_of(block))))
        detail = ", ".join([*map(_call, own), *map(self._words, groups)])
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
        """Wrap before a forward pass: by now the model's parts are what they stay."""
        if self.changed:
            return
        own = [target for target in self.targets if _method(target) in _OWN]
        for target in own:
            method = _method(target)
            path = target.removesuffix(method).removesuffix(".")
            for model in self.scene.modules_at((path,)):
                getattr(model, method)(**_OWN[method][1])
                self.changed += 1
        path, *segments = self.targets
        is_cut = len(segments) == 1 and segments[0].isdigit()
        rest = (path,) if is_cut else [each for each in self.targets if each not in own]
        for block in self.scene.modules_at(rest):
            forward = _segmented(block, int(segments[0])) if is_cut else _checkpointed(block)
            block.forward = forward
            self.changed += 1


def _prefix(path: str | None) -> str:
    """The text before the name of a method of the module at ``path``; empty where it has none."""
    if path is None:
        return ""
    return path if path.endswith(":") else f"{path}."


def _method(target: str) -> str:
    return target.rpartition(":")[2].rpartition(".")[2]


def _call(target: str) -> str:
    return f"model.{target.partition(':')[2]}()"


def _own_ways(model: torch.nn.Module, called: set[int]) -> list[tuple[torch.nn.Module, str]]:
    """The outermost modules that are called and have a way of their own, with its method."""
    way = _own_way(model)
    if way and id(model) in called:
        return [(model, way)]
    return [pair for child in model.children() for pair in _own_ways(child, called)]


def _own_way(module: torch.nn.Module) -> str:
    """The first of its methods that checkpoint its activations; empty where it has none."""
    ways = (
        name
        for name, (says, _) in _OWN.items()
        if callable(getattr(module, name, None)) and getattr(module, says, None) is True
    )
    return next(ways, "")


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
    """Groups of repeated blocks, as :class:`Checkpointing` has them; none inside another, and none
    in a model that has its own way.

    Blocks give way to smaller ones only where these are called one after the other: those that are
    attributes (a layer's projections, each with adapters) are parts of a computation that is theirs
    together.
    """
    if id(model) in called and _own_way(model):
        return []
    groups: list[list[torch.nn.Module]] = []
    by_kind: dict[tuple[type, ...], list[torch.nn.Module]] = {}
    for child in model.children():
        by_kind.setdefault(_kind(child), []).append(child)
    for children in by_kind.values():
        blocks = [child for child in children if id(child) in called and _is_block(child)]
        if len(blocks) >= _LEAST_BLOCKS:
            inner = [group for block in blocks for group in repeated_blocks(block, called)]
            inner = [group for group in inner if _in_order(group, blocks)]
            groups += inner if _elements(inner) > _MOSTLY * _elements([blocks]) else [blocks]
        else:
            groups += [group for child in children for group in repeated_blocks(child, called)]
    return groups


def _kind(module: torch.nn.Module) -> tuple[type, ...]:
    """The module's class; of a plain ``Sequential`` also those of its layers."""
    if type(module) is torch.nn.Sequential:
        return (torch.nn.Sequential, *map(type, module))
    return (type(module),)


def _is_block(module: torch.nn.Module) -> bool:
    """Has it parameters, and at least two parts?"""
    parts = sum(1 for _ in module.modules()) - 1
    return parts >= 2 and any(True for _ in module.parameters())


def _in_order(group: list[torch.nn.Module], outer: list[torch.nn.Module]) -> bool:
    """Do the blocks stand in a list, in one of ``outer``?"""
    return any(
        isinstance(module, _IN_ORDER) and any(child is group[0] for child in module.children())
        for block in outer
        for module in block.modules()
    )


def _elements(groups: list[list[torch.nn.Module]]) -> int:
    return sum(p.numel() for group in groups for block in group for p in block.parameters())
