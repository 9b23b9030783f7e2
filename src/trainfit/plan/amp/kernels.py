"""Operators of a run under autocast: cast, in float32 or in half precision."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainfit.memory.stream.replay import Replay, Stream, live_at
from trainfit.plan.steps.costing import has_rates
from trainfit.results.runs.kernels import DTYPES
from trainfit.results.runs.recording import KINDS, PHASES, IntArray, Recording
from trainfit.simgpu.operators.autocast_lists import policies
from trainfit.speed.model.step import Machine, TimedWork
from trainfit.speed.model.work import Work, steady

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
    return frozenset(plain_name(each.replace("::", ".")) for each in names)


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


def step_parts(recording: Recording, machine: Machine) -> StepParts | None:
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
    on_gpu = cast & ~work.is_kind("upload", "upload_pinned", "download")
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
    fixed = np.isin(kinds, _codes("input", "workspace"))
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
    """Of each operator, by its kernels; an entry more, so that -1 is none."""
    codes = [DTYPES.index(name) for name in ("float32", "tfloat32")]
    wide = np.isin(recording.kernel_dtype, codes) & (recording.kernel_op >= 0)
    found = np.zeros(len(recording.op_name) + 1, dtype=np.bool_)
    found[recording.kernel_op[wide]] = True
    return found


def _codes(*names: str) -> list[int]:
    return [KINDS.index(name) for name in names]


def _is(recording: Recording, wanted: Callable[[str], bool]) -> Mask:
    """Of each operator: is its plain name one of those? An entry more, so that -1 is none."""
    names = np.array([wanted(plain_name(name)) for name in recording.strings], dtype=np.bool_)
    return np.append(names[recording.op_name], False)


def _line(recording: Recording, op: int) -> str:
    lines = recording.alloc_line[recording.alloc_op == op]
    known = lines[lines >= 0]
    return recording.strings[known[0]] if len(known) else ""
