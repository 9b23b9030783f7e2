"""Autocast switched on or off from outside, to ask what it would do to a script."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import autocast_mode
from torch.nn.modules import module as nn_module

from trainfit.simgpu.patching import PatchSet


class AutocastSwitch:
    """Forces autocast "on" (around outermost module calls) or "off"; notes what was used."""

    def __init__(self, force: str | None, dtype: torch.dtype = torch.bfloat16) -> None:
        self._force = force
        self._dtype = dtype
        self._depth = 0
        self._context: Any = None
        self._handles: list[Any] = []
        self.used: str | None = None

    def install(self, patches: PatchSet) -> None:
        construct = autocast_mode.autocast.__init__
        switch = self

        def __init__(context: Any, *args: Any, **kwargs: Any) -> None:
            construct(context, *args, **kwargs)
            if getattr(context, "device", None) == "cuda":
                if switch._force == "off":
                    context._enabled = False
                elif context._enabled:
                    switch.used = str(context.fast_dtype).removeprefix("torch.")

        patches.set(autocast_mode.autocast, "__init__", __init__)
        if self._force == "on":
            self._handles = [
                nn_module.register_module_forward_pre_hook(self._enter),
                nn_module.register_module_forward_hook(self._leave, always_call=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._depth += 1
        if self._depth == 1 and not torch.is_autocast_enabled("cuda"):
            self._context = torch.autocast("cuda", dtype=self._dtype)
            self._context.__enter__()

    def _leave(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None
