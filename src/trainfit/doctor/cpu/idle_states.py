"""Check of the CPU's wake-up latency, which matters to paced inference, not to training."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import evidence, good, unsure
from trainfit.doctor.formatting import brief, on_host
from trainfit.results.format import duration
from trainfit.results.machine.doctor import Check, Fix
from trainfit.results.machine.machine import IdleState, Machine

NAME = "idle"


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
        return (unsure(NAME, "the CPU's idle states are not visible here", needed, found),)
    enabled = [state for state in states.value if not state.disabled]
    if not enabled:
        why = "every idle state is disabled: cores wake at once, and draw power all the time"
        return (good(NAME, "all idle states are disabled", found, why),)
    deepest = max(enabled, key=lambda state: state.latency_s)
    took = duration(deepest.latency_s)
    summary = f"waking from the deepest idle state ({brief(deepest.name)}) needs up to {took}"
    if deepest.latency_s < policy.IDLE_LATENCY_S:
        why = (
            "a loaded core does not enter idle states, so training is not slowed; a paced "
            "call loses about that much each time that it waits"
        )
        return (good(NAME, summary, found, why),)
    why = (
        "training is not slowed: a loaded core does not enter idle states. A paced call loses "
        "that much each time that it waits for the GPU or for a worker; to see whether it adds "
        "up, time the call with and without the fix (trainfit pace)."
    )
    return (Check(NAME, "cannot_tell", "", summary, why, tuple(found), _remedies(machine)),)


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
