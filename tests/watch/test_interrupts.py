"""Ctrl-C while a command is watched, and what a full disk leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers_watch import run_on_cpu
from trainfit.results.runs import tables
from trainfit.torch_private.modules import fast_call
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
    call = fast_call(torch.nn.Module.__call__, [True], lambda *_: None)
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
