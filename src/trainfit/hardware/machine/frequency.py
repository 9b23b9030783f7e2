"""Clocks and idle states: cpufreq, intel_pstate, amd_pstate and cpuidle of sysfs.

Sources: Documentation/admin-guide/pm/{cpufreq,intel_pstate,amd-pstate,cpuidle}.rst.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from trainfit.hardware.machine.parsing import cpus_at, natural, natural_at, word_at
from trainfit.hardware.machine.system import System
from trainfit.hardware.machine.topology import CPUINFO, CPUS, CpuInfo, is_virtual
from trainfit.results.machine import Fact, FrequencyPolicy, IdleState, absent, cannot_tell, known

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
        places = [each for cpu in online if system.exists(each := f"{CPUS}/cpu{cpu}/cpufreq")]
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
    """A file in kHz; "<unknown>" and 0 are no frequency."""
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
    clocks = tuple(each for each in hertz if each is not None)
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
