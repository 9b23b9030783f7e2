"""``torch.distributed``; a build may be without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainfit.torch_private.needed import PrivateName, needed, place

with needed():
    from torch.distributed import distributed_c10d

    _c10d: Any = torch._C._distributed_c10d
    #: A process group that communicates with nobody.
    LonelyGroup: Any = _c10d.FakeProcessGroup
    _work: Callable[[Any], Any] = _c10d._create_work_from_future

#: A build without CUDA has neither of them.
NCCL_VERSION = PrivateName(torch._C, "_nccl_version")
NCCL_VERSION_SUFFIX = PrivateName(torch._C, "_nccl_version_suffix")
NCCL_AVAILABLE = place(distributed_c10d, "_NCCL_AVAILABLE")
REBUILD_BUCKETS = place(_c10d.Reducer, "_rebuild_buckets")
SET_SEQUENCE_NUMBER = place(LonelyGroup, "_set_sequence_number_for_group")


def make_lonely_group(rank: int, size: int) -> Any:
    """A process group that communicates with nobody."""
    return getattr(LonelyGroup, "_create_internal", LonelyGroup)(rank, size)


def finished_work(future: Any) -> Any:
    """What a collective returns to wait for, where its result is there."""
    return _work(future).boxed()


def local_part(tensor: Any) -> Any:
    """The tensor that this process has of a DTensor."""
    return tensor._local_tensor
