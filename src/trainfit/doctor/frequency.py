"""Check of the CPU's clock: governor, limits, turbo, energy preference.

A governor's name is no diagnosis (kernel, admin-guide/pm/cpufreq and intel_pstate): what
`powersave` does depends on the driver. Only what holds the clock down whatever the load is
bad; what lets it fall between calls cannot be judged from settings, only measured.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, brief, evidence, good, on_host, unsure
from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.hardware.machine.topology import CPUS
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import FrequencyPolicy, IdleState, Machine
from trainfit.results.text import duration, ghz

FREQUENCY = "frequency"
#: Drivers that choose the clock themselves; a governor of theirs only names a preference.
_OWN_CHOICE = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
#: Its limit is the highest state of ACPI's table, its maximum includes the boost above it
#: (drivers/cpufreq/acpi-cpufreq.c, max_boost_ratio): the two differ on every machine that boosts.
_LIMIT_WITHOUT_BOOST = "acpi-cpufreq"
_HEAT = "more power and heat, also while idle"


def check_frequency(machine: Machine) -> tuple[Check, ...]:
    """Driver, governor, EPP, limits and turbo of the CPUs that a job may run on."""
    found = _found(machine)
    policies = _relevant(machine)
    if not policies:
        return (_hidden(machine, found),)
    check = (
        _pinned(machine, policies, found)
        or _limited(machine, policies, found)
        or _turbo_off(machine, found)
        or _prefers_power(machine, policies, found)
        or _scales(machine, policies, found)
    )
    return (check or good(FREQUENCY, f"{_name(policies)}: the clock stays up", found, _FAST),)


_FAST = "a call after a pause runs at the same clock as back-to-back calls"


def _relevant(machine: Machine) -> tuple[FrequencyPolicy, ...]:
    """The policies of the CPUs that this process may run on."""
    policies = machine.cpu.policies.value or ()
    affinity = machine.cpu.affinity.value
    if not affinity:
        return policies
    return tuple(p for p in policies if not set(p.cpus).isdisjoint(affinity)) or policies


def _found(machine: Machine) -> list[Evidence]:
    cpu = machine.cpu
    found = []
    for name, group in _grouped(_relevant(machine), _words).items():
        cpus = cpu_list_text(_cpus(group))
        found.append(Evidence(f"cpufreq of CPUs {cpus}", name, source=cpu.policies.source))
    if not found:
        found.append(evidence("cpufreq", cpu.policies, lambda _: "no policy"))
    return [
        *found,
        evidence("scaling mode", cpu.scaling_mode),
        evidence("turbo", cpu.turbo, lambda on: "on" if on else "off"),
        evidence("current clocks", cpu.current_hz, _span),
    ]


def _words(p: FrequencyPolicy) -> str:
    parts = [f"driver {p.driver or 'unknown'}", f"governor {p.governor or 'unknown'}"]
    if p.energy_preference is not None:
        parts.append(f"EPP {p.energy_preference}")
    if p.limit_hz is not None:
        parts.append(f"allowed {ghz(p.limit_hz)}")
    if p.hardware_hz is not None:
        parts.append(f"possible {ghz(p.hardware_hz)}")
    return ", ".join(parts)


def _span(clocks: Sequence[float]) -> str:
    if not clocks:
        return "none"
    return f"{ghz(min(clocks))} to {ghz(max(clocks))} (rest and work look different)"


def _grouped(
    policies: Iterable[FrequencyPolicy], key: Callable[[FrequencyPolicy], object]
) -> dict[str, list[FrequencyPolicy]]:
    groups: dict[str, list[FrequencyPolicy]] = {}
    for frequency_policy in policies:
        groups.setdefault(str(key(frequency_policy)), []).append(frequency_policy)
    return groups


def _name(policies: Sequence[FrequencyPolicy]) -> str:
    """Driver, governors and preferences on one short line."""
    drivers = sorted({brief(p.driver or "cpufreq", 16) for p in policies})[:2]
    governors = sorted({brief(p.governor or "no governor", 16) for p in policies})[:2]
    wishes = sorted({brief(p.energy_preference, 20) for p in policies if p.energy_preference})[:2]
    text = f"{'/'.join(drivers)} {'/'.join(governors)}"
    return brief(text + (f", EPP {'/'.join(wishes)}" if wishes else ""), 52)


def _hidden(machine: Machine, evidence: list[Evidence]) -> Check:
    reason = machine.cpu.policies.reason
    where = "the host decides" if machine.surroundings.virtual_machine.is_known else "it decides"
    return unsure(
        FREQUENCY,
        "cpufreq is not visible here: the CPU's clock settings are unknown",
        f"cpufreq of the machine itself ({reason or 'none is listed'}); {where}. Their effect on "
        "calls at a fixed rate can only be measured: paced against back to back.",
        evidence,
    )


def _epp(p: FrequencyPolicy) -> int | None:
    """EPP from 0 (performance) to 255 (power), where the hardware decides by it alone."""
    word = p.energy_preference
    if word is None or p.driver not in _OWN_CHOICE:
        return None
    if word.isascii() and word.isdigit() and len(word) <= 3:
        return int(word)
    return policy.EPP_WORDS.get(word)


def _pinned(
    machine: Machine, policies: Sequence[FrequencyPolicy], evidence: list[Evidence]
) -> Check | None:
    """The generic powersave governor sets the lowest clock and never raises it."""
    low = [p for p in policies if p.governor == "powersave" and p.driver not in _OWN_CHOICE]
    low = [p for p in low if p.driver is not None]
    if not low:
        return None
    driver = brief(low[0].driver or "")
    return bad(
        FREQUENCY,
        "governor_pins_minimum",
        f"governor powersave under {driver} holds the CPU at its lowest clock",
        "with this driver, powersave sets the lowest clock regardless of the load. Loading, "
        "decoding and launching kernels are slower in proportion to the clocks.",
        evidence,
        _governor_remedies(machine, policies, ("performance", "schedutil", "ondemand")),
    )


def _governor_remedies(
    machine: Machine,
    policies: Sequence[FrequencyPolicy],
    wanted: Sequence[str] = ("performance",),
) -> list[Fix]:
    """The first of the ``wanted`` governors that this machine has, or the module with it."""
    now = {p.governor for p in policies}
    offered = [set(p.available_governors) for p in policies if p.available_governors]
    had = [name for name in wanted if all(name in names for names in offered)]
    governor = had[0] if had else "performance"
    if now == {governor}:
        return []
    load = "" if had else "sudo modprobe cpufreq_performance && "
    return [
        Fix(
            f"{load}sudo cpupower frequency-set -g {governor}",
            _undo_governor(_grouped(policies, lambda p: p.governor or "")),
            on_host(machine, _HEAT if governor == "performance" else "more power under load"),
        )
    ]


def _undo_governor(former: dict[str, list[FrequencyPolicy]]) -> str:
    commands = []
    for governor, group in former.items():
        if not governor:
            continue
        cpus = cpu_list_text(_cpus(group))
        only = f"-c {cpus} " if len(former) > 1 else ""
        commands.append(f"sudo cpupower {only}frequency-set -g {shlex.quote(governor)}")
        for wish, wishing in _grouped(group, lambda p: p.energy_preference or "").items():
            if wish:
                commands.append(_set_epp(wish, wishing, everywhere=len(wishing) == len(group)))
    return " && ".join(commands) or "restart the machine"


def _set_epp(wish: str, group: Sequence[FrequencyPolicy], everywhere: bool) -> str:
    runs = cpu_list_text(_cpus(group)).split(",")
    words = ["{" + run.replace("-", "..") + "}" if "-" in run else run for run in runs]
    word = "*" if everywhere else words[0] if len(words) == 1 else "{" + ",".join(words) + "}"
    file = f"{CPUS}/cpu{word}/cpufreq/energy_performance_preference"
    return f"echo {shlex.quote(wish)} | sudo tee {file}"


def _limited(
    machine: Machine, policies: Sequence[FrequencyPolicy], evidence: list[Evidence]
) -> Check | None:
    low = [
        p
        for p in policies
        if p.limit_hz and p.hardware_hz and p.limit_hz < policy.CLOCK_LIMIT_SHARE * p.hardware_hz
        if p.driver != _LIMIT_WITHOUT_BOOST
    ]
    if not low:
        return None
    worst = min(low, key=lambda p: (p.limit_hz or 0) / (p.hardware_hz or 1))
    remedies = []
    for group in list(_grouped(low, lambda p: (p.limit_hz, p.hardware_hz)).values())[:4]:
        only = "" if len(group) == len(policies) else f"-c {cpu_list_text(_cpus(group))} "
        remedies.append(
            Fix(
                f"sudo cpupower {only}frequency-set -u {_khz(group[0].hardware_hz)}",
                f"sudo cpupower {only}frequency-set -u {_khz(group[0].limit_hz)}",
                on_host(machine, "power and heat; a laptop or a tuned profile may set it again"),
            )
        )
    return bad(
        FREQUENCY,
        "clock_limited",
        f"the CPU's clock is limited to {ghz(worst.limit_hz or 0)}; the hardware reaches "
        f"{ghz(worst.hardware_hz or 0)}",
        "scaling_max_freq limits the clock regardless of the load: loading, decoding and "
        "kernel launches are slower in proportion.",
        evidence,
        remedies,
    )


def _cpus(group: Iterable[FrequencyPolicy]) -> list[int]:
    return sorted(cpu for p in group for cpu in p.cpus)


def _khz(hertz: float | None) -> str:
    return f"{round((hertz or 0) / 1e3)}kHz"


def _turbo_off(machine: Machine, evidence: list[Evidence]) -> Check | None:
    turbo = machine.cpu.turbo
    if turbo.value is not False:
        return None
    # Intel's file says no_turbo, the generic one boost: opposite meanings.
    negated = "no_turbo" in turbo.source
    file = turbo.source if turbo.source.startswith("/sys/") else f"{CPUS}/cpufreq/boost"
    on, off = ("0", "1") if negated else ("1", "0")
    return bad(
        FREQUENCY,
        "turbo_off",
        "turbo is switched off: the CPU stays at its base clock",
        "one Python thread launches a model's kernels and gains most from turbo; workers that "
        "decode are slowed by the same factor.",
        evidence,
        [
            Fix(
                f"echo {on} | sudo tee {shlex.quote(file)}",
                f"echo {off} | sudo tee {shlex.quote(file)}",
                on_host(machine, "more power, heat and fan noise; clocks vary more between runs"),
            )
        ],
    )


def _prefers_power(
    machine: Machine, policies: Sequence[FrequencyPolicy], evidence: list[Evidence]
) -> Check | None:
    saving = [
        p for p in policies if p.governor != "performance" and (_epp(p) or 0) > policy.EPP_POWER
    ]
    if not saving:
        return None
    wish = brief(saving[0].energy_preference or "")
    return bad(
        FREQUENCY,
        "energy_preference_power",
        f"the CPU is set to save power (EPP {wish}): its clock rises late and not to the maximum",
        "a power-saving EPP also lowers the clock of a loaded core. Loading and kernel "
        "launches are slower, most of all for calls with pauses between them.",
        evidence,
        [*_epp_remedies(machine, policies), *_governor_remedies(machine, policies)],
    )


def _epp_remedies(machine: Machine, policies: Sequence[FrequencyPolicy]) -> list[Fix]:
    """EPP alone: the lesser remedy, where the hardware follows it."""
    if any(p.energy_preference is None or p.driver not in _OWN_CHOICE for p in policies):
        return []
    if any(p.governor == "performance" for p in policies):
        return []  # that governor sets EPP itself, and the kernel refuses another
    former = _grouped(policies, lambda p: p.energy_preference)
    undo = [_set_epp(w, g, everywhere=len(former) == 1) for w, g in former.items()]
    return [
        Fix(
            _set_epp("performance", policies, everywhere=True),
            " && ".join(undo),
            on_host(machine, "more power under load; the clock still drops when idle"),
        )
    ]


def _scales(
    machine: Machine, policies: Sequence[FrequencyPolicy], evidence: list[Evidence]
) -> Check | None:
    """Clocks that follow the load: good under a steady one, to be measured under a paced one."""
    slow = [p for p in policies if not _stays_up(p)]
    if not slow:
        return None
    return unsure(
        FREQUENCY,
        f"{_name(slow)}: fine under steady load; measure paced calls",
        "a loaded core reaches its clock, so training is not slowed. Between paced calls "
        "(inference at a control rate) it lowers the clock, and the next call may start slow: "
        "one robot's calls took 7 to 8 ms more at 30 Hz than at 60 Hz. To see whether this "
        "machine does that, time the same call paced and back to back, with and without the fix "
        "(trainfit pace).",
        evidence,
        (*_epp_remedies(machine, policies), *_governor_remedies(machine, policies)),
    )


def _stays_up(p: FrequencyPolicy) -> bool:
    return p.governor == "performance" or _epp(p) == 0


# ---
# Check of the CPU's wake-up latency, which matters to paced inference, not to training.


IDLE = "idle"


def check_idle(machine: Machine) -> tuple[Check, ...]:
    """The deepest C-state that is enabled, and what waking from it takes."""
    states = machine.cpu.idle_states
    found = [evidence("idle states", states, _listed)]
    if not states.value:
        needed = (
            "cpuidle's states of the physical "
            f"machine ({states.reason or 'none is listed'}); in a virtual machine the "
            "host decides. Training is not affected."
        )
        return (unsure(IDLE, "the CPU's idle states are not visible here", needed, found),)
    enabled = [state for state in states.value if not state.disabled]
    if not enabled:
        why = "every idle state is disabled: cores wake at once, and draw power all the time"
        return (good(IDLE, "all idle states are disabled", found, why),)
    deepest = max(enabled, key=lambda state: state.latency_s)
    took = duration(deepest.latency_s)
    summary = f"waking from the deepest idle state ({brief(deepest.name)}) needs up to {took}"
    if deepest.latency_s < policy.IDLE_LATENCY_S:
        why = (
            "a loaded core does not enter idle states, so training is not slowed; a paced "
            "call loses about that much each time that it waits"
        )
        return (good(IDLE, summary, found, why),)
    why = (
        "training is not slowed: a loaded core does not enter idle states. A paced call loses "
        "that much each time that it waits for the GPU or for a worker; to see whether it adds "
        "up, time the call with and without the fix (trainfit pace)."
    )
    return (unsure(IDLE, summary, why, found, _remedies(machine)),)


def _remedies(machine: Machine) -> tuple[Fix, ...]:
    off = [n for n, state in enumerate(machine.cpu.idle_states.value or ()) if state.disabled]
    undo = "sudo cpupower idle-set -E"
    if off:
        undo += "".join(f" && sudo cpupower idle-set -d {n}" for n in off)
    return (
        Fix(
            "sudo sh -c 'exec 3>/dev/cpu_dma_latency; printf \"\\0\\0\\0\\0\" >&3; sleep infinity'",
            "stop that command (Ctrl-C): the limit lasts as long as the file is open",
            on_host(machine, "idle cores draw power and leave less turbo headroom for busy ones"),
        ),
        Fix(
            f"sudo cpupower idle-set -D {policy.IDLE_KEEP_US}",
            undo,
            on_host(machine, "the same, until undone or the next reboot"),
        ),
    )


def _listed(states: Sequence[IdleState]) -> str:
    if not states:
        return "none"
    return ", ".join(
        f"{state.name} {duration(state.latency_s)}" + (" (off)" if state.disabled else "")
        for state in states
    )
