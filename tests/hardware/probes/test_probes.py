"""The three scripts that ask the driver: here without one, and before drivers that are made up."""

from __future__ import annotations

import ctypes
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from trainfit.hardware.machine.system import PROBES, System

MIB = 1 << 20


def run(name: str, tmp_path: Path, **modules: str) -> dict[str, Any]:
    """What a probe prints where Python finds ``modules`` first, given by their source."""
    for module, source in modules.items():
        place = tmp_path / f"{module.replace('__', '/')}.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source)
    done = subprocess.run(
        [sys.executable, "-P", str(PROBES / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def functions(name: str) -> dict[str, Any]:
    """A probe's functions, without its main part."""
    return runpy.run_path(str(PROBES / f"{name}.py"))


@pytest.mark.parametrize("name", ["nvml_gpus", "cuda_driver", "torch_devices"])
def test_probes_import_nothing_of_trainfit(name: str) -> None:
    assert "trainfit" not in re.sub(r'"""[\s\S]*?"""', "", (PROBES / f"{name}.py").read_text())


# --- NVML -----------------------------------------------------------------------------------------


def test_nvml_without_a_driver(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has NVML")
    answer = run("nvml_gpus", tmp_path)
    assert answer == {"error": "NVML_ERROR_LIBRARY_NOT_FOUND", "code": 12, "where": "nvmlInit"}


def test_nvml_without_its_package(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'pynvml'\")"
    answer = run("nvml_gpus", tmp_path, pynvml=missing)
    assert answer == {"error": "pynvml is not installed", "code": None, "where": "import"}
    damaged = run("nvml_gpus", tmp_path, pynvml="print('hello')\n1/0")
    assert damaged == {"error": "pynvml: division by zero", "code": None, "where": "import"}


MISMATCH = """
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
class NVMLError(Exception):
    value = 18
def nvmlInit():
    print("chatter of a library", end="")
    raise NVMLError
"""


def test_nvml_of_another_version(tmp_path: Path) -> None:
    answer = run("nvml_gpus", tmp_path, pynvml=MISMATCH)
    expected = {"error": "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "code": 18, "where": "nvmlInit"}
    assert answer == expected


def test_nvml_calls_exist_in_the_real_package() -> None:
    source = (PROBES / "nvml_gpus.py").read_text()
    calls = set(re.findall(r'"(nvml[A-Z]\w+)"', source)) | set(
        re.findall(r"module\.(nvml\w+)", source)
    )
    calls |= {
        f"nvmlDeviceGet{kind}RunningProcesses{end}"
        for kind in ("Compute", "Graphics")
        for end in ("", "_v2")
    }
    assert len(calls) > 30
    assert [call for call in sorted(calls) if not hasattr(pynvml, call)] == []
    probe = functions("nvml_gpus")
    assert probe["_CLOCK_GRAPHICS"] == pynvml.NVML_CLOCK_GRAPHICS
    assert probe["_CLOCK_SM"] == pynvml.NVML_CLOCK_SM
    assert probe["_CLOCK_MEMORY"] == pynvml.NVML_CLOCK_MEM
    assert probe["_TEMPERATURE_OF_GPU"] == pynvml.NVML_TEMPERATURE_GPU
    assert probe["_THRESHOLD_SLOWDOWN"] == pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    assert probe["_UNCORRECTED"] == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    assert probe["_VOLATILE"] == pynvml.NVML_VOLATILE_ECC
    assert probe["_SCOPE_OF_NODE"] == pynvml.NVML_AFFINITY_SCOPE_NODE


def put(**places: Any) -> Callable[..., int]:
    """A function of NVML that succeeds, and writes into its arguments by their place."""

    def call(*words: Any) -> int:
        for place, value in places.items():
            target = words[int(place.removeprefix("at"))]
            target = getattr(target, "_obj", target)
            if isinstance(value, dict):
                for field, one in value.items():
                    setattr(target, field, one)
            else:
                target.value = value
        return 0

    return call


def refuse(code: int) -> Callable[..., int]:
    return lambda *words: code


def by_clock(sm: int, memory: int) -> Callable[..., int]:
    def call(device: Any, kind: Any, result: Any) -> int:
        result._obj.value = {1: sm, 2: memory}[kind.value]
        return 0

    return call


def running(*processes: tuple[int, int]) -> Callable[..., int]:
    def call(device: Any, count: Any, places: Any) -> int:
        if places is None:
            count._obj.value = len(processes)
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE) if processes else 0
        for place, (pid, used) in zip(places, processes, strict=False):
            place.pid, place.usedGpuMemory = pid, used
        count._obj.value = len(processes)
        return 0

    return call


#: A T4 under a driver before 510: no second version of several calls.
OLD_DRIVER: dict[str, Callable[..., int]] = {
    "nvmlInitWithFlags": put(),
    "nvmlSystemGetDriverVersion": put(at0=b"470.57.02"),
    "nvmlSystemGetCudaDriverVersion": put(at0=11040),
    "nvmlDeviceGetCount_v2": put(at0=2),
    "nvmlDeviceGetHandleByIndex_v2": lambda index, device: 15 if index.value == 1 else 0,
    "nvmlDeviceGetName": put(at1=b"Tesla T4"),
    "nvmlDeviceGetUUID": put(at1=b"GPU-1"),
    "nvmlDeviceGetCudaComputeCapability": put(at1=7, at2=5),
    "nvmlDeviceGetMemoryInfo": put(at1={"total": 15109 * MIB, "used": 3 * MIB}),
    "nvmlDeviceGetUtilizationRates": put(at1={"gpu": 97, "memory": 41}),
    "nvmlDeviceGetPciInfo_v3": put(at1={"busId": b"00000000:00:04.0"}),
    "nvmlDeviceGetCurrPcieLinkGeneration": put(at1=1),
    "nvmlDeviceGetMaxPcieLinkGeneration": put(at1=3),
    "nvmlDeviceGetCurrPcieLinkWidth": put(at1=8),
    "nvmlDeviceGetMaxPcieLinkWidth": put(at1=16),
    "nvmlDeviceGetClockInfo": by_clock(585, 5000),
    "nvmlDeviceGetMaxClockInfo": by_clock(1590, 5001),
    "nvmlDeviceGetPerformanceState": put(at1=0),
    "nvmlDeviceGetCurrentClocksThrottleReasons": put(at1=0x4),
    "nvmlDeviceGetTemperature": put(at2=61),
    "nvmlDeviceGetPowerUsage": put(at1=70123),
    "nvmlDeviceGetEccMode": put(at1=1, at2=0),
    "nvmlDeviceGetTotalEccErrors": put(at3=0),
    "nvmlDeviceGetMigMode": refuse(3),
    "nvmlDeviceGetComputeRunningProcesses_v2": running((4242, 2 * MIB), (7, (1 << 64) - 1)),
    "nvmlDeviceGetGraphicsRunningProcesses_v2": running(),
    "nvmlDeviceGetPersistenceMode": put(at1=1),
    "nvmlDeviceGetComputeMode": refuse(4),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., int]]:
    """The functions of a driver, called through the real pynvml's own wrappers."""
    calls = dict(OLD_DRIVER)

    def function(name: str) -> Callable[..., int]:
        if name not in calls:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return calls[name]

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", function)
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
    return calls


def test_nvml_of_an_old_driver(driver: dict[str, Callable[..., int]]) -> None:
    answer = functions("nvml_gpus")["probe"]()
    assert answer["driver"] == "470.57.02"
    assert answer["cuda"] == 11040
    gpu, lost = answer["gpus"]
    assert lost == {"index": 1, "error": "NVML_ERROR_GPU_IS_LOST"}
    unknown_call = {"error": "NVML_ERROR_FUNCTION_NOT_FOUND"}
    assert json.loads(json.dumps(gpu)) == {
        "index": 0,
        "name": "Tesla T4",
        "uuid": "GPU-1",
        "capability": [7, 5],
        "memory_total": 15109 * MIB,
        "memory_used": 3 * MIB,
        "memory_reserved": unknown_call,
        "utilisation_gpu": 97,
        "utilisation_memory": 41,
        "pci_address": "00000000:00:04.0",
        "pcie_generation": 1,
        "pcie_generation_max": 3,
        "pcie_width": 8,
        "pcie_width_max": 16,
        "numa_node": unknown_call,
        "sm_mhz": 585,
        "sm_max_mhz": 1590,
        "memory_mhz": 5000,
        "memory_max_mhz": 5001,
        "application_sm_mhz": unknown_call,
        "performance_state": 0,
        "clock_reasons": 4,
        "temperature_c": 61,
        "slowdown_c": unknown_call,
        "power_mw": 70123,
        "power_limit_mw": unknown_call,
        "power_limit_default_mw": unknown_call,
        "persistence": 1,
        "compute_mode": {"error": "NVML_ERROR_NO_PERMISSION"},
        "ecc": 1,
        "ecc_errors": 0,
        "mig": {"error": "NVML_ERROR_NOT_SUPPORTED"},
        "mig_instances": {"error": "NVML_ERROR_NOT_SUPPORTED"},
        "processes": [
            {"pid": 4242, "used": 2 * MIB, "graphics": False},
            {"pid": 7, "used": None, "graphics": False},
        ],
    }


def test_nvml_of_a_new_driver_tells_the_reserve_apart(
    driver: dict[str, Callable[..., int]],
) -> None:
    driver["nvmlDeviceGetMemoryInfo_v2"] = put(
        at1={"total": 24564 * MIB, "used": 5 * MIB, "reserved": 357 * MIB}
    )
    driver["nvmlDeviceGetCurrentClocksEventReasons"] = put(at1=0x1)
    driver["nvmlDeviceGetComputeRunningProcesses_v3"] = running((1, MIB))
    driver["nvmlDeviceGetGraphicsRunningProcesses_v3"] = running((2, MIB))
    driver["nvmlDeviceGetMemoryAffinity"] = lambda device, size, nodes, scope: (
        nodes._obj.__setitem__(0, 0b10) or 0
    )
    gpu = functions("nvml_gpus")["probe"]()["gpus"][0]
    assert gpu["memory_total"] == 24564 * MIB
    assert gpu["memory_used"] == 5 * MIB
    assert gpu["memory_reserved"] == 357 * MIB
    assert gpu["clock_reasons"] == 1
    assert gpu["numa_node"] == 1
    assert [each["graphics"] for each in gpu["processes"]] == [False, True]


def test_nvml_lists_mig_instances_and_skips_empty_places(
    driver: dict[str, Callable[..., int]],
) -> None:
    driver["nvmlDeviceGetMigMode"] = put(at1=1, at2=1)
    driver["nvmlDeviceGetMaxMigDeviceCount"] = put(at1=7)

    def handle(device: Any, index: Any, result: Any) -> int:
        return 0 if index.value in (0, 3) else int(pynvml.NVML_ERROR_NOT_FOUND)

    driver["nvmlDeviceGetMigDeviceHandleByIndex"] = handle
    driver["nvmlDeviceGetUUID"] = put(at1=b"MIG-5")
    gpu = functions("nvml_gpus")["probe"]()["gpus"][0]
    assert gpu["mig"] == 1
    assert gpu["mig_instances"] == ["MIG-5", "MIG-5"]


def test_nvml_that_cannot_count_still_names_its_driver(
    driver: dict[str, Callable[..., int]],
) -> None:
    driver["nvmlDeviceGetCount_v2"] = refuse(999)
    assert functions("nvml_gpus")["probe"]() == {
        "driver": "470.57.02",
        "cuda": 11040,
        "error": "NVML_ERROR_UNKNOWN",
        "code": 999,
        "where": "nvmlDeviceGetCount",
    }


# --- libcuda --------------------------------------------------------------------------------------


def write(value: Any) -> Callable[..., int]:
    def call(result: Any) -> int:
        result._obj.value = value
        return 0

    return call


def words(texts: dict[int, bytes]) -> Callable[..., int]:
    def call(code: int, result: Any) -> int:
        result._obj.value = texts.get(code)
        return 0 if code in texts else 1

    return call


def libcuda(code: int, **more: Any) -> Callable[[str], Any]:
    calls = {
        "cuInit": lambda flags: code,
        "cuDeviceGetCount": write(2),
        "cuDriverGetVersion": write(12040),
        "cuGetErrorName": words({100: b"CUDA_ERROR_NO_DEVICE"}),
        "cuGetErrorString": words({100: b"no CUDA-capable device is detected"}),
        **more,
    }
    return lambda name: SimpleNamespace(
        **{name: call for name, call in calls.items() if call is not None}
    )


def test_cuda_driver_is_missing(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        text = str(error)
    else:
        pytest.skip("this machine has libcuda")
    answer = run("cuda_driver", tmp_path)
    assert answer == {"library": "libcuda.so.1", "missing": text}


def test_cuda_driver_works() -> None:
    answer = functions("cuda_driver")["probe"](libcuda(0))
    assert answer == {
        "library": "libcuda.so.1",
        "path": "",
        "code": 0,
        "error": "",
        "text": "",
        "version": 12040,
        "devices": 2,
    }


def test_cuda_driver_names_its_error() -> None:
    answer = functions("cuda_driver")["probe"](libcuda(100))
    assert (answer["code"], answer["devices"]) == (100, None)
    assert answer["error"] == "CUDA_ERROR_NO_DEVICE"
    assert answer["text"] == "no CUDA-capable device is detected"
    assert answer["version"] == 12040  # it is told without cuInit


def test_cuda_driver_without_names_for_errors() -> None:
    answer = functions("cuda_driver")["probe"](libcuda(802, cuGetErrorName=None))
    assert (answer["code"], answer["error"]) == (802, "CUresult 802")
    assert functions("cuda_driver")["probe"](libcuda(999))["error"] == "CUresult 999"


def test_cuda_driver_that_is_another_library() -> None:
    answer = functions("cuda_driver")["probe"](libcuda(0, cuInit=None))
    assert answer["library"] == "libcuda.so.1"
    assert "cuInit" in answer["missing"]


def test_the_path_of_a_loaded_library() -> None:
    path = functions("cuda_driver")["path_of"](ctypes.CDLL("libc.so.6"), "getpid")
    assert re.search(r"/libc[.-]", path), path
    assert os.path.realpath(path) == path


# --- PyTorch --------------------------------------------------------------------------------------


def test_torch_devices_here(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch has CUDA")
    answer = run("torch_devices", tmp_path)
    assert answer == {
        "version": torch.__version__,
        "cuda": None,
        "hip": None,
        "available": False,
        "devices": 0,
        "error": "Torch not compiled with CUDA enabled",
        "architectures": [],
        "capabilities": [],
        "kernel_error": None,
        "warnings": [],
    }


def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    answer = run("torch_devices", tmp_path, torch="raise OSError('libcudart.so.12: no such file')")
    assert answer == {"failed": "import torch: OSError: libcudart.so.12: no such file"}


TORCH = """
import warnings
from types import SimpleNamespace
warnings.warn("deprecated in an import")
print("a library's words")
__version__ = "2.6.0+cu124"
version = SimpleNamespace(cuda="12.4", hip=None)

class Tensor:
    def __mul__(self, other): return self
    __add__ = __mul__
    def sum(self): return self
    def item(self): return RESULT

def ones(size, device):
    if FAILURE and device == "cuda:1":
        raise RuntimeError(FAILURE)
    return Tensor()

def available():
    if WARNING:
        warnings.warn(WARNING)
    return not WARNING

def init():
    if WARNING:
        raise RuntimeError(WARNING)

cuda = SimpleNamespace(
    device_count=lambda: 2, is_available=available, init=init, synchronize=lambda index: None,
    get_arch_list=lambda: ["sm_50", "sm_90"], get_device_capability=lambda index: (12, index),
)
"""


def fake_torch(failure: str = "", warning: str = "", result: float = 48.0) -> str:
    return f"FAILURE, WARNING, RESULT = {failure!r}, {warning!r}, {result!r}\n{TORCH}"


def test_torch_that_works(tmp_path: Path) -> None:
    assert run("torch_devices", tmp_path, torch=fake_torch()) == {
        "version": "2.6.0+cu124",
        "cuda": "12.4",
        "hip": None,
        "available": True,
        "devices": 2,
        "error": "",
        "architectures": ["sm_50", "sm_90"],
        "capabilities": [[12, 0], [12, 1]],
        "kernel_error": "",
        "warnings": [],
    }


def test_torch_without_an_image_for_the_second_gpu(tmp_path: Path) -> None:
    failure = "CUDA error: no kernel image is available for execution on the device"
    answer = run("torch_devices", tmp_path, torch=fake_torch(failure=failure))
    assert answer["available"] is True
    assert answer["kernel_error"] == f"cuda:1: {failure}"
    wrong = run("torch_devices", tmp_path, torch=fake_torch(result=47.0))
    assert "47.0" in wrong["kernel_error"]


def test_torch_whose_driver_is_too_old(tmp_path: Path) -> None:
    warning = "The NVIDIA driver on your system is too old (found version 11040)."
    answer = run("torch_devices", tmp_path, torch=fake_torch(warning=warning))
    assert (answer["available"], answer["devices"]) == (False, 2)
    assert answer["error"] == warning
    assert answer["warnings"] == [warning]
    assert answer["kernel_error"] is None


# --- System.probe ---------------------------------------------------------------------------------


def test_a_probe_runs_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System()
    asked: list[str] = []
    together = threading.Barrier(4)

    def count(name: str, seconds: float) -> Any:
        asked.append(name)
        return object()

    monkeypatch.setattr(system, "_probe", count)
    answers: list[Any] = []

    def ask() -> None:
        together.wait()
        answers.append(system.probe("nvml_gpus", 1.0))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == ["nvml_gpus"]
    assert len(answers) == 4
    assert all(answer is answers[0] for answer in answers)
