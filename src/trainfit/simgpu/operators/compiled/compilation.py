"""``torch.compile`` on the simulated device: what it returns runs in eager mode.

Shapes and storages are eager's. That a compiled model's kernels and temporaries are others is
said where a compiled callable was called with tensors of the device, not where one was made:
libraries decorate functions that no script calls.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from trainfit.simgpu.dispatch.engine import Engine
from trainfit.simgpu.tensors.tensor import DeviceTensor
from trainfit.torch_private.compiled import EAGER_FLEX

#: PyTorch "compiles" it, with a backend that runs eagerly, for FlexAttention outside of a
#: compiled callable.
_EAGER: Final = EAGER_FLEX
_FLEX: Final = "torch.nn.attention.flex_attention"


class Compilation:
    """Stands for ``torch.compile`` and notes which of its results were called.

    Attributes: ``models`` are the modules that were compiled and not yet called.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._depth = 0
        self._any_model = False
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def inside(self) -> bool:
        """Would what is called now be compiled? In a script that compiled a model, all is."""
        return bool(self._depth) or self._any_model

    def compile(self, model: Any = None, *_: Any, **__: Any) -> Any:
        """``torch.compile(model)``, or the decorator ``torch.compile(mode=...)``."""
        if model is None:
            return self.compile
        if isinstance(model, torch.nn.Module):
            self.models.add(model)
            self._any_model = True
            return model
        if getattr(model, "__name__", "") == _EAGER:
            return model
        if inspect.isclass(model) or not callable(model):
            return model
        return self._function(model)

    def called(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called; noted at the first time that it is a compiled one's."""
        if (
            self.models
            and module in self.models
            and (_on_device(args) or _on_device(module.parameters()))
        ):
            self.models.discard(module)
            self._engine.assume("torch.compile was skipped: the model was simulated in eager mode")

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # FlexAttention is simulated as the kernel that it is compiled to.
        noted = getattr(function, "__module__", "") == _FLEX

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal noted
            if not noted and (_on_device(args) or _on_device(kwargs.values())):
                noted = True
                self._engine.assume(
                    f"torch.compile was skipped: {_name(function)} ran in eager mode"
                )
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return called


def _name(function: Any) -> str:
    """What to call it: ``Module.compile()`` compiles a module's bound method."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return f"a {type(owner).__name__}"
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name.rpartition('<locals>.')[2]}()"


def _on_device(values: Iterable[Any], depth: int = 3) -> bool:
    """Is a tensor of the device among arguments, or in lists and dicts among them?"""
    for value in values:
        if isinstance(value, (DeviceTensor, torch.nn.Module)):
            if isinstance(value, DeviceTensor) or _on_device(value.parameters(), 0):
                return True
        elif depth and isinstance(value, (list, tuple)):
            if _on_device(value, depth - 1):
                return True
        elif depth and isinstance(value, dict) and _on_device(value.values(), depth - 1):
            return True
    return False
