"""How long a context fits, and what a token costs, of a recording that was continued."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers_cases import some_of
from trainfit.hardware import GpuSpec, find_gpu
from trainfit.memory import capacity
from trainfit.memory.affine import AffineStream, OtherCourseError
from trainfit.memory.capacity import least_capacity
from trainfit.memory.replay import Stream, replay
from trainfit.plan.sizing import lengths
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.generation import OtherLengths, decode_seconds, generation
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.results.files.decoding import as_json
from trainfit.results.plan import TunableSizes
from trainfit.results.runs import continuation
from trainfit.results.runs.continuation import ended, whole
from trainfit.results.runs.generation import GeneratedText
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import RunSpec
from trainfit.simgpu.allocator.settings import AllocatorSettings
from trainfit.simgpu.session import Simulation
from trainfit.speed.step import step_time
from trainfit.speed.work import Work

PROMPT, WIDTH = 30, 1 << 18
GPU = find_gpu("RTX 4090")


def recorded(batch: int, calls: int, left: int, limit: int | None = None) -> Recording:
    """A cache that grows by a megabyte a sequence with each call."""
    with Simulation(GPU, limited=False) as simulation, torch.no_grad():
        cache = torch.zeros(batch, PROMPT, WIDTH, device="cuda")
        simulation.end_step()
        for _ in range(calls):
            new = torch.ones(batch, 1, WIDTH, device="cuda")
            cache = torch.cat([cache, new], 1)
            simulation.end_step()
        recording = simulation.recording
    text = GeneratedText(0, calls, left, PROMPT, batch, batch, limit, by="a test")
    header: Any = {**recording.header, "generation": json.loads(as_json(text))}
    return dataclasses.replace(recording, header=header)


def model_of(gib: float) -> MemoryModel:
    gpu: GpuSpec = dataclasses.replace(GPU, memory_bytes=int(gib * (1 << 30)))
    return MemoryModel(gpu, AllocatorSettings(), 0.0, ())


@pytest.mark.parametrize("gib", some_of([1.0, 3.0], 1))
def test_the_longest_context_is_the_last_that_fits(gib: float) -> None:
    model, machine = model_of(gib), machine_of(GPU)
    found = generation(whole(recorded(2, 17, 5)), machine, model, 2)
    assert found is not None and found.longest is not None
    calls = found.longest.positions - PROMPT
    assert not found.longest.by_model and not found.longest.is_estimate
    fits = [model.limited(stream_of(2, each)).fits for each in (calls, calls + 1)]
    assert fits == [True, False]


def stream_of(batch: int, calls: int) -> Stream:
    return Stream.of(recorded(batch, calls, 0))


def test_a_long_text_is_bounded_by_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy of a cache leaves a block that the next ones do not fit into. They are given back
    where memory is full: estimated from them, a text would be far shorter than it can be."""
    model, machine, recording = model_of(8.0), machine_of(GPU), whole(recorded(2, 17, 5))
    exact = generation(recording, machine, model, 2)
    monkeypatch.setattr("trainfit.plan.sizing.generation._MOST_EVENTS", 100)
    found = generation(recording, machine, model, 2)
    assert exact is not None and exact.longest is not None and not exact.longest.is_estimate
    assert found is not None and found.longest is not None and found.longest.is_estimate
    # Half of the memory is the cache, 2 MiB a token; the other half is its copy.
    assert exact.longest.positions == pytest.approx(8192 / 4, rel=0.15)
    assert found.longest.positions == pytest.approx(exact.longest.positions, rel=0.02)


def test_the_last_calls_need_what_the_text_needs() -> None:
    recording, device = whole(recorded(2, 17, 600)), model_of(8.0).device
    last = ended(recording)
    assert len(last.events) < len(recording.events) / 5
    least = [least_capacity(Stream.of(each), device) for each in (recording, last)]
    assert least[1] == pytest.approx(least[0], rel=0.01)
    assert ended(recorded(2, 17, 0)).simulated is None  # all of it was simulated


def test_a_model_is_not_asked_for_more_than_it_is_made_for() -> None:
    found = generation(whole(recorded(2, 17, 5, limit=200)), machine_of(GPU), model_of(22.0), 2)
    assert found is not None and found.longest is not None
    assert (found.longest.positions, found.longest.by_model) == (200, True)


def test_the_frontier_is_of_the_law_of_two_batch_sizes() -> None:
    pair = [(size, whole(recorded(size, 17, 40))) for size in (2, 4)]
    (one, first), (other, second) = pair
    law = AffineStream.between(first, one, second, other)
    model, machine = model_of(2.0), machine_of(GPU)
    found = generation(first, machine, model, 2, law, [1, 2, 4, 8])
    assert found is not None and found.longest is not None
    longest = {each.batch_size: each.positions for each in found.frontier}
    assert longest[2] == found.longest.positions and sorted(longest) == [1, 2, 4, 8]
    assert longest[1] > longest[2] > longest[4] > longest[8]
    alone = generation(second, machine, model, 4)
    assert alone is not None and alone.longest is not None
    assert longest[4] == alone.longest.positions
    with pytest.raises(OtherCourseError, match="58 tokens are generated at one batch size and 59"):
        AffineStream.between(first, 2, whole(recorded(4, 17, 41)), 4)


def test_the_time_of_tokens_is_that_of_all_calls() -> None:
    short, full = recorded(2, 17, 183), recorded(2, 200, 0)
    machine = machine_of(GPU)
    text = GeneratedText(0, 17, 183, PROMPT, 2, 2)
    calls = decode_seconds(whole(short), text, machine)
    every = [step_time(Work.of_step(full, step), machine).seconds for step in range(1, 201)]
    assert len(calls) == 200
    assert calls.sum() == pytest.approx(sum(every), rel=1e-3)
    assert calls[-1] == pytest.approx(every[-1], rel=1e-2) and calls[-1] > calls[0]
    found = generation(whole(short), machine, model_of(22.0), 2)
    assert found is not None and found.first_token_s is not None and found.total_s is not None
    assert found.total_s == pytest.approx(found.first_token_s + calls.sum())
    assert found.all_tokens_per_s == pytest.approx(2 * 201 / found.total_s)


def test_other_lengths_of_a_text_follow_from_its_run() -> None:
    """No run is made for them: where memory ends is where a run of that length ends."""
    model, most = model_of(3.0), []

    def fits(stream: Stream) -> bool:
        most.append(len(stream.events))
        return model.limited(stream).fits

    present = whole(recorded(2, 17, 80))
    text = OtherLengths.of(present, 98)
    assert text is not None
    largest = text.largest(fits, None, 2)
    assert largest > 4 * 98 and largest % 2 == 0
    # A run of that length: 18 of its calls are simulated.
    ran = [model.limited(Stream.of(ended(whole(recorded(2, 17, each - 18))))) for each in
           (largest, largest + 2)]  # fmt: skip
    assert [each.fits for each in ran] == [True, False]
    assert max(most) < len(Stream.of(whole(recorded(2, 17, largest - 18))).events) / 4
    assert text.largest(fits, 300, 2) == 300  # the model's last position
    assert text.largest(lambda _: False, None, 2) == 0
    with_prompt = OtherLengths.of(present, 98 + PROMPT)
    assert with_prompt is not None
    assert with_prompt.largest(fits, None, 1) - PROMPT in (largest, largest + 1)


def test_a_value_that_is_no_length_of_the_text_tells_nothing_of_others() -> None:
    assert OtherLengths.of(whole(recorded(2, 17, 80)), 97) is None
    assert OtherLengths.of(recorded(2, 17, 0), 18) is None  # all of it was simulated
    with Simulation(GPU, limited=False) as simulation, torch.no_grad():
        cache = torch.zeros(2, 500, WIDTH, device="cuda")  # made at once
        simulation.end_step()
        for _ in range(17):
            cache[:, :1] = torch.ones(2, 1, WIDTH, device="cuda")
            simulation.end_step()
        static = simulation.recording
    text = GeneratedText(0, 17, 80, PROMPT, 2, 2, by="a test")
    header: Any = {**static.header, "generation": json.loads(as_json(text))}
    continued = whole(dataclasses.replace(static, header=header))
    assert continued.simulated is not None and OtherLengths.of(continued, 98) is None


def test_other_lengths_at_other_batch_sizes_are_those_of_runs() -> None:
    pair = [whole(recorded(size, 17, 40)) for size in (2, 4)]
    law, text = AffineStream.between(pair[0], 2, pair[1], 4), OtherLengths.of(pair[0], 58)
    assert text is not None
    for value in (40, 58, 300):
        told = Stream.of(ended(whole(recorded(8, 17, value - 18))))
        device = model_of(64.0).device
        peaks = [device.unlimited(each).peak_reserved for each in
                 (text.stream_at(law, 8, value), told)]  # fmt: skip
        assert peaks[0] == pytest.approx(peaks[1], rel=0.02), value


def test_the_largest_length_of_a_text_is_found_in_a_few_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is all of each text replayed: of a long one that is millions of events, many times."""
    ran: dict[int, int] = {}
    replayed: list[int] = []

    def trace(batch: int, spec: RunSpec) -> Any:
        value = int(spec.values.get("max_new_tokens", 98))
        recording = whole(recorded(2, 17, value - 18))
        ran[value] = len(recording.events)
        context = SimpleNamespace(positions=None, longest=None)
        outcome = SimpleNamespace(context=context, peak_ram_bytes=0, loader=None)
        return SimpleNamespace(recording=recording, outcome=outcome)

    def counted(stream: Stream, **options: Any) -> Any:
        replayed.append(len(stream.events))
        return replay(stream, **options)

    monkeypatch.setattr(lengths, "varying_shapes", lambda _: None)
    monkeypatch.setattr(lengths, "context_parts", lambda _: ())
    monkeypatch.setattr(capacity, "replay", counted)
    job: Any = SimpleNamespace(
        memory_model=dataclasses.replace(model_of(3.0), headroom=0.1),
        machine=machine_of(GPU),
        batch=2,
        pairs=(),
        runs=SimpleNamespace(trace=trace, look_at_samples_s=0.0),
        first=SimpleNamespace(outcome=SimpleNamespace(loader=None)),
        sized=lambda spec: spec,
    )
    search = lengths._LengthSearch(job, "max_new_tokens", "--max_new_tokens", 98, RunSpec())
    search.look(98)
    found = search.solved(TunableSizes("max_new_tokens", "--max_new_tokens", 98))
    assert found.largest and found.recommended and found.too_large
    assert 0 < found.too_large - found.largest <= max(2, found.largest // 64)
    assert found.largest == pytest.approx(3072 / 4 - PROMPT, rel=0.15)
    assert found.recommended == pytest.approx(0.9 * found.largest, rel=0.1)
    assert len(ran) <= 5, ran
    assert sum(replayed) < 6 * max(ran.values()), (len(replayed), sum(replayed))


def test_batch_sizes_of_a_long_text_are_replayed_by_its_last_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All calls of a large model's are millions of events, and a batch size is looked for by a
    dozen replays."""
    pair = [whole(recorded(size, 17, 400)) for size in (2, 4)]
    device = model_of(8.0).device

    def law() -> AffineStream:
        return AffineStream.between(pair[0], 2, pair[1], 4)

    def largest() -> int:
        return capacity.largest_batch(law(), device.capacity_bytes, 0, device.settings)

    all_of_it, events = largest(), len(law().at(4).events)
    assert all_of_it > 4
    monkeypatch.setattr(continuation, "_TOO_MANY_EVENTS", 1000)
    brief = law()
    assert len(brief.at(4).events) < events / 3
    assert len(brief.at(4).alloc_bytes) == len(brief.template.alloc_bytes)
    assert largest() == all_of_it
    peaks = [device.unlimited(each.at(4)).peak_allocated for each in (law(), brief)]
    assert peaks[0] == peaks[1]


def test_room_is_judged_by_calls_however_many_a_step_stands_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six blocks that were asked for twice: of 500 calls they cost nothing, of 20 steps they do."""
    continued = whole(recorded(2, 17, 140))
    assert [Stream.of(each).calls for each in (continued, recorded(2, 17, 0))] == [158, 0]
    assert Stream.of(ended(continued)).calls == 18 + 3
    asked = {"replay": (30, *range(80, 100), 106), "unlimited": (30, *range(80, 101))}
    for name, counts in asked.items():
        outcome = SimpleNamespace(fits=True, retries=1, step_device_allocations=counts)
        monkeypatch.setattr(capacity.DeviceCapacity, name, lambda *_, outcome=outcome: outcome)
    stream, device = Stream.of(continued), model_of(8.0).device
    rooms = [device.has_room(dataclasses.replace(stream, calls=each)) for each in (500, 40, 0)]
    assert rooms == [True, False, False]
