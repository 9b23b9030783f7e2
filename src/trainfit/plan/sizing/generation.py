"""A generated text: the time of its tokens, how long a context fits at which batch size, and the
same text of another length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from trainfit.memory.affine import AffineStream
from trainfit.memory.replay import Replay, Stream, live_at
from trainfit.plan.sizing.costing import has_rates
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.results.runs.continuation import (
    DecodeLaw,
    last_calls,
    law_of_text,
    resized,
    shortened,
)
from trainfit.results.runs.generation import ContextPoint, GeneratedText, Generation, generated_text
from trainfit.results.runs.recording import KINDS, MALLOC, Recording
from trainfit.speed.step import HostedGpu, step_time
from trainfit.speed.work import COLUMNS, Work, one_off

#: Places of a text at which calls are costed; between them their time is taken to be linear.
_PLACES: Final = 9
#: Batch sizes of the frontier at the most.
_FRONTIER: Final = 6
#: Events of a replay to the longest context; beyond that it is estimated.
_MOST_EVENTS: Final = 400_000
#: Which share of itself an estimate is told to.
_TO: Final = 1 / 512
#: Positions that nobody asks for, where the model does not say how many it is made for.
_NO_LIMIT: Final = 1 << 20
_KV_CACHE: Final = KINDS.index("kv_cache")


def generation(
    recording: Recording,
    machine: HostedGpu,
    memory_model: MemoryModel,
    batch: int | None = None,
    law: AffineStream | None = None,
    sizes: Iterable[int] = (),
) -> Generation | None:
    """The generation of a recording that was continued to its text's end (as far as that is known);
    ``None`` where it is of none. ``sizes`` are batch sizes of the frontier, which ``law`` gives."""
    text = generated_text(recording)
    if text is None:
        return None
    found = Generation(
        new_tokens=text.new_tokens,
        known_tokens=text.known_tokens,
        prompt_tokens=text.prompt,
        sequences=text.sequences or batch,
        model_tokens=text.limit,
        cache=text.cache,
        cache_bytes=_cache_bytes(recording),
        simulated_calls=1 + text.decodes,
        by=text.by,
        reason=text.reason,
    )
    # Where calls were left out that do not follow from others, only their memory is known.
    if has_rates(machine.gpu) and (recording.simulated or text.reason or not text.calls_left):
        found = _timed(found, recording, text, machine)
    if text.round is not None and has_rates(machine.gpu):
        found = _in_rounds(found, recording, text.round, machine)
    if recording.simulated is None:
        return found
    contexts = _Contexts(recording, text, memory_model)
    now = contexts.longest(contexts.of_recording, batch)
    points: list[ContextPoint | None] = []
    if law is not None and law.template.simulated is not None:
        points = [
            contexts.longest(functools.partial(law.at, size), size) for size in _spread(sizes)
        ]
    known = tuple(point for point in points if point is not None)
    return dataclasses.replace(found, longest=now, frontier=known)


def _spread(sizes: Iterable[int]) -> list[int]:
    """A few of them, evenly; the first and the last are among them."""
    every = sorted(set(sizes))
    places = np.linspace(0, len(every) - 1, min(_FRONTIER, len(every))).round().astype(int)
    return [every[place] for place in dict.fromkeys(places.tolist())]


def _cache_bytes(recording: Recording) -> int | None:
    """Bytes of the cache at the end of the text; ``None`` where it has none."""
    stream = Stream.of(recording)
    live = live_at(stream, len(stream.events) - 1)
    of_cache = live[recording.alloc_kind[live] == _KV_CACHE]
    return int(recording.alloc_bytes[of_cache].sum()) if len(of_cache) else None


# ---
# Time: the prompt's call, and each call for a further token.


def _timed(
    found: Generation, recording: Recording, text: GeneratedText, machine: HostedGpu
) -> Generation:
    work = Work.of_step(recording, text.prefill)
    if not text.prefill:
        work = work.without(one_off(recording)[recording.op_step == 0])
    first = step_time(work, machine).seconds
    calls = decode_seconds(recording, text, machine)
    whole = first + float(calls.sum())
    rate = text.known_tokens / whole if whole > 0 else None
    return dataclasses.replace(
        found,
        first_token_s=first,
        token_s=(float(calls[0]), float(calls[-1])),
        total_s=whole,
        tokens_per_s=rate,
        all_tokens_per_s=rate * found.sequences if rate and found.sequences else None,
    )


def _in_rounds(
    found: Generation, recording: Recording, steps: tuple[int, int], machine: HostedGpu
) -> Generation:
    """The time of a round: each of its steps but the last is an assistant's call for one token."""
    seconds = [
        step_time(Work.of_step(recording, index), machine).seconds for index in range(*steps)
    ]
    return dataclasses.replace(found, round_s=sum(seconds), proposed=len(seconds) - 1)


def decode_seconds(
    recording: Recording, text: GeneratedText, machine: HostedGpu
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds of each call after the prompt's, from those at some places of the text.

    At each place it is the mean of a period's calls, whose sizes are padded differently.
    """
    simulated = recording.simulated or recording
    law = None
    if recording.simulated is not None:
        law = DecodeLaw.of(recording.simulated, text)
    period, last = (1 if law is None else law.period), text.decodes

    def seconds(call: int) -> float:
        """Seconds of a call after the prompt's, from 1."""
        if call <= text.decodes or law is None:
            work = Work.of_step(simulated, text.prefill + call)
        else:
            work = Work.of_step(law.call(call - text.decodes), 0)
        return step_time(work, machine).seconds

    many = text.decodes + (text.calls_left if law is not None else 0)
    places = {*_places(1, last, period), *_places(last + 1, many, period)}
    nodes = sorted(places)
    means = [
        float(np.mean([seconds(min(node + k, many)) for k in range(period)])) for node in nodes
    ]
    middle = [min(node + (period - 1) / 2, many) for node in nodes]
    found = np.interp(np.arange(1, many + 1), middle, means)
    if law is not None and text.window is not None and text.prompt is not None:
        ended = Work.of_step(law.call(text.calls_left), 0)
        full = _of_full_windows(recording, ended)
        if full is not None:
            more = step_time(full, machine).seconds - step_time(ended, machine).seconds
            found[max(0, text.window - text.prompt - 1) :] += more
    return found


def _of_full_windows(recording: Recording, last: Work) -> Work | None:
    """The last call with the model's part as it is with full windows; ``None``: not known."""
    full = recording.header.get("full_window")
    if full is None:
        return None
    before = int(full["before"])
    kept = last.op < before
    table = np.stack([np.array(full["table"][name], np.int64) for name in COLUMNS], axis=1)
    return Work(
        np.concatenate([last.table[kept], table]),
        np.concatenate([last.stream[kept], np.array(full["stream"], np.int64)]),
        np.concatenate([last.op[kept], np.array(full["op"], np.int64) + before]),
        np.concatenate([last.op_phase[:before], np.array(full["op_phase"], np.int64)]),
    )


def _places(first: int, last: int, period: int) -> list[int]:
    if last < first:
        return []
    end = max(first, last - period + 1)
    places: list[int] = np.unique(np.linspace(first, end, _PLACES).round().astype(int)).tolist()
    return places


# ---
# Memory: the longest context.


#: Of calls after those simulated, and of those that are left out between.
_TextStream = Callable[..., Stream]


class _Contexts:
    """How far a text may go until the GPU is full."""

    def __init__(self, recording: Recording, text: GeneratedText, model: MemoryModel) -> None:
        self._recording, self._text, self._model = shortened(recording), text, model
        simulated = self._recording.simulated
        assert simulated is not None
        law = DecodeLaw.of(simulated, text)
        assert law is not None
        self._law, self._simulated = law, simulated
        self._before = (text.prompt or 0) + text.decodes

    def of_recording(self, calls: int, leap: int = 0) -> Stream:
        """The stream of the recording, to another end."""
        sizes, arguments = self._simulated.alloc_bytes, self._simulated.workspace_args
        return Stream.of(resized(self._recording, sizes, arguments, calls, leap))

    def longest(self, stream: _TextStream, batch: int | None) -> ContextPoint | None:
        """The longest text until memory is full, or the model's own end; ``None`` where memory does
        not grow, a cache has its full length from the first call on (a longer text has another
        one), or the model's end is not known and memory is not full before any that there is.

        ``stream`` gives the allocations of so many calls after those simulated, and after as many
        that are left out.
        """
        limit = (self._text.limit or _NO_LIMIT) - self._before
        if limit < 1 or not _grows_with_text(self._law, self._text):
            return None
        maximum = max(1, min(limit, _MOST_EVENTS // self._law.events_of_call))
        calls = min(maximum, 1024)
        while True:
            run = self._model.limited(stream(calls))
            if run.failed is not None:
                return self._point(batch, self._calls_until(run, calls))
            if calls >= maximum:
                break
            calls = min(maximum, 4 * calls)
        if calls >= limit:
            return self._end_of_model(batch, limit)
        return self._estimate(stream, batch, limit)

    def _calls_until(self, run: Replay, calls: int) -> int:
        """Whole calls after those simulated before memory was full (negative: among those)."""
        assert run.failed is not None
        event = int(run.stream.events[run.failed])
        assert event & 3 == MALLOC
        return self._law.call_of(event >> 2, calls) - 1

    def _point(
        self, batch: int | None, calls: int, *, by_model: bool = False, is_estimate: bool = False
    ) -> ContextPoint:
        positions = max(0, self._before + calls)
        return ContextPoint(batch, positions, by_model, is_estimate)

    def _end_of_model(
        self, batch: int | None, calls: int, *, is_estimate: bool = False
    ) -> ContextPoint | None:
        if self._text.limit is None:
            return None
        return self._point(batch, calls, by_model=True, is_estimate=is_estimate)

    def _estimate(self, stream: _TextStream, batch: int | None, limit: int) -> ContextPoint | None:
        """A point by calls from further on: what those in between leave in the allocator's cache is
        given back to the GPU once memory is full, and does not bound a text."""
        period = self._law.period
        calls = 2 * period + 1
        top = max(1, (limit - calls) // period + 1)
        fits, fails = 0, top
        while fails - fits > max(1, fits * _TO):
            middle = (fits + fails) // 2
            if self._model.limited(stream(calls, middle * period)).failed is None:
                fits = middle
            else:
                fails = middle
        if fails == top:
            return self._end_of_model(batch, limit, is_estimate=True)
        return self._point(batch, calls + fits * period, is_estimate=True)


def _grows_with_text(law: DecodeLaw, text: GeneratedText) -> bool:
    """Does a longer text need the memory that further calls leave behind? Where a cache is made at
    once, for all of the text, these leave no more than their tokens."""
    return law.grows and law.changes and "static" not in text.cache


# ---
# The same text, of another length.


class OtherLengths:
    """A run's text continued to other values of what says its length: it goes on as it began, so no
    run is needed to know about where memory ends.

    A text is its last calls here, as those stand for all of them (``continuation.ended``).
    """

    def __init__(self, text: GeneratedText, law: DecodeLaw, value: int) -> None:
        self._law, self._value = law, value
        #: Calls after those simulated, less the value.
        self._more = text.calls_left - value

    @classmethod
    def of(cls, recording: Recording, value: int) -> OtherLengths | None:
        """The other lengths of the run at ``value``; ``None`` where its text's length is not that,
        alone or with the prompt, or memory does not grow with it."""
        text, law = generated_text(recording), law_of_text(recording)
        if text is None or law is None or not _grows_with_text(law, text):
            return None
        return cls(text, law, value) if value in (text.new_tokens, text.positions) else None

    def largest(self, test: Callable[[Stream], bool], most: int | None, step: int) -> int:
        """The largest value, a multiple of ``step`` up to ``most``, with which the text passes
        ``test``; 0 where none does that is as long as what was simulated."""
        low = max(1, -(-(1 - self._more) // step))
        high = max(low, (most or _NO_LIMIT) // step) + 1
        if not test(self._stream(low * step)):
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if test(self._stream(middle * step)) else (low, middle)
        return low * step

    def _stream(self, value: int) -> Stream:
        calls, leap = last_calls(value + self._more, self._law.period)
        return Stream.of(self._law.to(calls, leap=leap))

    def stream_at(self, law: AffineStream, batch: int, value: int) -> Stream:
        """The events at another batch size, too: ``law`` is that of the run's own value."""
        text, calls_law = generated_text(law.template), law_of_text(law.template)
        if text is None or calls_law is None:
            return law.at(batch)
        calls = max(1, text.calls_left + value - self._value)
        return law.at(batch, *last_calls(calls, calls_law.period))
