"""Gradients that a script limits by hand, next to ``clip_grad_norm_`` and ``clip_grad_value_``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.tensors import storage_key

#: Functions that limit each number of a tensor.
_LIMITS: Final = {"clamp_", "clip_", "clamp", "clip", "clamp_min_", "clamp_max_", "hardtanh_"}
#: … that tell how large its numbers are, and that scale it by a factor.
_MEASURES: Final = {
    *("norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "_foreach_norm"),
    *("pow", "square", "__pow__", "abs", "max"),
}
_SCALES: Final = {"mul_", "__imul__", "div_", "__itruediv__", "_foreach_mul_", "_foreach_div_"}


class HandMadeLimits:
    """Sees that gradients are limited while they are scaled; ``place`` gives the line that is
    running, ``are_scaled`` whether a GradScaler has scaled the gradients and not unscaled them."""

    def __init__(self, place: Callable[[], str | None], are_scaled: Callable[[], bool]) -> None:
        self._place, self._are_scaled = place, are_scaled
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._is_measured = False
        self._found: Misuse | None = None
        self.are_scaled_down = False
        """Does the script multiply or divide gradients by a number, as an average is made?"""

    def found(self) -> Iterator[Misuse]:
        """The first line that limits them."""
        if self._found is not None:
            yield self._found

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, by gradients that it has unscaled if it is to."""
        self._optimizers.add(optimizer)
        self._is_measured = False

    def gave(self, name: str, args: Sequence[Any]) -> None:
        """A function of PyTorch gave a tensor, or changed all tensors of a list."""
        is_limit, is_scale = name in _LIMITS, name in _SCALES
        if not (is_limit or is_scale or name in _MEASURES) or not self._optimizers:
            return
        is_number = is_scale and isinstance(args[1], int | float)
        if self.are_scaled_down if is_number else self._found is not None or not self._are_scaled():
            return
        if is_scale and not is_number and not self._is_measured:
            return
        first = args[0] if args else None
        if isinstance(first, list | tuple):
            first = next(iter(first), None)
        if not isinstance(first, torch.Tensor) or not self._is_gradient(first):
            return
        if is_number:
            self.are_scaled_down = True
        elif is_limit or is_scale:
            self._found = Misuse.of("clipped_by_hand", name.strip("_"), place=self._place())
        else:
            self._is_measured = True

    def _is_gradient(self, tensor: torch.Tensor) -> bool:
        """Has it the numbers of a parameter's gradient (``p.grad``, ``p.grad.data``)?"""
        key = storage_key(tensor.untyped_storage())
        return any(
            parameter.grad is not None
            and parameter.grad.layout is torch.strided
            and storage_key(parameter.grad.untyped_storage()) == key
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
