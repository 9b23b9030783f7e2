"""Runs PyTorch operators on the simulated device.

Every operator that touches a simulated tensor arrives in :meth:`Engine.run`, below
autograd and autocast. Its result geometry comes from PyTorch's meta kernels and is cached
by argument geometry; its result storages are allocated in :class:`DeviceMemory`; the
memory that the GPU's kernel would need in addition comes from
:mod:`trainfit.simgpu.operators.scratch`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.graph import increment_version

from trainfit.hardware import GpuSpec
from trainfit.results.runs.steps import WaitKind
from trainfit.simgpu import constructors
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.allocator.workspaces import workspace_bytes
from trainfit.simgpu.device import recorder
from trainfit.simgpu.device.conditions import Rounds
from trainfit.simgpu.device.device_memory import DeviceMemory
from trainfit.simgpu.device.errors import DeviceMismatch, UnsupportedOperatorError, out_of_memory
from trainfit.simgpu.device.geometry import (
    COPIES,
    Sequence,
    aliases,
    describe,
    geometry_key,
    infer,
    meta_arguments,
    meta_keywords,
    with_subclasses,
    without_subclasses,
)
from trainfit.simgpu.device.host_fills import HostFills
from trainfit.simgpu.device.ownership import ModuleTracker
from trainfit.simgpu.device.recorder import Accounting
from trainfit.simgpu.device.registry import MIXED_DEVICE, Hooks, OperatorInfo, are_refused
from trainfit.simgpu.device.tensor import (
    GPUS,
    META,
    DeviceTensor,
    SimulatedTensor,
    Spec,
    gpu_of,
    plain,
    several_gpus,
    spec_of,
    view_of,
    wrap,
)
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.device.values import PARTLY_KNOWN, Values
from trainfit.torch_private import operators as private
from trainfit.torch_private.autograd import graph_task_id
from trainfit.torch_private.operators import (
    COMPOSITE,
    KeepKeys,
    NoTorchDispatch,
    NoTorchFunction,
    call_for,
    include_meta,
    no_dispatch,
    set_data,
)

# ---
# On which GPU of a process an operator runs, and copies from one to another.


aten = torch.ops.aten

#: Operators that copy from a tensor of another device.
_COPIES: Final = {private.to_copy.default, aten.copy_.default}
#: Lists of tensors of several GPUs go their slow path, tensor by tensor.
_OF_LISTS: Final = "aten::_foreach_"
_TO_DEVICE: Final = aten.to.device


class OperatorGpus(NamedTuple):
    """The GPU that an operator runs on, and the one that it copies from (``None``: it does not, or
    that is the same)."""

    gpu: int
    source: int | None = None


class _RunningCall(threading.local):
    """The function of PyTorch that a thread runs: ``gpu`` is that of its arguments (``None``: none
    or several of them are)."""

    gpu: int | None = None


class Placing:
    """Finds the place of an operator by its arguments, as PyTorch's device guards do."""

    def __init__(self) -> None:
        self._latest = 0
        self.call = _RunningCall()

    def of(self, func: Any, args: Any, kwargs: dict[str, Any], current: int) -> OperatorGpus:
        """The GPU on which ``func`` runs while ``current`` is the current one.

        Raises :class:`DeviceMismatch` for operands of different GPUs.
        """
        numbers = list(dict.fromkeys(_gpus((args, tuple(kwargs.values())))))
        device = args[1] if func is _TO_DEVICE and len(args) > 1 else kwargs.get("device")
        if isinstance(device, torch.device) and device.type == "cuda":
            gpu = current if device.index is None else device.index
            return OperatorGpus(gpu, next((number for number in numbers if number != gpu), None))
        if numbers:
            self._latest = numbers[0]
            if len(numbers) == 1:
                return OperatorGpus(numbers[0])
            if func in _COPIES:
                return OperatorGpus(numbers[0], numbers[1])
            if func not in MIXED_DEVICE and not func.name().startswith(_OF_LISTS):
                raise DeviceMismatch(GPUS[numbers[1]], func, numbers[0])
            return OperatorGpus(numbers[0])
        # Autograd makes a formula's tensors on the GPU of the gradients that it goes through.
        if graph_task_id() != -1:
            return OperatorGpus(self._latest)
        # C++ makes a composite's tensors with the options of its arguments, which are "meta" to it.
        is_cpps = isinstance(device, torch.device) and device.type == "meta"
        return OperatorGpus(self.call.gpu if is_cpps and self.call.gpu is not None else current)


def _gpus(value: Any) -> Iterator[int]:
    """The GPUs of the tensors among arguments, in their order."""
    kind = type(value)
    if kind is SimulatedTensor:
        yield value._life.gpu
    elif kind is tuple or kind is list:
        for each in value:
            yield from _gpus(each)


class _Move(torch.autograd.Function):
    """PyTorch's own gradient of a copy asks C++ for the device, which says "meta" of all GPUs."""

    @staticmethod
    def forward(ctx: Any, tensor: DeviceTensor, device: torch.device) -> torch.Tensor:
        ctx.came_from = GPUS[gpu_of(tensor)]
        return private.to_copy.default(tensor, device=device)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.came_from), None


def moved(tensor: DeviceTensor, device: torch.device) -> torch.Tensor:
    """A copy of ``tensor`` on another GPU, or on the host; its gradient goes back."""
    made: torch.Tensor = _Move.apply(tensor, device)  # type: ignore[no-untyped-call]
    return made


# ---
# The engine.


_empty_strided = torch.empty_strided

#: An operator of PyTorch's own loads its kernels when it first runs. From so many different
#: operators on, the library "kernels" counts as used: a process that only copies tensors does
#: not pay for it.
KERNELS_FROM = 24


class Engine(Hooks):
    """The simulated device's executor. One per simulation."""

    def __init__(self, gpu: GpuSpec, memory: DeviceMemory, modules: ModuleTracker) -> None:
        super().__init__()
        self.gpu = gpu
        self.memory = memory
        self.recorder = memory.recorder
        self.modules = modules
        self.values = Values()
        self.host_fills = HostFills()
        self.rounds = Rounds()
        #: Was the host given a number of GPU data that is not known?
        self.assumed_number = False
        #: Was the size of a result assumed, as GPU data tells it?
        self.assumed_size = False
        self.in_optimizer = 0
        self.forward_seen = False
        self.explicit_meta = 0
        #: What ``torch.set_default_tensor_type`` set, where that is a type of the device: it holds
        #: in all threads.
        self.default_type: torch.dtype | None = None
        #: Is the gradient of the loss itself being made?
        self.starting_backward = False
        #: ``target.data = value`` where one of them is simulated; classes of users add to it.
        self.replace_data: Callable[[Any, Any], None] = self.set_data
        self.assumptions: dict[str, int] = {}
        self.accounting = Accounting(self.assumptions)
        #: Is a function running that looks for bad values in its arguments?
        self.trusts_data = False
        self.library_memory: set[Any] = set()
        #: In which ``cudnn.benchmark`` timed algorithms, for each convolution whatever its input.
        self.steps_with_trials: defaultdict[Any, set[int]] = defaultdict(set)
        #: What the host waits for now; outside of operators for all that was submitted.
        self.waits_for: WaitKind = "all"
        #: Called with what the host is about to copy from pageable memory, which it waits for.
        self.on_upload: Callable[[torch.Tensor], None] = lambda _: None
        #: Bytes of the operands that the current operator made contiguous for its kernels.
        self.copied: list[tuple[str, int]] = []
        #: The GPU that the current operator copies from, where that is another than it runs on.
        self.source_gpu: int | None = None
        self.placing = Placing()
        #: Libraries whose kernels ran.
        self.libraries: set[str] = set()
        self._key_of_launch: Any = None
        self._own_kernels = 0
        self._infos: dict[Any, OperatorInfo] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        self._copy_phase = False
        #: Threads of the script run their operators one after the other, each of them whole.
        self._turn = threading.RLock()

    def enter(self) -> bool:
        """The simulator runs now; did the script run before? (Then :meth:`leave` follows.)"""
        with self._turn:
            return self.on_enter()

    def leave(self) -> None:
        """The script runs again."""
        with self._turn:
            self.on_leave()

    @contextlib.contextmanager
    def held(self, limit_s: float) -> Iterator[None]:
        """No other thread runs an operator meanwhile: who reads what was recorded sees it whole,
        and has Python to itself. Nothing is held where a thread keeps its operator for ``limit_s``
        seconds."""
        has_turn = self._turn.acquire(timeout=limit_s)
        try:
            yield
        finally:
            if has_turn:
                self._turn.release()

    # -- where are we ------------------------------------------------------------------

    def phase(self) -> int:
        """The phase of the step that the current operator belongs to."""
        if self.in_optimizer:
            return recorder.OPTIMIZER
        if graph_task_id() != -1 or self.starting_backward:
            return recorder.BACKWARD
        if self._copy_phase:
            return recorder.INPUT
        return recorder.FORWARD if self.forward_seen else recorder.SETUP

    @staticmethod
    def in_backward() -> bool:
        """Does autograd run the current operator? On a GPU that is a thread of its own."""
        return bool(graph_task_id() != -1)

    def in_framework(self) -> bool:
        """Is it PyTorch, not the script, that comes to the next operator?"""
        return bool(self.in_optimizer) or self.in_backward()

    def record(self, info: OperatorInfo) -> None:
        phase = self.phase()
        self.recorder.op(info.name, phase, self.modules.current(phase == recorder.BACKWARD))

    @contextlib.contextmanager
    def copying_input(self) -> Iterator[None]:
        """Operators inside count as input, unless an optimizer or backward runs."""
        before, self._copy_phase = self._copy_phase, True
        try:
            yield
        finally:
            self._copy_phase = before

    def assume(self, text: str) -> None:
        """Note an assumption that the result has to state (counted when repeated)."""
        place = user_frame()
        text = f"{text} (at {place})" if place else text
        self.assumptions[text] = self.assumptions.get(text, 0) + 1

    def wait_for_device(self, kind: WaitKind = "value") -> None:
        """The host waits until the current stream has done what was submitted to it."""
        self.waits_for = kind
        self.memory.synchronize(self.memory.stream)
        self.waits_for = "all"

    # -- operators ---------------------------------------------------------------------

    def info(self, func: Any) -> OperatorInfo:
        info = self._infos.get(func)
        if info is None:
            info = OperatorInfo(func, self.recorder.string(str(func)))
            self._infos[func] = info
            self._own_kernels += not info.view and not info.composite
            if self._own_kernels == KERNELS_FROM:
                self.use_library("kernels")
        return info

    def use_library(self, name: str | None) -> None:
        """A kernel of the library ``name`` runs: from now on its memory is in use."""
        if name is not None and name not in self.libraries:
            self.libraries.add(name)
            self.on_library()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator whose arguments or device keyword are on the simulated GPU.

        Raises ``torch.OutOfMemoryError`` where the GPU would,
        :class:`UnsupportedOperatorError` for an operator without a fake kernel, and
        whatever PyTorch's own checks raise for wrong arguments.
        """
        entered = self.enter()
        info = self._infos.get(func) or self.info(func)
        try:
            if info.body is not None:
                # An operator that is Python may wait for other threads' operators.
                return self._run(info, func, args, kwargs)
            # In a backward pass the mode for functions is there, for the script's hooks: what the
            # engine itself asks of its tensors is not for it.
            with self._turn, NoTorchFunction():
                return self._run(info, func, args, kwargs)
        finally:
            if entered:
                self.leave()
            if several_gpus():
                self.on_done()

    def run_sparse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of which an argument is sparse; the operators on what it consists of come
        here."""
        return self.on_sparse(self, func, args, kwargs)

    def run_plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of which an argument is of a class of the user's own (`subclasses`)."""
        given: dict[int, Any] = {}
        plain_args = without_subclasses(args, given)
        plain_kwargs = {name: without_subclasses(each, given) for name, each in kwargs.items()}
        if torch.Tag.inplace_view in func.tags and type(args[0]) is not SimulatedTensor:
            return self.change_geometry(func, (args[0], *plain_args[1:]), plain_kwargs)
        return with_subclasses(self.run(func, plain_args, plain_kwargs), given)

    def _run(
        self, info: OperatorInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not several_gpus():
            return self._run_here(info, func, args, kwargs)
        place, outer = self.placing.of(func, args, kwargs, self.memory.gpu), self.source_gpu
        self.source_gpu = place.source
        try:
            if place.gpu == self.memory.gpu:
                return self._run_here(info, func, args, kwargs)
            with self.memory.on(place.gpu):
                return self._run_here(info, func, args, kwargs)
        finally:
            self.source_gpu = outer

    def _run_here(
        self, info: OperatorInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._key_of_launch = None
        if info.refusal is not None and are_refused() and (said := info.refusal(args, kwargs)):
            raise RuntimeError(said)
        try:
            if info.handler is not None:
                result = info.handler(self, func, args, kwargs)
            elif info.composite:
                result = self._decomposed(func, args, kwargs)
            elif info.body is not None:
                with self.function_mode(self), self.mode(self):
                    result = info.body(*args, **kwargs)
            else:
                result = self.generic(info, args, kwargs)
        except OutOfDeviceMemory as error:
            self.copied = []
            self.in_optimizer = 0  # a step that memory ended has no end of its own
            raise out_of_memory(error, func, args) from None
        if info.random:
            self.on_random()
        # Its arguments are known to be good now.
        if info.library is not None:
            self.use_library(self.accounting.attempt(func, info.library, self, args))
        if info.launches:
            key, self._key_of_launch = self._key_of_launch, None
            self.accounting.attempt(func, self.on_launch, info, key, args, kwargs, result)
        return result

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Autograd takes composite operators apart; inference mode leaves it out."""
        with self.mode(self):
            # PyTorch's own C++; func.decompose() prefers the compiler's Python version of it.
            return call_for(func)(COMPOSITE, *args, **kwargs)

    def generic(self, info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that needs nothing but its schema and its meta kernel."""
        self.record(info)
        if info.mutates:
            return self._mutating(info, args, kwargs)
        if info.view:
            return self._view(info, args, kwargs)
        return self._functional(info, args, kwargs)

    def _functional(self, info: OperatorInfo, args: Any, kwargs: Any) -> Any:
        key = self._key_of_launch = geometry_key(info, args, kwargs)
        result = self._results.get(key, _MISSING)
        if result is _MISSING:
            meta = infer(info.func, args, kwargs)
            if aliases(meta, self.memory.lives):
                return self.adopt(meta)
            result = describe(meta)
            self._results[key] = result
            del meta
        out = self.materialize(result) if info.maker is None else info.maker(self, result, args)
        if info.kernel is not None:
            self.accounting.attempt(info.func, info.kernel, self, args, out)
        if self.values.known(args):
            self.accounting.attempt(info.func, self.values.compute, info, args, kwargs, out)
        elif info.func in PARTLY_KNOWN:
            self.accounting.attempt(info.func, self.values.decide, info.func, args, out)
        return out

    def _view(self, info: OperatorInfo, args: Any, kwargs: Any) -> Any:
        source = args[0]
        if type(source) is SimulatedTensor:
            life = source._life
            with no_dispatch():
                meta = info.func(*meta_arguments(args), **meta_keywords(kwargs))
            if isinstance(meta, torch.Tensor):
                return wrap(meta, spec_of(meta), life)
            return type(meta)([wrap(each, spec_of(each), life) for each in meta])
        return self.adopt(infer(info.func, args, kwargs))

    def _mutating(self, info: OperatorInfo, args: Any, kwargs: Any) -> Any:
        if info.inplace_view:
            return self.change_geometry(info.func, args, kwargs)
        fresh: Any = ()
        if info.fresh:
            meta = infer(info.func, args, kwargs)
            fresh = self.adopt(meta) if len(info.returns) > 1 else (self.adopt(meta),)
        else:
            key = self._key_of_launch = geometry_key(info, args, kwargs)
            if key not in self._results:
                # Only for the checks that the operator makes; it has no new results.
                with contextlib.suppress(UnsupportedOperatorError):
                    infer(info.func, args, kwargs)
                self._results[key] = None
        if info.kernel is not None:
            self.accounting.attempt(info.func, info.kernel, self, args, fresh)
        self.accounting.attempt(info.func, self.values.mutate, info, args, kwargs)
        if info.of_lists and not torch.is_inference_mode_enabled():
            increment_version(args[0])
        if kwargs:
            self._follow_out(kwargs)
        returned = [
            fresh[i] if place is None else (kwargs if isinstance(place, str) else args)[place]
            for i, place in enumerate(info.returns)
        ]
        if not returned:
            return None
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _follow_out(self, kwargs: Any) -> None:
        """An ``out=`` tensor that its operator resized: adopt the new geometry."""
        for value in kwargs.values():
            if type(value) is SimulatedTensor and value._meta.shape != value.shape:
                shape = value._meta.shape
                value._meta = view_of(value)
                self.change_geometry(aten.resize_.default, (value, list(shape)), {})

    def move(self, tensor: DeviceTensor, device: torch.device) -> torch.Tensor:
        """A copy on another GPU or on the host, whose gradient goes back."""
        return moved(tensor, device)

    # -- geometry ----------------------------------------------------------------------

    def materialize(self, result: Any) -> Any:
        """New simulated tensors from described geometry."""
        if type(result) is Spec:
            return self.new(result)
        if type(result) is Sequence:
            return result.kind([self.materialize(each) for each in result.items])
        return result

    def new(self, spec: Spec) -> SimulatedTensor:
        """Allocate a tensor of this geometry."""
        meta = _empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=META)
        return wrap(meta, spec, self.memory.adopt(meta))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> SimulatedTensor:
        """Allocate a contiguous tensor of this shape."""
        with no_dispatch():
            meta = constructors.empty(shape, dtype=dtype, device=META)
        return self.adopt(meta)  # type: ignore[no-any-return]

    def adopt(self, meta: Any) -> Any:
        """Simulated tensors over meta tensors, allocating for storages that are new."""
        if isinstance(meta, torch.Tensor):
            if meta.layout is not torch.strided:
                raise UnsupportedOperatorError(
                    f"a tensor of layout {meta.layout}",
                    user_frame(),
                    "not simulated",
                    "only dense tensors are",
                )
            return wrap(meta, spec_of(meta), self.memory.adopt(meta))
        if isinstance(meta, (list, tuple)):
            return type(meta)([self.adopt(each) for each in meta])
        return meta

    def change_geometry(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Operators that change the sizes, strides or storage of their argument."""
        target: DeviceTensor = args[0]
        with (
            NoTorchDispatch(),
            KeepKeys(),
        ):
            include_meta(True)
            func(*args, **kwargs)
        self.refresh(target)
        return target

    def refresh(self, target: DeviceTensor) -> None:
        """Take over what C++ changed in ``target``'s geometry or storage."""
        meta = view_of(target)
        life = self.memory.adopt(meta)
        if type(target) is SimulatedTensor:
            target._meta, target._spec, target._life = meta, spec_of(meta), life
        nbytes = meta.untyped_storage().nbytes()
        if nbytes != life.nbytes:
            self.memory.resize(life, nbytes)

    def set_data(self, target: DeviceTensor, value: DeviceTensor) -> None:
        """``target.data = value`` between simulated tensors."""
        with NoTorchFunction():
            set_data(target, value)
        if type(target) is SimulatedTensor:
            value = plain(value)
            target._meta, target._spec, target._life = value._meta, value._spec, value._life

    # -- extra memory of kernels -------------------------------------------------------

    def workspace(self, *requests: tuple[str, tuple[int, ...]]) -> None:
        """Take workspaces ``(model, arguments)`` together for the time of a kernel."""
        with self.holding(*requests):
            pass

    def holding(self, *requests: tuple[str, tuple[int, ...]]) -> AbstractContextManager[None]:
        """A context with such workspaces."""
        copied = [(model, sizes[0]) for model, sizes in requests if model in COPIES and sizes[0]]
        # The passes of one operator (a convolution's gradients) hold the same copies.
        self.copied = max(self.copied, copied, key=len)
        return self.memory.held(
            [
                (workspace_bytes(model, arguments), self.recorder.string(model), arguments)
                for model, arguments in requests
            ]
        )

    def has_library_workspace(self, owner: Any) -> bool:
        """Was :meth:`library_workspace` called for this owner on the current stream?"""
        return (owner, self.memory.stream) in self.library_memory

    def library_workspace(self, model: str, arguments: tuple[int, ...], owner: Any = None) -> None:
        """Take a workspace that a library allocates once for each owner and stream, and keeps.

        Without an owner it is the process's. 0 bytes are noted, too.
        """
        key = (model if owner is None else owner, self.memory.stream)
        if key not in self.library_memory:
            self.library_memory.add(key)
            nbytes = workspace_bytes(model, arguments)
            if nbytes:
                self.memory.persistent(nbytes, self.recorder.string(model), arguments)


_MISSING = object()
