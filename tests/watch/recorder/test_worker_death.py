"""A worker that ends within a batch leaves the stack that it ended in."""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from trainfit.findings.failure import of_exception
from trainfit.findings.tracebacks import parse_stacks
from trainfit.results.runs.watched import died_path
from trainfit.simgpu.patching import PatchSet
from trainfit.watch.recorder import process
from trainfit.watch.recorder.rank_files import CrashStack
from trainfit.watch.recorder.worker_hooks import WorkerDeath, deaths


def decode(how: str) -> None:
    if how in ("exit", "after"):
        os._exit(3)
    if how == "crash":
        ctypes.string_at(0)


def work(how: str, stem: Path) -> None:
    faulthandler.disable()  # pytest's own
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    death = WorkerDeath(stem, lambda: how != "after")
    decode(how)
    death.close()


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("exit", 3, "os._exit(3)"),
        ("crash", -signal.SIGSEGV, "string_at"),
        ("after", 3, None),
        ("returns", 0, None),
    ],
)
def test_the_stack_is_left(how: str, code: int, line: str | None, tmp_path: Path) -> None:
    worker = multiprocessing.get_context("fork").Process(target=work, args=(how, tmp_path / "r"))
    worker.start()
    worker.join(60)
    assert worker.exitcode == code
    found = [stack.where for text in deaths(tmp_path / "r") for stack in parse_stacks(text)]
    lines, first = inspect.getsourcelines(decode)
    expected = [first + at for at, text in enumerate(lines) if line is not None and line in text]
    assert [frame.line for frame in found if frame is not None] == expected


def train(how: str, stem: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    faulthandler.disable()  # pytest's own
    if how == "before":
        faulthandler.enable()
    patches = PatchSet()
    stack = CrashStack(stem, patches)
    if how in ("own", "disabled"):
        assert not faulthandler.is_enabled()
        faulthandler.enable()
        assert faulthandler.is_enabled()
    if how == "disabled":
        faulthandler.disable()
        assert not faulthandler.is_enabled()
    if how == "child":
        if not (child := os.fork()):
            stack.in_child()
            decode("crash")
        os.waitpid(child, 0)
    if how in ("child", "returns"):
        stack.close()
        patches.restore()
        assert (
            not faulthandler.is_enabled()
            and getattr(faulthandler.enable, "__self__", None) is faulthandler
        )
        return
    decode("crash")


@pytest.mark.parametrize("how", ["crash", "own", "disabled", "before", "child", "returns"])
def test_the_training_s_own_stack_is_left_unless_the_script_wants_it(
    how: str, tmp_path: Path
) -> None:
    started = multiprocessing.get_context("fork").Process(target=train, args=(how, tmp_path / "r"))
    started.start()
    started.join(60)
    ends = how in ("child", "returns")
    assert started.exitcode == (0 if ends else -signal.SIGSEGV)
    assert started.pid is not None
    path = died_path(tmp_path / "r", started.pid)
    text = path.read_text() if path.exists() else ""
    assert ("in decode" in text) == (how == "crash")
    assert path.exists() == (how in ("crash", "own", "disabled"))


class Noted:
    """A recorder in whose first attempt to note an exception a worker's death is told."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.texts: list[str] = []
        self.failures: list[str] = []

    def ended_by(self, error: BaseException, text: str) -> None:
        self.texts.append(text)
        if len(self.texts) == 1:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    def failed(self, where: str, error: Exception) -> None:
        self.failures.append(where)


def test_a_signal_handler_that_raises_in_our_hook_is_what_ended_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = Noted(os.getpid())
    monkeypatch.setattr(process, "_active", noted)
    shown: list[object] = []
    hook = process._noting(lambda *each: shown.append(each[1]))
    error = ConnectionResetError(104, "Connection reset by peer")
    hook(type(error), error, None)
    assert shown == [error] and not noted.failures
    found = of_exception(noted.texts[-1])
    assert found is not None and found.kind == "worker_killed"
    assert "ConnectionResetError" in noted.texts[-1]


class Told:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.events: list[tuple[str, str]] = []

    def event(self, kind: str, *, text: str) -> None:
        self.events.append((kind, text))


def test_a_thread_that_an_error_ends_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    told, shown = Told(), []
    monkeypatch.setattr(process, "_active", told)
    monkeypatch.setattr(threading, "excepthook", process._noting_threads(shown.append))

    def ends_by(error: type[BaseException]) -> None:
        def run() -> None:
            raise error("of the script's own")

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    ends_by(KeyError)
    ends_by(SystemExit)  # as it means to
    assert [each.exc_type for each in shown] == [KeyError, SystemExit]  # Python shows the first
    [(kind, text)] = told.events
    assert kind == "thread_died" and text.endswith('KeyError: "of the script\'s own"\n')
