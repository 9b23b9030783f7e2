"""GPUs by a simulated NVML: what it says over time, refuses, and how it goes away."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping

import numpy as np
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

import helpers_nvml as nvml
from helpers_nvml import BUSY, GpuState, SimulatedGpu, SimulatedNvml
from trainfit.results.runs.tables import GPUS, Table, empty_rows
from trainfit.watch.sampler.machine import GpuCounters

GIB = 1 << 30
MEASURED = [name for name in GPUS.names or () if name not in ("time_s", "gpu")]


class Bench:
    """GPUs with a clock that the test moves."""

    def __init__(self, *gpus: SimulatedGpu, knows_pids: bool = True) -> None:
        self.now = 1000.0
        self.waited = 0.0
        self.events: list[tuple[str, str, dict[str, float]]] = []
        self.nvml = SimulatedNvml(nvml.several(gpus, 1000.0), lambda: self.now, self.wait)
        self.counters = GpuCounters(self.nvml, self.tell, knows_pids, self.timer)

    def timer(self) -> float:
        return self.now + self.waited

    def wait(self, seconds: float) -> None:
        self.waited += seconds

    def tell(self, kind: str, text: str, values: Mapping[str, float]) -> None:
        self.events.append((kind, text, dict(values)))

    def sample(
        self, seconds: float, every_s: float = 0.1, pids: frozenset[int] = frozenset()
    ) -> Table:
        rows = []
        for _ in range(round(seconds / every_s)):
            self.now += every_s
            rows.append(self.counters.sample(self.now, pids))
        return np.concatenate(rows)


def is_measured(row: Table, name: str) -> bool:
    value = row[name]
    return bool(np.isfinite(value) if row.dtype[name].kind == "f" else value >= 0)


def test_every_column_of_a_gpu() -> None:
    state = GpuState(
        utilization=0.9,
        memory_utilization=0.4,
        used_bytes=30 * GIB,
        processes={"50": 20 * GIB, "51": 4 * GIB, "99": 5 * GIB},
        sm_hz=1.5e9,
        memory_hz=2.6e9,
        clock_reasons=nvml.POWER_CAP,
        temperature_c=71,
        power_w=650.5,
        pcie_to_gpu_bytes_per_s=12 * 2.0**30,
        pcie_from_gpu_bytes_per_s=3 * 2.0**30,
        sm_active=0.8,
        tensor_active=0.3,
        dram_active=0.2,
    )
    bench = Bench(SimulatedGpu((state,), max_sm_hz=1.98e9, power_limit_w=700.0))
    rows = bench.sample(3.0, pids=frozenset((50, 51, 52)))
    expected = {
        "utilization": 0.9,
        "memory_utilization": 0.4,
        "used_bytes": 30 * GIB,
        "ours_bytes": 24 * GIB,
        "others_bytes": 5 * GIB,
        "sm_hz": 1.5e9,
        "max_sm_hz": 1.98e9,
        "memory_hz": 2.6e9,
        "clock_reasons": 4,
        "temperature_c": 71,
        "power_w": 650.5,
        "power_limit_w": 700.0,
        "pcie_to_gpu_bytes_per_s": 12 * 2.0**30,
        "pcie_from_gpu_bytes_per_s": 3 * 2.0**30,
        "sm_active": 0.8,
        "tensor_active": 0.3,
        "dram_active": 0.2,
    }
    assert sorted(expected) == sorted(MEASURED)
    for name, value in expected.items():
        found = [row[name] for row in rows if is_measured(row, name)]
        assert found, name
        assert found == pytest.approx([value] * len(found), rel=1e-3), name
    assert bench.waited == 0.0  # GPM tells of PCIe without blocking
    # What is cheap is in each row, memory of processes in one a second.
    assert np.isfinite(rows["sm_hz"]).all()
    assert np.isfinite(rows["max_sm_hz"]).all()
    assert 3 <= (rows["ours_bytes"] >= 0).sum() <= 4
    # GPM's counters refresh ten times a second: samples are further apart than that.
    assert 10 <= np.isfinite(rows["sm_active"]).sum() <= 15


def test_pcie_throughput_blocks_and_is_asked_for_once_a_second_one_gpu_at_a_time() -> None:
    older = SimulatedGpu(
        (dataclasses.replace(BUSY, pcie_to_gpu_bytes_per_s=8e9),), has_gpm=False, name="A100"
    )
    bench = Bench(older, older, older)
    rows = bench.sample(4.0)
    assert bench.nvml.calls["nvmlDeviceGetPcieThroughput"] <= 2 * 3 * 5
    for gpu in range(3):
        mine = rows[rows["gpu"] == gpu]
        told = np.isfinite(mine["pcie_to_gpu_bytes_per_s"])
        assert 3 <= told.sum() <= 5
        assert mine["pcie_to_gpu_bytes_per_s"][told] == pytest.approx(8e9)
        assert np.isnan(mine["sm_active"]).all()
    # No sample waits for more than one GPU.
    asked = [np.isfinite(rows["pcie_to_gpu_bytes_per_s"][n : n + 3]).sum() for n in (0, 3, 6, 9)]
    assert max(asked) == 1


def test_throttling_is_seen_when_it_begins() -> None:
    rows = Bench(nvml.throttled(from_s=2.0)).sample(4.0)
    hot = rows["time_s"] >= 1002.0
    assert set(rows["clock_reasons"][hot]) == {nvml.THERMAL}
    assert set(rows["clock_reasons"][~hot]) == {0}
    assert rows["sm_hz"][hot].max() < rows["sm_hz"][~hot].min()
    assert rows["temperature_c"][hot].min() > 85


def test_a_starved_gpu_lowers_its_clock_without_being_throttled() -> None:
    rows = Bench(nvml.starved(busy_s=0.5, idle_s=0.5)).sample(10.0)
    assert set(rows["clock_reasons"]) == {0, nvml.IDLE}
    assert rows["sm_hz"].min() < 0.5e9
    assert 0.4 < rows["utilization"].mean() < 0.6
    # Short waits disappear in NVML's average; GPM's is no sharper than its samples are.
    short = Bench(nvml.starved(busy_s=0.06, idle_s=0.04)).sample(10.0)
    assert short["utilization"].min() > 0.4
    assert short["utilization"].max() < 0.8


def test_a_gpu_that_falls_off_the_bus_and_comes_back() -> None:
    bench = Bench(nvml.lost(from_s=2.0, until_s=5.0), SimulatedGpu())
    rows = bench.sample(8.0)
    first = rows[rows["gpu"] == 0]
    gone = (first["time_s"] > 1002.05) & (first["time_s"] < 1004.95)
    for name in MEASURED:
        assert not any(is_measured(row, name) for row in first[gone]), name
    assert np.isfinite(first["utilization"][first["time_s"] < 1001.95]).all()
    assert np.isfinite(first["utilization"][first["time_s"] > 1006.2]).all()
    # The other one goes on, its slow values too.
    other = rows[rows["gpu"] == 1]
    assert np.isfinite(other["utilization"]).all()
    assert (other["ours_bytes"] >= 0).sum() >= 7
    assert [kind for kind, _, _ in bench.events] == ["nvml_lost", "nvml_back"]
    assert bench.events[0][2] == {"nvml": 0}
    # Tried once a second, and not ten times.
    assert bench.nvml.calls["nvmlDeviceGetHandleByUUID"] <= 5


def test_nvml_that_is_lost_altogether_is_started_again_once_a_second() -> None:
    bench = Bench(nvml.lost(from_s=1.0, until_s=4.0), nvml.lost(from_s=1.0, until_s=4.0))
    rows = bench.sample(7.0)
    assert bench.nvml.calls["nvmlInit"] <= 6
    late = rows[rows["time_s"] > 1005.5]
    assert np.isfinite(late["utilization"]).all()
    assert sorted(kind for kind, _, _ in bench.events) == ["nvml_back"] * 2 + ["nvml_lost"] * 2


CALLS = sorted(name for name in vars(SimulatedNvml) if name.startswith("nvmlDeviceGet"))
FAST = [call for call in CALLS if "Handle" not in call and "Count" not in call]


@given(
    failing=st.dictionaries(
        st.sampled_from([*FAST, "nvmlGpmSampleGet", "nvmlGpmMetricsGet"]),
        st.sampled_from([2, 3, 4, 6, 10, 13, 26]),
    )
)
def test_each_call_may_fail_alone(failing: dict[str, int]) -> None:
    state = dataclasses.replace(BUSY, used_bytes=GIB, fails=failing)
    bench = Bench(SimulatedGpu((state,)))
    rows = bench.sample(1.5)
    columns = {
        "nvmlDeviceGetUtilizationRates": ("utilization", "memory_utilization"),
        "nvmlDeviceGetClockInfo": ("sm_hz", "memory_hz"),
        "nvmlDeviceGetMaxClockInfo": ("max_sm_hz",),
        "nvmlDeviceGetTemperature": ("temperature_c",),
        "nvmlDeviceGetPowerUsage": ("power_w",),
        "nvmlDeviceGetEnforcedPowerLimit": ("power_limit_w",),
        "nvmlDeviceGetMemoryInfo": ("used_bytes",),
        "nvmlDeviceGetCurrentClocksEventReasons": ("clock_reasons",),
        "nvmlDeviceGetComputeRunningProcesses": ("ours_bytes", "others_bytes"),
        "nvmlGpmSampleGet": ("sm_active", "dram_active"),
        "nvmlGpmMetricsGet": ("sm_active", "dram_active"),
    }
    silent = {column for call in failing for column in columns.get(call, ())}
    for column in {column for each in columns.values() for column in each}:
        told = any(is_measured(row, column) for row in rows)
        assert told == (column not in silent), column
    assert bench.events == []


def test_what_a_gpu_does_not_have_is_asked_for_once() -> None:
    state = dataclasses.replace(BUSY, fails={"nvmlDeviceGetPowerUsage": nvml.NOT_SUPPORTED})
    bench = Bench(SimulatedGpu((state,)))
    bench.sample(2.0)
    assert bench.nvml.calls["nvmlDeviceGetPowerUsage"] == 1


def test_a_call_that_is_slow_is_made_once_a_second() -> None:
    bench = Bench(SimulatedGpu())
    asked = bench.nvml.nvmlDeviceGetPowerUsage

    def slow(handle: SimulatedGpu) -> int:
        # Not the first time: once alone, the sampler may just have waited for a core.
        bench.wait(0.01 if bench.now > 1001.0 else 0.0)
        return asked(handle)

    bench.nvml.nvmlDeviceGetPowerUsage = slow  # type: ignore[method-assign]
    rows = bench.sample(6.0)
    told = np.isfinite(rows["power_w"])
    assert told[rows["time_s"] < 1001.0].all()
    assert 4 <= told[rows["time_s"] > 1001.5].sum() <= 6
    assert np.isfinite(rows["sm_hz"]).all()


def test_in_a_container_nvml_knows_other_numbers() -> None:
    state = dataclasses.replace(BUSY, used_bytes=GIB, processes={"50": GIB})
    rows = Bench(SimulatedGpu((state,)), knows_pids=False).sample(2.0, pids=frozenset((50,)))
    assert set(rows["ours_bytes"]) == set(rows["others_bytes"]) == {-1}
    assert set(rows["used_bytes"]) == {GIB}


@pytest.mark.parametrize(
    ("mask", "numbers"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,7,0", [1]),
        ("GPU-00000002", [2]),
    ],
)
def test_only_the_gpus_that_a_mask_leaves_are_sampled(mask: str | None, numbers: list[int]) -> None:
    bench = Bench(SimulatedGpu(), SimulatedGpu(), SimulatedGpu())
    bench.counters.choose(mask)
    assert [device.number for device in bench.counters.devices] == numbers


def test_gpus_have_the_numbers_of_the_run() -> None:
    bench = Bench(SimulatedGpu(), SimulatedGpu(), SimulatedGpu())
    bench.counters.choose("2,0")

    def numbers(uuids: tuple[str, ...]) -> list[int]:
        rows = empty_rows(GPUS, 2)
        rows["gpu"] = (2, 0)
        bench.counters.renumber(uuids)(rows)
        return list(rows["gpu"])

    # PyTorch writes them without the prefix; a rank may have told its own only.
    assert numbers(("00000000-0000-0000-0000-000000000000",)) == [1, 0]
    # A header that comes later does not change what rows already have.
    uuid = "GPU-0000000{}-0000-0000-0000-000000000000"
    assert numbers((uuid.format(2), uuid.format(0))) == [1, 0]
    told = [values for kind, _, values in bench.events if kind == "gpu"]
    assert told == [{"gpu": 1, "nvml": 2}, {"gpu": 0, "nvml": 0}]


def test_the_simulation_is_called_as_the_real_package_is() -> None:
    for name, method in vars(SimulatedNvml).items():
        if name.startswith("nvml") and callable(method):
            real = getattr(pynvml, name)
            words = [word for word in inspect.signature(method).parameters if word != "self"]
            assert words == list(inspect.signature(real).parameters)[: len(words)], name
    assert pynvml.NVML_CLOCK_SM == SimulatedNvml.NVML_CLOCK_SM
    assert pynvml.NVML_CLOCK_MEM == SimulatedNvml.NVML_CLOCK_MEM
    assert pynvml.NVML_GPM_METRICS_GET_VERSION == SimulatedNvml.NVML_GPM_METRICS_GET_VERSION
    real_request = pynvml.c_nvmlGpmMetricsGet_t()
    for name in ("version", "numMetrics", "sample1", "sample2", "metrics"):
        assert hasattr(real_request, name)
    assert pynvml.nvmlClocksEventReasonSwThermalSlowdown == nvml.THERMAL
    assert pynvml.nvmlClocksEventReasonSwPowerCap == nvml.POWER_CAP
    assert pynvml.nvmlClocksEventReasonGpuIdle == nvml.IDLE


def test_numbers_of_nvml_that_the_counters_use() -> None:
    from trainfit.hardware.machine import nvml as nvml_counters

    assert nvml_counters._GPM == {
        "sm_active": pynvml.NVML_GPM_METRIC_SM_UTIL,
        "tensor_active": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
        "dram_active": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        "pcie_from_gpu_bytes_per_s": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
        "pcie_to_gpu_bytes_per_s": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    }
    assert (nvml_counters._SM_CLOCK, nvml_counters._MEMORY_CLOCK) == (
        pynvml.NVML_CLOCK_SM,
        pynvml.NVML_CLOCK_MEM,
    )
    assert nvml_counters._GPU_SENSOR == pynvml.NVML_TEMPERATURE_GPU
    assert nvml_counters._FROM_GPU == pynvml.NVML_PCIE_UTIL_TX_BYTES
    assert nvml_counters._TO_GPU == pynvml.NVML_PCIE_UTIL_RX_BYTES
    assert pynvml.NVML_ERROR_GPU_IS_LOST in nvml_counters._GONE
    assert pynvml.NVML_ERROR_UNINITIALIZED in nvml_counters._GONE
    assert pynvml.NVML_ERROR_NOT_SUPPORTED in nvml_counters._NOT_SUPPORTED
    assert pynvml.NVML_ERROR_FUNCTION_NOT_FOUND in nvml_counters._NOT_SUPPORTED
