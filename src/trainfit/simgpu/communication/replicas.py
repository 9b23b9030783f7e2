"""Threads of ``DataParallel``'s replicas: they run their operators in turns.

In which order threads run is chance, on a GPU as well, where it makes no difference to speak of.
Two simulated runs have to launch the same operators in the same order to be compared.
"""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any, Final

from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.cuda import PARALLEL_THREADS

#: So long a thread waits for its turn (s): another that has it may wait for a lock of the script's
#: that this one holds.
_PATIENCE: Final = 60.0


class Turns:
    """Whose turn it is, of the threads that take part."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._threads: deque[threading.Thread] = deque()

    def join(self, thread: threading.Thread) -> None:
        """It takes part from now on, whether it has started or not."""
        with self._change:
            self._threads.append(thread)

    def wait(self, thread: threading.Thread) -> None:
        """Until it is the turn of ``thread``; one that has waited too long takes part no more."""
        with self._change:
            self._change.wait_for(lambda: self._threads[0] is thread, _PATIENCE)
            if self._threads[0] is not thread:
                self._threads.remove(thread)

    def leave(self, thread: threading.Thread) -> None:
        """It has come to its end."""
        with self._change:
            if thread in self._threads:
                self._threads.remove(thread)
            self._change.notify_all()

    def pass_on(self) -> None:
        """The calling thread has run an operator; it goes on when its turn has come again."""
        thread = threading.current_thread()
        with self._change:
            if len(self._threads) < 2 or self._threads[0] is not thread:
                return
            self._threads.rotate(-1)
            self._change.notify_all()
        self.wait(thread)


def install(patches: PatchSet, engine: Engine) -> None:
    """Let the threads that ``parallel_apply`` makes take turns."""
    turns = Turns()
    engine.on_done = turns.pass_on

    class Replica(threading.Thread):
        """A thread of ``parallel_apply``, which makes all of them before it starts one."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            turns.join(self)

        def run(self) -> None:
            turns.wait(self)
            try:
                super().run()
            finally:
                turns.leave(self)

    patches.set(*PARALLEL_THREADS, SimpleNamespace(Thread=Replica, Lock=threading.Lock))
