"""Records the machine that it runs on as `this-machine.json`, more of it than doctor asks for.

    python tests/machines/record.py [--data FOLDER] [--rename OLD=NEW]…

Besides what the survey reads, files are kept that another reader may want. ``--rename``
replaces text everywhere in the recording: names of users, hosts and folders that are nobody's
business. Run `compose.py` afterwards: it writes the README's table.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import compose  # noqa: E402  (next to this file)

from trainfit.hardware.machine.recorded import RecordingSystem  # noqa: E402
from trainfit.hardware.machine.survey import survey  # noqa: E402

FILES = [
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/swaps",
    "/proc/version",
    "/proc/modules",
    "/proc/devices",
    "/proc/filesystems",
    "/proc/mounts",
    "/proc/self/mountinfo",
    "/proc/self/mounts",
    "/proc/self/cgroup",
    "/proc/self/status",
    "/proc/self/limits",
    "/proc/1/cgroup",
    "/proc/1/comm",
    "/proc/driver/nvidia/version",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/ostype",
    "/proc/sys/vm/swappiness",
    "/proc/sys/vm/overcommit_memory",
    "/etc/os-release",
    "/sys/hypervisor/type",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/fs/cgroup/cpu/cpu.stat",
    "/sys/fs/cgroup/cpuset/cpuset.cpus",
    "/sys/fs/cgroup/cpuset/cpuset.effective_cpus",
    "/sys/fs/cgroup/devices/devices.list",
    "/sys/fs/cgroup/unified/cgroup.controllers",
]
FOLDERS = ["/dev", "/sys/block", "/sys/dev/block", "/sys/class/block", "/sys/class/dmi/id"]
CPU = "/sys/devices/system/cpu"
NODE_FILES = ["cpulist", "meminfo", "distance"]
PCI_FILES = [
    "vendor",
    "device",
    "class",
    "numa_node",
    "uevent",
    "enable",
    "current_link_width",
    "max_link_width",
    "current_link_speed",
    "max_link_speed",
]
DISK_FILES = [
    "dev",
    "size",
    "removable",
    "ro",
    "queue/rotational",
    "queue/scheduler",
    "queue/read_ahead_kb",
    "queue/logical_block_size",
]
LIMITS = ["AS", "STACK", "CORE", "DATA", "FSIZE", "RSS", "CPU", "NPROC", "MEMLOCK", "NOFILE"]


def main() -> None:
    parser = argparse.ArgumentParser(description="record this machine")
    parser.add_argument("--data", help="a folder whose storage is measured")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    options = parser.parse_args()
    found = _recorded(options.data)
    document = {
        "format": found.pop("format"),
        "version": found.pop("version"),
        "origin": found.pop("origin"),
        "provenance": "record.py on a virtual machine; names of folders and makers were replaced",
        "about": "2 CPUs without frequencies, cgroup v1 beside v2, neither DMI nor modules; a"
        " CPU-only torch beside a torchvision for CUDA 13",
        "expected_cause": "",
    }
    del found["provenance"]
    text = compose.text(document | found)
    for old, new in (each.split("=", 1) for each in options.rename):
        text = text.replace(old, new)
    (HERE / "this-machine.json").write_text(text, encoding="utf-8")
    print(f"{len(found['files'])} files")


def _recorded(data: str | None) -> dict:
    system = RecordingSystem()
    survey(system, data, seconds=300)
    for probe in ("nvml_gpus", "cuda_driver", "torch_devices"):
        system.probe(probe, 120)
    for path in FILES:
        _keep(system, path)
    for folder in FOLDERS:
        system.names(folder)
    _walk(system, CPU)
    for node in system.names("/sys/devices/system/node").value or ():
        _keep(system, f"/sys/devices/system/node/{node}")  # "online" and the like
        for name in NODE_FILES:
            _keep(system, f"/sys/devices/system/node/{node}/{name}")
    for address in system.names("/sys/bus/pci/devices").value or ():
        system.link(f"/sys/bus/pci/devices/{address}/driver")
        for name in PCI_FILES:
            _keep(system, f"/sys/bus/pci/devices/{address}/{name}")
    for disk in system.names("/sys/block").value or ():
        for name in () if disk.startswith("loop") else DISK_FILES:
            _keep(system, f"/sys/block/{disk}/{name}")
    for path in ("/", "/dev/shm", "/tmp"):
        system.space(path)
    for name in LIMITS:
        system.limit(name)
    return system.document()


def _keep(system: RecordingSystem, path: str) -> None:
    # A file behind a link is kept by the link's name: Recorder keeps one or the other.
    if Path(path).is_file() and os.access(path, os.R_OK):
        system.text(path)
    elif Path(path).is_symlink():
        system.link(path)


def _walk(system: RecordingSystem, folder: str) -> None:
    """A folder with all that is in it, except what links lead to."""
    for name in system.names(folder).value or ():
        path = f"{folder}/{name}"
        if Path(path).is_dir() and not Path(path).is_symlink():
            if name not in ("power", "vulnerabilities", "hotplug"):
                _walk(system, path)
        else:
            _keep(system, path)


if __name__ == "__main__":
    main()
