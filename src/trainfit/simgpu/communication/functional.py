"""Functional collectives on the simulated device: DTensor calls them, as in tensor parallelism.

As ``torch/csrc/distributed/c10d/Functional.cpp`` has them: each result is new memory, made before
the collective begins on the stream of its group, and ``wait_tensor`` lets the current stream wait
for it. Those in place (``all_reduce_``) write to their input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from trainfit.results.runs.communication import EQUAL
from trainfit.simgpu.communication.collectives import (
    Communication,
    bytes_of,
    chunk_of,
    content_of,
    copy_of,
    give,
    ranks_of,
    reduce_to,
)
from trainfit.simgpu.communication.peers import gpu_in
from trainfit.simgpu.communication.refusals import require_backend
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import EVERYWHERE, handles, handles_named
from trainfit.simgpu.device.tensor import DeviceTensor
from trainfit.torch_private.operators import no_dispatch, schema

_ops: Any = torch.ops


class _FunctionalCall:
    """One call: its tensors, its group and its reduction."""

    def __init__(self, engine: Engine, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        from trainfit.torch_private import distributed as private

        names = (argument.name for argument in schema(func).arguments)
        self.named: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        self.engine = engine
        self.group = private.group_named(self.named["group_name"])
        self.ranks: int = self.group.size()
        given = args[0]
        self.listed = isinstance(given, (list, tuple))
        self.inputs: list[torch.Tensor] = list(given) if self.listed else [given]
        self.operation = str(self.named.get("reduce_op") or "").upper()


def _same(call: _FunctionalCall, source: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(source, memory_format=torch.contiguous_format)


def _gathered(call: _FunctionalCall, source: torch.Tensor) -> torch.Tensor:
    return source.new_empty((source.shape[0] * call.ranks, *source.shape[1:]))


def _scattered(call: _FunctionalCall, source: torch.Tensor) -> torch.Tensor:
    return source.new_empty((source.shape[0] // call.ranks, *source.shape[1:]))


def _exchanged(call: _FunctionalCall, source: torch.Tensor) -> torch.Tensor:
    return source.new_empty((sum(call.named["output_split_sizes"]), *source.shape[1:]))


def _all_reduce(call: _FunctionalCall, target: torch.Tensor, source: torch.Tensor) -> None:
    reduce_to(call.engine, target, source, call.operation, call.ranks)


def _all_gather(call: _FunctionalCall, target: torch.Tensor, source: torch.Tensor) -> None:
    known = content_of(call.engine, source)
    with no_dispatch():
        whole = None if known is None else known.reshape(-1).repeat(call.ranks)
    give(call.engine, target, whole)


def _reduce_scatter(call: _FunctionalCall, target: torch.Tensor, source: torch.Tensor) -> None:
    part = chunk_of(content_of(call.engine, source), call.group.rank(), call.ranks)
    give(call.engine, target, part)
    if part is not None:
        reduce_to(call.engine, target, target, call.operation, call.ranks)


def _all_to_all(call: _FunctionalCall, target: torch.Tensor, source: torch.Tensor) -> None:
    """Every other rank sends what this one would send to itself."""
    splits = {*call.named["output_split_sizes"], *call.named["input_split_sizes"]}
    part = None
    if len(splits) == 1:
        part = chunk_of(content_of(call.engine, source), call.group.rank(), call.ranks)
    with no_dispatch():
        give(call.engine, target, None if part is None else part.repeat(call.ranks))


def _broadcast(call: _FunctionalCall, target: torch.Tensor, source: torch.Tensor) -> None:
    give(call.engine, target, content_of(call.engine, source))


#: The kind of its kernel; what it makes; what that holds; whether the kernel moves the bytes of
#: what it is given (else of what it makes).
_Functional = tuple[
    str,
    Callable[[_FunctionalCall, torch.Tensor], torch.Tensor],
    Callable[[_FunctionalCall, torch.Tensor, torch.Tensor], None],
    bool,
]
_RULES: Final[dict[str, _Functional]] = {
    "all_reduce": ("all_reduce", _same, _all_reduce, True),
    "all_reduce_coalesced": ("all_reduce", _same, _all_reduce, True),
    "all_gather_into_tensor": ("all_gather", _gathered, _all_gather, False),
    "all_gather_into_tensor_coalesced": ("all_gather", _gathered, _all_gather, False),
    "reduce_scatter_tensor": ("reduce_scatter", _scattered, _reduce_scatter, True),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _scattered, _reduce_scatter, True),
    "all_to_all_single": ("all_to_all", _exchanged, _all_to_all, True),
    "broadcast": ("broadcast", _same, _broadcast, True),
}
#: They copy their input, and work on the copy.
_ON_COPIES: Final = ("all_reduce", "broadcast")


def _register(name: str, overload: str, rule: _Functional) -> None:
    packet = getattr(_ops._c10d_functional, overload, None)
    if packet is None:  # other versions have others
        return
    kind, makes, changes, moves_inputs = rule
    copies, in_place = name.startswith(_ON_COPIES), overload.endswith("_")
    EVERYWHERE.add(packet.default)

    @handles(packet.default)
    def functional(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
        engine.record(engine.info(func))
        call, communication = _FunctionalCall(engine, func, args, kwargs), Communication.current
        assert communication is not None
        require_backend(call.group, call.inputs[0])
        sources = [tensor.contiguous() for tensor in call.inputs]
        if in_place:
            made = call.inputs
        elif "out" in call.named:
            made = [call.named["out"]]
        elif copies:
            made = [each.clone(memory_format=torch.contiguous_format) for each in sources]
        else:
            made = [makes(call, each) for each in sources]
        moved = sources if moves_inputs else made
        if call.ranks > 1:
            nbytes = 0 if kind == "all_to_all" else bytes_of(moved)
            gpu = gpu_in(call.group, moved)
            communication.peers.met(kind, ranks_of(call.group), nbytes, gpu=gpu)
        handle = communication.launch_functional(kind, call.group, moved)
        for target, source in zip(made, sources, strict=True):
            if call.ranks > 1:
                changes(call, target, source)
                engine.assumptions[EQUAL] = 1
            elif not copies and not in_place:
                copy_of(target, source)
            communication.await_later(target, handle)
        return list(made) if call.listed else made[0]


for _name, _rule in _RULES.items():
    for _overload in (_name, f"{_name}_", f"{_name}_out"):
        _register(_name, _overload, _rule)


@handles(_ops._c10d_functional.wait_tensor.default)
def wait_tensor(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """The tensor itself, behind the collective that gives it."""
    engine.record(engine.info(func))
    communication = Communication.current
    if communication is not None:
        communication.wait_for(args[0])
    return args[0]


EVERYWHERE.add(_ops._c10d_functional.wait_tensor.default)


@handles_named("_c10d_functional::_wrap_tensor_autograd")
def wrapped(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor that waits when it is used first."""
    from trainfit.torch_private import distributed as private

    engine.record(engine.info(func))
    return private.waiting_tensor(args[0])


def _shard_dim_exchange(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """An all-to-all that shards another dimension (``distributed/tensor``'s C++)."""
    source, gathered, sharded, name = args
    from trainfit.torch_private import distributed as private

    group, communication = private.group_named(name), Communication.current
    assert communication is not None
    engine.record(engine.info(func))
    ranks = group.size()
    sizes: Sequence[int] = source.shape
    split = [*sizes[:sharded], ranks, sizes[sharded] // ranks, *sizes[sharded + 1 :]]
    sent = source.reshape(split).movedim(sharded, 0).contiguous()
    received = torch.empty_like(sent)
    handle = communication.launch_functional("all_to_all", group, [sent])
    communication.await_later(received, handle)
    communication.wait_for(received)
    if isinstance(received, DeviceTensor):
        give(engine, received, None)
    engine.assumptions[EQUAL] = 1
    return received.movedim(0, gathered).contiguous().flatten(gathered, gathered + 1)


if (_packet := getattr(_ops._dtensor, "shard_dim_alltoall", None)) is not None:
    handles(_packet.default)(_shard_dim_exchange)


# ---
# Operators of ``SyncBatchNorm``, which PyTorch has for GPUs alone: without shapes of their own.
#
# Statistics are of the dtype that CUDA adds up in: float32 for half precisions.


aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def _statistics(given: torch.Tensor) -> torch.Tensor:
    """A value for each channel."""
    dtype = torch.float32 if given.dtype in _HALVES else given.dtype
    return given.new_empty(given.shape[1], dtype=dtype)


@handles(
    aten.batch_norm_stats.default,
    aten.batch_norm_gather_stats_with_counts.default,
    aten.batch_norm_update_stats.default,
)
def statistics(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Mean, and one over the standard deviation; or the running ones."""
    engine.record(engine.info(func))
    return _statistics(args[0]), _statistics(args[0])


@handles(aten.batch_norm_elemt.default)
def normalized(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of the forward pass."""
    engine.record(engine.info(func))
    return torch.empty_like(args[0])


@handles(aten.batch_norm_backward_reduce.default)
def sums(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Sums of gradients over each channel, and the gradients of weight and bias that are asked
    for."""
    engine.record(engine.info(func))
    _, given, _, _, weight, _, of_weight, of_bias = args
    wanted = [weight is not None and each for each in (of_weight, of_bias)]
    gradients = (torch.empty_like(weight) if each else None for each in wanted)
    return _statistics(given), _statistics(given), *gradients


@handles(aten.batch_norm_backward_elemt.default)
def input_gradient(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of the input."""
    engine.record(engine.info(func))
    return torch.empty_like(args[1])
