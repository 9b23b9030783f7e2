"""The fixes of ``--fix``, each with its undo and its cost: which to advise, and its trial."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.pace.callee import CalleeError
from trainfit.pace.loop import Plan
from trainfit.pace.settings import SystemSettings, held_awake
from trainfit.pace.statistics import RateCounts, Sample, median, ratio, summary, taken_away
from trainfit.pace.ticks import HYBRID_S, RehearsalCall
from trainfit.results.findings import Fix
from trainfit.results.pace import (
    Arm,
    Attribution,
    CallBlock,
    Cause,
    Estimate,
    FixName,
    FixTrial,
    RateSummary,
)
from trainfit.results.text import duration, percent

_POLICIES: Final = "sys/devices/system/cpu/cpufreq"
_GOVERNOR, _PREFERENCE = "scaling_governor", "energy_performance_preference"


#: What `--fix` does, by its word.
FIX_TEXTS: Final[Mapping[FixName, Fix]] = {
    "spin": Fix(
        "",
        undo="wait with time.sleep",
        cost="that share of a core's time and power",
        title="sleep, then busy-wait for the last part of each pause (trainfit.pace.Pacer)",
    ),
    "rehearse": Fix(
        "",
        undo="leave rehearse out",
        cost="a second call for each tick: its CPU and GPU time, and their energy",
        title="a rehearsal call right before each tick (trainfit.pace.Pacer)",
    ),
    "qos": Fix(
        "",
        undo="none needed: it ends when the process closes the file or exits",
        cost="more power and heat of all cores meanwhile",
        title="deep idle states are disabled while a process holds /dev/cpu_dma_latency open",
    ),
    "governor": Fix(
        "",
        undo="trainfit pace --undo",
        cost="more power and heat, also while idle, until the next reboot",
        title="governor performance on all CPUs",
    ),
}


class Fixer:
    """Applies fixes on this machine, its files below ``root``."""

    def __init__(self, root: Path = Path("/"), settings: SystemSettings | None = None) -> None:
        self._root = root
        self._settings = settings or SystemSettings(root)

    def why_not(self, fix: FixName) -> str:
        """Why a fix cannot be tried here, with the remedy; "" if it can."""
        if fix == "qos":
            return held_awake(self._root).why_not()
        return self._why_no_governor() if fix == "governor" else ""

    def _why_no_governor(self) -> str:
        governors = self._governors()
        if not governors:
            return (
                "there is no cpufreq policy in /sys/devices/system/cpu/cpufreq: in a virtual "
                "machine or without a cpufreq driver this system cannot set the clock"
            )
        if not os.access(self._root / governors[0].lstrip("/"), os.W_OK):
            return f"{governors[0]} cannot be written by this user: run trainfit with sudo"
        return ""

    @contextlib.contextmanager
    def applied(self, fix: FixName) -> Iterator[None]:
        """Applies the fix within, as far as the system is concerned; raises
        :class:`trainfit.pace.settings.SettingsError` where that is not allowed."""
        if fix != "governor":
            yield
            return
        self.apply(fix)
        try:
            yield
        finally:
            self._settings.undo()

    def apply(self, fix: FixName) -> None:
        """Put it into effect for good, as far as it is the system's."""
        if fix == "governor":
            self._settings.change(self._wanted())

    def _wanted(self) -> dict[str, str]:
        """All files that performance changes: under it, drivers set the preference themselves.
        Governors come first: going back, a preference is only taken once its governor is."""
        governors, preferences = self._governors(), {}
        for path in governors:
            preference = path.replace(_GOVERNOR, _PREFERENCE)
            file = self._root / preference.lstrip("/")
            if file.is_file():
                preferences[preference] = file.read_text().strip()
        return {**dict.fromkeys(governors, "performance"), **preferences}

    def _governors(self) -> list[str]:
        folder = self._root / _POLICIES
        files = sorted(folder.glob(f"policy*/{_GOVERNOR}"), key=lambda path: (len(str(path)), path))
        return ["/" + str(path.relative_to(self._root)) for path in files]


# ---
# Fixes for the causes that were found, the least intrusive first.


_POWER: Final = "more power and heat, also while idle"


def advice(
    attribution: Attribution | None, machine: Mapping[str, str], rates: Sequence[RateSummary] = ()
) -> tuple[Fix, ...]:
    """The fixes of all causes, each once, by tier; ``rates``: of garbage collections in calls."""
    made: dict[str, Fix] = {}
    if any(rate.is_collecting for rate in rates):
        made[_COLLECTOR.title] = _COLLECTOR
    if attribution is None:
        return tuple(made.values())
    uses_gpu = any(arm.device_s is not None for arm in attribution.arms)
    for finding in attribution.findings:
        for fix in _of(finding.cause, machine, uses_gpu, attribution.hz):
            made.setdefault(fix.title, fix)
    if attribution.threads:
        made.setdefault(_PROCESS.title, _PROCESS)
    return tuple(sorted(made.values(), key=lambda each: each.tier or 0))


def _of(cause: Cause, machine: Mapping[str, str], uses_gpu: bool, hz: float) -> Sequence[Fix]:
    # Launched at once, kernels leave little work that a slow clock or cold caches could prolong.
    graphs = [_GRAPHS] if uses_gpu else []
    if cause == "cpu_frequency":
        return [_spin(hz), *graphs, *_cores(machine), _SET_GOVERNOR, *_preference(machine), _TUNED]
    if cause == "c_states":
        return [_FEWER_WAITS, _spin(hz), _fix("qos", 2, _HOLD), _TUNED]
    if cause == "gpu_clocks":
        return [_GPU_AWAKE, _GPU_CLOCKS]
    if cause == "launch_overhead":
        return [_GRAPHS]
    if cause == "cold_caches":
        return [_rehearse(hz), *graphs, *_cores(machine), _ALONE]
    if cause == "competing_thread":
        return [_PROCESS]
    return [*graphs, *_cores(machine), _ALONE]


def _fix(fix: FixName, tier: int, how: str) -> Fix:
    remedy = FIX_TEXTS[fix]
    return Fix(
        how,
        remedy.undo,
        remedy.cost,
        title=remedy.title,
        tier=tier,
        name=fix,
    )


def _spin(hz: float) -> Fix:
    return _fix("spin", 1, f"pacer = trainfit.pace.Pacer({hz:g}); pacer.wait() before each call")


def _rehearse(hz: float) -> Fix:
    how = (
        f"pacer = trainfit.pace.Pacer({hz:g}, rehearse=FN); pacer.wait() before each call. FN does "
        "the call's work on inputs of the same shapes and changes nothing: no state of the policy, "
        "no command to the robot"
    )
    return _fix("rehearse", 1, how)


_HOLD: Final = (
    "f = open('/dev/cpu_dma_latency', 'wb', 0); f.write(bytes(4)); keep f open (needs "
    "write permission)"
)
_SET_GOVERNOR: Final = _fix("governor", 3, "sudo cpupower frequency-set -g performance")
_GRAPHS: Final = Fix(
    'torch.compile(model, mode="reduce-overhead"), or torch.cuda.graph: needs fixed shapes',
    "call the model directly",
    "memory for the graphs' private pool, seconds of compilation",
    title="launch all kernels of a call at once",
    tier=1,
)
_FEWER_WAITS: Final = Fix(
    "one .cpu() at the end instead of .item(), .cpu() or print in between",
    "none is needed",
    "none",
    title="synchronize with the GPU once per call",
    tier=1,
)
_GPU_AWAKE: Final = Fix(
    "a thread that launches a tiny kernel on its own stream every millisecond",
    "leave it out",
    "the GPU draws more power while idle",
    title="keep the GPU busy between calls",
    tier=1,
)
_GPU_CLOCKS: Final = Fix(
    "sudo nvidia-smi -pm 1; sudo nvidia-smi -lgc 1500,MAX with the highest clock of "
    "`nvidia-smi -q -d SUPPORTED_CLOCKS`",
    "sudo nvidia-smi -rgc",
    "the GPU draws more power while idle",
    title="lock the GPU's clock",
    tier=3,
)
_TUNED: Final = Fix(
    "sudo tuned-adm profile latency-performance",
    "sudo tuned-adm profile balanced (or the profile that `tuned-adm active` printed before)",
    _POWER,
    title="a low-latency profile, which sets the governor, idle states and more",
    tier=3,
)
_ALONE: Final = Fix(
    "taskset -c for the loop, and cgroups or taskset for other processes; fewer "
    "threads (OMP_NUM_THREADS) in what runs alongside",
    "leave it out",
    "one core that other processes cannot use",
    title="keep other processes off the core",
    tier=1,
)


_COLLECTOR: Final = Fix(
    "gc.collect(), gc.freeze() and gc.disable() before the loop, and no gc.collect() in a call; "
    "gc.collect() between ticks, right after a call, where the pause is long enough for it",
    "gc.enable(), gc.unfreeze()",
    "objects that refer to each other in a circle stay in memory until the next gc.collect()",
    title="garbage collections between ticks, none within a call",
    tier=1,
)
_PROCESS: Final = Fix(
    "multiprocessing.Process for what the thread does, or a wait (Event.wait) in each round of it; "
    "one that runs Python code holds the interpreter's lock for 5 ms at a time "
    "(sys.setswitchinterval)",
    "leave it in a thread",
    "memory of a second process, and a queue or shared memory to it",
    title="a process of its own for what the other thread does",
    tier=1,
)


def _cores(machine: Mapping[str, str]) -> Sequence[Fix]:
    fast = machine.get("performance cores")
    if not fast:
        return []
    return [
        Fix(
            f"taskset -c {fast} in front of the command",
            "leave it out",
            "none as long as other processes have enough cores",
            title="run on the performance cores",
            tier=1,
        )
    ]


def _preference(machine: Mapping[str, str]) -> Sequence[Fix]:
    """The fix by EPP, where there is one: a preference alone does, and costs less."""
    if "EPP" not in machine.get("cpufreq", ""):
        return []
    files = "/sys/devices/system/cpu/cpufreq/policy*/energy_performance_preference"
    return [
        Fix(
            f"echo performance | sudo tee {files}",
            f"echo the previous value ({machine['cpufreq'].rpartition('EPP ')[2]}) the same way",
            _POWER,
            title="the energy performance preference (EPP) alone",
            tier=3,
        )
    ]


# ---
# Trial of a fix: the same measurement without and with it, interleaved.


ROUNDS: Final = 4
#: Least share of the excess that a fix must remove to count as one.
_LEAST_RECOVERED: Final = 0.7
_SURELY: Final = 0.4
#: Of the ticks, the share without their rehearsal call from which that is said.
_SKIPPED: Final = 0.05
#: Seconds of busy-wait that are tried, the shortest first; the whole pause is tried last.
_MARGINS: Final = (HYBRID_S, 5e-3, 10e-3, 20e-3)


@dataclasses.dataclass(frozen=True)
class Proof:
    """A fix (``None``: there is nothing to compare), and notes about it."""

    fix_trial: FixTrial | None
    notes: tuple[str, ...] = ()


Make = Callable[[Plan], CallBlock]


def prove(
    fix: FixName,
    hz: float,
    seconds: float,
    fixer: Fixer,
    make: Make,
    counted: RateCounts,
    why_not: str,
) -> Proof:
    """Blocks without and with the fix, interleaved; what it changes permanently, it changes only if
    it helped. ``why_not``: the calls themselves do not allow it.

    Raises :class:`CalleeError` where it cannot be carried out.
    """
    why = why_not or fixer.why_not(fix)
    if why:
        raise CalleeError(f"--fix {fix}: {why}")
    spin_s = _margin(hz, seconds, make, counted) if fix == "spin" else HYBRID_S
    arm = _arm(fix, hz, spin_s)
    before, after = [], []
    for _ in range(ROUNDS):
        before.append(make(Plan("sleep", hz, seconds, "fix")))
        with fixer.applied(fix):
            after.append(make(Plan(arm, hz, seconds, "fix", spin_s=spin_s, fix=fix)))
    proof = _judged(fix, before, after, counted, spin_s)
    if proof.fix_trial is not None and proof.fix_trial.is_fixed:
        fixer.apply(fix)
    return proof


def with_skipped(proof: Proof, rehearsals: Sequence[RehearsalCall]) -> Proof:
    """The same proof with a note of the ticks before which a rehearsal call was left out, if these
    are many."""
    skipped = sum(rehearsal.skipped for rehearsal in rehearsals)
    ticks = skipped + sum(rehearsal.made for rehearsal in rehearsals)
    if not ticks or skipped / ticks < _SKIPPED:
        return proof
    note = (
        f"{percent(skipped / ticks)} of the ticks had no rehearsal call, as the thread woke too "
        "late or the pause is too short for one: run the loop with priority (sudo chrt -f 10 "
        "COMMAND), with fewer other processes, or at a lower rate"
    )
    return dataclasses.replace(proof, notes=(*proof.notes, note))


def _arm(fix: FixName, hz: float, spin_s: float) -> Arm:
    if fix == "spin":
        return "spin" if spin_s >= 1 / hz else "hybrid"
    if fix == "rehearse":
        return "rehearse"
    return "no_idle_states" if fix == "qos" else "sleep"


def _margin(hz: float, seconds: float, make: Make, counted: RateCounts) -> float:
    """The shortest busy-wait that makes paced calls about as fast as back-to-back calls."""
    before = Sample.of([make(Plan("sleep", hz, seconds, "fix"))], counted.rhythm)
    for spin_s in (margin for margin in _MARGINS if margin < 1 / hz):
        plan = Plan("hybrid", hz, seconds, "fix", spin_s=spin_s, fix="spin")
        tried = Sample.of([make(plan)], counted.rhythm)
        gone = _recovered(before, tried, counted)
        if gone is not None and gone.value >= _LEAST_RECOVERED:
            return spin_s
    return 1 / hz


def _recovered(before: Sample, after: Sample, counted: RateCounts) -> Estimate | None:
    """The share of the excess over calls back to back that is gone; ``None``: there was none."""
    if counted.reference is None or not before.count or not after.count:
        return None
    return taken_away(before.wall, counted.reference.wall, (after.wall,))


def _judged(
    fix: FixName,
    before: list[CallBlock],
    after: list[CallBlock],
    counted: RateCounts,
    spin_s: float,
) -> Proof:
    first, last = summary(before, counted), summary(after, counted)
    samples = [Sample.of(blocks, counted.rhythm) for blocks in (before, after)]
    if first is None or last is None or counted.reference is None:
        return Proof(None, ("too few calls to measure the fix; give a longer --duration",))
    remedy, notes = FIX_TEXTS[fix], []
    recovered = _recovered(samples[0], samples[1], counted)
    if not first.is_slower:
        notes.append(f"calls at {first.hz:g} Hz are not slower than back to back: nothing to fix")
    is_fixed = (
        first.is_slower
        and recovered is not None
        and recovered.value >= _LEAST_RECOVERED
        and recovered.low >= _SURELY
    )
    what, cost = remedy.title, remedy.cost
    if fix == "spin" and first.hz is not None:
        idle = max(0.0, 1 / first.hz - (median(samples[1].wall) or 0.0))
        spent = min(spin_s, idle)
        what += f": {duration(spent)} of the {duration(idle)} between two calls"
        cost = f"{percent(spent * first.hz)} of a core's time and power"
    if fix == "rehearse" and first.hz is not None:
        # It finds the machine as a call without a rehearsal does.
        of_core = percent((spin_s + first.cpu_s) * first.hz)
        cost = f"a second call for each tick, and a busy-wait before it: {of_core} of a core's time"
        if first.device_s is not None:
            cost += f", {percent(first.device_s * first.hz)} of the GPU's"
        cost += ", and its energy"
    change = ratio(samples[1].wall, samples[0].wall)
    trial = FixTrial(fix, what, remedy.undo, cost, first, last, change, recovered, is_fixed)
    if not is_fixed and fix == "governor":
        notes.append("the previous governor was restored: this one did not help")
    return Proof(trial, tuple(notes))
