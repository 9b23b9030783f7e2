"""What is compared with classes: the largest outputs themselves where their positions are meant,
positions of the largest sample where those of the largest class are, logits as if they were
probabilities."""

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
_LAYERS: Final = {"linear", "conv2d", "conv1d"}
_AS_THEY_ARE: Final = {
    *("detach", "clone", "squeeze", "unsqueeze", "view", "reshape", "flatten", "view_as"),
    *("data", "to", "cuda", "contiguous", "float"),
}
#: … and an order of classes.
_TURNED: Final = {"softmax", "log_softmax", "sigmoid"}
_IN_ORDER: Final = _AS_THEY_ARE | _TURNED
_ABOVE: Final = {"gt", "ge"}
_OF_LOGITS: Final = "binary_cross_entropy_with_logits"
_COMPARE: Final = {"eq", "ne"}
_DRAWS: Final = "multinomial"
_FOLLOWED: Final = {_DRAWS} | _LARGEST | _POSITIONS | _LAYERS | _IN_ORDER | _COMPARE | _ABOVE


class Predictions(FirstOfKind):
    """Follows what layers give to what it is compared with; ``place`` gives the line that is
    running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        #: Outputs of a layer, and whether they are as the layer gave them; numbers of a sample that
        #: a loss of logits is given; largest outputs; positions that are of no class, what they
        #: are of, the shape there, and the line that asks for them.
        self._outputs: Marks[bool] = Marks()
        self._logits: set[int] = set()
        self._values: Marks[str | None] = Marks()
        self._columns: Marks[tuple[str, str, str | None]] = Marks()

    def gave(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A function of PyTorch with this name gave a tensor, or two."""
        name = name.strip("_")
        if name not in _FOLLOWED:
            return  # as most are: this is asked of each function
        given = tensors_among(args[:2])
        if not given:
            return
        source = given[0]
        if name == _DRAWS:
            self.drawing(source)
        elif name in _COMPARE:
            self._compare(given)
        elif name in _LARGEST:
            self._choose(source, args, kwargs, result)
        elif not isinstance(result, torch.Tensor):
            return
        elif name in _ABOVE:
            self._look_at_threshold(source, args)
        elif name in _POSITIONS:
            self._note_columns(source, _dimension(args, kwargs), result)
        elif name in _LAYERS:
            if len(given) > 1 and isinstance(given[1], torch.nn.Parameter):
                self._outputs.put(result, True)
        else:
            self._pass_on(name, source, result)

    def drawing(self, weights: Any) -> None:
        """Classes are drawn with these as their probabilities."""
        if isinstance(weights, torch.Tensor) and self._outputs.of(weights):
            self._note("scores_drawn", shape_of(weights))

    def comparing(self, name: str, output: Any) -> None:
        """A loss function is given this output."""
        if name == _OF_LOGITS and isinstance(output, torch.Tensor) and self._outputs.of(output):
            self._logits.add(_of_sample(output))

    def _look_at_threshold(self, source: torch.Tensor, args: Sequence[Any]) -> None:
        limit = args[1] if len(args) > 1 else None
        if not isinstance(limit, float) or not 0 < limit < 1 or not self._outputs.of(source):
            return
        if _of_sample(source) in self._logits:
            self._note("threshold_on_logits", f"{limit:g}")

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
        if dim is None or self._outputs.of(source) is None or source.dim() < 2:
            return
        if source.shape[dim] == 1 and source.shape[0] > 1:
            known = "one_output_chosen", shape_of(source), self._place()
            self._columns.put(positions, known)
        elif source.dim() == 2 and dim in (0, -2):
            known = "classes_over_samples", shape_of(source), self._place()
            self._columns.put(positions, known)

    def _pass_on(self, name: str, source: torch.Tensor, result: torch.Tensor) -> None:
        is_raw = self._outputs.of(source)
        if is_raw is not None and result.numel() == source.numel():
            self._outputs.put(result, is_raw and name not in _TURNED)
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
            column = self._columns.of(one)
            if column is not None and not self._columns.of(other) and one.numel() == other.numel():
                self._note(column[0], column[1], place=column[2] or "")
            if other.dtype not in (torch.int64, torch.int32) or one.numel() != other.numel():
                continue
            if (at := self._values.of(one)) is not None:
                self._note("values_as_classes", place=at or "")


def _of_sample(output: torch.Tensor) -> int:
    """Numbers of each sample."""
    return output.numel() // max(1, len(output)) if output.dim() else 0


def _dimension(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The one that a function goes over; ``None``: over all numbers."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    return dim if isinstance(dim, int) and not isinstance(dim, bool) else None
