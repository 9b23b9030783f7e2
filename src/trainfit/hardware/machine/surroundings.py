"""Where the process runs: operating system, container, virtual machine, WSL, scheduler."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Final

from trainfit.hardware.machine.parsing import word_at
from trainfit.hardware.machine.recorded import VARIABLES
from trainfit.hardware.machine.storage import MOUNTINFO, mount_of, read_mounts
from trainfit.hardware.machine.system import System
from trainfit.hardware.machine.topology import CPUINFO, read_cpuinfo
from trainfit.results.machine import Fact, Surroundings, absent, cannot_tell, known

_DMI = "/sys/class/dmi/id"

#: What hypervisors write into the DMI tables, as `systemd-detect-virt` and cloud-init's
#: ds-identify have it: (vendor begins with, product holds, our word).
_HYPERVISORS: Final = (
    ("Amazon EC2", "", "amazon-ec2"),
    ("Google", "Google Compute Engine", "google"),
    ("Microsoft Corporation", "Virtual Machine", "hyper-v"),
    ("VMware", "", "vmware"),
    ("innotek GmbH", "", "virtualbox"),
    ("Oracle Corporation", "VirtualBox", "virtualbox"),
    ("Xen", "", "xen"),
    ("Parallels", "", "parallels"),
    ("Apple Inc.", "Apple Virtualization", "apple"),
    ("OpenStack", "", "openstack"),
    ("Alibaba Cloud", "", "alibaba"),
    ("DigitalOcean", "", "digitalocean"),
    ("Nutanix", "AHV", "nutanix"),
    ("QEMU", "", "qemu"),
    ("Bochs", "", "qemu"),
    ("BHYVE", "", "bhyve"),
    ("", "KVM", "kvm"),
    ("", "OpenStack", "openstack"),
)

#: A cgroup's path names who made it. The daemons' own cgroups (docker.service) are no containers.
_CGROUP_NAMES: Final = (
    (r"kubepods", "kubernetes"),
    (r"/docker[/-][0-9a-f]{12}", "docker"),
    (r"libpod", "podman"),
    (r"cri-containerd|/containerd/|/nerdctl/", "containerd"),
    (r"/crio-", "cri-o"),
    (r"/lxc[./]|/lxc\.payload", "lxc"),
    (r"/ecs/[0-9a-f]", "ecs"),
)


def read_surroundings(system: System) -> Surroundings:
    """Everything about where the process runs; nothing raises."""
    scheduler, grant = _scheduler(system.environment)
    return Surroundings(
        operating_system=_operating_system(system),
        kernel=_kernel(system),
        container=_container(system),
        virtual_machine=_virtual_machine(system),
        wsl=_wsl(system),
        scheduler=scheduler,
        scheduler_grant=grant,
    )


def _kernel(system: System) -> Fact[str]:
    release = str(system.system_name().get("release", ""))
    if release:
        return known(release, "uname")
    text = system.text("/proc/sys/kernel/osrelease")
    return known(text.value, text.source) if text.value else cannot_tell("uname", "it is empty")


def _operating_system(system: System) -> Fact[str]:
    """Its name as os-release(5) has it."""
    text = system.text("/etc/os-release")
    if text.value is None:
        text = system.text("/usr/lib/os-release")
    if text.value is None:
        return cannot_tell("/etc/os-release", text.reason)
    entries = {}
    for line in text.value.splitlines():
        key, _, value = line.partition("=")
        try:
            entries[key.strip()] = " ".join(shlex.split(value))
        except ValueError:  # a quotation that does not end
            continue
    name = entries.get("PRETTY_NAME") or " ".join(
        filter(None, (entries.get("NAME"), entries.get("VERSION_ID")))
    )
    return known(name, text.source) if name else cannot_tell(text.source, "it names no system")


# --- Container --------------------------------------------------------------------------------


def _container(system: System) -> Fact[str]:
    found = _container_said(system) or _container_by_cgroup(system)
    if found is not None:
        return found
    mounts = read_mounts(system)
    root = mount_of("/", mounts.value or ())
    whole_disk = root is not None and root.root == "/" and not root.device.startswith("0:")
    if system.exists("/.dockerenv"):
        if whole_disk:
            # `docker export` leaves the file in images that virtual machines start from.
            return cannot_tell("/.dockerenv", "it exists, but / is a whole disk, unlike in Docker")
        return known("docker", "/.dockerenv")
    if root is None:
        return cannot_tell(MOUNTINFO, mounts.reason or "it does not list /")
    if root.filesystem == "overlay":
        why = (
            "/ is an overlay, as in a container or a live system, but no container engine is named"
        )
        return cannot_tell(MOUNTINFO, why)
    return absent(f"{MOUNTINFO}, /.dockerenv, /run/.containerenv", "no sign of one")


def _container_said(system: System) -> Fact[str] | None:
    """What a container says of itself, by variables and files."""
    environment = system.environment
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return known("kubernetes", "KUBERNETES_SERVICE_HOST")
    for source, word in (
        ("/run/.containerenv", "podman"),
        ("/.singularity.d", "apptainer"),
        ("/var/run/secrets/kubernetes.io", "kubernetes"),
    ):
        if system.exists(source):
            return known(word, source)
    # systemd's container interface; "oci" is any of them.
    said = str(environment.get("container", "")).strip()
    if said:
        return known(said, "container")
    manager = word_at(system, "/run/systemd/container")
    return known(manager, "/run/systemd/container") if manager else None


def _container_by_cgroup(system: System) -> Fact[str] | None:
    text = system.text("/proc/self/cgroup").value or ""
    for pattern, word in _CGROUP_NAMES:
        if re.search(pattern, text):
            return known(word, "/proc/self/cgroup")
    return None


# --- Virtual machine, WSL ---------------------------------------------------------------------


def _virtual_machine(system: System) -> Fact[str]:
    """The hypervisor by its DMI names; "unnamed" where only the processor's flag tells of one."""
    cpuinfo = read_cpuinfo(system)
    flags = cpuinfo.value.flags if cpuinfo.value is not None else frozenset()
    if flags and "hypervisor" not in flags:  # CPUID leaf 1, ECX bit 31: a hypervisor sets it
        return absent(CPUINFO, "the CPU flags list no hypervisor")
    vendor, product = (word_at(system, f"{_DMI}/{n}") for n in ("sys_vendor", "product_name"))
    for begin, part, word in _HYPERVISORS:
        if (vendor or "").startswith(begin) and part in (product or ""):
            # Without the flag (Arm): Amazon's whole machines are named "c7g.metal".
            if word == "amazon-ec2" and ".metal" in (product or "") and not flags:
                return absent(f"{_DMI}/product_name", f"{product} is a bare-metal instance")
            return known(word, f"{_DMI}/sys_vendor, product_name")
    kind = word_at(system, "/sys/hypervisor/type")
    if kind is not None:
        return known(kind, "/sys/hypervisor/type")
    tree = system.text("/proc/device-tree/hypervisor/compatible").value
    if tree:
        return known(tree.split("\0")[0], "/proc/device-tree/hypervisor/compatible")
    if "hypervisor" in flags:
        word = "hyper-v" if _wsl(system).value == 2 else "unnamed"
        return known(word, f"{CPUINFO} (flag hypervisor)")
    board = word_at(system, "/proc/device-tree/model")
    if board is not None and "dummy-virt" not in board:  # QEMU's name for its own
        return absent("/proc/device-tree", f"{board} names no hypervisor")
    if vendor is not None and product is not None:
        return absent(f"{_DMI}/sys_vendor", f"{vendor} {product} is not a hypervisor's name")
    return cannot_tell(f"{CPUINFO}, {_DMI}", "neither shows whether there is a hypervisor")


def _wsl(system: System) -> Fact[int]:
    """1 or 2, by the kernel's name: "4.4.0-19041-Microsoft", "5.15.90.1-microsoft-standard-WSL2".

    Custom kernels of WSL 2 are recognized by /dev/dxg together with WSL's variables.
    """
    kernel = _kernel(system)
    release = kernel.value or ""
    if "wsl2" in release.lower() or "microsoft-standard" in release:
        return known(2, kernel.source)
    if "Microsoft" in release:
        return known(1, kernel.source)
    variables = [n for n in ("WSL_INTEROP", "WSL_DISTRO_NAME") if system.environment.get(n)]
    if system.exists("/dev/dxg"):
        return known(2, "/dev/dxg")
    if variables:
        return cannot_tell(variables[0], "it is set, but neither the kernel nor /dev/dxg is WSL's")
    if kernel.value is None:
        return cannot_tell(kernel.source, kernel.reason)
    return absent(f"{kernel.source}, /dev/dxg", "the kernel is not Microsoft's")


# --- Scheduler --------------------------------------------------------------------------------


def _scheduler(environment: Mapping[str, str]) -> tuple[Fact[str], Mapping[str, str]]:
    """Who gave this job its share of the machine, and the variables in which it says what."""
    for variable, word, prefixes in (
        ("SLURM_JOB_ID", "slurm", ("SLURM_",)),
        ("PBS_JOBID", "pbs", ("PBS_",)),
        ("LSB_JOBID", "lsf", ("LSB_",)),
        ("JOB_ID", "sge", ("JOB_ID", "NSLOTS")),
    ):
        # "JOB_ID" alone may be anyone's.
        if environment.get(variable) and (word != "sge" or environment.get("NSLOTS")):
            granted = {
                name: str(environment[name])
                for name in VARIABLES
                if name.startswith(prefixes) and name in environment
            }
            return known(word, variable), granted
    return absent("SLURM_JOB_ID, PBS_JOBID, LSB_JOBID, JOB_ID", "none of them is set"), {}
