"""Numbers of a schedule that each sample gets by a step drawn for it, as in diffusion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import shape_of
from trainfit.hooks.provenance.cuts import Marks
from trainfit.results.runs.learning import Misuse

_DRAW: Final = {"randint", "randint_like"}
_CHOOSE: Final = {"getitem", "index_select", "gather", "take"}
#: What leaves one number for each sample, in one dimension.
_KEEP: Final = {
    *("sqrt", "rsqrt", "pow", "exp", "neg", "rsub", "sub", "add", "mul", "div", "truediv", "float"),
    *("to", "square", "clone", "cuda", "reciprocal", "sigmoid", "log", "clamp", "half", "type"),
}
#: Dimensions of what is noised, at least: samples, channels and positions.
_DIMENSIONS: Final = 3


class DrawnSteps:
    """Follows steps that are drawn for the samples of a batch to what is multiplied by them."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        self._drawn: Marks[bool] = Marks()
        self._of_samples: Marks[bool] = Marks()
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """Shapes of both, and the line that multiplies along another dimension."""
        if self._found is not None:
            yield self._found

    def gave(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        """A function of PyTorch gave a tensor."""
        if self._found is not None or result.dim() != 1:
            return
        name = name.strip("_")
        if name in _DRAW:
            self._drawn.put(result, True)
            return
        tensors = [each for each in _flat(args) if isinstance(each, torch.Tensor)]
        if name in _KEEP and any(self._drawn.of(each) for each in tensors):
            self._drawn.put(result, True)
            return
        chosen = name in _CHOOSE and any(self._drawn.of(each) for each in tensors[1:])
        if chosen or (name in _KEEP and any(self._of_samples.of(each) for each in tensors)):
            self._of_samples.put(result, True)

    def computed(self, left: Any, right: Any, result: Any) -> None:
        """A sum, a difference or a product was computed."""
        if self._found is not None or not self._of_samples:
            return
        if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
            return
        factor, other = (left, right) if left.dim() < right.dim() else (right, left)
        if factor.dim() != 1 or other.dim() < _DIMENSIONS or not self._of_samples.of(factor):
            return
        if factor.shape[0] == other.shape[0] == other.shape[-1] > 1:
            self._found = Misuse.of(
                "samples_over_width", shape_of(factor), shape_of(other), place=self._place()
            )


def _flat(args: Sequence[Any]) -> Iterator[Any]:
    for each in args:
        yield from each if isinstance(each, list | tuple) else (each,)
