"""Checks whether making a sample changes the data set that it is made of.

``image = self.images[i]`` is a view of an array: ``image -= mean`` changes the array, and the next
epoch begins with what this one left. Workers that start again each epoch have a fresh copy, which
hides it.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from trainfit.findings.source_code import function_syntax
from trainfit.hooks.held_objects import walk
from trainfit.loader.measure import processes
from trainfit.loader.measure.workload import Workload
from trainfit.results.findings import Evidence, Finding, Fix, Place

#: Bytes of arrays that are compared, and numbers that change from which it is no counter.
_MOST_BYTES: Final = 64 << 20
_LEAST: Final = 16
#: How often a sample is made before its arrays are expected to stay: a cache is filled once.
_FIRST: Final = 2


def check_changes(workload: Workload, limit_s: float = 10.0) -> tuple[Finding, ...]:
    """Make one sample a few times, in a forked process, and compare the arrays of the data set."""
    if workload.kind != "map":
        return ()
    changed = processes.call(functools.partial(changes, workload.dataset), limit_s).value
    if not changed:
        return ()
    path, numbers = changed
    return (
        Finding(
            "data_changed",
            "critical",
            f"Making a sample changes the data set: {numbers:,} numbers of {path} are others after "
            "it, and each epoch begins with what the last one left",
            (Evidence("numbers changed by one sample", numbers),),
            "an element of an array is a view of it, and an operator in place (-=, [...] =) "
            "changes the array itself; workers that are started for each epoch hide it",
            (Fix("a copy first: image = self.images[i].copy(), or .clone() of a tensor"),),
            place=_place(workload.dataset),
        ),
    )


def changes(dataset: Any) -> tuple[str, int] | None:
    """An array that a sample's making changes each time, and how many of its numbers; ``None``:
    there is none that is looked at."""
    index = 0
    for _ in range(_FIRST):
        dataset[index]
    arrays = list(_arrays(dataset))
    copies = [each.copy() for _, each in arrays]
    dataset[index]
    for (path, each), copy in zip(arrays, copies, strict=True):
        differs = (_bytes(copy) != _bytes(each)).reshape(-1, each.itemsize)
        changed = int(np.count_nonzero(differs.any(axis=1)))
        if changed >= _LEAST:
            return path, changed
    return None


def _arrays(dataset: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of the data set with their paths, up to so many bytes of them."""
    left = _MOST_BYTES
    for path, each in walk(dataset, type(dataset).__name__):
        array = each
        if isinstance(each, torch.Tensor):
            if each.device.type != "cpu" or each.layout != torch.strided or each.requires_grad:
                continue
            array = each.numpy() if each.dtype != torch.bfloat16 else None
        if not isinstance(array, np.ndarray) or isinstance(array, np.memmap):
            continue
        if array.dtype.hasobject or array.size < _LEAST or array.nbytes > left:
            continue
        left -= array.nbytes
        yield path, array


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _place(dataset: Any) -> Place | None:
    """The first operator in place of the method that makes a sample, or else that method."""
    method = getattr(type(dataset), "__getitem__", None)
    code = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
    if code is None:
        return None
    tree = function_syntax(code)
    nodes = () if tree is None else ast.walk(tree)
    lines = [each.lineno for each in nodes if isinstance(each, ast.AugAssign)]
    return Place.parse(f"{code.co_filename}:{min(lines, default=code.co_firstlineno)}")
