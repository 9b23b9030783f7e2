"""The launch command: what is put before the user's, and what is left as it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_cli import json_of, trainfit
from helpers_commands import parse
from trainfit.hardware import find_gpu
from trainfit.plan.command.parsing import parse_command, split_line
from trainfit.plan.launch_line import launch, useless_variables
from trainfit.plan.runs.tracing import Tracer
from trainfit.results.loader import CoreAdvice, VariableAdvice
from trainfit.results.runs.trace import TraceOutcome

pytestmark = pytest.mark.usefixtures("script", "warm")

CORES = CoreAdvice("taskset -c 0-3", (0, 1, 2, 3), "the fast cores", "4.9 GHz, not 3.8")


def variable(name: str, value: str, where: str = "environment") -> VariableAdvice:
    return VariableAdvice(name, value, where, f"{name}={value}", "why", "seen")


def test_cores_are_chosen_behind_what_starts_the_process_elsewhere() -> None:
    """srun's own cores are not those of its task; an environment manager's are."""
    made = launch(parse("A=b srun -n1 env B=c python train.py"), {}, {"X": "y"}, [], CORES)
    assert made.line == "X=y A=b srun -n1 taskset -c 0-3 env B=c python train.py"
    made = launch(parse("A=b nice python train.py"), {}, {}, [], CORES)
    assert made.line == "A=b taskset -c 0-3 nice python train.py"


THREADS = [variable("OMP_NUM_THREADS", "1"), variable("MKL_NUM_THREADS", "1")]


def test_everything_at_once() -> None:
    command = parse("python train.py --j={num_workers:0}")
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    advice = [*THREADS, variable("cv2.setNumThreads", "0", "worker_init_fn")]
    made = launch(command, {"num_workers": "4"}, variables, advice, CORES)
    assert made.line == (
        "ACCELERATE_MIXED_PRECISION=bf16 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 taskset -c 0-3 "
        "python train.py --j=4"
    )
    assert made.notes == ()
    again = parse_command(split_line(made.line))
    assert again.environment() == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    assert again.target().args == ("--j=4",)


@pytest.mark.parametrize(
    ("line", "launched"),
    [
        ("A=b C= python train.py", "X=1 A=b C= taskset -c 0-3 python train.py"),
        ("env A=b python train.py", "X=1 taskset -c 0-3 env A=b python train.py"),
        ("A=b nice -n 5 env B=c python train.py X=2",
         "X=1 A=b taskset -c 0-3 nice -n 5 env B=c python train.py X=2"),
        ("numactl --membind=0 python train.py",
         "X=1 taskset -c 0-3 numactl --membind=0 python train.py"),
        ("python -u train.py -C", "X=1 taskset -c 0-3 python -u train.py -C"),
    ],
)  # fmt: skip
def test_where_they_go(line: str, launched: str) -> None:
    made = launch(parse(line), {}, {"X": "1"}, (), CORES)
    assert made.line == launched
    assert made.notes == ()


@pytest.mark.parametrize(
    "line",
    [
        "OMP_NUM_THREADS=4 taskset -c 1 python train.py",
        "OMP_NUM_THREADS=4 /usr/bin/taskset 0x3 python train.py",
        "OMP_NUM_THREADS=4 numactl -C 0-7 python train.py",
        "nice env OMP_NUM_THREADS=4 numactl --cpunodebind=0 python train.py",
    ],
)
def test_what_the_command_sets_is_kept_and_said(line: str) -> None:
    made = launch(parse(line), {}, {}, THREADS, CORES)
    assert made.line == f"MKL_NUM_THREADS=1 {line}"
    assert made.notes[0] == "OMP_NUM_THREADS=4 of the command is kept; recommended is 1"
    assert "is kept; recommended is taskset -c 0-3" in made.notes[1]


def test_the_same_value_is_not_worth_a_note() -> None:
    made = launch(parse("OMP_NUM_THREADS=1 python train.py"), {}, {}, THREADS[:1])
    assert (made.line, made.notes) == ("OMP_NUM_THREADS=1 python train.py", ())


@pytest.mark.parametrize(
    ("line", "launched"),
    [
        ("env OMP_NUM_THREADS=0 python train.py", "python train.py"),
        ("/usr/bin/env OMP_NUM_THREADS=0 MKL_NUM_THREADS= nice python train.py",
         "/usr/bin/env MKL_NUM_THREADS= nice python train.py"),
        ("nice env OMP_NUM_THREADS=0 MKL_NUM_THREADS=x python train.py", "nice python train.py"),
        ("env -u A OMP_NUM_THREADS=0 python train.py", "env -u A python train.py"),
        ("env python train.py", "env python train.py"),
        ("OMP_NUM_THREADS=0 env python train.py", "env python train.py"),
        ("env OMP_NUM_THREADS=0 env A=b python train.py", "env A=b python train.py"),
    ],
)  # fmt: skip
def test_env_goes_with_the_last_of_its_variables(line: str, launched: str) -> None:
    command = parse(line)
    made = launch(command, {}, {}, useless=useless_variables(command, None))
    assert made.line == launched
    removed = "OMP_NUM_THREADS" in line
    assert ("OMP_NUM_THREADS=0 of the command is left out" in "".join(made.notes)) == removed


_NAMES = st.from_regex(r"[A-Z_]{1,8}", fullmatch=True)
_VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=12)


@given(
    st.dictionaries(_NAMES, _VALUES, max_size=3),
    st.dictionaries(_NAMES, _VALUES, max_size=4),
    st.booleans(),
    st.lists(_VALUES.filter(lambda text: "{" not in text), max_size=3),
)
def test_each_variable_is_set_once(
    own: dict[str, str], wanted: dict[str, str], cores: bool, args: list[str]
) -> None:
    own = {name: value.replace("{", "") for name, value in own.items()}
    words = [*(f"{name}={value}" for name, value in own.items()), "python", "train.py", *args]
    made = launch(parse_command(words), {}, wanted, (), CORES if cores else None)
    again = parse_command(split_line(made.line))
    assert again.environment() == {**wanted, **own}
    assert len(again.assignments_at) == len({**wanted, **own})
    assert again.target().args == tuple(args)
    assert ("taskset" in again.words[: again.program_at]) == cores


def test_bash_reads_it_as_it_is_meant(tmp_path: Path) -> None:
    """Shell variables, then a program that gets what is behind it."""
    program = tmp_path / "show.py"
    program.write_text("import os, sys; print(os.environ['A'], os.environ['B'], sys.argv[1:])")
    cores = CoreAdvice("nice -n 1", (), "", "")
    command = parse_command(["B=two words", "python3", str(program), "it's"])
    made = launch(command, {}, {"A": "1 $HOME"}, (), cores)
    done = subprocess.run(
        ["bash", "-c", made.line], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout == '1 $HOME two words ["it\'s"]\n'


# -- Accelerate --------------------------------------------------------------------------------

ACCELERATED = """
import os, torch
{before}
from accelerate import Accelerator
accelerator = Accelerator({argument})
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.randn(4, 8, device=accelerator.device)).sum())
optimizer.step()
"""
VARIABLE = "ACCELERATE_MIXED_PRECISION"


def simulated(tmp_path: Path, argument: str, before: str = "", words: str = "") -> TraceOutcome:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(ACCELERATED.format(argument=argument, before=before))
    command = parse(f"{words} python train.py")
    with Tracer(command, find_gpu("RTX 4090"), steps=1) as tracer:
        outcome = tracer.trace().outcome
    assert outcome.status == "finished", outcome
    return outcome


@pytest.mark.slow
def test_accelerate_that_asks_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    outcome = simulated(tmp_path, "", words=f"{VARIABLE}=bf16")
    assert (outcome.accelerate, outcome.autocast) == ("bf16", "bfloat16")


@pytest.mark.slow
def test_accelerate_that_is_told_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert simulated(tmp_path, "").accelerate == "no"
    assert simulated(tmp_path, "mixed_precision='no'").accelerate is None
    by_script = f"os.environ[{VARIABLE!r}] = 'bf16'"
    outcome = simulated(tmp_path, "", before=by_script)
    assert (outcome.accelerate, outcome.autocast) == (None, "bfloat16")


@pytest.mark.slow
@pytest.mark.usefixtures("unconfirmed")
def test_amp_is_a_variable_away_where_accelerate_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "train.py").write_text(ACCELERATED.format(argument="", before=""))
    words = ("plan", "--gpu", "RTX 4090", "--json", "--remedies=amp-bf16,amp-fp16", "--")
    plan = json_of(trainfit(*words, "python", "train.py", cwd=tmp_path))
    assert plan["launch"] == "python train.py"
    launched = {each["name"]: each["launch"] for each in plan["remedies"]["items"]}
    assert launched == {
        "amp-bf16": f"{VARIABLE}=bf16 python train.py",
        "amp-fp16": f"{VARIABLE}=fp16 python train.py",
    }
    # So small a model is slower with it.
    asked = [(each["asked"], each["value"]) for each in plan["amp_choice"]["candidates"]]
    assert asked == [("present", "no"), ("variable", "bf16"), ("variable", "fp16")]
    # What was exported belongs to the plan, and to its launch command.
    words = ("plan", "--gpu", "RTX 4090", "--json", "--no-remedies", "--", "python", "train.py")
    plan = json_of(trainfit(*words, cwd=tmp_path, **{VARIABLE: "bf16"}))
    assert plan["now"]["amp"] == "bfloat16"
    assert plan["amp_choice"]["variable"] == plan["variables"][VARIABLE] == "no"
    assert plan["launch"] == f"{VARIABLE}=no python train.py"


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "word"), [("RTX 4090", "bf16"), ("T4", "fp16")])
def test_accelerates_variable_is_set_where_it_wins(
    gpu: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.delenv(VARIABLE, raising=False)
    text = ACCELERATED.format(argument="", before="").replace("Linear(8, 8)", "Linear(4096, 4096)")
    (tmp_path / "train.py").write_text(text.replace("(4, 8,", "(4096, 4096,"))
    words = ("plan", "--gpu", gpu, "--json", "--no-remedies", "--", "python", "train.py")
    plan = json_of(trainfit(*words, cwd=tmp_path))
    assert plan["launch"] == f"{VARIABLE}={word} python train.py"
    assert plan["amp_choice"]["variable"] == word
