"""Matmuls: cuBLAS's workspaces, and operands that it needs in another layout.

Sources: ATen/cuda/CublasHandlePool.cpp, ATen/native/cuda/Blas.cpp, read in versions from
2.8 to 2.13.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.torch_version import TorchVersion

from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.geometry import FAKES, dense_copy
from trainfit.simgpu.device.registry import allocates
from trainfit.simgpu.device.tensor import SimulatedTensor
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import no_dispatch

aten = torch.ops.aten

KiB, MiB = 1 << 10, 1 << 20

#: From this version on data-centre and consumer Blackwell have Hopper's size (PyTorch pull
#: request 175344), and cuBLASLt shares cuBLAS's workspace unless told otherwise (175879).
_SHARED_SINCE = (2, 12)


def _grouped(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``_grouped_mm``, whose fake kernel refuses what CUDA's allows: float32 and
    float16, group by group (ATen/native/cuda/GroupedBlas.cpp)."""
    left, right, *others = args
    given = left.dtype
    with no_dispatch():
        if given in (torch.float32, torch.float16) and right.dtype is given:
            left, right = (each.to(torch.bfloat16) for each in (left, right))
        result = func(left, right, *others, **kwargs)
        return result if kwargs.get("out_dtype") else result.to(given)


def _of_four_bits(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``_weight_int4pack_mm``, whose fake kernel asks PyTorch's own fake tensors for
    their device since 2.14: eight columns to each first index (ATen/native/cuda/int4mm.cu)."""
    source, packed = args[:2]
    return source.new_empty(source.shape[0], 8 * packed.shape[0])


FAKES["aten::_grouped_mm"] = _grouped
FAKES["aten::_weight_int4pack_mm"] = _of_four_bits


def cublas_bytes(capability: tuple[int, int], env: Mapping[str, str]) -> int:
    """Bytes of one workspace: getChosenWorkspaceSize.

    ``:4096:2:16:8`` (two of 4 MiB and eight of 16 KiB), 32 MiB on Hopper and Blackwell;
    8,519,680 bytes are reported in pytorch issue 95668. ``CUBLAS_WORKSPACE_CONFIG`` is a
    list of ``:KiB:count``.
    """
    given = re.findall(r":([0-9]+):([0-9]+)", env.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if given:
        return sum(int(size) * KiB * int(count) for size, count in given)
    if capability == (9, 0) or (_shares() and capability[0] in (9, 10, 12)):
        return 32 * MiB
    return 2 * 4096 * KiB + 8 * 16 * KiB


def cublaslt_bytes(env: Mapping[str, str]) -> int:
    """Bytes of cuBLASLt's own workspace, 0 where it shares cuBLAS's.

    getCUDABlasLtWorkspaceSize: 1 MiB, or ``CUBLASLT_WORKSPACE_SIZE`` in KiB.
    """
    unified = env.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if unified == "1" or (unified is None and _shares()):
        return 0
    match = re.match(r"\s*(\d+)", env.get("CUBLASLT_WORKSPACE_SIZE", "1024"))
    return (int(match[1]) if match else 1024) * KiB


def _shares() -> bool:
    return TorchVersion(torch.__version__) >= _SHARED_SINCE  # type: ignore[operator,no-any-return]


def _handle(engine: Engine) -> None:
    """A handle belongs to a thread, and autograd runs backward in a thread of its own.

    So the forward and the backward pass have a workspace each, on every stream.
    """
    owner = ("cublas", engine.in_backward())
    if not engine.has_library_workspace(owner):
        nbytes = cublas_bytes(engine.gpu.capability, os.environ)
        engine.library_workspace("cublas_workspace", (nbytes,), owner)


def _lt_handle(engine: Engine) -> None:
    """cuBLASLt's workspace, in versions where it does not share cuBLAS's."""
    owner = ("cublaslt", engine.in_backward())
    if not engine.has_library_workspace(owner):
        engine.library_workspace("cublas_workspace", (cublaslt_bytes(os.environ),), owner)


@allocates(
    aten.mm.default,
    aten.mm.out,
    aten.dot.default,
    aten.mv.default,
    aten.addmv.default,
    private.int_mm.default,
    private.scaled_mm.default,
    aten.bmm.default,
    aten.bmm.out,
)
def product(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """cuBLAS allocates its workspace at the first matmul on a stream."""
    _handle(engine)
    if not (args[0]._spec.suits_blas and args[1]._spec.suits_blas):
        _copies(engine, args[:2])


@allocates(
    aten.addmm.default, aten.addmm.out, aten.addmm_.default, private.addmm_activation.default
)
def product_and_sum(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """``addmm`` goes to cuBLASLt where the summand is a bias (addmm_out_cuda_impl)."""
    _handle(engine)
    _, left, right = args[:3]
    if _goes_to_lt(*(argument._spec for argument in args[:3])):
        _lt_handle(engine)
    if not (left._spec.suits_blas and right._spec.suits_blas):
        _copies(engine, (left, right))


def _goes_to_lt(bias: Any, left: Any, right: Any) -> bool:
    return (
        len(bias.size) == 1
        and bias.contiguous
        and bias.size[0] == right.size[1]
        and min(*left.size, *right.size) > 1
    )


@allocates(
    aten.baddbmm.default,
    aten.baddbmm.out,
    aten.baddbmm_.default,
    aten.addbmm.default,
    private.trilinear.default,
)
def batched_product_and_sum(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    _handle(engine)
    _copies(engine, args[1:3])


def _copies(engine: Engine, operands: tuple[Any, ...]) -> None:
    """Operands that are neither row- nor column-major are copied for the call."""
    engine.workspace(
        *(
            dense_copy(tensor)
            for tensor in operands
            if type(tensor) is SimulatedTensor and not tensor._spec.suits_blas
        )
    )
