"""The forward pass that a recorded peak belongs to, and the elements of its operators' results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from trainfit.hardware.gpu_figures import GpuNameError
from trainfit.hardware.gpu_lookup import find_gpu
from trainfit.results.runs.recording import PHASES, IntArray, Recording
from trainfit.results.runs.steps import DTYPES, KINDS, MARKS

# ---
# The operators whose results a hand formula counts, with the number of elements of each.
#
# The note on ACT counts, for a layer of a Transformer, ``8 S D + 2 H S^2 + 2 S FFN`` numbers: Q, K
# and V, the attention's output, its projection, residual sums and layer norms; scores and
# probabilities; the hidden layer and its activation. The notes on VGG16 and on the T4 count each
# layer's output. Both are one rule: the results of convolutions, matmuls, normalization,
# activation functions, pooling and sums, but not of casts, copies, masks and elementwise products.


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
        """Operators of the forward pass from ``begin`` to before ``end``, in order."""
        operators = [
            operator for op in range(begin, end) if (operator := self._counted(op)) is not None
        ]
        scores = self._scores(operators)
        return [
            dataclasses.replace(counted_operator, row=ATTENTION)
            if counted_operator.operator in scores
            else counted_operator
            for counted_operator in operators
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

    def _scores(self, operators: list[CountedOperator]) -> set[int]:
        """The matmuls that computed the scores of a softmax: of as many numbers, shortly before."""
        scores: set[int] = set()
        for index, operator in enumerate(operators):
            if operator.row != ATTENTION:
                continue
            for before in reversed(operators[max(0, index - _SCORES_WITHIN) : index]):
                if before.row == PRODUCTS and before.elements == operator.elements:
                    scores.add(before.operator)
                    break
        return scores


def _firsts(owners: IntArray, count: int) -> IntArray:
    """For each operator the first row of ``owners`` that names it; -1 for none."""
    firsts = np.full(count, -1, dtype=np.int64)
    rows = np.flatnonzero(owners >= 0)[::-1]
    firsts[owners[rows]] = rows
    return firsts


_FORWARD: Final = PHASES.index("forward")
_STOPS: Final = (PHASES.index("backward"), PHASES.index("optimizer"))


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """Operators from ``begin`` to before ``end``, those whose results a hand formula counts, and
    the type that most of the FLOPs are of (float32 where there are none, and where TF32 is allowed
    on a GPU without it)."""

    begin: int
    end: int
    counted: Sequence[CountedOperator]
    compute: str


def forward_pass(operators: Operators, alloc: int) -> ForwardPass | None:
    """The forward pass before allocation ``alloc``, in its step; ``None`` if none was recorded.

    Of a step's several (micro-batches; clipping gradients looks like one) it is the one with the
    most numbers, the last of equals.
    """
    recording = operators.recording
    operator = int(recording.alloc_op[alloc])
    step = int(recording.op_step[operator]) if operator >= 0 else 0
    spans = _spans(recording)
    near = [span for span in spans if recording.op_step[span[0]] == step and span[0] <= operator]
    best, maximum = None, 0
    for begin, end in near or spans:
        counted = operators.counted(begin, end)
        numbers = sum(
            counted_operator.elements + counted_operator.extra for counted_operator in counted
        )
        if counted and numbers >= maximum:
            best, maximum = (begin, end, counted), numbers
    return None if best is None else ForwardPass(*best, _compute(recording, best[0], best[1]))


def _spans(recording: Recording) -> list[tuple[int, int]]:
    """Runs of operators without a backward pass or an optimizer's step, within one step."""
    phase, step = recording.op_phase, recording.op_step
    stops = np.isin(phase, _STOPS)
    cuts = np.flatnonzero(np.diff(stops.astype(np.int8)) | np.diff(step)) + 1
    return [
        (int(part[0]), int(part[-1]) + 1)
        for part in np.split(np.arange(len(phase)), cuts)
        if len(part) and not stops[part[0]] and (phase[part] == _FORWARD).any()
    ]


def _compute(recording: Recording, begin: int, end: int) -> str:
    chosen = (recording.kernel_op >= begin) & (recording.kernel_op < end)
    flops = np.bincount(
        recording.kernel_dtype[chosen],
        weights=recording.kernel_flops[chosen],
        minlength=len(DTYPES),
    )
    dtype = DTYPES[int(flops.argmax())] if flops.any() else "float32"
    # Recordings say which kernels may round to TF32, on any GPU.
    return "float32" if dtype == "tfloat32" and not _has_tf32(recording) else dtype


def _has_tf32(recording: Recording) -> bool:
    """Has the GPU TF32 (compute capability 8.0 on)? One that is in no list may have it."""
    try:
        return "tfloat32" in find_gpu(recording.header["gpu"]).tensor_flops
    except GpuNameError:
        return True
