"""``torch.distributed`` for the one process that is simulated.

A group of one process communicates with nobody: its collectives leave what is in place alone and
copy the rest, as NCCL does (``ncclLaunchOneRank``). DDP, FSDP and DTensor above them are PyTorch's
own. What NCCL's communicator takes of the GPU, outside of PyTorch's memory, is not modelled. A
group of several processes is refused.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch

from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.errors import SeveralGpusError
from trainfit.simgpu.device.recorder import Recorder
from trainfit.simgpu.device.registry import handles
from trainfit.simgpu.device.tensor import DeviceTensor, SimulatedTensor
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.operators import schema

#: What ``torchrun`` sets, in the order in which ``env://`` asks for it.
_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: What PyTorch gives operations of NCCL by default; None in a build without it.
_TIMEOUT: Final = timedelta(minutes=10)
#: ``torch.cuda.nccl.version()``, as ``torch._C`` packs it: what comes with torch 2.13.
_NCCL_VERSION: Final = 2 << 32 | 28 << 16 | 9

#: Its functions and classes are not all declared.
distributed: Any = torch.distributed


# -- the process group -----------------------------------------------------------------------------


class _OneRank(type):
    """Makes and knows PyTorch's own process group that communicates with nobody."""

    def __call__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        require_one_process(size)
        from trainfit.torch_private import distributed as private

        return private.make_lonely_group(rank, size)

    def __instancecheck__(cls, instance: object) -> bool:
        from trainfit.torch_private import distributed as private

        return isinstance(instance, private.LonelyGroup)


class ProcessGroupNCCL(metaclass=_OneRank):
    """Stands for ``torch.distributed.ProcessGroupNCCL``."""

    class Options:
        """Holds what is set; nothing depends on it."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = _Settings()
            self._timeout = _TIMEOUT


class _Settings:
    """Attributes of ``ncclConfig_t`` that a script may set."""


def require_one_process(size: int) -> None:
    """Raise :class:`SeveralGpusError` for a group of more processes than one."""
    if size > 1:
        raise SeveralGpusError(f"a process group of {size} processes", user_frame())


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
    """``rendezvous`` of one process: it meets nobody, so no port is opened."""
    if url.startswith("env://"):
        missing = [name for name in _VARIABLES if name not in os.environ]
        known = {"RANK": rank, "WORLD_SIZE": world_size}
        missing = [name for name in missing if known.get(name, -1) < 0]
        if missing:
            raise ValueError(
                "Error initializing torch.distributed using env:// rendezvous: environment "
                f"variable {missing[0]} expected, but not set"
            )
        rank = int(os.environ["RANK"]) if rank < 0 else rank
        world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
    require_one_process(world_size)
    yield distributed.HashStore(), max(rank, 0), max(world_size, 1)


class _Joined:
    """Stands for the context of processes that have ended."""

    processes: Final = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True


def _spawn(
    fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
) -> Any:
    """``torch.multiprocessing.spawn``: the one process is this one, for a fresh one has no
    simulated GPU."""
    if nprocs > 1:
        raise SeveralGpusError(f"torch.multiprocessing.spawn of {nprocs} processes", user_frame())
    fn(0, *args)
    return None if join else _Joined()


class Collectives:
    """Installs the process group of one process; takes down what a script left of it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._hook: Any = None
        self._installed = False

    def install(self, patches: PatchSet) -> None:
        """Do nothing where PyTorch was built without ``torch.distributed``."""
        if not distributed.is_available():
            return
        from trainfit.torch_private import distributed as private

        self._installed, self._hook = True, sys.excepthook
        module = distributed.distributed_c10d
        for owner in (distributed, module):
            patches.set(owner, "ProcessGroupNCCL", ProcessGroupNCCL)
            patches.set(owner, "is_nccl_available", lambda: True)
        patches.set(*private.NCCL_VERSION, lambda: _NCCL_VERSION)
        patches.set(*private.NCCL_VERSION_SUFFIX, lambda: b"")
        patches.set(*private.NCCL_AVAILABLE, True)
        patches.set(module, "default_pg_nccl_timeout", module.default_pg_nccl_timeout or _TIMEOUT)
        patches.set(module, "rendezvous", _rendezvous)
        reducer = distributed.Reducer
        rebuild = private.REBUILD_BUCKETS.now
        patches.set(distributed, "Reducer", self._of_gradients(reducer))
        patches.set(*private.REBUILD_BUCKETS, self._of_gradients(rebuild))
        patches.set(torch.multiprocessing, "spawn", _spawn)
        _install_dtensor(patches)
        patches.set(*private.SET_SEQUENCE_NUMBER, lambda group: None)

    def _of_gradients(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """DDP's reducer allocates buckets for the gradients, and others in their place."""

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            first = self._recorder.alloc_count
            result = function(*args, **kwargs)
            for number in range(first, self._recorder.alloc_count):
                self._recorder.mark(number, "gradient")
            return result

        return marked

    def remove(self) -> None:
        """A process group that a script left would outlive the simulation."""
        if not self._installed:
            return
        self._installed = False
        if distributed.is_initialized():
            distributed.destroy_process_group()
        sys.excepthook = self._hook


def _install_dtensor(patches: PatchSet) -> None:
    """A DTensor is where its local tensor is; C++ says "meta" of both."""
    module = sys.modules.get("torch.distributed.tensor")  # optimizers import it
    if module is None:
        return
    dtensor = module.DTensor
    for name in ("device", "is_cuda", "is_meta", "is_cpu"):
        patches.set(dtensor, name, property(_of_local(name)))


def _of_local(name: str) -> Callable[[Any], Any]:
    from trainfit.torch_private.distributed import local_part

    inherited = getattr(torch.Tensor, name)

    def get(tensor: Any) -> Any:
        local = local_part(tensor)
        return (
            getattr(local, name) if isinstance(local, DeviceTensor) else inherited.__get__(tensor)
        )

    return get


# -- operators ---------------------------------------------------------------------------------

_Pairs = Callable[[tuple[Any, ...]], Iterator[tuple[Any, Any]]]


def _work(tensors: list[Any]) -> Any:
    """What a collective returns to wait for: it is done."""
    from trainfit.torch_private.distributed import finished_work

    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return finished_work(future)


def _collective(name: str, pairs: _Pairs) -> None:
    """Register the operator ``c10d::name``, which copies to and from these pairs of tensors."""
    operator = getattr(torch.ops.c10d, name, None)
    if operator is None:  # other versions have others
        return
    returns = len(schema(operator.default).returns)

    @handles(operator.default)
    def collective(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
        engine.record(engine.info(func))
        for target, source in pairs(args):
            _copy(target, source)
        if not returns:
            return None
        work = _work(_flat(args[0]))
        return work if returns == 1 else (args[0], work)


def _copy(target: Any, source: Any) -> None:
    """Nothing where they are the same memory already."""
    if type(target) is SimulatedTensor and type(source) is SimulatedTensor:
        same = target._life is source._life and target._spec.offset == source._spec.offset
        if same:
            return
    if target.numel() == source.numel():
        source = source.reshape(target.shape)
    with torch.no_grad():
        target.copy_(source.expand_as(target))


def _flat(value: Any) -> list[Any]:
    """The tensors of a tensor, or of nested lists of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _flat(each)]


def _in_place(args: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    return iter(())


def _out_of_place(args: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    return zip(_flat(args[0]), _flat(args[1]), strict=False)


for _name in (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "barrier"),
    *("monitored_barrier_", "check_for_nan"),
):
    _collective(_name, _in_place)
for _name in (
    *("_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    *("gather_", "scatter_", "alltoall_", "alltoall_base_"),
):
    _collective(_name, _out_of_place)
