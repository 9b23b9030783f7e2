"""Inference whose memory grows from call to call, as with the KV cache of ``generate()``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware import find_gpu
from trainfit.memory.growth import step_pattern
from trainfit.memory.replay import Stream, replay
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.tracing import Trace, Tracer
from trainfit.report.steps import pattern_notes
from trainfit.results.runs.generation import generated_text
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.steps import GrowthSource, StepPattern
from trainfit.scripts.steps import CacheWatch

pytestmark = pytest.mark.usefixtures("warm")

SCRIPT = Path(__file__).parents[1] / "training_scripts" / "generating.py"
KIB, MIB = 1 << 10, 1 << 20


def watched(ends: Sequence[int]) -> CacheWatch:
    """What a watch has seen after calls that left these bytes in use."""
    simulation: Any = SimpleNamespace(allocator=SimpleNamespace())
    watch = CacheWatch(simulation)
    for nbytes in ends:
        simulation.allocator.requested_bytes = nbytes
        watch.note_call()
    return watch


@given(start=st.integers(0, 1 << 40), growths=st.lists(st.integers(1, 1 << 30), min_size=4))
def test_a_cache_grows_until_it_is_let_go(start: int, growths: list[int]) -> None:
    ends = [start]
    for growth in growths:
        ends.append(ends[-1] + growth)
    assert watched(ends).grows() and not watched(ends).released()
    after = watched([*ends, ends[-1] - 1])
    assert not after.grows() and after.released()


@given(bytes_=st.integers(0, 1 << 40), calls=st.integers(1, 9))
def test_the_same_in_each_call_is_no_growth(bytes_: int, calls: int) -> None:
    watch = watched([bytes_] * calls)
    assert not watch.grows() and not watch.released()


def traced(tokens: int, steps: int | None = None) -> Trace:
    words = ["python", str(SCRIPT), f"--tokens={tokens}"]
    with Tracer(parse_command(words), find_gpu("RTX 4090"), steps=steps) as tracer:
        return tracer.trace(RunSpec(count="calls"))


@pytest.mark.parametrize("tokens", [40, 250])
def test_the_peak_is_at_the_end_of_the_growth(tokens: int) -> None:
    """After the prompt and 17 tokens the others are counted, up to the next prompt."""
    trace, every = traced(tokens), traced(tokens, 1 + tokens)
    found, full = trace.recording, every.recording
    assert found is not None and full is not None
    assert (trace.outcome.steps, every.outcome.steps) == (18, 1 + tokens)
    text = generated_text(found)
    assert text is not None and (text.rows, text.prompt, text.new_tokens) == (4, 32, 1 + tokens)
    pattern = step_pattern(found, reserved_bytes=0)
    assert (pattern.course, pattern.unit) == ("growing", "model call")
    assert pattern.growth_bytes_per_step == 4 * KIB
    ends = [replay(Stream.of(each)) for each in (found, full)]
    assert len({(each.peak_allocated, each.peak_reserved) for each in ends}) == 1
    assert ends[0].step_peaks[-1] == ends[1].step_peaks[-1]


def test_a_few_tokens_are_simulated_one_by_one() -> None:
    trace = traced(9)
    assert trace.recording is not None and trace.recording.simulated is None
    text = generated_text(trace.recording)
    # The next prompt and its first token ended the run: of both texts it is the longer one.
    assert trace.outcome.steps == 12 and text is not None
    assert (text.prefill, text.new_tokens, text.calls_left) == (0, 10, 0)


def test_it_is_called_a_cache_and_no_leak() -> None:
    pattern = StepPattern(
        "growing", 152, (1, 2), (1, 2), growth_bytes_per_step=8 * KIB, steps_until_full=3041478,
        unit="model call",
    )  # fmt: skip
    (text,) = pattern_notes(pattern)
    assert text == (
        "memory grows by 8 KiB with each model call, as the KV cache of generated text does: the "
        "figures are for the end of the 152 calls simulated, and each further call (a longer "
        "prompt, more new tokens) needs 8 KiB more; the GPU would be full after about 3,041,478 "
        "calls"
    )
    assert "leak" not in text and "optimizer" not in text


def test_predictions_that_are_kept_are_no_cache() -> None:
    """Made outside of the model's modules: as the logits that an evaluation concatenates."""
    logits = GrowthSource(31 * MIB, "aten.cat.default", "", "temporary", "forward", "eval.py:7")
    pattern = StepPattern(
        "growing", 15, (1, 2), (1, 2), growth_bytes_per_step=31 * MIB, steps_until_full=775,
        unit="model call", sources=(logits,),
    )  # fmt: skip
    (text,) = pattern_notes(pattern)
    assert "KV cache" not in text and "output.detach().cpu()" in text
    assert "about 775 calls; the script keeps 31 MiB a step of temporaries" in text
    made_by_the_model = dataclasses.replace(logits, module="Model.layers.0.attention")
    (cache,) = pattern_notes(dataclasses.replace(pattern, sources=(made_by_the_model,)))
    assert "KV cache" in cache
    of_graph = dataclasses.replace(made_by_the_model, operator="aten.relu.default")
    (kept,) = pattern_notes(dataclasses.replace(pattern, sources=(of_graph,)))
    assert "KV cache" not in kept and "torch.no_grad()" in kept
