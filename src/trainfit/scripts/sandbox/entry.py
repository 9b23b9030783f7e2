"""Protects the process in which a user's script is about to run."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from trainfit.results.runs.sandbox import Protection, ProtectionKind, SandboxRequest
from trainfit.scripts.sandbox import overlay, redirection, state, supervisor
from trainfit.scripts.sandbox.errors import UnavailableError
from trainfit.scripts.sandbox.layer import FILES, Layer
from trainfit.scripts.sandbox.mount_plan import SHARED_MEMORY
from trainfit.scripts.sandbox.network import go_offline
from trainfit.scripts.sandbox.supervisor import Attempt, Keeper


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
    supervisor.adopt()
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
            _protect(attempt, kind, folder, where, before, request.guard)
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
    guard: bool,
) -> None:
    """In the child; it ends where the protection is not available."""
    earlier = before.entered if before is not None and before.kind == kind else None
    told: dict[str, Any] = {}
    entered: Any = None
    try:
        if kind == "overlay":
            assert attempt.layer is not None
            entered = overlay.enter(attempt.layer, folder, where, earlier)
            told = {
                "covers": [[each.path, each.upper] for each in entered.covers],
                "earlier": [
                    [each.path, upper] for each in entered.covers for upper in each.earlier[::-1]
                ],
                "read_only": list(entered.read_only),
            }
        elif kind == "redirection":
            assert attempt.layer is not None
            entered = redirection.enter(attempt.layer, folder, guard, earlier)
            told = {
                "covers": [],
                "folders": [*entered.earlier[::-1], entered.folder],
                "unguarded": entered.unguarded,
            }
    except UnavailableError as error:
        attempt.tell({"unavailable": f"{kind}: {error}"})
        os._exit(supervisor.NOT_STARTED)
    state.become(state.State(kind, folder, entered))
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
    """In the parent, until the child has ended; does not return."""
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
    supervisor.end_as(status)


def _refuse(folder: Path, reasons: list[str]) -> None:
    """Nothing protects here: the script is not run."""
    why = "; ".join(reasons) or "not requested"
    Protection(
        "none",
        why,
        stopped=f"the script could change your files, as no sandbox is available ({why}); allow "
        "it with --allow-writes, or run trainfit where user namespaces or Landlock are allowed",
    ).save(folder)
    os._exit(supervisor.NOT_STARTED)
