"""Runs a user's script on the simulated GPU: ``main()`` with a request file as argument.

This is the child process. The script is ``__main__``, sees its own arguments, and is
stopped from within the optimizer step that completes the wanted number of steps (or with
which memory has settled), by an exception that unwinds it (``finally`` blocks, ``with``
statements and ``atexit`` run). What happened goes to the outcome file; both files are
written before the script is unwound.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import importlib.machinery
import importlib.util
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
from trainfit.results.recording import Recording
from trainfit.results.trace import Status, Target, TraceOutcome, TraceRequest
from trainfit.simgpu.errors import UnsupportedOperatorError
from trainfit.simgpu.interventions import Interventions
from trainfit.simgpu.loaders import LoaderTracker
from trainfit.simgpu.location import claim, frame_of_user, is_library, line_of_user
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.precision import AutocastSwitch
from trainfit.simgpu.recorder import BACKWARD
from trainfit.simgpu.session import Simulation
from trainfit.simgpu.settling import LEAST_STEPS, judge

#: A bare ``except:`` catches the stop; after this many the script is ended by force.
_PATIENCE = 3
#: Calls of models without an optimizer or a backward pass after which a script is taken not
#: to train.
_INFERENCE_CALLS = 100
#: Attempts at a snapshot of a run that goes on meanwhile.
_SNAPSHOTS = 5
#: Seconds after the time limit at which the process ends even where Python cannot act.
_LAST_RESORT_S = 10.0


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
        self._autocast = AutocastSwitch(
            request.amp, torch.bfloat16 if gpu.supports_bf16 else torch.float16
        )
        self._interventions = Interventions(self._simulation, request.interventions, request.survey)
        self._patches = PatchSet()
        self._started = time.monotonic()
        self._process = os.getpid()
        self._stops = 0
        self._trains = False
        self._done = threading.Event()
        self._finishing = threading.Lock()

    def run(self) -> None:
        """Run the script to its stop or its end and write recording and outcome."""
        self._watch()
        status: Status = "ended"
        details: dict[str, Any] = {}
        with self._simulation:
            self._loaders.install(self._patches)
            self._autocast.install(self._patches)
            self._interventions.install(self._patches)
            self._simulation.on_step(self._after_step)
            self._interventions.after_call(self._after_call)
            try:
                execute(self._request.target)
            except SystemExit as error:
                if error.code not in (None, 0):
                    status, details = "exited", {"message": _exit_message(error.code)}
            except StopScript:
                pass  # the outcome is written
            except BaseException as error:
                status, details = _failure(error)
            finally:
                self._interventions.remove()
                self._autocast.remove()
                self._patches.restore()
        self._finish(status, details)

    def _after_step(self, steps: int) -> None:
        self._loaders.note_step()
        if not self._seen_enough(steps):
            return
        self._finish("finished", {})
        self._stop()

    def _after_call(self) -> None:
        """A model was called: a step where calls are counted, else maybe the last of an
        inference that would go on and on."""
        if self._request.count == "calls":
            self._simulation.end_step()
        elif self._interventions.forward_calls().calls >= _INFERENCE_CALLS and self._only_infers():
            self._finish("ended", {})
            self._stop()

    def _only_infers(self) -> bool:
        """Was there no optimizer and no backward pass so far?"""
        if self._interventions.optimizers or self._trains:
            return False
        self._trains = bool((self._simulation.recording.op_phase == BACKWARD).any())
        return not self._trains

    def _stop(self) -> None:
        self._stops += 1
        if self._stops > _PATIENCE:
            _end_by_force()
        raise StopScript

    def _seen_enough(self, steps: int) -> bool:
        """Are there as many steps as were asked for, or has memory settled before?

        Steps beyond the least number are worth half of the time limit, not all of it.
        """
        request = self._request
        if steps >= request.steps or not request.until_settled:
            return steps >= request.steps
        if steps < LEAST_STEPS:
            return False
        late = time.monotonic() - self._started > request.time_limit_s / 2
        return late or judge(self._simulation.step_uses()).course in ("settled", "growing")

    def _finish(self, status: Status, details: dict[str, Any]) -> bool:
        """Write recording and outcome, once; what the script does later does not count.

        Returns whether this call was the one that did.
        """
        with self._finishing:
            if self._done.is_set() or os.getpid() != self._process:
                return False
            self._done.set()
        faulthandler.cancel_dump_traceback_later()
        recording = self._snapshot()
        if recording is not None:
            recording.save(Path(self._request.recording))
        TraceOutcome(
            status=status,
            steps=self._simulation.steps,
            seconds=time.monotonic() - self._started,
            loader=self._loaders.feeding(),
            loaders=self._loaders.count,
            autocast=self._autocast.used,
            gpu_operators=len(recording.op_name) if recording is not None else 0,
            module_calls=int(recording.header["module_calls"]) if recording is not None else 0,
            optimizers=self._interventions.optimizers,
            forward=self._interventions.forward_calls(),
            compute=self._interventions.compute(),
            findings=self._interventions.findings(),
            changed=self._interventions.changed(),
            **details,
        ).save(Path(self._request.outcome))
        return True

    def _snapshot(self) -> Recording | None:
        """The recording so far. At the time limit the script goes on in another thread and
        may tear it: then once more, and ``None`` if that does not help."""
        for _ in range(_SNAPSHOTS):
            try:
                recording = self._simulation.recording
                recording.check()
            except (IndexError, ValueError, RuntimeError):
                continue
            return recording
        return None

    def _watch(self) -> None:
        """End the process when its time is over or its parent has died."""
        main, parent = threading.main_thread().ident, os.getppid()
        deadline = self._started + self._request.time_limit_s
        faulthandler.dump_traceback_later(self._request.time_limit_s + _LAST_RESORT_S, exit=True)

        def watch() -> None:
            while not self._done.wait(max(0.0, min(1.0, deadline - time.monotonic()))):
                if os.getppid() != parent:
                    os._exit(1)
                if time.monotonic() >= deadline:
                    place = frame_of_user(sys._current_frames().get(main or 0))
                    if self._finish("timeout", {"location": place}):
                        os._exit(0)

        threading.Thread(target=watch, daemon=True).start()


def execute(target: Target) -> None:
    """Run the target as ``python script.py args…`` or ``python -m module args…`` would."""
    sys.argv = [target.name, *target.args]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if target.kind == "module":
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        _claim_module(target.name)
        runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
        return
    path = Path(target.name)
    claim(path.parent)
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    main.__file__ = target.name
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", target.name)
    main.__dict__["__cached__"] = None
    code = compile(path.read_bytes(), target.name, "exec")
    exec(code, main.__dict__)


def _claim_module(name: str) -> None:
    """An installed package that is run with ``-m`` is the user's, not a library."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is not None and spec.origin is not None:
        for folder in spec.submodule_search_locations or ():
            claim(folder)


def _end_by_force() -> None:
    """The script does not let itself be stopped; its ``atexit`` handlers still run."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _exit_message(code: Any) -> str:
    if isinstance(code, int):
        return f"exit code {code}"
    print(code, file=sys.stderr)  # as Python itself does with sys.exit("text")
    return f"exit code 1: {code}"


def _failure(error: BaseException) -> tuple[Status, dict[str, Any]]:
    """Status and details of a script that raised."""
    details = {
        "message": f"{type(error).__name__}: {error}".removesuffix(": "),
        "traceback": "".join(_own_traceback(error).format()),
        "location": line_of_user(error.__traceback__),
    }
    for cause in _causes(error):
        if isinstance(cause, UnsupportedOperatorError):
            return "unsupported", details | {"message": str(cause), "location": cause.location}
    if isinstance(error, torch.OutOfMemoryError):
        return "out_of_memory", details
    return "failed", details


def _causes(error: BaseException | None) -> list[BaseException]:
    """The error and what led to it: a script may wrap the simulation's refusal in its own."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _own_traceback(error: BaseException) -> traceback.TracebackException:
    """The traceback from the script's first frame on. Where the simulated device raised as it
    should, it ends with the script's last frame: how the device works is no matter."""
    own = traceback.TracebackException.from_exception(error)
    expected = isinstance(error, (torch.OutOfMemoryError, UnsupportedOperatorError))
    frames = list(own.stack)
    while frames and _is_machinery(frames[0].filename):
        frames.pop(0)
    own_frames = [i for i, frame in enumerate(frames) if not is_library(frame.filename)]
    if expected and own_frames:
        frames = frames[: own_frames[-1] + 1]
    # A syntax error in the script itself has no frame, and Python writes no heading then.
    own.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    return own


def _is_machinery(filename: str) -> bool:
    return filename in (__file__, "<string>", runpy.__file__) or filename.startswith("<frozen ")


def main() -> None:
    """The child process's entry point."""
    request = TraceRequest.from_json(Path(sys.argv[1]).read_text())
    Runner(request).run()
