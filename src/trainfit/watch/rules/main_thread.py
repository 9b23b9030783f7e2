"""Rules about the main thread: launches, synchronisations, copies to the GPU, waits, a thread at
its limit."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.findings import habits
from trainfit.findings.habits import UNPINNED
from trainfit.findings.threads import set_at
from trainfit.results.findings import Confidence, Evidence, Finding, Fix, Unknown
from trainfit.results.runs.watched import StackLooks
from trainfit.watch import checks, thresholds
from trainfit.watch.rules.code_lines import costliest, place_of_most
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import PHASES, RankView, RunView, known, median


@dataclass(frozen=True)
class MainThread:
    """Shares of the steady steps' time; ``None`` is not measured."""

    rank: RankView

    @functools.cached_property
    def phases(self) -> dict[str, float | None]:
        return {name: self.rank.share(name) for name in PHASES}

    @functools.cached_property
    def launches(self) -> float | None:
        """The share of the time in forward, backward and optimizer: on a GPU, the launching of
        kernels."""
        found = [self.phases[name] for name in ("forward", "backward", "optimizer")]
        return None if found[0] is None else sum(phase or 0.0 for phase in found)

    @functools.cached_property
    def other(self) -> float | None:
        """Outside all phases, and outside of calls in which ranks meet: the script's own code."""
        if self.launches is None:
            return None
        meets_s = (self.rank.header.communication.called_s or 0.0) * len(self.rank.steps)
        meets = min(1.0, meets_s / self.rank.seconds) if self.rank.seconds else 0.0
        return max(0.0, 1 - meets - sum(phase or 0.0 for phase in self.phases.values()))

    @functools.cached_property
    def sync(self) -> float:
        """The share of the time in waiting for the GPU, where that was measured."""
        return self.phases["sync"] or 0.0

    @functools.cached_property
    def cpu(self) -> float | None:
        """Median of the main thread's CPU time over the step's."""
        ratios = known(checks.column(self.rank, "cpu_s") / checks.column(self.rank, "step_s"))
        return float(np.median(ratios)) if len(ratios) else None

    @property
    def launching(self) -> float | None:
        """Share of a step in which a thread works for it: the main thread, and in the backward
        pass, for which that one waits, autograd's own; ``None``: not measured."""
        return None if self.cpu is None else min(1.0, self.cpu + (self.phases["backward"] or 0.0))

    @functools.cached_property
    def unexplained_idle(self) -> float | None:
        """Share of the time in which the GPU was idle, less what input, checkpoints and
        evaluation are to blame for, and less that in which other programs kept the main thread from
        its core; ``None``: not measured."""
        idle = checks.idle_share(self.rank)
        if idle is None:
            return None
        named = checks.share_of(self.rank, checks.input_lost(self.rank))
        named += (self.phases["checkpoint"] or 0.0) + (self.phases["evaluation"] or 0.0)
        named += CoreWaits(self.rank).held_up_by_others or 0.0
        copies = checks.lost_to_copies(self.rank)
        # Copies keep the stream busy; NVML alone counts them as idle.
        if copies is not None and idle > 1 - (checks.busy_by_events(self.rank) or 1.0):
            named += checks.share_of(self.rank, copies)
        return max(0.0, idle - named)

    @functools.cached_property
    def idle_lasts(self) -> bool:
        """Was the GPU idle in a third of the run? NVML's mean is trusted where events see less."""
        steps = self.rank.steps
        gap = np.nan_to_num(checks.gap(self.rank))
        gap = np.maximum(0.0, gap - np.nan_to_num(checks.column(self.rank, "input_s")))
        if checks.lasts(self.rank, gap):
            return True
        values = known(self.rank.gpu["utilization"])
        idle = 1 - (checks.utilization(self.rank) or 1.0) >= thresholds.NVML_IDLE
        below = len(values) and np.mean(values <= 1 - thresholds.NOTICEABLE)
        return bool(len(steps) and idle and below >= thresholds.LASTING)


# ---
# The GPU waits for the host to launch kernels: small kernels, much Python for each.


_HOST_BOUND_LAUNCHES_KIND: Final = "host_bound_launches"


def _find_host_bound_launches(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if not checks.has_gpu(rank):
        return
    yield from (few := list(checks.too_few_steps(rank, _HOST_BOUND_LAUNCHES_KIND)))
    if few:
        return
    main = MainThread(rank)
    idle, launches = main.unexplained_idle, main.launches
    if idle is None or launches is None:
        yield Unknown(
            _HOST_BOUND_LAUNCHES_KIND,
            "no CUDA events measured the steps",
            "CUDA events of the phases",
        )
        return
    if idle < thresholds.HOST_IDLE or not main.idle_lasts:
        return
    # Where the host waits for the GPU, or does something else, others say so.
    if main.sync >= thresholds.SYNC_SHARE or launches < thresholds.LAUNCHES * _at_work(main):
        return
    if main.launching is not None and main.launching < thresholds.MAIN_THREAD * _at_work(main):
        return
    yield Finding(
        _HOST_BOUND_LAUNCHES_KIND,
        severity(idle),
        f"The GPU waits {checks.in_percent(idle)} of the time for the host to launch kernels",
        tuple(_evidence(main, idle)),
        "Launching the step's kernels from Python needs longer than the GPU needs to run them",
        (
            Fix(
                'launch less: torch.compile(mode="reduce-overhead") or CUDA graphs, a fused '
                "optimizer (fused=True), a larger batch",
                line='model = torch.compile(model, mode="reduce-overhead")',
            ),
        ),
        _confidence(main),
        idle,
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
    busy, by_nvml = checks.busy_by_events(rank), checks.utilization(rank)
    if busy is not None:
        yield Evidence("GPU busy by CUDA events", busy, "of the time")
    if by_nvml is not None:
        yield Evidence("GPU utilization by NVML", by_nvml, "of the time")


def _confidence(main: MainThread) -> Confidence:
    if main.cpu is None:
        return "possible"
    by_nvml = checks.utilization(main.rank)
    events = 1 - (checks.busy_by_events(main.rank) or 1.0)
    agree = by_nvml is not None and 1 - by_nvml >= 0.5 * events
    return "certain" if agree and events >= thresholds.WARNING_SHARE else "likely"


HOST_BOUND_LAUNCHES: Final = Rule(
    (_HOST_BOUND_LAUNCHES_KIND,), _find_host_bound_launches, each_rank=True
)


# ---
# Calls that wait for the GPU, after which it is idle until the host has launched again.


_HIDDEN_SYNCS_KIND: Final = habits.WAITS_KIND


def _find_hidden_syncs(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if not checks.has_gpu(rank):
        return
    yield from (few := list(checks.too_few_steps(rank, _HIDDEN_SYNCS_KIND)))
    if few:
        return
    main = MainThread(rank)
    counts = known(rank.steps["syncs"])
    idle = main.unexplained_idle
    if idle is None or not len(counts) or main.phases["sync"] is None:
        yield Unknown(
            _HIDDEN_SYNCS_KIND, "synchronizations or CUDA events were not recorded", "CUDA events"
        )
        return
    # A copy from pageable memory waits for what was launched before it, too: it has its own rule.
    copies = main.phases["copy"] or 0.0
    if (_unpinned_share(rank) or 0.0) > 0.5 and copies > main.sync:
        return
    lasting = np.mean(counts >= 1) >= thresholds.LASTING and main.idle_lasts
    if idle < thresholds.HOST_IDLE or main.sync < thresholds.SYNC_SHARE or not lasting:
        return
    yield Finding(
        _HIDDEN_SYNCS_KIND,
        severity(idle),
        f"Waiting for the GPU {np.mean(counts):.3g} times a step leaves it idle "
        f"{checks.in_percent(idle)} of the time",
        (
            Evidence("synchronizations", float(np.mean(counts)), "1/step"),
            Evidence("waiting in them", main.sync * rank.seconds / len(rank.steps), "s/step"),
            Evidence("GPU idle, not for lack of input", idle, "of the time"),
        ),
        habits.WAITS.cause,
        (_without_waits(rank.header.sync_code),),
        "likely",
        idle,
        place_of_most(rank.header.sync_code),
    )


#: What shows or logs a number, and what a condition on a tensor calls.
_SHOWS: Final = re.compile(
    r"set_postfix|set_description|tqdm|wandb|mlflow|add_scalars?$|\blogg(?:er|ing)\b|(?:^|\.)log$"
)
_CONDITION: Final = re.compile(r"(?:^|\.)__(?:bool|nonzero)__$|(?:^|\.)bool$")
_CLIPS: Final = re.compile(r"(?:^|\.)(?:grad_|vector_|total_)?norm\b|clip")


def _without_waits(looks: StackLooks) -> Fix:
    """What to do about the line that waits for the GPU most, by what it is done for."""
    line = costliest(looks)
    names = () if line is None or line.count < thresholds.LOOKS_AT_LINE else line.names
    if any(map(_SHOWS.search, names)):
        return Fix(
            "give the progress bar or the logger its numbers every 50 steps: sum the loss on the "
            "GPU (total += loss.detach()), and read total.item() / 50 then",
            line="if step % 50 == 0: …",
        )
    if any(map(_CONDITION.search, names)) or any(map(_CLIPS.search, names)):
        return Fix(
            "leave the comparison to the GPU: torch.nn.utils.clip_grad_norm_ (or clip_grad_value_) "
            "clips without reading the norm, torch.where(norm > most, a, b) stands for an if; what "
            "has to be read, read every 50 steps"
        )
    return Fix(habits.WAITS.action, line=habits.WAITS.line)


HIDDEN_SYNCS: Final = Rule((_HIDDEN_SYNCS_KIND,), _find_hidden_syncs, each_rank=True)


# ---
# The script itself waits: its main thread neither computes nor waits for batches or the GPU.


_SCRIPT_WAITS_KIND: Final = "script_waits"

#: In which the main thread waits for what other rules look at.
_WAITS: Final = ("copy", "sync", "checkpoint", "evaluation")


def _find_script_waits(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if checks.are_few(rank) or _is_held_up(rank):
        return  # what is measured without steps enough, or on a machine that swaps, says little
    if not checks.has_gpu(rank) and not len(known(rank.machine["runnable"])):
        # Of a moment: that it had no core is not told from that it waited.
        yield checks.too_few_samples(_SCRIPT_WAITS_KIND, "the run queue")
        return
    # Who waits for a slower rank is no cause; what the least of them waits, all of them do.
    share = min(_share(each) for each in view.ranks)
    least = thresholds.OTHER_CODE
    if share < least or not checks.lasts(rank, _waits(rank), least):
        return
    main = MainThread(rank)
    evidence = [
        Evidence("the main thread waits", share * rank.seconds / len(rank.steps), "s/step"),
        Evidence("CPU time of the main thread", main.cpu or 0.0),
        Evidence("outside of all phases", main.other or 0.0),
    ]
    storage = median(rank.main_process["waits_for_io"]) or 0.0
    if storage >= thresholds.NOTICEABLE:
        evidence.append(Evidence("waits for a disk", storage))
    yield Finding(
        _SCRIPT_WAITS_KIND,
        severity(share),
        f"The script itself waits {checks.in_percent(share)} of the time, for neither batches nor "
        "the GPU",
        tuple(evidence),
        "The main thread neither computes nor waits for what is recorded: it sleeps, or waits for "
        "a file, the network, another process or a lock",
        (
            Fix(
                "find the line: `faulthandler.dump_traceback_later(5, repeat=True)` in the "
                "script prints it, or `py-spy dump --pid PID`"
            ),
        ),
        "likely",
        share,
    )


def _share(rank: RankView) -> float:
    """The share of the time that the main thread waits; on a GPU only while that is idle for no
    other reason. Where the kernel counts how long the thread was ready and had no core, that is no
    wait of its own."""
    ready = CoreWaits(rank).main_thread or 0.0
    share = max(0.0, checks.share_of(rank, _waits(rank)) - ready)
    if not checks.has_gpu(rank):
        return share
    return min(share, MainThread(rank).unexplained_idle or 0.0)


def _waits(rank: RankView) -> NDArray[np.float64]:
    """Seconds of each steady step in which the main thread is neither on a core nor in a wait that
    has a name; 0: not measured. Less than that where two of them cannot be told apart."""
    step_s, cpu_s = checks.column(rank, "step_s"), checks.column(rank, "cpu_s")
    named = np.sum([np.nan_to_num(checks.column(rank, f"{each}_s")) for each in _WAITS], axis=0)
    named += np.nan_to_num(checks.column(rank, "input_s")) * (1 - _computes_batches(rank))
    backward = checks.has_gpu(rank) or rank.header.world_size > 1
    if backward:
        # Autograd's thread launches the backward pass; other ranks are waited for in it.
        named += np.nan_to_num(checks.column(rank, "backward_s"))
    if checks.several_compute(rank) or (not checks.has_gpu(rank) and checks.is_crowded(rank)):
        # The main thread waits for the other threads of PyTorch, or for its turn on a core: it
        # computes.
        names = ("forward_s", "optimizer_s", *(() if backward else ("backward_s",)))
        named += np.sum([np.nan_to_num(checks.column(rank, name)) for name in names], axis=0)
    waits = np.nan_to_num(np.maximum(0.0, step_s - cpu_s - named))
    return waits if _would_get_more(rank, cpu_s, step_s - named) else np.zeros(len(waits))


def _computes_batches(rank: RankView) -> float:
    """The share of the time in the DataLoader that is CPU time of the main thread; 0 with
    workers."""
    loader = checks.training_loader(rank.header)
    rows = rank.fetches
    if loader is None or loader.num_workers or not len(rows):
        return 0.0
    return min(1.0, max(0.0, median(rows["cpu_s"] / rows["fetch_s"]) or 0.0))


def _would_get_more(
    rank: RankView, cpu_s: NDArray[np.float64], rest_s: NDArray[np.float64]
) -> bool:
    """Does the thread use less than it would get among those that want to run? Schedulers are fair
    to a factor of two."""
    usable, runnable = checks.usable_cores(rank.header), median(rank.machine["runnable"])
    if usable is None or runnable is None or runnable <= usable:
        return True
    total = float(np.nansum(rest_s))
    return (
        total > 0 and float(np.nansum(cpu_s)) / total < thresholds.WANTS_CORES * usable / runnable
    )


def _is_held_up(rank: RankView) -> bool:
    """Is the main thread stopped by a quota, or by memory that is read back from swap?"""
    machine = rank.machine
    rows = machine[machine["cgroup_periods"] > 0]
    stopped = float(np.sum(np.maximum(0, rows["cgroup_throttled"]), dtype=np.float64))
    periods = float(np.sum(rows["cgroup_periods"], dtype=np.float64))
    swapped = known(machine["swap_in_bytes"])
    swaps = len(swapped) > 0 and float(np.mean(swapped > 0)) >= thresholds.SWAP_SAMPLES
    return swaps or (periods > 0 and stopped / periods >= thresholds.THROTTLED)


SCRIPT_WAITS: Final = Rule((_SCRIPT_WAITS_KIND,), _find_script_waits, each_rank=True)


# ---
# One thread has no more to give while most cores are idle.


_ONE_HOT_THREAD_KIND: Final = "one_hot_thread"


#: Cores that a machine's own programs keep busy when nothing runs.
_SOME: Final = 0.1


def _find_one_hot_thread(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _ONE_HOT_THREAD_KIND)))
    if few:
        return
    hottest, cores = known(rank.main_process["hottest_thread"]), checks.cores(rank)
    if cores is None or len(hottest) < thresholds.LEAST_SLOW_SAMPLES:
        yield Unknown(
            _ONE_HOT_THREAD_KIND,
            f"fewer than {thresholds.LEAST_SLOW_SAMPLES} samples of the threads",
            "the sampler, and a few seconds",
        )
        return
    hot = np.mean(hottest >= thresholds.HOT_THREAD) >= thresholds.LASTING
    if not hot or cores.idle < max(
        thresholds.HOT_THREAD, thresholds.IDLE_CORES * cores.usable - _SOME
    ):
        return
    main = MainThread(rank)
    share, threads = _own_code(main), rank.header.threads.get("torch")
    evidence = (
        Evidence("its busiest thread", float(np.median(hottest)), "cores"),
        Evidence("idle cores", cores.idle, "cores"),
        Evidence("usable cores", cores.usable, "cores"),
    )
    if share >= thresholds.OTHER_CODE:
        if cores.idle < 1.0:
            return  # a second process would have no core of its own
        yield Finding(
            _ONE_HOT_THREAD_KIND,
            severity(share),
            "The main thread is busy with the script's own code while cores are idle",
            (*evidence, Evidence("outside of all phases", main.other or 0.0, "of the time")),
            "Python code between the phases (metrics, logging, preparing batches) runs in one "
            "thread",
            (
                Fix(
                    "move it into the data set, so that workers do it, or onto the GPU; `py-spy "
                    "top` shows which lines it is"
                ),
            ),
            "likely",
            share,
        )
    elif not checks.has_gpu(rank) and threads is not None and 2 * threads <= cores.usable:
        place = checks.thread_place(rank)
        value = max(1, round(cores.idle) + threads)
        yield Finding(
            _ONE_HOT_THREAD_KIND,
            "warning",
            f"PyTorch computes with {threads} thread{'s' if threads > 1 else ''} while "
            f"{cores.idle:.1f} cores are idle",
            (*evidence, Evidence("threads of PyTorch", float(threads))),
            "OMP_NUM_THREADS, torchrun or the script limits the number of threads",
            (
                set_at(value)
                if place
                else Fix(f"set OMP_NUM_THREADS={value}", settings={"OMP_NUM_THREADS": str(value)}),
            ),
            "likely",
            place=place,
        )


def _own_code(main: MainThread) -> float:
    """Share of the time that the script's own code costs: on a GPU only while that is idle."""
    other = main.other or 0.0
    if main.cpu is not None and main.cpu < thresholds.MAIN_THREAD:
        return 0.0
    if not checks.has_gpu(main.rank):
        return other
    # Where launches dominate, or the host waits for the GPU, other rules say so.
    idle = main.unexplained_idle
    launches_dominate = (main.launches or 0.0) >= thresholds.LAUNCHES
    if idle is None or launches_dominate or main.sync >= thresholds.SYNC_SHARE:
        return 0.0
    return min(other, idle)


ONE_HOT_THREAD: Final = Rule((_ONE_HOT_THREAD_KIND,), _find_one_hot_thread, each_rank=True)


# ---
# Copies from the host to the GPU: what they cost the training, and where their bytes lie.


def _unpinned_share(rank: RankView) -> float | None:
    """The share of the copied bytes that are not pinned; ``None``: not measured, or none were
    copied."""
    every, unpinned = rank.steps["copied_bytes"], rank.steps["unpinned_bytes"]
    measured = (every >= 0) & (unpinned >= 0)
    total = float(np.sum(every[measured], dtype=np.float64))
    return float(np.sum(unpinned[measured], dtype=np.float64)) / total if total else None


def _of_copies(rank: RankView, seconds: checks.Seconds) -> tuple[Evidence, ...]:
    """Seconds and bytes of a step, and the rate."""
    spent = float(np.nanmean(seconds))
    evidence = [Evidence("copies to the GPU", spent, "s/step")]
    copied = known(rank.steps["copied_bytes"])
    if len(copied):
        evidence.append(Evidence("copied", float(np.mean(copied)), "bytes/step"))
        if spent > 0:
            evidence.append(Evidence("rate", float(np.mean(copied)) / spent, "bytes/s"))
    unpinned = _unpinned_share(rank)
    if unpinned is not None:
        evidence.append(Evidence("from pageable memory", unpinned, "of the bytes"))
    return tuple(evidence)


# ---
# Copies to the GPU take much of the step although their memory is pinned.


_COPIES_KIND: Final = "copies"


def _find_costly_copies(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if not checks.has_gpu(rank):
        return
    yield from (few := list(checks.too_few_steps(rank, _COPIES_KIND)))
    if few:
        return
    lost, unpinned = checks.lost_to_copies(rank), _unpinned_share(rank)
    if lost is None:
        yield Unknown(_COPIES_KIND, "copies to the GPU were not measured", "copy_s or gpu_copy_s")
        return
    share = checks.share_of(rank, lost)
    if share < thresholds.NOTICEABLE or not checks.lasts(rank, lost):
        return
    if unpinned is not None and unpinned >= thresholds.UNPINNED:
        return  # unpinned_copies says it
    yield Finding(
        _COPIES_KIND,
        severity(share),
        f"Copies to the GPU take {checks.in_percent(share)} of the time",
        _of_copies(rank, lost),
        "The GPU computes nothing while its stream copies a batch",
        (
            Fix(
                "copy the next batch in a stream of its own while this one is computed, and copy "
                "less: uint8 images, normalized on the GPU; tensors made there"
            ),
        ),
        "likely" if unpinned is not None else "possible",
        share,
        place_of_most(rank.header.copy_code),
    )


COPIES: Final = Rule((_COPIES_KIND,), _find_costly_copies, each_rank=True)


# ---
# Copies to the GPU come from pageable memory: slower, and the host waits for them.


_UNPINNED_COPIES_KIND: Final = "unpinned_copies"


def _find_unpinned_copies(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _UNPINNED_COPIES_KIND)))
    lost = checks.lost_to_copies(rank)
    if few or lost is None:
        return
    share = checks.share_of(rank, lost)
    if share < thresholds.NOTICEABLE or not checks.lasts(rank, lost):
        return
    unpinned = _unpinned_share(rank)
    if unpinned is None:
        yield Unknown(
            _UNPINNED_COPIES_KIND,
            "whether copies came from pinned memory was not recorded",
            "unpinned_bytes",
        )
        return
    if unpinned < thresholds.UNPINNED:
        return
    loader = checks.training_loader(rank.header)
    pins = loader is not None and loader.pin_memory
    yield Finding(
        _UNPINNED_COPIES_KIND,
        severity(share),
        f"Copies from pageable memory take {checks.in_percent(share)} of the time",
        _of_copies(rank, lost),
        UNPINNED.cause,
        (
            Fix(
                "pin what is copied outside the DataLoader: tensor.pin_memory(); and copy with "
                "non_blocking=True"
                if pins
                else UNPINNED.action,
                settings={} if pins else {"pin_memory": "True"},
                line=UNPINNED.line,
            ),
        ),
        "likely",
        share,
        place_of_most(rank.header.copy_code),
    )


UNPINNED_COPIES: Final = Rule((_UNPINNED_COPIES_KIND,), _find_unpinned_copies, each_rank=True)
