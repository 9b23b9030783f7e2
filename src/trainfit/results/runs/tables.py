"""The tables of a watched run, and the file to which their rows are appended.

A table is a file of rows of fixed size in the machine's byte order, without a header: whoever
writes one only appends, and a file that ends within a row (its writer was killed) is read up to the
last whole one. Times are seconds of ``time.monotonic()`` since the run's ``started_monotonic``
(:class:`~trainfit.results.runs.watched.RunHeader`), which all processes of a machine share.

Not measured is NaN in a column of floating-point numbers and -1 in one of integers; 0 is measured.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Table = NDArray[Any]

#: Bits of ``steps.flags``.
EPOCH_START: Final = 1  # its batch was the first of an iteration of the DataLoader
EVALUATION: Final = 2  # an evaluation ran within it
CHECKPOINT: Final = 4  # a checkpoint was written within it
LOSS_FINITE: Final = 8  # the loss was looked at and is a finite number
LOSS_NOT_FINITE: Final = 16  # … is NaN or infinite
STEP_SKIPPED: Final = 32  # GradScaler left the optimizer's step out
LIGHT: Final = (
    128  # of its phases only the wait for batches was looked at: see the recorder's budget
)
COMPILED: Final = 64  # torch.compile or cudnn.benchmark was at work: slower than the rest

#: A training step: from the end of the optimizer's step before to the end of its own. Phases are
#: seconds of the main thread and disjoint: a synchronisation within the forward pass counts as
#: ``sync_s`` alone; what no phase covers is ``step_s`` less their sum. ``gpu_*`` are seconds
#: between CUDA events on the current stream; ``gpu_gap_s`` is how long the stream was empty before
#: the step's first kernel.
STEPS: Final = np.dtype(
    [
        ("step", "i8"),
        ("end_s", "f8"),
        ("step_s", "f4"),
        ("input_s", "f4"),  # waiting in the DataLoader's next()
        ("copy_s", "f4"),  # host-to-device copies
        ("forward_s", "f4"),
        ("backward_s", "f4"),
        ("optimizer_s", "f4"),
        ("sync_s", "f4"),  # item(), cpu(), synchronize() and the like
        ("checkpoint_s", "f4"),
        ("evaluation_s", "f4"),
        ("gpu_s", "f4"),  # first to last event of the step
        ("gpu_gap_s", "f4"),
        ("gpu_copy_s", "f4"),
        ("gpu_forward_s", "f4"),
        ("gpu_backward_s", "f4"),
        ("gpu_optimizer_s", "f4"),
        ("cpu_s", "f4"),  # CPU time of the main thread
        ("samples", "i4"),
        ("batches", "i2"),  # micro-batches: accumulation
        ("queued", "i2"),  # batches that were ready when next() was called, 0 where the next one
        # in turn was not among them; of the first batch
        ("syncs", "i4"),  # calls that waited for the GPU
        ("copied_bytes", "i8"),
        ("unpinned_bytes", "i8"),  # of copied_bytes, from pageable memory
        ("allocated_bytes", "i8"),  # torch.cuda.memory_stats at the step's end, where looked at
        ("peak_allocated_bytes", "i8"),
        ("reserved_bytes", "i8"),
        ("alloc_retries", "i4"),
        ("loss", "f4"),
        ("loss_scale", "f4"),
        ("gradient_norm", "f4"),  # where the script computes it (clip_grad_norm_)
        ("flags", "u2"),
    ]
)

#: The machine, 10 times a second (once a second after the first ten minutes). Counters are of the
#: interval since the sample before.
MACHINE: Final = np.dtype(
    [
        ("time_s", "f8"),
        ("interval_s", "f4"),
        ("cores_busy", "f4"),  # all processes
        ("cores_ours", "f4"),  # the run's processes, workers included
        ("iowait_cores", "f4"),
        ("runnable", "f4"),  # threads that run or wait for a core
        ("ram_used_bytes", "i8"),
        ("ram_available_bytes", "i8"),
        ("swap_in_bytes", "i8"),
        ("swap_out_bytes", "i8"),
        ("shm_used_bytes", "i8"),
        ("shm_free_bytes", "i8"),
        ("disk_read_bytes", "i8"),
        ("disk_written_bytes", "i8"),
        ("net_received_bytes", "i8"),
        ("net_sent_bytes", "i8"),
        ("cgroup_periods", "i4"),  # of the CPU quota
        ("cgroup_throttled", "i4"),  # periods in which the quota ran out
        ("cgroup_throttled_s", "f4"),
        ("memory_pressure", "f4"),  # PSI "some", share of the interval
        ("io_pressure", "f4"),
        ("cpu_hz", "f8"),  # mean clock of the run's CPUs
    ]
)

#: A GPU at a sample, by NVML. ``clock_reasons`` are NVML's bits (nvmlClocksEventReasons).
GPUS: Final = np.dtype(
    [
        ("time_s", "f8"),
        ("gpu", "i2"),  # index in RunHeader.gpus
        ("utilization", "f4"),  # 0 to 1: time in which at least one kernel ran
        ("memory_utilization", "f4"),
        ("used_bytes", "i8"),  # all processes
        ("ours_bytes", "i8"),  # the run's processes
        ("others_bytes", "i8"),
        ("sm_hz", "f8"),
        ("max_sm_hz", "f8"),
        ("memory_hz", "f8"),
        ("clock_reasons", "i8"),
        ("temperature_c", "f4"),
        ("power_w", "f4"),
        ("power_limit_w", "f4"),
        ("pcie_to_gpu_bytes_per_s", "f8"),
        ("pcie_from_gpu_bytes_per_s", "f8"),
        ("sm_active", "f4"),  # GPM, Hopper and newer
        ("tensor_active", "f4"),
        ("dram_active", "f4"),
    ]
)

#: A process of the run at a sample. ``role`` 0: the training process, 1: a DataLoader worker,
#: 2: another child.
PROCESSES: Final = np.dtype(
    [
        ("time_s", "f8"),
        ("pid", "i4"),
        ("rank", "i2"),
        ("role", "i2"),
        ("worker", "i2"),  # the DataLoader's number of it
        ("cpu_cores", "f4"),  # CPU seconds a second
        ("hottest_thread", "f4"),  # CPU seconds a second of its busiest thread
        ("threads", "i4"),
        ("voluntary_switches", "f4"),  # a second
        ("involuntary_switches", "f4"),
        ("rss_bytes", "i8"),
        ("read_bytes", "i8"),  # in the interval, from storage
        ("waits_for_io", "f4"),  # share of the interval in state D
    ]
)

#: Memory of a process of the run by kind, once a second (``Rss*`` of /proc/PID/status).
#: ``private_bytes`` (USS: pages that no other process has) is read of some workers only, and
#: rarely: the kernel looks at each page for it.
MEMORY: Final = np.dtype(
    [
        ("time_s", "f8"),
        ("pid", "i4"),
        ("rank", "i2"),
        ("role", "i2"),
        ("worker", "i2"),
        ("anonymous_bytes", "i8"),  # heaps: tensors, Python objects
        ("file_bytes", "i8"),  # libraries, memory-mapped files
        ("shared_bytes", "i8"),  # /dev/shm: batches of workers
        ("private_bytes", "i8"),
    ]
)

#: How long threads of a process of the run were ready to run and had no core, in seconds a second:
#: its first thread, and all of them together. Twice a second, of the processes whose threads were
#: read; ``cpu_cores`` as in PROCESSES.
CORE_WAITS: Final = np.dtype(
    [
        ("time_s", "f8"),
        ("pid", "i4"),
        ("rank", "i2"),
        ("role", "i2"),
        ("worker", "i2"),
        ("cpu_cores", "f4"),
        ("main_thread", "f4"),
        ("threads", "f4"),
    ]
)

#: /dev/shm and the folder of temporary files, every few seconds. ``new_bytes`` are of files there
#: that the user's processes have made since the run began; -1: they were not counted.
FOLDERS: Final = np.dtype(
    [
        ("time_s", "f8"),
        ("folder", "i2"),  # SHARED_MEMORY or TEMPORARY
        ("used_bytes", "i8"),
        ("free_bytes", "i8"),
        ("new_bytes", "i8"),
        ("new_files", "i8"),
    ]
)
SHARED_MEMORY: Final = 0
TEMPORARY: Final = 1

#: A batch that a worker made. ``fetch_s`` is all of it; ``read_s``, ``decode_s``, ``transform_s``
#: and ``collate_s`` are its parts as far as they were told apart.
FETCHES: Final = np.dtype(
    [
        ("end_s", "f8"),
        ("worker", "i2"),
        ("pid", "i4"),
        ("fetch_s", "f4"),
        ("cpu_s", "f4"),  # of the worker's process: above fetch_s, several threads work
        ("read_s", "f4"),
        ("decode_s", "f4"),
        ("transform_s", "f4"),
        ("collate_s", "f4"),
        ("samples", "i4"),
        ("bytes", "i8"),
    ]
)

BY_NAME: Final = {
    "steps": STEPS,
    "machine": MACHINE,
    "gpus": GPUS,
    "processes": PROCESSES,
    "memory": MEMORY,
    "folders": FOLDERS,
    "core_waits": CORE_WAITS,
    "fetches": FETCHES,
}

#: Names of the sampler's.
SAMPLED: Final = ("machine", "gpus", "processes", "memory", "folders", "core_waits")

#: The largest numbers of 2 and of 4 bytes; ``struct`` refuses larger ones.
MOST_16: Final = int(np.iinfo("i2").max)
MOST_32: Final = int(np.iinfo("i4").max)
_MOST_FLOAT32: Final = 3.4e38


def float32(value: float) -> float:
    """``value`` as a 4-byte float can hold it: beyond, infinite (``struct`` would refuse it)."""
    return math.copysign(math.inf, value) if abs(value) > _MOST_FLOAT32 else value


def loss_flag(loss: float) -> int:
    """The flag of a loss that was looked at: what it was."""
    return LOSS_FINITE if math.isfinite(loss) else LOSS_NOT_FINITE


def empty_rows(kind: np.dtype[Any], count: int = 1) -> Table:
    """``count`` rows in which nothing is measured: NaN, -1, and no flags."""
    return np.repeat(_empty_row(kind), count)


@functools.lru_cache
def _empty_row(kind: np.dtype[Any]) -> Table:
    row = np.zeros(1, kind)
    for name in kind.names or ():
        if kind[name].kind == "f":
            row[name] = np.nan
        elif kind[name].kind == "i":
            row[name] = -1
    return row


def read_table(path: Path, kind: np.dtype[Any]) -> Table:
    """The whole rows of a file; none where there is no such file. Raises ``OSError``."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return np.zeros(0, kind)
    return np.frombuffer(data, kind, count=len(data) // kind.itemsize)


# ---
# Appends whole rows to a table's file; a disk that is full costs rows, nothing else.


#: Bytes of one write at most.
_MOST_BYTES: Final = 1 << 16
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC

Write = Callable[[int, "memoryview | bytes"], int]


class RowFile:
    """A file of rows of ``size`` bytes that one process appends to. It is opened by :meth:`open`,
    or by the first rows; nothing else raises."""

    def __init__(self, path: Path, size: int, write: Write | None = None) -> None:
        self._path, self._size, self._write = path, size, write
        self._descriptor = -1

    def open(self) -> None:
        """Raises ``OSError`` where it cannot be written to."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, _FLAGS, 0o644)
            self._cut()

    def lock(self) -> bool:
        """Keep other processes that ask from it; ``False``: one has it already. It must be open."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems know no locks.
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        return True

    def append(self, rows: memoryview | bytes) -> int:
        """Write whole rows; returns how many could not be."""
        data, done, write = memoryview(rows), 0, self._write or os.write
        try:
            self.open()
            while done < len(data):
                done += write(self._descriptor, data[done : done + _MOST_BYTES])
        except OSError:
            self._cut()
        return (len(data) - done + self._size - 1) // self._size

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _cut(self) -> None:
        """Take half a row at the file's end away: the next one must begin where a row does."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._descriptor).st_size
            if size % self._size:
                os.ftruncate(self._descriptor, size - size % self._size)
