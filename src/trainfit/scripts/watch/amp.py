"""A script's use of mixed precision: its scaler, its own kinds of operators.

Nothing that goes wrong while watching reaches the script.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.amp import grad_scaler

from trainfit.results.runs.steps import Framework
from trainfit.results.runs.trace import AmpSeen
from trainfit.scripts.watch.accelerate import AccelerateWatch
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.recording.user_location import user_frame
from trainfit.torch_private.autograd import apply_function
from trainfit.torch_private.operators import PythonOperator, casts_itself, full_name

#: Whose classes of ``torch.autograd.Function`` know of autocast, or are not the script's.
_OWN = ("torch.", "trainfit.")
#: Folders of the libraries that call the model for the user.
_FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    ("/transformers/trainer", "Transformers"),
    ("/pytorch_lightning/", "Lightning"),
    ("/lightning/", "Lightning"),
)


class AmpWatch:
    """Watches a run; ``accelerate`` knows of the script's Accelerator."""

    def __init__(self, accelerate: AccelerateWatch) -> None:
        self._accelerate = accelerate
        self._scaled = False
        self._scaler_at: str | None = None
        self._forward_at: str | None = None
        self._framework: Framework = ""
        self._was_called = False
        self._functions: dict[str, str] = {}
        self._operators: dict[str, str] = {}

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
        if self._was_called or not torch.is_grad_enabled():
            return
        self._was_called = True
        self._forward_at = user_frame()
        self._framework = _framework(sys._getframe(1))

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
