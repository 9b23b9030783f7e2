"""The runs of a plan: what waits for them hears Ctrl-C."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future

import pytest

from trainfit.plan.runs.runs import result_of
from trainfit.plan.runs.tracing import Trace


def test_ctrl_c_is_heard_that_does_not_wake_the_main_thread() -> None:
    """A signal handled in another thread does not, nor one that comes just before the wait."""
    future: Future[Trace] = Future()
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    late = threading.Timer(30.0, future.cancel)
    late.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            result_of(future)
        assert not future.done()
    finally:
        late.cancel()
        signal.signal(signal.SIGINT, former)
