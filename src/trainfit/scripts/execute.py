"""Runs a user's script as Python would, and reports the outcome.

What a run on the simulated GPU and one on a real GPU have in common. The script is
``__main__``, sees its own arguments, and is stopped from within the optimizer step that
completes the wanted number of steps, by an exception that unwinds it (``finally`` blocks,
``with`` statements and ``atexit`` run).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import runpy
import sys
import termios
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from trainfit.results.runs.operands import NO_CALL, FailedCall
from trainfit.results.runs.trace import ScriptOutcome, Target
from trainfit.results.text import exception_text
from trainfit.scripts import sandbox
from trainfit.scripts.fault import causes, own_fault, script_traceback
from trainfit.scripts.option_parsers import with_constants
from trainfit.simgpu.cuda_clocks import LONGEST
from trainfit.simgpu.device.errors import REQUEST, UnsupportedOperatorError
from trainfit.simgpu.device.user_location import claim, frame_of_user, line_of_user
from trainfit.simgpu.patching import PatchSet

#: How PyTorch names a simulated tensor's type, in its errors: one of CUDA has a name of its own.
_META_TYPE: Final = re.compile(r"\bMeta(\w+)Type\b")
#: A bare ``except:`` catches the stop; after this many the script is ended by force.
_PATIENCE = 3
#: Seconds after the time limit at which the process ends even where Python cannot act.
_LAST_RESORT_S = 10.0
#: Seconds between looks at whether a run has to end.
_TICK_S = 0.3


class StopScript(BaseException):
    """Raised in the script when enough was seen; no ``except Exception`` catches it."""


class Stopper:
    """Stops the script; a script that does not let itself be stopped is ended by force.

    Args:
        before_force: called then, within the script.
    """

    def __init__(self, before_force: Callable[[], None] = lambda: None) -> None:
        self._before_force = before_force
        self._stops = 0

    def stop(self) -> None:
        """Raise :class:`StopScript`, to be called from within the script's own calls."""
        self._stops += 1
        if self._stops > _PATIENCE:
            self._before_force()
            _end_by_force()
        raise StopScript


def run_script(
    target: Target,
    arguments: list[str] | None = None,
    looks: Callable[[BaseException], FailedCall] = lambda _: NO_CALL,
) -> ScriptOutcome:
    """Run the target to its stop or its end; what became of it, without its steps and seconds.

    ``arguments`` are its ``sys.argv``, in another form than a plain list; ``looks`` gives what the
    call was given that raised an exception.
    """
    try:
        execute(target, arguments)
    except SystemExit as error:
        if error.code not in (None, 0):
            return ScriptOutcome("exited", message=_exit_message(error.code))
    except StopScript:
        pass  # the outcome is written
    except BaseException as error:
        return dataclasses.replace(_failure(error), call=looks(error))
    return ScriptOutcome("ended")


def watch(
    started: float,
    limit_s: float,
    done: threading.Event,
    late: Callable[[Any], bool],
    stopped: Callable[[str, Any], bool] | None = None,
    why_stopped: Callable[[], str] = sandbox.stopped,
    own_s: Callable[[], float] | None = None,
) -> threading.Thread:
    """End the process when its time is over, its sandbox asks for it, or its parent has died.

    ``late(place)`` writes the outcome of a run whose time is over and returns whether it did;
    ``place`` is the user's line. ``stopped(reason, place)`` does that for a run that has to end
    as ``why_stopped`` says (by default because it wrote more than it may). Nothing is ended once
    ``done`` is set, with which the thread that is returned ends.

    Of a run whose ``own_s`` tell how long it lasted by itself, these are limited, and the time
    ``LONGEST`` times as far.
    """
    main, parent = threading.main_thread().ident, os.getppid()
    deadline = started + limit_s * (1.0 if own_s is None else LONGEST)
    last_resort = started + limit_s + _LAST_RESORT_S
    faulthandler.dump_traceback_later(limit_s + _LAST_RESORT_S, exit=True)

    def left_s() -> float:
        passed_by = deadline - time.monotonic()
        return passed_by if own_s is None else min(passed_by, limit_s - own_s())

    def look() -> None:
        nonlocal last_resort
        while not done.wait(max(0.0, min(_TICK_S, left := left_s()))):
            now = time.monotonic()
            if own_s is not None and now + left > last_resort:  # others had the cores
                last_resort = now + left + _LAST_RESORT_S
                faulthandler.dump_traceback_later(last_resort - now, exit=True)
            if os.getppid() != parent:
                os._exit(1)
            if stopped is not None and (reason := why_stopped()):
                place = frame_of_user(sys._current_frames().get(main or 0))
                if stopped(reason, place):
                    os._exit(0)
            if left_s() <= 0:
                place = frame_of_user(sys._current_frames().get(main or 0))
                if late(place):
                    os._exit(0)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


def execute(target: Target, arguments: list[str] | None = None) -> None:
    """Run the target as ``python script.py args…`` or ``python -m module args…`` would."""
    sys.argv = [target.name, *target.args] if arguments is None else arguments
    if target.terminal is not None:
        _in_terminal(*target.terminal)
    if target.input_file:
        with contextlib.suppress(OSError):  # it is gone meanwhile
            _as_input(os.open(target.input_file, os.O_RDONLY))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if target.kind == "module":
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        _claim_module(target.name)
        runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
        return
    path = Path(target.name)
    claim(path.parent)
    _claim_entry_point(path)
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    main.__file__ = target.name
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", target.name)
    main.__dict__["__cached__"] = None
    source = path.read_bytes()
    if target.constants:
        code = with_constants(source, target.name, target.constants)
    else:
        code = compile(source, target.name, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _as_input(file: int) -> None:
    """Let an open file be standard input from now on."""
    os.dup2(file, 0)
    os.close(file)


def _in_terminal(lines: int, columns: int) -> None:
    """Have the script find the terminal that it would be started in: ``stty size`` and
    ``os.get_terminal_size()`` fail without one. What is read from it is at its end at once."""
    size = os.terminal_size((columns, lines))
    own = os.get_terminal_size

    def get_terminal_size(*descriptor: int) -> os.terminal_size:
        try:
            return own(*descriptor)
        except OSError:
            return size

    _of_terminal.set(os, "get_terminal_size", get_terminal_size)
    with contextlib.suppress(OSError):  # there are no terminals to be had
        _, end = os.openpty()  # its other side stays open: without it the terminal is gone
        mode: list[Any] = termios.tcgetattr(end)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0
        termios.tcsetattr(end, termios.TCSANOW, mode)
        termios.tcsetwinsize(end, (lines, columns))
        _as_input(end)


_of_terminal: Final = PatchSet()


def _claim_module(name: str) -> None:
    """An installed package that is run with ``-m`` is the user's, not a library."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name.partition(".")[0])
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        claim(folder)


def _claim_entry_point(path: Path) -> None:
    """What an installed console script (``yolo``, ``lerobot-train``) runs is the user's: the
    script has but two lines of its own."""
    if path.suffix:
        return
    for entry in importlib.metadata.entry_points(group="console_scripts", name=path.name):
        _claim_module(entry.module)


def _end_by_force() -> None:
    """The script does not let itself be stopped; its ``atexit`` handlers still run."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _exit_message(code: Any) -> str:
    if isinstance(code, int):
        return f"exit code {code}"
    print(code, file=sys.stderr)  # as Python itself does with sys.exit("text")
    return f"exit code 1: {code}"


def _failure(error: BaseException) -> ScriptOutcome:
    """The outcome of a script that raised."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (_META_TYPE.sub(r"torch.cuda.\1Tensor", error.args[0]),)
    failed = ScriptOutcome(
        "out_of_memory" if isinstance(error, torch.OutOfMemoryError) else "failed",
        message=exception_text(type(error).__name__, error) + sandbox.hint(error),
        traceback=script_traceback(error),
        location=line_of_user(error.__traceback__),
        own_fault=own_fault(error, (__file__, runpy.__file__)),
        request=getattr(error, REQUEST, None),
    )
    for cause in causes(error):
        if isinstance(cause, UnsupportedOperatorError):
            return dataclasses.replace(
                failed, status="unsupported", message=str(cause), location=cause.location
            )
    return failed
