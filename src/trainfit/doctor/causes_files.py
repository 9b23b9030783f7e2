"""Rows of the decision table whose cause lies in the driver's libraries or device files."""

from __future__ import annotations

import posixpath
import shlex
from typing import Final

from trainfit.doctor.causes_driver import distribution
from trainfit.doctor.causes_torch import ask_slurm
from trainfit.doctor.driver_stack import DriverStack
from trainfit.doctor.findings import bad, evidence, on_host
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix

NAME: Final = "gpu"

# CUresult: docs.nvidia.com/cuda/cuda-driver-api, "Data types used by CUDA driver".
_DRIVER_MISMATCH = 803


def no_libraries(stack: DriverStack) -> Check | None:
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
        "The kernel module is loaded, but the driver's user-space libraries are missing (or "
        "not on the loader's search path).",
        _library_facts(stack),
        [
            Fix(
                f"sudo apt install libnvidia-compute-{branch} && sudo ldconfig",
                f"sudo apt remove libnvidia-compute-{branch}",
                "none; the version must match the kernel module",
            )
            if "ubuntu" in distribution(stack)
            else Fix(
                f"install the libraries of driver {stack.kernel_driver} "
                "the same way as the module, then: sudo ldconfig",
                "remove them the same way",
                "none; the version must match the kernel module",
            )
        ],
    )


def not_loaded(stack: DriverStack) -> Check | None:
    """libcuda's file is there, and the loader does not take it."""
    place, answer = stack.cuda.library_places.get("libcuda", ""), stack.cuda.cuda
    if not answer.is_absent or not place or not (stack.drives_gpu or stack.has_dxg):
        return None
    folder = shlex.quote(posixpath.dirname(place))
    if "too short" in answer.reason:
        why = "The file is empty: the image was committed from a running container."
        remedy = Fix(
            f"rm {shlex.quote(place)} && ldconfig   # in the image, then start it with its GPU",
            "none needed: the file is empty",
            "recreates the container",
        )
    else:
        why = "Its folder is not on the loader's search path."
        remedy = Fix(
            f'export LD_LIBRARY_PATH={folder}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"',
            f'export LD_LIBRARY_PATH="${{LD_LIBRARY_PATH#{folder}}}"; '
            'export LD_LIBRARY_PATH="${LD_LIBRARY_PATH#:}"',
            "none; to make it permanent: add the folder to a file in /etc/ld.so.conf.d, then "
            "sudo ldconfig",
        )
    return bad(
        NAME,
        "libcuda_not_loaded",
        "the driver's libcuda exists, but cannot be loaded",
        f"The loader reports: {answer.reason[:200]}. {why}",
        [Evidence("libcuda", place, source="file"), *_library_facts(stack)],
        [remedy],
    )


def version_mismatch(stack: DriverStack) -> Check | None:
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
    # A libcuda that starts is of the module's version, whatever other files lie about.
    if not said and (compat or not libraries or stack.cuda_code == 0):
        return None
    shown = ", ".join(f"{name} {version}" for name, version in sorted(libraries.items()))
    found = [
        Evidence(
            name, version, source=stack.cuda.library_places.get(name, "the library's file name")
        )
        for name, version in sorted(libraries.items())
    ]
    return bad(
        NAME,
        "version_mismatch",
        f"driver/library version mismatch: the loaded kernel module is {kernel}",
        f"Installed: {shown or 'another version'}. An update replaced the libraries while "
        "the old kernel module stayed loaded (or the container ships its own).",
        [*found, *_library_facts(stack)],
        _in_step(stack, sorted(libraries)),
    )


def _in_step(stack: DriverStack, libraries: list[str]) -> list[Fix]:
    """Bring libraries and module to one version."""
    host = [
        Fix(
            "sudo reboot",
            "none: a reboot cannot be undone",
            on_host(stack.machine, "reboots; terminates all running jobs"),
        ),
        Fix(
            "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia",
            "none: the previous module is no longer on disk",
            on_host(stack.machine, "no process may use the GPU meanwhile, including a desktop"),
        ),
    ]
    if not stack.in_container:
        return host
    places = [stack.cuda.library_places.get(name, name) for name in libraries]
    return [
        Fix(
            "recreate the container from an image without driver libraries: "
            f"dpkg -S {' '.join(map(shlex.quote, places)) or 'libcuda.so.1'} lists their package",
            "start it with the previous options",
            "recreates the container; the toolkit mounts the libraries of the host's driver",
        ),
        *host,
    ]


def _library_facts(stack: DriverStack) -> list[Evidence]:
    return [*stack.driver_evidence(), *stack.torch_evidence()]


# ---
# Rows of the decision table whose cause lies in the GPU's device files and MIG instances.


# CUresult: docs.nvidia.com/cuda/cuda-driver-api, "Data types used by CUDA driver".
_UNKNOWN = 999


def device_node(stack: DriverStack) -> Check | None:
    """A device file that CUDA needs is missing, or may not be opened."""
    if stack.kernel_driver is None or stack.in_wsl or stack.is_jetson or stack.sees_gpu:
        return None
    needed = (("/dev/nvidia0", stack.gpu_nodes), ("/dev/nvidia-uvm", stack.has_uvm))
    missing = [path for path, is_there in needed if not is_there]
    closed = [node.path for node in stack.closed_nodes]
    if not closed and not missing:
        return None
    if missing:
        summary = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        remedies = _make_nodes(stack)
    else:
        summary = f"{', '.join(closed)} cannot be opened by this user"
        remedies = _open_nodes(stack, closed)
    return bad(
        NAME,
        "device_node",
        summary,
        "CUDA opens the GPU's device file, nvidiactl and nvidia-uvm; NVML does not need "
        "nvidia-uvm, so nvidia-smi may still work.",
        [stack.node_evidence(), *_device_facts(stack)],
        remedies,
    )


def _make_nodes(stack: DriverStack) -> list[Fix]:
    make = Fix(
        "sudo nvidia-modprobe -c=0 -u   # loads nvidia-uvm and creates the files",
        "sudo rmmod nvidia_uvm",
        on_host(stack.machine, "none; nvidia-persistenced does it at every boot"),
    )
    if not stack.in_container:
        return [make]
    again = Fix(
        "then recreate the container: it gets the files that exist when it starts",
        "none needed",
        "terminates what runs in the container",
    )
    return [make, again]


def _open_nodes(stack: DriverStack, closed: list[str]) -> list[Fix]:
    if stack.in_slurm:
        return [ask_slurm()]
    if stack.in_container:
        return [
            Fix(
                "start the container with the GPU: docker run --gpus all …, or "
                "podman run --device nvidia.com/gpu=all --security-opt=label=disable "
                "--group-add keep-groups …",
                "start it with the previous options",
                "recreates the container; SELinux does not confine it (label=disable)",
            )
        ]
    return [
        Fix(
            f'sudo usermod -aG "$(stat -c %G {closed[0]})" "$USER"   # then log in again',
            f'sudo gpasswd -d "$USER" "$(stat -c %G {closed[0]})"',
            "if that group is root, use the next fix instead",
        ),
        Fix(
            f"ls -l {' '.join(closed)} && sudo chmod a+rw {' '.join(closed)}",
            f"sudo chmod 660 {' '.join(closed)}   # or the mode that ls showed",
            "every user may use the GPU, until the driver is reloaded (its parameter "
            "NVreg_DeviceFileMode sets the mode permanently)",
        ),
    ]


def mig_without_instances(stack: DriverStack) -> Check | None:
    """MIG is switched on, and no instance was made."""
    empty = [gpu for gpu in stack.gpus if gpu.mig.value and not gpu.mig_instances.value]
    if not empty or stack.sees_gpu or any(not gpu.mig.value for gpu in stack.gpus):
        return None
    index = empty[0].index
    return bad(
        NAME,
        "mig_without_instances",
        f"MIG is on without instances on GPU {', '.join(str(gpu.index) for gpu in empty)}",
        "A GPU in MIG mode exposes only its instances to CUDA, and there are none.",
        [
            evidence(f"MIG of GPU {index}", empty[0].mig),
            evidence(
                f"instances of GPU {index}",
                empty[0].mig_instances,
                lambda each: ", ".join(each) or "none",
            ),
            *_device_facts(stack),
        ],
        [
            Fix(
                f"sudo nvidia-smi mig -i {index} -cgi 0 -C   # one instance of the whole GPU",
                f"sudo nvidia-smi mig -i {index} -dci && sudo nvidia-smi mig -i {index} -dgi",
                "none; `nvidia-smi mig -lgip` lists the other sizes",
            ),
            Fix(
                f"sudo nvidia-smi -i {index} -mig 0",
                f"sudo nvidia-smi -i {index} -mig 1",
                "no process may use the GPU meanwhile",
            ),
        ],
    )


def unknown_error(stack: DriverStack) -> Check | None:
    """CUDA's part of the driver is stuck, while the rest answers: as after a suspend."""
    if stack.cuda_code != _UNKNOWN or not stack.cuda.nvml.is_known or stack.in_wsl:
        return None
    return bad(
        NAME,
        "cuda_unknown_error",
        "CUDA fails with 'unknown error' (999), although the driver works",
        "NVML works and cuInit fails: nvidia_uvm, the kernel module that only CUDA uses, "
        "is in a bad state, usually after the machine was suspended.",
        [stack.node_evidence(), *_device_facts(stack)],
        [
            Fix(
                "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
                "none needed: the same module is reloaded",
                on_host(stack.machine, "no process may use CUDA meanwhile; otherwise: sudo reboot"),
            )
        ],
    )


def _device_facts(stack: DriverStack) -> list[Evidence]:
    return [*stack.driver_evidence(), *stack.torch_evidence()]
