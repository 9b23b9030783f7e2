"""The child process that measures a command's DataLoader, from its request to its outcome.

It is started with the programs before the command that choose its cores or its priority
(``taskset``, ``nice``, …): a loader is measured as it will run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainfit.plan.command.parsing import Command
from trainfit.plan.runs.failures import one_line
from trainfit.plan.runs.processes import OwnProcess
from trainfit.plan.runs.tracing import protection_of, tail_of_file
from trainfit.results.runs.measurement import LoadingOutcome
from trainfit.results.runs.script import Protection
from trainfit.results.runs.spec import OUTCOME_FILE, RunSpec
from trainfit.torch_private import needed

# ---
# Programs before a command that choose its cores or its priority: ``taskset``, ``nice``, ….
#
# A loader is measured as it will run, so its process is started with the same.


#: Programs that choose cores, or a priority on them or on disks, for the one that they start.
_CORES: Final = ("taskset", "numactl")
_CHOOSES: Final = (*_CORES, "nice", "ionice", "chrt")
#: Seconds that one gets to start nothing.
_PATIENCE_S: Final = 20.0


@dataclass(frozen=True)
class CoreWrapper:
    """Words before a process that choose its cores and priority; ``failure`` says why some of the
    command's cannot be used here."""

    words: tuple[str, ...] = ()
    failure: str = ""


def core_wrapper(command: Command) -> CoreWrapper:
    """The wrappers of ``command`` that choose cores or priority, once they have started something
    here.

    One that does not (it is not installed, or names cores of another machine) is left out.
    """
    wrappers = [words for words in command.wrappers() if Path(words[0]).name in _CHOOSES]
    words: tuple[str, ...] = ()
    failures = []
    for each in wrappers:
        failure = _tried((*words, *each, command.python, "-c", ""))
        if not failure:
            words += each
            continue
        without = "on all cores available to this process"
        if Path(each[0]).name not in _CORES:
            without = "without it"
        failures.append(
            f"the command's `{' '.join(each)}` does not work here ({failure}): the DataLoader was "
            f"measured {without}"
        )
    return CoreWrapper(words, "; ".join(failures))


def _tried(words: Sequence[str]) -> str:
    """The error of this run; empty: none."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(str(error))
    return "" if not done.returncode else one_line(done.stderr) or f"exit code {done.returncode}"


_MODULE: Final = "trainfit.plan.dataloader.child"
_TICK_S: Final = 0.05
#: Seconds from the outcome to the end of the process before it is killed.
_GRACE_S: Final = 10.0
#: Seconds that an interrupted child gets to write down what it has: it has to get a core first.
_INTERRUPT_S: Final = 30.0
#: Seconds that a started process has at least, whatever the time limit: it imports PyTorch.
_LEAST_S: Final = 1.0


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


class LoadingProcess:
    """One child process, from its request to its outcome."""

    def __init__(
        self,
        spec: RunSpec,
        command: Command,
        listener: Listener,
        clock: Callable[[], float],
    ) -> None:
        self._spec, self._command = spec, command
        self._listener, self._clock = listener, clock
        self._folder = Path(spec.folder)
        self._wrapper = core_wrapper(command)
        self._read = 0
        self._stage = Stage("starting", 0.0, None)

    def run(self) -> Loaded:
        """Wait until it ends or its time is over; no process outlives the call."""
        self._spec.write()
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
        needed.check(code, tail_of_file(self._folder / "output.txt"))
        return dataclasses.replace(loaded, protection=protection_of(self._folder))

    def _end(self, process: OwnProcess) -> int | None:
        """Wait for what a child makes of an interrupt."""
        deadline = self._clock() + _INTERRUPT_S
        while (code := process.poll()) is None and self._clock() < deadline:
            if (self._folder / OUTCOME_FILE).is_file():
                break
            time.sleep(_TICK_S)
        return code

    def _wait(self, process: OwnProcess) -> int | None:
        outcome = self._folder / OUTCOME_FILE
        deadline = self._began + max(_LEAST_S, self._spec.time_limit_s)
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
            outcome = LoadingOutcome.load(self._folder / OUTCOME_FILE)
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
