"""Simulated runs forked from a process that has imported PyTorch, in the place of fresh ones.

Most runs of tests compute for a tenth of the time that importing takes. ``plan`` forks its own
from such a process (``trainfit.scripts.fork_server``; tests/scripts/test_stem.py holds that they
are what fresh ones are); here one process serves all runs of an environment that a test
process starts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from trainfit.plan.command import wrappers
from trainfit.plan.runs import processes
from trainfit.scripts import launchers

_SERVER = Path(__file__).with_name("warm_process.py")
#: Modules of ours whose runs begin with what the server has imported.
_SERVED = ("trainfit.scripts.trace_run", "trainfit.scripts.fork_server")
#: By each ``warm_runs`` that is entered: one in another's serves its modules, too.
_served: list[Sequence[str]] = [_SERVED]
#: The same of runs that time something in their own process.
MEASURING = (
    *("trainfit.plan.dataloader.child", "trainfit.speed.cpu_run"),
    "trainfit.memory.verification",
)
#: pytest's, which no run reads, and what libraries set when they are imported (PyTorch's compiler,
#: an OpenMP): the tests' own process has them sooner or later, a user's shell does not.
_IGNORED = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK")
#: Runs of one server may differ in these: they are read by libraries that it has not imported, when
#: CUDA is first used, when a process group is made, when a file is written, by the tuner's stub.
_READ_LATER = (
    *("HF_HOME", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "XDG_STATE_HOME"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_NAME"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "PATH", "STUB_TUNER", "STUB_METHODS"),
)
#: And in all that begin so.
_READ_BY_PREFIX = ("ACCELERATE_", "SLURM")
#: That of a rank, as launchers of several processes set it.
_OF_RANKS = {"OMP_NUM_THREADS": "1"}
#: OpenCV puts its own libraries in front, in the process that imports it: a user's shell does not.
_CHANGED = "LD_LIBRARY_PATH"
_TESTS = Path(__file__).resolve().parent
#: Where our own package is, which is found in any case, behind what hastens the start of processes.
OUR_PATH = os.pathsep.join([str(_TESTS / "quick_start"), str(_TESTS.parent / "src")])
#: The tests' own variables, which runs have that no command starts.
_OWN = {name: value for name, value in os.environ.items() if name not in _IGNORED}
_lock = threading.Lock()
#: Environments of earlier runs.
_asked_before: set[tuple[tuple[str, str], ...]] = set()


@contextlib.contextmanager
def warm_runs(more: Sequence[str] = ()) -> Iterator[None]:
    """Meanwhile runs that plans and simulations start in this process are forked.

    ``more`` are modules of further runs (:data:`MEASURING`), for tests of what comes of them
    and not of what they time.
    """
    served = (*_served[-1], *more)
    start = functools.partial(_start, served)
    stand_in = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
    _served.append(served)
    try:
        with mock.patch.object(processes, "subprocess", stand_in), launchers_here():
            yield
    finally:
        _served.pop()


@contextlib.contextmanager
def launchers_here() -> Iterator[list[list[str]]]:
    """Meanwhile launchers read their words in this process, which has imported PyTorch already.

    Gives the list of what they are asked: launcher, number of GPUs, words. DeepSpeed's leaves
    traces in its process, and has one of its own.
    """
    asked: list[list[str]] = []

    def run(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        is_own = list(words[:2]) == [sys.executable, "-c"] and words[2].endswith(wrappers._READ)
        if not is_own or words[3] == "deepspeed":
            return subprocess.run(words, **options)
        asked.append(list(words[3:]))
        said = io.StringIO()
        with mock.patch.object(sys, "argv", ["-c", *words[3:]]), contextlib.redirect_stdout(said):
            launchers.main()
        return subprocess.CompletedProcess(words, 0, said.getvalue(), "")

    stand_in = types.SimpleNamespace(**{**vars(subprocess), "run": run})
    with mock.patch.object(wrappers, "subprocess", stand_in):
        yield asked


def _start(
    served: Sequence[str],
    words: Sequence[str],
    *,
    stdin: int,
    stdout: io.BufferedWriter,
    stderr: int,
    env: Mapping[str, str],
    start_new_session: bool,
) -> Any:
    """A forked run if it would differ in nothing else from a fresh process, which it is if not."""
    plain = [sys.executable, "-u", "-c"]
    is_served = list(words[:3]) == plain and any(
        f"from {module} import" in words[3] for module in served
    )
    environment = _without_ignored(env)
    if not is_served or not _is_usual(_start_up(environment)):
        return subprocess.Popen(
            words,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=start_new_session,
        )
    asked = {"code": words[3], "argv": words[4:], "cwd": os.getcwd(), "environment": environment}
    return _Forked(words, asked, has_input=stdin == subprocess.PIPE, output=stdout.fileno())


def _without_ignored(environment: Mapping[str, str]) -> dict[str, str]:
    ignored = _IGNORED if _CHANGED in _OWN else (*_IGNORED, _CHANGED)
    kept = {name: value for name, value in environment.items() if name not in ignored}
    return kept | {_CHANGED: _OWN[_CHANGED]} if _CHANGED in kept else kept


def _start_up(environment: Mapping[str, str]) -> dict[str, str]:
    """What a server's imports may depend on."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _READ_LATER and not name.startswith(_READ_BY_PREFIX)
    }
    if kept.get("PYTHONPATH") in (OUR_PATH, _OWN["PYTHONPATH"]):
        del kept["PYTHONPATH"]
    return kept


def _is_usual(start_up: Mapping[str, str]) -> bool:
    """Is a server of this environment worth its start? That of the tests is, and that of the first
    command, and of ranks of either; of others the second run has one."""
    key = tuple(sorted(start_up.items()))
    usual = (_start_up(_OWN), _environment())
    known = (*usual, *({**each, **_OF_RANKS} for each in usual))
    is_known = start_up in known or key in _asked_before
    _asked_before.add(key)
    return is_known


@functools.cache
def _environment() -> dict[str, str]:
    """That of the first command."""
    return _start_up(_without_ignored(os.environ))


def serve_ahead() -> None:
    """Start the first command's server: test processes that are forked afterwards share it."""
    _server(tuple(sorted(_environment().items())))


@functools.cache
def _server(environment: tuple[tuple[str, str], ...]) -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"exec(compile(open({str(_SERVER)!r}).read(), {str(_SERVER)!r}, 'exec'))"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(its.fileno())],
        env={"PYTHONPATH": OUR_PATH, **dict(environment)},
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
    )
    its.close()

    def close() -> None:
        ours.close()
        process.wait(10)

    atexit.register(close)
    return ours


class _Forked:
    """A forked run, as far as ``processes`` uses ``subprocess.Popen``."""

    def __init__(
        self, words: Sequence[str], asked: dict[str, Any], *, has_input: bool, output: int
    ) -> None:
        self.args = words
        self.returncode: int | None = None
        self.stdin: io.FileIO | None = None
        self._told, its = socket.socketpair()
        source = os.open(os.devnull, os.O_RDONLY)
        if has_input:
            os.close(source)
            source, ours = os.pipe()
            self.stdin = open(ours, "wb", buffering=0)  # noqa: SIM115  (closed by its user)
        with _lock:
            descriptors = [source, output, output, its.fileno()]
            server = _server(tuple(sorted(_start_up(asked["environment"]).items())))
            socket.send_fds(server, [json.dumps(asked).encode()], descriptors)
        os.close(source)
        its.close()
        self.pid = int.from_bytes(self._told.recv(8), "little")

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._told.settimeout(timeout)
            try:
                status = self._told.recv(8)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._told.close()
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.Signals(number))
