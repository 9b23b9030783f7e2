"""The recorder of one process: what the hooks tell it goes to the files of its rank.

It opens no file before the training shows: a command starts processes that do not train
(launchers, downloads). The first to train as a rank has that rank's files; another one of the same
rank (a script that is run twice) gets a folder of its own within the run's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import json
import math
import multiprocessing
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from trainfit.hooks import learning_hooks
from trainfit.hooks.learning import LearningObserver
from trainfit.results.runs import tables
from trainfit.results.runs.watched import (
    LATE_S,
    NO_VALUES,
    Ending,
    Event,
    RunHeader,
    memory_path,
    missing_rows,
    noise_path,
)
from trainfit.scripts.step_makeup import loop_of
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import compiled
from trainfit.torch_private.modules import is_wrapper_of_compiled
from trainfit.watch.recorder import cuda_hooks, first_batches, header, training_hooks, worker_hooks
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.cuda_hooks import MemoryHistory
from trainfit.watch.recorder.first_batches import compared
from trainfit.watch.recorder.gpu_step import CudaDevice, Device
from trainfit.watch.recorder.guard import FlopCount, careful, in_place_of
from trainfit.watch.recorder.job import LoaderRecord, script_place
from trainfit.watch.recorder.loader_hooks import LoaderHooks
from trainfit.watch.recorder.looks.collector import CollectorPauses
from trainfit.watch.recorder.looks.main_thread import MainThreadLooks
from trainfit.watch.recorder.looks.stacks import code_below, merged
from trainfit.watch.recorder.looks.start import StartLooks
from trainfit.watch.recorder.rank_files import CrashStack, RankFiles
from trainfit.watch.recorder.rank_variables import world
from trainfit.watch.recorder.step_recorder import StepRecorder

if TYPE_CHECKING:
    from trainfit.watch.recorder.noise_scale import WatchedNoiseScale


# ---
# Is that an error of memory that ran out?


#: Words of PyTorch's errors: of CUDA, and of its allocator of the host's memory
#: (c10/core/impl/alloc_cpu.cpp).
_WORDS: Final = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Is a GPU or the host out of memory?"""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    return any(word in text for word in _WORDS)


#: Errors of the recorder's own after which it takes itself out.
_MOST_ERRORS: Final = 3
#: Steps before the one whose operations are counted: the first may build layers.
_COUNTED_STEP: Final = 1
_SAMPLES: Final = (tables.STEPS.names or ()).index("samples")
_FLAGS: Final = -1
_MOST_NOTES: Final = 20
_LONGEST_TRACEBACK: Final = 20_000


@dataclasses.dataclass(frozen=True)
class RecordingPlace:
    """The place where a run is recorded, and the moment that its times count from, on two clocks.

    ``measures_noise``: the gradient noise scale is measured, too, ``keeps_memory_history``: GPU
    memory's history is recorded.
    """

    folder: Path
    started_unix: float
    started_monotonic: float
    command: str
    measures_noise: bool = False
    keeps_memory_history: bool = False


class Recorder:
    """Hooks PyTorch from :meth:`start` to :meth:`stop`.

    Args:
        place: of the run.
        clock: seconds, monotonic, as all processes of the machine share it.
    """

    def __init__(self, place: RecordingPlace, clock: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self.origin = place.started_monotonic
        self.live = False
        self.pid = os.getpid()
        self._clock = clock
        self._patches = PatchSet()
        self._cuda_patches = PatchSet()
        self._cuda_hooked = False
        self._pauses = CollectorPauses(self.event)
        self._reset()

    def _reset(self) -> None:
        self._pauses.reset()
        self.steps = StepRecorder(self, self._clock, self.origin, time.thread_time)
        self._facts: dict[str, Any] = {}
        self._loaders: list[LoaderRecord] = []
        self._notes: list[str] = []
        self._files: RankFiles | None = None
        self._crash: CrashStack | None = None
        self._looks: MainThreadLooks | None = None
        self._start: StartLooks | None = None
        self._early_events: collections.deque[Event] = collections.deque(maxlen=1000)
        self._early: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=1000)
        self._early_fetches: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=1000)
        self._on_gpu = self._compile_hooked = False
        self._flops: FlopCount | None = None
        self._flops_known = False
        self._errors = 0
        self._last_error: BaseException | None = None
        self._ended: tuple[Ending, int | None] | None = None
        self._noise = _noise_scale() if self.place.measures_noise else None
        self._memory: MemoryHistory | None = None
        self._communication = cuda_hooks.CommunicationLooks()
        self._learning = LearningObserver(script_place, looked=self._learned, reads_values=True)

    # -- life ----------------------------------------------------------------------------------

    def start(self, late: bool = True) -> None:
        """Hook PyTorch, which has been imported; ``late``: other libraries may have been, too."""
        self.live = True
        if not late:
            steps = self.steps
            self._start = StartLooks(
                lambda: steps.count > 0, lambda: steps.cycle.has_optimizer, self._stands, self._hang
            )
            self._start.start()
        if late:
            for optimizer in _made_optimizers():
                self.steps.cycle.made(optimizer, before=True)
        if torch.version.cuda is not None or torch.version.hip is not None:
            self._cuda_hooked = True
            cuda_hooks.install(self, self._cuda_patches, late)
        if self.place.keeps_memory_history:
            self._memory = MemoryHistory()
        loaders = LoaderHooks(self)
        fetches = worker_hooks.FetchHooks(self)
        training_hooks.install(self, self._patches)
        training_hooks.install_saving(self, self._patches, loaders.watch_torchdata)
        learning_hooks.install(self._learning, self._patches)
        training_hooks.watch_until_a_step(self, self._patches)
        if self.place.measures_noise:
            self._patches.hook(torch, "save", self._without_noise)
        cuda_hooks.install_collectives(self, self._patches)
        self._pauses.install(self._patches)
        loaders.install(self._patches)
        fetches.install(self._patches)
        self.steps.numbers.suspect = lambda: fetches.suspect(self._files)

    def stop(
        self, ending: Ending = "finished", exit_code: int | None = None, unhook: bool = False
    ) -> None:
        """Record nothing more and write what is left; safe to call twice. The hooks stay, and do
        nothing, where the process ends anyway: others may have hooked what we did."""
        if os.getpid() != self.pid or self._ended is not None:
            return
        was_live, self.live = self.live, False
        self._ended = ending, exit_code
        if was_live and unhook:
            self.unhook()
        with contextlib.suppress(Exception):
            self.steps.finish()
            self._pauses.look(at_end=True)
        if self._start is not None:
            self._start.stop()
        if self._looks is not None:
            self._looks.stop()
        if self._files is None and self.steps.count:  # a training without a backward pass
            self._claim()
        if self._crash is not None:
            self._crash.close()
        if self._files is not None:
            self._save_noise(self._files)
            self._files.close()
            if self._files.lost:
                files = self._files  # said here: a full disk holds no note
                missing = missing_rows(files.lost, files.refused, files.first_lost_step)
                print(f"trainfit watch: {missing}", file=sys.stderr)

    def _save_noise(self, files: RankFiles) -> None:
        if self._noise is None:
            return
        try:
            why_not = self._noise.save(noise_path(files.stem))
        except Exception as error:
            why_not = f"{type(error).__name__}: {error}"
        if why_not:
            self.note(f"noise scale not measured: {why_not}"[:300])

    def _without_noise(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @in_place_of(save)
        def saved(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                if self._noise is not None:
                    with careful(self, "torch.save"):
                        stack.enter_context(self._noise.aside())
                return save(*args, **kwargs)

        return saved

    def scaled_by(self, scaler: Any) -> None:
        """See :class:`patches.guard.Host`."""
        if self._noise is not None:
            self._noise.scaler = scaler

    def unhook(self) -> None:
        """Take the hooks out: nothing is recorded until they are put in again."""
        self._cuda_patches.restore()
        self._patches.restore()
        self.live = False
        if self._noise is not None:
            self._noise.close()
        if self._memory is not None:
            self._memory.end()

    def in_child(self) -> None:
        """The process was forked: the child has nothing to write into the parent's files. One that
        trains begins files of its own; a DataLoader's worker writes next to the parent's."""
        if self._files is not None:
            self._parent_stem = self._files.stem
        if self._crash is not None:
            self._crash.in_child()
        self.pid = os.getpid()
        if self._ended is None:
            self._reset()

    # -- the beginning of a rank's files -------------------------------------------------------

    def training(self) -> None:
        """See :class:`step_recorder.Sink`."""
        if self._files is None:
            self._claim()

    def stepped(self) -> None:
        """See :class:`step_recorder.Sink`."""
        frame = sys._getframe(1)
        if self._looks is not None:
            self._looks.loop = code_below(frame)
        self.learn(framework=loop_of(frame))

    def _learned(self) -> None:
        if self.live:
            facts, made_by = self._learning.facts(), self.steps.numbers.made_by
            if facts.not_finite is None and made_by is not None:
                facts = dataclasses.replace(facts, not_finite=made_by)
            self.learn(learning=facts)

    def _claim(self) -> None:
        """Take a rank's files; where the folder cannot be written to, say so and take us out."""
        rank, size = world()
        self._facts |= {"rank": rank, "world_size": size, **header.of_process()}
        try:
            self._files = RankFiles(self.place.folder, rank, self._header, self.failed)
        except OSError as error:
            reason = error.strerror or str(error)
            print(f"trainfit watch: not recorded: {self.place.folder}: {reason}", file=sys.stderr)
            self.unhook()
            return
        self._files.events.extend(self._early_events)
        for row in self._early:
            self._files.steps.append(row)
        for row in self._early_fetches:
            self._files.fetches.append(row)
        self._early.clear()
        self._early_fetches.clear()
        self._early_events.clear()
        self._looks = MainThreadLooks(
            self.steps, self._files.stem, self.event, self._write_header, self._loaders
        )
        self._looks.start()
        with contextlib.suppress(OSError):
            self._crash = CrashStack(self._files.stem, self._patches)
        if multiprocessing.parent_process() is not None:
            # Such a process ends without Python's atexit.
            multiprocessing.util.Finalize(None, self._stop_child, exitpriority=10)

    def _stop_child(self) -> None:
        failed = sys.exc_info()[0] is not None
        self.stop("failed" if failed else "finished", int(failed))

    # -- what the hooks tell -------------------------------------------------------------------

    def append(self, row: tuple[Any, ...]) -> None:
        """See :class:`step_recorder.Sink`."""
        if self._files is None:
            self._early.append(row)
        else:
            self._files.steps.append(row)
        if not row[_FLAGS] & tables.LIGHT:
            self._look_around(row)

    def event(
        self,
        kind: str,
        *,
        seconds: float | None = None,
        text: str = "",
        values: Mapping[str, float] = NO_VALUES,
    ) -> None:
        """See :class:`step_recorder.Sink`."""
        events = self._early_events if self._files is None else self._files.events
        events.append(Event(self.steps.now, kind, self.steps.count, seconds, text, values))

    def learn(self, **facts: Any) -> None:
        """Fields of the run's header."""
        self._facts |= facts
        self._write_header()

    def _write_header(self) -> None:
        if self._files is not None:
            self._files.is_stale = True

    def loaders_changed(self) -> None:
        """See :class:`step_recorder.Sink`."""
        self._write_header()

    def _hang(self) -> Mapping[int, str]:
        return {} if self._files is None else worker_hooks.hanging_by_pid(self._files.stem)

    def _stands(self, seconds: float, stacks: str, workers: bool) -> None:
        """No step was made yet, and the main thread stands still; so do the ``workers``, or not."""
        if self.live and self._files is None:
            self._claim()
        if self.live:
            text = f"pid {self.pid}\n\n{stacks}"
            values = {"workers_idle": float(workers)}
            self.event("standstill", seconds=seconds, text=text[:_LONGEST_TRACEBACK], values=values)

    def note_loader(self, loader: LoaderRecord) -> None:
        """See :class:`patches.guard.Host`."""
        if loader not in self._loaders:
            self._loaders.append(loader)
        self._write_header()
        told = loader.describe()
        if self._files is None and (told.num_workers or told.batches == 0):
            self._claim()  # its workers need to know where to write; or that is why nothing trains

    def note(self, text: str) -> None:
        """Add a note to the header."""
        if len(self._notes) < _MOST_NOTES and text not in self._notes:
            self._notes.append(text)
            self._write_header()

    def called(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        """See :class:`step_recorder.Sink`."""
        if self._learning.awake:
            self._learning.misuse.reached(given)
        self._learning.called(module)

    def root_called(self, module: torch.nn.Module) -> None:
        """See :class:`step_recorder.Sink`."""
        self._look_for_gpu()
        if self._noise is not None:
            self._noise.root_called(module, self.steps.count)
        if not self._compile_hooked:
            self._compile_hooked = compiled.on_compilation(self._note_compilation)
        if self.steps.count == 0:
            self.learn(**header.of_model(module))
            self._communication.of_model(module)

    def use(self, device: Device) -> None:
        """The training uses CUDA: its calls are hooked, its steps timed by events."""
        self._on_gpu = True
        if not self._cuda_hooked:
            self._cuda_hooked = True
            cuda_hooks.install(self, self._cuda_patches, late=True)
        self.steps.use(device)
        self.learn(**header.of_gpus())

    def count_flops(self, module: torch.nn.Module) -> FlopCount | None:
        """See :class:`patches.guard.Host`: the calls of one step that trains."""
        if self.steps.count != _COUNTED_STEP or self._flops_known:
            return None
        if not torch.is_grad_enabled():
            return None
        if self._flops is None:
            self._flops = FlopCount()
        if is_wrapper_of_compiled(module):  # compiled: its layers are not called
            self._flops.flops = math.nan
            return None
        self._flops.install()
        return self._flops

    def _look_around(self, row: tuple[Any, ...]) -> None:
        """Look after each step at what may have become known meanwhile."""
        if self._flops is not None and not self._flops_known and row[0] == _COUNTED_STEP:
            self.learn(flops_per_sample=self._flops.per_sample(row[_SAMPLES]))
            self._flops_known = True
        if self._facts.get("optimizer") != self.steps.cycle.optimizer:
            self.learn(optimizer=self.steps.cycle.optimizer)
        self._look_for_gpu()
        self._pauses.look(at_end=row[0] == 0)
        self._communication.after(row[0])

    def _look_for_gpu(self) -> None:
        if not self._on_gpu and torch.cuda.is_initialized():
            self.use(CudaDevice())

    def _note_compilation(self, *_: Any) -> None:
        if not self.steps.compiled and self.steps.mine:  # of several in one step the first is told
            self.event("compiled", text=script_place())
        self.steps.compiled = True

    # -- errors --------------------------------------------------------------------------------

    def failed(self, where: str, error: Exception) -> None:
        """A hook of ours raised: the training goes on, and after some errors without us."""
        self._errors += 1
        self.note(f"the recorder failed at {where}: {type(error).__name__}: {error}"[:300])
        if self._errors == _MOST_ERRORS:
            self.note(f"the recorder switched itself off after {_MOST_ERRORS} errors")
            with contextlib.suppress(Exception):
                self.unhook()

    def saw(self, error: BaseException) -> None:
        """The training raised, in a call that we watch: once for all calls that it passes."""
        if error is self._last_error:
            return
        if is_out_of_memory(error):
            self._last_error = error
            with contextlib.suppress(Exception):
                self.event("out_of_memory", text=str(error)[:_LONGEST_TRACEBACK])
                self.event("out_of_memory_at", text=script_place())
                self._save_memory(error)

    def _save_memory(self, error: BaseException) -> None:
        """Save the memory history of the first failure, which may be one of several tries."""
        if self._memory is None or not isinstance(error, torch.OutOfMemoryError):
            return
        if self._files is None:
            self._claim()
        if self._files is not None and not (path := memory_path(self._files.stem)).exists():
            self._memory.save(path)
            if self._memory.why_not:
                self.note(f"memory history not recorded: {self._memory.why_not}"[:300])

    def ended_by(self, error: BaseException, traceback: str) -> None:
        """The process ends by an exception. Before it trained, that is recorded only where the
        cause is known, an optimizer was made, or a line of the script was at work for long: any
        program that imports PyTorch may end so."""
        self.saw(error)
        self._last_error = None
        is_long = self._start is not None and self._start.is_long(LATE_S)
        trains = self.steps.cycle.has_optimizer or is_long
        if self._files is None and (trains or _is_explained(traceback)):
            self._claim()
        if self._files is not None:
            with contextlib.suppress(OSError):  # no file can be opened: what ended it is told
                for stack in worker_hooks.deaths(self._files.stem):
                    self.event("worker_stack", text=stack[:_LONGEST_TRACEBACK])
                for stack in worker_hooks.hanging(self._files.stem):
                    self.event("worker_hangs", text=stack[:_LONGEST_TRACEBACK])
        self.event("exception", text=traceback[-_LONGEST_TRACEBACK:])

    @property
    def lost_rows(self) -> int:
        """Rows that could not be written so far."""
        return 0 if self._files is None else self._files.lost

    # -- workers -------------------------------------------------------------------------------

    _parent_stem: Path | None = None

    def stem_for_workers(self) -> Path | None:
        """See :class:`patches.workers.Home`: a forked worker inherits it, others look for the
        header of the process that started them."""
        if self._parent_stem is not None:
            return self._parent_stem
        parent = worker_hooks.parent_pid()
        for path in sorted(self.place.folder.glob("**/rank*.json")):
            with contextlib.suppress(OSError, ValueError):
                if json.loads(path.read_text(encoding="utf-8")).get("pid") == parent:
                    return path.with_suffix("")
        return None

    def main_fetches(self) -> worker_hooks.Rows | None:
        """See :class:`patches.workers.Home`."""
        if self.steps.light or not self.live or not self.steps.mine:
            return None
        return self._early_fetches if self._files is None else self._files.fetches

    # -- the header, made by the writing thread ------------------------------------------------

    def _header(self, worker_threads: Mapping[str, int]) -> RunHeader:
        if self._files is not None and "threads" not in self._facts:
            self._facts["threads"] = header.threads()
        ending, code = self._ended or ("running", None)
        dropped = self.steps.rows.without_gpu_times
        notes = tuple(self._notes)
        if dropped:
            notes += (f"{dropped} steps have no GPU times: the GPU was too far behind",)
        return RunHeader(
            command=self.place.command,
            started_unix=self.place.started_unix,
            started_monotonic=self.place.started_monotonic,
            loaders=tuple(loader.describe() for loader in list(self._loaders)),
            worker_threads=worker_threads,
            ending=ending,
            exit_code=code,
            lost_rows=self.lost_rows,
            refused_rows=0 if self._files is None else self._files.refused,
            first_lost_step=None if self._files is None else self._files.first_lost_step,
            loss_at=self.steps.numbers.loss_at,
            recording_share=self.steps.budget.share(self.steps.seconds),
            light_steps=self.steps.budget.light,
            input_sizes=self.steps.inputs.found(),
            communication=self._communication.facts(self.steps.collectives),
            notes=notes,
            **self._code(),
            **self._facts,
        )

    def _code(self) -> dict[str, Any]:
        """Lines of the script that threads were found at."""
        found: dict[str, Any] = {}
        looks = [] if self._looks is None else [self._looks.fetch.summary()]
        if self._start is not None:
            found["start_code"] = self._start.summary()
        if self._looks is not None:
            found["other_code"] = self._looks.other.summary()
            found["sampler_code"] = self._looks.sampler.summary()
            found["lock_code"] = self._looks.holders.summary()
            found["sync_code"] = self._looks.waits[ph.SYNC].summary()
            found["collective_code"] = self._looks.waits[ph.COLLECTIVE].summary()
            found["copy_code"] = self._looks.waits[ph.COPY].summary()
            found["other_threads"] = self._looks.threads.summary()
            found["growing"] = self._looks.variables.found()
            found["memories"] = self._looks.variables.memories()
            found["element_loops"] = self._looks.loops.summary()
            found["hook_code"] = self._looks.hooks.summary()
            found["pass_code"] = self._looks.passes.summary()
        if self._files is not None:
            code = first_batches.told_by_workers(self._files.stem)
            looks += [worker_code.looks for worker_code in code]
            found["worker_growing"] = first_batches.growing(code)
            found["worker_threads_at"] = first_batches.threads_set_at(code)
            found["slow_samples"] = first_batches.slowest(code)
            found["bad_samples"] = first_batches.bad_samples(code)
            found["copies"] = compared(
                [worker_code.first for worker_code in code if worker_code.first is not None]
            )
        found["fetch_code"] = merged(looks)
        return found


def _made_optimizers() -> list[torch.optim.Optimizer]:
    """The optimizers that the script has made before it was recorded."""
    return [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]


def _is_explained(traceback: str) -> bool:
    # Not before: no run needs it but one that failed.
    from trainfit.findings.failure import of_exception

    return of_exception(traceback) is not None


def _noise_scale() -> WatchedNoiseScale:  # which most runs do without
    from trainfit.watch.recorder.noise_scale import WatchedNoiseScale

    return WatchedNoiseScale()
