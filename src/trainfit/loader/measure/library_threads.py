"""Thread pools of native libraries in a process, and how they are limited.

What OpenMP, OpenBLAS, MKL and BLIS have is asked of threadpoolctl, which knows their ways;
OpenCV, numba, NumExpr and Arrow have pools of their own and calls for them. FFmpeg's threads
(PyAV, decord, torchcodec) belong to each decoder, and only the code that opens it sets them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from threadpoolctl import threadpool_info, threadpool_limits


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
#: Pools of threadpoolctl ("internal_api") that it can also set.
_POOLS: Final = ("openblas", "mkl", "openmp", "blis")
#: Pools that :func:`hold_down` can set.
HELD: Final = frozenset((*_POOLS, *(each.pool for each in _MODULES.values())))
#: What libraries read that are loaded later.
_VARIABLES: Final = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS"),
)


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
    return {name: threads for name, threads in sorted(found.items()) if threads > 1}


def hold_down(most: int) -> None:
    """Let each library of this process have so many threads, those that it loads later too.

    PyTorch's own (``torch.set_num_threads``) are held down with them.
    """
    os.environ.update(dict.fromkeys(_VARIABLES, str(most)))
    threadpool_limits(most)
    for name, module in _MODULES.items():
        if name in sys.modules:
            module.hold(sys.modules[name], most)


def native_threads() -> int | None:
    """Threads of this process that Python did not start; ``None`` where that is not told."""
    try:
        return len(os.listdir("/proc/self/task")) - threading.active_count()
    except OSError:
        return None
