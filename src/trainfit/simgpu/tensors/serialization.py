"""``torch.save`` and ``torch.load`` with tensors of the simulated device.

A file holds plausible CPU data, tagged with the device as a GPU's would be. What is loaded
to the device is read on the CPU and copied there, one copy for each storage, so tensors
that share a storage still do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.tensors.device import CUDA, check_ordinal
from trainfit.torch_private import tensors as private

#: Below the priorities that PyTorch's own devices have (10 and more): asked first.
_PRIORITY = 1
_MARK = "_trainfit_on_device"


def mark(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Note that a CPU storage stands for one of the device."""
    if not hasattr(storage, _MARK):
        setattr(storage, _MARK, {})
    return storage


def install(patches: PatchSet) -> None:
    registry = sorted(
        [*private.PACKAGE_REGISTRY.now, (_PRIORITY, _tag, _restore)],
        key=lambda entry: entry[0],
    )
    patches.set(*private.PACKAGE_REGISTRY, registry)
    patches.set(*private.REBUILD_TENSOR, _rebuilder(private.REBUILD_TENSOR.now))
    patches.set(private.StorageBase, "cuda", lambda storage, *_, **__: mark(storage))


def _tag(storage: Any) -> str | None:
    plain = private.untyped_of(storage)
    return str(CUDA) if hasattr(plain, _MARK) else None


def _restore(storage: Any, location: Any) -> Any:
    text = location.decode() if isinstance(location, bytes) else str(location)
    if not text.startswith("cuda"):
        return None
    check_ordinal(text)
    return mark(storage)


def _rebuilder(rebuild: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
        plain = private.untyped(storage)
        copies = getattr(plain, _MARK, None)
        if copies is None:
            return rebuild(storage, offset, size, stride)
        dtype = storage.dtype
        if dtype not in copies:
            count = plain.nbytes() // dtype.itemsize
            if copies:
                first = next(iter(copies.values()))
                copies[dtype] = first.view(torch.uint8).view(dtype)
            else:
                copies[dtype] = rebuild(storage, 0, (count,), (1,)).to(CUDA)
        return copies[dtype].as_strided(size, stride, offset)  # type: ignore[no-any-return]

    return rebuild_tensor
