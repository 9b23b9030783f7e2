"""Hooks of what copies to the GPU or waits for it, and of collectives.

``__torch_function__`` of modes and of tensors' subclasses is given the function that
``torch.Tensor`` holds: for those of C it is ours, then. Hooked right after PyTorch was imported,
that is the one that all know. Later there may be tables of functions that do not: then we dispatch
to overrides ourselves, with PyTorch's own.

Time in collectives: calls of ``torch.distributed``, and what DDP times of its own.

DDP's reducer is C++, which no hook sees. It times some of its backward passes by itself, on a GPU
by CUDA events that it waits for in any case; what it found is only read here.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
from torch import distributed, overrides
from torch.nn.parallel import DistributedDataParallel

from trainfit.results.runs.communication import GradientTimes, RankCommunication
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import cuda
from trainfit.torch_private.distributed import ddp_times, where_collectives_are
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.guard import Host, in_phase, in_place_of

#: Methods of a tensor that need its values on the host.
_READ: Final = (
    *("item", "tolist", "cpu", "nonzero", "is_nonzero", "equal", "masked_select"),
    *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__"),
)
# A mask as an index waits as well; a hook of every index costs more than it tells.


def install(host: Host, patches: PatchSet, late: bool) -> None:
    """Hook from now on, until ``patches`` is restored; ``late``: libraries have been imported."""
    methods = dict.fromkeys(_READ, _reading)
    methods |= {"to": _to, "cuda": _cuda, "copy_": _copy}
    for name, hook in methods.items():
        patches.hook(torch.Tensor, name, _of_tensors(host, hook, late))
    owners: set[Any] = {torch.cuda, torch.cuda.Event, torch.cuda.Stream}
    for owner in owners:
        patches.hook(owner, "synchronize", functools.partial(_waiting, host))
    # It waits before it gives memory back.
    patches.hook(torch.cuda, "empty_cache", functools.partial(_waiting, host))


def _of_tensors(
    host: Host, hook: Callable[..., Any], late: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    # A function of Python stays the one that all know, and dispatches itself.
    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        unknown = late and not isinstance(original, FunctionType)
        return hook(host, _dispatched(original) if unknown else original)  # type: ignore[no-any-return]

    return made


def _dispatched(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of tensors that overrides see as ``original``."""

    @in_place_of(original)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        if overrides.has_torch_function(args):
            return overrides.handle_torch_function(original, args, *args, **kwargs)
        return original(*args, **kwargs)

    return dispatched


def _waiting(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    timed = in_phase(host, ph.SYNC, original)

    @in_place_of(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        _note_sync(host)
        return timed(*args, **kwargs)

    return waiting


def _reading(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    timed = _waiting(host, original)

    @in_place_of(original)
    def reading(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return (timed if self.is_cuda else original)(self, *args, **kwargs)

    return reading


def _note_sync(host: Host) -> None:
    try:
        # A call that itself makes another (``__bool__``, ``item``) is one wait.
        if host.live and host.steps.mine and host.steps.phases.current != ph.SYNC:
            host.steps.note_sync()
    except Exception as error:
        host.failed("synchronize", error)


def _to(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    copying, reading = _copying(host, original), _waiting(host, original)

    @in_place_of(original)
    def to(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # PyTorch's own optimizers call it some times in a step: what costs no call comes first.
        where = args[0] if args else None
        if kwargs:
            where = kwargs.get("device", kwargs.get("other", where))
        if where is None or type(where) is torch.dtype:
            return original(self, *args, **kwargs)
        if not self.is_cuda:
            function = copying if _is_cuda(where) and self.device.type == "cpu" else original
        else:
            waits = _is_cpu(where) and not _non_blocking(args, kwargs, 2)
            function = reading if waits else original
        return function(self, *args, **kwargs)

    return to


def _cuda(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    copying = _copying(host, original)

    @in_place_of(original)
    def cuda(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return (copying if self.device.type == "cpu" else original)(self, *args, **kwargs)

    return cuda


def _copy(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    copying, reading = _copying(host, original, source=1), _waiting(host, original)

    @in_place_of(original)
    def copy_(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("src", kwargs.get("other"))
        function = original
        if isinstance(source, torch.Tensor) and source.is_cuda is not self.is_cuda:
            if self.is_cuda:
                function = copying if source.device.type == "cpu" and args else original
            elif not _non_blocking(args, kwargs, 1):
                function = reading
        return function(self, *args, **kwargs)

    return copy_


def _copying(host: Host, original: Callable[..., Any], source: int = 0) -> Callable[..., Any]:
    """A call that copies the argument at ``source``, which is on the host, to the GPU."""
    timed = in_phase(host, ph.COPY, original)

    @in_place_of(original)
    def copying(*args: Any, **kwargs: Any) -> Any:
        try:
            # An override of a tensor's methods may call another of them to do the work.
            if host.live and host.steps.mine and host.steps.phases.current != ph.COPY:
                tensor = args[source]
                host.steps.note_copy(tensor.nbytes, not tensor.is_pinned())
        except Exception as error:
            host.failed("copy", error)
        return timed(*args, **kwargs)

    return copying


def _is_cuda(where: Any) -> bool:
    if isinstance(where, torch.device):
        return where.type == "cuda"
    if isinstance(where, str):
        return where.startswith("cuda")
    if isinstance(where, torch.Tensor):
        return where.is_cuda
    return isinstance(where, int)


def _is_cpu(where: Any) -> bool:
    if isinstance(where, str):
        return where.startswith("cpu")
    return (where if isinstance(where, torch.device) else getattr(where, "device", where)) == (
        torch.device("cpu")
    )


def _non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any], last: int) -> bool:
    """Is it told not to wait? The flag is positional after the device (and a dtype)."""
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    return any(argument is True for argument in args[1 : last + 1])


# ---
# The history of a watched run's GPU memory, as PyTorch records it; saved where memory runs out.
#
# PyTorch keeps a stack of Python's frames with each allocation: some 2 µs each, by the docstring of
# ``torch.cuda.memory._record_memory_history``. Frames of C++ would tell more of the backward pass,
# and are left out: to name them takes seconds to minutes when the history is saved.


#: Allocations and frees that are kept, the latest: those of some steps, in some 100 MB of RAM.
_ENTRIES: Final = 200_000


class MemoryHistory:
    """Records from the moment on at which CUDA is initialized."""

    def __init__(self) -> None:
        self._records = False
        #: Why there is none; empty: there is one, or CUDA was not used.
        self.why_not = ""
        cuda.when_initialized(self._begin)

    def _begin(self) -> None:
        try:
            cuda.record_memory_history(max_entries=_ENTRIES, stacks="python")
            self._records = True
        except Exception as error:
            self.why_not = f"{type(error).__name__}: {error}"

    def save(self, path: Path) -> None:
        """Write the history; nothing where there is none, or the disk is full."""
        if self._records:
            try:
                cuda.dump_snapshot(str(path))
            except Exception as error:
                self.why_not = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Record no more."""
        if self._records:
            self._records = False
            with contextlib.suppress(Exception):
                cuda.record_memory_history(None)


#: Functions of ``torch.distributed`` in which a rank meets others.
_COLLECTIVES: Final = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "monitored_barrier", "broadcast", "broadcast_object_list"),
    *("gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "recv"),
)
#: Step after which DDP has timed its first passes, and steps until it times another one.
_FIRST_LOOK: Final = 11
_EVERY: Final = 100


def install_collectives(host: Host, patches: PatchSet) -> None:
    """Hook from now on, until ``patches`` is restored: calls are a phase of their own."""
    if not distributed.is_available():
        return
    for name in _COLLECTIVES:
        original = getattr(distributed, name, None)
        if original is None:
            continue
        around = functools.partial(in_phase, host, ph.COLLECTIVE)
        for module in where_collectives_are(name, original):
            patches.hook(module, name, around)


class CommunicationLooks:
    """What is known of a rank's communication, looked at between steps."""

    def __init__(self) -> None:
        self._ddp: weakref.ref[Any] | None = None
        self._due = _FIRST_LOOK
        self._gradients: GradientTimes | None = None

    def of_model(self, module: torch.nn.Module) -> None:
        """The model that is trained."""
        modules = (each for each in module.modules() if isinstance(each, DistributedDataParallel))
        if (ddp := next(modules, None)) is not None:
            self._ddp = weakref.ref(ddp)

    def after(self, step: int) -> None:
        """A step is over, which was recorded in detail."""
        if step < self._due:
            return
        self._due = step + _EVERY
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is not None:
            self._gradients = _times_of(ddp) or self._gradients

    def facts(self, called: ph.CollectiveSeconds) -> RankCommunication:
        """The facts that the hooks have counted; asks nobody."""
        return RankCommunication(called.mean_s, called.calls, self._gradients)


def _times_of(ddp: DistributedDataParallel) -> GradientTimes | None:
    found = ddp_times(ddp)

    def seconds(name: str) -> float:
        return int(found.get(f"avg_backward_{name}") or 0) / 1e9

    if not seconds("comm_time"):
        return None
    return GradientTimes(
        seconds("comm_time"),
        seconds("compute_comm_overlap_time"),
        seconds("compute_time"),
        "CUDA events" if next(ddp.parameters()).is_cuda else "the host's clock",
    )
