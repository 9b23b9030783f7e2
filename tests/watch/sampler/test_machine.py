"""The machine's counters, of this machine and of files below an injected root."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from trainfit.results.runs.tables import Table
from trainfit.watch.sampler.machine import MachineCounters

TICK = os.sysconf("SC_CLK_TCK")
CPUS = "sys/devices/system/cpu"
MOUNTINFO = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def counters(root: Path, step: int, quota: str = "200000 100000") -> None:
    """Counters after so many steps of a second."""
    write(root, "proc/stat", f"cpu {step * 3 * TICK} 0 {step * TICK} 9 {step * TICK // 2} 0 0 0\n")
    write(root, "proc/loadavg", "1.0 1.0 1.0 7/300 4000\n")
    write(root, "proc/meminfo", "MemTotal: 64000 kB\nMemFree: 1 kB\nMemAvailable: 48000 kB\n")
    write(root, "proc/vmstat", f"nr_free 5\npswpin {step * 2}\npswpout {step * 3}\n")
    write(root, "proc/diskstats", f"8 0 sda 1 0 {step * 10} 1 1 0 {step * 20} 1 0 1 1\n")
    write(root, "proc/net/dev", f"  eth0: {step * 500} 1 0 0 0 0 0 0 {step * 700} 1 0 0 0 0 0 0\n")
    for name in ("memory", "io"):
        write(root, f"proc/pressure/{name}", f"some avg10=0 total={step * 250_000}\n")
    write(root, "proc/77/cgroup", "0::/run\n")
    write(root, "proc/self/mountinfo", MOUNTINFO)
    own = "sys/fs/cgroup/run"
    write(root, f"{own}/cpu.max", quota)
    stat = f"nr_periods {step * 10}\nnr_throttled {step * 4}\nthrottled_usec {step * 300_000}\n"
    write(root, f"{own}/cpu.stat", stat)
    write(root, f"{own}/memory.max", str(20 << 20))
    write(root, f"{own}/memory.current", str(16 << 20))
    write(root, f"{own}/memory.stat", f"inactive_file {1 << 20}\n")
    write(root, f"{own}/io.pressure", f"some avg10=0 total={step * 900_000}\n")
    for cpu in (0, 1, 2):
        write(root, f"{CPUS}/cpu{cpu}/cpufreq/scaling_cur_freq", f"{2_000_000 + cpu * 500_000}\n")
    (root / "sys/block/sda").mkdir(parents=True, exist_ok=True)
    (root / "sys/block/loop0").mkdir(parents=True, exist_ok=True)
    (root / "sys/class/net/eth0/device").mkdir(parents=True, exist_ok=True)
    (root / "sys/class/net/docker0").mkdir(parents=True, exist_ok=True)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)


def second(root: Path, cpus: tuple[int, ...] = (0, 2)) -> Table:
    """Of two samples two seconds apart, in which three steps were made."""
    counters(root, 1)
    machine = MachineCounters(77, root)
    first = machine.sample(100.0, 1.5, cpus)
    assert np.isnan(first["interval_s"][0])
    assert np.isnan(first["cores_busy"][0])
    assert first["disk_read_bytes"][0] == -1
    counters(root, 4)
    return machine.sample(102.0, 1.5, cpus)[0]


def test_every_column_of_a_machine(tmp_path: Path) -> None:
    row = second(tmp_path)
    assert row["interval_s"] == 2.0
    assert row["cores_busy"] == pytest.approx(3 * 4 / 2)
    assert row["cores_ours"] == 1.5
    assert row["iowait_cores"] == pytest.approx(3 * 0.5 / 2)
    assert row["runnable"] == 6  # without the sampler itself
    page = os.sysconf("SC_PAGE_SIZE")
    assert (row["swap_in_bytes"], row["swap_out_bytes"]) == (6 * page, 9 * page)
    assert (row["disk_read_bytes"], row["disk_written_bytes"]) == (30 * 512, 60 * 512)
    assert (row["net_received_bytes"], row["net_sent_bytes"]) == (1500, 2100)
    assert (row["cgroup_periods"], row["cgroup_throttled"]) == (30, 12)
    assert row["cgroup_throttled_s"] == pytest.approx(0.9)
    # The machine's memory, and the cgroup's input and output.
    assert row["memory_pressure"] == pytest.approx(3 * 0.25 / 2)
    assert row["io_pressure"] == pytest.approx(3 * 0.9 / 2)
    assert row["shm_used_bytes"] >= 0
    assert row["shm_free_bytes"] >= 0


def test_memory_is_what_the_cgroup_leaves_of_it(tmp_path: Path) -> None:
    row = second(tmp_path)
    assert row["ram_used_bytes"] == 15 << 20
    assert row["ram_available_bytes"] == 5 << 20
    write(tmp_path, "sys/fs/cgroup/run/memory.max", "max")
    row = MachineCounters(77, tmp_path).sample(100.0, 0.0, ())[0]
    assert row["ram_used_bytes"] == 16000 * 1024
    assert row["ram_available_bytes"] == 48000 * 1024


def test_the_clock_is_that_of_the_cpus_that_the_run_is_on(tmp_path: Path) -> None:
    counters(tmp_path, 1)
    machine = MachineCounters(77, tmp_path)
    assert machine.sample(100.0, 0.0, (0, 2))["cpu_hz"][0] == 2.5e9
    assert np.isnan(machine.sample(100.1, 0.0, (0, 2), slow=False)["cpu_hz"][0])
    assert machine.sample(101.1, 0.0, (1,))["cpu_hz"][0] == 2.5e9
    assert np.isnan(machine.sample(103.0, 0.0, (9,))["cpu_hz"][0])


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    machine = MachineCounters(77, tmp_path)
    machine.sample(100.0, float("nan"), ())
    row = machine.sample(101.0, float("nan"), ())[0]
    for name in row.dtype.names:
        if name in ("time_s", "interval_s"):
            continue
        value = row[name]
        assert np.isnan(value) if row.dtype[name].kind == "f" else value == -1, name


def test_a_counter_that_begins_again_is_not_measured(tmp_path: Path) -> None:
    counters(tmp_path, 9)
    machine = MachineCounters(77, tmp_path)
    machine.sample(100.0, 0.0, ())
    counters(tmp_path, 2)
    row = machine.sample(101.0, 0.0, ())[0]
    assert row["net_sent_bytes"] == -1
    assert np.isnan(row["cores_busy"])


def test_this_machine_is_busy_while_this_process_is() -> None:
    machine = MachineCounters(os.getpid())
    machine.sample(time.monotonic(), 0.0, ())
    spent = time.process_time()
    while time.process_time() - spent < 0.3:
        pass
    row = machine.sample(time.monotonic(), 0.0, ())[0]
    assert row["cores_busy"] * row["interval_s"] > 0.15
    assert row["runnable"] >= 0
    assert row["ram_used_bytes"] > 0
    assert row["ram_available_bytes"] > 0
    assert row["disk_read_bytes"] >= -1
