"""Which loader ends an epoch, where a training step takes batches of several.

``for one, other in zip(a, b)`` ends with the shorter one, with ``cycle(a)`` in it with ``b``, and
what the body takes by ``next()`` does not end it. Read from the loop that the step is in.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, Final

from trainfit.scripts.phases.loops import called, frames_of_user, loops_around
from trainfit.simgpu.device.user_location import locals_of

#: Calls that go over their first argument; over all, to the end of the shortest; of the longest;
#: for ever.
_FIRST: Final = frozenset(("enumerate", "tqdm", "track", "iter", "islice", "prefetch"))
_SHORTEST: Final = frozenset(("zip",))
_LONGEST: Final = frozenset(("zip_longest",))
_ENDLESS: Final = frozenset(("cycle", "repeat", "count"))
#: Objects within one another that are looked into.
_DEPTH: Final = 4

#: A loader with its batches; one that never ends is none.
_Sized = tuple[float, Any]


def ends_epoch(frame: FrameType | None, combined: Any = None) -> Any:
    """The loader whose end is that of the loop over data around ``frame``, or of a trainer's
    ``combined`` loader; ``None`` where the source does not tell."""
    for each in reversed(frames_of_user(frame)):
        for loop in reversed(loops_around(each)):
            if loop.iterates is None:
                continue
            found = _of_source(loop.iterates, {**each.f_globals, **locals_of(each)})
            if found is not None:
                return found[1]
    found = None if combined is None else _of_object(combined)
    return None if found is None else found[1]


def _of_source(node: ast.expr, names: Mapping[str, Any]) -> _Sized | None:
    if isinstance(node, ast.Call):
        name = called(node)
        if name in _ENDLESS:
            return math.inf, None
        if not node.args or name not in _FIRST | _SHORTEST | _LONGEST:
            return None
        if name in _FIRST:
            return _of_source(node.args[0], names)
        return _chosen([_of_source(each, names) for each in node.args], name in _LONGEST)
    if not isinstance(node, ast.Name | ast.Attribute):
        return None
    parts = ast.unparse(node).split(".")
    value = names.get(parts[0])
    for part in parts[1:]:
        value = getattr(value, part, None)
    return _of_object(value)


def _of_object(value: Any, depth: int = _DEPTH) -> _Sized | None:
    if type(value).__name__ in _ENDLESS:
        return math.inf, None
    if depth and (inner := getattr(value, "iterable", None)) is not None:  # of a progress bar
        return _of_object(inner, depth - 1)
    if depth and hasattr(value, "flattened") and hasattr(value, "_mode"):  # Lightning's
        parts = [_of_object(each, depth - 1) for each in value.flattened]
        return _chosen(parts, not str(value._mode).startswith("min"))
    if not hasattr(value, "dataset") or not hasattr(value, "batch_sampler"):
        return None
    try:
        return len(value), value
    except (TypeError, NotImplementedError, AttributeError):
        return math.inf, value


def _chosen(parts: Iterable[_Sized | None], longest: bool) -> _Sized | None:
    known = [each for each in parts if each is not None]
    choose = max if longest else min
    return choose(known, key=lambda each: each[0]) if known else None
