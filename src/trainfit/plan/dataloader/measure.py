"""Measures the DataLoader of a command in a child process, and tells how it goes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trainfit.hardware import GpuNameError, GpuSpec, find_gpu, local_gpu
from trainfit.plan.command.core_wrapper import core_wrapper
from trainfit.plan.command.parsing import Command, quote
from trainfit.plan.launch.line import launch, useless_variables
from trainfit.plan.runs.failures import (
    ScriptError,
    last_lines,
    one_line,
    remedy,
    what_happened,
)
from trainfit.plan.runs.processes import OwnProcess
from trainfit.plan.runs.tracing import ending, protection_of, tail_of_file
from trainfit.results.files.errors import TrainfitError
from trainfit.results.files.words import count
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.loading import AS_FAST, Consumer, LoadingOutcome, LoadingRequest
from trainfit.results.runs.sandbox import UNASKED, Protection, SandboxRequest
from trainfit.results.runs.trace import TraceOutcome

#: Simulated where no GPU is named and none is here: the loader does not depend on it.
DEFAULT_GPU: Final = "RTX 4090"
_MODULE: Final = "trainfit.plan.dataloader.child"
_TICK_S: Final = 0.05
#: Seconds from the outcome to the end of the process before it is killed.
_GRACE_S: Final = 10.0
#: Seconds that an interrupted child gets to write down what it has.
_INTERRUPT_S: Final = 5.0
#: Seconds that a started process has at least, whatever the time limit: it imports PyTorch.
_LEAST_S: Final = 1.0


@dataclasses.dataclass(frozen=True)
class LoadingOptions:
    """How a loader is to be measured.

    ``step`` is the time of a training step (``step_is_bound``: no step is likely to be shorter);
    without it, ``gpu`` gives the lower bound of the prediction for the simulated step; without
    both the step time is 0. ``ranks``
    processes share the machine. ``loader`` ("module:callable") stands for a command, and
    ``batch_size`` is for a data set that it gives. ``time_limit_s`` is for everything,
    ``script_limit_s`` for the script's way to its first step (by default as long). ``sandbox``
    says what may come of the files that the script writes.
    """

    step: Consumer | None = None
    gpu: GpuSpec | None = None
    seconds: float = 20.0
    confirm: int = 4
    max_workers: int | None = None
    any_order: bool = False
    ranks: int = 1
    time_limit_s: float = 600.0
    loader: str = ""
    batch_size: int | None = None
    script_limit_s: float | None = None
    step_is_bound: bool = False
    sandbox: SandboxRequest = UNASKED


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a measuring process does now: begun ``elapsed_s`` after the start of everything.

    ``share`` of the measurement is done (``None``: nothing is measured yet).
    """

    text: str
    elapsed_s: float
    share: float | None


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a child process made: its function's result as JSON (``None``: it came to none),
    the last one that was kept before something that ended it, and what was printed."""

    outcome: LoadingOutcome | None
    result: str | None
    partial: str | None
    output: str
    stage: str
    code: int | None
    seconds: float
    protection: Protection | None = None
    wrapper_failure: str = ""
    """Why it ran without what the command puts before its program to choose cores."""
    interrupt: KeyboardInterrupt | None = None
    """The user's, upon which the function gave the result that it had by then."""


class Listener:
    """Hears of a measurement: ``stage`` when something begins, ``tick`` all the time."""

    def stage(self, stage: Stage) -> None:
        """Something else begins."""

    def tick(self, stage: Stage) -> None:
        """It goes on."""


class _Lines(Listener):
    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress

    def stage(self, stage: Stage) -> None:
        self._progress(stage.text)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What tuning found, and the user's interrupt that ended it, if one did."""

    result: LoaderResult
    interrupt: KeyboardInterrupt | None


def tune_command(
    command: Command | None,
    options: LoadingOptions,
    progress: Callable[[str], None] | Listener = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """The settings that suit the loader of ``command``, or of ``options.loader``.

    Raises :class:`~trainfit.plan.runs.failures.ScriptError` where the script comes to no loader
    that can be measured.
    """
    loaded = call_on_loader(command, options, progress, clock=clock)
    text = loaded.result or loaded.partial
    assert text is not None
    result = LoaderResult.from_json(text, Path("the measuring process"))
    line, said = _launch(command, result)
    result = dataclasses.replace(
        result,
        notes=(*result.notes, *said, *notes_of(loaded, command, options)),
        launch=line,
        step_is_bound=(options.step is None or options.step_is_bound) and result.step_s > 0,
        seconds=result.seconds or loaded.seconds,
        protection=loaded.protection,
    )
    return Tuned(result, loaded.interrupt)


def _launch(command: Command | None, result: LoaderResult) -> tuple[str, tuple[str, ...]]:
    """The command with variables and cores before it, and notes; empty where nothing is."""
    if command is None:
        return "", ()
    advised = launch(command, {}, {}, result.variables, result.cores, useless_variables(result))
    return advised.line if advised.line != command.line() else "", advised.notes


def call_on_loader(
    command: Command | None,
    options: LoadingOptions,
    progress: Callable[[str], None] | Listener = lambda text: None,
    function: str = "tune",
    arguments: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Loaded:
    """Call ``function`` ("trainfit.module:function") on the loader, in a child process.

    It gets the workload and the request (:mod:`trainfit.loader.child`); ``arguments`` are in
    the latter as JSON. There is a result or a partial one; raises :class:`ScriptError` else.
    A ``KeyboardInterrupt`` reaches the function too, and is raised here unless that gives a
    result all the same.
    """
    listener = progress if isinstance(progress, Listener) else _Lines(progress)
    with tempfile.TemporaryDirectory(prefix="trainfit-") as name:
        request = _request(command, options, Path(name))
        request = dataclasses.replace(
            request, function=function, arguments=json.dumps(dict(arguments or {}))
        )
        protected = dataclasses.replace(command or _no_command(), sandbox=options.sandbox)
        loaded = _Process(request, protected, listener, clock).run()
    if loaded.result is None and loaded.partial is None:
        raise _failure(loaded, command, options)
    return loaded


def _gpu(options: LoadingOptions) -> GpuSpec:
    if options.gpu is not None:
        return options.gpu
    try:
        return local_gpu() or find_gpu(DEFAULT_GPU)
    except GpuNameError:  # one that the catalogue does not know
        return find_gpu(DEFAULT_GPU)


def _request(command: Command | None, options: LoadingOptions, folder: Path) -> LoadingRequest:
    return LoadingRequest(
        folder=str(folder),
        gpu=_gpu(options),
        target=command.target() if command is not None else None,
        loader=options.loader,
        batch_size=options.batch_size,
        step=_known_step(command, options),
        seconds=options.seconds,
        confirm=options.confirm,
        max_workers=options.max_workers,
        any_order=options.any_order,
        ranks=options.ranks,
        script_limit_s=options.script_limit_s or options.time_limit_s,
        limit_s=options.time_limit_s,
        command=command.line() if command is not None else _given(options),
        variables=command.environment() if command is not None else {},
    )


def _given(options: LoadingOptions) -> str:
    """The options that stand for a command."""
    size = f" --batch-size {options.batch_size}" if options.batch_size is not None else ""
    return f"--loader {quote(options.loader)}{size}"


def _known_step(command: Command | None, options: LoadingOptions) -> Consumer | None:
    """The step's time, unless the script has to be simulated for it."""
    if options.step is not None:
        return options.step
    if options.gpu is None or command is None:
        return Consumer(0.0, source=AS_FAST)
    return None


class _Process:
    """One child process, from its request to its outcome."""

    def __init__(
        self,
        request: LoadingRequest,
        command: Command,
        listener: Listener,
        clock: Callable[[], float],
    ) -> None:
        self._request, self._command = request, command
        self._listener, self._clock = listener, clock
        self._folder = Path(request.folder)
        self._wrapper = core_wrapper(command)
        self._read = 0
        self._stage = Stage("starting", 0.0, None)

    def run(self) -> Loaded:
        """Wait until it ends or its time is over; no process outlives the call."""
        (self._folder / "request.json").write_text(self._request.to_json())
        environment = {**os.environ, **self._command.environment()}
        self._began = self._clock()
        process = OwnProcess(
            self._command, self._folder, environment, _MODULE, wrapper=self._wrapper.words
        )
        try:
            code = self._wait(process)
        except KeyboardInterrupt as interrupt:
            process.interrupt()
            loaded = self._loaded(self._end(process))
            if loaded.result is None and loaded.partial is None:
                raise
            return dataclasses.replace(loaded, interrupt=interrupt)
        finally:
            process.end()
        self._follow()
        loaded = self._loaded(code)
        return dataclasses.replace(loaded, protection=protection_of(self._folder))

    def _end(self, process: OwnProcess) -> int | None:
        """Wait for what a child makes of an interrupt."""
        deadline = self._clock() + _INTERRUPT_S
        while (code := process.poll()) is None and self._clock() < deadline:
            if (self._folder / "outcome.json").is_file():
                break
            time.sleep(_TICK_S)
        return code

    def _wait(self, process: OwnProcess) -> int | None:
        outcome = self._folder / "outcome.json"
        deadline = self._began + max(_LEAST_S, self._request.limit_s)
        while (code := process.poll()) is None and self._clock() < deadline:
            if outcome.is_file():
                deadline = min(deadline, self._clock() + _GRACE_S)
            self._follow()
            time.sleep(_TICK_S)
        return code

    def _follow(self) -> None:
        """Read on in what the child tells of its progress."""
        elapsed = self._clock() - self._began
        with contextlib.suppress(FileNotFoundError):
            data = (self._folder / "progress").read_bytes()
            end = data.rfind(b"\n") + 1
            for line in data[self._read : end].splitlines():
                told = json.loads(line)
                self._stage = Stage(told["text"], elapsed, told["share"])
                self._listener.stage(self._stage)
            self._read = max(self._read, end)
        self._listener.tick(dataclasses.replace(self._stage, elapsed_s=elapsed))

    def _loaded(self, code: int | None) -> Loaded:
        outcome = None
        with contextlib.suppress(OSError, ValueError):
            outcome = LoadingOutcome.load(self._folder / "outcome.json")
        return Loaded(
            outcome,
            self._text("result.json"),
            self._text("partial.json"),
            tail_of_file(self._folder / "output.txt"),
            self._stage.text,
            code,
            self._clock() - self._began,
            wrapper_failure=self._wrapper.failure,
        )

    def _text(self, name: str) -> str | None:
        path = self._folder / name
        return path.read_text() if path.is_file() else None


def _no_command() -> Command:
    """Python alone, where a callable is named in a command's place."""
    return Command((), {}, None, (), sys.executable, (), "script", "", 0)


# -- what to say -------------------------------------------------------------------------------


def notes_of(loaded: Loaded, command: Command | None, options: LoadingOptions) -> list[str]:
    """What a reader of the result should know of how it was made."""
    notes = [loaded.wrapper_failure] if loaded.wrapper_failure else []
    trace = loaded.outcome.trace if loaded.outcome is not None else None
    if trace is not None and trace.status == "unsupported":
        notes.append(
            f"the script's step could not be simulated ({one_line(trace.message)}); the "
            "DataLoader that gave the last batch before that was measured"
        )
    if trace is not None and trace.status == "timeout":
        notes.append(
            f"the script made no optimizer step in {trace.seconds:.0f} s; the DataLoader that "
            "gave the last batch by then was measured"
        )
    if command is not None and options.gpu is None:
        notes.append(f"the script ran on a simulated {_gpu(options).key}: --gpu names another")
    outcome = loaded.outcome
    if outcome is not None and outcome.status == "failed" and loaded.result is None:
        notes.append(f"measuring failed ({outcome.error}) while {loaded.stage}; results so far")
    elif loaded.interrupt is not None and loaded.result is None:
        notes.append(f"interrupted while {loaded.stage}; results so far")
    elif loaded.result is None:
        notes.append(f"{_broken_off(loaded, options)}; results so far")
    return notes


def _failure(loaded: Loaded, command: Command | None, options: LoadingOptions) -> TrainfitError:
    outcome = loaded.outcome
    name = command.name if command is not None else "--loader"
    if outcome is None and loaded.protection is not None and loaded.protection.stopped:
        return ScriptError(f"{name}: {loaded.protection.stopped}", last_lines(loaded.output))
    if outcome is None:
        said = f"{_broken_off(loaded, options)}; {_remedy(loaded.code)}"
        return ScriptError(f"{name}: {said}", last_lines(loaded.output))
    output = outcome.traceback or last_lines(loaded.output)
    if outcome.status == "script":
        assert outcome.trace is not None
        output = outcome.trace.traceback or last_lines(loaded.output)
        return ScriptError(f"{name}: {_script_failed(outcome.trace)}", output)
    if outcome.status == "loader" and not outcome.traceback:
        return ScriptError(f"{name}: {outcome.error}" if command is not None else outcome.error)
    if outcome.status == "loader":
        return ScriptError(outcome.error, outcome.traceback)
    where = f" ({outcome.loader})" if outcome.loader else ""
    return ScriptError(f"{name}: its loader{where} could not be measured: {outcome.error}", output)


def _remedy(code: int | None) -> str:
    if code is None:
        return "raise --time-limit"
    if code == -signal.SIGKILL:
        return "the system kills processes this way when memory runs out: see the system log"
    return "its last lines are below"


def _broken_off(loaded: Loaded, options: LoadingOptions) -> str:
    if loaded.code is None:
        return f"the time limit of {options.time_limit_s:g} s was reached while {loaded.stage}"
    return f"{ending(loaded.code)} while {loaded.stage}"


def _script_failed(trace: TraceOutcome) -> str:
    what = what_happened(trace)
    after = f"after {trace.seconds:.1f} s, before its first optimizer step"
    if trace.status == "timeout":
        made = count(trace.loaders, "DataLoader")
        return (
            f"{what} {after} (seen: {made}); shorten what comes before training, or raise "
            "--time-limit"
        )
    if trace.status == "unsupported":
        return f"{one_line(trace.message)}; name what creates its DataLoader with --loader"
    if trace.status == "exited":
        return f"{what} {after}; its own message is below"
    return f"{what} {after}; {remedy(trace)}"
