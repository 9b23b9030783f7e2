"""Which mixed precision is chosen, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest

from trainfit.hardware import find_gpu
from trainfit.plan.amp_choice import AmpSetting, choose_amp
from trainfit.plan.batches import Batches
from trainfit.plan.runs import AS_WRITTEN
from trainfit.plan.speed import Curve
from trainfit.plan.tracing import Trace
from trainfit.plan.tunables import float16_amp
from trainfit.results.plan import AmpChoice, Configuration, MemoryFigures
from trainfit.results.speed import StepSpeed
from trainfit.results.trace import TraceOutcome

T4, RTX = find_gpu("T4"), find_gpu("RTX 3090")


def setting(
    dtype: str,
    rate: float | None,
    value: str | None = None,
    *,
    fits: bool = True,
    curve: bool = True,
) -> AmpSetting:
    """With so many samples a second at its recommended batch size, 64, and at 8."""
    seconds = None if rate is None else 8 / rate
    steps = ()
    if rate is not None and curve:
        steps = (StepSpeed(64, 64 / rate, (0.0, 1.0), 0.0, 0.0, 0.0, "launches", rate),)
    best = 64 if fits else 0
    configuration = Configuration(
        8, dtype, MemoryFigures(0, 0, 0, 0, (0, 0)), fits, {}, {}, (), best, best, step_s=seconds
    )
    outcome = TraceOutcome(
        "finished", 3, 1.0, autocast_at="train.py:57" if dtype != "off" else None
    )
    batches = Batches("two traces", recommended=best, curve=Curve(steps))
    return AmpSetting(value, AS_WRITTEN, Trace(outcome, None, ""), configuration, batches)


def chosen(*settings: AmpSetting, gpu: str = "T4") -> AmpChoice:
    found = choose_amp(settings[0], settings[1:], find_gpu(gpu))
    assert found is not None
    return found


def test_an_emulated_bfloat16_loses_against_no_amp() -> None:
    """ACT on a T4: 732 ms in bfloat16, 591 without AMP, 323 in float16."""
    found = chosen(
        setting("bfloat16", 8 / 0.732, "true"),
        setting("off", 8 / 0.591, "false"),
        setting("float16", 8 / 0.323),
    )
    assert (found.value, found.dtype) == ("false", "off")
    assert found.configuration is not None and found.configuration.amp == "off"
    assert found.reason == (
        "AMP off: bfloat16 is emulated on T4; 1.24 times the samples/s of bfloat16 (predicted)"
    )
    assert found.by_hand == (
        "float16 would give 1.83 times as many samples/s (predicted): change autocast's dtype at "
        "train.py:57, with a GradScaler"
    )


def test_never_towards_an_emulated_bfloat16() -> None:
    found = chosen(setting("off", 10.0, "no"), setting("bfloat16", 30.0, "bf16"))
    assert (found.value, found.configuration) == ("no", None)
    both = chosen(
        setting("off", 10.0, "no"),
        setting("bfloat16", 30.0, "bf16"),
        setting("float16", 20.0, "fp16"),
    )
    assert (both.value, both.dtype) == ("fp16", "float16")


@pytest.mark.parametrize(
    ("off", "value"), [(100.0, "true"), (104.0, "true"), (106.0, "false"), (50.0, "true")]
)
def test_a_gain_that_the_model_cannot_tell_changes_nothing(off: float, value: str) -> None:
    found = chosen(setting("bfloat16", 100.0, "true"), setting("off", off, "false"), gpu="RTX 3090")
    assert found.value == value
    assert ("about as many" in found.reason) == (off in (100.0, 104.0))


def test_amp_is_switched_on_where_it_pays() -> None:
    found = chosen(setting("off", 100.0, "no"), setting("bfloat16", 190.0, "bf16"), gpu="RTX 3090")
    assert (found.value, found.dtype) == ("bf16", "bfloat16")
    assert "1.90 times the samples/s of no AMP" in found.reason


def test_a_command_that_cannot_say_it_keeps_what_it_has() -> None:
    found = chosen(setting("off", 100.0), setting("bfloat16", 190.0), gpu="RTX 3090")
    assert (found.value, found.configuration) == (None, None)
    assert "bfloat16 would give 1.90 times as many" in found.by_hand


def test_what_does_not_fit_is_left_for_what_does() -> None:
    off = setting("off", None, "false", fits=False)
    found = chosen(off, setting("bfloat16", None, "true"), gpu="RTX 3090")
    assert found.value == "true" and "does not fit" in found.reason


def test_without_step_times_it_stays_and_says_so() -> None:
    found = chosen(setting("off", None, "no"), setting("bfloat16", None, "bf16"), gpu="RTX 3090")
    assert found.value == "no" and "no throughput prediction" in found.reason
    assert choose_amp(setting("off", None), [], RTX) is None


def test_all_are_compared_at_the_present_batch_where_one_has_no_curve() -> None:
    bare = setting("bfloat16", 50.0, "bf16", curve=False)
    assert chosen(setting("off", 100.0, "no"), bare, gpu="RTX 3090").value == "no"
    hidden = dataclasses.replace(bare, value=None)  # 64 is recommended
    told = chosen(setting("off", 10.0, "no"), hidden, gpu="RTX 3090")
    assert "5.00 times as many samples/s at batch size 8 (predicted)" in told.by_hand
    unknown = dataclasses.replace(
        bare, configuration=dataclasses.replace(bare.configuration, step_s=None)
    )
    assert chosen(setting("off", 100.0, "no"), unknown).samples_per_s == {}


def test_a_setting_without_a_curve_is_compared_at_the_recommended_batch() -> None:
    """Without AMP a step of 8 is faster, one of 64 slower: launches against bandwidth."""
    small = setting("off", 150.0, curve=False)
    assert chosen(setting("bfloat16", 100.0), small, gpu="RTX 3090").by_hand
    simulated = dataclasses.replace(small, samples_per_s=60.0)
    found = chosen(setting("bfloat16", 100.0), simulated, gpu="RTX 3090")
    assert found.by_hand == "" and found.samples_per_s == {"bfloat16": 100.0, "off": 60.0}


@pytest.mark.parametrize(
    ("words", "value", "float16"),
    [
        (["--amp={amp:true}"], "true", None),
        (["--mixed_precision={amp:no}"], "no", "fp16"),
        (["--amp={amp:no}"], "no", None),  # a switch: "yes" is the other
        (["--mixed_precision", "{amp:bf16}"], "bf16", "fp16"),
        (["--precision={amp:32-true}"], "32-true", "16-mixed"),
        (["--dtype={amp:float32}"], "float32", "float16"),
    ],
)
def test_how_the_command_would_say_float16(
    words: list[str], value: str, float16: str | None
) -> None:
    assert float16_amp(words, {"amp": value}) == float16
    assert float16_amp(["x"], {}) is None
