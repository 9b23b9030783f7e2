"""Calls that may hang, each in a daemon thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def begin(call: Callable[..., T], *words: Any) -> Future[T]:
    """Call it in a thread of its own.

    A daemon, unlike an executor's: where even the start of a command hangs (a dead network
    mount), it keeps neither the reader nor the program from ending.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call(*words))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=f"trainfit {call.__name__}", daemon=True).start()
    return answer
