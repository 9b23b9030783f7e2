"""Memory that runs short or grows: a GPU's, and the machine's RAM and /dev/shm that run short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.findings import fixes
from trainfit.findings.habits import EXPANDABLE, FRAGMENTED, KEPT_GRAPHS
from trainfit.results.findings import Evidence, Finding, Fix, Place, Severity, Unknown
from trainfit.results.runs.tables import Table
from trainfit.results.runs.watched import Event
from trainfit.results.text import GIB, MIB, short, size
from trainfit.watch import thresholds
from trainfit.watch.checks import loader_place, loader_settings
from trainfit.watch.measures import growth_per_step, host_memory, ledger, peak_share
from trainfit.watch.rules.growth import LEAST_BYTES, MOSTLY, keeps, kept_tensors, what_keeps
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RankView, RunView, known, median

# ---
# Allocated memory that grows from step to step: a leak.


def _find_gpu_growth(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on the GPU memory of each rank that grows surely (the whole interval), and by an
    amount that matters."""
    for view in run.ranks:
        held = known(view.steps["allocated_bytes"])
        if view.header.gpu is None or not len(view.steps):
            continue
        growth, steps = growth_per_step(view), view.steps["step"]
        span = int(steps[-1] - steps[0])
        if growth is None or span < thresholds.GROWTH_STEPS:
            needs = f"{thresholds.GROWTH_STEPS} steps after the warm-up with memory readings"
            yield Unknown("memory_growth", "too few readings of allocated memory", needs)
            continue
        per_step, low, _ = growth
        grown = per_step * span
        least = max(thresholds.GROWTH_BYTES, thresholds.GROWTH_SHARE * float(held.min()))
        if low <= 0 or grown < least:
            continue
        books = ledger(view)
        full = books.out_of_memory_step if books is not None else None
        evidence = [
            Evidence("growth", per_step / MIB, "MiB/step"),
            Evidence("grown so far", grown / MIB, "MiB"),
        ]
        evidence += [] if full is None else [Evidence("out of memory at step", full)]
        variable = kept_tensors(view)
        title = f"Memory of tensors grows by {size(per_step)} a step"
        cause = (
            "something keeps tensors of past steps: a loss that is summed up, a list of outputs, "
            f"hooks or caches; {KEPT_GRAPHS.cause}"
        )
        fix = Fix(
            f"{KEPT_GRAPHS.action}; `trainfit memory` names the line that allocates what is kept"
        )
        if variable is not None:
            title += f": {keeps(variable)}"
            cause, fix = what_keeps(variable)
        yield Finding(
            "memory_growth",
            "critical" if full is not None else "warning",
            title,
            tuple(evidence),
            cause,
            (fix,),
            "certain" if variable is not None or grown > 4 * least else "likely",
            place=None if variable is None else Place.parse(variable.place),
            rank=view.rank,
        )


GPU_GROWTH: Final = Rule(("memory_growth",), _find_gpu_growth)


# ---
# A GPU whose memory is nearly used up.


def _find_gpu_near_limit(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on each rank's GPU, by what the driver says is used, at the worst moment of the
    run."""
    for view in run.ranks:
        if view.header.gpu is None or not len(view.record.steps):
            continue
        found = _judged(view)
        if found is not None:
            yield found


def _judged(view: RankView) -> Finding | Unknown | None:
    gpu = view.header.gpu
    total = (
        view.header.gpus[gpu].memory_bytes
        if gpu is not None and gpu < len(view.header.gpus)
        else None
    )
    used = known(view.every_gpu_sample["used_bytes"])
    reserved = known(view.record.steps["reserved_bytes"])
    if not total or not (len(used) or len(reserved)):
        return Unknown("memory_near_limit", "the GPU's memory was not read", "NVML")
    maximum = max(float(used.max()) if len(used) else 0.0, float(reserved.max(initial=0.0)))
    left = 1 - maximum / total
    tries = _retries(view)
    if left >= thresholds.NEAR_LIMIT and not tries:
        return None
    level: Severity = "critical" if tries or left < thresholds.AT_LIMIT else "warning"
    evidence = [
        Evidence("used at the peak", maximum / GIB, "GiB"),
        Evidence("of the GPU", total / GIB, "GiB"),
    ]
    evidence += [Evidence("allocations that had to free the cache first", tries)] if tries else []
    return Finding(
        "memory_near_limit",
        level,
        "The GPU's memory is nearly full",
        tuple(evidence),
        "each time the cache is freed, the GPU is synchronized and memory is requested from the "
        "driver"
        if tries
        else "a longer sample or an evaluation may no longer fit",
        (
            Fix(
                "lower the batch size, or run `trainfit plan` on this command for what each "
                "remedy saves"
            ),
        ),
        "certain",
        rank=view.rank,
    )


def _retries(view: RankView) -> int:
    """The retries of the allocator over the run: the counter only grows."""
    counted = known(view.record.steps["alloc_retries"])
    return int(np.ptp(counted)) if len(counted) else 0


GPU_LIMIT: Final = Rule(("memory_near_limit",), _find_gpu_near_limit)


# ---
# Reserved memory far above what tensors hold: fragmentation, or one large moment.


def _find_reserved_memory(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on the reserved memory of the judged rank, at the peaks of both."""
    steps = run.judged.record.steps
    reserved, peak = known(steps["reserved_bytes"]), known(steps["peak_allocated_bytes"])
    if not len(reserved) or not len(peak) or not peak.max():
        return
    ratio, share = float(reserved.max() / peak.max()), peak_share(run.judged)
    if ratio < thresholds.RESERVED_RATIO or (share or 0.0) < thresholds.RESERVED_SHARE:
        return
    yield Finding(
        "reserved_above_allocated",
        "warning",
        "PyTorch reserves far more memory than tensors hold",
        (
            Evidence("reserved at the peak", float(reserved.max()) / GIB, "GiB"),
            Evidence("allocated at the peak", float(peak.max()) / GIB, "GiB"),
        ),
        FRAGMENTED.cause,
        (Fix(f"{FRAGMENTED.action}, or pad batches to a few lengths", settings=EXPANDABLE),),
        "likely",
    )


RESERVED: Final = Rule(("reserved_above_allocated",), _find_reserved_memory, each_rank=True)


# ---
# RAM and /dev/shm that are nearly used up.


def _find_short_host_memory(run: RunView) -> Iterator[Finding]:
    """Findings on the RAM of the judged rank's machine, at the worst moment."""
    view = run.judged
    if not len(view.steps):
        return
    machine, ram = view.machine, view.header.ram_bytes
    left = known(machine["ram_available_bytes"])
    if ram and len(left) and left.min() < thresholds.RAM_LEFT * ram:
        yield _short_of_ram(view, float(left.min()), ram)
    free, used = known(machine["shm_free_bytes"]), known(machine["shm_used_bytes"])
    if len(free) and len(used):
        whole = float(free[-1] + used[-1])
        if whole and free.min() < thresholds.SHM_LEFT * whole:
            yield Finding(
                "shm_near_limit",
                "critical",
                "/dev/shm is nearly full",
                (
                    Evidence("least free", float(free.min()) / GIB, "GiB"),
                    Evidence("of", whole / GIB, "GiB"),
                ),
                "batches of workers wait there for the main process",
                (Fix(fixes.shm(loader_settings(view.header), None)),),
                "certain",
            )
        elif whole:
            yield from _small_shm(view, whole)


def _small_shm(view: RankView, whole: float) -> Iterator[Finding]:
    """The finding on a /dev/shm of ``whole`` bytes that cannot hold the batches that workers may
    have ready: those that were asked for, and the one that is used. That comes about where the
    training is slow for once (an evaluation, a checkpoint), and ends the run."""
    settings, fetches = loader_settings(view.header), view.record.fetches
    made = fetches["bytes"][fetches["worker"] >= 0]
    largest = float(made.max(initial=0))
    if settings is None or largest <= 0:
        return
    many = settings.num_workers * settings.prefetch_factor + 1
    if many * largest > (1 - thresholds.SHM_LEFT) * whole:
        yield Finding(
            "shm_near_limit",
            "warning",
            f"/dev/shm is too small for the batches that workers may have ready: {size(whole)}",
            (
                Evidence("largest batch", largest / MIB, "MiB"),
                Evidence("batches at most", float(many)),
                Evidence("they need", many * largest / MIB, "MiB"),
                Evidence("size of /dev/shm", whole / MIB, "MiB"),
            ),
            "batches of workers wait there for the main process; where the training is slow for "
            "once they are all there, and a worker ends with a bus error (Docker's default is "
            "64 MiB)",
            (Fix(fixes.shm(settings, int(many * largest))),),
            "likely",
        )


#: Of the RAM that is used, the run's own from which it is the one to change.
_OWN_RAM: Final = 0.25


def _short_of_ram(view: RankView, left: float, ram: int) -> Finding:
    """The finding on a machine with ``left`` bytes of ``ram`` free, by the run or by other
    programs."""
    held = host_memory(view)
    own = sum(memory.private_bytes + memory.shared_bytes for memory in held)
    evidence = (Evidence("least available", left / GIB, "GiB"), Evidence("of", ram / GIB, "GiB"))
    settings, by_others = loader_settings(view.header), ""
    action = fixes.memory(settings)
    if not settings:
        action = (
            "hold less of the data set in memory (np.memmap, files read as needed), or more memory"
        )
    if held and own < _OWN_RAM * (ram - left):
        by_others = f": other programs hold most of it, the run {size(own)}"
        action = "stop other programs, or wait for them (`ps aux --sort=-rss | head` lists them)"
    return Finding(
        "ram_near_limit",
        "warning" if by_others else "critical",
        f"RAM is nearly used up{by_others}",
        evidence,
        "when RAM runs out, the kernel kills a process, usually "
        f"{'the largest one' if by_others else 'a DataLoader worker'}",
        (Fix(action),),
        "certain",
    )


HOST_MEMORY: Final = Rule(
    ("ram_near_limit", "shm_near_limit"), _find_short_host_memory, each_rank=True
)


# ---
# Memory that runs out, which the script catches.


#: Tries of one step, all of which memory ran out in, from which none gets through: who looks for
#: a batch size tries a few.
_TRIES: Final = 4
#: Steps that memory ran out in, and their share of all, from which the run goes on so.
_STEPS_LOST: Final = 3
_SHARE_LOST: Final = 0.02


def _find_retries(run: RunView) -> Iterator[Finding]:
    """The finding on errors of memory that the script catches: it tries one step over and over, or
    goes on losing some. A few tries before the training are a search for a batch size."""
    for view in run.ranks:
        events = view.record.events
        full = [event for event in events if event.kind == "out_of_memory"]
        if not full or _ends_by(view, full[-1]):
            continue
        text = next((e.text for e in reversed(events) if e.kind == "out_of_memory_at"), "")
        done = int(view.record.steps["step"].max(initial=-1)) + 1
        tries = sum(event.step == full[-1].step for event in full)
        lost = {event.step for event in full}
        is_stuck = tries >= _TRIES and full[-1].step >= done
        if is_stuck:
            title = f"Memory runs out in each try of step {full[-1].step}: {tries} so far"
        elif len(lost) >= _STEPS_LOST and len(lost) >= _SHARE_LOST * done and min(lost) < done - 1:
            title = (
                f"In {len(lost)} of {done} steps memory runs out, and the script goes on without "
                "them"
            )
        else:
            continue
        yield Finding(
            "memory_retried",
            "critical" if is_stuck else "warning",
            title,
            (
                Evidence("times that memory ran out", float(len(full))),
                Evidence("the last time", short(full[-1].text.splitlines()[0], 160)),
            ),
            "The script catches the error. Within `except`, the exception keeps the functions that "
            "it came through, and with them all tensors of the failed try; and a try with the same "
            "batch needs the same memory",
            (
                Fix(
                    "a smaller batch in the next try (half of it, and twice the accumulation); set "
                    "a flag in `except`, and drop the tensors, torch.cuda.empty_cache() and try "
                    "after it, when the exception is gone"
                ),
            ),
            "certain",
            place=Place.parse(text),
            rank=view.rank,
            last_step=full[-1].step,
        )


def _ends_by(view: RankView, full: Event) -> bool:
    """Did this error end the process? It is told by what ended it, then."""
    ends = [event for event in view.record.events if event.kind == "exception"]
    return any(full.text.strip()[:200] in event.text for event in ends)


RETRIES: Final = Rule(("memory_retried",), _find_retries)
# ---
# Forked workers that copy the data set's pages: RSS stays, what is their own grows.


def _find_copies(run: RunView) -> Iterator[Finding | Unknown]:
    view = run.judged
    loader = loader_settings(view.header)
    # From the workers' first batches on, not only within the steady steps: most is copied then.
    every = view.run.memory[view.run.memory["rank"] == view.header.rank]
    table = every[(every["role"] == 1) & (every["private_bytes"] >= 0)]
    if loader is None or loader.start_method != "fork" or not len(view.steps):
        return
    parts = [part for pid in np.unique(table["pid"]) if (part := _copied(table, int(pid)))]
    if not parts:
        return
    copied, rss, seconds = max(parts)
    workers = loader.num_workers
    if copied < thresholds.GROWTH_BYTES or workers * copied < LEAST_BYTES:
        return
    if rss > (1 - MOSTLY) * copied:
        return  # it is new memory, which ram_growth looks at
    main = view.memory[view.memory["role"] == 0]
    maximum = workers * (median(main["anonymous_bytes"]) or copied)
    available = known(view.machine["ram_available_bytes"])
    worst: Severity = "info"
    if len(available):
        # What is copied already is no part of what is left, as copies in the end are of all.
        left, rest = float(available[-1]), max(0.0, maximum - workers * copied)
        is_scarce = maximum >= _SCARCE * (left + workers * copied)
        worst = "critical" if rest > left else "warning" if is_scarce else "info"
    evidence = [
        Evidence("its own memory of a worker grew by", copied, "bytes"),
        Evidence("its RSS, which counts shared pages, too, by", max(0.0, rss), "bytes"),
        Evidence("workers", float(workers)),
        Evidence("in", seconds, "s"),
        Evidence("all workers' copies at most", maximum, "bytes"),
    ]
    yield Finding(
        "copy_on_write",
        worst,
        f"Each worker copies the data set's Python objects as it reads them: {size(copied)} so far",
        tuple(evidence),
        "A forked worker shares the parent's pages until it writes to them; reading a Python "
        "object counts its references in the object itself, so that the page is copied",
        (Fix(fixes.LISTS),),
        "likely",
        place=loader_place(view.header),
    )


#: Of the available RAM, what copies may come to before they are a danger.
_SCARCE: Final = 0.25


def _copied(table: Table, pid: int) -> tuple[float, float, float] | None:
    """Bytes that became a worker's own, by how much its RSS grew meanwhile, and in how long;
    ``None``: fewer than three looks, or it did not go on."""
    rows = table[table["pid"] == pid]
    changes = np.diff(rows["private_bytes"])
    # Batches come and go.
    if len(rows) < 3 or changes.sum() < MOSTLY * np.abs(changes).sum():
        return None
    rss = rows["anonymous_bytes"] + rows["file_bytes"] + rows["shared_bytes"]
    return (
        float(rows["private_bytes"][-1] - rows["private_bytes"][0]),
        float(rss[-1] - rss[0]),
        float(rows["time_s"][-1] - rows["time_s"][0]),
    )


COPY_ON_WRITE: Final = Rule(("copy_on_write",), _find_copies, each_rank=True)


RULES = (GPU_LIMIT, RESERVED, GPU_GROWTH, RETRIES, COPY_ON_WRITE)
