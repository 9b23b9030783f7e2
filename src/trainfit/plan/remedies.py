"""Tries what would lower a job's memory, and says what each of it wins and costs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from trainfit.memory.affine import AffineStream, NotAffineError
from trainfit.memory.replay import Stream
from trainfit.plan.command import Command, quote
from trainfit.plan.failures import ScriptError, what_happened
from trainfit.plan.judge import Judge
from trainfit.plan.pricing import cost, extra_compute, ordered
from trainfit.plan.remedy_kinds import BY_NAME, NAMES, RemedyKind, instructions
from trainfit.plan.runs import AS_WRITTEN, Runs, Variant
from trainfit.plan.tracing import Trace
from trainfit.results.plan import Combination, Remedies, Remedy
from trainfit.results.recording import FREE, MALLOC, Recording
from trainfit.results.trace import Finding, InterventionRequest
from trainfit.results.words import count
from trainfit.simgpu.allocator_settings import ENVIRONMENT_VARIABLES, AllocatorSettings

#: Share of the device memory that a remedy must win to have its largest batch looked for.
_WORTH_A_LAW = 0.01
#: Simulated combinations.
_MOST_COMBINATIONS = 4
#: Numbers of micro-batches that are tried until one fits.
_MOST_SPLITS = 3
#: A run that takes longer than this is not repeated for the largest batch.
_CHEAP_S = 60.0

#: Settings that are replayed besides expandable segments; the best of them is shown.
_ALLOCATORS = (
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:64",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """The job that is planned: its runs, its batch size and what is known of others.

    ``batch`` is ``None`` where it could not be told. ``law`` gives every batch size and
    ``largest`` is the largest that fits; ``None`` where there is no law. ``flipped`` is the
    run with autocast the other way round, ``steps`` how many steps are enough.
    """

    command: Command
    runs: Runs
    judge: Judge
    batch: int | None
    law: AffineStream | None
    largest: int | None
    flipped: Variant
    steps: int


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A remedy's run: how it differs, and what it would be launched with."""

    kind: RemedyKind
    finding: Finding
    variant: Variant = AS_WRITTEN
    batch: int | None = None
    amp: str | None = None
    allocator: str | None = None
    how: tuple[str, ...] = ()


class NotApplicable(Exception):
    """A remedy does not apply; the message says why."""


def try_remedies(job: Job, names: Sequence[str]) -> Remedies:
    """Try the remedies called ``names`` on ``job``, each alone, then together if need be."""
    return _Remedies(job).run(names)


class _Remedies:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._judge = job.judge

    def run(self, names: Sequence[str]) -> Remedies:
        job = self._job
        survey = Variant(survey=True, steps=job.steps, title="looking for remedies")
        try:
            self._survey = job.runs.trace(job.batch, survey)
        except ScriptError as error:
            return Remedies(None, job.batch, job.largest, 0, (), failure=str(error))
        self._stream = _stream(self._survey)
        outcome, self._fits = self._judge.shown(self._stream)
        self._before = self._judge.figures(outcome)
        self._findings = {finding.name: finding for finding in self._survey.outcome.findings}
        trials, items = self._trials(names)
        items += [self._measure(name, trials) for name in list(trials)]
        items = self._with_largest(items, trials)
        done = ordered(items, NAMES)
        return Remedies(
            before=self._before,
            batch_size=job.batch,
            largest_batch=job.largest,
            steps=self._survey.outcome.steps,
            items=done,
            combination=self._combination(done, trials),
        )

    # -- what applies ----------------------------------------------------------------------

    def _trials(self, names: Sequence[str]) -> tuple[dict[str, _Trial], list[Remedy]]:
        """The trials to make, their runs begun; and the remedies that do not apply."""
        trials: dict[str, _Trial] = {}
        items: list[Remedy] = []
        for name in names:
            kind = BY_NAME[name]
            try:
                trial = self._trial(kind)
            except NotApplicable as reason:
                items.append(_without_figures(kind, "not applicable", str(reason)))
                continue
            trials[name] = trial
            if trial.allocator is None and kind.name != "fused-attention":
                self._job.runs.start(trial.batch, trial.variant)
        return trials, items

    def _trial(self, kind: RemedyKind) -> _Trial:
        """How the remedy is tried; raises :class:`NotApplicable`."""
        job = self._job
        if kind.name.startswith("amp-"):
            return self._amp(kind)
        if kind.name == "expandable-segments":
            return self._expandable(kind)
        if kind.name == "allocator-settings":
            return self._other_allocator(kind)
        finding = self._findings[kind.name]
        if not finding.applies:
            raise NotApplicable(finding.reason)
        if kind.name == "accumulate":
            return self._accumulation(kind, finding, 0)
        variant = self._variant(kind, finding.targets)
        how = instructions(kind, finding)
        return _Trial(kind, finding, variant, job.batch, how=how)

    def _variant(self, kind: RemedyKind, targets: tuple[str, ...] = ()) -> Variant:
        request = InterventionRequest(kind.name, targets)
        return Variant(interventions=(request,), steps=self._job.steps, title=kind.name)

    def _amp(self, kind: RemedyKind) -> _Trial:
        job = self._job
        present = self._survey.outcome.autocast
        if present is not None:
            raise NotApplicable(f"autocast computes in {present} already")
        dtype = "bfloat16" if kind.name == "amp-bf16" else "float16"
        if dtype == "bfloat16" and not self._judge.gpu.supports_bf16:
            raise NotApplicable(f"{self._judge.gpu.key} does not compute in bfloat16")
        finding = Finding(kind.name, True)
        try:
            is_flipped = job.runs.trace(job.batch, job.flipped).outcome.autocast == dtype
        except ScriptError:
            is_flipped = False
        if is_flipped:
            amp = job.flipped.amp
            how = ("as in the command below",) if amp is not None else kind.how(finding)
            return _Trial(kind, finding, job.flipped, job.batch, amp=amp, how=how)
        forced = "bfloat16" if dtype == "bfloat16" else "float16"
        variant = Variant(force=forced, steps=job.steps, title=kind.name)  # type: ignore[arg-type]
        return _Trial(kind, finding, variant, job.batch, how=kind.how(finding))

    def _accumulation(self, kind: RemedyKind, finding: Finding, skip: int) -> _Trial:
        """With the fewest micro-batches that look as if they fit, but for ``skip``."""
        batch, law = self._job.batch, self._job.law
        if batch is None:
            raise NotApplicable("the batch size is not known; write {batch_size:N} into it")
        splits = [k for k in range(2, batch + 1) if batch % k == 0]
        if not splits:
            raise NotApplicable("a batch of one sample cannot be split")
        if law is not None and not self._fits:
            good = [k for k in splits if self._judge.limited(law.at(batch // k)).fits]
            splits = good or splits[-1:]
        if skip >= len(splits):
            raise NotApplicable("no smaller micro-batch is left")
        parts = splits[skip]
        how = (
            *(instructions(kind, finding)),
            f"batch size {batch // parts} instead of {batch}; loss = loss / {parts} before "
            f"backward; step and zero_grad only after every {parts} batches",
        )
        variant = self._variant(kind, (str(parts),))
        return _Trial(kind, finding, variant, batch // parts, how=how)

    # -- the allocator ---------------------------------------------------------------------

    def _expandable(self, kind: RemedyKind) -> _Trial:
        if self._judge.settings.expandable_segments:
            raise NotApplicable("expandable segments are on already")
        return self._allocator_trial(kind, "expandable_segments:True")

    def _other_allocator(self, kind: RemedyKind) -> _Trial:
        """The best of several settings, all replayed on the recording."""
        reserved: dict[str, int] = {}
        for text in _ALLOCATORS:
            if text.partition(":")[0] in self._conf():
                continue
            outcome, fits = self._judge_with(text).shown(self._stream)
            reserved[text] = outcome.peak_reserved if fits or not self._fits else 1 << 60
        best = min(reserved, key=lambda text: reserved[text], default=None)
        if best is None or reserved[best] >= self._before.reserved_bytes:
            tried = ", ".join(reserved) or "settings that are not set already"
            raise NotApplicable(f"none of {tried} lowers reserved memory")
        return self._allocator_trial(kind, best)

    def _allocator_trial(self, kind: RemedyKind, text: str) -> _Trial:
        finding = Finding(kind.name, True, detail=text)
        how = (f"set {self._variable()} to {self._merged(text)}, as in the command below",)
        return _Trial(kind, finding, batch=self._job.batch, allocator=text, how=how)

    def _environment(self) -> Mapping[str, str]:
        return {**os.environ, **self._job.command.environment()}

    def _variable(self) -> str:
        """The variable that is set, else the one that every version of PyTorch reads."""
        present = [name for name in ENVIRONMENT_VARIABLES if name in self._environment()]
        return (present or ENVIRONMENT_VARIABLES)[0]

    def _conf(self) -> str:
        return self._environment().get(self._variable(), "")

    def _merged(self, text: str) -> str:
        return ",".join(filter(None, (self._conf().rstrip(","), text)))

    def _judge_with(self, text: str | None) -> Judge:
        if text is None:
            return self._judge
        return self._judge.with_settings(AllocatorSettings.from_conf(self._merged(text)))

    # -- figures ---------------------------------------------------------------------------

    def _measure(self, name: str, trials: dict[str, _Trial]) -> Remedy:
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
                trials[name] = trial = self._accumulation(trial.kind, trial.finding, skip)
                remedy = self._remedy(trial, self._traced(trial), "simulated")
        except NotApplicable as error:
            return remedy or _without_figures(trial.kind, "not applicable", str(error))
        except ScriptError as error:
            return _without_figures(trial.kind, "failed", str(error))
        return remedy

    def _traced(self, trial: _Trial) -> Trace:
        """The trial's run.

        Raises :class:`ScriptError` where it did not do what was asked, and
        :class:`NotApplicable` where it showed that the remedy is none.
        """
        trace = self._job.runs.attempt(trial.batch, trial.variant)
        outcome = trace.outcome
        if "WeightsUsedError" in outcome.message:
            raise NotApplicable(outcome.message.partition(": ")[2])
        if outcome.steps < self._survey.outcome.steps or trace.recording is None:
            raise ScriptError(f"{what_happened(outcome)} after {count(outcome.steps, 'step')}")
        for request in trial.variant.interventions:
            if not outcome.changed.get(request.name):
                raise ScriptError("nothing was found to change when it was tried")
        return trace

    def _estimate(self, trial: _Trial) -> Remedy:
        """The recording without the tensors that fused kernels do not keep."""
        stream = _without(self._stream, trial.finding.allocations)
        return self._remedy(trial, self._survey, "estimated", stream)

    def _remedy(
        self, trial: _Trial, trace: Trace, status: str, stream: Stream | None = None
    ) -> Remedy:
        kind = trial.kind
        judge = self._judge_with(trial.allocator)
        if stream is None:
            stream = _stream(trace, self._survey.outcome.steps)
        outcome, fits = judge.shown(stream)
        memory = judge.figures(outcome)
        extra = extra_compute(self._survey.outcome.compute, trace.outcome.compute)
        if status == "estimated":
            extra = None
        detail = kind.changes_detail
        if kind.name == "accumulate" and trial.finding.detail:
            detail = "batch norm sees the smaller micro-batches"
        return Remedy(
            name=kind.name,
            title=kind.title,
            status=status,  # type: ignore[arg-type]
            reason=_ESTIMATE if status == "estimated" else "",
            changes=kind.changes,
            changes_detail=detail,
            found=trial.finding.detail,
            memory=memory,
            fits=fits,
            saved_bytes=self._before.device_bytes - memory.device_bytes,
            extra=extra,
            cost=cost(extra, kind.changes),
            how=trial.how,
            launch=self._launch([trial]),
        )

    # -- the largest batch -----------------------------------------------------------------

    def _with_largest(self, items: list[Remedy], trials: Mapping[str, _Trial]) -> list[Remedy]:
        """The largest batch size of the remedies that win, where two runs give a law."""
        law = self._job.law
        if law is None or self._job.batch is None:
            return items
        least = _WORTH_A_LAW * self._before.device_bytes
        worth = [r.name for r in items if (r.saved_bytes or 0) >= least and r.name in trials]
        worth = [name for name in worth if name not in ("accumulate", "fused-attention")]
        for name in worth:
            if trials[name].allocator is None and self._is_cheap(trials[name]):
                for batch in law.batches:
                    self._job.runs.start(batch, trials[name].variant)
        return [
            dataclasses.replace(item, largest_batch=self._largest(trials[item.name], law))
            if item.name in worth
            else item
            for item in items
        ]

    def _is_cheap(self, trial: _Trial) -> bool:
        trace = self._job.runs.trace(trial.batch, trial.variant)
        return trace.outcome.seconds <= _CHEAP_S

    def _largest(self, trial: _Trial, law: AffineStream) -> int | None:
        if trial.allocator is not None:
            return self._judge_with(trial.allocator).largest(law)
        if not self._is_cheap(trial):
            return None
        try:
            traces = [self._job.runs.trace(batch, trial.variant) for batch in law.batches]
            steps = min(trace.outcome.steps for trace in traces)
            streams = [_recording(trace).first_steps(steps) for trace in traces]
            own = AffineStream.between(streams[0], law.batches[0], streams[1], law.batches[1])
        except (ScriptError, NotAffineError):
            return None
        return self._judge.largest(own) if own.depends_on_batch else None

    # -- several together ------------------------------------------------------------------

    def _combination(
        self, items: Sequence[Remedy], trials: Mapping[str, _Trial]
    ) -> Combination | None:
        """Remedies added in their order until they fit; ``None`` where one is enough."""
        if self._fits or any(item.fits and item.status != "estimated" for item in items):
            return None
        missing = self._before.device_bytes - self._judge.gpu.memory_bytes
        chosen: list[_Trial] = []
        latest: Combination | None = None
        runs = 0
        useful = [r for r in items if (r.saved_bytes or 0) > 0 and r.status != "estimated"]
        for index, item in enumerate(useful):
            trial = trials[item.name]
            if any(trial.kind.slots & other.kind.slots for other in chosen):
                continue
            chosen.append(trial)
            missing -= item.saved_bytes or 0
            is_last = index == len(useful) - 1
            if len(chosen) < 2 or (missing > 0 and not is_last):
                continue
            runs += 1
            latest = self._together(chosen) or latest
            if (latest is not None and latest.fits) or runs >= _MOST_COMBINATIONS:
                break
        return latest

    def _together(self, trials: Sequence[_Trial]) -> Combination | None:
        job = self._job
        requests = tuple(r for trial in trials for r in trial.variant.interventions)
        names = tuple(trial.kind.name for trial in trials)
        batch = next((t.batch for t in trials if t.kind.name == "accumulate"), job.batch)
        allocator = next((t.allocator for t in trials if t.allocator is not None), None)
        variant = Variant(
            amp=next((t.variant.amp for t in trials if t.variant.amp is not None), None),
            force=next((t.variant.force for t in trials if t.variant.force is not None), None),
            interventions=requests,
            steps=job.steps,
            title=" + ".join(names),
        )
        try:
            trace = job.runs.trace(batch, variant)
        except ScriptError:
            return None
        judge = self._judge_with(allocator)
        outcome, fits = judge.shown(_stream(trace, self._survey.outcome.steps))
        return Combination(
            names=names,
            memory=judge.figures(outcome),
            fits=fits,
            batch_size=batch,
            extra=extra_compute(self._survey.outcome.compute, trace.outcome.compute),
            launch=self._launch(trials) or job.command.line(),
        )

    def _launch(self, trials: Sequence[_Trial]) -> str | None:
        """The command with the changes; ``None`` where it stays as it is."""
        command = self._job.command
        values: dict[str, str] = {}
        for trial in trials:
            if trial.amp is not None:
                values["amp"] = trial.amp
            if trial.batch != self._job.batch and "batch_size" in command.present:
                values["batch_size"] = str(trial.batch)
        line = command.line(**values)
        text = next((t.allocator for t in trials if t.allocator is not None), None)
        if text is not None:
            name = self._variable()
            new = quote(f"{name}={self._merged(text)}")
            old = command.environment(**values).get(name)
            line = f"{new} {line}" if old is None else line.replace(quote(f"{name}={old}"), new, 1)
        return line if values or text is not None else None


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


def _recording(trace: Trace) -> Recording:
    assert trace.recording is not None  # as it made a step
    return trace.recording


def _stream(trace: Trace, steps: int | None = None) -> Stream:
    """The first ``steps`` steps of a run, or all of it."""
    recording = _recording(trace)
    if steps is not None and 0 < steps < recording.steps:
        recording = recording.first_steps(steps)
    return Stream.of(recording)


def _without(stream: Stream, allocations: Sequence[int]) -> Stream:
    """The stream as if ``allocations`` had never been made."""
    codes, numbers = stream.events & 3, stream.events >> 2
    gone = np.isin(numbers, allocations) & ((codes == MALLOC) | (codes == FREE))
    return dataclasses.replace(stream, events=stream.events[~gone])
