"""Launches of kernels that a stand-in's package has: each is an operator of the package's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from trainfit.results.gpus import Kernel
from trainfit.simgpu.operators.kernel_rules import (
    RULES,
    Arguments,
    bytes_of,
    dtype_of,
    tensors_in,
)

_SCHEMA: Final = (
    "(str kind, Tensor[] reads, Tensor(a!)[] writes, int flops, int rows, int columns, int depth, "
    "int batches) -> ()"
)
#: Of packages whose kernels were launched: PyTorch keeps an operator as long as its library.
_LIBRARIES: Final[dict[str, torch.library.Library]] = {}


def launch(
    name: str,
    kind: str,
    reads: Sequence[Any],
    writes: Sequence[Any],
    flops: int = 0,
    sizes: tuple[int, int, int, int] = (0, 0, 0, 1),
) -> None:
    """Launch the kernel ``name`` ("package::kernel"), which reads and writes tensors (``None``
    among them stands for none); ``sizes`` of a matmul are rows, columns, depth and batches."""
    read, written = ([each for each in some if each is not None] for some in (reads, writes))
    _operator(name)(kind, read, written, flops, *sizes)


def _operator(name: str) -> Any:
    package, _, kernel = name.partition("::")
    library = _LIBRARIES.get(package)
    if library is None:
        library = _LIBRARIES[package] = torch.library.Library(package, "FRAGMENT")
    if kernel not in RULES:
        library.define(f"{kernel}{_SCHEMA}")
        library.impl(kernel, lambda *_: None, "Meta")
        RULES[kernel] = _launched
    return getattr(getattr(torch.ops, package), kernel)


def _launched(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    read, written = tensors_in(list(call["reads"])), tensors_in(list(call["writes"]))
    sizes = (call[name] for name in ("rows", "columns", "depth", "batches"))
    dtype = dtype_of((read or written)[0])
    return [Kernel(call["kind"], dtype, call["flops"], bytes_of(read), bytes_of(written), *sizes)]
