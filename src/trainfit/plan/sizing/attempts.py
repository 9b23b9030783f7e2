"""Attempts at batch sizes: their runs, whether they fit, and whether they take another path."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from trainfit.memory.stream.replay import Replay, Stream
from trainfit.plan.runs.code_paths import other_path, takes_other_path
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.full_batches import full_part, full_steps, is_full, most_timed
from trainfit.plan.runs.runs import Runs, Variant
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.notes import CHANGES, Notes
from trainfit.plan.sizing.search import SimulatedBatch
from trainfit.plan.steps.curve import Curve
from trainfit.plan.steps.trial_curve import curve_through, refine, timed
from trainfit.results.plan.speed import StepSpeed
from trainfit.speed.model.step import Machine


class Attempts:
    """Runs at batch sizes of a job, timed on ``machine``; ``notes`` collects those that failed or
    were fed less."""

    def __init__(
        self, runs: Runs, memory_model: MemoryModel, machine: Machine, notes: Notes
    ) -> None:
        self._runs = runs
        self._memory_model = memory_model
        self._machine = machine
        self._notes = notes
        self._made: dict[Variant, dict[int, Trace]] = {}

    def simulated(self, variant: Variant) -> dict[int, Trace]:
        """The runs that :meth:`made` gave."""
        return dict(self._made.get(variant, {}))

    def trial(self, batch: int, trace: Trace) -> SimulatedBatch:
        stream = Stream.of(recording_of(trace))
        limited = self._memory_model.limited(stream)
        taken = limited.peak_reserved + self._memory_model.context_bytes
        return SimulatedBatch(
            batch=batch,
            reserved_bytes=self._memory_model.unlimited(stream).peak_reserved,
            fits=limited.fits,
            fits_with_headroom=limited.fits and taken <= self._memory_model.usable_bytes,
        )

    def trials(
        self,
        sizes: Sequence[int],
        batch: int,
        present: Trace,
        variant: Variant,
        paths: dict[int, Trace],
    ) -> Iterator[SimulatedBatch]:
        """Trials at ``sizes``, other than those whose steps run other code; ``paths`` gets all."""
        for size, trace in self.made(sizes, variant):
            paths[size] = trace
            if self.is_same_path(batch, present, size, trace):
                yield self.trial(size, trace)

    def made(self, batches: Sequence[int], variant: Variant) -> Iterator[tuple[int, Trace]]:
        """Runs at these batch sizes; those that failed or were fed less are noted, left out."""
        for batch in batches:
            self._runs.start(batch, variant)
        for batch in batches:
            try:
                trace = self._runs.trace(batch, variant)
            except ScriptError as error:
                self.note(f"batch size {batch} could not be simulated: {error}")
                continue
            if is_full(trace, batch):
                self._made.setdefault(variant, {})[batch] = trace
                yield batch, trace
            else:
                self.note(
                    f"batch size {batch} was requested, the DataLoader returned fewer samples"
                )

    def peak(self, batch: int, variant: Variant) -> Replay | None:
        """The memory and step time of a batch size, from its own run."""
        for _, trace in self.made([batch], variant):
            return self._memory_model.limited(Stream.of(recording_of(trace)))
        return None

    def timed_curve(
        self,
        known: Mapping[int, Trace],
        batch: int,
        most: int,
        variant: Variant,
        noise_scale: float | None,
        trials_left: int,
    ) -> Curve:
        """Steps up to ``most`` samples, from ``known`` runs of ``variant`` and as many more as
        needed, no more than ``trials_left``."""
        bounds: list[int] = []

        def measure(size: int) -> StepSpeed | None:
            trace = next((run for _, run in self.made([size], variant)), None)
            if trace is None:
                return None
            bounds.extend(filter(None, [most_timed(trace)]))
            return self._timed(trace, size)

        steps: dict[int, StepSpeed] = {}
        for size, trace in known.items():
            bounds.extend(filter(None, [most_timed(trace)]))
            if trace.recording is not None and is_full(trace, size):
                step = self._timed(trace, size)
                steps |= {size: step} if step is not None else {}
        if not steps:
            step = measure(min(batch, most))
            steps = {min(batch, most): step} if step is not None else {}
        if not steps:
            return Curve()
        least = functools.partial(min, bounds, default=None)
        return curve_through(refine(steps, most, measure, noise_scale, least, trials_left), most)

    def _timed(self, trace: Trace, size: int) -> StepSpeed | None:
        return timed(recording_of(trace), size, self._machine, full_steps(trace))

    def is_same_path(self, batch: int, present: Trace, size: int, trace: Trace) -> bool:
        """As far as it can be told: a first step lacks what the script does after a step."""
        one, other = full_part(present), full_part(trace)
        if other.steps < 2 <= one.steps:
            return True
        return not takes_other_path(batch, one, size, other)

    def note_other_paths(self, batch: int, paths: Mapping[int, Trace]) -> bool:
        parts = {size: full_part(each) for size, each in paths.items()}
        told = {s: each for s, each in parts.items() if not each.steps < 2 <= parts[batch].steps}
        said = other_path(batch, told)
        if said and said not in self._notes:
            self._notes.add(said, CHANGES)
        return bool(said)

    def note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
