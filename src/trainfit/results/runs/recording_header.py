"""The header of a recording: what it says of the run, with the types of its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from trainfit.results.files.decoding import decode
from trainfit.results.machine.constants import Constant


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the model: its allocation's number, shape, dtype ("float32"), and whether
    an optimizer updates it."""

    alloc: int
    shape: tuple[int, ...]
    dtype: str
    trained: bool


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless it has what it must, of the types that it must be of."""
    for key, kind in _HEADER.items():
        if type(header.get(key)) is not kind:
            raise ValueError(f"{key} is {header.get(key)!r}")
    for key, kind in _OPTIONAL_HEADER.items():
        if type(header.get(key)) not in (kind, type(None)):
            raise ValueError(f"{key} is {header.get(key)!r}")
    if [type(each) for each in header["context_range_bytes"]] != [int, int]:
        raise ValueError("context_range_bytes is not a pair of numbers")
    decode_context_parts(header)


def decode_parameters(header: Mapping[str, Any]) -> tuple[Parameter, ...] | None:
    """The model's parameters; ``None`` in a recording of version 1. Raises ``ValueError``."""
    entries = header.get("parameters")
    return None if entries is None else tuple(_parameter(entry) for entry in entries)


def decode_context_parts(header: Mapping[str, Any]) -> tuple[Constant, ...]:
    """The context's parts as the header holds them; none in recordings of earlier versions.

    Raises ``ValueError``.
    """
    return tuple(decode(Constant, part) for part in header.get("context_parts") or ())


#: What the header says of the run, with the types of its values.
_HEADER: Final[Mapping[str, type]] = {
    "gpu": str,
    "gpu_memory_bytes": int,
    "context_bytes": int,
    "context_range_bytes": list,
    "torch": str,
    "assumptions": dict,
    "limited": bool,
}


#: Further entries: the batch size where it is known, the script's name, its command
#: for bash with placeholders ("template"), the class of the optimizer, the allocator's settings as
#: ``PYTORCH_ALLOC_CONF`` has them, of each parameter ``[allocation, shape, dtype, is
#: trained]``, the message with which the simulated GPU was full, the parts of the context, what
#: other processes held, the calibration profile, what a result has to say of these, what kept
#: the script from changing files (:class:`~trainfit.results.runs.sandbox.Protection`), what
#: was among the steps (:class:`~trainfit.results.runs.coverage.Coverage`), the
#: launch command that was run, and what an optimizer step consists of (a
#: :class:`~trainfit.results.runs.steps.StepMakeup`; there without a value where no step was
#: counted).
_OPTIONAL_HEADER: Final[Mapping[str, type]] = {
    "batch_size": int,
    "script": str,
    "template": str,
    "optimizer": str,
    "alloc_conf": str,
    "parameters": list,
    "out_of_memory": str,
    "context_parts": list,
    "other_processes_bytes": int,
    "profile": str,
    "notes": list,
    "protection": dict,
    "coverage": dict,
    "command": str,
    "step": dict,
}


def _parameter(entry: Any) -> Parameter:
    """One entry of the header; raises ``ValueError`` for anything else."""
    match entry:
        case [int(alloc), [*shape], str(dtype), bool(trained)] if all(
            type(size) is int and size >= 0 for size in shape
        ):
            return Parameter(alloc, tuple(shape), dtype, trained)
    raise ValueError(f"a parameter is {entry!r}")
