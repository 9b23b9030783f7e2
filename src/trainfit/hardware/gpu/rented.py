"""Machines with a GPU that people rent, by name: their GPU, processor and RAM.

All figures are assumptions: what the providers say of them, as far as it is known here; none was
measured, and prices and offers change. A clock is given as the processor's base clock, which a
virtual machine shows, and as that with all of its cores busy, at which most run (Google, "CPU
platforms": virtual machines see the base clock only).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from trainfit.results.format import core_count, ghz, size

_GHZ: Final = 1e9
_GIB: Final = 1 << 30


@dataclass(frozen=True)
class RentedMachine:
    """One type of machine.

    ``gpu`` is the catalogue's name. ``vcpus`` are hardware threads of the whole machine, of which
    ``threads`` share a core; ``hz`` is the base clock and that with all cores busy. A job
    on one of several ``gpus`` has its share of CPU and RAM, or (``whole``) all of them. ``kind``
    is of :mod:`trainfit.hardware.cpu.cpu_kinds`.
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
        """Of CPU and RAM, what a job on one GPU has."""
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
    ram = round(ram_gib * _GIB)
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
    return _by_name().get(_plain(name))


@cache
def _by_name() -> dict[str, RentedMachine]:
    return {_plain(name): each for each in RENTED for name in (each.name, *each.names)}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("standard")
