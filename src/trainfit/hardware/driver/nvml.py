"""NVML's answer, queried in a separate process, and the meaning of its errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainfit.hardware.host import answers
from trainfit.hardware.host.system import System
from trainfit.results.files.facts import Fact, absent, cannot_tell, known

T = TypeVar("T")

#: NVML answers within tenths of a second; it takes seconds where no persistence daemon keeps
#: the GPUs awake.
SECONDS = 6.0

#: nvml.h's nvmlReturn_t, where its symbol does not say enough.
_MEANING = {
    "NVML_ERROR_FUNCTION_NOT_FOUND": "this driver is too old for this call",
    "NVML_ERROR_NO_PERMISSION": "this user lacks permission for it",
    "NVML_ERROR_DRIVER_NOT_LOADED": "no NVIDIA driver is loaded",
    "NVML_ERROR_LIBRARY_NOT_FOUND": "libnvidia-ml.so.1 was not found",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "libnvidia-ml and the driver have different versions",
    "NVML_ERROR_GPU_IS_LOST": "the GPU has fallen off the bus",
    "NVML_ERROR_RESET_REQUIRED": "the GPU must be reset",
    "NVML_ERROR_UNKNOWN": "Unknown Error",
}


def ask_nvml(system: System) -> Fact[Mapping[str, Any]]:
    """What `probes/nvml_gpus.py` prints, with or without GPUs."""
    return system.probe("nvml_gpus", SECONDS)


def refused(source: str, error: str) -> Fact[Any]:
    """A value that NVML does not give: the GPU has no such thing, or it is unknown."""
    if error == "NVML_ERROR_NOT_SUPPORTED":
        return absent(source, "this GPU does not report it")
    return cannot_tell(source, reason_of(error))


def reason_of(error: str) -> str:
    """NVML's symbol, with its meaning where that is not plain."""
    meaning = _MEANING.get(error)
    return f"{error}: {meaning}" if meaning else error


def blindness(answer: Fact[Mapping[str, Any]]) -> str:
    """Why NVML lists no GPUs; "" if it does."""
    if answer.value is None:
        return answer.reason
    error = answers.error_of(answer.value)
    if error is not None:
        return reason_of(error)
    listed = answer.value.get("gpus")
    if not isinstance(listed, list):
        return f"NVML's GPUs are {answers.shown(listed)}, not a list"
    return "" if listed else "NVML lists no GPU"


def value_of(
    entry: Mapping[str, Any], key: str, call: str, read: Callable[[Any], T | None]
) -> Fact[T]:
    """The value of ``key``, asked for by ``call``: read, refused, or not what it should be."""
    source = f"NVML {call}"
    value = entry.get(key)
    error = answers.error_of(value)
    if error is not None:
        return refused(source, error)
    if value is None:
        return cannot_tell(source, "NVML gave no answer")
    found = read(value)
    if found is None:
        return cannot_tell(source, f"it reports {answers.shown(value)}, an invalid value")
    return known(found, source)
