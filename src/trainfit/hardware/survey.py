"""All facts of a machine, read side by side, within a time limit whatever hangs."""

from __future__ import annotations

import dataclasses
import platform
import threading
import time
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainfit.hardware.cuda_stack import read_cuda_stack
from trainfit.hardware.gpus import read_gpus
from trainfit.hardware.limits import read_limits, read_threads
from trainfit.hardware.memory import read_memory
from trainfit.hardware.processor import read_cpu
from trainfit.hardware.storage import read_storage
from trainfit.hardware.surroundings import read_surroundings
from trainfit.hardware.system import System
from trainfit.results.facts import Fact, cannot_tell
from trainfit.results.machine import (
    Cpu,
    CudaStack,
    Limits,
    Machine,
    Memory,
    Storage,
    Surroundings,
    Threads,
)

_K = TypeVar("_K")

#: Longest that the facts are waited for; single probes have shorter limits of their own, so that
#: it is reached only where a file itself hangs (a dead network mount).
TIME_LIMIT_S = 18.0


def survey(system: System, data: str | None = None, seconds: float = TIME_LIMIT_S) -> Machine:
    """Read everything.

    Args:
        system: the machine.
        data: a file or folder whose storage is looked at and whose read rate is measured;
            without it the current folder's storage, unmeasured.
        seconds: after this time, what has not answered cannot be told.
    """
    readers: Mapping[str, Callable[[], Any]] = {
        "cuda": lambda: read_cuda_stack(system),
        "gpus": lambda: read_gpus(system),
        "storage": lambda: read_storage(system, data),
        "cpu": lambda: read_cpu(system),
        "memory": lambda: read_memory(system),
        "limits": lambda: read_limits(system),
        "surroundings": lambda: read_surroundings(system),
        "threads": lambda: read_threads(system),
    }
    answers = _side_by_side(readers, seconds)

    def part(kind: type[_K], name: str) -> _K:
        found = answers.get(name)
        if isinstance(found, kind):
            return found
        return unknown(kind, name, str(found or f"no answer within {seconds:g} s"))

    gpus = answers.get("gpus")
    if not isinstance(gpus, Fact):
        gpus = cannot_tell("NVML", str(gpus or f"no answer within {seconds:g} s"))
    return Machine(
        cpu=part(Cpu, "cpu"),
        memory=part(Memory, "memory"),
        storage=part(Storage, "storage"),
        limits=part(Limits, "limits"),
        surroundings=part(Surroundings, "surroundings"),
        threads=part(Threads, "threads"),
        cuda=part(CudaStack, "cuda"),
        gpus=gpus,
        python=platform.python_version(),
    )


def unknown(kind: type[_K], source: str, reason: str) -> _K:
    """A group of facts none of which can be told."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        origin = typing.get_origin(hints[field.name])
        if origin is Fact:
            values[field.name] = cannot_tell(source, reason)
        else:
            values[field.name] = {} if origin is Mapping else ""
    return kind(**values)


def _side_by_side(
    readers: Mapping[str, Callable[[], Any]], seconds: float
) -> Mapping[str, Any | str]:
    """What each reader returned; a text where it failed; nothing where it did not answer.

    The threads are daemons: one that hangs in the kernel is left behind, and does not keep
    the program from ending.
    """
    answers: dict[str, Any] = {}

    def read(name: str, reader: Callable[[], Any]) -> None:
        try:
            answers[name] = reader()
        except Exception as error:  # a fact less is better than no diagnosis
            answers[name] = f"trainfit failed to read it ({type(error).__name__}: {error})"

    threads = [
        threading.Thread(target=read, args=item, name=f"trainfit {item[0]}", daemon=True)
        for item in readers.items()
    ]
    until = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(answers)
