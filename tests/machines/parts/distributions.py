"""Distributions and boards: /etc/os-release, the kernel's own words, DMI."""

from __future__ import annotations

from parts import Files, Part, link

COMMON_NODES = (
    "null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "kmsg",
    "cpu_dma_latency", "fuse", "loop-control",
)  # fmt: skip

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
