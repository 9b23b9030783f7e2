"""``torch.distributed``; a build may be without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch

from trainfit.torch_private.needed import PrivateName, needed, place

with needed():
    from torch.distributed import distributed_c10d

    _c10d: Any = torch._C._distributed_c10d
    _group_of_name: Any = _c10d._resolve_process_group
    #: A process group that communicates with nobody.
    LonelyGroup: Any = _c10d.FakeProcessGroup
    #: What a collective returns to wait for.
    Work: Any = _c10d.Work
    _ReduceOp: Any = _c10d.ReduceOp
    _ProcessGroup: Any = _c10d.ProcessGroup
    queue_callback: Callable[[Callable[[], Any]], None] = (
        torch.autograd.Variable._execution_engine.queue_callback
    )

#: A build without CUDA has neither of them.
NCCL_VERSION = PrivateName(torch._C, "_nccl_version")
NCCL_VERSION_SUFFIX = PrivateName(torch._C, "_nccl_version_suffix")
NCCL_AVAILABLE = place(distributed_c10d, "_NCCL_AVAILABLE")
#: Other classes of NCCL's groups, each by the function that makes it: since PyTorch 2.15 "nccl" is
#: the first. A build without CUDA has the functions and not the classes.
LATER_GROUPS_OF_NCCL: Final = tuple(
    name
    for name, maker in (
        ("ProcessGroupNCCL2", "_create_nccl2_process_group"),
        ("ProcessGroupNCCLLazy", "_create_nccl_lazy_process_group"),
    )
    if hasattr(distributed_c10d, maker)
)
#: What a group's communicator may be split from; a group that communicates with nobody has none.
SPLIT_SOURCE = PrivateName(distributed_c10d, "_get_split_source")
REBUILD_BUCKETS = place(_c10d.Reducer, "_rebuild_buckets")
STORE_BARRIER = place(distributed_c10d, "_store_based_barrier")
SET_SEQUENCE_NUMBER = place(LonelyGroup, "_set_sequence_number_for_group")


def require_backend(group: Any, device: str) -> None:
    """Raise PyTorch's RuntimeError where ``group`` has no backend for tensors on ``device``."""
    group._get_backend(torch.device(device))


def is_bound(group: Any) -> bool:
    """Was it made with a ``device_id``, so that others may be split from its communicator?"""
    return getattr(group, "bound_device_id", None) is not None


def outside_of_split(split_group: Any) -> Any:
    """What ``split_group`` returns where this rank is in none of the groups: ``None`` until
    PyTorch 2.13, what ``new_group`` returns since."""
    declared = str(split_group.__annotations__.get("return"))
    return None if "None" in declared else distributed_c10d.GroupMember.NON_GROUP_MEMBER


def where_collectives_are(name: str, function: Any) -> list[Any]:
    """The modules that have this function of ``torch.distributed`` under its name."""
    modules = (torch.distributed, distributed_c10d)
    return [module for module in modules if getattr(module, name, None) is function]


def ddp_times(module: Any) -> dict[str, Any]:
    """What a DistributedDataParallel has timed of its passes, in nanoseconds; empty: it tells none.

    To be asked between passes by the thread that trains: it waits for what the reducer locks."""
    return dict(getattr(module, "_get_ddp_logging_data", dict)())


def ranks_of_join(join: Any) -> list[int]:
    """The ranks whose uneven batches a context of ``torch.distributed.algorithms.join`` makes up
    for; none where it is switched off, or where PyTorch does not tell."""
    group = getattr(join, "_process_group", None)
    if group is None or not getattr(join, "_enable", False):
        return []
    return list(torch.distributed.get_process_group_ranks(group))


class _LonelyGroup(LonelyGroup):  # type: ignore[misc]
    """In PyTorch 2.8 it has no options, which those of gloo are given."""


def make_lonely_group(rank: int, size: int) -> Any:
    """A process group that communicates with nobody."""
    group = getattr(LonelyGroup, "_create_internal", _LonelyGroup)(rank, size)
    if isinstance(group, _LonelyGroup):
        group.options = SimpleNamespace()
    return group


def group_of(boxed: Any) -> Any:
    """The process group that an operator was given."""
    return _ProcessGroup.unbox(boxed)


def group_named(name: Any) -> Any:
    """The process group of a functional collective, which is given its name, or itself."""
    return _group_of_name(name) if isinstance(name, str) else name


def reduction_name(boxed: Any) -> str:
    """The name of the reduction that an operator was given ("SUM"); empty for ``None``, and where
    PyTorch does not tell (2.8)."""
    if boxed is None or not boxed._has_method("op"):
        return ""
    number = int(boxed.op())
    kinds = _ReduceOp.RedOpType.__members__
    return next((name for name, kind in kinds.items() if int(kind) == number), "")


def waiting_tensor(tensor: Any) -> Any:
    """The tensor in one that waits for its collective when it is used first."""
    with needed():
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        return AsyncCollectiveTensor(tensor)


def shapes_of_dtensors() -> PrivateName:
    """What works out the shapes of a DTensor's results, by fake tensors; call it with DTensor
    imported."""
    with needed():
        from torch.distributed.tensor import _sharding_prop

        return place(_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_non_cached")


def shape_of_written(called: Any) -> Any:
    """The shape of what an operator that works in place, as DTensor was called with it, writes and
    returns; ``None`` for others."""
    if not called.op._schema.name.endswith("_") or not called.args_schema:
        return None
    return getattr(called.args_schema[0], "tensor_meta", None)


def without_modes() -> Any:
    """A context in which no mode sees what is dispatched."""
    with needed():
        from torch.utils._python_dispatch import _disable_current_modes

        return _disable_current_modes()


#: The module of a pipeline's stages, and their methods that call the stage's module for the shapes
#: of what it gives, before its first micro-batch: since PyTorch 2.13 on the GPU, and backwards.
PIPELINE_STAGES: Final = "torch.distributed.pipelining.stage"
_FOR_SHAPES: Final = (
    "_forward_metadata_inference",
    "_backward_metadata_inference",
    "_shape_inference",
)


def passes_for_shapes(stages: ModuleType) -> list[tuple[type, str]]:
    """The methods of :data:`PIPELINE_STAGES`' classes that call the stage's module for shapes, as
    owner and name."""
    return _methods(stages, _FOR_SHAPES)


#: Whether a stage lets an output go once it is sent, of ``(stage, output)``: since PyTorch 2.15,
#: where its type is ``torch.Tensor`` itself.
_LETS_GO: Final = ("_output_slot_is_releasable",)


def releases_of_outputs(stages: ModuleType) -> list[tuple[type, str]]:
    """The methods of :data:`PIPELINE_STAGES`' classes that tell whether an output is let go, as
    owner and name."""
    return _methods(stages, _LETS_GO)


def _methods(module: ModuleType, names: Sequence[str]) -> list[tuple[type, str]]:
    return [
        (kind, name)
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
        for name in names
        if name in vars(kind)
    ]
