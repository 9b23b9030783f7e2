"""The part of Triton's Python interface that launches kernels, as of Triton 3.9: what
``tests/simgpu/operators/test_triton_kernels.py`` calls, without the compiler."""

from __future__ import annotations

from typing import Any

from triton import testing
from triton.runtime import Autotuner, Config, Heuristics, JITFunction, driver

__all__ = ["Config", "autotune", "cdiv", "driver", "heuristics", "jit", "testing"]


def jit(function: Any) -> JITFunction:
    return JITFunction(function)


def autotune(configs: list[Config], key: list[str], **options: Any) -> Any:
    return lambda fn: Autotuner(fn, fn.arg_names, configs, key, **options)


def heuristics(values: dict[str, Any]) -> Any:
    return lambda fn: Heuristics(fn, fn.arg_names, values)


def cdiv(x: int, y: int) -> int:
    return -(-x // y)
