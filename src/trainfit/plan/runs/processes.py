"""The child processes of simulated runs, and the machine's RAM that they share.

Each run has one of its own, or one forked from a warm one. Two run at a time where both have room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import psutil

from trainfit.hardware.machine.limits import read_memory
from trainfit.hardware.machine.system import System
from trainfit.plan.command.interpreter import HASTENED
from trainfit.plan.command.parsing import Command
from trainfit.results.runs.script import SandboxRequest
from trainfit.results.text import size

#: Starts a module of ours in the user's interpreter, whose environment stays as it is; simulated
#: GPUs in it keep time by the speed model. None of the half a million objects that importing
#: PyTorch makes is garbage: they are not looked through until the module begins.
_START: Final = (
    "import gc; gc.disable()\n"
    "{before}from trainfit.torch_private.needed import tells_parent\n"
    "with tells_parent():\n"
    "    from trainfit.simgpu import cuda_clocks\n"
    "    from trainfit.speed.step import StepClock; cuda_clocks.use(StepClock)\n"
    "    from {module} import main; {after}gc.enable(); main()"
)
#: A simulated run, which looks through the objects of its script: not through these.
_SIMULATION: Final = "trainfit.scripts.trace_run"
#: Before that, where the user's script runs in this very process.
_PROTECTED: Final = (
    "from pathlib import Path; from trainfit.scripts import sandbox; "
    "sandbox.begin(Path(sys.argv[1]).parent); "
)

#: Seconds until a stopped run is taken to be gone; it is killed long before.
_END_S = 15.0
#: Seconds that a process has to end upon SIGTERM: it ends its own, and drops what they wrote.
_TERM_S = 10.0


class Process(Protocol):
    """A running child."""

    def poll(self) -> int | None:
        """The process's exit code (negative: the signal that ended it); ``None`` while it runs."""

    def end(self) -> None:
        """End it and what it left running (loader workers, its own children)."""


class OwnProcess:
    """A run in a process of its own; output goes to ``folder/output.txt``.

    ``runs_script``: what the user's script writes there goes to a layer, as the command says.
    ``wrapper`` starts it (``taskset -c 0``).
    """

    def __init__(
        self,
        command: Command,
        folder: Path,
        environment: Mapping[str, str],
        module: str = _SIMULATION,
        *,
        runs_script: bool = True,
        wrapper: Sequence[str] = (),
    ) -> None:
        if runs_script:
            sandbox_request(command).save(folder)
        before = _PROTECTED if runs_script else HASTENED
        words = [*wrapper, *_python(command, module, before), str(folder / "request.json")]
        with (folder / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def interrupt(self) -> None:
        """Let it end by itself, as upon Ctrl-C (only it, not what it started)."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        end_group(self._process)


class WarmProcess:
    """Forks runs from a process that has imported PyTorch (:mod:`trainfit.scripts.fork_server`)."""

    def __init__(self, command: Command, environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                _python(command, "trainfit.scripts.fork_server"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._command, self._log = command, log
        self._lock = threading.Lock()

    def start(self, folder: Path, *, grow: bool = False) -> Process:
        """Begin the run that ``folder/request.json`` asks for.

        ``grow``: it differs from others in nothing that shows before a script looks at its
        arguments (:mod:`trainfit.scripts.template_process`).
        """
        sandbox_request(self._command).save(folder)
        self.tell(f"{'grow' if grow else 'run'} {folder}")
        return _ForkedProcess(self, folder)

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(os.fsencode(line) + b"\n")
            self._process.stdin.flush()

    def ended(self, folder: Path) -> int | None:
        """The process's own exit code, if it ended; its words are then the run's output."""
        code = self._process.poll()
        if code is not None and not (folder / "output.txt").exists():
            (folder / "output.txt").write_bytes(self._log.read_bytes())
        return code

    def close(self) -> None:
        """End it and all its runs."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_S)
        end_group(self._process)


class WarmProcesses:
    """The processes that runs are forked from, one for each environment; a context manager.

    They are started when they are asked for, and wait at no cost: who makes a last run much later
    than the others need not import PyTorch again. The folders of runs are here: a process that
    others are forked from is one of these runs, and says in its folder how it ended.
    """

    def __init__(self) -> None:
        self._started: dict[tuple[str, ...], WarmProcess] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> WarmProcesses:
        self._scratch = tempfile.TemporaryDirectory(prefix="trainfit-")
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started.values():
            process.close()
        self._scratch.cleanup()

    def folder(self) -> Path:
        """A new one, for the folders of runs; it is removed when the processes have ended."""
        return Path(tempfile.mkdtemp(dir=self._scratch.name))

    def of(self, command: Command, environment: Mapping[str, str]) -> WarmProcess:
        """The warm process of the command's interpreter in this environment."""
        variables = (f"{name}={value}" for name, value in sorted(environment.items()))
        key = (*_python(command, ""), "", *variables)
        with self._lock:
            if key not in self._started:
                log = Path(self._scratch.name) / f"warm-{len(self._started)}.txt"
                self._started[key] = WarmProcess(command, environment, log)
            return self._started[key]


class _ForkedProcess:
    def __init__(self, warm: WarmProcess, folder: Path) -> None:
        self._warm = warm
        self._folder = folder

    def poll(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / "code").read_text())
        return self._warm.ended(self._folder)

    def end(self) -> None:
        if self.poll() is None:
            self._warm.tell(f"stop {self._folder}")
        deadline = time.monotonic() + _END_S
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)


def can_fork() -> bool:
    """Is forking after imports safe here? Frameworks of macOS do not bear it."""
    return sys.platform == "linux"


def sandbox_request(command: Command) -> SandboxRequest:
    """How the next run of ``command`` is protected; what the first one writes is kept, where
    the user asks for that."""
    request = command.sandbox
    with _keeping:
        if request.keep in _kept:
            return dataclasses.replace(request, keep="")
        if request.keep:
            _kept.add(request.keep)
    return request


#: Folders that have got (or will get) what a run wrote.
_kept: set[str] = set()
_keeping = threading.Lock()


def _python(command: Command, module: str, before: str = "") -> list[str]:
    # Unbuffered: what it printed is there when it is killed.
    after = "gc.freeze(); " if module == _SIMULATION else ""
    code = _START.format(module=module, before=before, after=after)
    return command.interpreter.start(code, "-u", *command.python_flags)


def end_group(process: subprocess.Popen[bytes]) -> None:
    for kill, patience in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, kill)
        except (ProcessLookupError, PermissionError):
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    process.wait()
    _end_session(process.pid)


def _end_session(leader: int) -> None:
    """End what is left of a child's session: runs of a loader are groups of their own in it."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != leader and os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


# ---
# Simulated runs share the machine's RAM: two at a time where both have room, else in turn.
#
# Tensors of the simulated GPU have no data, but a model that is built on the CPU has. What a run
# needs is known once one is over; until then the youngest gives way where RAM runs short.


#: Below this share of what was available at first, two runs are one too many.
_LEAST_SHARE: Final = 0.1
#: Below this share a run that goes on alone is ended, too, before it fills the machine's RAM.
_LEAST_ALONE: Final = 0.03
#: What a run may take, as a multiple of what an earlier one took: batches differ.
_SPREAD: Final = 1.1
#: Seconds between looks at the RAM, and while no other run can give way.
_LOOK_S: Final = 0.5
_LOOK_ALONE_S: Final = 0.1
#: Seconds between looks whether a run may begin.
_TICK_S: Final = 0.02


#: How a message says that the RAM went to programs that are not ours.
BY_OTHERS: Final = "other programs have taken most of it"


def others_with_ram(gone: int) -> str:
    """Says that other programs have most of ``gone`` bytes, and which of them has most; empty
    where our own processes have half of it or more."""
    own, largest = 0, (0, "")
    with contextlib.suppress(psutil.Error):
        us = psutil.Process()
        ours = {us.pid, *(child.pid for child in us.children(recursive=True))}
        for each in psutil.process_iter(["pid", "name", "memory_info"]):
            memory = each.info["memory_info"]
            if memory is None:
                continue
            if each.pid in ours:
                own += memory.rss
            else:
                largest = max(largest, (memory.rss, f"{each.info['name']}, pid {each.pid}"))
    if 2 * own >= gone:
        return ""
    return f" ({BY_OTHERS}; {largest[1]} has {size(largest[0])})"


class GaveWay(Exception):
    """A run was ended for want of RAM; it is to be made when no other goes on."""


def available_ram() -> int | None:
    """Bytes that processes can still take, by the machine and by the cgroup's limit."""
    memory = read_memory(System())
    limit, used = memory.limit_bytes.value, memory.limit_used_bytes.value
    left = limit - used if limit is not None and used is not None else None
    found = [each for each in (memory.available_bytes.value, left) if each is not None]
    return max(0, min(found)) if found else None


class RamShort(Exception):
    """A run that no other went on with was ended for want of RAM."""


class RamGate:
    """Lets runs begin side by side as long as there is RAM for them.

    Args:
        warn: is told once, in words, where they are made in turn.
        available: bytes of RAM that can be taken now (``None``: not known, nothing is limited).
        taken_by_others: says of so many bytes that are gone whether other programs have them
            (:func:`others_with_ram`).
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        available: Callable[[], int | None] = available_ram,
        clock: Callable[[], float] = time.monotonic,
        taken_by_others: Callable[[int], str] = others_with_ram,
    ) -> None:
        self._warn, self._available, self._clock = warn, available, clock
        self._taken_by_others = taken_by_others
        self._lock = threading.Lock()
        self._active: list[int] = []
        self._idle = available()
        self._peak = 0
        self._in_turn = False
        self._next_look = 0.0

    @contextlib.contextmanager
    def turn(self, run: int, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Wait until the run may begin, and hold its turn as long as it goes on; ``stopped``: it
        need not wait."""
        while not self._begins(run, stopped):
            time.sleep(_TICK_S)
        try:
            yield
        finally:
            with self._lock:
                self._active.remove(run)

    def _begins(self, run: int, stopped: Callable[[], bool]) -> bool:
        with self._lock:
            if not self._has_room() and not stopped():
                return False
            self._active.append(run)
            return True

    def look(self, run: int) -> None:
        """Look while a run goes on; raises :class:`GaveWay`, or alone :class:`RamShort`, where it
        has to end."""
        with self._lock:
            now = self._clock()
            if self._active[-1:] != [run] or now < self._next_look:
                return
            alone = len(self._active) < 2
            self._next_look = now + (_LOOK_ALONE_S if alone else _LOOK_S)
            left = self._available()
            least = _LEAST_ALONE if alone else _LEAST_SHARE
            if left is None or self._idle is None or left >= least * self._idle:
                return
            words = f"{size(left)} of RAM are left"
            if alone:
                others = self._taken_by_others(self._idle - left)
                raise RamShort(f"{words} of {size(self._idle)}{others}, so trainfit ended it")
            self._take_turns(words)
        raise GaveWay

    def learn(self, peak_bytes: int) -> None:
        """A run took so much at its peak."""
        with self._lock:
            self._peak = max(self._peak, peak_bytes)

    def _has_room(self) -> bool:
        if not self._active:
            return True
        if self._in_turn:
            return False
        need = int(_SPREAD * self._peak)
        if self._idle is None or (len(self._active) + 1) * need <= self._idle:
            return True
        self._take_turns(
            f"a run needs {size(self._peak)} of RAM, {size(self._idle)} were available"
        )
        return False

    def _take_turns(self, why: str) -> None:
        if not self._in_turn:
            self._in_turn = True
            self._warn(f"simulated runs are made one at a time: {why}")
