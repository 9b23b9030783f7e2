"""What PyTorch refuses while ``torch.use_deterministic_algorithms(True)`` is on: operators of a GPU
without a deterministic form."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import torch

#: Operators that ask ``alertNotDeterministic`` in ATen/native/cuda, and the name that they give
#: there; torch.use_deterministic_algorithms lists them.
_ALWAYS: Final = {
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "fractional_max_pool2d_backward": "fractional_max_pool2d_backward_cuda",
    "fractional_max_pool3d_backward": "fractional_max_pool3d_backward_cuda",
    "max_unpool2d": "max_unpooling2d_forward_out_cuda",
    "max_unpool3d": "max_unpooling3d_forward_out_cuda",
    "upsample_linear1d_backward": "upsample_linear1d_backward_out_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "upsample_trilinear3d_backward": "upsample_trilinear3d_backward_out_cuda",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "reflection_pad2d_backward": "reflection_pad2d_backward_cuda",
    "reflection_pad3d_backward": "reflection_pad3d_backward_out_cuda",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "grid_sampler_3d_backward": "grid_sampler_3d_backward_cuda",
    "put_": "put_",
}
_MEAN_OR_SUM: Final = (1, 2)
_MAXIMUM: Final = 2


def _is_float(args: Any, kwargs: Any) -> bool:
    dtype = kwargs.get("dtype") or args[0].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


#: … and those that ask for some arguments only.
_SOMETIMES: Final[dict[str, tuple[str, Callable[[Any, Any], bool]]]] = {
    "nll_loss2d_forward": (
        "nll_loss2d_forward_out_cuda_template",
        lambda args, _: args[3] in _MEAN_OR_SUM,
    ),
    "cumsum": ("cumsum_cuda_kernel", _is_float),
    "histc": ("_histc_cuda with floating point input", _is_float),
    "bincount": (
        "_bincount_cuda",
        lambda args, kwargs: (args[1:2] or (kwargs.get("weights"),))[0] is not None,
    ),
    "median.dim": ("median CUDA with indices output", lambda *_: True),
    "nanmedian.dim": ("median CUDA with indices output", lambda *_: True),
    "_embedding_bag_dense_backward": (
        "embedding_bag_backward_cuda_max",
        lambda args, _: args[7] == _MAXIMUM,
    ),
}
#: Of PyTorch 2.8, whose documentation names the variable, up to one that no longer asks for it:
#: matmuls of cuBLAS (ATen/cuda/CUDABlas.cpp; those with a bias go to cuBLASLt, which is not asked).
_MATMULS: Final = {"mm", "bmm", "baddbmm"}
_CONFIG: Final = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC: Final = (":4096:8", ":16:8")


def wants_config() -> bool:
    """Does this PyTorch refuse matmuls without ``CUBLAS_WORKSPACE_CONFIG``?"""
    return _CONFIG in (torch.use_deterministic_algorithms.__doc__ or "")


def refusal(name: str, overload: str) -> Callable[[Any, Any], str | None] | None:
    """What tells by an operator's arguments what PyTorch would raise of it while deterministic
    algorithms are on (``None``: nothing); ``None``: it is never refused."""
    if name in _MATMULS and wants_config():
        return lambda *_: None if os.environ.get(_CONFIG) in _DETERMINISTIC else _OF_CUBLAS
    if name in _ALWAYS:
        said = _told(_ALWAYS[name])
        return lambda *_: said
    if (some := _SOMETIMES.get(f"{name}.{overload}" if overload else name)) is not None:
        caller, asks = some
        return lambda args, kwargs: _told(caller) if asks(args, kwargs) else None
    return None


def are_refused() -> bool:
    """Does PyTorch raise for operators without a deterministic form now?"""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _told(caller: str) -> str:
    """aten/src/ATen/Context.cpp (alertNotDeterministic)"""
    return (
        f"{caller} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
        "operation, or you can use the 'warn_only=True' option, if that's acceptable for your "
        "application. You can also file an issue at https://github.com/pytorch/pytorch/issues to "
        "help us prioritize adding deterministic support for this operation."
    )


#: aten/src/ATen/Context.cpp (alertCuBLASConfigNotDeterministic)
_OF_CUBLAS: Final = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic "
    "because it uses CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this "
    "case, you must set an environment variable before running your PyTorch application: "
    "CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
)
