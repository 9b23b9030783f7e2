"""Compares two runs, or two groups of runs: their set-up, and what of their speed is proven."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.watched import RunHeader, RunRecord, WatchedLoader
from trainfit.results.watch import Change, Comparison, Difference, Group, Side, Verdict
from trainfit.watch.intervals import (
    BUSY,
    COLUMNS,
    LOOKED_AT,
    SAMPLES,
    STEPS,
    TIME,
    Effect,
    EffectEstimate,
    Groups,
    Rows,
    SteadyRows,
    groups,
    measured,
    peak_gpu_bytes,
    peak_ram_bytes,
)
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.thresholds import NOTICEABLE
from trainfit.watch.view import PHASES, RunView

# ---
# What two runs were given and ran on, where it differs.


_LOADER: Final = (
    *("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "start_method"),
)
#: Fields of a header by the group that they are told in.
_FIELDS: Final[Mapping[str, Group]] = {
    "precision": "precision",
    "autocast": "precision",
    "framework": "model",
    "parameters": "model",
    "trained_parameters": "model",
    "optimizer": "model",
    "torch": "version",
    "python": "version",
    "trainfit": "version",
    "distributed": "command",
    "world_size": "command",
    "host": "hardware",
    "cpu": "hardware",
    "usable_cores": "hardware",
    "quota_cores": "hardware",
    "ram_bytes": "hardware",
}


def setup_differences(before: RunHeader, after: RunHeader) -> tuple[Difference, ...]:
    """All of them, the command first."""
    return (
        *_command(before.command, after.command),
        *_loaders(before.loaders, after.loaders),
        *_fields(before, after),
        *_mapped("command", "threads of {}", before.threads, after.threads),
        *_mapped("loader", "worker threads of {}", before.worker_threads, after.worker_threads),
        *_mapped("variable", "{}", before.variables, after.variables),
        *_told("hardware", "GPUs", gpus(before), gpus(after)),
    )


def other_hardware(before: RunHeader, after: RunHeader) -> str:
    """Why times of the two cannot be compared ("usable cores: 8 and 16"); empty: they can.

    What only one of them knows is no difference.
    """
    cores = _cores(before), _cores(after)
    pairs = (
        ("GPUs", gpus(before), gpus(after)),
        ("usable cores", *(None if core is None else f"{core:g}" for core in cores)),
        ("processor", before.cpu or None, after.cpu or None),
    )
    return "; ".join(
        f"{what}: {first} and {second}"
        for what, first, second in pairs
        if first is not None and second is not None and first != second
    )


def gpus(header: RunHeader) -> str:
    """ "2 x NVIDIA A100", or "none"."""
    names = [each.name for each in header.gpus]
    texts = [f"{names.count(name)} x {name}" for name in sorted(set(names))]
    return ", ".join(texts) or "none"


def batch_size(header: RunHeader) -> int | None:
    """The batch size of the training's DataLoader; ``None``: not known."""
    loader = next(iter(_of_training(header.loaders)), None)
    return None if loader is None else loader.batch_size


def _cores(header: RunHeader) -> float | None:
    known = [cores for cores in (header.usable_cores, header.quota_cores) if cores is not None]
    return min(known, default=None)


def _command(before: str, after: str) -> Iterator[Difference]:
    """Word by word where both have as many; else both commands as a whole."""
    words = _words(before), _words(after)
    if len(words[0]) != len(words[1]):
        yield from _told("command", "command", before, after)
        return
    for index, (one, two) in enumerate(zip(*words, strict=True)):
        earlier = words[0][index - 1] if index else ""
        what = earlier if earlier.startswith("-") else "command"
        yield from _told("command", what, one, two)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # of a quote without its end; it was no shell that wrote it
        return command.split()


def _of_training(loaders: tuple[WatchedLoader, ...]) -> tuple[WatchedLoader, ...]:
    return tuple(loader for loader in loaders if loader.role == "training") or loaders


def _loaders(
    before: tuple[WatchedLoader, ...], after: tuple[WatchedLoader, ...]
) -> Iterator[Difference]:
    before, after = _of_training(before), _of_training(after)
    yield from _told("loader", "DataLoaders", str(len(before)), str(len(after)))
    many = len(before) > 1
    for one, two in zip(before, after, strict=False):
        place = f" ({one.place})" if many else ""
        for name in _LOADER:
            values = str(getattr(one, name)), str(getattr(two, name))
            yield from _told("loader", name + place, *values)
        sizes = str(one.batch_size), str(two.batch_size)
        yield from _told("batch size", "batch size" + place, *sizes)


def _fields(before: RunHeader, after: RunHeader) -> Iterator[Difference]:
    one, two = dataclasses.asdict(before), dataclasses.asdict(after)
    for name, group in _FIELDS.items():
        values = (_text(each[name]) for each in (one, two))
        yield from _told(group, name.replace("_", " "), *values)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mapped(
    group: Group, what: str, before: Mapping[str, object], after: Mapping[str, object]
) -> Iterator[Difference]:
    for name in sorted({*before, *after}):
        values = (str(each.get(name, "")) for each in (before, after))
        yield from _told(group, what.format(name), *values)


def _told(group: Group, what: str, before: str, after: str) -> Iterator[Difference]:
    if before != after:
        yield Difference(group, what, before, after)


# ---
# Compares two runs, or two groups of runs of the same two commands.


#: Steady steps that a run needs at least.
LEAST_STEPS: Final = 30
#: Steps at the start that are not judged (:mod:`trainfit.watch.view`).
WARM_UP: Final = 10
#: A smaller effect is none, however certain it is.
LEAST_EFFECT: Final = 0.01


class ComparisonError(TrainfitError):
    """Two runs that cannot be compared."""


def compare(
    before: RunRecord, after: RunRecord, *, allow_other_hardware: bool = False
) -> Comparison:
    """Compare two runs. Raises :class:`ComparisonError` across different hardware."""
    return compare_groups((before,), (after,), allow_other_hardware=allow_other_hardware)


def compare_groups(
    before: Sequence[RunRecord], after: Sequence[RunRecord], *, allow_other_hardware: bool = False
) -> Comparison:
    """Compare runs of one command with those of another; with several of each, the intervals hold
    what differs from run to run.

    Raises :class:`ComparisonError` across different hardware.
    """
    one, two = before[0].header, after[0].header
    other = other_hardware(one, two)
    if other and not allow_other_hardware:
        raise ComparisonError(
            f"the runs are of different hardware ({other}): their times do not show the effect "
            "of a change; watch both on one machine, or give --other-hardware"
        )
    looks = [[RunView(run) for run in runs] for runs in (before, after)]
    rows = [[measured(view) for view in views] for views in looks]
    sides = [
        Side(runs[0].folder, runs[0].header.command, sum(run.steps for run in row))
        for runs, row in zip((before, after), rows, strict=True)
    ]
    differences = setup_differences(one, two)
    needs = _needs(rows)
    if needs:
        return Comparison(sides[0], sides[1], differences, (), "cannot tell", needs)
    per_sample = _differ(rows)
    changes = [*_changes(rows, per_sample), *_peaks(looks)]
    held_up = _held_up(looks)
    text = "" if held_up is None else _of_others(*held_up)
    verdict = _verdict(changes[0])
    by_others = held_up is not None and _is_theirs(changes[0], *held_up)
    return Comparison(
        sides[0],
        sides[1],
        differences,
        tuple(changes),
        "cannot tell" if by_others else verdict,
        f"two runs next to the same other programs, or none ({text})" if by_others else "",
        notes=(*((text,) if text and not by_others else ()), *_notes(before, after, rows, other)),
    )


def _held_up(looks: Sequence[Sequence[RunView]]) -> tuple[float, float] | None:
    """The shares of each side's time in which its main thread was ready and other programs had the
    cores, where these differ; ``None``: they do not, or were not measured."""
    found = []
    for views in looks:
        known = [CoreWaits(view.judged).held_up_by_others for view in views]
        shares = [held_up for held_up in known if held_up is not None]
        if len(shares) < len(known):
            return None
        found.append(float(np.mean(shares)))
    return (found[0], found[1]) if abs(found[1] - found[0]) >= NOTICEABLE else None


def _of_others(before: float, after: float) -> str:
    return (
        f"other programs kept the training from a core {before:.0%} of the time in A and "
        f"{after:.0%} in B"
    )


def _is_theirs(change: Change, before: float, after: float) -> bool:
    """Is the difference of the step time gone, or the other way round, without the time in which
    the training had no core?"""
    if change.verdict == "no difference" or not change.before or not change.after:
        return False
    own = change.after * (1 - after) / (change.before * (1 - before)) - 1
    return own <= LEAST_EFFECT if change.verdict == "more" else own >= -LEAST_EFFECT


def _needs(rows: Sequence[Sequence[SteadyRows]]) -> str:
    """What is missing; empty: nothing."""
    least = min(len(run) for runs in rows for run in runs)
    if least >= LEAST_STEPS:
        return ""
    return (
        f"{LEAST_STEPS} steady steps of each run ({LEAST_STEPS + WARM_UP} with the warm-up); one "
        f"has {least}"
    )


def _differ(rows: Sequence[Sequence[SteadyRows]]) -> bool:
    """Are times to be told for a sample, as batches have different sizes?"""
    runs = [run for row in rows for run in row]
    if not all("samples" in run.known for run in runs):
        return False
    return len({run.batch for run in runs}) > 1


def _notes(
    before: Sequence[RunRecord],
    after: Sequence[RunRecord],
    rows: Sequence[Sequence[SteadyRows]],
    other: str,
) -> Iterator[str]:
    yield (
        "step time: the mean of the steady steps, waiting for batches and the script's own code "
        "included; checkpoints, evaluations, the first 10 steps and those that compile are not"
    )
    if len(before) == len(after) == 1:
        yield (
            "one run each: the intervals leave out variation between runs; "
            "`trainfit watch --verify` runs both in turn"
        )
    if other:
        yield f"different hardware ({other}): settings are not the only difference"
    sizes = [batch_size(runs[0].header) for runs in (before, after)]
    if sizes[0] != sizes[1] and not all("samples" in run.known for row in rows for run in row):
        yield "batch sizes differ, and samples were not counted: times are those of a step"
    if before[0].header.world_size != after[0].header.world_size:
        yield "the number of ranks differs: samples/s are those of all, phases of the first rank"
    if any(run.header.ending == "running" for run in (*before, *after)):
        yield "a run is in progress: the steps recorded so far were compared"


# -- changes -----------------------------------------------------------------------------------


def _changes(rows: Sequence[Sequence[SteadyRows]], per_sample: bool) -> Iterator[Change]:
    """The one that the verdict is about first."""
    made = groups(*([run.rows for run in runs] for runs in rows))
    totals = [np.sum([run.totals for run in runs], axis=0) for runs in (made.before, made.after)]
    known = frozenset.intersection(*(run.known for row in rows for run in row))
    either = frozenset.union(*(run.known for row in rows for run in row))
    per = SAMPLES if per_sample else STEPS
    yield _time(made, totals, per)
    if "samples" in known:
        yield _rate(made, totals)
    for name in PHASES:
        if name in either:
            yield _phase(made, totals, per, name, name in known)
    yield _phase(made, totals, per, "other", bool(known & set(PHASES)))
    if "busy" in known:
        yield _busy(made, totals)


def _time(made: Groups, totals: Sequence[Rows], per: int) -> Change:
    before, after = (float(total[TIME] / total[per]) for total in totals)
    estimate = made.estimate(_logarithm(lambda sums: sums[..., TIME] / sums[..., per]))
    unit, what = ("s/sample", "time of a sample") if per == SAMPLES else ("s/step", "step time")
    return _ratio(Change(what, unit, before, after), estimate)  # type: ignore[arg-type]


def _rate(made: Groups, totals: Sequence[Rows]) -> Change:
    before, after = (float(total[SAMPLES] / total[TIME]) for total in totals)
    estimate = made.estimate(_logarithm(lambda sums: sums[..., SAMPLES] / sums[..., TIME]))
    return _ratio(Change("samples/s", "samples/s", before, after), estimate)


def _phase(made: Groups, totals: Sequence[Rows], per: int, name: str, known: bool) -> Change:
    index = COLUMNS.index(name)
    unit = "s/sample" if per == SAMPLES else "s/step"
    before, after = (float(total[index] / total[per]) for total in totals)
    if not known:
        return Change(name, unit, None, None, basis="step")  # type: ignore[arg-type]
    whole = float(totals[0][TIME] / totals[0][per])

    def effect(first: Rows, second: Rows) -> Rows:
        difference: Rows = (
            second[..., index] / second[..., per] - first[..., index] / first[..., per]
        )
        return difference / whole

    change = Change(name, unit, before, after, basis="step")  # type: ignore[arg-type]
    return _judged(change, made.estimate(effect))


def _busy(made: Groups, totals: Sequence[Rows]) -> Change:
    before, after = (float(total[BUSY] / total[LOOKED_AT]) for total in totals)

    def effect(first: Rows, second: Rows) -> Rows:
        shares: Rows = second[..., BUSY] / second[..., LOOKED_AT]
        return shares - first[..., BUSY] / first[..., LOOKED_AT]

    change = Change("GPU busy", "share", before, after, basis="points")
    return _judged(change, made.estimate(effect))


def _peaks(looks: Sequence[Sequence[RunView]]) -> Iterator[Change]:
    """Peaks have no interval: a maximum is not a mean, and says nothing of its own scatter."""
    for what, look in (("peak GPU memory", peak_gpu_bytes), ("peak RAM", peak_ram_bytes)):
        before, after = (_most(look, views) for views in looks)
        if before is None or after is None:
            continue
        effect = after / before - 1 if before else None
        yield Change(what, "bytes", float(before), float(after), effect)


def _most(look: Callable[[RunView], int | None], views: Sequence[RunView]) -> int | None:
    found = [each for each in map(look, views) if each is not None]
    return max(found, default=None)


def _logarithm(value: Callable[[Rows], Rows]) -> Effect:
    """An effect: the logarithm of the ratio after to before, whose interval is as wide upwards as
    downwards."""
    return lambda before, after: np.log(value(after) / value(before))


def _ratio(change: Change, estimate: EffectEstimate) -> Change:
    """The same change judged by an estimate of a ratio's logarithm."""
    effect, low, high = (
        math.expm1(each) for each in (estimate.effect, estimate.low, estimate.high)
    )
    return _judged(change, EffectEstimate(effect, low, high), math.expm1(estimate.detectable))


def _judged(change: Change, estimate: EffectEstimate, detectable: float | None = None) -> Change:
    detectable = estimate.detectable if detectable is None else detectable
    sure = estimate.is_significant and abs(estimate.effect) > LEAST_EFFECT
    return Change(
        change.what,
        change.unit,
        change.before,
        change.after,
        estimate.effect,
        (estimate.low, estimate.high),
        change.basis,
        ("more" if estimate.effect > 0 else "less") if sure else "no difference",
        max(detectable, LEAST_EFFECT),
    )


def _verdict(change: Change) -> Verdict:
    if change.verdict == "less":
        return "faster"
    return "slower" if change.verdict == "more" else "no difference"
