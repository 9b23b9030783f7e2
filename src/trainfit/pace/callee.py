"""The callee of paced calls: a Python callable, or a command that answers line by line."""

from __future__ import annotations

import contextlib
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from trainfit.entrypoint import called, check_arguments, named
from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import duration

#: Seconds that a command's answer is waited for, and its end.
ANSWER_S: Final = 60.0
_END_S: Final = 5.0


class CalleeError(TrainfitError):
    """What cannot be called."""


class Callee(Protocol):
    """Something to call; ``is_here``: in the thread that measures, so that its CPU
    time and core speed are known."""

    @property
    def is_here(self) -> bool: ...

    def __call__(self) -> Any: ...

    def cpu_s(self) -> float | None:
        """CPU time of the command so far; ``None``: of a callable, ask the thread."""

    def close(self) -> None: ...


class Function:
    """A Python callable without arguments."""

    is_here = True

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __call__(self) -> Any:
        return self._function()

    def cpu_s(self) -> float | None:
        return None

    def close(self) -> None:
        pass


def function_of(place: str, setup: str | None) -> Function:
    """Of ``module:callable``. With ``setup``, another such name, that is called once first, and
    what it returns is the callable's argument.

    Raises :class:`CalleeError` for what is not callable, and what :mod:`trainfit.entrypoint` does
    for a name that leads nowhere and for what the user's code raises.
    """
    function = named(place, "", "policy.py:act")
    if not callable(function):
        raise CalleeError(f"{place!r} is a {type(function).__name__}, which cannot be called")
    if setup is None:
        check_arguments(repr(place), function, 0)
        return Function(function)
    prepare = named(setup, "--setup", "policy.py:load")
    if not callable(prepare):
        raise CalleeError(
            f"--setup {setup!r} is a {type(prepare).__name__}, which cannot be called"
        )
    prepared = called(f"--setup {setup!r}", prepare)
    check_arguments(repr(place), function, 0 if prepared is None else 1)
    if prepared is None:
        return Function(function)
    return Function(lambda: function(prepared))


class Command:
    """A command that gets an empty line for each call and answers with one line."""

    is_here = False

    def __init__(self, words: Sequence[str], answer_s: float = ANSWER_S) -> None:
        self._words, self._answer_s = list(words), answer_s
        try:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise CalleeError(
                f"command {words[0]!r}: {error.strerror or error}; check the name"
            ) from None
        self._rest = b""

    def __call__(self) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
        except BrokenPipeError:
            raise CalleeError(self._gone()) from None
        return self._line()

    def _line(self) -> bytes:
        """One line of the answer; what came beyond it belongs to the next."""
        assert self._process.stdout is not None
        until = time.monotonic() + self._answer_s
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise CalleeError(
                    f"command {self._words[0]!r} gave no line within {duration(self._answer_s)}; "
                    "it must answer each line with one line and flush its output"
                )
            piece = self._process.stdout.read(1 << 16)
            if not piece:
                raise CalleeError(self._gone())
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _gone(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.poll()
        how = "closed its output" if code is None else f"ended with exit code {code}"
        return (
            f"command {self._words[0]!r} {how}; it must answer line by line until it is terminated"
        )

    def cpu_s(self) -> float | None:
        # The kernel's clock of another process: clock_getcpuclockid(3), CPUCLOCK_SCHED.
        with contextlib.suppress(OSError):
            return time.clock_gettime((~self._process.pid << 3) | 2)
        return None

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
