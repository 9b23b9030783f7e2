"""Thread pools of native libraries in a process, and how they are limited.

What OpenMP, OpenBLAS, MKL and BLIS have is asked of threadpoolctl, which knows their ways;
OpenCV, numba, NumExpr and Arrow have pools of their own and calls for them. FFmpeg's threads
(PyAV, decord, torchcodec) belong to each decoder, and the code that opens it sets them; where it
leaves the number to FFmpeg, that is the count of CPUs, which a process can be told.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from threadpoolctl import ThreadpoolController, threadpool_info, threadpool_limits

from trainfit.findings.threads import variables


@dataclass(frozen=True)
class _Module:
    """A module with a pool of its own: its name in results, how it tells, how it is set."""

    pool: str
    ask: Callable[[Any], int]
    hold: Callable[[Any, int], object]


_MODULES: Final = {
    # cv2.setNumThreads(0) runs OpenCV's loops in the calling thread (modules/core/src/parallel).
    "cv2": _Module(
        "opencv",
        lambda cv2: int(cv2.getNumThreads()),
        lambda cv2, most: cv2.setNumThreads(most if most > 1 else 0),
    ),
    "numba": _Module(
        "numba",
        lambda numba: int(numba.get_num_threads()),
        lambda numba, most: numba.set_num_threads(min(most, numba.get_num_threads())),
    ),
    "numexpr": _Module(
        "numexpr",
        lambda numexpr: int(numexpr.get_num_threads()),
        lambda numexpr, most: numexpr.set_num_threads(most),
    ),
    "pyarrow": _Module(
        "arrow",
        lambda pyarrow: int(pyarrow.cpu_count()),
        lambda pyarrow, most: pyarrow.set_cpu_count(most),
    ),
}
#: Modules that decode with FFmpeg, and the name of its threads among the pools.
_DECODERS: Final = ("av", "decord", "torchcodec")
FFMPEG: Final = "ffmpeg"
#: Pools of threadpoolctl ("internal_api") that it can also set.
_POOLS: Final = ("openblas", "mkl", "openmp", "blis")
#: Pools that :func:`hold_down` can set.
HELD: Final = frozenset((*_POOLS, *(module.pool for module in _MODULES.values()), FFMPEG))


def pools() -> dict[str, int]:
    """Threads by library of this process, as it is now; only those above one."""
    found = {"torch": torch.get_num_threads()}
    for info in threadpool_info():
        # PyTorch's own OpenMP and MKL are set with PyTorch's threads.
        if "/torch/lib/" not in str(info.get("filepath", "")):
            name = str(info.get("internal_api") or info.get("user_api"))
            found[name] = max(found.get(name, 0), int(info.get("num_threads") or 0))
    for name, module in _MODULES.items():
        if name in sys.modules:
            found[module.pool] = module.ask(sys.modules[name])
    if any(name in sys.modules for name in _DECODERS):
        counts = (int(library.av_cpu_count()) for library in _ffmpeg_libraries())
        found[FFMPEG] = max(counts, default=1)
    return {name: threads for name, threads in sorted(found.items()) if threads > 1}


def hold_down(most: int) -> None:
    """Let each library of this process have so many threads, those that it loads later too.

    PyTorch's own (``torch.set_num_threads``) are held down with them. Of FFmpeg's decoders only
    those that leave the number to FFmpeg (``thread_count`` of 0, PyAV's default).
    """
    os.environ.update(dict.fromkeys(variables(), str(most)))  # what is loaded later reads them
    threadpool_limits(most)
    for name, module in _MODULES.items():
        if name in sys.modules:
            module.hold(sys.modules[name], most)
    for library in _ffmpeg_libraries():
        library.av_cpu_force_count(most)


def hold_down_all_but(pool: str) -> None:
    """One thread for each pool that is there by now, except this one."""
    others = [name for name in _POOLS if name != pool]
    ThreadpoolController().select(internal_api=others).limit(limits=1)
    for name, module in _MODULES.items():
        if name in sys.modules and module.pool != pool:
            module.hold(sys.modules[name], 1)


def _ffmpeg_libraries() -> list[ctypes.CDLL]:
    """Each libavutil of this process that can be told a count of CPUs (from FFmpeg 5 on), which
    is what a decoder takes as its number of threads (libavcodec/pthread*.c)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libavutil" in line}
    except OSError:
        return []
    libraries = []
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:  # replaced on the disk since it was loaded
            continue
        if hasattr(library, "av_cpu_force_count"):
            libraries.append(library)
    return libraries


def native_threads() -> int | None:
    """Threads of this process that Python did not start; ``None`` where that is not told."""
    try:
        return len(os.listdir("/proc/self/task")) - threading.active_count()
    except OSError:
        return None
