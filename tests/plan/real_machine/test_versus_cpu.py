"""Is a GPU worth it? The same script on this machine's CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_cli import SCRIPTS, trainfit
from helpers_plan import brief_plans
from helpers_warm import MEASURING, warm_runs
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.this_cpu import on_cpu, run_on_cpu, with_cpu
from trainfit.report.sections.real_runs import versus_cpu_facts
from trainfit.results.plan import Inference, PlanResult
from trainfit.results.real_runs import CpuRunOutcome, VersusCpu
from trainfit.results.runs.trace import Status
from trainfit.results.speed import Speed, StepSpeed

pytestmark = pytest.mark.usefixtures("warm_measuring")

TRAIN = ("python", str(SCRIPTS / "train.py"))
STEP = StepSpeed(8, 0.01, (0.008, 0.014), 0.004, 0.01, 0.0, "launches", 800.0)
SPEED = Speed(STEP, (), None, None, {}, "", epoch_s=10.0)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlanResult:
    """A plan whose script ran on the CPU as well."""
    folder = tmp_path_factory.mktemp("versus")
    words = (*TRAIN, "--batch_size={batch_size:4}", "--width=64", "--samples=400")
    own = ("--gpu=T4", "--versus-cpu", "--no-remedies", "-v", "--output=plan.json")
    with warm_runs(MEASURING), brief_plans():
        done = trainfit("plan", *own, "--", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "plan.txt").write_text(done.stdout)
    result = PlanResult.load(folder / "plan.json")
    return dataclasses.replace(result, notes=(done.stdout,))  # what was printed, for the tests


@pytest.mark.slow
def test_a_script_that_chooses_its_device_is_measured(planned: PlanResult) -> None:
    found = planned.versus_cpu
    assert found is not None and not found.why
    assert len(found.step_seconds) >= 2 and all(step > 0 for step in found.step_seconds)
    assert len(found.waited_s) == len(found.step_seconds)
    assert 0 < (found.waiting_share or 0) < 1  # the loader works in the same process
    assert found.batch_size == 4 and found.threads and found.cores
    assert planned.speed is not None and found.gpu_range_s == planned.speed.now.range_s
    assert "--batch_size=4" in found.command
    (printed,) = planned.notes
    assert "Is a GPU worth it?" in printed and f"of {len(found.step_seconds)} steps" in printed


#: Asks for a GPU by name; its argument: "train", "infer", or "strict", which looks what it got.
ON_CUDA = """import sys
import torch
model = torch.nn.Linear(8, 8).cuda()
if sys.argv[1] == "strict":
    assert model.weight.is_cuda
optimizer = torch.optim.SGD(model.parameters(), 0.1) if sys.argv[1] != "infer" else None
for _ in range(200):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    if optimizer:
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def on_cuda(tmp_path: Path) -> str:
    (tmp_path / "on_cuda.py").write_text(ON_CUDA)
    return str(tmp_path / "on_cuda.py")


@pytest.mark.parametrize(("what", "counts"), [("train", "steps"), ("infer", "calls")])
def test_a_script_with_the_gpu_written_into_it_gets_the_cpu_for_it(
    planned: PlanResult, on_cuda: str, what: str, counts: str
) -> None:
    """Its steps are measured, or the calls of a model that is not trained."""
    if what == "infer":
        planned = dataclasses.replace(planned, inference=Inference(True, None, None))
    found = with_cpu(planned, parse_command(["python", on_cuda, what]), 60.0).versus_cpu
    assert found is not None and found.stand_in and not found.why
    assert found.counts == counts and len(found.step_seconds) == 29


def test_a_script_that_needs_a_gpu_is_told_how_to_do_without(
    planned: PlanResult, on_cuda: str
) -> None:
    found = with_cpu(planned, parse_command(["python", on_cuda, "strict"]), 60.0).versus_cpu
    assert found is not None and not found.step_seconds and not found.stand_in
    assert "the script fails there at" in found.why and "on_cuda.py:3" in found.why
    assert found.why.endswith("let it choose its device by torch.cuda.is_available()")


def test_a_real_run_ends_when_it_has_seen_enough() -> None:
    command = parse_command([*TRAIN, "--batch_size=2", "--width=32", "--layers=1"])
    outcome = run_on_cpu(command, 120.0)
    assert (outcome.status, outcome.steps) == ("finished", 30)
    assert len(outcome.step_seconds) == 29
    short = parse_command([*TRAIN, "--batch_size=2", "--width=32", "--samples=2"])
    assert run_on_cpu(short, 120.0).steps == 30  # it makes 100 epochs


@pytest.mark.parametrize(
    ("word", "there"),
    [
        ("cuda", "cpu"),
        ("cuda:1", "cpu"),
        ("--device=cuda", "--device=cpu"),
        ("--policy.device=cuda:0", "--policy.device=cpu"),
        ("trainer.accelerator=gpu", "trainer.accelerator=cpu"),
        ("--name=cuda-runs", "--name=cuda-runs"),
        ("--out=/data/cuda", "--out=/data/cuda"),
        ("gpu_runs", "gpu_runs"),
    ],
)
def test_arguments_that_name_the_gpu_name_the_cpu(word: str, there: str) -> None:
    command = parse_command([*TRAIN, "--device", word, "{batch_size:4}"])
    assert on_cpu(command).fill()[2:] == ["--device", there, "4"]
    assert on_cpu(command).python == command.python


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        ("failed", "RuntimeError: no GPU", "fails there at a.py:3: RuntimeError: no GPU; let it"),
        ("exited", "exit code 4", "exits with exit code 4; let it"),
        ("ended", "", "ended after 7 s and 1 of 3 steps; let it make more"),
        ("timeout", "", "time limit was reached at a.py:3 after 7 s and 1 of 3 steps"),
        ("died", "its process was killed by SIGKILL", "killed by SIGKILL; let it"),
    ],
)
def test_why_nothing_was_measured(
    planned: PlanResult, status: Status, message: str, words: str
) -> None:
    outcome = CpuRunOutcome(status, 1, 7.0, message=message, location="a.py:3")
    result = with_cpu(planned, parse_command(list(TRAIN)), 10.0, run=lambda *_: outcome)
    assert result.versus_cpu is not None and words in result.versus_cpu.why
    text = section(result.versus_cpu)
    assert "not measured" in text and "cannot tell: a step on the CPU is not known" in text


def test_a_failing_script_is_run_again_with_the_cpu_for_its_gpu(planned: PlanResult) -> None:
    asked: list[tuple[str, bool]] = []

    def run(_: object, __: float, counts: str, stand_in: bool) -> CpuRunOutcome:
        asked.append((counts, stand_in))
        if stand_in:
            return CpuRunOutcome(
                "finished", 4, 3.0, step_seconds=(0.5, 0.2, 0.3), waited_s=(0, 0, 0)
            )
        return CpuRunOutcome("exited", 0, 1.0, message="exit code 1")

    infers = dataclasses.replace(planned, inference=Inference(True, None, None))
    found = with_cpu(infers, parse_command(list(TRAIN)), 10.0, run=run).versus_cpu
    assert asked == [("calls", False), ("calls", True)]
    assert found is not None and found.stand_in and found.step_seconds == (0.5, 0.2, 0.3)
    text = section(found)
    assert "300 ms a call" in text and "it ran on the CPU instead, without autocast" in text


def measured(*steps: float, gpu: tuple[float, float] | None = (0.008, 0.014)) -> VersusCpu:
    return VersusCpu("python train.py", 8, steps, (0.0,) * len(steps), 2, 2.0, gpu)


@given(
    steps=st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=9),
    low=st.floats(1e-4, 1e2),
    wide=st.floats(1.0, 3.0),
)
def test_who_is_faster_follows_from_both_ranges(
    steps: list[float], low: float, wide: float
) -> None:
    found = measured(*steps, gpu=(low, low * wide))
    ratio = found.ratio_range
    assert ratio is not None and ratio[0] <= ratio[1]
    sure = {"gpu": min(steps) > low * wide, "cpu": max(steps) < low}
    assert found.faster == next((name for name, holds in sure.items() if holds), "cannot tell")


def section(found: VersusCpu, speed: Speed | None = SPEED) -> str:
    told = versus_cpu_facts(found, speed)
    return "; ".join(f"{row.label} {row.text}" for row in told.rows) if told else ""


def test_the_verdict_in_words() -> None:
    text = section(measured(0.2, 0.21, 0.22))
    assert "210 ms a step, 38.1 samples/s (median of 3 steps, 200 ms to 220 ms, 2 threads" in text
    assert "the GPU is 14.3× to 27.5× as fast; an epoch needs 10 s on it, 3 min 30 s on the" in text
    slower = section(measured(0.001))
    assert "no: the CPU is faster, the GPU reaches 7% to 12% of its rate" in slower
    assert "cannot tell: the GPU is 0.71× to 1.25× as fast" in section(measured(0.01))
    unknown = section(measured(0.01, gpu=None), None)
    assert "cannot tell: the step on the GPU is not known" in unknown


def test_a_larger_batch_that_the_gpu_wants_is_named() -> None:
    large = StepSpeed(128, 0.016, (0.013, 0.022), 0.015, 0.01, 0.0, "bandwidth", 8000.0)
    known = dataclasses.replace(SPEED, curve=(STEP, large), knee=128)
    text = section(measured(0.01), known)
    assert "10% of its throughput at this batch size: 10.0× the samples/s with 128" in text
    waits = dataclasses.replace(measured(0.01), waited_s=(0.004,))
    assert "40% of it waits for the DataLoader" in section(waits)
