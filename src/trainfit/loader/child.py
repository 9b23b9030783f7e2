"""Measures a script's DataLoader: ``main()`` with a request file as argument.

This is a child process. It runs the script on the simulated GPU until its first step, takes
the loader that fed it, and calls a function on that, as if the script's process did: the script
is ``__main__``, for workers that are started by spawn import it again, and nothing of the
simulation is left. What is measured forks from here.

A function of trainfit that is to be called ("trainfit.module:function") gets the
:class:`~trainfit.loader.measure.workload.Workload` and the
:class:`~trainfit.results.runs.loading.LoadingRequest` with its ``step`` filled in, and returns a
dataclass. It tells of itself with :func:`trainfit.loader.progress.current`, whose ``keep`` it
should call with what it has before anything that may end the process.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from trainfit.loader.measure.workload import LoaderError, Workload
from trainfit.loader.model.dataloader import Consumer
from trainfit.loader.progress import Reporter, current, tell_to
from trainfit.loader.script import LoaderObservation, Script, workload_from, workload_of
from trainfit.results.files.decoding import decode
from trainfit.results.files.errors import TrainfitError
from trainfit.results.files.exchange import write_whole
from trainfit.results.runs.loading import (
    LoadingOutcome,
    LoadingRequest,
    LoadingStatus,
    StepTime,
)
from trainfit.results.runs.trace import TraceOutcome

_TICK_S = 0.02
#: The environment before a script could change it.
_STARTED_WITH = dict(os.environ)
#: Seconds after the time limit at which the process ends even where nobody ends it.
_LAST_RESORT_S = 60.0


class Child:
    """One request."""

    def __init__(self, request: LoadingRequest) -> None:
        self._request = request
        self._folder = Path(request.folder)
        self._process, self._parent = os.getpid(), os.getppid()
        self._began = time.monotonic()
        self._progress = Reporter(self._folder, self._alive)
        tell_to(self._progress)
        self._trace: TraceOutcome | None = None
        self._loader = ""

    def run(self) -> None:
        """Find the loader and measure it; what came of it is the outcome file."""
        request = self._request
        if request.target is None:
            self._measure(self._given)
            return
        self._progress(f"running {request.target.name} until its first step")
        Script(
            request.target,
            request.gpu,
            request.command,
            request.script_limit_s,
            recording=self._folder / "recording.trainfit" if request.step is None else None,
            late=self._late,
            use=lambda found: self._measure(lambda: self._scripts(found)),
        ).run()

    # -- the loader ----------------------------------------------------------------------

    def _given(self) -> Workload:
        self._loader = self._request.loader
        try:
            workload = workload_from(self._request.loader, self._request.batch_size)
        except TrainfitError:
            raise
        except (Exception, SystemExit) as error:
            raise LoaderError(
                f"--loader {self._request.loader!r} failed ({_one_line(error)}); its traceback "
                "is below"
            ) from error
        self._loader = f"{self._loader}: {_in_words(workload)}"
        return workload

    def _scripts(self, found: LoaderObservation) -> Workload | None:
        """The script's; ``None`` where the script itself is what to tell of."""
        trace = self._trace = found.trace
        usable = trace.status in ("finished", "ended")
        usable |= trace.status in ("unsupported", "timeout") and found.loader is not None
        if not usable:
            self._finish("script")
            return None
        workload = workload_of(found)
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
            request = dataclasses.replace(self._request, step=self._step())
            function = tune if request.function == "tune" else _function(request.function)
            result = _json(function(workload, request, self._loader))
        except LoaderError as error:
            self._finish("loader", _line(error), _cause(error))
        except (Exception, SystemExit) as error:
            if isinstance(error, TrainfitError):
                self._finish("failed", _line(error))
            else:
                self._finish("failed", _one_line(error), traceback.format_exc())
        else:
            write_whole(self._folder / "result.json", result)
            self._finish("measured")
        faulthandler.cancel_dump_traceback_later()

    def _step(self) -> StepTime:
        """The training step; the parent works it out from the simulated one."""
        if self._request.step is not None:
            return self._request.step
        trace = self._trace or TraceOutcome(status="ended", steps=0, seconds=0.0)
        trace.save(self._folder / "simulated.json")
        answer = self._folder / "step.json"
        while not answer.is_file():
            self._alive()
            time.sleep(_TICK_S)
        return decode(StepTime, json.loads(answer.read_text()))

    # -- ending --------------------------------------------------------------------------

    def _late(self, trace: TraceOutcome) -> None:
        self._trace = trace
        self._finish("script")

    def _finish(self, status: LoadingStatus, error: str = "", text: str = "") -> None:
        seconds = time.monotonic() - self._began
        LoadingOutcome(status, self._loader, self._trace, error, text, seconds).save(
            self._folder / "outcome.json"
        )

    def _left_s(self) -> float:
        return max(1.0, self._request.limit_s - (time.monotonic() - self._began))

    def _alive(self) -> None:
        """End with the parent: nobody would read what comes."""
        if os.getpid() == self._process and os.getppid() != self._parent:
            os._exit(1)


def tune(workload: Workload, request: LoadingRequest, loader: str) -> Any:
    """Find the settings that suit the loader."""
    step = request.step
    assert step is not None
    local_tuning: Any = importlib.import_module("trainfit.loader.local_tuning")
    return local_tuning.tune_here(
        workload,
        Consumer(step.step_s, step.work_s, step.pageable_s),
        step.source,
        ranks=request.ranks,
        command=request.command,
        loader=loader,
        seconds=request.seconds,
        confirm=request.confirm,
        max_workers=request.max_workers,
        any_order=request.any_order,
        progress=current(),
        command_sets=request.variables,
        started_with=_STARTED_WITH,
    )


def _function(name: str) -> Any:
    """A function of trainfit's own, which takes no third argument."""
    module, _, attribute = name.partition(":")
    assert module.startswith("trainfit."), name
    function = getattr(importlib.import_module(module), attribute)
    return lambda workload, request, loader: function(workload, request)


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
    return " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())[:300]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _cause(error: Exception) -> str:
    """The traceback of what the user's callable raised."""
    return "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""


def main() -> None:
    """The child process's entry point."""
    request = LoadingRequest.from_json(Path(sys.argv[1]).read_text())
    if request.target is None:
        sys.argv = [sys.argv[0]]
    Child(request).run()
    sys.stdout.flush()
    sys.stderr.flush()
