"""Shares of a GPU's peak rates that kernels reach: the constants of the speed model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

_PASSES: Final = ("", "_input_gradient", "_weight_gradient")
_BATCH_NORM: Final = ("", "_gradient", "_nhwc", "_nhwc_gradient", "_eval")


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Constants of :class:`trainfit.speed.kernel_times.KernelTimes`.

    ``arithmetic`` are shares of the peak rate by kind of kernel (of :mod:`results.kernels`), for
    matmuls of full tiles; ``traffic`` shares of the peak bandwidth. ``small_tile``: a tile of
    ``a`` x ``b`` results computes at ``(sqrt(a b) / 192) ** small_tile`` of that. ``unaligned``
    is the share left where a side of a half-precision matmul is not a multiple of 8,
    ``wide_groups`` that of grouped convolutions of channels-last tensors with over 32 channels a
    group (cuDNN has kernels of their own for narrower ones), ``uneven_groups`` that of narrower
    ones that those kernels do not take. ``cache`` is
    the share of the L2 cache in which an operand is still found. ``least_s`` is what a kernel
    takes at least, in seconds.
    """

    arithmetic: Mapping[str, float]
    traffic: Mapping[str, float]
    small_tile: float
    unaligned: float
    wide_groups: float
    uneven_groups: float
    cache: float
    least_s: float
    source: str = ""


def _passes(kind: str, *shares: float) -> dict[str, float]:
    """The efficiency of a convolution's three passes."""
    return {f"{kind}{each}": share for each, share in zip(_PASSES, shares, strict=True)}


#: Before anything is fitted: matmuls and copies as such kernels usually run.
DEFAULT: Final = Efficiency(
    arithmetic={
        **_passes("convolution", 0.75, 0.65, 0.6),
        **_passes("grouped", 0.5, 0.4, 0.3),
        **_passes("grouped_nhwc", 0.5, 0.4, 0.3),
        **_passes("depthwise", 0.1, 0.1, 0.05),
        **_passes("depthwise_nhwc", 0.2, 0.2, 0.1),
        "recurrent": 0.5,
    },
    traffic={
        **_passes("convolution", 0.8, 0.8, 0.8),
        **_passes("depthwise", 0.8, 0.8, 0.8),
        **_passes("depthwise_nhwc", 0.8, 0.8, 0.8),
        "pointwise": 0.85,
        "pointwise_reordered": 0.4,
        "concatenation": 0.7,
        **{f"batch_norm{each}": 0.8 for each in _BATCH_NORM},
        "layout": 0.7,
        "reduction": 0.8,
        "normalization": 0.8,
        "normalization_gradient": 0.8,
        "softmax": 0.8,
        "pooling": 0.8,
        "pooling_gradient": 0.8,
        "resampling": 0.8,
        "indexing": 0.8,
        "sorting": 0.6,
        "optimizer": 0.8,
    },
    small_tile=0.5,
    unaligned=0.6,
    wide_groups=0.2,
    uneven_groups=0.1,
    cache=0.3,
    least_s=2e-6,
    source="assumed",
)


#: As ``bench/speed_accuracy.py`` fits it to published steps of timm's models on an RTX 3090
#: (training and inference) and an RTX 4090 (inference), float16 autocast (docs/figures.md). Kinds
#: that those steps lack have their shares from :data:`DEFAULT`.
FITTED: Final = Efficiency(
    arithmetic={
        **_passes("convolution", 1.0, 1.2, 1.1),
        **_passes("grouped", 0.85, 0.90, 0.31),
        **_passes("grouped_nhwc", 0.55, 1.2, 0.39),
        **_passes("depthwise", 0.044, 0.10, 0.020),
        **_passes("depthwise_nhwc", 0.065, 0.21, 0.13),
        "recurrent": 0.94,
    },
    traffic={
        **_passes("convolution", 0.65, 0.29, 0.58),
        **_passes("depthwise", 0.60, 0.65, 0.78),
        **_passes("depthwise_nhwc", 0.45, 0.36, 0.44),
        "pointwise": 1.0,
        "pointwise_reordered": 0.69,
        "concatenation": 0.60,
        "batch_norm": 0.65,
        "batch_norm_gradient": 0.43,
        "batch_norm_nhwc": 0.93,
        "batch_norm_nhwc_gradient": 0.97,
        "batch_norm_eval": 1.0,
        "layout": 1.0,
        "reduction": 0.89,
        "normalization": 0.86,
        "normalization_gradient": 0.41,
        "softmax": 0.75,
        "pooling": 0.73,
        "pooling_gradient": 0.65,
        "resampling": 0.33,
        "indexing": 0.79,
        "sorting": 0.6,
        "optimizer": 0.8,
    },
    small_tile=0.33,
    unaligned=0.82,
    wide_groups=0.13,
    uneven_groups=0.45,
    cache=0.24,
    least_s=4.7e-6,
    source="fitted to published steps of timm's models on an RTX 3090 and an RTX 4090; other GPUs "
    "by their datasheets",
)
