"""Figures of a GPU that follow from rules, of a listed GPU and of a custom one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from trainfit.hardware.gpu_catalogue import Figure
from trainfit.results.files.errors import TrainfitError
from trainfit.results.gpus import GpuFigures, GpuSpec, JobFigures
from trainfit.results.text import GIB, MIB

# ---
# Figures that follow from a GPU's compute capability and sizes, each by a stated rule.
#
# Architecture, FP32 lanes, Tensor-core rates, usable memory and the memory of a CUDA context.


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
_LIBRARY_KERNELS_MOST_MIB = 320
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
    maximum = round(bare_most_mib + _LIBRARY_KERNELS_MOST_MIB) * MIB
    return expected, (least, maximum)


def bare_context_mib(sm_count: int) -> tuple[float, float, float]:
    """MiB of a fresh process's context before any library is used: expected, least, most."""
    bare_mib = _CONTEXT_BASE_MIB + _CONTEXT_PER_SM_MIB * sm_count
    return bare_mib, bare_mib * _CONTEXT_LEAST_SHARE, bare_mib * _CONTEXT_MOST_SHARE


# ---
# What can be wrong with a GPU's name.


LONGEST_NAME = 120  # a longer one is no GPU's name, and matching it would take long


#: The reason of a name that fits several GPUs.
AMBIGUOUS: Final = "ambiguous GPU name"


class GpuNameError(TrainfitError, ValueError):
    """A GPU's name that is unknown, ambiguous or malformed; `matches` are names that work."""

    def __init__(self, name: str, reason: str, matches: Sequence[str] = ()) -> None:
        super().__init__(name, reason, list(matches))
        self.name = name
        self.reason = reason
        self.matches = list(matches)

    @property
    def is_ambiguous(self) -> bool:
        """Does the name fit several GPUs?"""
        return self.reason == AMBIGUOUS

    def __str__(self) -> str:
        shown = self.name if len(self.name) <= LONGEST_NAME else self.name[:LONGEST_NAME] + "..."
        return f"{self.reason}: {shown!r}; {self._remedy()}"

    def _remedy(self) -> str:
        if self.matches:
            return f"try one of: {', '.join(self.matches)}"
        return 'give a name such as "RTX 4090", or "custom:24GiB" for a card that is not listed'


# ---
# Custom GPU specifications: "custom:24GiB", for a GPU that is not listed.


_CUSTOM = re.compile(
    r"custom[:\s]\s*(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>gib|gb|mib|mb)"
    r"(?::\s*(?P<major>\d+)\.(?P<minor>\d)|\s+sm_(?P<key_major>\d+)(?P<key_minor>\d))?",
    re.IGNORECASE | re.ASCII,
)
_UNITS = {"gib": GIB, "mib": MIB, "gb": 10**9, "mb": 10**6}
_CUSTOM_FORM = 'write "custom:24GiB" or "custom:8192MiB:8.6" (memory, then the capability)'
_CUSTOM_CAPABILITY = (8, 0)
#: Begins the source of a figure that nobody asked for and no card has.
_DEFAULT = "assumed: default of a custom device"
# A card of the middle of the catalogue; only predicted times depend on it, no memory but the
# context's.
_CUSTOM_SMS = 64
_CUSTOM_CLOCK_HZ = 1.5e9
_CUSTOM_BANDWIDTH = 600e9
_CUSTOM_WATTS = 250.0
_NO_FIGURES = {
    "memory_is_assumed", "sources", "count", "peer_to_peer", "machines", "network_bytes_per_s",
    "network_cards",
}  # fmt: skip
_FIGURES = set(GpuSpec.__dataclass_fields__) - _NO_FIGURES


def custom_gpu(name: str, text: str) -> GpuSpec:
    """The device that ``text`` describes; ``name`` is what the user wrote, for the error's sake."""
    match = _CUSTOM.fullmatch(text)
    if match is None:
        raise GpuNameError(name, f"malformed custom GPU ({_CUSTOM_FORM})", ["custom:24GiB"])
    memory_bytes = int(float(match["size"]) * _UNITS[match["unit"].lower()])
    if memory_bytes <= 0:
        raise GpuNameError(name, "custom GPU needs memory above 0", ["custom:24GiB"])
    capability = _CUSTOM_CAPABILITY
    if match["major"]:
        capability = int(match["major"]), int(match["minor"])
    elif match["key_major"]:  # a custom GPU's own key, as results have it
        capability = int(match["key_major"]), int(match["key_minor"])
    if capability not in ARCHITECTURES:
        known = [f"{major}.{minor}" for major, minor in ARCHITECTURES]
        raise GpuNameError(name, f"no compute capability {capability[0]}.{capability[1]}", known)
    return _custom_spec(memory_bytes, capability)


def _custom_spec(memory_bytes: int, capability: tuple[int, int]) -> GpuSpec:
    lanes = fp32_lanes(capability)
    rate = tensor_rate(capability, geforce=True)
    cycles_per_s = _CUSTOM_SMS * _CUSTOM_CLOCK_HZ
    context, context_range = context_bytes(_CUSTOM_SMS)
    key = f"custom {memory_bytes / GIB:g}GiB sm_{capability[0]}{capability[1]}"
    assumed = f"{_DEFAULT} (64 SMs at 1.5 GHz, 600 GB/s, 250 W)"
    asked = "as requested"
    sources = dict.fromkeys(_FIGURES, assumed)
    sources |= dict.fromkeys(("name", "key", "capability", "memory_bytes"), asked)
    sources |= dict.fromkeys(("context_bytes", "context_range_bytes"), CONTEXT_SOURCE)
    return GpuSpec(
        name=f"NVIDIA {key}",
        key=key,
        capability=capability,
        sm_count=_CUSTOM_SMS,
        memory_bytes=memory_bytes,
        memory_is_assumed=False,
        bandwidth_bytes_per_s=_CUSTOM_BANDWIDTH,
        l2_bytes=None,
        boost_clock_hz=_CUSTOM_CLOCK_HZ,
        fp32_flops=cycles_per_s * lanes * 2,
        tensor_flops=tensor_rates(cycles_per_s * rate, capability),
        power_watts=_CUSTOM_WATTS,
        shared_memory_device=False,
        context_bytes=context,
        context_range_bytes=context_range,
        sources=sources,
    )


def is_made_up(spec: GpuSpec, field: str) -> bool:
    """Is this figure that of no card, but what every device made to measure has?"""
    return spec.sources.get(field, "").startswith(_DEFAULT)


#: Elements that one block of an elementwise float32 kernel works on: 128 threads of 8 elements
#: (torch/include/ATen/native/cuda/CUDALoops.cuh of 2.13, `io_block_work_size`).
BLOCK_ELEMENTS = 1024
#: Rows and columns of the output that one block of a matmul computes; a usual tile of
#: cuBLAS (NVIDIA, Matrix Multiplication Background User's Guide, section 2.3). Smaller ones
#: exist, and are less efficient.
TILE = 128
#: Outputs of the linear layer that `fill_rows` speaks of.
LAYER_OUTPUTS = 1024
#: float32 parameter, gradient and AdamW's two moments.
ADAMW_BYTES = 16
#: AdamW reads all four and writes all but the gradient, once a step if it is fused.
ADAMW_TRAFFIC_BYTES = 28
#: c = a + b in float32: 1 FLOP, two elements read and one written.
ADDITION_BYTES = 12

#: Names in `GpuFigures` that differ from those in `GpuSpec`, under which the sources are.
_RENAMED = {
    "power_watts": "power_w",
    "fp32_flops": "fp32_flop_per_s",
    "tensor_flops": "tensor_flop_per_s",
    "nominal_bytes": "nominal_memory_bytes",
    "shared_memory_device": "shared_memory",
    "is_laptop": "laptop",
}


def figures(spec: GpuSpec) -> GpuFigures:
    """A GPU's figures and what follows from them.

    The defaults of a device made to measure are no card's figures and are left out.
    """
    real = {name for name in vars(spec) if not is_made_up(spec, name)}
    sms = spec.sm_count if "sm_count" in real else None
    bandwidth = spec.bandwidth_bytes_per_s if "bandwidth_bytes_per_s" in real else None
    fp32 = spec.fp32_flops if "fp32_flops" in real else None
    tensor = dict(spec.tensor_flops) if "tensor_flops" in real else None
    power = float(spec.power_watts) if "power_watts" in real else None
    return GpuFigures(
        key=spec.key,
        name=spec.name,
        architecture=ARCHITECTURES[spec.capability],
        capability=spec.capability,
        laptop=spec.is_laptop,
        shared_memory=spec.shared_memory_device,
        memory_bytes=spec.memory_bytes,
        memory_is_assumed=spec.memory_is_assumed,
        nominal_memory_bytes=spec.nominal_bytes,
        context_bytes=spec.context_bytes,
        context_range_bytes=spec.context_range_bytes,
        bandwidth_bytes_per_s=bandwidth,
        bus_bits=spec.bus_bits,
        l2_bytes=spec.l2_bytes,
        sm_count=sms,
        cuda_cores=sms * fp32_lanes(spec.capability) if sms is not None else None,
        boost_clock_hz=spec.boost_clock_hz if "boost_clock_hz" in real else None,
        fp32_flop_per_s=fp32,
        tensor_dtypes=tuple(spec.tensor_flops),
        tensor_flop_per_s=tensor,
        power_w=power,
        for_a_job=_for_a_job(spec, sms, bandwidth, fp32, tensor or {}, power),
        sources=_sources(spec),
        inline_ecc=spec.inline_ecc,
        memory_type=spec.memory_type,
        tensor_cores=spec.tensor_cores,
    )


def _for_a_job(
    spec: GpuSpec,
    sms: int | None,
    bandwidth: float | None,
    fp32: float | None,
    tensor: Mapping[str, float],
    power: float | None,
) -> JobFigures:
    rates = {**({"float32": fp32} if fp32 is not None else {}), **tensor}
    half = tensor.get("float16")
    balance = {dtype: rate / bandwidth for dtype, rate in rates.items()} if bandwidth else {}
    best = half or fp32
    return JobFigures(
        read_memory_once_s=spec.memory_bytes / bandwidth if bandwidth else None,
        balance_flop_per_byte=balance,
        addition_share=bandwidth / ADDITION_BYTES / fp32 if bandwidth and fp32 else None,
        # 2 n^3 FLOP on three matrices of 2 n^2 bytes: n / 3 FLOP per byte.
        matmul_balance_size=math.ceil(3 * balance["float16"]) if "float16" in balance else None,
        tensor_speedup={dtype: rate / fp32 for dtype, rate in tensor.items()} if fp32 else {},
        fill_elements=sms * BLOCK_ELEMENTS if sms else None,
        fill_rows=math.ceil(sms / (LAYER_OUTPUTS // TILE)) * TILE if sms else None,
        adamw_parameters=max(0, spec.memory_bytes - spec.context_bytes) // ADAMW_BYTES,
        adamw_step_s_per_billion=ADAMW_TRAFFIC_BYTES * 1e9 / bandwidth if bandwidth else None,
        l2_elements=spec.l2_bytes // 4 if spec.l2_bytes else None,
        pin_bits_per_s=bandwidth * 8 / spec.bus_bits if bandwidth and spec.bus_bits else None,
        flop_per_joule=best / power if best and power else None,
    )


def _sources(spec: GpuSpec) -> dict[str, str]:
    """Under the names of `GpuFigures`; TF32 and FP8 follow from FP16 (`tensor_rates`)."""
    sources = {
        _RENAMED.get(name, name): source
        for name, source in spec.sources.items()
        if not is_made_up(spec, name)
    }
    if len(spec.tensor_flops) > 1 and "tensor_flop_per_s" in sources:
        eight = ", FP8 twice it" if "float8" in spec.tensor_flops else ""
        sources["tensor_flop_per_s"] += f"; TF32 is half of FP16{eight}, by NVIDIA's ratios"
    if "sm_count" in sources:
        sources["cuda_cores"] = "SMs x FP32 units per SM (CUDA C++ Programming Guide)"
    return sources


def is_of_desktop(gpu: GpuSpec) -> bool:
    """Is it a card of desktops and workstations (GeForce, RTX), rather than of data centers?"""
    return gpu.key.startswith(("GTX ", "RTX ", "TITAN ", "Quadro "))
