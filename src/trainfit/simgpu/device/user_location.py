"""The current location in the user's code.

The user's is what is run (:func:`claim`), and whatever is neither Python's, nor installed, nor
trainfit's. What is installed as editable is a library too, unless the script that runs, or the
folder that it was started in, belongs to the same project.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep

_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
#: Folders that hold what is installed, wherever they are.
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def _start_folder() -> str:
    """The folder in which this process was started or forked off; empty where that is gone."""
    try:
        return os.path.realpath(os.getcwd())
    except OSError:
        return ""


_claimed: list[str] = []
#: Real paths of folders that are the user's: of the script, and the one it was started in.
_own: list[str] = [_start_folder()]
#: What :func:`is_library` said: a look-up costs less than a call.
_known: dict[str, bool] = {}


def claim(folder: str | Path) -> None:
    """Count ``folder`` as the user's own, also where it lies among the installed libraries."""
    _own.append(os.path.realpath(folder))
    is_library.cache_clear()
    _known.clear()
    if is_library(os.path.join(folder, "module.py")):
        _claimed.append(str(folder) + os.sep)
        is_library.cache_clear()


def user_frame() -> str | None:
    """``file:line`` of the innermost frame outside of PyTorch, libraries and trainfit.

    ``None`` where every frame belongs to a library.
    """
    return frame_of_user(sys._getframe(1))


def called_by_user() -> bool:
    """Is the innermost frame outside of PyTorch and trainfit the user's, no other library's?"""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_folders_of_torch()):
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_code.co_filename)


@functools.cache
def _folders_of_torch() -> tuple[str, ...]:
    """Trainfit's own, and PyTorch's, which only a run that has it asks for."""
    return _PACKAGE, str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep


def loaded_modules() -> Iterator[tuple[ModuleType, dict[str, Any]]]:
    """The modules that are imported by now, each with its own namespace.

    An attribute that is asked of a lazy module imports what it stands for: that costs time, warns
    of what is deprecated, and fails where a package is not installed.
    """
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):  # anything may lie there
            yield module, object.__getattribute__(module, "__dict__")


def files_of_user() -> tuple[str, ...]:
    """The user's files that are imported by now: their real paths."""
    named = {space.get("__file__") for _, space in loaded_modules()}
    files = (each for each in named if isinstance(each, str) and os.path.isabs(each))
    return tuple(sorted({os.path.realpath(file) for file in files if not is_library(file)}))


def place_of_user() -> tuple[str, int] | None:
    """The innermost file and line of the user's; for callers that ask at every allocation, hence
    unrolled."""
    frame: FrameType | None = sys._getframe(2)
    known = _known
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename not in known:
            known[filename] = is_library(filename)
        if not known[filename]:
            return filename, frame.f_lineno
        frame = frame.f_back
    return None


def frame_of_user(frame: FrameType | None) -> str | None:
    """The innermost file and line of the user's, from ``frame`` outwards."""
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def caller_of(frame: FrameType | None) -> FrameType | None:
    """The frame that called what is patched: the first from ``frame`` outwards that is none of
    trainfit's own."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def calls_of_user(frame: FrameType | None, most: int = 12) -> list[tuple[FrameType, FrameType]]:
    """The user's frames from ``frame`` outwards, each with the frame that it called."""
    calls: list[tuple[FrameType, FrameType]] = []
    while frame is not None and frame.f_back is not None and len(calls) < most:
        outer = frame.f_back
        if not is_library(outer.f_code.co_filename):
            calls.append((outer, frame))
        frame = outer
    return calls


def line_of_user(trace: TracebackType | None) -> str | None:
    """The innermost file and line of the user's, of the frames an exception passed through."""
    text = None
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if not is_library(filename):
            text = f"{filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return text


#: PyTorch's Python around a call of one function of its own.
_WRAPPERS = tuple(
    os.path.join("torch", *name)
    for name in (
        ("cuda", "__init__.py"),
        ("cuda", "memory.py"),
        ("_tensor.py",),
        ("nn", "functional.py"),
        ("utils", "data", "dataloader.py"),
    )
)


def call_of_user() -> str | None:
    """``file:line`` that calls what trainfit stands for now, if that line is the user's own and no
    library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_PACKAGE)
        or frame.f_code.co_filename.endswith(_WRAPPERS)
    ):
        frame = frame.f_back
    if frame is None or is_library(frame.f_code.co_filename):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_installed(filename: str) -> bool:
    """Does a file lie where packages are installed, whoever runs it?"""
    return filename.startswith(_LIBRARIES) or any(folder in filename for folder in _INSTALLED)


@functools.cache
def is_library(filename: str) -> bool:
    """Does a source file belong to Python, an installed package, or trainfit?"""
    if filename.startswith(tuple(_claimed)):
        return False
    return (
        filename.startswith((_PACKAGE, "<"))
        or is_installed(filename)
        or _is_of_another_project(filename)
    )


def _is_of_another_project(filename: str) -> bool:
    """Does it belong to an editable install that what runs does not belong to?"""
    try:
        path = os.path.realpath(filename)
    except OSError:  # a relative name, and the script removed its working directory
        return False
    if os.path.dirname(path) in _own:
        return False
    root = next((root for root in _editable_roots() if path.startswith(root)), None)
    return root is not None and not any(f"{own}{os.sep}".startswith(root) for own in _own)


@functools.cache
def _editable_roots() -> tuple[str, ...]:
    """The folders of projects that are installed as editable, each with a separator at its end.

    By ``direct_url.json``, which pip and uv write (PEP 610).
    """
    roots = []
    for distribution in importlib.metadata.distributions():
        try:
            found = json.loads(distribution.read_text("direct_url.json") or "{}")
            if found.get("dir_info", {}).get("editable"):
                folder = url2pathname(urlparse(found["url"]).path)
                roots.append(os.path.realpath(folder) + os.sep)
        except (OSError, ValueError, KeyError, AttributeError):
            continue  # what cannot be read names no project
    return tuple(roots)


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame of this thread: of a function a copy, of a module its own."""
    names = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return names
    found = dict(names)
    # Before Python 3.13 (PEP 667) a frame keeps this dictionary, and with it what the variables
    # held: a batch's outputs would live for longer than the script lets them. Nobody else has it
    # where there are no more references than the frame's, ours and the call's; a function that is
    # traced or profiled gets its variables back from it, and would have none.
    is_told = frame.f_trace or sys.gettrace() or sys.getprofile()
    if type(names) is dict and is_told is None and sys.getrefcount(names) <= 3:
        names.clear()
    return found


def untrace(frame: FrameType | None, trace: Callable[..., Any]) -> None:
    """The functions around that ``trace`` was told of are no longer traced, and keep nothing that
    tracing left in them."""
    while frame is not None:
        if frame.f_trace == trace:
            frame.f_trace = None
            locals_of(frame)
        frame = frame.f_back
