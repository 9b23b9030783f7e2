"""The kernels that an operator launches on the GPU, with each one's FLOPs and bytes.

FLOPs are those of :mod:`trainfit.simgpu.kernels.flops`. Traffic is what a kernel must read and
write if nothing stays in a cache: each operand once, or as often as PyTorch's and cuDNN's kernels
go over it; of a tensor that repeats elements (expanded) those that it has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from trainfit.simgpu.dispatch.layouts import innermost
from trainfit.simgpu.dispatch.tensor import SimulatedTensor, Spec
from trainfit.simgpu.kernels.convolution import Geometry
from trainfit.simgpu.kernels.flops import by_name, flops_of
from trainfit.simgpu.kernels.lower_bound import makes_kernel, may_round, tensors_in

aten = torch.ops.aten

_HALVES: Final = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, or ``launches`` of the same kind with their work together.

    ``kind`` and ``dtype`` are of :mod:`trainfit.results.runs.kernels`. ``rows``, ``columns`` and
    ``depth`` are those of a matmul (m, n, k; also of the implicit one of a convolution),
    of which there are ``batches`` at once; 0 in other kernels, but for "resampling", where ``rows``
    threads take ``depth`` turns each, one after the other.
    """

    kind: str
    dtype: str
    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    rows: int = 0
    columns: int = 0
    depth: int = 0
    batches: int = 1
    launches: int = 1


Arguments = Mapping[str, Any]
#: From an operator's arguments by name, its result and its FLOPs.
Rule = Callable[[Arguments, Any, int], list[Kernel]]

_RULES: Final[dict[str, Rule]] = {}


def kernels_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[Kernel]:
    """What ``func`` launches; nothing for empty tensors. Views are not to be asked for."""
    if not makes_kernel(func):
        return []
    flops = flops_of(func, args, kwargs, result)
    rule = _RULES.get(func._opname)
    if rule is not None:
        found = rule(by_name(func, args, kwargs), result, flops)
    else:
        found = [_by_operands(func, args, kwargs, result, flops)]
    return [each for each in found if each.read_bytes + each.written_bytes > 0]


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


# --- Tensors ------------------------------------------------------------------------------------


def stored_bytes(spec: Spec) -> int:
    """Bytes of the different elements of a tensor: repeated dimensions (stride 0) once."""
    if spec.contiguous:
        return spec.nbytes
    sizes = (size for size, step in zip(spec.size, spec.stride, strict=True) if step)
    return math.prod(sizes, start=spec.dtype.itemsize) if spec.numel else 0


def _bytes(tensors: Iterable[Any]) -> int:
    """Of simulated tensors, each once."""
    once = {id(each): each for each in tensors if type(each) is SimulatedTensor}
    return sum(stored_bytes(each._spec) for each in once.values())


def _dtype(tensor: Any, kind: str = "") -> str:
    """In which numbers a kernel computes; ``kind`` ("matmul", "convolution") may round to TF32."""
    dtype = tensor._spec.dtype
    if dtype is torch.float32:
        return "tfloat32" if kind and may_round(kind) else "float32"
    if dtype.is_floating_point:
        name = str(dtype).removeprefix("torch.")
        return "float8" if name.startswith("float8") else name
    return "integer"


def dtype_name(tensor: SimulatedTensor) -> str:
    """In which numbers a kernel over this tensor computes."""
    return _dtype(tensor)


# --- Matmuls ----------------------------------------------------------------------------


@_rule("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "mv", "addmv", "dot", "vdot")
def _product(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """(…, m, k) times (…, k, n) or a vector; what is added is read in addition."""
    left = _first(call, "mat1", "batch1", "mat", "self")
    right = _first(call, "mat2", "batch2", "vec", "tensor", "other")
    *before, depth = left._spec.size
    rows = before.pop() if before else 1
    columns = right._spec.size[-1] if len(right._spec.size) > 1 else 1
    batches = math.prod(before)
    return [
        Kernel(
            "matmul",
            _dtype(left, "matmul"),
            flops or 2 * batches * rows * columns * depth,
            _bytes([left, right, call.get("self")]),
            _bytes(tensors_in(result)),
            rows,
            columns,
            depth,
            batches,
        )
    ]


def _first(call: Arguments, *names: str) -> Any:
    return next(call[name] for name in names if name in call)


# --- Convolutions -------------------------------------------------------------------------------


@_rule("convolution", "_convolution", "cudnn_convolution")
def _convolution(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    shape = _Convolution(call, result, flops)
    return [*shape.layouts(), shape.forward()]


@_rule("convolution_backward")
def _convolution_backward(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    of_input, of_weight, of_bias = call["output_mask"]
    passes = max(1, of_input + of_weight)  # each of as many FLOPs
    shape = _Convolution(call, call["grad_output"], flops // passes)
    found: list[Kernel] = []
    if of_input:
        found += [*shape.layouts(), shape.input_gradient()]
    if of_weight:
        found += [*shape.layouts(), shape.weight_gradient()]
    if of_bias:
        read = _bytes([shape.result])
        found.append(Kernel("reduction", _dtype(shape.result), 0, read, 4 * shape.outputs))
    return found


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
        self.dtype = _dtype(source, "convolution")

    def layouts(self) -> list[Kernel]:
        """Both tensors of a pass are turned into NHWC, or back, for tensor cores (decision 4)."""
        on_tensor_cores = self.dtype == "tfloat32" or self.source._spec.dtype in _HALVES
        geometry = self.geometry
        if not on_tensor_cores or self._depthwise or geometry.pointwise or geometry.channels_last:
            return []
        sizes = [stored_bytes(each._spec) for each in (self.source, self.result)]
        return [Kernel("layout", self.dtype, 0, size, size) for size in sizes]

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
        written = stored_bytes(writes._spec)
        return Kernel(kind, self.dtype, self.flops, _bytes(reads), written, *sizes, self.groups)


#: A convolution's arguments that say where the filter goes, in the order of its schema.
_PLACES: Final = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


# --- Attention and recurrent networks -----------------------------------------------------------


def _attention(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    query, key = call["query"], call["key"]
    batch, heads, rows, size = query._spec.size
    backward = any(name.startswith("grad_out") for name in call)
    reads = _bytes(tensors_in(list(call.values())))
    return [
        Kernel(
            "attention_gradient" if backward else "attention",
            _dtype(query, "matmul"),
            flops,
            reads,
            _bytes(tensors_in(result)),
            rows,
            key._spec.size[2],
            size,
            batch * heads,
        )
    ]


for _backend in ("flash", "efficient", "cudnn"):
    for _way in ("", "_backward"):
        _rule(f"_scaled_dot_product_{_backend}_attention{_way}")(_attention)


@_rule("_cudnn_rnn", "_cudnn_rnn_backward")
def _recurrent(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """Time steps follow one another: each has its own matmul for every layer."""
    source, hidden = call["input"], call["hx"]
    steps = len(call["batch_sizes"]) or source._spec.size[1 if call["batch_first"] else 0]
    layers, _, size = hidden._spec.size
    batch = max(1, math.prod(source._spec.size[:-1]) // max(1, steps))
    reads = _bytes(tensors_in(list(call.values())))
    written = _bytes(tensors_in(result))
    dtype = _dtype(source, "convolution")
    depth = max(1, flops // max(1, 2 * batch * size * layers * steps))
    return [
        Kernel("recurrent", dtype, flops, reads, written, batch, size, depth, 1, layers * steps)
    ]


# --- Resampling ---------------------------------------------------------------------------------


def _upsampled(knows_last: bool) -> Rule:
    """A thread for each place, which goes through images and channels one after the other;
    ``knows_last``: channels-last tensors have a kernel with a thread for each element
    (ATen/native/cuda/UpSampleBilinear2d.cu, UpSampleBicubic2d.cu)."""

    def rule(call: Arguments, result: Any, flops: int) -> list[Kernel]:
        source = call["self"]
        images, channels, *places = result._spec.size
        serial = not (knows_last and innermost(source._spec) == -3)
        rows, depth = (math.prod(places), images * channels) if serial else (0, 0)
        read, written = _bytes([source]), _bytes([result])
        return [Kernel("resampling", _dtype(result), flops, read, written, rows, 0, depth)]

    return rule


_rule("upsample_bilinear2d")(_upsampled(knows_last=True))
_rule("upsample_bicubic2d")(_upsampled(knows_last=False))


# --- Between host and device --------------------------------------------------------------------


@_rule("_to_copy", "copy_")
def _copy(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """``copy_(self, src)`` writes to its first argument, ``_to_copy(self)`` to a new tensor."""
    target, source = (call["self"], call["src"]) if "src" in call else (result, call["self"])
    here, there = type(source) is SimulatedTensor, type(target) is SimulatedTensor
    if here and there:
        kind = _pointwise([source, target])
        return [Kernel(kind, _dtype(target), 0, _bytes([source]), stored_bytes(target._spec))]
    if there:
        pinned = call["non_blocking"] and source.is_pinned()
        size = source.numel() * source.element_size()
        kind = "upload_pinned" if pinned else "upload"
        return [Kernel(kind, _dtype(target), 0, size, stored_bytes(target._spec))]
    return [Kernel("download", _dtype(source), 0, _bytes([source]), _bytes([source]))]


@_rule("_local_scalar_dense")
def _item(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    source = call["self"]
    size = source._spec.dtype.itemsize
    return [Kernel("download", _dtype(source), 0, size, size)]


@_rule("slice_backward", "select_backward")
def _slice_gradient(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """Zeros, and a copy into a part of them (ATen/native/TensorShape.cpp)."""
    gradient, dtype = call["grad_output"], _dtype(result)
    same = innermost(gradient._spec) in (None, innermost(result._spec))
    kind, part = "pointwise" if same else "pointwise_reordered", stored_bytes(gradient._spec)
    return [
        Kernel("fill", dtype, 0, 0, stored_bytes(result._spec)),
        Kernel(kind, dtype, 0, part, part),
    ]


# --- Everything else: by its operands -----------------------------------------------------------

#: Kinds of operators by the beginning of their names; "" is determined by tags and operands.
_KINDS: Final[tuple[tuple[str, str], ...]] = (
    ("_foreach_zero_", "fill"),
    ("_foreach_", "optimizer"),
    ("_fused_", "optimizer"),
    ("_softmax", "softmax"),
    ("_log_softmax", "softmax"),
    ("native_dropout", "pointwise"),
    ("max_pool", "pooling"),
    ("avg_pool", "pooling"),
    ("_adaptive_avg_pool", "pooling"),
    ("adaptive_max_pool", "pooling"),
    ("upsample", "resampling"),
    ("_upsample", "resampling"),
    ("grid_sampler", "resampling"),
    ("im2col", "resampling"),
    ("col2im", "resampling"),
    ("reflection_pad", "resampling"),
    ("replication_pad", "resampling"),
    ("constant_pad", "pointwise"),
    ("index", "indexing"),
    ("_index_put", "indexing"),
    ("_unsafe_index", "indexing"),
    ("gather", "indexing"),
    ("scatter", "indexing"),
    ("embedding", "indexing"),
    ("masked_select", "indexing"),
    ("nonzero", "indexing"),
    ("take", "indexing"),
    ("roll", "pointwise"),
    ("flip", "pointwise_reordered"),
    ("sort", "sorting"),
    ("topk", "sorting"),
    ("cumsum", "sorting"),
    ("cumprod", "sorting"),
    ("unique", "sorting"),
    ("_unique", "sorting"),
    ("randperm", "sorting"),
    ("cat", "concatenation"),
    ("stack", "concatenation"),
    ("clone", "copy"),
    ("contiguous", "copy"),
    ("repeat", "copy"),
    ("nll_loss", "reduction"),
    ("fill", "fill"),
    ("zero", "fill"),
    ("full", "fill"),
    ("ones", "fill"),
    ("new_zeros", "fill"),
    ("new_ones", "fill"),
    ("new_full", "fill"),
    ("arange", "fill"),
    ("linspace", "fill"),
    ("eye", "fill"),
    ("rand", "fill"),
    ("normal", "fill"),
    ("uniform", "fill"),
    ("bernoulli", "fill"),
    ("random", "fill"),
)
#: These read nothing of what they write to.
_BLIND: Final = ("fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")


def _by_operands(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, flops: int
) -> Kernel:
    """One kernel that reads its arguments and writes its results, each once."""
    name = func._opname
    given, made = tensors_in((args, tuple(kwargs.values()))), tensors_in(result)
    written = {id(each) for each in made}
    changed = _changed(func, args, kwargs)
    blind = name.startswith(("_foreach_zero_", "_foreach_copy_")) or name in _BLIND
    reads = [each for each in given if not (blind and id(each) in changed)]
    writes = [*made, *(each for each in given if id(each) in changed and id(each) not in written)]
    kind = _kind(func, name, given, made)
    read_bytes, written_bytes = _bytes(reads), _bytes(writes)
    if kind == "indexing":
        # Of a table only the rows that are asked for are read, or changed.
        rows = min(read_bytes, written_bytes)
        read_bytes, written_bytes = rows, written_bytes if made and name != "index_put_" else rows
    first = next(iter([*made, *given]), None)
    dtype = _dtype(first) if first is not None else "float32"
    launches = _listed_launches(args) if name.startswith(("_foreach_", "_fused_")) else 1
    return Kernel(kind, dtype, flops, read_bytes, written_bytes, launches=launches)


#: multi_tensor_apply in ATen/native/cuda/MultiTensorApply.cuh: elements of a chunk, chunks and
#: tensors of one launch, the latter by the number of lists.
_CHUNK, _MOST_BLOCKS = 65536, 320
_MOST_TENSORS: Final = (110, 64, 48, 36, 30)


def _listed_launches(args: Sequence[Any]) -> int:
    """Kernels for an operator over lists of tensors."""
    lists = [tensors_in(each) for each in args if isinstance(each, list | tuple)]
    lists = [each for each in lists if each]
    if not lists:
        return 1
    most = _MOST_TENSORS[min(len(lists), len(_MOST_TENSORS)) - 1]
    chunks = sum(-(-each._spec.numel // _CHUNK) for each in lists[0])
    return max(1, -(-len(lists[0]) // most), -(-chunks // _MOST_BLOCKS))


def _kind(func: Any, name: str, given: Sequence[Any], made: Sequence[Any]) -> str:
    for start, kind in _KINDS:
        if name.startswith(start):
            found = kind
            break
    else:
        found = "pointwise" if torch.Tag.pointwise in func.tags else _untold(given, made)
    if "backward" in name and found == "pooling":
        return "pooling_gradient"
    if found in ("pointwise", "copy"):
        return _pointwise([*given, *made])
    return found


def _pointwise(operands: Sequence[Any]) -> str:
    """An elementwise kernel, by how it goes over its operands."""
    return "pointwise" if _same_order(operands) else "pointwise_reordered"


def _untold(given: Sequence[Any], made: Sequence[Any]) -> str:
    """Fewer elements come out than go in: a reduction."""
    elements = max((each._spec.numel for each in given), default=0)
    return "reduction" if sum(each._spec.numel for each in made) * 2 < elements else "pointwise"


def _same_order(tensors: Sequence[Any]) -> bool:
    """Do the large ones have the same innermost dimension, so that all is read in order?"""
    most = max((each._spec.numel for each in tensors), default=0)
    inner = {innermost(each._spec) for each in tensors if each._spec.numel == most}
    return len({each for each in inner if each is not None}) < 2


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    """Ids of the tensors that the schema says are written to."""
    schema = func._schema
    if not schema.is_mutable:
        return set()
    found: set[int] = set()
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = (
            kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
        )
        found |= {id(each) for each in tensors_in(value)}
    return found


def _passes(kind: str, reads: int) -> Rule:
    """Kernels that go over their (large) arguments so many times; small ones count once."""

    def rule(call: Arguments, result: Any, flops: int) -> list[Kernel]:
        given, made = tensors_in(list(call.values())), tensors_in(result)
        read, written = _bytes(given), _bytes(made)
        dtype = _dtype(given[0])
        return [Kernel(kind, dtype, flops, reads * read, written, launches=reads)]

    return rule


@_rule(
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("cudnn_batch_norm", "_batch_norm_with_update", "_native_batch_norm_legit_no_training"),
    "batch_norm_elemt",
)
def _batch_norm(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """Training: one pass for the statistics, one that normalizes. Otherwise an elementwise one."""
    train = call.get("training", call.get("train", True))
    kind = f"batch_norm{_last(call)}" if train else "batch_norm_eval"
    return _passes(kind, 1 + bool(train))(call, result, flops)


@_rule("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def _batch_norm_gradient(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    return _passes(f"batch_norm{_last(call)}_gradient", 2)(call, result, flops)


def _last(call: Arguments) -> str:
    """Normalized are channels that are next to each other, by kernels of their own?"""
    spec = call["input"]._spec
    return "_nhwc" if len(spec.size) > 2 and innermost(spec) == 1 - len(spec.size) else ""


_rule("native_layer_norm", "_fused_rms_norm")(_passes("normalization", 1))
_rule("native_group_norm")(_passes("normalization", 2))
_rule("native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward")(
    _passes("normalization_gradient", 2)
)
