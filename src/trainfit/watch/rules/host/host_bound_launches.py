"""The GPU waits for the host to launch kernels: small kernels, much Python for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Confidence, Evidence, Finding, Unknown
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.host.main_thread import MainThread
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "host_bound_launches"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if not gpu_time.has_gpu(rank):
        return
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    main = MainThread(rank)
    idle, launches = main.unexplained_idle, main.launches
    if idle is None or launches is None:
        yield Unknown(KIND, "no CUDA events measured the steps", "CUDA events of the phases")
        return
    if idle < thresholds.HOST_IDLE or not main.idle_lasts:
        return
    # Where the host waits for the GPU, or does something else, others say so.
    if main.sync >= thresholds.SYNC_SHARE or launches < thresholds.LAUNCHES * _at_work(main):
        return
    if main.cpu is not None and main.cpu < thresholds.MAIN_THREAD * _at_work(main):
        return
    yield Finding(
        KIND,
        severity(idle),
        f"The GPU waits {checks.in_percent(idle)} of the time for the host to launch kernels",
        tuple(_evidence(main, idle)),
        "Launching the step's kernels from Python needs longer than the GPU needs to run them",
        'launch less: torch.compile(mode="reduce-overhead") or CUDA graphs, a fused optimizer '
        "(fused=True), a larger batch",
        _confidence(main),
        idle,
        line='model = torch.compile(model, mode="reduce-overhead")',
    )


def _at_work(main: MainThread) -> float:
    """Share of the time in which the main thread neither waits for batches nor saves."""
    waits = (main.phases[name] or 0.0 for name in ("input", "checkpoint", "evaluation"))
    return max(0.0, 1 - sum(waits))


def _evidence(main: MainThread, idle: float) -> Iterator[Evidence]:
    rank = main.rank
    yield Evidence("GPU idle", idle, "of the time")
    yield Evidence("launching (forward, backward, optimizer)", main.launches or 0.0, "of the time")
    if main.cpu is not None:
        yield Evidence("main thread's CPU time", main.cpu, "of the step")
    busy, by_nvml = gpu_time.busy_by_events(rank), gpu_time.utilization(rank)
    if busy is not None:
        yield Evidence("GPU busy by CUDA events", busy, "of the time")
    if by_nvml is not None:
        yield Evidence("GPU utilization by NVML", by_nvml, "of the time")


def _confidence(main: MainThread) -> Confidence:
    if main.cpu is None:
        return "possible"
    by_nvml = gpu_time.utilization(main.rank)
    events = 1 - (gpu_time.busy_by_events(main.rank) or 1.0)
    agree = by_nvml is not None and 1 - by_nvml >= 0.5 * events
    return "certain" if agree and events >= thresholds.WARNING_SHARE else "likely"


RULE: Final = Rule((KIND,), _look, each_rank=True)
