"""Chooses a DataLoader's settings: predict many, run few, and only what the machine can hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from trainfit.hardware.machine.limits import OWN_FILES
from trainfit.loader.measure.fitting import Fitted
from trainfit.results.dataloader import Candidate, LoaderMachine, LoaderSettings, Probe
from trainfit.results.runs.measurement import Consumer
from trainfit.results.text import core_count, cores, count, size

#: Of the best rate, what the recommended settings have at least.
WITHIN: Final = 0.98
#: What one thread for each library must gain, other settings alike, to ask for it: two runs of the
#: same settings differ by that much.
_HELD_GAIN: Final = 1.05
PREFETCH: Final = (1, 2, 4, 8)
#: Workers that are tried: all up to eight, then some; around the knee all again.
_WORKERS: Final = (*range(9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
#: Of an epoch's time, what restarting the workers may cost before they are kept.
BUBBLE: Final = 0.01

Infeasible = Callable[[LoaderSettings], str]
"""Why settings cannot start, or nothing."""
Oversubscribed = Callable[[LoaderSettings, float], str]
"""Why settings that keep so many cores busy are slower than their workers promise, or nothing."""


@dataclass(frozen=True)
class Goal:
    """What settings are chosen for.

    ``present`` are the user's settings: start method and threads are kept, and so is the order
    unless ``any_order`` will do.
    ``infeasible`` says what cannot be chosen, ``impossible`` what cannot even be tried;
    ``oversubscribed`` what is not to be chosen unless it is the present.
    """

    consumer: Consumer
    present: LoaderSettings
    most_workers: int
    least_workers: int = 0
    any_order: bool = False
    infeasible: Infeasible = lambda settings: ""
    impossible: Infeasible = lambda settings: ""
    oversubscribed: Oversubscribed = lambda settings, busy_cores: ""


@dataclass
class Choice:
    """Candidates with what the model says of them, and which of them is chosen.

    ``fitted`` is the loader as it is, ``held`` the same with libraries in workers held to so many
    threads, where that was measured.
    """

    goal: Goal
    fitted: Fitted
    held: Mapping[int, Fitted] = field(default_factory=dict)
    candidates: dict[LoaderSettings, Candidate] = field(default_factory=dict)

    def model(self, settings: LoaderSettings) -> Fitted:
        """What predicts these settings."""
        threads = settings.library_threads
        return self.fitted if threads is None or not settings.num_workers else self.held[threads]

    def see(self, settings: LoaderSettings) -> Candidate:
        """The candidate of these settings, from now on one to choose from."""
        if settings not in self.candidates:
            self.candidates[settings] = self.look(settings)
        return self.candidates[settings]

    def look(self, settings: LoaderSettings) -> Candidate:
        """What the model says of these settings, without making them a candidate."""
        known = self.candidates.get(settings)
        if known is not None:
            return known
        outcome = self.model(settings).predict(settings, self.goal.consumer)
        return Candidate(
            settings,
            outcome.batches_per_s,
            outcome.waiting_share,
            outcome.busy_cores,
            infeasible=self.goal.infeasible(settings),
            oversubscribed=self.goal.oversubscribed(settings, outcome.busy_cores),
        )

    def search(self) -> None:
        """Simulate settings until the knee is known.

        The present settings of prefetching and the most of it bracket what lies between; all of
        it is tried around the knee.
        """
        goal = self.goal
        counts = [n for n in _WORKERS if goal.least_workers <= n <= goal.most_workers]
        if goal.most_workers not in counts:
            counts.append(goal.most_workers)
        for workers in counts:
            self._see(workers, (2, max(PREFETCH)))
        self.see(goal.present)
        while True:
            knee = self.best().num_workers
            # All numbers between those that were tried could be smaller and as good.
            below = max((n for n in counts if n < knee), default=goal.least_workers)
            for workers in range(below, knee + 1):
                self._see(workers, PREFETCH)
            if self.best().num_workers in range(below, knee + 1):
                return

    def _see(self, count: int, factors: Sequence[int]) -> None:
        either = self.goal.any_order and count > 1
        orders = (True, False) if either else (self.goal.present.in_order,)
        threads = (None, *self.held) if count else (None,)
        for factor, pinned, in_order, held in itertools.product(
            factors if count else [2], (False, True), orders, threads
        ):
            self.see(
                dataclasses.replace(
                    self.goal.present,
                    num_workers=count,
                    prefetch_factor=factor,
                    pin_memory=pinned,
                    in_order=in_order,
                    library_threads=held,
                )
            )

    def rates(self) -> dict[LoaderSettings, float]:
        """The model's rate of the feasible settings; oversubscribed settings are not credited
        with more."""
        return {
            settings: candidate.batches_per_s
            for settings, candidate in self.candidates.items()
            if not candidate.infeasible
            and (settings == self.goal.present or not candidate.oversubscribed)
        }

    def best_rate(self) -> float:
        """The best rate of the settings that are feasible; 0 without any."""
        return max(self.rates().values(), default=0.0)

    def best(self) -> LoaderSettings:
        """The smallest settings within 2% of the best rate; the present where nothing can be."""
        return self.smallest(self.rates())

    def smallest(
        self, rates: Mapping[LoaderSettings, float], share: float = WITHIN
    ) -> LoaderSettings:
        """The smallest of those that have at least this share of the best of these rates; the
        present settings where there are none."""
        least = share * max(rates.values(), default=0.0)
        good = [settings for settings, rate in rates.items() if rate >= least]
        best = min(good, key=self._size, default=self.goal.present)
        free = dataclasses.replace(best, library_threads=None)
        return free if rates.get(free, 0.0) * _HELD_GAIN > rates.get(best, 0.0) else best

    def _size(self, settings: LoaderSettings) -> tuple[int | bool, ...]:
        """Workers first (each costs RAM and a core), then what changes nothing, then what needs no
        variable, then the order of batches, then memory.

        Going from some workers to none is the last choice: each batch then adds to the step, and
        what that loses is within what two runs differ by."""
        present, factor = self.goal.present, settings.prefetch_factor
        gives_up = settings.num_workers == 0 < present.num_workers
        reordered = settings.in_order != present.in_order
        differs = settings.pin_memory != present.pin_memory
        # A factor of 1 leaves a worker idle until its batch is fetched: only if it must be.
        memory = (factor == 1, reordered, factor > 2, differs or factor > 2)
        held = settings.library_threads is not None
        return gives_up, settings.num_workers, settings != present, held, *memory


def search(fitted: Fitted, goal: Goal, held: Mapping[int, Fitted] | None = None) -> Choice:
    """All candidates needed to find the saturation point; ``held`` as in :class:`Choice`."""
    choice = Choice(goal, fitted, held or {})
    choice.search()
    return choice


def keep_workers(
    present: LoaderSettings, settings: LoaderSettings, start_s: float, epoch_s: float | None
) -> bool:
    """Should ``persistent_workers`` be set? Yes where restarting them costs over 1% of an epoch."""
    if settings.num_workers == 0:
        return False
    if epoch_s is None or epoch_s <= 0:
        return present.persistent_workers
    return settings.num_workers * start_s > BUBBLE * epoch_s or present.persistent_workers


def beyond_knee(
    choice: Choice, chosen: LoaderSettings, factors: Sequence[int] = (2, 4)
) -> tuple[Candidate, ...]:
    """Candidates of the same settings with so many times the workers."""
    counts = [factor * chosen.num_workers for factor in factors if chosen.num_workers]
    return tuple(choice.look(dataclasses.replace(chosen, num_workers=n)) for n in counts)


# ---
# Rates of settings, by the model and by real runs together, each by how much it may be off.
#
# A single run of settings that differ by less than runs do says little of which is faster: planned
# twice, the one or the other was recommended. The model errs alike both times.


#: What the model says too much or too little of settings, apart from what it does of all of a
#: loader's: the standard deviation of the rate's logarithm. Its errors over 400 settings have a
#: median of 3.9% (docs/figures.md), which is one of 5.8%; half of that variance is taken to be
#: common to a loader's settings.
OWN_ERROR: Final = 0.04


def estimated_rates(
    choice: Choice, measured: Mapping[LoaderSettings, float], noise: float
) -> dict[LoaderSettings, float]:
    """Batches a second of the settings that can be.

    ``measured`` has the rates of real runs, whose logarithms differ from run to run by the
    standard deviation ``noise``. What the model says is corrected by what it said too much or too
    little of those; of settings that were run it is weighed with the run, by both variances, and
    differs from it by ``noise`` at most: where the model is wrong, it is far off.
    """
    ratio = (noise / OWN_ERROR) ** 2
    missed = [
        math.log(rate / choice.look(settings).batches_per_s)
        for settings, rate in measured.items()
        if math.isfinite(choice.look(settings).batches_per_s)
    ]
    common = sum(missed) / (len(missed) + 1 + ratio)
    return {
        settings: _weighed(math.exp(common) * rate, measured.get(settings), noise, ratio)
        for settings, rate in choice.rates().items()
    }


def _weighed(predicted: float, measured: float | None, noise: float, ratio: float) -> float:
    if measured is None:
        return predicted
    if not math.isfinite(predicted) or predicted <= 0:
        return measured
    off = math.log(predicted / measured) * ratio / (1 + ratio)
    return measured * math.exp(min(max(off, -noise), noise))


# ---
# Feasibility of settings: RAM, shared memory, open files, and cores.
#
# Sources: `torch/utils/data/dataloader.py` (batches in flight), `torch/multiprocessing/
# reductions.py` (each storage is transferred as a file in /dev/shm with a descriptor),
# `ATen/core/CachingHostAllocator.h` (sizes of pinned buffers).


#: Of what is free, what a loader may take: the rest is for the page cache that reading needs,
#: and for what others on the machine do meanwhile. An assumption.
_SHARE: Final = 0.9
#: Of the cores that a job gets, the share that is busy where its workers take turns.
_FULL: Final = 0.9
#: Busy workers beyond the cores that are allowed (and a little, for clocks that are read).
_SPARE: Final = 1.1
#: Descriptors that the main process holds for each worker: two ends of its index queue's pipe
#: and two of its process (`multiprocessing/popen_fork.py`), and for the result queue's pipe.
_FILES_OF_WORKER: Final = 4
_FILES_OF_QUEUES: Final = 2


@dataclass(frozen=True)
class ResourceNeeds:
    """Resources that settings need in addition to the main process.

    ``ram_bytes`` holds the workers' private memory as measured, batches in shared memory and
    pinned copies; ``None`` where a worker's memory was not measured. ``ram_bound_bytes`` is
    what it may grow to (see :func:`growth`), ``None`` where that is not known.
    ``main_files`` and ``worker_files`` are open files of the main process and of a worker.
    """

    ram_bytes: int | None
    ram_bound_bytes: int | None
    shm_bytes: int
    main_files: int
    worker_files: int


def needs(settings: LoaderSettings, probe: Probe, shared_bytes: int | None = None) -> ResourceNeeds:
    """The resources that these settings need.

    In shared memory there are at most the ``prefetch_factor × num_workers`` batches that were
    asked for, and the one that the user holds meanwhile. With ``pin_memory`` each of them may
    be pinned instead, in a buffer of up to twice its size (powers of two).

    Args:
        shared_bytes: memory of the main process that forked workers share with it and that
            holds Python objects; at most that much is copied into each of them as reference
            counts are touched (pytorch#13246).
    """
    workers, batch = settings.num_workers, probe.batch_bytes
    if workers == 0:
        pinned = 2 * 2 * batch if settings.pin_memory else 0  # one made, one held by the user
        return ResourceNeeds(pinned, pinned, 0, OWN_FILES, 0)
    flying = settings.tokens + 1
    transport = flying * batch * (2 if settings.pin_memory else 1)
    private = probe.worker_private_bytes
    ram = None if private is None else workers * private + transport
    grown = workers * shared_bytes if shared_bytes is not None else None
    if settings.start_method != "fork":
        grown = 0  # what a worker has is its own from the start, and was measured so
    bound = None if ram is None or grown is None else ram + grown
    # Batches that came out of turn wait in the main process; with pinning only as copies.
    waiting = 2 if settings.pin_memory else flying
    return ResourceNeeds(
        ram,
        bound,
        flying * batch,
        OWN_FILES + _FILES_OF_QUEUES + _FILES_OF_WORKER * workers + waiting * probe.batch_tensors,
        OWN_FILES + (settings.prefetch_factor + 1) * probe.batch_tensors,
    )


def infeasible(
    settings: LoaderSettings,
    probe: Probe,
    machine: LoaderMachine,
    *,
    shared_bytes: int | None = None,
) -> str:
    """Why these settings could not start or would crash, with the remedy; empty if they can run.

    What is not known of the machine or was not measured forbids nothing.
    """
    if settings.num_workers == 0:
        return ""
    taken = needs(settings, probe, shared_bytes)
    return _shm(taken, machine) or _ram(settings, taken, machine) or _files(taken, machine)


def oversubscribed(
    settings: LoaderSettings, probe: Probe, machine: LoaderMachine, busy_cores: float
) -> str:
    """Why these settings are slower than their number of workers promises; empty if they are not.

    Workers beyond what the cores can run take turns, and the main process waits for its own: if
    they work, that is. Those that wait for the GPU take nothing from anybody. One worker more than
    cores can pay: it works while another waits to be taken from. A quota of 1.5 counts as two,
    each at three quarters of its speed.

    Args:
        busy_cores: cores that all of it keeps busy at the rate that it reaches.
    """
    target = settings.num_workers * _busy_share(probe)
    usable = max(1.0, machine.usable_cores)
    if settings.num_workers <= 1 or target <= math.ceil(usable - 1e-9) + _SPARE:
        return ""
    if busy_cores < _FULL * usable:
        return ""
    return (
        f"{count(settings.num_workers, 'worker')} need {core_count(target)}, "
        f"{cores(machine.usable_cores)} available: they compete for cores"
    )


def growth(
    settings: LoaderSettings, probe: Probe, machine: LoaderMachine, shared_bytes: int | None
) -> str:
    """The warning that RAM may run out later though it does not at first; or empty.

    A page that a forked worker shares is copied when the reference count of an object in it
    changes, so a data set that is a list of Python objects ends up in each worker. How soon
    depends on what is read; here the bound is held against the RAM that is free.
    """
    taken, free = needs(settings, probe, shared_bytes), machine.available_bytes
    if free is None or taken.ram_bytes is None or taken.ram_bound_bytes is None:
        return ""
    if taken.ram_bytes > _SHARE * free or taken.ram_bound_bytes <= _SHARE * free:
        return ""
    return (
        f"the memory of {count(settings.num_workers, 'worker')} may grow from "
        f"{size(taken.ram_bytes)} to {size(taken.ram_bound_bytes)} ({size(free)} are available) "
        "as they access the data set's Python objects: keep its index in a NumPy array or a "
        "tensor, not in lists and dicts"
    )


def _shm(taken: ResourceNeeds, machine: LoaderMachine) -> str:
    free = machine.shm_free_bytes
    if free is None or taken.shm_bytes <= _SHARE * free:
        return ""
    return (
        f"needs {size(taken.shm_bytes)} of /dev/shm for batches in flight, {size(free)} available: "
        f"start the container with --shm-size={_gigabytes(taken.shm_bytes)}g (or --ipc=host; in "
        "Kubernetes mount an emptyDir with medium Memory there), lower prefetch_factor, or send "
        "uint8 instead of float32"
    )


def _ram(settings: LoaderSettings, taken: ResourceNeeds, machine: LoaderMachine) -> str:
    free = machine.available_bytes
    least = taken.ram_bytes
    if least is None:  # what is known of it: the batches in flight
        least = taken.shm_bytes
    if free is None or least <= _SHARE * free:
        return ""
    return (
        f"needs {size(least)} of RAM for {count(settings.num_workers, 'worker')} and their "
        f"batches, {size(free)} available: use fewer workers, or memory-map the data "
        "set so that workers share it"
    )


def _files(taken: ResourceNeeds, machine: LoaderMachine) -> str:
    limit = machine.open_files
    maximum = max(taken.main_files, taken.worker_files)
    if limit is None or maximum <= limit:
        return ""
    which = "the main process" if taken.main_files == maximum else "a worker"
    return (
        f"needs {maximum} open files in {which} (one for each tensor in flight), {limit} "
        f"available: `ulimit -n {max(4096, 1 << (maximum - 1).bit_length())}`, pack the tensors "
        "of a batch, or torch.multiprocessing.set_sharing_strategy('file_system')"
    )


def _busy_share(probe: Probe) -> float:
    """Cores that one worker keeps busy; 1 where that was not measured."""
    if not probe.fetch_s or probe.fetch_cpu_s is None:
        return 1.0
    return probe.fetch_cpu_s / probe.fetch_s


def _gigabytes(nbytes: int) -> int:
    """Twice as much, in whole gigabytes: other jobs and bigger batches come."""
    return max(1, math.ceil(2 * nbytes / (1 << 30)))
