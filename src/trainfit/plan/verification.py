"""Runs a planned or recorded command on the real GPU and compares."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from trainfit.hardware import GpuNameError, find_gpu
from trainfit.memory.explanation import summarize
from trainfit.plan.calibration import CalibrationError, NoGpuError, Processes
from trainfit.plan.command.interpreter import Interpreter
from trainfit.plan.command.parsing import Command, parse_command, split_line
from trainfit.plan.runs.failures import ScriptError, cause_of, with_cause
from trainfit.plan.runs.tracing import run_real
from trainfit.results.files.errors import ResultFileError, TrainfitError
from trainfit.results.findings import Finding
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import PlanResult
from trainfit.results.real_runs import (
    REHEARSED,
    ComparedQuantity,
    RealRunOutcome,
    Verification,
)
from trainfit.results.runs.continuation import whole
from trainfit.results.runs.measurement import GpuEnvironment, StandIn
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.script import UNASKED, SandboxRequest
from trainfit.results.runs.spec import RunSpec
from trainfit.results.speed import StepSpeed
from trainfit.results.text import count, duration

#: Steps at the beginning whose times do not count: kernels are loaded, clocks rise.
WARM_UP: Final = 2
#: The share by which a prediction without a range of its own may miss.
TOLERANCE: Final = 0.02
#: A prediction's range is never narrower than the allocator's smallest step: a small segment
#: for allocated memory, a large one for reserved (c10/core/AllocatorConfig.h).
_LEAST_ALLOCATED: Final = 2 << 20
_LEAST_RESERVED: Final = 20 << 20


class VerificationError(TrainfitError):
    """The prediction cannot be verified; one line with reason and remedy."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a result file predicts, and of which command."""

    file: Path
    command: str
    gpu: str
    torch: str
    memory: MemoryFigures
    fits: bool
    step: StepSpeed | None = None


def read_prediction(path: Path, *, recommended: bool = False) -> Prediction:
    """The prediction of a plan (its present configuration or the recommended one) or a recording.

    Raises :class:`~trainfit.results.files.errors.ResultFileError` and :class:`VerificationError`.
    """
    if path.is_file() and zipfile.is_zipfile(path):
        return _of_recording(path, recommended)
    plan = PlanResult.load(path)
    if plan.inference is not None:
        raise VerificationError(f"{str(path)!r} plans a script that does not train")
    if not recommended:
        torch = plan.environment.get("torch", "")
        now, speed = plan.now, plan.speed
        step = speed.now if speed is not None and speed.now.batch_size == now.batch_size else None
        return Prediction(path, plan.command, plan.gpu, torch, now.memory, now.fits, step)
    has_batch = plan.batch_in_command and plan.launch != plan.command
    if plan.recommended is None or not has_batch:
        raise VerificationError(
            f"{str(path)!r} holds no command for another batch size; plan one with a "
            "{batch_size:N} in it, or leave --recommended out"
        )
    torch = plan.environment.get("torch", "")
    return Prediction(path, plan.launch, plan.gpu, torch, plan.recommended, True)


def _of_recording(path: Path, recommended: bool) -> Prediction:
    recording = whole(Recording.load(path))
    command = str(recording.header.get("command", ""))
    if recommended:
        raise VerificationError(f"{str(path)!r} is a recording: it recommends nothing")
    if not command:
        raise VerificationError(
            f"{str(path)!r} holds no command: it was recorded inside of a Python program, by an "
            "earlier version, or with another batch size than its command has; record the "
            "script with `trainfit simulate`"
        )
    if not recording.steps:
        raise VerificationError(f"{str(path)!r} holds no optimizer step; record a longer run")
    summary = summarize(recording, str(path))
    fits = summary.out_of_memory is None
    return Prediction(path, command, summary.gpu, summary.torch, summary.memory, fits)


class RealGpu(Protocol):
    """A GPU that the command runs on; tests bring one of their own.

    ``stand_in`` is the simulated GPU of a rehearsal.
    """

    stand_in: StandIn | None

    def probe(self, python: Interpreter, limit_s: float) -> GpuEnvironment:
        """The GPU as PyTorch sees it; raises :class:`NoGpuError`."""

    def others(self, limit_s: float) -> tuple[int, str]:
        """Bytes that other processes hold of the GPU now, and how that is known."""

    def run(self, command: Command, steps: int, limit_s: float) -> tuple[RealRunOutcome, str]:
        """Run the command; what it measured, and the end of what it printed."""


def verify(
    prediction: Prediction,
    gpu: RealGpu,
    *,
    steps: int,
    tolerance: float | None,
    time_limit_s: float,
    progress: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Run the predicted command and compare.

    Raises :class:`NoGpuError` before anything is run,
    :class:`~trainfit.plan.runs.failures.ScriptError` where the script made no step for another
    reason than memory.
    """
    command = parse_command(split_line(prediction.command))
    progress("querying the GPU and the memory that other processes use")
    held, how = gpu.others(time_limit_s)
    device = gpu.probe(command.interpreter, time_limit_s)
    progress(f"running {command.name} on {device.gpu} for {count(steps, 'optimizer step')}")
    outcome, output = gpu.run(command, steps, time_limit_s)
    if outcome.status != "out_of_memory" and outcome.steps == 0:
        message = f"{command.name}: {_without_step(outcome)}"
        cause = cause_of(outcome, output)
        raise ScriptError(message, outcome.traceback or output, outcome.own_fault, cause)
    if outcome.status != "out_of_memory" and not outcome.allocated_bytes:
        raise ScriptError(f"{command.name}: no memory of the GPU was used in its steps", output)
    notes = _notes(prediction, device, outcome, how, cause_of(outcome, output))
    if command.interpreter.note:
        notes.insert(0, command.interpreter.note)
    if gpu.stand_in is not None:
        notes.insert(0, REHEARSED)
    ran = outcome.status != "out_of_memory"
    return Verification(
        file=str(prediction.file),
        command=prediction.command,
        gpu_predicted=prediction.gpu,
        gpu_measured=device.gpu,
        steps=outcome.steps,
        range_basis=_range_basis(prediction.memory, tolerance),
        compared=_compare(prediction.memory, outcome, held, tolerance) if ran else {},
        fits_predicted=prediction.fits,
        fits_measured=ran,
        step_seconds=outcome.step_seconds[max(WARM_UP - 1, 0) :],
        notes=tuple(notes),
        environment={
            "torch": device.torch,
            "torch_predicted": prediction.torch,
            "cuda": device.cuda or "",
            "cudnn": device.cudnn or "",
        },
        protection=outcome.protection,
        predicted_step_s=None if prediction.step is None else prediction.step.seconds,
        predicted_step_range_s=None if prediction.step is None else prediction.step.range_s,
    )


def _compare(
    memory: MemoryFigures, outcome: RealRunOutcome, held: int, tolerance: float | None
) -> dict[str, ComparedQuantity]:
    ranges = stated_ranges(memory, tolerance)
    measured = {
        "allocated": outcome.allocated_bytes,
        "reserved": outcome.reserved_bytes,
        "device": _device_bytes(outcome, held),
    }
    predicted = {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes,
        "device": memory.device_bytes,
    }
    return {
        name: ComparedQuantity(predicted[name], *ranges[name], measured[name]) for name in predicted
    }


def stated_ranges(memory: MemoryFigures, tolerance: float | None) -> dict[str, tuple[int, int]]:
    """The range in which each figure is said to lie.

    It is that of the result unless a ``tolerance`` is asked for, a share to both sides (and for the
    device the range of the context in addition). Files of earlier versions state none: then it is
    :data:`TOLERANCE`.
    """
    stated = {
        "allocated": memory.allocated_range_bytes,
        "reserved": memory.reserved_range_bytes,
        "device": memory.device_range_bytes,
    }
    share = TOLERANCE if tolerance is None else tolerance
    least = {"allocated": _LEAST_ALLOCATED, "reserved": _LEAST_RESERVED, "device": _LEAST_RESERVED}
    ranges = {}
    for name, (low, high) in _by_share(memory, share).items():
        own = stated[name] if tolerance is None else None
        if own is not None:
            low, high = own
        predicted = getattr(memory, f"{name}_bytes")
        ranges[name] = max(0, min(low, predicted - least[name])), max(high, predicted + least[name])
    return ranges


def _by_share(memory: MemoryFigures, share: float) -> dict[str, tuple[int, int]]:
    allocated, reserved = (
        (value - math.ceil(value * share), value + math.ceil(value * share))
        for value in (memory.allocated_bytes, memory.reserved_bytes)
    )
    low, high = memory.context_range_bytes
    device = (reserved[0] + low, reserved[1] + high)
    return {"allocated": allocated, "reserved": reserved, "device": device}


def _range_basis(memory: MemoryFigures, tolerance: float | None) -> str:
    if tolerance is None and memory.device_range_bytes is not None:
        return "that of the result"
    share = TOLERANCE if tolerance is None else tolerance
    return f"±{100 * share:g}%, and the context's range for the device"


def _device_bytes(outcome: RealRunOutcome, held: int) -> int | None:
    """The process's peak on the device: reserved memory plus the rest, which only grows."""
    if outcome.reserved_bytes is None:
        return None
    if outcome.process_bytes is not None:
        return outcome.reserved_bytes + max(0, outcome.process_bytes)
    if outcome.outside_bytes is None:
        return None
    return outcome.reserved_bytes + max(0, outcome.outside_bytes - held)


def _notes(
    prediction: Prediction,
    device: GpuEnvironment,
    outcome: RealRunOutcome,
    how: str,
    cause: Finding | None,
) -> list[str]:
    notes = []
    if outcome.status in ("failed", "exited", "timeout"):
        stopped = (
            f"the script stopped after {count(outcome.steps, 'optimizer step')}: "
            f"{outcome.message or outcome.status}; measured by then"
        )
        notes.append(with_cause(stopped, cause))
    with contextlib.suppress(GpuNameError):  # a custom GPU specification has any name
        name = find_gpu(prediction.gpu).name
        if name != device.gpu and not prediction.gpu.startswith("custom"):
            notes.append(f"predicted for {name}, measured on {device.gpu}: plan for this GPU")
    here, there = device.torch.partition("+")[0], prediction.torch.partition("+")[0]
    if here != there:
        notes.append(f"predicted with torch {there}, measured with torch {here}")
    if outcome.process_bytes is None and outcome.outside_bytes is not None:
        notes.append(
            f"device memory is that of the GPU, less the memory of other processes before ({how})"
        )
    return notes


def _without_step(outcome: RealRunOutcome) -> str:
    what = {
        "ended": "the script ended without an optimizer step",
        "exited": f"the script exited with {outcome.message}",
        "timeout": "the time limit was reached",
        "died": f"the script ended unexpectedly ({outcome.message})",
    }.get(outcome.status, f"the script failed ({' '.join(outcome.message.split())[:200]})")
    place = f" at {outcome.location}" if outcome.location else ""
    if outcome.status == "ended":
        return f"{what}; verify a command that trains"
    return f"{what}{place} after {duration(outcome.seconds)}, before its first optimizer step"


class ThisMachine:
    """This machine's GPU, or a simulated one in its place."""

    def __init__(self, stand_in: StandIn | None = None, sandbox: SandboxRequest = UNASKED) -> None:
        self.stand_in = stand_in
        self._sandbox = sandbox
        self._processes = Processes(stand_in)

    def probe(self, python: Interpreter, limit_s: float) -> GpuEnvironment:
        """The GPU as PyTorch sees it in the command's interpreter."""
        try:
            outcome = self._processes.context(limit_s, python)
        except TimeoutError:
            raise CalibrationError(
                "the GPU did not answer within the time limit; is it hung? See nvidia-smi"
            ) from None
        if outcome.without_gpu:
            raise NoGpuError("verify on", outcome.error, "run it on a machine with a GPU")
        if outcome.memory is None:
            raise CalibrationError(
                f"the GPU cannot be used: {outcome.error}; stop other jobs on it"
            )
        return outcome.memory.device

    def others(self, limit_s: float) -> tuple[int, str]:
        """Bytes that other processes hold of the GPU now, and how that is known."""
        return self._processes.others(limit_s)

    def run(self, command: Command, steps: int, limit_s: float) -> tuple[RealRunOutcome, str]:
        """Run the command; what it measured, and the end of what it printed."""
        command = dataclasses.replace(command, sandbox=self._sandbox)
        with tempfile.TemporaryDirectory(prefix="trainfit-") as name:
            spec = RunSpec(target=command.target(), folder=name, steps=steps, time_limit_s=limit_s)
            if self.stand_in is not None:
                gpu, constants = self.stand_in.gpu, self.stand_in.constants
                spec = dataclasses.replace(spec, gpu=gpu, constants=constants)
            child = run_real(command, spec, "trainfit.memory.verification")
            with contextlib.suppress(OSError, ValueError):
                outcome = RealRunOutcome.load(spec.outcome)
                return dataclasses.replace(outcome, protection=child.protection), child.output
        return RealRunOutcome("died", 0, child.seconds, message=child.ending), child.output


__all__ = ["Prediction", "ResultFileError", "ThisMachine", "read_prediction", "verify"]
