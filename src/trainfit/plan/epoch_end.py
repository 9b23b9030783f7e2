"""What comes at the end of an epoch, and of all epochs: an evaluation, a checkpoint, in runs of
their own.

The training's DataLoader is cut short, so that the script comes there within a few steps; those of
an evaluation are, too, to two lengths. Memory that grows over it is carried on to its real length.
The last batch of each is the largest that its data set has. Where the source has more to come
after the loops, or goes by an epoch's number, a run goes on to the script's end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from trainfit.findings.habits import of_evaluation
from trainfit.findings.out_of_memory import of_full_memory
from trainfit.findings.training.accumulation import changed_later
from trainfit.findings.training.learning import of_later_learning, of_learning
from trainfit.memory.growth import is_freed_by_epochs
from trainfit.memory.held import full_memory
from trainfit.memory.replay import Stream
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.epoch_peak import (
    ALIKE,
    ShortRun,
    carried_peak,
    is_in_proportion,
    later_peak,
    memory_at_the_end,
    next_peak,
    step_peaks,
    what_grows,
    within_evaluation,
)
from trainfit.plan.growth_findings import of_epochs, of_longer_epochs
from trainfit.plan.runs.batches import last_batch_fails, remainder_of
from trainfit.plan.runs.failures import NotSimulated, fails_beyond, what_happened
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.memory_model import Growth
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results.configuration import EpochEnd
from trainfit.results.findings import EVALUATION_WITH_GRAPH, LAST_BATCH, Finding
from trainfit.results.runs.learning import LearningFacts
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.steps import Coverage
from trainfit.results.runs.trace import InterventionRequest, LoaderCut
from trainfit.results.text import count

#: Steps of an epoch that is cut short, and epochs in which an evaluation is waited for.
_STEPS, _EPOCHS = 2, 3
#: Gradients off in an evaluation.
_NO_GRAPH: Final = InterventionRequest("no-grad-eval")
#: Batches of an evaluation: two lengths tell whether memory grows over it.
_LENGTHS: Final = (8, 16)
#: A third, where something grows by more than in proportion to them.
_THIRD: Final = 32
#: All of them, for a script that does not bear less: it compares what it got with the data set.
_WHOLE: Final = (1 << 40,)
#: Seconds for a look at the samples of the evaluation's data set: its last batch is the largest.
_LOOK_S: Final = 2.5
#: Seconds for each of the runs.
_LIMIT_S: Final = 120.0
#: Times that loops are ended in a run to the end of a script, which may train in several stages;
#: and seconds for it.
_ROUNDS: Final = 8
_END_LIMIT_S: Final = 60.0
#: Where no DataLoader tells where an epoch ends: steps, and seconds of CPU time, that its end is
#: waited for.
_MOST_STEPS: Final = 2000
_BY_HAND_S: Final = 30.0
_IN_NONE: Final = f"no evaluation was seen in {_EPOCHS} epochs (a rarer one was not simulated)"
#: A run with one evaluation that lasts longer is not made again with several.
_SLOW_S: Final = 60.0
#: Where a script fails, in a run whose epochs are cut short.
_AT_END: Final = "between steps or at an epoch's end"
_AFTER: Final = "in its last epoch or after it"
_LATER: Final = "in a later epoch"
#: Seconds of a run from which on a training that does not fit is not looked at further.
_COSTLY_S: Final = 15.0


@dataclasses.dataclass(frozen=True)
class EpochEnds:
    """The evaluation at the ``present`` batch size and at the ``recommended`` one (``None``: that
    is the same, or the script does not train), the ``findings`` where it does not fit, the
    ``setting`` that is recommended with it in mind, and the ``run`` that had it."""

    setting: AmpSetting
    present: EpochEnd | None = None
    recommended: EpochEnd | None = None
    findings: tuple[Finding, ...] = ()
    run: tuple[RunSpec, Trace] | None = None


def epoch_ends(job: PlannedJob, chosen: AmpSetting) -> EpochEnds:
    """What the first evaluation and checkpoint need, now and as ``chosen`` recommends.

    Where the evaluation does not fit at the batch size that training recommends, or needs more than
    training does, a rule from two batch sizes says up to which one it fits.
    """
    if job.infers:
        return EpochEnds(chosen)
    if not _is_worth_it(job, chosen):
        why = "the training itself does not fit"
        return EpochEnds(chosen, EpochEnd("not simulated", why, batch_size=job.batch))
    evaluations = _Evaluations(job)
    present, findings = evaluations.at(job.batch, AS_WRITTEN, _LENGTHS)
    findings += (*evaluations.by_epoch(present), *evaluations.learned())
    if present.fits is False and any(finding.kind == EVALUATION_WITH_GRAPH for finding in findings):
        present = evaluations.without_graph(present)
    best = chosen.batches.recommended
    if present.device_bytes is None or not best or job.batch is None:
        return EpochEnds(chosen, present, None, findings, evaluations.looked)
    if best == job.batch and chosen.spec == AS_WRITTEN:
        there = None
    else:
        there, more = evaluations.at(best, chosen.spec, evaluations.lengths(present))
        findings += tuple(each for each in more if each.kind == LAST_BATCH)
    lengths = evaluations.lengths(present)
    setting, there = within_evaluation(
        job, chosen, present, there, lambda size, spec: evaluations.at(size, spec, lengths)[0]
    )
    return EpochEnds(setting, present, there, findings, evaluations.looked)


class _Evaluations:
    """Runs of ``job`` that are cut short to its evaluation."""

    def __init__(self, job: PlannedJob) -> None:
        self._job = job
        self.looked: tuple[RunSpec, Trace] | None = None
        #: The end of an epoch, the first that was looked at.
        self._first: EpochEnd | None = None
        #: May what follows the last epoch need most?
        self._looks_on = True
        #: Does the script fail in an evaluation that is cut short, and in a whole one not?
        self._is_whole = False
        self._learning: list[LearningFacts] = []
        self._later: tuple[Finding, ...] = ()

    def learned(self) -> tuple[Finding, ...]:
        """What spoils the learning from a later epoch on, or at the run's end, and is not known of
        the first steps."""
        known = {finding.kind for finding in of_learning(self._job.first.outcome.learning)}
        findings = [finding for facts in self._learning for finding in of_later_learning(facts)]
        late = {finding.kind: finding for finding in findings if finding.kind not in known}
        return (*late.values(), *self._later)

    def without_graph(self, present: EpochEnd) -> EpochEnd:
        """``present``, which has gradients on, with what it needs under ``torch.no_grad()``."""
        if not present.is_of_epoch:
            return present
        coverage = self.looked[1].outcome.coverage if self.looked is not None else None
        line = coverage.graph_at if coverage is not None else None
        end = present
        # An evaluation without eval() is known by its line, which a training step may share.
        for targets in ((), (line,)) if line else ((),):
            if end.device_bytes != present.device_bytes:
                break
            asked = dataclasses.replace(_NO_GRAPH, targets=targets)
            spec = RunSpec(interventions=(asked,), title="its evaluation without gradients")
            end, _ = self._of_epoch(present.batch_size, spec, self.lengths(present))
        return dataclasses.replace(present, without_graph_bytes=end.device_bytes)

    def by_epoch(self, present: EpochEnd) -> tuple[Finding, ...]:
        """What each epoch leaves behind: of several epochs, with one batch of an evaluation each.
        A run without an evaluation has them already."""
        job, first = self._job, self._first
        if self.looked is None or first is None or not first.fits:
            return ()
        if job.pattern.course == "growing":
            return ()
        spec, trace = self.looked
        if first.evaluation == "simulated":
            if spec.cut is None or trace.outcome.seconds > _SLOW_S:
                return ()
            spec = _several(spec, spec.cut)
            try:
                trace = job.runs.attempt(job.batch, spec)
            except NotSimulated:
                return ()
            if not _went_on(trace):
                return fails_beyond(trace, job.command, _LATER)
            self._learning.append(trace.outcome.learning)
        free = job.memory_model.capacity_bytes - (first.device_bytes or 0)
        recording = recording_of(trace)
        findings = tuple(of_epochs(recording, _STEPS, free))
        if findings or self.looked[0].cut is None or self.looked[0].cut.index is None:
            return findings
        if present.later is not None and present.fits:
            return ()  # the last epoch was looked at
        peaks = step_peaks(job.memory_model.unlimited(Stream.of(recording)))
        return tuple(of_longer_epochs(peaks, _STEPS, free))

    def _start_several(
        self, batch: int | None, spec: RunSpec, cut: LoaderCut, trace: Trace
    ) -> None:
        """Begin the run that :meth:`by_epoch` will most likely ask for, while others go on."""
        coverage = trace.outcome.coverage
        evaluated = _went_on(trace) and coverage is not None and coverage.evaluated
        if self.looked is not None or not evaluated or self._job.pattern.course == "growing":
            return
        if trace.outcome.seconds <= _SLOW_S:
            self._job.runs.start(batch, _several(spec, cut))

    @staticmethod
    def lengths(like: EpochEnd) -> tuple[int, ...]:
        """One suffices where memory does not grow over the evaluation."""
        return _LENGTHS if like.batch_bytes else _LENGTHS[:1]

    def _runs(
        self, batch: int | None, spec: RunSpec, cut: LoaderCut, lengths: Sequence[int]
    ) -> tuple[LoaderCut, list[Trace], tuple[Finding, ...]]:
        """The runs, with the epoch's last batch and what comes every so many steps; where they fail
        with these, without them, and what that says of the last batch."""
        plain = dataclasses.replace(cut, remainder=0)
        wanted = dict.fromkeys((cut, plain, dataclasses.replace(plain, periodic=0)))
        tried: dict[LoaderCut, list[Trace]] = {}
        for each in wanted:
            specs = [_lengthened(spec, each, length) for length in lengths]
            first = self._job.runs.attempt(batch, specs[0])
            goes_on = _went_on(first) and is_longer(first.outcome.coverage, each)
            others = specs[1:] if goes_on else []
            for one in others:
                self._job.runs.start(batch, one)
            self._start_several(batch, spec, each, first)
            tried[each] = [first, *(self._job.runs.attempt(batch, one) for one in others)]
            is_told = _waited_in_vain(first, each) or _fails_when_cut(first, each)
            if all(map(_went_on, tried[each])) or is_told:
                break
        runs = tried[each]
        found: tuple[Finding, ...] = ()
        at_fault = next((one for one in tried[cut] if one.outcome.status == "failed"), None)
        if cut.remainder and batch and at_fault is not None and _went_on(runs[0]):
            found = (last_batch_fails(self._job.first, batch, at_fault),)
        return each, runs, found

    def at(
        self, batch: int | None, spec: RunSpec, lengths: tuple[int, ...]
    ) -> tuple[EpochEnd, tuple[Finding, ...]]:
        """What needs most between the steps and after them at a batch size, and what fills the
        memory where that does not fit."""
        coverage = self._job.first.outcome.coverage
        has_more = coverage is not None and bool(coverage.after or coverage.by_number)
        lengths = _WHOLE if self._is_whole else lengths
        if coverage is not None and has_more and self._looks_on:  # while the other goes on
            cut = self._end_cut(batch, coverage)
            self._job.runs.start(batch, _lengthened(self._job.sized(spec), cut, lengths[0]))
        end, findings = self._of_epoch(batch, spec, lengths)
        lengths = _WHOLE if self._is_whole else lengths
        self._first = self._first or end
        if coverage is None or not has_more or not self._looks_on:
            return end, findings
        last, more = self._of_end(batch, spec, lengths, coverage)
        if (last.device_bytes or 0) > (1 + ALIKE) * (end.device_bytes or 0):
            return dataclasses.replace(last, saved=end.saved), (*findings, *more)
        # At other batch sizes it will not be the end of the run that needs most, either.
        self._looks_on = False
        if last.evaluation == "not simulated" and not findings:
            findings = more
        return dataclasses.replace(_known(end, last), unseen=last.unseen), findings

    def _end_cut(self, batch: int | None, coverage: Coverage) -> LoaderCut:
        numbered = coverage.by_number is not None
        cut = _cut(self._job, batch)
        return dataclasses.replace(cut, periodic=0, remainder=0, to_end=_STEPS, numbered=numbered)

    def _of_end(
        self, batch: int | None, spec: RunSpec, lengths: tuple[int, ...], coverage: Coverage
    ) -> tuple[EpochEnd, tuple[Finding, ...]]:
        """The last epoch, and what follows it."""
        cut = self._end_cut(batch, coverage)
        spec, what = self._job.sized(spec), _to_come(coverage)
        try:
            traces = self._to_end(batch, spec, cut, lengths)
            why = _shortfall(traces)
            if why and cut.numbered:
                why = _of_number(traces, why)
                what = _to_come(dataclasses.replace(coverage, after=None))
                traces = self._to_end(
                    batch, spec, dataclasses.replace(cut, numbered=False), lengths
                )
                if other := _shortfall(traces):
                    what, why = _to_come(coverage), other
        except NotSimulated as error:
            traces, why = [], str(error)
        unseen = f"{what} not simulated: {why}" if why else ""
        if not traces or not _went_on(traces[-1]):
            found = fails_beyond(traces[-1], self._job.command, _AFTER) if traces else ()
            return EpochEnd("not simulated", batch_size=batch, unseen=unseen), found
        self._learning.append(traces[-1].outcome.learning)
        self._later = self._later or tuple(_changed_later(self._job, traces[-1]))
        covered = traces[-1].outcome.coverage
        length = covered.evaluation_batches if covered is not None else None
        lengths = lengths[: len(traces)]
        end, findings = _measured(self._job, traces, lengths, length, to_end=True)
        later, final = end.later, end.final
        if final is None:
            later = later or coverage.after  # another loop that trains
        else:
            final = final or coverage.after
        end = dataclasses.replace(end, batch_size=batch, later=later, final=final, unseen=unseen)
        return end, findings

    def _to_end(
        self, batch: int | None, spec: RunSpec, cut: LoaderCut, lengths: Sequence[int]
    ) -> list[Trace]:
        specs = [_lengthened(spec, cut, length) for length in lengths]
        first = self._job.runs.attempt(batch, specs[0])
        if not _went_on(first) or not is_longer(first.outcome.coverage, cut):
            return [first]
        return [first, *(self._job.runs.attempt(batch, run_spec) for run_spec in specs[1:])]

    def _of_epoch(
        self, batch: int | None, spec: RunSpec, lengths: tuple[int, ...]
    ) -> tuple[EpochEnd, tuple[Finding, ...]]:
        """The evaluation at an epoch's end."""
        job, spec = self._job, self._job.sized(spec)
        cut = _cut(job, batch)
        index = cut.index
        try:
            asked, (cut, traces, last) = cut, self._runs(batch, spec, cut, lengths)
            why = _fails_when_cut(traces[0], cut)
            if why and not fails_beyond(traces[0], job.command, _AT_END):
                there, runs, more = self._runs(batch, spec, asked, _WHOLE)
                if runs[0].outcome.status == "timeout":
                    return EpochEnd("not simulated", why, batch_size=batch), last
                self._is_whole = _went_on(runs[0])
                cut, traces, last, lengths = there, runs, more, _WHOLE
        except NotSimulated as error:
            return EpochEnd("not simulated", str(error), batch_size=batch), ()
        lengths = lengths[: len(traces)]
        failed = next((trace for trace in traces if not _went_on(trace)), None)
        if failed is not None and _waited_in_vain(failed, cut):
            return EpochEnd("not simulated", _seen_until(failed), batch_size=batch), ()
        if failed is not None:
            text = "" if index is None else _AT_END
            found = fails_beyond(failed, job.command, text) if _went_on(job.first) else ()
            return EpochEnd("not simulated", what_happened(failed.outcome), batch_size=batch), found
        self.looked = self.looked or (_lengthened(spec, cut, lengths[-1]), traces[-1])
        self._learning.append(traces[-1].outcome.learning)
        coverage = traces[-1].outcome.coverage
        if coverage is None or not coverage.evaluated:
            ended = traces[-1].outcome.status == "ended"
            if index is None and not ended:
                return EpochEnd("not simulated", _seen_until(traces[-1]), batch_size=batch), last
            why = "" if ended else _IN_NONE
            saved = coverage is not None and coverage.saved
            end, findings = _measured(job, traces[-1:], lengths[-1:], None, is_seen=False)
            return dataclasses.replace(
                end, evaluation="none", reason=why, saved=saved, batch_size=batch
            ), (*last, *findings)
        whole = coverage.evaluation_batches
        if (
            len(lengths) > 1
            and (whole or 0) > lengths[-1]
            and not is_in_proportion(_short_runs(job, traces, lengths, whole))
        ):
            third = _lengthened(spec, cut, _THIRD)
            traces, lengths = [*traces, job.runs.attempt(batch, third)], (*lengths, _THIRD)
            if not _went_on(traces[-1]):
                why = what_happened(traces[-1].outcome)
                return EpochEnd("not simulated", why, batch_size=batch), ()
        end, findings = _measured(job, traces, lengths, whole)
        # Its epochs were cut to a step or a few.
        seen = dataclasses.replace(coverage, evaluated_each=None, saved_each=None)
        findings = (*of_evaluation(seen), *findings)
        evaluated = coverage.evaluation_batch_size
        end = dataclasses.replace(end, saved=coverage.saved, evaluation_batch_size=evaluated)
        return dataclasses.replace(end, batch_size=batch), (*last, *findings)


def start(job: PlannedJob, present: AmpSetting) -> None:
    """Begin the first run that :func:`epoch_ends` asks for."""
    if not job.infers and _is_worth_it(job, present):
        cut = _cut(job, job.batch)
        job.runs.start(job.batch, _lengthened(job.sized(AS_WRITTEN), cut, cut.others))


def within_epochs(job: PlannedJob) -> PlannedJob:
    """``job`` with room for what an epoch's steps keep, where several epochs that are cut short let
    it go at the end of each; as it is where they do not, or memory does not grow."""
    pattern, coverage = job.pattern, job.first.outcome.coverage
    epoch = coverage.steps_per_epoch if coverage is not None else None
    growth, full = pattern.growth_bytes_per_step, pattern.steps_until_full
    if not (epoch and growth and full) or not Growth.of(pattern, job.memory_model).unfit:
        return job
    if pattern.unit != "optimizer step" or job.infers or epoch >= full:
        return job
    more = growth * max(0, epoch - pattern.steps)
    spec = _several(job.sized(AS_WRITTEN), _cut(job, job.batch))
    try:
        trace = job.runs.attempt(job.batch, spec)
    except NotSimulated:
        return job
    if trace.recording is None or not is_freed_by_epochs(recording_of(trace), _STEPS):
        return job
    model = job.memory_model
    held = model.other_processes_bytes + more
    return dataclasses.replace(
        job,
        pattern=dataclasses.replace(
            pattern, grows_by_bytes=more, freed_every=epoch, steps_until_full=None
        ),
        memory_model=dataclasses.replace(model, other_processes_bytes=held),
    )


def _is_worth_it(job: PlannedJob, setting: AmpSetting) -> bool:
    """May what comes after an epoch matter? Where no batch size of a training fits, not before that
    does; its runs are left out where they take long, and where none can."""
    if job.too_large and not job.thorough:
        return False
    runs = setting.configuration.fits or bool(setting.batches.recommended)
    return runs or job.thorough or job.first.outcome.seconds < _COSTLY_S


def _cut(job: PlannedJob, batch: int | None) -> LoaderCut:
    """How the epochs of a run at this batch size are cut."""
    loader, makeup = job.first.outcome.loader, job.recording.makeup
    index = loader.index if loader is not None else None
    batches = (makeup.loader_batches if makeup is not None else None) or 1
    left = remainder_of(job.first, job.batch, batch) if index is not None else 0
    return LoaderCut(index, _STEPS * batches, _LENGTHS[0], _LOOK_S, _STEPS, left)


def _lengthened(spec: RunSpec, cut: LoaderCut, others: int) -> RunSpec:
    by_hand = cut.index is None and not cut.to_end
    steps = _STEPS * (_ROUNDS if cut.to_end else _EPOCHS)
    what = "the end of its run" if cut.to_end else "the end of its epoch"
    batches = others if others < _WHOLE[0] else "all"
    return dataclasses.replace(
        spec,
        cut=dataclasses.replace(cut, others=others),
        steps=_MOST_STEPS if by_hand else steps,
        time_limit_s=_END_LIMIT_S if cut.to_end else _LIMIT_S,
        steps_limit_s=_BY_HAND_S if by_hand else 0.0,
        title="up to its evaluation" if by_hand else f"{what} ({batches} batches)",
    )


def _several(spec: RunSpec, cut: LoaderCut) -> RunSpec:
    """``spec`` with several epochs as ``cut`` has them, and one batch of each evaluation."""
    cut = dataclasses.replace(cut, goes_on=True, periodic=0, remainder=0)
    return dataclasses.replace(_lengthened(spec, cut, 1), title="several epochs")


def _changed_later(job: PlannedJob, last: Trace) -> Iterator[Finding]:
    """Do steps of the last epoch, of a run to it, have as many micro-batches as the first ones?"""
    makeups = job.recording.makeup, recording_of(last).makeup
    if makeups[0] is not None and makeups[1] is not None and makeups[0].accumulation:
        yield from changed_later(
            makeups[0].accumulation, makeups[1].per_step, makeups[0].micro_batch,
            last.outcome.later,
        )  # fmt: skip


def _waited_in_vain(trace: Trace, cut: LoaderCut) -> bool:
    """Did an end of an epoch that no DataLoader tells of not come within its time?"""
    return cut.index is None and trace.outcome.status == "timeout"


def _seen_until(trace: Trace) -> str:
    """What was looked at of a script whose epochs' ends nobody tells of; it may have none."""
    seen = count(trace.outcome.steps, "step")
    return f"none was seen in {seen}, and no DataLoader tells where an epoch ends"


def _fails_when_cut(trace: Trace, cut: LoaderCut) -> str:
    """A clause on a script that fails within an evaluation; empty where it does not."""
    outcome, coverage = trace.outcome, trace.outcome.coverage
    is_short = cut.others < _WHOLE[0] and is_longer(coverage, cut)
    if outcome.status != "failed" or not is_short:
        return ""
    what = what_happened(outcome)
    return f"of {cut.others} of its batches, for all of them take too long: {what}"


def is_longer(coverage: Coverage | None, cut: LoaderCut) -> bool:
    """Has a run an evaluation that ``cut`` made shorter? One by hand has its whole length."""
    if coverage is None or not coverage.evaluated:
        return False
    whole = coverage.evaluation_batches
    return cut.index is not None if whole is None else whole > cut.others


def _known(end: EpochEnd, last: EpochEnd) -> EpochEnd:
    """``end``, where a run to the script's end had no evaluation either."""
    is_all = end.evaluation == "none" and last.evaluation == "simulated" and not last.unseen
    return dataclasses.replace(end, reason="") if is_all else end


def _to_come(coverage: Coverage) -> str:
    """What of a run comes with its last epoch, or after it, in words."""
    parts = []
    if coverage.by_number is not None:
        parts.append(f"what goes by the epoch's number ({PurePath(coverage.by_number).name})")
    if coverage.after is not None:
        parts.append(f"what follows the last epoch ({PurePath(coverage.after).name})")
    return " and ".join(parts)


def _shortfall(traces: Sequence[Trace]) -> str:
    """Why runs to the end of a script did not come there; empty where they did."""
    outcome = traces[-1].outcome
    if not _went_on(traces[-1]):
        return what_happened(outcome)
    return "" if outcome.status == "ended" else f"it was not reached in {outcome.steps} steps"


def _of_number(traces: Sequence[Trace], why: str) -> str:
    """Why a run did not come to its end, where the last epoch came right after the first: what the
    script kept of those between lacks, which is no fault of its own."""
    if traces[-1].outcome.status != "failed":
        return why
    return f"the script cannot run its last epoch right after its first ({why})"


def _went_on(trace: Trace) -> bool:
    return trace.outcome.status in ("finished", "ended") and trace.recording is not None


def _measured(
    job: PlannedJob,
    traces: Sequence[Trace],
    lengths: Sequence[int],
    length: int | None,
    *,
    is_seen: bool = True,
    to_end: bool = False,
) -> tuple[EpochEnd, tuple[Finding, ...]]:
    """The peak after an epoch's last step, at the lengths that were simulated and at the real one;
    and that of the next epoch's steps, where what came between them has left something behind.

    Where no evaluation ``is_seen``, that of the whole run, which has the end of several epochs. Of
    runs ``to_end``, the steps are those of the last epoch."""
    model = job.memory_model
    runs = _short_runs(job, traces, lengths, length)
    ends, whole = [run.outcome for run in runs], max(length or 0, runs[-1].batches)
    peak = carried_peak(runs, length) if is_seen else None
    allocated = peak.allocated_bytes if peak is not None else ends[-1].peak_allocated
    grows = float(peak.batch_bytes) if peak is not None else 0.0
    # A last epoch ends with the script: nothing comes after it.
    ended = traces[-1].outcome.status == "ended"
    nexts = [0 if ended else next_peak(run) for run in runs]
    if to_end:
        nexts = [later_peak(run, _STEPS, ALIKE) for run in runs]
    if len(runs) > 1:
        left = max(0, nexts[-1] - nexts[-2]) / (runs[-1].batches - runs[-2].batches)
        nexts[-1] += round(left * (whole - runs[-1].batches))
        grows = max(grows, left)
    if grows and length is None:
        return EpochEnd("not simulated", "its memory grows, and its length is not known"), ()
    seen = max(ends[-1].peak_allocated, *step_peaks(ends[-1]))
    allocated = max(allocated, nexts[-1])
    device = allocated + max(0, ends[-1].peak_reserved - seen) + model.context_bytes
    fits = device <= model.capacity_bytes
    extra = allocated - seen
    if not fits and extra < model.capacity_bytes:
        # The allocator frees cached blocks before it fails.
        held = model.other_processes_bytes + max(0, extra)
        limited = dataclasses.replace(model, other_processes_bytes=held).limited(ends[-1].stream)
        if limited.fits:
            device, fits = limited.peak_reserved + max(0, extra) + model.context_bytes, True
    steps = peak is None or peak.allocated_bytes < allocated
    later = traces[-1].outcome.later if steps else None
    final = peak.maker[2] if to_end and peak is not None and not steps else None
    found = EpochEnd(
        "simulated", "", False, allocated, device, fits, length, round(grows), None, later, final
    )
    memory = None
    if peak is not None and (peak.batch_bytes or not (fits or steps)):
        memory = memory_at_the_end(runs, peak, whole)
        if peak.batch_bytes:
            found = dataclasses.replace(found, kept_at=what_grows(runs, peak, memory))
    if fits:
        return found, ()
    if memory is None or steps:
        memory = full_memory(runs[-1].recording, ends[-1])
    return found, of_full_memory(memory)


def _short_runs(
    job: PlannedJob, traces: Sequence[Trace], lengths: Sequence[int], length: int | None
) -> list[ShortRun]:
    """One run of each length: a short evaluation is over before it is cut."""
    found: dict[int, ShortRun] = {}
    for trace, at in zip(traces, lengths, strict=True):
        batches = min(at, length or at)
        recording = recording_of(trace)
        outcome = job.memory_model.unlimited(Stream.of(recording))
        found[batches] = ShortRun(recording, outcome, batches)
    return list(found.values())
