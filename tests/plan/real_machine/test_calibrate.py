"""``trainfit calibrate``: on the simulated GPU, and with readings that were made up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_cases import some_of
from helpers_cli import error_line, json_of
from helpers_cli import trainfit as run
from trainfit.hardware import device_constants, find_gpu
from trainfit.memory import calibration
from trainfit.plan.calibration import (
    CalibrationError,
    NoGpuError,
    Processes,
    calibrate,
    driver_of_proc,
    of_this_model,
)
from trainfit.results.files.errors import ResultFileError
from trainfit.results.gpus import (
    CONTEXT,
    LIBRARIES,
    Constant,
    ConvolutionWorkspace,
    DeviceConstants,
    Kernel,
    Profile,
)
from trainfit.results.runs.measurement import (
    GpuEnvironment,
    MeasuringOutcome,
    MeasuringRequest,
    MemoryReadings,
    ProgramReadings,
    RateReadings,
    StandIn,
    Subject,
    WorkspaceReadings,
)
from trainfit.simgpu import Simulation
from trainfit.speed import calibration as speed

MIB = 1 << 20
GPU = find_gpu("RTX 4090")


def told(*mib: int, others: int = 0) -> DeviceConstants:
    """Constants that a simulation is told: the context, and each library."""
    parts = (
        Constant(name, value * MIB, value * MIB, value * MIB, "measured", "told")
        for name, value in zip((CONTEXT, *LIBRARIES), mib, strict=True)
    )
    return DeviceConstants(tuple(parts), other_processes_bytes=others * MIB)


TOLD = told(401, 45, 33, 17, 57, 21, 9, others=300)


# -- the measuring code, on the simulated GPU in this process ------------------------------------


@pytest.mark.parametrize(
    "gpu", some_of(["RTX 4090", "V100 16GB SXM", "H100 80GB SXM", "GTX 1080 Ti"], 2)
)
def test_memory_comes_back_as_it_was_told(gpu: str) -> None:
    with Simulation(gpu, constants=TOLD) as simulation:
        readings = calibration.measure_memory()
        assert readings.device.gpu == simulation.gpu.name
        assert readings.device.memory_bytes == simulation.gpu.memory_bytes
        workspace = (32 << 20) if simulation.gpu.capability[0] == 9 else 8_519_680
    assert readings.failed == {}
    assert readings.cublas_workspace_bytes == workspace
    expected, known = {}, 300
    for part in TOLD.parts:
        # Without fused kernels (compute capability 6.1, half precision) attention is products.
        known += part.value_bytes // MIB if part.name in simulation.engine.libraries else 0
        known += part.value_bytes // MIB if part.name == CONTEXT else 0
        expected[part.name] = known * MIB
    assert readings.outside_bytes == expected
    assert set(LIBRARIES) - simulation.engine.libraries <= {"sdpa"}


def test_a_process_that_holds_its_context_measures_no_more() -> None:
    with Simulation(GPU, constants=TOLD):
        assert set(calibration.measure_memory(context_only=True).outside_bytes) == {CONTEXT}


def test_workspaces_are_those_of_the_models() -> None:
    """float32 3x3: the Winograd workspace, 36 numbers a tile and channel (decision 4)."""
    with Simulation("V100 32GB SXM"):  # without tensor cores for float32
        readings = calibration.measure_workspaces()
    assert readings.failed == {}
    found = {
        (each.shape, each.dtype, each.direction, each.channels_last): each.measured_bytes
        for each in readings.convolutions
    }
    assert len(found) == 2 * 2 * 2 * len(calibration._CONVOLUTIONS)
    shape = (8, 64, 64, 56, 56, 3)
    tiles = 14 * 14
    winograd = 36 * 4 * (8 * tiles * (64 + 64) + 64 * 64)
    assert winograd <= found[shape, "float32", "forward", False] < winograd + 4 * MIB
    assert found[shape, "float32", "forward", True] == 0


def test_a_nearly_full_gpu_is_measured_as_far_as_it_goes() -> None:
    with Simulation("custom:1GiB", constants=told(100, 1, 1, 1, 1, 1, 1)):
        held = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
        outcome = calibration.measure_workspaces()
        assert outcome.convolutions
        assert any(
            "OutOfMemoryError: CUDA out of memory" in text for text in outcome.failed.values()
        )
        assert speed._side(torch.bfloat16) == 4096
        del held


class Ticks:
    """Events of a device that needs so many seconds for a call."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.calls = 0.0, seconds, 0

    def work(self) -> None:
        self.calls += 1
        self.now += self.seconds

    def event(self, **_: Any) -> Any:
        clock = self

        class Event:
            def record(self) -> None:
                self.at = clock.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Any) -> float:
                return float((end.at - self.at) * 1e3)

        return Event()


@pytest.mark.parametrize("duration", [1e-7, 3e-6, 1e-3, 0.5])
def test_a_trial_lasts_long_enough(duration: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Ticks(duration)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = speed.seconds(device.work)
    assert times == pytest.approx([duration] * speed.TRIALS)
    in_trials = device.calls * duration
    assert in_trials >= speed.TRIALS * min(0.02, speed._MOST_REPEATS * duration)
    # The search for the number of calls costs no more than a few trials.
    assert device.calls <= 10 + 2 * speed.TRIALS * max(0.02 / duration, 1)


def test_a_clock_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Ticks(0.0)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(speed.ClockError, match="no time passed"):
        speed.seconds(device.work)


# -- a laboratory with made-up readings ----------------------------------------------------------

DEVICE = GpuEnvironment(GPU.name, (8, 9), GPU.memory_bytes, "2.13.0+cu130", "13.0", "9.15.1", False)
WORKSPACE = ConvolutionWorkspace((8, 64, 64, 56, 56, 3), "float32", "forward", False, 7)


def readings(*outside_mib: int, failed: dict[str, str] | None = None) -> MeasuringOutcome:
    outside = {
        name: mib * MIB
        for name, mib in zip((CONTEXT, *LIBRARIES), outside_mib, strict=True)
        if name not in (failed or {})
    }
    return MeasuringOutcome(memory=MemoryReadings(DEVICE, outside, 8_519_680, failed or {}))


class Scripted:
    """Answers each measuring process with the next of the outcomes for its subject."""

    def __init__(self, **outcomes: list[MeasuringOutcome | Exception]) -> None:
        self.stand_in: StandIn | None = None
        self.outcomes = outcomes
        self.held = [100 * MIB, 100 * MIB]
        self.limits: list[float] = []
        self.stand_ins: list[StandIn | None] = []

    def measure(
        self, subject: Subject, limit_s: float, stand_in: StandIn | None
    ) -> MeasuringOutcome:
        self.limits.append(limit_s)
        self.stand_ins.append(stand_in)
        simulates = stand_in is not self.stand_in
        outcome = self.outcomes[f"simulated_{subject}" if simulates else subject].pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def others(self, limit_s: float) -> tuple[int, str]:
        return self.held.pop(0), "counted"

    def driver(self) -> str | None:
        return "580.65.06"


def workspaces(nbytes: int) -> MeasuringOutcome:
    found = (dataclasses.replace(WORKSPACE, measured_bytes=nbytes),)
    return MeasuringOutcome(workspaces=WorkspaceReadings(found, {}))


def rates(failed: dict[str, str] | None = None) -> MeasuringOutcome:
    trials = {"matmul.bfloat16": (1e14, 3e14, 2e14), "launch": (5e-6,), "memory_bandwidth": (9e11,)}
    return MeasuringOutcome(rates=RateReadings(trials, failed or {}))


def programs(*seconds: float, kernels: tuple[Kernel, ...] = ()) -> MeasuringOutcome:
    """One program, whose name is its class."""
    trials = {"large": seconds} if seconds else {}
    return MeasuringOutcome(programs=ProgramReadings(trials, {"large": kernels}, {}))


LARGE = Kernel("matmul", "bfloat16", flops=2 * 4096**3, rows=4096, columns=4096, depth=4096)


def good(**changes: Any) -> Scripted:
    outcomes: dict[str, Any] = {
        "memory": [
            readings(500, 515, 545, 555, 585, 605, 610),
            readings(504, 522, 552, 562, 598, 616, 622),
            readings(502, 516, 546, 556, 584, 604, 610),
        ],
        "workspaces": [workspaces(30 * MIB)],
        "simulated_workspaces": [workspaces(28 * MIB)],
        "rates": [rates()],
        "programs": [programs(2e-3, 1e-3, 3e-3)],
        "simulated_programs": [programs(kernels=(LARGE,))],
    }
    return Scripted(**{**outcomes, **changes})


def test_medians_and_spreads_of_three_processes() -> None:
    laboratory = good()
    profile = calibrate(laboratory, 180.0, clock=lambda: 0.0)
    assert Profile.from_json(profile.to_json(), Path("p")) == profile
    context = profile.memory.context
    assert context is not None
    # Less the 100 MiB that others hold.
    assert (context.value, context.low, context.high) == (402 * MIB, 400 * MIB, 404 * MIB)
    assert (context.basis, context.samples) == ("measured", 3)
    growths = {name: figure.value / MIB for name, figure in profile.memory.libraries.items()}
    assert growths == {
        "kernels": 15,
        "cublas": 30,
        "cublas_backward": 10,
        "cudnn_forward": 30,
        "cudnn_backward": 20,
        "sdpa": 6,
    }
    assert profile.memory.libraries["cudnn_forward"].high == 36 * MIB
    (workspace,) = profile.memory.convolutions
    assert (workspace.measured_bytes, workspace.modelled_bytes) == (30 * MIB, 28 * MIB)
    product = profile.rates.matmul["bfloat16"]
    assert (product.value, product.low, product.high, product.unit) == (2e14, 1e14, 3e14, "FLOP/s")
    assert profile.rates.launch is not None and profile.rates.launch.unit == "s"
    assert profile.rates.host_to_device_pinned is None
    assert (profile.driver, profile.cudnn, profile.notes) == ("580.65.06", "9.15.1", ())
    # The models are those of the GPU that was measured.
    given = [each for each in laboratory.stand_ins if each is not None]
    assert [each.gpu.key for each in given] == ["RTX 4090"] * 2
    # Times are measured when nothing is simulated any more.
    assert laboratory.stand_ins[-2:] == [None] * 2
    (program,) = profile.rates.programs
    assert (program.seconds.value, program.seconds.low, program.seconds.high) == (2e-3, 1e-3, 3e-3)
    assert (program.kernels, program.group) == ((LARGE,), "large matmuls")
    assert program.modelled_s is not None and program.modelled_s > 0


def test_programs_of_another_version_are_simulated_anew() -> None:
    """What was measured is kept; programs that this version does not have say nothing."""
    rates = calibrate(good(), 180.0, clock=lambda: 0.0).rates
    gpu = find_gpu("RTX 4090")
    assert of_this_model(rates, gpu, Scripted()) is rates
    (known,) = rates.programs
    stale = dataclasses.replace(known, kernels=(), group="")
    gone = dataclasses.replace(known, name="of an earlier version")
    older = dataclasses.replace(rates, model="0.0", programs=(stale, gone))
    anew = of_this_model(older, gpu, Scripted(simulated_programs=[programs(kernels=(LARGE,))]))
    assert anew.programs[0] == known and anew.model == rates.model
    assert (anew.programs[1].kernels, anew.programs[1].modelled_s) == ((), None)
    broken = Scripted(simulated_programs=[MeasuringOutcome(error="no torch")])
    with pytest.raises(CalibrationError, match=r"another version's model.*no torch.*again"):
        of_this_model(older, gpu, broken)


def test_a_stage_that_fails_is_left_out_and_said() -> None:
    failed = {"cudnn_forward": "RuntimeError: no engine"}
    laboratory = good(
        memory=[readings(500, 510, 525, 530, 0, 580, 585, failed=failed) for _ in range(3)],
        rates=[rates({"matmul.float16": "RuntimeError: x"})],
    )
    profile = calibrate(laboratory, 180.0)
    assert "cudnn_forward" not in profile.memory.libraries
    # What the next stage grew by is counted from the stage before.
    assert profile.memory.libraries["cudnn_backward"].value == 50 * MIB
    assert profile.notes == (
        "cudnn_forward not measured: RuntimeError: no engine",
        "matmul.float16 not measured: RuntimeError: x",
    )


@pytest.mark.parametrize(
    ("changes", "held", "says"),
    [
        ({}, [100, 150], "other processes' memory changed meanwhile"),
        (
            {"memory": [readings(500, 515, 530, 520, 580, 585, 600)] * 3},
            [100, 100],
            "a reading was below the one before it",
        ),
    ],
)
def test_a_disturbed_calibration_says_so(
    changes: dict[str, Any], held: list[int], says: str
) -> None:
    laboratory = good(**changes)
    laboratory.held = [mib * MIB for mib in held]
    (note,) = calibrate(laboratory, 180.0).notes
    assert says in note and "re-run calibrate" in note


def test_past_the_time_limit_the_rest_is_left_out() -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock, laboratory = Clock(), good()
    answer = laboratory.measure

    def slow(subject: Subject, limit_s: float, stand_in: StandIn | None) -> MeasuringOutcome:
        if limit_s < 25:
            clock.now += limit_s
            laboratory.limits.append(limit_s)
            raise TimeoutError
        clock.now += 25
        return answer(subject, limit_s, stand_in)

    laboratory.measure = slow  # type: ignore[method-assign]
    profile = calibrate(laboratory, 60.0, clock=clock)
    context = profile.memory.context
    assert context is not None and context.samples == 2
    assert profile.memory.convolutions == ()
    assert profile.rates.matmul == {}
    assert laboratory.limits == [60.0, 35.0, 10.0, 0.0, 0.0, 0.0]
    assert [note.partition(":")[0] for note in profile.notes] == [
        "memory not measured",
        "workspaces not measured",
        "rates not measured",
        "programs not measured",
    ]
    assert clock.now == 60.0


@pytest.mark.parametrize(
    ("outcome", "kind", "says"),
    [
        (MeasuringOutcome(error="torch 2, built without CUDA", without_gpu=True), NoGpuError,
         "no GPU to calibrate: PyTorch finds none in this machine (torch 2, built without CUDA)"),
        (MeasuringOutcome(error="OutOfMemoryError: full"), CalibrationError,
         "could not be measured: OutOfMemoryError: full; stop other jobs on the GPU"),
        (TimeoutError(), CalibrationError, "the time limit was reached"),
    ],
)  # fmt: skip
def test_without_a_first_reading_there_is_no_profile(
    outcome: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind) as caught:
        calibrate(Scripted(memory=[outcome]), 180.0)
    assert says in str(caught.value)


def test_a_gpu_that_is_in_no_catalogue_has_no_models() -> None:
    device = dataclasses.replace(DEVICE, gpu="NVIDIA Frobnicator 9")
    outcome = readings(500, 515, 545, 555, 585, 605, 610)
    assert outcome.memory is not None
    strange = MeasuringOutcome(memory=dataclasses.replace(outcome.memory, device=device))
    profile = calibrate(good(memory=[strange] * 3), 180.0)
    assert [each.modelled_bytes for each in profile.memory.convolutions] == [None]
    assert profile.notes == ("NVIDIA Frobnicator 9 is not in the catalogue: nothing to compare",)


def test_without_nvml_two_contexts_tell_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hold 300 MiB, a context takes 400: 700 with one, 1,100 with two."""
    import contextlib

    from trainfit.plan import calibration as measuring

    contexts = 0

    @contextlib.contextmanager
    def process(subject: Subject, stand_in: Any, *, hold: bool = False) -> Any:
        nonlocal contexts
        assert hold
        contexts += 1
        yield contexts, Path("result")
        contexts -= 1

    def outcome(held: int, result: Path, limit_s: float, *, keep: bool) -> MeasuringOutcome:
        outside = {CONTEXT: (300 + 400 * held) * MIB}
        return MeasuringOutcome(memory=MemoryReadings(DEVICE, outside, None, {}))

    monkeypatch.setattr(measuring, "local_usage", lambda: None)
    monkeypatch.setattr(measuring, "_process", process)
    monkeypatch.setattr(measuring, "_outcome", outcome)
    nbytes, how = Processes().others(10.0)
    assert nbytes == 300 * MIB
    assert "two processes" in how
    assert contexts == 0


def test_the_driver_by_the_kernels_file(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    for text in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.183.01  Release Build",
    ):
        (tmp_path / "proc/driver/nvidia/version").write_text(text)
        assert driver_of_proc(tmp_path) == "535.183.01"
    assert driver_of_proc(tmp_path / "proc") is None


def test_requests_survive_json() -> None:
    request = MeasuringRequest("memory", "r", StandIn(find_gpu("RTX 4090"), TOLD), hold=True)
    assert MeasuringRequest.from_json(request.to_json()) == request


# -- the command, in processes -----------------------------------------------------------------


@pytest.mark.slow
def test_a_rehearsal_writes_a_profile_that_simulate_can_be_made_to_use(tmp_path: Path) -> None:
    done = run(
        *("calibrate", "--rehearse", "RTX 4090", "--other-processes", "300MiB", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    profile = Profile.load(tmp_path / "profile.json")
    assert json_of(done) == json_of(run("show", "--json", "profile.json", cwd=tmp_path))
    constants = device_constants(GPU)
    figures = {CONTEXT: profile.memory.context, **profile.memory.libraries}
    for part in constants.parts:
        figure = figures[part.name]
        assert figure is not None
        assert (figure.low, figure.value, figure.high) == (part.value_bytes,) * 3
        assert figure.basis == "simulated"
    assert profile.memory.others is not None and profile.memory.others.value == 300 * MIB
    assert {each.measured_bytes == each.modelled_bytes for each in profile.memory.convolutions} == {
        True
    }
    assert set(profile.rates.matmul) == {"float32", "tfloat32", "float16", "bfloat16"}
    assert profile.notes == ()
    shown = run("show", "profile.json", cwd=tmp_path)
    assert "+ cuDNN, backward 15 MiB simulated" in " ".join(shown.stdout.split())
    (tmp_path / "s.py").write_text(
        "import torch\nm = torch.nn.Linear(9, 9).cuda()\no = torch.optim.SGD(m.parameters())\n"
        "while True:\n    m(torch.ones(9, 9).cuda()).sum().backward()\n    o.step()\n"
    )
    words = ("simulate", "--profile", "profile.json", "s.py")
    refused = run(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "it is a trial run on the simulated GPU, not a measurement" in error_line(refused)
    forced = run(*words[:-1], "--force-profile", "--json", "s.py", cwd=tmp_path)
    assert forced.returncode == 0, forced.stderr
    parts = json_of(forced)["memory"]["context_parts"]
    assert [(each["name"], each["basis"]) for each in parts] == [
        (CONTEXT, "simulated"),
        ("cublas", "simulated"),
    ]


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@needs_no_gpu
def test_without_a_gpu_there_is_one_line(tmp_path: Path) -> None:
    done = run("calibrate", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert error_line(done).startswith("no GPU to calibrate: PyTorch finds none in this machine (")
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rehearse", "RTX 9999"), "unknown GPU: 'RTX 9999'"),
        (("--output", "no/p.json"), "'no/p.json': its folder does not exist"),
    ],
)
def test_bad_calibrations(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = run("calibrate", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in error_line(done)


def test_a_damaged_profile_is_not_shown(tmp_path: Path) -> None:
    damaged = {"format": "trainfit-profile", "version": 1, "written_by": "0.1.0"}
    (tmp_path / "p.json").write_text(json.dumps(damaged))
    with pytest.raises(ResultFileError):
        Profile.load(tmp_path / "p.json")
    done = run("show", "p.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "it is damaged (Profile has no 'gpus')" in error_line(done)
