"""The run's GPUs: which they are, their rows, and NVML that goes away and comes back."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from trainfit.hardware.gpu.local_gpu import visible
from trainfit.hardware.machine.nvml import NvmlDevice
from trainfit.results.runs.tables import GPUS, Table, empty_rows
from trainfit.results.runs.watched import plain_uuid

#: Seconds between two tries to reach NVML, or a GPU, that went away.
_TRY_EVERY_S: Final = 1.0
#: The kernel's number of the first PID namespace (include/linux/proc_ns.h), whose PIDs NVML uses.
_FIRST_NAMESPACE: Final = "pid:[4026531836]"
_COLUMNS: Final = frozenset(GPUS.names or ())

Tell = Callable[[str, str, Mapping[str, float]], None]


def load_nvml() -> Any:
    """The module `pynvml`; raises ``ImportError``."""
    return importlib.import_module("pynvml")


def nvml_knows_our_pids() -> bool:
    """Does NVML know our processes by our numbers? In a container with PIDs of its own it speaks of
    others."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


class GpuCounters:
    """Rows of the table of GPUs. Their column ``gpu`` is NVML's number until :meth:`renumber`.

    Args:
        module: `pynvml`, or what stands in for it.
        tell: takes an event's kind, text and values.
        knows_pids: whether NVML's PIDs are those of /proc.
        timer: seconds, by which calls are timed.

    Raises:
        Exception: whatever the module raises where NVML cannot be used at all.
    """

    def __init__(
        self,
        module: Any,
        tell: Tell,
        knows_pids: bool = True,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._module, self._tell, self._knows_pids = module, tell, knows_pids
        module.nvmlInit()
        count = int(module.nvmlDeviceGetCount())
        self.devices = [NvmlDevice(module, number, timer) for number in range(count)]
        self._lost: set[int] = set()
        self._tried_at = float("-inf")
        self._numbers: dict[int, int] = {}

    def choose(self, mask: str | None) -> None:
        """Keep only the GPUs that CUDA_VISIBLE_DEVICES leaves to the run, in its order."""
        if mask is None:
            return
        taken, _ = visible(mask, len(self.devices), [device.uuid for device in self.devices])
        chosen = [device for entry in taken for device in self._named(entry)]
        if chosen or not taken:
            self.devices = chosen

    def _named(self, entry: str) -> list[NvmlDevice]:
        if entry.isdigit():
            return [device for device in self.devices if device.number == int(entry)]
        return [device for device in self.devices if device.uuid.startswith(entry)]

    def sample(self, now: float, pids: frozenset[int]) -> Table:
        """A row a GPU, at ``now`` (seconds of ``time.monotonic()``); empty ones for GPUs that are
        gone. ``pids`` are the run's."""
        self._reach(now)
        rows = empty_rows(GPUS, len(self.devices))
        known = pids if self._knows_pids else None
        # One GPU at a time makes the calls that block, the one that made them longest ago.
        there = [device for device in self.devices if not device.is_gone]
        turn = min(there, key=lambda device: device.waited_at, default=None)
        for place, device in enumerate(self.devices):
            values = {} if device.is_gone else device.sample(now, known, device is turn)
            for column in values.keys() & _COLUMNS:
                rows[column][place] = values[column]
            rows["time_s"][place], rows["gpu"][place] = now, device.number
            self._notice(device)
        return rows

    def renumber(self, uuids: Sequence[str]) -> Callable[[Table], None]:
        """Gives rows the GPUs' places in ``uuids`` (of the ranks' headers), or, where these are
        not known, in what CUDA_VISIBLE_DEVICES leaves. A GPU keeps the number that it has got, also
        where a header that comes later has another order: its UUID goes with the number."""
        places = {plain_uuid(uuid): place for place, uuid in enumerate(uuids) if uuid}
        numbers = self._numbers
        for place, device in enumerate(self.devices):
            if device.number not in numbers:
                wanted = places.get(plain_uuid(device.uuid), len(places) + place)
                taken = set(numbers.values())
                free = (number for number in itertools.count(wanted) if number not in taken)
                numbers[device.number] = next(free)
                values = {"gpu": numbers[device.number], "nvml": device.number}
                self._tell("gpu", f"{device.uuid} {device.name}".strip(), values)

        def change(rows: Table) -> None:
            if len(rows):
                rows["gpu"] = np.array([numbers.get(int(gpu), -1) for gpu in rows["gpu"]])

        return change

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._module.nvmlShutdown()

    def _reach(self, now: float) -> None:
        """Try to have back what is gone."""
        gone = [device for device in self.devices if device.is_gone]
        if not gone or now - self._tried_at < _TRY_EVERY_S:
            return
        self._tried_at = now
        if len(gone) == len(self.devices):
            with contextlib.suppress(Exception):
                self._module.nvmlShutdown()
            try:
                self._module.nvmlInit()
            except Exception:
                return
        for device in gone:
            device.is_gone = not device.open()

    def _notice(self, device: NvmlDevice) -> None:
        values = {"nvml": device.number}
        if device.is_gone and device.number not in self._lost:
            self._lost.add(device.number)
            self._tell("nvml_lost", f"NVML does not answer for {device.name or 'a GPU'}", values)
        elif not device.is_gone and device.number in self._lost:
            self._lost.remove(device.number)
            self._tell("nvml_back", f"NVML answers for {device.name or 'a GPU'} again", values)
