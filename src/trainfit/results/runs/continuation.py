"""A recording of a text's first tokens, continued to its end: memory and kernels of the calls that
were not simulated follow from those that were.

A call for one more token (a decode) makes the same allocations as the one before, some of them
larger: a KV cache grows by one position, and so do masks and scores. Each allocation's size is
``a + b * calls``, within calls that are a period apart where sizes are padded (attention masks, to
multiples of 8). The allocator's model replays them one by one: the copies of a growing cache,
rounding and fragmentation included.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from trainfit.results.runs.decodes import (
    ALIKE,
    KERNEL_SIZES,
    OF_EACH,
    DecodeTemplate,
    Mask,
    SimulatedDecodes,
)
from trainfit.results.runs.generation import GeneratedText, generated_text
from trainfit.results.runs.recording import (
    FREE,
    KINDS,
    MALLOC,
    OTHER,
    STEP_END,
    IntArray,
    Recording,
    RecordingHeader,
)

#: Decodes after which the others may be told from them: three of each period, and the first.
_ENOUGH: Final = (17, 25, 49)
#: Decodes after which sizes repeat, but for their growth.
_PERIODS: Final = (1, 2, 4, 8, 16)
#: Events of a replay up to which every allocation is in it: of one, and of one of many.
_MOST_EVENTS: Final = 1_200_000
_FEW_EVENTS: Final = 200_000
#: Events of one of many replays beyond which the last calls of a text stand for all of it: some two
#: seconds each.
_TOO_MANY_EVENTS: Final = 400_000
#: Periods at a text's end that stand for all of it.
_LAST_PERIODS: Final = 2
#: Allocations up to this come from the allocator's pool of small ones, in bytes.
_SMALL: Final = 1 << 20
_KV_CACHE: Final = KINDS.index("kv_cache")


def calls_in(recording: Recording) -> int:
    """Calls of a continued text whose allocations are in ``recording``; 0 for any other."""
    if recording.simulated is None:
        return 0
    return recording.simulated.steps + recording.header.get("continued_calls", 0)


def is_enough(decodes: int) -> bool:
    """Is it worth a look now whether the calls that follow can be told from so many?"""
    return decodes in _ENOUGH or (
        decodes % _ENOUGH[-1] == 0 and (decodes // _ENOUGH[-1]).bit_count() == 1
    )


def whole(recording: Recording) -> Recording:
    """``recording`` with the calls that follow to its text's end, where it is of such a text.

    Added to the simulated steps are the call in the middle of what follows, and the last, with all
    of their operators; and before each of them a step with the allocations alone of the calls that
    come between, without those that a call makes and frees in the pool of small ones where they
    would be too many.
    """
    text = None if recording.simulated is not None else generated_text(recording)
    if text is None or text.reason or text.calls_left < 1:
        return recording
    law = DecodeLaw.of(recording, text)
    return recording if law is None else law.to(text.calls_left)


def shortened(recording: Recording) -> Recording:
    """The recording with fewer allocations, for many replays (:func:`ended` of a long text); itself
    where no calls were added."""
    text, law = generated_text(recording), law_of_text(recording)
    if text is None or law is None:
        return recording
    calls, leap = law.briefly(text.calls_left)
    return law.to(calls, law.kept(calls, _FEW_EVENTS), leap)


def ended(recording: Recording) -> Recording:
    """The recording with its last calls alone after those simulated; itself where no calls were
    added.

    A GPU that has room for these has it for the text: what the calls between leave behind is given
    back where memory is full.
    """
    text, law = generated_text(recording), law_of_text(recording)
    if text is None or law is None:
        return recording
    calls, leap = last_calls(text.calls_left, law.period)
    return law.to(calls, leap=leap)


def law_of_text(recording: Recording) -> DecodeLaw | None:
    """How the calls of a continued text go on; ``None`` where no calls were added."""
    text = generated_text(recording)
    if recording.simulated is None or text is None:
        return None
    law = DecodeLaw.of(recording.simulated, text)
    assert law is not None
    return law


def last_calls(calls: int, period: int) -> tuple[int, int]:
    """How many of the ``calls`` after those simulated stand, at the end, for all of them, and how
    many (whole periods) are left out before these."""
    leap = max(0, (calls - 1) // period - _LAST_PERIODS) * period
    return calls - leap, leap


def resized(
    recording: Recording,
    sizes: IntArray,
    arguments: IntArray,
    calls: int | None,
    leap: int,
) -> Recording:
    """A shortened recording with other sizes of what was simulated; ``calls`` are those after it
    (``None``: as :func:`shortened` has it), from the one on before which ``leap`` were left out."""
    text, simulated = generated_text(recording), recording.simulated
    assert simulated is not None and text is not None
    other = dataclasses.replace(simulated, alloc_bytes=sizes, workspace_args=arguments)
    usual, law = (DecodeLaw.of(each, text) for each in (simulated, other))
    assert usual is not None and law is not None
    if calls is None:
        calls, leap = usual.briefly(text.calls_left)
    return law.to(calls, usual.kept(calls, _FEW_EVENTS), leap)


def with_decodes(recording: Recording, decodes: int) -> Recording:
    """A text's recording as if only so many calls after the first had been simulated."""
    text, simulated = generated_text(recording), recording.simulated
    if text is None or simulated is None or text.decodes <= decodes:
        return recording
    cut = simulated.first_steps(simulated.steps - text.decodes + decodes)
    left = text.calls_left + text.decodes - decodes
    told = {**(cut.header.get("generation") or {}), "decodes": decodes, "calls_left": left}
    return whole(dataclasses.replace(cut, header={**cut.header, "generation": told}))


class DecodeLaw:
    """How the decodes of a recording, its last steps, go on."""

    def __init__(self, recording: Recording, simulated: SimulatedDecodes, period: int) -> None:
        self._recording, self._seen, self.period = recording, simulated, period
        last = range(simulated.count - period, simulated.count)
        #: By the place in a period: what its calls are made of.
        self._templates = [DecodeTemplate(simulated, step, period) for step in last]

    @classmethod
    def of(cls, recording: Recording, text: GeneratedText) -> DecodeLaw | None:
        """The law of shortest period; ``None`` where the decodes of ``text``, its last steps,
        follow none."""
        decodes = text.decodes
        if not 0 < decodes < recording.steps:
            return None
        seen = SimulatedDecodes(recording, text)
        if not seen.is_whole:
            return None
        for period in _PERIODS:
            if max(OF_EACH * period, ALIKE) <= decodes and seen.repeats(period):
                return cls(recording, seen, period)
        return None

    def briefly(self, calls: int) -> tuple[int, int]:
        """How many calls of so many are replayed where that is done many times, and how many come
        before that are left out (0, but for a long text)."""
        if self.events_of_call * calls <= _TOO_MANY_EVENTS:
            return calls, 0
        return last_calls(calls, self.period)

    def kept(self, calls: int, most: int = _MOST_EVENTS) -> list[Mask]:
        """Allocations of a call that is not whole which are replayed, by the place in a period."""
        events = sum(len(template.events) for template in self._templates) * calls // self.period
        if events <= most:
            return [np.ones(template.count, dtype=bool) for template in self._templates]
        periods = calls // self.period + 1
        return [template.stays | (template.sizes(periods) > _SMALL) for template in self._templates]

    def to(self, calls: int, kept: list[Mask] | None = None, leap: int = 0) -> Recording:
        """The recording, continued by ``calls``; ``kept`` is that of another batch size.

        The first of them is the one that ``leap`` further calls (whole periods) would come before.
        """
        if calls < 1:
            return self._recording
        masks, seen = self.kept(calls) if kept is None else kept, self._seen
        leaped = leap // self.period
        return _Continuation(self._recording, seen, self._templates, masks, calls, leaped).made()

    @property
    def grows(self) -> bool:
        """Does any call leave more behind than the one before?"""
        return any(
            bool((template.sizes(1) - template.sizes(0))[template.stays].any())
            or self._leaves_more()
            for template in self._templates
        )

    @property
    def changes(self) -> bool:
        """Is a call of another size than the one before, in anything that it computes or makes?"""
        columns = [("alloc_bytes", self._seen.allocs)]
        columns += [(f"kernel_{name}", self._seen.kernels) for name in KERNEL_SIZES]
        return any(
            bool((template.at(name, starts, 1) - template.at(name, starts, 0)).any())
            for template in self._templates
            for name, starts in columns
        )

    def _leaves_more(self) -> bool:
        """Are there more allocations after a period than are freed in one?"""
        codes = np.concatenate([template.events[:, 0] for template in self._templates])
        return int((codes == MALLOC).sum()) > int((codes == FREE).sum())

    @property
    def events_of_call(self) -> int:
        """Events of a call in a replay that leaves small ones out, on average."""
        return max(
            1, sum(2 * int(template.stays.sum()) for template in self._templates) // self.period
        )

    def call_of(self, allocation: int, calls: int) -> int:
        """Which call that follows made this allocation of a recording that goes on for ``calls``,
        shortened (0 and less: one that was simulated)."""
        masks = self.kept(calls, _FEW_EVENTS)
        continuation = _Continuation(self._recording, self._seen, self._templates, masks, calls)
        return continuation.call_of(allocation)

    def call(self, number: int) -> Recording:
        """The operators and kernels of one call that follows, from 1, as a recording's only step;
        its allocations are not those."""
        stays = [template.stays for template in self._templates]
        continuation = _Continuation(self._recording, self._seen, self._templates, stays, number)
        return continuation.last_alone()


class _Continuation:
    """The calls that follow, numbered from 1, as columns of a recording."""

    def __init__(
        self,
        recording: Recording,
        simulated: SimulatedDecodes,
        templates: list[DecodeTemplate],
        kept: list[Mask],
        calls: int,
        leaped: int = 0,
    ) -> None:
        """``leaped``: periods that are left out before the first call."""
        self._recording, self._seen, self._templates = recording, simulated, templates
        self._leaped = leaped
        self._calls, self._period = calls, len(templates)
        self._kept = kept
        #: By template: the place of each allocation among those kept.
        self._rank = [np.cumsum(mask) - 1 for mask in kept]
        call = np.arange(1 - simulated.count, calls + 1)
        self._place = (call - 1) % self._period
        self._is_whole = (call <= 0) | (call == (calls + 1) // 2) | (call == calls)
        counts = np.where(
            self._is_whole,
            np.array([template.count for template in templates])[self._place],
            np.array([int(mask.sum()) for mask in kept])[self._place],
        )
        if simulated.count:
            counts[: simulated.count] = np.diff(simulated.allocs)
        #: The number of each call's first allocation, from the first of the decodes seen.
        self._starts = simulated.allocs[0] + np.concatenate(([0], np.cumsum(counts)))
        self._parts: dict[str, list[IntArray]] = {}
        self._ops = len(recording.op_name)

    def made(self) -> Recording:
        middle, step = (self._calls + 1) // 2, self._recording.steps
        first = 1
        for last in sorted({middle, self._calls}):
            if last > first:
                self._add_between(first, last - 1)
                self._add("events", np.array([step * 4 + STEP_END]))
                step += 1
            self._add_whole(last, step)
            first, step = last + 1, step + 1
        return self._finished()

    def call_of(self, allocation: int) -> int:
        place = int(np.searchsorted(self._starts, allocation, side="right"))
        return place - self._seen.count

    def last_alone(self) -> Recording:
        """The last call's operators and kernels as the only step; allocations are not of it."""
        self._add_operators(self._calls, -self._template(self._calls)[1], 0)
        columns: dict[str, Any] = {name: parts[0] for name, parts in self._parts.items()}
        return dataclasses.replace(self._recording, **columns)

    def _finished(self) -> Recording:
        recording = self._recording
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(recording, name), *parts])
            for name, parts in self._parts.items()
        }
        header: RecordingHeader = {**recording.header, "continued_calls": self._calls}
        found = dataclasses.replace(recording, simulated=recording, header=header, **columns)
        kinds = found.alloc_kind.copy()
        for step in range(self._seen.count):
            template = self._templates[(step - self._seen.count) % self._period]
            own = slice(self._seen.allocs[step], self._seen.allocs[step + 1])
            if len(kinds[own]) == template.count:
                kinds[own] = np.where(template.is_cache, _KV_CACHE, kinds[own])
        return dataclasses.replace(found, alloc_kind=kinds)

    def _template(self, call: int) -> tuple[DecodeTemplate, int]:
        """The template of a call, with the number of its first operator among those seen."""
        template = self._templates[(call - 1) % self._period]
        return template, self._seen.ops[template.step]

    def _periods(self, calls: Any) -> Any:
        """Periods from the decode seen that is at the same place."""
        return (calls - 1) // self._period + 1 + self._leaped

    def _add_between(self, first: int, last: int) -> None:
        """Calls of which the allocations alone are in it; one after the other, a place of the
        period at a time."""
        calls = np.arange(first, last + 1)
        places = (calls - 1) % self._period
        rows: dict[str, list[tuple[IntArray, IntArray]]] = {}
        for place in np.unique(places).tolist():
            own = calls[places == place]
            for name, values in self._of_place(place, own).items():
                rows.setdefault(name, []).append((own, values))
        for name, found in rows.items():
            order = np.concatenate([np.repeat(own, values.shape[1]) for own, values in found])
            flat = np.concatenate([values.ravel() for _, values in found])
            self._add(name, flat[np.argsort(order, kind="stable")])

    def _of_place(self, place: int, calls: IntArray) -> dict[str, IntArray]:
        """Columns with a row for each of ``calls``, which are at one place of the period."""
        template, mask, recording = self._templates[place], self._kept[place], self._recording
        own = slice(self._seen.allocs[template.step], self._seen.allocs[template.step + 1])
        found = {"alloc_bytes": template.sizes(self._periods(calls))[:, mask]}
        found["alloc_kind"] = self._repeated(self._kinds(template)[mask], calls)
        for name in ("op", "module", "stream", "line"):
            column = getattr(recording, f"alloc_{name}")[own][mask]
            found[f"alloc_{name}"] = self._repeated(column, calls)
        codes, back, where = template.events.T
        is_kept = codes == OTHER
        named = (codes == MALLOC) | (codes == FREE)
        is_kept |= named & ((back > 0) | mask[np.where(named & (back == 0), where, 0)])
        found["events"] = self._events(template.events[is_kept], calls)
        return found

    def _kinds(self, template: DecodeTemplate) -> IntArray:
        kinds = self._seen.of(self._recording.alloc_kind, self._seen.allocs, template.step)
        found: IntArray = np.where(template.is_cache, _KV_CACHE, kinds)
        return found

    @staticmethod
    def _repeated(column: IntArray, calls: IntArray) -> IntArray:
        return np.broadcast_to(column, (len(calls), len(column)))

    def _events(self, events: IntArray, calls: IntArray) -> IntArray:
        """Events of ``calls``, a row each, with allocations by their numbers there."""
        codes, back, where = events.T
        index = calls[:, None] - back[None, :] + self._seen.count - 1
        whole = self._is_whole[index]
        ranks = np.zeros(index.shape, dtype=np.int64)
        places = self._place[index]
        for place, rank in enumerate(self._rank):
            rows, columns = np.nonzero((places == place) & ~whole)
            if len(rows):
                ranks[rows, columns] = rank[where[columns]]
        values = self._starts[index] + np.where(whole, where[None, :], ranks)
        named = (codes == MALLOC) | (codes == FREE)
        found: IntArray = np.where(named[None, :], values, where[None, :]) * 4 + codes[None, :]
        return found

    def _add_whole(self, call: int, step: int) -> None:
        """A call with all of its operators, ``step`` of the recording."""
        template, first = self._template(call)
        shift, calls = self._ops - first, np.array([call])
        seen, recording = self._seen, self._recording
        own = slice(seen.allocs[template.step], seen.allocs[template.step + 1])
        start = int(self._starts[call + seen.count - 1])
        self._add("alloc_bytes", template.sizes(self._periods(calls))[0])
        self._add("alloc_op", recording.alloc_op[own] + shift)
        self._add("alloc_kind", self._kinds(template))
        for name in ("module", "stream", "line"):
            self._add(f"alloc_{name}", getattr(recording, f"alloc_{name}")[own])
        events = template.events.copy()
        events[events[:, 0] == STEP_END, 2] = step
        self._add("events", self._events(events, calls)[0])
        self._add_workspaces(call, template, start - seen.allocs[template.step])
        self._add_operators(call, shift, step)

    def _add_workspaces(self, call: int, template: DecodeTemplate, moved: int) -> None:
        seen, recording = self._seen, self._recording
        own = slice(seen.workspaces[template.step], seen.workspaces[template.step + 1])
        if own.start == own.stop:
            return
        self._add("workspace_alloc", recording.workspace_alloc[own] + moved)
        self._add("workspace_model", recording.workspace_model[own])
        lengths = np.diff(recording.workspace_start)[own]
        before = len(recording.workspace_args)
        before += sum(len(part) for part in self._parts.get("workspace_args", ()))
        self._add("workspace_start", before + np.cumsum(lengths))
        arguments = template.at("workspace_args", seen.arguments, self._periods(np.array([call])))
        self._add("workspace_args", arguments[0])

    def _add_operators(self, call: int, shift: int, step: int) -> None:
        template, seen, recording = self._template(call)[0], self._seen, self._recording
        own = slice(seen.ops[template.step], seen.ops[template.step + 1])
        for name in ("name", "phase", "module"):
            self._add(f"op_{name}", getattr(recording, f"op_{name}")[own])
        self._add("op_step", np.full(own.stop - own.start, step))
        self._ops += own.stop - own.start
        rows = slice(seen.kernels[template.step], seen.kernels[template.step + 1])
        self._add("kernel_op", recording.kernel_op[rows] + shift)
        for name in ("stream", "kind", "dtype", "launches"):
            self._add(f"kernel_{name}", getattr(recording, f"kernel_{name}")[rows])
        for name in KERNEL_SIZES:
            grown = template.at(f"kernel_{name}", seen.kernels, self._periods(np.array([call])))
            self._add(f"kernel_{name}", grown[0])

    def _add(self, name: str, values: IntArray) -> None:
        self._parts.setdefault(name, []).append(values)
