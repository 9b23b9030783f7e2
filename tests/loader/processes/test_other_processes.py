"""What others take of the cores, by counters; what a probe makes again for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers_loader import machine
from trainfit.hardware.machine.core_speed import CoreSpeed, CoreSpeeds
from trainfit.hardware.machine.system import System
from trainfit.loader import probe as probing
from trainfit.loader.measure import loop as others
from trainfit.loader.measure.loop import OtherProcesses, OtherProcessLoad, stays_busy
from trainfit.loader.measure.probe_runs import Readings
from trainfit.loader.measure.records import Run
from trainfit.results.dataloader import LoaderSettings


class Counters:
    """A machine whose counters a test sets: all cores, this process, and its worker."""

    def __init__(self) -> None:
        self.now = self.everyone = self.main = self.worker = 0.0
        self.ended = 0.0
        self.cpus = {0, 1}

    def process(self, pid: int | None = None) -> SimpleNamespace:
        worker = SimpleNamespace(cpu_times=lambda: self._times(self.worker, 0.0))
        return SimpleNamespace(
            cpu_times=lambda: self._times(self.main, self.ended),
            children=lambda recursive: [worker],
        )

    def _times(self, own: float, ended: float) -> SimpleNamespace:
        return SimpleNamespace(user=own, system=0.0, children_user=ended, children_system=0.0)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    made = Counters()
    monkeypatch.setattr(others, "busy_seconds", lambda cpus: made.everyone)
    monkeypatch.setattr(others.os, "sched_getaffinity", lambda pid: made.cpus, raising=False)
    monkeypatch.setattr(others.psutil, "Process", made.process)
    monkeypatch.setattr(others.time, "monotonic", lambda: made.now)
    return made


def test_what_is_not_ours_is_others(counters: Counters) -> None:
    work = OtherProcessLoad()
    counters.now, counters.everyone = 2.0, 4.0
    counters.main, counters.worker, counters.ended = 0.5, 1.0, 0.5
    assert work.cores() == pytest.approx(1.0)
    counters.everyone = 3.0  # half a core of others, and half a core idles
    assert work.cores() == 0.0
    counters.everyone = 1.9  # ticks: a little less than our own clocks say
    assert work.cores() == 0.0


def test_on_many_cores_others_are_in_nobodys_way(counters: Counters) -> None:
    counters.cpus = set(range(64))
    work = OtherProcessLoad()
    counters.now, counters.everyone, counters.main = 1.0, 34.0, 4.0
    assert work.cores() == 0.0
    counters.everyone = 63.0
    assert work.cores() == pytest.approx(58.0)


@pytest.mark.parametrize("version", [1, 2])
def test_who_shares_a_containers_quota_is_in_the_way(
    counters: Counters, tmp_path: Path, version: int
) -> None:
    """1.5 cores of 64, of which one is another's: cores idle, but the quota does not."""
    proc, group = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup"
    proc.mkdir(parents=True)
    group.mkdir(parents=True)
    kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,cpu,cpuacct")
    (proc / "cgroup").write_text("0::/\n" if version == 2 else "5:cpu,cpuacct:/\n")
    (proc / "mountinfo").write_text(f"33 25 0:28 / /sys/fs/cgroup rw - {kind} none {options}\n")
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "cpu.cfs_quota_us").write_text("150000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")

    def used(seconds: float) -> None:
        (group / "cpu.stat").write_text(f"usage_usec {seconds * 1e6:.0f}\nuser_usec 1\n")
        (group / "cpuacct.usage").write_text(f"{seconds * 1e9:.0f}\n")

    counters.cpus = set(range(64))
    used(10.0)
    work = OtherProcessLoad(system=System(tmp_path))
    counters.now, counters.everyone, counters.main = 2.0, 3.0, 1.0
    used(13.0)
    assert work.cores() == pytest.approx(1.0)
    used(12.0)  # half a core of others, and half a core of the quota idles
    assert work.cores() == 0.0
    (group / "cpu.stat").write_text("garbage\n")
    (group / "cpuacct.usage").write_text("garbage\n")
    assert work.cores() == 0.0


def test_counters_that_cannot_be_read_say_nothing(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> SimpleNamespace:
        raise others.psutil.NoSuchProcess(1)

    work = OtherProcessLoad()
    assert work.cores() is None  # no time has passed
    counters.cpus = set()
    elsewhere = OtherProcessLoad()
    counters.now = 1.0
    assert elsewhere.cores() is None
    monkeypatch.setattr(others.psutil, "Process", fails)
    assert work.cores() is None


def run_of(name: str, speed: float, cores: float = 0.0) -> Run:
    settings = LoaderSettings({"one": 1, "two": 2}[name])
    return Run(settings, 0.0, core_speed=CoreSpeed(speed, 1.0), others_cores=cores)


@pytest.mark.parametrize(
    ("one", "two", "again"),
    [
        ((0.95, 0.0), (0.90, 0.0), None),
        ((0.70, 0.0), (0.66, 0.0), None),  # slow alike: more of the same says nothing new
        ((0.95, 0.0), (0.70, 0.0), "two"),
        ((0.95, 1.0), (0.95, 0.0), "one"),
        ((0.95, 1.0), (0.95, 0.8), "one"),
    ],
)
def test_what_was_disturbed_is_run_again(
    one: tuple[float, float],
    two: tuple[float, float],
    again: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Readings, "with_speeds", lambda self, watch: self)
    readings = Readings(machine(), {"one": [run_of("one", *one)], "two": [run_of("two", *two)]})
    watch = CoreSpeeds()
    assert probing._disturbed(readings, ("one", "two"), set(), watch) == again
    assert probing._disturbed(readings, ("one", "two"), {"one", "two"}, watch) is None
    readings.runs["one"] *= 4
    readings.runs["two"] *= 4
    assert probing._disturbed(readings, ("one", "two"), set(), watch) is None  # often enough


# --- When it is given up ------------------------------------------------------------------------


def test_three_in_a_row_say_that_others_stay() -> None:
    assert stays_busy([1.0, 0.5, 2.0]) and stays_busy([0.0, 1.0, 0.5, 2.0])
    assert not stays_busy([1.0, 1.0]) and not stays_busy([1.0, 1.0, None])
    assert not stays_busy([1.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("cores", "made"),
    [
        (1.0, ["one", "two", "over", "alone"]),  # what the least prediction needs
        (0.0, ["one", "two", "over", "turn", "pinned", "tight", "paced", "alone", "alone_pinned"]),
    ],
)
def test_a_probe_of_a_busy_machine_ends(
    cores: float, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Readings, "with_speeds", lambda self, watch: self)
    readings, ran = Readings(machine()), []
    began = probing.time.monotonic()
    for name in probing._series(readings, began - 100.0, 50.0, CoreSpeeds()):
        ran.append(name)
        run = Run(LoaderSettings(1), 0.0, began=float(len(ran)), others_cores=cores)
        readings.runs.setdefault(name, []).append(run)
    assert ran == made
    assert readings.stays_busy is (cores > 0)


def test_who_is_busy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, without what is ours; what began meanwhile counts from its beginning."""
    worked = {(1, 0.0): ("init", 5.0), (7, 1.0): ("python", 40.0), (8, 1.0): ("ours", 1.0)}
    monkeypatch.setattr(others, "_worked_by_process", lambda: dict(worked))
    monkeypatch.setattr(others.time, "monotonic", lambda: now[0])
    ours = SimpleNamespace(pid=8, children=lambda recursive: [])
    monkeypatch.setattr(others.psutil, "Process", lambda: ours)
    now = [100.0]
    seen = OtherProcesses()
    now[0] = 110.0
    worked |= {(7, 1.0): ("python", 48.0), (8, 1.0): ("ours", 11.0), (9, 105.0): ("python", 2.0)}
    worked |= {(10, 105.0): ("pip", 3.0), (1, 0.0): ("init", 5.1)}
    assert seen.busiest() == pytest.approx({"python": 1.0, "pip": 0.3})
