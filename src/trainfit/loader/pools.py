"""Threads that libraries keep ready in a worker.

What OpenMP, OpenBLAS, MKL and BLIS have is asked of threadpoolctl, which knows their ways;
OpenCV, numba and Arrow have pools of their own and a call that tells.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from threadpoolctl import threadpool_info

from trainfit.loader import isolated
from trainfit.loader.workload import Workload
from trainfit.results.loader import LoaderSettings

#: Modules that a data set may have imported, and how each tells of its threads.
_CALLS: Final[Mapping[str, Callable[[Any], int]]] = {
    "cv2": lambda module: int(module.getNumThreads()),
    "numba": lambda module: int(module.get_num_threads()),
    "pyarrow": lambda module: int(module.cpu_count()),
}
_NAMES: Final = {"cv2": "opencv", "pyarrow": "arrow"}


def thread_pools(workload: Workload, limit_s: float = 5.0) -> dict[str, int]:
    """Threads by library, once a batch was made as in a worker; only those above one.

    Empty where no batch could be made in ``limit_s`` seconds: other parts of a probe say why.
    """
    ended = isolated.call(functools.partial(_after_a_batch, workload), limit_s)
    return ended.value or {}


def _after_a_batch(workload: Workload) -> dict[str, int]:
    next(iter(workload.loader(LoaderSettings(0))), None)
    return here()


def here() -> dict[str, int]:
    """Of this process, as it is now."""
    pools = {"torch": torch.get_num_threads()}
    for info in threadpool_info():
        # PyTorch's own OpenMP and MKL are set with PyTorch's threads.
        if "/torch/lib/" not in str(info.get("filepath", "")):
            name = str(info.get("internal_api") or info.get("user_api"))
            pools[name] = max(pools.get(name, 0), int(info.get("num_threads") or 0))
    for module, ask in _CALLS.items():
        if module in sys.modules:
            pools[_NAMES.get(module, module)] = ask(sys.modules[module])
    return {name: threads for name, threads in sorted(pools.items()) if threads > 1}
