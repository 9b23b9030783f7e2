"""Which line a look from another thread finds: one that runs, whether or not it keeps the lock."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import time

from trainfit.watch.recorder.looks.stacks import at_any_line

_LOOKS = 40
_DATA = b"x" * 8192


class _Training(threading.Thread):
    """A millisecond of Python, then some microseconds without the interpreter's lock."""

    ends = False

    def run(self) -> None:
        while not self.ends:
            self._python()
            hashlib.sha256(_DATA)

    @staticmethod
    def _python() -> None:
        total = 0.0
        for number in range(12_000):
            total += number * 0.5


def test_python_between_two_operators_is_seen() -> None:
    usual = sys.getswitchinterval()
    training = _Training(daemon=True)
    training.start()
    seen = 0
    for _ in range(_LOOKS):
        time.sleep(0.002)
        with at_any_line(random.random()):
            frame = sys._current_frames()[training.ident or 0]
            seen += frame.f_code.co_name == "_python"
    training.ends = True
    training.join()
    assert seen > _LOOKS / 2
    assert sys.getswitchinterval() == usual


def test_what_a_script_sets_meanwhile_stays() -> None:
    usual = sys.getswitchinterval()
    try:
        with at_any_line(0.0):
            sys.setswitchinterval(0.002)
        assert abs(sys.getswitchinterval() - 0.002) < 1e-6
    finally:
        sys.setswitchinterval(usual)
