"""What is known of other batch sizes of a job: laws of memory from two runs, if they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainfit.memory.affine import AffineStream, NotAffineError
from trainfit.memory.replay import Replay
from trainfit.plan.runs.batches import most_full
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.costing import memory_law
from trainfit.plan.sizing.curve import Curve
from trainfit.results.configuration import BatchCheck, BatchLimits
from trainfit.results.plan import Basis
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import RunSpec

# ---
# What is known of other batch sizes of a job.


#: A recording at each of two batch sizes.
RecordedPair = tuple[tuple[int, Recording], ...]


@dataclasses.dataclass(frozen=True)
class Batches:
    """Results for other batch sizes; ``recommended_peak`` is the peak at the recommended one.

    ``recommended`` and ``limits``: see :mod:`trainfit.plan.sizing.recommendation`.
    ``basis_detail`` says why, where ``basis`` is not "two traces"; ``law`` is there where it is,
    ``pair`` the recordings that it is from, and ``curve`` the steps at other batch sizes.
    ``check`` says whether the recommended one was simulated.
    """

    basis: Basis
    basis_detail: str = ""
    largest: int | None = None
    recommended: int | None = None
    recommended_peak: Replay | None = None
    law: AffineStream | None = None
    pair: RecordedPair = ()
    limits: BatchLimits | None = None
    curve: Curve = dataclasses.field(default_factory=Curve)
    check: BatchCheck | None = None

    @property
    def by_noise(self) -> int | None:
        """As of :attr:`BatchLimits.by_noise`."""
        return self.limits.by_noise if self.limits is not None else None

    @property
    def furthest(self) -> int | None:
        """The batch size that anything is said of: the option's, where there is one."""
        option = self.limits.option if self.limits is not None else None
        return option.batch_size if option is not None else self.recommended


def law_of(
    runs: Runs, traces: Mapping[int, Trace], spec: RunSpec
) -> tuple[RecordedPair, AffineStream]:
    """What two runs say of other batch sizes; raises ``NotAffineError``."""
    pair = tuple((size, recording_of(trace)) for size, trace in traces.items())
    law = memory_law(pair)
    _check_law(runs, law, spec)
    return pair, law


def law_above(
    runs: Runs, known: dict[int, Trace], batch: int, size: int, spec: RunSpec
) -> tuple[RecordedPair, AffineStream] | None:
    """A rule from ``size`` and twice that, where libraries do something else only below;
    ``None`` if there is none. ``known`` gets the run."""
    most = most_full(known[batch], batch)
    if most is not None and 2 * size > most:
        return None
    try:
        known[2 * size] = runs.trace(2 * size, spec)
        return law_of(runs, {at: known[at] for at in (size, 2 * size)}, spec)
    except (ScriptError, NotAffineError):
        return None  # they are simulated one by one


def _check_law(runs: Runs, law: AffineStream, spec: RunSpec) -> None:
    """Compare a law that looks odd with a third batch size; raises ``NotAffineError``.

    What grows with the square of the batch size (a contrastive loss) gives a line too,
    but one that is below zero at batch size 0.
    """
    one, two = sorted(law.batches)
    below_zero = law.base < 0 if law.batches == (one, two) else law.base > 0
    below_zero[law.recorded.workspace_alloc] = False  # they have models of their own
    if not below_zero.any():
        return
    third = (one + two) // 2 if two - one > 1 else one - 1
    if third < 2:
        third = two + 1
    try:
        found = recording_of(runs.trace(third, spec))
        seen = (found.simulated or found).alloc_bytes
    except ScriptError as error:
        raise NotAffineError(f"a third could not be simulated ({error})") from None
    expected, _ = law.sizes(third)
    differs = seen[: len(expected)] != expected[: len(seen)]
    if not differs.any():
        return
    name = law.recorded.strings[int(law.recorded.alloc_module[int(differs.argmax())])]
    where = f", first in {name}" if name else ""
    raise NotAffineError(f"sizes do not grow in proportion to the batch size{where}")
