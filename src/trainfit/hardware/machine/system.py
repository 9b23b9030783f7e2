"""Interface between trainfit and the machine: every file, command and call that facts come from.

A :class:`System` reads below an injectable root, so that a recorded machine replays as if it
were this one (`recorded`). Nothing here raises: what cannot be read is a fact that cannot be
told. Nothing here waits longer than its time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainfit.hardware.machine.files import DiskFiles, Files, read_rate
from trainfit.results.machine import Fact, absent, cannot_tell, known
from trainfit.results.text import duration
from trainfit.torch_private.needed import BAD_FORK, is_in_bad_fork

#: No file that facts come from is longer (/proc/cpuinfo of 512 CPUs has about 800 kB).
_LONGEST_FILE = 4 << 20
_LONGEST_OUTPUT = 1 << 20
#: Some thousand folders take a second to walk on a network file system.
_MOST_FOLDERS = 2000
PROBES = Path(__file__).parents[1] / "probes"


@dataclasses.dataclass(frozen=True)
class CommandOutput:
    """What a command printed, and its exit code (negative: the signal that ended it)."""

    code: int
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class Space:
    """Size of a file system in bytes, as statvfs gives it; ``free`` is for plain users."""

    total: int
    free: int


class System:
    """This machine, or what lies below ``root`` of another.

    Args:
        root: where absolute paths are looked up.
        environment: in place of ``os.environ``.
        files: in place of the disk.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        environment: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> None:
        self._root = root
        self._files: Files = files if files is not None else DiskFiles(root)
        self.environment = dict(os.environ if environment is None else environment)
        self._child_environment = dict(self.environment)
        self._probed: dict[str, Fact[Mapping[str, Any]]] = {}
        self._probing: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    # --- Files --------------------------------------------------------------------------------
    def text(self, path: str) -> Fact[str]:
        """The content of a text file without surrounding white space."""
        try:
            content = self._files.read(path, _LONGEST_FILE + 1)
        except OSError as error:
            return _unreadable(path, error)
        if len(content) > _LONGEST_FILE:
            return cannot_tell(path, f"it is longer than {_LONGEST_FILE} bytes")
        try:
            return known(content.decode("utf-8").strip(" \t\r\n\0"), path)
        except UnicodeDecodeError:
            return cannot_tell(path, "it is not UTF-8 text")

    def number(self, path: str) -> Fact[int]:
        """The content of a file that holds one integer."""
        return self.text(path).map(int, "an integer")

    def names(self, path: str) -> Fact[tuple[str, ...]]:
        """The names in a folder, sorted."""
        try:
            return known(tuple(sorted(self._files.names(path))), path)
        except OSError as error:
            return _unreadable(path, error)

    def exists(self, path: str) -> bool:
        """Is there such a file, folder, link or device?"""
        return self._files.exists(path)

    def accessible(self, path: str) -> bool:
        """May this process read and write it?"""
        return os.access(self._root / path.lstrip("/"), os.R_OK | os.W_OK)

    def link(self, path: str) -> Fact[str]:
        """The target of a symbolic link, as it is written."""
        try:
            return known(self._files.link(path), path)
        except OSError as error:
            return _unreadable(path, error)

    def real_path(self, path: str) -> str:
        """An absolute path without symbolic links."""
        return os.path.realpath(path)

    def file_sizes(self, path: str, most: int) -> Fact[tuple[tuple[str, int], ...]]:
        """Up to ``most`` plain files at or below ``path``, with their sizes in bytes."""
        found: list[tuple[str, int]] = []
        for file in itertools.islice(_files_below(path), most):
            with contextlib.suppress(OSError, ValueError):  # gone meanwhile
                found.append((file, os.path.getsize(file)))
        return known(tuple(found), path) if found else absent(path, "it contains no files")

    def space(self, path: str) -> Fact[Space]:
        """Size and free bytes of the file system that holds ``path``."""
        try:
            space = os.statvfs(path)
        except OSError as error:
            return _unreadable(path, error)
        return known(
            Space(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize),
            f"statvfs({path})",
        )

    def read_rate(self, file: str, seconds: float) -> Fact[tuple[float, float]]:
        """Bytes/s of reading a file from its storage, and from the page cache."""
        return read_rate(file, seconds)

    # --- Calls --------------------------------------------------------------------------------
    def affinity(self) -> Fact[tuple[int, ...]]:
        """The CPUs that this process may run on."""
        if not hasattr(os, "sched_getaffinity"):
            return cannot_tell("sched_getaffinity", "not available on this system")
        return known(tuple(sorted(os.sched_getaffinity(0))), "sched_getaffinity")

    def limit(self, name: str) -> Fact[tuple[int | None, int | None]]:
        """Soft and hard limit, as ``resource`` names it without prefix ("NOFILE").

        ``None`` within is unlimited.
        """
        source = f"getrlimit(RLIMIT_{name})"
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is None:
            return absent(source, "this system has no such limit")
        soft, hard = (
            None if value == resource.RLIM_INFINITY else value
            for value in resource.getrlimit(number)
        )
        return known((soft, hard), source)

    def system_name(self) -> Mapping[str, str]:
        """What ``uname`` says: keys "sysname", "release", "version", "machine"."""
        name = os.uname()
        return {
            "sysname": name.sysname,
            "release": name.release,
            "version": name.version,
            "machine": name.machine,
        }

    def bad_fork(self) -> Fact[bool]:
        """Was this process forked from one that had started CUDA?

        Known only where PyTorch is in use in this very process (`trainfit.why_no_gpu`).
        """
        source = BAD_FORK
        cuda = sys.modules.get("torch.cuda")
        if cuda is None:
            return absent(source, "PyTorch is not used in this process")
        try:
            return known(is_in_bad_fork(cuda), source)
        except Exception as error:
            return cannot_tell(source, f"{type(error).__name__}: {error}"[:200])

    # --- Children -----------------------------------------------------------------------------
    def command(self, words: Sequence[str], seconds: float) -> Fact[CommandOutput]:
        """Run a command to its end and return what it printed.

        Absent if there is no such command; unknown if it does not end in ``seconds``
        (it is killed then, with its children, and not waited for: a process that hangs in the
        driver cannot be killed).
        """
        return _run(words, self._child_environment, seconds, " ".join(words))

    def probe(self, name: str, seconds: float) -> Fact[Mapping[str, Any]]:
        """What `probes/NAME.py` prints in a fresh interpreter: one JSON object.

        A process of its own, because the answers are cached per process, and because a driver
        may hang or crash who asks it. Each probe runs once: who asks again, or meanwhile from
        another thread, gets the same answer.
        """
        with self._lock:
            running = self._probing.setdefault(name, threading.Lock())
        with running:
            if name not in self._probed:
                self._probed[name] = self._probe(name, seconds)
            return self._probed[name]

    def _probe(self, name: str, seconds: float) -> Fact[Mapping[str, Any]]:
        # -P: a file of the probes' folder is never taken for a module.
        words = [sys.executable, "-P", str(PROBES / f"{name}.py")]
        output = _run(words, self._child_environment, seconds, f"probe {name}")
        if output.value is None:
            return cannot_tell(output.source, output.reason)
        return _answer(output.value, output.source)

    def packages(self) -> Mapping[str, str]:
        """Folders of the installed torch and torchvision, found without importing them."""
        found = {}
        for name in ("torch", "torchvision"):
            with contextlib.suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(name)
                if spec is not None and spec.origin is not None:
                    found[name] = str(Path(spec.origin).parent)
        return found

    def process_names(self, pids: Iterable[int]) -> Mapping[int, str]:
        """Names of the processes that can be seen from here."""
        import psutil  # the recorder reads facts in a user's Python, which may be without it

        names = {}
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                names[pid] = psutil.Process(pid).name()
        return names

    def own_pids(self) -> frozenset[int]:
        """This process and its children."""
        import psutil

        own = {os.getpid()}
        with contextlib.suppress(psutil.Error):
            own.update(child.pid for child in psutil.Process().children(recursive=True))
        return frozenset(own)


def _unreadable(path: str, error: OSError) -> Fact[Any]:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return absent(path, "there is no such file")
    return cannot_tell(path, error.strerror or str(error))


def _run(
    words: Sequence[str], environment: Mapping[str, str], seconds: float, source: str
) -> Fact[CommandOutput]:
    try:
        process = subprocess.Popen(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        return absent(source, f"command {words[0]} not found")
    except OSError as error:
        return cannot_tell(source, error.strerror or str(error))
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return cannot_tell(source, f"no answer within {duration(seconds)}")
    return known(CommandOutput(process.returncode, _shown(out), _shown(err)), source)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with its children, and leave it if the kernel does not let it go."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _shown(output: bytes) -> str:
    return output[:_LONGEST_OUTPUT].decode("utf-8", errors="replace")


def _answer(output: CommandOutput, source: str) -> Fact[Mapping[str, Any]]:
    """The JSON object on the last line of a probe's output; others' words may precede it."""
    last = output.stdout.strip().rpartition("\n")[2]
    try:
        answer = json.loads(last)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        return known(answer, source)
    words = (output.stderr.strip() or output.stdout.strip()).rpartition("\n")[2]
    how = f"killed by signal {-output.code}" if output.code < 0 else f"exit code {output.code}"
    return cannot_tell(source, f"{how}: {words[:200]}" if words else how)


def _files_below(path: str) -> Iterator[str]:
    """Plain files at or below a path, of a bounded number of folders."""
    if os.path.isfile(path):
        yield path
    for folder, _, names in itertools.islice(os.walk(path), _MOST_FOLDERS):
        for name in names:
            file = os.path.join(folder, name)
            if os.path.isfile(file):
                yield file
