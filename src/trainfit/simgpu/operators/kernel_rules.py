"""One kernel, the registry of rules for an operator's kernels, and an operator's least work."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from trainfit.results.gpus import Kernel
from trainfit.results.text import dtype_name
from trainfit.simgpu.device.tensor import SimulatedTensor, Spec
from trainfit.simgpu.device.values import tensors_in
from trainfit.torch_private.operators import short_name

# ---
# The least work of an operator on any GPU, for a lower bound of a step's time.
#
# Bytes. A cache of ``L`` bytes holds at most ``L`` of what an operator reads when it begins, and
# at most ``L`` of what it wrote when it ends: the device's memory is read by ``reads - L`` at
# least, and written by ``writes - L``. Counted are operators that certainly touch every byte of
# their operands and have no FLOPs counted: elementwise ones, and the optimizers' over lists of
# parameters. Not counted are those that may not: look-ups, copies from the host, fills; nor
# normalizations and reductions, so that the sum stays below what is moved.


#: Where a GPU's L2 is not known: more than any has (126 MB of a B200, NVIDIA Blackwell).
_LARGE_L2_BYTES = 256 << 20
#: They make or change a tensor without a kernel.
_WITHOUT_KERNEL = ("empty", "new_empty", "resize_", "set_", "record_stream", "wait_tensor")
#: Namespaces of operators that launch nothing themselves: "prim" holds questions about a tensor,
#: such as ``prim::device``; "c10d" collectives, whose copies are operators of their own.
_WITHOUT_KERNELS = ("prim", "c10d")
#: Operators over lists of tensors: all of an optimizer's parameters at once.
_OVER_LISTS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
#: They write without reading what they write to.
_BLIND = ("_foreach_zero_", "_foreach_copy_")


def kind_of_work(func: Any, dtype: torch.dtype) -> str:
    """ "KIND/DTYPE" of an operator whose FLOPs are counted: see ``results.trace.Compute``."""
    name = short_name(func)
    kind = "matmul"
    if "rnn" in name:
        return f"matmul/{_shown(dtype, 'convolution')}"  # cuDNN's switch for TF32
    if "conv" in name:
        kind = "convolution"
    elif "attention" in name:
        kind = "attention"
    return f"{kind}/{_shown(dtype, kind)}"


def _shown(dtype: torch.dtype, kind: str) -> str:
    if dtype is torch.float32 and may_round(kind):
        return "tfloat32"
    return dtype_name(dtype)


def may_round(kind: str) -> bool:
    """May float32 be rounded to TF32 now? Attention's float32 kernels use TF32 by themselves."""
    if kind == "attention":
        return True
    backend = torch.backends.cudnn if kind == "convolution" else torch.backends.cuda.matmul
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # set by the newer fp32_precision, some of it: then it may
        return True


@functools.cache
def makes_kernel(func: Any) -> bool:
    """Does the operator launch a kernel (or a copy), if its operands are not empty?"""
    return func.namespace not in _WITHOUT_KERNELS and not str(short_name(func)).startswith(
        _WITHOUT_KERNEL
    )


def least_moved_bytes(func: Any, args: tuple[Any, ...], result: Any, l2_bytes: int | None) -> int:
    """Bytes between the device's memory and its cache that the operator cannot do without."""
    name = short_name(func)
    listed = name.startswith(_OVER_LISTS)
    if not (listed or torch.Tag.pointwise in func.tags):
        return 0
    cache = _LARGE_L2_BYTES if l2_bytes is None else l2_bytes
    reads = 0 if name in _BLIND else _dense_bytes(tensors_in(args))
    writes = _dense_bytes(tensors_in(_written(name, args, result) if listed else result))
    return max(0, reads - cache) + max(0, writes - cache)


def _written(name: str, args: tuple[Any, ...], result: Any) -> Any:
    """What an operator over lists of tensors writes for certain: parameters, and an optimizer's
    states (gradients only with a scaler; ``_fused_adam_(self, grads, exp_avgs, …)``)."""
    if name.startswith("_foreach_"):
        return args[:1] if name.endswith("_") else result
    return (*args[:1], *args[2 : 4 if "adam" in name else 3])


def _dense_bytes(tensors: Iterable[SimulatedTensor]) -> int:
    """Each tensor once; none of those that repeat elements (expanded) and are smaller thus."""
    once = {id(tensor): tensor for tensor in tensors}.values()
    return sum(tensor._spec.nbytes for tensor in once if 0 not in tensor._spec.stride)


Arguments = Mapping[str, Any]
#: From an operator's arguments by name, its result and its FLOPs.
Rule = Callable[[Arguments, Any, int], list[Kernel]]

RULES: Final[dict[str, Rule]] = {}


def launched_by(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


# --- Tensors ------------------------------------------------------------------------------------


def stored_bytes(spec: Spec) -> int:
    """Bytes of the different elements of a tensor: repeated dimensions (stride 0) once."""
    if spec.contiguous:
        return spec.nbytes
    sizes = (size for size, step in zip(spec.size, spec.stride, strict=True) if step)
    return math.prod(sizes, start=spec.dtype.itemsize) if spec.numel else 0


def bytes_of(tensors: Iterable[Any]) -> int:
    """Bytes of simulated tensors, each counted once."""
    once = {id(tensor): tensor for tensor in tensors if type(tensor) is SimulatedTensor}
    return sum(stored_bytes(each._spec) for each in once.values())


def dtype_of(tensor: Any, kind: str = "") -> str:
    """The numbers in which a kernel computes; ``kind`` ("matmul", "convolution") may round to
    TF32."""
    dtype = tensor._spec.dtype
    if dtype is torch.float32:
        return "tfloat32" if kind and may_round(kind) else "float32"
    if dtype.is_floating_point:
        name = dtype_name(dtype)
        return "float8" if name.startswith("float8") else name
    return "integer"
