"""A machine with a simulated clock, CPU and GPU, on which every cause can be switched on alone.

What is modelled, and from where:

- The CPU's utilisation average decays and grows with a half-life of 32 ms (PELT), counts a busy
  core by its clock (frequency invariance), and the clock follows it: f = headroom × u × f_max
  (kernel, Documentation/scheduler/schedutil.rst, where headroom is 1.25). Intel's HWP under a
  balanced preference is not documented; a headroom of 1.53 gives the seed's case.
- A wait of the thread ends in waking up, which takes the exit latency of the idle state that the
  core is in. The menu governor expects a wait to last as long as the recent ones: after long
  sleeps between calls the short waits within a call go into deep states, too.
- The GPU's clock falls while it idles and rises while it works, both exponentially.
- A call prepares (CPU), launches kernels (CPU, while the GPU works on those launched before), and
  waits for the GPU. Launches can be slower where none was made for a while (a cold driver path),
  and so can the call's own work after a pause (cold caches).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trainfit.pace.fixes import Fixer
from trainfit.pace.host import PROBE_S, BlockReadings, Clocks, Kernels, NoDevice
from trainfit.results.pace import Fix, HostReadings

#: Kernel, kernel/sched/pelt.c.
_HALF_LIFE_S: Final = 0.032
#: Seconds between two choices of a clock.
_CHOICE_S: Final = 2e-3
#: A pause between two calls that is one.
_PAUSE_S: Final = 3e-3
#: What waking a sleeper takes apart from idle states: timer slack and the scheduler.
_WAKE_S: Final = 60e-6


@dataclasses.dataclass(frozen=True)
class SimulatedWork:
    """A call, in seconds at the CPU's and the GPU's full clocks.

    ``prepare_s`` and then ``launches`` of ``launch_s`` each are worked by the CPU; the GPU works
    ``gpu_s`` in all. The thread waits ``waits`` times for the GPU (each a wake-up), or keeps its
    core busy until the GPU is done (``spins``, CUDA's default).
    """

    prepare_s: float = 2e-3
    launches: int = 1500
    launch_s: float = 6e-6
    gpu_s: float = 5e-3
    waits: int = 4
    uses_gpu: bool = True
    spins: bool = False


@dataclasses.dataclass(frozen=True)
class MachineTraits:
    """What the machine does to paced calls.

    ``headroom`` scales the clock's choice (``None``: always full), ``least_clock`` is the lowest
    share. ``exit_s`` is the deepest idle state's exit latency (0: there is none worth a word),
    ``residency_s`` how long a wait has to be expected to last for it. ``gpu_least`` is the GPU's
    idle clock (1: it stays up), which is reached and left with ``gpu_falls_s`` and
    ``gpu_rises_s``. ``cold_launches`` and ``cold_work`` are by how much launches and work are
    slower after a pause. ``can_hold`` is the right to forbid idle states, ``can_wake`` the means
    to keep the GPU busy. ``threads`` are the cores that other threads of the process
    want, by name, ``collects`` how many calls have one garbage collection, and its seconds.
    ``noise`` is the coefficient of variation of a call's times, ``hiccups`` how often something
    else takes a few ms.
    """

    headroom: float | None = None
    least_clock: float = 0.2
    exit_s: float = 0.0
    residency_s: float = 2e-3
    gpu_least: float = 1.0
    gpu_falls_s: float = 0.02
    gpu_rises_s: float = 0.03
    cold_launches: float = 0.0
    cold_work: float = 0.0
    can_hold: bool = True
    can_wake: bool = True
    threads: Mapping[str, float] = dataclasses.field(default_factory=dict)
    collects: tuple[int, float] | None = None
    noise: float = 0.03
    hiccups: float = 0.005


class SimulatedMachine:
    """A :class:`trainfit.pace.host.PacedHost`, and the callee (:meth:`call`) that runs on it."""

    def __init__(
        self, traits: MachineTraits, work: SimulatedWork | None = None, seed: int = 0
    ) -> None:
        self.traits, self.work = traits, work or SimulatedWork()
        self._chance = random.Random(seed)
        self._now = self._cpu = self._collected = 0.0
        self._calls = 0
        self._load = 1.0
        self._call_began = 0.0
        self._gpu_clock = 1.0
        self._gpu_idle_since = 0.0
        self._expected_wait_s = 0.0
        self._last_call = self._last_launch = self._last_touch = -1.0
        self._is_held = self._is_awake = False
        self.kernels = Kernels()
        self.device = SimulatedDevice(self)

    # --- Host -----------------------------------------------------------------------------------
    def look_for_device(self) -> None:
        pass

    def now(self) -> float:
        return self._now

    def cpu_now(self) -> float:
        return self._cpu

    def sleep_until(self, at: float) -> None:
        self._wait(at - self._now, slack_s=_WAKE_S)

    def spin_until(self, at: float) -> None:
        while self._now < at:
            self._busy(min(_CHOICE_S, at - self._now))

    def probe(self) -> float:
        began = self._cpu
        self._run(PROBE_S * self._varied(0.02))
        return self._cpu - began

    def why_no_latency_hold(self) -> str:
        return "" if self.traits.can_hold else "/dev/cpu_dma_latency cannot be written by this user"

    @contextlib.contextmanager
    def no_idle_states(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    @contextlib.contextmanager
    def observed(self) -> Iterator[BlockReadings]:
        found = BlockReadings()
        try:
            yield found
        finally:
            found.readings = HostReadings(
                gpu_hz=self.device.clocks().sm_hz, threads_cores=self.traits.threads
            )

    # --- The call -------------------------------------------------------------------------------
    def call(self) -> None:
        """One call of the user's code."""
        work, traits = self.work, self.traits
        self._call_began = self._now
        is_cold = self._now - self._last_call > _PAUSE_S
        has_data = self._now - self._last_touch <= _PAUSE_S
        cold_work = 1 + traits.cold_work * is_cold * (0.5 if has_data else 1.0)
        times = self._varied(traits.noise)
        self._run(work.prepare_s * times * cold_work)
        if work.uses_gpu:
            self._launch(times)
        if self._chance.random() < traits.hiccups:
            self._busy(self._chance.uniform(2e-3, 8e-3))
        self._calls += 1
        if traits.collects is not None and self._calls % traits.collects[0] == 0:
            self._busy(traits.collects[1])
            self._collected += traits.collects[1]
        self._last_call = self._now

    def collections_s(self) -> float:
        found, self._collected = self._collected, 0.0
        return found

    def touch(self) -> None:
        """The data that a call reads is read: it is half of what makes cold work slow."""
        self._run(20e-6)
        self._last_touch = self._now

    def launch_one(self) -> None:
        """A kernel of nothing, between calls: the driver's path stays warm."""
        self._run(self.work.launch_s)
        self._last_launch = self._now

    def _launch(self, times: float) -> None:
        """Launch all kernels, wait for the GPU; it works meanwhile on what there is."""
        began = self._now
        # The call's own preparing is no pause of the driver's.
        is_cold = self._call_began - self._last_launch > _PAUSE_S
        cold = 1 + self.traits.cold_launches * is_cold
        self._gpu_rests(began)
        waits = max(1, self.work.waits)
        self._run(self.work.launches * self.work.launch_s * times * cold)
        took = self.work.gpu_s * self._varied(self.traits.noise) / self._gpu_works()
        self.kernels.count += self.work.launches
        self.kernels.busy_s += took
        left = max(0.0, began + took - self._now)
        if self.work.spins:
            self.spin_until(self._now + left)
        else:
            for _ in range(waits):
                self._wait(left / waits)
        self._gpu_idle_since = self._last_launch = self._now

    # --- CPU ------------------------------------------------------------------------------------
    @property
    def _clock(self) -> float:
        """As a share of the highest."""
        headroom = self.traits.headroom
        if headroom is None:
            return 1.0
        return min(1.0, max(self.traits.least_clock, headroom * self._load))

    def _run(self, seconds: float) -> None:
        """So many seconds of work at the full clock."""
        while seconds > 0:
            clock = self._clock
            step = min(_CHOICE_S, seconds / clock)
            self._busy(step)
            seconds -= step * clock

    def _busy(self, seconds: float) -> None:
        clock = self._clock
        self._load = clock + (self._load - clock) * 0.5 ** (seconds / _HALF_LIFE_S)
        self._now += seconds
        self._cpu += seconds

    def _wait(self, seconds: float, slack_s: float = 0.0) -> None:
        """The thread sleeps; then it wakes up, from an idle state as deep as was expected."""
        if seconds <= 0 and not self.work.waits:
            return
        seconds = max(0.0, seconds)
        deep = self._expected_wait_s > self.traits.residency_s and not self._is_held
        woken = seconds + slack_s * self._chance.expovariate(1.0)
        woken += self.traits.exit_s * deep * self._chance.uniform(0.7, 1.0)
        self._load *= 0.5 ** (woken / _HALF_LIFE_S)
        self._now += woken
        # The longest of the last waits, forgotten over some: what menu's typical interval is for.
        self._expected_wait_s = max(seconds, 0.9 * self._expected_wait_s)

    # --- GPU ------------------------------------------------------------------------------------
    def _gpu_rests(self, until: float) -> None:
        if not self._is_awake:
            idle = max(0.0, until - self._gpu_idle_since)
            least = self.traits.gpu_least
            share = math.exp(-idle / self.traits.gpu_falls_s)
            self._gpu_clock = least + (self._gpu_clock - least) * share
        else:
            self._gpu_clock = 1.0

    def _gpu_works(self) -> float:
        """The mean clock while it works, which raises it."""
        seconds, rises = self.work.gpu_s / self._gpu_clock, self.traits.gpu_rises_s
        share = math.exp(-seconds / rises)
        mean = 1 - (1 - self._gpu_clock) * rises / seconds * (1 - share)
        self._gpu_clock = 1 - (1 - self._gpu_clock) * share
        return mean

    @contextlib.contextmanager
    def gpu_awake(self) -> Iterator[None]:
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = False
            self._gpu_idle_since = self._now

    def gpu_clock(self) -> float:
        self._gpu_rests(self._now)
        self._gpu_idle_since = self._now
        return self._gpu_clock

    def _varied(self, variation: float) -> float:
        return math.exp(self._chance.gauss(0.0, variation))


class SimulatedDevice:
    """The simulated machine's GPU; its marks are moments of the one clock."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    @property
    def is_there(self) -> bool:
        return self._machine.work.uses_gpu

    def why_not_awake(self) -> str:
        if not self.is_there:
            return NoDevice().why_not_awake()
        return "" if self._machine.traits.can_wake else "it cannot be kept busy here"

    def mark(self) -> Any:
        return self._machine.now()

    def seconds(self, first: Any, last: Any) -> float:
        return float(last - first)

    def awake(self) -> contextlib.AbstractContextManager[None]:
        return self._machine.gpu_awake()

    def launch(self) -> None:
        self._machine.launch_one()

    def clocks(self) -> Clocks:
        return Clocks(2.5e9 * self._machine.gpu_clock() if self.is_there else None)

    @contextlib.contextmanager
    def profiled(self) -> Iterator[Kernels]:
        """Kernels' own times, as CUPTI has them."""
        found, machine = Kernels(), self._machine
        before = dataclasses.replace(machine.kernels)
        try:
            yield found
        finally:
            found.count = machine.kernels.count - before.count
            found.busy_s = machine.kernels.busy_s - before.busy_s


class SimulatedFixer(Fixer):
    """Fixes on the simulated machine."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def why_not(self, fix: Fix) -> str:
        return self._machine.why_no_latency_hold() if fix == "qos" else ""

    @contextlib.contextmanager
    def applied(self, fix: Fix) -> Iterator[None]:
        former = self._machine.traits
        self.apply(fix)
        try:
            yield
        finally:
            self._machine.traits = former

    def apply(self, fix: Fix) -> None:
        if fix == "governor":
            self._machine.traits = dataclasses.replace(self._machine.traits, headroom=None)


class SimulatedCallee:
    """The simulated machine's own call."""

    is_here = True
    has_rehearsal = False

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def __call__(self) -> None:
        self._machine.call()

    def rehearse(self) -> None:
        self._machine.call()

    def why_no_touch(self) -> str:
        return ""

    def touch(self) -> None:
        self._machine.touch()

    def cpu_s(self) -> float | None:
        return None

    def close(self) -> None:
        pass
