"""Operators that are defined in Python (``torch.library.custom_op``, ``triton_op``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library import custom_ops

try:
    from torch._library.triton import triton_ops_to_kernels as _of_triton
except ImportError:  # before 2.9
    _of_triton = {}


def body_of(func: Any) -> Callable[..., Any] | None:
    """The function that a GPU's operator consists of, if it is to be run for its result's shape.

    That is so without a registered fake kernel, and where the function itself is that one
    (``triton_op``): it allocates what it needs and launches its kernels. With a fake kernel the
    body may be anything, also a library's that takes addresses.
    """
    name = func._schema.name
    definition = custom_ops.OPDEFS.get(name)
    if definition is None:
        return None
    if definition._abstract_fn is not None and name not in _of_triton:
        return None
    bodies = definition._backend_fns
    body: Callable[..., Any] | None = bodies.get("cuda") or bodies.get(None)
    return body
