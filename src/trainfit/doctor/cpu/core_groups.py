"""Groups of CPUs with the same kind, governor and largest clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Final

from trainfit.results.machine.machine import Cpu, FrequencyPolicy

#: Rows at most; where each core has a largest clock of its own (amd-pstate's preferred cores),
#: those that differ in nothing else share one.
MOST: Final = 4

Span = tuple[float, float]
"""The least and the most of some clocks, in Hz."""


@dataclasses.dataclass(frozen=True)
class CoreGroup:
    """CPUs of which the same is said; ``None`` is what sysfs does not say.

    ``now_hz`` are current clocks, ``limit_hz`` the most that cpufreq allows,
    ``hardware_hz`` the most that the cores can do.
    """

    cpus: tuple[int, ...]
    kind: str | None
    governor: str | None
    energy_preference: str | None
    now_hz: Span | None
    limit_hz: Span | None
    hardware_hz: Span | None


@dataclasses.dataclass(frozen=True)
class _Core:
    """What is known of one CPU."""

    cpu: int
    kind: str | None
    policy: FrequencyPolicy
    now_hz: float | None

    def settings(self) -> tuple[object, ...]:
        return self.kind, self.policy.governor, self.policy.energy_preference

    def all_alike(self) -> tuple[object, ...]:
        return *self.settings(), self.policy.limit_hz, self.policy.hardware_hz


def core_groups(cpu: Cpu) -> tuple[CoreGroup, ...]:
    """All CPUs that are online, :data:`MOST` groups of them at most; none where not even their
    numbers are known."""
    cores = _cores(cpu)
    for key in (_Core.all_alike, _Core.settings, lambda core: core.kind):
        groups = _grouped(cores, key)
        if len(groups) <= MOST:
            break
    return tuple(_group(members) for members in groups)


def _cores(cpu: Cpu) -> list[_Core]:
    kinds = {
        number: kind.kind for kind in cpu.core_kinds.value or () for number in kind.logical_cpus
    }
    policies = {number: each for each in cpu.policies.value or () for number in each.cpus}
    numbers = sorted({*kinds, *policies}) or list(range(cpu.logical_cpus.value or 0))
    listed = cpu.current_hz.value or ()
    # /proc/cpuinfo lists the CPUs that are online, in the order of their numbers.
    now = dict(zip(numbers, listed, strict=True)) if len(listed) == len(numbers) else {}
    found = []
    for number in numbers:
        policy = policies.get(number, FrequencyPolicy((number,)))
        found.append(_Core(number, kinds.get(number), policy, policy.current_hz or now.get(number)))
    return found


def _grouped(cores: Iterable[_Core], key: Callable[[_Core], object]) -> list[list[_Core]]:
    groups: dict[object, list[_Core]] = {}
    for core in cores:
        groups.setdefault(key(core), []).append(core)
    return list(groups.values())


def _group(members: list[_Core]) -> CoreGroup:
    return CoreGroup(
        tuple(core.cpu for core in members),
        members[0].kind,
        _common(core.policy.governor for core in members),
        _common(core.policy.energy_preference for core in members),
        _span(core.now_hz for core in members),
        _span(core.policy.limit_hz for core in members),
        _span(core.policy.hardware_hz for core in members),
    )


def _common(words: Iterable[str | None]) -> str | None:
    """The word of all of them, or all their words."""
    found = list(dict.fromkeys(word for word in words if word is not None))
    return "/".join(found) or None


def _span(clocks: Iterable[float | None]) -> Span | None:
    known = [clock for clock in clocks if clock is not None]
    return (min(known), max(known)) if known else None
