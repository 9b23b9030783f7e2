"""The composed machines: which parts each is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

from parts import GIB, Part, composed, drivers, gpus, made_up_uuid, processors, systems, torches
from parts.drivers import D470, D535, D550_54, D550_90, D580, D580_OPEN, DEBIAN, RED_HAT, WSL
from parts.gpus import Card

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


# --- Bases: everything but the GPU and PyTorch ------------------------------------------------


def _workstation() -> Part:
    """i9-12900K, Ubuntu 24.04, NVMe for / and a hard disk for /data."""
    return composed(
        processors.i9_12900k(),
        processors.nodes([range(24)], 65_534_212, 40_118_220),
        systems.memory(65_534_212, 52_118_440, 8_388_604, 12_288),
        systems.disk(systems.NVME),
        systems.disk(systems.HARD_DISK),
        systems.host_mounts(
            "30 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro",
            "91 30 8:1 / /data rw,relatime shared:52 - ext4 /dev/sda1 rw",
        ),
        systems.room(33_553_516_544, root=(1831, 902), data=(7302, 2190)),
        systems.data_set(182e6),
        systems.ubuntu_24(),
        systems.board(*systems.ASUS),
        systems.limits((1024, 1_048_576), 8_388_608_000, 255_604, 24),
        systems.session_cgroup(3_221_225_472),
        systems.systemd(),
        gpus.other_devices(),
        gpus.intel_graphics("0x4680"),
    )


def _desktop(distribution: Part | None = None) -> Part:
    """i7-9700K, Ubuntu 22.04, one NVMe: the small machine that most causes are shown on."""
    return composed(
        processors.i7_9700k(),
        processors.nodes([range(8)], 32_796_084, 24_118_220),
        systems.memory(32_796_084, 27_440_112, 2_097_148),
        systems.disk(systems.NVME),
        systems.host_mounts(
            "30 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro"
        ),
        systems.room(16_791_597_056, root=(1831, 640)),
        systems.data_set(3.1e9),
        distribution or systems.ubuntu_22(),
        systems.board(*systems.ASUS),
        systems.limits((1024, 1_048_576), 4_197_900_288, 127_934, 8),
        systems.session_cgroup(2_147_483_648),
        systems.systemd(),
        gpus.other_devices(),
    )


def _cloud(vcpus: int, memory_kib: int) -> Part:
    """A virtual machine at Google: no frequencies, no C-states, a network disk."""
    return composed(
        processors.cloud_xeon(vcpus),
        processors.nodes([range(vcpus)], memory_kib, memory_kib * 8 // 10),
        systems.memory(memory_kib, memory_kib * 9 // 10),
        systems.disk(systems.CLOUD_DISK),
        systems.host_mounts(
            "30 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,discard,errors=remount-ro"
        ),
        systems.room(memory_kib * 512, root=(194, 88)),
        systems.data_set(118e6),
        systems.ubuntu_22("6.5.0-1025-gcp"),
        systems.board(*systems.GOOGLE),
        systems.limits((1024, 1_048_576), memory_kib * 128, 120_110, vcpus),
        systems.session_cgroup(1_610_612_736),
        systems.systemd(),
        gpus.virtio_devices(),
    )


def _server() -> Part:
    """Two EPYC 9334, two NUMA nodes, 1 TiB, data on a network file system."""
    first, second = [*range(32), *range(64, 96)], [*range(32, 64), *range(96, 128)]
    return composed(
        processors.two_epyc_9334(),
        processors.nodes([first, second], 1_056_461_420, 990_118_220),
        systems.memory(1_056_461_420, 1_031_220_118),
        systems.disk(systems.NVME),
        systems.host_mounts(
            "30 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw",
            "140 30 0:57 / /data rw,relatime shared:77 - nfs4 10.20.0.5:/export/data rw,vers=4.2,"
            "rsize=1048576,wsize=1048576,proto=tcp,nconnect=8",
        ),
        systems.room(540_908_247_040, root=(1755, 1402), data=(204_800, 61_440)),
        systems.data_set(1.9e9, 7.2e9),
        systems.ubuntu_22(),
        systems.board(*systems.SUPERMICRO),
        systems.limits((1_048_576, 1_048_576), None, 4_126_504, 128),
        systems.session_cgroup(21_474_836_480),
        systems.systemd(),
        gpus.other_devices(amd=True),
    )


def _container(cpu_max: str = "max 100000", memory_max: str = "max", gpu: str = "") -> Part:
    """Docker on a host with 64 CPUs; ``gpu`` is the driver's version where it got a GPU."""
    device = "- ext4 /dev/nvme0n1p2 rw"
    mounted = ()
    if gpu:
        mounted = (
            "1413 1404 0:84 / /proc/driver/nvidia rw,nosuid,nodev,noexec,relatime"
            " - tmpfs tmpfs rw,mode=555,inode64",
            f"1414 1403 259:2 /usr/bin/nvidia-smi /usr/bin/nvidia-smi ro,nosuid,nodev {device}",
            *(
                f"{number} 1403 259:2 {DEBIAN}/{name}.so.{gpu} {DEBIAN}/{name}.so.{gpu}"
                f" ro,nosuid,nodev {device}"
                for number, name in ((1415, "libcuda"), (1416, "libnvidia-ml"))
            ),
            *(
                f"{number} 1405 0:5 /{name} /dev/{name} ro,nosuid,noexec"
                " - devtmpfs udev rw,size=263929756k,mode=755,inode64"
                for number, name in enumerate(("nvidiactl", "nvidia-uvm", "nvidia0"), 1417)
            ),
        )
    return composed(
        processors.epyc_7543(),
        processors.nodes([range(64)], 527_876_540, 400_118_220),
        systems.memory(527_876_540, 480_220_118),
        systems.disk(systems.NVME),
        systems.disk(systems.NVME_DATA),
        systems.ubuntu_22(),
        systems.board(*systems.SMALL_SERVER),
        systems.limits((1_048_576, 1_048_576), 65_536, None, 64),
        gpus.other_devices(amd=True),
        systems.docker(
            cpu_max, memory_max, 1_288_490_188, 65_536, 64,
            "1411 1403 259:4 /sets /data ro,relatime - xfs /dev/nvme1n1 rw,attr2,inode64", mounted,
        ),
        systems.room(64 << 20, root=(1831, 402), data=(3576, 1200)),
        systems.data_set(5.4e9),
    )  # fmt: skip


def _asked_for_gpus(which: str) -> Part:
    values = {"NVIDIA_VISIBLE_DEVICES": which, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    return {"environment": values}


def _wsl() -> Part:
    """WSL 2 on a Ryzen; /data is a Windows folder."""
    return composed(
        processors.wsl_ryzen(),
        processors.nodes([range(16)], 32_726_812, 28_118_220),
        systems.memory(32_726_812, 29_440_112, 8_388_608),
        systems.disk(systems.HYPERV_DISK),
        systems.wsl(),
        systems.limits((1024, 1_048_576), 67_108_864, 127_732, 16),
        systems.session_cgroup(1_073_741_824, "/init.scope"),
        systems.systemd(),
        systems.room(16_755_326_976, root=(1007, 874), **{"mnt/c": (1862, 220)}),
        systems.data_set(1.4e9),
        systems.data_set(160e6, 210e6, "/mnt/c/data"),
    )


def _laptop() -> Part:
    """i7-1260P, Fedora: btrfs, no GPU but Intel's."""
    return composed(
        processors.i7_1260p(),
        processors.nodes([range(16)], 16_004_212, 4_118_220),
        systems.memory(16_004_212, 6_440_112, 8_388_604, 1_220_112),
        systems.disk(systems.NVME),
        systems.host_mounts(
            "30 1 0:33 /root / rw,relatime shared:1 - btrfs /dev/nvme0n1p3"
            " rw,compress=zstd:1,ssd,discard=async,space_cache=v2,subvolid=257,subvol=/root",
            "92 30 0:33 /home /home rw,relatime shared:60 - btrfs /dev/nvme0n1p3"
            " rw,compress=zstd:1,ssd,discard=async,space_cache=v2,subvolid=256,subvol=/home",
        ),
        systems.room(8_194_156_544, root=(475, 22), home=(475, 22)),
        systems.data_set(2.2e9),
        systems.fedora(),
        systems.board(*systems.LENOVO),
        systems.limits((1024, 524_288), 2_048_539_136, 62_216, 16),
        systems.session_cgroup(
            1_073_741_824,
            "/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome-terminal.scope",
        ),
        systems.systemd(),
        gpus.other_devices(),
        gpus.intel_graphics(),
    )


# --- GPUs -------------------------------------------------------------------------------------

PRIMARY = "0000:01:00.0"
RTX_4090 = Card(gpus.RTX_4090, PRIMARY, changes={"memory_used": 642 << 20, "persistence": 0})
RTX_3060 = Card(gpus.RTX_3060, PRIMARY, changes={"memory_used": 210 << 20, "persistence": 0})
RTX_5090 = Card(gpus.RTX_5090, PRIMARY, changes={"persistence": 0})
GTX_1080 = Card(gpus.GTX_1080, PRIMARY, changes={"persistence": 0})
#: NVML of 470 has neither the call that tells the reserve apart nor that for the node.
RTX_3090_470 = Card(
    gpus.RTX_3090, PRIMARY,
    changes={
        "memory_total": 24268 << 20, "memory_reserved": gpus.NOT_FOUND,
        "numa_node": gpus.NOT_FOUND, "persistence": 0,
    },
)  # fmt: skip
T4 = Card(gpus.T4, "0000:00:04.0", changes={"pcie_generation": 1})
A10 = Card(gpus.A10, "0000:81:00.0", node=0)
A100 = Card(gpus.A100, "0000:00:04.0")
WSL_4070 = Card(
    gpus.RTX_4070_LAPTOP, PRIMARY, width=8,
    changes={
        "memory_used": 1204 << 20, "ecc": gpus.NOT_SUPPORTED, "clock_reasons": 0,
        "slowdown_c": gpus.NOT_SUPPORTED,
    },
)  # fmt: skip
WSL_DRIVER = drivers.Driver("551.88", 12040, "")
H100_ADDRESSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")


def _h100s(faults: bool) -> list[Card]:
    changes: dict[int, dict[str, Any]] = {}
    if faults:
        foreign = {"pid": 90_311, "used": 40 << 30, "graphics": False}
        changes = {
            3: {
                "processes": [foreign], "memory_used": (40 << 30) + (514 << 20),
                "utilisation_gpu": 97, "utilisation_memory": 41, "sm_mhz": 1980,
                "clock_reasons": 0, "power_mw": 512_204, "temperature_c": 58,
            },
            5: {"persistence": 0},
            6: {"ecc_errors": 2},
        }  # fmt: skip
    return [
        Card(
            gpus.H100, f"0000:{bus}:00.0", node=int(number >= 4), serial=str(number),
            width_now=8 if faults and number == 3 else 0, changes=changes.get(number, {}),
        )
        for number, bus in enumerate(H100_ADDRESSES)
    ]  # fmt: skip


# --- The machines -----------------------------------------------------------------------------


def machines() -> dict[str, Machine]:
    """Every composed machine by its name."""
    return {**_healthy(), **_wheels_and_masks(), **_absent(), **_broken(), **_late(), **_on_wsl()}


def _healthy() -> dict[str, Machine]:
    card_4090 = (drivers.works(D550_54, [RTX_4090]), torches.sees(torches.T26, [(8, 9)]))
    server = _h100s(faults=True)
    granted = dataclasses.replace(A10, address="0000:81:00.0")
    return {
        "workstation": Machine(
            "hybrid CPU at `powersave` with HWP, two P-cores faster than the rest; the idle GPU's"
            " link is at generation 1 of 4; / on NVMe, /data on a hard disk",
            "", "cpuinfo fields of an i7-1260P (htop issue 879), C-states of intel_idle.c, TLP"
            " outputs for intel_pstate, NVRM line of 550.54.14",
            (_workstation(), *card_4090),
        ),
        "t4-vm": Machine(
            "virtual machine: neither cpufreq nor C-states; persistent disk", "",
            "cpuinfo of colabtools issue 1937, with 8 CPUs",
            (
                _cloud(8, 30_812_212),
                drivers.works(D550_90, [T4]),
                torches.sees(torches.T26, [(7, 5)]),
            ),
        ),
        "container-quota": Machine(
            "quota of 2 CPUs of 64, 8 GiB, 64 MiB of /dev/shm, OMP_NUM_THREADS not set", "",
            "mounts of coder/envbox issue 126 and lxc issue 3890; Docker's defaults",
            (
                _container("200000 100000", str(8 * GIB), D550_90.version),
                drivers.works(D550_90, [A10]),
                {"files": {"/proc/driver/nvidia/params": None, "/dev/nvidia-modeset": None}},
                torches.sees(torches.T26, [(8, 6)]),
                _asked_for_gpus("all"),
            ),
        ),
        "server-8gpu": Machine(
            "two NUMA nodes, 8 H100 with NVSwitch; GPU 3 has half its PCIe lanes and somebody"
            " else's process, GPU 5 no persistence mode, GPU 6 two ECC errors; /data on NFS", "",
            "PCI ids of H100 and NVSwitch from the PCI id list; nodes as in flux issue 14",
            (
                _server(),
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
                _cloud(12, 87_412_212),
                drivers.works(D550_90, [A100]),
                drivers.mig(D550_90, A100, ["3g.20gb", "3g.20gb"]),
                torches.sees(torches.T26, [(8, 0)]),
            ),
        ),
        "jetson-orin": Machine(
            "Arm without model name; the GPU is not on PCI, NVML knows no memory, no nvidia-uvm",
            "", "lscpu of vamp issue 20; /proc/driver/nvidia/version and /dev of published logs of"
            " JetPack 6; the 12 CPUs are in three packages, as Linux 5.15 says",
            (_jetson(),),
        ),
        "slurm-node": Machine(
            "4 of 64 CPUs by cpuset, one of four GPUs: the other three nodes may not be opened", "",
            "paths of Slurm's cgroup v2 documentation (jobperf issue 3)",
            (_slurm(granted),),
        ),
        "forked-after-cuda": Machine(
            "fresh processes see the GPU; the asking process is a fork of one that used CUDA",
            "forked_after_cuda", "as workstation; torch/cuda/__init__.py, `_is_in_bad_fork`",
            (_workstation(), *card_4090, {"calls": {"bad_fork": True}}),
        ),
    }  # fmt: skip


def _jetson() -> Part:
    version = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build"
        "  (buildbrain@mobile-u64-6336-d8000)  Tue Jan  7 17:35:12 PST 2025\n"
        "GCC version:  collect2: error: ld returned 1 exit status    \n"
    )
    folder = "/usr/lib/aarch64-linux-gnu/nvidia"
    uuid = made_up_uuid("orin")
    unknown = (
        "memory_total memory_used memory_reserved utilisation_gpu utilisation_memory pci_address"
        " pcie_generation pcie_generation_max pcie_width pcie_width_max numa_node sm_mhz"
        " sm_max_mhz memory_mhz memory_max_mhz application_sm_mhz performance_state clock_reasons"
        " temperature_c slowdown_c power_mw power_limit_mw power_limit_default_mw persistence"
        " ecc ecc_errors mig"
    )
    gpu = {
        "index": 0, "name": "Orin (nvgpu)", "uuid": uuid, "capability": [8, 7],
        **dict.fromkeys(unknown.split(), gpus.NOT_SUPPORTED), "compute_mode": 0,
        "mig_instances": [], "processes": [],
    }  # fmt: skip
    compiler = "buildbrain@mobile-u64-6336-d8000) (aarch64-buildroot-linux-gnu-gcc 11.3.0"
    built = "#1 SMP PREEMPT Tue Jan 7 17:14:38 PST 2025"
    kernel = "5.15.148-tegra"
    nodes = ("nvidia0", "nvidiactl", "nvidia-modeset", "nvmap", "nvhost-gpu", "nvgpu/igpu0/ctrl")
    files = {
        "/proc/driver/nvidia/version": version,
        "/proc/modules": "nvidia_modeset 1269760 7 nvidia_drm, Live 0x0000000000000000 (OE)\n"
        "nvidia 1466368 11 nvidia_modeset, Live 0x0000000000000000 (OE)\n"
        "nvgpu 2654208 23 - Live 0x0000000000000000 (E)\n"
        "nvmap 204800 79 nvgpu, Live 0x0000000000000000 (OE)\n",
        "/sys/module/nvidia/version": "540.4.0",
        "/proc/device-tree": {"link": "../sys/firmware/devicetree/base"},
        "/sys/firmware/devicetree/base/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
        "/sys/firmware/devicetree/base/compatible": "nvidia,p3737-0000\0nvidia,tegra234\0",
        "/etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic,"
        " EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC 2025\n",
        **gpus.pci("0001:01:00.0", "0x144d", "0xa80c", "0x010802", "nvme", 0),
        **{f"/dev/{name}": "" for name in nodes},
        **{f"{folder}/{name}": "" for name in ("libcuda.so.1.1", "libnvidia-ml.so.540.4.0")},
        f"{folder}/libcuda.so": {"link": "libcuda.so.1.1"},
        f"{folder}/libcuda.so.1": {"link": "libcuda.so.1.1"},
        f"{folder}/libnvidia-ml.so.1": {"link": "libnvidia-ml.so.540.4.0"},
        "/usr/sbin/nvidia-smi": "",
    }
    smi = {"code": 0, "stdout": f"GPU 0: Orin (nvgpu) (UUID: {uuid})\n", "stderr": ""}
    answer = {
        "library": "libcuda.so.1", "path": f"{folder}/libcuda.so.1.1", "code": 0, "error": "",
        "version": 12060, "devices": 1,
    }  # fmt: skip
    return composed(
        processors.orin(),
        processors.nodes([range(12)], 64_349_084, 50_118_220),
        systems.memory(64_349_084, 58_440_112, 32_174_528, 0, 262_144),
        systems.disk(dataclasses.replace(systems.NVME, path="platform/14160000.pcie/nvme0n1")),
        systems.host_mounts("30 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw"),
        systems.room(32_946_731_008, root=(916, 610)),
        systems.data_set(2.6e9, 5.1e9),
        systems.distribution(systems.UBUNTU_22, kernel, built, compiler, "aarch64"),
        systems.limits((1024, 1_048_576), 8_236_682_752, 250_872, 12),
        systems.session_cgroup(2_147_483_648),
        systems.systemd(),
        torches.sees(torches.JETSON, [(8, 7)]),
        {
            "files": files,
            "commands": {"nvidia-smi -L": smi},
            "probes": {
                "nvml_gpus": {"driver": "540.4.0", "cuda": 12060, "gpus": [gpu]},
                "cuda_driver": answer,
            },
        },
    )


def _slurm(granted: Card) -> Part:
    four = [
        dataclasses.replace(A10, address=f"0000:{bus}:00.0") for bus in ("01", "41", "81", "c1")
    ]
    lustre = "10.0.0.2@o2ib:/scratch rw,flock,lazystatfs"
    return composed(
        processors.epyc_7543(),
        processors.nodes([range(64)], 527_876_540, 400_118_220),
        systems.memory(527_876_540, 480_220_118),
        systems.disk(systems.NVME),
        systems.host_mounts(
            "30 1 259:2 / / rw,relatime shared:1 - xfs /dev/nvme0n1p2 rw,attr2,inode64",
            f"150 30 0:61 / /data rw,relatime shared:80 - lustre {lustre}",
        ),
        systems.room(270_272_788_480, root=(893, 700), data=(2_097_152, 410_000)),
        systems.data_set(1.1e9, 6.8e9),
        systems.rocky(),
        systems.board(*systems.SMALL_SERVER),
        systems.limits((131_072, 131_072), None, 2_061_120, 64),
        systems.session_cgroup(2_411_724_800, "/system.slice"),
        systems.systemd(),
        systems.slurm(7_310_442, [8, 9, 40, 41], 64 * GIB),
        gpus.other_devices(amd=True),
        drivers.kernel_module(D550_90, four),
        drivers.device_nodes(4),
        drivers.denied("nvidia0", "nvidia1", "nvidia3"),
        drivers.libraries(D550_90.version, RED_HAT),
        drivers.nvml(D550_90, [granted]),
        drivers.cuda(D550_90, 1, RED_HAT),
        torches.sees(torches.T26, [(8, 6)]),
    )


def _wheels_and_masks() -> dict[str, Machine]:
    good = drivers.works(D550_54, [RTX_3060])
    blind = (
        _desktop(), drivers.installed(D550_54, [RTX_3060]),
        drivers.cuda_fails(100, f"{DEBIAN}/libcuda.so.550.54.14"), torches.blind(torches.T26),
    )  # fmt: skip

    def masked(value: str, about: str) -> Machine:
        variable = {"environment": {"CUDA_VISIBLE_DEVICES": value}}
        source = "CUDA programming guide, CUDA_VISIBLE_DEVICES: enumeration ends at the first bad"
        return Machine(about, "masked", source, (*blind, variable))

    return {
        "cpu-laptop": Machine(
            "no NVIDIA GPU and a CPU-only wheel: the wheel is found first; btrfs, full disk, swap"
            " in use",
            "cpu_only_torch", "cpuinfo of htop issue 879 (i7-1260P)",
            (_laptop(), drivers.without_driver(), torches.without_cuda(torches.CPU_ONLY)),
        ),
        "cpu-only-torch": Machine(
            "GPU and driver are fine, the wheel has no CUDA", "cpu_only_torch",
            "version.py of the wheel torch 2.13.0+cpu",
            (_desktop(), good, torches.without_cuda(torches.CPU_ONLY)),
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
                _desktop(), gpus.intel_graphics("0x3e98"), drivers.without_driver(),
                torches.blind(torches.T26, torches.NO_DRIVER),
            ),
        ),
        "no-driver": Machine(
            "the GPU is driven by nouveau; nothing of NVIDIA's is installed", "no_driver",
            "c10/cuda/CUDAFunctions.cpp: message without a driver",
            (
                _desktop(), drivers.without_driver(),
                {
                    "files": gpus.on_bus(RTX_3060, "nouveau")
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
                _desktop(systems.ubuntu_22("6.8.0-48-generic")), drivers.no_module(),
                drivers.libraries(D550_54.version), drivers.nvml_fails(9),
                drivers.cuda_fails(100, path), {"files": gpus.on_bus(RTX_3060, None)},
                torches.blind(torches.T26),
            ),
        ),
        "container-without-gpu": Machine(
            "started without `--gpus`: the host's module is visible, device nodes and libraries"
            " are not", "container_without_gpu",
            "Docker shares /proc and /sys/bus/pci with the host",
            (
                _container(), drivers.kernel_module(D550_90, [A10]), drivers.nvml_fails(12),
                drivers.cuda_missing(), torches.blind(torches.T26, torches.NO_DRIVER),
            ),
        ),
    }  # fmt: skip


def _broken() -> dict[str, Machine]:
    lost_nodes = drivers.denied("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    library = f"{DEBIAN}/libcuda.so"

    def lost(code: int, error: str) -> tuple[Part, ...]:
        return (
            _container(gpu=D550_90.version), drivers.installed(D550_90, [A10]), lost_nodes,
            drivers.nvml_fails(999), drivers.cuda_fails(code, f"{library}.{D550_90.version}"),
            torches.blind(torches.T26, error), _asked_for_gpus("all"),
            {"files": {"/dev/nvidia-modeset": None}},
        )  # fmt: skip

    def mismatch(kernel: drivers.Driver, user: drivers.Driver) -> tuple[Part, ...]:
        return (
            _desktop(), drivers.kernel_module(kernel, [RTX_3060]), drivers.device_nodes(1),
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
                systems.docker_cgroup_v1(
                    "c 1:3 rwm\nc 1:5 rwm\nc 136:* rwm\nc 195:* m\n",
                    _container(gpu=D550_90.version),
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
                _desktop(systems.ubuntu_20()), drivers.works(D470, [RTX_3090_470]),
                torches.blind(torches.T26, torches.TOO_OLD.format(11040)),
            ),
        ),
        "driver-too-old-cuda13": Machine(
            "driver 550 (CUDA 12.4), PyTorch for CUDA 13.0", "driver_too_old",
            "CUDA 13 needs driver 580 (CUDA toolkit release notes)",
            (
                _desktop(), drivers.works(D550_54, [RTX_3060]),
                torches.blind(torches.T29_CU130, torches.TOO_OLD.format(12040)),
            ),
        ),
    }  # fmt: skip


def _late() -> dict[str, Machine]:
    eight = _h100s(faults=False)
    path = f"{DEBIAN}/libcuda.so"
    no_uvm = (
        drivers.kernel_module(D550_54, [RTX_3060], uvm=False), drivers.device_nodes(1, uvm=False),
        drivers.libraries(D550_54.version), drivers.nvml(D550_54, [RTX_3060]),
    )  # fmt: skip
    everything = ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
    return {
        "fabric-manager-down": Machine(
            "8 H100, fabric manager failed; `nvidia-smi -L` works", "fabric_manager_down",
            "pytorch issue 35710, lisa issue 2823",
            (
                _server(), drivers.installed(D550_90, eight), drivers.nvswitches(running=False),
                drivers.cuda_fails(802, f"{path}.{D550_90.version}"),
                torches.blind(torches.T26, torches.ERRORS[802]),
            ),
        ),
        "no-kernel-image-old-gpu": Machine(
            "GTX 1080 (6.1) with a wheel that starts at 7.0", "no_kernel_image",
            "architectures of the 2.9 wheels: ComfyUI pull request 16438",
            (
                _desktop(), drivers.works(D580, [GTX_1080]),
                torches.incompatible(torches.T29_CU128, "NVIDIA GeForce GTX 1080", (6, 1)),
            ),
        ),
        "no-kernel-image-new-gpu": Machine(
            "RTX 5090 (12.0) with a wheel that ends at 9.0", "no_kernel_image",
            "pytorch issue 167244; warning as in all-in-one issue 35",
            (
                _desktop(), drivers.works(D580_OPEN, [RTX_5090]),
                torches.incompatible(torches.T26, "NVIDIA GeForce RTX 5090", (12, 0)),
            ),
        ),
        "device-node-missing": Machine(
            "/dev/nvidia-uvm is missing and its module not loaded; NVML is fine", "device_node",
            "pytorch issue 49081",
            (
                _desktop(), *no_uvm, drivers.cuda_fails(999, f"{path}.{D550_54.version}"),
                torches.blind(torches.T26, torches.UNKNOWN),
            ),
        ),
        "device-node-denied-uvm": Machine(
            "/dev/nvidia-uvm may not be opened; NVML is fine", "device_node",
            "cuInit 304: gpu-burn issue 92",
            (
                _desktop(), drivers.installed(D550_54, [RTX_3060]),
                drivers.denied("nvidia-uvm", "nvidia-uvm-tools"),
                drivers.cuda_fails(304, f"{path}.{D550_54.version}"),
                torches.blind(torches.T26, torches.ERRORS[304]),
            ),
        ),
        "device-node-denied": Machine(
            "no /dev/nvidia* may be opened (mode 660, user not in the group)", "device_node",
            "NVML error 4 (nvml.h); NVreg_DeviceFileMode in the driver's README",
            (
                _desktop(), drivers.installed(D550_54, [RTX_3060]), drivers.denied(*everything),
                drivers.nvml_fails(4), drivers.cuda_fails(100, f"{path}.{D550_54.version}"),
                torches.blind(torches.T26),
                {"files": {"/proc/driver/nvidia/params": "DeviceFileMode: 432\n"}},
            ),
        ),
        "mig-without-instances": Machine(
            "MIG is on, nobody made instances; NVML is fine", "mig_without_instances",
            "NVIDIA's MIG user guide",
            (
                _cloud(12, 87_412_212), drivers.installed(D550_90, [A100]),
                drivers.mig(D550_90, A100, []),
                drivers.cuda_fails(100, f"{path}.{D550_90.version}"), torches.blind(torches.T26),
            ),
        ),
    }  # fmt: skip


def _on_wsl() -> dict[str, Machine]:
    windows = drivers.wsl_libraries(drivers.WSL_CUDA)
    works = drivers.nvml(WSL_DRIVER, [WSL_4070])
    stub = f"{WSL}/libcuda.so.1.1"
    return {
        "wsl2": Machine(
            "WSL 2: /dev/dxg and /usr/lib/wsl/lib instead of /dev/nvidia* and a module", "",
            "mounts of WSL issue 7152, versions of vllm pull request 9293",
            (
                _wsl(), windows, works, drivers._cuda(stub, 0, 12040, 1),
                torches.sees(torches.T24, [(8, 9)]),
            ),
        ),
        "wsl-shadowed": Machine(
            "a Linux driver was installed inside: its libcuda is found before Windows' own",
            "wsl_driver", "cuml issue 6218: cuInit 100, cured by LD_LIBRARY_PATH=/usr/lib/wsl/lib",
            (
                _wsl(), windows, drivers.libraries(D535.version), drivers.nvml_fails(9),
                drivers.cuda_fails(100, f"{DEBIAN}/libcuda.so.{D535.version}"),
                torches.blind(torches.T24),
            ),
        ),
        "wsl-no-windows-driver": Machine(
            "Windows has no driver with CUDA for WSL: no libcuda in /usr/lib/wsl/lib",
            "wsl_driver", "NVIDIA's CUDA on WSL guide",
            (
                _wsl(), drivers.wsl_libraries(()), drivers.nvml_fails(12), drivers.cuda_missing(),
                torches.blind(torches.T24, torches.NO_DRIVER),
            ),
        ),
        "wsl-old-kernel-part": Machine(
            "libraries are in place but cuInit says 500 (Windows driver and WSL do not match)",
            "wsl_driver", "NVIDIA's CUDA on WSL guide; CUDA error 500",
            (
                _wsl(), windows, works, drivers.cuda_fails(500, stub),
                torches.blind(torches.T24, torches.ERRORS[500]),
            ),
        ),
    }  # fmt: skip
