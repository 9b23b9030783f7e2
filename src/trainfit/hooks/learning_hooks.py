"""Hooks that tell a :class:`LearningObserver` what a training does.

They change nothing and never raise: after an error of its own the observer is asked no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optim
from torch.utils import checkpoint

from trainfit.hooks.learning import LearningObserver
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.compiled import traces_original

_Tell = Callable[..., None]


def install(observed: Callable[[], LearningObserver], patches: PatchSet) -> Callable[[], None]:
    """Hook from now on, until ``patches`` is restored and what is returned is called.

    ``observed`` gives the observer: a process that was forked off has another.
    """
    tell = _Careful()
    scaler = grad_scaler.GradScaler
    hooks: tuple[tuple[Any, str, _Tell], ...] = (
        (torch.autograd, "backward", lambda tensors, *_, **__: observed().backward(tensors)),
        (scaler, "scale", lambda it, *_, **__: _if_enabled(it, lambda: observed().scaled())),
        (
            scaler,
            "unscale_",
            lambda it, *_, **__: _if_enabled(it, lambda: observed().unscaled()),
        ),
        (clip_grad, "clip_grad_norm_", lambda *_, **__: observed().clipping()),
        (clip_grad, "clip_grad_value_", lambda *_, **__: observed().clipping()),
        (optim.Optimizer, "zero_grad", lambda *_, **__: observed().zeroed()),
        (torch.nn.Module, "zero_grad", lambda *_, **__: observed().zeroed()),
        (torch.nn.Module, "train", lambda it, mode=True: observed().mode_set(it, mode)),
        (checkpoint, "check_backward_validity", lambda inputs: observed().checkpointing(inputs)),
    )
    for owner, name, told in hooks:
        patches.hook(owner, name, functools.partial(_around, tell, told))
    before = optim.register_optimizer_step_pre_hook(
        lambda optimizer, *_: tell(lambda: observed().stepping(optimizer))
    )
    after = optim.register_optimizer_step_post_hook(
        lambda optimizer, *_: tell(lambda: observed().stepped(optimizer))
    )

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


def _around(tell: _Careful, told: _Tell, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        tell(told, *args, **kwargs)
        return original(*args, **kwargs)

    if original.__name__ != "backward":  # torch.compile stops before that one in any case
        traces_original(hook, original)
    return hook


class _Careful:
    """Calls an observer until it fails once."""

    def __init__(self) -> None:
        self._live = True

    def __call__(self, told: _Tell, *args: Any, **kwargs: Any) -> None:
        if self._live and not torch.compiler.is_compiling():
            try:
                told(*args, **kwargs)
            except Exception:
                self._live = False


def _if_enabled(scaler: Any, told: Callable[[], None]) -> None:
    if scaler.is_enabled():
        told()
