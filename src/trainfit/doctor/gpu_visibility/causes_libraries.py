"""Rows of the decision table whose cause lies in the driver's libraries."""

from __future__ import annotations

import posixpath
from typing import Final

from trainfit.doctor.figures import on_host, quoted
from trainfit.doctor.findings import bad
from trainfit.doctor.gpu_visibility.causes_driver import distribution
from trainfit.doctor.gpu_visibility.driver_stack import Stack
from trainfit.results.machine.doctor import Check, Evidence, Fix

NAME: Final = "gpu"

# CUresult: docs.nvidia.com/cuda/cuda-driver-api, "Data types used by CUDA driver".
_DRIVER_MISMATCH = 803


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
            Fix(
                f"sudo apt install libnvidia-compute-{branch} && sudo ldconfig",
                f"sudo apt remove libnvidia-compute-{branch}",
                "none; the version must be that of the kernel module",
            )
            if "ubuntu" in distribution(stack)
            else Fix(
                f"install the libraries of driver {stack.kernel_driver} in the way that the "
                "module was installed, then: sudo ldconfig",
                "remove them again in the same way",
                "none; the version must be that of the kernel module",
            )
        ],
    )


def not_loaded(stack: Stack) -> Check | None:
    """libcuda's file is there, and the loader does not take it."""
    place, answer = stack.cuda.library_places.get("libcuda", ""), stack.cuda.cuda
    if not answer.is_absent or not place or not (stack.drives_gpu or stack.has_dxg):
        return None
    folder = quoted(posixpath.dirname(place))
    if "too short" in answer.reason:
        why = "An empty file is left of a container's image that was committed while it ran."
        remedy = Fix(
            f"rm {quoted(place)} && ldconfig   # in the image, then start it with its GPU",
            "none needed: the file is empty",
            "the container starts anew",
        )
    else:
        why = "Its folder is not among those that the loader searches."
        remedy = Fix(
            f'export LD_LIBRARY_PATH={folder}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"',
            f'export LD_LIBRARY_PATH="${{LD_LIBRARY_PATH#{folder}}}"; '
            'export LD_LIBRARY_PATH="${LD_LIBRARY_PATH#:}"',
            "none; for good: the folder in a file of /etc/ld.so.conf.d, then sudo ldconfig",
        )
    return bad(
        NAME,
        "libcuda_not_loaded",
        "the driver's libcuda is there, but cannot be loaded",
        f"The loader says: {answer.reason[:200]}. {why}",
        [Evidence("libcuda", place, "file"), *_all(stack)],
        [remedy],
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
        f"the loaded driver is {kernel}, the libraries are not",
        f"Installed: {shown or 'another version'}. An update replaced the libraries while the "
        "old kernel module stayed loaded (or the container brings its own).",
        [*found, *_all(stack)],
        _in_step(stack, sorted(libraries)),
    )


def _in_step(stack: Stack, libraries: list[str]) -> list[Fix]:
    """Bring libraries and module to one version."""
    host = [
        Fix(
            "sudo reboot",
            "none: a restart cannot be taken back",
            on_host(stack.machine, "everything on the machine ends"),
        ),
        Fix(
            "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia",
            "none: the former module is no longer on the disk",
            on_host(stack.machine, "no process may use the GPU meanwhile, a desktop included"),
        ),
    ]
    if not stack.in_container:
        return host
    places = [stack.cuda.library_places.get(name, name) for name in libraries]
    return [
        Fix(
            "start the container anew, from an image without driver libraries of its own: "
            f"dpkg -S {' '.join(map(quoted, places)) or 'libcuda.so.1'} names their package",
            "start it as before",
            "the container starts anew; the toolkit brings in the libraries of the host's driver",
        ),
        *host,
    ]


def _all(stack: Stack) -> list[Evidence]:
    return [*stack.driver_evidence(), *stack.torch_evidence()]
