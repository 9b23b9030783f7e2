"""Runs a user's script on the simulated GPU: ``python -m trainfit.simgpu.runner REQUEST``.

This is the child process. The script is ``__main__``, sees its own arguments, and is
stopped from within the optimizer step that completes the wanted number of steps, by an
exception that unwinds it (``finally`` blocks and ``with`` statements run). What happened
goes to the outcome file; the recording is written before the script is unwound.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

import torch

from trainfit.hardware import find_gpu
from trainfit.results.trace import Status, Target, TraceOutcome, TraceRequest
from trainfit.simgpu.errors import UnsupportedOperatorError
from trainfit.simgpu.loaders import LoaderTracker
from trainfit.simgpu.location import frame_of_user
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.precision import AutocastSwitch
from trainfit.simgpu.session import Simulation

#: A script may catch the stop; after this many it is ended by force.
_PATIENCE = 3


class StopScript(BaseException):
    """Raised in the script when enough was seen; no ``except Exception`` catches it."""


class Runner:
    """One run of a script on the simulated GPU."""

    def __init__(self, request: TraceRequest) -> None:
        gpu = find_gpu(request.gpu)
        if request.gpu_memory_bytes is not None:
            gpu = dataclasses.replace(gpu, memory_bytes=request.gpu_memory_bytes)
        self._request = request
        self._simulation = Simulation(gpu, limited=request.limited)
        self._loaders = LoaderTracker(request.loader)
        self._autocast = AutocastSwitch(request.amp)
        self._patches = PatchSet()
        self._started = time.monotonic()
        self._feeding: dict[str, Any] | None = None
        self._stops = 0
        self._done = threading.Event()

    def run(self) -> None:
        """Run the script to its stop or its end and write recording and outcome."""
        self._watch()
        status: Status = "ended"
        details: dict[str, Any] = {}
        simulation = self._simulation
        simulation.on_step(self._after_step)
        with simulation:
            self._loaders.install(self._patches)
            self._autocast.install(self._patches)
            try:
                execute(self._request.target)
            except StopScript:
                status = "finished"
            except SystemExit as error:
                if error.code not in (None, 0):
                    status, details = "exited", {"message": f"exit code {error.code}"}
            except torch.OutOfMemoryError as error:
                status, details = "out_of_memory", _describe(error)
            except UnsupportedOperatorError as error:
                status, details = "unsupported", _describe(error)
                details["location"] = error.location
            except BaseException as error:
                cause = _unsupported_cause(error)
                status, details = "failed", _describe(error)
                if cause is not None:
                    status = "unsupported"
                    details |= {"message": str(cause), "location": cause.location}
            finally:
                self._autocast.remove()
                self._patches.restore()
        if self._stops:
            status = "finished"  # what happened while it was unwound is no matter
        self._finish(status, details)

    def _after_step(self, steps: int) -> None:
        if self._feeding is None:
            self._feeding = self._loaders.feeding()
        if steps < self._request.steps:
            return
        if not self._stops:
            self._save_recording()
        self._stops += 1
        if self._stops > _PATIENCE:
            self._finish("finished", {})
            os._exit(0)
        raise StopScript

    def _save_recording(self) -> None:
        self._simulation.recording.save(Path(self._request.recording))

    def _finish(self, status: Status, details: dict[str, Any]) -> None:
        if self._done.is_set():
            return
        self._done.set()
        if not self._stops:
            self._save_recording()
        recording = self._simulation.recording
        TraceOutcome(
            status=status,
            steps=recording.steps,
            seconds=time.monotonic() - self._started,
            loader=self._feeding or self._loaders.feeding(),
            loaders=self._loaders.count,
            autocast=self._autocast.used,
            gpu_operators=len(recording.op_name),
            module_calls=int(recording.header["module_calls"]),
            **details,
        ).save(Path(self._request.outcome))

    def _watch(self) -> None:
        """End the process when the time limit is over, saying where the script was."""
        main = threading.main_thread().ident

        def watch() -> None:
            if self._done.wait(self._request.time_limit_s):
                return
            place = frame_of_user(sys._current_frames().get(main or 0))
            self._finish("timeout", {"location": place})
            os._exit(0)

        threading.Thread(target=watch, daemon=True).start()


def execute(target: Target) -> None:
    """Run the target as ``python script.py args…`` or ``python -m module args…`` would."""
    if target.kind == "module":
        sys.argv = [target.name, *target.args]
        sys.path[0] = os.getcwd()
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)
        return
    path = Path(target.name)
    sys.argv = [target.name, *target.args]
    sys.path[0] = str(path.resolve().parent)
    main = types.ModuleType("__main__")
    main.__file__ = target.name
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    code = compile(path.read_bytes(), target.name, "exec")
    exec(code, main.__dict__)


def _describe(error: BaseException) -> dict[str, Any]:
    """Message and the part of the traceback that is the script's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    # The first frame of "__main__" may be this module itself: its last line runs the script.
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    return {
        "message": f"{type(error).__name__}: {error}",
        "traceback": "".join(lines),
        "location": _location(error),
    }


def _location(error: BaseException) -> str | None:
    """Innermost frame of the user's own code in a traceback."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        place = frame_of_user(trace.tb_frame, outwards=False)
        found = f"{place.rpartition(':')[0]}:{trace.tb_lineno}" if place else found
        trace = trace.tb_next
    return found


def _unsupported_cause(error: BaseException) -> UnsupportedOperatorError | None:
    """The simulation's own refusal, if the script wrapped it in an error of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnsupportedOperatorError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def main() -> None:
    request = TraceRequest.from_json(Path(sys.argv[1]).read_text())
    Runner(request).run()


if __name__ == "__main__":
    main()
