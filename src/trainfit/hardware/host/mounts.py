"""The mount table: /proc/self/mountinfo (proc(5), Documentation/filesystems/proc.rst)."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Iterable

from trainfit.hardware.host.system import System
from trainfit.results.files.facts import Fact

MOUNTINFO = "/proc/self/mountinfo"

_OURS = re.compile(r"trainfit (\d+:\d+) (\S+) (.*) (/.*)", re.S)
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclasses.dataclass(frozen=True)
class Mount:
    """One line. ``root`` is the folder of the file system that shows at ``point``.

    ``device`` is "MAJOR:MINOR"; major 0 is no block device (btrfs, overlay, tmpfs, network).
    """

    device: str
    root: str
    point: str
    filesystem: str
    source: str
    options: tuple[str, ...]


def read_mounts(system: System) -> Fact[tuple[Mount, ...]]:
    """Every mount that this process sees, in their order; lines that are none are left out."""
    return system.text(MOUNTINFO).map(_parsed, "a list of mounts")


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that an absolute path lies in: the longest mount point, the last of equals."""
    best: Mount | None = None
    for mount in mounts:
        inside = relative(path, mount.point) is not None
        # A later mount on the same point covers the earlier one.
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def relative(path: str, folder: str) -> str | None:
    """``path`` as seen from ``folder``: "" for itself, ``None`` where it lies outside."""
    if path == folder:
        return ""
    prefix = folder.rstrip("/") + "/"
    return path.removeprefix(prefix) if path.startswith(prefix) else None


def _parsed(text: str) -> tuple[Mount, ...] | None:
    mounts = tuple(mount for line in text.split("\n") if (mount := _mount(line)) is not None)
    return mounts or None


def _mount(line: str) -> Mount | None:
    # Fields 7 and on are optional ones, until a lone hyphen.
    before, hyphen, after = line.partition(" - ")
    left, right = before.split(" "), after.split(" ")
    if not hyphen or len(left) < 6 or len(right) < 2 or "\0" in line:
        return None
    if not re.fullmatch(r"[0-9]{1,8}:[0-9]{1,8}", left[2]):
        return None
    root, point = _unescaped(left[3]), _unescaped(left[4])
    if not point.startswith("/") or "\0" in root + point:
        return None
    options = tuple((right[2] if len(right) > 2 else "").split(","))
    if right[0] == "overlay" and (covered := _OURS.fullmatch(_unescaped(right[1]))) is not None:
        # A layer of ours over a user's files (scripts/sandbox/overlay.py): they lie below it.
        device, filesystem, source, root = covered.groups()
        return Mount(device, root, normal(point), filesystem, source, options)
    # normpath: a damaged line must not lead out of the root that is read below.
    return Mount(left[2], root, normal(point), right[0], _unescaped(right[1]), options)


def normal(path: str) -> str:
    """An absolute path without "..", "." and doubled slashes."""
    return posixpath.normpath("/" + path.lstrip("/"))


def _unescaped(field: str) -> str:
    """Blank, tab, newline and backslash are written as octal numbers."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), field)
