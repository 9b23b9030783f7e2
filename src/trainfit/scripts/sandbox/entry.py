"""Protects the process in which a user's script is about to run, and supervises it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainfit.results.runs.script import Protection, ProtectionKind, SandboxRequest
from trainfit.scripts.sandbox import layer as state
from trainfit.scripts.sandbox import overlay, redirection
from trainfit.scripts.sandbox.ending import (
    adopt,
    end_as,
    end_children,
    hasten,
    reap_others,
    signal_group,
    wait_for_children,
)
from trainfit.scripts.sandbox.layer import (
    FILES,
    Layer,
    LayerContents,
    UnavailableError,
    copy_writes,
    written,
)
from trainfit.scripts.sandbox.mounts import SHARED_MEMORY
from trainfit.scripts.sandbox.network import go_offline

# ---
# The process that supervises one run and cleans up after it.
#
# The process that was to run the script forks: the child runs it, protected; the parent stays
# outside with the original files. It ends a run that writes too much, ends what the script leaves
# running (its orphans become children of this process: prctl(2), PR_SET_CHILD_SUBREAPER), tells
# what was written, drops the layer, and ends as the child did. That happens too when those that
# asked for the run are killed.


#: In the run's folder, with the reason: the script is to end itself.
STOP_NAME = "stop"
#: Seconds between looks at the layer's size and at who asked for the run.
_TICK_S = 0.2
#: Seconds that a run has to end itself, and to end upon SIGTERM.
_STOP_S = 15.0
_TERM_S = 1.5
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
        """Wait until the keeper is ready; the process then is what it was before the fork."""
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
        """Wait until the run has ended; its wait status."""
        self._protection.save(self._folder)
        while True:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                break
            self._look(_next_signal())
        signal_group(self._pid, signal.SIGKILL)
        if self._protection.kind != "overlay":
            wait_for_children()
        daemons = end_children()
        self._tell(daemons)
        if self._layer is not None:
            self._layer.drop()
        return status

    def _look(self, number: int | None) -> None:
        now = time.monotonic()
        if now >= self._kill_at:
            signal_group(self._pid, signal.SIGKILL)
        elif number == signal.SIGINT:
            os.kill(self._pid, signal.SIGINT)
        elif number == signal.SIGTERM or os.getppid() != self._parent:
            signal_group(self._pid, signal.SIGTERM)
            self._kill_at = min(self._kill_at, now + _TERM_S)
        elif number is None and not self._stopped and self._layer is not None:
            self._stopped = self._layer.exceeded([upper for _, upper in self._uppers])
            if self._stopped:
                (self._folder / STOP_NAME).write_text(self._stopped)
                self._kill_at = now + _STOP_S
        reap_others(self._pid)

    def _tell(self, daemons: int) -> None:
        found = written(self._uppers) if self._uppers else LayerContents({}, ())
        lost: tuple[str, ...] = ()
        if self._request.keep and self._uppers:
            try:
                copy_writes(self._uppers, Path(self._request.keep))
            except OSError as error:  # the disk is full, the folder is gone
                why = error.strerror or str(error)
                lost = (f"--keep-writes: not all was copied to {self._request.keep}: {why}",)
        Protection(
            self._protection.kind,
            self._protection.detail,
            self._protection.guarded,
            len(found.files),
            sum(found.files.values()),
            len(found.removed),
            (*lost, *_notes(self._folder), *_daemons_note(daemons), *_downloads_note(found)),
            self._stopped,
        ).save(self._folder)


def _next_signal() -> int | None:
    """The signal that came within a tick."""
    if sys.platform == "linux":
        found = signal.sigtimedwait(_SIGNALS, _TICK_S)
        return found.si_signo if found is not None else None
    time.sleep(0.02)
    pending = signal.sigpending() & {signal.SIGTERM, signal.SIGINT}
    return signal.sigwait(pending) if pending else None


def _notes(folder: Path) -> tuple[str, ...]:
    """What the run noted by itself (:func:`trainfit.scripts.sandbox.layer.note`)."""
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


def begin(folder: Path) -> None:
    """Protect this process as ``sandbox.json`` in ``folder`` asks, if it is there.

    The process must have one thread. It forks: the call returns in the child, which is
    protected (``folder`` alone is real to it); the parent watches over it and ends as it does.
    In a process that was forked from a protected one, the child sees what that wrote so far,
    and writes to a layer of its own.
    """
    where, parent, before = _cwd(), os.getppid(), state.current()
    if before is not None and before.kind == "overlay":
        overlay.go_back(before.entered)
    elif before is not None and before.kind == "redirection":
        before.entered.view.leave(str(folder.resolve()))
    try:
        request = SandboxRequest.load(folder)
    except FileNotFoundError:
        if before is not None:
            raise  # it must not run over the original files
        return
    adopt()
    reasons: list[str] = []
    kinds: tuple[ProtectionKind, ...] = request.kinds
    if request.allow_writes:
        kinds = ("none",)
    elif before is not None:
        kinds = (before.kind,)
    for kind in kinds:
        # Landlock allows the children of a redirected process no folder but that one's.
        within = before.entered.folder if before is not None and kind == "redirection" else ""
        make = functools.partial(Layer.make, request.limit_bytes, within)
        attempt = Attempt(None if kind == "none" else make)
        if attempt.pid == 0:
            _protect(attempt, kind, folder, where, before, request)
            return
        heard = attempt.heard()
        if before is not None and before.kind == "redirection":
            before.entered.calls.uninstall()
        if "unavailable" not in heard and heard:
            _keep(attempt, kind, heard, reasons, folder, request, parent)
        attempt.give_up()
        reasons.append(heard.get("unavailable", f"{kind}: its process died"))
    _refuse(folder, reasons)


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _protect(
    attempt: Attempt,
    kind: ProtectionKind,
    folder: Path,
    where: str | None,
    before: state.State | None,
    request: SandboxRequest,
) -> None:
    """Protect this process, the child; it ends where the protection is not available."""
    earlier = before.entered if before is not None and before.kind == kind else None
    told: dict[str, Any] = {}
    entered: Any = None
    try:
        if kind == "overlay":
            assert attempt.layer is not None
            entered = overlay.enter(attempt.layer, folder, where, earlier)
            told = {
                "covers": [[cover.path, cover.upper] for cover in entered.covers],
                "earlier": [
                    [cover.path, upper] for cover in entered.covers for upper in cover.earlier[::-1]
                ],
                "read_only": list(entered.read_only),
            }
        elif kind == "redirection":
            assert attempt.layer is not None
            entered = redirection.enter(attempt.layer, folder, request.guard, earlier)
            told = {
                "covers": [],
                "folders": [*entered.earlier[::-1], entered.folder],
                "unguarded": entered.unguarded,
            }
    except UnavailableError as error:
        attempt.tell({"unavailable": f"{kind}: {error}"})
        os._exit(NOT_STARTED)
    state.become(state.State(kind, folder, entered))
    hasten(None if request.keep else attempt.layer)
    if before is None:  # else it is so already
        go_offline()
    attempt.tell(told or {"covers": []})
    attempt.wait()


def _keep(
    attempt: Attempt,
    kind: ProtectionKind,
    heard: dict[str, Any],
    reasons: list[str],
    folder: Path,
    request: SandboxRequest,
    parent: int,
) -> None:
    """Keep the protection, in the parent, until the child has ended; does not return."""
    uppers = [(path, upper) for path, upper in heard.get("earlier", [])]
    for path, descriptor in heard["covers"]:
        # The child's descriptor: its folder may lie in a file system that only the child sees.
        own = os.open(f"/proc/{attempt.pid}/fd/{descriptor}", os.O_RDONLY | os.O_DIRECTORY)
        if path != SHARED_MEMORY:
            uppers.append((path, f"/proc/self/fd/{own}"))
    detail = "; ".join(reasons)
    for layer in heard.get("folders", ()):
        uppers.append(("/", f"{layer}/{FILES}"))
    if unguarded := heard.get("unguarded", ""):
        detail = "; ".join(filter(None, (detail, unguarded)))
    if bare := [each for each in heard.get("read_only", ()) if each != "/"]:
        detail = "; ".join(filter(None, (detail, f"read-only: {', '.join(bare)}")))
    attempt.let_go()
    protection = Protection(kind, detail, guarded=not unguarded)
    status = Keeper(attempt, folder, request, protection, uppers, parent).keep()
    end_as(status)


def _refuse(folder: Path, reasons: list[str]) -> None:
    """Nothing protects here: the script is not run."""
    why = "; ".join(reasons) or "not requested"
    Protection(
        "none",
        why,
        stopped=f"the script could change your files, as no sandbox is available ({why}); allow "
        "it with --allow-writes, or run trainfit where user namespaces or Landlock are allowed",
    ).save(folder)
    os._exit(NOT_STARTED)
