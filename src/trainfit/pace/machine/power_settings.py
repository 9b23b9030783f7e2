"""Clock and idle-state settings of this machine as text, stored with a measurement."""

from __future__ import annotations

from trainfit.hardware.host.parsing import cpu_list_text
from trainfit.results.format import duration
from trainfit.results.machine.machine import Machine


def power_facts(machine: Machine) -> dict[str, str]:
    """By subject: cpufreq, scaling mode, turbo, idle states, P-cores, virtual machine. What is not
    visible here is said to be."""
    cpu = machine.cpu
    found = {"cpufreq": _policies(machine)}
    if cpu.scaling_mode.value is not None:
        found["scaling mode"] = cpu.scaling_mode.value
    if cpu.turbo.value is not None:
        found["turbo"] = "on" if cpu.turbo.value else "off"
    states = cpu.idle_states.value
    if states is not None:
        found["idle states"] = ", ".join(
            f"{state.name} ({duration(state.latency_s)})" + (" off" if state.disabled else "")
            for state in states
        )
    else:
        found["idle states"] = f"not visible: {cpu.idle_states.reason}"
    fast = [kind for kind in cpu.core_kinds.value or () if kind.kind == "performance"]
    if fast:
        found["performance cores"] = cpu_list_text(fast[0].logical_cpus)
    virtual = machine.surroundings.virtual_machine.value
    if virtual is not None:
        found["virtual machine"] = str(virtual)
    return found


def _policies(machine: Machine) -> str:
    policies = machine.cpu.policies
    if policies.value is None:
        return f"not visible: {policies.reason}"
    words = {
        f"{each.driver or 'unknown driver'} {each.governor or 'no governor'}"
        + (f", EPP {each.energy_preference}" if each.energy_preference else "")
        for each in policies.value
    }
    return "; ".join(sorted(words))
