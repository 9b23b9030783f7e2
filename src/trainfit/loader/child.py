"""Measures a script's DataLoader, in a process of its own.

It runs the script on the simulated GPU until its first step, takes
the loader that fed it, and calls a function on that, as if the script's process did: the script
is ``__main__``, for workers that are started by spawn import it again, and nothing of the
simulation is left. What is measured forks from here.

What is called gets the :class:`~trainfit.loader.measure.workload.Workload` and the
:class:`~trainfit.results.runs.spec.LoaderSpec` whose tuning has its step filled in, and returns a
dataclass. It tells of itself with :func:`trainfit.loader.measure.processes.current`, whose
``keep`` it should call with what it has before anything that may end the process.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from trainfit.entrypoint import UnknownNameError, UserCodeError
from trainfit.loader.local_tuning import tune_here
from trainfit.loader.measure.processes import Reporter, current, tell_to
from trainfit.loader.measure.running import time_samples
from trainfit.loader.measure.workload import LoaderError, Workload
from trainfit.loader.rehearsal import rehearse_as_asked
from trainfit.loader.script import LoaderObservation, Script, workload_from, workload_of
from trainfit.results.files.decoding import write_whole
from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.measurement import (
    Consumer,
    LoadingOutcome,
    LoadingStatus,
)
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import LoaderSpec, RunSpec
from trainfit.results.runs.trace import OwnFault, TraceOutcome
from trainfit.results.text import exception_text
from trainfit.scripts.fault import own_fault

#: The training step of what a script did until its first: what became of the run, and its
#: recording (``None``: no script was run).
StepOf = Callable[[TraceOutcome, Recording | None], Consumer]
#: The environment before a script could change it.
_STARTED_WITH = dict(os.environ)
#: Seconds after the time limit at which the process ends even where nobody ends it.
_LAST_RESORT_S = 60.0
#: Of the time limit, what the script has until its first step, from the start of its process;
#: seconds that it has at least.
_SCRIPT_SHARE = 0.9
_LEAST_S = 1.0


class ChildMeasurement:
    """One measurement; where ``spec`` says no step, ``step_of`` gives it."""

    def __init__(self, spec: RunSpec, step_of: StepOf) -> None:
        assert spec.loading is not None
        self._spec, self._loading, self._step_of = spec, spec.loading, step_of
        self._folder = Path(spec.folder)
        self._process, self._parent = os.getpid(), os.getppid()
        self._began = time.monotonic()
        self._progress = Reporter(self._folder, self._alive)
        tell_to(self._progress)
        self._trace: TraceOutcome | None = None
        self._recording: Recording | None = None
        self._loader = ""

    def run(self) -> None:
        """Find the loader and measure it; what came of it is the outcome file."""
        if self._spec.target is None:
            self._measure(self._given)
            return
        self._progress(f"running {self._spec.target.name} until its first step")
        Script(
            self._spec,
            self._loading.script_limit_s or self._script_limit_s(),
            records=self._loading.tuning.step is None,
            late=self._late,
            use=lambda found: self._measure(lambda: self._scripts(found)),
        ).run()

    def _script_limit_s(self) -> float:
        """The time limit of the script in seconds: if it hangs, this process tells where before it
        is ended."""
        passed_s = max(0.0, time.time() - float(psutil.Process().create_time()))
        return max(_LEAST_S, _SCRIPT_SHARE * self._spec.time_limit_s - passed_s)

    # -- the loader ----------------------------------------------------------------------

    def _given(self) -> Workload:
        self._loader = self._loading.place
        try:
            workload = workload_from(self._loading.place, self._loading.batch_size)
        except (UnknownNameError, UserCodeError) as error:
            raise LoaderError(str(error)) from error
        self._loader = f"{self._loader}: {_in_words(workload)}"
        return workload

    def _scripts(self, observation: LoaderObservation) -> Workload | None:
        """The script's; ``None`` where the script itself is what to tell of."""
        trace = self._trace = observation.trace
        self._recording = observation.recording
        usable = trace.status in ("finished", "ended")
        usable |= trace.status in ("unsupported", "timeout") and observation.loader is not None
        if not usable:
            self._finish("script")
            return None
        workload = workload_of(observation)
        where = trace.loader.where if trace.loader is not None else None
        self._loader = f"{where}: {_in_words(workload)}" if where else _in_words(workload)
        return workload

    # -- measuring -----------------------------------------------------------------------

    def _measure(self, find: Any) -> None:
        """Call the function on what ``find`` gives; never raises for what the loader does."""
        faulthandler.dump_traceback_later(self._left_s() + _LAST_RESORT_S, exit=True)
        try:
            workload = find()
            if workload is None:
                return
            tuning = dataclasses.replace(self._loading.tuning, step=self._step())
            loading = dataclasses.replace(self._loading, tuning=tuning)
            result = _json(self._called(workload, loading))
        except LoaderError as error:
            self._finish("loader", _line(error), _cause(error))
        except (Exception, SystemExit) as error:
            if isinstance(error, TrainfitError):
                self._finish("failed", _line(error))
            else:
                fault = own_fault(error)
                self._finish("failed", _one_line(error), traceback.format_exc(), fault)
        else:
            write_whole(self._folder / "result.json", result)
            self._finish("measured")
        faulthandler.cancel_dump_traceback_later()

    def _called(self, workload: Workload, loading: LoaderSpec) -> Any:
        """What the task gives."""
        if loading.task == "time samples":
            return time_samples(workload)
        if loading.task == "rehearse":
            return rehearse_as_asked(workload, loading, self._spec.command)
        return tune_here(
            workload,
            loading.tuning,
            command=self._spec.command,
            loader=self._loader,
            progress=current(),
            command_sets=loading.command_sets,
            started_with=_STARTED_WITH,
        )

    def _step(self) -> Consumer:
        """The training step; what was recorded of it is let go before anything is measured."""
        if self._loading.tuning.step is not None:
            return self._loading.tuning.step
        trace = self._trace or TraceOutcome(status="ended", steps=0, seconds=0.0)
        recording, self._recording = self._recording, None
        return self._step_of(trace, recording)

    # -- ending --------------------------------------------------------------------------

    def _late(self, trace: TraceOutcome) -> None:
        self._trace = trace
        self._finish("script")

    def _finish(
        self,
        status: LoadingStatus,
        error: str = "",
        text: str = "",
        fault: OwnFault | None = None,
    ) -> None:
        seconds = time.monotonic() - self._began
        LoadingOutcome(status, self._loader, self._trace, error, text, seconds, fault).save(
            self._folder / "outcome.json"
        )

    def _left_s(self) -> float:
        return max(1.0, self._spec.time_limit_s - (time.monotonic() - self._began))

    def _alive(self) -> None:
        """End with the parent: nobody would read what comes."""
        if os.getpid() == self._process and os.getppid() != self._parent:
            os._exit(1)


def _in_words(workload: Workload) -> str:
    size = workload.batch_size
    return workload.name + (f", batch size {size}" if size is not None else "")


def _json(result: Any) -> str:
    text: str = (
        result.to_json()
        if hasattr(result, "to_json")
        else json.dumps(dataclasses.asdict(result), allow_nan=False)
    )
    return text


def _one_line(error: BaseException) -> str:
    return " ".join(exception_text(type(error).__name__, error).split())[:300]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _cause(error: Exception) -> str:
    """The traceback of what the user's callable raised."""
    return error.__cause__.script_output if isinstance(error.__cause__, UserCodeError) else ""
