"""``torch.distributed`` for the one process that is simulated, rank 0 of its group mostly.

DDP and DTensor are PyTorch's own; their collectives are simulated operators
(:mod:`trainfit.simgpu.communication.collectives`). The other processes are not there: a group
has as many as the machine has GPUs, at most.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

import torch
from torch.distributed import device_mesh

from trainfit.results.gpus import Kernel
from trainfit.results.runs.communication import JOINS, LEAVES, MEETING_PLACE
from trainfit.simgpu.communication import checkpoints, mpi, sharing, stores
from trainfit.simgpu.communication import functional as _functional  # noqa: F401  (registers)
from trainfit.simgpu.communication import functional as _sync  # noqa: F401  (registers)
from trainfit.simgpu.communication.collectives import Communication
from trainfit.simgpu.communication.peers import Peers, of_tasks
from trainfit.simgpu.communication.started_ranks import StartedRanks
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.errors import (
    SeveralGpusError,
    UnsupportedOperatorError,
    too_few_gpus,
)
from trainfit.simgpu.device.recorder import RecordingBuilder
from trainfit.simgpu.device.tensor import DeviceTensor, SimulatedTensor, allocation_of
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.device.values import as_objects, tensors_in
from trainfit.simgpu.operators.kernel_rules import Arguments, bytes_of, dtype_of, launched_by
from trainfit.simgpu.operators.launch_log import KernelLog
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import modules
from trainfit.torch_private.operators import local_part, no_dispatch

# ---
# FSDP: the kernels of its own copies, and what other ranks have of its parameters.
#
# Operators copy into the buffers of its collectives, and out of them: they write to a tensor that
# they are given, all of it, and read what they copy once (``_fsdp_collectives.py``).


@launched_by("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
def _copies(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    written = call["out"] if "out" in call else call["all_gather_output"]
    targets = {id(tensor) for tensor in tensors_in(written)}
    sources = [tensor for tensor in tensors_in(list(call.values())) if id(tensor) not in targets]
    moved = bytes_of(sources)
    return [Kernel("pointwise", dtype_of(sources[0]), 0, moved, moved)] if sources else []


def watch_outputs(patches: PatchSet) -> None:
    """Let stages of a pipeline let go what they sent, as they do a plain tensor of a GPU, until
    ``patches`` is restored."""
    from trainfit.torch_private import distributed as private

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def is_releasable(stage: Any, output: Any) -> Any:
            if type(output) is SimulatedTensor:
                with no_dispatch():
                    output = torch.empty(0, device="cpu")
            return original(stage, output)

        return is_releasable

    def seen(module: ModuleType) -> None:
        for owner, name in private.releases_of_outputs(module):
            patches.hook(owner, name, hook)

    patches.when_imported(private.PIPELINE_STAGES, seen)


#: DeepSpeed's stages of ZeRO, and their methods that make the bucket in which gradients wait for
#: being reduced: memory for ``reduce_bucket_size`` of them, however few the model has.
_STAGES_OF_ZERO: Final = (
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
)
_MAKE_BUCKETS: Final = ("setup_buckets", "reduce_gradients", "_setup_for_real_optimizer")
#: In the names of the attributes that hold it, in all versions: ``ipg_buckets``, ``ipg_buffer``, …
_BUCKETS: Final = "ipg_bu"


def watch_buckets(patches: PatchSet, recorder: RecordingBuilder) -> None:
    """Tell DeepSpeed's buckets from other memory until ``patches`` is restored."""

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def makes_buckets(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            for name, value in vars(optimizer).items():
                for tensor in _device_tensors(value) if _BUCKETS in name else ():
                    if (number := allocation_of(tensor)) is not None:
                        recorder.mark(number, "bucket")
            return result

        return makes_buckets

    def seen(module: ModuleType) -> None:
        for each in list(vars(module).values()):
            if isinstance(each, type) and each.__module__ == module.__name__:
                for name in _MAKE_BUCKETS:
                    if name in vars(each):
                        patches.hook(each, name, hook)

    for name in _STAGES_OF_ZERO:
        patches.when_imported(name, seen)


def _device_tensors(value: Any) -> Iterator[DeviceTensor]:
    """The tensors in lists, dictionaries, and what a bucket holds as its ``buffer``."""
    if isinstance(value, DeviceTensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _device_tensors(each)
    elif hasattr(value, "buffer") and not isinstance(value, torch.Tensor):
        yield from _device_tensors(value.buffer)


def watch_whole_gradients(patches: PatchSet, recorder: RecordingBuilder) -> None:
    """Tell FSDP2's gradients of whole parameters, which micro-batches without a reduction leave,
    from other memory until ``patches`` is restored."""

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def ends(group: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(group, *args, **kwargs)
            for parameter in group.fsdp_params:
                kept = local_part(getattr(parameter, modules.WHOLE_GRADIENT, None))
                if isinstance(kept, DeviceTensor) and (number := allocation_of(kept)) is not None:
                    recorder.mark(number, "gradient")
            return result

        return ends

    def seen(module: ModuleType) -> None:
        kind = getattr(module, modules.SHARDED_GROUP, None)
        if hasattr(kind, modules.END_OF_BACKWARD):
            patches.hook(kind, modules.END_OF_BACKWARD, hook)

    patches.when_imported(modules.SHARDED_GROUPS, seen)


#: What ``torchrun`` sets, in the order in which ``env://`` asks for it.
_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# ---
# The group.


#: What PyTorch gives operations of NCCL by default; None in a build without it.
_TIMEOUT: Final = timedelta(minutes=10)
#: ``torch.cuda.nccl.version()``, as ``torch._C`` packs it: what comes with torch 2.13.
_NCCL_VERSION: Final = 2 << 32 | 28 << 16 | 9

#: Where calls of other processes are made.
_RPC: Final = "torch.distributed.rpc"

#: Its functions and classes are not all declared.
distributed: Any = torch.distributed
#: A build may be without it.
GLOO: Any = getattr(distributed, "ProcessGroupGloo", ())


# -- the process group -----------------------------------------------------------------------------


class _LonelyRank(type):
    """Makes and knows PyTorch's own process group that communicates with nobody."""

    def __call__(
        cls, store: Any, rank: int, size: int, options: Any = None, device: Any = None
    ) -> Any:
        require_gpus(size, f"a process group of {size} processes")
        from trainfit.torch_private import distributed as private

        return private.make_lonely_group(rank, size)

    def __instancecheck__(cls, instance: object) -> bool:
        from trainfit.torch_private import distributed as private

        return isinstance(instance, private.LonelyGroup)


class ProcessGroupNCCL(metaclass=_LonelyRank):
    """Stands for ``torch.distributed.ProcessGroupNCCL``."""

    class Options:
        """Holds what is set; nothing depends on it."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = _Settings()
            self._timeout = _TIMEOUT


class _HostGroup(type):
    """Makes gloo's groups: of one process by gloo itself, others are lonely like NCCL's."""

    def __call__(cls, store: Any, rank: int, size: int, **options: Any) -> Any:
        if size == 1:
            return GLOO(store, rank, size, **options)
        return ProcessGroupNCCL(store, rank, size)  # type: ignore[call-arg]

    def __instancecheck__(cls, instance: object) -> bool:
        from trainfit.torch_private import distributed as private

        return isinstance(instance, (GLOO, private.LonelyGroup))


class ProcessGroupGloo(metaclass=_HostGroup):
    """Stands for ``torch.distributed.ProcessGroupGloo``."""


def _quiet(logger: Any) -> Any:
    """DDP's logger without what it notes of a group: it asks one by the name of gloo for its
    threads (``torch/csrc/distributed/c10d/logger.cpp``), whatever its class."""
    return type("Logger", (logger,), {"set_construction_data_and_log": lambda *_: None})


class _Settings:
    """Attributes of ``ncclConfig_t`` that a script may set."""


def require_gpus(size: int, what: str) -> None:
    """Raise :class:`SeveralGpusError` for more processes than the machine has GPUs."""
    communication = Communication.current
    assert communication is not None
    communication.ranks = max(size, communication.ranks or 1)
    gpu = communication.gpu
    if size > gpu.count * gpu.machines:
        raise SeveralGpusError(what, user_frame(), too_few_gpus(size, gpu.key, gpu.count))


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
    """``rendezvous`` of one process: it meets nobody, so no port is opened."""
    if url.startswith("env://"):
        _note_meeting_place()
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
    require_gpus(world_size, f"a process group of {world_size} processes")
    yield stores.make_store(), max(rank, 0), max(world_size, 1)


def _note_meeting_place() -> None:
    """Note that batch systems do not set where ranks meet, which a batch file does."""
    communication = Communication.current
    if communication is not None and MEETING_PLACE.items() <= os.environ.items() and of_tasks():
        names = " and ".join(MEETING_PLACE)
        communication.assume(f"{names} were assumed to be set where the tasks are started")


_GATHER_OBJECTS: Final = ("all_gather_object", "gather_object")
_SEND_OBJECTS: Final = (*_GATHER_OBJECTS, "scatter_object_list")


def _objects_of_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """``broadcast_object_list``: what another rank would send is known to nobody here."""

    @functools.wraps(original)
    def broadcast(object_list: Any, src: int | None = None, *args: Any, **kwargs: Any) -> Any:
        root = kwargs.get("group_src") if src is None else src
        assert Communication.current is not None
        known = {distributed.get_rank(), *Communication.current.peers.company}
        if root is not None and root not in known:
            raise UnsupportedOperatorError(
                f"broadcast_object_list from rank {root}",
                user_frame(),
                "not simulated",
                f"only rank 0 runs, and objects that only rank {root} has are not known; let rank "
                "0 send them",
            )
        return original(object_list, src, *args, **kwargs)

    return broadcast


def _objects_of_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """``all_gather_object`` or ``gather_object``: what this rank gives stands for all others, which
    where it is None need not be so."""
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def gather(*args: Any, **kwargs: Any) -> Any:
        assert Communication.current is not None
        if (dict(zip(names, args, strict=False)) | kwargs).get("obj") is None:
            Communication.current.peers.gave_none_at = user_frame()
        return original(*args, **kwargs)

    return gather


def _by_new_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    """``split_group`` of a group with a ``device_id`` (``init_device_mesh`` calls it there):
    NCCL splits its communicator, which a group that communicates with nobody does not have."""
    from trainfit.torch_private import distributed as private

    @functools.wraps(original)
    def split_group(
        parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, *args: Any, **more: Any
    ) -> Any:
        if not split_ranks or not private.is_bound(distributed.group.WORLD):
            return original(parent_pg, split_ranks, timeout, *args, **more)  # raises
        of_parent = distributed.get_process_group_ranks(parent_pg)
        mine = private.outside_of_split(original)
        for split in split_ranks:
            ranks = [of_parent[number] for number in sorted(split)]
            made = distributed.new_group(ranks, timeout, group_desc=more.get("group_desc"))
            if distributed.get_rank() in ranks:
                mine = made
        return mine

    return split_group


def _init_rpc(*_: Any, **__: Any) -> None:
    """Other processes would be waited for without end: none of them is started here."""
    raise UnsupportedOperatorError(
        "torch.distributed.rpc.init_rpc",
        user_frame(),
        "not simulated",
        "only rank 0 runs, and what other processes would answer to its calls is not known; plan a "
        "script that builds and trains one process's part by itself",
    )


class Collectives:
    """Installs rank 0's process groups; takes down what a script left of them."""

    def __init__(self, engine: Engine, kernels: KernelLog, peers: Peers) -> None:
        self._engine, self._kernels, self._recorder = engine, kernels, engine.recorder
        self._peers = peers
        self._hook: Any = None
        self._ranks: int | None = None
        self._sharing = 1
        self._installed = False

    def install(self, patches: PatchSet) -> None:
        """Do nothing where PyTorch was built without ``torch.distributed``."""
        if not distributed.is_available():
            return
        from trainfit.torch_private import distributed as private

        self._installed, self._hook = True, sys.excepthook
        Communication.current = Communication(self._engine, self._kernels, self._peers)
        module = distributed.distributed_c10d
        for owner in (distributed, module):
            for name in ("ProcessGroupNCCL", *private.LATER_GROUPS_OF_NCCL):
                patches.set(owner, name, ProcessGroupNCCL)
            patches.set(owner, "is_nccl_available", lambda: True)
            if GLOO:
                patches.set(owner, "ProcessGroupGloo", ProcessGroupGloo)
        patches.set(*private.NCCL_VERSION, lambda: _NCCL_VERSION)
        patches.set(*private.NCCL_VERSION_SUFFIX, lambda: b"")
        patches.set(*private.NCCL_AVAILABLE, True)
        patches.set(*private.SPLIT_SOURCE, lambda *_: None)
        patches.set(module, "default_pg_nccl_timeout", module.default_pg_nccl_timeout or _TIMEOUT)
        patches.set(module, "rendezvous", _rendezvous)
        reducer = distributed.Reducer
        rebuild = private.REBUILD_BUCKETS.now
        patches.set(distributed, "Reducer", self._of_gradients(reducer))
        patches.set(distributed, "Logger", _quiet(distributed.Logger))
        patches.set(*private.REBUILD_BUCKETS, self._of_gradients(rebuild))
        StartedRanks(
            self._peers.rank, require_gpus, trained=lambda: self._recorder.step > 0
        ).install(patches)
        of_rank = _objects_of_rank(module.broadcast_object_list)
        sends = {name: as_objects(getattr(module, name)) for name in _SEND_OBJECTS}
        sends |= {name: _objects_of_all(sends[name]) for name in _GATHER_OBJECTS}
        for name, function in (sends | {"broadcast_object_list": as_objects(of_rank)}).items():
            for owner in (distributed, module):
                patches.set(owner, name, function)
        for owner in (distributed, module, device_mesh):
            if hasattr(owner, "split_group"):  # since PyTorch 2.6
                patches.hook(owner, "split_group", _by_new_groups)
        _install_dtensor(patches)
        _install_join(patches, self._peers)
        sharing.install(patches)
        mpi.install(patches)
        stores.install(patches)
        patches.when_imported(_RPC, lambda rpc: patches.set(rpc, "init_rpc", _init_rpc))
        checkpoints.install(patches)
        watch_outputs(patches)
        watch_buckets(patches, self._recorder)
        watch_whole_gradients(patches, self._recorder)
        patches.set(*private.SET_SEQUENCE_NUMBER, lambda group: None)
        # Nobody else comes to it.
        patches.set(*private.STORE_BARRIER, lambda *_, **__: None)

    @property
    def ranks(self) -> int | None:
        """Processes of the largest group so far; ``None``: there was none."""
        return self._ranks if Communication.current is None else Communication.current.ranks

    @property
    def sharing(self) -> int:
        """How many processes work on the same samples together."""
        return self._sharing if Communication.current is None else Communication.current.sharing

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
        self._ranks, self._sharing = self.ranks, self.sharing
        if distributed.is_initialized():
            distributed.destroy_process_group()
        Communication.current = None
        sys.excepthook = self._hook


def _install_join(patches: PatchSet, peers: Peers) -> None:
    """Tell that a rank may have fewer batches than others, and where they are over."""
    from torch.distributed.algorithms.join import Join

    from trainfit.torch_private import distributed as private

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __exit__(join: Any, kind: Any, *raised: Any) -> Any:
            if kind is None and (ranks := private.ranks_of_join(join)):
                peers.met(LEAVES, ranks, 0)
            return original(join, kind, *raised)

        return __exit__

    def enters(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __enter__(join: Any) -> Any:
            peers.met(JOINS, (peers.rank,), 0)
            return original(join)

        return __enter__

    patches.hook(Join, "__enter__", enters)
    patches.hook(Join, "__exit__", hook)


def _install_dtensor(patches: PatchSet) -> None:
    """A DTensor is where its local tensor is; C++ says "meta" of both."""
    module = sys.modules.get("torch.distributed.tensor")  # optimizers import it
    if module is None:
        return
    from trainfit.torch_private import distributed as private

    shapes = private.shapes_of_dtensors()
    original = shapes.now

    def from_fake_tensors(propagator: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        # PyTorch's own way fails for uniform_() where it is built without CUDA.
        written = private.shape_of_written(called)
        if written is not None:
            return written
        with private.without_modes():
            return original(propagator, called, *args, **kwargs)

    patches.set(*shapes, from_fake_tensors)
    dtensor = module.DTensor
    for name in ("device", "is_cuda", "is_meta", "is_cpu"):
        patches.set(dtensor, name, property(_of_local(name)))


def _of_local(name: str) -> Callable[[Any], Any]:
    inherited = getattr(torch.Tensor, name)

    def get(tensor: Any) -> Any:
        local = local_part(tensor)
        return (
            getattr(local, name) if isinstance(local, DeviceTensor) else inherited.__get__(tensor)
        )

    return get
