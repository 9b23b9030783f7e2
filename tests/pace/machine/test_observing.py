"""What the machine says around a block of calls: counters below an injected root."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import time
from pathlib import Path

import pytest

from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.system import System
from trainfit.hardware.machine.topology import clock_here, idle_seconds, throttle_count
from trainfit.pace.host import PROBE_S, Clocks, NoDevice, Observer, RealHost, _name_of
from trainfit.pace.settings import power_facts

CPUS = "sys/devices/system/cpu"


def write(root: Path, path: str, text: object) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def tree(root: Path, c10_us: int = 1_000_000, throttled: int = 2) -> Path:
    """Two CPUs with two idle states; this process ran on CPU 1 last."""
    for cpu in (0, 1):
        for number, (name, micro) in enumerate((("POLL", 500), ("C10", c10_us))):
            folder = f"{CPUS}/cpu{cpu}/cpuidle/state{number}"
            write(root, f"{folder}/name", name)
            write(root, f"{folder}/time", micro)
        write(root, f"{CPUS}/cpu{cpu}/thermal_throttle/core_throttle_count", throttled)
        write(root, f"{CPUS}/cpu{cpu}/cpufreq/scaling_cur_freq", 1_700_000 + 2_300_000 * cpu)
    # A name with blanks and a bracket is legal.
    write(root, "proc/self/stat", "4 (a ) b) R " + " ".join(["0"] * 35) + " 1 0 0")
    return root


def test_counters_are_read_of_the_cpus_that_may_be_used(tmp_path: Path) -> None:
    system = System(tree(tmp_path))
    assert idle_seconds(system, (0, 1)) == pytest.approx({"POLL": 1e-3, "C10": 2.0})
    assert idle_seconds(system, (0,))["C10"] == pytest.approx(1.0)
    assert throttle_count(system, (0, 1)) == 4
    assert clock_here(system) == 4.0e9


def test_what_is_not_there_is_not_told(tmp_path: Path) -> None:
    system = System(tmp_path)
    assert idle_seconds(system, (0, 1)) == {}
    assert throttle_count(system, (0,)) is None
    assert clock_here(system) is None
    write(tmp_path, "proc/self/stat", "4 (short) R 0")
    assert clock_here(system) is None
    write(tmp_path, f"{CPUS}/cpu0/cpuidle/state0/name", "C1")
    write(tmp_path, f"{CPUS}/cpu0/cpuidle/state0/time", "<unknown>")
    assert idle_seconds(system, (0,)) == {}


class TwoCpus(System):
    def affinity(self):  # type: ignore[no-untyped-def]
        from trainfit.results.machine import known

        return known((0, 1), "test")


def test_readings_are_differences(tmp_path: Path) -> None:
    observer = Observer(TwoCpus(tree(tmp_path)))
    before = observer.counters()
    tree(tmp_path, c10_us=1_000_000, throttled=5)
    found = observer.readings(before, Clocks(1.2e9, 8, False))
    assert found.throttled == 6 and found.cpu_hz == 4.0e9
    assert found.idle_shares == pytest.approx({"POLL": 0.0, "C10": 0.0})
    assert (found.gpu_hz, found.gpu_pstate, found.gpu_slowed) == (1.2e9, 8, False)
    assert found.others_cores is not None and found.others_cores >= 0
    tree(tmp_path, c10_us=51_000_000)
    assert observer.readings(before, Clocks()).idle_shares["C10"] > 1  # more than time allows


def test_other_threads_are_told_by_name_with_the_cores_that_they_want(tmp_path: Path) -> None:
    """Each second on a core or in the queue for one; the thread that measures is none of them."""
    ended = threading.Event()
    named = threading.Thread(target=ended.wait, name="camera")
    named.start()
    try:
        own, other, unknown = threading.get_native_id(), named.native_id, 1 << 30
        for thread in (own, other, unknown):
            write(tmp_path, f"proc/self/task/{thread}/schedstat", "1000000 0 7")
        observer = Observer(TwoCpus(tree(tmp_path)))
        before = dataclasses.replace(observer.counters(), at_s=time.monotonic() - 1e3)
        assert before.threads_s == dict.fromkeys((own, other, unknown), 1e-3)
        for thread, seconds in ((own, 900), (other, 500), (unknown, 20)):
            at = f"proc/self/task/{thread}/schedstat"
            write(tmp_path, at, f"{seconds * 10**9 // 2} {seconds * 10**9 // 2} 9")
        found = observer.readings(before, Clocks()).threads_cores
    finally:
        ended.set()
        named.join()
    place = f"threading.py:{threading.Event.wait.__code__.co_firstlineno}"
    told = f"camera, Event.wait at {place}"
    assert found == pytest.approx({told: 0.5, "without a name in Python": 0.02}, rel=0.2)


def test_a_thread_is_told_with_the_function_that_it_runs() -> None:
    class Camera(threading.Thread):
        def run(self) -> None:
            pass

    def flush(_: int) -> None:
        pass

    line = Camera.run.__code__.co_firstlineno
    made = _name_of(Camera(name="front"))
    assert (
        "front, " in made
        and "Camera.run at " in made
        and made.endswith(f"test_observing.py:{line}")
    )
    bound = threading.Thread(target=functools.partial(flush, 1), name="log")
    assert "log, " in _name_of(bound) and "flush at " in _name_of(bound)
    assert _name_of(threading.Thread(target=print, name="printer")) == "printer"


def test_garbage_collections_are_timed_while_the_time_is_observed() -> None:
    host, before = RealHost(), list(gc.callbacks)
    with host.observed():
        gc.collect()
        assert 0 < host.collections_s() < 60
        gc.disable()
        try:
            host.collections_s()
            assert host.collections_s() == 0.0
        finally:
            gc.enable()
    assert gc.callbacks == before
    gc.collect()
    assert host.collections_s() == 0.0


def test_the_fixed_loop_takes_about_what_it_should() -> None:
    """Within a wide margin: cores are slowed by others, and twice as fast as the calibration."""
    host = RealHost()
    took = sorted(host.probe() for _ in range(200))
    assert PROBE_S / 4 < took[10] < PROBE_S * 10


def test_no_device() -> None:
    device = NoDevice()
    assert not device.is_there and device.why_not_awake() == "calls use no GPU"
    assert device.clocks() == Clocks()
    device.launch()
    with device.awake(), device.profiled() as kernels:
        assert kernels.of_one(0).count == 0
    assert device.seconds(device.mark(), device.mark()) == 0.0


def test_a_device_that_pytorch_uses() -> None:
    """A simulated one: events, a stream of its own; no NVML and no profiler behind it."""
    import torch

    import trainfit
    from trainfit.pace.host import PacedCudaDevice, device_in_use

    assert not device_in_use().is_there
    with trainfit.simulate("RTX 4090"):
        model = torch.nn.Linear(64, 64).cuda()
        device = device_in_use()
        assert isinstance(device, PacedCudaDevice) and device.why_not_awake() == ""
        first = device.mark()
        model(torch.randn(8, 64, device="cuda"))
        assert 0 < device.seconds(first, device.mark()) < 1
        assert device.clocks() == Clocks()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            device.launch()
        assert 0 < torch.cuda.memory_allocated() - before <= 512  # one small tensor, of no pool's
        with device.profiled() as kernels, device.awake():
            model(torch.randn(8, 64, device="cuda"))
        assert kernels.count == 0
        with pytest.raises(KeyError), device.profiled():
            raise KeyError("the user's")


@pytest.mark.slow
def test_what_holds_clocks_is_said() -> None:
    import helpers_machines as machines
    from trainfit.hardware.machine.survey import survey

    names = [path.stem for path in machines.MACHINES.glob("*.json")]
    laptop = "cpu-laptop" if "cpu-laptop" in names else "workstation"
    facts = power_facts(survey(machines.machine(laptop)))
    assert "intel_pstate" in facts["cpufreq"] or "amd" in facts["cpufreq"]
    assert facts["idle states"]
    blind = power_facts(survey(RecordedSystem({})))
    assert blind["cpufreq"].startswith("not visible: ")
