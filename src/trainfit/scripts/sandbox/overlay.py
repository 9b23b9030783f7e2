"""A layer over the whole file system, by overlayfs in a mount namespace of the process's own.

Documentation/filesystems/overlayfs.rst: what is written goes to the upper folder, what is
removed leaves a mark there, and the lower folder stays as it is, whoever writes: Python, C code,
child processes. Without root, a user namespace allows the same (Linux 5.11).

Two mount namespaces are made: one that still shows the original files (`_Entered.pristine`), and
in it the one with the overlays. A process that was forked within goes back to the first to
get a layer of its own: the files that its parent wrote so far, over the originals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trainfit.hardware.machine.storage import Mount, mount_of, normal, read_mounts, relative
from trainfit.hardware.machine.system import System
from trainfit.scripts.sandbox import mounts as kernel
from trainfit.scripts.sandbox.layer import Layer, UnavailableError, is_in_layer
from trainfit.scripts.sandbox.mounts import SHARED_MEMORY, foreign_files, open_sockets, places

#: File systems whose content is in RAM: better than none for a layer.
_IN_MEMORY = ("tmpfs", "ramfs")
#: Where those are that are made for a layer, in its first folder.
_RAM, _SHARED = "memory", "shared-memory"


@dataclasses.dataclass(frozen=True)
class OverlayMount:
    """One overlay: its mount point, and descriptors of the folder with what was written."""

    path: str
    upper: int
    earlier: tuple[str, ...] = ()
    """Layers of the processes from which this one was forked, the latest first."""


@dataclasses.dataclass(frozen=True)
class OverlayState:
    """What a process needs to know of its overlays: what it was written and where."""

    covers: tuple[OverlayMount, ...]
    pristine: int
    read_only: tuple[str, ...]
    capabilities: kernel.Capabilities | None
    uppers: dict[str, tuple[str, ...]]


def enter(
    layer: Layer, folder: Path, where: str | None, before: OverlayState | None = None
) -> OverlayState:
    """Cover the file system of this process, which must have one thread.

    ``folder`` stays as it is, for real; ``where`` becomes the working directory. With
    ``before`` the process was forked from one that had entered: its layer is laid over that
    one's. Raises :class:`UnavailableError`; the
    process is then of no use for anything else.
    """
    if sys.platform != "linux":
        raise UnavailableError("no Linux")
    capabilities, pristine = _namespaces(layer, before)
    try:
        covers, bare, uppers = _cover(layer, folder, capabilities is not None, before)
    except OSError as error:
        raise UnavailableError(f"overlayfs: {error.strerror} ({error.filename})") from None
    if where is not None:
        with contextlib.suppress(OSError):  # removed meanwhile
            os.chdir(where)
    if capabilities is not None:
        capabilities.lay_down()
    return OverlayState(covers, pristine, bare, capabilities, uppers)


def go_back(before: OverlayState) -> None:
    """See the original files again. The working directory becomes "/"."""
    if before.capabilities is not None:
        before.capabilities.take_up()
    kernel.setns(before.pristine, kernel.CLONE_NEWNS)


def _namespaces(
    layer: Layer, before: OverlayState | None
) -> tuple[kernel.Capabilities | None, int]:
    """The namespaces; a descriptor of the one with the original files."""
    try:
        if before is not None:
            go_back(before)
            kernel.unshare(kernel.CLONE_NEWNS)
            _mount_memory(layer)
            return before.capabilities, before.pristine
        capabilities = _first_namespaces()
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        _mount_memory(layer)
        pristine = os.open("/proc/self/ns/mnt", os.O_RDONLY)
        kernel.unshare(kernel.CLONE_NEWNS)
    except OSError as error:
        raise UnavailableError(f"mount namespaces: {error.strerror}") from None
    return capabilities, pristine


def _first_namespaces() -> kernel.Capabilities | None:
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # root of a container
            kernel.unshare(kernel.CLONE_NEWNS)
            return None
    uid, gid = os.geteuid(), os.getegid()
    if foreign := foreign_files(os.getcwd(), uid, gid):
        raise UnavailableError(
            f"{foreign!r} belongs to another user or group, which a user namespace cannot show"
        )
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    kernel.map_to_itself(uid, gid)
    return kernel.Capabilities()


def _cover(
    layer: Layer, folder: Path, in_user_namespace: bool, before: OverlayState | None
) -> tuple[tuple[OverlayMount, ...], tuple[str, ...], dict[str, tuple[str, ...]]]:
    mounts = [
        mount
        for mount in read_mounts(System()).value or ()
        if not is_in_layer(mount.point)  # what _mount_memory made
    ]
    found = places(mounts, [str(each) for each in layer.folders], locked=in_user_namespace)
    bases = _bases(layer, mounts)
    own = os.open(folder, os.O_PATH)
    # An overlay may hide what is mounted below it, and is looked up by descriptor then.
    lowers = {path: os.open(path, os.O_PATH) for path in found.covered}
    earlier = {
        path: tuple((name, os.open(name, os.O_PATH)) for name in names)
        for path, names in (before.uppers if before is not None else {}).items()
    }
    stay = (*found.kept, *open_sockets(found.covered))
    kept = {path: descriptor for path in stay if (descriptor := _opened(path)) is not None}
    covers, read_only = [], list(found.bare)
    uppers: dict[str, tuple[str, ...]] = {}
    for number, (path, lower) in enumerate(lowers.items()):
        mount = mount_of(path, mounts)
        assert mount is not None
        below = earlier.get(path, ())
        lower_stack = [*(descriptor for _, descriptor in below), lower]
        upper = _overlay(bases, mount, path, lower_stack, number, user=in_user_namespace)
        if upper is None:
            _bind(lower, path)
            read_only.append(path)
            continue
        name, descriptor = upper
        covers.append(OverlayMount(path, descriptor, tuple(name for name, _ in below)))
        uppers[path] = (name, *covers[-1].earlier)
    for path, descriptor in kept.items():
        _bind(descriptor, path)
    _bind(own, str(folder))
    for path in read_only:
        kernel.make_read_only(path)
    stacked = [descriptor for each in earlier.values() for _, descriptor in each]
    for descriptor in (own, *lowers.values(), *kept.values(), *stacked):
        os.close(descriptor)
    for base in bases:
        os.close(base.descriptor)
    return tuple(covers), tuple(read_only), uppers


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_PATH)
    except OSError:
        return None


def _bind(descriptor: int, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        kernel.mount(f"/proc/self/fd/{descriptor}", path, "", kernel.MS_BIND)


@dataclasses.dataclass(frozen=True)
class _Base:
    """A folder for layers. It is looked up by descriptor: an overlay may hide it soon."""

    path: str
    descriptor: int
    kind: Literal["disk", "memory", "shared memory"]

    def serves(self, path: str) -> bool:
        """Can it take what is written below ``path``? No layer lies in what it covers, unless
        it is a file system of its own."""
        if path == SHARED_MEMORY or self.kind == "shared memory":
            return path == SHARED_MEMORY and self.kind == "shared memory"
        return self.kind == "memory" or relative(self.path, path) is None


def _bases(layer: Layer, mounts: Sequence[Mount]) -> list[_Base]:
    """The layer's folders, those on disks first, and at last one in RAM."""
    found = []
    for folder in layer.folders:
        mount = mount_of(str(folder), mounts)
        if mount is not None and mount.filesystem != "overlay":
            found.append((mount.filesystem in _IN_MEMORY, str(folder)))
    bases = [_Base(path, os.open(path, os.O_PATH), "disk") for _, path in sorted(found)]
    memory, shared = (str(layer.folders[0] / name) for name in (_RAM, _SHARED))
    bases.append(_Base(memory, os.open(memory, os.O_PATH), "memory"))
    bases.append(_Base(shared, os.open(shared, os.O_PATH), "shared memory"))
    return bases


def _mount_memory(layer: Layer) -> None:
    """File systems in RAM: for what no disk can take, and for shared memory."""
    for name, size in ((_RAM, layer.memory_bytes()), (_SHARED, _shared_memory_bytes())):
        point = layer.folders[0] / name
        point.mkdir(exist_ok=True)
        kernel.mount("tmpfs", str(point), "tmpfs", 0, f"size={size},mode=0700")


def _shared_memory_bytes() -> int:
    """The bytes of shared memory that are free: its layer is no way to more."""
    try:
        free = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 1 << 20
    return max(1 << 20, free.f_bavail * free.f_frsize)


def _overlay(
    bases: Sequence[_Base],
    mount: Mount,
    path: str,
    lowers: Sequence[int],
    number: int,
    *,
    user: bool,
) -> tuple[str, int] | None:
    """Mount one over ``lowers``, the upmost first; the path of its upper folder in the pristine
    namespace, and the folder's descriptor. ``None`` where no base can serve."""
    stack = ":".join(f"/proc/self/fd/{lower}" for lower in lowers)
    # What the mount covers is shown to readers of the mount table (hardware/machine/storage.py).
    root = normal(f"{mount.root}/{relative(path, mount.point)}")
    source = f"trainfit {mount.device} {mount.filesystem} {mount.source} {root}"
    for base in bases:
        if not base.serves(path):
            continue
        text = f"/proc/self/fd/{base.descriptor}/{number}"
        upper, work = _folders(text, lowers[0])
        options = f"lowerdir={stack},upperdir=/proc/self/fd/{upper}"
        options += f",workdir=/proc/self/fd/{work}"
        try:
            kernel.mount(source, path, "overlay", 0, options + (",userxattr" if user else ""))
        except OSError:
            os.close(upper)
            continue
        finally:
            os.close(work)
        return f"{base.path}/{number}/upper", upper
    return None


def _folders(at: str, lower: int) -> tuple[int, int]:
    """The upper folder, which looks as the lower one does, and the work folder."""
    original = os.stat(f"/proc/self/fd/{lower}")
    for name in ("upper", "work"):
        os.makedirs(f"{at}/{name}", mode=0o700, exist_ok=True)
    with contextlib.suppress(OSError):  # another's folder
        os.chown(f"{at}/upper", original.st_uid, original.st_gid)
    os.chmod(f"{at}/upper", original.st_mode & 0o7777)
    os.utime(f"{at}/upper", ns=(original.st_atime_ns, original.st_mtime_ns))
    return os.open(f"{at}/upper", os.O_PATH), os.open(f"{at}/work", os.O_PATH)
