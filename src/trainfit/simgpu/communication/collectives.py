"""Collective operators of ``torch.distributed`` on the simulated device.

One process of the job runs here, rank 0 mostly, and the others are taken to hold what it holds:
what they would send is what it has, so a value that is known stays known, and is what equal ranks
would make of it. Sends, receives and broadcasts go by what really comes from ranks simulated with
it. A collective of several ranks is one kernel of NCCL's. As ProcessGroupNCCL has it, one that the
script waits for by a handle runs on a stream of the group's own, behind what was launched before;
others run on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from trainfit.results.gpus import Kernel
from trainfit.results.runs.communication import EQUAL
from trainfit.results.runs.recording import gpu_of, stream_on
from trainfit.simgpu.communication.peers import Peers, gpu_in, ranks_per_machine
from trainfit.simgpu.communication.refusals import refuse
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import EVERYWHERE, handles
from trainfit.simgpu.device.tensor import DeviceTensor, SimulatedTensor, plain
from trainfit.simgpu.device.values import worth_keeping
from trainfit.simgpu.operators.kernel_rules import dtype_of
from trainfit.simgpu.operators.launch_log import KernelLog
from trainfit.torch_private.autograd import graph_task_id
from trainfit.torch_private.operators import no_dispatch, schema

#: PyTorch hands out streams 1 to 64 from its pools; groups have theirs behind them.
_FIRST_STREAM: Final = 65
#: Steps for which handles that nobody has waited for are kept: C++ may wait for one, and holds
#: nothing of its Python side. A collective is over after that, and NCCL lets its tensors go.
_STEPS_KEPT: Final = 2


class Communication:
    """Launches the collectives of a simulation."""

    #: The simulation's; there is one at a time.
    current: Communication | None = None

    def __init__(self, engine: Engine, kernels: KernelLog, peers: Peers) -> None:
        self._engine, self._kernels = engine, kernels
        self.gpu, self.peers = engine.gpu, peers
        #: Processes of the largest group so far; ``None``: there was none.
        self.ranks: int | None = None
        #: Of those, how many work on the same samples together (tensor, context parallelism), and
        #: the sets of ranks that do so.
        self.sharing = 1
        self.sharers: list[frozenset[int]] = []
        self._streams: dict[str, int] = {}
        #: Those that nobody has waited for, by their number, with the step that each is of.
        self._handles: dict[int, tuple[int, Any]] = {}
        #: By the memory of a functional collective's result.
        self._awaited: dict[int, tuple[int, int]] = {}

    def launch(
        self,
        kind: str,
        group: Any,
        tensors: Sequence[Any],
        *,
        asynchronous: bool,
        peer: tuple[str, int] | None = None,
        arrives: Callable[[], None] | None = None,
    ) -> Any:
        """A collective of the bytes of ``tensors``; returns the handle that C++ gets. ``peer``:
        "send" to a rank, or "receive" from it. ``arrives`` is called when the script waits."""
        done = self._launch(kind, group, tensors, asynchronous=asynchronous, peer=peer)
        return self._handle(tensors, done, arrives)

    def _launch(
        self,
        kind: str,
        group: Any,
        tensors: Sequence[Any],
        *,
        asynchronous: bool,
        peer: tuple[str, int] | None = None,
    ) -> tuple[int, int] | None:
        engine, ranks = self._engine, group.size()
        nbytes = bytes_of(tensors)
        on_device = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        if ranks == 1 or not nbytes or not on_device:  # by gloo, it costs the GPU nothing
            return None
        engine.use_library("nccl")
        first = next(tensor for tensor in tensors if isinstance(tensor, DeviceTensor))
        dtype, machines = dtype_of(plain(first)), self._machines_of(group)
        written = nbytes if peer is not None and peer[0] == "receive" else 0
        depth = 0 if peer is None else 1 + peer[1]
        kernel = Kernel(kind, dtype, 0, nbytes, written, ranks, machines, depth)
        if not asynchronous:
            self._kernels.kernel(kernel)
            return None
        current = engine.memory.stream
        own = stream_on(gpu_of(current), _FIRST_STREAM + len(self._streams))
        stream = self._streams.setdefault(group.group_name, own)
        self._kernels.stream_waits(stream, self._kernels.event(current), current)
        self._kernels.kernel(kernel, stream)
        return self._kernels.event(stream), stream

    def launch_functional(self, kind: str, group: Any, tensors: Sequence[Any]) -> Any:
        """Launch a functional collective; returns what to wait for (``None``: nothing)."""
        return self._launch(kind, group, tensors, asynchronous=True)

    def await_later(self, tensor: Any, done: tuple[int, int] | None) -> None:
        """``wait_tensor`` of this tensor waits for that."""
        if done is not None and isinstance(tensor, DeviceTensor):
            self._awaited[id(plain(tensor)._life)] = done

    def wait_for(self, tensor: Any) -> None:
        """The current stream waits for what a functional collective makes, if it does not yet."""
        if isinstance(tensor, DeviceTensor):
            done = self._awaited.pop(id(plain(tensor)._life), None)
            if done is not None:
                self.waits(*done)

    def assume(self, text: str) -> None:
        """Note an assumption that the result has to state."""
        self._engine.assume(text)

    def _machines_of(self, group: Any) -> int:
        """How many machines the ranks of a group are on."""
        if self.gpu.machines == 1:
            return 1
        each = ranks_per_machine(self.gpu.count)
        return len({rank // each for rank in ranks_of(group)})

    def waits(self, event: int, stream: int) -> None:
        """The current stream waits for a collective."""
        self._kernels.stream_waits(self._engine.memory.stream, event, stream)

    def host_waits(self) -> None:
        """The script's process waits for what was launched."""
        self._engine.wait_for_device("all")

    def _handle(
        self,
        tensors: Sequence[Any],
        done: tuple[int, int] | None,
        arrives: Callable[[], None] | None,
    ) -> Any:
        handle = _handle_class()(tensors, done, self, arrives)
        step = self._engine.recorder.step
        while self._handles and next(iter(self._handles.values()))[0] <= step - _STEPS_KEPT:
            del self._handles[next(iter(self._handles))]
        self._handles[id(handle)] = step, handle
        return handle.boxed()

    def release(self, handle: Any) -> None:
        """Nobody waits for it any more but who holds it."""
        self._handles.pop(id(handle), None)


def ranks_of(group: Any) -> list[int]:
    """The ranks of a group, by their numbers in the job."""
    try:
        ranks: list[int] = torch.distributed.get_process_group_ranks(group)
    except (KeyError, ValueError):  # one that PyTorch keeps no list of
        return list(range(group.size()))
    return ranks


def bytes_of(tensors: Sequence[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_classes: list[type] = []


def _handle_class() -> type:
    """The class of handles; a PyTorch without ``torch.distributed`` has no base for it."""
    from trainfit.torch_private import distributed as private

    if not _classes:

        class Handle(private.Work):  # type: ignore[misc]
            """What a collective returns to wait for. Its tensors live until then."""

            def __init__(
                self,
                tensors: Sequence[Any],
                done: tuple[int, int] | None,
                owner: Communication,
                arrives: Callable[[], None] | None,
            ) -> None:
                super().__init__()
                self._done, self._owner, self._arrives = done, owner, arrives
                self._future: Any = torch.futures.Future()
                self._future.set_result(list(tensors))

            def wait(self, timeout: Any = None) -> bool:
                self._owner.release(self)
                done, self._done = self._done, None
                arrives, self._arrives = self._arrives, None
                if arrives is not None:
                    arrives()
                if done is not None:
                    self._owner.waits(*done)
                return True

            def block_current_stream(self) -> None:
                self.wait()

            def synchronize(self) -> None:
                self.wait()

            def result(self) -> list[Any]:
                return list(self._future.value())

            def get_future(self) -> Any:
                # DDP's reducer waits for its futures in C++, at the end of the backward pass.
                if self._done is not None and graph_task_id() != -1:
                    private.queue_callback(self.wait)
                self._owner.release(self)
                return self._future

            def is_completed(self) -> bool:
                return True

            def is_success(self) -> bool:
                return True

        _classes.append(Handle)
    return _classes[0]


# -- what the tensors hold ------------------------------------------------------------------------

#: What equal ranks make of a value: by the reduction's name, of the value and their number.
_REDUCED: Final[dict[str, Callable[[Any, int], Any]]] = {
    "SUM": lambda value, ranks: value * ranks,
    "PRODUCT": lambda value, ranks: value**ranks,
    "BXOR": lambda value, ranks: value * (ranks % 2),
    **dict.fromkeys(("AVG", "MIN", "MAX", "BAND", "BOR"), lambda value, ranks: value),
}


def content_of(engine: Engine, tensor: Any) -> torch.Tensor | None:
    return engine.values.read(plain(tensor)) if isinstance(tensor, DeviceTensor) else tensor


def give(engine: Engine, target: Any, content: torch.Tensor | None) -> None:
    """``target`` holds ``content`` now (``None``: nobody knows what)."""
    if not isinstance(target, DeviceTensor):
        if content is not None:
            with no_dispatch():
                target.copy_(content)
        return
    target = plain(target)
    life, fits = target._life, content is not None and content.numel() == target.numel()
    if not fits or content is None or not worth_keeping(target._meta):
        engine.values.forget(life)
        return
    with no_dispatch():
        content = content.detach().reshape(target._spec.size).to(target._spec.dtype)
        whole = target.numel() * target._spec.dtype.itemsize == life.nbytes
        if whole:
            engine.values.write(target, content)
        elif life.value is not None and life.value.dtype == target._spec.dtype:
            spec = target._spec
            life.value.as_strided(spec.size, spec.stride, spec.offset).copy_(content)
        else:
            engine.values.forget(life)


def reduce_to(engine: Engine, target: Any, source: Any, operation: str, ranks: int) -> None:
    """``target`` is the reduction of what all ranks have in ``source``."""
    rule, known = _REDUCED.get(operation), content_of(engine, source)
    if operation == "SUM" and (placed := _in_places(known, ranks)) is not None:
        give(engine, target, placed)
        return
    if known is not None and not operation:  # PyTorch 2.8 does not tell: of zeros all make zeros
        with no_dispatch():
            rule = None if known.any() else lambda value, _: value
    if known is not None and rule is not None:
        with no_dispatch():
            give(engine, target, rule(known, ranks))
        return
    fill = plain(source)._life.fill if isinstance(source, DeviceTensor) else None
    give(engine, target, None)
    if fill is not None and rule is not None and isinstance(target, DeviceTensor):
        plain(target)._life.fill = rule(fill, ranks)


def _in_places(known: torch.Tensor | None, ranks: int) -> torch.Tensor | None:
    """Bytes of which each rank writes its own part, which their sum brings together (Fairseq's
    ``all_gather_list``, of pickled objects); ``None``: it is no such sum."""
    if known is None or known.dtype is not torch.uint8 or not known.numel():
        return None
    if ranks < 2 or known.numel() % ranks:
        return None
    with no_dispatch():
        parts = known.reshape(ranks, -1)
        written = parts.any(1).bool()
        if int(written.sum()) != 1:
            return None
        return parts[written].expand(ranks, -1).reshape(known.shape).contiguous()


def _copies(engine: Engine, targets: Sequence[Any], source: Any) -> None:
    """Each of ``targets`` gets what a rank has in ``source``."""
    known = content_of(engine, source)
    for target in targets:
        if not _is_same(target, source):
            give(engine, target, known)


def _is_same(target: Any, source: Any) -> bool:
    """Are they the same memory?"""
    if type(target) is SimulatedTensor and type(source) is SimulatedTensor:
        return target._life is source._life and target._spec.offset == source._spec.offset
    return target is source


def copy_of(target: Any, source: Any) -> None:
    """A copy on the device, as NCCL makes it where a rank is alone."""
    if _is_same(target, source):
        return
    if target.numel() == source.numel():
        source = source.reshape(target.shape)
    with torch.no_grad():
        target.copy_(source.expand_as(target))


def chunk_of(known: torch.Tensor | None, number: int, ranks: int) -> torch.Tensor | None:
    """The part of rank ``number`` of a tensor along its first dimension."""
    if known is None or not known.numel() or known.numel() % ranks:
        return None
    with no_dispatch():
        return known.reshape(ranks, -1)[number]


# -- operators ------------------------------------------------------------------------------------


def _flat(value: Any) -> list[Any]:
    """The tensors of a tensor, or of nested lists of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _flat(each)]


class _CollectiveCall:
    """One call of an operator ``c10d::…``: its arguments by name."""

    def __init__(self, engine: Engine, func: Any, args: tuple[Any, ...]) -> None:
        from trainfit.torch_private import distributed as private

        self.engine, self.args = engine, args
        self.named = dict(
            zip((argument.name for argument in schema(func).arguments), args, strict=False)
        )
        self.group = private.group_of(self.named["process_group"])
        self.ranks: int = self.group.size()
        self.operation = private.reduction_name(self.named.get("reduce_op"))


#: Of an operator: the kind of its kernel, the tensors whose bytes it moves, and what it does to
#: what they hold.
_Rule = tuple[str, Callable[[_CollectiveCall], list[Any]], Callable[[_CollectiveCall], None]]


def _all_reduce(call: _CollectiveCall) -> None:
    for each in _flat(call.args[0]):
        reduce_to(call.engine, each, each, call.operation, call.ranks)


def _reduce_to_root(call: _CollectiveCall) -> None:
    if call.named["root_rank"] == call.group.rank():
        _all_reduce(call)


def _all_gather(call: _CollectiveCall) -> None:
    """Lists of a rank's tensors each, or tensors that hold those of all ranks one after another."""
    for target, source in _pairs(call.args[0], call.args[1]):
        if isinstance(target, torch.Tensor):
            known = content_of(call.engine, source)
            if known is not None:
                with no_dispatch():
                    known = known.reshape(-1).repeat(call.ranks)
            give(call.engine, target, known)
        else:
            _copies(call.engine, target, source)


def _all_gather_lists(call: _CollectiveCall) -> None:
    """Give each rank's list all tensors that are gathered."""
    for of_rank in call.args[0]:
        for target, source in _pairs(of_rank, call.args[1]):
            _copies(call.engine, [target], source)


def _reduce_scatter(call: _CollectiveCall) -> None:
    rank = call.group.rank()
    for target, source in _pairs(call.args[0], call.args[1]):
        whole = isinstance(source, torch.Tensor)
        known = content_of(call.engine, source if whole else source[rank])
        if whole:
            known = chunk_of(known, rank, call.ranks)
        rule = _REDUCED.get(call.operation)
        with no_dispatch():
            made = None if known is None or rule is None else rule(known, call.ranks)
        give(call.engine, target, made)


def _scatter(call: _CollectiveCall) -> None:
    mine = call.args[1][0] if call.args[1] else []
    if mine:
        _copies(call.engine, _flat(call.args[0]), mine[call.group.rank()])
    else:
        _forget_first(call)


def _all_to_all(call: _CollectiveCall) -> None:
    """Every other rank sends what this one would send to itself."""
    targets, sources = call.args[0], call.args[1]
    rank = call.group.rank()
    if isinstance(targets, torch.Tensor):
        even = not call.named.get("output_split_sizes") and not call.named.get("input_split_sizes")
        known = chunk_of(content_of(call.engine, sources), rank, call.ranks) if even else None
        if known is not None:
            with no_dispatch():
                known = known.repeat(call.ranks)
        give(call.engine, targets, known)
        return
    for target in targets:
        same = target.shape == sources[rank].shape
        give(call.engine, target, content_of(call.engine, sources[rank]) if same else None)


def _forget_first(call: _CollectiveCall) -> None:
    for each in _flat(call.args[0]):
        give(call.engine, each, None)


def _nothing(call: _CollectiveCall) -> None:
    return None


def _pairs(targets: Any, sources: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(targets, torch.Tensor):
        return iter([(targets, sources)])
    return zip(targets, sources, strict=True)


def _first(call: _CollectiveCall) -> list[Any]:
    return _flat(call.args[0])


def _second(call: _CollectiveCall) -> list[Any]:
    return _flat(call.args[1])


_RULES: Final[dict[str, _Rule]] = {
    "allreduce_": ("all_reduce", _first, _all_reduce),
    "allreduce_coalesced_": ("all_reduce", _first, _all_reduce),
    "broadcast_": ("broadcast", _first, _nothing),
    "reduce_": ("reduce", _first, _reduce_to_root),
    "barrier": ("all_reduce", _first, _nothing),
    "monitored_barrier_": ("all_reduce", _first, _nothing),
    "_allgather_base_": ("all_gather", _first, _all_gather),
    "allgather_": ("all_gather", _first, _all_gather),
    "allgather_coalesced_": ("all_gather", _first, _all_gather_lists),
    "allgather_into_tensor_coalesced_": ("all_gather", _first, _all_gather),
    "_reduce_scatter_base_": ("reduce_scatter", _second, _reduce_scatter),
    "reduce_scatter_": ("reduce_scatter", _second, _reduce_scatter),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _second, _reduce_scatter),
    "gather_": ("send_receive", _first, _all_gather),
    "scatter_": ("send_receive", _second, _scatter),
    "alltoall_": ("all_to_all", _second, _all_to_all),
    "alltoall_base_": ("all_to_all", _second, _all_to_all),
    "send": ("send_receive", _first, _nothing),
    "recv_": ("send_receive", _first, _forget_first),
    "recv_any_source_": ("send_receive", _first, _forget_first),
}
#: To one rank, or from one: where the operator says which, by its place in the group.
_TO_OR_FROM: Final = {"send": ("send", "dst"), "recv_": ("receive", "src")}
#: Of these, ranks may have different bytes: of objects (their sizes differ), and where only the
#: root has the whole.
_UNEVEN: Final = ("gather_", "scatter_", "alltoall_", "alltoall_base_")
#: After these the script's process has waited for the GPU.
_BARRIERS: Final = ("barrier", "monitored_barrier_")


def _register(name: str, rule: _Rule) -> None:
    operator = getattr(torch.ops.c10d, name, None)
    if operator is None:  # other versions have others
        return
    returns = len(schema(operator.default).returns)
    kind, moved, changes = rule
    EVERYWHERE.add(operator.default)

    @handles(operator.default)
    def collective(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
        engine.record(engine.info(func))
        call, communication = _CollectiveCall(engine, func, args), Communication.current
        assert communication is not None
        refuse(name, call.group, call.named, args)
        tensors = moved(call)
        if call.ranks == 1:
            _alone(call)
        asynchronous = bool(call.named.get("async_op", True)) and name not in _BARRIERS
        peer, arrives = None, None
        if call.ranks > 1:
            changes(call)
            engine.assumptions[EQUAL] = 1
            peer, arrives = _meet(call, communication.peers, name, kind, tensors)
        handle = communication.launch(
            kind, call.group, tensors, asynchronous=asynchronous, peer=peer, arrives=arrives
        )
        if name in _BARRIERS and isinstance(args[0], DeviceTensor):
            communication.host_waits()
        if not returns:
            return None
        return handle if returns == 1 else (args[0], handle)


def _meet(
    call: _CollectiveCall, peers: Peers, name: str, kind: str, tensors: Sequence[Any]
) -> tuple[tuple[str, int] | None, Callable[[], None] | None]:
    """Note what others take part in, and pass on to and from the ranks that are simulated with this
    one: the peer of a send or a receive, and what brings what is received."""
    ranks = ranks_of(call.group)
    if name in _TO_OR_FROM:
        what, argument = _TO_OR_FROM[name]
        peer = ranks[int(call.named[argument])]
        peers.met(what, ranks, bytes_of(tensors), peer)
        if what == "send":
            for each in tensors:
                peers.send(peer, _known(call.engine, each))
            return (what, peer), None
        return (what, peer), _arrival(call.engine, peers, peer, tensors)
    if name == "recv_any_source_":
        peers.met("receive", ranks, 0)
        return None, None
    uneven = name in _UNEVEN or any(each.dtype is torch.uint8 for each in tensors)
    if name in _BARRIERS:  # NCCL chooses a GPU for it
        peers.met("barrier", ranks, 0)
    else:
        nbytes = 0 if uneven else bytes_of(tensors)
        peers.met(kind, ranks, nbytes, gpu=gpu_in(call.group, tensors))
    if name == "broadcast_" and peers.company:
        root = ranks[int(call.named["root_rank"])]
        if root != peers.rank:
            return None, _arrival(call.engine, peers, root, tensors)
        for each in (rank for rank in ranks if rank != root):
            for tensor in tensors:
                peers.send(each, _known(call.engine, tensor))
    return None, None


def _known(engine: Engine, tensor: Any) -> torch.Tensor | None:
    """The tensor's content, where it is small enough to be followed on the device."""
    return content_of(engine, tensor) if worth_keeping(_geometry(tensor)) else None


def _geometry(tensor: Any) -> torch.Tensor:
    return plain(tensor)._meta if isinstance(tensor, DeviceTensor) else tensor


def _arrival(
    engine: Engine, peers: Peers, source: int, tensors: Sequence[Any]
) -> Callable[[], None] | None:
    """Gives ``tensors`` what comes from a rank that is simulated with this one."""
    numbers = [peers.expect(source) for _ in tensors]

    def arrive() -> None:
        for number, tensor in zip(numbers, tensors, strict=True):
            if number is not None and worth_keeping(_geometry(tensor)):
                give(engine, tensor, peers.receive(source, number))

    return None if None in numbers else arrive


def _alone(call: _CollectiveCall) -> None:
    """What a collective does in a group of one: copies, where it has another place for its result
    (``ncclLaunchOneRank``)."""
    if len(call.args) > 1 and isinstance(call.args[1], (torch.Tensor, list, tuple)):
        for target, source in zip(_flat(call.args[0]), _flat(call.args[1]), strict=False):
            copy_of(target, source)


for _name, _rule in _RULES.items():
    _register(_name, _rule)
