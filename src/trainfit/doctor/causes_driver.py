"""Rows of the decision table whose cause lies in the GPU, its driver or the driver's files."""

from __future__ import annotations

from typing import Final

from trainfit.doctor import packages as wheels
from trainfit.doctor.causes_torch import for_jetson
from trainfit.doctor.driver_stack import LEAST_DRIVER, DriverStack
from trainfit.doctor.findings import bad, evidence, on_host, version_text
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix

NAME: Final = "gpu"

# CUresult: docs.nvidia.com/cuda/cuda-driver-api, "Data types used by CUDA driver".
_NOT_READY = 802
_COMPAT_NOT_SUPPORTED = 804


def hangs(stack: DriverStack) -> Check | None:
    """The driver does not answer at all."""
    hanging = stack.hanging
    if len(hanging) < 2 and "libcuda" not in hanging:
        return None
    if not (stack.drives_gpu or stack.nodes or stack.pci):
        return None  # without a driver nothing hangs in it: the machine itself is slow
    return bad(
        NAME,
        "driver_hangs",
        f"the NVIDIA driver does not respond ({', '.join(hanging)})",
        "Calls into the driver do not return: a GPU that fell off the bus, a driver "
        "that crashed, or a process stuck in it. On servers with many GPUs and without persistence "
        "mode, the first call may also need tens of seconds.",
        _all(stack),
        [
            Fix(
                "time nvidia-smi -L   # if it returns after all: sudo nvidia-smi -pm 1",
                "Ctrl-C; sudo nvidia-smi -pm 0",
                "none",
            ),
            Fix(
                "sudo dmesg | grep -iE 'nvrm|xid' | tail -20",
                "changes nothing",
                "none; an Xid number identifies the error (docs.nvidia.com/deploy/xid-errors)",
            ),
            Fix(
                "sudo reboot",
                "none: a reboot cannot be undone",
                on_host(stack.machine, "reboots; terminates all running jobs"),
            ),
        ],
    )


def no_gpu(stack: DriverStack) -> Check | None:
    """There is no NVIDIA GPU on the bus."""
    if stack.drives_gpu or stack.in_wsl or stack.is_jetson:
        return None
    if stack.pci is None or stack.pci:
        return None
    return bad(
        NAME,
        "no_gpu",
        "this machine has no NVIDIA GPU",
        "No NVIDIA device (vendor 0x10de) is on the PCI bus, and no NVIDIA driver is loaded. A "
        "GPU that a laptop has powered off (prime-select, supergfxctl), an unplugged eGPU, or "
        "one that the host does not pass through to this virtual machine is not on the bus "
        "either.",
        _all(stack),
        [
            Fix(
                'trainfit plan --gpu "RTX 4090" -- python train.py …',
                "none needed",
                "none: plans the job for a GPU of another machine",
            )
        ],
    )


def no_driver(stack: DriverStack) -> Check | None:
    """A GPU is there, or may be, and no NVIDIA driver is loaded."""
    if stack.drives_gpu or stack.in_wsl or stack.is_jetson:
        return None
    if not stack.cuda.kernel_driver.is_absent:
        return None
    drivers = {device.kernel_driver for device in stack.pci or () if device.kernel_driver}
    other = sorted(drivers - {"nvidia"})  # nvidia: it runs, and its files are hidden here
    if stack.pci is None:
        why = (
            "No NVIDIA driver is loaded; whether there is a GPU is unknown, as "
            f"the PCI bus is not visible ({stack.cuda.pci_devices.reason})."
        )
    elif "vfio-pci" in other:
        why = "The GPU is reserved for a virtual machine (vfio-pci); this system cannot use it."
    elif other:
        why = f"The GPU is driven by {', '.join(other)}, which does not support CUDA."
    elif _built(stack) and not stack.in_container:
        why = (
            f"The driver's libraries ({_built(stack)}) are installed, but its kernel "
            "module is not loaded: it was not built for this kernel (after a kernel update), "
            "Secure Boot rejects it, or it is blacklisted."
        )
    else:
        why = "An NVIDIA GPU is on the PCI bus, but no driver is bound to it."
    return bad(
        NAME,
        "no_driver",
        "no NVIDIA driver is loaded",
        why,
        [
            evidence("kernel modules", stack.cuda.kernel_modules, lambda m: ", ".join(m) or "none"),
            *_all(stack),
        ],
        _load(stack, other),
    )


#: From this PCI id on GPUs are of the Blackwell generation (B200: 0x2901, RTX 5090: 0x2b85), which
#: NVIDIA's open kernel modules alone drive.
_BLACKWELL: Final = 0x2900


def unbound(stack: DriverStack) -> Check | None:
    """NVIDIA's driver is loaded, and drives none of the GPUs."""
    gpus = [device for device in stack.pci or () if device.device_class.startswith("0x03")]
    if stack.kernel_driver is None or not gpus or stack.in_wsl or stack.gpu_nodes or stack.gpus:
        return None
    others = sorted({device.kernel_driver or "" for device in gpus})
    if "nvidia" in others:
        return None
    held = [name for name in others if name]
    fixes = [
        Fix(
            "sudo dmesg | grep -iE 'nvrm|nvidia' | tail -20",
            "changes nothing",
            "none; the kernel log says why the driver refused the GPU",
        )
    ]
    if held:
        why = f"The GPU is held by {', '.join(held)}, so that NVIDIA's driver cannot have it."
        fixes = _load(stack, held)
    elif any(_id(device.device_id) >= _BLACKWELL for device in gpus):
        why = (
            "GPUs of the Blackwell generation need NVIDIA's open kernel modules, of driver 570 or "
            "newer: the proprietary ones refuse them."
        )
        fixes.insert(
            0,
            Fix(
                "install the variant -open of the driver (Ubuntu: sudo apt install "
                f"nvidia-driver-{max(570, stack.driver_branch or 0)}-open), then reboot",
                "install the previous package",
                on_host(stack.machine, "requires a reboot"),
            ),
        )
    else:
        why = (
            "The driver refused the GPU: it is too old for it or no longer supports it (580 is the "
            "last branch for Maxwell, Pascal and Volta), or the GPU does not start."
        )
    return bad(
        NAME,
        "gpu_not_driven",
        "NVIDIA's driver is loaded, but drives none of this machine's GPUs",
        why,
        [evidence("nvidia-smi -L", stack.cuda.nvidia_smi), *_all(stack)],
        fixes,
    )


def _id(written: str) -> int:
    try:
        return int(written, 16)
    except ValueError:
        return 0


def _built(stack: DriverStack) -> str | None:
    """Version of the driver's libraries that are installed."""
    return stack.cuda.library_versions.get("libcuda")


def _load(stack: DriverStack, other: list[str]) -> list[Fix]:
    """How a driver comes to the GPU."""
    if "vfio-pci" in other:
        held = [d.address for d in stack.pci or () if d.kernel_driver == "vfio-pci"]
        return [
            Fix(
                " && ".join(f"sudo driverctl unset-override {address}" for address in held),
                " && ".join(f"sudo driverctl set-override {a} vfio-pci" for a in held),
                "the virtual machine loses the GPU; if the kernel command line "
                "or /etc/modprobe.d lists it (vfio-pci.ids=), remove it there, then reboot",
            )
        ]
    install = Fix(
        _install_command(stack),
        "remove the package, then reboot",
        on_host(
            stack.machine,
            "requires a reboot; with Secure Boot the module must be signed (mokutil --sb-state)",
        ),
    )
    if other or not _built(stack) or stack.in_container:
        return [install]
    return [
        Fix(
            "sudo modprobe nvidia   # if it fails: sudo dkms autoinstall, and try again",
            "sudo modprobe -r nvidia",
            on_host(
                stack.machine, "none; if it fails, the kernel log says why (sudo dmesg | tail)"
            ),
        ),
        install,
    ]


def distribution(stack: DriverStack) -> str:
    """The system's name; "" in a container, whose image says nothing of the host's."""
    if stack.in_container:
        return ""
    return (stack.machine.surroundings.operating_system.value or "").lower()


def _install_command(stack: DriverStack) -> str:
    system = distribution(stack)
    if "ubuntu" in system:
        return "sudo ubuntu-drivers install && sudo reboot"
    if "debian" in system:
        return "sudo apt install nvidia-driver firmware-misc-nonfree && sudo reboot"
    if "fedora" in system:
        return "sudo dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda && sudo reboot"
    if "arch" in system:
        return "sudo pacman -S nvidia-open && sudo reboot"
    return (
        "install NVIDIA's driver for the distribution, then reboot "
        "(docs.nvidia.com/datacenter/tesla/driver-installation-guide)"
    )


def lost_gpu(stack: DriverStack) -> Check | None:
    """The GPU fell off the bus."""
    reasons = [stack.nvml_error, stack.cuda.nvidia_smi.reason]
    reasons += [gpu.name.reason for gpu in stack.gpus]
    if not any("GPU_IS_LOST" in reason or "is lost" in reason for reason in reasons):
        return None
    return bad(
        NAME,
        "gpu_lost",
        "a GPU has fallen off the bus",
        "NVML reports GPU_IS_LOST. Usual causes: overheating, power or a bad slot (Xid 79).",
        _all(stack),
        [
            Fix(
                "sudo reboot",
                "none: a reboot cannot be undone",
                on_host(stack.machine, "reboots; terminates all running jobs"),
            )
        ],
    )


def compat_unsupported(stack: DriverStack) -> Check | None:
    """A forward-compatibility libcuda is used on a GPU that may not use it."""
    if stack.cuda_code != _COMPAT_NOT_SUPPORTED and "Error 804" not in stack.torch_words:
        return None
    build, branch = stack.torch, stack.driver_branch
    least = LEAST_DRIVER.get(build.cuda[0]) if build is not None and build.cuda else None
    if least is not None and branch is not None and branch < least:
        return None  # without it the driver would be too old: that is the cause
    return bad(
        NAME,
        "forward_compat_unsupported",
        "CUDA's forward-compatibility libcuda is used on a GPU that does not support it (error "
        "804)",
        "It supports data-center GPUs only, and is found before the driver's own libcuda, usually "
        "through an image's LD_LIBRARY_PATH. The driver itself is new enough for this PyTorch.",
        _all(stack),
        [
            Fix(
                'export LD_LIBRARY_PATH="$(echo "$LD_LIBRARY_PATH" | tr : \'\\n\' | '
                'grep -v compat | paste -sd:)"',
                "open a new shell",
                "none; if ldconfig lists the folder: sudo apt remove 'cuda-compat-*'",
            )
        ],
    )


def too_old(stack: DriverStack) -> Check | None:
    """The driver is older than the CUDA of this PyTorch needs."""
    build = stack.torch
    if build is None or build.cuda is None or stack.sees_gpu:
        return None
    if not stack.too_old:
        return None
    least = LEAST_DRIVER.get(build.cuda[0])
    driver = stack.kernel_driver or stack.cuda.nvml.value or "the driver"
    needs = (
        f"CUDA {version_text(build.cuda)} needs driver {least} or newer"
        if least and not stack.is_jetson
        else (f"CUDA {version_text(build.cuda)} needs a newer one")
    )
    newest = stack.cuda_driver.version if stack.cuda_driver is not None else None
    newest = newest or stack.cuda.nvml_cuda.value
    serves = f"; this driver supports CUDA up to {version_text(newest)}" if newest else ""
    remedies = [
        Fix(
            "install NVIDIA driver "
            + (f"{least} or newer" if least else "of the current branch")
            + ", then reboot",
            f"reinstall driver {driver}",
            "requires a reboot; in a container, the host's driver is the one that matters",
        )
    ]
    index = wheels.index_for(stack.driver_branch, stack.capabilities)
    if stack.is_jetson:
        remedies = [for_jetson(build)]  # its driver comes with JetPack, and counts otherwise
    elif index is not None:
        remedies.append(
            Fix(
                wheels.install(index),
                wheels.again(build),
                "possibly an older PyTorch: the newest one built for a CUDA version that "
                "this driver supports",
            )
        )
    return bad(
        NAME,
        "driver_too_old",
        f"driver {driver} is too old for PyTorch {build.version}",
        f"{needs}{serves}.",
        _all(stack),
        remedies,
    )


def fabric_manager(stack: DriverStack) -> Check | None:
    """GPUs joined by NVSwitch wait for the fabric manager (error 802)."""
    not_ready = stack.cuda_code == _NOT_READY or "Error 802" in stack.torch_words
    if not not_ready:
        return None
    version = stack.driver_branch or "VERSION"
    return bad(
        NAME,
        "fabric_manager_down",
        "the GPUs wait for the fabric manager (error 802, system not yet initialized)",
        "GPUs connected by NVSwitch are listed by nvidia-smi but refuse CUDA "
        "until nvidia-fabricmanager runs, in exactly the driver's version.",
        [
            evidence("nvidia-fabricmanager", stack.cuda.fabric_manager),
            evidence("nvidia-smi -L", stack.cuda.nvidia_smi),
            *_all(stack),
        ],
        [
            Fix(
                "sudo systemctl enable --now nvidia-fabricmanager",
                "sudo systemctl disable --now nvidia-fabricmanager",
                on_host(stack.machine, "none"),
            ),
            Fix(
                f"sudo apt install nvidia-fabricmanager-{version}   # if the unit is missing",
                f"sudo apt remove nvidia-fabricmanager-{version}",
                on_host(stack.machine, "none"),
            ),
        ],
    )


def _all(stack: DriverStack) -> list[Evidence]:
    return [*stack.driver_evidence(), *stack.torch_evidence()]
