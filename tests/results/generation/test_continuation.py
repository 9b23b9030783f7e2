"""Recordings of a text's first tokens, continued: the same as if all calls had been simulated."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from trainfit.memory.replay import Stream, replay
from trainfit.results.files.decoding import as_json
from trainfit.results.runs.continuation import DecodeLaw, is_enough, shortened, whole, with_decodes
from trainfit.results.runs.generation import GeneratedText, generated_text
from trainfit.results.runs.recording import KINDS, Recording
from trainfit.simgpu.session import Simulation
from trainfit.speed.work import COLUMNS, Work

PROMPT = 30
#: A position of the cache, in bytes: 4 sequences of 1024 numbers.
POSITION = 4 * 1024 * 2


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=torch.float16)


class Growing(torch.nn.Module):
    """A cache that each call copies into one that is a position longer."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = zeros(4, PROMPT, 1024)
        self.scale = torch.nn.Parameter(zeros(1))  # what has none is no model

    def forward(self, call: int) -> torch.Tensor:
        new = zeros(4, 1, 1024) + 1
        self.cache = torch.cat([self.cache, new], 1)
        return (self.cache * 2).sum(1)


class Padded(Growing):
    """In addition a mask, padded to a multiple of 8."""

    def forward(self, call: int) -> torch.Tensor:
        scores = super().forward(call)
        length = self.cache.shape[1]
        mask = zeros(4, 64, length)
        if length % 8:
            mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))
        return scores + mask.sum()


class Reordered(Growing):
    """In addition a copy in another order, as the keys of an attention without a kernel."""

    def forward(self, call: int) -> torch.Tensor:
        scores = super().forward(call)
        return scores + self.cache.transpose(1, 2).contiguous()[:, :, 0]


class Kept(torch.nn.Module):
    """Keeps what each call gives."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, call: int) -> torch.Tensor:
        self.kept.append(zeros(4, 700, 1024) + 1)
        return self.kept[-1]


class Window(Growing):
    """A cache of 100 positions at most."""

    def forward(self, call: int) -> torch.Tensor:
        found = super().forward(call)
        self.cache = self.cache[:, -99:]
        return found


class Squares(torch.nn.Module):
    """Scores of all positions with all others: no line."""

    def forward(self, call: int) -> torch.Tensor:
        return zeros(PROMPT + call, PROMPT + call) + 1


def record(kind: type[torch.nn.Module], calls: int, **told: Any) -> Recording:
    """A prompt's call and ``calls`` for further tokens; ``told`` is said of the text."""
    with Simulation("RTX 4090") as simulation, torch.no_grad():
        model = kind()
        zeros(4, PROMPT, 1024).sum()
        mask = zeros(4, PROMPT)
        simulation.end_step()
        for call in range(1, calls + 1):
            model(call)
            mask = torch.cat([mask, mask[:, :1]], 1)  # it grows, too, and is no cache
            simulation.end_step()
        recording = simulation.recording
    text = GeneratedText(0, calls, prompt=PROMPT, **told)
    header: Any = {**recording.header, "generation": _plain(text)}
    return dataclasses.replace(recording, header=header)


def _plain(text: GeneratedText) -> dict[str, Any]:

    found: dict[str, Any] = json.loads(as_json(text))
    return found


def peaks(recording: Recording, *, last: int = 1) -> tuple[Any, ...]:
    """Of all, and of the last steps."""
    outcome = replay(Stream.of(recording))
    reserved = outcome.stats["reserved_bytes"], outcome.stats["allocated_bytes"]
    return outcome.peak_allocated, outcome.peak_reserved, outcome.step_peaks[-last:], *reserved


def text_of(recording: Recording) -> GeneratedText:
    text = generated_text(recording)
    assert text is not None
    return text


@pytest.mark.parametrize("calls", [26, pytest.param(28, marks=pytest.mark.slow), 120])
@pytest.mark.parametrize("kind", [Growing, Padded, Kept])
def test_it_is_as_if_all_calls_were_simulated(kind: type[torch.nn.Module], calls: int) -> None:
    short, full = record(kind, 25, calls_left=calls - 25), record(kind, calls)
    found = whole(short)
    found.check()
    assert found.simulated is short and text_of(found).new_tokens == calls + 1
    assert peaks(found) == peaks(full)
    mine, theirs = (Work.of_step(each, each.steps - 1) for each in (found, full))
    assert np.array_equal(mine.table, theirs.table) and np.array_equal(mine.op, theirs.op)
    law = DecodeLaw.of(short, text_of(short))
    assert law is not None and law.period == (8 if kind is Padded else 1)
    for call in (1, calls - 25):
        one, other = Work.of_step(law.call(call), 0), Work.of_step(full, 25 + call)
        assert np.array_equal(one.table, other.table)


def test_what_a_reordered_copy_passes_through_the_cache_follows_what_it_moves() -> None:
    short, full = record(Reordered, 25, calls_left=95), record(Reordered, 120)
    found = whole(short)
    assert found.simulated is short and peaks(found) == peaks(full)
    mine, theirs = (Work.of_step(each, each.steps - 1).table for each in (found, full))
    different = np.flatnonzero((mine != theirs).any(0)).tolist()
    columns = COLUMNS.index("columns")
    assert different == [columns]
    assert (mine[:, columns][mine[:, columns] != theirs[:, columns]] > 0).all()


def test_a_window_ends_the_growth() -> None:
    modules = ("Window",)
    short = record(Window, 17, calls_left=283, window=100, in_window=modules)
    assert peaks(whole(short)) == peaks(record(Window, 300))


def test_what_follows_no_law_is_left_as_it_is() -> None:
    short = record(Squares, 49, calls_left=100)
    assert DecodeLaw.of(short, text_of(short)) is None and whole(short) is short
    assert whole(record(Growing, 17)).simulated is None
    assert whole(record(Growing, 17, calls_left=9, reason="an assistant")).simulated is None
    # A padded mask repeats after 8: with 17 calls each place was not seen three times.
    few = record(Padded, 17, calls_left=9)
    assert DecodeLaw.of(few, text_of(few)) is None


def test_a_growing_cache_is_told_from_other_memory() -> None:
    found = whole(record(Growing, 17, calls_left=83))
    cache = found.alloc_kind == KINDS.index("kv_cache")
    assert int(found.alloc_bytes[cache][-1]) == (PROMPT + 100) * POSITION
    assert np.count_nonzero(cache) == 100


def test_many_calls_are_replayed_without_small_allocations_of_each() -> None:
    short = record(Growing, 17, calls_left=30_000)
    found, fewer = whole(short), shortened(whole(short))
    for each in (found, fewer):
        each.check()
        assert int(each.alloc_bytes.max()) >= (PROMPT + 30_017) * POSITION
    assert len(fewer.events) < len(found.events)


def test_files_hold_what_was_simulated(tmp_path: Any) -> None:
    short = record(Growing, 17, calls_left=5_000)
    path = tmp_path / "text.trainfit"
    whole(short).save(path)
    assert path.stat().st_size < 40_000
    again = Recording.load(path)
    assert again.steps == short.steps and peaks(whole(again)) == peaks(whole(short))


def test_fewer_simulated_calls_give_the_same() -> None:
    found = whole(record(Padded, 49, calls_left=51))
    fewer = with_decodes(found, 25)
    assert text_of(fewer).decodes == 25 and text_of(fewer).new_tokens == text_of(found).new_tokens
    assert peaks(fewer) == peaks(found)


def test_a_look_is_taken_now_and_then() -> None:
    assert [n for n in range(1, 400) if is_enough(n)] == [17, 25, 49, 98, 196, 392]


@pytest.mark.parametrize(
    "told", [{"decodes": 17}, {"prefill": 0, "decodes": 99}, {"prefill": -1, "decodes": 2}, "text"]
)
def test_what_a_header_cannot_say_of_a_text_is_none(told: Any) -> None:
    recording = record(Growing, 17, calls_left=5)
    header: Any = {**recording.header, "generation": told}
    assert generated_text(dataclasses.replace(recording, header=header)) is None
