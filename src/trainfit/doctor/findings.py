"""Constructors of findings: three verdicts, evidence that names its source, words of fixes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix, Severity
from trainfit.results.machine import Fact, Gpu, Machine
from trainfit.results.text import short

T = TypeVar("T")


def evidence(what: str, fact: Fact[T], show: Callable[[T], Any] = str) -> Evidence:
    """A fact as evidence: its value in words, or why there is none."""
    if fact.value is not None:
        return Evidence(what, str(show(fact.value)), source=fact.source)
    state = "none" if fact.is_absent else "cannot tell"
    return Evidence(what, f"{state} ({fact.reason})", source=fact.source)


def good(name: str, summary: str, evidence: Sequence[Evidence] = (), why: str = "") -> Check:
    """Nothing is wrong."""
    return Check("", "info", summary, tuple(evidence), why, name=name, verdict="good")


def bad(
    name: str,
    kind: str,
    summary: str,
    why: str,
    evidence: Sequence[Evidence],
    fixes: Sequence[Fix],
    severity: Severity = "warning",
) -> Check:
    """Something costs the job its GPU, speed or memory; ``kind`` is a stable identifier."""
    return Check(
        kind, severity, summary, tuple(evidence), why, tuple(fixes), name=name, verdict="bad"
    )


def unsure(
    name: str,
    summary: str,
    needed: str,
    evidence: Sequence[Evidence] = (),
    to_try: Sequence[Fix] = (),
) -> Check:
    """Undetermined; ``needed`` says what would be needed to tell, ``to_try`` what may show it."""
    return Check(
        "",
        "info",
        summary,
        tuple(evidence),
        needed,
        tuple(to_try),
        name=name,
        verdict="cannot_tell",
    )


# ---
# Words of fixes: shell commands, where to run them, and the GPU that is meant.


_LONGEST_WORD = 24


def brief(text: str, most: int = _LONGEST_WORD) -> str:
    """A machine's own word for a summary: printable, on one line, and not long."""
    return short(text, most)


def restore(machine: Machine, variable: str) -> str:
    """The shell's words that give an environment variable back what it has now."""
    former = machine.threads.variables.get(variable)
    return f"unset {variable}" if former is None else f"export {variable}={shlex.quote(former)}"


def version_text(version: tuple[int, int]) -> str:
    """(12, 4) as "12.4"."""
    return f"{version[0]}.{version[1]}"


def which(gpu: Gpu) -> str:
    """A GPU in a summary: "GPU 0 (NVIDIA T4)"."""
    return f"GPU {gpu.index}" + (f" ({brief(gpu.name.value)})" if gpu.name.value else "")


def on_host(machine: Machine, cost: str) -> str:
    """What a remedy costs; inside a container also that it has to be run outside."""
    if not machine.surroundings.container.is_known:
        return cost
    return f"{cost}; run it on the host, not in this container"


#: What is written for the value that is wanted, and for the present one.
Change = tuple[str, str]


def raise_limit(machine: Machine, docker: Change, field: Change, unit: Change, cost: str) -> Fix:
    """Raise a limit where this machine's was set: on a pod, a container, or a systemd unit.

    ``docker``, ``field`` and ``unit`` are options with the wanted value and with the present one.
    """
    kind = (machine.surroundings.container.value or "").lower()
    if "kube" in kind:
        wanted, former = (f"in the pod's spec: resources.limits.{v}" for v in field)
        return Fix(wanted, former, cost)
    if kind:
        engine = "podman" if "podman" in kind else "docker"
        wanted, former = (f"{engine} update {v} CONTAINER" for v in docker)
        return Fix(wanted, former, on_host(machine, cost))
    wanted, former = (f"sudo systemctl set-property user-$(id -u).slice {v}" for v in unit)
    return Fix(wanted, former, f"{cost}; if another unit sets the limit, use that unit's name")


def whole(number: float) -> int:
    """Cores rounded up to a whole number of threads, at least one."""
    return max(1, math.ceil(number))
