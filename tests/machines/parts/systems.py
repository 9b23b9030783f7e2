"""What lies around the processor: memory, disks, distribution, containers, schedulers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parts import FOLDER, GIB, Files, Part, cpu_list, link

NOBODY = 9223372036854771712  # cgroup v1's "unlimited", PAGE_COUNTER_MAX in bytes


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
COMMON_NODES = (
    "null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "kmsg",
    "cpu_dma_latency", "fuse", "loop-control",
)  # fmt: skip


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


# --- Distributions ----------------------------------------------------------------------------

UBUNTU_22 = """\
PRETTY_NAME="Ubuntu 22.04.5 LTS"
NAME="Ubuntu"
VERSION_ID="22.04"
VERSION="22.04.5 LTS (Jammy Jellyfish)"
VERSION_CODENAME=jammy
ID=ubuntu
ID_LIKE=debian
HOME_URL="https://www.ubuntu.com/"
UBUNTU_CODENAME=jammy
"""
UBUNTU_24 = """\
PRETTY_NAME="Ubuntu 24.04.1 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION="24.04.1 LTS (Noble Numbat)"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
HOME_URL="https://www.ubuntu.com/"
UBUNTU_CODENAME=noble
"""
UBUNTU_20 = """\
NAME="Ubuntu"
VERSION="20.04.6 LTS (Focal Fossa)"
ID=ubuntu
ID_LIKE=debian
PRETTY_NAME="Ubuntu 20.04.6 LTS"
VERSION_ID="20.04"
VERSION_CODENAME=focal
UBUNTU_CODENAME=focal
"""
DEBIAN_12 = """\
PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
VERSION="12 (bookworm)"
VERSION_CODENAME=bookworm
ID=debian
HOME_URL="https://www.debian.org/"
"""
FEDORA_41 = """\
NAME="Fedora Linux"
VERSION="41 (Workstation Edition)"
ID=fedora
VERSION_ID=41
VERSION_CODENAME=""
PLATFORM_ID="platform:f41"
PRETTY_NAME="Fedora Linux 41 (Workstation Edition)"
"""
ROCKY_9 = """\
NAME="Rocky Linux"
VERSION="9.4 (Blue Onyx)"
ID="rocky"
ID_LIKE="rhel centos fedora"
VERSION_ID="9.4"
PLATFORM_ID="platform:el9"
PRETTY_NAME="Rocky Linux 9.4 (Blue Onyx)"
"""


def distribution(os_release: str, kernel: str, built: str, compiler: str, arch="x86_64") -> Part:
    """/etc/os-release and what the kernel says of itself."""
    lines = dict(line.split("=", 1) for line in os_release.splitlines())
    return {
        "files": {
            "/etc/os-release": link("../usr/lib/os-release"),
            "/usr/lib/os-release": os_release,
            "/proc/version": f"Linux version {kernel} ({compiler}) {built}\n",
            "/proc/sys/kernel/osrelease": kernel,
            "/proc/sys/kernel/ostype": "Linux",
            "/proc/sys/kernel/version": built,
            "/proc/sys/vm/overcommit_memory": "0",
            "/proc/sys/vm/swappiness": "60",
            "/proc/sys/fs/file-max": "9223372036854775807",
            "/proc/cmdline": f"BOOT_IMAGE=/boot/vmlinuz-{kernel} root=/dev/root ro quiet",
            "/proc/filesystems": "nodev\tsysfs\nnodev\ttmpfs\nnodev\tcgroup2\n\text4\n",
            "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "/etc/hostname": lines["ID"].strip('"') + "-host",
        }
        | {f"/dev/{name}": "" for name in COMMON_NODES},
        "calls": {
            "uname": {
                "sysname": "Linux", "release": kernel, "version": built, "machine": arch,
            },
            "folder": "/home/user/project",
            "own_pids": [41_207],
            "processes": {"41207": "python"},
        },
    }  # fmt: skip


GCC_11 = "x86_64-linux-gnu-gcc-11 (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0, GNU ld 2.38"
GCC_13 = "x86_64-linux-gnu-gcc-13 (Ubuntu 13.2.0-23ubuntu4) 13.2.0, GNU ld 2.42"


def ubuntu_22(kernel: str = "5.15.0-122-generic") -> Part:
    """Ubuntu 22.04."""
    built = "#132-Ubuntu SMP Thu Aug 29 13:45:52 UTC 2024"
    return distribution(UBUNTU_22, kernel, built, f"buildd@lcy02-amd64-034) ({GCC_11}")


def ubuntu_24(kernel: str = "6.8.0-45-generic") -> Part:
    """Ubuntu 24.04."""
    built = "#45-Ubuntu SMP PREEMPT_DYNAMIC Fri Aug 30 12:02:04 UTC 2024"
    return distribution(UBUNTU_24, kernel, built, f"buildd@lcy02-amd64-115) ({GCC_13}")


def ubuntu_20() -> Part:
    """Ubuntu 20.04."""
    built = "#204-Ubuntu SMP Fri Oct 11 18:24:52 UTC 2024"
    gcc = "buildd@lcy02-amd64-017) (gcc version 9.4.0 (Ubuntu 9.4.0-1ubuntu1~20.04.2)"
    return distribution(UBUNTU_20, "5.4.0-200-generic", built, gcc)


def fedora() -> Part:
    """Fedora 41."""
    built = "#1 SMP PREEMPT_DYNAMIC Thu Nov 14 20:26:51 UTC 2024"
    gcc = "mockbuild@b3e63f72) (gcc (GCC) 14.2.1 20240912 (Red Hat 14.2.1-3)"
    return distribution(FEDORA_41, "6.11.8-300.fc41.x86_64", built, gcc)


def rocky() -> Part:
    """Rocky Linux 9."""
    built = "#1 SMP PREEMPT_DYNAMIC Wed Aug 14 16:28:36 UTC 2024"
    gcc = "mockbuild@iad1-prod-build001) (gcc (GCC) 11.4.1 20231218 (Red Hat 11.4.1-3)"
    return distribution(ROCKY_9, "5.14.0-427.31.1.el9_4.x86_64", built, gcc)


def board(vendor: str, product: str, board_vendor: str, bios: str, chassis: int) -> Part:
    """DMI; chassis 3 is a desktop, 10 a notebook, 23 a rack mount, 1 other (virtual)."""
    values = {
        "sys_vendor": vendor, "product_name": product, "board_vendor": board_vendor,
        "board_name": product, "bios_vendor": bios, "chassis_type": str(chassis),
    }  # fmt: skip
    files: Files = {f"/sys/devices/virtual/dmi/id/{name}": text for name, text in values.items()}
    files["/sys/class/dmi/id"] = link("../../devices/virtual/dmi/id")
    return {"files": files}


ASUS = ("ASUS", "System Product Name", "ASUSTeK COMPUTER INC.", "American Megatrends Inc.", 3)
GOOGLE = ("Google", "Google Compute Engine", "Google", "Google", 1)
SUPERMICRO = ("Supermicro", "AS -8125GS-TNHR", "Supermicro", "American Megatrends Inc.", 23)
SMALL_SERVER = ("Supermicro", "AS -2014CS-TR", "Supermicro", "American Megatrends Inc.", 23)
LENOVO = ("LENOVO", "21CB000HUS", "LENOVO", "LENOVO", 10)


# --- cgroups and limits -----------------------------------------------------------------------

SESSION = "/user.slice/user-1000.slice/session-3.scope"


def limits(
    open_files: tuple[int, int], locked: int | None, processes: int | None, cpus: int
) -> Part:
    """getrlimit, and what /proc/self says of the same process."""
    named = {
        "NOFILE": list(open_files), "MEMLOCK": [locked, locked], "NPROC": [processes, processes],
        "AS": [None, None], "STACK": [8_388_608, None], "CORE": [0, None], "FSIZE": [None, None],
        "DATA": [None, None], "RSS": [None, None], "CPU": [None, None],
    }  # fmt: skip
    mask = f"{(1 << cpus) - 1:x}"
    status = (
        "Name:\tpython\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t41207\nNgid:\t0\nPid:\t41207\n"
        "PPid:\t41180\nTracerPid:\t0\nUid:\t1000\t1000\t1000\t1000\n"
        f"Threads:\t1\nCpus_allowed:\t{mask}\nCpus_allowed_list:\t{cpu_list(range(cpus))}\n"
        "Mems_allowed_list:\t0\n"
    )
    shown = {name: "unlimited" if each[0] is None else str(each[0]) for name, each in named.items()}
    hard = {name: "unlimited" if each[1] is None else str(each[1]) for name, each in named.items()}
    table = "Limit                     Soft Limit           Hard Limit           Units     \n"
    for title, name, unit in (
        ("Max processes", "NPROC", "processes"), ("Max open files", "NOFILE", "files"),
        ("Max locked memory", "MEMLOCK", "bytes"), ("Max address space", "AS", "bytes"),
    ):  # fmt: skip
        table += f"{title:<25} {shown[name]:<20} {hard[name]:<20} {unit:<10}\n"
    files = {"/proc/self/status": status, "/proc/self/limits": table}
    return {"files": files, "calls": {"limits": named}}


def session_cgroup(used_bytes: int, folder: str = SESSION) -> Part:
    """cgroup v2 of a login session, without limits at any level."""
    files: Files = {
        "/proc/self/cgroup": f"0::{folder}\n",
        "/proc/1/cgroup": "0::/init.scope\n",
        "/proc/1/comm": "systemd",
        "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc",
        "/sys/fs/cgroup/cpu.stat": "usage_usec 81402231127",
    }
    parts = folder.strip("/").split("/")
    for depth in range(1, len(parts) + 1):
        place = "/sys/fs/cgroup/" + "/".join(parts[:depth])
        files |= {
            f"{place}/cgroup.controllers": "cpu memory pids",
            f"{place}/cpu.max": "max 100000",
            f"{place}/cpu.weight": "100",
            f"{place}/memory.max": "max",
            f"{place}/memory.high": "max",
            f"{place}/memory.current": str(used_bytes),
            f"{place}/memory.swap.max": "max",
            f"{place}/pids.max": "77059",
        }
    return {"files": files}


def systemd() -> Part:
    """A host whose systemd knows of no fabric manager."""
    return {
        "files": {"/run/systemd/system": FOLDER, "/proc/1/sched": "systemd (1, #threads: 1)\n"},
        "commands": {
            "systemctl is-active nvidia-fabricmanager": {
                "code": 3, "stdout": "inactive\n", "stderr": "",
            }
        },
    }  # fmt: skip


# --- Containers, schedulers -------------------------------------------------------------------


def docker(
    cpu_max: str,
    memory_max: str,
    used_bytes: int,
    shm_kib: int,
    cpus: int,
    data: str,
    nvidia: Sequence[str] = (),
) -> Part:
    """Docker with cgroup v2 and its own cgroup namespace; ``nvidia`` are further mounts."""
    layers = "l/2SDJHPXWR4F4UWQ5XQWWTM6ZHQ:/var/lib/docker/overlay2/l/KYOWOVUVJQ6HVCJ2GW3OHYTZ4D"
    folder = "/var/lib/docker/overlay2/5f3a9d5e7a6e"
    table = mounts(
        f"1403 1180 0:72 / / rw,relatime - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/"
        f"{layers},upperdir={folder}/diff,workdir={folder}/work,nouserxattr",
        "1404 1403 0:75 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw",
        "1405 1403 0:76 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755,inode64",
        "1406 1405 0:77 / /dev/pts rw,nosuid,noexec,relatime"
        " - devpts devpts rw,gid=5,mode=620,ptmxmode=666",
        "1407 1403 0:78 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro",
        "1408 1407 0:30 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw",
        "1409 1405 0:74 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw",
        f"1410 1405 0:79 / /dev/shm rw,nosuid,nodev,noexec,relatime"
        f" - tmpfs shm rw,size={shm_kib}k,inode64",
        data,
        "1412 1403 259:2 /var/lib/docker/containers/3e1f/hostname /etc/hostname rw,relatime"
        " - ext4 /dev/nvme0n1p2 rw",
        *nvidia,
    )
    files = table["files"] | {
        "/.dockerenv": "",
        "/proc/self/cgroup": "0::/\n",
        "/proc/1/cgroup": "0::/\n",
        "/proc/1/comm": "bash",
        "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc",
        "/sys/fs/cgroup/cpu.max": cpu_max,
        "/sys/fs/cgroup/cpu.weight": "100",
        "/sys/fs/cgroup/cpu.stat": "usage_usec 40118227\nnr_periods 812\nnr_throttled 190\n"
        "throttled_usec 12830114\n",
        "/sys/fs/cgroup/cpuset.cpus": "",
        "/sys/fs/cgroup/cpuset.cpus.effective": cpu_list(range(cpus)),
        "/sys/fs/cgroup/cpuset.mems.effective": "0",
        "/sys/fs/cgroup/memory.max": memory_max,
        "/sys/fs/cgroup/memory.high": "max",
        "/sys/fs/cgroup/memory.current": str(used_bytes),
        "/sys/fs/cgroup/memory.swap.max": "0" if memory_max != "max" else "max",
        "/sys/fs/cgroup/pids.max": "max",
        "/run/systemd/system": None,
        "/proc/1/sched": None,
        "/etc/hostname": "3e1fa2c09b11",
    }
    calls = {"folder": "/workspace"}
    commands = {"systemctl is-active nvidia-fabricmanager": None}
    return {"files": files, "calls": calls, "commands": commands}


def docker_cgroup_v1(devices: str, container: Part) -> Part:
    """Turns a ``container``'s cgroup v2 into v1 (older hosts); ``devices`` is its list."""
    folder = "/docker/3e1fa2c09b11f1f2f8b4b0c6d1d36fda3aa9a0f5c2f7f4d9f32a8ed1b0d33c55"
    names = ("name=systemd", "memory", "devices", "cpuset", "cpu,cpuacct", "pids", "blkio")
    groups = "".join(f"{12 - n}:{name}:{folder}\n" for n, name in enumerate(names))
    base = "/sys/fs/cgroup"
    old = (
        "cgroup.controllers cpu.max cpu.weight cpu.stat cpuset.cpus cpuset.cpus.effective"
        " cpuset.mems.effective memory.max memory.high memory.current memory.swap.max pids.max"
    )
    lines = ["1408 1407 0:80 / /sys/fs/cgroup rw,nosuid,nodev,noexec - tmpfs tmpfs rw,mode=755"]
    for number, name in enumerate(names):
        place = f"{base}/{name.removeprefix('name=')}"
        lines.append(
            f"{1430 + number} 1408 0:{31 + number} {folder} {place} ro,nosuid,nodev,noexec,relatime"
            f" master:{11 + number} - cgroup cgroup rw,{name}"
        )
    table = container["files"]["/proc/self/mountinfo"].splitlines()
    kept = [line for line in table if " - cgroup2 " not in line]
    files: Files = {f"{base}/{name}": None for name in old.split()}
    files |= mounts(*kept, *lines)["files"]
    files |= {
        f"{base}/systemd": FOLDER,
        f"{base}/blkio": FOLDER,
        "/proc/self/cgroup": groups,
        "/proc/1/cgroup": groups,
        f"{base}/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        f"{base}/cpu,cpuacct/cpu.cfs_period_us": "100000",
        f"{base}/cpu,cpuacct/cpu.shares": "1024",
        f"{base}/cpu": link("cpu,cpuacct"),
        f"{base}/cpuacct": link("cpu,cpuacct"),
        f"{base}/cpuset/cpuset.cpus": "0-63",
        f"{base}/cpuset/cpuset.effective_cpus": "0-63",
        f"{base}/memory/memory.limit_in_bytes": str(NOBODY),
        f"{base}/memory/memory.usage_in_bytes": "6120837120",
        f"{base}/memory/memory.stat": f"cache 1208111104\nhierarchical_memory_limit {NOBODY}\n",
        f"{base}/devices/devices.list": devices,
        f"{base}/pids/pids.max": "max",
    }
    return {"files": files}


def slurm(job: int, cpus: Sequence[int], memory_bytes: int) -> Part:
    """A Slurm step with cgroup v2 (`ConstrainCores`, `ConstrainRAMSpace`)."""
    scope = "/system.slice/slurmstepd.scope"
    steps = [f"{scope}/job_{job}", f"{scope}/job_{job}/step_batch"]
    steps += [f"{steps[1]}/user", f"{steps[1]}/user/task_0"]
    files: Files = {
        "/proc/self/cgroup": f"0::{steps[-1]}\n",
        "/proc/1/cgroup": "0::/init.scope\n",
        "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc",
    }
    for place in steps:
        at = f"/sys/fs/cgroup{place}"
        files |= {
            f"{at}/cgroup.controllers": "cpuset cpu memory pids",
            f"{at}/cpu.max": "max 100000",
            f"{at}/cpuset.cpus.effective": cpu_list(cpus),
            f"{at}/cpuset.cpus": cpu_list(cpus) if "user" not in place else "",
            f"{at}/memory.max": str(memory_bytes) if "user" not in place else "max",
            f"{at}/memory.high": "max",
            f"{at}/memory.current": str(2_411_724_800),
            f"{at}/memory.swap.max": "0" if "user" not in place else "max",
        }
    status = (
        "Name:\tpython\nState:\tS (sleeping)\nPid:\t41207\nUid:\t1000\t1000\t1000\t1000\n"
        f"Threads:\t1\nCpus_allowed_list:\t{cpu_list(cpus)}\nMems_allowed_list:\t0\n"
    )
    count = str(len(cpus))
    return {
        "files": {**files, "/proc/self/status": status},
        "calls": {"affinity": cpu_list(cpus)},
        "environment": {
            "SLURM_JOB_ID": str(job), "SLURM_CPUS_PER_TASK": count, "SLURM_CPUS_ON_NODE": count,
            "SLURM_JOB_CPUS_PER_NODE": count, "SLURM_NTASKS": "1", "SLURM_JOB_PARTITION": "gpu",
            "SLURM_MEM_PER_NODE": str(memory_bytes >> 20), "SLURM_JOB_GPUS": "2",
            "SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0",
        },
    }  # fmt: skip


def wsl() -> Part:
    """Windows Subsystem for Linux 2: its kernel, its mounts, /dev/dxg."""
    kernel = "5.15.153.1-microsoft-standard-WSL2"
    built = "#1 SMP Fri Mar 29 23:14:13 UTC 2024"
    compiler = "root@941d701f84f1) (gcc (GCC) 11.2.0, GNU ld (GNU Binutils) 2.37"
    part = distribution(UBUNTU_22, kernel, built, compiler)
    drvfs = (
        "rw,dirsync,aname=drvfs;path=C:\\134;uid=1000;gid=1000;symlinkroot=/mnt/,mmap,"
        "access=client,msize=65536,trans=fd,rfd=5,wfd=5"
    )
    table = mounts(
        "78 60 8:32 / / rw,relatime - ext4 /dev/sdc rw,discard,errors=remount-ro,data=ordered",
        "96 78 0:27 / /mnt/wsl rw,relatime shared:1 - tmpfs none rw",
        "97 78 0:29 / /usr/lib/wsl/drivers ro,nosuid,nodev,noatime"
        " - 9p drivers ro,dirsync,aname=drivers;fmask=222;dmask=222,mmap,access=client,"
        "msize=65536,trans=fd,rfd=7,wfd=7",
        "104 78 0:35 / /usr/lib/wsl/lib rw,relatime - overlay none rw,"
        "lowerdir=/gpu_lib_packaged:/gpu_lib_inbox,upperdir=/gpu_lib/rw/upper,"
        "workdir=/gpu_lib/rw/work",
        "115 78 0:5 / /dev rw,nosuid,relatime - devtmpfs none rw,size=16360772k,mode=755",
        "116 78 0:22 / /sys rw,nosuid,nodev,noexec,noatime - sysfs sysfs rw",
        "117 78 0:52 / /proc rw,nosuid,nodev,noexec,noatime - proc proc rw",
        "120 115 0:56 / /dev/shm rw,nosuid,nodev,noatime - tmpfs none rw",
        "121 116 0:58 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - cgroup2 cgroup2 rw",
        f"160 78 0:66 / /mnt/c rw,noatime - 9p C:\\134 {drvfs}",
    )
    return {
        **part,
        "files": part["files"] | table["files"] | {
            "/proc/sys/fs/binfmt_misc/WSLInterop": "enabled\ninterpreter /init\nflags: PF\n",
            "/run/WSL": FOLDER,
            "/dev/dxg": "",
            "/sys/bus/pci/devices/4f8e:00:00.0/vendor": "0x1414",
            "/sys/bus/pci/devices/4f8e:00:00.0/device": "0x008e",
            "/sys/bus/pci/devices/4f8e:00:00.0/class": "0x030200",
            "/sys/bus/pci/devices/4f8e:00:00.0/numa_node": "-1",
            "/sys/bus/pci/devices/4f8e:00:00.0/driver": link("../../../../bus/pci/drivers/dxgkrnl"),
            "/sys/bus/pci/drivers/dxgkrnl": FOLDER,
            "/etc/wsl.conf": "[boot]\nsystemd=true\n",
            "/proc/modules": "",
        },
        "environment": {"WSL_DISTRO_NAME": "Ubuntu-22.04", "WSL_INTEROP": "/run/WSL/412_interop"},
    }  # fmt: skip
