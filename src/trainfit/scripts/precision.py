"""A script's mixed precision: what it uses, its scaler, and autocast switched from outside."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any, Final

import torch
from torch.amp import autocast_mode, grad_scaler

from trainfit.results.runs.steps import Framework
from trainfit.results.runs.trace import AmpSeen, ForcedAmp
from trainfit.results.text import dtype_name
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.autograd import apply_function
from trainfit.torch_private.modules import autocast_is_on, half_of, switch_off
from trainfit.torch_private.operators import PythonOperator, casts_itself, full_name

# ---
# Detects whether a script's Accelerate reads its mixed precision from the environment.
#
# ``Accelerator(mixed_precision=None)``, the default, reads ``ACCELERATE_MIXED_PRECISION``
# (``AcceleratorState.__init__`` in accelerate/state.py): then the variable can be set in the
# launch command. It has no effect where the script says which, or sets the variable itself, as
# Transformers' ``TrainingArguments`` do.


VARIABLE = "ACCELERATE_MIXED_PRECISION"
_MODULE = "accelerate.state"


class AccelerateWatch:
    """Looks at the first ``AcceleratorState`` of a process, whenever it is imported."""

    def __init__(self) -> None:
        self._before = os.environ.get(VARIABLE)
        #: The precision that came from the environment; ``None``: none did.
        self.from_environment: str | None = None
        #: The user's line that made the first state; ``None``: there is none.
        self.where: str | None = None

    def expect(self, variables: Mapping[str, str]) -> None:
        """These are in the environment from now on, as if they had been before the process."""
        os.environ.update(variables)
        self._before = os.environ.get(VARIABLE)

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        self._before = os.environ.get(VARIABLE)
        patches.when_imported(_MODULE, functools.partial(self._patch, patches))

    def _patch(self, patches: PatchSet, module: ModuleType) -> None:
        state = getattr(module, "AcceleratorState", None)
        if state is None:  # another version's, of which nothing is known
            return
        construct = state.__init__
        watch = self

        @functools.wraps(construct)
        def __init__(own: Any, mixed_precision: Any = None, *args: Any, **kwargs: Any) -> None:
            is_first = not getattr(state, "_shared_state", None)
            construct(own, mixed_precision, *args, **kwargs)
            if is_first:
                watch.where = user_frame()
            if is_first and mixed_precision is None and os.environ.get(VARIABLE) == watch._before:
                watch.from_environment = str(getattr(own, "mixed_precision", "no"))

        patches.set(state, "__init__", __init__)


#: Whose classes of ``torch.autograd.Function`` know of autocast, or are not the script's.
_OWN = ("torch.", "trainfit.")
#: Folders of the libraries that call the model for the user.
_FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    ("/transformers/trainer", "Transformers"),
    ("/pytorch_lightning/", "Lightning"),
    ("/lightning/", "Lightning"),
)


#: Calls of what is trained whose lines are looked at: some steps'.
_CALLS: Final = 64


class AmpWatch:
    """Watches a run; ``accelerate`` knows of the script's Accelerator."""

    def __init__(self, accelerate: AccelerateWatch) -> None:
        self._accelerate = accelerate
        self._scaled = False
        self._scaler_at: str | None = None
        self._forwards: Counter[str] = Counter()
        self._frozen_at: str | None = None
        self._framework: Framework = ""
        self._was_called = False
        self._functions: dict[str, str] = {}
        self._operators: dict[str, str] = {}
        self._fsdp = ""

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        scaler = grad_scaler.GradScaler
        patches.set(scaler, "__init__", self._before(scaler.__init__, self._made))
        # A subclass has a scale() of its own (FSDP's), but not a step().
        for name in ("scale", "step"):
            patches.set(scaler, name, self._before(getattr(scaler, name), self._used))
        noted = functools.wraps(torch.autograd.Function.apply)(
            self._before(apply_function, self._applied)
        )
        patches.set(torch.autograd.Function, "apply", classmethod(noted))
        call = PythonOperator.__call__
        patches.set(PythonOperator, "__call__", self._before(call, self._operated))

    def called(self, module: torch.nn.Module) -> None:
        """An outermost module with parameters is about to be called."""
        if self._forwards.total() == _CALLS or not torch.is_grad_enabled():
            return
        at = user_frame()
        self._fsdp = self._fsdp or half_of(module)
        if at is not None and any(parameter.requires_grad for parameter in module.parameters()):
            self._forwards[at] += 1
        if not self._was_called:
            self._was_called = True
            self._frozen_at = at
            self._framework = _framework(sys._getframe(1))

    @property
    def _forward_at(self) -> str | None:
        """The place at which the step calls what is trained: the line that did most often, as a
        script may call it, or a frozen network, before its loop; of several the first."""
        return max(self._forwards, key=self._forwards.__getitem__, default=self._frozen_at)

    def seen(self) -> AmpSeen:
        """What was seen so far."""
        framework, at = self._framework, None
        if not framework and self._accelerate.where is not None:
            framework, at = "Accelerate", self._accelerate.where
        return AmpSeen(
            self._scaled,
            self._scaler_at,
            self._forward_at,
            framework,
            at,
            dict(self._functions),
            dict(self._operators),
            self._fsdp,
        )

    @staticmethod
    def _before(function: Callable[..., Any], told: Callable[[Any], None]) -> Callable[..., Any]:
        """``function``, whose first argument ``told`` is reported to before."""

        @functools.wraps(function)
        def noting(first: Any, /, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                told(first)
            return function(first, *args, **kwargs)

        return noting

    def _made(self, scaler: Any) -> None:
        self._scaler_at = self._scaler_at or user_frame()

    def _used(self, scaler: Any) -> None:
        self._scaled = self._scaled or scaler.is_enabled()

    def _applied(self, function: Any) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        if name in self._functions or name.startswith(_OWN) or not _in_autocast():
            return
        if function.forward.__code__.co_name != "decorate_fwd":  # custom_fwd's
            self._functions[name] = user_frame() or ""

    def _operated(self, operator: Any) -> None:
        name = full_name(operator)
        if name not in self._operators and _in_autocast() and not casts_itself(operator):
            self._operators[name] = user_frame() or ""


def _in_autocast() -> bool:
    return torch.is_autocast_enabled("cuda")


def _framework(frame: FrameType | None) -> Framework:
    """The library among the callers that has an option for the precision."""
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        for folder, name in _FRAMEWORKS:
            if folder in path:
                return name
        frame = frame.f_back
    return ""


# ---
# Switches a script's autocast on or off from outside.


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
                switch.used = dtype_name(context.fast_dtype)
            return enter(context)

        patches.set(autocast_mode.autocast, "__init__", __init__)
        patches.set(autocast_mode.autocast, "__enter__", __enter__)
        # Also where nothing is forced yet: hooks are called in the order of their registration.
        patches.see_calls(self._enter, self._leave)

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
