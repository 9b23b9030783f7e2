"""Words of fixes: shell commands, where to run them, and the GPU that is meant."""

from __future__ import annotations

import math
import shlex

from trainfit.hardware.gpu.masking import gpus_of_job
from trainfit.results.machine.doctor import Fix
from trainfit.results.machine.machine import Gpu, Machine
from trainfit.results.text import short

_LONGEST_WORD = 24


def brief(text: str, most: int = _LONGEST_WORD) -> str:
    """A machine's own word for a summary: printable, on one line, and not long."""
    return short(text, most)


def quoted(text: str) -> str:
    """A machine's own word as one word of a shell command."""
    return shlex.quote(text)


def restore(machine: Machine, variable: str) -> str:
    """The shell's words that give an environment variable back what it has now."""
    former = machine.threads.variables.get(variable)
    return f"unset {variable}" if former is None else f"export {variable}={quoted(former)}"


def which(gpu: Gpu) -> str:
    """A GPU in a summary: "GPU 0 (NVIDIA T4)"."""
    return f"GPU {gpu.index}" + (f" ({brief(gpu.name.value)})" if gpu.name.value else "")


def on_host(machine: Machine, cost: str) -> str:
    """What a remedy costs; inside a container also that it has to be run outside."""
    if not machine.surroundings.container.is_known:
        return cost
    return f"{cost}; run it on the host, not in this container"


def raise_limit(machine: Machine, docker: str, field: str, unit: str, cost: str) -> Fix:
    """Raise a limit where this machine's was set: on a pod, a container, or a systemd unit.

    ``docker``, ``field`` and ``unit`` are options with the wanted value and, after a bar, the
    present one: "--cpus=16|--cpus=4".
    """
    kind = (machine.surroundings.container.value or "").lower()
    if "kube" in kind:
        wanted, former = (f"in the pod's spec: resources.limits.{v}" for v in field.split("|"))
        return Fix(wanted, former, cost)
    if kind:
        engine = "podman" if "podman" in kind else "docker"
        wanted, former = (f"{engine} update {v} CONTAINER" for v in docker.split("|"))
        return Fix(wanted, former, on_host(machine, cost))
    wanted, former = (
        f"sudo systemctl set-property user-$(id -u).slice {v}" for v in unit.split("|")
    )
    return Fix(wanted, former, f"{cost}; if another unit sets the limit, use that unit's name")


def all_gpus(machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs of a job that starts here (check "gpu" says why where there are none)."""
    return gpus_of_job(machine)


def whole(number: float) -> int:
    """Cores rounded up to a whole number of threads, at least one."""
    return max(1, math.ceil(number))
