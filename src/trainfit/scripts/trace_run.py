"""Runs a user's script on the simulated GPU: ``main()`` with a request file as argument.

This is the child process. The script is stopped with the training step that completes the
wanted number of them, or with which memory has settled. What happened goes to the outcome
file; it and the recording are written before the script is unwound (see
:mod:`trainfit.scripts.execute`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainfit.hooks import learning_hooks
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.limits import bounded_buffers
from trainfit.hooks.provenance.policies import with_transitions
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import REQUEST_FILE, RunSpec
from trainfit.results.runs.steps import Coverage, StepMakeup
from trainfit.results.runs.trace import (
    EARLY_FILE,
    INTERRUPT_FILE,
    STATUS_FILE,
    ContextSeen,
    LoaderInfo,
    RunStatus,
    ScriptOutcome,
    Status,
    StepFeed,
    TraceOutcome,
)
from trainfit.scripts import sandbox
from trainfit.scripts.dataloader import LoaderTracker
from trainfit.scripts.execute import Stopper, execute, run_script, watch
from trainfit.scripts.fault import HangStacks
from trainfit.scripts.fork_server import become_run
from trainfit.scripts.generation import GenerationWatch
from trainfit.scripts.launchers import LaunchInPlace, as_rank
from trainfit.scripts.options import OptionsWatch
from trainfit.scripts.phases.coverage import CoverageWatch
from trainfit.scripts.phases.last_epoch import LastEpoch, LightningTrainer
from trainfit.scripts.phases.micro_batches import MicroBatches
from trainfit.scripts.phases.periodic import PeriodicWork
from trainfit.scripts.phases.sampling import SampledLoop
from trainfit.scripts.precision import AccelerateWatch, AmpWatch, AutocastSwitch
from trainfit.scripts.samples.context_length import ContextWatch
from trainfit.scripts.step_makeup import with_makeup
from trainfit.scripts.steps import CacheWatch, InferenceWatch, StepWatch
from trainfit.scripts.template_process import Stem
from trainfit.simgpu.communication.peers import Peers
from trainfit.simgpu.cuda_clocks import OwnTime
from trainfit.simgpu.device.settling import LEAST_STEPS, enough_steps, judge
from trainfit.simgpu.device.user_location import files_of_user, user_frame
from trainfit.simgpu.interventions import Interventions
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

#: Seconds between two words of a run about itself, if no step is over meanwhile.
_TELL_S = 0.5
#: Why a run ends that the user ended.
_INTERRUPTED = "interrupted"
#: Steps after which a run may tell what it has, and seconds that the rest must last for that.
_EARLY_STEPS, _EARLY_S = 2, 4.0
#: Share of the time limit that steps beyond the least number are worth: 150 s at the default.
_MORE_STEPS = 0.25
#: Seconds of the run's own that an evaluation may last before the third step.
_EVALUATION_S = 15.0
#: Seconds of the run's own that a loop may last whose calls are left out, and calls that are made
#: at the most until they are, where calls are what a run is made of.
_SAMPLING_S, _SAMPLING_CALLS = 10.0, 24
#: Attempts at a snapshot of a run that goes on; seconds for which its operator is waited for.
_SNAPSHOTS, _HOLD_S = 5, 5.0


class Runner:
    """One run of a script on the simulated GPU."""

    def __init__(self, spec: RunSpec, stem: Stem | None = None) -> None:
        self._stem = stem
        self._spec = spec
        _, gpu = spec.script_and_gpu()
        self._peers = Peers(spec.rank, spec.company, spec.folder)
        self._simulation = Simulation(
            gpu,
            limited=spec.limited,
            constants=spec.constants,
            command=spec.command,
            peers=self._peers,
        )
        self._loaders = LoaderTracker(spec.loader, sample=spec.sample, cut=spec.cut)
        self._step = StepWatch(self._simulation, self._loaders)
        self._autocast = AutocastSwitch(
            spec.force, torch.bfloat16 if gpu.supports_bf16 else torch.float16
        )
        self._accelerate = AccelerateWatch()
        self._amp = AmpWatch(self._accelerate)
        self._learning = LearningObserver(user_frame, counts_in_place=False)
        self._options = OptionsWatch()
        self._context = ContextWatch()
        self._launch = LaunchInPlace(execute, spec.rank, gpu.count)
        self._coverage = CoverageWatch(self._loaders.feeding, lambda: self._simulation.operators)
        self._coverage.before_evaluation = self._before_evaluation
        self._coverage.trains_again = self._trains_again
        self._coverage.other_batch = self._loaders.other_batch
        self._loaders.epochs.ended = self._epoch_ended
        self._has_epoch_ended = self._has_gone_on = False
        self._evaluating_since: float | None = None
        self._periodic = PeriodicWork()
        self._last_epoch = LastEpoch()
        self._lightning = LightningTrainer(lambda: self._spec.cut is not None)
        self._loaders.combined = self._lightning.combined
        self._coverage.of_epoch = self._lightning.trained
        self._coverage.of_trainer = lambda: (self._lightning.epochs, self._lightning.by_number)
        self._loaders.epochs.of_evaluation = self._lightning.evaluated
        self._interventions = Interventions(self._simulation, spec.interventions, spec.survey)
        self._patches = PatchSet()
        self._stopper = Stopper()
        self._inference = InferenceWatch(self._simulation, self._interventions)
        self._cache = CacheWatch(self._simulation)
        self._generation = GenerationWatch(self._simulation)
        self._micro = MicroBatches(self._simulation, self._step.repeat, self._generation.repeated)
        self._generation.is_repeated = self._text_repeated
        self._generation.over = self._text_over
        self._sampling = SampledLoop(
            self._simulation,
            lambda: self._generation.in_generate or self._generation.in_loop,
            spec.count == "calls",
        )
        self._sampling.is_over = self._text_repeated
        self._sampling_since: float | None = None
        self._finishing, self._over = threading.Lock(), False
        self._begin()

    def run(self) -> None:
        """Run the script to its stop or its end and write recording and outcome."""
        target, gpu = self._spec.script_and_gpu()
        if self._spec.rank:
            target = as_rank(self._spec.rank, gpu.count, target)
        words = [target.name, *target.args]
        with self._simulation:
            self._loaders.install(self._patches)
            self._autocast.install(self._patches)
            self._accelerate.install(self._patches)
            self._accelerate.expect(self._spec.variables)
            self._amp.install(self._patches)
            self._options.install(self._patches)
            self._context.install(self._patches)
            self._launch.install(self._patches)
            self._step.install(self._patches)
            self._coverage.install(self._patches)
            self._lightning.install(self._patches)
            self._generation.install(self._patches)
            self._sampling.install(self._patches)
            self._micro.install(self._patches)
            self._patches.hook(os, "_exit", self._told_exit)
            self._interventions.before_call(self._coverage.called)
            self._interventions.before_call(self._amp.called)
            self._interventions.before_call(self._learning.called)
            self._interventions.install(self._patches)
            self._simulation.cycle.counts_every_pass = self._spec.count == "backwards"
            self._simulation.on_step(self._after_step)
            self._loaders.after_batch = self._after_batch
            self._interventions.after_call(self._learning.returned)
            self._interventions.after_call(self._after_call)
            self._step.after_backward = self._after_backward
            learning_hooks.install(
                self._learning,
                self._patches,
                self._simulation.on_arithmetic,
                self._simulation.on_view,
                self._simulation.on_result,
            )
            try:
                arguments = None if self._stem is None else self._stem.arguments(self, words)
                end = run_script(target, arguments, self._learning.misuse.origins.of_failure)
                self._over = True
                if end.status == "ended":
                    self._simulation.script_ended()
            finally:
                self._periodic.end()
                self._last_epoch.end()
                self._patches.restore()
        self._finish(end)

    def _begin(self) -> None:
        """This process runs the script from now on."""
        self._own_s = OwnTime()
        self._started = self._told = self._own_s.began
        self._cpu_s = time.process_time()
        self._process = os.getpid()
        self._steps_at: list[float] = []
        self._done = threading.Event()
        self._stacks = HangStacks(self._spec.outcome.with_name("stacks.txt"))
        limit, callbacks = self._spec.time_limit_s, (self._late, self._stopped)
        self._watch = watch(
            self._started, limit, self._done, *callbacks, self._why_stopped, self._used_s
        )

    # -- as a stem -------------------------------------------------------------------------

    def hold(self) -> str:
        """Stop what would not outlive a fork; why there must be none, empty if there may."""
        self._done.set()
        self._watch.join()
        faulthandler.cancel_dump_traceback_later()
        self._simulation.pause()
        if not self._simulation.is_untouched or self._interventions.optimizers:
            return "something was already simulated"
        if self._loaders.count or self._autocast.made:
            return "a DataLoader or an autocast region already exists"
        if self._accelerate.where is not None:
            return "Accelerate has already read the environment"
        self._printed = self._spec.outcome.with_name("output.txt").read_bytes()
        return ""

    def become(self, folder: str) -> list[str]:
        """Be the run that ``folder`` asks for, in a process that was forked when the script looked
        at its arguments. It has no interventions, which would have to be made before."""
        sandbox.begin(Path(folder))
        become_run(folder, self._printed)
        self._spec = spec = _spec_in(folder)
        self._simulation.rename(spec.command)
        self._loaders.override(spec.loader, spec.sample, spec.cut)
        self._autocast.force(spec.force)
        self._accelerate.expect(spec.variables)
        self._simulation.cycle.counts_every_pass = spec.count == "backwards"
        self._begin()
        self._simulation.go_on()
        target, _ = spec.script_and_gpu()
        return [target.name, *target.args]

    def _is_run(self) -> bool:
        """Is this the process of a run, neither a worker of it nor a stem? A stem ends here."""
        if os.getpid() != self._process:
            return False
        if self._stem is not None:
            self._stem.give_up("the script did not read its arguments")
        return True

    # -- while it runs ---------------------------------------------------------------------

    def _after_step(self, steps: int) -> None:
        self._loaders.note_step()
        self._step.note_step()
        self._coverage.stepped(steps)
        if self._over:
            return
        limit_s = self._spec.steps_limit_s
        if limit_s and time.process_time() - self._cpu_s > limit_s:
            self._finish(ScriptOutcome("timeout"))
            self._stopper.stop()
        if not self._seen_enough(steps):
            cut = self._spec.cut
            if cut is not None and cut.periodic and steps >= cut.periodic:
                self._periodic.begin()
            if cut is not None and cut.to_end and steps % cut.to_end == 0:
                waits = cut.numbered and self._lightning.goes_on()
                if not waits:
                    self._last_epoch.begin(by_number=cut.numbered)
            self._tell()
            self._steps_at.append(time.monotonic())
            self._tell_early()
            return
        self._finish(ScriptOutcome("finished"))
        self._stopper.stop()

    def _after_batch(self) -> None:
        self._leave_evaluation()
        self._inference.fed()
        self._generation.fed()
        self._sampling.forget()
        if time.monotonic() - self._told >= _TELL_S:
            self._tell()
            self._tell_early()

    def _tell(self) -> None:
        """Say how far the run is; a full disk is no reason to end it."""
        if not self._is_run():
            return
        self._told = time.monotonic()
        spec = self._spec
        status = RunStatus(
            steps=self._simulation.steps,
            least=LEAST_STEPS if spec.until_settled else spec.steps,
            most=spec.steps,
            seconds=self._told - self._started,
            loading_s=self._loaders.waited_s,
        )
        with contextlib.suppress(OSError):
            status.save(spec.outcome.with_name(STATUS_FILE))

    def _tell_early(self) -> None:
        """Save what was recorded by now, once, where the rest of the run lasts."""
        now, steps = time.monotonic(), self._steps_at
        if not self._spec.tells_early or len(steps) < _EARLY_STEPS:
            return
        # One more step would last as long as the last one did, or some already have.
        if max(steps[-1] - steps[-2], now - steps[_EARLY_STEPS - 1]) < _EARLY_S:
            return
        path = self._spec.outcome.with_name(EARLY_FILE)
        if path.exists() or not self._is_run() or (recording := self._snapshot()) is None:
            return
        with contextlib.suppress(OSError):  # a full disk is no reason to end it
            recording.save(path)

    def _after_call(self, *_: Any) -> None:
        """A model was called: a step where calls are counted, else maybe the last of an
        inference that would go on and on."""
        if self._generation.is_counting:
            if self._generation.is_full or self._is_late():
                self._generation.cut_short()
                self._text_over()
        elif self._spec.count == "calls" and self._sampling.was_left_out:
            if self._is_late() or self._used_s() >= self._spec.time_limit_s:
                self._text_over()
        elif self._spec.count == "calls":
            self._cache.note_call()
            self._generation.called(self._simulation.steps + 1)
            self._simulation.end_step()
        else:
            self._generation.shorten()
            if not self._inference.trains and self._inference.only_infers():
                self._finish(ScriptOutcome("ended"))
                self._stopper.stop()

    def _before_evaluation(self) -> None:
        """The training is over for now: a run of steps alone ends with the last of them, where
        they are enough to tell; else it waits for the evaluation, if that does not last."""
        if self._spec.only_training and self._simulation.periods >= _EARLY_STEPS and self._is_run():
            self._evaluating_since = self._own_s()
            self._leave_evaluation()

    def _leave_evaluation(self) -> None:
        since = self._evaluating_since
        if since is None or not self._is_run():
            return
        enough = self._simulation.periods >= LEAST_STEPS and not self._step.warms_up()
        if enough or self._own_s() - since > _EVALUATION_S:
            self._finish(ScriptOutcome("finished"))
            self._stopper.stop()

    def _epoch_ended(self) -> None:
        if not self._has_epoch_ended and self._is_run():
            self._has_epoch_ended = True
            if not self._periodic.entered:
                self._coverage.epoch_ended()

    def _trains_again(self) -> None:
        """Training goes on after an evaluation of an epoch's end, or one that was made to come
        early: a run that was to have it ends; after the next one, where a later epoch's work was
        made to come early, too."""
        self._evaluating_since = None
        has_ended, cut = self._has_epoch_ended or bool(self._periodic.entered), self._spec.cut
        if cut is not None and cut.index is None:  # no DataLoader tells of an epoch's end
            has_ended = has_ended or self._simulation.steps >= cut.batches
        if has_ended and self._periodic.later is not None and not self._has_gone_on:
            self._has_gone_on = True
            return
        ends = cut is not None and not (cut.goes_on or cut.to_end)
        if ends and has_ended and self._is_run():
            self._finish(ScriptOutcome("finished"))
            self._stopper.stop()

    def _after_backward(self) -> None:
        """Maybe the last pass of a training that makes no step of an optimizer."""
        self._coverage.differentiated()
        if self._inference.updates_by_itself() and self._spec.count == "steps":
            self._finish(ScriptOutcome("ended"))
            self._stopper.stop()

    def _used_s(self) -> float:
        """Seconds of the run's own; all that there are, once a loop of calls that are left out has
        lasted its time."""
        used, since = self._own_s(), self._sampling_since
        if since is not None and used - since > _SAMPLING_S:
            return max(used, self._spec.time_limit_s)
        return used

    def _late(self, place: str | None) -> bool:
        if self._sampling_since is not None:
            return self._finish(ScriptOutcome("finished"))
        stacks = self._stacks.text() if not self._simulation.steps and self._is_run() else ""
        return self._finish(ScriptOutcome("timeout", location=place, stacks=stacks))

    def _told_exit(self, end_process: Callable[[int], None]) -> Callable[[int], None]:
        """``os._exit``, which ends the process with nothing of its run written."""

        def _exit(status: int) -> None:
            place = None if self._stem is not None and self._stem.waits else user_frame()
            if place is not None and not self._done.is_set() and self._is_run():
                end = ScriptOutcome("exited", message=f"exit code {status}: os._exit at {place}")
                if not status:
                    self._simulation.script_ended()
                    end = ScriptOutcome("ended") if self._simulation.steps else end
                self._finish(end)
            end_process(status)

        return _exit

    def _why_stopped(self) -> str:
        asked = self._spec.outcome.with_name(INTERRUPT_FILE).exists()
        return sandbox.stopped() or (_INTERRUPTED if asked else "")

    def _stopped(self, reason: str, place: str | None) -> bool:
        status: Status = "interrupted" if reason == _INTERRUPTED else "failed"
        return self._finish(ScriptOutcome(status, message=reason, location=place))

    def _seen_enough(self, steps: int) -> bool:
        """Are there as many steps as were asked for, or has memory settled before?

        Steps beyond the least are worth a share of the time limit, a warm-up of accumulation half
        of it. The warm-up of a CUDA graph comes in addition. Calls over which a cache grows go on
        to where it is let go; of a text's, those that follow from others are left out.
        """
        spec, simulation = self._spec, self._simulation
        late = self._is_late()
        if spec.count == "calls" and spec.until_settled:
            watch = self._generation
            if watch.frozen is None and not watch.in_generate and self._cache.released():
                return True
            if watch.in_generate or watch.begins or self._cache.grows():
                watch.look(self._snapshot)
                return late
            if watch.frozen is not None:
                return late
            if self._samples(steps):
                return late
        if not spec.until_settled:
            return steps >= spec.steps
        steps -= min(simulation.warm_up_steps, spec.steps)
        passes = min((feed.backwards for feed in self._step.feeds), default=1)
        if steps >= enough_steps(spec.steps, passes):
            return True
        if steps < LEAST_STEPS or self._step.warms_up():
            return steps >= LEAST_STEPS and late
        slow = self._own_s() > spec.time_limit_s * _MORE_STEPS
        return slow or judge(simulation.step_uses()).course in ("settled", "growing")

    def _samples(self, steps: int) -> bool:
        """Is the last call of a loop that may go on by itself? What comes after it may need more
        memory, such as the decoder of what was sampled."""
        if self._sampling.leaves_out and self._sampling_since is None:
            self._sampling_since = self._own_s()
        return self._sampling.goes_on and (self._sampling.leaves_out or steps < _SAMPLING_CALLS)

    def _is_late(self) -> bool:
        return self._own_s() > self._spec.time_limit_s / 2

    def _text_over(self) -> None:
        """The loop whose calls were counted is over."""
        if self._is_run():
            self._finish(ScriptOutcome("finished"))
            self._stopper.stop()

    def _text_repeated(self) -> None:
        """The script comes to a text that it made before."""
        spec = self._spec
        if spec.count == "calls" and spec.until_settled and self._simulation.steps:
            self._text_over()

    def _finish(self, end: ScriptOutcome) -> bool:
        """Write recording and outcome, once (did this call?); what comes later does not count."""
        with self._finishing:
            if self._done.is_set() or not self._is_run():
                return False
            self._done.set()
        self._periodic.end()
        self._last_epoch.end()
        faulthandler.cancel_dump_traceback_later()
        # At the time limit the script goes on in another thread, which would tear the recording.
        with self._simulation.engine.held(_HOLD_S):
            self._write(end)
        return True

    def _write(self, end: ScriptOutcome) -> None:
        recording = self._generation.frozen or self._snapshot()
        if recording is not None:
            if self._spec.count == "calls":
                recording = self._generation.described(recording, end.status)
            recording.save(self._spec.recording)
        seconds = self._own_s()
        kept = self._generation.frozen
        steps = self._simulation.steps if kept is None else kept.steps
        end = self._peers.explained(dataclasses.replace(end, steps=steps, seconds=seconds))
        coverage = self._covered(end.status)
        TraceOutcome(
            **vars(end),
            loader=self._feeding(end.status),
            loaders=self._loaders.count,
            autocast=self._autocast.used,
            autocast_at=self._autocast.where,
            gpu_operators=len(recording.op_name) if recording is not None else 0,
            module_calls=recording.header["module_calls"] if recording is not None else 0,
            optimizers=self._interventions.optimizers,
            forward=self._interventions.forward_calls(),
            compute=self._interventions.compute(),
            findings=self._interventions.findings(),
            changed=self._interventions.changed(),
            accelerate=self._accelerate.from_environment,
            amp=self._amp.seen(),
            learning=with_transitions(
                self._learning.facts(
                    coverage.all_steps or 0, is_whole=coverage.all_epochs is not None
                )
            ),
            feeds=self._feeds(),
            coverage=coverage,
            peak_ram_bytes=_peak_ram_bytes(),
            sample_s=self._loaders.sample_s(),
            options=self._options.options(),
            context=self._context_seen(),
            periodic=tuple(self._periodic.entered),
            later=self._periodic.later or self._last_epoch.place or self._lightning.later,
            absent=tuple(self._simulation.absent.asked),
            imported=self._simulation.missed_packages,
            meetings=tuple(self._peers.meetings),
            files=files_of_user(),
            saves=self._coverage.saves,
        ).save(self._spec.outcome)

    def _context_seen(self) -> ContextSeen:
        for text in self._generation.texts:
            if text.positions and text.limit:  # the model is not given the last one
                self._context.generates(text.positions - 1, text.limit)
        return self._context.seen()

    def _covered(self, status: Status) -> Coverage:
        """What the run covered; where the script came to its end, no epoch's end comes later."""
        coverage = self._loaders.epochs.covered(self._coverage.result())
        coverage = dataclasses.replace(coverage, is_eager=self._simulation.is_eager)
        if status == "ended":
            return dataclasses.replace(coverage, steps_per_epoch=None, is_whole=True)
        return coverage

    def _feeds(self) -> tuple[StepFeed, ...]:
        return tuple(self._step.feeds) if self._spec.count != "calls" else ()

    def _makeup(self) -> StepMakeup | None:
        return self._step.makeup(self._spec.batch_size) if self._feeds() else None

    def _feeding(self, status: Status) -> LoaderInfo | None:
        """The DataLoader, with a look at its samples where that was asked for."""
        optimizes = bool(self._interventions.optimizers)
        loader_info = self._loaders.of_run(status, self._simulation.steps, optimizes)
        seconds = self._spec.look_at_samples_s
        if loader_info is None or not seconds or status not in ("finished", "ended"):
            return loader_info
        return dataclasses.replace(loader_info, scan=self._loaders.scan(seconds))

    def _snapshot(self) -> Recording | None:
        """The recording so far. A script in another thread that could not be held may tear it:
        then once more, and ``None`` if that does not help."""
        for _ in range(_SNAPSHOTS):
            try:
                recording = with_makeup(self._simulation.recording, self._makeup())
                recording.header["evaluations"] = self._coverage.evaluations()
                if self._generation.repeated:
                    recording.header["repeated"] = [
                        list(each) for each in self._generation.repeated
                    ]
                if buffers := bounded_buffers():
                    recording.header["buffers"] = [list(buffer) for buffer in buffers]
                recording.check()
            except (IndexError, ValueError, RuntimeError):
                continue
            return recording
        return None


def main() -> None:
    """The child process's entry point."""
    Runner(RunSpec.load(Path(sys.argv[1]))).run()


def grow(folder: str, serve: Callable[[], str | None], status: int) -> None:
    """The entry point of a stem, and of every run that is forked from it."""
    Runner(_spec_in(folder), Stem(serve, status)).run()


def _peak_ram_bytes() -> int:
    """The most that this process held; what it shares with its parent counts too."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _spec_in(folder: str) -> RunSpec:
    """What is asked of the run in ``folder``; it writes there."""
    return dataclasses.replace(RunSpec.load(Path(folder) / REQUEST_FILE), folder=folder)
