"""Measures a GPU, or a simulated one, in child processes; a profile is made of their readings."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from trainfit.hardware import GpuNameError
from trainfit.hardware.context_memory import gpu_of_profile
from trainfit.hardware.local_gpu import local_usage
from trainfit.plan.command.interpreter import HASTENED, Interpreter, own_interpreter
from trainfit.results.files.errors import TrainfitError
from trainfit.results.gpus import (
    CONTEXT,
    LIBRARIES,
    OF_DATA,
    Basis,
    ConvolutionWorkspace,
    DeviceConstants,
    GpuFigure,
    GpuMemory,
    GpuSpec,
    MeasuredProgram,
    Profile,
    Rates,
    Unit,
)
from trainfit.results.runs.measurement import (
    MeasuringOutcome,
    MeasuringRequest,
    MemoryReadings,
    StandIn,
    Subject,
)
from trainfit.results.text import size
from trainfit.version import __version__

#: Fresh processes whose memory is read; the spread of a figure is theirs.
PROCESSES: Final = 3
#: Others' memory that comes or goes between two readings by more than this disturbs them.
_STEADY_BYTES: Final = 8 << 20

#: Rooms whose text a program's kernels, and their times, follow from.
_MODEL: Final = ("simgpu", "speed")
#: Seconds for simulating a profile's programs again; they take four.
_RENEWAL_S: Final = 300.0

_RATE_UNITS: Final[Mapping[str, Unit]] = {"matmul": "FLOP/s", "launch": "s"}


class CalibrationError(TrainfitError):
    """The GPU could not be measured; one line with reason and remedy."""


class NoGpuError(CalibrationError):
    """PyTorch finds no GPU in this machine."""

    def __init__(self, verb: str, reason: str, remedy: str) -> None:
        super().__init__(
            f"no GPU to {verb}: PyTorch finds none in this machine ({reason}); {remedy}"
        )


class Laboratory(Protocol):
    """A place in which measuring processes run; tests bring one of their own."""

    stand_in: StandIn | None

    def measure(
        self, subject: Subject, limit_s: float, stand_in: StandIn | None
    ) -> MeasuringOutcome:
        """One fresh process; raises ``TimeoutError`` past ``limit_s``."""

    def others(self, limit_s: float) -> tuple[int, str]:
        """Bytes that other processes hold of the GPU now, and how that is known."""

    def driver(self) -> str | None:
        """The version of the GPU's driver."""


def calibrate(
    laboratory: Laboratory,
    time_limit_s: float,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Profile:
    """Measure everything that the time allows for; what is missing is in the notes.

    Raises :class:`NoGpuError`, and :class:`CalibrationError` where not even the context
    could be measured.
    """
    deadline = clock() + time_limit_s
    run = _CalibrationRuns(laboratory, lambda: deadline - clock(), progress)
    progress("measuring the GPU memory that other processes use")
    others = [laboratory.others(time_limit_s)]
    readings = run.memory()
    others.append(laboratory.others(max(deadline - clock(), 1.0)))
    basis: Basis = "measured" if laboratory.stand_in is None else "simulated"
    device = readings[0].device
    profile = Profile(
        gpus=(device.gpu,),
        module_loading="eager" if device.eager_loading else "lazy",
        provenance=_PROVENANCE if laboratory.stand_in is None else _REHEARSAL,
        memory=_memory(readings, others, basis, run.notes),
        rates=_rates({}, basis),
        capability=device.capability,
        driver=laboratory.driver(),
        cuda=device.cuda,
        cudnn=device.cudnn,
        torch=device.torch,
    )
    gpu = run.gpu_of(profile)
    with ThreadPoolExecutor(1) as pool:
        simulations = pool.submit(run.simulations, gpu)
        workspaces = run.once("workspaces", "convolution workspaces")
    # Only what measures times wants all cores.
    simulated = simulations.result()
    rates = run.once("rates", "matmuls, bandwidth, launches, copies")
    programs = run.once("programs", "programs of each class of kernels")
    timed = programs.programs.trials if programs and programs.programs else {}
    found = dataclasses.replace(
        _rates(rates.rates.trials if rates and rates.rates else {}, basis),
        programs=tuple(
            MeasuredProgram(name, _figure(trials, "s", basis, _HOW_PROGRAMS))
            for name, trials in timed.items()
        ),
    )
    if found.programs and gpu is not None and simulated.programs is not None:
        found = _modelled(found, simulated.programs, gpu)
    return dataclasses.replace(
        profile,
        memory=dataclasses.replace(
            profile.memory, convolutions=_convolutions(workspaces, simulated.workspaces)
        ),
        rates=found,
        notes=tuple(run.notes),
    )


def _convolutions(
    measured: MeasuringOutcome | None, simulated: MeasuringOutcome | None
) -> tuple[ConvolutionWorkspace, ...]:
    """The measured workspaces, each with its size on the simulated GPU."""
    if measured is None or measured.workspaces is None:
        return ()
    convolutions = measured.workspaces.convolutions
    if simulated is None or simulated.workspaces is None:
        return tuple(convolutions)
    models = {
        _identity(convolution): convolution.measured_bytes
        for convolution in simulated.workspaces.convolutions
    }
    return tuple(
        dataclasses.replace(workspace, modelled_bytes=models.get(_identity(workspace)))
        for workspace in convolutions
    )


_PROVENANCE = "measured by `trainfit calibrate` on this GPU"
_REHEARSAL = "a rehearsal of `trainfit calibrate` on the simulated GPU: no measurement"


@dataclasses.dataclass(frozen=True)
class _SimulatedReadings:
    """What a simulated GPU says of the measured subjects; ``None``: it came to nothing."""

    workspaces: MeasuringOutcome | None
    programs: MeasuringOutcome | None


class _CalibrationRuns:
    """The processes of one calibration, within its time."""

    def __init__(
        self,
        laboratory: Laboratory,
        left_s: Callable[[], float],
        progress: Callable[[str], None],
    ) -> None:
        self._laboratory = laboratory
        self._left_s = left_s
        self._progress = progress
        self.notes: list[str] = []

    def memory(self) -> list[MemoryReadings]:
        """Readings of several fresh processes, one at least."""
        found: list[MemoryReadings] = []
        for number in range(1, PROCESSES + 1):
            self._progress(f"measuring device memory, process {number} of {PROCESSES}")
            outcome = self._measure("memory", self._laboratory.stand_in, needed=not found)
            if outcome is not None and outcome.memory is not None:
                found.append(outcome.memory)
                self._note_failed(outcome.memory.failed)
        return found

    def once(self, subject: Subject, what: str) -> MeasuringOutcome | None:
        """One process for ``subject``; ``None`` where it came to nothing."""
        self._progress(f"measuring {what}")
        outcome = self._measure(subject, self._laboratory.stand_in, needed=False)
        readings = None
        if outcome is not None:
            readings = outcome.workspaces or outcome.rates or outcome.programs
        if readings is not None:
            self._note_failed(readings.failed)
        return outcome

    def gpu_of(self, profile: Profile) -> GpuSpec | None:
        """The catalogue's GPU; ``None``, with a note, where it has none of this name."""
        try:
            return gpu_of_profile(profile)
        except GpuNameError:
            self.notes.append(f"{profile.gpus[0]} is not in the catalogue: nothing to compare")
            return None

    def simulations(self, gpu: GpuSpec | None) -> _SimulatedReadings:
        """The same workspaces and programs on the simulated GPU, as far as time allows."""
        named = StandIn(gpu, _bare_constants()) if gpu is not None else None
        return _SimulatedReadings(
            self._simulated("workspaces", self._laboratory.stand_in or named),
            self._simulated("programs", named),
        )

    def _simulated(self, subject: Subject, stand_in: StandIn | None) -> MeasuringOutcome | None:
        if stand_in is None or self._left_s() <= 0:
            return None
        return self._measure(subject, stand_in, needed=False)

    def _measure(
        self, subject: Subject, stand_in: StandIn | None, *, needed: bool
    ) -> MeasuringOutcome | None:
        try:
            outcome = self._laboratory.measure(subject, max(self._left_s(), 0.0), stand_in)
        except TimeoutError:
            reason = "the time limit was reached"
            outcome = MeasuringOutcome(error=reason)
        if not outcome.error:
            return outcome
        if outcome.without_gpu:
            raise NoGpuError(
                "calibrate",
                outcome.error,
                'run it on a machine with a GPU, or rehearse it here with --rehearse "RTX 4090"',
            )
        if needed:
            raise CalibrationError(
                f"the GPU could not be measured: {outcome.error}; stop other jobs on the GPU, "
                "or raise --time-limit"
            )
        self.notes.append(f"{subject} not measured: {outcome.error}")
        return None

    def _note_failed(self, failed: Mapping[str, str]) -> None:
        for name, reason in failed.items():
            note = f"{name} not measured: {reason}"
            if note not in self.notes:
                self.notes.append(note)


def of_this_model(rates: Rates, gpu: GpuSpec, laboratory: Laboratory | None = None) -> Rates:
    """``rates`` with the kernels that this version of the model has of their programs: those of
    another lack what this one goes by, or are corrected for what it corrects itself.

    Programs that this version does not have say nothing any more. Raises :class:`CalibrationError`
    where they cannot be simulated.
    """
    if not rates.programs or rates.model == model_name():
        return rates
    given = StandIn(gpu, _bare_constants())
    try:
        outcome = (laboratory or Processes()).measure("programs", _RENEWAL_S, given)
    except TimeoutError:
        outcome = MeasuringOutcome(error="no answer in time")
    if outcome.programs is None:
        raise CalibrationError(
            "the profile is of another version's model, and its programs could not be simulated "
            f"({outcome.error}): run `trainfit calibrate` again"
        )
    return _modelled(rates, outcome, gpu)


@cache
def model_name() -> str:
    """The name of what a program's kernels and their times follow from: the text of these
    modules."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(file for name in _MODEL for file in (root / name).rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{__version__}-{digest.hexdigest()[:12]}"


def _modelled(rates: Rates, outcome: MeasuringOutcome, gpu: GpuSpec) -> Rates:
    """The same rates with the kernels that the simulated GPU has of the programs, and what the
    model says."""
    from trainfit.speed.efficiency import FITTED
    from trainfit.speed.measured import modelled_as, with_rates
    from trainfit.speed.step import HostedGpu

    kernels = outcome.programs.kernels if outcome.programs is not None else {}
    bare = dataclasses.replace(rates, programs=())
    machine = with_rates(HostedGpu(gpu, FITTED), bare, "this one")
    programs = []
    for program in rates.programs:
        launched = kernels.get(program.name, ())
        seconds, group = modelled_as(launched, machine) or (None, "")
        programs.append(MeasuredProgram(program.name, program.seconds, launched, seconds, group))
    return dataclasses.replace(rates, programs=tuple(programs), model=model_name())


def _bare_constants() -> DeviceConstants:
    """Constants for simulated workspaces, on which the context has no influence."""
    from trainfit.hardware.context_memory import assumed_parts

    return DeviceConstants(assumed_parts(1))


def _identity(workspace: ConvolutionWorkspace) -> tuple[object, ...]:
    return workspace.shape, workspace.dtype, workspace.direction, workspace.channels_last


# -- from readings to figures ------------------------------------------------------------------


def _memory(
    readings: Sequence[MemoryReadings],
    others: Sequence[tuple[int, str]],
    basis: Basis,
    notes: list[str],
) -> GpuMemory:
    held, how = [nbytes for nbytes, _ in others], others[0][1]
    if max(held) - min(held) > _STEADY_BYTES:
        notes.append(
            f"other processes' memory changed meanwhile, from {size(held[0])} to "
            f"{size(held[-1])}: "
            "re-run calibrate on an idle GPU"
        )
    contexts = [reading.outside_bytes[CONTEXT] - held[0] for reading in readings]
    growths = {str(name): _growths(readings, name) for name in LIBRARIES}
    if min((*contexts, *(each for many in growths.values() for each in many))) < 0:
        notes.append(
            "a reading was below the one before it: other processes freed memory meanwhile; "
            "re-run calibrate on an idle GPU"
        )
    fresh = (
        f"fresh processes after torch.zeros(1).cuda(), less the memory of other processes ({how})"
    )
    first = "growth outside the allocator when first used"
    libraries = {
        name: _figure(values, "B", basis, first) for name, values in growths.items() if values
    }
    workspaces = [
        reading.cublas_workspace_bytes
        for reading in readings
        if reading.cublas_workspace_bytes is not None
    ]
    stays = "stays allocated after a first matmul"
    totals = [reading.device.memory_bytes for reading in readings]
    return GpuMemory(
        context=_figure(contexts, "B", basis, fresh),
        libraries=libraries,
        usable=_figure(totals, "B", basis, "total of cudaMemGetInfo"),
        others=_figure(held, "B", basis, how),
        cublas_workspace=_figure(workspaces, "B", basis, stays) if workspaces else None,
    )


def _growths(readings: Sequence[MemoryReadings], name: str) -> list[int]:
    """What each process grew by at the stage ``name``: since the stage before that was run."""
    growths = []
    order = (CONTEXT, *LIBRARIES)
    for reading in readings:
        known = reading.outside_bytes
        if name in known:
            before = [stage for stage in order[: order.index(name)] if stage in known]
            growths.append(known[name] - known[before[-1]])
    return growths


def _rates(trials: Mapping[str, tuple[float, ...]], basis: Basis) -> Rates:
    figures = {
        name: _figure(
            values, _RATE_UNITS.get(name.partition(".")[0], "B/s"), basis, _HOW_RATES[_kind(name)]
        )
        for name, values in trials.items()
    }
    products = {
        name.removeprefix("matmul."): figure
        for name, figure in figures.items()
        if _kind(name) == "matmul"
    }
    return Rates(
        matmul=products,
        memory_bandwidth=figures.get("memory_bandwidth"),
        launch=figures.get("launch"),
        host_to_device_pinned=figures.get("host_to_device_pinned"),
        host_to_device_pageable=figures.get("host_to_device_pageable"),
    )


def _kind(name: str) -> str:
    return name.partition(".")[0]


_HOW_RATES: Final[Mapping[str, str]] = {
    "matmul": "CUDA events around square matmuls of random numbers",
    "memory_bandwidth": "bytes read and written by copies on the device, CUDA events",
    "launch": "from one small kernel to the next in eager mode, CUDA events",
    "host_to_device_pinned": "copies from pinned memory, CUDA events",
    "host_to_device_pageable": OF_DATA,
}


_HOW_PROGRAMS: Final = "CUDA events around calls with several sets of random operands in turn"


def _figure(values: Sequence[float], unit: Unit, basis: Basis, how: str) -> GpuFigure:
    """Median, least and most. Below zero is no amount: a disturbed reading counts as 0."""
    clipped = [max(0.0, float(value)) for value in values]
    middle = statistics.median(clipped)
    return GpuFigure(middle, min(clipped), max(clipped), unit, basis, how, len(clipped))


# -- real processes ----------------------------------------------------------------------------


# ---
# Processes that measure this machine's GPU, or a simulated one.


_MODULES: Final[Mapping[Subject, str]] = {
    "memory": "trainfit.memory.calibration",
    "workspaces": "trainfit.memory.calibration",
    "rates": "trainfit.speed.calibration",
    "programs": "trainfit.speed.calibration",
}
_START: Final = HASTENED + "from {module} import main; main()"


class Processes:
    """Measures in child processes, on this machine's GPU or on a simulated one."""

    def __init__(self, stand_in: StandIn | None = None) -> None:
        self.stand_in = stand_in

    def measure(
        self, subject: Subject, limit_s: float, stand_in: StandIn | None
    ) -> MeasuringOutcome:
        """One fresh process; raises ``TimeoutError`` past ``limit_s``."""
        with _process(subject, stand_in) as (process, result):
            return _outcome(process, result, limit_s)

    def others(self, limit_s: float) -> tuple[int, str]:
        """Bytes that other processes hold of the GPU now, and how that is known.

        NVML says so. Without it two processes with a context each tell: the second sees one
        context more than the first.
        """
        if self.stand_in is not None:
            return self.stand_in.constants.other_processes_bytes, "as set for the simulated GPU"
        usage = local_usage()
        if usage is not None and usage.used_bytes is not None:
            return usage.used_bytes, "NVML, before the process was started"
        one = two = MeasuringOutcome(error="the time limit was reached")
        with contextlib.suppress(TimeoutError), _process("memory", None, hold=True) as first:
            one = _outcome(*first, limit_s, keep=True)
            if one.memory is not None:
                with _process("memory", None, hold=True) as second:
                    two = _outcome(*second, limit_s, keep=True)
        if one.memory is None or two.memory is None:
            return 0, "not known: no NVML (pip install nvidia-ml-py)"
        alone = one.memory.outside_bytes[CONTEXT]
        both = two.memory.outside_bytes[CONTEXT]
        return max(0, 2 * alone - both), "from two processes with a context each, without NVML"

    def context(self, limit_s: float, python: Interpreter | None = None) -> MeasuringOutcome:
        """A fresh process that makes nothing but its context, in ``python`` (default: our own).

        Raises ``TimeoutError`` past ``limit_s``.
        """
        with _process("memory", self.stand_in, hold=True, python=python) as (process, result):
            return _outcome(process, result, limit_s, keep=True)

    def driver(self) -> str | None:
        """The version of the GPU's driver."""
        if self.stand_in is not None:
            return None
        usage = local_usage()
        return usage.driver if usage is not None and usage.driver else driver_of_proc()


def driver_of_proc(root: Path = Path("/")) -> str | None:
    """The driver's version by the kernel's file, where there is one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else None


@contextlib.contextmanager
def _process(
    subject: Subject,
    stand_in: StandIn | None,
    *,
    hold: bool = False,
    python: Interpreter | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A measuring process and the file that it will write; it does not outlive the block."""
    with tempfile.TemporaryDirectory(prefix="trainfit-") as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(MeasuringRequest(subject, str(result), stand_in, hold).to_json())
        code = _START.format(module=_MODULES[subject])
        with (Path(folder) / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [*(python or own_interpreter()).start(code), str(request)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(os.environ),
                start_new_session=True,
            )
            try:
                yield process, result
            finally:
                process.kill()
                process.communicate()


def _outcome(
    process: subprocess.Popen[bytes], result: Path, limit_s: float, *, keep: bool = False
) -> MeasuringOutcome:
    """What the process wrote; with ``keep`` it need not have ended."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and not (keep and result.is_file()):
        if time.monotonic() >= deadline:
            raise TimeoutError
        time.sleep(0.05)
    if result.is_file():
        return MeasuringOutcome.load(result)
    output = (result.parent / "output.txt").read_text(errors="replace").strip()
    last = output.splitlines()[-1] if output else "no output"
    return MeasuringOutcome(error=f"the process ended with code {process.returncode} ({last})")
