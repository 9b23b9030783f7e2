"""``trainfit verify``: replayed measurements, and a simulated GPU in the real one's place."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainfit as package
from helpers_cli import error_line, json_of
from helpers_cli import trainfit as run
from helpers_report import whole
from trainfit.hardware import device_constants, find_gpu
from trainfit.plan.calibration import NoGpuError
from trainfit.plan.command.parsing import Command, parse_command, split_line
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.verification import (
    Prediction,
    ThisMachine,
    VerificationError,
    read_prediction,
    stated_ranges,
    verify,
)
from trainfit.report.sections.real_runs import prediction_subject
from trainfit.results.gpus import CONTEXT, LIBRARIES, Constant, DeviceConstants
from trainfit.results.memory import MemoryFigures
from trainfit.results.real_runs import RealRunOutcome
from trainfit.results.runs.measurement import GpuEnvironment, StandIn
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import Target
from trainfit.results.speed import StepSpeed

MIB = 1 << 20
GIB = 1 << 30
DEVICE = GpuEnvironment(
    "NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB, "2.13.0+cu130", "13.0", "9.15.1", False
)
MEMORY = MemoryFigures(4000 * MIB, 5000 * MIB, 5400 * MIB, 400 * MIB, (300 * MIB, 500 * MIB))
MEASURED = RealRunOutcome(
    status="finished",
    steps=5,
    seconds=3.0,
    device=DEVICE,
    allocated_bytes=4000 * MIB,
    reserved_bytes=5000 * MIB,
    outside_bytes=620 * MIB,
    step_seconds=(0.9, 0.11, 0.1, 0.12),
)


class Replayed:
    """A GPU whose run was measured before."""

    stand_in: StandIn | None = None

    def __init__(self, outcome: RealRunOutcome, held: int = 200 * MIB) -> None:
        self.outcome, self.held = outcome, held
        self.ran: list[tuple[str, int]] = []

    def probe(self, python: str, limit_s: float) -> GpuEnvironment:
        return DEVICE

    def others(self, limit_s: float) -> tuple[int, str]:
        return self.held, "counted"

    def run(self, command: Command, steps: int, limit_s: float) -> tuple[RealRunOutcome, str]:
        self.ran.append((command.line(), steps))
        return self.outcome, "last words"


@pytest.fixture
def prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prediction:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    command = "python train.py --batch 8"
    return Prediction(Path("plan.json"), command, "RTX 4090", "2.13.0+cpu", MEMORY, True)


def compare(prediction: Prediction, gpu: Replayed, tolerance: float | None = 0.02) -> Any:
    return verify(prediction, gpu, steps=5, tolerance=tolerance, time_limit_s=9.0)


# -- comparing -------------------------------------------------------------------------------


def test_measured_beside_predicted(prediction: Prediction) -> None:
    gpu = Replayed(MEASURED)
    result = compare(prediction, gpu)
    assert gpu.ran == [("python train.py --batch 8", 5)]
    # Of the 620 MiB outside the allocator others held 200 before.
    assert result.compared["device"].measured_bytes == 5420 * MIB
    assert [each.within for each in result.compared.values()] == [True] * 3
    assert result.good
    # The time from the first step to the second is warm-up.
    assert result.step_seconds == (0.11, 0.1, 0.12)
    assert result.notes == (
        "device memory is that of the GPU, less the memory of other processes before (counted)",
    )
    text = whole(prediction_subject(result))
    assert "allocated 3.91 GiB 3.91 GiB 0 B (+0.0%)" in " ".join(text.split())
    assert "110 ms, from 100 ms to 120 ms in 3 steps" in text
    assert text.startswith(
        "As predicted (stated range: ±2%, and the context's range for the device)"
    )
    assert "a recording predicts none" in text and result.quantities()["step_error_share"] is None
    document = json.loads(result.to_json())
    assert (document["format"], document["version"]) == ("trainfit-verification", 1)
    assert document["compared"]["reserved"]["measured_bytes"] == 5000 * MIB


def test_the_predicted_step_stands_next_to_the_measured_one(prediction: Prediction) -> None:
    """It decides nothing: the measured one includes waiting for batches."""
    step = StepSpeed(8, 0.1, (0.09, 0.105), gpu_s=0.1, host_s=0.05, copies_s=0.0, bound="compute")
    result = compare(dataclasses.replace(prediction, step=step), Replayed(MEASURED))
    text = " ".join(whole(prediction_subject(result)).split())
    assert "predicted without it: 100 ms (90 ms to 105 ms)" in text
    assert result.good
    assert result.quantities()["step_error_share"] == pytest.approx(1 - 0.1 / 0.11)


def test_nvml_knows_the_process_better_than_the_difference(prediction: Prediction) -> None:
    outcome = dataclasses.replace(MEASURED, process_bytes=410 * MIB)
    result = compare(prediction, Replayed(outcome, held=0))
    assert result.compared["device"].measured_bytes == 5410 * MIB
    assert result.notes == ()


@pytest.mark.parametrize(
    ("name", "figure", "good"),
    [
        ("allocated_bytes", 4080 * MIB, True),
        ("allocated_bytes", 4081 * MIB, False),
        ("allocated_bytes", 3919 * MIB, False),
        ("reserved_bytes", 5100 * MIB, True),
        ("reserved_bytes", 5101 * MIB, False),
        ("outside_bytes", (300 - 100 + 200) * MIB, True),
        ("outside_bytes", (300 - 100 + 200) * MIB - 1, False),
        ("outside_bytes", (500 + 100 + 200) * MIB, True),
        ("outside_bytes", (500 + 100 + 200) * MIB + 1, False),
    ],
)
def test_a_figure_is_good_within_its_range(
    name: str, figure: int, good: bool, prediction: Prediction
) -> None:
    result = compare(prediction, Replayed(dataclasses.replace(MEASURED, **{name: figure})))
    assert result.good is good
    assert ("outside" in whole(prediction_subject(result))) is not good
    assert compare(prediction, Replayed(result_of(name, figure)), tolerance=0.5).good


def result_of(name: str, figure: int) -> RealRunOutcome:
    return dataclasses.replace(MEASURED, **{name: figure})


@given(
    allocated=st.integers(0, 1 << 45),
    reserved=st.integers(0, 1 << 45),
    context=st.tuples(*[st.integers(0, GIB)] * 3).map(sorted),
    tolerance=st.none() | st.floats(0, 0.99),
)
def test_ranges_hold_their_prediction(
    allocated: int, reserved: int, context: list[int], tolerance: float | None
) -> None:
    low, value, high = context
    memory = MemoryFigures(allocated, reserved, reserved + value, value, (low, high))
    ranges = stated_ranges(memory, tolerance)
    for name, predicted in (
        ("allocated", allocated),
        ("reserved", reserved),
        ("device", memory.device_bytes),
    ):
        least, most = ranges[name]
        assert 0 <= least <= predicted <= most
        assert most - predicted >= int(predicted * (tolerance or 0.0)) - value


def test_the_range_that_a_result_states_is_its_own(prediction: Prediction) -> None:
    memory = dataclasses.replace(
        MEMORY,
        allocated_range_bytes=(4000 * MIB, 4100 * MIB),
        reserved_range_bytes=(4000 * MIB, 6000 * MIB),
        device_range_bytes=(4300 * MIB, 6500 * MIB),
    )
    stated = dataclasses.replace(prediction, memory=memory)
    outcome = dataclasses.replace(MEASURED, reserved_bytes=6000 * MIB)
    result = compare(stated, Replayed(outcome), tolerance=None)
    assert result.good
    assert whole(prediction_subject(result)).startswith(
        "As predicted (stated range: that of the result)"
    )
    assert result.compared["device"].high_bytes == 6500 * MIB
    # Exact as allocated memory may be: a segment of the allocator is never too far off.
    assert result.compared["allocated"].low_bytes == 3998 * MIB
    assert not compare(stated, Replayed(outcome), tolerance=0.02).good
    # Of a file that states none it is 2%.
    assert not compare(prediction, Replayed(outcome), tolerance=None).good
    assert compare(prediction, Replayed(MEASURED), tolerance=None).range_basis.startswith("±2%")


def test_what_is_not_known_is_no_failure(prediction: Prediction) -> None:
    outcome = dataclasses.replace(MEASURED, outside_bytes=None)
    result = compare(prediction, Replayed(outcome))
    assert result.compared["device"].within is None
    assert result.good
    assert re.search(r"device +5\.27 GiB +- .* not known", whole(prediction_subject(result)))


@pytest.mark.parametrize(
    ("predicted", "status", "good", "says"),
    [
        (True, "out_of_memory", False, "WRONG: predicted to fit, but ran out"),
        (False, "out_of_memory", True, "As predicted: it does not fit"),
        (False, "finished", False, "WRONG: predicted not to fit, but it fits"),
    ],
)
def test_whether_it_fits_is_a_prediction(
    predicted: bool, status: Any, good: bool, says: str, prediction: Prediction
) -> None:
    outcome = dataclasses.replace(MEASURED, status=status)
    result = compare(dataclasses.replace(prediction, fits=predicted), Replayed(outcome))
    assert result.good is good
    assert says in whole(prediction_subject(result))


def test_differences_of_the_runs_are_stated(prediction: Prediction) -> None:
    other = dataclasses.replace(prediction, gpu="RTX 3090", torch="2.9.1")
    outcome = dataclasses.replace(MEASURED, status="failed", message="KeyError: 'x'")
    notes = compare(other, Replayed(outcome)).notes
    assert "stopped after 5 optimizer steps: KeyError: 'x'" in notes[0]
    assert "predicted for NVIDIA GeForce RTX 3090, measured on NVIDIA GeForce RTX 4090" in notes[1]
    assert notes[2] == "predicted with torch 2.9.1, measured with torch 2.13.0"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "ended"}, "ended without an optimizer step; verify a command that trains"),
        ({"status": "failed", "message": "KeyError: 1", "location": "train.py:3"},
         "the script failed (KeyError: 1) at train.py:3 after 3 s"),
        ({"status": "exited", "message": "exit code 2"}, "exited with exit code 2"),
        ({"status": "died", "message": "its process was killed by SIGKILL"}, "by SIGKILL"),
        ({"status": "timeout"}, "the time limit was reached after 3 s"),
    ],
)  # fmt: skip
def test_a_run_without_a_step(changes: Any, says: str, prediction: Prediction) -> None:
    outcome = dataclasses.replace(MEASURED, steps=0, **changes)
    with pytest.raises(ScriptError) as caught:
        compare(prediction, Replayed(outcome))
    assert says in str(caught.value)
    assert caught.value.script_output == "last words"


def test_why_the_script_failed_is_said_if_it_is_known(prediction: Prediction) -> None:
    message = "RuntimeError: CUDA error: device-side assert triggered"
    failed: Any = {"status": "failed", "message": message, "traceback": message}
    with pytest.raises(ScriptError) as caught:
        compare(prediction, Replayed(dataclasses.replace(MEASURED, steps=0, **failed)))
    assert caught.value.cause is not None and caught.value.cause.kind == "device_assert"
    result = compare(prediction, Replayed(dataclasses.replace(MEASURED, **failed)))
    assert any("; cause: A GPU kernel met" in each and "; fix: " in each for each in result.notes)
    failed = {"status": "failed", "message": "KeyError: 1", "traceback": "KeyError: 1"}
    result = compare(prediction, Replayed(dataclasses.replace(MEASURED, **failed)))
    assert not any("cause" in each for each in result.notes)


def test_a_run_on_the_cpu(prediction: Prediction) -> None:
    outcome = RealRunOutcome("finished", 5, 1.0)
    with pytest.raises(ScriptError, match="no memory of the GPU was used"):
        compare(prediction, Replayed(outcome))


def test_without_a_gpu_nothing_is_run(prediction: Prediction) -> None:
    class Absent(Replayed):
        def probe(self, python: str, limit_s: float) -> GpuEnvironment:
            raise NoGpuError("verify on", "no driver", "run it on a machine with a GPU")

    gpu = Absent(MEASURED)
    with pytest.raises(NoGpuError, match="no GPU to verify on"):
        compare(prediction, gpu)
    assert gpu.ran == []


def test_requests_and_outcomes_survive_json(tmp_path: Path) -> None:
    spec = RunSpec(target=Target("script", "s.py", ("ü",)), steps=3, folder="o")
    assert RunSpec.from_json(spec.to_json()) == spec
    MEASURED.save(tmp_path / "o.json")
    assert RealRunOutcome.load(tmp_path / "o.json") == MEASURED


# -- the command in a result -------------------------------------------------------------------


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=5))
def test_a_command_line_gives_its_words_back(arguments: list[str]) -> None:
    program = package.__file__
    words = ["A=1 \n", "python", str(program), *arguments]
    escaped = [re.sub(r"\{(?=batch_size|amp)", "{{", word) for word in words]
    escaped = [re.sub(r"(\{\{(?:batch_size|amp)[^{}]*)\}", r"\1}}", word) for word in escaped]
    line = parse_command(escaped).line()
    again = parse_command(split_line(line))
    assert again.line() == line
    assert again.target().args == tuple(parse_command(escaped).target().args)
    assert again.environment() == {"A": "1 \n"}


@pytest.mark.parametrize(
    "word",
    ["", "a b", "it's", "\x1b[31m", "A=\x07", "$HOME", "ü", "\udc80", "{batch_size:8}", "\\'"],
)
def test_odd_words_come_back(word: str) -> None:
    script = str(package.__file__)
    given_words = ["python", script, word.replace("{", "{{").replace("}", "}}")]
    command = parse_command(given_words)
    assert parse_command(split_line(command.line())).target().args == (word,)


# -- reading results ---------------------------------------------------------------------------


def test_a_launch_command_without_the_batch_size_recommends_none(tmp_path: Path) -> None:
    """It can have other workers, and the figures recommended are of another batch size."""
    from tests.report.plan.test_text import PLAN

    plan = dataclasses.replace(PLAN, launch="OMP_NUM_THREADS=1 python train.py --j=4")
    plan.save(tmp_path / "plan.json")
    assert read_prediction(tmp_path / "plan.json", recommended=True).command == plan.launch
    dataclasses.replace(plan, batch_in_command=False).save(tmp_path / "plan.json")
    with pytest.raises(VerificationError, match="holds no command for another batch size"):
        read_prediction(tmp_path / "plan.json", recommended=True)


def test_results_that_cannot_be_verified(tmp_path: Path) -> None:
    with package.simulate("RTX 4090") as simulation:
        parameter = torch.nn.Parameter(torch.ones(9, device="cuda"))
        optimizer = torch.optim.SGD([parameter])
        for _ in range(2):
            parameter.sum().backward()
            optimizer.step()
    path = tmp_path / "r"
    simulation.recording.save(path)
    with pytest.raises(VerificationError, match="holds no command: it was recorded inside"):
        read_prediction(path)
    with pytest.raises(VerificationError, match="is a recording: it recommends nothing"):
        read_prediction(path, recommended=True)
    header = {**simulation.recording.header, "command": "python x.py"}
    recording = dataclasses.replace(simulation.recording, header=header)
    recording.save(path)
    assert read_prediction(path).command == "python x.py"


# -- a simulated GPU in the real one's place -----------------------------------------------------

TRAIN = """
import json, sys, torch
batch, steps = int(sys.argv[1]), int(sys.argv[2])
calls = dict.fromkeys(("synchronize", "mem_get_info"), 0)
def count(name):
    function = getattr(torch.cuda, name)
    def counted(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)
    setattr(torch.cuda, name, counted)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for name in calls:
    count(name)
{extra}
for step in range(steps):
    model(torch.randn(batch, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(json.dumps({{"step": step + 1, **calls}}), flush=True)
print("the end")
"""


def told(context: int, others: int = 0) -> DeviceConstants:
    parts = [Constant(CONTEXT, context * MIB, context * MIB, context * MIB, "measured", "told")]
    parts += [Constant(name, MIB, MIB, MIB, "measured", "told") for name in LIBRARIES]
    return DeviceConstants(tuple(parts), others * MIB)


def real_run(folder: Path, extra: str = "", steps: int = 4, wanted: int = 3) -> Any:
    """A run on a GPU whose context is 700 MiB and of which others hold 300."""
    (folder / "train.py").write_text(TRAIN.format(extra=extra))
    command = parse_command(["python", str(folder / "train.py"), "1024", str(steps)])
    machine = ThisMachine(StandIn(find_gpu("RTX 4090"), told(700, 300)))
    return machine.run(command, wanted, 120.0)


@pytest.mark.usefixtures("warm_measuring")
def test_a_run_is_measured_without_disturbing_it(tmp_path: Path) -> None:
    outcome, output = real_run(tmp_path)
    assert (outcome.status, outcome.steps) == ("finished", 3)
    assert outcome.device is not None and outcome.device.gpu == DEVICE.gpu
    # Weights, gradients and two states of two layers, and more.
    assert outcome.allocated_bytes > 4 * 4 * (2 * 512 * 2048 + 2048 + 512)
    assert outcome.reserved_bytes >= outcome.allocated_bytes
    assert outcome.outside_bytes in ((700 + 300 + 1) * MIB, (700 + 300 + 2) * MIB)
    assert outcome.process_bytes is None
    assert len(outcome.step_seconds) == 2
    assert min(outcome.step_seconds) > 0
    # Nobody waited for the device, nor asked it, until the last step was over.
    seen = [json.loads(line) for line in output.splitlines()]
    assert seen == [{"step": step, "synchronize": 0, "mem_get_info": 0} for step in (1, 2)]


@pytest.mark.slow
def test_a_short_script_is_measured_to_its_end(tmp_path: Path) -> None:
    outcome, output = real_run(tmp_path, steps=2, wanted=10)
    assert (outcome.status, outcome.steps) == ("ended", 2)
    assert outcome.allocated_bytes > 0
    assert output.rstrip().endswith("the end")


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", ["max_memory_allocated", "Event", "mem_get_info", "is_initialized"]
)
def test_our_errors_do_not_reach_the_script(broken: str, tmp_path: Path) -> None:
    extra = f"torch.cuda.{broken} = None"
    outcome, output = real_run(tmp_path, extra)
    assert (outcome.status, outcome.steps) == ("finished", 3)
    assert '"step": 2' in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_the_scripts_own_errors_are_its_own(tmp_path: Path) -> None:
    outcome, _ = real_run(tmp_path, "steps = 0\nraise KeyError('mine')")
    assert (outcome.status, outcome.steps) == ("failed", 0)
    assert outcome.message == "KeyError: 'mine'"
    assert "trainfit" not in outcome.traceback
    full = "torch.empty(30 << 30, dtype=torch.uint8, device='cuda')"
    assert real_run(tmp_path, full)[0].status == "out_of_memory"


@pytest.mark.slow
def test_a_script_that_resets_the_peaks(tmp_path: Path) -> None:
    reset = (
        "held = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')\n"
        "model.register_forward_pre_hook(lambda *_: step == 1 and ("
        "globals().update(held=None), torch.cuda.reset_peak_memory_stats()))"
    )
    outcome, _ = real_run(tmp_path, reset)
    assert outcome.allocated_bytes > 1 << 30


@pytest.mark.slow
def test_a_plan_is_verified(tmp_path: Path) -> None:
    """Predicted and "measured" on the same simulated GPU: they must agree to the byte."""
    (tmp_path / "train.py").write_text(TRAIN.format(extra="").replace('"1"', "1"))
    words = ("python", "train.py", "{batch_size:64}", "9")
    gpu = ("--gpu", "RTX 4090")
    planned = run("plan", *gpu, "--output", "plan.json", "--", *words, cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    rehearse = ("--rehearse", "RTX 4090", "--steps", "4", "--json")
    for flag, memory in (((), plan["now"]["memory"]), (("--recommended",), plan["recommended"])):
        done = run("verify", "plan.json", *flag, *rehearse, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        result = json_of(done)
        for name, each in result["compared"].items():
            assert each["predicted_bytes"] == memory[f"{name}_bytes"]
            assert each["measured_bytes"] == each["predicted_bytes"]
        predicted = None if flag else plan["speed"]["now"]["seconds"]
        assert result["predicted_step_s"] == predicted
        assert "a rehearsal on the simulated GPU" in result["notes"][0]
    batch = plan["now"]["recommended_batch"]
    assert result["command"] == f"python train.py {batch} 9"


@pytest.mark.slow
def test_a_wrong_prediction_is_bad_news(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(extra=""))
    done = run("simulate", "--gpu", "RTX 4090", "train.py", "65536", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ("verify", "recording.trainfit", "--rehearse", "H100 80GB SXM")
    other = run(*words, cwd=tmp_path)
    # Hopper's cuBLAS workspaces are 32 MiB instead of 8; the job takes some hundred.
    assert other.returncode == 1, other.stderr
    assert "outside" in other.stdout
    assert "NOT as predicted" in other.stdout
    assert run(*words, "--tolerance", "50%", cwd=tmp_path).returncode == 0


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.slow
@needs_no_gpu
def test_without_a_gpu_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('it-ran', 'w')\n" + TRAIN.format(extra=""))
    words = ("--gpu", "RTX 4090", "--allow-writes", "train.py", "64", "9")
    done = run("simulate", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "it-ran").unlink()
    verified = run("verify", "--allow-writes", "recording.trainfit", cwd=tmp_path)
    assert (verified.returncode, verified.stdout) == (2, "")
    assert error_line(verified).startswith("no GPU to verify on: PyTorch finds none")
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.json",), "result file 'none.json': there is no such file"),
        (("s.py",), "result file 's.py': damaged, or not a result file"),
    ],
)
def test_bad_input(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("x")
    done = run("verify", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in error_line(done)


def test_constants_of_the_catalogue_are_what_a_plan_takes() -> None:
    gpu = find_gpu("RTX 4090")
    with package.simulate(gpu) as simulation:
        torch.zeros(1, device="cuda")
    assert simulation.constants == device_constants(gpu)
