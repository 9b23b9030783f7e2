"""The simulated calls for further tokens of a text: what they are made of, and how that grows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from trainfit.results.runs.generation import GeneratedText
from trainfit.results.runs.recording import (
    FREE,
    KINDS,
    MALLOC,
    OTHER,
    STEP_END,
    IntArray,
    Recording,
)
from trainfit.results.runs.steps import KINDS as KERNEL_KINDS

Mask = npt.NDArray[np.bool_]

#: Decodes of each place in a period: two for a law, one that has to follow it.
OF_EACH: Final = 3
#: And decodes at least that have to follow a law: padding to multiples of 8 shows within these.
ALIKE: Final = 16
#: Columns of kernels that grow with a text.
KERNEL_SIZES: Final = ("flops", "read", "written", "rows", "columns", "depth", "batches")
#: Kernels whose ``columns`` are bytes that pass the L2 cache: by where blocks begin, on no line.
_REORDERED: Final = KERNEL_KINDS.index("pointwise_reordered")
_UNMARKED: Final = (KINDS.index("temporary"), KINDS.index("activation"))


class SimulatedDecodes:
    """The last steps of a recording, with their allocations, operators and kernels."""

    def __init__(self, recording: Recording, text: GeneratedText) -> None:
        self.recording, self.count = recording, text.decodes
        count = text.decodes
        codes = recording.events & 3
        ends = np.flatnonzero(codes == STEP_END)[-count - 1 :]
        made = np.cumsum(codes == MALLOC)
        #: Numbers of the first allocation, operator, kernel and workspace of each, and of the first
        #: after the last.
        self.allocs: list[int] = made[ends].tolist()
        self.events = [
            recording.events[first + 1 : last + 1]
            for first, last in itertools.pairwise(ends.tolist())
        ]
        steps = np.arange(recording.steps - count, recording.steps + 1)
        self.ops: list[int] = np.searchsorted(recording.op_step, steps).tolist()
        self.kernels: list[int] = np.searchsorted(recording.kernel_op, self.ops).tolist()
        self.workspaces: list[int] = np.searchsorted(
            recording.workspace_alloc, self.allocs
        ).tolist()
        #: The call that follows with which sliding windows are full, and operators that have one.
        self.full_at: int | None = None
        self.in_window = np.zeros(len(recording.op_name), dtype=bool)
        if text.window is not None and text.prompt is not None:
            self.full_at = text.window - text.prompt - count
            paths = tuple(text.in_window)
            modules = [path.startswith(paths) for path in recording.strings]
            self.in_window = np.array(modules)[recording.op_module] & (recording.op_module >= 0)
        starts = recording.workspace_start[self.workspaces]
        self.arguments: list[int] = starts.tolist()
        self.is_whole = bool(ends[-1] == len(recording.events) - 1)

    def of(self, column: IntArray, starts: list[int], step: int) -> IntArray:
        """A column's part that is of one of them (from 0)."""
        return column[starts[step] : starts[step + 1]]

    def named(self, step: int) -> IntArray:
        """Its events (a row each): code, calls back to the one that made what is named, its place
        there. Of what none of them made the calls back are more than there are."""
        codes, values = self.events[step] & 3, self.events[step] >> 2
        named = (codes == MALLOC) | (codes == FREE)
        of = np.searchsorted(self.allocs, values, side="right") - 1
        place = values - np.array(self.allocs)[np.maximum(of, 0)]
        back = np.where(of >= 0, step - of, self.count + 1)
        others = np.where(codes == OTHER, values, 0)
        return np.stack([codes, np.where(named, back, 0), np.where(named, place, others)], axis=1)

    def repeats(self, period: int) -> bool:
        """Are the last ones as those a period before, but for sizes that grow by the same?"""
        first = self.count - max(OF_EACH * period, ALIKE) + (OF_EACH - 1) * period
        return all(self._repeats(step, period) for step in range(self.count - 1, first - 1, -1))

    def _repeats(self, step: int, period: int) -> bool:
        recording, steps = self.recording, [step - back * period for back in range(OF_EACH)]
        events = [self.named(each) for each in steps]
        if (events[0][events[0][:, 0] == OTHER, 2] > 0).any():  # another stream's
            return False
        if (events[0][:, 1] > self.count).any() or not self._on_device(step):
            return False
        fixed: list[Callable[[int], IntArray]] = [
            lambda each: self.of(recording.op_name, self.ops, each),
            lambda each: self.of(recording.kernel_kind, self.kernels, each),
            lambda each: self.of(recording.workspace_model, self.workspaces, each),
            lambda each: np.diff(recording.workspace_start)[
                self.workspaces[each] : self.workspaces[each + 1]
            ],
        ]
        if not all(np.array_equal(event, events[0]) for event in events[1:]):
            return False
        for column in fixed:
            first, *others = map(column, steps)
            if not all(np.array_equal(first, each) for each in others):
                return False
        return all(self._is_linear(*column, steps) for column in self._growing())

    def _growing(self) -> list[tuple[IntArray, list[int]]]:
        recording = self.recording
        sizes = {name: getattr(recording, f"kernel_{name}") for name in KERNEL_SIZES}
        sizes["columns"] = np.where(recording.kernel_kind == _REORDERED, 0, sizes["columns"])
        return [
            (recording.alloc_bytes, self.allocs),
            (recording.workspace_args, self.arguments),
            *((column, self.kernels) for column in sizes.values()),
        ]

    def _is_linear(self, column: IntArray, starts: list[int], steps: list[int]) -> bool:
        rows = [self.of(column, starts, step) for step in steps]
        growths = [now - before for now, before in itertools.pairwise(rows)]
        return all(np.array_equal(growths[0], growth) for growth in growths[1:])

    def _on_device(self, step: int) -> bool:
        """Do its allocations all belong to its own operators?"""
        own = self.of(self.recording.alloc_op, self.allocs, step)
        return not len(own) or int(own.min()) >= self.ops[step]


class DecodeTemplate:
    """What the calls at one place of a period are made of."""

    def __init__(self, simulated: SimulatedDecodes, step: int, period: int) -> None:
        self._seen, self.step, self._before = simulated, step, step - period
        self.events = simulated.named(step)
        self.count = simulated.allocs[step + 1] - simulated.allocs[step]
        freed = self.events[(self.events[:, 0] == FREE) & (self.events[:, 1] == 0), 2]
        #: Which of its allocations live when it ends.
        self.stays: Mask = np.ones(self.count, dtype=bool)
        self.stays[freed] = False

    def at(self, name: str, starts: list[int], periods: int | IntArray) -> IntArray:
        """A column so many periods later; a row each where they are several."""
        column = getattr(self._seen.recording, name)
        now = self._seen.of(column, starts, self.step)
        growth = now - self._seen.of(column, starts, self._before)
        found: IntArray = now + np.multiply.outer(periods, growth)
        windowed = self._windowed(name)
        if self._seen.full_at is not None and windowed.any():
            # Full at a call that may lie between two of this place in the period.
            period, call = self.step - self._before, self.step - self._seen.count + 1
            calls = np.minimum(np.asarray(periods) * period, self._seen.full_at - call)
            found = np.where(windowed, now + np.multiply.outer(calls, growth) // period, found)
        if name == "kernel_columns":
            found = np.where(self._is_reordered, self._passed(periods), found)
        return np.maximum(found, 0)

    @property
    def _is_reordered(self) -> Mask:
        seen = self._seen
        mask: Mask = seen.of(seen.recording.kernel_kind, seen.kernels, self.step) == _REORDERED
        return mask

    def _passed(self, periods: int | IntArray) -> IntArray:
        """Bytes that pass the L2 cache: of those that are moved the share that it was in the calls
        at this place of a period that were seen."""
        seen, period = self._seen, self.step - self._before
        first = max(0, seen.count - max(OF_EACH * period, ALIKE))
        moved, passed = (
            sum(
                seen.of(getattr(seen.recording, f"kernel_{name}"), seen.kernels, step)
                for name in names
                for step in range(self.step, first - 1, -period)
            )
            for names in (("read", "written"), ("columns",))
        )
        share = passed / np.maximum(1, moved)
        then = sum(self.at(f"kernel_{name}", seen.kernels, periods) for name in ("read", "written"))
        found: IntArray = np.rint(share * then).astype(np.int64)
        return found

    def _windowed(self, name: str) -> Mask:
        """Which rows of a column are of operators with a sliding window."""
        seen = self._seen
        if name.startswith("workspace"):
            return np.zeros(1, dtype=bool)
        of_alloc = name.startswith("alloc")
        ops = seen.recording.alloc_op if of_alloc else seen.recording.kernel_op
        starts = seen.allocs if of_alloc else seen.kernels
        mask: Mask = seen.in_window[seen.of(ops, starts, self.step)]
        return mask

    def sizes(self, periods: int | IntArray) -> IntArray:
        """Bytes of its allocations so many periods later."""
        return self.at("alloc_bytes", self._seen.allocs, periods)

    @property
    def is_cache(self) -> Mask:
        """Which are of a cache: they live on, grow, and were made within the model."""
        recording = self._seen.recording
        modules = self._seen.of(recording.alloc_module, self._seen.allocs, self.step)
        inside = np.array([bool(path) for path in recording.strings] + [False])
        of_model = inside[modules]  # -1, or an empty path: outside of every module
        kinds = self._seen.of(recording.alloc_kind, self._seen.allocs, self.step)
        grows = self.sizes(1) > self.sizes(0)
        mask: Mask = self.stays & grows & of_model & np.isin(kinds, _UNMARKED)
        return mask
