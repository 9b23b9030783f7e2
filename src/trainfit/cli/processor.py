"""``--cpu``: parses the description of the CPU of the machine with the GPU."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

# What takes time to import is needed only where the option is given, not for the help.
if TYPE_CHECKING:
    from trainfit.hardware.gpu.rented import RentedMachine
    from trainfit.results.plan.result import HostCpu

#: Numbers that may be given, and the most that there can be of them.
_LIMITS: Final = {"cores": 4096.0, "vcpus": 8192.0, "ghz": 20.0}
_HERE: Final = "here"
_EXAMPLE: Final = "cores=2,ghz=2.2,kind=skylake"
#: Hardware threads of a core, where vCPUs are given.
_THREADS: Final = 2


def processor(text: str) -> HostCpu | None:
    """An argparse type: ``cores=2,ghz=2.2,kind=skylake``, or some of it; ``None`` for ``here``."""
    from trainfit.results.plan.result import HostCpu

    if text.strip() == _HERE:
        return None
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in (*_LIMITS, "kind") or not value:
            raise argparse.ArgumentTypeError(
                f"expected {_EXAMPLE}, some of its fields, or here, got {text!r}"
            )
        if name in found:
            raise argparse.ArgumentTypeError(f"{name}= is given twice in {text!r}: leave one out")
        found[name] = value
    if "cores" in found and "vcpus" in found:
        raise argparse.ArgumentTypeError(
            f"{text!r} has cores= and vcpus= ({_THREADS} of these are one core): leave one out"
        )
    numbers = {name: _number(name, value) for name, value in found.items() if name in _LIMITS}
    cores, threads = numbers.get("cores"), 0.0
    if "vcpus" in numbers:
        threads = numbers["vcpus"] * (1 - 1 / _THREADS) if numbers["vcpus"] > 1 else 0.0
        cores = numbers["vcpus"] - threads
    ghz = numbers.get("ghz")
    return HostCpu(
        cores,
        ghz * 1e9 if ghz is not None else None,
        kind=_kind(found["kind"]) if "kind" in found else "",
        second_threads=threads,
    )


def rented_cpu(machine: RentedMachine) -> HostCpu:
    """The CPU share of a job on one GPU of a rented machine, at its all-core clock."""
    from trainfit.results.plan.result import HostCpu

    return HostCpu(
        machine.cores,
        machine.hz[1],
        kind=machine.kind,
        second_threads=machine.second_threads,
        hz_range=machine.hz,
        ram_bytes=int(machine.share * machine.ram_bytes),
        name=machine.name,
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _LIMITS[name]:
        raise argparse.ArgumentTypeError(
            f"{name}={text}: expected a number above 0, at most {_LIMITS[name]:g}, as in {_EXAMPLE}"
        )
    return value


def _kind(text: str) -> str:
    from trainfit.hardware.cpu.cpu_kinds import CpuKindError, find_cpu_kind

    try:
        return find_cpu_kind(text).key
    except CpuKindError as error:
        raise argparse.ArgumentTypeError(f"kind=: {error}") from None
