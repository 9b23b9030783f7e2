"""Ranks that a script starts as processes of ``multiprocessing``: the simulated one runs in this
process, for a fresh one has no simulated GPU; the others, which would wait for it, are not started.
Processes that train on the script's own GPU without being ranks (Hogwild) are refused by name.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Final

import torch

from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.simgpu.device.user_location import is_library, user_frame
from trainfit.simgpu.patching import PatchSet

#: By a call of this a process becomes a rank.
_JOINS: Final = "init_process_group"
#: By a call of this it trains.
_TRAINS: Final = "backward"
#: Calls from one function of the script to another that are followed to find it.
_DEPTH: Final = 5


class _Joined:
    """Stands for the context of processes that have ended."""

    processes: Final = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True


class _Ended:
    """Stands for what ``multiprocessing`` holds of a started process: it ended well."""

    returncode = 0

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.sentinel, end = os.pipe()  # ready to be read, as of a process that has ended
        os.close(end)

    def poll(self, *_: Any) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def terminate(self) -> None:
        """Nothing is left to end."""

    kill = terminate

    def close(self) -> None:
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    __del__ = close


class StartedRanks:
    """Installs what starts processes. ``rank`` is the one that runs here; ``require`` is told how
    many there are, in words, too, and refuses those without a GPU; ``trained`` says whether this
    process has made a step."""

    def __init__(
        self, rank: int, require: Callable[[int, str], None], trained: Callable[[], bool]
    ) -> None:
        self._rank, self._require, self._trained = rank, require, trained
        self._started = 0

    def install(self, patches: PatchSet) -> None:
        module = sys.modules["torch.multiprocessing.spawn"]
        for owner in (torch.multiprocessing, module):
            for name in ("spawn", "start_processes"):
                if hasattr(owner, name):
                    patches.set(owner, name, self._several(name))
        patches.hook(multiprocessing.process.BaseProcess, "start", self._one)

    def _several(self, name: str) -> Callable[..., Any]:
        def start(
            fn: Callable[..., Any],
            args: Any = (),
            nprocs: int = 1,
            join: bool = True,
            *_: Any,
            **__: Any,
        ) -> Any:
            self._require(nprocs, f"torch.multiprocessing.{name} of {nprocs} processes")
            fn(self._rank, *args)
            return None if join else _Joined()

        return start

    def _one(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def start(process: Any) -> None:
            names = _named_by(process)
            if _JOINS not in names:
                if _TRAINS in names and not self._trained() and _is_given_gpu(process):
                    raise _trains_beside(process)
                original(process)
                return
            number, self._started = self._started, self._started + 1
            self._require(self._started, f"{self._started} processes that the script starts")
            process._popen = _Ended()
            if number == self._rank:
                process.run()

        return start


def _named_by(process: Any) -> set[str]:
    """What the functions of the script name that this process would run, as far as they can be
    seen: whether it becomes a rank, and whether it trains."""
    target = getattr(process, "_target", None) or type(process).run
    while isinstance(target, functools.partial):
        target = target.func
    named: set[str] = set()
    seen: set[CodeType] = set()
    level = [(_plain(target), type(getattr(target, "__self__", process)))]
    for _ in range(_DEPTH):
        following = []
        for function, owner in level:
            code = getattr(function, "__code__", None)
            if code is None or code in seen:
                continue
            seen.add(code)
            names = set(_names(code))
            named |= names
            held = function.__globals__
            found = (getattr(owner, name, None) or held.get(name) for name in sorted(names))
            following += [_called(each, owner) for each in found if _of_script(each)]
        level = following
    return named


def _is_given_gpu(process: Any) -> bool:
    """Is one of its arguments on the GPU, or the GPU itself?"""
    given = (*getattr(process, "_args", ()), *getattr(process, "_kwargs", {}).values())
    return any(_is_on_gpu(each) for each in given)


def _is_on_gpu(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return any(parameter.is_cuda for parameter in value.parameters())
    if isinstance(value, torch.Tensor):
        return bool(value.is_cuda)
    return isinstance(value, torch.device) and value.type == "cuda"


def _trains_beside(process: Any) -> UnsupportedOperatorError:
    """A process that trains next to others on one GPU, none of which is the script's own."""
    name = getattr(getattr(process, "_target", None), "__name__", "") or "run"
    return UnsupportedOperatorError(
        f"the training of a process that the script starts ({name})",
        user_frame(),
        "not simulated",
        "trainfit sees the GPU memory of the script's own process, and each of these has a CUDA "
        "context, gradients and an optimizer of its own in addition; plan a copy of the script "
        f"that calls {name}(…) itself in place of start(), and count its memory once for each "
        "process",
    )


def _plain(function: Any) -> Any:
    return getattr(function, "__func__", function)


def _called(found: Any, owner: type) -> tuple[Any, type]:
    """The function that a call of ``found`` runs, and the class in which its names are looked up
    first."""
    if isinstance(found, type):
        return found.__init__, found  # type: ignore[misc]
    return _plain(found), owner


def _of_script(found: Any) -> bool:
    """Is it of the user's own modules, not of a library's?"""
    module = sys.modules.get(getattr(found, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return callable(found) and bool(file) and not is_library(file)


def _names(code: CodeType) -> Iterator[str]:
    """All that it and the functions within it name."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
