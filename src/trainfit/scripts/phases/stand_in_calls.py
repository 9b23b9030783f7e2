"""What stands in for a model's forward call that is not made, and for the tensors that it gives."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch


class StandInCall:
    """Is the model's forward call, from when it is made to :meth:`remove`.

    A copy of the model, or what is saved of it, has the forward call that the model has itself, and
    nothing in place of one that its class gives (see :func:`state_as_it_was`). It keeps no model
    alive: one that the script drops is freed at once, as it would be.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.name = type(module).__name__
        self._module = weakref.ref(module)
        self._held: Callable[..., Any] | None = vars(module).get("forward")
        module.forward = self

    @property
    def module(self) -> torch.nn.Module:
        """The model, which is there while it is called, copied or saved."""
        module = self._module()
        assert module is not None
        return module

    @property
    def forward(self) -> Callable[..., Any]:
        """The call that this one stands for."""
        if self._held is not None:
            return self._held
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._held is not None:
            return copy.deepcopy(self._held, memo)
        module = memo.get(id(self.module), self.module)
        return types.MethodType(type(self.module).forward, module)

    def __reduce__(self) -> Any:
        if self._held is not None:
            return copy.copy, (self._held,)
        return getattr, (self.module, "forward")

    def put_into(self, state: dict[str, Any]) -> None:
        """What the module has itself, in a copy of its attributes."""
        if self._held is None:
            del state["forward"]
        else:
            state["forward"] = self._held

    def remove(self) -> None:
        """The module is as it was."""
        module = self._module()
        if module is None or vars(module).get("forward") is not self:
            return  # whoever took its place keeps it
        if self._held is None:
            vars(module).pop("forward", None)
        else:
            module.forward = self._held


def state_as_it_was(module: torch.nn.Module) -> dict[str, Any]:
    """What is pickled of a module: ``torch.load`` refuses all that its user has not allowed."""
    state = vars(module)
    stands_in = state.get("forward")
    if isinstance(stands_in, StandInCall):
        state = dict(state)
        stands_in.put_into(state)
    return state


class TensorOutline:
    """A tensor without its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device

    def made(self) -> torch.Tensor:
        return torch.empty_strided(
            self._shape, self._stride, dtype=self._dtype, device=self._device
        )
