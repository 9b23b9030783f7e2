"""Derived figures of a GPU: `GpuSpec` to `results.gpus`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainfit.hardware.gpu.custom import is_made_up
from trainfit.hardware.gpu.derived import ARCHITECTURES, fp32_lanes
from trainfit.results.machine.gpu_spec import GpuSpec
from trainfit.results.machine.gpus import GpuFigures, JobFigures

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
    found = {
        _RENAMED.get(name, name): source
        for name, source in spec.sources.items()
        if not is_made_up(spec, name)
    }
    if len(spec.tensor_flops) > 1 and "tensor_flop_per_s" in found:
        eight = ", FP8 twice it" if "float8" in spec.tensor_flops else ""
        found["tensor_flop_per_s"] += f"; TF32 is half of FP16{eight}, by NVIDIA's ratios"
    if "sm_count" in found:
        found["cuda_cores"] = "SMs x FP32 units per SM (CUDA C++ Programming Guide)"
    return found
