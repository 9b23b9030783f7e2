"""Ctrl-C while a command is watched, and what a full disk leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers_watch import run_on_cpu
from trainfit.cli.verbs import watch
from trainfit.results.runs import tables
from trainfit.torch_private.modules import Inside, fast_call
from trainfit.watch import launch
from trainfit.watch.judge import judge
from trainfit.watch.recorder import own_frames, process


def test_a_terminal_is_seen_though_stdin_is_a_file() -> None:
    ask = "from trainfit.watch.launch import _in_foreground as f; raise SystemExit(7 if f() else 8)"
    shell = f"{sys.executable} -c '{ask}' < /dev/null"
    code = (
        f"import os, pty; os._exit(os.waitstatus_to_exitcode(pty.spawn(['sh', '-c', {shell!r}])))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 7


def test_a_command_that_goes_on_after_an_interrupt_is_told_how_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Code in C, as a collective that waits for another rank, does not look at Ctrl-C."""
    now = 100.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    command = SimpleNamespace(pid=4711, poll=lambda: None, interrupted_s=None)
    run = watch.InterruptedRun(command, tmp_path)  # type: ignore[arg-type]
    now = 200.0
    assert run.poll() is None  # nobody has interrupted it
    command.interrupted_s = 195.0
    run.poll()  # it may still write a checkpoint
    assert capsys.readouterr().err == ""
    now = 206.0
    run.poll()
    run.poll()
    (line,) = capsys.readouterr().err.splitlines()
    assert "kill -KILL 4711" in line and f"trainfit watch --read {tmp_path}" in line
    command.poll = lambda: 130
    assert run.poll() == 130


@pytest.mark.parametrize("in_foreground", [True, False])
def test_when_a_command_was_interrupted_is_known(
    monkeypatch: pytest.MonkeyPatch, in_foreground: bool
) -> None:
    monkeypatch.setattr(launch, "_in_foreground", lambda: in_foreground)
    code = (
        "import signal, time; signal.signal(2, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    )
    read, write = os.pipe()
    with launch.WatchedCommand([sys.executable, "-c", code], None, output=write) as command:
        os.read(read, 1)  # it ignores interrupts from now on
        assert command.interrupted_s is None
        os.kill(os.getpid(), signal.SIGINT)
        assert command.interrupted_s is not None and command.poll() is None
        command.send_signal(signal.SIGKILL)
        assert command.wait() == 128 + signal.SIGKILL
    os.close(read)
    os.close(write)


def test_a_second_interrupt_leaves_the_commands_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended_by(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_failed", None)
    monkeypatch.setattr(process, "_active", SimpleNamespace(pid=os.getpid(), ended_by=ended_by))
    printed: list[BaseException] = []
    error = ValueError("never raised: it has no traceback")
    process._noting(lambda kind, error, trace: printed.append(error))(ValueError, error, None)
    assert printed == [error]


def test_an_interrupt_while_an_error_is_printed_shows_no_frame_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python would tell of it as an "Error in sys.excepthook", in this hook."""
    monkeypatch.setattr(process, "_failed", None)
    monkeypatch.setattr(process, "_active", None)

    printed: list[BaseException] = []

    def prints(_: Any, error: BaseException, __: Any) -> None:
        printed.append(error)
        raise KeyboardInterrupt

    error = ValueError()
    process._noting(prints)(ValueError, error, None)
    assert printed == [error]


def test_estimated_steps_are_a_share_of_the_recorded_ones() -> None:
    made = run_on_cpu(flags=tables.LIGHT, header={"light_steps": 1_000_000})
    (note,) = [each for each in judge(made).notes if "estimated" in each]
    assert "the phases of 100% of" in note


def test_an_error_in_a_module_shows_no_frame_of_the_hook_that_calls_it() -> None:
    call = fast_call(torch.nn.Module.__call__, Inside(True), lambda *_: None)
    assert call is not None
    with pytest.raises(RuntimeError) as caught:
        call(torch.nn.Linear(2, 2), torch.ones(3))
    assert any("torch_private" in str(each.path) for each in caught.traceback)
    trace = own_frames.without_ours(caught.value)
    files = []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    assert len(files) > 2 and not [each for each in files if "torch_private" in each]


def test_what_is_typed_while_all_is_printed_says_nothing() -> None:
    """Python would tell of an interrupt in its own end: "lost sys.stderr"."""
    code = (
        "import atexit, os, signal, sys\n"
        "from trainfit.cli.main import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"  # runs after what comes later
        "sys.argv = ['trainfit', 'watch', '--read', '/nowhere/at/all']\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


def test_an_interrupt_while_the_record_is_closed_shows_no_frame_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_failed", None)
    monkeypatch.setattr(process, "_active", SimpleNamespace(pid=os.getpid(), stop=stop))
    process._at_exit()


@pytest.mark.parametrize("recorded", [True, False])
def test_an_interrupt_between_the_command_and_its_report_tells_where_that_is(
    recorded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: Any) -> int:
        if recorded:
            (tmp_path / "rank0.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "_watched", interrupted)
    monkeypatch.setattr(watch, "_why_not", lambda *_: "")
    options = SimpleNamespace(folder=tmp_path, fail_if=None)
    with pytest.raises(KeyboardInterrupt):
        watch._run(options, ["python", "x.py"], None)  # type: ignore[arg-type]
    assert (f"trainfit watch --read {tmp_path}" in capsys.readouterr().err) is recorded


def test_an_interrupt_while_the_sampler_ends_leaves_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "start_sampler", lambda *_: SimpleNamespace(stop=stop))
    options: Any = SimpleNamespace(quiet=True, plain=True, noise_scale=False, memory_history=False)
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    assert watch._watched(options, command, tmp_path) == 7
