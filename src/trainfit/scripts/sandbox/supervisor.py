"""The process that supervises one run and cleans up after it.

The process that was to run the script forks: the child runs it, protected; the parent stays
outside with the original files. It ends a run that writes too much, ends what the script leaves
running (its orphans become children of this process: prctl(2), PR_SET_CHILD_SUBREAPER), tells
what was written, drops the layer, and ends as the child did. That happens too when those that
asked for the run are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainfit.results.runs.sandbox import Protection, SandboxRequest
from trainfit.scripts.sandbox import kernel
from trainfit.scripts.sandbox.layer import Layer, LayerContents, copy_writes, written

#: In the run's folder, with the reason: the script is to end itself.
STOP_NAME = "stop"
#: Seconds between looks at the layer's size and at who asked for the run.
_TICK_S = 0.2
#: Seconds that a run has to end itself, and to end upon SIGTERM.
_STOP_S = 15.0
_TERM_S = 1.5
#: Seconds for processes that clear up behind the script.
_CLEAR_UP_S = 0.3
#: Where libraries keep what they download (XDG), and the bytes of it that a user should know of.
_CACHE, _WORTH_A_NOTE = "/.cache/", 50_000_000
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
#: The exit code of a run that was not started.
NOT_STARTED = 70


class Attempt:
    """One fork: the child tries to protect itself, and says whether it is.

    ``make_layer`` is called where no signal can end this process: from then on the layer is
    dropped, whatever happens. Raises what it does; ``None``: there is no layer.
    """

    def __init__(self, make_layer: Callable[[], Layer] | None) -> None:
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.layer = None if make_layer is None else make_layer()
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
            raise
        self._said, self._say = os.pipe()
        self._go, self._let_go = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            os.close(self._said)
            os.close(self._let_go)
        else:
            with contextlib.suppress(OSError):
                os.setpgid(self.pid, self.pid)
            os.close(self._say)
            os.close(self._go)

    # -- in the child --------------------------------------------------------------------

    def tell(self, message: dict[str, Any]) -> None:
        """Tell the keeper, once."""
        os.write(self._say, json.dumps(message).encode() + b"\n")
        os.close(self._say)

    def wait(self) -> None:
        """Until the keeper is ready; the process then is what it was before the fork."""
        os.read(self._go, 1)
        os.close(self._go)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)

    # -- in the keeper -------------------------------------------------------------------

    def heard(self) -> dict[str, Any]:
        """What the child told; empty if it died."""
        with open(self._said, "rb") as pipe:
            line = pipe.readline()
        return json.loads(line) if line else {}

    def let_go(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._let_go)

    def give_up(self) -> None:
        """The child is of no use."""
        self.let_go()
        os.waitpid(self.pid, 0)
        if self.layer is not None:
            self.layer.drop()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)


class Keeper:
    """Watches over the run of a protected child; ``uppers`` are pairs of a folder that is
    covered and the folder with what was written there."""

    def __init__(
        self,
        attempt: Attempt,
        folder: Path,
        request: SandboxRequest,
        protection: Protection,
        uppers: list[tuple[str, str]],
        parent: int,
    ) -> None:
        self._pid, self._layer, self._folder = attempt.pid, attempt.layer, folder
        self._request, self._protection = request, protection
        self._uppers = uppers
        self._parent = parent
        self._stopped = ""
        self._kill_at = float("inf")

    def keep(self) -> int:
        """Until the run has ended; its wait status."""
        self._protection.save(self._folder)
        while True:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                break
            self._look(_next_signal())
        _signal_group(self._pid, signal.SIGKILL)
        if self._protection.kind != "overlay":
            _wait_for_children()
        daemons = end_children()
        self._tell(daemons)
        if self._layer is not None:
            self._layer.drop()
        return status

    def _look(self, number: int | None) -> None:
        now = time.monotonic()
        if now >= self._kill_at:
            _signal_group(self._pid, signal.SIGKILL)
        elif number == signal.SIGINT:
            os.kill(self._pid, signal.SIGINT)
        elif number == signal.SIGTERM or os.getppid() != self._parent:
            _signal_group(self._pid, signal.SIGTERM)
            self._kill_at = min(self._kill_at, now + _TERM_S)
        elif number is None and not self._stopped and self._layer is not None:
            self._stopped = self._layer.exceeded([upper for _, upper in self._uppers])
            if self._stopped:
                (self._folder / STOP_NAME).write_text(self._stopped)
                self._kill_at = now + _STOP_S
        _reap_others(self._pid)

    def _tell(self, daemons: int) -> None:
        found = written(self._uppers) if self._uppers else LayerContents({}, ())
        if self._request.keep and self._uppers:
            copy_writes(self._uppers, Path(self._request.keep))
        Protection(
            self._protection.kind,
            self._protection.detail,
            self._protection.guarded,
            len(found.files),
            sum(found.files.values()),
            len(found.removed),
            (*_notes(self._folder), *_daemons_note(daemons), *_downloads_note(found)),
            self._stopped,
        ).save(self._folder)


def adopt() -> None:
    """Become the parent of what the script leaves running, where the system can do that."""
    with contextlib.suppress(OSError, AttributeError):
        kernel.adopt_orphans()


def end_as(status: int) -> None:
    """End this process as another one did."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    time.sleep(1.0)
    os._exit(128 - code)


def end_children() -> int:
    """End all descendants of this process; how many were in a session of their own (daemons)."""
    daemons, own = 0, os.getsid(0)
    while children := _children():
        for pid in children:
            with contextlib.suppress(OSError):
                daemons += os.getsid(pid) != own
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
    return daemons


def _wait_for_children() -> None:
    """A moment for those that end by themselves: Python's resource tracker, which removes
    shared memory that the script left (an overlay drops it)."""
    deadline = time.monotonic() + _CLEAR_UP_S
    while _children() and time.monotonic() < deadline:
        time.sleep(0.01)
        _reap_others(-1)


def _children() -> list[int]:
    """Children of this process that are alive or not yet waited for."""
    own, found = os.getpid(), []
    if sys.platform != "linux":
        return []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path("/proc", name, "stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == own:
                    found.append(int(name))
    return found


def _reap_others(pid: int) -> None:
    """Orphans that ended meanwhile; the run itself is waited for elsewhere."""
    for child in _children():
        if child != pid:
            with contextlib.suppress(OSError):
                os.waitpid(child, os.WNOHANG)


def _next_signal() -> int | None:
    """The signal that came within a tick."""
    if sys.platform == "linux":
        found = signal.sigtimedwait(_SIGNALS, _TICK_S)
        return found.si_signo if found is not None else None
    time.sleep(0.02)
    pending = signal.sigpending() & {signal.SIGTERM, signal.SIGINT}
    return signal.sigwait(pending) if pending else None


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _notes(folder: Path) -> tuple[str, ...]:
    """What the run noted by itself (:func:`trainfit.scripts.sandbox.state.note`)."""
    try:
        lines = (folder / "notes.txt").read_text().splitlines()
    except OSError:
        return ()
    return tuple(dict.fromkeys(lines))


def _downloads_note(found: LayerContents) -> tuple[str, ...]:
    loaded = sum(size for path, size in found.files.items() if _CACHE in path)
    if loaded < _WORTH_A_NOTE:
        return ()
    return (
        f"{loaded / 1e9:.2g} GB that the script downloaded into a cache were discarded with its "
        "temporary layer: download them once beforehand to avoid repeating it in every run",
    )


def _daemons_note(count: int) -> tuple[str, ...]:
    if not count:
        return ()
    what = "a process left by the script" if count == 1 else f"{count} processes left by the script"
    return (f"{what} running in its own session was terminated",)
