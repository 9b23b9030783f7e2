"""The stack of a thread that makes samples, looked at from another thread."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import operator
import sys
import types

from trainfit.scripts.sample_costs.call_sites import written_at

#: A call that a thread is in: its frame, and its code and instruction of one moment.
Seen = tuple[types.FrameType, tuple[types.CodeType, int]]


def stack_of(thread: int) -> list[Seen]:
    """Each call that a thread is in, the innermost first: its frame, and its code and place.

    All are of one moment: everything here happens in one call of ``list.extend``, inside of
    which nothing runs Python code and so nobody can take the interpreter's lock from us. With
    a loop in Python the thread goes on while its frames are read. (Somebody's callback of the
    garbage collector would run, so there is no collection meanwhile.)
    """
    leaf = map(operator.itemgetter(thread), itertools.starmap(sys._current_frames, ((),)))
    calls = itertools.accumulate(itertools.chain(leaf, itertools.repeat("f_back")), getattr)
    frames, again = itertools.tee(calls)
    places = map(operator.attrgetter("f_code", "f_lasti"), again)
    stack: list[Seen] = []
    collects = bool(gc.callbacks) and gc.isenabled()
    if collects:
        gc.disable()
    with contextlib.suppress(AttributeError, KeyError):  # beyond the outermost; no such thread
        stack.extend(zip(frames, places, strict=False))
    if collects:
        gc.enable()
    return stack


@functools.lru_cache(1 << 14)
def called_in(code: types.CodeType, lasti: int) -> str:
    """How the source writes what a frame calls."""
    return written_at(code, lasti)


def fetchers() -> frozenset[int]:
    """The identities of the fetchers' code objects."""
    from trainfit.torch_private.data_loading import FETCHERS

    return frozenset(id(kind.__dict__["fetch"].__code__) for kind in FETCHERS)
