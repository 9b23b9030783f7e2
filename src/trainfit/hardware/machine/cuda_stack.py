"""The layers between PyTorch and the GPUs, each queried independently and concurrently."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any, Final

from trainfit.hardware.machine import parsing
from trainfit.hardware.machine.nvml import (
    ask_nvml,
    blindness,
    has_switches,
    read_pci,
    reason_of,
    value_of,
)
from trainfit.hardware.machine.parsing import begin
from trainfit.hardware.machine.system import CommandOutput, System
from trainfit.results.machine import (
    CudaDriver,
    CudaStack,
    DeviceNode,
    Fact,
    TorchBuild,
    TorchProbe,
    absent,
    cannot_tell,
    known,
)

# ---
# Files of NVIDIA's driver: module, device files, libraries.


_VERSION_FILE = "/proc/driver/nvidia/version"
_NODES = re.compile(
    r"nvidia\d+|nvidiactl|nvidia-uvm|nvidia-uvm-tools|nvidia-modeset|dxg|nvhost-.+|nvmap"
)
_CAPABILITIES = "/dev/nvidia-caps"
#: nvgpu and nova_core are NVIDIA's for Jetson and the kernel's newest; nouveau serves no CUDA.
_MODULES = ("nvidia", "nouveau", "nova_core", "nvgpu")

LIBRARIES = ("libcuda", "libnvidia-ml")
#: Where the loader looks, or the driver's installers, containers, WSL and Jetson put them.
_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia",
    "/usr/lib/aarch64-linux-gnu/tegra",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
)
#: CUDA's forward compatibility: only whoever names the folder in LD_LIBRARY_PATH gets it.
_UNUSED_FOLDERS = ("/usr/local/cuda/compat",)
_MOST_LINKS = 5


def kernel_driver(system: System) -> Fact[str]:
    """The version of the loaded kernel module: "550.54.14"."""
    said = system.text(_VERSION_FILE)
    if not said.is_absent:
        return said.map(_nvrm_version, "a line NVRM with a version")
    module = system.text("/sys/module/nvidia/version")
    if module.is_absent:
        return absent(_VERSION_FILE, said.reason)
    return module.map(_plain_version, "a version")


def kernel_modules(system: System) -> Fact[tuple[str, ...]]:
    """Loaded modules that drive NVIDIA's GPUs."""
    return system.text("/proc/modules").map(
        lambda content: tuple(
            sorted(line.split()[0] for line in content.splitlines() if line.startswith(_MODULES))
        ),
        "a list of modules",
    )


def device_nodes(system: System) -> Fact[tuple[DeviceNode, ...]]:
    """The driver's files below /dev; empty where there are none."""
    listed = system.names("/dev")
    if listed.value is None:
        return Fact(listed.state, None, listed.source, listed.reason)
    paths = [f"/dev/{name}" for name in listed.value if _NODES.fullmatch(name)]
    paths += [f"{_CAPABILITIES}/{name}" for name in system.names(_CAPABILITIES).value or ()]
    return known(tuple(DeviceNode(path, system.accessible(path)) for path in paths), "/dev")


def libraries(
    system: System, driver: str | None, loaded: str
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Versions and places of the driver's libraries, by name.

    Args:
        driver: the kernel module's version, whose libraries lie where no link leads to them.
        loaded: the file that libcuda was loaded from in a fresh process ("" if it was not).

    The plain name is the file that the loader takes: ``loaded``, or that of the first folder.
    A file of another version elsewhere is named with its folder: "libcuda (/usr/lib64)". A
    file without a version in its name (WSL's) has a place only.
    """
    versions: dict[str, str] = {}
    places: dict[str, str] = {}
    for name in LIBRARIES:
        found = list(_found(system, name, driver))
        if name == "libcuda" and loaded:
            found.insert(0, (loaded, True))
        for path, is_used in found:
            version = _version_in(path)
            folder = posixpath.dirname(path)
            key = name if is_used and name not in places else f"{name} ({folder})"
            if key != name and (version is None or version == versions.get(name)):
                continue
            places.setdefault(key, path)
            if version is not None:
                versions.setdefault(key, version)
    return versions, places


def _found(system: System, name: str, driver: str | None) -> Iterator[tuple[str, bool]]:
    """Files of a library in the loader's order, and whether the loader looks into the folder."""
    own = parsing.text(system.environment.get("LD_LIBRARY_PATH")) or ""
    named = [path for path in map(parsing.path, own.split(":")) if path is not None]
    folders = [*map(posixpath.normpath, named), *_FOLDERS]
    for folder in dict.fromkeys([*folders, *_UNUSED_FOLDERS]):
        path = _file_in(system, folder, name, driver)
        if path is not None:
            yield path, folder in folders


def _file_in(system: System, folder: str, name: str, driver: str | None) -> str | None:
    path = f"{folder}/{name}.so.1"
    if system.exists(path):
        end = _followed(system, path)
        if _version_in(end) is not None:
            return end
        versioned = _versioned(system, folder, name)
        return f"{folder}/{versioned}" if versioned else path
    if driver is None:  # a folder of libraries is long: it is not read for nothing
        return None
    versioned = _versioned(system, folder, name)
    return f"{folder}/{versioned}" if versioned else None


def _versioned(system: System, folder: str, name: str) -> str | None:
    """The newest file of a library in a folder, as ``ldconfig`` would link to it."""
    names = system.names(folder).value or ()
    found = [each for each in names if each.startswith(f"{name}.so.") and _version_in(each)]
    return max(found, key=lambda each: _sortable(_version_in(each) or ""), default=None)


def _followed(system: System, path: str) -> str:
    for _ in range(_MOST_LINKS):
        target = system.link(path).value
        if not target:
            break
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return path


def _version_in(path: str) -> str | None:
    """The driver's version in a file's name; libcuda.so.1.1 of WSL and Jetson has none."""
    match = re.search(r"\.so\.(\d{3,4}(?:\.\d{1,4}){1,3})$", path, re.ASCII)
    return match[1] if match else None


def _sortable(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _nvrm_version(content: str) -> str | None:
    """The driver's version in a line such as "NVRM version: NVIDIA UNIX x86_64 Kernel Module
    550.54.14  Thu Feb 22 …".

    Also of "… UNIX Open Kernel Module for x86_64  550.54.14  Release Build …".
    """
    line = re.search(r"^NVRM version:.*$", content, re.MULTILINE)
    return _plain_version(line[0]) if line else None


def _plain_version(content: str) -> str | None:
    match = re.search(r"(?<!\S)\d{2,4}(?:\.\d{1,4}){1,3}(?!\S)", content, re.ASCII)
    return match[0] if match else None


# ---
# Build targets of the installed PyTorch and torchvision, read from their files.


# `cuda: Optional[str] = '12.4'` of torch/version.py, at the beginning of a line: torchvision's
# own `cuda` is computed when it is imported.
_ASSIGNMENT = re.compile(
    r"""^(__version__|cuda|hip|rocm)\s*(?::[^=\n]*)?=\s*(?:None|'([^'\n]*)'|"([^"\n]*)")\s*$""",
    re.MULTILINE,
)
_PLAIN_BUILDS = ("cpu", "xpu")
#: `torchrun --numa-binding` came with this version (pytorch#149334).
_NUMA_BINDING = (2, 9)


def read_build(system: System, name: str) -> Fact[TorchBuild]:
    """The build of ``name`` ("torch", "torchvision") by its version.py, which is not run."""
    folder = parsing.path(system.packages().get(name))
    if folder is None:
        return absent(name, f"{name} is not installed")
    file = f"{folder}/version.py"
    content = system.text(file)
    if content.value is None:
        return cannot_tell(file, content.reason)
    assigned = {match[1]: match[2] or match[3] for match in _ASSIGNMENT.finditer(content.value)}
    version = assigned.get("__version__")
    if not version:
        return cannot_tell(file, "it has no version")
    if assigned.get("cuda") or assigned.get("hip") or assigned.get("rocm"):
        cuda, hip = _cuda(assigned.get("cuda")), assigned.get("hip") or assigned.get("rocm")
        told = hip is not None or cuda is not None
    elif "cuda" in assigned:
        cuda, hip, told = None, None, True
    else:
        cuda, hip, told = _by_tag(version)
    if not told:
        return cannot_tell(file, f"{version} does not state its CUDA version")
    return known(TorchBuild(version, cuda, hip, folder), file)


def torchrun_binds(version: str) -> bool:
    """Does `torchrun` of this PyTorch ("2.13.0+cpu") know `--numa-binding`?"""
    words = version.split(".")[:2]
    if len(words) < 2 or not all(word.isascii() and word.isdigit() for word in words):
        return False
    return tuple(int(word) for word in words) >= _NUMA_BINDING


def _cuda(written: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,3})\.(\d{1,3})(?!\d)", written or "", re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def _by_tag(version: str) -> tuple[tuple[int, int] | None, str | None, bool]:
    """CUDA, HIP, and whether the tag tells: of 0.21.0+cu124, +rocm6.2, +cpu."""
    tag = version.partition("+")[2]
    if match := re.match(r"cu(\d{1,2})(\d)(?!\d)", tag, re.ASCII):
        return (int(match[1]), int(match[2])), None, True
    if match := re.match(r"rocm(\d[\d.]*)", tag, re.ASCII):
        return None, match[1], True
    return None, None, tag.startswith(_PLAIN_BUILDS)


_SMI_SECONDS = 6.0
_CUDA_SECONDS = 8.0
_TORCH_SECONDS = 14.0
_SYSTEMCTL_SECONDS = 3.0
#: PyTorch's probe makes a context on each GPU, which NVML would count as memory in use, as a
#: process and as a clock that rises: it waits for NVML's answer, but not for an NVML that hangs.
_NVML_FIRST_SECONDS = 2.0

_FABRIC_MANAGER = ("systemctl", "is-active", "nvidia-fabricmanager")
_UNIT_STATES = {"active": "running", "inactive": "stopped", "activating": "starting"}
_NO_SUCH_UNIT = 4  # LSB's exit code of a status: the program is not known


def read_cuda_stack(system: System, imports_torch: bool = True) -> CudaStack:
    """Every layer from the bus upwards; takes at most some 17 s, whatever hangs.

    With ``imports_torch`` PyTorch is asked, too, in a process that imports it: seconds of a core.
    """
    torch = read_build(system, "torch")
    nvml = begin(ask_nvml, system)
    smi = begin(_nvidia_smi, system)
    cuda = begin(system.probe, "cuda_driver", _CUDA_SECONDS)
    probed = begin(_torch_probe, system, torch, nvml) if imports_torch else None
    fabric = begin(_fabric_manager, system)
    driver = kernel_driver(system)
    answer = cuda.result()
    versions, places = libraries(system, driver.value, _loaded(answer))
    return CudaStack(
        pci_devices=read_pci(system),
        kernel_driver=driver,
        kernel_modules=kernel_modules(system),
        device_nodes=device_nodes(system),
        library_versions=versions,
        library_places=places,
        nvml=_nvml_value(nvml.result(), "driver", "nvmlSystemGetDriverVersion", parsing.word),
        nvml_cuda=_nvml_value(
            nvml.result(), "cuda", "nvmlSystemGetCudaDriverVersion", parsing.cuda_version
        ),
        nvidia_smi=smi.result(),
        cuda=_cuda_driver(answer),
        fabric_manager=fabric.result(),
        visible_devices=_visible_devices(system),
        torch=torch,
        torch_probe=_NOT_ASKED if probed is None else probed.result(),
        torchvision=read_build(system, "torchvision"),
        bad_fork=system.bad_fork(),
    )


# --- NVML, nvidia-smi, libcuda --------------------------------------------------------------------


def _nvml_value(answer: Fact[Mapping[str, Any]], key: str, call: str, read: Any) -> Fact[Any]:
    """A value of the driver, or why NVML gives none."""
    if answer.value is None:
        return cannot_tell(answer.source, answer.reason)
    if answer.value.get(key) is not None:
        return value_of(answer.value, key, call, read)
    error = parsing.error_of(answer.value)
    where = f"NVML {parsing.word(answer.value.get('where')) or call}"
    if error == "NVML_ERROR_LIBRARY_NOT_FOUND":
        return absent(where, reason_of(error))
    return cannot_tell(where, blindness(answer) or "NVML gave no answer")


def _nvidia_smi(system: System) -> Fact[str]:
    return _first_line(system.command(("nvidia-smi", "-L"), _SMI_SECONDS))


def _first_line(ran: Fact[CommandOutput]) -> Fact[str]:
    if ran.value is None:
        return Fact(ran.state, None, ran.source, ran.reason)
    code = parsing.whole(ran.value.code)
    said = _line(ran.value.stdout) or _line(ran.value.stderr)
    if code == 0 and said.startswith("GPU "):
        return known(said, ran.source)
    # It prints its failures on either channel, and some with exit code 0.
    if code == 0:
        return cannot_tell(ran.source, said or "it printed nothing")
    return cannot_tell(
        ran.source, f"exit code {parsing.shown(ran.value.code)}: {said}".rstrip(": ")
    )


def _line(output: Any) -> str:
    """The first line with something in it."""
    lines = (parsing.text(output) or "").strip().splitlines()
    return lines[0].strip()[:300] if lines else ""


def _loaded(answer: Fact[Mapping[str, Any]]) -> str:
    return parsing.path(answer.value.get("path")) or "" if answer.value is not None else ""


def _cuda_driver(answer: Fact[Mapping[str, Any]]) -> Fact[CudaDriver]:
    source = "cuInit in a fresh process"
    if answer.value is None:
        return cannot_tell(source, answer.reason)
    missing = parsing.word(answer.value.get("missing"))
    if missing is not None:
        return absent(source, missing)
    code = parsing.whole(answer.value.get("code"))
    if code is None:
        return cannot_tell(source, f"its code is {parsing.shown(answer.value.get('code'))}")
    error = parsing.word(answer.value.get("error"))
    return known(
        CudaDriver(
            library=_loaded(answer) or parsing.word(answer.value.get("library")) or "libcuda.so.1",
            code=code,
            error=(error or f"CUresult {code}") if code else "",
            version=parsing.cuda_version(answer.value.get("version")),
            devices=parsing.whole(answer.value.get("devices")),
        ),
        source,
    )


def _fabric_manager(system: System) -> Fact[str]:
    source = " ".join(_FABRIC_MANAGER)
    if not has_switches(system):
        return absent(source, "no NVSwitch connects GPUs here")
    ran = system.command(_FABRIC_MANAGER, _SYSTEMCTL_SECONDS)
    if ran.value is None:
        return cannot_tell(source, ran.reason)
    said = _line(ran.value.stdout)
    if ran.value.code == _NO_SUCH_UNIT or said == "unknown":
        return known("not installed", source)
    if not said:
        return cannot_tell(source, _line(ran.value.stderr) or "it printed nothing")
    return known(_UNIT_STATES.get(said, said), source)


# --- PyTorch --------------------------------------------------------------------------------------


_NOT_ASKED: Final[Fact[TorchProbe]] = cannot_tell("PyTorch in a fresh process", "it was not asked")


def _visible_devices(system: System) -> Fact[str]:
    value = parsing.text(system.environment.get("CUDA_VISIBLE_DEVICES"))
    if value is None:
        return absent("CUDA_VISIBLE_DEVICES", "it is not set")
    return known(value, "CUDA_VISIBLE_DEVICES")


def _torch_probe(
    system: System, build: Fact[TorchBuild], nvml: Future[Fact[Mapping[str, Any]]]
) -> Fact[TorchProbe]:
    source = _NOT_ASKED.source
    if build.is_absent:
        return absent(source, build.reason)
    if build.value is not None and build.value.cuda is None and build.value.hip is None:
        return _import_for_cpu(system, build.value, source)
    wait([nvml], timeout=_NVML_FIRST_SECONDS)
    answer = system.probe("torch_devices", _TORCH_SECONDS)
    if answer.value is None:
        return cannot_tell(source, answer.reason)
    failed = parsing.word(answer.value.get("failed"))
    if failed is not None:
        return cannot_tell(source, failed)
    return _torch_answer(answer.value, source)


def _import_for_cpu(system: System, build: TorchBuild, source: str) -> Fact[TorchProbe]:
    """Such a build sees no GPU; whether it can be imported is asked all the same."""
    answer = system.probe("torch_devices", _TORCH_SECONDS)
    reason = answer.reason if answer.value is None else parsing.word(answer.value.get("failed"))
    if reason and reason.startswith(("import torch: ", "killed by signal")):
        return cannot_tell(source, reason)
    return absent(source, f"PyTorch {build.version} is built without CUDA")


def _torch_answer(answer: Mapping[str, Any], source: str) -> Fact[TorchProbe]:
    available = parsing.flag(answer.get("available"))
    devices = parsing.whole(answer.get("devices"))
    if available is None or devices is None:
        return cannot_tell(source, "its answer has no device count")
    return known(
        TorchProbe(
            available=available,
            devices=devices,
            error=parsing.text(answer.get("error")) or "",
            architectures=parsing.each(answer.get("architectures"), parsing.word) or (),
            capabilities=parsing.each(answer.get("capabilities"), parsing.pair) or (),
            kernel_error=parsing.text(answer.get("kernel_error")),
            warnings=parsing.each(answer.get("warnings"), parsing.word) or (),
        ),
        source,
    )
