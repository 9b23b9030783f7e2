"""What PyTorch and NCCL refuse of a collective's tensors, before anything is sent.

Simulated collectives do not reach the C++ that checks them (``ProcessGroup.hpp``,
``ProcessGroupNCCL.cpp`` and ``Utils.hpp`` in ``torch/csrc/distributed/c10d``): a script with a
call that no group of several ranks accepts would be planned, and fail on its machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from trainfit.simgpu.device.tensor import DeviceTensor


def refuse(name: str, group: Any, named: Mapping[str, Any], args: Sequence[Any]) -> None:
    """Raise what PyTorch does for a call of ``c10d::name`` that it does not accept: ``named`` are
    its arguments by name, ``args`` in order.

    Raises:
        RuntimeError: ``group`` has no backend for where the tensors are, splits do not add up, or
            a root is no rank of it.
        ValueError: a tensor or a list of them has another size than the group asks for.
    """
    first = _first(args[0]) if args else None
    if first is not None:
        require_backend(group, first)
    if (check := _CHECKS.get(name)) is not None:
        check(group.size(), named, args)
    for root in _ROOTS:
        if not 0 <= int(named.get(root, 0)) < group.size():
            what, maximum = name.strip("_"), group.size() - 1
            raise RuntimeError(
                f"{what}: invalid root {named[root]} (root should be in the 0..{maximum} range)"
            )


def require_backend(group: Any, tensor: Any) -> None:
    """Raise PyTorch's RuntimeError where ``group`` has none for the device of ``tensor`` ("No
    backend type associated with device type cpu"): NCCL sends what is on GPUs."""
    from trainfit.torch_private import distributed as private

    private.require_backend(group, "cuda" if isinstance(tensor, DeviceTensor) else "cpu")


def require_splits(tensor: Any, splits: Sequence[int], ranks: int) -> None:
    """Raise RuntimeError where a tensor is not split among ``ranks`` as ``splits`` say (empty:
    evenly)."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % ranks:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        return
    if len(splits) != ranks:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(splits) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


_ROOTS: Final = ("root_rank",)


def _first(value: Any) -> Any:
    """The first tensor of a tensor, or of nested lists of them."""
    while isinstance(value, (list, tuple)):
        if not value:
            return None
        value = value[0]
    return value


def _gathers(ranks: int, named: Mapping[str, Any], args: Sequence[Any]) -> None:
    target, source = args[0], args[1]
    if target.numel() != source.numel() * ranks:
        raise ValueError("output tensor size must be equal to world_size times input tensor size")
    if target.dtype != source.dtype:
        raise TypeError("output tensor must have the same type as input tensor")


def _scatters(ranks: int, named: Mapping[str, Any], args: Sequence[Any]) -> None:
    target, source = args[0], args[1]
    if source.numel() != target.numel() * ranks:
        raise ValueError("input tensor must be the same size as output size times world size")
    if target.dtype != source.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")


def _list_of_ranks(at: int) -> Callable[[int, Mapping[str, Any], Sequence[Any]], None]:
    """A list that has a tensor for each rank: the argument ``at``, a list of such lists."""

    def check(ranks: int, named: Mapping[str, Any], args: Sequence[Any]) -> None:
        for each in args[at]:
            if isinstance(each, (list, tuple)) and each and len(each) != ranks:
                raise ValueError(
                    "Tensor list input to scatter/gather must match number of collective "
                    f"participants but got {len(each)} inputs and {ranks} participants."
                )

    return check


def _exchanges(ranks: int, named: Mapping[str, Any], args: Sequence[Any]) -> None:
    for tensor, splits in zip(args[:2], ("output_split_sizes", "input_split_sizes"), strict=True):
        require_splits(tensor, named.get(splits) or (), ranks)


_CHECKS: Final[dict[str, Callable[[int, Mapping[str, Any], Sequence[Any]], None]]] = {
    "_allgather_base_": _gathers,
    "_reduce_scatter_base_": _scatters,
    "allgather_": _list_of_ranks(0),
    "gather_": _list_of_ranks(0),
    "reduce_scatter_": _list_of_ranks(1),
    "scatter_": _list_of_ranks(1),
    "alltoall_base_": _exchanges,
}
