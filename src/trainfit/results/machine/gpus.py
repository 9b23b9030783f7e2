"""What ``trainfit gpus`` answers: figures of GPUs, and what they mean for a job.

Format history
    1   first version
    2   inline ECC
    3   the memory's type, the number of Tensor cores
    4   "matmul_balance_size" (was "product_balance_size")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.files.upgrades import Upgrade, rename_key

FORMAT: Final = "trainfit-gpus"
VERSION: Final = 4

_REMAKE: Final = "re-create it with `trainfit gpus --json`"
_WANTED: Final = "give a file that `trainfit gpus --json` wrote"


def _upgrade_terms(document: dict[str, Any]) -> None:
    rename_key(document, "gpus.for_a_job", "product_balance_size", "matmul_balance_size")


_UPGRADES: Final[Mapping[int, Upgrade]] = {3: _upgrade_terms}


@dataclasses.dataclass(frozen=True)
class MeaningLine:
    """One figure with what it says and what it does not.

    ``value`` is written for people, with its unit; ``None`` where it is not known, and then
    ``says`` is the reason. ``source`` is where the figure is from.
    """

    figure: str
    value: str | None
    says: str
    does_not_say: str = ""
    source: str = ""
    assumed: bool = False


@dataclasses.dataclass(frozen=True)
class JobFigures:
    """What follows from a GPU's own figures; ``None`` where one of them is not known.

    Mappings are by dtype: "float32" on the CUDA cores, "tfloat32", "float16", "bfloat16" and
    "float8" on Tensor cores.
    """

    read_memory_once_s: float | None
    """Memory divided by bandwidth: the least time of a pass over all of it."""
    balance_flop_per_byte: Mapping[str, float]
    """Rate divided by bandwidth: an operation of fewer FLOP per byte waits for memory."""
    addition_share: float | None
    """c = a + b in float32 (1 FLOP per 12 bytes) as a share of the FP32 rate, at best."""
    matmul_balance_size: int | None
    """From this n on an n x n x n matmul of 2-byte elements is not bound by bandwidth."""
    tensor_speedup: Mapping[str, float]
    """Tensor-core rate divided by the FP32 rate of the CUDA cores."""
    fill_elements: int | None
    """Elements of an elementwise operation from which on each SM has a block."""
    fill_rows: int | None
    """Rows through a linear layer of 1024 outputs from which on each SM has a tile."""
    adamw_parameters: int
    """Trained float32 parameters that fit with gradients and AdamW's moments, nothing else."""
    adamw_step_s_per_billion: float | None
    """Time of AdamW's memory traffic a step, for each 10^9 float32 parameters."""
    l2_elements: int | None
    """float32 elements that fit in the L2 cache."""
    pin_bits_per_s: float | None
    """Bandwidth per bit of the memory's bus."""
    flop_per_joule: float | None
    """The GPU's highest 16-bit or FP32 rate divided by its power."""


@dataclasses.dataclass(frozen=True)
class GpuFigures:
    """A GPU's figures in base units; ``None`` is not known, as of a custom GPU specification.

    Rates are dense. ``sources`` says of each figure where it is from; it begins with
    "assumed" where nobody published or measured it.
    """

    key: str
    name: str
    architecture: str
    capability: tuple[int, int]
    laptop: bool
    shared_memory: bool
    memory_bytes: int
    memory_is_assumed: bool
    nominal_memory_bytes: int | None
    context_bytes: int
    context_range_bytes: tuple[int, int]
    bandwidth_bytes_per_s: float | None
    bus_bits: int | None
    l2_bytes: int | None
    sm_count: int | None
    cuda_cores: int | None
    boost_clock_hz: float | None
    fp32_flop_per_s: float | None
    tensor_dtypes: tuple[str, ...]
    tensor_flop_per_s: Mapping[str, float] | None
    """By dtype; empty without Tensor cores."""
    power_w: float | None
    for_a_job: JobFigures
    sources: Mapping[str, str]
    inline_ecc: bool = False
    """Do the codes of ECC, on as sold, pass the same bus as the data?"""
    memory_type: str = ""
    """Such as "GDDR6"; empty is not known."""
    tensor_cores: int | None = None
    meaning: tuple[MeaningLine, ...] = ()
    """In words; empty unless asked for."""


@dataclasses.dataclass(frozen=True)
class GpusResult(ResultFile):
    """The GPUs in the order in which they are shown."""

    FILE: ClassVar = Format(FORMAT, VERSION, _REMAKE, _WANTED, upgrades=_UPGRADES)

    gpus: tuple[GpuFigures, ...]
