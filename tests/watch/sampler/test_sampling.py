"""The sampler as a process of its own, next to small real children."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import helpers_nvml as nvml
from helpers_watch import ENDS_WITH_US
from trainfit.results.runs import tables
from trainfit.results.runs.watched import Event, RunHeader, RunRecord, load_run
from trainfit.watch.sampler import sampling
from trainfit.watch.sampler.sampling import Sampler
from trainfit.watch.sampler.start import LOG, SamplerHandle, start_sampler

STAND_IN = Path(__file__).parents[2] / "stand_ins" / "nvml"
ASLEEP = "import time; time.sleep(600)"
FAMILY = """
import multiprocessing, os, time
def work(parent):
    while os.getppid() == parent: pass  # also where the tests are killed
if __name__ == "__main__":
    for _ in range(2):
        multiprocessing.get_context("fork").Process(
            target=work, args=[os.getpid()], daemon=True
        ).start()
    time.sleep(600)
"""
#: Long for a machine that others use: the sampler gives way to them.
PATIENCE_S = 120.0


@contextlib.contextmanager
def child(program: str = ASLEEP) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS_WITH_US + program], start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


@contextlib.contextmanager
def sampled(folder: Path, pid: int) -> Iterator[SamplerHandle]:
    handle = start_sampler(folder, pid)
    try:
        yield handle
    finally:
        handle.stop()


def write_header(folder: Path, pid: int, rank: int = 0) -> None:
    header = RunHeader("x", rank, 1, pid, "h", time.time(), time.monotonic(), "0", "3")
    part = folder / "part"
    part.write_text(header.to_json())
    part.rename(folder / f"rank{rank}.json")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)


def size(folder: Path, name: str = "machine") -> int:
    """Rows of a table."""
    return len(tables.read_table(folder / f"{name}.bin", tables.BY_NAME[name]))


def ending(run: RunRecord) -> Event:
    (found,) = (event for event in run.sampler_events if event.kind == "sampler_ended")
    return found


def test_a_run_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    """The sampler is there before the header is; what it saw until then is kept."""
    with child(FAMILY) as process, sampled(tmp_path, process.pid) as handle:
        time.sleep(1.0)
        assert size(tmp_path) == 0
        write_header(tmp_path, process.pid)
        until(lambda: size(tmp_path) > 15)
        process.kill()
        process.wait()
        assert handle.wait(PATIENCE_S) == 0
    run = load_run(tmp_path)
    machine, processes = run.machine, run.processes
    assert (np.diff(machine["time_s"]) > 0).all()
    # How much longer than its interval is a matter of who else uses this machine.
    assert np.median(np.diff(machine["time_s"])) > 0.09
    assert machine["interval_s"][1:] == pytest.approx(np.diff(machine["time_s"]), abs=1e-4)
    assert np.nanmax(machine["cores_ours"][2:]) > 0
    mains = processes[processes["role"] == 0]
    assert set(mains["pid"]) == {process.pid}
    assert set(mains["rank"]) == {0}
    workers = processes[processes["role"] == 1]
    assert len(set(workers["pid"])) == 2
    assert set(workers["rank"]) == {0}
    # Those that are never idle, next to one that sleeps once it has started them.
    assert np.nanmin(workers["cpu_cores"]) > np.nanmin(mains["cpu_cores"])
    values = ending(run).values
    assert values["samples"] >= len(machine)
    assert values["lost_rows"] == 0
    assert len(run.gpus) == 0 or np.isfinite(run.gpus["utilization"]).any()
    assert not (tmp_path / LOG).exists()


def test_a_gpu_of_the_simulated_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: throttled after a while, then off the bus, and back."""
    hot = nvml.throttled(from_s=1.0)
    gone = nvml.lost(from_s=2.0, until_s=3.0, state=hot.course[1]).course[1:]
    gpu = nvml.SimulatedGpu((*hot.course, *gone))
    nvml.several([gpu], 0.0).save(tmp_path / "nvml.json")
    monkeypatch.setenv("SIMULATED_NVML", str(tmp_path / "nvml.json"))
    monkeypatch.setenv("SIMULATED_TIME", str(tmp_path / "time"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    sources = os.pathsep.join([str(STAND_IN), str(Path(sampling.__file__).parents[3])])
    monkeypatch.setenv("PYTHONPATH", sources)

    def reach(seconds: float) -> None:
        (tmp_path / "part").write_text(str(seconds))
        (tmp_path / "part").rename(tmp_path / "time")

    def reasons() -> list[int]:
        return list(tables.read_table(tmp_path / "gpus.bin", tables.GPUS)["clock_reasons"])

    def happened(kind: str) -> bool:
        return kind in [event.kind for event in load_run(tmp_path).sampler_events]

    reach(0.5)
    with child() as process, sampled(tmp_path, process.pid) as handle:
        write_header(tmp_path, process.pid)
        until(lambda: len(reasons()) > 10)
        assert set(reasons()) == {0}
        reach(1.5)
        until(lambda: nvml.THERMAL in reasons())
        reach(2.5)
        until(lambda: happened("nvml_lost"))
        known = len(reasons())
        reach(3.5)
        until(lambda: happened("nvml_back") and nvml.THERMAL in reasons()[known:])
        handle.stop()
    run = load_run(tmp_path)
    assert set(run.gpus["gpu"]) == {0}
    found = list(run.gpus["clock_reasons"])
    assert set(found) <= {0, nvml.THERMAL, -1}
    assert 0 not in found[found.index(nvml.THERMAL) :]
    kinds = [event.kind for event in run.sampler_events]
    assert "gpu" in kinds
    assert kinds.index("nvml_lost") < kinds.index("nvml_back")


def test_it_ends_when_the_watched_process_is_killed(tmp_path: Path) -> None:
    with child() as process:
        write_header(tmp_path, process.pid)
        with sampled(tmp_path, process.pid) as handle:
            until(lambda: size(tmp_path) > 3)
            process.kill()  # and nobody waits for it: it stays a zombie
            assert handle.wait(PATIENCE_S) == 0
    assert ending(load_run(tmp_path)).values["samples"] > 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_its_last_rows_are_written_when_it_is_asked_to_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    with child() as process:
        write_header(tmp_path, process.pid)
        with sampled(tmp_path, process.pid) as handle:
            until(lambda: size(tmp_path) > 3)
            os.kill(handle.pid, number)
            assert handle.wait(PATIENCE_S) == 0
    run = load_run(tmp_path)
    assert ending(run).values["samples"] == len(run.machine)


def test_what_a_killed_sampler_leaves_is_readable(tmp_path: Path) -> None:
    with child() as process:
        write_header(tmp_path, process.pid)
        with sampled(tmp_path, process.pid) as handle:
            until(lambda: size(tmp_path) > 3)
            os.kill(handle.pid, signal.SIGKILL)
            assert handle.wait(PATIENCE_S) == -signal.SIGKILL
    assert len(load_run(tmp_path).machine) > 3


def test_it_ends_when_who_started_it_has_ended_without_a_word(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, sys, time
from trainfit.watch.sampler.start import start_sampler
handle = start_sampler(pathlib.Path({str(tmp_path)!r}), int(sys.argv[1]))
print(handle.pid, flush=True)
time.sleep(600)
"""
    with child() as process:
        write_header(tmp_path, process.pid)
        words = [sys.executable, "-c", program, str(process.pid)]
        environment = {**os.environ, "PYTHONPATH": str(Path(sampling.__file__).parents[3])}
        starter = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        until(lambda: size(tmp_path) > 3)
        starter.kill()
        starter.wait()
        until(lambda: not is_running(pid))
        assert process.poll() is None


def test_a_script_that_starts_its_own_sampler(tmp_path: Path) -> None:
    """It is a child of the watched process then, and no part of the run."""
    program = f"""
import os, pathlib, time
from trainfit.results.runs.watched import RunHeader
from trainfit.watch.sampler.start import start_sampler
folder = pathlib.Path({str(tmp_path)!r})
header = RunHeader("x", 0, 1, os.getpid(), "h", 0.0, time.monotonic(), "0", "3")
(folder / "rank0.json").write_text(header.to_json())
print(start_sampler(folder, os.getpid()).pid, flush=True)
until = time.monotonic() + {PATIENCE_S}
while time.monotonic() < until and not (folder / "enough").exists(): time.sleep(0.05)
os._exit(3)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(sampling.__file__).parents[3])}
    words = [sys.executable, "-c", program]
    script = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
    assert script.stdout is not None
    pid = int(script.stdout.readline())
    until(lambda: size(tmp_path) > 3)
    (tmp_path / "enough").touch()
    assert script.wait(PATIENCE_S) == 3
    until(lambda: not is_running(pid))
    run = load_run(tmp_path)
    assert set(run.processes["pid"]) == {script.pid}
    assert set(run.processes["role"]) == {0}
    assert ending(run).values["samples"] == len(run.machine)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_it_ends_when_its_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with child() as process:
        write_header(folder, process.pid)
        with sampled(folder, process.pid) as handle:
            until(lambda: size(folder) > 3)
            shutil.rmtree(folder)
            assert handle.wait(PATIENCE_S) == 0
            assert not folder.exists()
            assert process.poll() is None


def test_a_second_sampler_of_a_run_ends_at_once(tmp_path: Path) -> None:
    with child() as process:
        write_header(tmp_path, process.pid)
        with sampled(tmp_path, process.pid) as first:
            until(lambda: size(tmp_path) > 3)
            with sampled(tmp_path, process.pid) as second:
                assert second.wait(PATIENCE_S) == 0
            assert first.is_running
    assert len([e for e in load_run(tmp_path).sampler_events if e.kind == "sampler_ended"]) == 1


def test_a_process_that_has_ended_already_is_not_sampled(tmp_path: Path) -> None:
    with child("pass") as process:
        process.wait()
        with sampled(tmp_path, process.pid) as handle:
            assert handle.wait(PATIENCE_S) == 0
    assert size(tmp_path, "processes") == 0


def test_it_imports_no_torch_and_leaves_the_recorder_out(tmp_path: Path) -> None:
    with child() as process:
        with sampled(tmp_path, process.pid) as handle:
            until((tmp_path / "machine.bin").exists)
            maps = Path(f"/proc/{handle.pid}/maps").read_text()
            variables = Path(f"/proc/{handle.pid}/environ").read_bytes().split(b"\0")
            niceness = os.getpriority(os.PRIO_PROCESS, handle.pid)
        assert "torch" not in maps
        assert b"TRAINFIT_WATCH=0" in variables
        assert niceness >= 10
        # A terminal's Ctrl-C is for the training alone.
        assert handle.pid != os.getpgrp()


def test_modules_of_the_scripts_folder_are_not_taken_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('taken')")
    monkeypatch.chdir(tmp_path)
    with child() as process:
        write_header(tmp_path, process.pid)
        with sampled(tmp_path, process.pid):
            until(lambda: size(tmp_path) > 1)


def test_a_fork_of_the_starter_does_not_end_the_sampler(tmp_path: Path) -> None:
    with child() as process, sampled(tmp_path, process.pid) as handle:
        if (pid := os.fork()) == 0:
            try:
                handle.stop()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert handle.is_running


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["/no/such/folder", "1"], "is not a folder"),
        ([".", "0"], "is not a process"),
        ([".", "one"], "invalid int value"),
    ],
)
def test_bad_input_is_refused_in_a_line(words: list[str], line: str, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "trainfit.watch.sampler", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(sampling.__file__).parents[3])},
    )
    assert found.returncode == 2
    assert line in found.stderr
    assert "Traceback" not in found.stderr


# --- In this process ------------------------------------------------------------------------------


def run_here(sampler: Sampler, enough: Callable[[], bool]) -> None:
    """It blocks signals, one of which ends it as soon as there is enough.

    The signal is for this thread alone. Of the process, whichever thread does not block it (one
    of pytest-xdist's) would have it, and the process would end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    caller, failed = threading.get_ident(), []

    def end_it() -> None:
        try:
            until(enough)
        except BaseException as error:
            failed.append(error)
        signal.pthread_kill(caller, signal.SIGHUP)

    watcher = threading.Thread(target=end_it, daemon=True)
    watcher.start()
    try:
        assert sampler.run()
    finally:
        watcher.join()
        signal.sigtimedwait([signal.SIGHUP], 0)  # where the run has ended by itself
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert not failed


def no_nvml() -> Any:
    raise ImportError("no GPU here")


def test_samples_are_rarer_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with child() as process:
        write_header(tmp_path, process.pid)
        monkeypatch.setattr(sampling, "_OF_AGE", 0.5)
        sampler = Sampler(tmp_path, process.pid, nvml=no_nvml)

        def rare() -> bool:
            table = tables.read_table(tmp_path / "machine.bin", tables.BY_NAME["machine"])
            return len(table) > 5 and (np.diff(table["time_s"])[-2:] > 0.9).all()

        run_here(sampler, rare)
    intervals = np.diff(load_run(tmp_path).machine["time_s"])
    assert intervals[:5].min() < 0.9


def test_what_cannot_be_sampled_is_told_once_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: Any) -> None:
        raise RuntimeError("no such machine")

    monkeypatch.setattr(sampling, "MachineCounters", fail)
    with child() as process:
        write_header(tmp_path, process.pid)
        sampler = Sampler(tmp_path, process.pid, nvml=no_nvml)
        run_here(sampler, lambda: size(tmp_path, "processes") > 3)
    run = load_run(tmp_path)
    assert len(run.machine) == 0
    assert len(run.processes) > 3
    told = [event.text for event in run.sampler_events if event.kind == "not_sampled"]
    assert len(told) == 2
    assert "no GPU is sampled (ImportError: no GPU here)" in told
    assert any("the machine cannot be sampled (RuntimeError" in text for text in told)
    # Since the beginning of the run, not of the machine.
    assert all(event.time_s < PATIENCE_S for event in run.sampler_events)


def test_a_driver_that_hangs_holds_up_nothing_else(tmp_path: Path) -> None:
    class Hanging(nvml.SimulatedNvml):
        def nvmlDeviceGetPowerUsage(self, handle: nvml.SimulatedGpu) -> int:
            hangs.set()
            goes_on.wait()
            return 0

    hangs, goes_on = threading.Event(), threading.Event()
    machine = nvml.several([nvml.SimulatedGpu()], time.monotonic())
    with child() as process:
        write_header(tmp_path, process.pid)
        sampler = Sampler(tmp_path, process.pid, nvml=lambda: Hanging(machine))
        # It ends, too, while the driver's call is still going on.
        run_here(sampler, lambda: hangs.is_set() and size(tmp_path) > 10)
        assert not goes_on.is_set()
    goes_on.set()
    assert len(load_run(tmp_path).machine) > 10


def test_a_full_disk_is_counted_and_sampling_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        if len(refused) < 4:
            refused.append(descriptor)
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    class Full(sampling.TableFile):
        def __init__(self, path: Path, kind: Any) -> None:
            super().__init__(path, kind, full)

    monkeypatch.setattr(sampling, "TableFile", Full)
    with child() as process:
        write_header(tmp_path, process.pid)
        sampler = Sampler(tmp_path, process.pid, nvml=no_nvml)
        run_here(sampler, lambda: len(refused) == 4 and size(tmp_path) > 3)
    run = load_run(tmp_path)
    lost = ending(run).values["lost_rows"]
    assert lost > 0
    assert len(run.machine) > 3
    # Each sample has a row of the machine, some one of the process.
    every = len(run.machine) + len(run.processes) + lost
    assert ending(run).values["samples"] < every <= 2 * ending(run).values["samples"]
