"""A machine as one JSON document: files, environment, and the answers of calls and children.

``trainfit doctor --record FILE`` writes one, ``--machine FILE`` replays it, and the tests'
machines (``tests/machines``) are written in it. Keys:

``origin``, ``provenance``
    "recorded" or "composed", and from what.
``files``
    path → content: a text; ``{"base64": …}``; ``{"error": "EACCES"}``; ``{"link": target}``;
    ``{"folder": true}``. A path may hold one range, ``cpu{0-15}``: it stands for all of them,
    with a list of contents for one each.
``environment``
    the variables that facts are read from (:data:`VARIABLES`), no others.
``inaccessible``
    paths that this user may not open.
``calls``
    ``affinity`` ("0-15"), ``limits`` (name → [soft, hard], null is unlimited), ``uname``,
    ``spaces`` (path → [total, free] in bytes), ``packages`` (name → folder), ``folder`` (the
    current one), ``bad_fork``, ``processes`` (pid → name), ``own_pids``, ``sizes`` (path →
    {file: bytes}), ``read_rates`` (file → [past the cache, from the cache] in bytes/s).
``commands``, ``probes``
    the words joined by blanks, or the probe's name → ``{"code", "stdout", "stderr"}`` or the
    probe's JSON object; ``{"hangs": true}`` never answers, ``{"fails": why}`` fails.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from trainfit.hardware.machine.files import RecordedFiles
from trainfit.hardware.machine.limits import THREAD_VARIABLES
from trainfit.hardware.machine.system import CommandOutput, Space, System
from trainfit.results.files.errors import ResultFileError
from trainfit.results.machine import Fact, absent, cannot_tell, known
from trainfit.results.text import duration
from trainfit.torch_private.needed import BAD_FORK

FORMAT: Final = "trainfit-machine"
VERSION: Final = 1

#: Environment variables that facts are read from; a recording holds no others, as they may
#: hold secrets.
VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "CUDA_HOME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    *THREAD_VARIABLES,
    "MALLOC_ARENA_MAX",
    "KUBERNETES_SERVICE_HOST",
    "container",
    "WSL_DISTRO_NAME",
    "WSL_INTEROP",
    "SLURM_JOB_ID",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPUS_ON_NODE",
    "SLURM_JOB_CPUS_PER_NODE",
    "SLURM_MEM_PER_NODE",
    "SLURM_MEM_PER_CPU",
    "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS",
    "SLURM_GPUS_ON_NODE",
    "SLURM_NTASKS",
    "SLURM_JOB_PARTITION",
    "PBS_JOBID",
    "LSB_JOBID",
    "JOB_ID",
    "NSLOTS",
)

_AGAIN = "re-record it with `trainfit doctor --record FILE`"


class RecordedSystem(System):
    """A machine that was recorded, from its document.

    Raises ``ValueError`` for a document that holds what is no path or no content.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(
            environment=document.get("environment", {}),
            files=RecordedFiles(document.get("files", {})),
        )
        self._inaccessible = frozenset(document.get("inaccessible", ()))
        self._calls = document.get("calls", {})
        self._commands = document.get("commands", {})
        self._probes = document.get("probes", {})

    def accessible(self, path: str) -> bool:
        return self.exists(path) and path not in self._inaccessible

    def real_path(self, path: str) -> str:
        folder = str(self._calls.get("folder", "/"))
        return os.path.normpath(os.path.join(folder, path))

    def space(self, path: str) -> Fact[Space]:
        spaces: Mapping[str, list[int]] = self._calls.get("spaces", {})
        above = [path, *(str(each) for each in PurePosixPath(path).parents)]
        for each in above:
            if each in spaces:
                total, free = spaces[each]
                return known(Space(total, free), f"statvfs({path})")
        return absent(path, "there is no such file")

    def affinity(self) -> Fact[tuple[int, ...]]:
        if "affinity" not in self._calls:
            return cannot_tell("sched_getaffinity", "not available on this system")
        return known(_numbers(self._calls["affinity"]), "sched_getaffinity")

    def limit(self, name: str) -> Fact[tuple[int | None, int | None]]:
        limits = self._calls.get("limits", {})
        source = f"getrlimit(RLIMIT_{name})"
        if name not in limits:
            return absent(source, "this system has no such limit")
        soft, hard = limits[name]
        return known((soft, hard), source)

    def system_name(self) -> Mapping[str, str]:
        uname: Mapping[str, str] = self._calls.get("uname", {})
        return uname

    def bad_fork(self) -> Fact[bool]:
        source = BAD_FORK
        if "bad_fork" not in self._calls:
            return absent(source, "PyTorch is not used in this process")
        return known(bool(self._calls["bad_fork"]), source)

    def packages(self) -> Mapping[str, str]:
        packages: Mapping[str, str] = self._calls.get("packages", {})
        return packages

    def process_names(self, pids: Iterable[int]) -> Mapping[int, str]:
        names = self._calls.get("processes", {})
        return {pid: names[str(pid)] for pid in pids if str(pid) in names}

    def own_pids(self) -> frozenset[int]:
        return frozenset(self._calls.get("own_pids", ()))

    def file_sizes(self, path: str, most: int) -> Fact[tuple[tuple[str, int], ...]]:
        sizes = self._calls.get("sizes", {}).get(path)
        if not sizes:
            return absent(path, "it contains no files")
        return known(tuple(sizes.items())[:most], path)

    def read_rate(self, file: str, seconds: float) -> Fact[tuple[float, float]]:
        rates = self._calls.get("read_rates", {}).get(file)
        if rates is None:
            return cannot_tell(file, "it was not measured when the machine was recorded")
        return known((float(rates[0]), float(rates[1])), file)

    def command(self, words: Sequence[str], seconds: float) -> Fact[CommandOutput]:
        source = " ".join(words)
        answer = self._commands.get(source)
        if answer is None:
            return absent(source, f"command {words[0]} not found")
        if failed := _failure(answer, source, seconds):
            return failed
        return known(
            CommandOutput(
                answer.get("code", 0), answer.get("stdout", ""), answer.get("stderr", "")
            ),
            source,
        )

    def probe(self, name: str, seconds: float) -> Fact[Mapping[str, Any]]:
        source = f"probe {name}"
        answer = self._probes.get(name)
        if answer is None:
            return cannot_tell(source, "it was not run when the machine was recorded")
        return _failure(answer, source, seconds) or known(answer, source)


def replayed(path: Path) -> RecordedSystem:
    """The machine in ``path``; raises :class:`ResultFileError` for what is no recording."""
    document = read_machine(path)
    try:
        return RecordedSystem(document)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ResultFileError(path, f"it is damaged ({error})", _AGAIN) from error


def read_machine(path: Path) -> dict[str, Any]:
    """The document in ``path``; raises :class:`ResultFileError`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultFileError(path, "there is no such file", "check the path") from None
    except OSError as error:
        raise ResultFileError(path, error.strerror or str(error), "check the path") from error
    except (ValueError, RecursionError) as error:
        raise ResultFileError(path, f"it is not a recorded machine ({error})", _AGAIN) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ResultFileError(path, "it is not a recorded machine", _AGAIN)
    version = document.get("version")
    if type(version) is not int or version > VERSION:
        raise ResultFileError(path, f"its format version is {version!r}", "upgrade trainfit")
    return document


def _numbers(text: str) -> tuple[int, ...]:
    """A list of CPUs as Linux writes it: "0-3,8"."""
    numbers: list[int] = []
    for part in filter(None, str(text).strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _failure(answer: Any, source: str, seconds: float) -> Fact[Any] | None:
    if not isinstance(answer, Mapping):
        return cannot_tell(source, "its recorded answer is not an object")
    if answer.get("hangs"):
        return cannot_tell(source, f"no answer within {duration(seconds)}")
    if "fails" in answer:
        return cannot_tell(source, str(answer["fails"]))
    return None


class RecordingSystem(System):
    """This machine, remembering everything that is read of it."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, Any] = {}
        self._inaccessible: set[str] = set()
        self._calls: dict[str, Any] = {"limits": {}, "spaces": {}, "processes": {}}
        self._calls |= {"sizes": {}, "read_rates": {}, "folder": os.getcwd()}
        self._commands: dict[str, Any] = {}
        self._probes: dict[str, Any] = {}
        # Children still get the whole environment.
        self.environment = {
            name: value for name, value in self.environment.items() if name in VARIABLES
        }

    def text(self, path: str) -> Fact[str]:
        fact = super().text(path)
        if fact.value is not None:
            if os.path.islink(path):
                self._kept[path] = {"link": os.readlink(path)}
                path = os.path.realpath(path)
            self._kept[path] = fact.value
        elif not fact.is_absent:
            self._keep_unreadable(path)
        return fact

    def names(self, path: str) -> Fact[tuple[str, ...]]:
        fact = super().names(path)
        for name in fact.value or ():
            self._keep_name(f"{path.rstrip('/')}/{name}")
        if fact.value is not None:
            self._kept.setdefault(path, {"folder": True})
        elif not fact.is_absent:
            self._keep_unreadable(path)
        return fact

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        if found:
            self._keep_name(path)
        return found

    def accessible(self, path: str) -> bool:
        found = super().accessible(path)
        if not found and self.exists(path):
            self._inaccessible.add(path)
        return found

    def link(self, path: str) -> Fact[str]:
        fact = super().link(path)
        if fact.value is not None:
            self._kept[path] = {"link": fact.value}
        return fact

    def space(self, path: str) -> Fact[Space]:
        fact = super().space(path)
        if fact.value is not None:
            self._calls["spaces"][path] = [fact.value.total, fact.value.free]
        return fact

    def affinity(self) -> Fact[tuple[int, ...]]:
        fact = super().affinity()
        if fact.value is not None:
            self._calls["affinity"] = ",".join(map(str, fact.value))
        return fact

    def limit(self, name: str) -> Fact[tuple[int | None, int | None]]:
        fact = super().limit(name)
        if fact.value is not None:
            self._calls["limits"][name] = list(fact.value)
        return fact

    def system_name(self) -> Mapping[str, str]:
        self._calls["uname"] = dict(super().system_name())
        return super().system_name()

    def bad_fork(self) -> Fact[bool]:
        fact = super().bad_fork()
        if fact.value is not None:
            self._calls["bad_fork"] = fact.value
        return fact

    def packages(self) -> Mapping[str, str]:
        self._calls["packages"] = dict(super().packages())
        return super().packages()

    def process_names(self, pids: Iterable[int]) -> Mapping[int, str]:
        names = super().process_names(pids)
        self._calls["processes"] |= {str(pid): name for pid, name in names.items()}
        return names

    def own_pids(self) -> frozenset[int]:
        own = super().own_pids()
        self._calls["own_pids"] = sorted(own)
        return own

    def file_sizes(self, path: str, most: int) -> Fact[tuple[tuple[str, int], ...]]:
        fact = super().file_sizes(path, most)
        self._calls["sizes"][path] = dict(fact.value or ())
        return fact

    def read_rate(self, file: str, seconds: float) -> Fact[tuple[float, float]]:
        fact = super().read_rate(file, seconds)
        if fact.value is not None:
            self._calls["read_rates"][file] = list(fact.value)
        return fact

    def command(self, words: Sequence[str], seconds: float) -> Fact[CommandOutput]:
        fact = super().command(words, seconds)
        if fact.value is not None:
            self._commands[" ".join(words)] = vars(fact.value)
        elif not fact.is_absent:
            self._commands[" ".join(words)] = {"fails": fact.reason}
        return fact

    def probe(self, name: str, seconds: float) -> Fact[Mapping[str, Any]]:
        fact = super().probe(name, seconds)
        self._probes[name] = fact.value if fact.value is not None else {"fails": fact.reason}
        return fact

    def document(self) -> dict[str, Any]:
        """The machine as far as it was read."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "origin": "recorded",
            "provenance": "recorded by `trainfit doctor --record`",
            "environment": self.environment,
            "files": dict(sorted(self._kept.items())),
            "inaccessible": sorted(self._inaccessible),
            "calls": self._calls,
            "commands": self._commands,
            "probes": self._probes,
        }

    def _keep_name(self, path: str) -> None:
        """A name without its content, until more is read: a link, a folder, an unread file."""
        place = Path(path)
        if place.is_symlink():
            content: Any = {"link": os.readlink(place)}
        else:
            content = {"folder": True} if place.is_dir() else {"error": "ENODATA"}
        self._kept.setdefault(path, content)

    def _keep_unreadable(self, path: str) -> None:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            self._kept[path] = {"error": errno.errorcode.get(error.errno or 0, "EIO")}
        else:
            self._kept[path] = {"base64": base64.b64encode(content).decode()}
