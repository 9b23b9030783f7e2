"""The operators whose results a hand formula counts, with the number of elements of each.

The note on ACT counts, for a layer of a Transformer, ``8 S D + 2 H S^2 + 2 S FFN`` numbers: Q, K
and V, the attention's output, its projection, residual sums and layer norms; scores and
probabilities; the hidden layer and its activation. The notes on VGG16 and on the T4 count each
layer's output. Both are one rule: the results of convolutions, matmuls, normalization,
activation functions, pooling and sums, but not of casts, copies, masks and elementwise products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import numpy as np

from trainfit.results.runs.kernels import DTYPES, KINDS, MARKS
from trainfit.results.runs.recording import IntArray, Recording

ATTENTION: Final = "attention scores, probabilities"
PRODUCTS: Final = "matmuls"

_ROWS: Final[Mapping[str, tuple[str, ...]]] = {
    "convolutions": ("convolution", "_convolution", "cudnn_convolution", "miopen_convolution"),
    PRODUCTS: ("mm", "addmm", "bmm", "baddbmm", "_cudnn_rnn", "_grouped_mm", "_scaled_mm"),
    ATTENTION: ("_softmax", "_safe_softmax"),
    "normalization": (
        *("native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm"),
        *("_native_batch_norm_legit", "_batch_norm_with_update", "_fused_rms_norm", "rms_norm"),
        *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
    ),
    "activation functions": (
        *("relu", "gelu", "silu", "hardtanh", "leaky_relu", "elu", "celu", "sigmoid", "tanh"),
        *("hardswish", "hardsigmoid", "mish", "softplus", "_prelu_kernel", "glu", "threshold"),
        *("log_sigmoid_forward", "selu", "relu6"),
    ),
    "pooling, resampling": (
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"),
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d"),
        *("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    ),
    "sums, concatenations": ("add", "cat"),
    "embeddings": ("embedding",),
}
_ROW_OF: Final = {name: row for row, names in _ROWS.items() for name in names}
_SIZES: Final[Mapping[str, int]] = {
    "float32": 4,
    "tfloat32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "float8": 1,
}
#: Operators before a softmax among which the matmul of its scores is searched.
_SCORES_WITHIN: Final = 16


@dataclasses.dataclass(frozen=True)
class CountedOperator:
    """An operator whose result the formula counts.

    ``elements`` are the numbers of the result, ``extra`` those that the formula counts in addition
    (scores and probabilities of fused attention). ``output`` is the result's allocation
    (-1: it has none of its own).
    """

    operator: int
    row: str
    elements: int
    output: int
    extra: int = 0


class Operators:
    """A recording's operators, by number: names, allocations and kernels."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._first_alloc = _firsts(recording.alloc_op, len(recording.op_name))
        launched = ~np.isin(recording.kernel_kind, [KINDS.index(kind) for kind in MARKS])
        self._first_kernel = _firsts(
            np.where(launched, recording.kernel_op, -1), len(recording.op_name)
        )

    def name(self, operator: int) -> str:
        """ "addmm" of "aten.addmm.default"."""
        return self.full_name(operator).split(".")[-2 if "." in self.full_name(operator) else 0]

    def full_name(self, operator: int) -> str:
        return self.recording.strings[int(self.recording.op_name[operator])]

    def itemsize(self, operator: int) -> int | None:
        """Bytes of a number in the first kernel; ``None`` for none, or for whole numbers."""
        kernel = int(self._first_kernel[operator])
        return None if kernel < 0 else _SIZES.get(DTYPES[int(self.recording.kernel_dtype[kernel])])

    def counted(self, begin: int, end: int) -> list[CountedOperator]:
        """Those of the forward pass from operator ``begin`` to before ``end``, in order."""
        found = [each for op in range(begin, end) if (each := self._counted(op)) is not None]
        scores = self._scores(found)
        return [
            dataclasses.replace(each, row=ATTENTION) if each.operator in scores else each
            for each in found
        ]

    def _counted(self, operator: int) -> CountedOperator | None:
        name = self.name(operator)
        if name.startswith("_scaled_dot_product"):
            return self._fused_attention(operator)
        in_place = name.endswith("_") and not name.endswith("__")
        row, itemsize = _ROW_OF.get(name.removesuffix("_")), self.itemsize(operator)
        if row is None or itemsize is None:
            return None
        output = -1 if in_place else int(self._first_alloc[operator])
        if output >= 0:
            elements = int(self.recording.alloc_bytes[output]) // itemsize
        else:
            written = self.recording.kernel_written[int(self._first_kernel[operator])]
            elements = int(written) // itemsize
        return CountedOperator(operator, row, elements, output)

    def _fused_attention(self, operator: int) -> CountedOperator | None:
        kernel, itemsize = int(self._first_kernel[operator]), self.itemsize(operator)
        output = int(self._first_alloc[operator])
        if kernel < 0 or itemsize is None or output < 0:
            return None
        recording = self.recording
        scores = 1
        for column in (recording.kernel_rows, recording.kernel_columns, recording.kernel_batches):
            scores *= int(column[kernel])
        elements = int(recording.alloc_bytes[output]) // itemsize
        return CountedOperator(operator, PRODUCTS, elements, output, extra=2 * scores)

    def _scores(self, found: list[CountedOperator]) -> set[int]:
        """The matmuls that computed the scores of a softmax: of as many numbers, shortly before."""
        scores: set[int] = set()
        for index, each in enumerate(found):
            if each.row != ATTENTION:
                continue
            for before in reversed(found[max(0, index - _SCORES_WITHIN) : index]):
                if before.row == PRODUCTS and before.elements == each.elements:
                    scores.add(before.operator)
                    break
        return scores


def _firsts(owners: IntArray, count: int) -> IntArray:
    """For each operator the first row of ``owners`` that names it; -1 for none."""
    firsts = np.full(count, -1, dtype=np.int64)
    rows = np.flatnonzero(owners >= 0)[::-1]
    firsts[owners[rows]] = rows
    return firsts
