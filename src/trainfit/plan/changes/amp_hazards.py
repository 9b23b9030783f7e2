"""What a run shows of a mixed precision: what autocast casts, hazards, the lines to change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.findings.habits import UNSCALED
from trainfit.findings.source_code import from_here
from trainfit.hardware import GpuSpec
from trainfit.memory.replay import Replay, Stream, live_at
from trainfit.plan.command.tunables import FRAMEWORKS
from trainfit.plan.runs.tracing import Trace
from trainfit.plan.sizing.costing import has_rates
from trainfit.results.configuration import amp_hazard
from trainfit.results.findings import Finding, Place
from trainfit.results.runs.recording import KINDS, PHASES, IntArray, Recording
from trainfit.results.runs.steps import DTYPES, HOST_COPIES
from trainfit.results.runs.trace import TraceOutcome
from trainfit.results.text import percent
from trainfit.simgpu.operators.autocast_lists import policies
from trainfit.speed.step import HostedGpu, TimedWork
from trainfit.speed.work import Work, steady

# ---
# What to change in a script for mixed precision, and where.


_SCALER = (
    'scaler = torch.amp.GradScaler("cuda") before the loop, scaler.scale(loss).backward(), '
    "scaler.step(optimizer) and scaler.update()"
)


def line_for(dtype: str, outcome: TraceOutcome, *, has: str | None) -> tuple[str, str]:
    """The place in the script (empty: not known) and what to write there for ``dtype``.

    ``outcome`` is of a run with autocast, if there is one; ``has`` the dtype that the script itself
    has there (``None``: none, or not known).
    """
    amp = outcome.amp
    if amp.framework:
        return place_of(amp.framework_at), FRAMEWORKS[amp.framework].with_precision(dtype)
    needs_scaler = dtype == "float16" and not amp.scaled
    made_at = place_of(amp.scaler_at)
    enabled = 'torch.amp.GradScaler("cuda") enabled'
    if needs_scaler and has == dtype:
        return (made_at, enabled) if made_at else ("", _SCALER)
    scaler = f"; {made_at}: {enabled}" if made_at else f"; {_SCALER}"
    scaler = scaler if needs_scaler else ""
    if outcome.autocast_at is not None:
        written = "enabled=False" if dtype == "off" else f"dtype=torch.{dtype}"
        return place_of(outcome.autocast_at), f'torch.autocast("cuda", {written}){scaler}'
    around = "around the forward pass and the loss"
    written = f'with torch.autocast("cuda", dtype=torch.{dtype}): {around}{scaler}'
    return place_of(amp.forward_at), written


def place_of(place: str | None) -> str:
    """A line of the user's, from the working directory where it is below; empty: none."""
    return (from_here(place) or place) if place else ""


# ---
# Operators of a run under autocast: cast, in float32 or in half precision.


Mask = NDArray[np.bool_]

#: Operators that copy a tensor into another dtype or to another place.
CASTS = frozenset({"to_copy"})
#: Of what autocast runs in float32, whose results leave float16's range for moderate operands.
OVERFLOWING = frozenset(
    {
        *("exp", "expm1", "pow", "cosh", "sinh", "tan", "reciprocal", "rsqrt"),
        *("sum", "prod", "cumsum", "cumprod", "linalg_vector_norm", "dist", "cdist"),
        *("mse_loss", "renorm"),
    }
)
_BEFORE = ("native_", "fused_")
_BEHIND = ("_forward", "_backward_data", "_backward")
_OPTIMIZER, _FORWARD = PHASES.index("optimizer"), PHASES.index("forward")


@functools.cache
def float32_operators() -> frozenset[str]:
    """Plain names of what autocast runs in float32, from the lists of the installed PyTorch."""
    listed = policies()
    names = (*listed["float32"], *listed["set_dtype"], *listed["append_dtype"])
    return frozenset(plain_name(name.replace("::", ".")) for name in names)


@functools.cache
def plain_name(recorded: str) -> str:
    """An operator's name as autocast's lists and users have it: "layer_norm" for
    "aten.native_layer_norm_backward.default"."""
    name = recorded.partition(".")[2].partition(".")[0].lstrip("_")
    for word in _BEFORE:
        name = name.removeprefix(word)
    for word in _BEHIND:
        name = name.removesuffix(word)
    return name


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The typical step under autocast: seconds of all its kernels on the GPU, and of those of the
    optimizer, of casts, and of what autocast runs in float32, by operator; ``casts`` are the
    launches of casts."""

    gpu_s: float
    optimizer_s: float
    casts_s: float
    float32_s: dict[str, float]
    casts: int

    @property
    def float32_share(self) -> float:
        """Share of the kernels' time of operators that autocast runs in float32."""
        return sum(self.float32_s.values()) / self.gpu_s if self.gpu_s > 0 else 0.0


def step_parts(recording: Recording, machine: HostedGpu) -> StepParts | None:
    """``None`` where the step's kernels are not known, or not told from what is done once."""
    step = steady(recording) if recording.steps and len(recording.kernel_op) else 0
    if not step or not has_rates(machine.gpu):
        return None
    work = Work.of_step(recording, step)
    ops = np.flatnonzero(recording.op_step == step)[0] + work.op
    seconds = TimedWork(work, machine).seconds
    in_optimizer = recording.op_phase[ops] == _OPTIMIZER
    cast = _is(recording, CASTS.__contains__)[ops] & ~in_optimizer
    kept = _is(recording, float32_operators().__contains__)[ops] & ~in_optimizer
    kept &= work.column("dtype") == DTYPES.index("float32")
    names = [plain_name(recording.strings[code]) for code in recording.op_name[ops[kept]]]
    by_name: dict[str, float] = {}
    for name, each in zip(names, seconds[kept].tolist(), strict=True):
        by_name[name] = by_name.get(name, 0.0) + each
    # Copies from the host are no casts and have no time here.
    on_gpu = cast & ~work.is_kind(*HOST_COPIES)
    return StepParts(
        float(seconds.sum()),
        float(seconds[in_optimizer].sum()),
        float(seconds[on_gpu].sum()),
        by_name,
        int(work.column("launches")[on_gpu].sum()),
    )


def outside_autocast(recording: Recording, dtype: str) -> dict[str, str]:
    """Operators of :data:`OVERFLOWING` that ran in autocast's ``dtype`` in the forward pass, hence
    where autocast was off, each with the user's line (empty: not known)."""
    ops = recording.kernel_op
    half = (recording.kernel_dtype == DTYPES.index(dtype)) & (ops >= 0)
    ops = np.unique(ops[half])
    ops = ops[recording.op_phase[ops] == _FORWARD]
    ops = ops[_is(recording, OVERFLOWING.__contains__)[ops]]
    found: dict[str, str] = {}
    for op in ops.tolist():
        found.setdefault(plain_name(recording.strings[recording.op_name[op]]), _line(recording, op))
    return found


@dataclasses.dataclass(frozen=True)
class PeakParts:
    """Bytes at the peak of a run under autocast, by whether autocast makes them fewer: ``state``
    are parameters, buffers, gradients and the optimizer's, which keep their dtype; ``casts``
    copies that autocast made; ``float32`` results of what it runs in float32; ``promoted`` other
    results that are in float32, because an operand was, most of them made at the user's line
    ``promoted_at`` (empty: not known); ``fixed`` inputs and workspaces; ``rest`` what is in half
    precision, or no floating-point number."""

    state: int
    casts: int
    float32: int
    promoted: int
    fixed: int
    rest: int
    promoted_at: str = ""

    @property
    def total(self) -> int:
        return self.state + self.casts + self.float32 + self.promoted + self.fixed + self.rest


def peak_parts(recording: Recording, stream: Stream, outcome: Replay) -> PeakParts:
    """The composition of the peak."""
    live = live_at(stream, outcome.peak_event)
    sizes, kinds, ops = outcome.granted[live], recording.alloc_kind[live], recording.alloc_op[live]
    made = ops >= 0
    state = np.isin(kinds, _codes("parameter", "buffer", "gradient", "optimizer_state"))
    fixed = np.isin(kinds, _codes("input", "workspace", "data", "bucket"))
    free = made & ~state & ~fixed
    cast = free & _is(recording, CASTS.__contains__)[ops]
    kept = free & ~cast & _is(recording, float32_operators().__contains__)[ops]
    promoted = free & ~cast & ~kept & _computes_in_float32(recording)[ops]
    state_, casts, float32, wide, fixed_ = (
        int(sizes[each].sum()) for each in (state, cast, kept, promoted, fixed)
    )
    rest = int(sizes.sum()) - (state_ + casts + float32 + wide + fixed_)
    at = _most_at(recording, live[promoted], sizes[promoted])
    return PeakParts(state_, casts, float32, wide, fixed_, rest, at)


def _most_at(recording: Recording, allocations: IntArray, sizes: IntArray) -> str:
    """The user's line that made the most of these; empty where that is not known."""
    lines = recording.alloc_line[allocations]
    if not (lines >= 0).any():
        return ""
    totals = np.bincount(lines[lines >= 0], weights=sizes[lines >= 0])
    return recording.strings[int(totals.argmax())]


def _computes_in_float32(recording: Recording) -> Mask:
    """A mask of the operators that compute in float32, by their kernels; an entry more, so that -1
    is none."""
    codes = [DTYPES.index(name) for name in ("float32", "tfloat32")]
    wide = np.isin(recording.kernel_dtype, codes) & (recording.kernel_op >= 0)
    zeros = np.zeros(len(recording.op_name) + 1, dtype=np.bool_)
    zeros[recording.kernel_op[wide]] = True
    return zeros


def _codes(*names: str) -> list[int]:
    return [KINDS.index(name) for name in names]


def _is(recording: Recording, wanted: Callable[[str], bool]) -> Mask:
    """A mask of the operators whose plain name is ``wanted``; an entry more, so that -1 is none."""
    names = np.array([wanted(plain_name(name)) for name in recording.strings], dtype=np.bool_)
    return np.append(names[recording.op_name], False)


def _line(recording: Recording, op: int) -> str:
    lines = recording.alloc_line[recording.alloc_op == op]
    known = lines[lines >= 0]
    return recording.strings[known[0]] if len(known) else ""


#: Capabilities whose float16 arithmetic is slower than float32's, or missing (CUDA C++ Programming
#: Guide, table "Throughput of Native Arithmetic Instructions": 6.1 does 2 of 128 a clock).
_SLOW_HALF: Final = ((5, 0), (5, 2), (6, 1))
#: Share of a step's time from which it is told what autocast runs in float32.
_TOLD: Final = 0.1
_NAMED: Final = 3


#: The hazard of float16 whose gradients nobody scales.
_NO_SCALER: Final = "no scaler"
#: That of no AMP, for a model whose own weights are in float16.
_WEIGHTS: Final = "float16 weights"


def is_native(dtype: str, gpu: GpuSpec) -> bool:
    """Does the GPU have units that are faster in it? float32 ("off") counts."""
    if dtype == "off":
        return True
    return gpu.has_tensor_cores and (gpu.supports_bf16 or dtype != "bfloat16")


def is_bearable(dtype: str, gpu: GpuSpec) -> bool:
    """May it be asked for where nothing else fits? Neither emulated nor slower than float32."""
    return is_native(dtype, gpu) or (dtype == "float16" and gpu.capability not in _SLOW_HALF)


def of_gpu(dtype: str, gpu: GpuSpec) -> Iterator[Finding]:
    """What the GPU does with the dtype."""
    if is_native(dtype, gpu):
        return
    if dtype == "bfloat16" and not gpu.supports_bf16:
        text = f"bfloat16 is emulated on {gpu.key}"
        yield amp_hazard("emulated", dtype, text, blocks=True)
        return
    text = f"{gpu.key} has no Tensor cores: it computes no faster in {dtype}"
    yield amp_hazard("no tensor cores", dtype, text, blocks=True)


def of_run(
    dtype: str, trace: Trace, machine: HostedGpu, *, is_own: bool, trains: bool
) -> Iterator[Finding]:
    """What a run under autocast showed, for ``dtype``.

    ``is_own``: the script itself asked for that dtype in the run, with its own scaler or without.
    """
    amp = trace.outcome.amp
    if dtype == "float16" and trains and not amp.scaled and (is_own or not amp.framework):
        made = amp.scaler_at and f"the GradScaler of {place_of(amp.scaler_at)} is switched off"
        yield amp_hazard(
            _NO_SCALER,
            dtype,
            f"{made or 'no GradScaler scales the loss'}: gradients below 6e-8 become 0 in float16",
            amp.scaler_at or "",
            UNSCALED.action,
            blocks=True,
        )
    yield from _foreign(dtype, amp.functions, "custom function")
    yield from _foreign(dtype, amp.operators, "custom operator")
    if trace.recording is None:
        return
    # Where autocast was forced around the model alone, it is not the script that left them out.
    if dtype == "float16" and (is_own or trace.outcome.autocast_at is not None):
        outside = outside_autocast(trace.recording, trace.outcome.autocast or dtype)
        if outside:
            names = ", ".join(sorted(outside)[:_NAMED])
            yield amp_hazard(
                "outside autocast",
                dtype,
                f"{names} of float16 tensors outside autocast: results above 65504 become inf",
                next(iter(outside.values())),
                "compute them within the autocast region, or on tensor.float()",
            )
    parts = step_parts(trace.recording, machine)
    if parts is not None and parts.float32_share >= _TOLD:
        largest = sorted(parts.float32_s, key=lambda name: -parts.float32_s[name])[:_NAMED]
        yield amp_hazard(
            "float32 operators",
            dtype,
            f"autocast runs {', '.join(largest)} in float32: {percent(parts.float32_share)} of the "
            "kernels' time",
            share=parts.float32_share,
        )


def of_none(trace: Trace, *, trains: bool) -> Iterator[Finding]:
    """What a run without the script's AMP showed: that what computes in float16 nevertheless (a
    frozen model that is loaded so, with adapters in float32) goes without AMP's scaler then."""
    amp = trace.outcome.amp
    if not trains or trace.recording is None or (amp.scaled and not amp.framework):
        return
    if _differentiates_in_float16(trace.recording):
        yield amp_hazard(
            _WEIGHTS,
            "off",
            "the model computes in float16 itself, and without AMP no GradScaler scales the loss: "
            "gradients below 6e-8 become 0",
            blocks=True,
        )


def _differentiates_in_float16(recording: Recording) -> bool:
    """Are there kernels of backward passes that compute in it?"""
    ops = recording.kernel_op
    half = ops[(recording.kernel_dtype == DTYPES.index("float16")) & (ops >= 0)]
    return bool((recording.op_phase[half] == PHASES.index("backward")).any())


def unscaled(hazards: Iterable[Finding], outcome: TraceOutcome) -> Iterator[Finding]:
    """What a script learns worse by, of its own precision, with the line that turns it on."""
    for hazard in hazards:
        if hazard.kind == _NO_SCALER:
            yield dataclasses.replace(
                hazard,
                kind="gradients_unscaled",
                severity="warning",
                cause=UNSCALED.cause,
                place=hazard.place or Place.parse(outcome.autocast_at),
            )


def _foreign(dtype: str, found: Mapping[str, str], kind: str) -> Iterator[Finding]:
    """Code that autocast does not know; ``found`` are names with places."""
    for full_name, place in found.items():
        name = full_name.removeprefix("__main__.")
        if kind == "custom function":
            text = f"{name} has no custom_fwd: its backward pass runs without autocast"
            remedy = 'decorate forward and backward with torch.amp.custom_fwd(device_type="cuda") '
            remedy += "and custom_bwd"
            yield amp_hazard("custom function", dtype, text, place, remedy)
        else:
            text = f"operator {name} has no autocast rule: it gets operands of several dtypes"
            remedy = "register one with torch.library.register_autocast"
            yield amp_hazard("custom operator", dtype, text, place, remedy)


def of_failure(dtype: str, outcome: TraceOutcome, message: str) -> Finding:
    """A run in ``dtype`` that raised; ``message`` is what it is called in a note."""
    place, text = outcome.location or "", outcome.message
    if "without overflow" in text:
        return amp_hazard(
            "overflow",
            dtype,
            "a number is beyond float16's 65504: PyTorch raises "
            '"value cannot be converted … without overflow"',
            place,
            'use float("-inf") or torch.finfo(tensor.dtype).min for it',
            blocks=True,
        )
    # Or outside of autocast: probabilities in half precision, with targets that are not.
    mixed = "Found dtype" in text and "binary_cross_entropy(" in outcome.traceback
    if "unsafe to autocast" in text or mixed:
        return amp_hazard(
            "fails",
            dtype,
            "BCELoss raises an error under autocast",
            place,
            "BCEWithLogitsLoss on the logits, without the sigmoid",
            blocks=True,
        )
    return amp_hazard("fails", dtype, message, place, blocks=True)
