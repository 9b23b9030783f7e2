"""Fixes for the causes that were found, the least intrusive first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from trainfit.pace.machine.fixes import FIX_TEXTS
from trainfit.results.machine.pace import Advice, Attribution, Cause, Fix

_POWER: Final = "more power and heat, also while idle"


def advice(found: Attribution | None, machine: Mapping[str, str]) -> tuple[Advice, ...]:
    """Of all causes, each once, by tier."""
    if found is None:
        return ()
    made: dict[str, Advice] = {}
    uses_gpu = any(arm.device_s is not None for arm in found.arms)
    for finding in found.findings:
        for each in _of(finding.cause, machine, uses_gpu, found.hz):
            made.setdefault(each.what, each)
    return tuple(sorted(made.values(), key=lambda each: each.tier))


def _of(cause: Cause, machine: Mapping[str, str], uses_gpu: bool, hz: float) -> Sequence[Advice]:
    # Launched at once, kernels leave little work that a slow clock or cold caches could prolong.
    graphs = [_GRAPHS] if uses_gpu else []
    if cause == "cpu_frequency":
        return [_spin(hz), *graphs, *_cores(machine), _GOVERNOR, *_preference(machine), _TUNED]
    if cause == "c_states":
        return [_FEWER_WAITS, _spin(hz), _fix("qos", 2, _HOLD), _TUNED]
    if cause == "gpu_clocks":
        return [_GPU_AWAKE, _GPU_CLOCKS]
    if cause == "launch_overhead":
        return [_GRAPHS]
    return [*graphs, *_cores(machine), _ALONE]


def _fix(fix: Fix, tier: int, how: str) -> Advice:
    remedy = FIX_TEXTS[fix]
    return Advice(tier, remedy.what, how, remedy.undo, remedy.cost, fix)


def _spin(hz: float) -> Advice:
    return _fix("spin", 1, f"pacer = trainfit.pace.Pacer({hz:g}); pacer.wait() before each call")


_HOLD: Final = (
    "f = open('/dev/cpu_dma_latency', 'wb', 0); f.write(bytes(4)); keep f open (needs "
    "write permission)"
)
_GOVERNOR: Final = _fix("governor", 3, "sudo cpupower frequency-set -g performance")
_GRAPHS: Final = Advice(
    1,
    "launch all kernels of a call at once",
    'torch.compile(model, mode="reduce-overhead"), or torch.cuda.graph: needs fixed shapes',
    "call the model directly",
    "memory for the graphs' private pool, seconds of compilation",
)
_FEWER_WAITS: Final = Advice(
    1,
    "synchronize with the GPU once per call",
    "one .cpu() at the end instead of .item(), .cpu() or print in between",
    "none is needed",
    "none",
)
_GPU_AWAKE: Final = Advice(
    1,
    "keep the GPU busy between calls",
    "a thread that launches a tiny kernel on its own stream every millisecond",
    "leave it out",
    "the GPU draws more power while idle",
)
_GPU_CLOCKS: Final = Advice(
    3,
    "lock the GPU's clock",
    "sudo nvidia-smi -pm 1; sudo nvidia-smi -lgc 1500,MAX with the highest clock of "
    "`nvidia-smi -q -d SUPPORTED_CLOCKS`",
    "sudo nvidia-smi -rgc",
    "the GPU draws more power while idle",
)
_TUNED: Final = Advice(
    3,
    "a low-latency profile, which sets the governor, idle states and more",
    "sudo tuned-adm profile latency-performance",
    "sudo tuned-adm profile balanced (or the profile that `tuned-adm active` printed before)",
    _POWER,
)
_ALONE: Final = Advice(
    1,
    "keep other processes off the core",
    "taskset -c for the loop, and cgroups or taskset for other processes; fewer "
    "threads (OMP_NUM_THREADS) in what runs alongside",
    "leave it out",
    "one core that other processes cannot use",
)


def _cores(machine: Mapping[str, str]) -> Sequence[Advice]:
    fast = machine.get("performance cores")
    if not fast:
        return []
    return [
        Advice(
            1,
            "run on the performance cores",
            f"taskset -c {fast} in front of the command",
            "leave it out",
            "none as long as other processes have enough cores",
        )
    ]


def _preference(machine: Mapping[str, str]) -> Sequence[Advice]:
    """With EPP a preference alone does, and costs less."""
    if "EPP" not in machine.get("cpufreq", ""):
        return []
    files = "/sys/devices/system/cpu/cpufreq/policy*/energy_performance_preference"
    return [
        Advice(
            3,
            "the energy performance preference (EPP) alone",
            f"echo performance | sudo tee {files}",
            f"echo the previous value ({machine['cpufreq'].rpartition('EPP ')[2]}) the same way",
            _POWER,
        )
    ]
