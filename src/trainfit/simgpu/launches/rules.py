"""One kernel, and the registry of rules that say which kernels an operator launches.

FLOPs are those of :mod:`trainfit.simgpu.launches.flops`. Traffic is what a kernel must read and
write if nothing stays in a cache: each operand once, or as often as PyTorch's and cuDNN's kernels
go over it; of a tensor that repeats elements (expanded) those that it has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from trainfit.simgpu.launches.lower_bound import may_round
from trainfit.simgpu.tensors.tensor import SimulatedTensor, Spec


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
    """Of simulated tensors, each once."""
    once = {id(each): each for each in tensors if type(each) is SimulatedTensor}
    return sum(stored_bytes(each._spec) for each in once.values())


def dtype_of(tensor: Any, kind: str = "") -> str:
    """In which numbers a kernel computes; ``kind`` ("matmul", "convolution") may round to TF32."""
    dtype = tensor._spec.dtype
    if dtype is torch.float32:
        return "tfloat32" if kind and may_round(kind) else "float32"
    if dtype.is_floating_point:
        name = str(dtype).removeprefix("torch.")
        return "float8" if name.startswith("float8") else name
    return "integer"
