"""Asks libcuda itself, through ctypes; a script run by path in a fresh interpreter.

PyTorch turns several failures of ``cuInit`` into "0 devices"; its raw code tells them apart.
It imports nothing of trainfit, never fails, and prints one JSON object as its last line:
    ``{"library": "libcuda.so.1", "path": "/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.14",
    "code": 0, "error": "" or "CUDA_ERROR_NO_DEVICE", "text": "no CUDA-capable device …",
    "version": 12040 or null, "devices": 1 or null}``
where "code" is cuInit's CUresult (or, after a cuInit that succeeded, that of cuDeviceGetCount)
and "path" the file that was loaded, links followed ("" if unknown). Where it is missing:
    ``{"library": "libcuda.so.1", "missing": "libcuda.so.1: cannot open shared object file: …"}``
CUDA_VISIBLE_DEVICES holds for this call as for every other program's.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

LIBRARY = "libcuda.so.1"


class _Symbol(ctypes.Structure):
    """``Dl_info`` of <dlfcn.h>."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def probe(load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, Any]:
    """What libcuda answers; ``load`` stands in for ``ctypes.CDLL``."""
    try:
        library = load(LIBRARY)
    except OSError as error:
        return {"library": LIBRARY, "missing": str(error)[:500]}
    try:
        return {"library": LIBRARY, "path": path_of(library, "cuInit"), **_start(library)}
    except Exception as error:  # a file of that name without CUDA's calls
        return {"library": LIBRARY, "missing": f"{type(error).__name__}: {error}"[:500]}


def _start(library: Any) -> dict[str, Any]:
    code = int(library.cuInit(0))
    devices = None
    if code == 0:
        count = ctypes.c_int()
        code = int(library.cuDeviceGetCount(ctypes.byref(count)))
        devices = count.value if code == 0 else None
    return {
        "code": code,
        "error": _words(library, "cuGetErrorName", code) or f"CUresult {code}" if code else "",
        "text": _words(library, "cuGetErrorString", code) if code else "",
        "version": _version(library),
        "devices": devices,
    }


def _words(library: Any, call: str, code: int) -> str:
    words = ctypes.c_char_p()
    try:
        failed = getattr(library, call)(code, ctypes.byref(words))
    except AttributeError:  # drivers before CUDA 6
        return ""
    return "" if failed or words.value is None else words.value.decode("utf-8", "replace")


def _version(library: Any) -> int | None:
    version = ctypes.c_int()
    try:
        failed = library.cuDriverGetVersion(ctypes.byref(version))
    except AttributeError:
        return None
    return None if failed else version.value


def path_of(library: Any, function: str) -> str:
    """The file that the loader took a function from, links followed; "" if unknown."""
    try:
        address = ctypes.cast(getattr(library, function), ctypes.c_void_p)
        symbol = _Symbol()
        if not ctypes.CDLL(None).dladdr(address, ctypes.byref(symbol)) or not symbol.file:
            return ""
        return os.path.realpath(os.fsdecode(symbol.file))
    except (AttributeError, TypeError, OSError, ctypes.ArgumentError):
        return ""


if __name__ == "__main__":
    # Whatever libraries print goes to stderr, and nothing of theirs runs after the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(probe(), default=str) + "\n")
    answer.flush()
    sys.stderr.flush()
    os._exit(0)
