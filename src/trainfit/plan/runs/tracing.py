"""Runs a command on the simulated GPU in a child process and reads back what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainfit.findings.tracebacks import NO_MEMORY, own_fault_in
from trainfit.hardware import GpuSpec
from trainfit.memory.replay import Stream, replay
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.runs.processes import OwnProcess, Process, WarmProcesses, available_ram, can_fork
from trainfit.plan.runs.side_by_side import Post
from trainfit.results.files.errors import ResultFileError, TrainfitError
from trainfit.results.gpus import DeviceConstants
from trainfit.results.runs.communication import EQUAL
from trainfit.results.runs.continuation import whole
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.script import Protection
from trainfit.results.runs.spec import AS_WRITTEN, OUTCOME_FILE, RECORDING_FILE, RunSpec
from trainfit.results.runs.trace import (
    EARLY_FILE,
    INTERRUPT_FILE,
    STATUS_FILE,
    WAITS_IN_VAIN,
    RunStatus,
    TraceOutcome,
)
from trainfit.results.text import signal_name, size
from trainfit.simgpu.allocator.settings import AllocatorSettings
from trainfit.simgpu.cuda_clocks import LONGEST
from trainfit.simgpu.device.settling import MOST_STEPS
from trainfit.torch_private import needed

#: Steps of ranks that run side by side: the first, and two like all others.
COMPANY_STEPS = 3
#: Seconds between the outcome and the end of the process before it is killed.
_GRACE_S = 20.0
#: Seconds past the time limit after which the child is taken not to see to it itself.
_OVERTIME_S = 30.0
#: Seconds that an interrupted run gets to tell what it has: on a machine whose cores others have,
#: some hundred thousand operators are written in 10 to 20.
_INTERRUPT_S = 30.0
#: Seconds between looks at a running process: each is a few calls of the system.
_TICK_S = 0.05
#: Seconds between looks at how far a run is.
_LOOK_S = 0.25
#: Bytes of the script's output that are kept.
_OUTPUT_BYTES = 1 << 16


class ProtectionError(TrainfitError):
    """Nothing here keeps the script from changing files, and the user did not allow it."""


class Stopped(Exception):
    """The tracer was stopped while the run was going on."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """One simulated run: its outcome, its recording, and the end of what it printed; and the user's
    interrupt that ended it, if one did and what it had by then was asked for. ``ranks`` are the
    runs of the job's ranks by number, where those ran side by side."""

    outcome: TraceOutcome
    recording: Recording | None
    output: str
    interrupt: KeyboardInterrupt | None = None
    ranks: Mapping[int, Trace] = dataclasses.field(default_factory=dict)


def recording_of(trace: Trace) -> Recording:
    """The recording of a run that made a step, as :func:`trainfit.plan.runs.failures.require_step`
    made sure."""
    assert trace.recording is not None
    return trace.recording


class Tracer:
    """Runs traces of one command, from any thread; a context manager.

    It owns a scratch directory, and no run outlives it. With ``warm`` its runs are forked from
    processes that have imported PyTorch already, where the system allows that.
    ``steps`` of ``None`` are as many as memory needs to settle, within bounds. With
    ``keeps_interrupted`` a run in the main thread that the user interrupts is asked for what it
    has. ``only_training``: runs end where an evaluation begins, but for those that are cut short
    to have one.
    """

    def __init__(
        self,
        command: Command,
        gpu: GpuSpec,
        *,
        steps: int | None = None,
        limited: bool = False,
        time_limit_s: float = 600.0,
        constants: DeviceConstants | None = None,
        warm: WarmProcesses | None = None,
        keeps_interrupted: bool = False,
        only_training: bool = False,
    ) -> None:
        self._command = command
        self._only_training = only_training
        self._keeps_interrupted = keeps_interrupted
        self._warm = warm if can_fork() else None
        self._gpu, self._constants, self._limited = gpu, constants, limited
        self._steps, self._limit = steps, time_limit_s
        self._numbers = itertools.count(1)
        self._stopped = threading.Event()
        self._at_exit = contextlib.ExitStack()
        #: Ranks that run side by side, the one whose outcome counts first (none: one runs alone).
        self.company: tuple[int, ...] = ()

    def __enter__(self) -> Tracer:
        if self._warm is not None:
            self._scratch = self._warm.folder()
        else:
            own = tempfile.TemporaryDirectory(prefix="trainfit-")
            self._scratch = Path(self._at_exit.enter_context(own))
        return self

    def __exit__(self, *_: object) -> None:
        self._at_exit.close()

    @property
    def is_stopped(self) -> bool:
        """Do all runs raise :class:`Stopped`?"""
        return self._stopped.is_set()

    def use(self, command: Command) -> None:
        """Trace ``command`` from now on, which says the same in other words."""
        self._command = command

    def stop(self) -> None:
        """End the runs that are going on: one of which something was told (``early``) with what it
        has; the others, and all later ones, raise :class:`Stopped`."""
        self._stopped.set()

    def trace(
        self,
        spec: RunSpec = AS_WRITTEN,
        *,
        constants: Mapping[str, int] | None = None,
        heard: Callable[[RunStatus], None] = lambda status: None,
        look: Callable[[], None] = lambda: None,
        early: Callable[[Recording], None] | None = None,
    ) -> Trace:
        """Simulate the command as ``spec`` says, and with ``constants`` of its script: with others
        of its company side by side, if it has any.

        ``heard`` is told now and then how far the run is; ``look`` is called all the time, and
        ends the run by raising. ``early`` gets what a run that goes on for seconds after its second
        step has recorded by then.
        """
        company = spec.company or self.company
        if not company or (spec.rank and not spec.company):
            return self._one(spec, self._folder(), constants, heard, look, early)
        first = spec.rank if spec.company else company[0]
        others = [rank for rank in company if rank != first]
        folders = {rank: self._folder() for rank in company}
        post, over = Post(folders), threading.Event()

        def one(rank: int) -> Trace:
            def looks() -> None:
                post.carry()
                if rank == first:
                    look()
                elif over.is_set():
                    raise Stopped

            steps = spec.steps if spec.company else self._steps or COMPANY_STEPS
            own = dataclasses.replace(spec, rank=rank, company=company)
            own = own if spec.cut is not None else dataclasses.replace(own, steps=steps)
            try:
                return self._one(own, folders[rank], constants, heard, looks, None)
            finally:
                post.ended(rank)

        with ThreadPoolExecutor(len(others)) as pool:
            futures = {rank: pool.submit(one, rank) for rank in others}
            try:
                traces = {first: one(first)}
            except BaseException:
                over.set()
                raise
            traces |= {rank: future.result() for rank, future in futures.items()}
        return traces[first] if spec.company else _of_heaviest(traces)

    def _folder(self) -> Path:
        folder = self._scratch / f"trace-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def _one(
        self,
        spec: RunSpec,
        folder: Path,
        constants: Mapping[str, int] | None,
        heard: Callable[[RunStatus], None],
        look: Callable[[], None],
        early: Callable[[Recording], None] | None,
    ) -> Trace:
        """One process."""
        command, values = self._command, spec.values
        batch = values.get("batch_size", command.present.get("batch_size"))
        target = command.target(**values)
        # Of several ranks, or of an epoch that is cut short, the steps are said.
        is_cut = spec.cut is not None or spec.rank > 0 or bool(spec.company)
        settles = self._steps is None and not is_cut
        most = MOST_STEPS if self._steps is None else self._steps
        if settles and spec.steps > 1:  # so many show what is asked
            most, settles = spec.steps, False
        dataclasses.replace(
            spec,
            gpu=self._gpu,
            constants=self._constants,
            limited=self._limited,
            steps=spec.steps if is_cut else most,
            until_settled=settles,
            only_training=self._only_training and self._steps is None and not is_cut,
            time_limit_s=min(self._limit, spec.time_limit_s) if is_cut else self._limit,
            target=dataclasses.replace(target, constants=dict(constants or {})),
            command=command.line(**values),
            batch_size=None if batch is None else int(batch),
            folder=str(folder),
            tells_early=early is not None,
        ).write()
        environment = {**os.environ, **command.environment(**values)}
        # A script that was forked at its arguments has its constants by then.
        grows = not (spec.interventions or spec.survey or constants or spec.rank or spec.company)
        status = _StatusReader(folder / STATUS_FILE, heard)
        listeners = [early] if early is not None else []

        def looks() -> None:
            look()
            status()
            if listeners and (folder / EARLY_FILE).is_file():
                with contextlib.suppress(ResultFileError):
                    listeners.pop()(Recording.load(folder / EARLY_FILE))

        return self._run(folder, environment, looks, grows)

    def _run(
        self,
        folder: Path,
        environment: Mapping[str, str],
        look: Callable[[], None],
        grows: bool,
    ) -> Trace:
        started = time.monotonic()
        process = self._start(folder, environment, grows)
        interrupt, longest = None, LONGEST * self._limit
        if self._keeps_interrupted:
            interrupt = _asked_when_interrupted(process, folder, longest, self._stopped, look)
        child = _child(process, folder, started, longest, self._stopped, look)
        outcome, recording = _outcome(folder, child, self._limit), _recording(folder)
        if recording is not None:
            needed.saw(recording.header["torch"])
        return Trace(outcome, recording, child.output, interrupt)

    def _start(self, folder: Path, environment: Mapping[str, str], grows: bool) -> Process:
        if self._warm is None:
            return OwnProcess(self._command, folder, environment)
        return self._warm.of(self._command, environment).start(folder, grow=grows)


def _of_heaviest(traces: Mapping[int, Trace]) -> Trace:
    """What the first rank says of the job, with the recording of the one that needs the most
    memory; or the first that failed, and did not only wait for one that has."""
    first, *_ = traces.values()
    failed = [
        trace for trace in traces.values() if trace.outcome.status not in ("finished", "ended")
    ]
    ram = sum(trace.outcome.peak_ram_bytes for trace in traces.values())
    if failed:
        worst = min(failed, key=lambda each: each.outcome.message.startswith(WAITS_IN_VAIN))
        return dataclasses.replace(worst, ranks=traces)
    found = {
        rank: replay(Stream.of(trace.recording)).peak_reserved
        for rank, trace in traces.items()
        if trace.recording is not None and trace.recording.steps
    }
    if not found:
        return dataclasses.replace(first, ranks=traces)
    rank = max(found, key=lambda rank: found[rank])
    recording = traces[rank].recording
    assert recording is not None
    header = recording.header.copy()
    header["notes"] = [
        *(header.get("notes") or ()),
        f"of the {len(traces)} ranks that send to each other, memory is that of rank {rank}, which "
        "needs the most",
    ]
    if recording.ranks == len(traces):  # all of them ran
        header["assumptions"] = {
            text: times for text, times in header["assumptions"].items() if text != EQUAL
        }
    if first.recording is not None:
        step = first.recording.header.get("step")
        # A batch goes through all of them.
        own = {"processes": max(1, recording.ranks // len(traces))}
        header["step"] = None if step is None else {**step, **own}
    recording = dataclasses.replace(recording, header=header)
    # A pipeline's schedule divides gradients after the losses of micro-batches were added.
    learning = dataclasses.replace(first.outcome.learning, loss_is_known=False)
    outcome = dataclasses.replace(first.outcome, peak_ram_bytes=ram, learning=learning)
    return dataclasses.replace(first, outcome=outcome, recording=recording, ranks=traces)


@dataclasses.dataclass(frozen=True)
class Child:
    """A child process that has ended: its exit code (``None``: it had to be ended), the
    seconds that it ran, the end of what it printed, and what kept it from changing files."""

    code: int | None
    seconds: float
    output: str
    protection: Protection | None = None

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return ending(self.code or 0)


class _StatusReader:
    """Reads now and then how far a run is, and passes it on where it is news."""

    def __init__(self, path: Path, heard: Callable[[RunStatus], None]) -> None:
        self._path, self._heard = path, heard
        self._next = 0.0
        self._last: RunStatus | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        with contextlib.suppress(OSError, ValueError):
            status = RunStatus.load(self._path)
            if status != self._last:
                self._last = status
                self._heard(status)


def run_child(
    command: Command,
    module: str,
    folder: Path,
    environment: Mapping[str, str],
    limit_s: float,
    *,
    runs_script: bool = True,
) -> Child:
    """Run ``main`` of ``module`` in the command's interpreter, with ``request.json`` of ``folder``.

    It is waited for until it ends, and not for long once ``outcome.json`` is written there.
    No process outlives the call.
    """
    started = time.monotonic()
    process = OwnProcess(command, folder, environment, module, runs_script=runs_script)
    return _child(process, folder, started, limit_s, threading.Event())


def run_real(
    command: Command, spec: RunSpec, module: str, variables: Mapping[str, str] | None = None
) -> Child:
    """Run a script for real by ``main`` of ``module``, as ``spec`` says; ``variables`` are added
    to its environment."""
    spec.write()
    environment = {**os.environ, **command.environment(), **(variables or {})}
    return run_child(command, module, Path(spec.folder), environment, spec.time_limit_s)


def _child(
    process: Process,
    folder: Path,
    started: float,
    limit_s: float,
    stopped: threading.Event,
    look: Callable[[], None] = lambda: None,
) -> Child:
    """Wait for a run of which ``folder`` holds request and outcome; raises :class:`Stopped`,
    and :class:`ProtectionError` or :class:`tested.RefusedError` where it was not made."""
    try:
        code = _wait(process, folder, limit_s, stopped, look)
    finally:
        process.end()
    seconds = time.monotonic() - started
    output = tail_of_file(folder / "output.txt")
    needed.check(code, output)
    return Child(code, seconds, output, protection_of(folder))


def _asked_when_interrupted(
    process: Process,
    folder: Path,
    limit_s: float,
    stopped: threading.Event,
    look: Callable[[], None],
) -> KeyboardInterrupt | None:
    """Wait for a run; upon the user's interrupt, for what it then tells of itself."""
    try:
        _wait(process, folder, limit_s, stopped, look)
    except KeyboardInterrupt as interrupt:
        if not _tells_what_it_has(process, folder):
            process.end()
            raise
        return interrupt
    return None


def _tells_what_it_has(process: Process, folder: Path) -> bool:
    """Ask a run to end with what it has, and wait for that; did it?"""
    outcome = folder / OUTCOME_FILE
    (folder / INTERRUPT_FILE).touch()
    deadline = time.monotonic() + _INTERRUPT_S
    while process.poll() is None and time.monotonic() < deadline and not outcome.is_file():
        time.sleep(_TICK_S)
    return outcome.is_file()


def protection_of(folder: Path) -> Protection | None:
    """What protected the run in ``folder``; raises :class:`ProtectionError`."""
    protection = Protection.load(folder)
    if protection is not None and protection.not_run:
        raise ProtectionError(protection.stopped)
    return protection


def _wait(
    process: Process,
    folder: Path,
    limit_s: float,
    stopped: threading.Event,
    look: Callable[[], None],
) -> int | None:
    """Wait until the process ends; not for long once the outcome is written. One that is stopped is
    asked for what it has where something of it was told already, else it raises."""
    outcome = folder / OUTCOME_FILE
    deadline = time.monotonic() + limit_s + _OVERTIME_S
    while (code := process.poll()) is None and time.monotonic() < deadline:
        time.sleep(_TICK_S)  # not on the event: see `result_of`
        if stopped.is_set():
            if (folder / EARLY_FILE).is_file() and _tells_what_it_has(process, folder):
                return process.poll()
            raise Stopped
        look()
        if outcome.is_file():
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    return code


def allocator_settings(command: Command) -> AllocatorSettings:
    """The caching allocator's settings in the command's environment."""
    environment = {**os.environ, **command.environment()}
    try:
        return AllocatorSettings.from_environment(environment, command.interpreter.torch)
    except ValueError as error:
        raise CommandError(f"{error}; correct the variable, or unset it") from None


def _outcome(folder: Path, child: Child, limit: float) -> TraceOutcome:
    """What the child wrote, or what its silence means."""
    why = child.ending + (_ram_words() if child.code == -signal.SIGKILL else "")
    outcome = TraceOutcome(status="died", steps=0, seconds=child.seconds, message=why)
    stopped = child.protection.stopped if child.protection is not None else ""
    if stopped:
        outcome = dataclasses.replace(outcome, status="failed", message=stopped)
    elif child.seconds >= limit:
        outcome = dataclasses.replace(outcome, status="timeout", message="")
    if outcome.status == "died":
        why += _space_words(child.output)
        fault = own_fault_in(child.output)
        outcome = dataclasses.replace(outcome, message=why, own_fault=fault)
    with contextlib.suppress(OSError, ValueError):
        outcome = TraceOutcome.load(folder / OUTCOME_FILE)
    return dataclasses.replace(outcome, protection=child.protection)


def _ram_words() -> str:
    """What RAM there was for a process that the kernel may have ended for want of it."""
    ram = available_ram()
    return "" if ram is None else f"; {size(ram)} of RAM are available without it"


def _space_words(output: str) -> str:
    """What limits the memory of a process that said that it got none; empty where nothing does."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not NO_MEMORY.search(output):
        return ""
    return f"; its address space is limited to {size(limit)}: raise that limit (ulimit -v)"


def ending(code: int) -> str:
    """How a process ended that had this exit code (negative: signal), in words."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was killed by {signal_name(-code)}"


def _recording(folder: Path) -> Recording | None:
    try:
        return whole(Recording.load(folder / RECORDING_FILE))
    except ResultFileError:
        return None  # a run that came to nothing


def tail_of_file(path: Path) -> str:
    """The end of what was printed into a file; empty where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _OUTPUT_BYTES))
        return stream.read().decode(errors="replace")
