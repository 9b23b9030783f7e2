"""The composed machines: which parts each is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import bases
from parts import (
    GIB,
    Part,
    composed,
    distributions,
    drivers,
    gpus,
    made_up_uuid,
    surroundings,
    torches,
)
from parts.drivers import D470, D535, D550_54, D550_90, D580, D580_OPEN, DEBIAN, WSL

FORMAT = {"format": "trainfit-machine", "version": 1}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine's parts, the cause that its decision table must find, and where it is from."""

    about: str
    cause: str
    provenance: str
    parts: tuple[Part, ...]

    def document(self) -> dict[str, Any]:
        whole = composed(*self.parts)
        return {
            **FORMAT,
            "origin": "composed",
            "provenance": self.provenance,
            "about": self.about,
            "expected_cause": self.cause,
            "environment": dict(sorted(whole["environment"].items())),
            "files": dict(sorted(whole["files"].items())),
            "inaccessible": whole["inaccessible"],
            "calls": whole["calls"],
            "commands": dict(sorted(whole["commands"].items())),
            "probes": dict(sorted(whole["probes"].items())),
        }


# --- The machines -----------------------------------------------------------------------------


def machines() -> dict[str, Machine]:
    """Every composed machine by its name."""
    return {**_healthy(), **_wheels_and_masks(), **_absent(), **_broken(), **_late(), **_on_wsl()}


def _healthy() -> dict[str, Machine]:
    card_4090 = (drivers.works(D550_54, [bases.RTX_4090]), torches.sees(torches.T26, [(8, 9)]))
    server = bases.h100s(faults=True)
    granted = dataclasses.replace(bases.A10, address="0000:81:00.0")
    return {
        "workstation": Machine(
            "hybrid CPU at `powersave` with HWP, two P-cores faster than the rest; the idle GPU's"
            " link is at generation 1 of 4; / on NVMe, /data on a hard disk",
            "", "cpuinfo fields of an i7-1260P (htop issue 879), C-states of intel_idle.c, TLP"
            " outputs for intel_pstate, NVRM line of 550.54.14",
            (bases.workstation(), *card_4090),
        ),
        "t4-vm": Machine(
            "virtual machine: neither cpufreq nor C-states; persistent disk", "",
            "cpuinfo of colabtools issue 1937, with 8 CPUs",
            (
                bases.cloud(8, 30_812_212),
                drivers.works(D550_90, [bases.T4]),
                torches.sees(torches.T26, [(7, 5)]),
            ),
        ),
        "container-quota": Machine(
            "quota of 2 CPUs of 64, 8 GiB, 64 MiB of /dev/shm, OMP_NUM_THREADS not set", "",
            "mounts of coder/envbox issue 126 and lxc issue 3890; Docker's defaults",
            (
                bases.container("200000 100000", str(8 * GIB), D550_90.version),
                drivers.works(D550_90, [bases.A10]),
                {"files": {"/proc/driver/nvidia/params": None, "/dev/nvidia-modeset": None}},
                torches.sees(torches.T26, [(8, 6)]),
                bases.asked_for_gpus("all"),
            ),
        ),
        "server-8gpu": Machine(
            "two NUMA nodes, 8 H100 with NVSwitch; GPU 3 has half its PCIe lanes and somebody"
            " else's process, GPU 5 no persistence mode, GPU 6 two ECC errors; /data on NFS", "",
            "PCI ids of H100 and NVSwitch from the PCI id list; nodes as in flux issue 14",
            (
                bases.server(),
                drivers.works(D550_90, server),
                drivers.nvswitches(running=True),
                torches.sees(torches.T26, [(9, 0)] * 8),
                {"calls": {"processes": {"41207": "python", "90311": "python3"}}},
            ),
        ),
        "mig": Machine(
            "MIG with two instances; CUDA_VISIBLE_DEVICES names one by its UUID", "",
            "NVIDIA's MIG user guide: /proc/driver/nvidia/capabilities, `nvidia-smi -L`",
            (
                bases.cloud(12, 87_412_212),
                drivers.works(D550_90, [bases.A100]),
                drivers.mig(D550_90, bases.A100, ["3g.20gb", "3g.20gb"]),
                torches.sees(torches.T26, [(8, 0)]),
            ),
        ),
        "jetson-orin": Machine(
            "Arm without model name; the GPU is not on PCI, NVML knows no memory, no nvidia-uvm",
            "", "lscpu of vamp issue 20; /proc/driver/nvidia/version and /dev of published logs of"
            " JetPack 6; the 12 CPUs are in three packages, as Linux 5.15 says",
            (bases.jetson(),),
        ),
        "slurm-node": Machine(
            "4 of 64 CPUs by cpuset, one of four GPUs: the other three nodes may not be opened", "",
            "paths of Slurm's cgroup v2 documentation (jobperf issue 3)",
            (bases.slurm(granted),),
        ),
        "forked-after-cuda": Machine(
            "fresh processes see the GPU; the asking process is a fork of one that used CUDA",
            "forked_after_cuda", "as workstation; torch/cuda/__init__.py, `_is_in_bad_fork`",
            (bases.workstation(), *card_4090, {"calls": {"bad_fork": True}}),
        ),
    }  # fmt: skip


def _wheels_and_masks() -> dict[str, Machine]:
    good = drivers.works(D550_54, [bases.RTX_3060])
    blind = (
        bases.desktop(), drivers.installed(D550_54, [bases.RTX_3060]),
        drivers.cuda_fails(100, f"{DEBIAN}/libcuda.so.550.54.14"), torches.blind(torches.T26),
    )  # fmt: skip

    def masked(value: str, about: str) -> Machine:
        variable = {"environment": {"CUDA_VISIBLE_DEVICES": value}}
        source = "CUDA programming guide, CUDA_VISIBLE_DEVICES: enumeration ends at the first bad"
        return Machine(about, "masked", source, (*blind, variable))

    return {
        "cpu-laptop": Machine(
            "no NVIDIA GPU and a CPU-only wheel, which fits; btrfs, full disk, swap in use",
            "", "cpuinfo of htop issue 879 (i7-1260P)",
            (bases.laptop(), drivers.without_driver(), torches.without_cuda(torches.CPU_ONLY)),
        ),
        "cpu-only-torch": Machine(
            "GPU and driver are fine, the wheel has no CUDA", "cpu_only_torch",
            "version.py of the wheel torch 2.13.0+cpu",
            (bases.desktop(), good, torches.without_cuda(torches.CPU_ONLY)),
        ),
        "masked-empty": masked("", "CUDA_VISIBLE_DEVICES is set and empty"),
        "masked-minus-one": masked("-1", "CUDA_VISIBLE_DEVICES is -1"),
        "masked-index": masked("7", "CUDA_VISIBLE_DEVICES names index 7 of one GPU"),
        "masked-uuid": masked(
            f"GPU-{made_up_uuid('elsewhere')}", "CUDA_VISIBLE_DEVICES names a UUID of elsewhere"
        ),
    }  # fmt: skip


def _absent() -> dict[str, Machine]:
    nouveau = (
        "nouveau 3096576 8 - Live 0x0000000000000000\n"
        "video 77824 1 nouveau, Live 0x0000000000000000\n"
    )
    path = f"{DEBIAN}/libcuda.so.550.54.14"
    return {
        "no-gpu": Machine(
            "no NVIDIA device on the bus; PyTorch has CUDA", "no_gpu",
            "c10/cuda/CUDAFunctions.cpp: message without a driver",
            (
                bases.desktop(), gpus.intel_graphics("0x3e98"), drivers.without_driver(),
                torches.blind(torches.T26, torches.NO_DRIVER),
            ),
        ),
        "no-driver": Machine(
            "the GPU is driven by nouveau; nothing of NVIDIA's is installed", "no_driver",
            "c10/cuda/CUDAFunctions.cpp: message without a driver",
            (
                bases.desktop(), drivers.without_driver(),
                {
                    "files": gpus.on_bus(bases.RTX_3060, "nouveau")
                    | {"/proc/modules": nouveau, "/dev/dri/card0": "", "/dev/dri/renderD128": ""}
                },
                torches.blind(torches.T26, torches.NO_DRIVER),
            ),
        ),
        "no-driver-after-kernel-update": Machine(
            "libraries are there, but no module was built for the new kernel: no driver holds the"
            " GPU",
            "no_driver", "nvidia-smi's words: nvidia-docker issue 291",
            (
                bases.desktop(distributions.ubuntu_22("6.8.0-48-generic")), drivers.no_module(),
                drivers.libraries(D550_54.version), drivers.nvml_fails(9),
                drivers.cuda_fails(100, path), {"files": gpus.on_bus(bases.RTX_3060, None)},
                torches.blind(torches.T26),
            ),
        ),
        "container-without-gpu": Machine(
            "started without `--gpus`: the host's module is visible, device nodes and libraries"
            " are not", "container_without_gpu",
            "Docker shares /proc and /sys/bus/pci with the host",
            (
                bases.container(), drivers.kernel_module(D550_90, [bases.A10]),
                drivers.nvml_fails(12),
                drivers.cuda_missing(), torches.blind(torches.T26, torches.NO_DRIVER),
            ),
        ),
    }  # fmt: skip


def _broken() -> dict[str, Machine]:
    lost_nodes = drivers.denied("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    library = f"{DEBIAN}/libcuda.so"

    def lost(code: int, error: str) -> tuple[Part, ...]:
        return (
            bases.container(gpu=D550_90.version),
            drivers.installed(D550_90, [bases.A10]), lost_nodes,
            drivers.nvml_fails(999), drivers.cuda_fails(code, f"{library}.{D550_90.version}"),
            torches.blind(torches.T26, error), bases.asked_for_gpus("all"),
            {"files": {"/dev/nvidia-modeset": None}},
        )  # fmt: skip

    def mismatch(kernel: drivers.Driver, user: drivers.Driver) -> tuple[Part, ...]:
        return (
            bases.desktop(), drivers.kernel_module(kernel, [bases.RTX_3060]),
            drivers.device_nodes(1),
            drivers.libraries(user.version),
            drivers.nvml_fails(18, user.version.rpartition(".")[0]),
            drivers.cuda_fails(803, f"{library}.{user.version}"),
            torches.blind(torches.T26, torches.ERRORS[803]),
        )  # fmt: skip

    return {
        "container-lost-gpu": Machine(
            "after `systemctl daemon-reload` on the host the nodes may not be opened",
            "container_lost_gpu", "nvidia-container-toolkit issues 48 and 1227",
            lost(100, torches.NO_GPUS),
        ),
        "container-lost-gpu-v1": Machine(
            "the same with cgroup v1, whose devices.list has lost `c 195:0 rw`; cuInit says 999",
            "container_lost_gpu", "devices.list of nvidia-container-toolkit issue 251",
            (
                *lost(999, torches.UNKNOWN),
                surroundings.docker_cgroup_v1(
                    "c 1:3 rwm\nc 1:5 rwm\nc 136:* rwm\nc 195:* m\n",
                    bases.container(gpu=D550_90.version),
                ),
            ),
        ),
        "version-mismatch": Machine(
            "module 550.90.07, libraries 550.54.14", "version_mismatch",
            "NVRM line of 550.90.07 as logged; NVML error 18, CUDA error 803",
            mismatch(D550_90, D550_54),
        ),
        "version-mismatch-after-upgrade": Machine(
            "packages were upgraded to 550.90.07, the module of 550.54.14 is still loaded",
            "version_mismatch", "as version-mismatch, the other way round",
            mismatch(D550_54, D550_90),
        ),
        "driver-too-old": Machine(
            "driver 470 (CUDA 11.4), PyTorch for CUDA 12.4; NVML of 470 lacks newer calls",
            "driver_too_old", "driver and words of Fooocus issue 1313",
            (
                bases.desktop(distributions.ubuntu_20()), drivers.works(D470, [bases.RTX_3090_470]),
                torches.blind(torches.T26, torches.TOO_OLD.format(11040)),
            ),
        ),
        "driver-too-old-cuda13": Machine(
            "driver 550 (CUDA 12.4), PyTorch for CUDA 13.0", "driver_too_old",
            "CUDA 13 needs driver 580 (CUDA toolkit release notes)",
            (
                bases.desktop(), drivers.works(D550_54, [bases.RTX_3060]),
                torches.blind(torches.T29_CU130, torches.TOO_OLD.format(12040)),
            ),
        ),
    }  # fmt: skip


def _late() -> dict[str, Machine]:
    eight = bases.h100s(faults=False)
    path = f"{DEBIAN}/libcuda.so"
    no_uvm = (
        drivers.kernel_module(D550_54, [bases.RTX_3060], uvm=False),
        drivers.device_nodes(1, uvm=False),
        drivers.libraries(D550_54.version), drivers.nvml(D550_54, [bases.RTX_3060]),
    )  # fmt: skip
    everything = ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
    return {
        "fabric-manager-down": Machine(
            "8 H100, fabric manager failed; `nvidia-smi -L` works", "fabric_manager_down",
            "pytorch issue 35710, lisa issue 2823",
            (
                bases.server(), drivers.installed(D550_90, eight),
                drivers.nvswitches(running=False),
                drivers.cuda_fails(802, f"{path}.{D550_90.version}"),
                torches.blind(torches.T26, torches.ERRORS[802]),
            ),
        ),
        "no-kernel-image-old-gpu": Machine(
            "GTX 1080 (6.1) with a wheel that starts at 7.0", "no_kernel_image",
            "architectures of the 2.9 wheels: ComfyUI pull request 16438",
            (
                bases.desktop(), drivers.works(D580, [bases.GTX_1080]),
                torches.incompatible(torches.T29_CU128, "NVIDIA GeForce GTX 1080", (6, 1)),
            ),
        ),
        "no-kernel-image-new-gpu": Machine(
            "RTX 5090 (12.0) with a wheel that ends at 9.0", "no_kernel_image",
            "pytorch issue 167244; warning as in all-in-one issue 35",
            (
                bases.desktop(), drivers.works(D580_OPEN, [bases.RTX_5090]),
                torches.incompatible(torches.T26, "NVIDIA GeForce RTX 5090", (12, 0)),
            ),
        ),
        "device-node-missing": Machine(
            "/dev/nvidia-uvm is missing and its module not loaded; NVML is fine", "device_node",
            "pytorch issue 49081",
            (
                bases.desktop(), *no_uvm, drivers.cuda_fails(999, f"{path}.{D550_54.version}"),
                torches.blind(torches.T26, torches.UNKNOWN),
            ),
        ),
        "device-node-denied-uvm": Machine(
            "/dev/nvidia-uvm may not be opened; NVML is fine", "device_node",
            "cuInit 304: gpu-burn issue 92",
            (
                bases.desktop(), drivers.installed(D550_54, [bases.RTX_3060]),
                drivers.denied("nvidia-uvm", "nvidia-uvm-tools"),
                drivers.cuda_fails(304, f"{path}.{D550_54.version}"),
                torches.blind(torches.T26, torches.ERRORS[304]),
            ),
        ),
        "device-node-denied": Machine(
            "no /dev/nvidia* may be opened (mode 660, user not in the group)", "device_node",
            "NVML error 4 (nvml.h); NVreg_DeviceFileMode in the driver's README",
            (
                bases.desktop(), drivers.installed(D550_54, [bases.RTX_3060]),
                drivers.denied(*everything),
                drivers.nvml_fails(4), drivers.cuda_fails(100, f"{path}.{D550_54.version}"),
                torches.blind(torches.T26),
                {"files": {"/proc/driver/nvidia/params": "DeviceFileMode: 432\n"}},
            ),
        ),
        "mig-without-instances": Machine(
            "MIG is on, nobody made instances; NVML is fine", "mig_without_instances",
            "NVIDIA's MIG user guide",
            (
                bases.cloud(12, 87_412_212), drivers.installed(D550_90, [bases.A100]),
                drivers.mig(D550_90, bases.A100, []),
                drivers.cuda_fails(100, f"{path}.{D550_90.version}"), torches.blind(torches.T26),
            ),
        ),
    }  # fmt: skip


def _on_wsl() -> dict[str, Machine]:
    windows = drivers.wsl_libraries(drivers.WSL_CUDA)
    works = drivers.nvml(bases.WSL_DRIVER, [bases.WSL_4070])
    stub = f"{WSL}/libcuda.so.1.1"
    return {
        "wsl2": Machine(
            "WSL 2: /dev/dxg and /usr/lib/wsl/lib instead of /dev/nvidia* and a module", "",
            "mounts of WSL issue 7152, versions of vllm pull request 9293",
            (
                bases.wsl(), windows, works, drivers._cuda(stub, 0, 12040, 1),
                torches.sees(torches.T24, [(8, 9)]),
            ),
        ),
        "wsl-shadowed": Machine(
            "a Linux driver was installed inside: its libcuda is found before Windows' own",
            "wsl_driver", "cuml issue 6218: cuInit 100, cured by LD_LIBRARY_PATH=/usr/lib/wsl/lib",
            (
                bases.wsl(), windows, drivers.libraries(D535.version), drivers.nvml_fails(9),
                drivers.cuda_fails(100, f"{DEBIAN}/libcuda.so.{D535.version}"),
                torches.blind(torches.T24),
            ),
        ),
        "wsl-no-windows-driver": Machine(
            "Windows has no driver with CUDA for WSL: no libcuda in /usr/lib/wsl/lib",
            "wsl_driver", "NVIDIA's CUDA on WSL guide",
            (
                bases.wsl(), drivers.wsl_libraries(()), drivers.nvml_fails(12),
                drivers.cuda_missing(),
                torches.blind(torches.T24, torches.NO_DRIVER),
            ),
        ),
        "wsl-old-kernel-part": Machine(
            "libraries are in place but cuInit says 500 (Windows driver and WSL do not match)",
            "wsl_driver", "NVIDIA's CUDA on WSL guide; CUDA error 500",
            (
                bases.wsl(), windows, works, drivers.cuda_fails(500, stub),
                torches.blind(torches.T24, torches.ERRORS[500]),
            ),
        ),
    }  # fmt: skip
