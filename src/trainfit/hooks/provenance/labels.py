"""Follows tokens of a batch to the labels of a loss: does it go over padding, which the model's
embedding leaves out?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from trainfit.hooks.provenance.cuts import FirstOfKind, NumberMarks, name_of, tensors_among
from trainfit.torch_private.operators import no_dispatch

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
        for each in tensors:
            is_of_tokens = each.dtype == torch.int64 and each.dim() == _DIMENSIONS
            if not is_of_tokens or each.device.type != "cpu" or min(each.shape) < 2:
                continue
            with no_dispatch():
                numbers = each.numpy()
            rows, columns = numbers.shape
            filled = _filled(numbers), _filled(numbers.T)
            labels = rows * (columns - 1), (rows - 1) * columns
            self._known.put(each, _Tokens(filled, labels))

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
    found: Counter[int] = Counter()
    backwards = rows[:, ::-1]
    differs = backwards != backwards[:, :1]
    runs = np.where(differs.any(axis=1), differs.argmax(axis=1), rows.shape[1])
    for token, run in zip(backwards[:, 0].tolist(), runs.tolist(), strict=True):
        if run > 1:
            found[token] += min(run, rows.shape[1] - 1)
    return found
