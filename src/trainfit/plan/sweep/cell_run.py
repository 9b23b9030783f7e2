"""One cell of a sweep, run as the command ``trainfit plan`` or ``trainfit simulate``.

A process of its own: a cell that is killed takes no other with it. Nothing here needs PyTorch, and
a cell can be sent to another machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import re
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from trainfit.hardware.machine.processor import read_cpu
from trainfit.hardware.machine.system import System
from trainfit.lint.imports import UnreadableError, read_files
from trainfit.plan.command.interpreter import Interpreter
from trainfit.plan.command.parsing import Command
from trainfit.plan.runs.processes import GaveWay, RamGate, RamShort, available_ram, end_group
from trainfit.plan.runs.tracing import ending
from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.sweep import SweepVerb
from trainfit.results.text import printable
from trainfit.version import __version__

#: Seconds between looks whether a cell is done.
_TICK_S: Final = 0.05
#: Exit codes of a verb that has a result: it fits, and it does not.
_ANSWERED: Final = (0, 1)
#: The line in which a verb says what was wrong; the traceback below it is left to `trainfit plan`.
_ERROR: Final = re.compile(
    r"^trainfit[ a-z]*: error: (.+?)(?:; its traceback is below)?$", re.MULTILINE
)


#: Variables that change what a run does, by their beginnings.
VARIABLES: Final = ("PYTORCH_", "CUDA_", "NCCL_", "TORCH", "OMP_", "HF_", "TRANSFORMERS_")
#: Those that say what runs it.
_FINDING: Final = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TRAINFIT_CONFIG")


def own_variables() -> dict[str, str]:
    """The variables of this process that a cell is to have wherever it runs; others are no business
    of another machine's."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _FINDING or name.startswith(VARIABLES)
    }


class CellStopped(Exception):
    """The sweep ends, and the cell with it."""


@dataclasses.dataclass(frozen=True)
class CellJob:
    """What a cell's process is told: the verb's ``options`` and the user's ``words``, in
    ``folder``, with ``variables`` in the place of the machine's own (:func:`own_variables`)."""

    verb: SweepVerb
    options: tuple[str, ...]
    gpu: str
    words: tuple[str, ...]
    folder: str
    variables: Mapping[str, str]

    def environment(self) -> dict[str, str]:
        """The variables of the cell's process; Ray's for its own workers do not count."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
        return {**kept, **self.variables}

    def command(self, output: Path) -> list[str]:
        """The words of its process, which writes its result to ``output``."""
        own = ["--no-loader"] if self.verb == "plan" else []
        return [
            *(sys.executable, "-P", "-m", "trainfit", self.verb, *own, *self.options),
            *("--gpu", self.gpu, "--output", str(output), "--", *self.words),
        ]


@dataclasses.dataclass(frozen=True)
class CellEnd:
    """What came of it: the bytes of its result's file, or why there is none."""

    content: bytes | None
    failure: str = ""


def run_cell(
    job: CellJob,
    stopped: Callable[[], bool] = lambda: False,
    look: Callable[[], None] = lambda: None,
) -> CellEnd:
    """Run it to its end.

    Args:
        stopped: should it end early? It raises :class:`CellStopped` then.
        look: is called while it goes on; what that raises ends it, too.
    """
    if not os.path.isdir(job.folder):
        return CellEnd(None, f"folder {job.folder!r} is not on machine {os.uname().nodename}")
    with tempfile.TemporaryDirectory(prefix="trainfit-sweep-") as scratch:
        output, said = Path(scratch, "result"), Path(scratch, "said.txt")
        with said.open("wb") as stream:
            process = subprocess.Popen(
                job.command(output),
                cwd=job.folder,
                env=job.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                time.sleep(_TICK_S)
                if stopped():
                    raise CellStopped
                look()
        finally:
            if process.poll() is None:
                end_group(process)
        # Another exit code may come with what was known by then, which is no whole result.
        if process.returncode in _ANSWERED and output.is_file():
            return CellEnd(output.read_bytes())
        return CellEnd(None, _failure(process.returncode, said))


def _failure(code: int, path: Path) -> str:
    """What was wrong, in one line: what the verb said, or how its process ended."""
    text = path.read_text(encoding="utf-8", errors="replace")
    matches = _ERROR.findall(text)
    return printable(matches[-1]) if matches else ending(code)


# ---
# What determines the result of a cell: its words, its machine, its files, its packages.
#
# Cells are kept by a hash of it, so that a sweep goes on where it ended, and a script that was
# edited is planned afresh. Of files, those are looked at that the command names and that its script
# imports by name; what else it opens is not known before it runs.


#: Of larger files, length and time of the last change stand for what is in them.
_LARGE: Final = 64 << 20


def key_of(job: CellJob, command: Command, defaults: str) -> str:
    """The name of the cell's file: the same whenever its result would be.

    Args:
        defaults: of the verb's options, from a file of the user's.
    """
    said = {
        "trainfit": __version__,
        "job": [job.verb, *job.options, job.gpu, *job.words, job.folder],
        "defaults": defaults,
        "variables": {
            name: value for name, value in job.variables.items() if name.startswith(VARIABLES)
        },
        "packages": _packages(command.interpreter),
        "files": {
            str(path): _digest(path, (state := path.stat()).st_size, state.st_mtime_ns)
            for path in _files(command, job)
        },
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:20]


def _files(command: Command, job: CellJob) -> Iterator[Path]:
    named = [Path(word.rpartition("=")[2]) for word in (*job.words, *job.options)]
    script = Path(command.name)
    if command.kind == "module":
        place = Path(*command.name.split("."))
        parts = (place.with_suffix(".py"), place / "__main__.py")
        script = next((part for part in parts if part.is_file()), script)
    yield from (each.resolve() for each in (script, *named) if each.is_file())
    try:
        files, _ = read_files(script)
    except UnreadableError:
        return
    yield from (file.source.path.resolve() for file in files)


@functools.cache
def _digest(path: Path, length: int, changed_ns: int) -> str:
    if length > _LARGE:
        return f"{length} {changed_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _packages(interpreter: Interpreter) -> list[str]:
    """The packages of the command's Python: its path, its version, PyTorch's, and what is installed
    next to it, as far as its folder tells."""
    if interpreter.is_own:
        # Not those that a library has put on the path since.
        folders = [*site.getsitepackages(), site.getusersitepackages()]
        found = [
            f"{distribution.name}-{distribution.version}"
            for distribution in metadata.distributions(path=folders)
        ]
    else:
        folder = Path(interpreter.path).parent.parent
        found = [file.name for file in folder.glob("lib/python*/site-packages/*.dist-info")]
    version = ".".join(map(str, interpreter.version))
    return [interpreter.path, version, interpreter.torch, *sorted(found)]


# ---
# Who runs the cells of a sweep: processes of this machine, or the nodes of a Ray cluster.


#: A plan makes two simulated runs at a time.
_CORES_OF_CELL: Final = 2
#: RAM of the processes of a small plan; who needs more gives way where it runs short.
_RAM_OF_CELL: Final = 3 << 30

#: Cells by their key, in the order in which they are run.
Jobs = Mapping[str, CellJob]
Ends = Generator[tuple[str, CellEnd], None, None]


class RayError(TrainfitError):
    """Ray is not installed, or its cluster cannot be reached."""


def cells_at_once() -> int:
    """The most cells that this machine's cores and RAM allow, at least one."""
    cores = read_cpu(System()).usable_cores.value or 1
    ram = available_ram()
    by_ram = cores if ram is None else ram // _RAM_OF_CELL
    return max(1, min(int(cores) // _CORES_OF_CELL, int(by_ram)))


def run_here(jobs: Jobs, at_once: int, warn: Callable[[str], None]) -> Ends:
    """Each cell's end, as they come.

    Closing the iterator ends the cells that go on; where RAM runs short, the youngest of them is
    ended and run later.
    """
    stop, gate = threading.Event(), RamGate(warn)

    def run(number: int, job: CellJob) -> CellEnd:
        while True:
            try:
                with gate.turn(number, stop.is_set):
                    return run_cell(job, stop.is_set, lambda: gate.look(number))
            except GaveWay:
                continue
            except RamShort as error:
                return CellEnd(None, str(error))

    with ThreadPoolExecutor(at_once) as pool:
        waiting: dict[Future[CellEnd], str] = {}
        try:
            for number, (key, job) in enumerate(jobs.items()):
                waiting[pool.submit(run, number, job)] = key
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future), future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


# ---
# Ray: chosen for its retries on another node when a worker or a node dies, and as what clusters for
# training have already. Nothing but the cell's words goes to a node: the user's files are to be
# there, at the same place, as on a shared file system.

#: Times that a cell is begun once more after its worker or its node was lost.
_RETRIES: Final = 2
_POLL_S: Final = 0.5
#: In which a cluster's port answers.
_OPEN_S: Final = 10.0


def run_on_ray(jobs: Jobs, address: str) -> Ends:
    """Each cell's end, as they come, run on the cluster at ``address`` with a CPU of Ray's each.

    Raises :class:`RayError`.
    """
    # Ray prints what becomes of its workers; standard output is the result's alone.
    with contextlib.redirect_stdout(sys.stderr):
        yield from _on_ray(_ray(address), jobs)


def _on_ray(ray: Any, jobs: Jobs) -> Ends:
    try:
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(
            run_cell
        )
        waiting: dict[Any, str] = {remote.remote(job): key for key, job in jobs.items()}
        try:
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=_POLL_S)
                for each in done:
                    yield waiting.pop(each), _end_of(ray, each)
        finally:
            for each in waiting:
                ray.cancel(each)
            if waiting:
                ray.wait(list(waiting), num_returns=len(waiting), timeout=10 * _POLL_S)
    finally:
        ray.shutdown()


def _ray(address: str) -> Any:
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to its makers
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise RayError(
            f"--ray {address}: Ray is not installed; pip install 'trainfit[ray]', or leave --ray "
            "out to run the cells on this machine"
        ) from None
    try:
        _require_open(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # what is not reached has many ways to say so
        said = " ".join(str(error).split())[:160]
        raise RayError(
            f"--ray {address}: no cluster is reached there ({type(error).__name__}: {said}); start "
            "one with `ray start --head`, or give its address"
        ) from None
    return ray


def _require_open(address: str) -> None:
    """Raise OSError where nothing answers at ``address`` (``host:port``, ``ray://host:port``):
    Ray 2.60 asks again for a quarter of an hour, and longer."""
    if match := re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)", address):
        socket.create_connection((match[1], int(match[2])), _OPEN_S).close()


def _end_of(ray: Any, reference: Any) -> CellEnd:
    try:
        end: CellEnd = ray.get(reference)
    except Exception as error:  # a lost worker, or what a node lacks
        words = [line for line in str(error).splitlines() if line.strip()]
        text = words[-1].strip()[:200] if words else "no reason was given"
        return CellEnd(None, f"Ray could not run it ({type(error).__name__}: {text})")
    return end
