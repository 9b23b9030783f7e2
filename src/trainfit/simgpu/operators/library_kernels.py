"""Kernels of cuBLAS, cuDNN and flash attention: matmuls, convolutions, attention, recurrence."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from trainfit.results.gpus import Kernel
from trainfit.simgpu.device.geometry import innermost
from trainfit.simgpu.device.tensor import current_engine
from trainfit.simgpu.device.values import tensors_in
from trainfit.simgpu.operators.convolution import Geometry
from trainfit.simgpu.operators.flops import grouped_sizes, packed_sizes
from trainfit.simgpu.operators.kernel_rules import (
    Arguments,
    bytes_of,
    dtype_of,
    launched_by,
    stored_bytes,
)

_HALVES: Final = (torch.float16, torch.bfloat16)
_LAYOUT_TILE: Final = 32
#: Of which a map's places are a multiple, for a matmul of its channels as they lie.
_ALIGNED_PLACES: Final = 4


# --- Matmuls ----------------------------------------------------------------------------


@launched_by("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "mv", "addmv", "dot", "vdot")
def _product(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """(…, m, k) times (…, k, n) or a vector; what is added is read in addition."""
    left = _first(call, "mat1", "batch1", "mat", "self")
    right = _first(call, "mat2", "batch2", "vec", "tensor", "other")
    *before, depth = left._spec.size
    rows = before.pop() if before else 1
    columns = right._spec.size[-1] if len(right._spec.size) > 1 else 1
    batches = math.prod(before)
    flops = flops or 2 * batches * rows * columns * depth
    moved = bytes_of([left, right, call.get("self")]), bytes_of(tensors_in(result))
    if min(rows, depth) > 1 and innermost(left._spec) == -2:
        # Rows are next to each other in memory, as columns are of others: it is their alignment
        # that counts, so that the matmul is that of both operands turned.
        rows, columns = columns, rows
    sizes = rows, columns, depth, batches
    return [Kernel("matmul", dtype_of(left, "matmul"), flops, *moved, *sizes)]


@launched_by("_weight_int4pack_mm")
def _of_four_bits(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """Weights of 4 bits are read as they lie, and multiplied in 16 (ATen/native/cuda/int4mm.cu)."""
    source, columns = call["self"], result._spec.size[-1]
    rows, depth = source._spec.size
    read, written = bytes_of(tensors_in(list(call.values()))), bytes_of(tensors_in(result))
    work = 2 * rows * columns * depth
    return [Kernel("matmul", dtype_of(source), work, read, written, rows, columns, depth)]


@launched_by("_grouped_mm")
def _grouped_product(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """A matmul for each group, in one kernel."""
    left, sizes = call["self"], grouped_sizes(call)
    read, written = bytes_of([left, call["mat2"]]), bytes_of(tensors_in(result))
    shape = (sizes.rows, sizes.columns, sizes.depth, sizes.groups)
    return [Kernel("matmul", dtype_of(left, "matmul"), flops, read, written, *shape)]


@launched_by("dequantize_4bit")
def _dequantized(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """bitsandbytes' weights of 4 bits become a dense matrix: each value is looked up."""
    read, written = bytes_of(tensors_in(list(call.values()))), bytes_of(tensors_in(result))
    return [Kernel("pointwise", dtype_of(result), 0, read, written, result._spec.numel)]


@launched_by("gemv_4bit")
def _by_four_bits(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """A few rows times such a matrix of ``shapeB`` (columns, depth), looked up on the way."""
    columns, depth = call["shapeB"]
    rows = call["A"]._spec.numel // max(1, depth)
    read = bytes_of(tensors_in(list(call.values())))
    work = flops or 2 * rows * columns * depth
    written = bytes_of(tensors_in(result))
    return [Kernel("matmul", dtype_of(result), work, read, written, rows, columns, depth)]


def _first(call: Arguments, *names: str) -> Any:
    return next(call[name] for name in names if name in call)


# --- Convolutions -------------------------------------------------------------------------------


@launched_by("convolution", "_convolution", "cudnn_convolution")
def _convolution(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    shape = _Convolution(call, result, flops)
    return [*shape.layouts(), shape.forward()]


@launched_by("convolution_backward")
def _convolution_backward(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    of_input, of_weight, of_bias = call["output_mask"]
    passes = max(1, of_input + of_weight)  # each of as many FLOPs
    shape = _Convolution(call, call["grad_output"], flops // passes)
    kernels: list[Kernel] = []
    if of_input:
        kernels += [*shape.layouts(), shape.input_gradient()]
    if of_weight:
        kernels += [*shape.layouts(summed=True), shape.weight_gradient()]
    if of_bias:
        read = bytes_of([shape.result])
        kernels.append(Kernel("reduction", dtype_of(shape.result), 0, read, 4 * shape.outputs))
    return kernels


class _Convolution:
    """One convolution: its operands, and the implicit matmuls of its three passes."""

    def __init__(self, call: Arguments, result: Any, flops: int) -> None:
        """``result`` may stand for its gradient; ``flops`` are those of one pass."""
        source, weight = call["input"], call["weight"]
        self.source, self.weight, self.result, self.flops = source, weight, result, flops
        self.geometry = Geometry(source, weight, result, *(call[name] for name in _PLACES))
        self.groups: int = self.geometry.groups
        # A transposed convolution is another one's input gradient: that one's result is its source.
        small, large = (source, result) if self.geometry.transposed else (result, source)
        self.outputs, self.inputs = small._spec.size[1], large._spec.size[1]
        self.places = small._spec.size[0] * math.prod(small._spec.size[2:])
        self.source_places = large._spec.size[0] * math.prod(large._spec.size[2:])
        self.taps = math.prod(weight._spec.size[2:])
        self.dtype = dtype_of(source, "convolution")

    def layouts(self, summed: bool = False) -> list[Kernel]:
        """The kernels that turn both tensors of a pass into NHWC, or back, for tensor cores
        (decision 4); ``summed``: of the weight gradient."""
        on_tensor_cores = self.dtype == "tfloat32" or self.source._spec.dtype in _HALVES
        geometry = self.geometry
        if not on_tensor_cores or self._depthwise or geometry.channels_last:
            return []
        if geometry.pointwise and not self._copied(summed):
            return []
        return [self._layout(each._spec) for each in (self.source, self.result)]

    def _copied(self, summed: bool) -> bool:
        """Is a 1x1 of stride 1 no matmul of the operands as they lie? Where a map's places are no
        multiple of four, and in the weight gradient where one for each sample would take more than
        copies do (trainfit.simgpu.allocator.cudnn_convolutions)."""
        source, result = self.source._spec, self.result._spec
        if not summed:
            return bool(math.prod(source.size[2:]) % _ALIGNED_PLACES)
        each = 4 * self.weight._spec.numel * source.size[0]
        return bool(10 * each > 11 * (stored_bytes(source) + stored_bytes(result)))

    def _is_matmul(self, summed: bool) -> bool:
        """Is it one matmul of all places' channels, which lie next to each other or are made to?"""
        if not self.geometry.pointwise or self.groups > 1:
            return False
        return self.geometry.channels_last or bool(self.layouts(summed))

    def _layout(self, spec: Any) -> Kernel:
        """The layout kernel with tiles of 32 places and 32 channels (cuDNN's nchwToNhwcKernel),
        which few channels do not fill."""
        channels, size = spec.size[1], stored_bytes(spec)
        filled = spec.numel // max(1, channels) * math.ceil(channels / _LAYOUT_TILE) * _LAYOUT_TILE
        return Kernel("layout", self.dtype, 0, size, size, filled)

    def forward(self) -> Kernel:
        if self.geometry.transposed:
            return self._to_source("convolution", self.source, self.result)
        return self._to_result("convolution", self.source, self.result)

    def input_gradient(self) -> Kernel:
        kind = "convolution_input_gradient"
        if self.geometry.transposed:
            return self._to_result(kind, self.result, self.source)
        return self._to_source(kind, self.result, self.source)

    def weight_gradient(self) -> Kernel:
        rows, columns = self.outputs // self.groups, self.inputs // self.groups * self.taps
        kind = "convolution_weight_gradient"
        return self._kernel(
            kind, (rows, columns, self.places), [self.source, self.result], self.weight
        )

    def _to_result(self, kind: str, reads: Any, writes: Any) -> Kernel:
        """Each place of the result: all taps of the input's channels."""
        sizes = (self.places, self.outputs // self.groups, self.inputs // self.groups * self.taps)
        return self._kernel(kind, sizes, [reads, self.weight], writes)

    def _to_source(self, kind: str, reads: Any, writes: Any) -> Kernel:
        """Each place of the input; where the step is above 1 it meets a part of the taps."""
        columns = self.inputs // self.groups
        each = self.source_places * columns * self.groups
        depth = max(1, round(self.flops / 2 / max(1, each)))
        return self._kernel(
            kind, (self.source_places, columns, depth), [reads, self.weight], writes
        )

    @property
    def _depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.inputs

    def _kernel(
        self, kind: str, sizes: tuple[int, int, int], reads: list[Any], writes: Any
    ) -> Kernel:
        if self._depthwise:
            ours = self.geometry.native_depthwise
            kind = kind.replace("convolution", "depthwise" if ours else "depthwise_nhwc")
        elif self.groups > 1:
            last = self.geometry.channels_last
            kind = kind.replace("convolution", "grouped_nhwc" if last else "grouped")
        elif self.geometry.for_winograd and not kind.endswith("weight_gradient"):
            kind = kind.replace("convolution", "convolution_3x3")
        elif self._is_matmul(summed=kind.endswith("weight_gradient")):
            kind = kind.replace("convolution", "convolution_1x1")
        written = stored_bytes(writes._spec)
        return Kernel(kind, self.dtype, self.flops, bytes_of(reads), written, *sizes, self.groups)


#: A convolution's arguments that say where the filter goes, in the order of its schema.
_PLACES: Final = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


# --- Attention and recurrent networks -----------------------------------------------------------


def _attention(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    query, key = call["query"], call["key"]
    batch, heads, rows, size = query._spec.size
    backward = any(name.startswith("grad_out") for name in call)
    reads = bytes_of(tensors_in(list(call.values())))
    return [
        Kernel(
            "attention_gradient" if backward else "attention",
            dtype_of(query, "matmul"),
            flops,
            reads,
            bytes_of(tensors_in(result)),
            rows,
            key._spec.size[2],
            size,
            batch * heads,
        )
    ]


for _backend in ("flash", "efficient", "cudnn"):
    for _way in ("", "_backward"):
        launched_by(f"_scaled_dot_product_{_backend}_attention{_way}")(_attention)


@launched_by("_flash_attention_forward", "_flash_attention_backward")
def _packed_attention(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """The kernel of attention with heads after the length, and maybe sequences one after the
    other."""
    query, sizes = call["query"], packed_sizes(call)
    kind = "attention_gradient" if "grad_out" in call else "attention"
    reads, written = bytes_of(tensors_in(list(call.values()))), bytes_of(tensors_in(result))
    dtype, blocks = dtype_of(query, "matmul"), sizes.batch * sizes.heads
    rows, columns = sizes.queries, sizes.keys
    return [Kernel(kind, dtype, flops, reads, written, rows, columns, sizes.size, blocks)]


@launched_by("_cudnn_rnn", "_cudnn_rnn_backward")
def _recurrent(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """Time steps follow one another: each has its own matmul for every layer, and a kernel for the
    cells (elemWiseRNNcell, LSTM_elementWise_bp1 in profiles of cuDNN 9). ``batches`` are the
    matmuls that the CPU launches one by one."""
    source, hidden = call["input"], call["hx"]
    steps = len(call["batch_sizes"]) or source._spec.size[1 if call["batch_first"] else 0]
    layers, _, size = hidden._spec.size
    batch = max(1, math.prod(source._spec.size[:-1]) // max(1, steps))
    reads = bytes_of(tensors_in(list(call.values())))
    written = bytes_of(tensors_in(result))
    dtype = dtype_of(source, "convolution")
    depth = max(1, flops // max(1, 2 * batch * size * layers * steps))
    calls = layers * steps
    sizes = batch, size, depth, layers if _persists(call, batch) else calls
    return [Kernel("recurrent", dtype, flops, reads, written, *sizes, 2 * calls)]


#: Hidden sizes up to which one kernel goes over all time steps (use_rnn_persist_small_h in
#: ATen/native/cudnn/RNN.cpp): forward, backward; of cells with gates and of plain ones.
_SMALL_GATED, _SMALL_PLAIN = (192, 128), (384, 256)
_PLAIN_CELLS: Final = (0, 1)
_LSTM: Final = 2
#: Of one layer in one direction in float16, where there are so many multiprocessors and for these
#: batches (use_persist_common_heuristics and use_persist_device_heuristics there; Volta's own list
#: of lengths is taken for the same).
_PERSISTENT_SMS, _PERSISTENT_SIDE, _PERSISTENT_MOST = 80, 128, 1024


def _persists(call: Arguments, batch: int) -> bool:
    """Does one kernel take all time steps of a layer?"""
    source, hidden = call["input"], call["hx"]
    layers, _, size = hidden._spec.size
    if call["proj_size"] or call["batch_sizes"]:
        return False
    small = _SMALL_PLAIN if call["mode"] in _PLAIN_CELLS else _SMALL_GATED
    if size <= small["grad_output" in call]:
        return True
    gpu = current_engine().gpu
    return (
        source._spec.dtype is torch.float16
        and call["mode"] == _LSTM
        and layers == 1
        and size <= _PERSISTENT_MOST
        and size % _PERSISTENT_SIDE == source._spec.size[-1] % _PERSISTENT_SIDE == 0
        and batch % 8 == 0
        and batch <= _PERSISTENT_SIDE
        and gpu.sm_count >= _PERSISTENT_SMS
        and gpu.capability[1] not in (5, 6)
    )
