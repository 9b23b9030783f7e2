"""The Python that a command names: found as the shell finds it, asked once, and given our code.

The rule of all verbs: the interpreter that the command names runs it. A plain ``python`` or
``python3`` without PyTorch gives way to trainfit's own, which is said; any other is refused.
In another environment than trainfit's, our code comes from a folder that has nothing but
trainfit and what it lacks there: the user's packages are what they are.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from trainfit.plan.command.tunables import CommandError

#: The oldest Python and the oldest PyTorch (pyproject.toml) with which our code runs.
LEAST_PYTHON: Final = (3, 11)
LEAST_TORCH: Final = (2, 8)

_NAME: Final = re.compile(r"python(\d+(\.\d+t?)?)?$")
_PLAIN: Final = ("python", "python3")
#: Seconds in which an interpreter has answered.
_LIMIT_S: Final = 30.0
#: What our code imports in the user's process, and can be lent to an interpreter without it.
_LENT: Final = ("psutil", "threadpoolctl")
#: What belongs to the user's PyTorch, and cannot.
_REQUIRED: Final = ("numpy",)
_SOURCE: Final = Path(__file__).resolve().parents[3]
_OURS: Final = "import sys; sys.path.append({folder!r}); "
#: In another environment there may be another trainfit, which would not understand this one.
_LENT_CODE: Final = (
    "import sys; sys.path.append({folder!r}); sys.path.insert(0, {folder!r}); import trainfit; "
    "del sys.path[0]; "
)
#: Before code that runs no script of the user's: PyTorch is not taken apart at the end, which takes
#: most of a second.
HASTENED: Final = "import atexit, gc; atexit.register(gc.freeze); "
_STUB: Final = """\
# trainfit where it is installed: see trainfit/plan/command/interpreter.py
__path__ = [{folder!r}]
__file__ = {file!r}
with open(__file__, encoding="utf-8") as _stream:
    exec(compile(_stream.read(), __file__, "exec"))
"""
#: Any Python answers, also one that is too old. Nothing is imported that is looked for.
_QUESTION: Final = f"""
import json, re, sys
sys.path[:] = [each for each in sys.path if each]
told = {{"version": list(sys.version_info[:3]), "abi": getattr(sys, "abiflags", ""), "has": []}}
try:
    from importlib.util import find_spec
    for name in {_LENT + _REQUIRED!r}:
        if find_spec(name) is not None:
            told["has"].append(name)
    spec = find_spec("torch")
    if spec is not None and spec.origin:
        told["torch"] = "of an unknown version"
        with open(spec.origin[:-len("__init__.py")] + "version.py") as stream:
            told["torch"] = re.search("__version__ = ['\\"]([^'\\"]+)", stream.read()).group(1)
except Exception:
    pass
print("\\n" + json.dumps(told))
"""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python that runs a command: the path that starts it, and how the command names it.

    ``torch`` is its version of PyTorch; ``lacks`` are modules that our code needs and that it has
    not. ``note`` says in one line what a reader of the command would not expect of it.
    """

    path: str
    named: str
    version: tuple[int, ...] = sys.version_info[:3]
    torch: str = ""
    lacks: tuple[str, ...] = ()
    is_own: bool = True
    note: str = ""

    def start(self, code: str, *flags: str) -> list[str]:
        """The words of a process of it that runs ``code``, which can import trainfit."""
        if self.is_own:
            before = _OURS.format(folder=str(_SOURCE))
        else:
            before = _LENT_CODE.format(folder=_lent_folder(self.lacks))
        return [self.path, *flags, "-c", before + code]


def own_interpreter(note: str = "") -> Interpreter:
    """The one that runs trainfit."""
    return Interpreter(sys.executable, "python", torch=own_pytorch(), note=note)


@functools.cache
def own_pytorch() -> str:
    """The version of PyTorch next to trainfit."""
    return metadata.version("torch")


def is_python(word: str) -> bool:
    """Is this the name, or the path, of an interpreter?"""
    return _NAME.match(Path(word).name) is not None


def interpreter_of(
    named: str,
    environment: Mapping[str, str],
    flags: Sequence[str],
    *,
    managed: str,
) -> Interpreter:
    """The interpreter that a command names, or a script's first line, in ``environment``.

    ``managed`` says whose Python it is to be, where a manager has an environment: there trainfit's
    own does not take its place. Raises :class:`CommandError` where our code, or
    PyTorch, does not run in it.
    """
    path = find_program(named, environment)
    gives_way = named in _PLAIN and not managed
    if path is None:
        if not gives_way:
            where = "" if os.sep in named else " on PATH"
            raise CommandError(
                f"program {named!r}: there is no such program{where}; check the path, or write "
                "`python` for trainfit's own Python"
            )
        return _given_way(f"{named} is not on PATH")
    if is_own(path):
        return dataclasses.replace(own_interpreter(), named=named)
    told = told_by(path, environment, flags)
    name = managed or named
    if "failure" in told:
        whose = _shown(name, path)
        if gives_way:
            return _given_way(f"{whose} does not run ({told['failure']})")
        raise CommandError(
            f"{whose} does not run ({told['failure']}); name a Python that has torch"
        )
    version, torch = tuple(told["version"]), told.get("torch", "")
    if not torch:
        whose = _shown(name, path, f"Python {_dotted(version)}")
        if gives_way:
            return _given_way(f"{whose} has no torch")
        raise CommandError(
            f"{whose} has no torch; install it there ({shlex.quote(path)} -m pip install torch), "
            "or name a Python that has it"
        )
    whose = _shown(name, path, f"Python {_dotted(version)}", f"torch {torch}")
    lacks = tuple(each for each in (*_LENT, *_REQUIRED) if each not in told["has"])
    interpreter = Interpreter(path, named, version, torch, lacks, False, f"run by {whose}")
    _check(interpreter, whose, "t" in told["abi"])
    return interpreter


def find_program(named: str, environment: Mapping[str, str]) -> str | None:
    """The file that a shell starts for this word; ``None`` where there is none."""
    return shutil.which(named, path=environment.get("PATH", os.defpath))


def told_by(path: str, environment: Mapping[str, str], flags: Sequence[str] = ()) -> dict[str, Any]:
    """What an interpreter says of itself: ``version``, ``abi``, ``torch`` (where it has it), and
    the modules that it ``has``; ``failure`` alone where it does not run. It is asked once."""
    return _asked(path, tuple(flags), tuple(sorted(environment.items())))


def is_own(path: str) -> bool:
    """Does this path start the interpreter that runs trainfit, in its environment?"""
    one, other = Path(os.path.abspath(path)), Path(sys.executable)
    return one == other or (one.parent == other.parent and one.resolve() == other.resolve())


def first_line(program: str) -> list[str]:
    """The interpreter that an executable file names in its first lines, with its options; empty
    if it names no Python. ``python`` without a path is the one on PATH."""
    with open(program, "rb") as stream:
        first, second = (stream.readline(512).decode(errors="replace") for _ in range(2))
    if not first.startswith("#!"):
        return []
    # Installers write paths that are too long for a "#!" line into a second one.
    exec_line = re.match(r"'''exec' (\"[^\"]+\"|\S+)", second)
    words = [exec_line[1].strip('"')] if exec_line else first[2:].split()
    if words and Path(words[0]).name == "env":
        words = words[1:]
        while words and words[0].startswith("-"):
            words = words[1:]
    return words if words and is_python(words[0]) else []


def _given_way(why: str) -> Interpreter:
    return own_interpreter(
        f"{why}: trainfit's own Python ({sys.executable}) runs the command; activate its "
        "environment, or write its path"
    )


def _shown(name: str, path: str, *facts: str) -> str:
    """An interpreter in a sentence: its name, and its path with what is known of it."""
    told = [path] if name != path else []
    facts = (*told, *facts)
    return f"{name} ({', '.join(facts)})" if facts else name


def _check(interpreter: Interpreter, whose: str, is_free_threaded: bool) -> None:
    """Raise :class:`CommandError` where our code does not run in another interpreter."""
    if interpreter.version < LEAST_PYTHON:
        raise CommandError(
            f"{whose}: trainfit's code needs Python {_dotted(LEAST_PYTHON)} or later; use an "
            "environment with one, or name another Python that has torch"
        )
    release = tuple(int(each) for each in re.findall(r"\d+", interpreter.torch)[:2])
    if release and release < LEAST_TORCH:
        raise CommandError(
            f"{whose}: trainfit needs torch {_dotted(LEAST_TORCH)} or later; update it there "
            f"({shlex.quote(interpreter.path)} -m pip install -U torch)"
        )
    missing = [
        each
        for each in interpreter.lacks
        if each not in _LENT or not _can_be_lent(each, is_free_threaded=is_free_threaded)
    ]
    if missing:
        raise CommandError(
            f"{whose} has no {' and no '.join(missing)}, which trainfit needs there; install it "
            f"({shlex.quote(interpreter.path)} -m pip install {' '.join(missing)})"
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _can_be_lent(module: str, *, is_free_threaded: bool) -> bool:
    """Does ours run in any Python? Its compiled files are of the stable ABI, or there are none."""
    place = _place_of(module)
    compiled = list(place.glob("*.so")) if place is not None and place.is_dir() else []
    stable = all(".abi3." in file.name for file in compiled)
    return place is not None and (not compiled or (stable and not is_free_threaded))


def _place_of(module: str) -> Path | None:
    """The folder or the file of a module in our own environment."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


@functools.lru_cache(maxsize=8)
def _lent_folder(lacks: tuple[str, ...]) -> str:
    """A folder with trainfit and these modules, and nothing else; it goes with this process.

    It stands last in the path, where processes that a script spawns find it, too.
    """
    kept = tempfile.TemporaryDirectory(prefix="trainfit-")
    _kept.append(kept)
    folder, ours = Path(kept.name), _SOURCE / "trainfit"
    (folder / "trainfit").mkdir()
    stub = _STUB.format(folder=str(ours), file=str(ours / "__init__.py"))
    (folder / "trainfit" / "__init__.py").write_text(stub)
    for place in filter(None, map(_place_of, lacks)):
        (folder / place.name).symlink_to(place)
    return kept.name


#: Removed when this process ends.
_kept: Final[list[tempfile.TemporaryDirectory[str]]] = []


@functools.lru_cache(maxsize=16)
def _asked(
    path: str, flags: tuple[str, ...], environment: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [path, *flags, "-c", _QUESTION],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
            env={**dict(environment), "TRAINFIT_WATCH": "0"},
        )
        told: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
        return told
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"failure": " ".join(str(error).split())}
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"failure": " ".join(lines[-1 if "Traceback" in lines[0] else 0].split())}
