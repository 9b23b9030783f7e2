"""Ranks that wait for one another: which is slow, by how much and why; time in collectives.

Data-parallel ranks all take as long as the slowest: gradients are averaged within the backward
pass, where the others wait. What tells them apart is each one's own work: everything but the
backward pass, and of that what DistributedDataParallel times as its computation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.findings import Evidence, Finding, Fix, Unknown
from trainfit.results.runs.tables import Table
from trainfit.watch import checks, thresholds
from trainfit.watch.measures import exposed_s, samples_per_step
from trainfit.watch.rules.code_lines import CostlyLine, costliest
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.rules.fetching import Fetching
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import PHASES, RankView, RunView, median

#: Blocks of steps in which a rank must be behind; of these, those in which it may be ahead; and the
#: percentile of its blocks that is its best pace.
_LEAST_BLOCKS: Final = 3
_LEAST_STEPS: Final = _LEAST_BLOCKS * thresholds.BLOCK_STEPS
_IN_TURNS: Final = 0.25
_AT_BEST: Final = 25
#: Of the time that other programs hold up each of the ranks, what one may lose more than another by
#: chance: who waits for a slow rank needs no core meanwhile, and is hardly held up.
_BY_CHANCE: Final = 0.5
#: Samples of a step over the others', from which they are the cause.
_MORE_SAMPLES: Final = 1.1
_PARTS: Final = {
    "input": "its DataLoader",
    "copy": "copies to the GPU",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations",
    "other": "Python code between the phases",
}


def find_uneven_ranks(run: RunView) -> Iterator[Finding | Unknown]:
    """A rank that is slower than the others."""
    world = run.run.header.world_size
    if world < 2:
        return
    if len(run.ranks) < world:
        reason = f"{len(run.ranks)} of {world} ranks were recorded"
        yield Unknown("straggler", reason, "the folders of the other machines, merged")
    ranks = [view for view in run.ranks if len(view.steps) >= _LEAST_STEPS]
    if len(ranks) < 2:
        yield Unknown("straggler", "too few steps", f"{_LEAST_STEPS} steps of two ranks")
        return
    yield from _straggler(ranks)


def _straggler(ranks: list[RankView]) -> Iterator[Finding | Unknown]:
    steps = [_common(view, ranks) for view in ranks]
    if len(steps[0]) < _LEAST_STEPS:
        yield Unknown(
            "straggler", "too few steps that all ranks have", f"{_LEAST_STEPS} such steps"
        )
        return
    called = [view.header.communication.called_s or 0.0 for view in ranks]
    backward = _computing_backward(ranks)
    work = np.array(
        [
            [_seconds(each, part, *times) for part in _PARTS]
            for each, *times in zip(steps, called, backward, strict=True)
        ]
    )
    step_s = max(float(np.nanmedian(step["step_s"])) for step in steps)
    own, mean = work.sum(axis=1), work.mean(axis=2)
    slowest = int(own.mean(axis=1).argmax())
    others = np.delete(np.arange(len(ranks)), slowest)
    lag = float(mean.sum(axis=1)[slowest] - np.median(mean.sum(axis=1)[others]))
    least = thresholds.STRAGGLER * step_s
    held_up = np.array([CoreWaits(view).held_up_by_others or 0.0 for view in ranks])
    # By what other programs take of its core more than of the others' it is not slower itself.
    usual = float(np.median(held_up[others])) * _more_on_core(ranks, slowest)
    lag -= step_s * max(0.0, float(held_up[slowest]) - usual)
    lag -= step_s * _BY_CHANCE * float(held_up.min())
    if lag < least or not _lasting(own, slowest, least):
        return
    part = list(_PARTS)[int((mean[slowest] - np.median(mean[others], axis=0)).argmax())]
    rank, share = ranks[slowest].header.rank, lag / step_s
    line = _line_of(ranks, slowest, part, mean[:, list(_PARTS).index("other")], lag)
    cause, fix, evidence, is_its_work = _why(ranks, slowest, part, lag, step_s, line)
    yield Finding(
        "straggler",
        severity(share),
        f"Rank {rank} is slower than the others, which wait for it",
        (
            Evidence(f"own work of rank {rank}", float(mean[slowest].sum()), "s/step"),
            Evidence(
                "own work of the others, median",
                float(np.median(mean.sum(axis=1)[others])),
                "s/step",
            ),
            *evidence,
            *_in_collectives(ranks, slowest),
        ),
        cause,
        (Fix(fix),),
        "likely",
        share,
        line.place if line is not None and is_its_work else None,
        rank=rank,
    )


def _line_of(
    ranks: list[RankView], slowest: int, part: str, other_s: NDArray[np.float64], lag: float
) -> CostlyLine | None:
    """The script's line of that part that makes the rank slower; ``None``: no line is known to.

    Of Python code between the phases, ``other_s`` seconds a step on each rank, it is one at which
    this rank spends at least half of the ``lag`` more than any other does.
    """
    if part == "input":
        return Fetching(ranks[slowest]).slow_line
    line = costliest(ranks[slowest].header.other_code)
    if part != "other" or line is None or line.count < thresholds.LOOKS_AT_LINE:
        return None
    at_line = [_share_at(view, line) for view in ranks] * other_s
    return line if at_line[slowest] - np.delete(at_line, slowest).max() >= lag / 2 else None


def _share_at(view: RankView, line: CostlyLine) -> float:
    """The share of a rank's looks at Python code between the phases that found it at a line."""
    found = costliest(view.header.other_code)
    if found is None or found.place != line.place:
        return 0.0
    return found.count / max(1, sum(each.count for each in view.header.other_code.lines))


def _computing_backward(ranks: list[RankView]) -> list[float]:
    """Seconds of a step in which each rank computes its backward pass; 0 of all where one's are not
    known, or the others do not wait in collectives for the one that computes longest.

    DDP gives means, with those of the first passes: none is taken for longer than the median pass.
    """
    times = [view.header.communication.gradients for view in ranks]
    computed, exposed = [], []
    for view, time in zip(ranks, times, strict=True):
        column = "gpu_backward_s" if checks.has_gpu(view) else "backward_s"
        usual = median(view.steps[column])
        if time is None or usual is None or time.by != (times[0] or time).by:
            return [0.0] * len(ranks)
        computed.append(min(time.backward_s, usual))
        exposed.append(time.exposed_s)
    longest = int(np.argmax(computed))
    is_waited_for = exposed[longest] <= min(exposed)
    return computed if is_waited_for else [0.0] * len(ranks)


def _more_on_core(ranks: list[RankView], slowest: int) -> float:
    """The factor by which the slowest is on a core more than the others: who computes more waits
    more often for a core that other programs use, too."""
    usual = float(np.median([_on_core(rank) for n, rank in enumerate(ranks) if n != slowest]))
    return max(1.0, _on_core(ranks[slowest]) / usual) if usual > 0 else 1.0


def _on_core(view: RankView) -> float:
    """Share of a step in which the main thread is on a core; 0: not measured."""
    share = median(view.steps["cpu_s"] / view.steps["step_s"])
    return share or 0.0


def _why(
    ranks: list[RankView],
    slowest: int,
    part: str,
    lag: float,
    step_s: float,
    line: CostlyLine | None,
) -> tuple[str, str, tuple[Evidence, ...], bool]:
    """The cause, what to do, and what tells it: the rank's core, its data or its computation; and
    whether it is what the rank does, for which ``line`` is to blame, and not how much it is given.
    """
    others = [view for place, view in enumerate(ranks) if place != slowest]
    slow, name = ranks[slowest], _PARTS[part]
    rank = slow.header.rank
    most = f"most of the difference is {name}"
    waits = CoreWaits(slow).main_thread or 0.0
    theirs = float(np.median([CoreWaits(view).main_thread or 0.0 for view in others]))
    expected = theirs * _more_on_core(ranks, slowest)
    if step_s * (waits - expected) >= lag / 2:
        return (
            f"its core: its main thread is ready and has none; {most}",
            "give each rank cores of its own (taskset, numactl), and start no more threads and "
            "workers than there are cores (OMP_NUM_THREADS, num_workers)",
            (
                Evidence(f"rank {rank} ready without a core", waits),
                Evidence("the others, median", theirs),
            ),
            False,
        )
    more = samples_per_step(slow)
    usual = [found for view in others if (found := samples_per_step(view)) is not None]
    if more is not None and usual and more > _MORE_SAMPLES * (fewer := float(np.median(usual))):
        return (
            f"its data: it has more samples in a step than the others; {most}",
            "give all ranks batches of the same size (DistributedSampler, drop_last=True)",
            (
                Evidence(f"samples of rank {rank}", more, "samples/step"),
                Evidence("samples of the others, median", fewer, "samples/step"),
            ),
            False,
        )
    sizes, given = _input_elements(slow), [_input_elements(view) for view in others]
    if sizes and all(given) and sizes > _MORE_SAMPLES * (smaller := float(np.median(given))):
        return (
            f"its data: its batches are larger, with as many samples (longer ones, most likely); "
            f"{most}",
            "give all ranks samples of the same length: shuffle them over the ranks "
            "(DistributedSampler with set_epoch), or put samples of one length into each step's "
            "batches of all ranks",
            (
                Evidence(f"elements of a batch of rank {rank}", sizes),
                Evidence("of the others, median", smaller),
            ),
            False,
        )
    whose, what = "its data" if part == "input" else "its computation", f"compare {name}"
    if part == "input":
        what = f"compare what rank {rank}'s data set does, its storage and its workers"
    if line is not None:
        what = f"compare what {line} does on rank {rank}"
        most += f", at {line}"
    elif part != "input":
        what += f" of rank {rank}'s machine"
    is_unknown = line is None and part != "input"
    likely = " (samples of the same length, a GPU of the same kind)" if is_unknown else ""
    return (
        f"{whose}: {most}, with as many samples",
        f"{what} with the others'; give all ranks as much work{likely}",
        (),
        True,
    )


def _input_elements(view: RankView) -> float:
    """The median number of elements of the largest tensor that a model is given in a step; 0: not
    looked at."""
    sizes = [elements for _, elements in view.header.input_sizes]
    return float(np.median(sizes)) if sizes else 0.0


def _in_collectives(ranks: list[RankView], slowest: int) -> Iterator[Evidence]:
    """How long the slow one and the others are in collectives, where both were measured."""
    ours = exposed_s(ranks[slowest])
    known = (exposed_s(view) for place, view in enumerate(ranks) if place != slowest)
    theirs = [value for value in known if value is not None]
    if ours is not None and theirs:
        yield Evidence("in collectives", ours, "s/step")
        yield Evidence("the others in collectives, median", float(np.median(theirs)), "s/step")


def _common(view: RankView, ranks: list[RankView]) -> Table:
    """The rank's steady steps that all ranks have."""
    shared = functools.reduce(np.intersect1d, [rank.steps["step"] for rank in ranks])
    _, places = np.unique(view.steps["step"], return_index=True)
    steps: Table = view.steps[places]
    steps = steps[np.isin(steps["step"], shared)]
    return steps


def _lasting(own: NDArray[np.float64], slowest: int, least: float) -> bool:
    """Is a rank ``least`` seconds a step behind the others' median, and not by chance? ``own`` is
    each rank's own work in each step (a row a rank).

    Other programs hold up one rank or the other, for a while, and only ever make its work longer:
    a rank that is slow by itself is so in its best blocks of steps, too, and hardly ever ahead.
    """
    length = thresholds.BLOCK_STEPS
    starts = np.arange(0, own.shape[1] - length + 1, length)
    blocks = np.add.reduceat(own[:, : len(starts) * length], starts, axis=1) / length
    others = np.delete(blocks, slowest, axis=0)
    behind = blocks[slowest] - np.median(others, axis=0)
    at_best = np.percentile(blocks, _AT_BEST, axis=1)
    gap = at_best[slowest] - np.median(np.delete(at_best, slowest))
    later, earlier = int(np.sum(behind >= least)), int(np.sum(behind <= -least))
    often = max(_LEAST_BLOCKS, thresholds.LASTING * len(starts))
    return bool(gap >= least and later >= often and earlier <= _IN_TURNS * later)


def _seconds(steps: Table, part: str, called_s: float, backward_s: float) -> NDArray[np.float64]:
    """Seconds of a part in each of the steps; those of the GPU where they are longer. "other" is
    what no phase covers, waiting for the GPU or in the backward pass included among the phases,
    without the ``called_s`` that the rank spends in collectives, where it waits for others;
    "backward" the ``backward_s`` that it computes."""
    if part == "backward":
        return np.full(len(steps), backward_s)
    if part == "other":
        covered = np.sum([_column(steps, f"{name}_s") for name in PHASES], axis=0)
        rest: NDArray[np.float64] = _column(steps, "step_s") - covered - called_s
        return rest.clip(min=0.0)
    host = _column(steps, f"{part}_s")
    if part in ("forward", "optimizer", "copy"):
        host = np.fmax(host, _column(steps, f"gpu_{part}_s"))
    return host


def _column(steps: Table, name: str) -> NDArray[np.float64]:
    return np.nan_to_num(np.asarray(steps[name], dtype=np.float64))


RANKS: Final = Rule(("straggler",), find_uneven_ranks)


# ---
# Communication that the backward pass does not hide. Who is in collectives for the shortest time
# waits for nobody: what it spends there is the communication itself.


_EXPOSED_KIND: Final = "exposed_communication"
#: Of the time in collectives, that in calls of the script from which these are what is told.
_MOST: Final = 0.5


def _find_exposed_communication(run: RunView) -> Iterator[Finding | Unknown]:
    header = run.run.header
    ranks = [view for view in run.ranks if len(view.steps) >= thresholds.LEAST_STEPS]
    if header.world_size < 2 or not ranks:
        return
    times = [(exposed_s(view), view) for view in ranks]
    if any(seconds is None for seconds, _ in times):
        how = "FSDP's" if header.distributed == "fsdp" else "this training's"
        reason = f"the time in {how} collectives was not measured"
        yield Unknown(_EXPOSED_KIND, reason, "a trace of torch.profiler (DDP times its own)")
        return
    least, view = min(((seconds or 0.0, view) for seconds, view in times), key=lambda e: e[0])
    if len(run.ranks) < header.world_size or not view.seconds:
        return
    step_s = view.seconds / len(view.steps)  # what a barrier after an evaluation waits is a mean
    if least / step_s < thresholds.WARNING_SHARE:
        return
    # Whoever has no core is waited for: next to other programs even the rank that waits least does.
    # What DDP sends goes through threads of its own, each of which needs one.
    communication, line = view.header.communication, costliest(view.header.collective_code)
    of_calls = line is not None and (communication.called_s or 0.0) >= _MOST * least
    held_up = max(_held_up(rank, all_threads=not of_calls) for rank in ranks)
    share = min(1.0, least / step_s - held_up)
    if share < thresholds.WARNING_SHARE:
        reason = f"other programs keep the ranks from their cores {held_up:.0%} of the time"
        yield Unknown(_EXPOSED_KIND, reason, "a run without them")
        return
    gradients = communication.gradients
    if line is not None and of_calls:
        yield _of_calls(line, communication.called_s or 0.0, share)
        return
    measured: tuple[Evidence, ...] = ()
    if gradients is not None:
        measured = (
            Evidence("all-reduce of gradients", gradients.collectives_s, "s/step"),
            Evidence("hidden by the backward pass", gradients.hidden_s, "s/step"),
            Evidence("measured by", gradients.by),
        )
    yield Finding(
        _EXPOSED_KIND,
        severity(share),
        f"Communication makes every step {checks.in_percent(share)} longer, on all ranks",
        (Evidence("in collectives, on the rank that waits least", least, "s/step"), *measured),
        "Collectives last longer than the computation that could hide them",
        (
            Fix(
                "send less or less often: more samples on each GPU, no_sync() while gradients "
                "accumulate, fp16_compress_hook, gradient_as_bucket_view=True; `trainfit plan` "
                "with as many GPUs says what the links allow"
            ),
        ),
        "likely",
        share,
    )


def _held_up(view: RankView, *, all_threads: bool) -> float:
    """The share of the time in which a rank's main thread, or any of its threads, was ready and
    other programs had the cores; at most 1."""
    waits = CoreWaits(view)
    if not all_threads:
        return waits.held_up_by_others or 0.0
    return min(1.0, (waits.threads or 0.0) * (waits.by_others or 0.0))


def _of_calls(line: CostlyLine, seconds: float, share: float) -> Finding:
    """The finding on what the script calls itself, and not DDP in its backward pass."""
    name = line.most.calls
    is_of_objects = name.endswith(("_object", "_object_list"))
    return Finding(
        _EXPOSED_KIND,
        severity(share),
        f"{line} meets the other ranks{f' (`{name}`)' if name else ''} for "
        f"{checks.in_percent(share)} of the time",
        (Evidence("in such calls, on the rank that waits least", seconds, "s/step"),),
        "Each call waits until all ranks make it, and sends its data to them",
        (
            Fix(
                (
                    "send tensors (all_gather_into_tensor, all_reduce) instead of Python objects, "
                    "which are pickled; "
                    if is_of_objects
                    else ""
                )
                + "add up on each rank, and meet once in 50 steps or at the end of an epoch"
            ),
        ),
        "likely",
        share,
        line.place,
    )


COMMUNICATION: Final = Rule((_EXPOSED_KIND,), _find_exposed_communication)
RULES: Final = (RANKS, COMMUNICATION)
