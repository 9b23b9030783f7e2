"""Matrix products: cuBLAS's workspaces, and operands that it wants in another layout.

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

from trainfit.simgpu.engine import Engine, allocates
from trainfit.simgpu.tensor import SimulatedTensor

aten = torch.ops.aten

KiB, MiB = 1 << 10, 1 << 20

#: From this version on data-centre and consumer Blackwell have Hopper's size (PyTorch pull
#: request 175344), and cuBLASLt shares cuBLAS's workspace unless told otherwise (175879).
_SHARED_SINCE = (2, 12)


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
    engine.library_workspace(
        "cublas_workspace",
        (cublas_bytes(engine.gpu.capability, os.environ),),
        owner=engine.in_backward(),
    )


@allocates(
    aten.mm.default,
    aten.mm.out,
    aten.dot.default,
    aten.mv.default,
    aten.addmv.default,
    aten._int_mm.default,
    aten._scaled_mm.default,
)
def product(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """cuBLAS takes its workspace at the first product on a stream."""
    _handle(engine)
    _copies(engine, args[:2])


@allocates(aten.addmm.default, aten.addmm.out, aten.addmm_.default, aten._addmm_activation.default)
def product_and_sum(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """``addmm`` goes to cuBLASLt where the summand is a bias (addmm_out_cuda_impl)."""
    _handle(engine)
    bias, left, right = args[:3]
    lt = (
        bias.dim() == 1
        and bias.is_contiguous()
        and bias.shape[0] == right.shape[1]
        and min(*left.shape, *right.shape) > 1
    )
    nbytes = cublaslt_bytes(os.environ) if lt else 0
    if nbytes:
        owner = (engine.in_backward(), "lt")
        engine.library_workspace("cublas_workspace", (nbytes,), owner=owner)
    _copies(engine, (left, right))


@allocates(aten.bmm.default, aten.bmm.out)
def batched_product(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    _handle(engine)
    _copies(engine, args[:2])


@allocates(
    aten.baddbmm.default,
    aten.baddbmm.out,
    aten.baddbmm_.default,
    aten.addbmm.default,
    aten._trilinear.default,
)
def batched_product_and_sum(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    _handle(engine)
    _copies(engine, args[1:3])


def _copies(engine: Engine, operands: tuple[Any, ...]) -> None:
    """Operands that are neither row- nor column-major are copied for the call."""
    requests = [
        ("contiguous_copy", (tensor._spec.nbytes,))
        for tensor in operands
        if type(tensor) is SimulatedTensor and not _suits_cublas(tensor._spec)
    ]
    if requests:
        engine.workspace(*requests)


def _suits_cublas(spec: Any) -> bool:
    """prepare_matrix_for_cublas, and its like for batches."""
    if len(spec.size) < 2 or spec.numel == 0:
        return True
    (rows, columns), (down, across) = spec.size[-2:], spec.stride[-2:]
    if across == 1 and down >= max(1, columns):
        return True
    if down == 1 and across >= max(1, rows):
        return True
    # A contiguous tensor with a side of 1 has any stride there.
    return bool(down and across and rows * columns == max(rows, columns))
