"""Where and how files are written: whole or not at all, never in place of a file of the user's."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: No room: writing in place of a file would lose what is in it, too.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: How many bytes of a file are read to tell what it is.
_HEAD: Final = 4096
#: What each form begins with: a result, a page, a picture, a trace.
_BEGIN: Final = re.compile(
    rb'\s*\{\s*"format"\s*:\s*"trainfit-|'
    rb'<!doctype html>.*<meta name="generator" content="trainfit|'
    rb"<svg[^>]*><!-- trainfit |"
    rb'\{"otherData": \{"generator": "trainfit ',
    re.S,
)
#: The last line of Markdown.
_END: Final = re.compile(rb"\ntrainfit [^\n]+; made from [^\n]*\n*\Z")


def write_file(path: Path, data: bytes) -> None:
    """Write ``data`` to what ``path`` leads to.

    A regular file is replaced when all is written, so that it is the former or the new one; links
    stay. A device, a pipe, and the file that is standard output are written to. Raises ``OSError``
    that names ``path``.
    """
    try:
        found = _status(path)
        standard = _standard(found)
        if standard is not None:
            with os.fdopen(os.dup(standard), "wb") as stream:
                stream.write(data)
        elif found is not None and not stat.S_ISREG(found.st_mode):
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data, found)
    except OSError as error:
        error.filename = str(path)
        raise


def is_replaceable(path: Path) -> bool:
    """May a result be written to ``path``? Not in place of a file that is not a result of ours.

    An empty file has nothing to lose, and a device nothing to keep.
    """
    found = _status(path)
    if found is None or not stat.S_ISREG(found.st_mode) or found.st_size == 0:
        return True
    return is_result(path)


def is_result(path: Path) -> bool:
    """Was the regular file at ``path`` written by trainfit: a result, a recording, a report?"""
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _HEAD))
        tail = stream.read(_HEAD)
    if _BEGIN.match(head) or _END.search(tail):
        return True
    return head.startswith(b"PK") and _is_recording(path)


def _is_recording(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return {"header.json", "events.npy"} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _standard(status: os.stat_result | None) -> int | None:
    """The descriptor of standard output or error that is this file."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if status is not None and os.path.samestat(status, os.fstat(descriptor)):
                return descriptor
    return None


def _replace(path: Path, data: bytes, status: os.stat_result | None) -> None:
    scratch = path.with_name(f".trainfit-{secrets.token_hex(8)}.part")
    try:
        with scratch.open("xb") as stream:
            stream.write(data)
        if status is not None:
            scratch.chmod(stat.S_IMODE(status.st_mode))
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        if status is None or error.errno in _NO_ROOM or not os.access(path, os.W_OK):
            raise
        # A file that may be written in a folder that may not, or a mount point of its own.
        path.write_bytes(data)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


# ---
# The folder in which trainfit keeps what is none of the user's files.


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``trainfit`` in $XDG_STATE_HOME or ~/.local/state (XDG Base Directory Specification); it is
    not created."""
    home = environment.get("XDG_STATE_HOME", "")
    return (Path(home) if os.path.isabs(home) else _home() / ".local" / "state") / "trainfit"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a user that the system does not know
        return Path(tempfile.gettempdir())
