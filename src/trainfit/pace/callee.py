"""The callee of paced calls: a Python callable, or a command that answers line by line."""

from __future__ import annotations

import contextlib
import gc
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

from trainfit.entrypoint import called, check_arguments, named
from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import duration, size

#: Seconds that a command's answer is waited for, and its end.
ANSWER_S: Final = 60.0
_END_S: Final = 5.0
#: Parameters of more bytes than this are not in any cache for their having been read.
_MOST_TOUCHED: Final = 64 << 20
#: Bytes of a cache line: one byte of each is read.
_LINE: Final = 64


class CalleeError(TrainfitError):
    """What cannot be called."""


class PacedCallee(Protocol):
    """Something to call; ``is_here``: in the thread that measures, so that its CPU
    time and core speed are known. ``has_rehearsal``: there is a function that does a call's work
    and changes no state."""

    @property
    def is_here(self) -> bool: ...

    @property
    def has_rehearsal(self) -> bool: ...

    def __call__(self) -> Any: ...

    def rehearse(self) -> Any:
        """A call whose answer nobody needs."""

    def why_no_touch(self) -> str:
        """Why the parameters that a call reads cannot be read in its place; "" if they can."""

    def touch(self) -> None:
        """Read them, and run nothing of the call."""

    def cpu_s(self) -> float | None:
        """CPU time of the command so far; ``None``: of a callable, ask the thread."""

    def close(self) -> None: ...


class Function:
    """A Python callable without arguments, and one that does the same work and changes nothing."""

    is_here = True

    def __init__(
        self, function: Callable[[], Any], rehearse: Callable[[], Any] | None = None
    ) -> None:
        self._function, self._rehearse = function, rehearse
        self._parameters: list[Any] | None = None

    @property
    def has_rehearsal(self) -> bool:
        return self._rehearse is not None

    def __call__(self) -> Any:
        return self._function()

    def rehearse(self) -> Any:
        return (self._rehearse or self._function)()

    def why_no_touch(self) -> str:
        nbytes = sum(each.nbytes for each in self._found())
        if not nbytes:
            return "no PyTorch module of this process has parameters in the CPU's memory"
        if nbytes > _MOST_TOUCHED:
            return f"{size(nbytes)} of parameters are more than a cache holds"
        return ""

    def touch(self) -> None:
        for each in self._found():
            each[::_LINE].max()

    def _found(self) -> list[Any]:
        """Once: a garbage collector's list is long."""
        if self._parameters is None:
            self._parameters = _parameters()
        return self._parameters

    def cpu_s(self) -> float | None:
        return None

    def close(self) -> None:
        pass


def why_no_rehearsal(callee: PacedCallee, period: int) -> str:
    """Why a rehearsal call would tell nothing, with the remedy; "" if it would."""
    if period == 1 or callee.has_rehearsal:
        return ""
    return (
        f"every {period}th call does the work: one call more would only take from the queue; give "
        "--rehearse MODULE:FN, a function that runs the network and changes no state"
    )


def _parameters() -> list[Any]:
    """The bytes of all modules' parameters and buffers in the CPU's memory, as NumPy arrays."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = {}
    with contextlib.suppress(Exception), torch.no_grad():
        for each in gc.get_objects():
            if not issubclass(type(each), torch.nn.Module):
                continue
            for tensor in (*each.parameters(recurse=False), *each.buffers(recurse=False)):
                if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                    storage = tensor.untyped_storage()
                    read = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                    if len(read):
                        found[storage.data_ptr()] = read
    return list(found.values())


def function_of(place: str, setup: str | None, rehearse: str | None) -> Function:
    """The function that ``module:callable`` names. With ``setup``, another such name, that is
    called once first, and what it returns is the callable's argument; ``rehearse`` names what does
    the callable's work and changes nothing, and gets the same argument.

    Raises :class:`CalleeError` for what is not callable, and what :mod:`trainfit.entrypoint` does
    for a name that leads nowhere and for what the user's code raises.
    """
    function = _callable(place, "", "policy.py:act")
    prepare = _callable(setup, "--setup", "policy.py:load") if setup is not None else None
    again = _callable(rehearse, "--rehearse", "policy.py:forward") if rehearse is not None else None
    prepared = called(f"--setup {setup!r}", prepare) if prepare is not None else None
    arguments = () if prepared is None else (prepared,)
    check_arguments(repr(place), function, len(arguments))
    if again is None:
        return Function(lambda: function(*arguments))
    check_arguments(f"--rehearse {rehearse!r}", again, len(arguments))
    return Function(lambda: function(*arguments), lambda: again(*arguments))


def _callable(place: str, option: str, example: str) -> Callable[..., Any]:
    found = named(place, option, example)
    if not callable(found):
        said = f"{option} {place!r}".strip()
        raise CalleeError(f"{said} is of type {type(found).__name__}, which cannot be called")
    return cast(Callable[..., Any], found)


class CommandCallee:
    """A command that gets an empty line for each call and answers with one line."""

    is_here = has_rehearsal = False

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

    def rehearse(self) -> Any:
        return self()

    def why_no_touch(self) -> str:
        return "the parameters are in the command's memory"

    def touch(self) -> None:
        pass

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
