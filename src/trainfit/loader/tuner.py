"""One tuning behind its probe: settings are searched, confirmed and explained."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Final

import psutil

from trainfit.hardware.machine.core_speed import CoreSpeeds
from trainfit.loader import search as feasible
from trainfit.loader import threads
from trainfit.loader.bottleneck import limit
from trainfit.loader.confirmation import (
    PREDICTED_GAIN,
    Confirmation,
    ConfirmingRun,
    Decision,
    decide,
    doubts,
    measured_rate,
    probe_is_disturbed,
)
from trainfit.loader.measure.loop import is_disturbed as is_busy
from trainfit.loader.measure.loop import predicted_save_s, save_seconds
from trainfit.loader.measure.noise_correction import with_speeds
from trainfit.loader.measure.probe_runs import UNSAFE, SettingConstraints, bounds
from trainfit.loader.measure.processes import MeasurementProgress
from trainfit.loader.measure.records import Run
from trainfit.loader.measure.running import PAGEABLE_BYTES_PER_S, alone_note
from trainfit.loader.measure.workload import Workload
from trainfit.loader.other_changes import beyond
from trainfit.loader.preflight import run_watched
from trainfit.loader.probe import Measured
from trainfit.loader.search import BUBBLE, WITHIN, Choice, Goal, beyond_knee, keep_workers, search
from trainfit.results.dataloader import Candidate, Confirmed, LoaderMachine, LoaderSettings, Probe
from trainfit.results.findings import Finding
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import TuningSpec
from trainfit.results.text import byte_rate, duration, percent, rate
from trainfit.results.text import count as count_of

#: Real runs that confirm, at most.
CONFIRM: Final = 4
#: Seconds of one, and of a probe's time the share that one takes at most.
RUN_S: Final = 4.0
_RUN_SHARE: Final = 0.2
#: Of a probe's time, what may have gone since its end when a run is begun that only looks for
#: something faster than what was chosen.
_EXPLORING_S: Final = 0.4
#: Batches that one should count: one of settings that may be chosen; and one that shows by how much
#: others are slower, which their batches alone make so many times slower than the fastest that was
#: run. No error of a mean of ten batches bridges that; the farther, the fewer say it as surely (a
#: mean's error falls with the root of their number), down to a few.
_RUN_BATCHES: Final = 25
_COMPARED_BATCHES: Final = 10
_FAR_SLOWER: Final = 1.5
_LEAST_COMPARED: Final = 4
#: Of all its time, what a tuning's probe takes.
PROBE_SHARE: Final = 0.65
#: Threads that libraries in workers are held to where they start some of their own.
HELD: Final = 1
#: Workers that are tried for each core, and the most for batches that mostly wait.
_WORKERS_A_CORE: Final = 2
_WAITING_A_CORE: Final = 8


def run_seconds(batch_s: float, fastest: float, seconds: float) -> float:
    """How long a confirming run counts, of a tuning whose probe takes ``seconds``.

    ``batch_s`` is what a batch takes by what its fetching and the consumer need, and ``fastest``
    the most batches a second of a run so far, 0 before the first.
    """
    batches, slower = float(_RUN_BATCHES), batch_s * fastest
    if slower > _FAR_SLOWER:
        fewer = (math.log(_FAR_SLOWER) / math.log(slower)) ** 2
        batches = max(_LEAST_COMPARED, _COMPARED_BATCHES * fewer)
    return max(min(RUN_S, _RUN_SHARE * seconds), min(batches * batch_s, seconds / 2))


def workers_tried(probe: Probe, cores: float, *, is_busy: bool) -> int:
    """The most workers that are tried: two a core, and more where batches mostly wait.

    Where other processes keep the cores busy (``is_busy``), no more than compute at a time: what
    taking turns costs was not measured. Waiting for a core is no waiting there; where the kernel
    does not tell it from any other, that is one a core.
    """
    waiting = 1.0
    if probe.fetch_s and probe.fetch_cpu_s is not None:
        computes = (probe.fetch_cpu_s + (probe.core_wait_s or 0.0)) / probe.fetch_s
        waiting = 1 / max(computes, 1 / _WAITING_A_CORE)
    if not is_busy:
        return max(2, round(max(_WORKERS_A_CORE, waiting) * cores))
    is_told = probe.core_wait_s is not None
    return max(2, math.ceil(cores), round(waiting * cores) if is_told else 0)


def _shared_bytes() -> int | None:
    """What of this process' memory forked workers share, until they write to it."""
    try:
        return int(psutil.Process().memory_full_info().uss)
    except psutil.Error:
        return None


class Tuner:
    """One tuning, behind its probe; ``spec`` has the step that batches are for."""

    def __init__(
        self,
        workload: Workload,
        machine: LoaderMachine,
        spec: TuningSpec,
        measured: Measured,
        held: Mapping[int, Measured],
        progress: MeasurementProgress,
        result: LoaderResult,
        watch: CoreSpeeds,
    ) -> None:
        # Without any run that only looks for something faster it would take so long, about.
        self._probed = time.monotonic()
        self._held = held
        assert spec.step is not None
        self._workload, self._machine, self._consumer = workload, machine, spec.step
        self._measured, self._spec, self._progress = measured, spec, progress
        self._result, self._watch = result, watch
        self._faults = list(measured.probe.faults)
        self._fault_of: dict[LoaderSettings, Finding] = {}
        self._runs = 0
        self._fastest = 0.0
        save_seconds()  # the first finds cold caches
        self._save_s = save_seconds()

    def tuned(self) -> LoaderResult:
        """Search, confirm, explain."""
        choice = self.predicted()
        confirmation = Confirmation(
            choice,
            self._run,
            0 if self._measured.stays_busy else max(0, min(self._spec.confirm, CONFIRM)),
            after=self._keep,
            in_time=lambda: time.monotonic() < self._probed + _EXPLORING_S * self._spec.seconds,
            noise=self._noise,
            within=1 / PREDICTED_GAIN if self._measured.stays_busy else WITHIN,
        )
        chosen = confirmation.run()
        return self._explained(confirmation.choice, chosen, confirmation.trials)

    def predicted(self) -> Choice:
        """What the model says of all settings; kept in case that the next step ends everything."""
        fitted = self._measured.fitted
        assert fitted is not None
        self._progress("simulating settings", PROBE_SHARE)
        models = {most: each.fitted for most, each in self._held.items() if each.fitted}
        choice = search(fitted, self._goal(), models)
        self._progress.keep(self._explained(choice, choice.best(), [], is_last=False))
        return choice

    def _keep(self, confirmation: Confirmation) -> None:
        """What there is so far, in case that the next run ends everything."""
        chosen = confirmation.choice.best()
        so_far = confirmation.choice, chosen, confirmation.trials
        self._progress.keep(self._explained(*so_far, is_last=False))

    # -- choosing --------------------------------------------------------------------------

    def _goal(self) -> Goal:
        """Settings of the user's kind that the faults leave."""
        left = self._measured.bounds
        present = self._workload.present
        start = present.start_method
        if left.start_methods and start not in left.start_methods:
            start = left.start_methods[0]
        return Goal(
            self._consumer,
            dataclasses.replace(present, start_method=start),
            self._most_workers(),
            least_workers=left.least_workers,
            any_order=self._spec.any_order,
            infeasible=self._infeasible,
            oversubscribed=self._oversubscribed,
            impossible=self._impossible,
        )

    def _most_workers(self) -> int:
        """The most workers that are worth a try and allowed."""
        busy = self._measured.stays_busy
        most = workers_tried(self._measured.probe, self._machine.usable_cores, is_busy=busy)
        for bound in (self._spec.max_workers, self._measured.bounds.workers):
            most = most if bound is None else min(most, bound)
        return most

    def _infeasible(self, settings: LoaderSettings) -> str:
        asked = self._spec.max_workers
        if asked is not None and settings.num_workers > asked:
            return f"limited to {count_of(asked, 'worker')} as requested"
        left: SettingConstraints = bounds(self._faults)
        if not left.allows(settings):
            return "excluded by a fault: " + ", ".join(left.reasons)
        unsafe = self._unsafe
        if unsafe and settings.num_workers:
            return f"excluded until a fault is fixed: {unsafe}"
        return feasible.infeasible(settings, self._measured.probe, self._machine)

    @property
    def _unsafe(self) -> str:
        """The fault by which workers, of which the script has none, would give other samples."""
        if self._workload.present.num_workers:
            return ""
        return next((fault.kind for fault in self._faults if fault.kind in UNSAFE), "")

    def _impossible(self, settings: LoaderSettings) -> str:
        if not bounds(self._faults).allows(settings):
            return "excluded by a fault"
        return feasible.infeasible(settings, self._measured.probe, self._machine)

    def _oversubscribed(self, settings: LoaderSettings, busy_cores: float) -> str:
        return feasible.oversubscribed(settings, self._probe(settings), self._machine, busy_cores)

    def _probe(self, settings: LoaderSettings) -> Probe:
        """What was measured with the threads of these settings."""
        maximum = settings.library_threads
        return (self._measured if maximum is None else self._held[maximum]).probe

    def _run(self, settings: LoaderSettings, consumer: Consumer) -> Run:
        """One confirming run, long enough for some batches."""
        count = settings.num_workers
        share = PROBE_SHARE + (1 - PROBE_SHARE) * self._runs / CONFIRM
        self._progress(f"confirming {count_of(count, 'worker')}", share)
        self._runs += 1
        fetch_s = self._probe(settings).fetch_s or 0.0
        batch_s = max(fetch_s / max(1, count), consumer.step_s)
        run, fault = run_watched(
            self._workload,
            settings,
            consumer,
            run_seconds(batch_s, self._fastest, self._spec.seconds),
            patience_s=2 * self._spec.seconds,
            batch_s=fetch_s,
            alone_s=self._measured.probe.alone_s,
            machine=self._machine,
            saves=True,
            ranks=self._result.ranks,
        )
        if fault is not None:
            self._faults.append(fault)
            self._fault_of[settings] = fault
        elif not is_busy(run.others_cores):
            self._fastest = max(self._fastest, run.batches_per_s or 0.0)
        return self._at_full_speed(run)

    def _at_full_speed(self, run: Run) -> Run:
        """The same run with its cores' speed, and with the rate that it would have had at full
        speed."""
        (run,) = with_speeds([run], self._watch)
        return self._measured.slowing.with_full_speed_rate(run)

    # -- explaining ------------------------------------------------------------------------

    def _explained(
        self,
        choice: Choice,
        chosen: LoaderSettings,
        trials: list[ConfirmingRun],
        *,
        is_last: bool = True,
    ) -> LoaderResult:
        """The result with these settings chosen. What others would give without a GPU is
        simulated at last, for those that a page shows."""
        probe, machine = self._measured.probe, self._machine
        load = choice.model(chosen).load(self._consumer, chosen.worker_threads)
        bound = limit(load, chosen, self._probe(chosen))
        disturbed = probe_is_disturbed(probe, self._held_probe)
        if disturbed and bound != "gpu":  # what else it is, others may have made
            bound = "unknown"
        if self._measured.bounds.workers == 0:
            bound = "main_process"
        decision = decide(choice, trials, chosen, bound, disturbed=disturbed, noise=self._noise)
        changes = decision.is_predicted and not decision.keeps
        without_others = chosen if changes else None
        if decision.keeps:
            chosen = choice.goal.present
        asked = {chosen, choice.goal.present}
        if is_last:
            asked |= {trial.settings for trial in trials} | _fastest(choice)
        recommended = self._with_persistence(choice, chosen)
        decision = self._final(decision, recommended)
        # Alongside other processes a batch has fewer busy threads than alone.
        notes = [] if decision.is_predicted else [threads.verdict(probe, machine, recommended)]
        if self._held and not decision.is_predicted:
            notes.append(_held_note(choice, trials, chosen))
        if self._consumer.pageable_s:
            copied = byte_rate(PAGEABLE_BYTES_PER_S)
            notes.append(
                "copying an unpinned batch to the GPU is assumed to block the "
                f"main thread for {duration(self._consumer.pageable_s)} ({copied}, assumed)"
            )
        if self._consumer.work_s:
            notes.append(
                f"{duration(self._consumer.work_s)} of the step keep a core busy: kernel "
                "launches, and busy-waits for the GPU"
            )
        findings = doubts(probe, self._held_probe, trials, is_predicted=decision.is_predicted)
        if note := alone_note([trial.run for trial in trials], self._result.ranks):
            notes.append(note)
        if self._unsafe and (why := _left_by_a_fault(choice, chosen, self._unsafe)):
            decision = dataclasses.replace(decision, reason=why)
        if warning := feasible.growth(recommended, probe, machine, _shared_bytes()):
            notes.append(warning)
        epoch = self._workload.epoch_batches
        return dataclasses.replace(
            self._result,
            recommended=recommended,
            verdict=decision.verdict,
            limit=bound,
            reason=decision.reason,
            candidates=tuple(
                self._with_needs(candidate, choice, has_rate=candidate.settings in asked)
                for candidate in choice.candidates.values()
            ),
            confirmed=tuple(map(self._confirmed, trials)),
            variables=threads.variables(
                probe, machine, recommended, os.environ, was_held=bool(self._held)
            ),
            # Next to other programs shares of a batch's time hold, rates less so.
            advice=tuple(
                finding
                for finding in beyond(
                    load, self._probe(chosen), recommended, self._consumer, machine, epoch
                )
                if finding.fix.gain is None or not decision.is_predicted
            ),
            too_many=tuple(
                self._with_needs(candidate, choice, has_rate=False)
                for candidate in beyond_knee(choice, chosen)
            ),
            faults=tuple(self._faults),
            notes=tuple(notes),
            save_alone_s=self._save_s,
            held=self._held_probe,
            doubts=findings,
            without_others=without_others,
        )

    @property
    def _noise(self) -> float:
        """The noise of runs (:meth:`Readings.run_noise`); 0, so that runs count alone, where the
        model is from runs that other processes disturbed."""
        disturbed = probe_is_disturbed(self._measured.probe, self._held_probe)
        return 0.0 if disturbed else self._measured.noise

    @property
    def _held_probe(self) -> Probe | None:
        return next((each.probe for each in self._held.values()), None)

    def _final(self, decision: Decision, recommended: LoaderSettings) -> Decision:
        """A change other than the rate within an epoch is one, too."""
        present, left = self._workload.present, bounds(self._faults)
        if decision.gains_nothing and not left.allows(present):
            return Decision("change", f"the current settings fail: {', '.join(left.reasons)}")
        if not decision.gains_nothing or recommended == present:
            return decision
        if recommended.persistent_workers != present.persistent_workers:
            workers = count_of(recommended.num_workers, "worker")
            text = f"restarting {workers} needs more than {percent(BUBBLE)} of each epoch"
            reason = f"{text}; within an epoch, {decision.reason}"
            return dataclasses.replace(decision, verdict="change", reason=reason, keeps=False)
        return decision

    def _with_persistence(self, choice: Choice, chosen: LoaderSettings) -> LoaderSettings:
        rate = choice.look(chosen).batches_per_s
        batches = self._workload.epoch_batches
        epoch_s = batches / rate if batches and rate > 0 else None
        starts = self._measured.probe.start_s
        start_s = starts.get(chosen.start_method, choice.fitted.start_s)
        persistent = keep_workers(choice.goal.present, chosen, start_s, epoch_s)
        return dataclasses.replace(chosen, persistent_workers=persistent)

    def _with_needs(self, candidate: Candidate, choice: Choice, *, has_rate: bool) -> Candidate:
        """The same candidate with the memory that it needs, and its rate with a consumer that needs
        no time."""
        needs = feasible.needs(candidate.settings, self._probe(candidate.settings))
        alone: float | None = candidate.batches_per_s
        if self._consumer.step_s:
            model = choice.model(candidate.settings)
            alone = (
                model.predict(candidate.settings, Consumer(0.0)).batches_per_s if has_rate else None
            )
        return dataclasses.replace(
            candidate,
            ram_bytes=needs.ram_bytes,
            shm_bytes=needs.shm_bytes,
            alone_batches_per_s=alone,
            save_s=self._predicted_save_s(candidate),
        )

    def _predicted_save_s(self, candidate: Candidate) -> float | None:
        if self._save_s is None:
            return None
        batch_s = self._probe(candidate.settings).fetch_cpu_s or 0.0
        settings, cores = candidate.settings, self._machine.usable_cores
        return predicted_save_s(self._save_s, settings, candidate.waiting_share, batch_s, cores)

    def _confirmed(self, trial: ConfirmingRun) -> Confirmed:
        run = trial.run
        handed = len(run.handed)
        switches = sum(run.context_switches)
        return Confirmed(
            settings=trial.settings,
            predicted_batches_per_s=trial.predicted,
            measured_batches_per_s=trial.measured,
            waiting_share=run.waiting_share if trial.measured is not None else None,
            batches=handed,
            seconds=run.seconds,
            context_switches_per_batch=switches / handed if switches and handed else None,
            private_bytes=sum(run.private_bytes) if run.private_bytes else None,
            fault=self._fault_of.get(trial.settings),
            core_speed=run.core_speed.speed if run.core_speed is not None else None,
            save_s=run.save_s,
            others_cores=run.others_cores,
            tries=trial.tries,
        )


def _fastest(choice: Choice) -> set[LoaderSettings]:
    """The settings with the best predicted rate for each number of workers."""
    found: dict[int, Candidate] = {}
    for candidate in choice.candidates.values():
        workers = candidate.settings.num_workers
        if not candidate.infeasible and (
            workers not in found or candidate.batches_per_s > found[workers].batches_per_s
        ):
            found[workers] = candidate
    return {each.settings for each in found.values()}


def _left_by_a_fault(choice: Choice, chosen: LoaderSettings, fault: str) -> str:
    """What workers would gain that a fault keeps from being advised; empty: nothing."""
    others = [
        candidate for candidate in choice.candidates.values() if candidate.settings.num_workers
    ]
    best = max(others, key=lambda each: each.batches_per_s, default=None)
    if best is None or choice.look(chosen).batches_per_s >= WITHIN * best.batches_per_s:
        return ""
    return (
        f"no workers are recommended until {fault} is fixed: "
        f"{count_of(best.settings.num_workers, 'worker')} would then give about "
        f"{rate(best.batches_per_s)} batches/s"
    )


def _held_note(choice: Choice, trials: Sequence[ConfirmingRun], chosen: LoaderSettings) -> str:
    """What holding libraries to one thread does to the rate, other settings alike."""
    if not chosen.num_workers:
        chosen = dataclasses.replace(chosen, num_workers=1)
    held, free = (dataclasses.replace(chosen, library_threads=threads) for threads in (HELD, None))
    ours, theirs = measured_rate(trials, held), measured_rate(trials, free)
    how = "measured"
    if ours is None or theirs is None:
        ours, theirs = choice.look(held).batches_per_s, choice.look(free).batches_per_s
        how = "predicted from a probe of each"
    return (
        f"{count_of(chosen.num_workers, 'worker')} with one thread per library: {rate(ours)} "
        f"batches/s; with the libraries' default threads: {rate(theirs)} ({how})"
    )
