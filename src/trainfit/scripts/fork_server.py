"""A process that has imported PyTorch once and forks one child for each simulated run.

Importing takes longer than most runs do. Nothing of PyTorch has computed before the fork, so
a child is what a fresh process would be; the user's script and all that it imports run in the
child alone.

Lines on standard input are ``run FOLDER``, ``grow FOLDER`` and ``stop FOLDER``. A run reads
``FOLDER/request.json`` and prints to ``FOLDER/output.txt``; when its process has ended, its
exit code (negative: signal) is in ``FOLDER/code``. The end of the input ends everything.

``grow`` is ``run`` for runs that differ in nothing that a script sees before it looks at its
arguments: they are forked from a child that has come that far
(:mod:`trainfit.scripts.template_process`), if there can be one.

Each run has a sandbox of its own, as ``FOLDER/sandbox.json`` asks
(:mod:`trainfit.scripts.sandbox`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from trainfit.results.runs.script import SandboxRequest
from trainfit.scripts import sandbox
from trainfit.scripts.sandbox.ending import signal_group

#: Seconds between looks for children that ended.
_TICK_S = 0.02
#: Seconds that a stopped run has before it is killed; it drops what its script wrote.
_PATIENCE_S = 8.0
#: Seconds of computing that a stem has until its script looks at its arguments, and seconds in
#: which it has to compute at least so much; runs wait for it.
_GROWING_S = 60.0
_STALLED_S, _LEAST_S = 6.0, 0.1


class Server:
    """Forks runs on requests from the descriptor ``control``.

    ``tell_code`` is given the folder and the exit code of each run that has ended.
    """

    def __init__(
        self, control: int = 0, tell_code: Callable[[str, int], None] | None = None
    ) -> None:
        self._control = control
        self._tell_code = tell_code or _write_code
        self._running: dict[int, str] = {}
        self._kill_at: dict[int, float] = {}

    def serve(self) -> str | None:
        """Returns twice or more: in each child its folder, at last in the server ``None``."""
        waiting, is_open = b"", True
        while is_open:
            if select.select([self._control], [], [], self._pause())[0]:
                data = os.read(self._control, 1 << 16)
                is_open = bool(data)
                waiting += data
            *lines, waiting = waiting.split(b"\n")
            for line in lines:
                verb, _, folder = os.fsdecode(line).partition(" ")
                if self._obey(verb, folder):
                    return folder
            if (child := self._look()) is not None:
                return child
            self._reap()
        self._end()
        return None

    def _pause(self) -> float | None:
        return _TICK_S if self._running else None

    def _obey(self, verb: str, folder: str) -> bool:
        """Is this process the child?"""
        if verb == "stop":
            self._stop(folder)
            return False
        return self._fork(folder)

    def _look(self) -> str | None:
        """What is to be done meanwhile; in a child its folder."""
        return None

    def _end(self) -> None:
        for folder in list(self._running.values()):
            self._stop(folder)
        while self._running:
            self._reap()
            time.sleep(_TICK_S)

    def _fork(self, folder: str) -> bool:
        pid = _fork_group()
        if pid:
            self._running[pid] = folder
            return False
        if self._control != 0:
            os.close(self._control)
        return True

    def _stop(self, folder: str) -> None:
        for pid, each in self._running.items():
            if each == folder:
                signal_group(pid, signal.SIGTERM)
                self._kill_at[pid] = time.monotonic() + _PATIENCE_S

    def _reap(self) -> None:
        for pid, at in self._kill_at.items():
            if time.monotonic() >= at and pid in self._running:
                signal_group(pid, signal.SIGKILL)
        for pid in list(self._running):
            if not _has_ended(pid):
                continue
            # What it left running goes too, while its number cannot be another's.
            signal_group(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._kill_at.pop(pid, None)
            self._tell_code(self._running.pop(pid), code)


class GrowingServer(Server):
    """A server that has a stem grow for the first ``grow``, and passes runs on to it.

    ``stem`` is called in the stem, with its folder, the descriptor of its commands and that of
    what it tells.
    """

    def __init__(self, stem: Callable[[str, int, int], None]) -> None:
        super().__init__()
        self._grow = stem
        self._stem: int | None = None  # its process
        self._is_ready = self._has_failed = False
        self._commands = self._status = -1
        self._told = b""
        self._queue: list[str] = []
        self._passed: set[str] = set()

    def _pause(self) -> float | None:
        return _TICK_S if self._running or self._stem is not None else None

    def _obey(self, verb: str, folder: str) -> bool:
        if verb == "grow" and not self._has_failed:
            self._queue.append(folder)
            if self._stem is None:
                self._plant(folder)
            elif self._is_ready:
                self._pass_on()
            return False
        if verb == "stop" and folder in self._queue:
            self._queue.remove(folder)
            _write_code(folder, -signal.SIGTERM)
            return False
        if verb == "stop" and folder in self._passed:
            self._say(f"stop {folder}")
            return False
        return super()._obey(verb, folder)

    def _fork(self, folder: str) -> bool:
        is_child = super()._fork(folder)
        if is_child and self._stem is not None:
            os.close(self._commands)
            os.close(self._status)
        return is_child

    def _plant(self, folder: str) -> None:
        """Fork the stem; it does not return here."""
        own = Path(folder).with_name(f"{Path(folder).name}-stem")
        own.mkdir()
        shutil.copyfile(Path(folder, "request.json"), own / "request.json")
        with contextlib.suppress(FileNotFoundError):
            # What the stem writes is kept with what its run writes, and not once more.
            dataclasses.replace(SandboxRequest.load(Path(folder)), keep="").save(own)
        heard, self._commands = os.pipe()
        self._status, tells = os.pipe()
        self._stem = _fork_group()
        if self._stem == 0:
            for each in (self._commands, self._status):
                os.close(each)
            self._grow(str(own), heard, tells)
            os._exit(0)
        os.close(heard)
        os.close(tells)
        self._pace = _Pace(self._stem)

    def _look(self) -> str | None:
        if self._stem is not None:
            has_ended = _has_ended(self._stem)
            self._hear()
            if has_ended or (not self._is_ready and self._pace.is_over()):
                self._lose()
        return self._fork_queue() if self._has_failed else None

    def _hear(self) -> None:
        """What the stem tells: that it is ready, and which runs have ended."""
        while select.select([self._status], [], [], 0.0)[0]:
            data = os.read(self._status, 1 << 16)
            self._told += data
            if not data:
                break
        *lines, self._told = self._told.split(b"\n")
        for line in lines:
            verb, _, rest = os.fsdecode(line).partition(" ")
            if verb == "ready":
                self._is_ready = True
                self._pass_on()
            elif verb == "ended":
                code, _, folder = rest.partition(" ")
                self._passed.discard(folder)
                _write_code(folder, int(code))

    def _pass_on(self) -> None:
        while self._queue:
            folder = self._queue.pop(0)
            self._passed.add(folder)
            self._say(f"run {folder}")

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, os.fsencode(line) + b"\n")

    def _lose(self) -> None:
        """There is no stem; runs that were forked from it are over, too."""
        assert self._stem is not None
        signal_group(self._stem, signal.SIGTERM)
        _end_child(self._stem)
        for descriptor in (self._commands, self._status):
            os.close(descriptor)
        self._stem, self._has_failed = None, True
        for folder in self._passed:
            _write_code(folder, -signal.SIGKILL)
        self._passed.clear()

    def _fork_queue(self) -> str | None:
        while self._queue:
            folder = self._queue.pop(0)
            if self._fork(folder):
                return folder
        return None

    def _end(self) -> None:
        if self._stem is not None:
            os.close(self._commands)  # it ends its runs, and then itself
            if not self._is_ready:
                signal_group(self._stem, signal.SIGTERM)
            _end_child(self._stem)
        super()._end()


def _has_ended(pid: int) -> bool:
    """Has this child ended? It is still to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_child(pid: int) -> None:
    """Wait for a child that is about to end; it is killed if it does not."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and not _has_ended(pid):
        time.sleep(_TICK_S)
    signal_group(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class _Pace:
    """Has a process computed for too long, or does it stand still?"""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._since, self._at = time.monotonic(), 0.0

    def is_over(self) -> bool:
        now = time.monotonic()
        if now - self._since < _STALLED_S:
            return False
        computed = _computed_s(self._process)
        if computed > _GROWING_S or computed - self._at < _LEAST_S:
            return True
        self._since, self._at = now, computed
        return False


def _computed_s(process: psutil.Process) -> float:
    """Seconds that a process and its descendants have computed."""
    found = 0.0
    with contextlib.suppress(psutil.Error):
        for child in (process, *process.children(recursive=True)):
            times = child.cpu_times()
            found += times.user + times.system
    return found


def _fork_group() -> int:
    """Fork a child that leads a process group."""
    pid = os.fork()
    with contextlib.suppress(OSError):  # the child was faster, or is gone
        os.setpgid(pid, pid)
    return pid


def _write_code(folder: str, code: int) -> None:
    with contextlib.suppress(OSError):
        part = Path(folder) / "code.part"
        part.write_text(str(code))
        part.replace(Path(folder) / "code")


def become_run(folder: str, printed: bytes = b"") -> None:
    """The child's standard streams and arguments, as a process of its own would have them.

    ``printed`` is what it has printed already.
    """
    output = os.open(Path(folder) / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(output, printed)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if os.isatty(0):  # the script that was forked has its terminal
        return
    if stat.S_ISREG(os.fstat(0).st_mode):  # or a file, in which it has a place of its own
        at = os.lseek(0, 0, os.SEEK_CUR)
        own = os.open("/proc/self/fd/0", os.O_RDONLY)
        os.lseek(own, at, os.SEEK_SET)
    else:
        own = os.open(os.devnull, os.O_RDONLY)
    os.dup2(own, 0)
    os.close(own)


def main() -> None:
    """The server's entry point, and that of every run."""
    gc.disable()  # none of the objects that imports make is garbage
    runner = importlib.import_module("trainfit.scripts.trace_run")
    # Every simulation needs the compiler.
    from trainfit.torch_private import compiled

    compiled.import_compiler()
    compiled.remove_import_folder()
    importlib.import_module("numpy.ma")  # np.unique looks at it in each run
    # Nor are they looked through by a collection in a run, which would copy the pages they share.
    gc.freeze()
    gc.enable()

    def grow(folder: str, control: int, status: int) -> None:
        become_run(folder)
        sandbox.begin(Path(folder))

        def tell_code(run: str, code: int) -> None:
            # The files that it sees are not those of its server: it is in a sandbox.
            os.write(status, os.fsencode(f"ended {code} {run}\n"))

        runner.grow(folder, Server(control, tell_code).serve, status)

    folder = GrowingServer(grow).serve()
    if folder is None:
        os._exit(0)  # nothing to take down, and that takes seconds
    become_run(folder)
    sandbox.begin(Path(folder))
    sys.argv = [sys.argv[0], str(Path(folder) / "request.json")]
    runner.main()
