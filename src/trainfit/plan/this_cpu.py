"""Measures this machine's CPU: its cores, a core's dispatch rate, the command without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainfit.hardware.machine.processor import read_cpu
from trainfit.hardware.machine.system import System
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.runs.tracing import run_child, run_real
from trainfit.results.plan import HostCpu, PlanResult
from trainfit.results.real_runs import WARM_UP, Counts, CpuRunOutcome, VersusCpu
from trainfit.results.runs.spec import RunSpec
from trainfit.results.text import duration
from trainfit.speed.step import REFERENCE_OPERATOR_S

#: Seconds that importing PyTorch and measuring may take.
_LIMIT_S: Final = 60.0


def measured_cpu(command: Command) -> HostCpu:
    """The cores that a job has here, and a core's speed in the command's interpreter.

    Raises :class:`CommandError` where PyTorch does not run there.
    """
    with tempfile.TemporaryDirectory(prefix="trainfit-") as name:
        folder = Path(name)
        outcome = folder / "outcome.json"
        (folder / "request.json").write_text(json.dumps({"outcome": str(outcome)}))
        environment = {**os.environ, **command.environment()}
        module = "trainfit.speed.dispatch_probe"
        child = run_child(command, module, folder, environment, _LIMIT_S, runs_script=False)
        seconds = None
        with contextlib.suppress(OSError, ValueError, KeyError):
            seconds = float(json.loads(outcome.read_text())["operator_s"])
    if not seconds:
        last = (child.output.strip().splitlines() or [child.ending])[-1]
        raise CommandError(
            f"--cpu here: PyTorch does not run in {command.python} ({last}); describe the "
            "processor, as in --cpu cores=8,ghz=3.5"
        )
    cores = read_cpu(System()).usable_cores.value
    return HostCpu(cores, None, REFERENCE_OPERATOR_S / seconds)


# ---
# Is a GPU worth it? The same command for a few steps on this machine's CPU, for real.


#: Steps that are measured: so many at the most, fewer where they take long.
_LEAST_STEPS: Final = WARM_UP + 2
_MOST_STEPS: Final = 30
_ENOUGH_S: Final = 20.0
#: An argument that asks for a GPU: ``cuda``, ``cuda:0``, ``--device=cuda``, ``policy.device=cuda``.
_ASKS_FOR_GPU: Final = re.compile(r"((?:-{0,2}[\w.\-]+=)?)(?:cuda|gpu)(?::\d+)?")
#: How a script ends that cannot do without a GPU.
_FAILED: Final = ("failed", "exited", "unsupported")
#: PyTorch sees no GPU under these, whoever made it.
_NO_GPU: Final = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

#: Runs a command with a time limit in seconds: counting what, and with the CPU in the place of a
#: GPU that the script asks for?
Runner = Callable[[Command, float, Counts, bool], CpuRunOutcome]


def with_cpu(
    result: PlanResult,
    command: Command,
    time_limit_s: float,
    progress: Callable[[str], None] = lambda text: None,
    run: Runner | None = None,
) -> PlanResult:
    """The plan with the job's step on this machine's CPU; it never raises for what the script
    does there.

    A script that fails without a GPU is run once more, and told that the CPU is one.

    Args:
        run: runs a command on the CPU (for tests).
    """
    here = on_cpu(command)
    counts: Counts = "steps" if result.inference is None else "calls"

    def attempt(stand_in: bool) -> CpuRunOutcome:
        how = " instead of its GPU" if stand_in else ", for real"
        progress(f"running {command.name} on the CPU{how}")
        return (run or run_on_cpu)(here, time_limit_s, counts, stand_in)

    outcome, stands_in = attempt(False), False
    if outcome.status in _FAILED and not outcome.step_seconds:
        other = attempt(True)
        if other.step_seconds:
            outcome, stands_in = other, True
    cpu = VersusCpu(
        here.line(),
        result.now.batch_size,
        step_seconds=outcome.step_seconds[WARM_UP - 1 :],
        waited_s=outcome.waited_s[WARM_UP - 1 :],
        threads=outcome.threads,
        cores=read_cpu(System()).usable_cores.value,
        gpu_range_s=result.speed.now.range_s if result.speed is not None else None,
        why="" if outcome.step_seconds else _why(outcome, counts),
        counts=counts,
        stand_in=stands_in,
    )
    return dataclasses.replace(result, versus_cpu=cpu)


def on_cpu(command: Command) -> Command:
    """The command whose arguments name the CPU where they named a GPU."""
    words = list(command.words)
    for index in range(command.arguments_at, len(words)):
        asks = _ASKS_FOR_GPU.fullmatch(words[index])
        if asks is not None:
            words[index] = f"{asks[1]}cpu"
    return dataclasses.replace(command, words=tuple(words))


def run_on_cpu(
    command: Command, limit_s: float, counts: Counts = "steps", stand_in: bool = False
) -> CpuRunOutcome:
    """Run the command for some steps in a process that sees no GPU, or the CPU as one."""
    with tempfile.TemporaryDirectory(prefix="trainfit-") as name:
        spec = RunSpec(
            target=command.target(),
            folder=name,
            steps=_MOST_STEPS,
            least_steps=_LEAST_STEPS,
            enough_s=_ENOUGH_S,
            time_limit_s=limit_s,
            count=counts,
            cpu_stands_in=stand_in,
        )
        child = run_real(command, spec, "trainfit.speed.cpu_run", _NO_GPU)
        with contextlib.suppress(OSError, ValueError):
            return CpuRunOutcome.load(spec.outcome)
    return CpuRunOutcome("died", 0, child.seconds, message=child.ending)


def _why(outcome: CpuRunOutcome, counts: Counts) -> str:
    """Why no step was timed there, and what to do."""
    text = f" at {outcome.location}" if outcome.location else ""
    said = " ".join(outcome.message.split())[:200]
    steps = f"after {duration(outcome.seconds)} and {outcome.steps} of {_LEAST_STEPS} {counts}"
    if outcome.status == "timeout":
        return f"the time limit was reached{text} {steps}; raise --time-limit"
    if outcome.status in ("ended", "finished"):
        more = "make more optimizer steps" if counts == "steps" else "call its model more often"
        return f"the script ended {steps}; let it {more}"
    ended = f"the script exits with {said}" if outcome.status == "exited" else f"it {said}"
    if outcome.status in ("failed", "out_of_memory", "unsupported"):
        ended = f"the script fails there{text}: {said}"
    elif outcome.status == "died":
        ended = said
    return f"{ended}; let it choose its device by torch.cuda.is_available()"
