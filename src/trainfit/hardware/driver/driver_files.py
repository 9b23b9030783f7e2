"""Files of NVIDIA's driver: module, device files, libraries."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping

from trainfit.hardware.host import answers
from trainfit.hardware.host.system import System
from trainfit.results.files.facts import Fact, absent, known
from trainfit.results.machine.machine import DeviceNode

_VERSION_FILE = "/proc/driver/nvidia/version"
_NODES = re.compile(
    r"nvidia\d+|nvidiactl|nvidia-uvm|nvidia-uvm-tools|nvidia-modeset|dxg|nvhost-.+|nvmap"
)
_CAPABILITIES = "/dev/nvidia-caps"
#: nvgpu and nova_core are NVIDIA's for Jetson and the kernel's newest; nouveau serves no CUDA.
_MODULES = ("nvidia", "nouveau", "nova_core", "nvgpu")

LIBRARIES = ("libcuda", "libnvidia-ml")
#: Where the loader looks, or the driver's installers, containers, WSL and Jetson put them.
_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia",
    "/usr/lib/aarch64-linux-gnu/tegra",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
)
#: CUDA's forward compatibility: only whoever names the folder in LD_LIBRARY_PATH gets it.
_UNUSED_FOLDERS = ("/usr/local/cuda/compat",)
_MOST_LINKS = 5


def kernel_driver(system: System) -> Fact[str]:
    """The version of the loaded kernel module: "550.54.14"."""
    said = system.text(_VERSION_FILE)
    if not said.is_absent:
        return said.map(_nvrm_version, "a line NVRM with a version")
    module = system.text("/sys/module/nvidia/version")
    if module.is_absent:
        return absent(_VERSION_FILE, said.reason)
    return module.map(_plain_version, "a version")


def kernel_modules(system: System) -> Fact[tuple[str, ...]]:
    """Loaded modules that drive NVIDIA's GPUs."""
    return system.text("/proc/modules").map(
        lambda content: tuple(
            sorted(line.split()[0] for line in content.splitlines() if line.startswith(_MODULES))
        ),
        "a list of modules",
    )


def device_nodes(system: System) -> Fact[tuple[DeviceNode, ...]]:
    """The driver's files below /dev; empty where there are none."""
    listed = system.names("/dev")
    if listed.value is None:
        return Fact(listed.state, None, listed.source, listed.reason)
    paths = [f"/dev/{name}" for name in listed.value if _NODES.fullmatch(name)]
    paths += [f"{_CAPABILITIES}/{name}" for name in system.names(_CAPABILITIES).value or ()]
    return known(tuple(DeviceNode(path, system.accessible(path)) for path in paths), "/dev")


def libraries(
    system: System, driver: str | None, loaded: str
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Versions and places of the driver's libraries, by name.

    Args:
        driver: the kernel module's version, whose libraries lie where no link leads to them.
        loaded: the file that libcuda was loaded from in a fresh process ("" if it was not).

    The plain name is the file that the loader takes: ``loaded``, or that of the first folder.
    A file of another version elsewhere is named with its folder: "libcuda (/usr/lib64)". A
    file without a version in its name (WSL's) has a place only.
    """
    versions: dict[str, str] = {}
    places: dict[str, str] = {}
    for name in LIBRARIES:
        found = list(_found(system, name, driver))
        if name == "libcuda" and loaded:
            found.insert(0, (loaded, True))
        for path, is_used in found:
            version = _version_in(path)
            folder = posixpath.dirname(path)
            key = name if is_used and name not in places else f"{name} ({folder})"
            if key != name and (version is None or version == versions.get(name)):
                continue
            places.setdefault(key, path)
            if version is not None:
                versions.setdefault(key, version)
    return versions, places


def _found(system: System, name: str, driver: str | None) -> Iterator[tuple[str, bool]]:
    """Files of a library in the loader's order, and whether the loader looks into the folder."""
    own = answers.text(system.environment.get("LD_LIBRARY_PATH")) or ""
    named = [path for path in map(answers.path, own.split(":")) if path is not None]
    folders = [*map(posixpath.normpath, named), *_FOLDERS]
    for folder in dict.fromkeys([*folders, *_UNUSED_FOLDERS]):
        path = _file_in(system, folder, name, driver)
        if path is not None:
            yield path, folder in folders


def _file_in(system: System, folder: str, name: str, driver: str | None) -> str | None:
    path = f"{folder}/{name}.so.1"
    if system.exists(path):
        end = _followed(system, path)
        if _version_in(end) is not None:
            return end
        versioned = _versioned(system, folder, name)
        return f"{folder}/{versioned}" if versioned else path
    if driver is None:  # a folder of libraries is long: it is not read for nothing
        return None
    versioned = _versioned(system, folder, name)
    return f"{folder}/{versioned}" if versioned else None


def _versioned(system: System, folder: str, name: str) -> str | None:
    """The newest file of a library in a folder, as ``ldconfig`` would link to it."""
    names = system.names(folder).value or ()
    found = [each for each in names if each.startswith(f"{name}.so.") and _version_in(each)]
    return max(found, key=lambda each: _sortable(_version_in(each) or ""), default=None)


def _followed(system: System, path: str) -> str:
    for _ in range(_MOST_LINKS):
        target = system.link(path).value
        if not target:
            break
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return path


def _version_in(path: str) -> str | None:
    """The driver's version in a file's name; libcuda.so.1.1 of WSL and Jetson has none."""
    found = re.search(r"\.so\.(\d{3,4}(?:\.\d{1,4}){1,3})$", path, re.ASCII)
    return found[1] if found else None


def _sortable(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _nvrm_version(content: str) -> str | None:
    """Of "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 …".

    Also of "… UNIX Open Kernel Module for x86_64  550.54.14  Release Build …".
    """
    line = re.search(r"^NVRM version:.*$", content, re.MULTILINE)
    return _plain_version(line[0]) if line else None


def _plain_version(content: str) -> str | None:
    found = re.search(r"(?<!\S)\d{2,4}(?:\.\d{1,4}){1,3}(?!\S)", content, re.ASCII)
    return found[0] if found else None
