"""Activations that a script casts to float32 by hand within autocast, which casts them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import called_by_user
from trainfit.torch_private.autograd import behind

#: Functions that cast, and those that autocast computes in 16 bits (torch/amp, "ops that can
#: autocast to float16").
_CASTS: Final = {"float", "double", "to", "type"}
_IN_16_BITS: Final = {
    *("linear", "matmul", "bmm", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
}
#: What is between both: views, and what changes each number by itself.
_BETWEEN: Final = (
    *("View", "UnsafeView", "Reshape", "Split", "Slice", "Select", "Transpose", "Permute"),
    *("Expand", "Unsqueeze", "Squeeze", "Unbind", "Clone", "Alias", "T0", "Gelu", "Relu", "Silu"),
    *("Sigmoid", "Tanh", "LeakyRelu", "Hardswish", "Mish", "Elu", "NativeDropout", "FusedDropout"),
)
_MARK: Final = "trainfit_cast"
#: Bytes of a step's casts that are worth a word, and lines that are told.
_LARGE: Final = 64 << 20
_LINES: Final = 3


class UndoneCasts:
    """Follows what a script casts to float32 to the layer that autocast runs in 16 bits."""

    def __init__(self, place: Callable[[], str | None], steps: Callable[[], int]) -> None:
        self._place, self._steps = place, steps
        self._step = -1
        self._bytes: dict[str, int] = {}
        self._most: dict[str, int] = {}

    def found(self) -> Iterator[Misuse]:
        """Bytes of a step's casts, how many lines make them, and the first of these."""
        most = max(self._bytes, self._most, key=lambda each: sum(each.values()))
        if sum(most.values()) >= _LARGE:
            lines = sorted(most, key=lambda line: -most[line])
            told = ", ".join(line.rpartition("/")[2] for line in lines[:_LINES])
            yield Misuse.of("casts_undone", sum(most.values()), len(lines), told, place=lines[0])

    def gave(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        """A function of PyTorch gave a tensor."""
        if name not in _CASTS and name not in _IN_16_BITS:
            return
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not torch.is_autocast_enabled("cuda"):
            return
        if name in _CASTS:
            node: Any = result.grad_fn
            if node is not None and result.itemsize > first.itemsize == 2 and called_by_user():
                node.metadata[_MARK] = self._place() or "", result.nbytes
            return
        for each in args[:3]:
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                node = behind(each.grad_fn, _BETWEEN)
                cast = None if node is None else node.metadata.pop(_MARK, None)
                if cast is not None:
                    self._note(*cast)

    def _note(self, place: str, nbytes: int) -> None:
        if self._steps() != self._step:
            self._step = self._steps()
            self._most = max(self._bytes, self._most, key=lambda each: sum(each.values()))
            self._bytes = {}
        self._bytes[place] = self._bytes.get(place, 0) + nbytes
