"""Table of the models of library and kernel workspaces.

Each model is a pure function of integers, every one of which is affine in the batch size,
so a recording can be evaluated at another batch size without running the script again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MODELS: Final[dict[str, Callable[..., int]]] = {}


def model(function: Callable[..., int]) -> Callable[..., int]:
    """Register a model under its function's name."""
    MODELS[function.__name__] = function
    return function


def workspace_bytes(name: str, arguments: tuple[int, ...]) -> int:
    """Bytes that model ``name`` asks for; 0 means that nothing is allocated."""
    return MODELS[name](*arguments)


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
