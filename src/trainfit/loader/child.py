"""Measures a script's DataLoader, in a process of its own.

It runs the script on the simulated GPU until its first step, takes
the loader that fed it, and calls a function on that, as if the script's process did: the script
is ``__main__``, for workers that are started by spawn import it again, and nothing of the
simulation is left. What is measured forks from here.

What is called gets the :class:`~trainfit.loader.measure.workload.Workload` and the
:class:`~trainfit.results.runs.spec.LoaderSpec` whose tuning has its step filled in, and returns a
dataclass. It tells of itself with :func:`trainfit.loader.measure.processes.current`, whose
``keep`` it should call with what it has before anything that may end the process.

The DataLoader is the one that feeds a user's script, or one that a callable returns.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainfit.entrypoint import UnknownNameError, UserCodeError, called, named
from trainfit.loader.local_tuning import tune_here
from trainfit.loader.measure.processes import Reporter, current, tell_to
from trainfit.loader.measure.running import time_samples
from trainfit.loader.measure.workload import LoaderError, Workload
from trainfit.loader.rehearsal import rehearse_as_asked
from trainfit.results.files.decoding import write_whole
from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.measurement import (
    Consumer,
    LoadingOutcome,
    LoadingStatus,
)
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import LoaderSpec, RunSpec
from trainfit.results.runs.trace import OwnFault, ScriptOutcome, Status, TraceOutcome
from trainfit.results.text import exception_text
from trainfit.scripts.dataloader import LoaderTracker, is_simulated
from trainfit.scripts.execute import Stopper, execute, run_script, watch
from trainfit.scripts.fault import HangStacks, own_fault
from trainfit.scripts.launchers import LaunchInPlace
from trainfit.scripts.options import OptionsWatch
from trainfit.scripts.precision import AutocastSwitch
from trainfit.scripts.step_makeup import with_makeup
from trainfit.scripts.steps import InferenceWatch, StepWatch
from trainfit.simgpu.interventions import Interventions
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

#: Share of the time limit after which a script that loads batches and makes no step (it trains
#: without an optimizer of PyTorch's) is stopped with its next batch.
_PATIENCE_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class LoaderObservation:
    """What a script showed until its first step.

    ``loader`` is ``None`` where none gave a batch, ``recording`` where none was wanted; ``handles``
    are what its data set held open before it was asked for a sample, path → type.
    Nothing of the simulation is left, and no worker of the script's; ``sys.modules["__main__"]``
    is the script still.
    """

    trace: TraceOutcome
    loader: DataLoader[Any] | None
    on_gpu: bool
    recording: Recording | None = None
    handles: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Script:
    """A user's script on the simulated GPU, until its first optimizer step is made.

    Args:
        limit_s: seconds that it may take.
        records: is the recording of the simulated step needed?
        late: called with the outcome when the time is over; the process ends then.
        use: called with what was found (with the status "timeout" where batches came, but no
            step within half of the limit). That happens after the script was unwound, or within
            it where it does not let itself be stopped (a bare ``except``).
    """

    def __init__(
        self,
        spec: RunSpec,
        limit_s: float,
        records: bool,
        late: Callable[[TraceOutcome], None],
        use: Callable[[LoaderObservation], None],
    ) -> None:
        self._records = records
        self._target, gpu = spec.script_and_gpu()
        self._limit_s, self._late, self._use = limit_s, late, use
        self._simulation = Simulation(gpu, limited=False, command=spec.command)
        self._loaders = LoaderTracker(keep=True)
        self._step = StepWatch(self._simulation, self._loaders)
        self._launch = LaunchInPlace(execute, gpus=gpu.count)
        half = torch.bfloat16 if gpu.supports_bf16 else torch.float16
        self._autocast = AutocastSwitch(None, half)
        self._options = OptionsWatch()
        self._watch = Interventions(self._simulation, (), survey=False)
        self._patches = PatchSet()
        self._installed = ExitStack()
        self._stopper = Stopper(before_force=self._use_now)
        self._done = threading.Event()
        self._process, self._thread = os.getpid(), threading.current_thread()
        self._inference = InferenceWatch(self._simulation, self._watch)
        self._outcome: TraceOutcome | None = None
        self._stacks = HangStacks(Path(spec.folder) / "stacks.txt")
        self._finishing = threading.Lock()
        self._over = False

    def run(self) -> None:
        """Run the script and use what was found."""
        self._started = time.monotonic()
        with self._installed:
            self._install()
            watch(self._started, self._limit_s, self._done, self._is_late, self._is_stopped)
            end = run_script(self._target)
            self._over = True
            if end.status == "ended" and not self._done.is_set():
                self._simulation.script_ended()
            self._finish(end)
        self._use(self._found())

    def _install(self) -> None:
        enter = self._installed
        enter.enter_context(self._simulation)
        enter.callback(self._patches.restore)
        self._loaders.install(self._patches)
        self._launch.install(self._patches)
        self._options.install(self._patches)
        self._autocast.install(self._patches)
        self._step.install(self._patches)
        self._watch.install(self._patches)
        self._loaders.after_batch = self._after_batch
        self._simulation.on_step(self._after_step)
        self._watch.after_call(self._after_call)

    def _after_step(self, steps: int) -> None:
        self._loaders.note_step()
        self._step.note_step()
        if not self._over:
            self._end()

    def _after_call(self, *_: Any) -> None:
        if self._inference.only_infers():
            self._end()

    def _after_batch(self) -> None:
        late = time.monotonic() - self._started > _PATIENCE_SHARE * self._limit_s
        # A thread of the script's that fetches ahead would die of it, and the script wait on.
        if late and threading.current_thread() is self._thread:
            self._end("timeout")

    def _end(self, status: Status = "finished") -> None:
        """Enough was seen. Forked children of the script's own go on."""
        if os.getpid() == self._process:
            self._finish(ScriptOutcome(status))
            self._stopper.stop()

    def _use_now(self) -> None:
        """The script cannot be stopped: its loader is used from within it."""
        self._installed.close()
        self._use(self._found())

    def _is_late(self, place: str | None) -> bool:
        stacks = self._stacks.text() if os.getpid() == self._process else ""
        return self._ends_here(ScriptOutcome("timeout", location=place, stacks=stacks))

    def _is_stopped(self, reason: str, place: str | None) -> bool:
        return self._ends_here(ScriptOutcome("failed", message=reason, location=place))

    def _ends_here(self, end: ScriptOutcome) -> bool:
        if os.getpid() != self._process or not self._finish(end):
            return False
        assert self._outcome is not None
        self._late(self._outcome)
        return True

    def _finish(self, end: ScriptOutcome) -> bool:
        """The first call counts (what the script does later does not); was it this one?"""
        with self._finishing:
            if self._done.is_set():
                return False
            self._done.set()
        faulthandler.cancel_dump_traceback_later()
        self._outcome = self._told(end)
        return True

    def _told(self, end: ScriptOutcome) -> TraceOutcome:
        seconds = time.monotonic() - self._started
        end = dataclasses.replace(end, steps=self._simulation.steps, seconds=seconds)
        return TraceOutcome(
            **vars(end),
            loader=self._loaders.of_run(end.status, end.steps, bool(self._watch.optimizers)),
            loaders=self._loaders.count,
            autocast=self._autocast.used,
            optimizers=self._watch.optimizers,
            forward=self._watch.forward_calls(),
            compute=self._watch.compute(),
            feeds=tuple(self._step.feeds),
            options=self._options.options(),
        )

    def _found(self) -> LoaderObservation:
        assert self._outcome is not None
        self._loaders.shut_down()
        gc.collect()
        recording = None
        if self._records:
            recording = with_makeup(self._simulation.recording, self._step.makeup())
        loader, on_gpu = self._loaders.loader(), self._loaders.gives_gpu_tensors()
        handles = self._loaders.handles()
        return LoaderObservation(self._outcome, loader, on_gpu, recording, handles)


def workload_of(observation: LoaderObservation) -> Workload:
    """The workload of the script's loader; raises :class:`LoaderError` where it cannot be
    measured."""
    loader = observation.loader
    if loader is None:
        made = observation.trace.loaders
        if made:
            raise LoaderError(
                f"it creates {made} DataLoader{'s' if made > 1 else ''}, but none returned "
                "a batch before the first step; specify the one to tune "
                "with --loader MODULE:CALLABLE"
            )
        raise LoaderError(
            "it creates no DataLoader: nothing to tune; specify one with --loader MODULE:CALLABLE"
        )
    if is_simulated(loader.dataset):
        raise LoaderError(
            f"its data set ({type(loader.dataset).__name__}) holds tensors on the GPU: only "
            "the main process can read them, so workers do not help; keep them on the CPU, or "
            "index them in the loop without a DataLoader"
        )
    if observation.on_gpu:
        raise LoaderError(
            "its DataLoader returns batches already on the GPU, which only the "
            "main process can do; move them in the loop with .to(device, non_blocking=True) instead"
        )
    return Workload(loader, handles=observation.handles)


def workload_from(place: str, batch_size: int | None) -> Workload:
    """The workload that ``module:callable`` or ``path/to/file.py:callable`` gives, called without
    arguments; raises :class:`LoaderError`, and what :mod:`trainfit.entrypoint` does."""
    value = named(place, "--loader", "data.py:make_loader")
    if callable(value) and not isinstance(value, DataLoader | Dataset):
        value = called(f"--loader {place!r}", value)
    if isinstance(value, DataLoader):
        if batch_size is not None:
            raise LoaderError(
                f"--loader {place!r}: it returns a DataLoader, which has a batch "
                "size; remove --batch-size"
            )
        return Workload(value)
    is_dataset = isinstance(value, IterableDataset) or (
        hasattr(value, "__getitem__") and hasattr(value, "__len__") and not _plain(value)
    )
    if not is_dataset:
        raise LoaderError(
            f"--loader {place!r}: it returns {_named(value)}; expected a DataLoader or a data set"
        )
    if batch_size is None:
        raise LoaderError(
            f"--loader {place!r}: it returns a data set ({type(value).__name__}); add --batch-size "
            "N"
        )
    return Workload.of(value, batch_size)


def _plain(value: Any) -> bool:
    """Text and mappings have items and a length, and are no data sets."""
    return isinstance(value, str | bytes | dict | type)


def _named(value: Any) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__}"


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
