"""What is compared with classes: the largest outputs themselves where their positions are meant,
positions of the largest sample where those of the largest class are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import shape_of
from trainfit.hooks.provenance.cuts import FirstOfKind, Marks, tensors_among

#: Functions that give the largest of a dimension and where they are, and those of the position.
_LARGEST: Final = {"max", "min"}
_POSITIONS: Final = {"argmax", "argmin"}
#: Layers whose second operand is their weight, and what leaves a prediction as it is.
_LAYERS: Final = {"linear"}
_AS_THEY_ARE: Final = {
    *("detach", "clone", "squeeze", "unsqueeze", "view", "reshape", "flatten", "view_as"),
    *("data", "to", "cuda", "contiguous", "float"),
}
#: … and an order of classes.
_IN_ORDER: Final = _AS_THEY_ARE | {"softmax", "log_softmax", "sigmoid"}
_COMPARE: Final = {"eq", "ne"}
_FOLLOWED: Final = _LARGEST | _POSITIONS | _LAYERS | _IN_ORDER | _COMPARE


class Predictions(FirstOfKind):
    """Follows what layers give to what it is compared with; ``place`` gives the line that is
    running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        #: Outputs of a layer, a row for each sample; largest outputs, and positions of the largest
        #: of each column, with the line that asks for them.
        self._outputs: Marks[bool] = Marks()
        self._values: Marks[str | None] = Marks()
        self._columns: Marks[tuple[str, str | None]] = Marks()

    def gave(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A function of PyTorch with this name gave a tensor, or two."""
        name = name.strip("_")
        if name not in _FOLLOWED:
            return  # as most are: this is asked of each function
        given = tensors_among(args[:2])
        if not given:
            return
        source = given[0]
        if name in _COMPARE:
            self._compare(given)
        elif name in _LARGEST:
            self._choose(source, args, kwargs, result)
        elif not isinstance(result, torch.Tensor):
            return
        elif name in _POSITIONS:
            self._note_columns(source, _dimension(args, kwargs), result)
        elif name in _LAYERS:
            weight = given[1] if len(given) > 1 else None
            is_row = result.dim() == 2 and result.shape[1] > 1
            if is_row and isinstance(weight, torch.nn.Parameter):
                self._outputs.put(result, True)
        else:
            self._pass_on(name, source, result)

    def _choose(
        self, source: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        dim = _dimension(args, kwargs)
        if not isinstance(result, tuple) or len(result) != 2 or dim is None or source.dim() < 2:
            return
        values, positions = result
        if values.is_floating_point() and "values_as_classes" not in self._found:
            self._values.put(values, self._place())
        self._note_columns(source, dim, positions)

    def _note_columns(self, source: torch.Tensor, dim: int | None, positions: torch.Tensor) -> None:
        if dim in (0, -source.dim()) and self._outputs.of(source):
            self._columns.put(positions, (shape_of(source), self._place()))

    def _pass_on(self, name: str, source: torch.Tensor, result: torch.Tensor) -> None:
        if self._outputs.of(source) and result.shape == source.shape:
            self._outputs.put(result, True)
        if name not in _AS_THEY_ARE or result.numel() != source.numel():
            return
        if (at := self._values.of(source)) is not None and result.is_floating_point():
            self._values.put(result, at)
        if (column := self._columns.of(source)) is not None:
            self._columns.put(result, column)

    def _compare(self, given: Sequence[torch.Tensor]) -> None:
        if len(given) != 2:
            return
        for one, other in (given, given[::-1]):
            if other.dtype not in (torch.int64, torch.int32) or one.numel() != other.numel():
                continue
            if (at := self._values.of(one)) is not None:
                self._note("values_as_classes", place=at or "")
            if (column := self._columns.of(one)) is not None and not self._columns.of(other):
                self._note("classes_over_samples", column[0], place=column[1] or "")


def _dimension(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The one that a function goes over; ``None``: over all numbers."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    return dim if isinstance(dim, int) and not isinstance(dim, bool) else None
