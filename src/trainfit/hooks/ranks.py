"""Several ranks that train one model: the data that each goes over, in which order, and whether the
wrapper that averages their gradients is called."""

from __future__ import annotations

import ast
import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from trainfit.findings.source_code import parsed
from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import call_of_user, is_library, loaded_modules
from trainfit.torch_private.data_loading import dataset_of, index_sampler_of
from trainfit.torch_private.modules import sharded_parameters, within_checkpoint


def length_of(data: Any) -> int | None:
    """Batches of an epoch, or samples, where a DataLoader or a data set knows."""
    try:
        return len(data)
    except (TypeError, NotImplementedError, AttributeError):
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
    """The type of a model that is ``called``, or parts of which are by its methods, where nothing
    that is has the wrapper around it."""
    for wrapper in wrappers if ranks() > 1 else ():
        within = getattr(wrapper, "module", None)
        if (
            within is not None
            and any(each is part for part in within.modules() for each in called)
            and not any(_has(each, wrapper) for each in called)
        ):
            return type(within).__name__
    return None


def _has(model: Any, wrapper: Any) -> bool:
    """Is a wrapper a model, or within it (torch.compile, a script's own module around it)?"""
    return model is not None and any(part is wrapper for part in model.modules())


#: What gives each epoch of a DistributedSampler another order.
_SET_EPOCH: Final = "set_epoch"


def goes_over_host(wrapper: Any) -> bool:
    """Are the gradients of a DistributedDataParallel on the GPU, and exchanged by gloo, which
    copies them to the host and back?"""
    if not next((parameter.is_cuda for parameter in wrapper.parameters()), False):
        return False
    try:
        return "cuda:gloo" in dist.get_backend_config(wrapper.process_group)
    except (KeyError, ValueError):  # one that PyTorch keeps no list of
        return False


#: Parameters from which on PyTorch's own policy gives a part of a model a unit of its own
#: (``min_num_params`` of size_based_auto_wrap_policy in torch/distributed/fsdp/wrap.py).
_LARGE_UNIT: Final = 100_000_000
#: More than this share of a model in one unit's layers is most of it.
_MOST: Final = 0.5


class Gathered(NamedTuple):
    """What FSDP puts together at once, most of a model: layers that are alike and could be units
    of their own; ``nbytes`` are the unit's, ``of_bytes`` the model's."""

    layer: str
    layers: int
    nbytes: int
    of_bytes: int


def gathered_at_once(models: Iterable[Any]) -> Gathered | None:
    """The first model that FSDP puts together as a whole, in parts that it could have gone through
    one after another; ``None``: there is none."""
    for model in models if ranks() > 1 else ():
        sharded = sharded_parameters(model)
        every = sum(sharded_parameter.nbytes for sharded_parameter in sharded)
        units: dict[int, list[Any]] = {}
        for parameter in sharded:
            units.setdefault(id(parameter.unit), []).append(parameter)
        unit = max(units.values(), key=lambda held: sum(each.nbytes for each in held), default=[])
        if sum(each.numbers for each in unit) < _LARGE_UNIT:
            continue
        held: Counter[int] = Counter()  # a weight and a bias are of one owner
        for each in unit:
            held[id(each.owner)] += each.nbytes
        alike = _alike(unit[0].unit, held)
        if alike is not None and alike[2] > _MOST * every:
            return Gathered(*alike[:2], sum(each.nbytes for each in unit), every)
    return None


def _alike(unit: Any, held: Mapping[int, int]) -> tuple[str, int, int] | None:
    """The class, number and bytes of the layers of one class that stand side by side in ``unit``,
    those with the most bytes. ``held`` are the unit's own, by the module that has them."""
    found: list[tuple[str, int, int]] = []
    for part in unit.modules():
        by_class: dict[str, list[int]] = {}
        for child in part.children():
            nbytes = sum(held.get(id(module), 0) for module in child.modules())
            by_class.setdefault(_class_of(child), []).append(nbytes)
        found += [(name, len(own), sum(own)) for name, own in by_class.items() if min(own)]
    return max((each for each in found if each[1] > 1), key=lambda each: each[2], default=None)


def _class_of(layer: Any) -> str:
    """The name of a layer's class, also of one in PyTorch's wrapper that computes it once more in
    the backward pass."""
    return type(within_checkpoint(layer)).__name__


#: Steps without an average from which on it is not left out for some of them only.
_NEVER: Final = 3


class Averaging:
    """When do wrappers of DistributedDataParallel average gradients? Their ``no_sync()`` holds for
    forward passes within it: those decide what the backward pass does."""

    def __init__(self) -> None:
        self._in_vain: str | None = None
        #: Of the step that goes on: backward passes, and those that may have averaged. Of all
        #: steps: how many had none that did, and whether one had.
        self._passes = self._averaged = self._without = 0
        self._ever = False

    def backward(self, wrappers: Iterable[Any], place: str | None) -> None:
        """A line begins a backward pass."""
        for wrapper in wrappers:
            is_left_out = getattr(wrapper, "require_backward_grad_sync", True) is False
            by_forward = getattr(wrapper, "require_forward_param_sync", True) is True
            if is_left_out and by_forward and self._in_vain is None:
                self._in_vain = place or ""
            self._passes += 1
            self._averaged += not is_left_out or by_forward

    def stepping(self) -> None:
        """An optimizer is about to step."""
        if self._passes:
            self._without += not self._averaged
            self._ever |= self._averaged > 0
        self._passes = self._averaged = 0

    def found(self) -> Iterator[Misuse]:
        if self._in_vain is not None:
            yield Misuse("no_sync_in_vain", (), self._in_vain)
        if self._without >= _NEVER and not self._ever:
            yield Misuse("never_averaged", (), None)


class EpochOrder:
    """Has each epoch of several ranks another order? A DistributedSampler shuffles by its epoch's
    number, which somebody has to tell it."""

    def __init__(self) -> None:
        #: Of each data set that was trained on: the seed and the epoch of its last pass.
        self._trained: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        #: The pass that was begun last, and the optimizer steps before it.
        self._begun: tuple[weakref.ref[Any], tuple[int, int], int] | None = None
        #: The line of a loop of the script's own, with the batches of a pass.
        self._loop: tuple[str, int] | None = None
        self._same: str | None = None
        self._is_told = False

    def told(self) -> None:
        """Some sampler is told the epoch's number."""
        self._is_told = True

    def begins(self, loader: Any, steps: int) -> None:
        """A DataLoader begins to be gone over, after so many optimizer steps."""
        if self._begun is not None and steps > self._begun[2]:
            data = self._begun[0]()
            if data is not None:
                self._trained[data] = self._begun[1]
        self._begun = None
        sampler = getattr(loader, "sampler", None)
        if type(sampler) is not DistributedSampler or not sampler.shuffle:
            return
        with contextlib.suppress(TypeError):  # of a list there are no weak references
            order = sampler.seed, sampler.epoch
            place = call_of_user()
            if self._trained.get(sampler.dataset) == order and self._same is None:
                self._same = place or ""
            self._begun = weakref.ref(sampler.dataset), order, steps
            if place is not None and self._loop is None and not steps:
                self._loop = place, length_of(loader) or 0

    def same(self, ahead: int = 0) -> str | None:
        """The line that goes over the same order in each epoch: one that did, or whose script
        never tells the epoch's number and goes on for ``ahead`` steps of the optimizer."""
        if self._same is not None or self._loop is None or self._is_told:
            return self._same
        place, batches = self._loop
        return place if 0 < batches < ahead and not _is_called(_SET_EPOCH) else None


def _is_called(name: str) -> bool:
    """Is it in a source file of the script's own that is loaded, or is one of them not to be
    read?"""
    files = {space.get("__file__") for _, space in loaded_modules()}
    for file in files:
        if isinstance(file, str) and file.endswith(".py") and not is_library(file):
            with contextlib.suppress(FileNotFoundError):  # of modules that no file has
                try:
                    source = Path(file).read_text(encoding="utf-8", errors="replace")
                except PermissionError:
                    return True
                if name in source and _is_used(name, source):
                    return True
    return False


def _is_used(name: str, source: str) -> bool:
    """Is it an attribute that Python code uses, or a string, by which one may be asked for? In
    comments and as a method of the script's own it is not."""
    tree = parsed(source)
    return tree is None or any(
        (isinstance(node, ast.Attribute) and node.attr == name)
        or (isinstance(node, ast.Constant) and node.value == name)
        for node in ast.walk(tree)
    )
