"""The processor, the share of it that a job can use, and CPU types by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainfit.hardware.machine import topology
from trainfit.hardware.machine.cgroup import cpu_quota, cpuset
from trainfit.hardware.machine.parsing import asked, cpu_list, cpus_at, natural, natural_at, word_at
from trainfit.hardware.machine.system import System
from trainfit.hardware.machine.topology import CPUINFO, CPUS, CpuInfo, is_virtual, read_cpuinfo
from trainfit.results.machine import (
    Cpu,
    Fact,
    FrequencyPolicy,
    IdleState,
    absent,
    cannot_tell,
    known,
)

# ---
# Clocks and idle states: cpufreq, intel_pstate, amd_pstate and cpuidle of sysfs.
#
# Sources: Documentation/admin-guide/pm/{cpufreq,intel_pstate,amd-pstate,cpuidle}.rst.


#: Kernels before arch/x86/kernel/cpu/aperfmperf.c was reworked (Linux 5.19) wait for 10 ms in
#: each reading of scaling_cur_freq on an idle CPU; /proc/cpuinfo asks all CPUs in one wait.
_MOST_CURRENT = 64


def policies(
    system: System, online: Sequence[int], cpuinfo: Fact[CpuInfo]
) -> Fact[tuple[FrequencyPolicy, ...]]:
    """Every cpufreq policy; absent where the kernel has no say over the clock."""
    folder = f"{CPUS}/cpufreq"
    names = system.names(folder)
    numbers = [int(n[6:]) for n in names.value or () if re.fullmatch(r"policy[0-9]{1,5}", n)]
    places = [f"{folder}/policy{number}" for number in sorted(numbers)]
    source = f"{folder}/policy*"
    if not places:  # older kernels
        places = [text for cpu in online if system.exists(text := f"{CPUS}/cpu{cpu}/cpufreq")]
        source = f"{CPUS}/cpu*/cpufreq"
    if not places:
        return _no_policies(system, names, cpuinfo)
    found: dict[tuple[int, ...], FrequencyPolicy] = {}
    for place in places:
        cpus = _policy_cpus(system, place)
        if cpus.value is None:
            return cannot_tell(cpus.source, cpus.reason)
        if cpus.value and cpus.value not in found:  # one without CPUs is switched off
            found[cpus.value] = _policy(system, place, cpus.value, len(places) <= _MOST_CURRENT)
    if not found:
        return cannot_tell(source, "no policy has a CPU")
    return known(tuple(found[cpus] for cpus in sorted(found)), source)


def _no_policies(
    system: System, names: Fact[tuple[str, ...]], cpuinfo: Fact[CpuInfo]
) -> Fact[tuple[FrequencyPolicy, ...]]:
    source = f"{CPUS}/cpufreq"
    if names.value is None and not names.is_absent:
        return cannot_tell(source, names.reason)
    if not system.exists(CPUS):
        return cannot_tell(source, f"there is no {CPUS}")
    if is_virtual(cpuinfo):
        return absent(source, "this is a virtual machine: its host sets the clocks")
    return absent(source, "the kernel has no cpufreq driver loaded: the firmware sets the clocks")


def _policy_cpus(system: System, place: str) -> Fact[tuple[int, ...]]:
    affected = cpus_at(system, f"{place}/affected_cpus")
    return affected if affected.value is not None else cpus_at(system, f"{place}/related_cpus")


def _policy(
    system: System, place: str, cpus: tuple[int, ...], with_current: bool
) -> FrequencyPolicy:
    available = word_at(system, f"{place}/scaling_available_governors")
    return FrequencyPolicy(
        cpus=cpus,
        driver=word_at(system, f"{place}/scaling_driver"),
        governor=word_at(system, f"{place}/scaling_governor"),
        available_governors=tuple((available or "").split()),
        energy_preference=word_at(system, f"{place}/energy_performance_preference"),
        current_hz=_hertz(system, f"{place}/scaling_cur_freq") if with_current else None,
        limit_hz=_hertz(system, f"{place}/scaling_max_freq"),
        hardware_hz=_hertz(system, f"{place}/cpuinfo_max_freq"),
    )


def _hertz(system: System, path: str) -> float | None:
    """A file in kHz; "<unknown>" and 0 are no"""
    khz = natural_at(system, path).value
    return khz * 1e3 if khz else None


def scaling_mode(system: System) -> Fact[str]:
    """The mode of intel_pstate or amd_pstate."""
    intel, amd = f"{CPUS}/intel_pstate/status", f"{CPUS}/amd_pstate/status"
    for path in (intel, amd):
        status = system.text(path)
        if not status.is_absent:
            return status.map(_mode, "a driver mode")
    if not system.exists(CPUS):
        return cannot_tell(intel, f"there is no {CPUS}")
    if system.exists(f"{CPUS}/intel_pstate"):  # older kernels
        return cannot_tell(intel, "this kernel's intel_pstate does not report its mode")
    return absent(f"{intel}, {amd}", "neither driver is loaded")


def _mode(text: str) -> str | None:
    mode = {"disable": "off"}.get(text, text)
    return mode if mode in ("active", "passive", "guided", "off") else None


def turbo(system: System, has_policies: Fact[tuple[FrequencyPolicy, ...]]) -> Fact[bool]:
    """Are clocks above the base frequency allowed?"""
    intel, boost = f"{CPUS}/intel_pstate/no_turbo", f"{CPUS}/cpufreq/boost"
    no_turbo = natural_at(system, intel).map(_switch, "0 or 1")
    if no_turbo.value is not None:
        return known(not no_turbo.value, intel)
    boosted = natural_at(system, boost).map(_switch, "0 or 1")
    if boosted.value is not None:
        return boosted
    for fact in (no_turbo, boosted):
        if not fact.is_absent:
            return cannot_tell(fact.source, fact.reason)
    if has_policies.is_absent:
        return absent(boost, has_policies.reason)
    return cannot_tell(f"{intel}, {boost}", "this driver does not report it")


def _switch(number: int) -> bool | None:
    return bool(number) if number in (0, 1) else None


def current_hz(
    cpuinfo: Fact[CpuInfo], has_policies: Fact[tuple[FrequencyPolicy, ...]]
) -> Fact[tuple[float, ...]]:
    """Each CPU's clock at this moment, in the order of /proc/cpuinfo."""
    source = f"{CPUINFO} (cpu MHz)"
    if cpuinfo.value is None:
        return cannot_tell(source, cpuinfo.reason)
    texts = [entry.get("cpu MHz") for entry in cpuinfo.value.processors.values()]
    if not any(texts):
        return absent(source, "on this architecture the kernel does not list it there")
    hertz = [_megahertz(text) for text in texts]
    if None in hertz:
        return cannot_tell(source, "it does not list it for every CPU")
    clocks = tuple(value for value in hertz if value is not None)
    # x86's show_cpuinfo: measured with aperfmperf, else cpufreq's, else the nominal cpu_khz.
    measured = "aperfmperf" in cpuinfo.value.flags or has_policies.is_known
    if not measured:
        nominal = f"{clocks[0] / 1e6:.0f} MHz"
        return cannot_tell(source, f"not measured here; {nominal} is the nominal clock")
    return known(clocks, source)


def _megahertz(text: str | None) -> float | None:
    if text is None or not re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,9})?", text):
        return None
    hertz = float(text) * 1e6
    return hertz if hertz > 0 and math.isfinite(hertz) else None


def idle_states(system: System, cpuinfo: Fact[CpuInfo]) -> Fact[tuple[IdleState, ...]]:
    """The C-states of CPU 0, from the lightest on."""
    folder = f"{CPUS}/cpu0/cpuidle"
    names = system.names(folder)
    numbers = [int(n[5:]) for n in names.value or () if re.fullmatch(r"state[0-9]{1,3}", n)]
    if names.value is not None and numbers:
        states = [_idle_state(system, f"{folder}/state{number}") for number in sorted(numbers)]
        found = tuple(state for state in states if state is not None)
        if len(found) == len(states):
            return known(found, f"{folder}/state*")
        return cannot_tell(f"{folder}/state*", "a state's name, latency or switch is unreadable")
    if names.value is None and not names.is_absent:
        return cannot_tell(folder, names.reason)
    if not system.exists(f"{CPUS}/cpu0"):
        return cannot_tell(folder, f"there is no {CPUS}/cpu0")
    if is_virtual(cpuinfo):
        return absent(folder, "this is a virtual machine: its host chooses idle states")
    return absent(folder, "the kernel has no cpuidle driver loaded")


def _idle_state(system: System, place: str) -> IdleState | None:
    """Latency and residency are in µs; the switch is a number, 0 or more."""
    name = word_at(system, f"{place}/name")
    latency = natural_at(system, f"{place}/latency").value
    disabled = system.text(f"{place}/disable").map(natural, "a number").value
    residency = natural_at(system, f"{place}/residency").value
    if name is None or latency is None or disabled is None:
        return None
    return IdleState(
        name, latency / 1e6, disabled > 0, None if residency is None else residency / 1e6
    )


# ---
# The processor, the share of it that a job can use, and CPU types by name.


_STATUS = "/proc/self/status"


def read_cpu(system: System) -> Cpu:
    """Every fact of the processor; none of them raises."""
    cpuinfo = read_cpuinfo(system)
    online = topology.online_cpus(system, cpuinfo)
    numbers = online.value or ()
    physical = topology.cores(system, numbers, cpuinfo)
    affinity = read_affinity(system)
    quota = cpu_quota(system)
    clocks = policies(system, numbers, cpuinfo)
    return Cpu(
        model=_model(system, cpuinfo),
        sockets=topology.sockets(system, numbers, cpuinfo),
        physical_cores=physical.map(len, "cores"),
        logical_cpus=online.map(len, "CPUs"),
        core_kinds=topology.core_kinds(system, numbers, physical, cpuinfo),
        affinity=affinity,
        quota_cores=quota,
        usable_cores=_usable(affinity, quota),
        numa_nodes=topology.numa_nodes(system),
        policies=clocks,
        scaling_mode=scaling_mode(system),
        turbo=turbo(system, clocks),
        current_hz=current_hz(cpuinfo, clocks),
        idle_states=idle_states(system, cpuinfo),
        siblings=physical,
    )


def read_affinity(system: System) -> Fact[tuple[int, ...]]:
    """The CPUs that this process may run on; the cgroup's cpuset is already in it."""
    call = asked("sched_getaffinity", system.affinity)
    if call.value:
        return call
    listed = system.text(_STATUS).map(_allowed, "a line Cpus_allowed_list")
    if listed.value:
        return listed
    granted = cpuset(system)
    return granted if granted.value else cannot_tell(call.source, call.reason or "no CPU")


def _allowed(text: str) -> tuple[int, ...] | None:
    match = re.search(r"(?m)^Cpus_allowed_list:[ \t]*([0-9,\-]+)[ \t]*$", text)
    return None if match is None else cpu_list(match[1])


def _usable(affinity: Fact[tuple[int, ...]], quota: Fact[float]) -> Fact[float]:
    if affinity.value is None:
        return cannot_tell(affinity.source, affinity.reason)
    allowed = float(len(affinity.value))
    if quota.value is not None:
        return known(min(allowed, quota.value), f"{affinity.source}, {quota.source}")
    if quota.is_absent:
        return known(allowed, affinity.source)
    return cannot_tell(
        quota.source, f"at most {allowed:g} by the affinity, the quota is not known: {quota.reason}"
    )


def _model(system: System, cpuinfo: Fact[CpuInfo]) -> Fact[str]:
    if cpuinfo.value is None:
        return cannot_tell(CPUINFO, cpuinfo.reason)
    first = cpuinfo.value.first
    name = first.get("model name", "")
    # 64-bit Arm has no names: NVIDIA's kernels write "ARMv8 Processor rev 1 (v8l)" there.
    if name and not name.startswith("ARMv"):
        return known(name, CPUINFO)
    board = word_at(system, "/proc/device-tree/model")
    if board:
        return known(board, "/proc/device-tree/model")
    implementer, part = first.get("CPU implementer"), first.get("CPU part")
    if implementer and part:
        return known(f"Arm implementer {implementer}, part {part}", CPUINFO)
    for key in ("cpu", "cpu model", "uarch"):  # POWER, MIPS, RISC-V
        if first.get(key):
            return known(first[key], CPUINFO)
    return known(name, CPUINFO) if name else cannot_tell(CPUINFO, "it lists no model")


# ---
# CPU types by name, with the work per clock cycle of a core of each.
#
# The figures are assumptions: makers' and reviewers' averages of single-threaded programs at equal
# clocks, relative to Intel's Skylake core of 2015. A program may gain more or less from a newer
# core; :data:`SPREAD` says by how much.


#: What the second thread of a core adds to the first: of two workers on one core each runs at
#: 0.6 of its speed alone, together at 1.2. An assumption: published gains of simultaneous
#: multithreading lie between 0 and 0.3 (Intel Technology Journal, volume 6, issue 1: up to 30%
#: of server loads); decoders, which keep the execution units busy, are in the middle.
SIBLING_GAIN: Final = 0.2
SIBLING_RANGE: Final = (0.0, 0.3)
#: By what share one program's work per clock may differ from a kind's figure. An assumption: the
#: single programs of a maker's average lie within about that (AMD's 13% for Zen 4 are the mean of
#: gains from 1 to 39%).
SPREAD: Final = 0.15


class CpuKindError(ValueError):
    """A kind of CPU that is not known; one line with the kinds that are."""


@dataclass(frozen=True)
class CpuKind:
    """A core's design.

    ``key`` is its name here, ``names`` are others for it: processors, code names, cloud families.
    ``per_clock`` is its work per clock cycle, as a multiple of Skylake's; ``source`` says whose
    average that is.
    """

    key: str
    per_clock: float
    source: str
    names: tuple[str, ...] = ()


_PCPER: Final = "PC Perspective, August 2015: Skylake +10% over Haswell at 3.5 GHz"
_GOLDEN_COVE: Final = (
    "Intel Architecture Day 2021: Golden Cove +19% over Cypress Cove, that +19% over Skylake"
)

#: Oldest first, Intel's before AMD's.
KINDS: Final = (
    CpuKind("Haswell", 1 / 1.1, _PCPER, ("e5 v3", "4th gen")),
    CpuKind("Broadwell", 1 / 1.06, f"{_PCPER}; Broadwell between", ("e5 v4", "5th gen")),
    CpuKind(
        "Skylake",
        1.0,
        "the reference",
        (
            *("skylake sp", "cascade lake", "cooper lake", "kaby lake", "coffee lake"),
            *("comet lake", "scalable", "scalable 2"),
            *(f"{number}th gen" for number in range(6, 11)),
        ),
    ),
    CpuKind(
        "Ice Lake",
        1.18,
        "Intel, Computex 2019: Sunny Cove +18% over Skylake",
        ("ice lake sp", "sunny cove", "tiger lake", "scalable 3"),
    ),
    CpuKind(
        "Rocket Lake",
        1.19,
        "Intel, March 2021: Cypress Cove +19% over Skylake",
        ("cypress cove", "11th gen"),
    ),
    CpuKind(
        "Sapphire Rapids",
        1.19 * 1.19,
        _GOLDEN_COVE,
        (
            *("golden cove", "raptor cove", "emerald rapids", "granite rapids"),
            *("scalable 4", "scalable 5"),
        ),
    ),
    CpuKind(
        "Alder Lake",
        1.19 * 1.19,
        f"{_GOLDEN_COVE} (its performance cores)",
        ("raptor lake", "12th gen", "13th gen", "14th gen"),
    ),
    CpuKind(
        "Zen 1", 1.05 / 1.15, "AMD, Computex 2019: Zen 2 +15% over Zen", ("zen", "zen+", "naples")
    ),
    CpuKind("Zen 2", 1.05, "reviews of 2019 at equal clocks: Skylake +5%", ("rome",)),
    CpuKind("Zen 3", 1.05 * 1.19, "AMD, October 2020: Zen 3 +19% over Zen 2", ("milan",)),
    CpuKind(
        "Zen 4",
        1.05 * 1.19 * 1.13,
        "AMD, August 2022: Zen 4 +13% over Zen 3",
        ("genoa", "bergamo", "siena"),
    ),
    CpuKind(
        "Zen 5", 1.05 * 1.19 * 1.13 * 1.16, "AMD, Computex 2024: Zen 5 +16% over Zen 4", ("turin",)
    ),
)

_BY_KEY: Final = {kind.key: kind for kind in KINDS}
#: Of family 6, by /proc/cpuinfo's model number (arch/x86/include/asm/intel-family.h of Linux).
_INTEL: Final[Mapping[str, tuple[int, ...]]] = {
    "Haswell": (60, 63, 69, 70),
    "Broadwell": (61, 71, 79, 86),
    "Skylake": (78, 85, 94, 142, 158, 165, 166),
    "Ice Lake": (106, 108, 125, 126, 140, 141),
    "Rocket Lake": (167,),
    "Sapphire Rapids": (143, 173, 207),
    "Alder Lake": (151, 154, 183, 186, 191),
}
#: By family, the first model number of each design's ranges (arch/x86/kernel/cpu/amd.c of Linux).
_AMD: Final[Mapping[int, tuple[tuple[int, str], ...]]] = {
    0x17: ((0x00, "Zen 1"), (0x30, "Zen 2")),
    0x19: (
        *((0x00, "Zen 3"), (0x10, "Zen 4"), (0x20, "Zen 3")),
        *((0x60, "Zen 4"), (0x80, ""), (0xA0, "Zen 4")),
    ),
    0x1A: ((0x00, "Zen 5"),),
}


def find_cpu_kind(text: str) -> CpuKind:
    """The kind that ``text`` names, in any spelling; raises :class:`CpuKindError`."""
    wanted = _plain(text)
    for kind in KINDS:
        if wanted in map(_plain, (kind.key, *kind.names)):
            return kind
    known = ", ".join(kind.key for kind in KINDS)
    raise CpuKindError(f"unknown CPU type {text.strip()[:60]!r}; available: {known}")


def cpu_kind_here(system: System) -> CpuKind | None:
    """This machine's, by the family and model of /proc/cpuinfo; ``None``: not in the table."""
    cpuinfo = read_cpuinfo(system).value
    if cpuinfo is None:
        return None
    vendor = cpuinfo.first.get("vendor_id", "")
    family, model = (_number(cpuinfo.first.get(key, "")) for key in ("cpu family", "model"))
    if family is None or model is None:
        return None
    if vendor == "GenuineIntel" and family == 6:
        return next((_BY_KEY[key] for key, models in _INTEL.items() if model in models), None)
    key = ""
    if vendor == "AuthenticAMD":
        for first, name in _AMD.get(family, ()):
            key = name if model >= first else key
    return _BY_KEY.get(key)


def _plain(name: str) -> str:
    words = re.sub(r"generation", "gen", name.lower())
    return re.sub(r"intel|amd|core|epyc|ryzen|xeon|cpu|[^a-z0-9+]", "", words)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
