"""Values of options: noise scales, learning rates, decay rates, and the CPU of ``--cpu``."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainfit.cli.common import UsageError, number
from trainfit.results.batch import MOST_SAMPLES, Interval, NoiseResult, samples_text

if TYPE_CHECKING:
    # What takes time to import is needed only where the option is given, not for the help.
    from trainfit.hardware.gpu_lookup import RentedMachine
    from trainfit.results.plan import HostCpu


_RANGE = re.compile(r"(?P<value>[^:]+?)(?::(?P<low>[^:]*):(?P<high>[^:]*))?")


def noise_scale(text: str) -> Interval | Path:
    """An argparse type: ``200``, ``200:150:280`` (with its interval), or a result's file."""
    try:
        value, low, high = _numbers(text)
    except ValueError:
        return Path(text)
    if not 0 < low <= value <= high <= MOST_SAMPLES:
        raise argparse.ArgumentTypeError(
            f"expected a noise scale in samples such as 200 or 200:150:280, got {text!r}"
        )
    return Interval(value, low, high)


def _numbers(text: str) -> tuple[float, float, float]:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    value = float(match["value"])
    return value, float(match["low"] or value), float(match["high"] or value)


def rate(text: str) -> float:
    """An argparse type: a positive number, such as a learning rate."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def decay(text: str) -> float:
    """An argparse type: a number between 0 and 1, such as beta2."""
    value = rate(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return value


def read_noise(given: Interval | Path | None) -> tuple[Interval | None, str, NoiseResult | None]:
    """The noise scale, where it is from, and the result that it is of.

    Raises ``ResultFileError`` and :class:`UsageError`: a result without a noise scale.
    """
    if given is None:
        return None, "", None
    if isinstance(given, Interval):
        return given, "given", None
    result = NoiseResult.load(given)
    if result.noise is None:
        raise UsageError(
            f"{str(given)!r} has no noise scale: {result.cannot_tell}; measure more, or give "
            "--noise-scale"
        )
    average = samples_text(result.batch_size)
    source = f"{given.name}: {result.steps_used} measured steps at batch {average}"
    return result.noise, source, result


# ---
# ``--cpu``: parses the description of the CPU of the machine with the GPU.


#: Numbers that may be given, and the most that there can be of them.
_LIMITS: Final = {"cores": 4096.0, "vcpus": 8192.0, "ghz": 20.0}
_HERE: Final = "here"
_EXAMPLE: Final = "cores=2,ghz=2.2,kind=skylake"
#: Hardware threads of a core, where vCPUs are given.
_THREADS: Final = 2


def processor(text: str) -> HostCpu | None:
    """An argparse type: ``cores=2,ghz=2.2,kind=skylake``, or some of it; ``None`` for ``here``."""
    from trainfit.results.plan import HostCpu

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
    from trainfit.results.plan import HostCpu

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
    value = number(text)
    if not 0 < value <= _LIMITS[name]:
        raise argparse.ArgumentTypeError(
            f"{name}={text}: expected a number above 0, at most {_LIMITS[name]:g}, as in {_EXAMPLE}"
        )
    return value


def _kind(text: str) -> str:
    from trainfit.hardware.machine.processor import CpuKindError, find_cpu_kind

    try:
        return find_cpu_kind(text).key
    except CpuKindError as error:
        raise argparse.ArgumentTypeError(f"kind=: {error}") from None
