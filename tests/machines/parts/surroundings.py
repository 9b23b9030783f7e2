"""What stands between a process and the machine: limits, cgroups, Docker, Slurm, WSL."""

from __future__ import annotations

from collections.abc import Sequence

from parts import FOLDER, Files, Part, cpu_list, distributions, link, storage

UNLIMITED = 9223372036854771712  # of cgroup v1: PAGE_COUNTER_MAX in bytes


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
    table = storage.mounts(
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
    files |= storage.mounts(*kept, *lines)["files"]
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
        f"{base}/memory/memory.limit_in_bytes": str(UNLIMITED),
        f"{base}/memory/memory.usage_in_bytes": "6120837120",
        f"{base}/memory/memory.stat": f"cache 1208111104\nhierarchical_memory_limit {UNLIMITED}\n",
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
    part = distributions.distribution(distributions.UBUNTU_22, kernel, built, compiler)
    drvfs = (
        "rw,dirsync,aname=drvfs;path=C:\\134;uid=1000;gid=1000;symlinkroot=/mnt/,mmap,"
        "access=client,msize=65536,trans=fd,rfd=5,wfd=5"
    )
    table = storage.mounts(
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
