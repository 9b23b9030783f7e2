"""Asks PyTorch for its GPUs and runs a kernel on each; a script run in a fresh interpreter.

It imports nothing of trainfit, never fails, and prints one JSON object as its last line:
    ``{"version": "2.6.0+cu124", "cuda": "12.4" or null, "hip": null, "available": true,
    "devices": 1, "error": "", "architectures": ["sm_50", …, "compute_90"],
    "capabilities": [[8, 9]], "kernel_error": "" | text | null, "warnings": []}``
"error" is what ``torch.cuda.init()`` raised. "kernel_error" is what the first kernel raised:
"no kernel image is available …" while ``is_available()`` stays true; null where there was
nothing to try. "warnings" are those that the questions gave (a driver that is too old, errors
802, 804 and 999 are told by them alone). A PyTorch that cannot be imported:
    ``{"failed": "import torch: OSError: libcudart.so.12: cannot open shared object file …"}``
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

_LONGEST = 2000


def probe() -> dict[str, Any]:
    """What PyTorch answers, or why it cannot be asked."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch
        except BaseException as error:
            return {"failed": f"import torch: {_shown(error)}"}
        # From here on: what is deprecated in the import is none of the GPU's business.
        caught.clear()
        answer = _ask(torch)
        answer["warnings"] = [str(warning.message)[:_LONGEST] for warning in caught]
    return answer


def _ask(torch: Any) -> dict[str, Any]:
    cuda = torch.cuda
    # In a script's order: is_available() starts CUDA, and device_count() answers otherwise
    # once it has started.
    devices = int(_or(0, cuda.device_count))
    available = bool(_or(False, cuda.is_available))
    error = _raised(cuda.init)
    working = devices if not error else 0
    return {
        "version": str(torch.__version__),
        "cuda": getattr(torch.version, "cuda", None),
        "hip": getattr(torch.version, "hip", None),
        "available": available,
        "devices": devices,
        "error": error,
        "architectures": _architectures(torch),
        "capabilities": _or(
            [], lambda: [list(cuda.get_device_capability(i)) for i in range(working)]
        ),
        "kernel_error": _kernels(torch, working) or _cudnn(torch) if working else None,
        "warnings": [],
    }


def _architectures(torch: Any) -> list[str]:
    """Also where there is no GPU: ``get_arch_list()`` of some versions is empty then."""
    found = _or([], torch.cuda.get_arch_list)
    return list(found or _or([], lambda: torch._C._cuda_getArchFlags().split()))


def _kernels(torch: Any, devices: int) -> str:
    """What the first kernel that fails raised, on the first GPU where one fails."""
    for index in range(devices):
        if words := _raised(functools.partial(_kernel, torch, index)):
            return f"cuda:{index}: {words}" if devices > 1 else words
    return ""


def _cudnn(torch: Any) -> str:
    """What asking for cuDNN's version raises: another one was found than PyTorch is built with."""
    words = _raised(lambda: torch.backends.cudnn.version())
    return words if "cuDNN version incompatibility" in words else ""


def _kernel(torch: Any, index: int) -> None:
    ones = torch.ones(16, device=f"cuda:{index}")
    total = (ones * 2 + 1).sum()
    torch.cuda.synchronize(index)
    if float(total.item()) != 48.0:
        raise ArithmeticError(f"16 times 3 is {total.item()} there")


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return _shown(error)
    return ""


def _or(otherwise: Any, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:
        return otherwise


def _shown(error: BaseException) -> str:
    # PyTorch's own say all in their text; of others the type is needed to make sense of it.
    plain = isinstance(error, RuntimeError | AssertionError) and str(error)
    return (str(error) if plain else f"{type(error).__name__}: {error}")[:_LONGEST]


if __name__ == "__main__":
    # Whatever libraries print goes to stderr, and nothing of theirs runs after the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        said = probe()
    except BaseException as error:
        said = {"failed": _shown(error)}
    answer.write(json.dumps(said, default=str) + "\n")
    answer.flush()
    sys.stderr.flush()
    os._exit(0)
