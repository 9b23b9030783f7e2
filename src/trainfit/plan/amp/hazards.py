"""Hazards of a precision, observed in a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.plan.amp.by_hand import place_of
from trainfit.plan.amp.kernels import outside_autocast, step_parts
from trainfit.plan.runs.tracing import Trace
from trainfit.results.format import percent
from trainfit.results.plan.amp import AmpHazard
from trainfit.results.runs.trace import TraceOutcome
from trainfit.speed.model.step import Machine

#: Capabilities whose float16 arithmetic is slower than float32's, or missing (CUDA C++ Programming
#: Guide, table "Throughput of Native Arithmetic Instructions": 6.1 does 2 of 128 a clock).
_SLOW_HALF: Final = ((5, 0), (5, 2), (6, 1))
#: Share of a step's time from which it is told what autocast runs in float32.
_TOLD: Final = 0.1
_NAMED: Final = 3


def is_native(dtype: str, gpu: GpuSpec) -> bool:
    """Does the GPU have units that are faster in it? float32 ("off") counts."""
    if dtype == "off":
        return True
    return gpu.has_tensor_cores and (gpu.supports_bf16 or dtype != "bfloat16")


def is_bearable(dtype: str, gpu: GpuSpec) -> bool:
    """May it be asked for where nothing else fits? Neither emulated nor slower than float32."""
    return is_native(dtype, gpu) or (dtype == "float16" and gpu.capability not in _SLOW_HALF)


def of_gpu(dtype: str, gpu: GpuSpec) -> Iterator[AmpHazard]:
    """What the GPU does with the dtype."""
    if is_native(dtype, gpu):
        return
    if dtype == "bfloat16" and not gpu.supports_bf16:
        text = f"bfloat16 is emulated on {gpu.key}"
        yield AmpHazard("emulated", dtype, text, blocks=True)
        return
    text = f"{gpu.key} has no Tensor cores: it computes no faster in {dtype}"
    yield AmpHazard("no tensor cores", dtype, text, blocks=True)


def of_run(
    dtype: str, trace: Trace, machine: Machine, *, is_own: bool, trains: bool
) -> Iterator[AmpHazard]:
    """What a run under autocast showed, for ``dtype``.

    ``is_own``: the script itself asked for that dtype in the run, with its own scaler or without.
    """
    seen = trace.outcome.amp
    if dtype == "float16" and trains and not seen.scaled and (is_own or not seen.framework):
        made = seen.scaler_at and f"the GradScaler of {place_of(seen.scaler_at)} is switched off"
        yield AmpHazard(
            "no scaler",
            dtype,
            f"{made or 'no GradScaler scales the loss'}: gradients below 6e-8 become 0 in float16",
            seen.scaler_at or "",
            "scale the loss by torch.amp.GradScaler, or compute in bfloat16",
            blocks=True,
        )
    yield from _foreign(dtype, seen.functions, "custom function")
    yield from _foreign(dtype, seen.operators, "custom operator")
    if trace.recording is None:
        return
    # Where autocast was forced around the model alone, it is not the script that left them out.
    if dtype == "float16" and (is_own or trace.outcome.autocast_at is not None):
        outside = outside_autocast(trace.recording, trace.outcome.autocast or dtype)
        if outside:
            names = ", ".join(sorted(outside)[:_NAMED])
            yield AmpHazard(
                "outside autocast",
                dtype,
                f"{names} of float16 tensors outside autocast: results above 65504 become inf",
                next(iter(outside.values())),
                "compute them within the autocast region, or on tensor.float()",
            )
    parts = step_parts(trace.recording, machine)
    if parts is not None and parts.float32_share >= _TOLD:
        largest = sorted(parts.float32_s, key=lambda name: -parts.float32_s[name])[:_NAMED]
        yield AmpHazard(
            "float32 operators",
            dtype,
            f"autocast runs {', '.join(largest)} in float32: {percent(parts.float32_share)} of the "
            "kernels' time",
            share=parts.float32_share,
        )


def _foreign(dtype: str, found: Mapping[str, str], kind: str) -> Iterator[AmpHazard]:
    """Code that autocast does not know; ``found`` are names with places."""
    for full_name, place in found.items():
        name = full_name.removeprefix("__main__.")
        if kind == "custom function":
            text = f"{name} has no custom_fwd: its backward pass runs without autocast"
            remedy = 'decorate forward and backward with torch.amp.custom_fwd(device_type="cuda") '
            remedy += "and custom_bwd"
            yield AmpHazard("custom function", dtype, text, place, remedy)
        else:
            text = f"operator {name} has no autocast rule: it gets operands of several dtypes"
            remedy = "register one with torch.library.register_autocast"
            yield AmpHazard("custom operator", dtype, text, place, remedy)


def of_failure(dtype: str, outcome: TraceOutcome, message: str) -> AmpHazard:
    """A run in ``dtype`` that raised; ``message`` is what it is called in a note."""
    place, text = outcome.location or "", outcome.message
    if "without overflow" in text:
        return AmpHazard(
            "overflow",
            dtype,
            "a number is beyond float16's 65504: PyTorch raises "
            '"value cannot be converted … without overflow"',
            place,
            'use float("-inf") or torch.finfo(tensor.dtype).min for it',
            blocks=True,
        )
    if "unsafe to autocast" in text:
        return AmpHazard(
            "fails",
            dtype,
            "binary_cross_entropy (BCELoss) raises an error under autocast, as its gradients "
            "overflow",
            place,
            "use BCEWithLogitsLoss on the logits, without the sigmoid",
            blocks=True,
        )
    return AmpHazard("fails", dtype, message, place, blocks=True)
