"""Gradients that a script limits by hand, and those of two losses that one step uses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import called_by_user
from trainfit.torch_private.operators import storage_key, version

#: Functions that limit each number of a tensor.
_LIMITS: Final = {"clamp_", "clip_", "clamp", "clip", "clamp_min_", "clamp_max_", "hardtanh_"}
#: … that tell how large its numbers are, and that scale it by a factor.
_MEASURES: Final = {
    *("norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "_foreach_norm"),
    *("pow", "square", "__pow__", "abs", "max"),
}
_SCALES: Final = {"mul_", "__imul__", "div_", "__itruediv__", "_foreach_mul_", "_foreach_div_"}
#: Steps with gradients of two losses, after which it is told.
_TIMES_MIXED: Final = 2


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
        is_number = is_scale and isinstance(next(iter(args[1:2]), None), int | float)
        if self.are_scaled_down if is_number else self._found is not None or not self._are_scaled():
            return
        if is_scale and not is_number and not self._is_measured:
            return
        first = args[0] if args else None
        if isinstance(first, list | tuple):
            first = next(iter(first), None)
        # What optimizers compute of each gradient is no limit of a script's.
        if not isinstance(first, torch.Tensor) or not called_by_user():
            return
        if not self._is_gradient(first):
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


class MixedPasses:
    """Sees an optimizer that steps with gradients of two losses, another optimizer's and its own:
    backward(), a step of the other, backward(), its own step, and no zero_grad() in between."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        #: Of each optimizer a gradient of its own when another stepped, its version then, and how
        #: many steps others made since its own last one.
        self._left: weakref.WeakKeyDictionary[Any, tuple[Any, int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._times: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: Those whose gradients were set to zero since their last step: others keep all of them.
        self._zeroed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """The line of the step, and the classes of both optimizers."""
        if self._found is not None:
            yield self._found

    def zeroed(self, owner: Any) -> None:
        """Gradients of an optimizer, or of a model, were set to zero."""
        are_all = not isinstance(owner, torch.optim.Optimizer)
        for each in list(self._left) if are_all else [owner]:
            self._left[each] = None, 0, 0
            self._zeroed.add(each)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if self._found is not None:
            return
        gradient, before, others = self._left.get(optimizer, (None, 0, 0))
        known = gradient() if gradient is not None else None
        is_known = optimizer in self._zeroed and _first_gradient(optimizer) is known
        self._zeroed.discard(optimizer)
        if known is not None and is_known and others == 1 and version(known) > before:
            self._times[optimizer] = self._times.get(optimizer, 0) + 1
            if self._times[optimizer] >= _TIMES_MIXED:
                self._found = Misuse.of("gradients_mixed", place=self._place())
        self._left[optimizer] = None, 0, 0
        for other, (_, _, number) in list(self._left.items()):
            if other is not optimizer and (own := _first_gradient(other)) is not None:
                self._left[other] = weakref.ref(own), version(own), number + 1


def _first_gradient(optimizer: Any) -> torch.Tensor | None:
    return next(
        (
            each.grad
            for group in optimizer.param_groups
            for each in group["params"]
            if each.grad is not None
        ),
        None,
    )
