"""The recommended batch size: by throughput, within memory and data set, whatever the start."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import trainfit
from trainfit.hardware import find_gpu
from trainfit.memory.capacity import LARGEST
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.batches import (
    data_set_of,
    full_part,
    full_steps,
    half_epoch,
    is_full,
    most_full,
    most_timed,
    samples_used,
    shared_by,
    unit_of,
)
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing import batch_sizes as sizing
from trainfit.plan.sizing.attempts import SimulatedBatch, other_path, search
from trainfit.plan.sizing.batch_sizes import BatchSizes
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.curve import (
    MOST_TRIALS,
    Curve,
    Grain,
    batch_sizes,
    curve_of,
    curve_through,
    refine,
    saturation_batch,
    timed,
)
from trainfit.plan.sizing.recommendation import (
    Bounds,
    EffectiveBatch,
    accumulation_for,
    recommend,
)
from trainfit.results.configuration import BatchOption
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.plan import option_text
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import AS_WRITTEN
from trainfit.results.runs.steps import StepMakeup
from trainfit.results.runs.trace import LoaderInfo, TraceOutcome
from trainfit.results.speed import KNEE, StepSpeed

STARTS = (1, 2, 3, 7, 8, 32, 100)
MACHINE = machine_of(find_gpu("RTX 3090"))


def step(batch: int, seconds: float) -> StepSpeed:
    return StepSpeed(
        batch, seconds, (0.8 * seconds, 1.2 * seconds), seconds, 0.0, 0.0, "launches",
        batch / seconds,
    )  # fmt: skip


def curve(time: Callable[[int], float], most: int) -> Curve:
    return Curve(tuple(step(size, time(size)) for size in batch_sizes(most)))


def line(batch: int) -> float:
    return max(10.0, 2.0 + 0.5 * batch)


#: What is recommended is one of these: 1, 2, 3, 4, then multiples of 8.
def grid(most: int) -> list[int]:
    sizes = [size for size in batch_sizes(most) if size <= 4 or size % 8 == 0]
    return sorted({*sizes, most})


def are_neighbours(answers: Sequence[int], most: int) -> bool:
    """Do they lie within one step of the grid?"""
    places = [sum(size < answer for size in grid(most)) for answer in answers]
    return max(places) - min(places) <= 1


# -- the present one stays where nothing is clearly faster ---------------------------------------


@pytest.mark.parametrize(
    ("present", "batch", "reason"),
    [
        (80, 80, ""),  # it is the smallest that is nearly as fast as any
        (200, 200, "keeping 200: the smaller 80 is no faster"),  # never down for nothing
        (76, 76, "keeping 76: 5% more samples/s at 80 is less than the curve's own error of 6%"),
        (40, 80, ""),  # twice as fast
        (2000, 80, ""),  # does not fit
    ],
)
def test_present(present: int, batch: int, reason: str) -> None:
    found = recommend(Bounds(1000, 100_000), curve(lambda size: max(1.0, size / 80), 1000), present)
    assert (found.batch, found.limits.reason) == (batch, reason)


@pytest.mark.parametrize(
    ("samples", "present", "batch", "reason"),
    [
        (2048, 32, 40, "leaves an epoch of 2048 samples 50 steps (1000 would be faster)"),
        (16_000, 32, 320, "leaves an epoch of 16000 samples 50 steps (1000 would be faster)"),
        (200, 8, 8, "keeping 8: an epoch of 200 samples has few steps as it is"),
        (1_000_000, 32, 1000, ""),
        (None, 32, 1000, ""),
    ],
)
def test_an_epoch_keeps_its_steps(
    samples: int | None, present: int, batch: int, reason: str
) -> None:
    one = EffectiveBatch(accumulating(f"{{batch_size:{present}}}").command, None, present)
    flat = curve(lambda size: 1.0, 1000)
    found = recommend(Bounds(1000, samples), flat, present, effective=one)
    assert (found.batch, found.limits.reason, found.limits.option) == (batch, reason, None)


@pytest.mark.parametrize(
    ("samples", "present", "option"),
    [
        (2048, 32, BatchOption(40, 40, 32, 1.25, 52, 64)),
        (16_000, 32, BatchOption(320, 320, 32, 10.0, 50, 500)),
        (200, 8, None),  # few steps as it is
        (1_000_000, 32, BatchOption(1000, 1000, 32, 31.25, 1000, 31_250)),
        (None, 32, BatchOption(1000, 1000, 32, 31.25, None, None)),
        (16_000, 304, None),  # 5% more samples/s are within the curve's error
    ],
)
def test_a_batch_that_changes_what_is_learned_is_an_option(
    samples: int | None, present: int, option: BatchOption | None
) -> None:
    """The batch size that nobody marked stays, with the samples of a step."""
    one = EffectiveBatch(accumulating().command, None, present)
    flat = curve(lambda size: 1.0, 1000)
    found = recommend(Bounds(1000, samples), flat, present, effective=one)
    assert (found.batch, found.limits.option) == (present, option)
    # Of an inference nothing is learned.
    free = dataclasses.replace(one, infers=True)
    assert recommend(Bounds(1000, 1_000_000), flat, present, effective=free).batch == 1000
    # What does not fit cannot stay.
    assert recommend(Bounds(4, samples), flat, present, effective=one).batch == 4


@pytest.mark.parametrize(
    ("seconds", "batch"),
    [
        (lambda size: max(1.0, size / 80), 512),  # as fast from 80 on: the nearest to 1024
        (lambda size: max(1.0, size / 80) ** 1.2, 64),  # slower by far
    ],
)
def test_what_does_not_fit_becomes_the_nearest_to_it(
    seconds: Callable[[int], float], batch: int
) -> None:
    """Not the smallest that is nearly as fast: nothing keeps the samples of a step."""
    makeup = StepMakeup(1024, 1, 1024, "DataLoader", 1)
    one = EffectiveBatch(accumulating().command, makeup, 1024)
    found = recommend(Bounds(1000, 100_000), curve(seconds, 1000), 1024, effective=one)
    assert found.batch == batch


@pytest.mark.parametrize(
    ("optimizer", "factor", "rule"),
    [("SGD", 10, "linear"), ("AdamW", 10**0.5, "square root"), ("Adafactor", None, "")],
)
def test_an_option_has_the_rule_of_its_optimizer(
    optimizer: str, factor: float | None, rule: str
) -> None:
    one = EffectiveBatch(accumulating().command, None, 32, optimizer=optimizer)
    found = recommend(Bounds(1000, 16_000), curve(lambda size: 1.0, 1000), 32, effective=one)
    option = found.limits.option
    assert option is not None and option.rate_rule == rule
    assert option.rate_factor == (pytest.approx(factor) if factor else None)
    assert ("no rule" if factor is None else f"{rule} rule for {optimizer}") in option_text(option)


def test_accumulation_keeps_the_step_and_a_larger_one_is_the_option() -> None:
    kept = accumulating("{batch_size:8}", "{grad_accum:4}")
    found = recommend(Bounds(1000, 100_000), curve(line, 1000), 8, effective=kept)
    option = found.limits.option
    assert found.batch == 32 and option is not None
    assert (option.batch_size, option.samples, option.samples_now) == (80, 80, 32)


def test_a_present_batch_that_is_slower_is_left() -> None:
    """Also for a smaller one: beyond 64 each sample takes twice as long."""
    slower = curve(lambda size: max(1.0, size / 64) + max(0, size - 64) / 64, 1000)
    assert recommend(Bounds(1000), slower, 512).batch == 64
    assert recommend(Bounds(1000), slower, 512, noise_scale=1e9).batch == 64
    # 14% faster is within what a step of a small batch may be wrong: 20%.
    assert recommend(Bounds(1000), curve(lambda size: size + size / 70 - 1 / 70, 10), 8).batch == 8


# -- within what is possible -------------------------------------------------------------------


def test_the_smallest_that_is_nearly_as_fast_as_any() -> None:
    found = recommend(Bounds(1000, 100_000), curve(line, 1000), 8)
    assert found.batch == found.limits.knee == 80
    assert (found.limits.reason, found.limits.epoch_steps) == ("", None)


def test_no_batch_is_larger_than_the_data_set() -> None:
    """A data set of 64 samples: the memory's limit stays what it is."""
    bounds = Bounds(229_376, 64)
    found = recommend(bounds, curve(line, 64), 8)
    assert bounds.most == 64
    assert found.batch == 40 and found.limits.memory == 229_376
    assert found.limits.epoch_steps == 2
    assert recommend(Bounds(229_376, 64), curve(lambda batch: 1.0, 64), 8).batch == 64


@pytest.mark.parametrize(("samples", "steps"), [(640, None), (639, 8), (200, 3), (81, 2), (80, 1)])
def test_an_epoch_of_few_steps_is_told(samples: int, steps: int | None) -> None:
    found = recommend(Bounds(1000, samples), curve(lambda batch: 1.0, 80), 8)
    assert (found.batch, found.limits.epoch_steps) == (80, steps)


def test_an_epoch_of_full_batches_alone() -> None:
    """4096 samples in batches of 2560 whose last one is dropped: one step."""
    flat = curve(lambda batch: 1.0, 2560)
    found = recommend(Bounds(10_000, 4096, drops_last=True), flat, 256)
    assert (found.batch, found.limits.epoch_steps) == (2560, 1)
    assert recommend(Bounds(10_000, 4096), flat, 256).limits.epoch_steps == 2


def accumulating(*words: str, accumulation: int = 4) -> EffectiveBatch:
    """The job of ``words`` with micro-batches of 8."""
    makeup = StepMakeup(8, accumulation, 8 * accumulation, "DataLoader", accumulation)
    return EffectiveBatch(parse_command(["python", "-m", "json.tool", *words]), makeup, 8)


def test_steps_of_an_epoch_are_the_optimizers() -> None:
    """Of four micro-batches each: 160 batches of 8 are 40 steps."""
    bounds, flat = Bounds(1000, 16 * 80), curve(lambda batch: 1.0, 80)
    found = recommend(bounds, flat, 8, effective=accumulating("{batch_size:8}"))
    assert (found.batch, found.limits.epoch_steps) == (8, None)
    # With no curve, too: what stays is the current batch size.
    kept = recommend(Bounds(1000, 64), Curve(), 8, effective=accumulating())
    assert (kept.batch, kept.limits.epoch_steps) == (8, 2)
    unknown = EffectiveBatch(accumulating().command, StepMakeup(None, 4, None, loader_batches=4), 8)
    assert recommend(Bounds(1000, 64), Curve(), 8, effective=unknown).limits.epoch_steps == 2


def test_a_script_that_keeps_the_samples_of_a_step_has_its_fastest_micro_batch() -> None:
    """LitGPT's global batch size of 32: four micro-batches of 8, or one of 32."""
    effective = accumulating()
    assert effective.makeup is not None
    kept = dataclasses.replace(effective.makeup, is_kept=True)
    effective = dataclasses.replace(effective, makeup=kept)
    found = recommend(Bounds(1000, 100_000), curve(lambda batch: 1.0, 1000), 8, effective=effective)
    assert (found.batch, found.limits.option) == (32, None)
    assert found.limits.reason == "the script keeps the effective batch size of 32"
    as_it_is = accumulation_for(effective.command, kept, 8, 32)
    assert not (as_it_is.values or as_it_is.note or as_it_is.action)


def test_steps_of_an_epoch_are_with_the_accumulation_of_the_launch_command() -> None:
    """Effective batch 128: micro-batches of 64 become two a step, not the present 16."""
    effective = accumulating("{batch_size:8}", "{grad_accum:16}", accumulation=16)
    found = recommend(Bounds(1000, 640), curve(lambda batch: 1.0, 64), 8, effective=effective)
    assert (found.batch, found.limits.epoch_steps) == (64, 5)


def test_the_placeholder_for_accumulation_bounds_the_batch() -> None:
    effective = accumulating("{batch_size:8}", "{grad_accum:4}")
    found = recommend(Bounds(1000, 100_000), curve(line, 1000), 8, effective=effective)
    assert found.batch == 32 and found.limits.knee == 80
    assert found.limits.reason == "{grad_accum} keeps the effective batch size of 32"
    # Without it, or where it has no effect, throughput decides.
    for words in ((), ("{grad_accum:2}",)):
        free = accumulating("{batch_size:8}", *words)
        assert recommend(Bounds(1000), curve(line, 1000), 8, effective=free).batch == 80


def saturated(most: int, micro_batches: int = 1) -> Curve:
    """As fast from 64 samples on; below it launches cost time."""
    times = {size: micro_batches * (1.0 + size / 64) for size in batch_sizes(most)}
    return Curve(
        tuple(
            dataclasses.replace(step(size, seconds), samples_per_s=micro_batches * size / seconds)
            for size, seconds in times.items()
        )
    )


def test_the_noise_scale_is_compared_with_the_samples_of_a_step() -> None:
    """Micro-batches of one step of 256 samples learn the same: the fastest is best, whatever the
    noise scale. Without accumulation it asks for a smaller batch, of which no smaller one's
    accumulation makes the current one again."""
    bounds, four = Bounds(1024, 100_000), saturated(1024, 4)
    present = StepMakeup(64, 4, 256, "DataLoader", 4)
    command = parse_command(["python", "-m", "json.tool", "{batch_size:64}", "{grad_accum:4}"])
    kept = EffectiveBatch(command, present, 64)
    found = recommend(bounds, four, 64, noise_scale=16.0, effective=kept)
    assert found == dataclasses.replace(
        recommend(bounds, four, 64, effective=kept),
        limits=dataclasses.replace(found.limits, noise_scale=16.0),
    )
    assert (found.batch, found.limits.trains) == (256, None)
    # No placeholder: the accumulation stays, and a step of 4 micro-batches is what learns.
    free = EffectiveBatch(
        parse_command(["python", "-m", "json.tool", "{batch_size:64}"]), present, 64
    )
    of_step = recommend(bounds, four, 64, noise_scale=256.0, effective=free).batch
    alone = recommend(bounds, saturated(1024), 64, noise_scale=64.0).batch
    assert of_step == alone is not None
    unknown = Curve(tuple(dataclasses.replace(s, samples_per_s=None) for s in four.steps))
    assert recommend(bounds, unknown, 64, noise_scale=16.0).limits.trains is None


@pytest.mark.parametrize(
    ("memory", "batch", "values"), [(1024, 24, {}), (16, 16, {"grad_accum": "16"})]
)
def test_a_noise_scale_may_lower_the_samples_of_a_step(
    memory: int, batch: int, values: dict[str, str]
) -> None:
    """An option for accumulation, found and not marked, does not make 256 of them again; where
    memory is what forces a smaller batch, it does."""
    words = ["python", "-m", "json.tool", "{batch_size:256}", "{grad_accum:1}"]
    command = dataclasses.replace(parse_command(words), supposed=frozenset({"grad_accum"}))
    effective = EffectiveBatch(command, StepMakeup(256, 1, 256, "DataLoader", 1), 256)
    found = recommend(Bounds(memory), saturated(memory), 256, noise_scale=16.0, effective=effective)
    by_noise = found.limits.by_noise
    assert found.batch == batch
    assert accumulation_for(command, effective.makeup, 256, batch, by_noise).values == values
    samples = dataclasses.replace(effective, by_noise=by_noise).samples_at(batch)
    assert samples == (24 if memory == 1024 else 256)


def test_without_a_curve_the_present_one_stays_with_the_reason() -> None:
    why = "no throughput prediction for a custom GPU"
    kept = recommend(Bounds(500), Curve(), 8, without_curve=why)
    assert (kept.batch, kept.limits.reason) == (8, f"{why}: keeping 8")
    # It does not fit, or the data set has no more.
    for bounds in (Bounds(5), Bounds(500, 5)):
        less = recommend(bounds, Curve(), 8, without_curve=why)
        assert less.batch == 5 and "the largest" in less.limits.reason
    unknown = recommend(Bounds(None), Curve(), None, without_curve=why)
    assert (unknown.batch, unknown.limits.reason) == (None, why)


def test_none_is_recommended_while_memory_grows() -> None:
    found = recommend(Bounds(500), curve(line, 500), 8, unfit="memory grows")
    assert (found.batch, found.limits.reason) == (None, "memory grows")


def test_not_even_one_sample() -> None:
    assert recommend(Bounds(0, 100), Curve(), 8).batch == 0


# -- whatever the start: jobs without a law --------------------------------------------------------


def by_trial(start: int, memory: Callable[[int], int], time: Callable[[int], float]) -> int | None:
    """What is recommended from batches that are simulated one by one."""
    free, most = 1_000_000, 100_000

    def trial(batch: int) -> SimulatedBatch:
        return SimulatedBatch(batch, memory(batch), memory(batch) <= free, memory(batch) <= free)

    def measure(batch: int) -> StepSpeed:
        return step(batch, time(batch))

    found = search(
        [trial(batch) for batch in {start, max(2, start), 2 * start}],
        lambda batches: map(trial, batches),
        free_bytes=free,
        free_with_headroom_bytes=free,
        most=most,
    )
    if not found.recommended:
        return found.recommended
    bounds = Bounds(Curve().grain.rounded(found.recommended), most)
    assert bounds.most is not None
    known = {batch: measure(batch) for batch in found.tried if batch <= bounds.most}
    known = known or {min(start, bounds.most): measure(min(start, bounds.most))}
    refined = refine(known, bounds.most, measure)
    assert len(refined) <= len(known) + MOST_TRIALS
    return recommend(bounds, curve_through(refined, bounds.most), start).batch


@settings(max_examples=40, deadline=None)
@given(
    st.floats(1.0, 500.0),  # of launches, in the time that a sample takes
    st.floats(0.0, 200.0),  # of weights and the optimizer
    st.floats(0.0, 0.02),  # with the square of the batch size
    st.integers(20, 30_000),  # a sample's bytes
)
@example(10.0, 2.0, 0.0, 30)
@example(300.0, 2.0, 0.01, 20)
@example(1.0, 82.0, 0.00390625, 2893)
@example(219.0, 0.0, 0.0, 139)
def test_the_start_does_not_matter_without_a_law(
    launches: float, base: float, square: float, sample: int
) -> None:
    def time(batch: int) -> float:
        return 1e-3 * max(launches, base + batch + square * batch * batch)

    answers = [by_trial(start, lambda batch: 5_000 + sample * batch, time) for start in STARTS]
    assert all(answers)
    # The present batch size stays where nothing is clearly faster.
    moved = [each for each, start in zip(answers, STARTS, strict=True) if each and each != start]
    assert not moved or are_neighbours(moved, 100_000), answers
    rates = {size: size / time(size) for size in batch_sizes((1_000_000 - 5_000) // sample)}
    # Nearly as fast as any: but for a sixteenth of the memory, and for multiples of 8 below it.
    least = 0.8 * KNEE * max(rates.values())
    assert all(each and each / time(each) > least for each in answers), answers


def test_steps_between_two_that_were_simulated() -> None:
    known = {size: step(size, line(size)) for size in (4, 32, 64, 128)}
    found = curve_through(known, 100)
    sizes = [each.batch_size for each in found.steps]
    assert sizes[0] == 1 and sizes[-1] == 64 and sizes == sorted(set(map(int, sizes)))  # type: ignore[arg-type]
    at = {each.batch_size: each for each in found.steps}
    assert at[48].seconds == pytest.approx(line(48))
    assert at[48].samples_per_s == pytest.approx(48 / line(48))
    assert at[32] == known[32]
    assert "4, 32, 64" in found.notes[0]
    assert curve_through(known, 2) == Curve()


def test_a_script_that_keeps_its_effective_batch_has_fewer_micro_batches() -> None:
    """Between two trials a micro-batch takes what the line says; a step has another number."""
    effective = 64

    def accumulated(batch: int) -> StepSpeed:
        parts = effective / batch
        seconds = parts * line(batch)
        whole = step(batch, seconds)
        return dataclasses.replace(whole, samples_per_s=effective / seconds)

    found = curve_through({size: accumulated(size) for size in (8, 32, 64)}, 64)
    at = {each.batch_size: each for each in found.steps}
    assert at[48].samples_per_s == pytest.approx(48 / line(48))
    assert at[40].samples_per_s == pytest.approx(40 / line(40))
    trials = refine({8: accumulated(8), 64: accumulated(64)}, 64, accumulated)
    assert recommend(Bounds(64, 64), curve_through(trials, 64), 8).batch == 40  # 95% of the best


def test_a_trial_that_fails_is_not_made_again() -> None:
    asked: list[int] = []

    def measure(batch: int) -> StepSpeed | None:
        asked.append(batch)
        return None if batch > 50 else step(batch, line(batch))

    refine({8: step(8, line(8)), 16: step(16, line(16))}, 400, measure)
    assert len(asked) == len(set(asked)) <= MOST_TRIALS


def test_below_the_present_batch_size_only_where_that_may_be_faster() -> None:
    """It stays where nothing is clearly faster: how much smaller it might be is no news."""
    asked: list[int] = []

    def measure(batch: int) -> StepSpeed:
        asked.append(batch)
        return step(batch, time(batch))

    def time(batch: int) -> float:
        return 1e-3 * batch  # as fast at any

    known = {size: step(size, time(size)) for size in (32, 64)}
    refine(known, 64, measure, least=32)
    assert asked and min(asked) > 32
    refine(known, 64, measure)
    assert min(asked) < 32
    asked.clear()

    def time(batch: int) -> float:  # type: ignore[no-redef]
        return 1e-3 * max(8, batch**2 / 16)

    known = {size: step(size, time(size)) for size in (32, 64)}
    found = refine(known, 64, measure, least=32)
    assert min(found) < 32
    assert recommend(Bounds(64, 64), curve_through(found, 64), 32).batch in (8, 16)


def test_two_sizes_next_to_one_another_promise_nothing_of_smaller_ones() -> None:
    """timm's 32 and 33: the second runs slower kernels, and the line through both promised that
    16 samples were faster still."""
    asked: list[int] = []

    def measure(batch: int) -> StepSpeed:
        asked.append(batch)
        return step(batch, line(batch))

    known = {32: step(32, line(32)), 33: step(33, 1.2 * line(33))}
    refine(known, 64, measure, least=32)
    assert asked and min(asked) > 33


@given(samples=st.integers(64, 600), start=st.sampled_from([8, 16, 24, 40]))
def test_no_run_is_made_beyond_what_a_data_set_lets_be_timed(samples: int, start: int) -> None:
    """Of a run with one step an epoch no step can be timed; the first that is says so."""
    asked: list[int] = []
    bounds: list[int] = []

    def measure(batch: int) -> StepSpeed | None:
        asked.append(batch)
        if batch <= samples // 2:
            return step(batch, line(batch))
        bounds.append(samples // 2)
        return None

    trials = refine(
        {start: step(start, line(start))}, samples, measure, None, lambda: min(bounds, default=None)
    )
    assert len([batch for batch in asked if batch > samples // 2]) <= 1
    assert max(trials) == max(samples // 2, start)


# -- whatever the start: jobs with a law -----------------------------------------------------------


@functools.cache
def recorded(batch: int, width: int, layers: int) -> Recording:
    """Three steps of a perceptron with images of 8 x 8."""
    with trainfit.simulate("RTX 3090", limited=False) as simulation:
        blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        model = nn.Sequential(nn.Conv2d(3, width, 1), nn.Flatten(2), nn.Linear(64, width), *blocks)
        optimizer = torch.optim.AdamW(model.cuda().parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.zeros(batch, 3, 8, 8, device="cuda")).square().mean().backward()
            optimizer.step()
    return simulation.recording


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.sampled_from([32, 64, 256]), st.integers(1, 4))
def test_the_curve_does_not_depend_on_the_pair(width: int, layers: int) -> None:
    """The law of (b, 2b) is one law: the saturation batch size is the same."""
    found = []
    for start in (3, 32):
        pair = [(b, recorded(b, width, layers)) for b in (start, 2 * start)]
        found.append(curve_of(pair, MACHINE, 4096))
    for one, other in itertools.pairwise(found):
        for here, there in zip(one.steps, other.steps, strict=True):
            assert here.seconds == pytest.approx(there.seconds, rel=1e-3)
    assert len({saturation_batch(each) for each in found}) == 1


def test_a_trial_is_timed_by_its_usual_step() -> None:
    """The first step sets the optimizer's state up; it is not what a step takes."""
    recording = recorded(8, 64, 2)
    whole = timed(recording, 8, MACHINE)
    assert whole is not None and whole.batch_size == 8
    pair = [(b, recorded(b, 64, 2)) for b in (8, 16)]
    assert whole.seconds == pytest.approx(curve_of(pair, MACHINE, 8).steps[-1].seconds)
    custom = dataclasses.replace(MACHINE, gpu=find_gpu("custom:24GiB"))
    assert timed(recording, 8, custom) is None


def short_epoch(*sizes: int) -> Trace:
    """A run with batches of these sizes, all of its data set."""
    with trainfit.simulate("RTX 3090", limited=False) as simulation:
        model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for samples in sizes:
            model(torch.zeros(samples, 2048, device="cuda")).square().mean().backward()
            optimizer.step()
    loader = LoaderInfo(
        0, sizes[0], sum(sizes), len(sizes), LoaderSettings(0), "list", None, fed=sizes
    )
    return Trace(TraceOutcome("ended", len(sizes), 1.0, loader=loader), simulation.recording, "")


def test_a_short_last_batch_does_not_pass_for_a_full_one() -> None:
    """Of 2054 samples, the third batch of 1024 has 6."""
    trace = short_epoch(1024, 1024, 6, 6)
    assert full_steps(trace) == 2
    every = timed(recording_of(trace), 1024, MACHINE)
    full = timed(recording_of(trace), 1024, MACHINE, full_steps(trace))
    assert every is not None and full is not None
    assert full.seconds > 2 * every.seconds
    assert full_part(trace).steps == 2
    assert full_steps(dataclasses.replace(trace, recording=None)) is None


def test_an_epoch_has_the_samples_of_its_batches() -> None:
    """Of 2054, six are left out where the last batch is dropped."""
    trace = short_epoch(1024, 1024, 6)
    assert samples_used(trace, 1024) == samples_used(trace, None) == 2054
    loader = trace.outcome.loader
    assert loader is not None
    dropped = dataclasses.replace(loader, drops_last=True)
    outcome = dataclasses.replace(trace.outcome, loader=dropped)
    trace = dataclasses.replace(trace, outcome=outcome)
    assert (samples_used(trace, 1024), samples_used(trace, 4096)) == (2048, 2054)


def test_one_full_step_tells_no_time() -> None:
    """What the script does after it (an average of the weights, say) is of the next, short one."""
    trace = short_epoch(1024, 6)
    assert full_steps(trace) == 1
    assert timed(recording_of(trace), 1024, MACHINE, full_steps(trace)) is None
    alone = short_epoch(1024)
    assert timed(recording_of(alone), 1024, MACHINE, full_steps(alone)) is None
    assert most_timed(trace, 1024) == half_epoch(trace, 1030) == 515
    assert most_timed(alone, 1024) == 512


@pytest.mark.parametrize(("batch", "unit"), [(16, 8), (6, 1), (None, 8)])
def test_batches_have_whole_groups_of_samples(batch: int | None, unit: int) -> None:
    """Completions of a prompt; a script whose batch has none already does not ask for it."""
    plain = short_epoch(6, 6)
    loader = plain.outcome.loader
    assert loader is not None and unit_of(plain, batch) == 1
    outcome = dataclasses.replace(plain.outcome, loader=dataclasses.replace(loader, group=8))
    assert unit_of(dataclasses.replace(plain, outcome=outcome), batch) == unit


def test_a_batch_that_processes_share() -> None:
    """Each of 6 gets 6 samples of 36: other sizes are multiples of 6, and 6 x 8 is a tile."""
    alone = short_epoch(6, 6)
    assert shared_by(alone, 6) == 1
    recording = recording_of(alone)
    six = dataclasses.replace(recording, header={**recording.header, "ranks": 6})
    trace = dataclasses.replace(alone, recording=six)
    assert (shared_by(trace, 36), shared_by(trace, 6), shared_by(trace, None)) == (6, 1, 1)
    assert is_full(trace, 36)
    assert data_set_of(trace, 36) == 72
    assert most_full(trace, 36) == 6 * (most_full(trace, 6) or 0)
    assert batch_sizes(50, 6) == [6, 12, 18, 24, 30, 36, 42, 48]
    grain = Grain(8, 6)
    assert [grain.rounded(size) for size in (5, 17, 48, 100)] == [0, 12, 48, 96]
    steps = tuple(step(size, 1.0 + size / 1000) for size in batch_sizes(400, 6))
    assert saturation_batch(Curve(steps, grain=grain)) == 384
    makeup = StepMakeup(6, 1, 6, "DataLoader", 1).of_all(6)
    assert (makeup.micro_batch, makeup.effective_batch) == (36, 36)


def test_a_short_last_batch_is_no_other_path() -> None:
    """A script that loops over a batch's samples runs few operators for an epoch's last one."""

    def run(batch: int) -> Trace:
        with trainfit.simulate("RTX 3090", limited=False) as simulation:
            model = nn.Linear(8, 8).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            fed = (batch, batch, 40 - 2 * batch) if 40 - 2 * batch < batch else (batch,) * 3
            for samples in fed:
                sum(model(torch.zeros(8, device="cuda")).sum() for _ in range(samples)).backward()  # type: ignore[union-attr]
                optimizer.step()
        loader = LoaderInfo(0, batch, 40, 3, LoaderSettings(0), "list", None, fed=fed)
        return Trace(TraceOutcome("ended", 3, 1.0, loader=loader), simulation.recording, "")

    runs = {size: run(size) for size in (4, 19)}
    whole = {size: recording_of(trace) for size, trace in runs.items()}
    assert other_path(4, whole)
    assert not other_path(4, {size: full_part(trace) for size, trace in runs.items()})


@pytest.mark.parametrize(("memory", "batch"), [(70, 64), (60, 32), (40, 32), (31, 16), (3, 2)])
def test_what_does_not_fit_becomes_a_part_of_it(memory: int, batch: int) -> None:
    """40 of 64 samples: no number of micro-batches makes the same step."""
    one = EffectiveBatch(accumulating().command, StepMakeup(64, 1, 64, "DataLoader", 1), 64)
    flat = curve(lambda size: 1.0 + size / 100, memory)
    found = recommend(Bounds(memory), flat, 64, effective=one)
    assert found.batch == batch
    kept = accumulation_for(one.command, one.makeup, 64, batch)
    assert (f"after every {64 // batch} batches" in kept.action) == (batch < 64)
    # A data set of fewer samples than a batch is no matter of memory.
    short = curve(lambda size: 1.0 + size / 100, 40)
    assert recommend(Bounds(500, 40), short, 64, effective=one).batch == 40
    # Where a noise scale asks for fewer samples, that is what is wanted.
    assert accumulation_for(one.command, one.makeup, 64, batch, batch).action == ""


def test_accumulation_divides_the_step() -> None:
    """Micro-batches of 12, four a step: of 10, five would be 50 samples."""
    words = ("python", "-m", "json.tool", "{batch_size:12}", "{grad_accum:4}")
    makeup = StepMakeup(12, 4, 48, "DataLoader", 4)
    kept = EffectiveBatch(parse_command(words), makeup, 12)
    found = recommend(Bounds(10), curve(lambda size: 1.0, 10), 12, effective=kept)
    assert found.batch == 8 and kept.samples_at(8) == 48


@pytest.mark.parametrize(
    ("is_kept", "data_set", "most"),
    [(True, None, 32), (True, 20, 20), (False, None, LARGEST), (False, 100, 100)],
)
def test_none_is_tried_that_is_larger_than_the_step_that_a_script_keeps(
    is_kept: bool, data_set: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LitGPT refuses micro-batches that are larger than its global batch size."""
    effective = accumulating()
    assert effective.makeup is not None
    makeup = dataclasses.replace(effective.makeup, is_kept=is_kept)
    effective = dataclasses.replace(effective, makeup=makeup)
    monkeypatch.setattr(sizing, "data_set_of", lambda *_: data_set)
    monkeypatch.setattr(BatchSizes, "_effective", lambda *_: effective)
    tried: list[int] = []

    def noted(*_: Any, most: int, **__: Any) -> Any:
        tried.append(most)
        raise LookupError

    monkeypatch.setattr(sizing, "search", noted)
    sizes = BatchSizes.__new__(BatchSizes)
    sizes._thorough, sizes._grain = True, Grain()
    sizes._memory_model = sizes._attempts = MagicMock()
    trace = MagicMock()
    trace.outcome.loader = None
    with pytest.raises(LookupError):
        sizes._by_trial({8: trace}, 8, AS_WRITTEN, AS_WRITTEN, "a test")
    assert tried == [most]
