"""The layers between PyTorch and the GPUs, each queried independently and concurrently."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

from trainfit.hardware.driver.driver_files import (
    device_nodes,
    kernel_driver,
    kernel_modules,
    libraries,
)
from trainfit.hardware.driver.nvml import ask_nvml, blindness, reason_of, value_of
from trainfit.hardware.driver.pci import has_switches, read_pci
from trainfit.hardware.driver.torch_builds import read_build
from trainfit.hardware.host import answers
from trainfit.hardware.host.background import begin
from trainfit.hardware.host.system import Output, System
from trainfit.results.files.facts import Fact, absent, cannot_tell, known
from trainfit.results.machine.machine import CudaDriver, CudaStack, TorchBuild, TorchProbe

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


def read_cuda_stack(system: System) -> CudaStack:
    """Every layer from the bus upwards; takes at most some 17 s, whatever hangs."""
    torch = read_build(system, "torch")
    nvml = begin(ask_nvml, system)
    smi = begin(_nvidia_smi, system)
    cuda = begin(system.probe, "cuda_driver", _CUDA_SECONDS)
    probed = begin(_torch_probe, system, torch, nvml)
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
        nvml=_nvml_value(nvml.result(), "driver", "nvmlSystemGetDriverVersion", answers.word),
        nvml_cuda=_nvml_value(
            nvml.result(), "cuda", "nvmlSystemGetCudaDriverVersion", answers.cuda_version
        ),
        nvidia_smi=smi.result(),
        cuda=_cuda_driver(answer),
        fabric_manager=fabric.result(),
        visible_devices=_visible_devices(system),
        torch=torch,
        torch_probe=probed.result(),
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
    error = answers.error_of(answer.value)
    where = f"NVML {answers.word(answer.value.get('where')) or call}"
    if error == "NVML_ERROR_LIBRARY_NOT_FOUND":
        return absent(where, reason_of(error))
    return cannot_tell(where, blindness(answer) or "NVML gave no answer")


def _nvidia_smi(system: System) -> Fact[str]:
    return _first_line(system.command(("nvidia-smi", "-L"), _SMI_SECONDS))


def _first_line(ran: Fact[Output]) -> Fact[str]:
    if ran.value is None:
        return Fact(ran.state, None, ran.source, ran.reason)
    code = answers.whole(ran.value.code)
    said = _line(ran.value.stdout) or _line(ran.value.stderr)
    if code == 0 and said.startswith("GPU "):
        return known(said, ran.source)
    # It prints its failures on either channel, and some with exit code 0.
    if code == 0:
        return cannot_tell(ran.source, said or "it printed nothing")
    return cannot_tell(
        ran.source, f"exit code {answers.shown(ran.value.code)}: {said}".rstrip(": ")
    )


def _line(output: Any) -> str:
    """The first line with something in it."""
    lines = (answers.text(output) or "").strip().splitlines()
    return lines[0].strip()[:300] if lines else ""


def _loaded(answer: Fact[Mapping[str, Any]]) -> str:
    return answers.path(answer.value.get("path")) or "" if answer.value is not None else ""


def _cuda_driver(answer: Fact[Mapping[str, Any]]) -> Fact[CudaDriver]:
    source = "cuInit in a fresh process"
    if answer.value is None:
        return cannot_tell(source, answer.reason)
    missing = answers.word(answer.value.get("missing"))
    if missing is not None:
        return absent(source, missing)
    code = answers.whole(answer.value.get("code"))
    if code is None:
        return cannot_tell(source, f"its code is {answers.shown(answer.value.get('code'))}")
    error = answers.word(answer.value.get("error"))
    return known(
        CudaDriver(
            library=_loaded(answer) or answers.word(answer.value.get("library")) or "libcuda.so.1",
            code=code,
            error=(error or f"CUresult {code}") if code else "",
            version=answers.cuda_version(answer.value.get("version")),
            devices=answers.whole(answer.value.get("devices")),
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


def _visible_devices(system: System) -> Fact[str]:
    value = answers.text(system.environment.get("CUDA_VISIBLE_DEVICES"))
    if value is None:
        return absent("CUDA_VISIBLE_DEVICES", "it is not set")
    return known(value, "CUDA_VISIBLE_DEVICES")


def _torch_probe(
    system: System, build: Fact[TorchBuild], nvml: Future[Fact[Mapping[str, Any]]]
) -> Fact[TorchProbe]:
    source = "PyTorch in a fresh process"
    if build.is_absent:
        return absent(source, build.reason)
    if build.value is not None and build.value.cuda is None and build.value.hip is None:
        return absent(source, f"PyTorch {build.value.version} is built without CUDA: not queried")
    wait([nvml], timeout=_NVML_FIRST_SECONDS)
    answer = system.probe("torch_devices", _TORCH_SECONDS)
    if answer.value is None:
        return cannot_tell(source, answer.reason)
    failed = answers.word(answer.value.get("failed"))
    if failed is not None:
        return cannot_tell(source, failed)
    return _torch_answer(answer.value, source)


def _torch_answer(answer: Mapping[str, Any], source: str) -> Fact[TorchProbe]:
    available = answers.flag(answer.get("available"))
    devices = answers.whole(answer.get("devices"))
    if available is None or devices is None:
        return cannot_tell(source, "its answer has no device count")
    return known(
        TorchProbe(
            available=available,
            devices=devices,
            error=answers.text(answer.get("error")) or "",
            architectures=answers.each(answer.get("architectures"), answers.word) or (),
            capabilities=answers.each(answer.get("capabilities"), answers.pair) or (),
            kernel_error=answers.text(answer.get("kernel_error")),
            warnings=answers.each(answer.get("warnings"), answers.word) or (),
        ),
        source,
    )
