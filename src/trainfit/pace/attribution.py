"""Attribution of paced calls' slowness: each cause by the share of the excess that an arm removes.

The excess is how much longer a paced call (sleeping in between) is than one back to back. Keeping
the core busy in between removes what idling costs the CPU; disabling deep idle states removes
the part of that which is waking up, and leaves the clock's; keeping the GPU busy removes
what the GPU's falling clock costs; launching small kernels as well, what a cold driver does.
What a rehearsal call right before removes in addition to all of these is due to cold caches and
branch predictors. What no arm removes is undetermined.

Where another thread of the process works, what the caller does between calls also keeps that thread
off the core, its caches and the interpreter's lock: such an arm then proves neither cold caches nor
the CPU's clock. That calls wait longer, and nobody else has the cores, does prove the thread.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from trainfit.pace.host import UNNAMED, Kernels
from trainfit.pace.statistics import (
    Sample,
    Values,
    estimate,
    is_slower,
    median,
    ratio,
    speed,
    taken_away,
)
from trainfit.results.pace import (
    Arm,
    ArmEffect,
    Attribution,
    Cause,
    CauseShare,
    Estimate,
    HostReadings,
)
from trainfit.results.text import core_count, duration, ghz, percent

#: An arm is said to help from this part of the excess on, and if the interval's low end is above
#: the second; what is left unexplained counts from the same on.
HELPS: Final = 0.2
_SURELY: Final = 0.1
#: Of the excess, the CPU's or the GPU's time has this part in it at least, to be where it is; less
#: than the second, it is not there.
_IN_IT, _NOT_IN_IT = 0.5, 0.25
#: The fixed loop below this share of its speed back to back shows a lower clock.
_SLOWED: Final = 0.93
#: Arms that take something away, by what they try.
TRIED: Final[tuple[Arm, ...]] = (
    "spin",
    "gpu_awake",
    "awake",
    "launching",
    "no_idle_states",
    "touch",
    "rehearse_awake",
)
#: Of these, those that keep everything awake that can be, the most thorough first.
MOST_AWAKE: Final[tuple[Arm, ...]] = ("launching", "awake", "spin")
#: Those that keep one thing awake each.
_APART: Final[tuple[Arm, ...]] = ("spin", "gpu_awake")
#: Cores that a thread wants while no call runs (for one of Python: of that time), to compete with
#: calls; and those that other processes have, for a call's waits to be due to them as well.
_COMPETES: Final = 0.1
_OTHERS: Final = 0.3


@dataclasses.dataclass(frozen=True)
class PacedSamples:
    """What the arms measured at one rate.

    ``samples`` has "back_to_back" and "sleep" at least; ``why_not`` says of other arms why they
    could not be run; ``has_gpu``: do calls use one; ``kernels`` are those of one call, ``readings``
    the machine's readings around the blocks, by arm, as far as known.
    """

    hz: float
    samples: Mapping[Arm, Sample]
    why_not: Mapping[Arm, str]
    has_gpu: bool = False
    kernels: Mapping[Arm, Kernels] = dataclasses.field(default_factory=dict)
    readings: Mapping[Arm, Sequence[HostReadings]] = dataclasses.field(default_factory=dict)
    fast_s: float | None = None

    def wall(self, arm: Arm) -> float:
        return median(self.samples[arm].wall) or math.nan

    @functools.cached_property
    def recovered(self) -> Mapping[Arm, Estimate | None]:
        """The share of the excess that each arm removes."""
        return {arm: self.part((arm,)) for arm in TRIED if arm in self.samples}

    def part(self, more: tuple[Arm, ...], less: tuple[Arm, ...] = ()) -> Estimate | None:
        """The sum of what the arms ``more`` remove, less that of ``less``."""
        paced, back, *others = (
            self.samples[name].wall for name in ("sleep", "back_to_back", *more, *less)
        )
        return taken_away(paced, back, others[: len(more)], others[len(more) :])

    def left(self, arms: tuple[Arm, ...]) -> Estimate | None:
        """The share of the excess that none of these arms removes."""
        if not arms:
            return Estimate(1.0, 1.0, 1.0)
        taken = self.part(arms)
        if taken is None:
            return None
        return Estimate(1 - taken.value, 1 - taken.high, 1 - taken.low)

    def cpu_growth(self, arm: Arm = "sleep") -> float:
        """The share of the excess by which a call's CPU time is longer in this arm than back to
        back."""
        paced = median(self.samples[arm].cpu)
        back = median(self.samples["back_to_back"].cpu)
        return self._growth(paced, back) or 0.0

    @property
    def gpu_growth(self) -> float | None:
        """The share of the excess by which a call's kernels' own time is longer; ``None`` where
        unknown."""
        paced, back = self.kernels.get("sleep"), self.kernels.get("back_to_back")
        if paced is None or back is None or not back.count:
            return None
        return self._growth(paced.busy_s, back.busy_s)

    def _growth(self, paced: float | None, back: float | None) -> float | None:
        excess = self.wall("sleep") - self.wall("back_to_back")
        if paced is None or back is None or excess <= 0:
            return None
        return (paced - back) / excess

    def speed(self, arm: Arm) -> float | None:
        return speed(self.samples[arm].before, self.fast_s)

    def clock(self, arm: Arm, of: Literal["cpu_hz", "gpu_hz"]) -> float | None:
        """The median clock around this arm's blocks."""
        told = [getattr(each, of) for each in self.readings.get(arm, ())]
        hertz = [each for each in told if each is not None]
        return statistics.median(hertz) if hertz else None

    def idle_share(self, arm: Arm) -> tuple[str, float] | None:
        """The deepest idle state that CPUs were in, and for which share of the time."""
        rows = [each.idle_shares for each in self.readings.get(arm, ()) if each.idle_shares]
        if not rows:
            return None
        name = list(rows[0])[-1]
        return name, statistics.fmean(row.get(name, 0.0) for row in rows)

    @functools.cached_property
    def competing(self) -> Mapping[str, float]:
        """The other threads of the process that work while no call runs, and the cores that each
        wants. A pool's threads work for the call, and as long as it at most."""
        rows = [each.threads_cores for each in self.readings.get("sleep", ())]
        if not rows:
            return {}
        in_calls = self.hz * float(np.mean(np.concatenate(self.samples["sleep"].wall)))
        cores = {
            name: statistics.fmean(row.get(name, 0.0) for row in rows)
            for name in {name for row in rows for name in row}
        }
        # A pool of PyTorch spins for about a millisecond after a call; Python's threads do not.
        between = max(0.0, 1 - in_calls)
        found = {
            name: core
            for name, core in cores.items()
            if between and core - in_calls >= _COMPETES * (1 if name == UNNAMED else between)
        }
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    @property
    def others_cores(self) -> float:
        """Cores that other processes had while calls were paced."""
        told = [each.others_cores or 0.0 for each in self.readings.get("sleep", ())]
        return statistics.fmean(told) if told else 0.0

    @property
    def waits(self) -> Estimate | None:
        """The share of the excess by which a call waits longer."""

        def off_core(arm: Arm) -> list[Values]:
            sample = self.samples[arm]
            return [a - b for a, b in zip(sample.wall, sample.cpu, strict=True)]

        def share(m: Sequence[float]) -> float:
            return (m[0] - m[1]) / (m[2] - m[3]) if m[2] > m[3] else math.nan

        paced, back = self.samples["sleep"].wall, self.samples["back_to_back"].wall
        return estimate(share, (off_core("sleep"), off_core("back_to_back"), paced, back))

    def is_slowed(self, arm: Arm = "sleep") -> bool | None:
        """Does the fixed loop run slower before calls of this arm than back to back?"""
        paced, back = self.speed(arm), self.speed("back_to_back")
        return None if paced is None or back is None else paced < _SLOWED * back


def attribute(samples: PacedSamples) -> Attribution:
    """The verdict, with all that decided it."""
    groups = (samples.samples["sleep"].wall, samples.samples["back_to_back"].wall)
    excess = estimate(lambda m: m[0] - m[1], groups)
    assert excess is not None  # of two times
    against = ratio(*groups)
    if against is None or not is_slower(against, samples.wall("back_to_back")):
        return Attribution(samples.hz, excess, _effects(samples), (), _GONE)
    findings, open_questions = _of_the_cpu(samples)
    findings += _of_the_gpu(samples)
    findings += _of_launching(samples)
    found, cannot_tell = _of_the_rest(samples)
    if samples.competing:
        findings, open_questions = _next_to_threads(samples, findings + found, open_questions)
    else:
        findings += found
    findings.sort(key=lambda finding: -finding.share.value)
    low, high = _middle_half(samples, "sleep")
    if not findings and not samples.competing and high - low > excess.value:
        cannot_tell += "; " * bool(cannot_tell) + _spread_words(samples)
    would = [
        f"{_NAMES[arm]}: {why}" for arm, why in samples.why_not.items() if _matters(arm, samples)
    ]
    if samples.competing:
        names = ", ".join(samples.competing)
        would.insert(0, f"the same measurement without these threads of this process: {names}")
    return Attribution(
        samples.hz,
        excess,
        _effects(samples),
        tuple(findings),
        "; ".join(part for part in (open_questions, cannot_tell) if part),
        tuple(would) if open_questions or cannot_tell else (),
        tuple(samples.competing),
        high - low,
    )


_GONE: Final = (
    "paced calls were no slower during attribution; the earlier slowdown was not caused by "
    "the pauses, or is over: re-run the measurement"
)


def _middle_half(samples: PacedSamples, arm: Arm) -> tuple[float, float]:
    low, high = np.percentile(np.concatenate(samples.samples[arm].wall), (25, 75))
    return float(low), float(high)


def _spread_words(samples: PacedSamples) -> str:
    paced, back = (
        " to ".join(map(duration, _middle_half(samples, arm))) for arm in ("sleep", "back_to_back")
    )
    return (
        f"calls vary by more than the excess: half of them within {paced}, back to back within "
        f"{back} (their own work: files, logs, memory, locks; or other programs)"
    )


def _helps(estimate: Estimate | None) -> bool:
    return estimate is not None and estimate.value >= HELPS and estimate.low > _SURELY


def _matters(arm: Arm, samples: PacedSamples) -> bool:
    return arm in _NAMES and (arm != "gpu_awake" or samples.has_gpu)


# --- The CPU -----------------------------------------------------------------------------------


def _of_the_cpu(samples: PacedSamples) -> tuple[list[CauseShare], str]:
    """Clock or idle states, if a core that is kept busy makes calls fast again."""
    spin = samples.recovered.get("spin")
    if spin is None or not _helps(spin):
        return [], ""
    said = [_took(spin, "keeping the core busy between calls")]
    awake = samples.recovered.get("no_idle_states")
    if awake is not None:
        return _divided(samples, spin, awake, said), ""
    cpu = samples.cpu_growth()
    said += _cpu_words(samples)
    if cpu >= _IN_IT * spin.value and samples.is_slowed():
        return [CauseShare("cpu_frequency", spin, tuple(said))], ""
    if cpu < _NOT_IN_IT * spin.value and not samples.is_slowed():
        return [CauseShare("c_states", spin, (*said, _WAITS_LONGER, *_idle_words(samples)))], ""
    return [], (
        f"{percent(spin.value)} of the excess is caused by the idle CPU, but whether by its clock "
        "or its idle states could not be determined"
    )


_WAITS_LONGER = "the call's CPU time does not grow, its waits do: each wait ends with a wake-up"


def _divided(
    samples: PacedSamples, spin: Estimate, awake: Estimate, said: list[str]
) -> list[CauseShare]:
    """Idle states' part is what goes when they are forbidden; the clock's what does not."""
    shares = []
    # Calls that became slower still (a governor that found another balance) are nobody's part.
    clock = samples.part(("spin",), ("no_idle_states",)) if awake.value > 0 else spin
    if _helps(awake):
        words = _took(awake, "disabling deep idle states (/dev/cpu_dma_latency)")
        shares.append(CauseShare("c_states", awake, (*said, words, *_idle_words(samples))))
    if _helps(clock) or not shares:
        cpu = _cpu_words(samples)
        words = _took(awake, "disabling deep idle states") + ": not the wake-up"
        shares.append(CauseShare("cpu_frequency", clock or spin, (*said, words, *cpu)))
    return shares


def _cpu_words(samples: PacedSamples) -> list[str]:
    words = [
        f"{percent(max(0.0, samples.cpu_growth()))} of the excess is CPU time of the call itself"
    ]
    paced, back = samples.speed("sleep"), samples.speed("back_to_back")
    if paced is not None and back is not None:
        words.append(
            f"a small fixed loop right before each call runs at {percent(paced)} of "
            f"its full speed paced, at {percent(back)} back to back"
        )
    low, high = samples.clock("sleep", "cpu_hz"), samples.clock("back_to_back", "cpu_hz")
    if low is not None and high is not None:
        words.append(f"cpufreq reports {ghz(low)} paced, {ghz(high)} back to back")
    return words


def _idle_words(samples: PacedSamples) -> list[str]:
    paced, back = samples.idle_share("sleep"), samples.idle_share("back_to_back")
    if paced is None or back is None:
        return []
    return [
        f"CPUs were in {paced[0]} for {percent(paced[1])} of the time paced, "
        f"{percent(back[1])} back to back"
    ]


# --- The GPU -----------------------------------------------------------------------------------


def _of_the_gpu(samples: PacedSamples) -> list[CauseShare]:
    if not samples.has_gpu:
        return []
    growth, awake = samples.gpu_growth, _of_gpu_awake(samples)
    if growth is None:  # keeping the GPU busy may have kept a core awake, too
        if awake is None or not _helps(awake) or _helps(samples.recovered.get("spin")):
            return []
        words = _took(awake, "keeping the GPU busy"), "keeping the core busy does not"
        return [CauseShare("gpu_clocks", awake, (*words, "kernel times could not be measured"))]
    said = [f"{percent(max(0.0, growth))} of the excess is kernel time on the GPU"]
    paced, back = samples.clock("sleep", "gpu_hz"), samples.clock("back_to_back", "gpu_hz")
    fell = paced is not None and back is not None and paced < _SLOWED * back
    if paced is not None and back is not None:
        said.append(f"SM clock {paced / 1e6:.0f} MHz paced, {back / 1e6:.0f} MHz back to back")
    if awake is not None:
        if _helps(awake) and growth >= _NOT_IN_IT * awake.value:
            return [CauseShare("gpu_clocks", awake, (_took(awake, "keeping the GPU busy"), *said))]
        return []
    if growth >= _IN_IT and fell:
        share = Estimate(growth, 0.0, 1.0)
        return [CauseShare("gpu_clocks", share, tuple(said))]
    return []


def _of_gpu_awake(samples: PacedSamples) -> Estimate | None:
    """What keeping the GPU busy removes: with an idle core, or with a busy one. A
    governor that follows the load answers shorter calls with a lower clock, so that the GPU's part
    may only show where the core is busy."""
    alone = samples.recovered.get("gpu_awake")
    if "awake" not in samples.samples or "spin" not in samples.samples:
        return alone
    with_spin = samples.part(("awake",), ("spin",))
    found = [each for each in (alone, with_spin) if each is not None]
    return max(found, key=lambda each: each.value, default=None)


# --- Launches, and what no arm took away --------------------------------------------------------


def _of_launching(samples: PacedSamples) -> list[CauseShare]:
    """A cold driver: what launching small kernels removes where core and GPU are awake."""
    if "launching" not in samples.samples or "awake" not in samples.samples:
        return []
    warm = samples.part(("launching",), ("awake",))
    if warm is None or not _helps(warm):
        return []
    words = _took(warm, "launching small kernels between calls, with core and GPU kept busy,")
    return [CauseShare("launch_overhead", warm, (words, *_launch_words(samples)))]


def _launch_words(samples: PacedSamples) -> list[str]:
    kernels = samples.kernels.get("back_to_back")
    if kernels is None or not kernels.count:
        return []
    busy = kernels.busy_s / samples.wall("back_to_back")
    return [
        f"a call launches {kernels.count} kernels, and the GPU is busy for {percent(busy)} of "
        "its time"
    ]


def _of_the_rest(samples: PacedSamples) -> tuple[list[CauseShare], str]:
    """What stays with everything awake: caches, if a rehearsal call removes it."""
    arm = next((arm for arm in MOST_AWAKE if arm in samples.samples), None)
    apart = tuple(each for each in _APART if _helps(samples.recovered.get(each)))
    rest = samples.left(apart if arm is None or arm == "spin" else (arm,))
    if rest is None or not _helps(rest):
        return [], ""
    awake = "CPU and GPU are" if samples.has_gpu else "the CPU is"
    left = f"{percent(rest.value)} of the excess remains when {awake} kept awake"
    if arm is None:
        return (
            [],
            f"{percent(rest.value)} of the excess: the measurement with a busy core is missing",
        )
    if samples.has_gpu and "gpu_awake" not in samples.samples:
        return [], f"{left} (the GPU could not be kept awake)"
    if "rehearse_awake" in samples.samples:
        return _of_rehearsals(samples, arm, rest, left)
    growth = samples.cpu_growth(arm)
    if growth < _IN_IT * rest.value or samples.is_slowed(arm):
        return [], left
    said = (
        left,
        f"{percent(growth)} of the excess is then the call's own CPU time at full clock: "
        "the same instructions need longer, because of cold caches or other work on the core",
        *_launch_words(samples),
    )
    return [CauseShare("cache_or_contention", rest, said)], ""


def _of_rehearsals(
    samples: PacedSamples, arm: Arm, rest: Estimate, left: str
) -> tuple[list[CauseShare], str]:
    """Cold caches are what goes when the same call was made right before, on a core that was awake
    either way."""
    warm = samples.part(("rehearse_awake",), (arm,))
    if warm is None or not _helps(warm):
        return [], f"{left}, also with a rehearsal call right before: it is not cold caches"
    said = [left, _took(warm, "a rehearsal call right before, in addition,")]
    touched = samples.part(("touch",), (arm,)) if "touch" in samples.samples else None
    if touched is not None:
        data = _took(touched, "reading the parameters right before, without running anything,")
        said.append(f"{data}: that much is their way from memory, the rest code and predictors")
    unknown = rest.value - warm.value
    more = f"{percent(unknown)} of the excess remains also with a rehearsal call right before"
    share = CauseShare("cold_caches", warm, (*said, *_launch_words(samples)))
    return [share], more if unknown >= HELPS else ""


# --- Other threads of the process ---------------------------------------------------------------


def _next_to_threads(
    samples: PacedSamples, findings: list[CauseShare], open_questions: str
) -> tuple[list[CauseShare], str]:
    """The causes that are proven although other threads of the process work, and a sentence on
    what is not; ``open_questions`` is the one on the idle CPU."""
    kept = [finding for finding in findings if _is_proven(finding.cause, samples)]
    lost = sum(finding.share.value for finding in findings) - sum(each.share.value for each in kept)
    spin = samples.recovered.get("spin")
    if open_questions and spin is not None:
        lost += spin.value
    waits = samples.waits
    works = ", ".join(f"{name}: {core_count(each)}" for name, each in samples.competing.items())
    is_free = not samples.has_gpu and samples.others_cores < _OTHERS
    if is_free and waits is not None and _helps(waits) and not kept:
        said = (
            f"{percent(waits.value)} of the excess is time in which the call waits for the "
            "interpreter's lock or a core, and does not work",
            f"other threads of this process want, also between calls: {works}",
        )
        kept, lost = [CauseShare("competing_thread", waits, said)], lost - waits.value
    if lost < HELPS:
        return kept, ""
    return kept, (
        f"{percent(min(1.0, lost))} of the excess is due to the pause (cold caches, the clock) "
        f"or to other threads of this process ({works}, also between calls): what was tried shuts "
        "out both"
    )


def _is_proven(cause: Cause, samples: PacedSamples) -> bool:
    """Is it shown by something that a thread of the process does not lose by?"""
    if cause == "cpu_frequency":
        paced, back = samples.clock("sleep", "cpu_hz"), samples.clock("back_to_back", "cpu_hz")
        return paced is not None and back is not None and paced < _SLOWED * back
    if cause == "c_states":
        return "no_idle_states" in samples.samples
    return cause not in ("cold_caches", "cache_or_contention")


def _took(estimate: Estimate, what: str) -> str:
    low, high = max(-1.0, estimate.low), min(2.0, estimate.high)
    if high <= 0:
        return f"{what} removes none of the excess"
    removed = f"{percent(estimate.value)} of the excess ({percent(low)} to {percent(high)})"
    return f"{what} removes {removed}"


def _effects(samples: PacedSamples) -> tuple[ArmEffect, ...]:
    effects = [
        ArmEffect(
            arm,
            wall_s=median(sample.wall),
            cpu_s=median(sample.cpu),
            device_s=median(sample.device),
            speed=samples.speed(arm),
            recovered=samples.recovered.get(arm),
        )
        for arm, sample in samples.samples.items()
    ]
    return (*effects, *(ArmEffect(arm, why_not=why) for arm, why in samples.why_not.items()))


#: What each arm is, as it is said.
_NAMES: Final[Mapping[Arm, str]] = {
    "spin": "keeping the core busy between calls",
    "gpu_awake": "keeping the GPU busy between calls",
    "no_idle_states": "disabling deep idle states meanwhile",
    "rehearse_awake": "a rehearsal call right before each call",
}


def causes(attribution: Attribution | None) -> tuple[Cause, ...]:
    """The causes found, the largest first."""
    return (
        tuple(finding.cause for finding in attribution.findings) if attribution is not None else ()
    )
