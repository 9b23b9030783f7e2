"""The sampler's loop: samples at their times, written now and then, until the run has ended."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainfit.results.runs.tables import BY_NAME, SAMPLED, RowFile, Table, Write
from trainfit.results.runs.watched import Event, gpu_places
from trainfit.watch.sampler import machine
from trainfit.watch.sampler.machine import (
    Folders,
    GpuCounters,
    MachineCounters,
    load_nvml,
    nvml_knows_our_pids,
    temporary_folder,
)
from trainfit.watch.sampler.proc_files import is_mapped_by_others
from trainfit.watch.sampler.processes import MOST_PROCESSES, MemoryByKind, ProcessTree
from trainfit.watch.sampler.roles import Role, RunFolder

# ---
# Tables that are appended to while they are sampled; a full disk costs rows, nothing else.


#: Bytes of rows that wait for a table at most, until the run's beginning is known: an hour of
#: hundreds of processes would otherwise fill the memory.
_MOST_WAITING: Final = 16 << 20


class TableFile:
    """A table of the run's folder. Its rows have seconds of ``time.monotonic()`` in ``time_s``
    until they are written.

    Threads may add rows while another writes. Nothing raises but the constructor (``OSError``).
    """

    def __init__(
        self,
        path: Path,
        kind: np.dtype[Any],
        write: Write | None = None,
    ) -> None:
        self._file = RowFile(path, kind.itemsize, write)
        self._file.open()
        self._lock = threading.Lock()
        self._waiting: list[Table] = []
        self._bytes = 0
        self.lost = 0
        """Rows that could not be written, or that waited for too long."""

    def lock(self) -> bool:
        """Keep other samplers of this run from it; ``False``: there is one already."""
        return self._file.lock()

    def add(self, rows: Table) -> None:
        """Have them written by the next :meth:`flush`."""
        if not len(rows):
            return
        with self._lock:
            self._waiting.append(rows)
            self._bytes += rows.nbytes
            while self._bytes > _MOST_WAITING:
                oldest = self._waiting.pop(0)
                self._bytes -= oldest.nbytes
                self.lost += len(oldest)

    def flush(self, began: float, change: Callable[[Table], None] | None = None) -> None:
        """Write what waits, with times since ``began``; ``change`` may correct the rows first."""
        with self._lock:
            waiting, self._waiting, self._bytes = self._waiting, [], 0
        if not waiting:
            return
        rows = np.concatenate(waiting)
        rows["time_s"] -= began
        if change is not None:
            change(rows)
        self.lost += self._file.append(rows.tobytes())

    def close(self) -> None:
        self._file.close()


#: Seconds between samples, at least and at most, and of the time since the run began or a process
#: of it came or went: what has just begun shows its short events, and what goes on as it did costs
#: the training less. Each wake finds its code and data out of the caches: 0.5 to 1 ms.
FAST_S: Final = 0.1
SLOW_S: Final = 2.0
_OF_AGE: Final = 0.05
#: Seconds between readings of what costs more, each process and memory; of these, one in so many
#: reads what is dear or changes slowly, too: memory by kind, disks, network, context switches.
WHOLE_S: Final = 0.5
_SLOW_TIMES: Final = 2
#: Share of the machine's cores that sampling may take; where there is more to read, samples are
#: rarer, the dear ones first.
_MOST_CPU: Final = 0.0005
#: CPU seconds above that share that a run may take in all before samples get rarer: a short run is
#: sampled at full rate, and in a long one they do not count.
_CREDIT_S: Final = 0.1
#: Seconds over which the own CPU time is measured, and how much rarer samples may get.
_MEASURE_S: Final = 2.0
_RAREST: Final = 20.0
#: By how many times the dear readings are rarer before the others become rarer, too.
_DEAR_FIRST: Final = 4.0
#: Seconds between looks into the folder, and between writes.
_LOOK_EVERY_S: Final = 2.0
_WRITE_EVERY_S: Final = 2.0
#: Seconds that a thread may take to end: a driver or a file system that hangs is left alone.
_PATIENCE_S: Final = 1.0
#: Samples for each look at what fills folders.
_FOLDERS_PERIODS: Final = 4.0
_NONE: Final[Mapping[str, float]] = {}
#: Signals that ask for the end.
_STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Sampler:
    """Samples one run into its folder.

    Args:
        folder: the run's, which exists.
        pid: the process that is watched, with all below it.
        started_ticks: when it was started, as /proc/PID/stat says; ``None``: not checked.
        parent: the process whose end also ends the sampler; ``None``: none.
        nvml: gives the module `pynvml` or what stands in for it.

    Raises ``OSError`` where the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        pid: int,
        started_ticks: int | None = None,
        parent: int | None = None,
        nvml: Callable[[], Any] = load_nvml,
    ) -> None:
        self._began, self._started_cpu_s = time.monotonic(), time.process_time()
        self._parent, self._load_nvml = parent, nvml
        self._tree = ProcessTree(pid, started_ticks)
        self._folder = RunFolder(folder, self._tree.started_s or 0.0)
        self._tables = {name: TableFile(folder / f"{name}.bin", BY_NAME[name]) for name in SAMPLED}
        self._machine: MachineCounters | None = None
        self._memory = MemoryByKind()
        self._pid = pid
        self._gpus: GpuCounters | None = None
        self._stop = threading.Event()
        self._period = self._gpu_period = FAST_S
        self._whole_s, self._stretch = WHOLE_S, 1.0
        self._whole_at = self._slow_at = self._measured_at = float("-inf")
        self._measured_cpu_s, self._measured_samples = 0.0, 0
        self._credit_s = _CREDIT_S
        self._most_cpu = _MOST_CPU * (os.cpu_count() or 1)
        self._roles: dict[int, Role] = {}
        self._looked_at = self._wrote_at = float("-inf")
        self._told: set[str] = set()
        self._unwritten: list[Event] = []
        self._samples = 0
        self._cores = math.nan

    def run(self) -> bool:
        """Sample until the end; ``False``: another sampler does that already."""
        if not self._tables["machine"].lock():
            return False
        # Waiting for a sample is waiting for these.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("gpus", self._sample_gpus), ("folders", self._sample_folders))
        ]
        for thread in threads:
            thread.start()
        due = time.monotonic()
        while True:
            self._sample(time.monotonic())
            if self._has_ended():
                break
            due = max(due + self._period, time.monotonic())
            if _asked_to_end(due - time.monotonic()):
                break
        self._stop.set()
        for thread in threads:
            thread.join(_PATIENCE_S)
        self._finish()
        return True

    def _has_ended(self) -> bool:
        """Has the run ended, or who started this process, or the folder?"""
        if self._parent is not None and os.getppid() != self._parent:
            return True
        return not self._tree.is_alive or self._folder.is_gone

    # --- One sample -------------------------------------------------------------------------------
    def _sample(self, now: float) -> None:
        # Those that come at their time, and are not late by a little.
        whole = now - self._whole_at >= self._whole_s - FAST_S / 2
        slow = whole and now - self._slow_at >= _SLOW_TIMES * self._whole_s - FAST_S / 2
        if slow:
            self._slow_at = now
        if whole:
            self._whole_at = now
            self._guarded("processes", self._sample_processes, now, slow)
        self._guarded("the machine", self._sample_machine, now, whole, slow)
        if now - self._looked_at >= _LOOK_EVERY_S or self._tree.has_new:
            self._looked_at = now
            self._guarded("the run's folder", self._look)
        if now - self._wrote_at >= _WRITE_EVERY_S:
            self._wrote_at = now
            self._write()
        self._samples += 1
        self._set_periods(now)

    def _sample_processes(self, now: float, slow: bool) -> None:
        rows, self._cores = self._tree.sample(now, slow)
        self._tables["processes"].add(rows)
        self._tables["core_waits"].add(self._tree.core_waits)
        if self._tree.left_out:
            text = f"of more than {MOST_PROCESSES} processes, the other ones are not sampled"
            self._tell("not_sampled", text, {"left_out": self._tree.left_out}, once=True)
        if slow:
            self._tables["memory"].add(self._memory.sample(now, self._tree.roles))

    def _sample_machine(self, now: float, whole: bool, slow: bool) -> None:
        if self._machine is None:
            self._machine = MachineCounters(self._pid)
        cores, cpus = self._tree.cores(now), self._tree.cpus() if whole else ()
        if whole and math.isnan(cores):
            cores = self._cores
        self._tables["machine"].add(self._machine.sample(now, cores, cpus, whole, slow))

    def _look(self) -> None:
        self._folder.look()
        self._roles |= self._tree.assign(self._folder.ranks, self._folder.workers)

    def _set_periods(self, now: float) -> None:
        self._set_stretch(now)
        unchanged_s = now - max(self._began, self._tree.changed_at)
        self._gpu_period = FAST_S * max(1.0, self._stretch / _DEAR_FIRST)
        self._period = max(self._gpu_period, min(SLOW_S, _OF_AGE * unchanged_s))
        self._whole_s = max(self._period, WHOLE_S * self._stretch)

    def _set_stretch(self, now: float) -> None:
        if now - self._measured_at < _MEASURE_S:
            return
        # Counting private pages has a limit of its own.
        cpu_s = time.process_time() - self._memory.counting_s
        # Not the time in which this process was stopped, or asleep with the machine.
        seconds = (self._samples - self._measured_samples) * self._period
        seconds, spent = min(now - self._measured_at, seconds), cpu_s - self._measured_cpu_s
        self._measured_samples = self._samples
        first, self._measured_at, self._measured_cpu_s = self._samples < 2, now, cpu_s
        if first:  # it has read what there is, and imported: that comes once
            return
        self._credit_s -= max(0.0, spent - self._most_cpu * seconds)
        # Half of the way, so that one dear look into the folder does not count for long.
        target = self._stretch * spent / seconds / self._most_cpu if self._credit_s <= 0 else 1.0
        self._stretch = min(_RAREST, max(1.0, (self._stretch + target) / 2))
        if self._stretch > _DEAR_FIRST:
            text = "there is so much to read that samples are taken less often"
            self._tell("not_sampled", text, {"period_s": self._period}, once=True)

    # --- What may hang, in threads of their own: a driver, a file system on the network -----------
    def _sample_folders(self) -> None:
        environment = _decoded(self._tree.environment())
        found = Folders(
            temporary_folder(environment),
            self._tell,
            written=self._tree.written,
            is_mapped_elsewhere=lambda file: is_mapped_by_others(file, self._tree.pids),
        )
        due = 0.0
        while not self._stop.wait(due):
            self._guarded("folders", self._sample_folders_once, found)
            due = max(machine.EVERY_S, _FOLDERS_PERIODS * self._period)

    def _sample_folders_once(self, found: Folders) -> None:
        self._tables["folders"].add(found.sample(time.monotonic()))

    def _sample_gpus(self) -> None:
        try:
            module = self._load_nvml()
            gpus = GpuCounters(module, self._tell, nvml_knows_our_pids())
            gpus.choose(_decoded(self._tree.environment()).get("CUDA_VISIBLE_DEVICES"))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:200]
            self._tell("not_sampled", f"no GPU is sampled ({reason})")
            return
        self._gpus, due = gpus, time.monotonic()
        while not self._stop.is_set() and gpus.devices:
            self._guarded("GPUs", self._sample_gpus_once, gpus)
            due = max(due + self._gpu_period, time.monotonic())
            self._stop.wait(max(0.0, due - time.monotonic()))
        gpus.close()

    def _sample_gpus_once(self, gpus: GpuCounters) -> None:
        self._tables["gpus"].add(gpus.sample(time.monotonic(), self._tree.pids))

    # --- Writing ----------------------------------------------------------------------------------
    def _write(self) -> None:
        began = self._folder.began
        if began is None:
            return
        self._tables["machine"].flush(began)
        for name in ("processes", "core_waits", "memory"):
            self._tables[name].flush(began, self._put_roles)
        self._tables["folders"].flush(began)
        self._roles = {pid: role for pid, role in self._roles.items() if pid in self._tree.pids}
        if self._gpus is not None:
            places = gpu_places(self._folder.headers)
            self._tables["gpus"].flush(began, self._gpus.renumber(tuple(places)))
        while self._unwritten:
            event = self._unwritten.pop(0)
            self._folder.write_event(_since(event, began))

    def _put_roles(self, rows: Table) -> None:
        """What the processes have turned out to be since they were sampled."""
        for pid in np.unique(rows["pid"]):
            role = self._roles.get(int(pid))
            if role is not None:
                mine = rows["pid"] == pid
                rows["role"][mine] = role.kind
                rows["rank"][mine] = role.rank
                rows["worker"][mine] = role.worker

    def _tell(
        self, kind: str, text: str, values: Mapping[str, float] = _NONE, once: bool = False
    ) -> None:
        if once and text in self._told:
            return
        self._told.add(text)
        self._unwritten.append(Event(time.monotonic(), kind, text=text, values=values))

    def _guarded(self, what: str, call: Callable[..., None], *words: Any) -> None:
        """One thing that cannot be sampled does not keep the others from it."""
        try:
            call(*words)
        except Exception as error:
            text = f"{what} cannot be sampled ({type(error).__name__}: {error})"[:300]
            self._tell("not_sampled", text, once=True)

    def _finish(self) -> None:
        now = time.monotonic()
        cpu_s = time.process_time() - self._started_cpu_s
        self._guarded("the run's folder", self._look)
        values = {
            "samples": float(self._samples),
            "seconds": now - self._began,
            "start_cpu_s": self._started_cpu_s,
            "cpu_s": cpu_s,
            "share_of_cores": cpu_s / max(1e-9, now - self._began) / (os.cpu_count() or 1),
            "lost_rows": float(sum(table.lost for table in self._tables.values())),
        }
        self._tell("sampler_ended", "", values)
        with contextlib.suppress(Exception):
            self._write()
        for table in self._tables.values():
            table.close()


def _asked_to_end(seconds: float) -> bool:
    """Waits so long for a signal that asks for the end. Where the process was stopped and goes on
    meanwhile (SIGSTOP, SIGCONT), Python returns something that is none of these signals."""
    found = signal.sigtimedwait(_STOPS, max(0.0, seconds))
    return found is not None and found.si_signo in _STOPS


def _decoded(environment: bytes) -> dict[str, str]:
    """The variables of /proc/PID/environ."""
    entries = (entry.partition(b"=") for entry in environment.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in entries if equals}


def _since(event: Event, began: float) -> Event:
    return Event(event.time_s - began, event.kind, text=event.text, values=event.values)
