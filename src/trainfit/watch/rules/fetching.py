"""How batches are made: what one costs, how many workers the step needs, and which part dominates.

Each second that is lost by waiting for batches is counted once: what the start of an epoch or one
slow worker is to blame for is theirs, the rest is that of the input as a whole.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from trainfit.findings.own_code import Habit
from trainfit.findings.sample_code import habit_of_samples
from trainfit.results.findings import Place
from trainfit.results.runs.tables import Table
from trainfit.results.runs.watched import CodeLine, WaitsFor, WatchedLoader
from trainfit.watch import checks, thresholds
from trainfit.watch.rules import code_lines
from trainfit.watch.rules.code_lines import CostlyLine, costliest
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.view import RankView, known, median, percentile

Part = Literal["disk", "decode", "transform", "collate", "sleep", "lock", "network", ""]
_PART_OF_WAIT: Final[Mapping[WaitsFor, Part]] = {
    "sleep": "sleep",
    "lock": "lock",
    "network": "network",
    "disk": "disk",
    "": "",
}
#: Of these, the ones in which nothing is computed, and nothing read from a disk.
_NO_WORK: Final = ("sleep", "network")
_NO_DISK: Final = (*_NO_WORK, "lock")
_PARTS: Final[tuple[tuple[Part, str], ...]] = (
    ("disk", "read_s"),
    ("decode", "decode_s"),
    ("transform", "transform_s"),
    ("collate", "collate_s"),
)
#: Of the available RAM, what more workers may hold.
_RAM_SHARE: Final = 0.5
#: Of the usable cores, what more workers may use that mostly wait: on full cores, too.
_CORES_OF_WAITING: Final = 0.1
#: Workers that mostly wait: as many at most, or so many for each core, as each holds a process' RAM
#: and the system's tables of files and threads are shared by all.
_MOST_WAITING: Final = 16
_WAITING_PER_CORE: Final = 4
#: Of the cores that other programs keep busy, what threads that take turns with them get.
_FAIR: Final = 0.5
#: Seconds that a slow batch takes longer than most, at least.
_NOTICED_S: Final = 0.01
#: Of the time of all batches, what few slow ones, or few lines, take that are the cause.
_MOSTLY_SLOW: Final = 0.5
#: Of batches, the percentile above which a few are no measure of what all of them cost.
_MOST_OF_THEM: Final = 90
#: Of the looks at one line, those in a function that is known, from which they tell what it does.
_PART_OF_LINE: Final = 0.2
#: Idle cores are medians; a worker more is not lost to their noise.
_ROUNDING: Final = 0.02


@dataclass(frozen=True)
class SlowWorker:
    """A worker whose batches take longer; ``share`` is the part of the input's loss by it."""

    worker: int
    fetch_s: float
    others_s: float
    share: float


#: Where a program is started, or its end is waited for.
_OF_PROGRAMS: Final = re.compile(r"^subprocess\.|(?:^|\.)(?:check_output|os\.system|_fork_exec)$")


#: What a line does that makes samples and waits, by what for.
_WAITING: Final[dict[WaitsFor, str]] = {
    "sleep": "sleeps", "lock": "waits for a lock", "network": "waits for the network",
    "process": "waits for another process", "disk": "waits for a file",
}  # fmt: skip
#: Of the waits for batches, what looks must have found in the sampler for more of them to be its.
_OF_WAITS: Final = 1 / 8


@dataclass(frozen=True)
class Fetching:
    """The fetches of one rank's steady part; ``None`` is not measured."""

    rank: RankView

    @functools.cached_property
    def loader(self) -> WatchedLoader | None:
        return checks.training_loader(self.rank.header)

    @property
    def workers(self) -> int | None:
        return None if self.loader is None else self.loader.num_workers

    @functools.cached_property
    def fetch_s(self) -> float | None:
        """Median seconds of a batch in a worker, or in the main process where it has none."""
        found = median(self.rank.fetches["fetch_s"])
        if found is None and self.workers == 0 and self.batches_per_step:
            waited = median(self.rank.steps["input_s"])
            found = None if waited is None else waited / self.batches_per_step
        return found or None

    @functools.cached_property
    def cpu_s(self) -> float | None:
        """Median CPU seconds of a batch."""
        return median(self.rank.fetches["cpu_s"])

    @functools.cached_property
    def most_cpu_s(self) -> float | None:
        """CPU seconds of a batch at most: where the training makes it itself, all of a step's."""
        if self.cpu_s is not None or self.workers != 0:
            return self.cpu_s
        spent = median(self.rank.steps["cpu_s"])
        return None if spent is None else spent / self.batches_per_step

    @functools.cached_property
    def waiting_s(self) -> float | None:
        """Seconds of a batch in which its worker waits for something else than a core (storage, a
        lock, a network), at least. Where it was not counted how long it had none: on crowded cores
        a thread waits for its turn as often as others take theirs."""
        if not self.fetch_s or self.most_cpu_s is None:
            return None
        if self.core_waits.fetch_s is not None and self.cpu_s is not None:
            return max(0.0, (median(self.core_waits.fetch_s) or 0.0) - self.cpu_s)
        # In a sleep or a call to the network a thread computes nothing.
        kind, looks, _ = self.waits_for
        seen = looks * self.fetch_s - self.most_cpu_s if kind in _NO_WORK else 0.0
        if self.turns is None:
            return max(0.0, seen) or None
        return max(0.0, seen, self.fetch_s - self.turns * self.most_cpu_s)

    @functools.cached_property
    def core_waits(self) -> CoreWaits:
        return CoreWaits(self.rank)

    @functools.cached_property
    def turns(self) -> float | None:
        """Threads that take turns on a core; ``None``: cores are full, and it was not sampled."""
        found = checks.turns(self.rank)
        if found is None:
            return None if self.cores is not None and self.cores.saturated else 1.0
        return found

    @functools.cached_property
    def waits(self) -> float:
        """:attr:`waiting_s` as a share of a batch's time; 0 where it is not most of it, or programs
        that are started for the batch use the cores meanwhile."""
        if self.slow_line is not None and any(map(_OF_PROGRAMS.match, self.slow_line.names)):
            return 0.0
        share = (self.waiting_s or 0.0) / (self.fetch_s or 1.0)
        return share if share >= thresholds.WAITS else 0.0

    @functools.cached_property
    def batches_per_step(self) -> float:
        return max(1.0, median(self.rank.steps["batches"]) or 1.0)

    @functools.cached_property
    def batch_every_s(self) -> float | None:
        """Seconds a batch of the training itself, without waiting for the input."""
        step_s = checks.step_without_input(self.rank)
        return None if not step_s else step_s / self.batches_per_step

    @functools.cached_property
    def cores(self) -> checks.BusyCores | None:
        return checks.cores(self.rank)

    @functools.cached_property
    def others(self) -> float | None:
        """Cores that processes outside the run keep busy; ``None``: not measured."""
        ours = median(self.rank.machine["cores_ours"])
        return None if ours is None or self.cores is None else max(0.0, self.cores.busy - ours)

    @property
    def usable(self) -> float | None:
        return checks.usable_cores(self.rank.header)

    @property
    def others_press(self) -> bool:
        """Do other programs keep cores busy of which a worker more would get its turns?"""
        if self.others is None or self.cores is None:
            return False
        return self.others >= thresholds.OTHERS_CORES * self.cores.usable

    @functools.cached_property
    def cores_per_worker(self) -> float:
        """The cores that a busy worker keeps busy; one where it is not measured."""
        cpu_s = self.most_cpu_s if self.waits else self.cpu_s
        return 1.0 if not self.fetch_s or cpu_s is None else max(0.05, cpu_s / self.fetch_s)

    @functools.cached_property
    def cores_needed(self) -> float | None:
        """The cores that the batches of all ranks of the machine keep busy at the training's
        pace."""
        if not self.cpu_s or not self.batch_every_s:
            return None
        return max(1, checks.local_ranks(self.rank)) * self.cpu_s / self.batch_every_s

    @functools.cached_property
    def cost_s(self) -> float | None:
        """Seconds of a batch where nothing else wants the cores.

        Where they are saturated, workers wait for each other: then CPU time and what else they
        wait for tell it, else the time it takes.
        """
        if self.cores is not None and self.cores.saturated and self.most_cpu_s:
            return self.most_cpu_s + (self.waiting_s or 0.0)
        return self.fetch_s

    @functools.cached_property
    def is_cheap(self) -> bool:
        """Is a batch as quickly made as taken from a worker?"""
        times = [each for each in (self.cost_s, self.fetch_s) if each]
        return bool(times) and min(times) <= max(thresholds.CHEAP_BATCH_S, self._hand_off_s())

    @property
    def is_large(self) -> bool:
        """Is a batch so large that taking it from a worker is work? Unless measured otherwise."""
        size = median(self.rank.fetches["bytes"])
        return size is None or size >= thresholds.LARGE_BATCH_BYTES

    def _hand_off_s(self) -> float:
        """Seconds that the main process takes for a batch that is ready, on average, without those
        in which other threads have its core; 0 where that is not told, as of a small one next to
        other programs."""
        if not self.workers or (self.queued_while_waiting or 0) < 1 or self.turns is None:
            return 0.0
        if self.others_press and not self.is_large:
            return 0.0
        waits = (self.waited - self.waited * self._of_slow_worker)[self.rank.steps["queued"] >= 1]
        return float(np.mean(waits)) / self.batches_per_step / self.turns

    @functools.cached_property
    def needed_workers(self) -> int | None:
        """The smallest number that makes batches as fast as the training uses them, or so nearly
        that the rest is not noticeable."""
        cost = self.cost_s
        if not cost or not self.batch_every_s:
            return None
        if self.waits and not self.is_uneven:
            cost = max(cost, self._mean_s)
        return max(1, math.ceil((1 - thresholds.NOTICEABLE) * cost / self.batch_every_s))

    @property
    def _mean_s(self) -> float:
        """Seconds of a batch on average, the slowest tenth as the fastest of them: where many wait
        and many do not, the median is that of either."""
        times = self.own_times
        if len(times) < thresholds.LEAST_STEPS:
            return 0.0
        return float(np.mean(np.minimum(times, np.percentile(times, _MOST_OF_THEM))))

    @functools.cached_property
    def most_workers(self) -> int | None:
        """The most that find cores and RAM: those that run now, and others on the idle cores and
        in half of the RAM that is available."""
        if self.cores is None or self.workers is None:
            return None
        idle = 0.0 if self.cores.saturated else self.cores.idle
        if self.waits:
            idle = max(idle, _CORES_OF_WAITING * self.cores.usable, self._shared_cores())
        ranks = max(1, checks.local_ranks(self.rank))
        more = int(idle / self.cores_per_worker / ranks + _ROUNDING)
        if (room := self._more_by_ram()) is not None:
            more = min(more, room // ranks)
        return max(self.workers, min(self.workers + more, self.most_useful))

    @property
    def most_useful(self) -> int:
        """Workers beyond which more are a burden, whatever they wait for."""
        ranks = max(1, checks.local_ranks(self.rank))
        maximum = max(_MOST_WAITING, int(_WAITING_PER_CORE * (self.usable or 1.0) / ranks))
        if self.loader is not None and self.loader.batches:
            maximum = min(maximum, self.loader.batches)  # of one epoch
        return max(1, maximum)

    def _shared_cores(self) -> float:
        """Cores that workers which mostly wait get of those that other programs fill: their share
        of what these keep busy, as the scheduler gives a thread that comes back its turn."""
        return _FAIR * (self.others or 0.0)

    def _more_by_ram(self) -> int | None:
        """How many workers like the current ones fit into the RAM that may be used; ``None``: their
        memory was not measured. What pages they share is counted for each: too few, if at all."""
        held = median(self.rank.workers["rss_bytes"])
        free = median(self.rank.machine["ram_available_bytes"])
        if not held or free is None:
            return None
        return int(_RAM_SHARE * free / held)

    @functools.cached_property
    def part(self) -> tuple[Part, float]:
        """What dominates a fetch, and its share of the fetch's time; "" where it is not told."""
        if not self.fetch_s:
            return "", 0.0
        parts = {name: median(self.rank.fetches[column]) for name, column in _PARTS}
        told = {name: seconds for name, seconds in parts.items() if seconds}
        if told:
            name = max(told, key=lambda each: told[each])
            kind, share, _ = self.waits_for
            if name == "disk" and kind in _NO_DISK:
                return _PART_OF_WAIT[kind], share  # what reads is not told from what waits
            if told[name] >= 0.25 * self.fetch_s:
                return name, min(1.0, told[name] / self.fetch_s)
        if not self.waits:
            return "", 0.0
        kind = self.waits_for[0]
        return (_PART_OF_WAIT[kind] if self.was_looked_at else "disk"), self.waits

    @property
    def was_looked_at(self) -> bool:
        """Do looks tell what is waited for? Else storage is the likeliest."""
        return self.rank.header.fetch_code.looks >= code_lines.LEAST_LOOKS

    @functools.cached_property
    def waits_for(self) -> tuple[WaitsFor, float, CodeLine | None]:
        """What batches wait for most: see :func:`.code_lines.waits_for`."""
        return code_lines.waits_for(self.rank.header.fetch_code)

    @property
    def is_locked(self) -> bool:
        """Do workers wait for a lock that others of them hold?"""
        return self.waits_for[0] == "lock" and (self.workers or 0) >= 1

    @functools.cached_property
    def own_times(self) -> checks.Seconds:
        """Seconds of each batch, without those in which its worker had no core where that was
        counted, and without the batches of one slow worker and the first of each, whose losses are
        told by themselves."""
        kept = ~self._are_first
        if self.slow_worker is not None:
            kept &= self.rank.fetches["worker"] != self.slow_worker.worker
        return known(self._times[kept])

    @property
    def _times(self) -> checks.Seconds:
        counted = self.core_waits.fetch_s
        every = self.rank.fetches["fetch_s"] if counted is None else counted
        return np.asarray(every, dtype=np.float64)

    @functools.cached_property
    def _are_first(self) -> NDArray[np.bool_]:
        """A mask of batches that are the first of a worker's process, where more are started than
        there are workers: with each epoch. What its data set begins with is in them."""
        rows, every = self.rank.fetches, self.rank.record.fetches
        pids, of = np.unique(every["pid"], return_inverse=True)
        if len(pids) <= 2 * (self.workers or 0) or (pids < 0).any():
            return np.zeros(len(rows), bool)
        first = np.full(len(pids), np.inf)
        np.minimum.at(first, of, every["end_s"])
        found: NDArray[np.bool_] = rows["end_s"] <= first[np.searchsorted(pids, rows["pid"])]
        return found

    @functools.cached_property
    def first_batch_s(self) -> float | None:
        """Seconds of a worker's first batch, where that is much longer than the others."""
        first = known(self._times[self._are_first])
        usual = median(self.own_times)
        if usual is None or len(first) < thresholds.LEAST_EVENTS:
            return None
        seconds = float(np.median(first))
        maximum = max(thresholds.UNEVEN_FETCHES * usual, usual + _NOTICED_S)
        return seconds if seconds > maximum else None

    @functools.cached_property
    def slow_batch_s(self) -> float | None:
        """Seconds of a batch that is much slower than most, where some are: the median of those
        above twice the usual."""
        times = self.own_times
        if len(times) < thresholds.LEAST_STEPS:
            return None
        usual = float(np.median(times))
        slow = times[times > max(thresholds.UNEVEN_FETCHES * usual, usual + _NOTICED_S)]
        few = len(slow) <= 0.4 * len(times)
        return float(np.median(slow)) if len(slow) >= 2 and few else None

    @functools.cached_property
    def is_uneven(self) -> bool:
        """Do few batches take most of the time that all take?"""
        times = self.own_times
        if self.slow_batch_s is None:
            return False
        usual = float(np.median(times))
        slow = times > max(thresholds.UNEVEN_FETCHES * usual, usual + _NOTICED_S)
        return float(np.sum(times[slow])) >= _MOSTLY_SLOW * float(np.sum(times))

    @functools.cached_property
    def best_every_s(self) -> float | None:
        """Seconds a batch at best: what the training takes, or the workers together."""
        times = self.own_times
        if not self.workers or not self.batch_every_s or not len(times):
            return None
        return max(self.batch_every_s, float(np.mean(times)) / self.workers)

    @property
    def keeps_up(self) -> bool:
        """Do the workers together make batches as fast as they are used, slow ones counted?"""
        return self.best_every_s is not None and self.best_every_s == self.batch_every_s

    @property
    def place(self) -> Place | None:
        """The line that batches wait in, or where the script makes the DataLoader."""
        line = self.waits_for[2]
        found = Place.parse(line.place) if line is not None else None
        return found or checks.loader_place(self.rank.header)

    @functools.cached_property
    def slow_line(self) -> CostlyLine | None:
        """The script's line that most of a batch's time goes to; ``None``: no few lines have it."""
        looks = self.rank.header.fetch_code
        least = _MOSTLY_SLOW * looks.looks
        line = costliest(looks, least) if looks.looks >= code_lines.LEAST_LOOKS else None
        return line if line is not None and line.count >= least else None

    @functools.cached_property
    def habit(self) -> Habit | None:
        """What that line does, where it is known by what it calls; of several, that of most."""
        line = self.slow_line
        if line is None:
            return None
        if not line.is_several and (known := habit_of_samples(line.names, line.most.over)):
            return known
        counts: Counter[Habit | None] = Counter()
        for call in line.calls:
            counts[habit_of_samples(call.names, call.over)] += call.count
        if not line.is_several:
            # A library that is called there is in another function at each look.
            del counts[None]
        least = (_MOSTLY_SLOW if line.is_several else _PART_OF_LINE) * line.count
        habit, looks = next(iter(counts.most_common(1)), (None, 0))
        return habit if looks >= least else None

    @functools.cached_property
    def outweighs(self) -> bool:
        """Do workers need more of the cores for a step's batches than the training for the step,
        next to other programs? Then whatever is late there is late by what batches cost."""
        if not self.workers or not self.others_press or not self.cpu_s:
            return False
        spent = median(self.rank.steps["cpu_s"])
        needs = self.cpu_s + (self.waiting_s or 0.0) / self.workers
        return spent is not None and needs * self.batches_per_step >= spent

    @property
    def slow_code(self) -> str:
        """A clause on what that line does; empty: it is not known."""
        if self.slow_line is None:
            return ""
        waits = _WAITING.get(self.slow_line.most.waits_for, "")
        if self.habit is None and (waits == "" or self.slow_line.is_several):
            verb = "compute" if self.slow_line.is_several else "computes"
            return f"{self.slow_line} {verb} most of a batch"
        if self.habit is None:
            return f"{self.slow_line} {waits} for most of a batch's time"
        name = "" if self.slow_line.is_several else self.slow_line.most.calls
        return f"{self.slow_line} {self.habit.what}{f' (`{name}`)' if name else ''}"

    @functools.cached_property
    def unevenness(self) -> float | None:
        """90th percentile of a fetch over its median."""
        usual, high = median(self.own_times), percentile(self.own_times, 90)
        return None if high is None or not usual else high / usual

    @functools.cached_property
    def queued_while_waiting(self) -> float | None:
        """Batches that were ready when a step began to wait in vain: in the median second of what
        is lost. Many short waits for a transfer say nothing of a few long ones."""
        lost, queued = np.nan_to_num(checks.input_lost(self.rank)), self.rank.steps["queued"]
        waits = (lost >= thresholds.NOTICEABLE * self.rank.steps["step_s"]) & (queued >= 0)
        if not waits.any():
            return None
        order = np.argsort(queued[waits], kind="stable")
        seconds = np.cumsum(lost[waits][order])
        return float(queued[waits][order][np.searchsorted(seconds, seconds[-1] / 2)])

    @functools.cached_property
    def slow_worker(self) -> SlowWorker | None:
        """The slowest worker, where it alone holds up the batches, which come in turns.

        With n workers and T between two batches of the training, a worker that takes F gives n
        batches every max(nT, F): what the others take beyond nT is lost anyway.
        """
        times = self._times_by_worker()
        every, workers = self.batch_every_s, self.workers
        if every is None or not workers or len(times) < 2:
            return None
        # What is seen to sleep or to wait for an answer has no need of a core.
        if self._threads_take_turns and self.waits_for[0] not in _NO_WORK:
            return None
        slowest = max(times, key=lambda each: times[each])
        rest = [seconds for each, seconds in times.items() if each != slowest]
        fetch_s, in_turn, others = times[slowest], workers * every, float(np.median(rest))
        # Several that are slow are no single one: threads that take turns make such by chance.
        if fetch_s < thresholds.SLOW_WORKER * max(rest) or fetch_s <= in_turn:
            return None
        share = (fetch_s - max(in_turn, others)) / (fetch_s - in_turn)
        return SlowWorker(slowest, fetch_s, others, share)

    @property
    def _threads_take_turns(self) -> bool:
        """Have the workers more threads of libraries at work than there are cores? Which of them
        get these is chance."""
        threads = checks.threads_of_worker(self.rank)
        many = threads > 1 and (self.workers or 0) * threads > (self.usable or math.inf)
        return many and bool(checks.is_crowded(self.rank))

    def _times_by_worker(self) -> dict[int, float]:
        fetches: Table = self.rank.fetches
        counted, found = self.core_waits.fetch_s, {}
        every = fetches["fetch_s"] if counted is None else counted
        for worker in np.unique(fetches["worker"][fetches["worker"] >= 0]):
            times = known(every[fetches["worker"] == worker])
            if len(times) >= thresholds.LEAST_FETCHES:
                found[int(worker)] = float(np.median(times))
        return found

    @functools.cached_property
    def sampler(self) -> tuple[CostlyLine | None, float]:
        """The line that chooses samples, and the share of the time that this takes."""
        looks = self.rank.header.sampler_code
        line = costliest(looks)
        share = 0.0 if line is None else line.count / max(1, looks.looks)
        every = checks.share_of(self.rank, np.nan_to_num(checks.input_lost(self.rank)))
        if share >= _OF_WAITS * every and self.is_cheap and (self.queued_while_waiting or 0) >= 1:
            # Looks come late to what C does at once; a batch that is ready is soon taken.
            taken = 2 * thresholds.CHEAP_BATCH_S * self.batches_per_step * len(self.rank.steps)
            taken *= self.core_waits.training_stretch or 1.0
            share = max(share, every - taken / self.rank.seconds)
        return line, share

    @functools.cached_property
    def library_sampler(self) -> tuple[CodeLine | None, float]:
        """The line and the share of the time of PyTorch's own sampler, of which no line is the
        script's."""
        looks = self.rank.header.sampler_code
        lines = [line for line in looks.lines if not line.place]
        share = sum(line.count for line in lines) / max(1, looks.looks)
        return max(lines, key=lambda each: each.count, default=None), share

    @functools.cached_property
    def waited(self) -> checks.Seconds:
        """Seconds a step of waiting for batches, but for what epochs' starts and the choice of
        samples cost."""
        lost = np.nan_to_num(checks.input_lost(self.rank)) - checks.epoch_start_lost(self.rank)
        share = checks.share_of(self.rank, lost)
        found: checks.Seconds = lost * (max(0.0, 1 - self.sampler[1] / share) if share else 1.0)
        return found

    @functools.cached_property
    def lost(self) -> checks.Seconds:
        """The part of :attr:`waited` that the input is to blame for: without what other programs
        add."""
        share, own = checks.share_of(self.rank, self.waited), self.share_alone
        return self.waited if own is None or not share else self.waited * min(1.0, own / share)

    @functools.cached_property
    def share_alone(self) -> float | None:
        """Share of the time that waiting for batches would cost with no other program on the
        cores; ``None``: it is what was measured, or not known.

        A batch then comes as soon as the training asks for it, the workers have made it, and the
        cores have done what all of this needs; those that were ready come as much sooner as other
        programs hold up whoever gives them.
        """
        if self.workers is None or not self.others_press or not self.batch_every_s:
            return None
        per_step = self.batches_per_step
        if not self.workers:
            each_s = float(np.mean(self.waited)) / per_step
            return self.core_waits.input_share_in_turn(self.batch_every_s, each_s)
        # Cheap batches differ by chance next to other programs.
        usual, high = median(self.own_times) or 0.0, percentile(self.own_times, 90) or 0.0
        if self.is_uneven or high > max(thresholds.UNEVEN_FETCHES * usual, usual + _NOTICED_S):
            return None
        return self.core_waits.input_share(self.batch_every_s, self.waited / per_step, per_step)

    @property
    def lost_in_turns(self) -> checks.Seconds:
        """The part of :attr:`lost` that one slow worker is to blame for."""
        return self.lost * self._of_slow_worker

    @property
    def _of_slow_worker(self) -> float:
        return 0.0 if self.slow_worker is None else self.slow_worker.share


def is_measured(rank: RankView) -> bool:
    """Was it measured how long the steps waited for batches?"""
    return bool(np.isfinite(rank.steps["input_s"]).any())
