"""Memory, disks, mounts, and files to train on."""

from __future__ import annotations

import dataclasses

from parts import GIB, Files, Part, link

# --- Memory -----------------------------------------------------------------------------------


def memory(
    total_kib: int, available_kib: int, swap_kib: int = 0, swap_used_kib: int = 0, cma_kib: int = 0
) -> Part:
    """/proc/meminfo as Linux 5.15 to 6.8 writes it."""
    cached = available_kib // 4
    free = available_kib - cached
    values = {
        "MemTotal": total_kib, "MemFree": free, "MemAvailable": available_kib,
        "Buffers": total_kib // 200, "Cached": cached, "SwapCached": 0,
        "Active": total_kib // 12, "Inactive": total_kib // 9, "Unevictable": 64, "Mlocked": 64,
        "SwapTotal": swap_kib, "SwapFree": swap_kib - swap_used_kib, "Zswap": 0, "Zswapped": 0,
        "Dirty": 412, "Writeback": 0, "AnonPages": total_kib // 14, "Mapped": total_kib // 60,
        "Shmem": total_kib // 400, "KReclaimable": total_kib // 90, "Slab": total_kib // 60,
        "SReclaimable": total_kib // 90, "SUnreclaim": total_kib // 180, "KernelStack": 21_120,
        "PageTables": 48_220, "NFS_Unstable": 0, "Bounce": 0, "WritebackTmp": 0,
        "CommitLimit": swap_kib + total_kib // 2, "Committed_AS": total_kib // 8,
        "VmallocTotal": 34_359_738_367, "VmallocUsed": 92_440, "VmallocChunk": 0,
        "Percpu": 18_944, "HardwareCorrupted": 0, "AnonHugePages": 0, "ShmemHugePages": 0,
        "ShmemPmdMapped": 0, "CmaTotal": cma_kib, "CmaFree": cma_kib // 2,
    }  # fmt: skip
    lines = [f"{name + ':':<16}{value:>8} kB" for name, value in values.items()]
    lines += ["HugePages_Total:       0", "HugePages_Free:        0", "Hugepagesize:       2048 kB"]
    swaps = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority"
    if swap_kib:
        swaps += (
            f"\n/swap.img                               file\t\t{swap_kib}\t\t{swap_used_kib}\t\t-2"
        )
    files = {"/proc/meminfo": "\n".join(lines) + "\n", "/proc/swaps": swaps + "\n"}
    return {"files": files}


# --- Disks and mounts -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Disk:
    """A block device with its partitions (name → minor number)."""

    name: str
    major: int
    minor: int
    path: str  # below /sys/devices
    rotational: bool
    model: str
    partitions: tuple[tuple[str, int], ...] = ()


NVME = Disk(
    "nvme0n1", 259, 0, "pci0000:00/0000:00:06.0/0000:02:00.0/nvme/nvme0/nvme0n1", False,
    "Samsung SSD 990 PRO 2TB", (("nvme0n1p1", 1), ("nvme0n1p2", 2), ("nvme0n1p3", 3)),
)  # fmt: skip
NVME_DATA = Disk(
    "nvme1n1", 259, 4, "pci0000:40/0000:40:01.1/0000:41:00.0/nvme/nvme1/nvme1n1", False,
    "SAMSUNG MZQL23T8HCLS-00A07",
)  # fmt: skip
HARD_DISK = Disk(
    "sda", 8, 0, "pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda", True,
    "ST8000VN004-3CP101", (("sda1", 1),),
)  # fmt: skip
CLOUD_DISK = Disk(
    "sda", 8, 0, "pci0000:00/0000:00:03.0/virtio0/host0/target0:0:1/0:0:1:0/block/sda", False,
    "PersistentDisk", (("sda1", 1), ("sda15", 15)),
)  # fmt: skip
HYPERV_DISK = Disk(
    "sdc", 8, 32,
    "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/fd1d2cbd-ce7c-535c-966b-eb5f811c95f0"
    "/host0/target0:0:0/0:0:0:2/block/sdc", True, "Virtual Disk",
)  # fmt: skip


def disk(device: Disk) -> Part:
    """A disk in /sys/block, /sys/class/block, /sys/dev/block and /dev."""
    whole = f"/sys/devices/{device.path}"
    files: Files = {
        f"{whole}/dev": f"{device.major}:{device.minor}",
        f"{whole}/size": "3907029168",
        f"{whole}/removable": "0",
        f"{whole}/ro": "0",
        f"{whole}/device/model": device.model,
        f"{whole}/queue/rotational": "1" if device.rotational else "0",
        f"{whole}/queue/scheduler": "[mq-deadline] none" if device.rotational else "[none]",
        f"{whole}/queue/read_ahead_kb": "128",
        f"{whole}/queue/logical_block_size": "512",
    }
    files |= _named(device.name, f"{device.major}:{device.minor}", device.path)
    files[f"/sys/block/{device.name}"] = link(f"../devices/{device.path}")
    for number, (name, offset) in enumerate(device.partitions, start=1):
        dev = f"{device.major}:{device.minor + offset}"
        place = f"{device.path}/{name}"
        inside = {"dev": dev, "partition": str(number), "size": "1953513472", "start": "2048"}
        files |= {f"/sys/devices/{place}/{key}": text for key, text in inside.items()}
        files |= _named(name, dev, place)
    return {"files": files}


def _named(name: str, dev: str, path: str) -> Files:
    return {
        f"/sys/class/block/{name}": link(f"../../devices/{path}"),
        f"/sys/dev/block/{dev}": link(f"../../devices/{path}"),
        f"/dev/{name}": "",
    }


def mounts(*lines: str) -> Part:
    """/proc/self/mountinfo, and /proc/mounts of the same file systems."""
    table = []
    for line in lines:
        left, right = line.split(" - ")
        kind, source, options = right.split(" ", 2)
        table.append(f"{source} {left.split()[4]} {kind} {options} 0 0")
    return {
        "files": {
            "/proc/self/mountinfo": "\n".join(lines) + "\n",
            "/proc/self/mounts": "\n".join(table) + "\n",
            "/proc/mounts": link("self/mounts"),
        }
    }


COMMON_MOUNTS = (
    "24 30 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw",
    "25 30 0:23 / /proc rw,nosuid,nodev,noexec,relatime shared:14 - proc proc rw",
    "26 30 0:5 / /dev rw,nosuid,relatime shared:2"
    " - devtmpfs udev rw,size=32764128k,nr_inodes=8191032,mode=755,inode64",
    "27 26 0:24 / /dev/pts rw,nosuid,noexec,relatime shared:3"
    " - devpts devpts rw,gid=5,mode=620,ptmxmode=000",
    "28 30 0:25 / /run rw,nosuid,nodev,noexec,relatime shared:5"
    " - tmpfs tmpfs rw,size=6559244k,mode=755,inode64",
    "33 26 0:28 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64",
    "35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9"
    " - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot",
)


def host_mounts(root: str, *more: str) -> Part:
    """The mounts of a distribution with systemd, the root's line, and others."""
    return mounts(root, *COMMON_MOUNTS, *more)


def room(shm_bytes: int, **spaces: tuple[int, int]) -> Part:
    """Sizes of file systems in GiB: ``root=(total, free)`` is /, ``data`` is /data."""
    named = {f"/{'' if name == 'root' else name}": each for name, each in spaces.items()}
    sizes = {path: [total * GIB, free * GIB] for path, (total, free) in named.items()}
    return {"calls": {"spaces": {**sizes, "/dev/shm": [shm_bytes, shm_bytes - (shm_bytes >> 6)]}}}


def data_set(bytes_per_s: float, cached: float = 9.1e9, folder: str = "/data/train") -> Part:
    """Files to train on, and what reading the largest one gave."""
    files = {f"{folder}/shard-{number:05d}.tar": 1_073_741_824 for number in range(12)}
    rates = {name: [bytes_per_s, cached] for name in files}
    return {"calls": {"sizes": {folder: files, "/data": files}, "read_rates": rates}}
