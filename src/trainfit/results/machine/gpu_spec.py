"""What a GPU has: resolved from its name once, and part of every request to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Where the figure of a card's Tensor cores is from, if it has none.
NO_TENSOR_CORES: Final = "no Tensor cores"


@dataclass(frozen=True)
class GpuSpec:
    """What a GPU has, in base units (bytes, Hz, FLOP/s, W)."""

    name: str
    """As `torch.cuda.get_device_name` says it: "NVIDIA GeForce RTX 4090"."""
    key: str
    """Short name shown to users: "RTX 4090"."""
    capability: tuple[int, int]
    """CUDA compute capability (major, minor)."""
    sm_count: int
    memory_bytes: int
    """Total as cudaMemGetInfo reports it, below the nominal size (Linux)."""
    memory_is_assumed: bool
    """True where `memory_bytes` is derived by a rule (good to about 2%), not reported."""
    bandwidth_bytes_per_s: float
    """Device memory bandwidth, peak."""
    l2_bytes: int | None
    boost_clock_hz: float | None
    fp32_flops: float
    """Dense FP32 rate of the shader cores."""
    tensor_flops: Mapping[str, float] = field(hash=False)
    """Dense Tensor-core rate by dtype name; empty without Tensor cores."""
    power_watts: float
    """Board power limit as sold."""
    shared_memory_device: bool
    """True for Jetson and the like, whose memory the CPU uses as well."""
    context_bytes: int
    """Assumed size of the CUDA context with a PyTorch process's lazily loaded modules."""
    context_range_bytes: tuple[int, int]
    """Least and most that `context_bytes` may be."""
    sources: Mapping[str, str] = field(hash=False)
    """Field name to where its figure comes from; "assumed: ..." where nobody measured it."""
    nominal_bytes: int | None = None
    """Memory as sold; None of a card that is not known."""
    bus_bits: int | None = None
    """Width of the memory's bus."""
    memory_type: str = ""
    """Such as "GDDR6"; empty of a card that is not known."""
    tensor_cores: int | None = None
    """Their number as datasheets count them; None of a card that is not known."""
    is_laptop: bool = False
    """True of a laptop's or an embedded module's card, whose power the maker of the device sets."""
    inline_ecc: bool = False
    """True of cards whose GDDR memory keeps the codes of its ECC, on as sold, among the data."""

    @property
    def supports_bf16(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def has_tensor_cores(self) -> bool:
        return bool(self.tensor_flops)
