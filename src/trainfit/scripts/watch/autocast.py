"""Switches a script's autocast on or off from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.amp import autocast_mode
from torch.nn.modules import module as nn_module

from trainfit.results.runs.trace import ForcedAmp
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.recording.user_location import user_frame
from trainfit.torch_private.modules import autocast_is_on, switch_off

_DTYPES: Final = ("bfloat16", "float16")


class AutocastSwitch:
    """Forces autocast on (around outermost module calls) or "off"; notes what was used.

    ``force`` names the dtype that forced autocast computes in, or is "on" for ``dtype``.
    ``used`` is the dtype of the autocast regions of the GPU that were entered so far,
    ``None`` where there were none; ``where`` the user's line that made the first.
    """

    def __init__(self, force: ForcedAmp | None, dtype: torch.dtype) -> None:
        self._best = dtype
        self.force(force)
        self.made = 0
        """Autocast regions that were made so far."""
        self._depth = 0
        self._own = False
        self._context: Any = None
        self._handles: list[Any] = []
        self.used: str | None = None
        self.where: str | None = None

    def force(self, force: ForcedAmp | None) -> None:
        """Force it so from now on."""
        self._force = force
        self._dtype = self._best
        if force is not None and force in _DTYPES:
            self._dtype = getattr(torch, force)

    def install(self, patches: PatchSet) -> None:
        """Watch or force autocast from now on, until ``patches`` is restored."""
        construct = autocast_mode.autocast.__init__
        enter: Callable[[Any], Any] = autocast_mode.autocast.__enter__
        switch = self

        def __init__(context: Any, *args: Any, **kwargs: Any) -> None:
            construct(context, *args, **kwargs)
            switch.made += 1
            if getattr(context, "device", None) != "cuda":
                return
            if switch._force == "off":
                switch_off(context)
            elif switch._force in _DTYPES:
                context.fast_dtype = switch._dtype
            if autocast_is_on(context) and switch.where is None and not switch._own:
                switch.where = user_frame()

        def __enter__(context: Any) -> Any:
            if getattr(context, "device", None) == "cuda" and autocast_is_on(context):
                switch.used = str(context.fast_dtype).removeprefix("torch.")
            return enter(context)

        patches.set(autocast_mode.autocast, "__init__", __init__)
        patches.set(autocast_mode.autocast, "__enter__", __enter__)
        # Also where nothing is forced yet: hooks are called in the order of their registration.
        self._handles = [
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away; the patches are their owner's to restore."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._depth += 1
        if self._force in (None, "off"):
            return
        if self._depth == 1 and not torch.is_autocast_enabled("cuda"):
            self._own = True
            self._context = torch.autocast("cuda", dtype=self._dtype)
            self._own = False
            self._context.__enter__()

    def _leave(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None
