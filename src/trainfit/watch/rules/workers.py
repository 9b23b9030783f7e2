"""Rules about a DataLoader's workers: none, too many, a slow one, and their start in each epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.findings.habits import (
    LOADED_IN_TRAINING,
    MADE_AGAIN,
    RESTARTED_ITERATOR,
    ScriptHabit,
    restarted_workers,
)
from trainfit.findings.training import worker_copies
from trainfit.results.findings import Confidence, Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.tables import EPOCH_START
from trainfit.results.runs.watched import WatchedLoader
from trainfit.results.text import count as plural
from trainfit.results.text import duration
from trainfit.watch import checks, thresholds
from trainfit.watch.rules.code_lines import CostlyLine
from trainfit.watch.rules.fetching import Fetching, is_measured
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import RankView, RunView, median

_NO_WORKERS_KIND: Final = "no_workers"


def _find_no_workers(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _NO_WORKERS_KIND)))
    if few or not is_measured(rank):
        return
    fetching = Fetching(rank)
    maximum = fetching.most_workers
    if fetching.workers != 0 or maximum == 0 or fetching.is_cheap:
        return  # where workers would not help, input_bound says what is left to do
    share = checks.share_of(rank, fetching.lost)
    if share < thresholds.NOTICEABLE or not checks.lasts(rank, fetching.lost):
        return
    value, confidence = _workers_to_start(fetching)
    less, code = "", fetching.slow_code
    if fetching.habit is not None and code:
        less = f"; {fetching.habit.action}"
    evidence = [
        Evidence("making batches", share * rank.seconds / len(rank.steps), "s/step"),
        Evidence("num_workers", 0.0),
    ]
    step_s = checks.step_without_input(rank)
    if step_s is not None:
        evidence.append(Evidence("step without that", step_s, "s"))
    if fetching.cores is not None:
        evidence.append(Evidence("idle cores", fetching.cores.idle, "cores"))
    yield Finding(
        _NO_WORKERS_KIND,
        severity(share),
        f"The main process loads the batches itself, {checks.in_percent(share)} of the time"
        + (f": {code}" if code else ""),
        tuple(evidence),
        LOADED_IN_TRAINING.cause,
        (
            Fix(
                f"set num_workers={value} and persistent_workers=True{less}",
                settings={"num_workers": str(value), "persistent_workers": "True"},
                gain=None if less else _limited_gain(fetching, share, value),
            ),
        ),
        confidence,
        share,
        fetching.place if fetching.slow_line is None else fetching.slow_line.place,
    )


def _limited_gain(fetching: Fetching, share: float, workers: int) -> float | None:
    """How many times as fast steps get with so many workers, where these or the cores are the limit
    and not the training."""
    computes = 1 - share + share * min(1.0, (fetching.cpu_s or 0.0) / (fetching.fetch_s or 1.0))
    least = max(share / workers, computes / max(1.0, fetching.usable or 1.0))
    return 1 / least if least > 1 - share else None


def _workers_to_start(fetching: Fetching) -> tuple[int, Confidence]:
    needed, maximum = fetching.needed_workers, fetching.most_workers
    if needed is None:
        return 1, "possible"
    needed = min(needed, fetching.most_useful)
    if maximum is not None:
        return min(needed, maximum), "certain"
    # How busy the cores are was not sampled: who computes needs one, who waits does not.
    usable = fetching.usable
    held = usable is not None and not fetching.waits
    return min(needed, max(1, int(usable or 1))) if held else needed, "likely"


NO_WORKERS: Final = Rule((_NO_WORKERS_KIND,), _find_no_workers, each_rank=True)


# ---
# One worker is slower than the others, which all wait for their turn behind it.


_SLOW_WORKER_KIND: Final = "slow_worker"


def _find_slow_worker(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _SLOW_WORKER_KIND)))
    if few or not is_measured(rank):
        return
    fetching = Fetching(rank)
    if checks.share_of(rank, fetching.lost) < thresholds.NOTICEABLE:
        return
    if (fetching.workers or 0) >= 2 and not len(rank.fetches):
        yield Unknown(
            _SLOW_WORKER_KIND, "the workers' batches were not recorded", "rows of fetches"
        )
    slow, lost = fetching.slow_worker, fetching.lost_in_turns
    share = checks.share_of(rank, lost)
    if slow is None or share < thresholds.NOTICEABLE or not checks.lasts(rank, lost):
        return
    ratio = slow.fetch_s / slow.others_s if slow.others_s else float(slow.fetch_s > 0)
    line = fetching.slow_line
    text = "" if line is None else f": {fetching.slow_code or line}"
    yield Finding(
        _SLOW_WORKER_KIND,
        severity(share),
        f"Worker {slow.worker} needs {ratio:.1f} times as long for a batch as the others{text}",
        (
            Evidence(f"a batch in worker {slow.worker}", slow.fetch_s, "s"),
            Evidence("a batch in the others", slow.others_s, "s"),
            Evidence("time lost", share * rank.seconds / len(rank.steps), "s/step"),
        ),
        "A DataLoader gives batches in the order of its workers: all wait for the slowest one",
        (
            Fix(
                "look at what this worker reads: an uneven shard of an IterableDataset, a slow "
                "disk, or a core that it shares; DataLoader(in_order=False) lets the others go "
                "ahead",
                settings={"in_order": "False"},
            ),
        ),
        "likely",
        share,
        checks.loader_place(rank.header) if line is None else line.place,
    )


SLOW_WORKER: Final = Rule((_SLOW_WORKER_KIND,), _find_slow_worker, each_rank=True)


# ---
# Samples are chosen in the training process, whoever makes the batches.


_SAMPLER_KIND: Final = "sampler_share"


def _find_sampler_share(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    line, share = Fetching(rank).sampler
    if line is None:
        yield from _find_library_sampler(rank)
    if (
        checks.are_few(rank)
        or line is None
        or line.count < thresholds.LOOKS_AT_LINE
        or share < thresholds.NOTICEABLE
    ):
        return
    reads = _reads_samples(line)
    yield Finding(
        _SAMPLER_KIND,
        severity(share),
        f"Choosing the samples of batches costs {checks.in_percent(share)} of the time: "
        + (f"{line}" if reads is None else f"{reads} reads samples of the data set for it"),
        (
            Evidence("looks at the main thread", float(rank.header.sampler_code.looks)),
            Evidence("of them at this line", float(line.count)),
        ),
        "A sampler runs in the training process, which waits for it, also where workers make the "
        "batches",
        (
            Fix(
                "choose the indices of an epoch at once, by tensors or arrays (torch.randperm, "
                "torch.multinomial), instead of a loop in Python for each batch"
                if reads is None
                else "keep what it needs of each sample (its length, its class) in a list that is "
                "made once, in __init__, or stored with the data, and choose by that"
            ),
        ),
        "likely",
        share,
        line.place if reads is None else reads,
    )


def _reads_samples(line: CostlyLine) -> Place | None:
    """The sampler's line that has the data set make samples, where most of its time goes to them;
    ``None``: it does not."""
    made = [e for e in line.calls if e.function.rpartition(".")[2].startswith("__getitem")]
    if sum(call.count for call in made) < _MOSTLY_FIRST * line.count or not made[0].callers:
        return None
    return Place.parse(made[0].callers[-1])


def _find_library_sampler(rank: RankView) -> Iterator[Finding]:
    """PyTorch's own, which orders or draws all samples of an epoch when it begins."""
    line, share = Fetching(rank).library_sampler
    if checks.are_few(rank) or line is None or share < thresholds.NOTICEABLE:
        return
    if line.count < thresholds.LOOKS_AT_LINE:
        return
    draws = "multinomial" in line.inner
    name = "WeightedRandomSampler" if draws else line.inner or line.calls
    yield Finding(
        _SAMPLER_KIND,
        severity(share),
        f"Choosing the samples of batches costs {checks.in_percent(share)} of the time: {name}",
        (
            Evidence("looks at the main thread", float(rank.header.sampler_code.looks)),
            Evidence("of them in the sampler", share * rank.header.sampler_code.looks),
        ),
        "The sampler chooses all samples of an epoch when it begins, in the training process, also "
        "those that are not used",
        (
            Fix(
                "draw only as many as an epoch uses: WeightedRandomSampler(weights, num_samples=…)"
                if draws
                else "longer epochs; or a sampler that draws only as many as an epoch uses: "
                "RandomSampler(data, replacement=True, num_samples=…)"
            ),
        ),
        "likely",
        share,
        checks.loader_place(rank.header),
    )


SAMPLER_SHARE: Final = Rule((_SAMPLER_KIND,), _find_sampler_share, each_rank=True)


# ---
# More workers than the training needs, which cost it cores or memory.


_TOO_MANY_WORKERS_KIND: Final = "too_many_workers"


def _find_too_many_workers(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _TOO_MANY_WORKERS_KIND)))
    fetching = Fetching(rank)
    usable = checks.usable_cores(rank.header)
    workers = (fetching.workers or 0) * max(1, checks.local_ranks(rank))
    if few or not is_measured(rank) or not workers:
        return
    if usable is None:
        yield Unknown(
            _TOO_MANY_WORKERS_KIND, "the usable cores are not known", "the machine's samples"
        )
        return
    value = _workers_enough(fetching, usable)
    if value >= (fetching.workers or 0):
        return
    evidence = list(_harm(fetching, usable, workers))
    if not evidence:
        return
    yield Finding(
        _TOO_MANY_WORKERS_KIND,
        "warning" if workers > usable else "info",
        f"{fetching.workers} workers are more than the training needs",
        (
            Evidence("workers on this machine", float(workers)),
            Evidence("workers that are needed", float(fetching.needed_workers or value)),
            Evidence("usable cores", usable, "cores"),
            *evidence,
        ),
        "Workers beyond what cores or training can use take turns on the cores, and each holds "
        "its own copies of data in RAM",
        (Fix(f"set num_workers={value}", settings={"num_workers": str(value)}),),
        "likely",
        place=checks.loader_place(rank.header),
    )


def _workers_enough(fetching: Fetching, usable: float) -> int:
    """The number of workers that are needed and have cores, next to the process that trains."""
    ranks = max(1, checks.local_ranks(fetching.rank))
    maximum = max(1, int(usable / ranks) - 1)
    needed = fetching.needed_workers
    return maximum if needed is None else min(needed + 1, maximum)


def _harm(fetching: Fetching, usable: float, workers: int) -> Iterator[Evidence]:
    """What the surplus costs; nothing where idle workers do no harm."""
    rank, needed = fetching.rank, fetching.needed_workers
    crowded = checks.is_crowded(rank) and checks.are_workers_the_crowd(rank)
    crowded = crowded and checks.threads_of_worker(rank) <= 1
    if workers > usable and crowded and not checks.is_kept_busy(rank):
        yield Evidence("threads that want to run", median(rank.machine["runnable"]) or 0.0)
        switches = checks.switches_per_s(rank)
        if switches is not None:
            yield Evidence("involuntary context switches", switches, "1/s")
    fine = checks.share_of(rank, fetching.lost) <= thresholds.INPUT_FINE
    spare = needed is not None and (fetching.workers or 0) >= thresholds.SPARE_WORKERS * needed
    if not (fine and spare):
        return
    held, total = _ram_of_workers(fetching), rank.header.ram_bytes
    free = median(rank.machine["ram_available_bytes"])
    if held and total and free is not None:
        scarce = free < thresholds.RAM_AVAILABLE * total
        if scarce and held >= thresholds.RAM_OF_WORKERS * total:
            yield Evidence("RAM of the workers", held, "bytes")
            yield Evidence("RAM that is available", free, "bytes")
    if workers > usable:
        yield Evidence("lost by waiting for batches", checks.share_of(rank, fetching.lost))


def _ram_of_workers(fetching: Fetching) -> float | None:
    rows = fetching.rank.workers
    rows = rows[rows["rss_bytes"] >= 0]
    return median(checks.by_time(rows, "rss_bytes"))


TOO_MANY_WORKERS: Final = Rule((_TOO_MANY_WORKERS_KIND,), _find_too_many_workers, each_rank=True)


# ---
# Each epoch begins with a wait: workers are started, and import and read, from nothing.


_EPOCH_START_KIND: Final = "epoch_start"


def _find_epoch_start(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _EPOCH_START_KIND)))
    if few or not is_measured(rank):
        return
    loader = checks.training_loader(rank.header)
    lost = checks.epoch_start_lost(rank)
    share = checks.share_of(rank, lost)
    starts = (rank.steps["flags"] & EPOCH_START) != 0
    if share < thresholds.NOTICEABLE:
        return
    count = int(starts.sum())
    if count < thresholds.LEAST_EVENTS:
        yield Unknown(
            _EPOCH_START_KIND, "only one epoch began while it was watched", "watch two epochs"
        )
        return
    wait = float(np.median(lost[starts]))
    place = _begun_for_a_batch(rank, len(rank.steps) / count)
    title = f"The start of an epoch costs {wait:.2g} s, {checks.in_percent(share)} of the time"
    cause, fix = _why_and_fix(loader, count)
    begun, first_s = None, Fetching(rank).first_batch_s
    if first_s is not None and first_s >= _MOSTLY_FIRST * wait:
        title += f": the first batch of a worker needs {duration(first_s)}"
        if (slow := Fetching(rank).slow_line) is not None:
            title, begun = f"{title}, most of it at {slow}", slow.place
        cause, fix = _BEGINS.cause, Fix(f"{_BEGINS.action}; {fix.action}", settings=fix.settings)
    if place is not None:
        title = "Each step starts a new pass over the data for one batch, "
        title += f"{checks.in_percent(share)} of the time"
        cause, fix = RESTARTED_ITERATOR.cause, Fix(RESTARTED_ITERATOR.action)
        if loader is not None and _starts_workers(loader):
            cause = f"{cause}; each pass starts {plural(loader.num_workers, 'worker process')}"
    yield Finding(
        _EPOCH_START_KIND,
        severity(share),
        title,
        (
            Evidence("wait at the start of an epoch", wait, "s"),
            Evidence("epochs that began", float(count)),
            Evidence("steps between them", len(rank.steps) / count),
        ),
        cause,
        (fix,),
        _confidence(loader),
        share,
        place or begun or checks.loader_place(rank.header),
    )


#: Of the wait at the start of an epoch, what a worker's first batch must be of it to be the cause.
_MOSTLY_FIRST: Final = 0.5
_BEGINS: Final = ScriptHabit(
    "What the data set does when a worker begins is in its first batch: a shuffle buffer that is "
    "filled, files that are opened or read",
    "let the data set begin with less (a shuffle buffer of some batches, with the files themselves "
    "in random order), or do it once, in __init__",
)
#: Steps from one start of the DataLoader to the next, on average, below which most steps have one.
_HARDLY_TWO: Final = 1.5


def _begun_for_a_batch(rank: RankView, between: float) -> Place | None:
    """The line that starts a pass over the data for each step; ``None``: passes have more than one
    batch."""
    if between >= _HARDLY_TWO or rank.header.learning.restarted is None:
        return None
    return Place.parse(rank.header.learning.restarted)


#: Of the epochs, those before which the script must have made the DataLoader.
_MADE_AGAIN: Final = 0.5


def _starts_workers(loader: WatchedLoader | None) -> bool:
    return loader is not None and loader.num_workers > 0 and not loader.persistent_workers


def _confidence(loader: WatchedLoader | None) -> Confidence:
    if loader is None:
        return "possible"
    return "certain" if _starts_workers(loader) else "likely"


def _why_and_fix(loader: WatchedLoader | None, epochs: int) -> tuple[str, Fix]:
    if loader is not None and loader.num_workers and loader.made >= _MADE_AGAIN * epochs:
        return MADE_AGAIN.cause, Fix(MADE_AGAIN.action)
    if loader is not None and _starts_workers(loader):
        return (
            restarted_workers(loader.num_workers),
            Fix("set persistent_workers=True", settings={"persistent_workers": "True"}),
        )
    if loader is not None and loader.num_workers:
        return (
            "Each epoch starts with an empty queue of batches",
            Fix("make epochs longer: a sampler that goes through the data several times"),
        )
    return (
        "In each epoch the DataLoader's iterator, its order of samples and its first batch are "
        "created while the training waits",
        Fix(
            "make epochs longer, or keep the workers: num_workers=1 or more with "
            "persistent_workers=True"
        ),
    )


SLOW_EPOCH_START: Final = Rule((_EPOCH_START_KIND,), _find_epoch_start, each_rank=True)


# ---
# Rules about what DataLoader workers copy: open files, random generators, a data set that each of
# them iterates whole.
#
# The recorder looks in the workers' first batches (:mod:`trainfit.watch.recorder.first_batches`);
# `trainfit loader` finds the same by trying it.


def _find_copies(view: RunView) -> Iterator[Finding | Unknown]:
    """Each is said whatever it costs: it spoils what is learned, or crashes one day."""
    rank = view.judged
    copies, settings = rank.header.copies, checks.loader_settings(rank.header)
    place = checks.loader_place(rank.header)
    findings: list[Finding] = []
    if copies.handles and settings is not None and settings.start_method == "fork":
        findings.append(worker_copies.shared_handle(copies.handles, "warning", "likely"))
    if copies.same_batches:
        same = "The first batches of two workers are the same, and differ from one another"
        findings.append(worker_copies.not_sharded(same, "critical", "likely"))
    if 0 < copies.empty < copies.workers:
        fed = copies.workers - copies.empty
        findings.append(
            worker_copies.too_few_shards("empty_workers", fed, copies.workers, "warning", "likely")
        )
    yield from (dataclasses.replace(finding, place=place) for finding in findings)
    for paths, by_workers in ((copies.by_workers, True), (copies.by_epochs, False)):
        if paths:
            yield worker_copies.generator_copied(paths, "warning", by_workers=by_workers)


COPIES: Final = Rule(
    ("shared_handle", "generator_copied", "iterable_not_sharded", "empty_workers"),
    _find_copies,
    each_rank=True,
)
