"""Faults found by running a loader: before it is tuned, briefly, and in any run after.

Checks whether making a sample changes the data set that it is made of.

``image = self.images[i]`` is a view of an array: ``image -= mean`` changes the array, and the next
epoch begins with what this one left. Workers that start again each epoch have a fresh copy, which
hides it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from trainfit.findings import fixes
from trainfit.findings.facts import FailureContext
from trainfit.findings.source_code import function_syntax
from trainfit.findings.training.misuse import of_misuse
from trainfit.hardware.machine.cgroup import between, oom_kills
from trainfit.hooks.held_objects import walk
from trainfit.hooks.loaders import never_drawn
from trainfit.loader.diagnose import context_of, diagnose_run
from trainfit.loader.measure import processes
from trainfit.loader.measure.probe_runs import HARMLESS, START_METHODS, bounds_of
from trainfit.loader.measure.processes import captured_stderr
from trainfit.loader.measure.records import WALL, Run
from trainfit.loader.measure.running import others, run_loader
from trainfit.loader.measure.workload import Workload
from trainfit.loader.pickling import made_at, pickled, session_problem
from trainfit.loader.sharding import check_generators, check_sharding
from trainfit.results.dataloader import LoaderMachine, LoaderSettings, StartMethod
from trainfit.results.findings import Evidence, Finding, Fix, Place, failure_finding
from trainfit.results.runs.measurement import Consumer
from trainfit.results.text import duration, percent, rate

#: Bytes of arrays that are compared, and numbers that change from which it is no counter.
_MOST_BYTES: Final = 64 << 20
_LEAST: Final = 16
#: How often a sample is made before its arrays are expected to stay: a cache is filled once.
_FIRST: Final = 2


def check_changes(workload: Workload, limit_s: float = 10.0) -> tuple[Finding, ...]:
    """Make one sample a few times, in a forked process, and compare the arrays of the data set."""
    if workload.kind != "map":
        return ()
    changed = processes.call(functools.partial(changes, workload.dataset), limit_s).value
    if not changed:
        return ()
    path, numbers = changed
    return (
        Finding(
            "data_changed",
            "critical",
            f"Making a sample changes the data set: {numbers:,} numbers of {path} are others after "
            "it, and each epoch begins with what the last one left",
            (Evidence("numbers changed by one sample", numbers),),
            "an element of an array is a view of it, and an operator in place (-=, [...] =) "
            "changes the array itself; workers that are started for each epoch hide it",
            (Fix("a copy first: image = self.images[i].copy(), or .clone() of a tensor"),),
            place=_place(workload.dataset),
        ),
    )


def changes(dataset: Any) -> tuple[str, int] | None:
    """An array that a sample's making changes each time, and how many of its numbers; ``None``:
    there is none that is looked at."""
    index = 0
    for _ in range(_FIRST):
        dataset[index]
    arrays = list(_arrays(dataset))
    copies = [each.copy() for _, each in arrays]
    dataset[index]
    for (path, each), copy in zip(arrays, copies, strict=True):
        differs = (_bytes(copy) != _bytes(each)).reshape(-1, each.itemsize)
        changed = int(np.count_nonzero(differs.any(axis=1)))
        if changed >= _LEAST:
            return path, changed
    return None


def _arrays(dataset: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of the data set with their paths, up to so many bytes of them."""
    left = _MOST_BYTES
    for path, tensor in walk(dataset, type(dataset).__name__):
        array = tensor
        if isinstance(tensor, torch.Tensor):
            if (
                tensor.device.type != "cpu"
                or tensor.layout != torch.strided
                or tensor.requires_grad
            ):
                continue
            array = tensor.numpy() if tensor.dtype != torch.bfloat16 else None
        if not isinstance(array, np.ndarray) or isinstance(array, np.memmap):
            continue
        if array.dtype.hasobject or array.size < _LEAST or array.nbytes > left:
            continue
        left -= array.nbytes
        yield path, array


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _place(dataset: Any) -> Place | None:
    """The first operator in place of the method that makes a sample, or else that method."""
    method = getattr(type(dataset), "__getitem__", None)
    code = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
    if code is None:
        return None
    tree = function_syntax(code)
    nodes = () if tree is None else ast.walk(tree)
    lines = [node.lineno for node in nodes if isinstance(node, ast.AugAssign)]
    return Place.parse(f"{code.co_filename}:{min(lines, default=code.co_firstlineno)}")


#: The sampler is slow where it takes this share of the time between two batches: the main
#: thread can spend no more, next to receiving batches and the training step.
_SAMPLER_SHARE: Final = 0.25
#: Seconds before an epoch's first index that are worth a word.
_SLOW_FIRST_S: Final = 1.0
#: Batches of indices that are drawn to time a sampler.
_SAMPLER_BATCHES: Final = 64
#: Faults of how much there is, not of workers as such.
_OF_SIZE: Final = ("shm_full", "open_files", "out_of_memory", "worker_killed")
_ENDS_PROCESSES: Final = (*_OF_SIZE, "worker_crashed", "worker_exited")
#: Batches that a trial run takes.
_TRIAL_BATCHES: Final = 3


def check(
    workload: Workload,
    settings: LoaderSettings | None = None,
    *,
    limit_s: float = 10.0,
    batch_s: float | None = None,
    batches_per_s: float | None = None,
) -> tuple[Finding, ...]:
    """All checks that need no run of the loader itself.

    Args:
        settings: those that are wanted; by default the script's own.
        limit_s: time limit of each check.
        batch_s: what a worker takes for a batch, in seconds, if that is known.
        batches_per_s: the rate that the training takes batches at, if that is known.
    """
    settings = settings or workload.present
    faults = list(check_start(workload, settings, limit_s))
    faults += check_sharding(workload, limit_s)
    faults += check_generators(workload, limit_s)
    faults += check_changes(workload, limit_s)
    faults += check_sampler(workload, settings, batch_s, batches_per_s, limit_s)
    return tuple(faults)


# --- Workers that are not forked --------------------------------------------------------------


def check_start(
    workload: Workload, settings: LoaderSettings, limit_s: float = 10.0
) -> tuple[Finding, ...]:
    """Can workers be started by other means than a fork, and what are they sent?

    A data set that cannot be pickled is named under "fork", too: it bounds what may be tried.
    So is a file that is open before the workers start, which forked ones share.
    Its size, and whether workers can import its class, matter under the other methods only.
    """
    report = pickled(workload, limit_s)
    fault, shared = report.fault, report.shared_handle
    if settings.start_method == "fork":
        if fault is not None and fault.kind != "not_picklable":
            fault = None
        problem = None
    else:
        # A data set that leaves it out of its pickle opens it in the worker.
        shared, problem = (shared if report.culprits else None), session_problem(workload)
    found = fault if fault != shared else None
    if shared is not None:
        place = made_at(workload.dataset, next(iter(report.handles)))
        shared = dataclasses.replace(shared, place=place)
    return tuple(each for each in (shared, found, problem) if each is not None)


# --- The sampler ------------------------------------------------------------------------------


def check_sampler(
    workload: Workload,
    settings: LoaderSettings,
    batch_s: float | None = None,
    batches_per_s: float | None = None,
    limit_s: float = 10.0,
) -> tuple[Finding, ...]:
    """Is the sampler slow itself, and can it be iterated again?

    It runs in the main process, one batch's indices at a time: whatever the workers do, there
    are no more batches a second than that.
    """
    if workload.kind == "iterable":
        return ()
    loader = workload.loader(LoaderSettings(0))
    endless = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    source = getattr(endless, "_sampler", None)
    inner = getattr(source, "sampler", source)
    if source is None or inner is None:
        return ()
    if few := never_drawn(inner, workload.dataset):
        return (of_misuse(few),)
    if one_shot := _one_shot(source) or _one_shot(inner):
        return (one_shot,)
    seconds = list(workload.sampler_seconds)
    if not seconds:
        ended = processes.call(functools.partial(_draw, source, limit_s / 2), limit_s)
        if ended.hung:
            text = f"no batch of indices in {duration(limit_s)}"
            return (_slow_sampler(inner, text),)
        seconds = list(ended.value or ())
    return judge_sampler(inner, seconds, settings, batch_s, batches_per_s)


def judge_sampler(
    sampler: Any,
    seconds: Sequence[float],
    settings: LoaderSettings,
    batch_s: float | None,
    batches_per_s: float | None,
) -> tuple[Finding, ...]:
    """The faults of a sampler that took so many seconds for each batch's indices.

    The first of them has the making of an epoch's order in it.
    """
    faults: list[Finding] = []
    if seconds and seconds[0] >= _SLOW_FIRST_S:
        faults.append(
            _slow_sampler(sampler, f"{duration(seconds[0])} before an epoch's first batch")
        )
    later = sorted(seconds[1:])
    if not later:
        return tuple(faults)
    usual = later[len(later) // 2]
    wanted = batches_per_s
    if wanted is None and batch_s:
        wanted = max(1, settings.num_workers) / batch_s
    if wanted is not None and usual * wanted >= _SAMPLER_SHARE:
        text = (
            f"{duration(usual)} for the indices of a batch, in the main process: "
            f"{percent(usual * wanted)} of its time at {rate(wanted)} batches/s, and at most "
            f"{rate(1 / usual)} batches/s with any number of workers"
        )
        faults.append(_slow_sampler(sampler, text))
    return tuple(faults)


def _slow_sampler(sampler: Any, text: str) -> Finding:
    name = type(sampler).__name__
    try:
        many = f" over {len(sampler)} samples"
    except Exception:  # the sampler may be the user's own
        many = ""
    fix = fixes.HANGS["slow_sampler"]
    if name == "WeightedRandomSampler":
        fix = (
            "it draws a whole epoch at once (torch.multinomial) and converts it to a list: use "
            "num_samples smaller than the data set, or draw a group by weight and then a sample "
            "in it"
        )
    return failure_finding("slow_sampler", f"{name}{many} is itself slow", text, fix)


def _one_shot(sampler: Any) -> Finding | None:
    """A generator, or another iterator that is used up after one pass.

    An object of a class written in Python may restart in ``__iter__`` and still be its own
    iterator; built-in iterators do not.
    """
    is_python = "__dict__" in dir(type(sampler))
    if not inspect.isgenerator(sampler) and (is_python or not isinstance(sampler, Iterator)):
        return None
    text = f"the sampler is a {type(sampler).__name__}, which is its own iterator"
    summary = "The sampler is exhausted after one epoch"
    return failure_finding("not_restartable", summary, text, fixes.NOT_RESTARTABLE)


def _draw(source: Any, seconds: float) -> list[float]:
    taken: list[float] = []
    iterator, end = None, time.monotonic() + seconds
    for _ in itertools.repeat(None, _SAMPLER_BATCHES):
        began = time.perf_counter()
        iterator = iter(source) if iterator is None else iterator
        if next(iterator, None) is None:
            break
        taken.append(time.perf_counter() - began)
        if time.monotonic() > end:
            break
    return taken


# --- Workers as such --------------------------------------------------------------------------


def check_workers(
    workload: Workload,
    settings: LoaderSettings,
    *,
    limit_s: float = 20.0,
    alone_s: float | None = None,
    start_methods: Sequence[StartMethod] = START_METHODS,
) -> tuple[Finding, ...]:
    """Does the loader work with a worker at all? What fails is named, with what works instead.

    A few batches are made by one worker; if that fails, the same without workers, up to the batch
    that failed, and by one worker of each other start method that the fault leaves. A data set that
    works in the main process only gets the fault "main_process_only" in addition.

    Args:
        limit_s: time limit of each try.
        alone_s: what a batch takes without workers, in seconds, if that is known.
    """
    wanted = _one_worker(settings, settings.start_method)
    tried = _try(workload, wanted, limit_s, alone_s)
    if tried.fault is None or tried.fault.kind in HARMLESS:
        return () if tried.fault is None else (tried.fault,)
    none = LoaderSettings(0, start_method=settings.start_method)
    alone = _try(workload, none, limit_s, most_batches=tried.reached)
    if alone.fault is not None:
        return tried.fault, alone.fault
    if alone_s is None:
        tried = tried.compared(workload, alone.batch_s)
    fault = tried.fault
    assert fault is not None
    if fault.kind in HARMLESS or fault.kind in _OF_SIZE:
        return (fault,)
    for start in start_methods:
        other = _one_worker(settings, start)
        if other == wanted or not bounds_of(fault).allows(other):
            continue
        if _try(workload, other, limit_s, alone_s).fault is None:
            cause = f"{fault.cause}; it works with {start} here"
            return (dataclasses.replace(fault, cause=cause),)
    return fault, _main_process_only(fault)


def _main_process_only(fault: Finding) -> Finding:
    return failure_finding(
        "main_process_only",
        "The data set works in the main process only",
        f"with one worker: {fault.title} ({fault.cause}); without workers it returned a batch",
        f"num_workers=0 until it is fixed: {fault.fix.action}",
        fault.loader,
    )


@dataclasses.dataclass(frozen=True)
class _Tried:
    """A trial run, and the fault that it met, if any."""

    run: Run
    context: FailureContext
    fault: Finding | None

    @property
    def reached(self) -> int:
        """The number of the batch that it failed at; of what ends a process, which this one is not
        to meet, the first."""
        failure = self.run.failure
        if self.fault is not None and self.fault.kind in _ENDS_PROCESSES:
            return 1
        if failure is None or failure.exit_code is not None:
            return 1
        return 1 + max(len(self.run.handed), self.context.made if failure.hung else 0)

    @property
    def batch_s(self) -> float | None:
        """Production time of a batch."""
        records = [fetch for fetch in self.run.fetches if len(fetch)]
        return float(records[0][:, WALL].mean()) if records else None

    def compared(self, workload: Workload, alone_s: float | None) -> _Tried:
        """The same run, diagnosed with the time of a batch without workers (``None``: unknown)."""
        context = dataclasses.replace(self.context, alone_s=alone_s)
        return _Tried(self.run, context, diagnose_run(self.run, workload, context))


def _one_worker(settings: LoaderSettings, start: StartMethod) -> LoaderSettings:
    return LoaderSettings(1, 2, start_method=start, worker_threads=settings.worker_threads)


def _try(
    workload: Workload,
    settings: LoaderSettings,
    limit_s: float,
    alone_s: float | None = None,
    most_batches: int = _TRIAL_BATCHES,
) -> _Tried:
    before = oom_kills()
    with same_order(workload), captured_stderr() as output:
        run = run_loader(
            workload, settings, seconds=limit_s, limit_s=limit_s, most_batches=most_batches
        )
    context = context_of(
        run,
        limit_s=limit_s,
        alone_s=alone_s,
        oom_kills=between(before, oom_kills()),
        output=output.text,
    )
    good = run.failure is None and len(run.handed)
    return _Tried(run, context, None if good else diagnose_run(run, workload, context))


# ---
# One real run with what is needed to name its fault, in the order of batches of every other.


#: Batches (and steps) that a run's time limit leaves beyond its own time.
_SLOW_BATCHES: Final = 8


def run_watched(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    seconds: float,
    *,
    patience_s: float,
    batch_s: float,
    alone_s: float | None = None,
    machine: LoaderMachine | None = None,
    saves: bool = False,
    ranks: int = 1,
) -> tuple[Run, Finding | None]:
    """One real run, with what is needed to name its fault if it fails; next to the loaders of the
    other ``ranks``.

    Each run draws the same order of batches: what differs between runs is the settings alone.
    It is taken to hang ``patience_s`` seconds after its own time, and after what some batches
    take and their steps.
    """
    limit_s = seconds + patience_s + _SLOW_BATCHES * (consumer.step_s + batch_s)
    before = oom_kills()
    with (
        same_order(workload),
        captured_stderr() as output,
        others(workload, settings, consumer, ranks - 1, limit_s) as at_work,
    ):
        run = run_loader(
            workload, settings, consumer=consumer, seconds=seconds, limit_s=limit_s, saves=saves
        )
        run = dataclasses.replace(run, ranks=1 + at_work.working())
    if run.failure is None and not run.exhausted:
        return run, None
    context = context_of(
        run,
        limit_s=limit_s,
        alone_s=alone_s,
        shm_free_bytes=machine.shm_free_bytes if machine is not None else None,
        ram_free_bytes=machine.available_bytes if machine is not None else None,
        open_files=machine.open_files if machine is not None else None,
        oom_kills=between(before, oom_kills()),
        output=output.text,
    )
    return run, diagnose_run(run, workload, context)


@contextlib.contextmanager
def same_order(workload: Workload) -> Iterator[None]:
    """Leave random numbers as they are: the next run draws the same order of batches.

    Runs with workers happen in a fork and change nothing here; those without do.
    """
    state, generators = torch.random.get_rng_state(), workload.generators
    states = [each.get_state() for each in generators]
    others = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
        random.setstate(others[0])
        np.random.set_state(others[1])
        for generator, former in zip(generators, states, strict=True):
            generator.set_state(former)
