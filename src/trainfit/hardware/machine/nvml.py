"""NVIDIA's devices by NVML, queried in a separate process, and on the PCI bus."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from trainfit.hardware.machine import parsing
from trainfit.hardware.machine.system import System
from trainfit.results.machine import Fact, PciDevice, absent, cannot_tell, known

T = TypeVar("T")

#: NVML answers within tenths of a second; it takes seconds where no persistence daemon keeps
#: the GPUs awake.
SECONDS = 6.0

#: nvml.h's nvmlReturn_t, where its symbol does not say enough.
_MEANING = {
    "NVML_ERROR_FUNCTION_NOT_FOUND": "this driver is too old for this call",
    "NVML_ERROR_NO_PERMISSION": "this user lacks permission for it",
    "NVML_ERROR_DRIVER_NOT_LOADED": "no NVIDIA driver is loaded",
    "NVML_ERROR_LIBRARY_NOT_FOUND": "libnvidia-ml.so.1 was not found",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "libnvidia-ml and the driver have different versions",
    "NVML_ERROR_GPU_IS_LOST": "the GPU has fallen off the bus",
    "NVML_ERROR_RESET_REQUIRED": "the GPU must be reset",
    "NVML_ERROR_UNKNOWN": "Unknown Error",
}


def ask_nvml(system: System) -> Fact[Mapping[str, Any]]:
    """What `probes/nvml_gpus.py` prints, with or without GPUs."""
    return system.probe("nvml_gpus", SECONDS)


def refused(source: str, error: str) -> Fact[Any]:
    """A value that NVML does not give: the GPU has no such thing, or it is unknown."""
    if error == "NVML_ERROR_NOT_SUPPORTED":
        return absent(source, "this GPU does not report it")
    return cannot_tell(source, reason_of(error))


def reason_of(error: str) -> str:
    """NVML's symbol, with its meaning where that is not plain."""
    meaning = _MEANING.get(error)
    return f"{error}: {meaning}" if meaning else error


def blindness(answer: Fact[Mapping[str, Any]]) -> str:
    """Why NVML lists no GPUs; "" if it does."""
    if answer.value is None:
        return answer.reason
    error = parsing.error_of(answer.value)
    if error is not None:
        return reason_of(error)
    listed = answer.value.get("gpus")
    if not isinstance(listed, list):
        return f"NVML's GPUs are {parsing.shown(listed)}, not a list"
    return "" if listed else "NVML lists no GPU"


def value_of(
    entry: Mapping[str, Any], key: str, call: str, read: Callable[[Any], T | None]
) -> Fact[T]:
    """The value of ``key``, asked for by ``call``: read, refused, or not what it should be."""
    source = f"NVML {call}"
    value = entry.get(key)
    error = parsing.error_of(value)
    if error is not None:
        return refused(source, error)
    if value is None:
        return cannot_tell(source, "NVML gave no answer")
    found = read(value)
    if found is None:
        return cannot_tell(source, f"it reports {parsing.shown(value)}, an invalid value")
    return known(found, source)


# ---
# NVIDIA's devices on the PCI bus, as the kernel lists them: seen also where NVML is blind.


FOLDER = "/sys/bus/pci/devices"

_NVIDIA = 0x10DE
#: Base class and subclass: PCI Code and ID Assignment Specification. A GPU's other functions
#: (audio 0x0403, USB 0x0c03, serial bus 0x0c80) are of other classes.
_DISPLAY = 0x03
_OTHER_BRIDGE = 0x0680
#: GT/s of one lane by PCI Express generation: PCI Express Base Specification.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
_WIDEST_LINK = 32


def read_pci(system: System) -> Fact[tuple[PciDevice, ...]]:
    """The NVIDIA GPUs on the bus, by address; empty where the bus has none."""
    listed = system.names(FOLDER)
    if listed.value is None:
        return Fact(listed.state, None, listed.source, listed.reason)
    found, unread = [], 0
    for address in listed.value:
        vendor = _code(system, address, "vendor")
        kind = _code(system, address, "class") if vendor == _NVIDIA else None
        if vendor is None or (vendor == _NVIDIA and kind is None):
            unread += 1
        elif vendor == _NVIDIA and kind is not None and kind >> 16 == _DISPLAY:
            found.append(_device(system, address))
    if unread and not found:
        return cannot_tell(FOLDER, f"vendor or class of {unread} devices cannot be read")
    return known(tuple(found), FOLDER)


def has_switches(system: System) -> bool:
    """Are the GPUs joined by NVSwitch, so that a fabric manager must run?"""
    # The module nvidia makes the folder everywhere, with a file in it for each switch.
    if system.names("/proc/driver/nvidia-nvswitch/devices").value:
        return True
    return any(
        _code(system, address, "vendor") == _NVIDIA
        and (_code(system, address, "class") or 0) >> 8 == _OTHER_BRIDGE
        for address in system.names(FOLDER).value or ()
    )


def place(address: str) -> str | None:
    """The kernel's spelling of a PCI address: "0000:01:00.0" of NVML's "00000000:01:00.0"."""
    found = re.fullmatch(
        r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", address.strip().lower()
    )
    return f"{int(found[1], 16):04x}:{found[2]}" if found else None


def informed(system: System) -> Iterator[tuple[str, str | None, str | None]]:
    """Address, model and UUID of each GPU below /proc/driver/nvidia/gpus."""
    folder = "/proc/driver/nvidia/gpus"
    for address in system.names(folder).value or ():
        content = system.text(f"{folder}/{address}/information").value or ""
        yield address, _field(content, "Model"), _field(content, "GPU UUID")


def _field(content: str, name: str) -> str | None:
    found = re.search(rf"^{name}:[ \t]*(\S.*?)[ \t]*$", content, re.MULTILINE)
    # The driver writes what it does not know as "Unknown" and "GPU-????????-…".
    return found[1] if found and "?" not in found[1] and found[1] != "Unknown" else None


def _device(system: System, address: str) -> PciDevice:
    folder = f"{FOLDER}/{address}"
    driver = system.link(f"{folder}/driver").value
    node = system.number(f"{folder}/numa_node").value
    return PciDevice(
        address=address,
        device_id=system.text(f"{folder}/device").value or "",
        device_class=system.text(f"{folder}/class").value or "",
        kernel_driver=driver.rstrip("/").rpartition("/")[2] or None if driver else None,
        numa_node=node if node is not None and node >= 0 else None,
        link_generation=_generation(system.text(f"{folder}/current_link_speed").value),
        link_generation_max=_generation(system.text(f"{folder}/max_link_speed").value),
        link_width=_width(system.number(f"{folder}/current_link_width").value),
        link_width_max=_width(system.number(f"{folder}/max_link_width").value),
    )


def _code(system: System, address: str, name: str) -> int | None:
    """A number that the kernel writes as "0x10de"."""
    content = system.text(f"{FOLDER}/{address}/{name}").value or ""
    return int(content, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", content) else None


def _generation(speed: str | None) -> int | None:
    """Of "16.0 GT/s PCIe"; ``None`` of "Unknown", which a link that is down says."""
    found = re.match(r"(\d{1,3}(?:\.\d{1,2})?) GT/s", speed or "")
    return _GENERATIONS.get(float(found[1])) if found else None


def _width(lanes: int | None) -> int | None:
    # 0 is a link that is down, 255 one that cannot be read.
    return lanes if lanes is not None and 0 < lanes <= _WIDEST_LINK else None
