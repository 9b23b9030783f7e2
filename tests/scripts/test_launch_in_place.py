"""Programs that end in ``accelerate launch`` of one process run their script in the simulation."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers_cli import error_line, trainfit
from trainfit.results.runs.trace import Target
from trainfit.scripts.launchers import LaunchInPlace
from trainfit.simgpu.patching import PatchSet

_LAUNCHER = """
import subprocess
import sys
from accelerate.commands.launch import launch_command, launch_command_parser

words = ["--num_processes", "1", sys.argv[1], *sys.argv[2:]]
launch_command(launch_command_parser().parse_args(words))
"""

_SCRIPT = """
import os, sys, torch

assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no" and sys.argv[1:] == ["--wide", "3"]
assert __name__ == "__main__" and torch.cuda.is_available()
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(100):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in Accelerate's place, whose start of a process is only noted."""
    module: Any = ModuleType("accelerate.commands.launch")
    module.started = []
    module.simple_launcher = module.started.append
    module.prepare_simple_launcher_cmd_env = lambda args: (
        [sys.executable, *(["-m"] if args.module else []), args.script, "--wide", "3"],
        {**os.environ, "FROM_THE_LAUNCHER": "yes"},
    )
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch", module)
    monkeypatch.setenv("FROM_THE_LAUNCHER", "no")
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(("module", "kind"), [(False, "script"), (True, "module")])
def test_one_process_is_this_one(launcher: Any, module: bool, kind: Any) -> None:
    seen: list[tuple[Target, str]] = []
    patches = PatchSet()
    watch = LaunchInPlace(lambda target: seen.append((target, os.environ["FROM_THE_LAUNCHER"])))
    watch.install(patches)
    launcher.simple_launcher(argparse.Namespace(no_python=False, module=module, script="train"))
    patches.restore()
    assert seen == [(Target(kind, "train", ("--wide", "3")), "yes")]
    assert launcher.started == []


def test_another_program_is_left_to_accelerate(launcher: Any) -> None:
    patches = PatchSet()
    watch = LaunchInPlace(lambda target: pytest.fail(f"{target} was run"))
    watch.install(patches)
    words = argparse.Namespace(no_python=True, module=False, script="./program")
    launcher.simple_launcher(words)
    patches.restore()
    assert launcher.started == [words]
    launcher.simple_launcher(1)  # Accelerate's own again
    assert launcher.started == [words, 1]


def test_a_console_script_that_launches_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "tool.py").write_text(_LAUNCHER)
    (tmp_path / "train.py").write_text(_SCRIPT)
    words = ("simulate", "--gpu", "custom:8GiB", "--steps", "2", "tool.py", "train.py")
    done = trainfit(*words, "--wide", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "train.py").write_text("raise ValueError('mine')")
    failed = trainfit(*words, cwd=tmp_path)
    assert failed.returncode != 0
    assert "train.py:1 (ValueError: mine)" in error_line(failed)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_a_script_starts_by_subprocess(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them runs here; the others, which would wait for it, are not started."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "")  # put back at the end
    ran: list[tuple[Target, str]] = []
    launch = LaunchInPlace(lambda target: ran.append((target, os.environ["RANK"])), rank)
    patches = PatchSet()
    launch.install(patches)
    try:
        for number in range(2):
            given = {**os.environ, "RANK": str(number), "WORLD_SIZE": "2"}
            process = subprocess.Popen([sys.executable, "-u", "train.py", "--x"], env=given)
            assert process.wait() == process.poll() == 0
        other = subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True)
    finally:
        patches.restore()
        os.environ.pop("RANK", None)
    assert ran == [(Target("script", "train.py", ("--x",)), str(rank))]
    assert other.stdout == "3\n"


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives what a rank's :class:`LaunchInPlace` runs, with its environment, while it is there."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    patches = PatchSet()

    def of_rank(rank: int) -> list[tuple[Target, dict[str, str]]]:
        ran: list[tuple[Target, dict[str, str]]] = []
        launch = LaunchInPlace(lambda target: ran.append((target, dict(os.environ))), rank, gpus=2)
        launch.install(patches)
        return ran

    yield of_rank
    patches.restore()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_that_starts_itself_for_each_gpu(
    rank: int, in_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under names of its own: which of its starts it is tells the rank."""
    main = types.ModuleType("__main__")
    main.__file__ = "train.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    ran = in_place(rank)
    for number in range(2):
        given = {**os.environ, "MY_GPU": str(number)}
        process = subprocess.Popen(
            [sys.executable, os.path.abspath("train.py")], env=given, stdout=subprocess.PIPE
        )
        assert process.communicate() == (b"", None) and process.returncode == 0
    assert [(target.name, given["MY_GPU"]) for target, given in ran] == [
        (os.path.abspath("train.py"), str(rank))
    ]


def test_ranks_told_by_words_or_by_the_own_environment(in_place: Any) -> None:
    ran = in_place(1)
    for number in range(2):
        subprocess.Popen([sys.executable, "main.py", "--world-size", "2", "--rank", str(number)])
    assert [target.args[-1] for target, _ in ran] == ["1"]
    os.environ.update(RANK="1", WORLD_SIZE="2")
    subprocess.run([sys.executable, "other.py"], check=True)
    assert ran[1][0].name == "other.py"


def test_a_launcher_that_a_script_starts_runs_the_rank_here(in_place: Any) -> None:
    """As ultralytics has it: the module is run here, and its agent runs the script."""
    ran = in_place(1)
    words = ["-m", "torch.distributed.run", "--nproc_per_node=2", "rank.py", "--x"]
    subprocess.run([sys.executable, *words], check=True)
    subprocess.run(["torchrun", "--nproc_per_node=2", "rank.py"], check=True)
    assert {(target.kind, target.name) for target, _ in ran} == {("module", words[1])}
    from torch.distributed import run

    run.main(words[2:])
    target, given = ran[-1]
    assert (target.name, target.args) == ("rank.py", ("--x",))
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert {name: given[name] for name in expected} == expected


def test_modules_that_read_their_rank_when_imported_have_the_new_one(
    in_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ultralytics', which would start its ranks once more; not a rank of LoRA's."""
    module, lora = types.ModuleType("reads_rank"), types.ModuleType("lora")
    vars(module).update(RANK=-1, LOCAL_RANK=-1, WORLD_SIZE=1)
    vars(lora).update(RANK=16)
    monkeypatch.setitem(sys.modules, "reads_rank", module)
    monkeypatch.setitem(sys.modules, "lora", lora)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    in_place(1)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
    seen = elastic_launch(config, lambda: dict(vars(module)))()[1]
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (1, 1, 2)
    assert vars(lora)["RANK"] == 16


def test_elastic_launch_of_a_function(in_place: Any) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    in_place(1)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
    assert elastic_launch(config, lambda add: int(os.environ["RANK"]) + add)(4) == {1: 5}
