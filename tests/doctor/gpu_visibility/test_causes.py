"""Causes beyond the table's recorded machines: who else sees no GPU, and what is told to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from helpers_facts import GIB, changed, gpu
from helpers_facts import machine as healthy
from trainfit.doctor import packages as wheels
from trainfit.doctor.checks import MACHINE_CHECKS, check_visibility
from trainfit.hardware.local_gpu import left
from trainfit.results.doctor import Check
from trainfit.results.machine import (
    CudaDriver,
    DeviceNode,
    Fact,
    Gpu,
    GpuProcess,
    Machine,
    PciDevice,
    TorchBuild,
    TorchProbe,
    absent,
    cannot_tell,
    known,
)

BLIND = TorchProbe(False, 0, "No CUDA GPUs are available", ("sm_90",), (), None)
NO_DEVICE = CudaDriver("/usr/lib/libcuda.so.550.54.14", 100, "CUDA_ERROR_NO_DEVICE", None, None)


def refusing(code: int, library: str = NO_DEVICE.library) -> CudaDriver:
    return CudaDriver(library, code, f"CUresult {code}", None, None)


def blind(cuda: dict[str, Any], **changes: Any) -> Machine:
    return healthy(cuda={"torch_probe": BLIND, "cuda": NO_DEVICE} | cuda, **changes)


def failing(words: str | None, devices: int = 1, **changes: Any) -> Machine:
    """PyTorch sees GPUs, and its first kernel fails."""
    probe = TorchProbe(True, devices, "", ("sm_89",), ((8, 9),) * devices, words)
    cuda = {"torch_probe": probe} | changes.pop("cuda", {})
    return healthy(cuda=cuda, **changes)


def verdict(machine: Machine) -> Check:
    (check,) = check_visibility(machine)
    return check


def commands(check: Check) -> str:
    return "\n".join(remedy.action for remedy in check.fixes)


def nodes(**accessible: bool) -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(f"/dev/{n.replace('_', '-')}", may) for n, may in accessible.items())


# --- PyTorch itself ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "shadowed"),
    [
        ("ImportError: libcudnn.so.9: cannot open shared object file: No such file", True),
        ("ImportError: libcusparse.so.12: undefined symbol: __nvJitLinkComplete_12_4", True),
        ("ImportError: /opt/lib/libc10.so: invalid ELF header", True),
        ("ModuleNotFoundError: No module named 'typing_extensions'", False),
    ],
)
def test_a_pytorch_that_cannot_be_imported_is_named_as_such(words: str, shadowed: bool) -> None:
    check = verdict(healthy(cuda={"torch_probe": cannot_tell("p", f"import torch: {words}")}))
    assert (check.verdict, check.kind) == ("bad", "torch_import_fails")
    assert words in check.cause
    assert ("LD_LIBRARY_PATH" in commands(check)) == shadowed
    assert "torch==2.8.0+cu126 --index-url https://download.pytorch.org/whl/cu126" in commands(
        check
    )


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("import torch: OSError: /opt/lib/libgomp.so.1: file too short", "torch_import_fails"),
        ("killed by signal 4", "torch_crashes"),
        ("no answer within 14 s", ""),
    ],
)
def test_a_build_for_the_cpu_that_does_not_start_is_no_good_one(said: str, cause: str) -> None:
    build = TorchBuild("2.8.0+cpu", None, None, "/v/torch")
    facts = without_driver(pci_devices=(), torch=build, torch_probe=cannot_tell("p", said))
    assert verdict(healthy(gpus=(), cuda=facts)).kind == cause


@pytest.mark.parametrize(
    ("signal", "cause"), [(4, "torch_crashes"), (11, "torch_crashes"), (9, "")]
)
def test_a_crash_is_a_cause_and_a_kill_is_none(signal: int, cause: str) -> None:
    probe = cannot_tell("probe", f"killed by signal {signal}")
    assert verdict(healthy(cuda={"torch_probe": probe})).kind == cause


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("cuda:1: CUDA out of memory. Tried to allocate 2.00 MiB.", "gpu_full"),
        ("CUDA error: out of memory", "gpu_full"),
        ("CUDA error: uncorrectable ECC error encountered", "kernel_fails"),
        ("CUDA error: no kernel image is available for execution", "no_kernel_image"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "gpu_busy"),
        (
            "cuDNN version incompatibility: PyTorch was compiled  against (9, 10, 2) but found "
            "runtime version (9, 1, 0). Looks like your LD_LIBRARY_PATH contains incompatible "
            "version of cudnn.",
            "cudnn_mismatch",
        ),
        (None, ""),
    ],
)
def test_a_gpu_that_is_seen_and_fails_is_not_said_to_be_unseen(
    words: str | None, cause: str
) -> None:
    # Odd things next to it, of which none can be the cause where the GPU is seen.
    odd = {
        "pci_devices": (),
        "library_versions": {"libcuda": "550.54.14", "libnvidia-ml": "535.1"},
        "device_nodes": nodes(nvidia0=False),
    }
    check = verdict(failing(words, cuda=odd))
    assert check.kind == cause
    assert "sees no GPU" not in check.title
    assert (check.verdict == "cannot_tell") == (words is None)


def test_a_full_gpu_names_those_that_are_free() -> None:
    busy = gpu(0, used_bytes=23 * GIB)
    check = verdict(failing("cuda:0: out of memory", 2, gpus=[busy, gpu(1)]))
    first = check.fixes[0]
    assert first.action == f"export CUDA_VISIBLE_DEVICES={gpu(1).uuid.value}"
    assert first.undo == "unset CUDA_VISIBLE_DEVICES"
    assert any(e.value == "23.00 GiB" for e in check.evidence)
    granted = {"visible_devices": busy.uuid.value}
    others = verdict(failing("out of memory", gpus=[busy, gpu(1)], cuda=granted))
    assert "export" not in commands(others)  # a scheduler has not granted them
    alone = verdict(failing("out of memory", gpus=[busy]))
    assert "export" not in commands(alone)


def test_addresses_that_cuda_may_not_reserve_are_no_full_gpu() -> None:
    def said(limit: Fact[int]) -> Check:
        return verdict(failing("CUDA error: out of memory", limits={"address_space_bytes": limit}))

    check = said(known(16 * GIB, "getrlimit(RLIMIT_AS)"))
    assert check.kind == "address_space_limited" and "allows 16.00 GiB" in check.title
    assert check.fixes[0].action.startswith("ulimit -v unlimited")
    assert check.fixes[0].undo == f"ulimit -v {16 << 20}"
    unlimited = absent("getrlimit(RLIMIT_AS)", "unlimited")
    for enough in (known(1 << 46, "getrlimit(RLIMIT_AS)"), unlimited):
        assert said(enough).kind == "gpu_full"


def test_rocm_that_sees_a_gpu_and_fails_is_not_told_that_there_is_none() -> None:
    build = TorchBuild("2.9.0+rocm6.4", None, "6.4", "/venv/torch")
    odd = {"torch": build, "pci_devices": (), "kernel_driver": None, "nvml": None, "cuda": None}
    check = verdict(failing("HIP error: invalid device function", cuda=odd, gpus=None))
    assert check.verdict == "cannot_tell" and "fails to run a kernel" in check.title


# --- Masks ------------------------------------------------------------------------------------
def bus(*addresses: str, driver: str | None = "nvidia") -> tuple[PciDevice, ...]:
    return tuple(PciDevice(a, "0x27b8", "0x030200", driver) for a in addresses)


def test_the_hosts_other_gpus_on_a_containers_bus_are_not_the_containers() -> None:
    # docker run --gpus device=1, with the host's number of it inside
    eight = bus(*(f"0000:0{i}:00.0" for i in range(8)))
    inside = {"container": "docker"}
    facts = blind({"visible_devices": "1", "pci_devices": eight}, surroundings=inside)
    assert verdict(facts).kind == "masked"
    seen = verdict(healthy(cuda={"visible_devices": "0", "pci_devices": eight}))
    assert seen.verdict == "good" and "leaves" not in seen.cause


def test_a_gpu_named_twice_hides_all() -> None:
    check = verdict(blind({"visible_devices": "0,0"}))
    assert check.kind == "masked" and "twice" in check.cause


def test_a_job_of_slurm_is_told_to_ask_for_a_gpu() -> None:
    check = verdict(blind({"visible_devices": "NoDevFiles"}, surroundings={"scheduler": "slurm"}))
    assert check.kind == "masked" and "--gres=gpu:1" in check.fixes[0].action


# --- Device files -----------------------------------------------------------------------------
def test_files_of_other_jobs_gpus_are_closed_on_purpose() -> None:
    some = nodes(nvidia0=False, nvidia1=True, nvidiactl=True, nvidia_uvm=True)
    facts = blind({"device_nodes": some}, surroundings={"scheduler": "slurm"})
    assert verdict(facts).kind == "unexplained"
    none = nodes(nvidia0=False, nvidia1=False, nvidiactl=True, nvidia_uvm=True)
    check = verdict(blind({"device_nodes": none}, surroundings={"scheduler": "slurm"}))
    assert check.kind == "device_node" and "--gres" in commands(check)
    assert "chmod" not in commands(check)


def test_permissions_are_not_changed_inside_a_container() -> None:
    closed = nodes(nvidia0=False, nvidiactl=False, nvidia_uvm=False)
    check = verdict(blind({"device_nodes": closed}, surroundings={"container": "podman"}))
    assert check.kind == "device_node"
    assert "keep-groups" in commands(check) and "chmod" not in commands(check)


def test_a_container_without_the_compute_capability_is_told_so() -> None:
    others = {"libnvidia-ml": "550.54.14"}
    without = {"cuda": None, "library_versions": others, "library_places": {}}
    check = verdict(blind(without, surroundings={"container": "docker"}))
    assert check.kind == "container_without_gpu"
    assert "NVIDIA_DRIVER_CAPABILITIES=compute" in commands(check)


def test_cuda_that_is_stuck_after_a_suspend() -> None:
    check = verdict(blind({"cuda": refusing(999)}))
    assert check.kind == "cuda_unknown_error" and "modprobe nvidia_uvm" in commands(check)


def test_a_jetson_is_judged_by_other_rules() -> None:
    board = nodes(nvidia0=True, nvmap=True, nvhost_gpu=True)
    drivers = {"kernel_driver": "35.4.1", "nvml": "35.4.1", "library_versions": {}}
    facts = blind(drivers | {"device_nodes": board})
    assert verdict(facts).kind == "unexplained"


# --- Driver -----------------------------------------------------------------------------------
def test_forward_compatibility_that_is_refused_is_not_an_old_driver() -> None:
    facts = blind({"cuda": refusing(804, "/usr/local/cuda/compat/libcuda.so.560.1")})
    assert verdict(facts).kind == "forward_compat_unsupported"
    needed = TorchBuild("2.9.0+cu130", (13, 0), None, "/venv/torch")
    old = blind({"cuda": refusing(804), "torch": needed})
    assert verdict(old).kind == "driver_too_old"


def without_driver(**cuda: Any) -> dict[str, Any]:
    none = absent("/proc/driver/nvidia/version", "there is no such file")
    return {"kernel_driver": none, "nvml": none, "device_nodes": (), "cuda": None} | cuda


def test_a_gpu_that_is_kept_for_a_virtual_machine_needs_no_installation() -> None:
    held = bus("0000:01:00.0", driver="vfio-pci")
    check = verdict(blind(without_driver(pci_devices=held, library_versions={})))
    assert check.kind == "no_driver"
    assert commands(check) == "sudo driverctl unset-override 0000:01:00.0"
    assert check.fixes[0].undo == "sudo driverctl set-override 0000:01:00.0 vfio-pci"


def test_an_installed_driver_is_loaded_before_it_is_installed_again() -> None:
    check = verdict(blind(without_driver(pci_devices=bus("0000:01:00.0", driver=None))))
    assert check.kind == "no_driver" and "550.54.14" in check.cause
    assert check.fixes[0].action.startswith("sudo modprobe nvidia")


def test_a_slow_machine_without_a_driver_does_not_hang_in_it() -> None:
    late = cannot_tell("probe", "no answer within 8 s")
    facts = healthy(
        cuda=without_driver(pci_devices=(), torch_probe=late, nvidia_smi=late, nvml=late, cuda=late)
    )
    assert verdict(facts).kind == "no_gpu"


def test_libraries_of_another_version_in_a_container_are_the_images() -> None:
    mixed = {"libcuda": "535.1.1", "libnvidia-ml": "550.54.14"}
    check = verdict(blind({"library_versions": mixed}, surroundings={"container": "docker"}))
    assert check.kind == "version_mismatch" and "recreate" in check.fixes[0].action
    assert "on the host" in check.fixes[1].cost


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ("libcuda.so.1: cannot open shared object file", "LD_LIBRARY_PATH=/usr/local/nvidia/lib64"),
        ("/usr/local/nvidia/lib64/libcuda.so.1: file too short", "rm /usr/local/nvidia/lib64/"),
    ],
)
def test_a_libcuda_that_the_loader_does_not_take(said: str, command: str) -> None:
    place = {"libcuda": "/usr/local/nvidia/lib64/libcuda.so.550.54.14"}
    missing = absent("cuInit in a fresh process", said)
    facts = blind(
        {"cuda": missing, "library_places": place}, surroundings={"container": "kubernetes"}
    )
    check = verdict(facts)
    assert check.kind == "libcuda_not_loaded" and said in check.cause
    assert command in commands(check)
    assert verdict(blind({"cuda": missing, "library_places": {}})).kind != check.kind


def test_a_containers_image_does_not_say_how_the_host_is_installed() -> None:
    for changes in ({}, {"pci_devices": cannot_tell("/sys", "no such folder")}):
        cuda = without_driver(pci_devices=bus("0000:01:00.0", driver=None)) | changes
        check = verdict(blind(cuda, surroundings={"container": "docker"}))
        assert check.kind == "no_driver"
        assert "ubuntu" not in commands(check) and "modprobe" not in commands(check)
        assert "on the host" in check.fixes[0].cost


# --- WSL --------------------------------------------------------------------------------------
STORE = "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1.1"


def wsl(code: int, library: str, versions: dict[str, str], **changes: Any) -> Machine:
    cuda = {
        "kernel_driver": None,
        "device_nodes": nodes(dxg=True),
        "cuda": CudaDriver(library, code, "", None, None),
        "library_versions": versions,
        "library_places": {"libcuda": library},
    }
    return blind(cuda, surroundings={"wsl": 2, **changes})


def test_windows_driver_is_known_wherever_a_container_puts_it() -> None:
    for library in (STORE, "/usr/lib/x86_64-linux-gnu/libcuda.so.1.1"):
        check = verdict(wsl(500, library, {}, container="docker"))
        assert check.kind == "wsl_driver" and "hides" not in check.title
    linux = "/usr/lib/x86_64-linux-gnu/libcuda.so.535.247.01"
    assert "hides" in verdict(wsl(100, linux, {"libcuda": "535.247.01"})).title


def test_a_container_under_wsl_without_its_gpu() -> None:
    facts = wsl(100, "", {}, container="docker")
    cuda = changed(facts.cuda, {"device_nodes": (), "cuda": None})
    check = verdict(dataclasses.replace(facts, cuda=cuda))
    assert check.kind == "container_without_gpu" and "docker run --gpus all" in commands(check)


# --- pip's commands ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("driver", "capability", "version", "tag"),
    [
        (580, (8, 9), "2.13.0", "cu130"),
        (580, (8, 9), "2.8.0", "cu126"),  # has none for CUDA 13
        (580, (7, 0), "2.9.0", "cu126"),  # CUDA 13 has dropped Volta
        (570, (12, 0), "2.12.0", None),  # 12.8 is gone
        (570, (12, 0), None, "cu128"),  # CUDA 12.6 does not know Blackwell
        (580, (12, 0), None, "cu130"),
        (550, (8, 0), "2.5.1", "cu124"),
        (470, (8, 6), None, "cu118"),
        (470, (8, 6), "2.9.0", None),
        (None, (8, 6), None, "cu126"),
        (390, (6, 1), None, None),
    ],
)
def test_the_wheel_suits_driver_gpu_and_version(
    driver: int | None, capability: tuple[int, int], version: str | None, tag: str | None
) -> None:
    index = wheels.index_for(driver, [capability], version)
    assert index == (f"https://download.pytorch.org/whl/{tag}" if tag else None)


@pytest.mark.parametrize(
    ("version", "command"),
    [
        ("2.6.0+cu124", "torch==2.6.0+cu124 --index-url https://download.pytorch.org/whl/cu124"),
        (
            "2.10.0.dev20251001+cu130",
            "--pre torch==2.10.0.dev20251001+cu130 "
            "--index-url https://download.pytorch.org/whl/nightly/cu130",
        ),
        ("2.9.0", "pip install --force-reinstall torch==2.9.0  # conda's: conda install"),
        ("2.8.0a0+34c6371d24.nv25.08", "from its original source"),
    ],
)
def test_a_build_comes_back_from_the_index_that_has_it(version: str, command: str) -> None:
    again = wheels.again(TorchBuild(version, (12, 4), None, "/venv/torch"))
    assert command in again
    assert "nv25" not in again or "pip" not in again


def test_a_new_gpu_gets_a_wheel_that_its_driver_serves() -> None:
    probe = TorchProbe(True, 1, "", ("sm_80", "sm_90"), ((12, 0),), "no kernel image is available")
    facts = healthy(cuda={"torch_probe": probe, "kernel_driver": "570.86.10"})
    check = verdict(facts)
    assert check.kind == "no_kernel_image" and check.fixes[0].action.endswith("/cu128")


# --- The other checks -------------------------------------------------------------------------
def test_a_vgpu_that_reports_little_is_not_bad() -> None:
    power = ("power_w", "power_limit_w", "power_limit_default_w", "temperature_c", "slowdown_c")
    link = ("pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max")
    others = ("clock_reasons", "ecc_errors", "application_sm_hz", "reserved_bytes")
    hidden = dict.fromkeys((*power, *link, *others))
    vgpu = gpu(name="GRID A100D-20C", ecc=False, **hidden)
    facts = healthy(gpus=[vgpu], surroundings={"virtual_machine": "vmware"})
    found = [check for _, make in MACHINE_CHECKS for check in make(facts)]
    assert [c.name for c in found if c.verdict == "bad"] == []


def test_a_link_is_not_judged_where_no_job_can_use_the_gpu() -> None:
    dead = gpu(pcie_generation=1)
    blank = {
        field.name: cannot_tell("NVML", "NVML_ERROR_UNKNOWN")
        for field in dataclasses.fields(dead)
        if field.name not in ("index", "name", "pci_address") and "pcie" not in field.name
    }
    facts = healthy(gpus=[dataclasses.replace(dead, **blank)])
    names = [check.name for _, make in MACHINE_CHECKS for check in make(facts)]
    assert "pcie" not in names


def busy(index: int, **changes: Any) -> Gpu:
    process = GpuProcess(4000 + index, "python", 20 * GIB)
    return gpu(index, used_bytes=21 * GIB, processes=(process,), **changes)


@pytest.mark.parametrize("mask", ["GPU-00000001", "1"])
def test_gpus_that_a_mask_leaves_to_others_are_not_judged(mask: str) -> None:
    gpus = [busy(0), gpu(1), busy(2, ecc_errors=3)]
    facts = healthy(gpus=gpus, cuda={"visible_devices": mask}, cpu={"usable_cores": 4.0})
    found = [check for _, make in MACHINE_CHECKS for check in make(facts)]
    assert [check.name for check in found if check.verdict == "bad"] == []
    open_to_all = healthy(gpus=gpus, cpu={"usable_cores": 4.0})
    names = {c.name for _, make in MACHINE_CHECKS for c in make(open_to_all) if c.verdict == "bad"}
    assert names == {"gpu-processes", "ecc", "cores"}


def test_a_mask_that_names_no_gpu_for_certain_leaves_all() -> None:
    mixed = (gpu(0, name="NVIDIA A"), gpu(1, name="NVIDIA B"))
    split = (gpu(0, mig=True, mig_instances=("MIG-1", "MIG-2")), gpu(1))
    assert left(None, mixed) == left("1", mixed) == left("", mixed) == left("GPU-x", mixed) == mixed
    assert left("1", split) == split
    assert left("MIG-2", split) == split[:1]
    assert left(f"MIG-{split[1].uuid.value}/1/0", split) == split[1:]


def test_a_lost_gpu_matters_behind_a_mask_too() -> None:
    lost = gpu(0)
    blank = {
        field.name: cannot_tell("NVML", "NVML_ERROR_GPU_IS_LOST")
        for field in dataclasses.fields(lost)
        if field.name != "index"
    }
    gpus = [dataclasses.replace(lost, **blank), gpu(1)]
    facts = healthy(gpus=gpus, cuda={"visible_devices": "GPU-00000001"})
    found = [check for _, make in MACHINE_CHECKS for check in make(facts)]
    assert [check.kind for check in found if check.verdict == "bad"] == ["gpu_lost"]


# --- Machines that public issue trackers show -----------------------------------------------------


@pytest.mark.parametrize(
    ("version", "hip", "said"),
    [("2.8.0+rocm6.4", "6.4", "AMD's GPUs"), ("2.8.0+xpu", None, "Intel's GPUs")],
)
def test_a_build_for_another_maker_s_gpus(version: str, hip: str | None, said: str) -> None:
    build = TorchBuild(version, None, hip, "/v/torch")
    words = "No HIP GPUs are available" if hip else "Torch not compiled with CUDA enabled"
    probe = TorchProbe(False, 0, words, (), (), None)
    check = verdict(healthy(cuda={"torch": build, "torch_probe": probe}))
    assert (check.verdict, check.kind) == ("bad", "torch_for_other_gpus") and said in check.title
    assert "torch==2.8.0 --index-url https://download.pytorch.org/whl/cu" in commands(check)
    # On a machine with none of NVIDIA's it is no fault.
    away = without_driver(pci_devices=(), torch=build, torch_probe=probe)
    assert verdict(healthy(gpus=(), cuda=away)).kind == ""


JETSON = {
    "device_nodes": nodes(nvhost_gpu=True, nvmap=True, nvidia0=True),
    "pci_devices": (),
    "kernel_driver": "540.4.0",
    "nvml": "540.4.0",
}


@pytest.mark.parametrize(
    ("probe", "cause"),
    [
        (
            TorchProbe(
                *(False, 0, "The NVIDIA driver on your system is too old (found version 12060)."),
                *(("sm_80", "sm_90"), (), None),
            ),
            "driver_too_old",
        ),
        (
            TorchProbe(True, 1, "", ("sm_90",), ((8, 7),), "CUDA error: no kernel image is …"),
            "no_kernel_image",
        ),
    ],
)
def test_a_wheel_for_servers_on_a_jetson(probe: TorchProbe, cause: str) -> None:
    """Its driver is JetPack's and cannot be replaced by another; NVIDIA has wheels for it."""
    build = TorchBuild("2.9.0+cu130", (13, 0), None, "/v/torch")
    driver = CudaDriver("/usr/lib/libcuda.so.1.1", 0, "", (12, 6), 1)
    cuda = JETSON | {"torch": build, "torch_probe": probe, "cuda": driver}
    check = verdict(healthy(cuda=cuda))
    assert check.kind == cause and len(check.fixes) == 1
    assert "JetPack" in commands(check) and "580" not in f"{check.cause} {commands(check)}"


@pytest.mark.parametrize(
    ("device", "driver", "said"),
    [
        ("0x2b85", None, "nvidia-driver-570-open"),
        ("0x1b06", None, "dmesg"),
        ("0x2b85", "vfio-pci", "driverctl unset-override 0000:01:00.0"),
        ("0x2684", "nouveau", "install"),
    ],
)
def test_a_driver_that_is_loaded_and_drives_no_gpu(
    device: str, driver: str | None, said: str
) -> None:
    """nvidia-smi: "No devices were found"."""
    cuda = {
        "pci_devices": (PciDevice("0000:01:00.0", device, "0x030000", driver),),
        "device_nodes": nodes(nvidiactl=True),
        "nvidia_smi": cannot_tell("nvidia-smi -L", "No devices were found"),
    }
    check = verdict(blind(cuda, gpus=()))
    assert check.kind == "gpu_not_driven" and said in commands(check)
    bound = {"pci_devices": (PciDevice("0000:01:00.0", device, "0x030000", "nvidia"),)}
    assert verdict(blind(cuda | bound, gpus=())).kind == "device_node"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ImportError: libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent", "mkl<2024.1"),
        ("ImportError: libstdc++.so.6: version `GLIBCXX_3.4.30' not found", "$CONDA_PREFIX/lib"),
        ("ImportError: undefined symbol: ncclCommWindowRegister", "env -u LD_LIBRARY_PATH"),
    ],
)
def test_libraries_of_elsewhere_have_their_own_fix(words: str, said: str) -> None:
    check = verdict(healthy(cuda={"torch_probe": cannot_tell("p", f"import torch: {words}")}))
    assert check.kind == "torch_import_fails" and said in check.fixes[0].action
