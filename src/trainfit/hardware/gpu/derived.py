"""Figures that follow from a GPU's compute capability and sizes, each by a stated rule.

Architecture, FP32 lanes, Tensor-core rates, usable memory and the memory of a CUDA context.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainfit.hardware.gpu.catalogue import MIB, Figure

# --- Architectures --------------------------------------------------------------------------
ARCHITECTURES: Mapping[tuple[int, int], str] = {
    (5, 0): "Maxwell", (5, 2): "Maxwell", (5, 3): "Maxwell",
    (6, 0): "Pascal", (6, 1): "Pascal", (6, 2): "Pascal",
    (7, 0): "Volta", (7, 2): "Volta", (7, 5): "Turing",
    (8, 0): "Ampere", (8, 6): "Ampere", (8, 7): "Ampere", (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell", (10, 3): "Blackwell",
    (11, 0): "Blackwell",
    (12, 0): "Blackwell", (12, 1): "Blackwell",
}  # fmt: skip

# FP32 FMA lanes of one SM: CUDA C++ Programming Guide, table of arithmetic throughput.
_WIDE_SM, _NARROW_SM = 128, 64
NARROW_CAPABILITIES = {(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)}


def fp32_lanes(capability: tuple[int, int]) -> int:
    """FP32 FMA units of one SM."""
    return _NARROW_SM if capability in NARROW_CAPABILITIES else _WIDE_SM


# Dense FP16 FLOP per clock per SM with FP32 accumulate, where one figure holds for a capability.
_TENSOR_RATE = {
    (7, 0): 1024, (7, 2): 1024, (8, 0): 2048, (8, 7): 2048, (9, 0): 4096,
    (10, 0): 8192, (10, 3): 8192,
}  # fmt: skip
_GEFORCE_RATE = 512  # GeForce runs FP32 accumulate at half rate
_PROFESSIONAL_RATE = 1024


def tensor_rate(capability: tuple[int, int], geforce: bool) -> int:
    """Dense FP16 Tensor FLOP per clock per SM (multiply and add counted apart)."""
    if capability < (7, 0):
        return 0
    return _TENSOR_RATE.get(capability, _GEFORCE_RATE if geforce else _PROFESSIONAL_RATE)


def tensor_rates(fp16_flops: float, capability: tuple[int, int]) -> dict[str, float]:
    """Dense Tensor FLOP/s by dtype, from the FP16 rate.

    TF32 is half of FP16 and BF16 equals it from Ampere on; FP8 is twice FP16 from Ada on.
    """
    if fp16_flops <= 0:
        return {}
    rates = {"float16": fp16_flops}
    if capability >= (8, 0):
        rates |= {"bfloat16": fp16_flops, "tfloat32": fp16_flops / 2}
    if capability >= (8, 9):
        rates["float8"] = fp16_flops * 2
    return rates


# --- Usable memory --------------------------------------------------------------------------
# The driver keeps some memory for itself, so that torch's total is below the nominal size.
# Fitted to the reported totals in `catalogue` (Linux; Windows reports 0.1-0.4 GiB more):
# RTX 3070 -215 MiB, 3080 -225, 3090 -308; 4090 -369 to -492, RTX 6000 Ada -643; 5090 -648,
# 5060 Ti 16 GB -568 (github.com/Luce-Org/lucebox/issues/407). The rule meets them within 1%.
# Only the step for Maxwell and Pascal rests on a figure that we could not trace to a report,
# the 10.92 GiB of a GTX 1080 Ti.
_RESERVE_PER_GIB_MIB = 6
_RESERVE_MIB = (  # from this capability on
    ((12, 0), 440),
    ((8, 9), 290),
    ((7, 0), 170),
    ((5, 0), 20),
)
# HBM: reported totals are 0.981 (A30) to 0.994 (P100) of the nominal size, A100 and H100 0.989.
_HBM_SHARE = 0.989
# Inline ECC: nvidia-smi shows 23034 of 24576 MiB on an L4, 46068 of 49152 on an L40S, 15360 of
# 16384 on a T4 (github.com/modal-labs/modal-client/pull/2797).
_INLINE_ECC_SHARE = 15 / 16
# Jetson: what firmware and kernel leave of the shared memory (MemTotal); our estimate.
_SHARED_SHARE = 0.955


def usable_memory(
    nominal_gib: float, capability: tuple[int, int], *, hbm: bool, inline_ecc: bool, shared: bool
) -> Figure:
    """Usable bytes derived from the nominal size; within 1% of the totals that users report."""
    nominal_mib = nominal_gib * 1024
    if shared:
        return _assumed(nominal_mib * _SHARED_SHARE, "0.955 of the nominal size (Jetson)")
    if hbm:
        return _assumed(nominal_mib * _HBM_SHARE, "0.989 of the nominal size (HBM)")
    reserve = next(mib for since, mib in _RESERVE_MIB if capability >= since)
    share = _INLINE_ECC_SHARE if inline_ecc else 1.0
    usable = nominal_mib * share - _RESERVE_PER_GIB_MIB * nominal_gib - reserve
    ecc = "15/16 of (inline ECC) " if inline_ecc else ""
    return _assumed(usable, f"{ecc}the nominal size less 6 MiB per GiB less {reserve} MiB")


def _assumed(mib: float, rule: str) -> Figure:
    return Figure(round(mib) * MIB, f"assumed: {rule}; the driver's own reserve", assumed=True)


# --- CUDA context ---------------------------------------------------------------------------
# A bare context of torch 2.10 (CUDA 13, lazy loading) took 426 MiB on an RTX 6000 Ada with 142
# SMs (github.com/unslothai/unsloth-zoo/pull/1053); one of torch 1.13 about 270 MiB after a first
# tensor (github.com/pytorch/pytorch/pull/86509); a PyTorch developer names 300 to 400 MB
# (github.com/pytorch/pytorch/issues/107667, /109888). It grows with the SMs. Kernels of cuBLAS
# and cuDNN come on top as they are first used; 100 MiB is our guess. `constants`
# splits it by library, and has a rule for eager loading (CUDA_MODULE_LOADING=EAGER).
_CONTEXT_BASE_MIB = 120
_CONTEXT_PER_SM_MIB = 2.15
_LIBRARY_KERNELS_MIB = 100
_LIBRARY_KERNELS_MOST_MIB = 250
_CONTEXT_LEAST_SHARE, _CONTEXT_MOST_SHARE = 0.8, 1.1
CONTEXT_SOURCE = (
    "assumed: 120 MiB + 2.15 MiB per SM for the context, + 100 MiB of lazily loaded kernels;"
    " anchored at 426 MiB on 142 SMs (github.com/unslothai/unsloth-zoo/pull/1053)"
)


def context_bytes(sm_count: int) -> tuple[int, tuple[int, int]]:
    """Bytes of the CUDA context with lazily loaded modules, and the (least, most) they may be."""
    bare_mib, least_mib, bare_most_mib = bare_context_mib(sm_count)
    expected = round(bare_mib + _LIBRARY_KERNELS_MIB) * MIB
    least = round(least_mib) * MIB
    most = round(bare_most_mib + _LIBRARY_KERNELS_MOST_MIB) * MIB
    return expected, (least, most)


def bare_context_mib(sm_count: int) -> tuple[float, float, float]:
    """MiB of a fresh process's context before any library is used: expected, least, most."""
    bare_mib = _CONTEXT_BASE_MIB + _CONTEXT_PER_SM_MIB * sm_count
    return bare_mib, bare_mib * _CONTEXT_LEAST_SHARE, bare_mib * _CONTEXT_MOST_SHARE
