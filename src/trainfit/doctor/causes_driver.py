"""Rows of the decision table whose cause lies in the GPU, its driver or the driver's files."""

from __future__ import annotations

from typing import Final

from trainfit.doctor.stack import LEAST_DRIVER, Stack, version_text
from trainfit.doctor.verdicts import bad, evidence
from trainfit.results.doctor import Check, Evidence, Remedy

NAME: Final = "gpu"

# CUresult: docs.nvidia.com/cuda/cuda-driver-api, "Data types used by CUDA driver".
_DEVICES_UNAVAILABLE = 46
_NOT_READY = 802
_DRIVER_MISMATCH = 803
_COMPAT_NOT_SUPPORTED = 804


def hangs(stack: Stack) -> Check | None:
    """The driver does not answer at all."""
    hanging = stack.hanging
    if len(hanging) < 2 and "libcuda" not in hanging:
        return None
    return bad(
        NAME,
        "driver_hangs",
        f"the NVIDIA driver does not answer ({', '.join(hanging)})",
        "Calls into the driver do not come back: a GPU that fell off the bus, a driver that "
        "crashed, or a process stuck in it.",
        _all(stack),
        [
            Remedy(
                "sudo dmesg | grep -iE 'nvrm|xid' | tail -20",
                "nothing is changed",
                "none; an Xid number says what happened (docs.nvidia.com/deploy/xid-errors)",
            ),
            Remedy("sudo reboot", "none", "everything on the machine ends"),
        ],
    )


def no_gpu(stack: Stack) -> Check | None:
    """There is no NVIDIA GPU on the bus."""
    if stack.drives_gpu or stack.in_wsl or stack.is_jetson:
        return None
    if stack.pci is None or stack.pci:
        return None
    return bad(
        NAME,
        "no_gpu",
        "this machine has no NVIDIA GPU",
        "No device of NVIDIA (0x10de) is on the PCI bus, and no NVIDIA driver is loaded.",
        _all(stack),
        [
            Remedy(
                'trainfit plan --gpu "RTX 4090" -- python train.py …',
                "none needed",
                "none: plans the job for a GPU that is elsewhere",
            )
        ],
    )


def no_driver(stack: Stack) -> Check | None:
    """A GPU is there, or may be, and no NVIDIA driver is loaded."""
    if stack.drives_gpu or stack.in_wsl or stack.is_jetson:
        return None
    if not stack.cuda.kernel_driver.is_absent:
        return None
    other = sorted({device.kernel_driver for device in stack.pci or () if device.kernel_driver})
    if stack.pci is None:
        why = (
            "No NVIDIA driver is loaded; whether there is a GPU cannot be told, as the PCI bus "
            f"cannot be seen ({stack.cuda.pci_devices.reason})."
        )
    elif "vfio-pci" in other:
        why = "The GPU is held back for a virtual machine (vfio-pci); this system cannot use it."
    elif other:
        why = f"The GPU is driven by {', '.join(other)}, which serves no CUDA."
    else:
        why = "An NVIDIA GPU is on the PCI bus, and no driver has taken it."
    return bad(
        NAME,
        "no_driver",
        "no NVIDIA driver is loaded",
        why,
        [
            evidence("kernel modules", stack.cuda.kernel_modules, lambda m: ", ".join(m) or "none"),
            *_all(stack),
        ],
        [
            Remedy(
                _install_command(stack),
                "remove the package again, then reboot",
                "a reboot; with Secure Boot the module must be signed (mokutil --sb-state)",
            )
        ],
    )


def _install_command(stack: Stack) -> str:
    system = (stack.machine.surroundings.operating_system.value or "").lower()
    if "ubuntu" in system:
        return "sudo ubuntu-drivers install && sudo reboot"
    if "debian" in system:
        return "sudo apt install nvidia-driver firmware-misc-nonfree && sudo reboot"
    if "fedora" in system:
        return "sudo dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda && sudo reboot"
    if "arch" in system:
        return "sudo pacman -S nvidia-open && sudo reboot"
    return (
        "install NVIDIA's driver for this distribution, then reboot "
        "(docs.nvidia.com/datacenter/tesla/driver-installation-guide)"
    )


def lost_gpu(stack: Stack) -> Check | None:
    """The GPU fell off the bus."""
    reasons = [stack.nvml_error, stack.cuda.nvidia_smi.reason]
    reasons += [gpu.name.reason for gpu in stack.gpus]
    if not any("GPU_IS_LOST" in reason or "is lost" in reason for reason in reasons):
        return None
    return bad(
        NAME,
        "gpu_lost",
        "a GPU has fallen off the bus",
        "NVML says GPU_IS_LOST: overheating, power or a bad slot are the usual causes (Xid 79).",
        _all(stack),
        [Remedy("sudo reboot", "none", "everything on the machine ends")],
    )


def no_libraries(stack: Stack) -> Check | None:
    """The kernel's part of the driver runs, and the libraries are not installed."""
    if stack.kernel_driver is None or stack.has_libcuda or stack.in_container or stack.in_wsl:
        return None
    if not stack.gpu_nodes:
        return None  # the device files are the nearer cause
    branch = stack.driver_branch
    return bad(
        NAME,
        "no_driver_libraries",
        "the NVIDIA driver's libcuda is not installed",
        "The kernel module is loaded, but the driver's user libraries are not there (or not "
        "where the loader looks).",
        _all(stack),
        [
            Remedy(
                f"sudo apt install libnvidia-compute-{branch} && sudo ldconfig",
                f"sudo apt remove libnvidia-compute-{branch}",
                "none; the version must be that of the kernel module",
            )
        ],
    )


def version_mismatch(stack: Stack) -> Check | None:
    """The libraries are of another version than the loaded kernel module."""
    kernel = stack.kernel_driver
    if kernel is None or stack.in_wsl:
        return None
    libraries = {
        name: version
        for name, version in stack.cuda.library_versions.items()
        if name in ("libcuda", "libnvidia-ml") and version != kernel
    }
    said = "LIB_RM_VERSION_MISMATCH" in stack.nvml_error or stack.cuda_code == _DRIVER_MISMATCH
    # CUDA's forward compatibility brings a libcuda of its own that is newer on purpose.
    compat = "/compat" in stack.cuda.library_places.get("libcuda", "")
    if not said and (compat or not libraries):
        return None
    shown = ", ".join(f"{name} {version}" for name, version in sorted(libraries.items()))
    found = [
        Evidence(name, version, stack.cuda.library_places.get(name, "the library's file name"))
        for name, version in sorted(libraries.items())
    ]
    return bad(
        NAME,
        "version_mismatch",
        f"the loaded driver is {kernel}, the libraries are not",
        f"Installed: {shown or 'another version'}. An update replaced the libraries while the "
        "old kernel module stayed loaded (or the container brings its own).",
        [*found, *_all(stack)],
        [
            Remedy("sudo reboot", "none needed", "everything on the machine ends"),
            Remedy(
                "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia",
                "none needed",
                "no process may use the GPU meanwhile, a desktop included",
            ),
        ],
    )


def too_old(stack: Stack) -> Check | None:
    """The driver is older than the CUDA of this PyTorch needs."""
    build = stack.torch
    if build is None or build.cuda is None or stack.sees_gpu:
        return None
    if not stack.too_old and stack.cuda_code != _COMPAT_NOT_SUPPORTED:
        return None
    least = LEAST_DRIVER.get(build.cuda[0])
    driver = stack.kernel_driver or stack.cuda.nvml.value or "the driver"
    needs = (
        f"CUDA {version_text(build.cuda)} needs driver {least} or newer"
        if least
        else (f"CUDA {version_text(build.cuda)} needs a newer one")
    )
    newest = stack.cuda_driver.version if stack.cuda_driver is not None else None
    newest = newest or stack.cuda.nvml_cuda.value
    serves = f"; this driver serves CUDA up to {version_text(newest)}" if newest else ""
    remedies = [
        Remedy(
            "install NVIDIA driver "
            + (f"{least} or newer" if least else "of the current branch")
            + ", then reboot",
            f"reinstall driver {driver}",
            "a reboot; in a container the host's driver counts",
        )
    ]
    if newest is not None and newest[0] in LEAST_DRIVER and newest[0] < build.cuda[0]:
        wheel = {11: "cu118", 12: "cu126"}[newest[0]]
        remedies.append(
            Remedy(
                "pip install --force-reinstall torch --index-url "
                f"https://download.pytorch.org/whl/{wheel}",
                f"pip install --force-reinstall torch=={build.version}",
                f"perhaps an older PyTorch: the newest that was built for CUDA {newest[0]}",
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


def fabric_manager(stack: Stack) -> Check | None:
    """GPUs joined by NVSwitch wait for the fabric manager (error 802)."""
    not_ready = stack.cuda_code == _NOT_READY or "Error 802" in stack.torch_words
    if not not_ready:
        return None
    version = stack.driver_branch or "VERSION"
    return bad(
        NAME,
        "fabric_manager_down",
        "the GPUs wait for the fabric manager (error 802, system not yet initialized)",
        "GPUs that are joined by NVSwitch answer nvidia-smi and refuse CUDA until "
        "nvidia-fabricmanager, of exactly the driver's version, runs.",
        [
            evidence("nvidia-fabricmanager", stack.cuda.fabric_manager),
            evidence("nvidia-smi -L", stack.cuda.nvidia_smi),
            *_all(stack),
        ],
        [
            Remedy(
                "sudo systemctl enable --now nvidia-fabricmanager",
                "sudo systemctl disable --now nvidia-fabricmanager",
                "none",
            ),
            Remedy(
                f"sudo apt install nvidia-fabricmanager-{version}   # where the unit is missing",
                f"sudo apt remove nvidia-fabricmanager-{version}",
                "none",
            ),
        ],
    )


def device_node(stack: Stack) -> Check | None:
    """A device file that CUDA needs is missing, or may not be opened."""
    if stack.kernel_driver is None or stack.in_wsl or stack.sees_gpu:
        return None
    closed = stack.closed_nodes
    missing = [
        path
        for path, is_there in (
            ("/dev/nvidia0", stack.gpu_nodes),
            ("/dev/nvidia-uvm", stack.has_uvm),
        )
        if not is_there
    ]
    if not closed and not missing:
        return None
    if missing:
        summary = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        remedy = Remedy(
            "sudo nvidia-modprobe -c=0 -u   # loads nvidia-uvm and makes the files",
            "sudo rmmod nvidia_uvm",
            "none; nvidia-persistenced does it at every start",
        )
    else:
        summary = f"{', '.join(node.path for node in closed)} may not be opened by this user"
        remedy = Remedy(
            f"sudo chmod a+rw {' '.join(node.path for node in closed)}",
            f"sudo chmod 660 {' '.join(node.path for node in closed)}",
            "every user may use the GPU; or add this one to the files' group (ls -l /dev/nvidia*)",
        )
    return bad(
        NAME,
        "device_node",
        summary,
        "CUDA opens the GPU's own file, nvidiactl and nvidia-uvm; NVML needs the last not, so "
        "nvidia-smi may look healthy.",
        [stack.node_evidence(), *_all(stack)],
        [remedy],
    )


def mig_without_instances(stack: Stack) -> Check | None:
    """MIG is switched on, and no instance was made."""
    empty = [gpu for gpu in stack.gpus if gpu.mig.value and not gpu.mig_instances.value]
    if not empty or stack.sees_gpu or any(not gpu.mig.value for gpu in stack.gpus):
        return None
    index = empty[0].index
    return bad(
        NAME,
        "mig_without_instances",
        f"MIG is on without instances on GPU {', '.join(str(gpu.index) for gpu in empty)}",
        "A GPU in MIG mode offers only its instances to CUDA, and there are none.",
        [
            evidence(f"MIG of GPU {index}", empty[0].mig),
            evidence(
                f"instances of GPU {index}",
                empty[0].mig_instances,
                lambda each: ", ".join(each) or "none",
            ),
            *_all(stack),
        ],
        [
            Remedy(
                f"sudo nvidia-smi mig -i {index} -cgi 0 -C   # one instance of the whole GPU",
                f"sudo nvidia-smi mig -i {index} -dci && sudo nvidia-smi mig -i {index} -dgi",
                "none; `nvidia-smi mig -lgip` lists the other sizes",
            ),
            Remedy(
                f"sudo nvidia-smi -i {index} -mig 0",
                f"sudo nvidia-smi -i {index} -mig 1",
                "nothing may use the GPU meanwhile",
            ),
        ],
    )


def occupied(stack: Stack) -> Check | None:
    """The compute mode lets no further process in."""
    if stack.cuda_code != _DEVICES_UNAVAILABLE and "busy or unavailable" not in stack.torch_words:
        return None
    modes = [gpu.compute_mode.value for gpu in stack.gpus if gpu.compute_mode.value]
    return bad(
        NAME,
        "gpu_busy",
        "the GPU lets no further process in",
        "Its compute mode is exclusive or prohibited, and another process holds it.",
        [evidence("compute mode", gpu.compute_mode) for gpu in stack.gpus] + _all(stack),
        [
            Remedy(
                "sudo nvidia-smi -c DEFAULT",
                f"sudo nvidia-smi -c {next(iter(modes), 'EXCLUSIVE_PROCESS').upper()}",
                "others may share the GPU",
            )
        ],
    )


def _all(stack: Stack) -> list[Evidence]:
    return [*stack.driver_evidence(), *stack.torch_evidence()]
