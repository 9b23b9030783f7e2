"""Checkpoints of sharded models and optimizers: what other ranks have of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from trainfit.simgpu.device.tensor import DeviceTensor
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import modules

#: Its functions and classes are not all declared.
distributed: Any = torch.distributed


def install(patches: PatchSet) -> None:
    """Let rank 0 write and gather checkpoints by itself, until ``patches`` is restored."""
    watch_states(patches)
    watch_plans(patches)
    watch_consolidation(patches)
    watch_staging(patches)


def watch_states(patches: PatchSet) -> None:
    """Let checkpoints of FSDP1's optimizers have the states of all ranks, until ``patches`` is
    restored.

    With ``use_orig_params`` each rank has the parameters whose elements are in its shards; taken
    as equal, the others would have this one's, and those that it has none of would have no state.
    """

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def keys_of_ranks(*args: Any, **kwargs: Any) -> Any:
            keys, own = original(*args, **kwargs)
            return sorted({*keys, *modules.keys_of_other_ranks(original, args, kwargs)}), own

        return keys_of_ranks

    def seen(module: ModuleType) -> None:
        if hasattr(module, modules.KEYS_OF_STATES):
            patches.hook(module, modules.KEYS_OF_STATES, hook)

    patches.when_imported(modules.OPTIMIZER_STATES, seen)


def watch_plans(patches: PatchSet) -> None:
    """Let sharded checkpoints be planned (``torch.distributed.checkpoint.save``) until ``patches``
    is restored: taken as equal, all ranks would have the shards that this one has, each of which
    is its own to write, and which are not the whole."""

    def hook_sharing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def share(plans: Any, *args: Any, **kwargs: Any) -> Any:
            shared = original(plans, *args, **kwargs)
            if len(plans) < 2:
                return shared
            rank = distributed.get_rank()
            kept = {each.index for each in shared[rank].items}
            own = {each.index for each in plans[rank].items if each.type.name == "SHARD"}
            mine = [each for each in plans[rank].items if each.index in kept | own]
            others = [[each for each in plan.items if each.index not in own] for plan in shared]
            others[rank] = mine
            pairs = zip(shared, others, strict=True)
            return [dataclasses.replace(plan, items=items) for plan, items in pairs]

        return share

    def hook_check(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validate(plans: Any, *args: Any, **kwargs: Any) -> Any:
            return (
                modules.nothing_wrong(original)
                if len(plans) > 1
                else original(plans, *args, **kwargs)
            )

        return validate

    def seen(module: ModuleType) -> None:
        hooks = {modules.SHARING_OF_PLANS: hook_sharing, modules.CHECK_OF_PLANS: hook_check}
        for name, hook in hooks.items():
            if hasattr(module, name):
                patches.hook(module, name, hook)

    patches.when_imported(modules.PLANS_OF_CHECKPOINTS, seen)


def watch_staging(patches: PatchSet) -> None:
    """Let ``async_save`` copy simulated tensors into RAM, until ``patches`` is restored: it copies
    their storages, and then all that a tensor has as attributes."""

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def offload(stager: Any, x: Any, memo: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, DeviceTensor):
                return original(stager, x, memo, *args, **kwargs)
            memo[id(x)] = x.detach().cpu()
            return memo[id(x)]

        return offload

    def seen(module: ModuleType) -> None:
        stager = getattr(module, modules.STAGER, None)
        if hasattr(stager, modules.STAGES_TENSOR):
            patches.hook(stager, modules.STAGES_TENSOR, hook)

    def saves(module: ModuleType) -> None:
        # A process of its own has no simulated ranks.
        if hasattr(module, modules.BY_PROCESS) and hasattr(module, modules.BY_THREAD):
            patches.set(module, modules.BY_PROCESS, getattr(module, modules.BY_THREAD))

    patches.when_imported(modules.STAGERS, seen)
    patches.when_imported(modules.ASYNC_SAVES, saves)


def watch_consolidation(patches: PatchSet) -> None:
    """Let ``ZeroRedundancyOptimizer.consolidate_state_dict`` get the states of other ranks, which
    have no values here, until ``patches`` is restored."""
    consolidating: list[Any] = []

    def consolidates(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def consolidate_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            consolidating.append(optimizer)
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                consolidating.pop()

        return consolidate_state_dict

    def sends(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def broadcast(obj: Any, src_rank: int, group: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not consolidating or src_rank == distributed.get_rank():
                return original(obj, src_rank, group, *args, **kwargs)
            number = distributed.get_process_group_ranks(group).index(src_rank)
            return modules.state_elsewhere(consolidating[-1], number)

        return broadcast

    def seen(module: ModuleType) -> None:
        if hasattr(module, modules.SENDS_STATES):
            patches.hook(module, modules.SENDS_STATES, sends)
            patches.hook(module.ZeroRedundancyOptimizer, "consolidate_state_dict", consolidates)

    patches.when_imported(modules.SHARED_OPTIMIZERS, seen)
