"""Pinned memory where there is no accelerator: the same thread, the same copies.

PyTorch leaves ``pin_memory=True`` out on a machine without one. Here the DataLoader's own
pinning thread runs, and copies each tensor into a buffer that was used before, as the caching
host allocator gives it (sizes rounded up to powers of two, `ATen/core/CachingHostAllocator.h`).
What a GPU's driver does in addition to pin a new buffer is paid once and is left out.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import torch

from trainfit.results.loader.settings import LoaderSettings

#: Bytes a second at which a driver copies what is not pinned to a GPU, through buffers of its
#: own, while the main thread waits. An assumption: 3 to 9 GB/s over PCIe 3 and 4, by the
#: core's speed; what is pinned goes at the bus' speed and needs no core.
PAGEABLE_BYTES_PER_S: Final = 6e9


@contextlib.contextmanager
def emulated_pinning(*, always: bool = False) -> Iterator[None]:
    """Let DataLoaders pin in this process; nothing changes where there is an accelerator.

    With ``always``, and in a process that uses CUDA already, it is emulated all the same: CUDA
    does not survive a fork, neither one that comes later nor one that was.
    """
    if torch.accelerator.is_available() and not (always or torch.cuda.is_initialized()):
        yield
        return
    accelerator: Any = torch.accelerator
    names = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "set_device_index": lambda *_: None,
    }
    former = {name: getattr(accelerator, name) for name in names}
    pin = torch.Tensor.pin_memory
    staging = _Staging()
    tensor_type: Any = torch.Tensor
    try:
        for name, function in names.items():
            setattr(accelerator, name, function)
        tensor_type.pin_memory = lambda tensor, *_, **__: staging.copy(tensor)
        yield
    finally:
        tensor_type.pin_memory = pin
        for name, function in former.items():
            setattr(accelerator, name, function)


class _Staging:
    """Buffers that come back when the tensors in them are freed."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in such a buffer."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0 or tensor.layout != torch.strided:
            return tensor.clone()
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            free = self._free[size]
            buffer = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        staged = buffer[:nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        weakref.finalize(staged, self._return, size, buffer).atexit = False
        return staged

    def _return(self, size: int, buffer: torch.Tensor) -> None:
        # Without the lock: a finalizer may run in the midst of copy, in the same thread.
        self._free[size].append(buffer)


def pinning(settings: LoaderSettings) -> contextlib.AbstractContextManager[None]:
    """Pinned memory for a loader of these settings in this process, as far as they ask for it."""
    if not settings.pin_memory:
        return contextlib.nullcontext()
    # Without workers it happens in this process, from which others are forked later.
    return emulated_pinning(always=not settings.num_workers)
