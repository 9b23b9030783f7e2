"""Programs that end in ``accelerate launch`` of one process run their script in the simulation."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
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
    watch.remove()
    patches.restore()
    assert seen == [(Target(kind, "train", ("--wide", "3")), "yes")]
    assert launcher.started == []


def test_another_program_is_left_to_accelerate(launcher: Any) -> None:
    patches = PatchSet()
    watch = LaunchInPlace(lambda target: pytest.fail(f"{target} was run"))
    watch.install(patches)
    words = argparse.Namespace(no_python=True, module=False, script="./program")
    launcher.simple_launcher(words)
    watch.remove()
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
        launch.remove()
        patches.restore()
        os.environ.pop("RANK", None)
    assert ran == [(Target("script", "train.py", ("--x",)), str(rank))]
    assert other.stdout == "3\n"
