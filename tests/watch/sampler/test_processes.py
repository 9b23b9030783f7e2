"""The processes of a run, by real children of this one."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_watch import ENDS_WITH_US
from trainfit.results.runs.tables import Table
from trainfit.watch.sampler import processes
from trainfit.watch.sampler.proc_files import KeptFiles, process_stat
from trainfit.watch.sampler.processes import ProcessTree
from trainfit.watch.sampler.roles import MAIN, OTHER, WORKER, Known, Role, Worker, roles
from trainfit.watch.sampler.threads import Threads

#: Prints a line when it is at work, and goes on until it is killed.
BUSY = "print(flush=True)\nwhile True: pass"
ASLEEP = "import time; print(flush=True); time.sleep(600)"
THREADS = """
import threading, time
for _ in range(6):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def work():
    while True: pass
threading.Thread(target=work, daemon=True).start()
print(flush=True)
time.sleep(600)
"""
FAMILY = """
import multiprocessing, subprocess, sys, time
if __name__ == "__main__":
    context = multiprocessing.get_context("METHOD")
    workers = [context.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2)]
    for worker in workers: worker.start()
    other = subprocess.Popen(["sleep", "600"])
    time.sleep(0.2)
    print(*[worker.pid for worker in workers], other.pid, flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def child(program: str, **environment: str) -> Iterator[tuple[int, list[int]]]:
    """A child in a process group of its own, and the numbers that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS_WITH_US + program],
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process.pid, [int(word) for word in process.stdout.readline().split()]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def sampled(tree: ProcessTree, seconds: float = 0.4) -> tuple[Table, float]:
    """The second of two samples."""
    tree.sample(time.monotonic())
    time.sleep(seconds)
    return tree.sample(time.monotonic())


def test_a_busy_process_and_a_sleeping_one() -> None:
    with child(BUSY) as (busy, _), child(ASLEEP) as (asleep, _):
        for pid, low, high in ((busy, 0.02, 1.3), (asleep, 0.0, 0.05)):
            rows, cores = sampled(ProcessTree(pid))
            assert list(rows["pid"]) == [pid]
            assert low <= rows["cpu_cores"][0] <= high
            assert rows["hottest_thread"][0] == rows["cpu_cores"][0]
            assert cores == pytest.approx(rows["cpu_cores"][0], abs=1e-6)
            assert rows["threads"][0] == 1
            assert rows["rss_bytes"][0] > 1 << 20
            assert rows["waits_for_io"][0] in (0.0, 1.0)


def test_the_first_sample_has_no_rates() -> None:
    with child(ASLEEP) as (pid, _):
        rows, cores = ProcessTree(pid).sample(time.monotonic())
        assert np.isnan(rows["cpu_cores"][0])
        assert np.isnan(rows["voluntary_switches"][0])
        assert rows["read_bytes"][0] == -1
        assert math.isnan(cores)


def test_the_busiest_of_many_threads() -> None:
    with child(THREADS) as (pid, _):
        rows, _ = sampled(ProcessTree(pid))
        assert rows["threads"][0] == 8
        assert 0.02 < rows["hottest_thread"][0] <= 1.3
        assert rows["hottest_thread"][0] == pytest.approx(rows["cpu_cores"][0], abs=0.3)


def test_context_switches_are_those_of_all_threads() -> None:
    program = """
import threading, time
def nap():
    while True: time.sleep(0.005)
for _ in range(4): threading.Thread(target=nap, daemon=True).start()
print(flush=True)
time.sleep(600)
"""
    with child(program) as (pid, _):
        rows, _ = sampled(ProcessTree(pid), 1.2)
        # 4 × 200 a second, less where the machine is busy; one thread alone has 200 at most.
        assert 210 < rows["voluntary_switches"][0] < 1500
        assert rows["involuntary_switches"][0] >= 0


def test_reads_from_storage_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 20))
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
    program = f"""
import os, sys, time
file = os.open({str(file)!r}, os.O_RDONLY)
print(flush=True)
time.sleep(0.3)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
os.read(file, 1 << 20)
time.sleep(600)
"""
    with child(program) as (pid, _):
        tree = ProcessTree(pid)
        tree.sample(time.monotonic())
        found = []
        for _ in range(30):
            time.sleep(0.1)
            rows, _ = tree.sample(time.monotonic())
            found.append(int(rows["read_bytes"][0]))
        # A file system in memory (tmpfs) reads nothing from storage.
        assert all(each >= 0 for each in found)
        assert sum(found) in (0, *range(1 << 20, 4 << 20))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_by_how_multiprocessing_starts_them(method: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAMILY.replace("METHOD", method))
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    if method != "fork":  # children import the main module from its file
        program = f"import os, sys; os.execv(sys.executable, [sys.executable, {str(script)!r}])"
    with child(program) as (pid, told):
        tree = ProcessTree(pid)
        tree.sample(time.monotonic())
        tree.assign({0: pid}, {})
        rows, _ = sampled(tree, 0.3)
        found = {int(row["pid"]): (int(row["role"]), int(row["rank"])) for row in rows}
        *workers, other = told
        assert found[pid] == (MAIN, 0)
        assert [found[worker] for worker in workers] == [(WORKER, 0)] * 2
        assert found[other] == (OTHER, 0)
        others = found.keys() - {pid, *told}
        # A resource tracker and a fork server, where there are.
        assert {found[each] for each in others} <= {(OTHER, 0)}


def test_processes_that_begin_and_end_meanwhile() -> None:
    program = """
import subprocess, sys, time
work = "import time\\nwhile time.process_time() < 0.2: pass\\ntime.sleep(600)"
print(flush=True)
time.sleep(0.3)
sub = subprocess.Popen([sys.executable, "-c", work])
time.sleep(1.5)
sub.kill(); sub.wait()
time.sleep(600)
"""
    with child(program) as (pid, _):
        tree = ProcessTree(pid)
        counts, spent, before = [], 0.0, time.monotonic()
        until = before + 4.0
        while time.monotonic() < until:
            now = time.monotonic()
            rows, cores = tree.sample(now)
            counts.append(len(rows))
            spent += 0.0 if math.isnan(cores) else cores * (now - before)
            before = now
            time.sleep(0.1)
        assert counts[0] == 1
        assert max(counts) == 2
        assert counts[-1] == 1
        # From its very beginning: what it did before it was found counts as well.
        assert spent >= 0.2


def test_the_tree_ends_with_its_process_and_its_ranks() -> None:
    with child(ASLEEP) as (pid, _), child(ASLEEP) as (other, _):
        tree = ProcessTree(pid)
        assert tree.is_alive
        os.kill(pid, 9)
        for _ in range(100):
            tree.sample(time.monotonic())
            if not tree.is_alive:
                break
            time.sleep(0.05)
        # It is a zombie still, which nobody has waited for.
        assert os.path.exists(f"/proc/{pid}")
        assert not tree.is_alive
        assert not len(tree.sample(time.monotonic())[0])
        assert os.path.exists(f"/proc/{other}")


def test_another_process_with_the_number_is_not_watched() -> None:
    with child(ASLEEP) as (pid, _):
        stat = process_stat(Path(f"/proc/{pid}/stat").read_bytes())
        assert stat is not None
        assert ProcessTree(pid, stat.started_ticks).is_alive
        assert not ProcessTree(pid, stat.started_ticks - 1).is_alive


def write_process(root: Path, pid: int, parent: int, started: int = 5, state: str = "S") -> None:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True, exist_ok=True)
    fields = [state, parent, *[0] * 9, 7, 3, 0, 0, 20, 0, 1, 0, started, 0, 1000, *[0] * 16]
    (folder / "stat").write_text(f"{pid} (python) {' '.join(map(str, fields))}\n")


def test_a_number_that_is_given_again_is_another_process(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1)
    write_process(tmp_path, 11, 10)
    tree = ProcessTree(10, root=tmp_path, cpu_clock=lambda pid: None)
    assert set(tree.sample(1.0)[0]["pid"]) == {10, 11}
    # 11 has ended; a stranger has its number now, and 12 is a new child of another.
    write_process(tmp_path, 11, 1, started=900)
    write_process(tmp_path, 12, 11, started=901)
    assert set(tree.sample(2.0)[0]["pid"]) == {10}


def test_of_too_many_processes_ranks_and_workers_come_first(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1)
    for pid in range(11, 31):
        write_process(tmp_path, pid, 10)
    tree = ProcessTree(10, root=tmp_path, cpu_clock=lambda pid: None, most=4)
    tree.sample(1.0)
    tree.assign({0: 10}, {28: Worker(0, 1), 29: Worker(0, 0)})
    rows, _ = tree.sample(2.0)
    assert list(rows["pid"]) == [10, 28, 29, 11]
    assert list(rows["worker"]) == [-1, 1, 0, -1]
    assert tree.left_out == 17
    assert tree.pids == frozenset(range(10, 31))


def test_without_a_cpu_clock_ticks_tell(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1)
    tree = ProcessTree(10, root=tmp_path, cpu_clock=lambda pid: None)
    tree.sample(1.0)
    rows, cores = tree.sample(2.0)
    assert rows["cpu_cores"][0] == cores == 0.0
    assert rows["read_bytes"][0] == -1  # there is no such file


def test_threads_are_read_in_turns_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_THREADS_A_SAMPLE", 12)
    with child(THREADS) as (first, _), child(THREADS) as (second, _):
        tree = ProcessTree(os.getpid())
        read = {first: 0, second: 0}
        for _ in range(60):
            rows, _ = tree.sample(time.monotonic())
            for pid in rows["pid"][np.isfinite(rows["hottest_thread"])]:
                read[int(pid)] = read.get(int(pid), 0) + 1
            time.sleep(0.01)
        # Eight threads each: one process a sample, and each of them comes to its turn.
        assert min(read[first], read[second]) >= 3
        assert max(read[first], read[second]) < 50


def test_a_kernel_without_scheduler_statistics_is_read_by_ticks(tmp_path: Path) -> None:
    def write(cpu_ticks: int) -> None:
        folder = tmp_path / "proc/10/task/10"
        folder.mkdir(parents=True, exist_ok=True)
        fields = ["S", 1, *[0] * 9, cpu_ticks, 0, 0, 0, 20, 0, 2, 0, 5, 0, 1000]
        (folder / "stat").write_text(f"10 (python) {' '.join(map(str, fields))}\n")
        (folder / "schedstat").write_text("0 0 0\n")

    write(100)
    threads = Threads(KeptFiles(tmp_path), 10, 0.01)
    for now, ticks in ((1.0, 100), (2.0, 110), (2.1, 115), (3.0, 160)):
        write(ticks)
        found = threads.read(now, 2, 0.5)
    # 2.1 was too early for ticks of 10 ms: between 2.0 and 3.0 half of a core.
    assert found.hottest == pytest.approx(0.5)


def write_scheduled(root: Path, pid: int, thread: int, ran_s: float, waited_s: float) -> None:
    folder = root / f"proc/{pid}/task/{thread}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"{ran_s * 1e9:.0f} {waited_s * 1e9:.0f} 9\n")


def test_how_long_threads_had_no_core_is_counted(tmp_path: Path) -> None:
    threads = Threads(KeptFiles(tmp_path), 10, 0.01)
    for second in (1.0, 2.0):
        write_scheduled(tmp_path, 10, 10, 3.0 + 0.25 * second, 7.0 + 0.5 * second)
        write_scheduled(tmp_path, 10, 11, 0.5 * second, 0.125 * second)
        found = threads.read(second, 2, 0.75)
    assert found.hottest == pytest.approx(0.5)
    assert (found.main_waits, found.waits) == (pytest.approx(0.5), pytest.approx(0.625))
    # A thread that has begun since counts from zero, whether it is the second or not.
    write_scheduled(tmp_path, 10, 12, 0.1, 0.2)
    found = threads.read(3.0, 3, 0.75)
    assert (found.main_waits, found.waits) == (pytest.approx(0.0), pytest.approx(0.2))


def test_the_only_thread_of_a_process_is_counted_before_and_after_it_has_others(
    tmp_path: Path,
) -> None:
    threads = Threads(KeptFiles(tmp_path), 10, 0.01)
    for second in (1.0, 2.0):
        write_scheduled(tmp_path, 10, 10, 0.25 * second, 0.5 * second)
        found = threads.read(second, 1, 0.25)
    assert found.hottest == 0.25
    assert (found.main_waits, found.waits) == (pytest.approx(0.5), pytest.approx(0.5))
    write_scheduled(tmp_path, 10, 10, 1.5, 1.25)
    write_scheduled(tmp_path, 10, 11, 0.0, 0.5)
    found = threads.read(3.0, 2, 1.0)
    assert (found.hottest, found.main_waits, found.waits) == pytest.approx((1.0, 0.25, 0.75))


def test_processes_without_counted_waits_have_no_row_of_them(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1)
    tree = ProcessTree(10, root=tmp_path, cpu_clock=lambda pid: 0.5)
    for second in (1.0, 2.0):
        assert len(tree.sample(second)[0]) == 1 and not len(tree.core_waits)
    for second in (3.0, 4.0, 5.0):
        write_scheduled(tmp_path, 10, 10, 0.1 * second, 0.5 * second)
        tree.sample(second)
    assert list(tree.core_waits["pid"]) == [10]
    assert tree.core_waits["main_thread"][0] == pytest.approx(0.5)


# --- Roles ----------------------------------------------------------------------------------------

TRAIN = b"python\0train.py\0"


def test_ranks_of_torchrun_before_and_after_they_have_told_their_pids() -> None:
    """RANK is in the environment of each rank and of all that it starts."""
    run = {
        10: Known(1, b"torchrun", b"torchrun\0train.py\0"),
        11: Known(10, b"python", TRAIN, 0),
        12: Known(10, b"python", TRAIN, 1),
        13: Known(11, b"pt_data_worker", TRAIN, 0),
        14: Known(12, b"sh", b"sh\0", 1),
    }
    expected = {
        10: Role(OTHER, -1),
        11: Role(MAIN, 0),
        12: Role(MAIN, 1),
        13: Role(WORKER, 0),
        14: Role(OTHER, 1),
    }
    assert roles(run, {}, {}) == expected
    assert roles(run, {0: 11, 1: 12}, {}) == expected
    numbered = roles(run, {0: 11}, {13: Worker(0, 3)})
    assert numbered == {**expected, 13: Role(WORKER, 0, 3)}


def test_a_shell_that_got_the_rank_is_not_the_rank_once_it_has_told() -> None:
    run = {10: Known(1, b"bash", b"bash\0run.sh\0", 0), 11: Known(10, b"python", TRAIN, 0)}
    assert roles(run, {0: 11}, {}) == {10: Role(OTHER, -1), 11: Role(MAIN, 0)}


@given(
    parents=st.dictionaries(st.integers(1, 30), st.integers(0, 40), max_size=20),
    ranks=st.dictionaries(st.integers(0, 3), st.integers(1, 40), max_size=3),
    workers=st.sets(st.integers(1, 40), max_size=5),
)
def test_whatever_the_tree_each_process_has_one_role(
    parents: dict[int, int], ranks: dict[int, int], workers: set[int]
) -> None:
    """Also with numbers in a circle, as given again."""
    run = {pid: Known(parent, command=TRAIN) for pid, parent in parents.items()}
    found = roles(run, ranks, {pid: Worker(0, -1) for pid in workers})
    assert found.keys() == run.keys()
    for pid, role in found.items():
        assert (role.kind == MAIN) == (pid in ranks.values())
