"""Rows of the decision table whose cause lies in the driver's libraries."""

from __future__ import annotations

import posixpath
from typing import Final

from trainfit.doctor.findings import bad
from trainfit.doctor.formatting import on_host, quoted
from trainfit.doctor.gpu_visibility.causes_driver import distribution
from trainfit.doctor.gpu_visibility.driver_stack import DriverStack
from trainfit.results.machine.doctor import Check, Evidence, Fix

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
        _all(stack),
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
    folder = quoted(posixpath.dirname(place))
    if "too short" in answer.reason:
        why = "The file is empty: the image was committed from a running container."
        remedy = Fix(
            f"rm {quoted(place)} && ldconfig   # in the image, then start it with its GPU",
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
        [Evidence("libcuda", place, "file"), *_all(stack)],
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
        Evidence(name, version, stack.cuda.library_places.get(name, "the library's file name"))
        for name, version in sorted(libraries.items())
    ]
    return bad(
        NAME,
        "version_mismatch",
        f"driver/library version mismatch: the loaded kernel module is {kernel}",
        f"Installed: {shown or 'another version'}. An update replaced the libraries while "
        "the old kernel module stayed loaded (or the container ships its own).",
        [*found, *_all(stack)],
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
            f"dpkg -S {' '.join(map(quoted, places)) or 'libcuda.so.1'} lists their package",
            "start it with the previous options",
            "recreates the container; the toolkit mounts the libraries of the host's driver",
        ),
        *host,
    ]


def _all(stack: DriverStack) -> list[Evidence]:
    return [*stack.driver_evidence(), *stack.torch_evidence()]
