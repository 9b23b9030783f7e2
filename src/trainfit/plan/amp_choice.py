"""Which mixed precision a job is to run in, among those that its command can express."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.plan.batches import Batches
from trainfit.plan.launch import ACCELERATE, PRECISIONS
from trainfit.plan.runs import Variant
from trainfit.plan.tracing import Trace
from trainfit.results.plan import AmpChoice, Configuration

#: Samples a second that another setting must win: what is less the model cannot tell apart.
LEAST_GAIN: Final = 0.05


@dataclasses.dataclass(frozen=True)
class AmpSetting:
    """One setting of AMP: ``value`` is for the placeholder (``None``: the command cannot say it),
    ``variant`` its runs, ``trace`` that at the present batch size, with what follows from it.

    ``samples_per_s`` are those at the batch size that is recommended for the present setting, where
    it was simulated there because nothing tells its own (``None``: it was not).
    """

    value: str | None
    variant: Variant
    trace: Trace
    configuration: Configuration
    batches: Batches
    samples_per_s: float | None = None

    @property
    def dtype(self) -> str:
        """What autocast computes in, or "off"."""
        return self.configuration.amp

    @property
    def runs(self) -> bool:
        """Does the job fit, at its present batch size or another?"""
        return self.configuration.fits or bool(self.configuration.recommended_batch)


def choose_amp(present: AmpSetting, others: Sequence[AmpSetting], gpu: GpuSpec) -> AmpChoice | None:
    """The setting with clearly the most samples a second; the present one where none has.

    Never one that computes in bfloat16 on a GPU that emulates it, nor one that does not fit.
    ``None`` where no other is known.
    """
    if not others:
        return None
    rates, where = _rates(present, others)
    emulated = {each.dtype for each in (present, *others) if is_emulated(each.dtype, gpu)}
    able = [
        each
        for each in others
        if each.value is not None and each.runs and each.dtype not in emulated
    ]
    best = max(able, key=lambda each: rates.get(each.dtype, 0.0), default=None)
    if best is not None and not present.runs:
        chosen, why = best, f"AMP {present.dtype} does not fit"
    elif not rates:
        chosen, why = present, "no throughput prediction tells the settings apart"
    elif best is not None and rates[best.dtype] > (1 + LEAST_GAIN) * rates[present.dtype]:
        chosen, why = best, _compared(best, present, rates) + where
    else:
        chosen, why = present, _kept(present, others, rates) + where
    if present.dtype in emulated:
        why = f"bfloat16 is emulated on {gpu.key}; {why}"
    return AmpChoice(
        chosen.value,
        chosen.dtype,
        f"AMP {chosen.dtype}: {why}",
        None if chosen is present else chosen.configuration,
        rates,
        _by_hand(present, others, chosen, rates, emulated, where),
    )


def is_emulated(dtype: str | None, gpu: GpuSpec) -> bool:
    """Does the GPU compute in this dtype by way of another?"""
    return dtype == "bfloat16" and not gpu.supports_bf16


def _rates(present: AmpSetting, others: Sequence[AmpSetting]) -> tuple[Mapping[str, float], str]:
    """Samples a second of each dtype, at the batch size that is recommended for it.

    Where one of them is not known there, all at the present batch size, which is told in words
    where it is not the recommended one; empty where that is not known.
    """
    settings, batch = [present, *others], present.configuration.batch_size
    elsewhere = batch is not None and present.batches.recommended not in (None, 0, batch)
    told = f" at batch size {batch}" if elsewhere else ""
    for of, where in ((_at_recommended, ""), (_at_present, told)):
        rates = {each.dtype: of(each) for each in settings}
        found = {dtype: rate for dtype, rate in rates.items() if rate is not None}
        if len(found) == len(rates):
            return found, where
    return {}, ""


def _at_recommended(setting: AmpSetting) -> float | None:
    best = setting.batches.recommended
    steps = (step for step in setting.batches.curve.steps if step.batch_size == best)
    return next((step.samples_per_s for step in steps), setting.samples_per_s)


def _at_present(setting: AmpSetting) -> float | None:
    batch, seconds = setting.configuration.batch_size, setting.configuration.step_s
    # Where the batch size is not known it is the same for all.
    return (batch or 1) / seconds if seconds else None


def _compared(one: AmpSetting, other: AmpSetting, rates: Mapping[str, float]) -> str:
    gain = rates[one.dtype] / rates[other.dtype]
    return f"{gain:.2f} times the samples/s of {_named(other.dtype)} (predicted)"


def _kept(present: AmpSetting, others: Sequence[AmpSetting], rates: Mapping[str, float]) -> str:
    rival = max(others, key=lambda each: rates[each.dtype])
    gain = rates[present.dtype] / rates[rival.dtype]
    if gain > 1 + LEAST_GAIN:
        return _compared(present, rival, rates)
    if gain < 1 - LEAST_GAIN:
        return "kept; what is faster needs a change of the script"
    return f"kept, {_named(rival.dtype)} gives about as many samples/s (predicted)"


def _by_hand(
    present: AmpSetting,
    others: Sequence[AmpSetting],
    chosen: AmpSetting,
    rates: Mapping[str, float],
    emulated: set[str],
    at: str,
) -> str:
    """A faster setting that only a change of the script would give; or nothing."""
    hidden = [each for each in others if each.value is None and each.dtype not in emulated]
    best = max(hidden, key=lambda each: rates.get(each.dtype, 0.0), default=None)
    if best is None or not rates or rates[best.dtype] <= (1 + LEAST_GAIN) * rates[chosen.dtype]:
        return ""
    gain = rates[best.dtype] / rates[chosen.dtype]
    text = f"{_named(best.dtype)} would give {gain:.2f} times as many samples/s{at} (predicted)"
    where = _shown(present.trace.outcome.autocast_at or best.trace.outcome.autocast_at or "")
    if best.dtype == "off":
        return text + ": switch it off in the script"
    precision = PRECISIONS.get(best.dtype)
    if present.trace.outcome.accelerate == "no" and precision:
        return f"{text}: set {ACCELERATE}={precision} before the command"
    place = f": change autocast's dtype at {where}" if where else ": put autocast around the model"
    return text + place + (", with a GradScaler" if best.dtype == "float16" else "")


def _named(dtype: str) -> str:
    return "no AMP" if dtype == "off" else dtype


def _shown(place: str) -> str:
    """A line of the user's, from the working directory where it is below."""
    with contextlib.suppress(ValueError):
        return str(Path(place).relative_to(Path.cwd()))
    return place
