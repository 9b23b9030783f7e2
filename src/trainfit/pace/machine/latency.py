"""Disables deep idle states for as long as a process wants (Linux's PM QoS).

``/dev/cpu_dma_latency`` takes a 32-bit number of microseconds: no CPU enters an idle state that
takes longer to leave, as long as the file is open; the least of all holders wins (kernel,
Documentation/power/pm_qos_interface.rst). Closing it, or dying, ends it: nothing is to be undone.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType

DEVICE = "/dev/cpu_dma_latency"


class held_awake:
    """A context in which CPUs wake at once. Raises ``OSError`` where that is not allowed."""

    def __init__(self, root: Path = Path("/"), microseconds: int = 0) -> None:
        self._path = root / DEVICE.lstrip("/")
        self._microseconds = microseconds
        self._file: int | None = None

    def why_not(self) -> str:
        """Why it cannot be held, with the remedy; "" if it can."""
        if not self._path.exists():
            return (
                f"there is no {DEVICE}: the kernel has no CPU idle states to disable, "
                "or this is a container (give it --device /dev/cpu_dma_latency)"
            )
        if not os.access(self._path, os.W_OK):
            return (
                f"{DEVICE} cannot be written by this user; run as root, or "
                f"`sudo setfacl -m u:$USER:rw {DEVICE}` until the next boot"
            )
        return ""

    def __enter__(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY)
        os.write(self._file, struct.pack("=i", self._microseconds))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
