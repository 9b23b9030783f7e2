"""Custom GPU specifications: "custom:24GiB", for a GPU that is not listed."""

from __future__ import annotations

import re

from trainfit.hardware.gpu import derived
from trainfit.hardware.gpu.catalogue import GIB, MIB
from trainfit.hardware.gpu.name_error import GpuNameError
from trainfit.results.machine.gpu_spec import GpuSpec

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
_FIGURES = set(GpuSpec.__dataclass_fields__) - {"memory_is_assumed", "sources"}


def custom_gpu(name: str, text: str) -> GpuSpec:
    """The device that ``text`` describes; ``name`` is what the user wrote, for the error's sake."""
    found = _CUSTOM.fullmatch(text)
    if found is None:
        raise GpuNameError(name, f"malformed custom GPU ({_CUSTOM_FORM})", ["custom:24GiB"])
    memory_bytes = int(float(found["size"]) * _UNITS[found["unit"].lower()])
    if memory_bytes <= 0:
        raise GpuNameError(name, "custom GPU needs memory above 0", ["custom:24GiB"])
    capability = _CUSTOM_CAPABILITY
    if found["major"]:
        capability = int(found["major"]), int(found["minor"])
    elif found["key_major"]:  # a custom GPU's own key, as results have it
        capability = int(found["key_major"]), int(found["key_minor"])
    if capability not in derived.ARCHITECTURES:
        known = [f"{major}.{minor}" for major, minor in derived.ARCHITECTURES]
        raise GpuNameError(name, f"no compute capability {capability[0]}.{capability[1]}", known)
    return _custom_spec(memory_bytes, capability)


def _custom_spec(memory_bytes: int, capability: tuple[int, int]) -> GpuSpec:
    lanes = derived.fp32_lanes(capability)
    tensor_rate = derived.tensor_rate(capability, geforce=True)
    cycles_per_s = _CUSTOM_SMS * _CUSTOM_CLOCK_HZ
    context, context_range = derived.context_bytes(_CUSTOM_SMS)
    key = f"custom {memory_bytes / GIB:g}GiB sm_{capability[0]}{capability[1]}"
    assumed = f"{_DEFAULT} (64 SMs at 1.5 GHz, 600 GB/s, 250 W)"
    asked = "as requested"
    sources = dict.fromkeys(_FIGURES, assumed)
    sources |= dict.fromkeys(("name", "key", "capability", "memory_bytes"), asked)
    sources |= dict.fromkeys(("context_bytes", "context_range_bytes"), derived.CONTEXT_SOURCE)
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
        tensor_flops=derived.tensor_rates(cycles_per_s * tensor_rate, capability),
        power_watts=_CUSTOM_WATTS,
        shared_memory_device=False,
        context_bytes=context,
        context_range_bytes=context_range,
        sources=sources,
    )


def is_made_up(spec: GpuSpec, field: str) -> bool:
    """Is this figure that of no card, but what every device made to measure has?"""
    return spec.sources.get(field, "").startswith(_DEFAULT)
