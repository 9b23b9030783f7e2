"""Tries the remedies that lower a job's memory, with their savings and costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from trainfit.memory.affine import AffineStream
from trainfit.memory.peak import by_kind, moment
from trainfit.memory.replay import Stream
from trainfit.plan.changes.catalogue import (
    BY_NAME,
    NAMES,
    RemedyKind,
    cost_percent,
    extra_compute,
    ordered,
    two_digits,
)
from trainfit.plan.changes.trials import (
    Before,
    Kinds,
    NotApplicable,
    Trial,
    Trials,
    combinations,
    expected_bytes,
    gentler,
)
from trainfit.plan.runs.failures import NotSimulated, ScriptError, what_happened
from trainfit.plan.runs.runs import PARALLEL
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.costing import step_seconds
from trainfit.plan.sizing.memory_model import Batches
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results.changes import LEAST_GAIN, Combination, Remedies, Remedy
from trainfit.results.memory import MemoryFigures
from trainfit.results.runs.recording import FREE, MALLOC, NotAffineError
from trainfit.results.runs.spec import RunSpec
from trainfit.results.text import count

#: Share of the device memory that a remedy must win to have its largest batch looked for.
_WORTH_A_LAW = 0.05
#: Seconds of simulation after which no further remedy is begun that nobody asked for.
_ENOUGH_S: Final = 120.0
#: Numbers of micro-batches that are tried until one fits.
_MOST_SPLITS = 3
#: A run that is longer than this is not repeated for the largest batch.
_CHEAP_S = 60.0


def try_remedies(
    job: PlannedJob, batches: Batches, flipped: RunSpec, names: Sequence[str] | None
) -> Remedies:
    """Try the remedies called ``names`` on ``job``, each alone, then together if need be.

    ``None`` of them are all, of a job that does not fit: those that can lower its peak, as many as
    are simulated in :data:`_ENOUGH_S` seconds (all, if the plan is thorough). ``batches`` are those
    of the job as it is, ``flipped`` its run with autocast the other way round.
    """
    remedies = _Remedies(job, batches, flipped, is_asked=names is not None)
    return remedies.run(NAMES if names is None else names)


class _Remedies:
    """The trials of a job. ``is_asked``: somebody wants to know of each remedy; else the job is to
    be made to fit."""

    def __init__(
        self, job: PlannedJob, batches: Batches, flipped: RunSpec, *, is_asked: bool
    ) -> None:
        self._job, self._batches, self._flipped = job, batches, flipped
        self._is_asked = is_asked
        self._memory_model = job.memory_model
        self._spent_s = 0.0
        self._kinds: dict[str, Kinds] = {}
        #: Those that apply and were left out for want of time.
        self._untried: dict[str, Trial] = {}

    def run(self, names: Sequence[str]) -> Remedies:
        job = self._job
        survey = job.sized(RunSpec(survey=True, title="looking for remedies"))
        try:
            self._survey = job.runs.trace(job.batch, survey)
        except ScriptError as error:
            return Remedies(
                None, job.batch, self._batches.largest, 0, (),
                failure=error.in_note, is_asked=self._is_asked,
            )  # fmt: skip
        self._trials = Trials(job, self._batches.law, self._flipped, self._survey)
        self._before = self._trials.before
        trials, items = self._applicable(names)
        items += self._measured(trials)
        items = self._with_largest(items, trials)
        done = ordered(items, NAMES)
        combination = self._combination(done, trials)
        together = () if combination is None else combination.names
        done = tuple(
            dataclasses.replace(each, how=self._untried[each.name].how)
            if each.name in together and each.name in self._untried
            else each
            for each in done
        )
        return Remedies(
            before=self._before,
            batch_size=job.batch,
            largest_batch=self._batches.largest,
            steps=self._survey.outcome.steps,
            items=done,
            combination=combination,
            is_asked=self._is_asked,
        )

    # -- what applies ----------------------------------------------------------------------

    def _applicable(self, names: Sequence[str]) -> tuple[dict[str, Trial], list[Remedy]]:
        """The trials to make, first what can save most; and the remedies that do not apply."""
        trials: dict[str, Trial] = {}
        items: list[Remedy] = []
        for name in names:
            kind = BY_NAME[name]
            try:
                if not self._is_asked:
                    self._trials.require_share(kind)
                trials[name] = self._trials.of(kind)
            except NotApplicable as reason:
                items.append(_without_figures(kind, "not applicable", str(reason)))
        if not self._is_asked and {"amp-bf16", "amp-fp16"} <= trials.keys():
            del trials["amp-fp16"]
            items.append(_without_figures(BY_NAME["amp-fp16"], "not tried", _AS_BFLOAT16))
        return {name: trials[name] for name in sorted(trials, key=self._rank)}, items

    def _rank(self, name: str) -> tuple[bool, float, bool, int]:
        """What goes with others first, then what can save most (to two digits), and what leaves
        the training as it is."""
        kind = BY_NAME[name]
        most = two_digits(self._trials.most_saved(kind))
        return not kind.combines, -most, kind.changes == "training", NAMES.index(name)

    def _measured(self, trials: dict[str, Trial]) -> list[Remedy]:
        """Each trial's figures; of those that nobody asked for, while there is time."""
        items: list[Remedy] = []
        order = list(trials)
        for index, name in enumerate(order):
            if not self._is_simulated(trials[name]) or self._has_time():
                for each in order[index : index + PARALLEL]:
                    if self._is_simulated(trials[each]):
                        self._job.runs.start(trials[each].batch, trials[each].spec)
                items.append(self._measure(name, trials))
            else:
                self._untried[name] = trial = trials.pop(name)
                items.append(_without_figures(trial.kind, "not tried", _NO_TIME))
        return items

    @staticmethod
    def _is_simulated(trial: Trial) -> bool:
        return trial.allocator is None and trial.kind.name != "fused-attention"

    def _has_time(self) -> bool:
        return self._is_asked or self._job.thorough or self._spent_s < _ENOUGH_S

    # -- figures ---------------------------------------------------------------------------

    def _measure(self, name: str, trials: dict[str, Trial]) -> Remedy:
        """What the trial shows; where accumulation does not fit yet, with a smaller batch."""
        trial = trials[name]
        if trial.allocator is not None:
            return self._remedy(trial, self._survey, "replayed")
        if name == "fused-attention":
            return self._estimate(trial)
        remedy: Remedy | None = None
        try:
            remedy = self._remedy(trial, self._traced(trial), "simulated")
            for skip in range(1, _MOST_SPLITS):
                if name != "accumulate" or remedy.fits:
                    break
                trials[name] = trial = self._trials.accumulation(trial.kind, trial.finding, skip)
                remedy = self._remedy(trial, self._traced(trial), "simulated")
        except NotApplicable as error:
            return remedy or _without_figures(trial.kind, "not applicable", str(error))
        except ScriptError as error:
            if name == "fewer-cameras":
                reason = f"the model does not run without {trial.finding.detail}"
                return _without_figures(trial.kind, "not applicable", reason)
            return _without_figures(trial.kind, "failed", error.in_note)
        return remedy

    def _traced(self, trial: Trial) -> Trace:
        """The trial's run.

        Raises :class:`ScriptError` where it did not do what was asked, and
        :class:`NotApplicable` where it showed that the remedy is none.
        """
        trace = self._job.runs.attempt(trial.batch, trial.spec)
        outcome = trace.outcome
        if trial.spec != self._job.sized(self._flipped):  # which was there already
            self._spent_s += outcome.seconds
        if "WeightsUsedError" in outcome.message:
            raise NotApplicable(outcome.message.partition(": ")[2])
        if outcome.steps < self._survey.outcome.steps or trace.recording is None:
            raise ScriptError(f"{what_happened(outcome)} after {count(outcome.steps, 'step')}")
        for request in trial.spec.interventions:
            if not outcome.changed.get(request.name):
                raise ScriptError("the trial found nothing to change")
        return trace

    def _estimate(self, trial: Trial) -> Remedy:
        """The recording without the tensors that fused kernels do not keep."""
        stream = _without(self._trials.stream, trial.finding.allocations)
        return self._remedy(trial, self._survey, "estimated", stream)

    def _remedy(
        self, trial: Trial, trace: Trace, status: str, stream: Stream | None = None
    ) -> Remedy:
        kind = trial.kind
        memory_model = self._trials.memory_model_with(trial.allocator)
        if stream is None:
            stream = _stream(trace, self._survey.outcome.steps)
        outcome, fits = memory_model.shown(stream)
        memory = memory_model.figures(outcome)
        self._kinds[kind.name] = by_kind(recording_of(trace), stream, outcome)
        extra = extra_compute(self._survey.outcome.compute, trace.outcome.compute)
        if status == "estimated":
            extra = None
        change = None if status == "estimated" else self._step_change(trace)
        detail = kind.changes_detail
        if kind.name == "accumulate" and trial.finding.detail:
            detail = "batch norm sees the smaller micro-batches"
        return Remedy(
            name=kind.name,
            title=kind.title,
            status=status,  # type: ignore[arg-type]
            reason=_ESTIMATE if status == "estimated" else self._why_nothing(kind, memory),
            changes=kind.changes,
            changes_detail=detail,
            found=trial.finding.detail,
            memory=memory,
            fits=fits,
            saved_bytes=self._before.device_bytes - memory.device_bytes,
            extra=extra,
            cost_percent=cost_percent(extra, kind.changes),
            how=trial.how,
            launch=self._trials.launch([trial]),
            step_change=change,
        )

    def _why_nothing(self, kind: RemedyKind, memory: MemoryFigures) -> str:
        """Why a change of the activations saves none of the memory; empty where it does."""
        if kind.name not in _ACTIVATIONS or memory.allocated_bytes < self._before.allocated_bytes:
            return ""
        peak, _ = self._memory_model.shown(self._trials.stream)
        if moment(recording_of(self._survey), peak.peak_event).phase == "optimizer":
            return "the peak is in the optimizer's step, where no activations are left"
        return _SAME_RESULTS if kind.name == "inplace" else ""

    def _step_change(self, trace: Trace) -> float | None:
        """How much longer an optimizer's step is than in the unchanged job."""
        machine = self._job.machine
        before = step_seconds(recording_of(self._survey), machine)
        after = step_seconds(recording_of(trace), machine)
        return after / before - 1 if before and after is not None else None

    # -- the largest batch -----------------------------------------------------------------

    def _with_largest(self, items: list[Remedy], trials: Mapping[str, Trial]) -> list[Remedy]:
        """The largest batch size of the remedies that win, where two runs give a law."""
        law = self._batches.law
        if law is None or self._job.batch is None:
            return items
        least = _WORTH_A_LAW * self._before.device_bytes
        worth = [r.name for r in items if (r.saved_bytes or 0) >= least and r.name in trials]
        worth = [name for name in worth if name not in ("accumulate", "fused-attention")]
        if not self._is_asked:
            fitting = {remedy.name for remedy in items if remedy.fits}
            worth = [name for name in worth if name in fitting and self._has_time()]
        for name in worth:
            if trials[name].allocator is None and self._is_cheap(trials[name]):
                for batch in law.batches:
                    self._job.runs.start(batch, trials[name].spec)
        return [
            dataclasses.replace(item, largest_batch=self._largest(trials[item.name], law))
            if item.name in worth
            else item
            for item in items
        ]

    def _is_cheap(self, trial: Trial) -> bool:
        trace = self._job.runs.trace(trial.batch, trial.spec)
        return trace.outcome.seconds <= _CHEAP_S

    def _largest(self, trial: Trial, law: AffineStream) -> int | None:
        if trial.allocator is not None:
            return self._trials.memory_model_with(trial.allocator).largest(law)
        if not self._is_cheap(trial):
            return None
        try:
            traces = [self._job.runs.trace(batch, trial.spec) for batch in law.batches]
            steps = min(trace.outcome.steps for trace in traces)
            streams = [recording_of(trace).first_steps(steps) for trace in traces]
            own = AffineStream.between(streams[0], law.batches[0], streams[1], law.batches[1])
        except (ScriptError, NotAffineError):
            return None
        return self._memory_model.largest(own) if own.depends_on_batch else None

    # -- several together ------------------------------------------------------------------

    def _combination(
        self, items: Sequence[Remedy], trials: Mapping[str, Trial]
    ) -> Combination | None:
        """Remedies added in their order until they fit. Where one suffices, but only one that
        changes the training, such as change it less; else ``None``."""
        fitting = [item for item in items if item.fits and item.status != "estimated"]
        if self._trials.fits or any(item.changes != "training" for item in fitting):
            return None
        if fitting:
            return self._gentler({**self._untried, **trials}, {item.name for item in fitting})
        wins = [item for item in items if self._wins(item) and item.status != "estimated"]
        before = Before(self._trials.kinds, self._before)
        together = functools.partial(expected_bytes, before, {i.name: i for i in wins}, self._kinds)
        latest: Combination | None = None
        for names in combinations(wins, together, self._memory_model.capacity_bytes):
            try:
                latest = self._together([trials[name] for name in names])
            except NotSimulated:
                break
            if latest.fits:
                break
        return latest

    def _gentler(self, trials: Mapping[str, Trial], fitting: Collection[str]) -> Combination | None:
        """The first of :func:`gentler` that fits; ``trials`` are those that apply, ``fitting`` what
        fits alone."""
        for names in gentler(trials, fitting):
            try:
                combination = self._together([trials[name] for name in names])
            except NotSimulated:
                return None
            if combination.fits:
                return combination
        return None

    def _wins(self, item: Remedy) -> bool:
        return (item.saved_bytes or 0) >= LEAST_GAIN * self._before.device_bytes

    def _together(self, trials: Sequence[Trial]) -> Combination:
        """All of ``trials`` in one run."""
        job = self._job
        requests = tuple(r for trial in trials for r in trial.spec.interventions)
        names = tuple(trial.kind.name for trial in trials)
        batch = next((t.batch for t in trials if t.kind.name == "accumulate"), job.batch)
        allocator = next((t.allocator for t in trials if t.allocator is not None), None)
        spec = RunSpec(
            values={name: text for t in trials for name, text in t.spec.values.items()},
            force=next((t.spec.force for t in trials if t.spec.force is not None), None),
            interventions=requests,
            title=" + ".join(names),
        )
        launch = self._trials.launch(trials) or job.command.line()
        trace = job.runs.attempt(batch, job.sized(spec))
        steps = self._survey.outcome.steps
        if trace.recording is None or trace.outcome.steps < steps:
            failure = what_happened(trace.outcome)
            return Combination(names, None, False, batch, None, launch, failure)
        memory_model = self._trials.memory_model_with(allocator)
        outcome, fits = memory_model.shown(_stream(trace, steps))
        extra = extra_compute(self._survey.outcome.compute, trace.outcome.compute)
        figures, change = memory_model.figures(outcome), self._step_change(trace)
        return Combination(names, figures, fits, batch, extra, launch, step_change=change)


_AS_BFLOAT16: Final = "its memory is that of amp-bf16, which needs no scaler"
_NO_TIME: Final = "not simulated: others can save more (--remedies tries all)"
#: Remedies that lower activations alone.
_ACTIVATIONS = (
    *("inplace", "checkpoint", "lower-resolution", "fewer-cameras", "attention-weights"),
    *("channels-last", "no-grad-eval"),
)
_SAME_RESULTS = (
    "only the result is kept for the backward pass, in place or not; the input is freed anyway"
)
_ESTIMATE = (
    "not simulated: estimated by leaving the scores and probabilities out of the recording; "
    "the script's own code would have to change"
)


def _without_figures(kind: RemedyKind, status: str, reason: str) -> Remedy:
    return Remedy(
        name=kind.name,
        title=kind.title,
        status=status,  # type: ignore[arg-type]
        reason=reason,
        changes=kind.changes,
        changes_detail=kind.changes_detail,
    )


def _stream(trace: Trace, steps: int | None = None) -> Stream:
    """The first ``steps`` steps of a run, or all of it."""
    recording = recording_of(trace)
    if steps is not None and 0 < steps < recording.steps:
        recording = recording.first_steps(steps)
    return Stream.of(recording)


def _without(stream: Stream, allocations: Sequence[int]) -> Stream:
    """The stream as if ``allocations`` had never been made."""
    codes, numbers = stream.events & 3, stream.events >> 2
    gone = np.isin(numbers, allocations) & ((codes == MALLOC) | (codes == FREE))
    return dataclasses.replace(stream, events=stream.events[~gone])
