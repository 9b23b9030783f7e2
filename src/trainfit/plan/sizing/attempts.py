"""Attempts at batch sizes: their runs, whether they fit, and whether they take another path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainfit.memory.stream.replay import Replay, Stream
from trainfit.plan.runs.code_paths import other_path, takes_other_path
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.full_batches import full_part, is_full
from trainfit.plan.runs.runs import Runs, Variant
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.notes import CHANGES, Notes
from trainfit.plan.sizing.search import SimulatedBatch


class Attempts:
    """Runs at batch sizes of a job; ``notes`` collects those that failed or were fed less."""

    def __init__(self, runs: Runs, memory_model: MemoryModel, notes: Notes) -> None:
        self._runs = runs
        self._memory_model = memory_model
        self._notes = notes

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
