"""What becomes of sequences of tokens that are filled up to one length, and of their positions: a
last step that is padding, attention to padding, positions by the number of the sample.

Follows tokens of a batch to the labels of a loss: does it go over padding, which the model's
embedding leaves out?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from trainfit.hooks.losses import shape_of
from trainfit.hooks.provenance.cuts import FirstOfKind, Marks, NumberMarks, name_of, tensors_among
from trainfit.hooks.provenance.inputs import is_last_step
from trainfit.hooks.provenance.targets import tokens_of
from trainfit.torch_private.autograd import first_operand, operator_of
from trainfit.torch_private.operators import no_dispatch

#: Of a batch's rows, the share that ends in padding, of two tokens or more, from which it matters;
#: and of its positions.
_ROWS: Final = 0.5
_POSITIONS: Final = 0.1
_RUN: Final = 2
#: The token that is padding where no embedding names another, if rows end in runs of it of so many
#: lengths.
_USUAL: Final = 0
_LENGTHS: Final = 3
#: Dimensions of a batch of sequences with features.
_BATCH: Final = 3
_ADDS: Final = {"add", "radd", "iadd"}
#: What is done with the last state of a layer that uses it as features.
_USES: Final = {"__getitem__", "squeeze", "linear", "cat"}
#: Nodes of what is 0 at padding: by a mask, of packed sequences, of an embedding; and views.
_MASKED: Final = ("Mul", "MaskedFill", "Where", "_PadPacked", "PadPacked", "Embedding")
_ORDER: Final = ("Transpose", "Permute", "View", "Clone", "Unsqueeze", "Squeeze", "ToCopy")
#: Sums that show it.
_SUMS: Final = 2


class Sequences(FirstOfKind):
    """Follows sequences through layers; ``place`` gives the line that is running, ``batch_sizes``
    are those of the DataLoaders so far."""

    def __init__(self, place: Callable[[], str | None], batch_sizes: Collection[int]) -> None:
        super().__init__(place)
        self._batch_sizes = batch_sizes
        self._paddings: set[int] = set()
        #: Of the recurrent layer that is being called: rows that end in padding, all rows, and
        #: which dimension its steps are.
        self._padded: tuple[int, int, int] | None = None
        #: Its outputs and last states.
        self._outputs: Marks[tuple[int, int, int]] = Marks()
        self._states: Marks[tuple[int, int, int]] = Marks()
        #: The first rows of a table of positions.
        self._rows: Marks[tuple[str, str | None]] = Marks()
        self._sums = 0

    def embedded(self, padding: Any) -> None:
        """An embedding is computed, which leaves one token out."""
        if isinstance(padding, int) and padding >= 0:
            self._paddings.add(padding)

    def recurs(self, module: Any, x: Any) -> None:
        """A recurrent layer is about to be called."""
        self._padded = None
        if "last_step_padded" in self._found or not isinstance(x, torch.Tensor):
            return  # packed sequences know their lengths
        tokens = tokens_of(x)
        if tokens is None or x.dim() != _BATCH or tokens.shape != x.shape[:2]:
            return
        steps = 1 if module.batch_first else 0
        padding = self._padding_in(tokens if steps else tokens.T)
        if padding is not None and padding[0] >= _ROWS * padding[1]:
            self._padded = *padding[:2], steps

    def recurred(self, result: Any) -> None:
        """A recurrent layer gave its outputs and last states."""
        padded, self._padded = self._padded, None
        if padded is None or not isinstance(result, tuple) or len(result) != 2:
            return
        output, states = result
        if isinstance(output, torch.Tensor):
            self._outputs.put(output, padded)
        for state in states if isinstance(states, tuple) else (states,):
            if isinstance(state, torch.Tensor):
                self._states.put(state, padded)

    def gave(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor
    ) -> None:
        """A function of PyTorch with this name gave a tensor."""
        if name == "mean" and torch.is_grad_enabled():
            self._look_at_mean(args, kwargs)
        if name in _USES and (self._outputs or self._states):
            self._look_at_last(name, args)
        if name == "__getitem__" and len(args) > 1:
            self._look_at_rows(args[0], args[1], result)
        elif self._rows and name.strip("_") in _ADDS:
            self._look_at_sum(args)

    def _look_at_last(self, name: str, args: Sequence[Any]) -> None:
        given = args[0]
        for tensor in given if isinstance(given, list | tuple) else (given,):
            if not isinstance(tensor, torch.Tensor) or not torch.is_grad_enabled():
                continue
            padded = self._outputs.of(tensor)
            if padded is not None and (
                name != "__getitem__" or not is_last_step(args[1], padded[2])
            ):
                padded = None
            if (padded := padded or self._states.of(tensor)) is not None:
                self._note("last_step_padded", *padded[:2])

    def _look_at_mean(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A mean of features over the positions of tokens that end in padding, which nothing was
        multiplied by before."""
        x, *rest = args
        dim = rest[0] if rest else kwargs.get("dim")
        if x.dim() != _BATCH or not isinstance(dim, int) or x.grad_fn is None or _is_masked(x):
            return
        tokens = None if "padding_averaged" in self._found else tokens_of(x)
        if tokens is None:
            return
        over = dim % _BATCH
        if over not in (0, 1) or x.shape[:2] != (tokens.shape if over else tokens.T.shape):
            return
        padding = self._padding_in(tokens if over else tokens.T)
        if padding is None:
            return
        rows, of_rows, positions = padding
        if rows >= _ROWS * of_rows and positions >= _POSITIONS * tokens.numel():
            self._note("padding_averaged", positions, tokens.numel(), shape_of(tokens))

    def _look_at_rows(self, table: Any, index: Any, result: torch.Tensor) -> None:
        """``table[:n]`` of positions, with a dimension for the batch between them and features."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        if not isinstance(first, slice) or first.step is not None or first.start not in (None, 0):
            return
        is_whole = all(each is Ellipsis or each == slice(None) for each in rest)
        if not isinstance(table, torch.Tensor) or table.grad_fn is not None or not is_whole:
            return
        if result.dim() == _BATCH and result.shape[1] == 1 and len(result) < len(table):
            self._rows.put(result, (shape_of(table), self._place()))

    def _look_at_sum(self, args: Sequence[Any]) -> None:
        if len(args) < 2 or not all(isinstance(argument, torch.Tensor) for argument in args[:2]):
            return
        for x, rows in (args[:2], args[1::-1]):
            known = self._rows.of(rows)
            if known is None or x.dim() != _BATCH or len(x) not in self._batch_sizes:
                continue
            steps = x.shape[1]
            if steps > 1 and all(steps % size for size in self._batch_sizes):
                self._sums += 1
                if self._sums >= _SUMS:
                    self._note("positions_by_sample", shape_of(x), known[0], place=known[1] or "")

    def attends(self, query: Any, key: Any, *, is_masked: bool, batch_first: bool) -> None:
        """Attention is about to be computed; ``batch_first``: a row of tokens is a sample."""
        if is_masked or not torch.is_grad_enabled() or "padding_attended" in self._found:
            return
        tokens = tokens_of(query)
        if tokens is None or not (query is key or tokens_of(key) is tokens):
            return
        padding = self._padding_in(tokens if batch_first else tokens.T)
        if padding is None:
            return
        rows, of_rows, positions = padding
        if rows >= _ROWS * of_rows and positions >= _POSITIONS * tokens.numel():
            self._note("padding_attended", positions, tokens.numel(), shape_of(tokens))

    def _padding_in(self, tokens: torch.Tensor) -> tuple[int, int, int] | None:
        """Rows that end in padding, all rows, and positions of padding; ``None``: there is none."""
        with no_dispatch():
            rows = tokens.numpy()
        count, columns = rows.shape
        if count < 2 or columns < 2:
            return None
        last = rows[:, -1]
        differs = rows[:, ::-1] != last[:, None]
        runs = np.where(differs.any(axis=1), differs.argmax(axis=1), columns)
        for token in self._paddings or {_USUAL}:
            own = runs[(last == token) & (runs >= _RUN)]
            if len(own) and (token in self._paddings or len(np.unique(own)) >= _LENGTHS):
                return len(own), count, int(own.sum())
        return None


def _is_masked(features: torch.Tensor) -> bool:
    """Were they multiplied by a mask last, or come from what is 0 at padding?"""
    node: Any = features.grad_fn
    while node is not None and operator_of(node).startswith(_ORDER):
        node = first_operand(node)
    return node is None or operator_of(node).startswith(_MASKED)


#: What leaves tokens as they are.
_AS_THEY_ARE: Final = {
    *("to", "cuda", "long", "getitem", "view", "reshape", "contiguous", "flatten", "clone", "t"),
    *("transpose", "permute", "narrow", "detach", "slice"),
}
#: The share of labels from which padding is worth a word.
_LEAST: Final = 0.05
_DIMENSIONS: Final = 2


class _Tokens(NamedTuple):
    """The tokens of a batch's tensor: how often each fills its rows or columns up, and numbers of
    tokens without the first of each row or column, which have no label."""

    filled: tuple[Counter[int], Counter[int]]
    labels: tuple[int, int]


class Labels(FirstOfKind):
    """Follows the tokens of batches."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        #: What they are, with the version of the tensor then.
        self._known: NumberMarks[_Tokens] = NumberMarks()
        self._paddings: set[int] = set()

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """A DataLoader gave a batch with these."""
        for tensor in tensors:
            is_of_tokens = tensor.dtype == torch.int64 and tensor.dim() == _DIMENSIONS
            if not is_of_tokens or tensor.device.type != "cpu" or min(tensor.shape) < 2:
                continue
            with no_dispatch():
                numbers = tensor.numpy()
            rows, columns = numbers.shape
            filled = _filled(numbers), _filled(numbers.T)
            labels = rows * (columns - 1), (rows - 1) * columns
            self._known.put(tensor, _Tokens(filled, labels))

    def gave(self, func: Any, args: Sequence[Any], result: torch.Tensor) -> None:
        """A function of PyTorch gave a tensor."""
        if result.dtype != torch.int64 or name_of(func).strip("_") not in _AS_THEY_ARE:
            return
        given = tensors_among(args[:1])
        if given and (known := self._known.of(given[0])) is not None:
            self._known.put(result, known)

    def embedded(self, tokens: Any, padding: Any) -> None:
        """An embedding is computed, which leaves one token out."""
        if isinstance(tokens, torch.Tensor) and isinstance(padding, int) and padding >= 0:
            self._paddings.add(padding)

    def compares(self, target: Any, weight: Any, ignored: Any) -> None:
        """A loss over classes of these targets is called."""
        if not isinstance(target, torch.Tensor) or weight is not None or self._found:
            return
        tokens = self._known.of(target)
        if tokens is None:
            return
        for filled, labels in zip(tokens.filled, tokens.labels, strict=True):
            for padding in self._paddings - {ignored}:
                found = filled[padding]
                if target.numel() == labels and found >= _LEAST * labels:
                    self._note("padding_learned", found, labels, padding)


def _filled(rows: Any) -> Counter[int]:
    """How often each token stands at the end of rows, two times or more in one."""
    counts: Counter[int] = Counter()
    backwards = rows[:, ::-1]
    differs = backwards != backwards[:, :1]
    runs = np.where(differs.any(axis=1), differs.argmax(axis=1), rows.shape[1])
    for token, run in zip(backwards[:, 0].tolist(), runs.tolist(), strict=True):
        if run > 1:
            counts[token] += min(run, rows.shape[1] - 1)
    return counts
