"""Hooks of what writes checkpoints: PyTorch, safetensors, and the training frameworks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch

from trainfit.simgpu.import_hook import ImportHook
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.compiled import TRACE_RULES
from trainfit.watch.recorder.patches.guard import Host, careful, in_phase
from trainfit.watch.recorder.step import phases as ph

#: Where the code of hooks stands.
_WITH_HOOKS: Final = ("trainfit.watch.recorder", "trainfit.torch_private")
#: Modules, and what in them writes a checkpoint.
_SAVERS: Final = (
    ("safetensors.torch", ("save_file", "save_model")),
    ("torch.distributed.checkpoint.state_dict_saver", ("save",)),
    ("accelerate.accelerator", ("Accelerator.save_state", "Accelerator.save_model")),
    ("transformers.trainer", ("Trainer._save_checkpoint", "Trainer.save_model")),
    ("transformers.modeling_utils", ("PreTrainedModel.save_pretrained",)),
    ("lightning.pytorch.trainer.trainer", ("Trainer.save_checkpoint",)),
    ("pytorch_lightning.trainer.trainer", ("Trainer.save_checkpoint",)),
)


def install(
    host: Host, patches: PatchSet, torchdata: Callable[[PatchSet, ModuleType], None]
) -> Callable[[], None]:
    """Hook from now on, also modules that are imported later, until ``patches`` is restored and
    what is returned is called; ``torchdata`` hooks StatefulDataLoader's module."""
    patches.hook(torch, "save", _checkpoint(host))
    hooks = [_when_imported(host, patches, name, names) for name, names in _SAVERS]

    def seen(module: ModuleType) -> None:
        with careful(host, module.__name__):
            if host.live:
                torchdata(patches, module)

    def traces(module: ModuleType) -> None:
        with careful(host, module.__name__):
            for name in _WITH_HOOKS:
                module.add(name)  # what torch.compile leaves alone

    hooks.append(ImportHook(TRACE_RULES, traces))
    hooks.append(ImportHook("torchdata.stateful_dataloader.stateful_dataloader", seen))
    for hook in hooks:
        hook.install()

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


def _when_imported(
    host: Host, patches: PatchSet, name: str, functions: tuple[str, ...]
) -> ImportHook:
    def seen(module: ModuleType) -> None:
        with careful(host, name):
            if host.live:
                for each in functions:
                    _hook(host, patches, module, each)

    return ImportHook(name, seen)


def _hook(host: Host, patches: PatchSet, owner: Any, name: str) -> None:
    *outer, last = name.split(".")
    for each in outer:
        owner = getattr(owner, each, None)
    function = vars(owner).get(last) if owner is not None else None
    if callable(function):  # another version may not have it
        patches.hook(owner, last, _checkpoint(host))


def _checkpoint(host: Host) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda write: in_phase(host, ph.CHECKPOINT, write, "checkpoint")
