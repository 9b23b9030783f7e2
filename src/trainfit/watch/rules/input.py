"""Rules about where batches come from: the DataLoader, its workers, and copies to the GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.findings.fixes import MORE_SHARDS
from trainfit.results.findings import Confidence, Evidence, Finding, Fix, Unknown
from trainfit.results.runs.watched import GrowingVariable
from trainfit.results.text import count, duration, three_digits
from trainfit.watch import checks, thresholds
from trainfit.watch.rules import main_thread, workers
from trainfit.watch.rules.fetching import Fetching, is_measured
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import RankView, RunView, known

# ---
# The training waits for batches: why, and how many workers would do.


_INPUT_BOUND_KIND: Final = "input_bound"
#: Slow samples that are shown; batches that a worker should hold at most.
_SHOWN: Final = 4
_MOST_PREFETCHED: Final = 32
#: Said of workers only where the run itself has the cores, or a batch is cheap.
USELESS: Final = "workers would not help"

_LESS_WORK: Final = {
    "disk": "copy the data to a local disk or into RAM, or pack it into larger files",
    "decode": "decode less: store smaller or already decoded samples, or use a faster decoder",
    "transform": "move augmentations to the GPU, or store what does not change between epochs",
    "collate": "return tensors from the data set and collate them in one torch.stack",
    "sleep": "remove the sleep",
    "lock": "hold the lock for less",
    "network": "keep a local copy of the data, or fetch several samples with one request",
    "": "make a batch cheaper: smaller samples, augmentations on the GPU",
}
#: Where no GPU could take the augmentations.
_ON_CPU: Final = {
    "transform": "use cheaper augmentations, or store what does not change between epochs",
    "": "make a batch cheaper: smaller samples, fewer augmentations",
}


#: Why a run waits for batches, and what to do.
_Why = tuple[str, Fix, Confidence]


def _find_input_bound(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _INPUT_BOUND_KIND)))
    if few:
        return
    if not is_measured(rank):
        yield Unknown(
            _INPUT_BOUND_KIND, "no wait for a DataLoader was recorded", "a loop over a DataLoader"
        )
        return
    fetching = Fetching(rank)
    if fetching.workers == 0 and _workers_would_help(fetching):
        return  # no_workers says it
    lost = fetching.lost - fetching.lost_in_turns
    share = checks.share_of(rank, lost)
    if share < thresholds.NOTICEABLE or not checks.lasts(rank, lost):
        return
    cause, fix, confidence = _why(fetching)
    if fetching.others_press and _HAND_OFF not in cause:
        # More than all of its batches cost no loader loses: that is the want of a core.
        maximum = _made_s(fetching) * len(rank.steps) / rank.seconds
        if (share := min(share, maximum)) < thresholds.NOTICEABLE:
            return
    # Where no setting of the DataLoader helps, what a batch's time goes to is to be changed.
    is_late = (fetching.queued_while_waiting or 0) >= 1 and not fetching.outweighs
    is_shards = _fed(fetching) is not None or _left_alone(fetching) is not None
    is_elsewhere = is_late or fetching.is_locked or is_shards
    slow = None if fix.settings or is_elsewhere else fetching.slow_line
    reason = _reason(fetching, cause)
    if (cache := _lost_cache(fetching)) is not None:
        cause, fix = _with_lost_cache(cache, cause, fix)
        reason += f"{'; ' if reason else ': '}`{cache.name}` is lost with the workers each epoch"
    if checks.has_gpu(rank) and not checks.has_events(rank):
        confidence = "possible"  # the GPU may have had work meanwhile
    # Cheap batches, and those that only lack a core when they are there, cost what little they do
    # with any settings.
    is_core = fetching.others_press and is_late and not fetching.is_large
    usual = (slow is None and not fetching.workers and fetching.is_cheap) or is_core
    yield Finding(
        _INPUT_BOUND_KIND,
        "info" if usual and share < thresholds.CRITICAL_SHARE else severity(share),
        f"Waiting for batches costs {checks.in_percent(share)} of the time{reason}",
        tuple(_evidence(fetching, share)),
        cause,
        (fix,),
        confidence,
        share,
        fetching.place if slow is None else slow.place,
    )


#: What a data set looks samples up in, by their index.
_KEPT_IN: Final = ("dict", "OrderedDict", "defaultdict", "cache")


def _lost_cache(fetching: Fetching) -> GrowingVariable | None:
    """What the data set keeps samples in, in workers that end with each epoch."""
    loader = fetching.loader
    if loader is None or not loader.num_workers or loader.persistent_workers:
        return None
    variables = (e for e in fetching.rank.header.worker_growing if e.kind in _KEPT_IN)
    kept = [variable for variable in variables if variable.item_bytes or variable.kind == "cache"]
    # The same is reached from the script's modules by another name.
    return min(kept, key=lambda each: not each.name.startswith("self."), default=None)


def _with_lost_cache(cache: GrowingVariable, cause: str, fix: Fix) -> tuple[str, Fix]:
    return (
        f"`{cache.name}` ({cache.place}) is filled in each worker, and lost when the workers end "
        f"with the epoch: the next one makes all samples once more. {cause}",
        Fix(
            "set persistent_workers=True, so that what was kept is there in the next epoch (each "
            "worker keeps its own), or fill it before the workers start, in __init__, as a tensor "
            f"that they share; {fix.action}",
            settings={"persistent_workers": "True", **fix.settings},
        ),
    )


def _made_s(fetching: Fetching) -> float:
    """Seconds that the batches of a step cost who makes them; infinite: not measured."""
    every = known(fetching.rank.fetches["fetch_s"])
    return float(np.mean(every)) * fetching.batches_per_step if len(every) else math.inf


def _reason(fetching: Fetching, cause: str) -> str:
    """A clause on what holds batches up where it is no lack of workers."""
    if fetching.is_locked:
        return ": workers wait for a lock"
    if (fed := _fed(fetching)) is not None:
        return f": {fed} of {fetching.rank.header.copies.workers} workers get samples"
    if (alone := _left_alone(fetching)) is not None:
        who = f"{alone[0]} of {fetching.workers} workers {_makes(alone[0])} them"
        return f": {who} for {alone[1]:.0%} of the time, as the others' shards are at their end"
    if fetching.workers and fetching.is_uneven:
        return ": few of them take long"
    if (fetching.queued_while_waiting or 0) >= 1 and not fetching.outweighs:
        return ": the transfer of those that are ready is slow" if _HAND_OFF in cause else ""
    return f": {fetching.slow_code}" if fetching.slow_code else ""


def _workers_would_help(fetching: Fetching) -> bool:
    return fetching.most_workers != 0 and not fetching.is_cheap


def _evidence(fetching: Fetching, share: float) -> Iterator[Evidence]:
    rank = fetching.rank
    yield Evidence("lost by waiting for batches", share * rank.seconds / len(rank.steps), "s/step")
    step_s = checks.step_without_input(rank)
    if step_s is not None:
        yield Evidence("step without that", step_s, "s")
    if fetching.fetch_s is not None:
        who = "a worker" if fetching.workers else "the training"
        yield Evidence(f"a batch costs {who}", fetching.fetch_s, "s")
    if fetching.cpu_s is not None:
        yield Evidence("CPU time of a batch", fetching.cpu_s, "s")
    part, of_fetch = fetching.part
    if part:
        yield Evidence(f"{part}, share of a batch's time", of_fetch)
    if (line := fetching.slow_line) is not None:
        share = line.count / fetching.rank.header.fetch_code.looks
        yield Evidence(f"{line}, share of a batch's time", share)
    if fetching.workers is not None:
        yield Evidence("num_workers", float(fetching.workers))
    if fetching.cores is not None:
        yield Evidence("busy cores", fetching.cores.busy, "cores")
        yield Evidence("usable cores", fetching.cores.usable, "cores")
    if fetching.queued_while_waiting is not None:
        yield Evidence("batches that were ready", fetching.queued_while_waiting)


def _why(fetching: Fetching) -> _Why:
    needed, workers = fetching.needed_workers, fetching.workers
    cores, usable = fetching.cores, fetching.usable
    if workers == 0 and fetching.is_cheap:
        return _cheap(fetching)
    if fetching.is_locked and workers:
        return _locked(fetching)
    if (fed := _fed(fetching)) is not None:
        return _few_shards(fetching, fed)
    if (alone := _left_alone(fetching)) is not None:
        return _uneven_shards(*alone)
    if workers and fetching.is_uneven:
        return _uneven(fetching)
    if usable is not None and _fills(fetching, usable):
        return _saturated(fetching, usable)  # which also makes ready batches late
    # Where other programs fill the cores, also batches that are ready come late.
    waits = fetching.waits and cores is not None and cores.saturated
    if waits and needed is not None and workers and needed > workers:
        return _more_workers(fetching, needed, workers)
    if workers and (fetching.queued_while_waiting or 0) >= 1:
        return _transfer(fetching, "The workers' batches are ready, but")
    if needed is None or workers is None:
        return (
            "What a batch costs in a worker was not recorded",
            Fix("run `trainfit loader`, which measures the DataLoader alone"),
            "possible",
        )
    if cores is not None and cores.saturated and not fetching.waits:
        return _saturated(fetching, cores.usable)
    if needed > workers:
        return _more_workers(fetching, needed, workers)
    if (fetching.unevenness or 0.0) >= thresholds.UNEVEN_FETCHES:
        return _uneven(fetching)
    return _transfer(fetching, "The workers make batches fast enough, but these")


def _fed(fetching: Fetching) -> int | None:
    """How many workers get samples, where others of a data set that is iterated get none and would
    help; ``None``: all get some, or those that do have all cores."""
    copies, cores = fetching.rank.header.copies, fetching.cores
    if not 0 < copies.empty < copies.workers or fetching.is_locked:
        return None
    fed = copies.workers - copies.empty
    if fetching.needed_workers is not None and fetching.needed_workers <= fed:
        return None
    full = cores is not None and cores.saturated and not fetching.others_press
    return None if full and not fetching.waits else fed


def _few_shards(fetching: Fetching, fed: int) -> _Why:
    many = fetching.rank.header.copies.workers
    less = _less_work(fetching)
    return (
        f"Only {fed} of {many} workers make batches: the data set has no more shards",
        Fix(f"{MORE_SHARDS}; or {less}"),
        "likely",
    )


#: Parts of the time in which the workers that make batches are counted, and batches of each worker
#: that there must be in a part on average: one that makes none then has come to its end.
_TIMES: Final = 20
_BATCHES: Final = 3
#: Of the waits, those while others have come to their end, from which that is the cause.
_OF_THE_WAITS: Final = 0.5


def _left_alone(fetching: Fetching) -> tuple[int, float] | None:
    """How many workers of a data set that is iterated still make batches where most waits are,
    after others have come to the end of their shards, and the share of the time that is so;
    ``None``: it is not so."""
    loader, rank = fetching.loader, fetching.rank
    rows = rank.fetches
    if loader is None or loader.batches is not None or fetching.is_locked:
        return None
    fed = loader.num_workers - rank.header.copies.empty
    if fed < 2 or len(rows) < _BATCHES * _TIMES * fed:
        return None
    edges = np.linspace(*rank.window, _TIMES + 1)
    began, ended = rows["end_s"] - rows["fetch_s"], rows["end_s"]
    makes = np.array(
        [
            len(np.unique(rows["worker"][(ended >= first) & (began <= last)]))
            for first, last in itertools.pairwise(edges)
        ]
    )
    of_steps = makes[np.clip(np.searchsorted(edges, rank.steps["end_s"]) - 1, 0, _TIMES - 1)]
    few, waited = of_steps < fed, fetching.waited
    if float(waited[few].sum()) < _OF_THE_WAITS * float(waited.sum()):
        return None
    return int(np.median(of_steps[few])), float(np.mean(makes < fed))


def _makes(workers: int) -> str:
    return "makes" if workers == 1 else "make"


def _uneven_shards(left: int, share: float) -> _Why:
    return (
        f"Workers share out whole shards, and these differ in size: for {share:.0%} of the time "
        f"{count(left, 'worker')} alone {_makes(left)} batches",
        Fix(
            "make shards of equal size, many small ones (several a worker, the largest first), or "
            "share out samples instead of files"
        ),
        "likely",
    )


def _locked(fetching: Fetching) -> _Why:
    _, share, line = fetching.waits_for
    text = f" at {line.place}" if line is not None and line.place else ""
    return (
        f"Workers wait for a lock{text} for {checks.in_percent(share)} of the time that a batch "
        "needs: they make samples one after the other",
        Fix(
            f"more {USELESS}: open the file or the connection in each worker (at its first sample, "
            "or in worker_init_fn), so that no lock is needed, or hold the lock for less"
        ),
        "likely",
    )


def _less_work(fetching: Fetching) -> str:
    part, _ = fetching.part
    if fetching.habit is not None:
        return fetching.habit.action
    if not checks.has_gpu(fetching.rank):
        return _ON_CPU.get(part, _LESS_WORK[part])
    return _LESS_WORK[part]


def _cheap(fetching: Fetching) -> _Why:
    return (
        "A batch is made as quickly as the training could take it from a worker",
        Fix(f"{USELESS}; {_less_work(fetching)}"),
        "likely",
    )


_HAND_OFF: Final = "hand-off"


def _transfer(fetching: Fetching, which: str) -> _Why:
    on_gpu = checks.has_gpu(fetching.rank)
    hand_off = "transfer between processes and pinning" if on_gpu else "transfer between processes"
    cause = f"{which} reach the main process late ({_HAND_OFF}: {hand_off})"
    if fetching.is_cheap:
        return (
            cause,
            Fix(
                "set num_workers=0: to make such a batch costs no more than to take it from a "
                "worker",
                settings={"num_workers": "0"},
            ),
            "likely",
        )
    if fetching.others_press and not fetching.is_large:
        return _without_cores(fetching, f"{which} reach the main process late")
    return (
        cause,
        Fix(
            "send less through it: uint8 instead of float32, tensors (which go through "
            "shared memory) instead of arrays, lists and objects (which are pickled), fewer and "
            f"larger tensors; {'set pin_memory=True; ' if on_gpu else ''}keep the main thread free "
            "between steps"
        ),
        "likely",
    )


def _fills(fetching: Fetching, usable: float) -> bool:
    """Do the workers keep all cores busy, and could not make batches as fast as they are used, or
    do the run's threads take turns?"""
    rank = fetching.rank
    busy = fetching.cores.saturated if fetching.cores else (fetching.workers or 0) >= usable
    # Workers that mostly wait fill no core, however many the training could use; where batches are
    # ready all the same, it is the main process that gets none.
    fills_none = fetching.waits and fetching.others_press and not fetching.queued_while_waiting
    demand = 0.0 if fills_none else fetching.cores_needed or 0.0
    return busy and (_crowded(rank, usable) or demand > usable)


def _crowded(rank: RankView, usable: float) -> bool:
    """Do the run's workers take turns on the cores?"""
    crowded = bool(checks.is_crowded(rank)) and checks.is_of_run(rank, usable)
    return crowded and checks.are_workers_the_crowd(rank)


def _saturated(fetching: Fetching, usable: float) -> _Why:
    part, _ = fetching.part
    text, demand = "", fetching.cores_needed
    if demand and demand > usable:
        text = f": the batches need {demand:.1f} cores, {usable:g} are usable"
    return _without_cores(
        fetching, f"All cores are busy{f' ({_named(part)})' if part else ''}{text}"
    )


def _without_cores(fetching: Fetching, cause: str) -> _Why:
    """No core is idle: where the run itself has them, a worker more gets none. What it would take
    from other programs is told by no figure of the run."""
    threads, usable = checks.threads_of_worker(fetching.rank), fetching.usable
    many = threads > 1 and usable is not None
    if fetching.others_press:
        others = (
            "stop the other programs and watch again, or run `trainfit loader`, which tries more "
            "workers"
        )
        less = _less_work(fetching)
        # What is known to be done for nothing costs time on any machine.
        action = f"{less}; or {others}" if fetching.habit is not None else f"{others}; or {less}"
        cause += f"; other programs keep {fetching.others:.1f} of them busy"
        many = many and (fetching.workers or 0) * threads > (usable or 0.0)
    elif (of_main := _threads_of_main(fetching)) > 1:
        # Threads that wait for each other keep cores busy, too: a worker may need fewer.
        action = (
            f"run `trainfit loader`, which tries workers: each makes batches with one thread, the "
            f"training with {of_main}"
        )
        return (f"{cause} with the threads of the training", Fix(action), "possible")
    else:
        action = f"more {USELESS}; {_less_work(fetching)}"
        many = many and _crowded(fetching.rank, usable or 0.0)
    if many and fetching.habit is not None:
        action += f"; limit the {threads} threads in each worker"
    elif many:
        action = f"first limit the {threads} threads in each worker; {action}"
    return (cause, Fix(action), "possible" if fetching.others_press else "likely")


def _threads_of_main(fetching: Fetching) -> int:
    """The threads of libraries in the process that makes the batches itself; 1 where workers do."""
    return 1 if fetching.workers else max(fetching.rank.header.threads.values(), default=1)


def _more_workers(fetching: Fetching, needed: int, workers: int) -> _Why:
    part, _ = fetching.part
    maximum = fetching.most_workers
    cause = f"Too few workers: {workers} of {needed} needed"
    if part:
        cause += f" (most of a batch's time: {_named(part)})"
    value = needed if maximum is None else min(needed, maximum)
    if value <= workers:
        return _without_cores(fetching, f"{cause}, and no core is idle")
    action = f"set num_workers={value}"
    if value < needed:
        action += f" (more would need more idle cores), and {_less_work(fetching)}"
    elif part == "disk":
        action += f"; if the disk is the limit, {_less_work(fetching)}"
    elif fetching.waits_for[0] == "sleep":
        action += f"; or {_less_work(fetching)}"
    sure: Confidence = "possible" if part == "disk" or maximum is None else "likely"
    return (cause, Fix(action, settings={"num_workers": str(value)}), sure)


def _uneven(fetching: Fetching) -> _Why:
    loader, workers = fetching.loader, fetching.workers or 1
    now = 2 if loader is None or loader.prefetch_factor is None else loader.prefetch_factor
    times = fetching.unevenness
    slow, every = fetching.slow_batch_s, fetching.best_every_s
    which = _slow_samples(fetching)
    if slow is not None and fetching.fetch_s:
        cause = (
            f"Some batches take {duration(slow)}, {three_digits(slow / fetching.fetch_s)} times as "
            f"long as usual, and later ones wait for them{which}"
        )
    else:
        cause = (
            f"Some batches take {times:.1f} times as long as usual, and later ones wait for them"
        )
    value = max(4, 2 * now)
    if slow is not None and every:
        # The others' batches have to last until a slow one is there.
        value = max(value, 1 << math.ceil(math.log2(slow / every / workers + 1)))
    value = min(value, _MOST_PREFETCHED)
    less = f"; make {which.removeprefix(': ')} cheaper" if which else ""
    if fetching.waits_for[0] == "sleep":
        less += f"; {_less_work(fetching)}"
    if not fetching.keeps_up:
        less += "; the slow ones alone need more workers than there are, or less work"
    return (
        cause,
        Fix(
            f"set prefetch_factor={value}, so that ready batches bridge the slow ones; "
            f"batch samples of similar cost{less}",
            settings={"prefetch_factor": str(value)},
        ),
        "likely",
    )


def _slow_samples(fetching: Fetching) -> str:
    """A clause on the samples that the recorder saw hold batches up."""
    slow = fetching.rank.header.slow_samples
    most = sorted(slow, key=lambda each: -slow[each])[:_SHOWN]
    if not most:
        return ""
    more = ", …" if len(slow) > len(most) else ""
    seconds = float(np.median(list(slow.values())))
    return f": samples {', '.join(most)}{more} (some {duration(seconds)} each)"


def _named(part: str) -> str:
    names = {"disk": "reading", "decode": "decoding", "transform": "transforms"}
    names |= {"sleep": "sleeping", "lock": "waiting for a lock", "network": "the network"}
    return names.get(part, "collation")


INPUT_BOUND: Final = Rule((_INPUT_BOUND_KIND,), _find_input_bound, each_rank=True)


RULES: Final[tuple[Rule, ...]] = (
    INPUT_BOUND,
    workers.SLOW_WORKER,
    workers.SLOW_EPOCH_START,
    workers.NO_WORKERS,
    workers.SAMPLER_SHARE,
    workers.TOO_MANY_WORKERS,
    main_thread.UNPINNED_COPIES,
)
