"""The GPU's idle time in a rehearsal: its utilization over time, and the causes of each wait."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.loader.measure.records import BEGAN, WALL
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.rehearsal import (
    Cause,
    Dip,
    RehearsedEpoch,
    RehearsedRates,
    UtilisationTimeline,
)
from trainfit.results.text import duration

# ---
# The GPU's utilization over time, computed from the times of a rehearsal.
#
# Nothing here runs a loader; times go in, figures come out.


Times = NDArray[np.float64]

#: Sample periods of ``nvmlUtilization_t.gpu`` ("between 1 second and 1/6 second, depending on
#: the product", https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html).
PERIODS_S: Final = (1 / 6, 1.0)
#: Windows of a timeline at most; a longer rehearsal has longer ones.
_MOST_WINDOWS: Final = 1800
#: Epochs of a result at most.
_MOST_EPOCHS: Final = 200
#: Column of ``made``, behind those of a worker's record.
WORKER: Final = 4


@dataclass(frozen=True)
class RehearsalRecord:
    """What a rehearsal noted down; times on the monotonic clock, in seconds.

    Of each batch: ``asked`` is when ``next`` was called (of an epoch's first: ``iter``),
    ``handed`` when it returned, ``next_cpu`` the main thread's CPU time between, ``steps`` how
    long the step took, ``epochs`` the number of its epoch, ``ready`` when the first worker
    was (of an epoch's first batch; 0: it was before, or is not known). ``made`` are the workers'
    records of batches (:mod:`trainfit.loader.measure.records`), each with its worker.
    """

    settings: LoaderSettings
    began: float
    ended: float
    asked: Times
    handed: Times
    next_cpu: Times
    steps: Times
    epochs: NDArray[np.int64]
    ready: Times
    made: Times = field(default_factory=lambda: np.empty((0, 5)))
    failed: bool = False
    """The end was a failure: what passed after the last step is no waiting for a batch."""
    exhausted: bool = False
    """The last epoch came to its end."""

    @property
    def total_s(self) -> float:
        return self.ended - self.began

    @property
    def busy(self) -> Times:
        """The begin and end of each step, in seconds from the beginning; shape (batches, 2)."""
        begin = self.handed - self.began
        return np.column_stack((begin, np.minimum(begin + self.steps, self.total_s)))

    @property
    def place(self) -> NDArray[np.int64]:
        """The place of each batch in its epoch, from 0."""
        places: NDArray[np.int64] = np.arange(len(self.epochs))
        if len(places):
            places -= self._first[self.epochs]
        return places

    @property
    def _first(self) -> NDArray[np.int64]:
        """The first batch of each epoch."""
        index: NDArray[np.int64] = np.searchsorted(self.epochs, np.arange(self.epochs[-1] + 1))
        return index


def busy_shares(busy: Times, total_s: float, window_s: float) -> Times:
    """The share of each window of ``window_s`` in which an interval of ``busy`` runs.

    ``busy`` are intervals in order that do not overlap, within 0 and ``total_s``; shape (n, 2).
    The last window ends at ``total_s``.
    """
    if total_s <= 0:
        return np.empty(0)
    count = max(1, math.ceil(total_s / window_s - 1e-9))
    edges = np.minimum(np.arange(count + 1) * window_s, total_s)
    edges[-1] = total_s
    if not len(busy):
        return np.zeros(count)
    at = busy.ravel()
    done = np.zeros_like(at)
    done[1::2] = np.cumsum(busy[:, 1] - busy[:, 0])
    done[2::2] = done[1:-1:2]
    shares: Times = np.diff(np.interp(edges, at, done)) / np.diff(edges)
    return np.minimum(np.maximum(shares, 0.0), 1.0)


def timeline(observed: RehearsalRecord) -> UtilisationTimeline:
    """The busy shares in the windows of nvidia-smi, or longer ones if those were too many."""
    total = observed.total_s
    fitting = (period for period in PERIODS_S if total / period <= _MOST_WINDOWS)
    window = next(fitting, total / _MOST_WINDOWS)
    shares = busy_shares(observed.busy, total, window)
    return UtilisationTimeline(window, tuple(float(share) for share in shares))


def overall_rates(observed: RehearsalRecord, batch_size: int | None) -> RehearsedRates | None:
    """The rates of the whole rehearsal; ``None`` if it took no time."""
    return _rates(observed, 0.0, observed.total_s, 0, batch_size)


def steady_rates(observed: RehearsalRecord, batch_size: int | None) -> RehearsedRates | None:
    """The rates from when the queues were full for the first time; ``None`` if it was too short.

    What passed after the last step until the loader failed does not count.
    """
    settings = observed.settings
    first = min(settings.tokens + settings.num_workers, int(np.sum(observed.epochs == 0)))
    least = max(2, settings.num_workers)
    if len(observed.handed) - first < least:
        return None
    until = float(observed.busy[-1, 1]) if observed.failed else observed.total_s
    return _rates(observed, float(observed.asked[first] - observed.began), until, first, batch_size)


def _rates(
    observed: RehearsalRecord, from_s: float, until: float, first: int, batch_size: int | None
) -> RehearsedRates | None:
    busy = observed.busy
    seconds = until - from_s
    if seconds <= 0:
        return None
    batches = len(busy) - first
    waited = float(np.sum((observed.handed - observed.asked)[first:]))
    waited += until - (float(busy[-1, 1]) if len(busy) else from_s)
    rate = batches / seconds
    return RehearsedRates(
        from_s=from_s,
        seconds=seconds,
        batches=batches,
        busy_share=_share(float(np.sum(busy[first:, 1] - busy[first:, 0])), seconds),
        waiting_share=_share(waited, seconds),
        batches_per_s=rate,
        samples_per_s=rate * batch_size if batch_size is not None else None,
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def epochs(observed: RehearsalRecord) -> tuple[RehearsedEpoch, ...]:
    """The first epochs."""
    firsts = np.flatnonzero(observed.place == 0)
    begins = np.append(observed.asked[firsts] - observed.began, observed.total_s)
    rehearsed = []
    for index, first in enumerate(firsts[:_MOST_EPOCHS]):
        last = index == len(firsts) - 1
        following = len(observed.epochs) if last else firsts[index + 1]
        rehearsed.append(
            RehearsedEpoch(
                start_s=float(begins[index]),
                seconds=float(begins[index + 1] - begins[index]),
                batches=int(following - first),
                complete=observed.exhausted if last else True,
                first_batch_s=float(observed.handed[first] - observed.asked[first]),
            )
        )
    return tuple(rehearsed)


def epoch_seconds(
    epochs: tuple[RehearsedEpoch, ...], epoch_batches: int | None, steady: RehearsedRates | None
) -> tuple[float | None, bool]:
    """The time of an epoch, and whether it was measured (the mean of those that ended)."""
    whole = [epoch.seconds for epoch in epochs if epoch.complete]
    if whole:
        return sum(whole) / len(whole), True
    if epoch_batches is None or steady is None or not steady.batches_per_s:
        return None, False
    begin = epochs[0].first_batch_s if epochs else 0.0
    return (begin or 0.0) + epoch_batches / steady.batches_per_s, False


#: From this share of the time on, waiting in every round of the workers is starving; a round
#: that waits for so much longer than usual is a dip.
NOTABLE_SHARE: Final = 0.05
#: Rounds from which the usual time is derived, if there are so many after the warm-up.
_LEAST_ROUNDS: Final = 3
#: Dips of a result at most.
_MOST_DIPS: Final = 40
#: Idle seconds of a dip at least: less is not to be seen in the shortest window.
_LEAST_DIP_S: Final = NOTABLE_SHARE * PERIODS_S[0]


@dataclass(frozen=True)
class _Round:
    """Batches that the workers produce in parallel, and the idle time before each."""

    cause: Cause
    """Of what it waits longer than usual."""
    first: int
    last: int
    start_s: float
    end_s: float
    handing_s: float
    rest_s: float
    seconds: float


def explain(observed: RehearsalRecord) -> tuple[dict[str, float], tuple[Dip, ...]]:
    """Idle seconds of the whole rehearsal by cause, and the largest dips in order of time.

    Idle time before an epoch's first batch is of the start-up or of the epoch. After that, what
    passes after the batch was produced is transfer; the rest is summed over rounds of
    ``num_workers`` batches, since in order the workers' batches come together.
    What the median round waits is starving if it is :data:`NOTABLE_SHARE` of its time (else
    transfer, too); what a round waits beyond is of the warm-up or the epoch's beginning, or of
    a slow batch.
    """
    pieces = _pieces(observed)
    idle: dict[str, float] = {}
    for piece in pieces:
        idle[piece.cause] = idle.get(piece.cause, 0.0) + piece.idle_s
    return idle, _dips(observed, pieces)


def _pieces(observed: RehearsalRecord) -> list[Dip]:
    """All idle time, each piece with its cause."""
    busy = observed.busy
    if not len(busy):
        return [Dip("start_up", 0.0, observed.total_s, observed.total_s, 0, 0)]
    idle_from = np.append(0.0, busy[:-1, 1])
    gaps = np.maximum(0.0, busy[:, 0] - idle_from)
    rounds = _rounds(observed, idle_from, gaps)
    usual, steadily = _usual(observed, rounds)
    size = max(1, observed.settings.num_workers)
    pieces = []
    for first in np.flatnonzero(observed.place == 0):
        at, begin, gap = int(first), float(idle_from[first]), float(gaps[first])
        cause: Cause = "epoch" if at else "start_up"
        part = min(gap, usual / size) if at else 0.0
        pieces.append(Dip(cause, begin, begin + gap, gap - part, at, 1))
        pieces.append(Dip(steadily, begin, begin + gap, part, at, 1))
    for each in rounds:
        pieces += _pieces_of(each, usual, steadily)
    pieces.append(_tail(observed, float(busy[-1, 1])))
    return [piece for piece in pieces if piece.idle_s > 0]


def _tail(observed: RehearsalRecord, end: float) -> Dip:
    """What passed after the last step: the loader failed, or a batch was still waited for."""
    idle = observed.total_s - end
    cause: Cause = "slow_batch" if idle >= _LEAST_DIP_S else "transfer"
    if observed.failed or observed.exhausted:
        cause = "end"
    return Dip(cause, end, observed.total_s, idle, len(observed.handed), 0)


def _rounds(observed: RehearsalRecord, idle_from: Times, gaps: Times) -> list[_Round]:
    """The rounds of all batches but the first of each epoch."""
    workers, tokens = observed.settings.num_workers, observed.settings.tokens
    handing = _handing(observed, gaps)
    place, size = observed.place, max(1, workers)
    others = np.flatnonzero(place > 0)
    number = (place[others] - 1) // size
    new = (np.diff(number, prepend=-1) != 0) | (np.diff(observed.epochs[others], prepend=-1) != 0)
    rounds = []
    for group in np.split(others, np.flatnonzero(new)[1:]) if len(others) else []:
        first, last = int(group[0]), int(group[-1])
        beginning = place[first] <= tokens + workers
        cause: Cause = "slow_batch"
        if beginning and workers:
            cause = "epoch" if observed.epochs[first] else "warm_up"
        idle = float(np.sum(gaps[group]))
        rounds.append(
            _Round(
                cause=cause,
                first=first,
                last=last,
                start_s=float(idle_from[first]),
                end_s=float(idle_from[last] + gaps[last]),
                handing_s=float(np.sum(handing[group])),
                rest_s=idle - float(np.sum(handing[group])),
                seconds=idle + float(np.sum(observed.steps[group])),
            )
        )
    return rounds


def _handing(observed: RehearsalRecord, gaps: Times) -> Times:
    """The part of each gap that came after the batch was made, in seconds (as far as it is
    known)."""
    if not observed.settings.num_workers:
        return np.zeros_like(gaps)  # next makes the batch
    begins, made = observed.handed - gaps, made_at(observed)
    since = observed.handed - np.maximum(begins, np.where(np.isnan(made), begins, made))
    return np.minimum(gaps, np.where(np.isnan(made), observed.next_cpu, since))


def _usual(observed: RehearsalRecord, rounds: list[_Round]) -> tuple[float, Cause]:
    """Seconds that the median round waits, and what that is called."""
    if not rounds:
        return 0.0, "transfer"
    full = [each for each in rounds if each.last - each.first + 1 >= observed.settings.num_workers]
    steady = [each for each in full if each.cause == "slow_batch"]
    counted = steady if len(steady) >= _LEAST_ROUNDS else full or rounds
    waited = float(np.median([each.rest_s for each in counted]))
    if not observed.settings.num_workers:
        return waited, "main_process"
    whole = float(np.median([each.seconds for each in counted]))
    starves = whole > 0 and waited >= NOTABLE_SHARE * whole
    return waited, "starving" if starves else "transfer"


def _pieces_of(each: _Round, usual: float, steadily: Cause) -> list[Dip]:
    """A round's idle time, divided among its causes."""
    count = each.last - each.first + 1

    def piece(cause: Cause, seconds: float) -> Dip:
        return Dip(cause, each.start_s, each.end_s, seconds, each.first, count)

    # Costs vary: up to twice the median is taken to be as usual, in the steady state.
    bound = (2 if each.cause == "slow_batch" else 1) * usual
    normal = min(each.rest_s, bound)
    beyond = each.rest_s - normal
    if beyond < NOTABLE_SHARE * each.seconds:
        normal, beyond = each.rest_s, 0.0
    return [
        piece("transfer", each.handing_s),
        piece(steadily, normal),
        piece(each.cause, beyond),
    ]


def _dips(observed: RehearsalRecord, pieces: list[Dip]) -> tuple[Dip, ...]:
    """Pieces of one cause that follow each other are one dip; what is always so is one, too."""
    merged: list[Dip] = []
    for cause in dict.fromkeys(piece.cause for piece in pieces if piece.cause != "transfer"):
        always = cause in ("starving", "main_process")
        former: Dip | None = None
        for piece in sorted((p for p in pieces if p.cause == cause), key=lambda p: p.start_s):
            joins = former is not None and (
                always or piece.first_batch <= former.first_batch + former.batches
            )
            if former is not None and joins:
                merged[-1] = former = _join(former, piece)
            else:
                merged.append(piece)
                former = piece
    dips = [dip for dip in merged if dip.idle_s >= _LEAST_DIP_S]
    largest = sorted(dips, key=lambda dip: -dip.idle_s)[:_MOST_DIPS]
    with_words = (_described(observed, dip) for dip in largest)
    return tuple(sorted(with_words, key=lambda dip: dip.start_s))


def _join(one: Dip, other: Dip) -> Dip:
    end = max(one.end_s, other.end_s)
    batches = other.first_batch + other.batches - one.first_batch
    return Dip(
        one.cause, one.start_s, end, one.idle_s + other.idle_s, one.first_batch, max(1, batches)
    )


def _described(observed: RehearsalRecord, dip: Dip) -> Dip:
    words = {
        "start_up": _start_words,
        "epoch": _start_words,
        "slow_batch": _slow_words,
    }.get(dip.cause)
    what = words(observed, dip) if words is not None else ""
    return Dip(dip.cause, dip.start_s, dip.end_s, dip.idle_s, dip.first_batch, dip.batches, what)


def _start_words(observed: RehearsalRecord, dip: Dip) -> str:
    """What passed until workers were ready, and until the first batch."""
    batch = dip.first_batch
    if batch >= len(observed.asked) or observed.place[batch]:
        return ""
    asked, handed, ready = observed.asked[batch], observed.handed[batch], observed.ready[batch]
    first = f"the first batch came after {duration(handed - asked)}"
    if ready <= asked or not observed.settings.num_workers:
        return first
    return f"the first worker was ready after {duration(min(ready, handed) - asked)}, {first}"


def _slow_words(observed: RehearsalRecord, dip: Dip) -> str:
    """Production time of the batch that was waited for, against the median."""
    if not dip.batches:
        return "still pending at the end"
    waited = (observed.handed - observed.asked)[dip.first_batch : dip.first_batch + dip.batches]
    longest = dip.first_batch + int(np.argmax(waited))
    asked, handed = observed.asked[longest], observed.handed[longest]
    if not observed.settings.num_workers:
        usual = float(np.median(observed.handed - observed.asked))
        return f"batch {longest} took {duration(handed - asked)}, the median {duration(usual)}"
    made = observed.made
    finished = made[:, BEGAN] + made[:, WALL] if len(made) else np.empty(0)
    during = np.flatnonzero((finished > asked) & (finished <= handed))
    if not len(during):
        return f"batch {longest} came {duration(handed - asked)} late"
    wall = float(np.max(made[during, WALL]))
    usual = float(np.median(made[:, WALL]))
    return (
        f"batch {longest} came {duration(handed - asked)} late: "
        f"{duration(wall)} in its worker, the median batch needs {duration(usual)}"
    )


def made_at(observed: RehearsalRecord) -> Times:
    """When each batch was made in its worker; NaN where that is not known.

    In order, an epoch's batches are asked of the workers in turn; else whichever is made first
    is returned first.
    """
    at = np.full(len(observed.handed), np.nan)
    workers, made = observed.settings.num_workers, observed.made
    if not len(made) or not len(at):
        return at
    finished = made[:, BEGAN] + made[:, WALL]
    firsts = np.flatnonzero(observed.place == 0)
    lasts = np.append(firsts[1:], len(at))
    begins = np.append(observed.asked[firsts], np.inf)
    for number, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        own = (made[:, BEGAN] >= begins[number]) & (made[:, BEGAN] < begins[number + 1])
        if observed.settings.in_order:
            for worker in range(workers):
                places = at[first + worker : last : workers]
                times = np.sort(finished[own & (made[:, WORKER] == worker)])[: len(places)]
                places[: len(times)] = times
        else:
            times = np.sort(finished[own])[: last - first]
            at[first : first + len(times)] = times
    at[at > observed.handed] = np.nan  # another's: the turns were others than supposed
    return at
