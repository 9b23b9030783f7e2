"""Which batch sizes fit, and which of them is about as fast as any."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from trainfit.memory.affine import AffineStream, NotAffineError
from trainfit.memory.fit import LARGEST
from trainfit.memory.replay import Replay, Stream
from trainfit.plan.command import Command, CommandError
from trainfit.plan.failures import ScriptError
from trainfit.plan.judge import Judge
from trainfit.plan.laws import memory_law
from trainfit.plan.runs import Runs, Variant
from trainfit.plan.search import Found, Trial, search
from trainfit.plan.speed import Curve, curve_of, enough
from trainfit.plan.tracing import Trace, recording_of
from trainfit.results.plan import Basis, BatchLimits
from trainfit.results.recording import Recording
from trainfit.simgpu.settling import LEAST_STEPS
from trainfit.speed.step import Machine

#: A recommended batch from here on is rounded down to a multiple of this: tensor cores
#: work on tiles of 8, and a batch of round size loses at most 7 samples.
_ROUND = 8


@dataclasses.dataclass(frozen=True)
class Batches:
    """What is known of other batch sizes; ``recommended_peak`` is what the recommended takes.

    ``basis_detail`` says why, where ``basis`` is not "two traces"; ``law`` is there where it is,
    ``pair`` the recordings that it is from, and ``curve`` the steps at other batch sizes.
    """

    basis: Basis
    basis_detail: str = ""
    largest: int | None = None
    recommended: int | None = None
    recommended_peak: Replay | None = None
    law: AffineStream | None = None
    pair: tuple[tuple[int, Recording], ...] = ()
    limits: BatchLimits | None = None
    curve: Curve = dataclasses.field(default_factory=Curve)


class BatchSizes:
    """What a job's runs at some batch sizes say of the others.

    ``notes`` takes what is to be said of them besides; ``noise_scale`` is the gradients', if it
    is known.
    """

    def __init__(
        self,
        command: Command,
        runs: Runs,
        judge: Judge,
        machine: Machine,
        notes: list[str],
        noise_scale: float | None = None,
    ) -> None:
        self._noise_scale = noise_scale
        self._command = command
        self._runs = runs
        self._judge = judge
        self._machine = machine
        self._notes = notes

    def find(
        self,
        present: Trace,
        batch: int | None,
        pairs: Sequence[tuple[int, int]],
        variant: Variant,
        *,
        by_trial: bool,
    ) -> Batches:
        """What is known of other batch sizes, from two of them if that is possible."""
        if batch is None:
            return Batches(
                "one trace",
                "the batch size is not known: no DataLoader with a batch size fed the first "
                "step; write {batch_size:N} into the command",
            )
        why = "the data set is too small for two batch sizes with full batches only"
        for one, other in pairs:
            try:
                traces = self._runs.trace(one, variant), self._runs.trace(other, variant)
            except ScriptError as error:
                why = f"no other batch size could be simulated: {error}"
                continue
            try:
                pair = tuple(zip((one, other), map(recording_of, traces), strict=True))
                law = memory_law(pair)
                self._check_law(law, variant)
            except NotAffineError as error:
                why = f"batch sizes {one} and {other} give no rule for others: {error}"
                if by_trial:
                    known = {batch: present, one: traces[0], other: traces[1]}
                    return self._by_trial(known, variant, why)
                break
            if not law.depends_on_batch:
                return self._without_effect(one, other)
            return self._by_law(law, pair)
        return Batches("one trace", why)

    def _check_law(self, law: AffineStream, variant: Variant) -> None:
        """Compare a law that looks odd with a third batch size; raises ``NotAffineError``.

        What grows with the square of the batch size (a contrastive loss) gives a line too,
        but one that is below zero at batch size 0.
        """
        one, two = sorted(law.batches)
        below_zero = law.base < 0 if law.batches == (one, two) else law.base > 0
        below_zero[law.template.workspace_alloc] = False  # they have models of their own
        if not below_zero.any():
            return
        third = (one + two) // 2 if two - one > 1 else one - 1
        if third < 2:
            third = two + 1
        try:
            seen = recording_of(self._runs.trace(third, variant)).alloc_bytes
        except ScriptError as error:
            raise NotAffineError(f"a third could not be simulated ({error})") from None
        expected = law.at(third).alloc_bytes
        differs = seen[: len(expected)] != expected[: len(seen)]
        if not differs.any():
            return
        name = law.template.strings[int(law.template.alloc_module[int(differs.argmax())])]
        where = f", first in {name}" if name else ""
        raise NotAffineError(f"sizes do not grow in proportion to the batch size{where}")

    def _by_law(self, law: AffineStream, pair: tuple[tuple[int, Recording], ...]) -> Batches:
        """Exact for every batch size: the largest that runs, and that leaves the headroom; and
        the smallest of those that is about as fast as any."""
        judge = self._judge
        largest = judge.largest(law)
        most = _rounded(judge.largest(law, judge.usable_bytes) if largest else 0)
        curve = curve_of(pair, self._machine, most or largest)
        limits = BatchLimits(
            most,
            enough(curve) if most else None,
            self._noise_scale,
            enough(curve, self._noise_scale) if most and self._noise_scale else None,
        )
        best = min(most, limits.trains or limits.knee or most)
        peak = judge.limited(law.at(best)) if best else None
        return Batches("two traces", "", largest, best, peak, law, pair, limits, curve)

    def _by_trial(self, known: dict[int, Trace], variant: Variant, why: str) -> Batches:
        """By simulating one batch size after the other."""
        context = self._judge.context_bytes
        loader = next(iter(known.values())).outcome.loader
        found = search(
            [self._trial(batch, trace) for batch, trace in known.items()],
            lambda batches: self._trials(batches, variant),
            free_bytes=self._judge.capacity_bytes - context,
            free_with_headroom_bytes=self._judge.usable_bytes - context,
            most=loader.samples if loader is not None and loader.samples else LARGEST,
        )
        best = found.recommended
        peak = None
        if best:
            peak = self._judge.limited(Stream.of(recording_of(self._runs.trace(best, variant))))
        return Batches(
            "one trace a batch size", f"{why}; {_tried(found)}", found.largest, best, peak
        )

    def _trials(self, batches: Sequence[int], variant: Variant) -> Iterator[Trial]:
        for batch in batches:
            self._runs.start(batch, variant)
        for batch in batches:
            try:
                trace = self._runs.trace(batch, variant)
            except ScriptError as error:
                self._notes.append(f"batch size {batch} could not be simulated: {error}")
            else:
                yield self._trial(batch, trace)

    def _trial(self, batch: int, trace: Trace) -> Trial:
        stream = Stream.of(recording_of(trace))
        limited = self._judge.limited(stream)
        taken = limited.peak_reserved + self._judge.context_bytes
        return Trial(
            batch=batch,
            reserved_bytes=self._judge.unlimited(stream).peak_reserved,
            fits=limited.fits,
            fits_with_headroom=limited.fits and taken <= self._judge.usable_bytes,
        )

    def _without_effect(self, one: int, other: int) -> Batches:
        what = f"the batch size has no effect: {one} and {other} allocate the same"
        if "batch_size" in self._command.present:
            raise CommandError(
                f"placeholder {{batch_size}}: {what}; put it into the option from which "
                f"{self._command.name} takes its batch size"
            )
        return Batches(
            "one trace",
            f"{what} (the DataLoader takes its batches from elsewhere); "
            "write {batch_size:N} into the command",
        )


def most_full(first: Trace, batch: int | None) -> int | None:
    """The largest batch size at which every batch of the run is full; ``None``: any.

    A data set that is used up before the run ends gives a short last batch, after which
    nothing scales with the batch size.
    """
    loader = first.outcome.loader
    if loader is None or loader.samples is None or loader.batch_size != batch:
        return None
    # Other batch sizes are compared over the least number of steps.
    share = min(1.0, LEAST_STEPS / max(first.outcome.steps, 1))
    return loader.samples // max(math.ceil(loader.batches * share), 1)


def pairs_of(batch: int, most: int | None) -> Iterator[tuple[int, int]]:
    """Pairs of batch sizes to derive the law from, in the order of preference.

    The present one is among them if it can. Not 1: with one sample, strides are trivially
    contiguous and copies disappear.
    """
    if batch > 1 and (most is None or batch <= most):
        found = [(batch, other) for other in (2 * batch, batch + 1, batch - 1, batch // 2)]
    elif batch == 1:
        found = [(2, 4), (2, 3)]
    else:
        assert most is not None
        found = [(most // 2, most), (most - 1, most)]
    for one, other in dict.fromkeys(found):
        if min(one, other) > 1 and one != other and (most is None or max(one, other) <= most):
            yield one, other


def _rounded(batch: int) -> int:
    return batch - batch % _ROUND if batch > _ROUND else batch


def _tried(found: Found) -> str:
    """In words, how far a search by trial came."""
    batches = ", ".join(map(str, found.tried))
    text = f"simulated one by one: {batches}"
    if found.largest and found.too_large:
        return f"{text}; the largest lies between {found.largest} and {found.too_large - 1}"
    return text
