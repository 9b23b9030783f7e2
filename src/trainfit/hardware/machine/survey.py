"""All facts of a machine, read concurrently, within a time limit even if some hang."""

from __future__ import annotations

import dataclasses
import platform
import typing
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from trainfit.hardware.machine.cuda_stack import read_cuda_stack
from trainfit.hardware.machine.gpus import read_gpus
from trainfit.hardware.machine.limits import read_limits, read_memory, read_threads
from trainfit.hardware.machine.parsing import begin
from trainfit.hardware.machine.processor import read_cpu
from trainfit.hardware.machine.storage import read_storage
from trainfit.hardware.machine.surroundings import read_surroundings
from trainfit.hardware.machine.system import System
from trainfit.results.machine import (
    Cpu,
    CudaStack,
    Fact,
    Limits,
    Machine,
    Memory,
    Storage,
    Surroundings,
    ThreadSettings,
    cannot_tell,
)
from trainfit.results.text import duration

_K = TypeVar("_K")

#: Longest that the facts are waited for; single probes have shorter limits of their own, so that
#: it is reached only where a file itself hangs (a dead network mount).
TIME_LIMIT_S = 18.0


def survey(
    system: System,
    data: str | None = None,
    seconds: float = TIME_LIMIT_S,
    *,
    imports_torch: bool = True,
) -> Machine:
    """Read everything.

    Args:
        system: the machine.
        data: a file or folder whose storage is looked at and whose read rate is measured;
            without it the current folder's storage, unmeasured.
        seconds: after this time, what has not answered is unknown.
        imports_torch: whether PyTorch is imported in a process of its own, to ask what it sees.
    """
    answers: Mapping[str, Future[Any]] = {
        "cuda": begin(read_cuda_stack, system, imports_torch),
        "gpus": begin(read_gpus, system),
        "storage": begin(read_storage, system, data),
        "cpu": begin(read_cpu, system),
        "memory": begin(read_memory, system),
        "limits": begin(read_limits, system),
        "surroundings": begin(read_surroundings, system),
        "threads": begin(read_threads, system),
    }
    wait(answers.values(), timeout=seconds)

    def part(kind: type[_K], name: str) -> _K:
        reason = _failure(answers[name], seconds)
        return unknown(kind, name, reason) if reason else answers[name].result()

    blind = _failure(answers["gpus"], seconds)
    return Machine(
        cpu=part(Cpu, "cpu"),
        memory=part(Memory, "memory"),
        storage=part(Storage, "storage"),
        limits=part(Limits, "limits"),
        surroundings=part(Surroundings, "surroundings"),
        threads=part(ThreadSettings, "threads"),
        cuda=part(CudaStack, "cuda"),
        gpus=cannot_tell("NVML", blind) if blind else answers["gpus"].result(),
        python=platform.python_version(),
    )


def unknown(kind: type[_K], source: str, reason: str) -> _K:
    """A group of facts all of which are unknown."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        origin = typing.get_origin(hints[field.name])
        if origin is Fact:
            values[field.name] = cannot_tell(source, reason)
        else:
            values[field.name] = {} if origin is Mapping else ""
    return kind(**values)


def _failure(answer: Future[Any], seconds: float) -> str:
    """Why a reader gave nothing; "" if it did."""
    if not answer.done():
        return f"no answer within {duration(seconds)}"
    error = answer.exception()
    # A fact less is better than no diagnosis.
    return f"trainfit failed to read it ({type(error).__name__}: {error})" if error else ""
