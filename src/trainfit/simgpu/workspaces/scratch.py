"""Memory that GPU libraries use in addition to an operator's results.

The models by library and kernel: cuBLAS and cuDNN's convolutions here, attention, sorting
and indexing, and recurrent networks in modules of their own. Recordings name them; see
:mod:`trainfit.simgpu.workspaces.models`.
"""

from __future__ import annotations

from typing import Final

from trainfit.simgpu.workspaces import attention as _attention  # noqa: F401  (registers)
from trainfit.simgpu.workspaces import indexing as _indexing  # noqa: F401  (registers)
from trainfit.simgpu.workspaces import rnn as _rnn  # noqa: F401  (registers)
from trainfit.simgpu.workspaces.models import MODELS, workspace_bytes
from trainfit.simgpu.workspaces.models import model as _model

__all__ = ["MODELS", "workspace_bytes"]

#: Models of what a closed library chooses by itself: estimates, not facts.
ESTIMATED: Final = frozenset({"cudnn_tensor_core", "cudnn_winograd", "cudnn_rnn_workspace"})


@_model
def cublas_workspace(nbytes: int) -> int:
    """Workspace of a cuBLAS handle on one stream, kept for the life of the process.

    :mod:`trainfit.simgpu.kernels.matmul` works out its size.
    """
    return nbytes


@_model
def cublas_handle(capability_major: int) -> int:
    """The same in recordings of format version 1, by compute capability."""
    return 32 << 20 if capability_major in (9, 10) else 4096 * 1024 * 2 + 16 * 1024 * 8


@_model
def cudnn_tensor_core(copies: int, input_bytes: int, output_bytes: int) -> int:
    """cuDNN's tensor-core convolution: copies of the tensors of a pass in its workspace.

    One in the NHWC layout that the kernels want (``nchwToNhwcKernel`` and
    ``nhwcToNchwKernel`` in profiles), one more where they are rounded to TF32.
    """
    return copies * (input_bytes + output_bytes)


@_model
def cudnn_winograd(
    samples: int, inputs: int, outputs: int, height: int, width: int, itemsize: int
) -> int:
    """cuDNN's non-fused Winograd convolution, F(4x4, 3x3), for float32 3x3 at stride 1.

    Each 4x4 tile of the result (``height`` x ``width``) becomes 6x6 numbers for every input
    and every output channel, and each 3x3 filter 6x6; all three are held at once
    (Lavin and Gray, arXiv 1509.09308, section 4; CUDNN_CONVOLUTION_*_ALGO_WINOGRAD_NONFUSED).
    """
    tiles = -(-height // 4) * -(-width // 4)
    return 36 * itemsize * (samples * tiles * (inputs + outputs) + inputs * outputs)


@_model
def contiguous_copy(nbytes: int) -> int:
    """A copy that a kernel's caller makes because it wants dense operands."""
    return nbytes


@_model
def reordered_copy(nbytes: int) -> int:
    """The same where other elements become neighbours."""
    return nbytes
