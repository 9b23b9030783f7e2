"""What composed machines are built on: whole machines without GPU and PyTorch, and their GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

from parts import (
    GIB,
    Part,
    composed,
    distributions,
    drivers,
    gpus,
    made_up_uuid,
    processors,
    storage,
    surroundings,
    torches,
)
from parts.drivers import D550_90, DEBIAN, RED_HAT
from parts.gpus import Card

# --- Bases: everything but the GPU and PyTorch ------------------------------------------------


def workstation() -> Part:
    """i9-12900K, Ubuntu 24.04, NVMe for / and a hard disk for /data."""
    return composed(
        processors.i9_12900k(),
        processors.nodes([range(24)], 65_534_212, 40_118_220),
        storage.memory(65_534_212, 52_118_440, 8_388_604, 12_288),
        storage.disk(storage.NVME),
        storage.disk(storage.HARD_DISK),
        storage.host_mounts(
            "30 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro",
            "91 30 8:1 / /data rw,relatime shared:52 - ext4 /dev/sda1 rw",
        ),
        storage.room(33_553_516_544, root=(1831, 902), data=(7302, 2190)),
        storage.data_set(182e6),
        distributions.ubuntu_24(),
        distributions.board(*distributions.ASUS),
        surroundings.limits((1024, 1_048_576), 8_388_608_000, 255_604, 24),
        surroundings.session_cgroup(3_221_225_472),
        surroundings.systemd(),
        gpus.other_devices(),
        gpus.intel_graphics("0x4680"),
    )


def desktop(distribution: Part | None = None) -> Part:
    """i7-9700K, Ubuntu 22.04, one NVMe: the small machine that most causes are shown on."""
    return composed(
        processors.i7_9700k(),
        processors.nodes([range(8)], 32_796_084, 24_118_220),
        storage.memory(32_796_084, 27_440_112, 2_097_148),
        storage.disk(storage.NVME),
        storage.host_mounts(
            "30 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro"
        ),
        storage.room(16_791_597_056, root=(1831, 640)),
        storage.data_set(3.1e9),
        distribution or distributions.ubuntu_22(),
        distributions.board(*distributions.ASUS),
        surroundings.limits((1024, 1_048_576), 4_197_900_288, 127_934, 8),
        surroundings.session_cgroup(2_147_483_648),
        surroundings.systemd(),
        gpus.other_devices(),
    )


def cloud(vcpus: int, memory_kib: int) -> Part:
    """A virtual machine at Google: no frequencies, no C-states, a network disk."""
    return composed(
        processors.cloud_xeon(vcpus),
        processors.nodes([range(vcpus)], memory_kib, memory_kib * 8 // 10),
        storage.memory(memory_kib, memory_kib * 9 // 10),
        storage.disk(storage.CLOUD_DISK),
        storage.host_mounts(
            "30 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,discard,errors=remount-ro"
        ),
        storage.room(memory_kib * 512, root=(194, 88)),
        storage.data_set(118e6),
        distributions.ubuntu_22("6.5.0-1025-gcp"),
        distributions.board(*distributions.GOOGLE),
        surroundings.limits((1024, 1_048_576), memory_kib * 128, 120_110, vcpus),
        surroundings.session_cgroup(1_610_612_736),
        surroundings.systemd(),
        gpus.virtio_devices(),
    )


def server() -> Part:
    """Two EPYC 9334, two NUMA nodes, 1 TiB, data on a network file system."""
    first, second = [*range(32), *range(64, 96)], [*range(32, 64), *range(96, 128)]
    return composed(
        processors.two_epyc_9334(),
        processors.nodes([first, second], 1_056_461_420, 990_118_220),
        storage.memory(1_056_461_420, 1_031_220_118),
        storage.disk(storage.NVME),
        storage.host_mounts(
            "30 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw",
            "140 30 0:57 / /data rw,relatime shared:77 - nfs4 10.20.0.5:/export/data rw,vers=4.2,"
            "rsize=1048576,wsize=1048576,proto=tcp,nconnect=8",
        ),
        storage.room(540_908_247_040, root=(1755, 1402), data=(204_800, 61_440)),
        storage.data_set(1.9e9, 7.2e9),
        distributions.ubuntu_22(),
        distributions.board(*distributions.SUPERMICRO),
        surroundings.limits((1_048_576, 1_048_576), None, 4_126_504, 128),
        surroundings.session_cgroup(21_474_836_480),
        surroundings.systemd(),
        gpus.other_devices(amd=True),
    )


def container(cpu_max: str = "max 100000", memory_max: str = "max", gpu: str = "") -> Part:
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
        storage.memory(527_876_540, 480_220_118),
        storage.disk(storage.NVME),
        storage.disk(storage.NVME_DATA),
        distributions.ubuntu_22(),
        distributions.board(*distributions.SMALL_SERVER),
        surroundings.limits((1_048_576, 1_048_576), 65_536, None, 64),
        gpus.other_devices(amd=True),
        surroundings.docker(
            cpu_max, memory_max, 1_288_490_188, 65_536, 64,
            "1411 1403 259:4 /sets /data ro,relatime - xfs /dev/nvme1n1 rw,attr2,inode64", mounted,
        ),
        storage.room(64 << 20, root=(1831, 402), data=(3576, 1200)),
        storage.data_set(5.4e9),
    )  # fmt: skip


def asked_for_gpus(which: str) -> Part:
    values = {"NVIDIA_VISIBLE_DEVICES": which, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    return {"environment": values}


def wsl() -> Part:
    """WSL 2 on a Ryzen; /data is a Windows folder."""
    return composed(
        processors.wsl_ryzen(),
        processors.nodes([range(16)], 32_726_812, 28_118_220),
        storage.memory(32_726_812, 29_440_112, 8_388_608),
        storage.disk(storage.HYPERV_DISK),
        surroundings.wsl(),
        surroundings.limits((1024, 1_048_576), 67_108_864, 127_732, 16),
        surroundings.session_cgroup(1_073_741_824, "/init.scope"),
        surroundings.systemd(),
        storage.room(16_755_326_976, root=(1007, 874), **{"mnt/c": (1862, 220)}),
        storage.data_set(1.4e9),
        storage.data_set(160e6, 210e6, "/mnt/c/data"),
    )


def laptop() -> Part:
    """i7-1260P, Fedora: btrfs, no GPU but Intel's."""
    return composed(
        processors.i7_1260p(),
        processors.nodes([range(16)], 16_004_212, 4_118_220),
        storage.memory(16_004_212, 6_440_112, 8_388_604, 1_220_112),
        storage.disk(storage.NVME),
        storage.host_mounts(
            "30 1 0:33 /root / rw,relatime shared:1 - btrfs /dev/nvme0n1p3"
            " rw,compress=zstd:1,ssd,discard=async,space_cache=v2,subvolid=257,subvol=/root",
            "92 30 0:33 /home /home rw,relatime shared:60 - btrfs /dev/nvme0n1p3"
            " rw,compress=zstd:1,ssd,discard=async,space_cache=v2,subvolid=256,subvol=/home",
        ),
        storage.room(8_194_156_544, root=(475, 22), home=(475, 22)),
        storage.data_set(2.2e9),
        distributions.fedora(),
        distributions.board(*distributions.LENOVO),
        surroundings.limits((1024, 524_288), 2_048_539_136, 62_216, 16),
        surroundings.session_cgroup(
            1_073_741_824,
            "/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome-terminal.scope",
        ),
        surroundings.systemd(),
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


def h100s(faults: bool) -> list[Card]:
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


# --- Machines of their own kind ------------------------------------------------------------------


def jetson() -> Part:
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
        storage.memory(64_349_084, 58_440_112, 32_174_528, 0, 262_144),
        storage.disk(dataclasses.replace(storage.NVME, path="platform/14160000.pcie/nvme0n1")),
        storage.host_mounts("30 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw"),
        storage.room(32_946_731_008, root=(916, 610)),
        storage.data_set(2.6e9, 5.1e9),
        distributions.distribution(distributions.UBUNTU_22, kernel, built, compiler, "aarch64"),
        surroundings.limits((1024, 1_048_576), 8_236_682_752, 250_872, 12),
        surroundings.session_cgroup(2_147_483_648),
        surroundings.systemd(),
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


def slurm(granted: Card) -> Part:
    four = [
        dataclasses.replace(A10, address=f"0000:{bus}:00.0") for bus in ("01", "41", "81", "c1")
    ]
    lustre = "10.0.0.2@o2ib:/scratch rw,flock,lazystatfs"
    return composed(
        processors.epyc_7543(),
        processors.nodes([range(64)], 527_876_540, 400_118_220),
        storage.memory(527_876_540, 480_220_118),
        storage.disk(storage.NVME),
        storage.host_mounts(
            "30 1 259:2 / / rw,relatime shared:1 - xfs /dev/nvme0n1p2 rw,attr2,inode64",
            f"150 30 0:61 / /data rw,relatime shared:80 - lustre {lustre}",
        ),
        storage.room(270_272_788_480, root=(893, 700), data=(2_097_152, 410_000)),
        storage.data_set(1.1e9, 6.8e9),
        distributions.rocky(),
        distributions.board(*distributions.SMALL_SERVER),
        surroundings.limits((131_072, 131_072), None, 2_061_120, 64),
        surroundings.session_cgroup(2_411_724_800, "/system.slice"),
        surroundings.systemd(),
        surroundings.slurm(7_310_442, [8, 9, 40, 41], 64 * GIB),
        gpus.other_devices(amd=True),
        drivers.kernel_module(D550_90, four),
        drivers.device_nodes(4),
        drivers.denied("nvidia0", "nvidia1", "nvidia3"),
        drivers.libraries(D550_90.version, RED_HAT),
        drivers.nvml(D550_90, [granted]),
        drivers.cuda(D550_90, 1, RED_HAT),
        torches.sees(torches.T26, [(8, 6)]),
    )
