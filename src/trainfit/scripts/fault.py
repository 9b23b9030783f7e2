"""Whose fault a failure is, the script's or trainfit's, told by the frames of its traceback.

It is ours where the innermost frame is ours and an instruction of ours failed there: an attribute
that an object lacks, an ``assert``, a call that does not suit its function. It is the script's
where our frame only passed the script's own call on (``func(*args, **kwargs)``, which is how the
simulated device asks PyTorch for shapes), or raised on purpose, as a GPU would.
"""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import multiprocessing
import os
import re
import runpy
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO

from trainfit.results.runs.trace import OwnFault
from trainfit.results.text import exception_text
from trainfit.simgpu.device.user_location import is_library, locals_of

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_OF_LOADER: Final = "/torch/utils/data/"
#: What PyTorch itself raises for a wrong call, also where a frame of ours made the call for the
#: script. What is wrong with a file, or with the memory that there is, is nobody's bug.
_OF_A_CALL: Final = (RuntimeError, IndexError)
_OF_FILES: Final = (OSError, MemoryError, RecursionError, SyntaxError)


def own_fault(error: BaseException, started: Sequence[str] = ()) -> OwnFault | None:
    """The fault of trainfit's own in ``error``, or in what it was raised in answer to.

    ``None`` where it is not. ``started`` are the files whose outermost frames started the script.
    """
    for cause in causes(error):
        last = _last_frame(cause, started)
        if last is None:
            continue
        if _is_on_purpose(cause, last):
            return None  # whatever it answered to was seen to
        if _is_at_fault(cause, last):
            text = "".join(traceback.format_exception(error))
            said = exception_text(type(cause).__name__, cause)
            return OwnFault(said, place_of(last), text)
    return None


def causes(error: BaseException | None) -> list[BaseException]:
    """The error and what led to it: a script may wrap the simulation's refusal in its own."""
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__cause__ or error.__context__
    return errors


def is_own(filename: str) -> bool:
    """Is it a file of trainfit's?"""
    return _PACKAGE in Path(filename).parents


def place_of(trace: TracebackType) -> str:
    """``trainfit/scripts/precision.py:55``: our file as it is in the repository, and its line."""
    path = Path(trace.tb_frame.f_code.co_filename).relative_to(_PACKAGE.parent)
    return f"{path}:{trace.tb_lineno}"


def script_traceback(error: BaseException) -> str:
    """The traceback of ``error`` and of what led to it, by the script's own frames and those of the
    libraries that it called; without trainfit's."""
    own = traceback.TracebackException.from_exception(error)
    left: list[traceback.TracebackException | None] = [own]
    while left:
        each = left.pop()
        if each is None:
            continue
        left += [each.__cause__, each.__context__]
        frames = _of_script(list(each.stack))
        # A syntax error in the script itself has no frame, and Python writes no heading then.
        each.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    return _logged_cause(error) + "".join(own.format())


#: Where Transformers raises that weights could not be converted, of which it only logs the reasons
#: (``utils/loading_report.py``), each a traceback, and how a chain of tracebacks goes on.
_REPORTS: Final = "log_state_dict_report"
_FROM: Final = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_FRAME_OF: Final = re.compile(r'  File "(.+)", line \d+')


def _logged_cause(error: BaseException) -> str:
    """The traceback that a library logged of what ``error`` comes from, as Python chains it; empty
    where it logged none."""
    raising = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not raising or raising[-1].f_code.co_name != _REPORTS:
        return ""
    reasons = getattr(locals_of(raising[-1]).get("loading_info"), "conversion_errors", None)
    if not isinstance(reasons, Mapping) or not reasons:
        return ""
    heading, *lines = str(next(iter(reasons.values()))).splitlines()
    shown, is_shown = [heading], True
    for line in lines:
        if (frame := _FRAME_OF.match(line)) is not None:
            is_shown = not is_own(frame[1])
        if not line.startswith(" "):
            return "\n".join([*shown, line]) + _FROM
        shown += [line] * is_shown
    return ""


def _of_script(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames from the script's first to what it called last. What PyTorch did behind that for a
    frame of ours is left out: how the simulated device works is no matter. A DataLoader behind it
    is real: its frames tell whether it was starting workers, or collating."""
    users = [index for index, frame in enumerate(frames) if not is_library(frame.filename)]
    if users:
        ours = [
            index
            for index, frame in enumerate(frames)
            if index > users[-1] and is_own(frame.filename)
        ]
        loads = any(_OF_LOADER in frame.filename for frame in frames[users[-1] :])
        frames = frames[users[0] : ours[0] if ours and not loads else None]
    return [frame for frame in frames if not (is_own(frame.filename) or _starts(frame.filename))]


def _starts(filename: str) -> bool:
    """Does it only start a program?"""
    return filename == runpy.__file__ or filename.startswith(("<frozen ", "<string>"))


def _last_frame(error: BaseException, started: Sequence[str]) -> TracebackType | None:
    """The innermost frame, where it is ours; those of ``started`` alone are none."""
    trace, has_begun = error.__traceback__, False
    last = None
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        has_begun = has_begun or filename not in started
        last, trace = trace, trace.tb_next
    if last is None or not has_begun or not is_own(last.tb_frame.f_code.co_filename):
        return None
    return last


def _is_on_purpose(error: BaseException, last: TracebackType) -> bool:
    is_ours = type(error).__module__.startswith("trainfit.")
    is_raised = _instruction(last) == "RAISE_VARARGS" and not isinstance(error, AssertionError)
    return is_ours or is_raised


def _is_at_fault(error: BaseException, last: TracebackType) -> bool:
    if not isinstance(error, Exception) or isinstance(error, _OF_FILES):
        return False
    instruction = _instruction(last)
    if instruction == "CALL_FUNCTION_EX":
        return False
    return "CALL" not in instruction or not isinstance(error, _OF_A_CALL)


def _instruction(trace: TracebackType) -> str:
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]


# ---
# The stacks of a run that hangs: of its own threads, and of the workers that it forked.
#
# Workers inherit the handler and the file. A script that has a handler of its own for the signal
# keeps it: its processes tell nothing then.


#: Of the user's, the least likely to be in use where one can be waited for.
_SIGNAL: Final = signal.SIGUSR2
#: Seconds that workers get to write, and characters that are kept.
_WRITE_S: Final = 0.3
_MOST: Final = 200_000


class HangStacks:
    """``path`` is the file that they are written to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        with contextlib.suppress(OSError, ValueError):  # no file: no stacks
            self._file = path.open("w", encoding="utf-8")
            faulthandler.register(_SIGNAL, file=self._file, all_threads=True)

    def text(self) -> str:
        """The stacks now; empty where there are none to be had."""
        if self._file is None:
            return ""
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=self._file, all_threads=True)
        for child in multiprocessing.active_children():
            with contextlib.suppress(OSError):
                if child.pid is not None and child.is_alive() and _takes(child.pid):
                    os.kill(child.pid, _SIGNAL)
        time.sleep(_WRITE_S)
        try:
            return self._path.read_text(encoding="utf-8", errors="replace")[:_MOST]
        except OSError:
            return ""


def _takes(process: int) -> bool:
    """Has the process a handler for the signal, which would end it otherwise?"""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (_SIGNAL - 1) & 1)
