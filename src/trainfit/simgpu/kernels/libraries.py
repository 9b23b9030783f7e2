"""The library of an operator's kernel: a library allocates device memory at its first use.

Only who pays is decided here; how much is a matter of the GPU's ``DeviceConstants``.
"""

from __future__ import annotations

from typing import Any

import torch

from trainfit.results.machine.constants import Library
from trainfit.simgpu.dispatch.engine import Engine
from trainfit.simgpu.dispatch.registry import LIBRARY_OF
from trainfit.simgpu.kernels.convolution import native_depthwise

_PRODUCTS = (
    *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
    *("addr", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *("linalg_solve_triangular", "triangular_solve", "linalg_lu_factor_ex", "linalg_lu_solve"),
)
_CUDNN_FORWARD = ("cudnn_batch_norm", "_cudnn_rnn", "_cudnn_ctc_loss", "cudnn_convolution")
_CUDNN_BACKWARD = ("cudnn_batch_norm_backward", "_cudnn_rnn_backward")
_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
#: cuDNN's attention is cuDNN's and no kernel of PyTorch's own.
_CUDNN_ATTENTION = "_scaled_dot_product_cudnn_attention"


def _cublas(engine: Engine, args: tuple[Any, ...]) -> Library:
    return "cublas"


def _cudnn_forward(engine: Engine, args: tuple[Any, ...]) -> Library:
    return "cudnn_forward"


def _cudnn_backward(engine: Engine, args: tuple[Any, ...]) -> Library:
    return "cudnn_backward"


def _sdpa(engine: Engine, args: tuple[Any, ...]) -> Library:
    return "sdpa"


def _convolution(engine: Engine, args: tuple[Any, ...]) -> Library | None:
    """aten::convolution: cuDNN, or PyTorch's own depthwise kernels, or matmuls."""
    if native_depthwise(args[0], args[1], *args[3:9]):
        return None
    return "cudnn_forward" if torch.backends.cudnn.enabled else "cublas"


def _convolution_backward(engine: Engine, args: tuple[Any, ...]) -> Library | None:
    if native_depthwise(args[1], args[2], *args[4:10]):
        return None
    return "cudnn_backward" if torch.backends.cudnn.enabled else "cublas"


LIBRARY_OF.update(
    {
        **dict.fromkeys(_PRODUCTS, _cublas),
        **dict.fromkeys((*_CUDNN_FORWARD, _CUDNN_ATTENTION), _cudnn_forward),
        **dict.fromkeys((*_CUDNN_BACKWARD, f"{_CUDNN_ATTENTION}_backward"), _cudnn_backward),
        **dict.fromkeys(_FUSED_ATTENTION, _sdpa),
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
    }
)
