"""How many bytes Python's objects have that a list or a dictionary is added to.

Only types are asked that are Python's own: another one's ``__sizeof__`` may be anyone's code.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
from collections.abc import Iterable
from typing import Any, Final

#: Parts of an object that are looked at (of all of them, as large as these), and levels of lists,
#: dictionaries and objects.
_PARTS: Final = 16
_LEVELS: Final = 3
#: Numbers that Python has once, for all who use them.
_ONCE: Final = range(-5, 257)
#: Bytes of a place in a list, and of one in a dictionary (its hash, key and value, a third empty).
_IN_LIST: Final = 8
_IN_DICTIONARY: Final = 48
_DICTIONARIES: Final = (dict, collections.defaultdict, collections.OrderedDict)
_SINGLE: Final = (int, float, complex, str, bytes, bytearray)
_SEVERAL: Final = (list, tuple, set, frozenset, collections.deque)


def entry_bytes(held: Any, last: Any) -> int:
    """Bytes of ``last``, the last entry of ``held``, with its place in it; 0: it is of a kind that
    does not tell."""
    if type(held) in (str, bytes, bytearray):
        return 1
    if type(held) in (list, collections.deque):
        return _IN_LIST + _size(last, _LEVELS)
    if type(held) in _DICTIONARIES:
        key = None
        with contextlib.suppress(RuntimeError, StopIteration):  # it changes meanwhile, or is empty
            key = next(reversed(held))
        return _IN_DICTIONARY + _size(key, 1) + _size(last, _LEVELS)
    return 0


def _size(value: Any, levels: int) -> int:
    kind = type(value)
    if value is None or kind is bool or (kind is int and value in _ONCE):
        return 0
    if kind in _SINGLE:
        return sys.getsizeof(value)
    if kind in _DICTIONARIES:
        return sys.getsizeof(value) + _of_parts(value.values(), len(value), levels)
    if kind in _SEVERAL:
        return sys.getsizeof(value) + _of_parts(value, len(value), levels)
    with contextlib.suppress(AttributeError, TypeError):  # it has no attributes
        names = object.__getattribute__(value, "__dict__")
        return object.__sizeof__(value) + _of_parts(names.values(), len(names), levels)
    return 0


def _of_parts(parts: Iterable[Any], number: int, levels: int) -> int:
    if not levels or not number:
        return 0
    with contextlib.suppress(RuntimeError):  # it changes meanwhile
        sizes = [_size(part, levels - 1) for part in itertools.islice(parts, _PARTS)]
        return sum(sizes) * number // max(1, len(sizes))
    return 0
