"""Batch sizes that fit, and the throughput curve over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from trainfit.memory.affine import AffineStream, OtherCourseError
from trainfit.memory.capacity import LARGEST
from trainfit.memory.replay import Stream
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.runs.batches import (
    VaryingShapes,
    data_set_of,
    drops_last,
    half_epoch,
    is_full,
    joined_by,
    unknown_batch,
)
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.progress import Notes
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.attempts import Attempts, Found, found_by, reach_of, search
from trainfit.plan.sizing.costing import has_rates
from trainfit.plan.sizing.curve import MOST_TRIALS, Curve, Grain, curve_of, with_sizes
from trainfit.plan.sizing.memory_model import (
    Batches,
    Growth,
    MemoryModel,
    RecordedPair,
    law_above,
    law_of,
)
from trainfit.plan.sizing.recommendation import (
    Bounds,
    EffectiveBatch,
    Recommendation,
    recommend,
)
from trainfit.plan.sizing.speed import replicas_of
from trainfit.results.configuration import BatchCheck, BatchLimits
from trainfit.results.runs.recording import NotAffineError
from trainfit.results.runs.spec import RunSpec
from trainfit.speed.step import HostedGpu

#: Why the current batch size stays where others are of no use.
_PATHS: Final = "steps run different code at other batch sizes"
#: Batch sizes that are simulated for throughput where memory does not seem to limit, and the share
#: of what memory seems to allow up to which it does not.
_FEW_TRIALS: Final = 3
_CLEARLY_WITHIN: Final = 0.5
#: Batch sizes of one path below which nothing is said of others.
_LEAST_TRIALS: Final = 2


class BatchSizes:
    """What a job's runs at some batch sizes say of the others.

    ``notes`` collects further remarks; ``noise_scale`` is the gradients', if it
    is known. ``growth`` is what stays behind with each step: too much, and none is recommended.
    ``shapes`` says what stands for all batches where they vary in shape: memory is that of the
    longest. ``thorough``: sizes that are simulated one by one are explored up to the largest that
    fits, even where it is not what limits the recommended one. ``infers``: the script trains
    nothing. Batch sizes are multiples of ``unit``.
    """

    def __init__(
        self,
        command: Command,
        runs: Runs,
        memory_model: MemoryModel,
        machine: HostedGpu,
        notes: Notes,
        noise_scale: float | None,
        growth: Growth,
        shapes: VaryingShapes | None,
        *,
        thorough: bool = True,
        infers: bool = False,
        unit: int = 1,
    ) -> None:
        self._thorough = thorough
        self._infers = infers
        self._shapes = shapes
        self._noise_scale = noise_scale
        self._growth = growth
        self._command = command
        self._runs = runs
        self._memory_model = memory_model
        self._machine = machine
        self._grain = Grain.of(machine.gpu, unit)
        self._attempts = Attempts(runs, memory_model, machine, notes)

    def find(
        self,
        present: Trace,
        batch: int | None,
        pairs: Sequence[tuple[int, int]],
        spec: RunSpec,
        *,
        by_trial: bool,
    ) -> Batches:
        """What is known of other batch sizes, from two of them if that is possible.

        ``present`` is the run at ``batch``. With ``by_trial`` they are simulated one by one
        where no two of them say what is wanted.
        """
        found = self._found(present, batch, pairs, spec, by_trial=by_trial)
        curve = with_sizes(found.curve, (found.recommended, found.furthest))
        found = dataclasses.replace(found, curve=curve)
        peak, limits = found.recommended_peak, found.limits
        unfit = self._growth.unfit_at(peak) if peak is not None else ""
        if not unfit or limits is None:
            return found
        limits = dataclasses.replace(limits, reason=unfit, epoch_steps=None)
        return dataclasses.replace(found, recommended=None, recommended_peak=None, limits=limits)

    def _found(
        self,
        present: Trace,
        batch: int | None,
        pairs: Sequence[tuple[int, int]],
        spec: RunSpec,
        *,
        by_trial: bool,
    ) -> Batches:
        if batch is None:
            makeup = recording_of(present).makeup
            if makeup is not None and makeup.is_whole:
                why = (
                    "the job has no batch size: each step is of the same tensors, all samples at "
                    "once (where they are one batch of several, {batch_size:N} in the command "
                    "varies it)"
                )
                return self._only_present(present, batch, why)
            return self._only_present(present, batch, unknown_batch(present))
        timing = spec
        if self._shapes is not None and self._shapes.matter:
            timing = self._shapes.timed(spec)
            spec = self._shapes.sized(spec)
            try:
                present = self._of_one_shape(batch, spec)
            except NotAffineError as error:
                why = f"batches vary in shape, and {error}"
                if by_trial:
                    return self._by_trial({batch: present}, batch, spec, timing, why)
                return self._only_present(present, batch, why)
        why = "the data set is too small for two batch sizes with full batches only"
        for one, other in pairs:
            try:
                traces = self._runs.trace(one, spec), self._runs.trace(other, spec)
            except ScriptError as error:
                why = f"no other batch size could be simulated: {error.in_note}"
                continue
            known = {batch: present, one: traces[0], other: traces[1]}
            try:
                pair, law = law_of(self._runs, {one: traces[0], other: traces[1]}, spec)
            except NotAffineError as error:
                why = f"batch sizes {one} and {other} do not predict others: {error}"
                if not by_trial:
                    break
                above = None
                if isinstance(error, OtherCourseError):
                    above = law_above(self._runs, known, batch, max(one, other), spec)
                if above is None:
                    return self._by_trial(known, batch, spec, timing, why)
                pair, law = above
            if not law.depends_on_batch:
                if batch not in (one, other):
                    return self._without_effect_above(present, batch, one, other)
                return self._without_effect(present, batch, one, other)
            return self._by_law(law, pair, known, batch, spec, timing, by_trial=by_trial)
        return self._only_present(present, batch, why)

    def one_by_one(self, known: dict[int, Trace], batch: int, spec: RunSpec, why: str) -> Batches:
        """What is known of other batch sizes without a rule, which ``why`` says to be wrong.

        ``known`` are runs of ``spec``, where batches vary in shape with the longest sample.
        """
        timing = spec
        if self._shapes is not None:
            timing, spec = self._shapes.timed(spec), self._shapes.sized(spec)
        return self._by_trial(known, batch, spec, timing, why)

    def _of_one_shape(self, batch: int, spec: RunSpec) -> Trace:
        """The run with batches of the longest sample alone.

        Raises ``NotAffineError`` where there is none, or its batches vary all the same.
        """
        assert self._shapes is not None
        if self._shapes.longest is None:
            raise NotAffineError(self._shapes.reason)
        try:
            trace = self._runs.trace(batch, spec)
        except ScriptError as error:
            raise NotAffineError(f"the longest could not be simulated: {error.in_note}") from None
        if trace.outcome.loader is not None and trace.outcome.loader.varies:
            raise NotAffineError("fail with batches of one sample")
        return trace

    def _by_law(
        self,
        law: AffineStream,
        pair: RecordedPair,
        known: Mapping[int, Trace],
        batch: int,
        spec: RunSpec,
        timing: RunSpec,
        *,
        by_trial: bool,
    ) -> Batches:
        """Memory is exact for every batch size: the largest that runs, and that leaves the
        headroom. So is the work of a step; where it is not, steps are simulated one by one."""
        memory_model = self._memory_model
        largest = memory_model.largest(law)
        largest -= largest % self._grain.unit
        allowed = memory_model.largest(law, memory_model.usable_bytes) if largest else 0
        memory = self._grain.rounded(allowed)
        bounds = Bounds(
            memory, data_set_of(known[batch], batch), drops_last=drops_last(known[batch])
        )
        most = _compared(bounds, known[batch])
        curve = curve_of(
            self._timing_pair(pair, spec, timing), self._machine, most or largest, self._grain.unit
        )
        if not curve.steps and most and by_trial:
            curve = self._timed_curve(known, batch, most, spec, timing, curve.notes)
        recommendation = self._recommend(bounds, curve, batch, known[batch])
        peak = memory_model.limited(law.at(recommendation.batch)) if recommendation.batch else None
        return Batches(
            "two traces",
            "",
            largest,
            recommendation.batch,
            peak,
            law,
            pair,
            recommendation.limits,
            curve,
        )

    def _by_trial(
        self, known: dict[int, Trace], batch: int, spec: RunSpec, timing: RunSpec, why: str
    ) -> Batches:
        """The batch sizes by simulating one after the other."""
        if not self._thorough:
            few = self._by_few_trials(known, batch, spec, timing, why)
            if few is not None:
                return few
        context = self._memory_model.context_bytes
        present = known[batch]
        data_set = data_set_of(present, batch)
        full = {size: trace for size, trace in known.items() if is_full(trace, size)}
        paths = {batch: present, **full}
        found = search(
            [
                self._attempts.trial(size, trace)
                for size, trace in full.items()
                if self._attempts.is_same_path(batch, present, size, trace)
            ],
            lambda sizes: self._attempts.trials(sizes, batch, present, spec, paths),
            free_bytes=self._memory_model.capacity_bytes - context,
            free_with_headroom_bytes=self._memory_model.usable_bytes - context,
            most=self._furthest(present, batch),
            unit=self._grain.unit,
        )
        if found.recommended is None and not self._attempts.trial(batch, present).fits:
            return self._only_present(present, batch, f"{why}; {_tried(found)}")
        memory = None if found.recommended is None else self._grain.rounded(found.recommended)
        at_least = found.too_large is None and found.largest == found.recommended
        bounds = Bounds(memory, data_set, at_least, drops_last(present))
        curve = Curve(grain=self._grain)
        if self._attempts.note_other_paths(batch, paths):
            if len(found.tried) < _LEAST_TRIALS:
                return self._only_present(present, batch, f"{why}; {_tried(found)}", _PATHS)
            bounds = dataclasses.replace(bounds, at_least=found.too_large is None)
        if most := _compared(bounds, present):
            traces = {size: self._runs.attempt(size, spec) for size in found.tried}
            curve = self._timed_curve(traces, batch, most, spec, timing)
        advised = self._recommend(bounds, curve, batch, present)
        peak = None
        if advised.batch:
            peak = self._attempts.peak(advised.batch, spec)
        return Batches(
            "one trace a batch size",
            f"{why}; {_tried(found)}",
            found.largest,
            advised.batch,
            peak,
            limits=dataclasses.replace(advised.limits, failed_batches=self._attempts.failed(spec)),
            curve=curve,
            check=BatchCheck(advised.batch) if peak is not None and advised.batch else None,
        )

    def _by_few_trials(
        self, known: dict[int, Trace], batch: int, spec: RunSpec, timing: RunSpec, why: str
    ) -> Batches | None:
        """The batch sizes by simulating what the recommended one follows from, and it itself;
        ``None`` where memory may be what limits it, or steps run other code at other batch sizes.
        """
        present, data_set = known[batch], data_set_of(known[batch], batch)
        made = {size: trace for size, trace in known.items() if is_full(trace, size)}
        free = self._memory_model.usable_bytes - self._memory_model.context_bytes
        best, reach = 0, 0
        # Each round looks further, as long as the fastest lies at the end of what was looked at.
        while best >= _CLEARLY_WITHIN * reach:
            before = reach
            trials = [self._attempts.trial(size, trace) for size, trace in made.items()]
            furthest = self._furthest(present, batch)
            reach = reach_of(trials, free, furthest) if len(trials) > 1 else 0
            bounds = Bounds(self._grain.rounded(reach), data_set, True, drops_last(present))
            most = _compared(bounds, present)
            if not most or reach <= before or not has_rates(self._machine.gpu):
                return None
            curve = self._timed_curve(made, batch, most, spec, timing, trials_left=_FEW_TRIALS)
            best = self._recommend(bounds, curve, batch, present).furthest or LARGEST
            list(self._attempts.made([best] if best <= most else [], spec))
            made |= self._attempts.simulated(spec)
            same = (self._attempts.is_same_path(batch, present, *each) for each in made.items())
            if best not in made or not all(same):
                return None
        found = found_by([self._attempts.trial(size, trace) for size, trace in made.items()])
        if (found.recommended or 0) < best:
            return None
        memory = max(best, self._grain.rounded(found.recommended or 0))
        bounds = dataclasses.replace(bounds, memory=memory, at_least=found.too_large is None)
        advised = self._recommend(bounds, curve, batch, present)
        if advised.furthest != best or not advised.batch:
            return None
        return Batches(
            "one trace a batch size",
            f"{why}; {_tried(found)}; larger ones were not simulated (--thorough does)",
            found.largest,
            advised.batch,
            self._attempts.peak(advised.batch, spec),
            limits=dataclasses.replace(advised.limits, failed_batches=self._attempts.failed(spec)),
            curve=curve,
            check=BatchCheck(advised.batch),
        )

    def _timing_pair(self, pair: RecordedPair, spec: RunSpec, timing: RunSpec) -> RecordedPair:
        """The runs that steps are timed by, at the batch sizes of ``pair``: that of memory, or
        others of a typical sample."""
        if timing == spec or not has_rates(self._machine.gpu):
            return pair
        try:
            traces = [self._runs.trace(size, timing) for size, _ in pair]
        except ScriptError as error:
            self._attempts.note(f"steps are timed with the longest batches: {error.in_note}")
            return pair
        return tuple((size, recording_of(run)) for (size, _), run in zip(pair, traces, strict=True))

    def _timed_curve(
        self,
        known: Mapping[int, Trace],
        batch: int,
        limit: int,
        spec: RunSpec,
        timing: RunSpec,
        notes: tuple[str, ...] = (),
        trials_left: int = MOST_TRIALS,
    ) -> Curve:
        """Steps up to ``most`` samples, from ``known`` runs and up to ``trials_left`` more."""
        if not has_rates(self._machine.gpu):
            return Curve((), notes, self._grain)
        noise_scale = self._noise_scale
        if batch in known and self._effective(known[batch], batch).is_kept:
            noise_scale = None
        usable = known if timing == spec else {}
        curve = self._attempts.timed_curve(
            usable, batch, limit, timing, noise_scale, trials_left, self._grain.unit
        )
        return dataclasses.replace(curve, notes=(*notes, *curve.notes), grain=self._grain)

    def _recommend(
        self, bounds: Bounds, curve: Curve, batch: int, present: Trace
    ) -> Recommendation:
        why = "the step's time is not known at other batch sizes"
        if not has_rates(self._machine.gpu):
            why = "no throughput prediction for a custom GPU"
        return recommend(
            bounds,
            curve,
            batch,
            noise_scale=self._noise_scale,
            without_curve=why,
            unfit=self._growth.unfit,
            effective=self._effective(present, batch),
        )

    def _effective(self, present: Trace, batch: int) -> EffectiveBatch:
        loader = present.outcome.loader
        # The data set may have had fewer samples than were asked for.
        unit, given = self._grain.unit, batch
        processes = max(1, unit // joined_by(present))
        if loader is not None and loader.fed:
            given = min(batch, loader.fed[0] * unit)
        is_summed = present.outcome.learning.is_divided is False
        recording = recording_of(present)
        makeup = self._runs.with_evidence(batch, recording.makeup)
        return EffectiveBatch(
            self._command,
            makeup.of_all(processes) if makeup is not None else None,
            given,
            is_summed=is_summed,
            optimizer=str(recording.header.get("optimizer") or ""),
            infers=self._infers,
            replicas=max(1, replicas_of(present) // processes),
        )

    def _furthest(self, present: Trace, batch: int) -> int:
        """The largest batch size that is looked at: that of the data set, or with which the script
        makes a step of the samples that it keeps; it refuses a larger one, or cuts it."""
        most = data_set_of(present, batch) or LARGEST
        effective = self._effective(present, batch)
        if effective.makeup is None or not effective.makeup.is_kept:
            return most
        return min(most, effective.most or most)

    def _only_present(
        self, present: Trace, batch: int | None, why: str, reason: str = "only one was simulated"
    ) -> Batches:
        """Nothing is known but the current batch size: it stays, where it fits."""
        trial = self._attempts.trial(batch or 0, present)
        bounds = Bounds(None, data_set_of(present, batch), drops_last=drops_last(present))
        if batch is None or not trial.fits:
            recommendation = Recommendation(None, BatchLimits(None, None, data_set=bounds.data_set))
        else:
            recommendation = recommend(
                bounds,
                Curve(grain=self._grain),
                batch,
                without_curve=reason,
                unfit=self._growth.unfit,
                effective=self._effective(present, batch),
            )
        peak = (
            self._memory_model.limited(Stream.of(recording_of(present)))
            if recommendation.batch
            else None
        )
        return Batches(
            "one trace", why, None, recommendation.batch, peak, limits=recommendation.limits
        )

    def _without_effect_above(self, present: Trace, batch: int, one: int, other: int) -> Batches:
        """Something else limits what is trained on: a replay or rollout buffer has its own size."""
        what = f"batch sizes {one} and {other} allocate the same, so something else limits them"
        return self._only_present(present, batch, what, what)

    def _without_effect(self, present: Trace, batch: int, one: int, other: int) -> Batches:
        what = f"the batch size has no effect: {one} and {other} allocate the same"
        if "batch_size" in self._command.present.keys() - self._command.supposed:
            raise CommandError(
                f"placeholder {{batch_size}}: {what}; put it into the option that sets the batch "
                f"size of {self._command.name}"
            )
        return self._only_present(
            present,
            batch,
            f"{what} (the DataLoader gets its batches from elsewhere); "
            "write {batch_size:N} into the command",
        )


def _tried(found: Found) -> str:
    """A clause on how far a search by trial came."""
    batches = ", ".join(map(str, found.tried))
    text = f"simulated one by one: {batches}"
    if found.largest and found.too_large:
        return f"{text}; the largest lies between {found.largest} and {found.too_large - 1}"
    return text


def _compared(bounds: Bounds, present: Trace) -> int | None:
    """The largest batch size of which throughput is compared: an epoch has two steps or more.

    Of one step an epoch no time can be told from a run, nor is it a training that anybody wants.
    """
    half = half_epoch(present, bounds.data_set)
    return bounds.most if bounds.most is None or half is None else min(bounds.most, half)
