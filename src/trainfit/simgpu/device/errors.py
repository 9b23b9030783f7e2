"""Errors of the simulated device, with PyTorch's wording where it has one.

Commands name these errors too: PyTorch is imported by who raises one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from trainfit.results.runs.trace import FailedRequest
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory

if TYPE_CHECKING:
    import torch


class UnsupportedOperatorError(NotImplementedError):
    """An operator whose result shapes nobody has described.

    Attributes: ``operator`` its name, ``location`` the user's ``file:line`` or ``None``.
    """

    def __init__(
        self, operator: str, location: str | None, detail: str, remedy: str | None = None
    ) -> None:
        place = f" called at {location}" if location else ""
        name = operator.removesuffix(".default").replace(".", "::", 1)
        if remedy is None:
            remedy = (
                "it has no fake (meta) kernel; register one with "
                f'torch.library.register_fake("{name}") before the call'
            )
        super().__init__(f"cannot simulate {operator}{place}" + (f": {remedy}" if remedy else ""))
        self.operator = operator
        self.location = location
        self.detail = detail


#: The variable that hides GPUs from CUDA, and numbers the others.
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def visible_gpus(count: int) -> int:
    """How many of a machine's GPUs a process sees: all where no variable hides any."""
    named = [part for part in os.environ.get(_VISIBLE, "").split(",") if part.strip()]
    return count if not named or named == ["-1"] else min(count, len(named))


def no_such_gpu(gpu: str, count: int, index: int) -> str:
    """What to do where a script names a GPU that the machine does not have, or hides."""
    visible = [part for part in os.environ.get(_VISIBLE, "").split(",") if part.strip()]
    if visible and visible != ["-1"] and index >= len(visible):
        last = len(visible) - 1
        left = "one GPU, which is cuda:0" if not last else f"{last + 1} GPUs, cuda:0 to cuda:{last}"
        return (
            f"{_VISIBLE}={','.join(visible)} leaves {left}: GPUs are numbered from 0 among those "
            'that are visible; torch.device("cuda"), or no such variable'
        )
    have = "one GPU is simulated, cuda:0" if count == 1 else f"{count} GPUs are simulated"
    return f'{have}: name as many as the script uses, --gpu "{index + 1}x {gpu}"'


def too_few_gpus(processes: int, gpu: str, count: int) -> str:
    """What to do where a machine has fewer GPUs than a job has processes."""
    have = "one GPU is" if count == 1 else f"{count} GPUs are"
    return f'{have} simulated, and each process has one: name as many, --gpu "{processes}x {gpu}"'


class SeveralGpusError(UnsupportedOperatorError):
    """The script asks for more GPUs or processes than are simulated.

    It is a ``RuntimeError``, as CUDA's "invalid device ordinal" is.
    """

    def __init__(self, what: str, location: str | None, remedy: str) -> None:
        super().__init__(what, location, "", remedy)


class DeviceMismatch(RuntimeError):
    """A tensor of the CPU, or of another GPU, where the GPU's kernel needs one of its own."""

    def __init__(self, device: torch.device, func: Any, gpu: int = 0) -> None:
        super().__init__(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:{gpu} and {device}! (when running {func})"
        )


def format_size(nbytes: int) -> str:
    """Bytes as PyTorch's out-of-memory message writes them (format_size in C++)."""
    if nbytes <= 1024:
        return f"{nbytes} bytes"
    for limit, unit in ((1 << 20, "KiB"), (1 << 30, "MiB")):
        if nbytes <= limit:
            return f"{nbytes / (limit >> 10):.2f} {unit}"
    return f"{nbytes / (1 << 30):.2f} GiB"


#: Where an out-of-memory exception keeps what was computed when the memory was full.
REQUEST: Final = "trainfit_request"


def out_of_memory(
    error: OutOfDeviceMemory, func: Any = None, args: Iterable[Any] = ()
) -> torch.OutOfMemoryError:
    """PyTorch's exception for the allocator's, while an operator runs; same message as the CUDA
    build's."""
    import torch

    limit = error.allowed_bytes
    allowed = "" if limit is None else f"{format_size(limit)} allowed; "
    raised = torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {format_size(error.requested_bytes)}. "
        f"GPU {error.gpu} has a total capacity of {format_size(error.capacity_bytes)} "
        f"of which {format_size(error.free_bytes)} is free. "
        "Including non-PyTorch memory, this process has "
        f"{format_size(error.non_pytorch_bytes + error.reserved_bytes)} memory in use. {allowed}"
        f"Of the allocated memory {format_size(error.allocated_bytes)} is allocated by PyTorch, "
        f"and {format_size(error.reserved_bytes - error.allocated_bytes)} "
        "is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
        "See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    if func is not None:
        given = [argument for argument in args if isinstance(argument, torch.Tensor)]
        request = FailedRequest(
            str(func).removeprefix("aten.").partition(".")[0].strip("_"),
            error.requested_bytes,
            tuple("×".join(map(str, argument.shape)) or "scalar" for argument in given),
            sum(argument.untyped_storage().nbytes() for argument in given),
        )
        setattr(raised, REQUEST, request)
    return raised
