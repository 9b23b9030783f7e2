"""The recorder in a process, from its first import of PyTorch to its end.

This module is imported at the start of every Python process of a watched command, so that it
imports next to nothing itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from trainfit.simgpu import patching
from trainfit.simgpu.patching import PatchSet
from trainfit.watch.recorder.looks import locked
from trainfit.watch.recorder.own_frames import without_ours

if TYPE_CHECKING:
    from trainfit.watch.recorder.recorder import Recorder, RecordingPlace

#: Folder of the run; empty or "0" switches the recorder off.
FOLDER: Final = "TRAINFIT_WATCH"
#: Seconds that the run counts from, by ``time.time()`` and ``time.monotonic()``.
STARTED: Final = "TRAINFIT_WATCH_STARTED"
#: The command as the user typed it.
COMMAND: Final = "TRAINFIT_WATCH_COMMAND"
#: "1": the gradient noise scale is measured, too.
NOISE_SCALE: Final = "TRAINFIT_WATCH_NOISE_SCALE"
#: "1": the history of the GPU's memory is recorded, too.
MEMORY_HISTORY: Final = "TRAINFIT_WATCH_MEMORY_HISTORY"

#: What is replaced for the rest of the process's life.
_patches: Final = PatchSet()
_active: Recorder | None = None
_exit_code: int | None = None
_waits = False
_failed: BaseException | None = None


def switched_off() -> bool:
    """Does the environment say that nothing is to be recorded?"""
    return os.environ.get(FOLDER, "off") in ("", "0")


def is_on() -> bool:
    """Is this process recorded, or will it be once it imports PyTorch?"""
    return _active is not None or _waits


def from_environment() -> None:
    """Record this process as soon as it has imported PyTorch, if the environment says where."""
    global _waits
    folder = os.environ.get(FOLDER, "")
    if folder in ("", "0"):
        return
    _waits = True

    late = "torch" in sys.modules

    def seen(_: ModuleType) -> None:
        hook.remove()
        if not _waits:  # stopped before
            return
        try:
            begin(place(folder), late)
        except Exception as error:
            print(f"trainfit watch: not recorded: {error}", file=sys.stderr)

    hook = patching.ImportHook("torch", seen)
    hook.install()
    locked.install(_patches)
    _hook_exceptions()


def place(folder: str) -> RecordingPlace:
    """The place of the run in ``folder`` that the environment tells of."""
    from trainfit.watch.recorder.recorder import RecordingPlace

    unix, _, monotonic = os.environ.get(STARTED, "").partition(" ")
    command = os.environ.get(COMMAND, " ".join(sys.orig_argv))
    started = (float(unix), float(monotonic)) if monotonic else (time.time(), time.monotonic())
    return RecordingPlace(
        Path(folder),
        *started,
        command,
        os.environ.get(NOISE_SCALE) == "1",
        os.environ.get(MEMORY_HISTORY) == "1",
    )


def begin(place: RecordingPlace, late: bool = True) -> Recorder:
    """Record from now on until the process ends, or :func:`end`; ``late``: PyTorch was not
    imported just now."""
    global _active
    from trainfit.watch.recorder.recorder import Recorder

    if _active is not None:
        return _active
    recorder = Recorder(place)
    recorder.start(late)
    _active = recorder
    _watch_end()
    return recorder


def end() -> None:
    """Stop recording; the process goes on."""
    global _active, _waits
    recorder, _active, _waits = _active, None, False
    if recorder is not None:
        recorder.stop("finished", unhook=True)


@functools.cache
def _hook_exceptions() -> None:
    """Show the user's tracebacks without our frames, and note what ends the process: hooked once
    in its life."""
    _patches.hook(sys, "excepthook", _noting)


@functools.cache
def _watch_end() -> None:
    """Ask Python to tell of the process's end, and of its threads' by errors, once in its life."""
    import threading

    os.register_at_fork(after_in_child=_in_child)
    atexit.register(_at_exit)
    _hook_exceptions()
    _patches.hook(sys, "exit", _leaving)
    _patches.hook(threading, "excepthook", _noting_threads)


def _leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
    def exit(status: Any = None, /) -> Any:
        global _exit_code
        # Any other object is printed, and the process ends with 1.
        _exit_code = 0 if status is None else status if isinstance(status, int) else 1
        leave(status)

    return exit


def _in_child() -> None:
    if _active is not None:
        try:
            _active.in_child()
        except Exception as error:
            _active.failed("fork", error)


#: What that handler says (`torch/csrc/DataLoader.cpp`), and how Python joins two exceptions.
_OF_WORKER: Final = "DataLoader worker"
_AND_THEN: Final = (
    "\nDuring handling of the above exception, another exception occurred:\n\n"
    "Traceback (most recent call last):\n"
)


def _noting(
    hook: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], Any]:
    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        global _failed
        _failed = error
        try:
            trace = without_ours(error)
            if _active is not None and os.getpid() == _active.pid:
                text = "".join(traceback.format_exception(kind, error, trace))
                _active.ended_by(error, text)
        except KeyboardInterrupt:
            pass  # a second Ctrl-C: the command's own error is printed, without our frames
        except Exception as mine:
            _note_again(error, mine)
        # Python's own hook prints without running Python code: a Ctrl-C meanwhile comes out of the
        # call in this frame, and would be told of as an error in it.
        with contextlib.suppress(KeyboardInterrupt):
            hook(kind, error, trace)

    return excepthook


#: Characters of a thread's traceback that are kept, the last ones.
_LONGEST: Final = 4000


def _noting_threads(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Note that a thread of the script ended by an error: the training may wait for it."""

    def excepthook(args: Any, /) -> None:
        try:
            ended = args.exc_value is not None and not issubclass(args.exc_type, SystemExit)
            if ended and _active is not None and os.getpid() == _active.pid:
                text = "".join(traceback.format_exception(args.exc_value))
                _active.event("thread_died", text=text[-_LONGEST:])
        except Exception as mine:
            if _active is not None:
                _active.failed("excepthook", mine)
        hook(args)

    return excepthook


def _note_again(error: BaseException, raised: Exception) -> None:
    """``raised`` came out of noting ``error``: a DataLoader's handler of SIGCHLD raises in whatever
    code runs when a worker has died, and says what the error is from."""
    if _active is None:
        return
    if not str(raised).startswith(_OF_WORKER):
        _active.failed("excepthook", raised)
        return
    texts = "".join(traceback.format_exception(error)), f"{type(raised).__name__}: {raised}"
    try:
        _active.ended_by(error, _AND_THEN.join(texts))
    except Exception as mine:
        _active.failed("excepthook", mine)


def _awaits_queue() -> bool:
    """Will Python wait for a thread that sends what was put into a queue of multiprocessing? Not
    for those of DataLoaders, which say so (``cancel_join_thread``)."""
    queues, util = map(sys.modules.get, ("multiprocessing.queues", "multiprocessing.util"))
    if queues is None or util is None:
        return False
    # What Python calls in the end, with a weak reference to the thread (multiprocessing/queues.py).
    joins = getattr(queues.Queue, "_finalize_join", None)
    for each in list(getattr(util, "_finalizer_registry", {}).values()):
        if joins is not None and getattr(each, "_callback", None) is joins:
            thread = each._args[0]()
            if thread is not None and thread.is_alive():
                return True
    return False


def _note_children(recorder: Recorder) -> None:
    """Processes that Python waits for after this, as they are no daemons, and queues whose content
    is still to be read."""
    import multiprocessing

    for child in multiprocessing.active_children():
        if not child.daemon:
            recorder.event("awaits", text=child.name, values={"pid": float(child.pid or 0)})
    if _awaits_queue():
        recorder.event("awaits_queue")


def _at_exit() -> None:
    if _active is None:
        return
    try:
        # Somebody may have put another excepthook in the place of ours.
        failed = _failed or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
        if failed is not None and _failed is None:
            _active.ended_by(failed, "".join(traceback.format_exception(failed)))
        _note_children(_active)
        if isinstance(failed, KeyboardInterrupt):
            _active.stop("interrupted", 130)
        elif failed is not None:
            _active.stop("failed", 1)
        else:
            _active.stop("failed" if _exit_code else "finished", _exit_code or 0)
    except KeyboardInterrupt:
        pass  # typed once more: the process is to end, and Python would print our frames
    except Exception as error:
        _active.failed("exit", error)
