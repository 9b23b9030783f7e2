"""Several ranks that train one model: the data that each goes over, and whether the wrapper that
averages their gradients is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, Subset

from trainfit.torch_private.data_loading import dataset_of, index_sampler_of


def length_of(data: Any) -> int | None:
    """Batches of an epoch, or samples, where a DataLoader or a data set knows."""
    try:
        return len(data)
    except TypeError:
        return None


def ranks() -> int:
    """Processes that train together, as PyTorch knows it."""
    is_one_of_several = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_one_of_several else 1


def goes_over_all(batches: Any) -> bool:
    """Has the iterator of a DataLoader PyTorch's own order of all samples, which each rank makes
    likewise? Not of a data set that is a rank's part of another one, or that knows its rank."""
    sampler = index_sampler_of(batches)
    return (
        type(sampler) is BatchSampler
        and type(sampler.sampler) in (RandomSampler, SequentialSampler)
        and not _is_part(dataset_of(batches))
    )


def _is_part(dataset: Any) -> bool:
    """Is it at most a rank's share of another data set, or has it a rank of its own?"""
    if type(dataset) is Subset:
        whole = length_of(dataset.dataset)
        return whole is not None and len(dataset) <= -(-whole // ranks())
    return any("rank" in name or "shard" in name for name in getattr(dataset, "__dict__", ()))


def passed_by(wrappers: Iterable[Any], called: Sequence[Any]) -> str | None:
    """The type of a model that is ``called`` where nothing that is has the wrapper around it."""
    for wrapper in wrappers if ranks() > 1 else ():
        within = getattr(wrapper, "module", None)
        if (
            within is not None
            and any(each is within for each in called)
            and not any(_has(each, wrapper) for each in called)
        ):
            return type(within).__name__
    return None


def _has(model: Any, wrapper: Any) -> bool:
    """Is a wrapper a model, or within it (torch.compile, a script's own module around it)?"""
    return model is not None and any(part is wrapper for part in model.modules())
