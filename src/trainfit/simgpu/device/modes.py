"""The two PyTorch modes that route work to the engine, in every thread.

Simulated tensors reach the engine by themselves. The modes are for what has no simulated
argument yet: factories with ``device="cuda"``, copies from the host, and what C++ builds
on "meta" because it knows that simulated tensors are there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainfit.simgpu import constructors
from trainfit.simgpu.device.device_names import (
    MADE_OF_DATA,
    call,
    complete,
    construct,
    legacy_dtype,
    made_pinned,
    on_meta,
)
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import EVERYWHERE
from trainfit.simgpu.device.sparse_tensor import SparseTensor
from trainfit.simgpu.device.subclasses import SUBCLASSES, has_operators, replace_data
from trainfit.simgpu.device.tensor import (
    CUDA,
    DeviceTensor,
    SimulatedTensor,
    gpu_of,
    plain,
    several_gpus,
    wrapped,
)
from trainfit.simgpu.device.user_location import called_by_user
from trainfit.simgpu.patching import PatchSet, in_child
from trainfit.torch_private import operators as private
from trainfit.torch_private.autograd import ENGINE_RUN_BACKWARD, MAKE_GRADS, current_node
from trainfit.torch_private.operators import NoTorchDispatch, TorchDispatchMode

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_CHECKS_DATA = {torch.istft, torch.Tensor.istft}
_COMPARES = {torch.isclose, torch.Tensor.isclose}
_WRITES = {torch.Tensor.copy_, torch.Tensor.__setitem__}
_ARITHMETIC = {
    *(torch.sub, torch.mul, torch.add, torch.Tensor.sub, torch.Tensor.mul, torch.Tensor.add),
}
_VIEWS = {torch.reshape, torch.Tensor.reshape, torch.Tensor.view}
#: What reads a tensor's memory without an operator.
_READS = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist}
_to_cuda = torch.Tensor.cuda
_WITH_POSITIONAL_DEVICE = {torch.Tensor.to, _to_cuda, torch.Tensor.type}
#: What is looked at even if no tensor of the device is given to it: what names a device by place,
#: reads a tensor, makes tensors of data, calls Python, or may wait for a reader.
_NOTED = {
    *(torch.device, _set_data, torch.Tensor.apply_, torch.Tensor.map_),
    *(torch.Tensor.pin_memory, torch.Tensor.is_pinned, torch.Tensor.normal_),
    *(torch.Tensor.uniform_, torch.Tensor.zero_, torch.Tensor.fill_, torch.Tensor.__setitem__),
    *_WITH_POSITIONAL_DEVICE, *_READS, *MADE_OF_DATA,
}  # fmt: skip
#: The types of functions, methods and attributes that C++ implements.
_IN_C = {*map(type, (torch.add, torch.Tensor.add, torch.Tensor.__getitem__, _set_data))}
_PLAIN = {
    *(torch.Tensor, torch.nn.Parameter, int, float, bool, type(None), type(...)),
    *(torch.Size, torch.dtype),
}  # fmt: skip
#: What gives the largest numbers along a dimension, and where they are.
_SET_ITEM = torch.Tensor.__setitem__
_LARGEST = {torch.return_types.max, torch.return_types.min}
#: Classes of ``torch.distributed`` whose tensors consist of others, with operators of their own:
#: C++ believes them to be on "meta".
_DTENSOR = "DTensor"
_DISTRIBUTED = {_DTENSOR, "AsyncCollectiveTensor"}
#: ``x.to(device, dtype)`` in inference mode; otherwise autograd has taken it apart.
_TO_DEVICE = torch.ops.aten.to.device


class DeviceMode(TorchDispatchMode):
    """Sends operators with a CUDA (or C++'s "meta") device keyword to the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._engine = engine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch._dynamo (seconds) at the first operator, for nothing.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        if len(types) == 1 and types[0] is SimulatedTensor:
            return self._engine.run(func, args, kwargs)
        if not types and not kwargs and func is not _TO_DEVICE and func not in EVERYWHERE:
            return self._engine.host_fills.run(func, args, kwargs)
        if any(each.__name__ in _DISTRIBUTED for each in types):
            return NotImplemented  # their own dispatch calls this for what they consist of
        of_users = bool(SUBCLASSES) and not SUBCLASSES.isdisjoint(types)
        if SparseTensor in types and not wrapped(types):
            return self._engine.run_sparse(func, args, kwargs)
        if of_users or SimulatedTensor in types:
            if len(types) > 1 and wrapped(types):
                return NotImplemented if has_operators(types) else func(*args, **kwargs)
            run = self._engine.run_plain if of_users else self._engine.run
            return run(func, args, kwargs)
        if func in EVERYWHERE:
            return self._engine.run(func, args, kwargs)
        if types and has_operators(types):
            return NotImplemented
        device = args[1] if func is _TO_DEVICE and len(args) > 1 else kwargs.get("device")
        if kwargs.get("pin_memory") and not (device is not None and device.type == "cuda"):
            result = func(*args, **(kwargs | {"pin_memory": False}))
            if isinstance(result, torch.Tensor):
                made_pinned(result)
            return result
        if device is not None and (
            device.type == "cuda" or (device.type == "meta" and not self._engine.explicit_meta)
        ):
            return self._engine.run(func, args, kwargs)
        return self._engine.host_fills.run(func, args, kwargs)


class FunctionMode(TorchFunctionMode):
    """Completes bare ``"cuda"`` devices and notes when the user asks for meta tensors."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and type(func) in _IN_C and func not in _NOTED and self._is_of_host(args):
            with NoTorchDispatch():
                result = func(*args)
            if func in _ARITHMETIC:
                self._tell(args, result)
            return result
        entered = _any_on_device(types) and self._engine.enter()
        try:
            result = (self._placed if several_gpus() else self._call)(func, args, kwargs)
            known = isinstance(result, DeviceTensor) or type(result) in _LARGEST
            if known or func is _SET_ITEM or func in private.foreach_in_place:
                self._engine.on_result(func, args, kwargs, result)
            return result
        finally:
            if entered:
                self._engine.leave()

    def _is_of_host(self, args: Any) -> bool:
        """May C++ do what it is asked alone? A training on the host asks for little else, and each
        of its operators would come to Python for nothing."""
        return (
            _are_plain(args)
            and not self._engine.host_fills
            and not private.count_function_modes()  # such as a default device
            and private.count_dispatch_modes() == 1
            and private.hooks_of_saved_tensors(True) is None
            and not private.has_transforms()  # whose tensors are plain ones, to Python
        )

    def _placed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What C++ makes for the function by itself is on the GPU of its arguments."""
        numbers = set(_gpus_in((args, *(kwargs or {}).values())))
        running = self._engine.placing.call
        outer = running.gpu
        if numbers:
            running.gpu = numbers.pop() if len(numbers) == 1 else None
        try:
            return self._call(func, args, kwargs)
        finally:
            running.gpu = outer

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.device:
            return construct(args, kwargs or {})
        if func in _WITH_POSITIONAL_DEVICE:
            return self._move(func, args, kwargs or {})
        if func == _set_data and _crosses(*args):
            return replace_data(args[0], args[1])
        if func in _READS:
            self._engine.host_fills.draw(args[0])
        if func in _CHECKS_DATA:
            return self._trusting(func, args, kwargs)
        if several_gpus() and func in _WRITES:
            args = _on_one_gpu(*args)
        if func in _ARITHMETIC:
            result = call(self._engine, func, args, kwargs)
            self._tell(args, result)
            return result
        if func in _VIEWS:
            result = call(self._engine, func, args, kwargs)
            if isinstance(args[0], DeviceTensor) and called_by_user():
                self._engine.on_view(args[0], result)
            return result
        if func in _COMPARES:
            return self._close(call(self._engine, func, args, kwargs))
        return call(self._engine, func, args, kwargs)

    def _tell(self, args: Any, result: Any) -> None:
        if len(args) == 2 and (isinstance(args[1], torch.Tensor) or called_by_user()):
            self._engine.on_arithmetic(args[0], args[1], result)

    def _trusting(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function that checks its arguments' data: they are taken as good."""
        self._engine.trusts_data = True
        try:
            return call(self._engine, func, args, kwargs)
        finally:
            self._engine.trusts_data = False

    def _close(self, result: Any) -> Any:
        """Elements that nobody knows are taken as close, as ``torch.allclose`` does."""
        if isinstance(result, DeviceTensor):
            life = plain(result)._life
            if life.value is None and life.fill is None:
                life.fill = True
                self._engine.assume("two GPU tensors were assumed to be close")
        return result

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """``Tensor.to``, ``.cuda`` and ``.type``."""
        tensor, *rest = args
        if func is torch.Tensor.type:
            dtype = legacy_dtype(rest[0] if rest else kwargs.get("dtype"))
            if dtype is None:
                return func(*args, **kwargs)
            return torch.Tensor.to(tensor, complete("cuda"), dtype)
        rest = [complete(each) for each in rest]
        if type(tensor).__name__ == _DTENSOR and func is not _to_cuda:
            # C++ believes it to be on "meta": where it is already, nothing is to be copied.
            if rest and isinstance(rest[0], str | torch.device):  # Module.to: then a dtype of None
                names = ("device", "dtype", "non_blocking", "copy")
                kwargs, rest = dict(zip(names, rest, strict=False)) | kwargs, []
            kwargs = {
                name: each
                for name, each in kwargs.items()
                if each is not None and not _is_at(each, tensor)
            }
            if not rest and not kwargs.get("copy") and not kwargs.keys() - {"non_blocking", "copy"}:
                return tensor
        if func is _to_cuda:  # as it was: it may be wrapped by now
            kwargs = dict(kwargs)
            named = kwargs.pop("device", rest[0] if rest else None)
            return torch.Tensor.to(tensor, complete("cuda" if named is None else named), **kwargs)
        if torch.device("meta") in rest:
            return on_meta(self._engine, func, (tensor, *rest), kwargs)
        return call(self._engine, func, (tensor, *rest), kwargs)


def _are_plain(args: Any) -> bool:
    """Is there no tensor among them but of PyTorch's own two classes, nor a device?"""
    for each in args:
        kind = type(each)
        if kind in _PLAIN:
            continue
        if kind is slice:
            each = (each.start, each.stop, each.step)
        elif kind is not tuple and kind is not list:
            return False
        if not _are_plain(each):
            return False
    return True


def _is_at(device: Any, tensor: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device) == tensor.device


def _on_one_gpu(target: Any, *rest: Any) -> tuple[Any, ...]:
    """Arguments of an assignment; a value of another GPU whose gradient has to go back there is
    moved first (C++ believes both to be on "meta")."""
    if not isinstance(target, DeviceTensor):
        return target, *rest
    return target, *(
        tensor.to(target.device)
        if isinstance(tensor, DeviceTensor)
        and tensor.requires_grad
        and gpu_of(tensor) != gpu_of(target)
        else tensor
        for tensor in rest
    )


def _gpus_in(value: Any) -> Iterator[int]:
    """The GPUs of the tensors among arguments."""
    if isinstance(value, DeviceTensor):
        yield gpu_of(value)
    elif type(value) in (tuple, list):
        for each in value:
            yield from _gpus_in(each)


def _any_on_device(types: Any) -> bool:
    return SimulatedTensor in types or bool(SUBCLASSES and not SUBCLASSES.isdisjoint(types))


def _crosses(target: Any, value: Any) -> bool:
    return isinstance(target, DeviceTensor) or isinstance(value, DeviceTensor)


class Modes:
    """Keeps the two modes on the stacks of all threads while a simulation is active."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mine: list[Any] = []

    def install(self, patches: PatchSet) -> None:
        self._engine.mode, self._engine.function_mode = DeviceMode, FunctionMode
        bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
        engine = self._engine

        def bootstrap_with_modes(thread: threading.Thread) -> None:
            default = contextlib.nullcontext() if engine.default_type is None else CUDA
            private.lift_cpu_only(True)  # each thread has its own
            with FunctionMode(engine), DeviceMode(engine), default:
                bootstrap(thread)

        patches.set(threading.Thread, "_bootstrap_inner", bootstrap_with_modes)
        run_backward = ENGINE_RUN_BACKWARD.now
        # A backward pass that failed leaves nodes in the queue of this thread, and with them its
        # graph, until the next one drops them; a GPU's thread drops its own at once
        # (Engine::thread_main in torch/csrc/autograd/engine.cpp). This one has no operator.
        leaf = constructors.zeros((), requires_grad=True)
        with torch.enable_grad():
            one = constructors.ones(())
            nothing = ((leaf.clone(),), (one,), True, False, (leaf,), False, False)

        def backward_with_mode(*args: Any, **kwargs: Any) -> Any:
            # PyTorch disables the mode on the way here, yet hooks, custom functions and what
            # checkpointing calls again are Python that names the device.
            is_active = any(
                isinstance(function_mode, FunctionMode)
                for function_mode in private.function_modes()
            )
            try:
                with contextlib.nullcontext() if is_active else FunctionMode(engine):
                    return run_backward(*args, **kwargs)
            except BaseException:
                if current_node() is None:
                    with contextlib.suppress(Exception):
                        run_backward(*nothing)
                raise

        patches.set(*ENGINE_RUN_BACKWARD, backward_with_mode)
        make_grads = MAKE_GRADS.now

        def make_grads_in_backward(*args: Any, **kwargs: Any) -> Any:
            engine.starting_backward = True
            try:
                return make_grads(*args, **kwargs)
            finally:
                engine.starting_backward = False

        patches.set(*MAKE_GRADS, make_grads_in_backward)
        self._mine = [FunctionMode(self._engine), DeviceMode(self._engine)]
        for mode in self._mine:
            mode.__enter__()
        # DataLoader workers are forked with the modes active; their CPU work must not pay.
        in_child(self.drop)

    def remove(self) -> None:
        """Leave the modes, also from under others that a script entered and never left."""
        for mode in reversed(self._mine):
            pop, push, depth = _stack_of(mode)
            above = []
            for _ in range(depth()):
                top = pop()
                if top is mode:
                    push(mode)
                    mode.__exit__(None, None, None)
                    break
                above.append(top)
            for each in reversed(above):
                push(each)
        self._mine = []

    def drop(self) -> None:
        """Take the modes off this thread's stacks, whatever lies on top of them."""
        if not self._mine:
            return
        kept = []
        for _ in range(private.count_function_modes()):
            mode = private.pop_function_mode()
            if not isinstance(mode, FunctionMode):
                kept.append(mode)
        for mode in reversed(kept):
            private.push_function_mode(mode)
        others = []
        for _ in range(private.count_dispatch_modes()):
            dispatch = private.pop_dispatch_mode()
            if not isinstance(dispatch, DeviceMode):
                others.append(dispatch)
        for dispatch in reversed(others):
            private.push_dispatch_mode(dispatch)
        self._mine = []


def _stack_of(mode: Any) -> tuple[Any, Any, Any]:
    """Pop, push and depth of the stack that ``mode`` is on."""
    if isinstance(mode, FunctionMode):
        return private.pop_function_mode, private.push_function_mode, private.count_function_modes
    pop, push = private.pop_dispatch_mode, private.push_dispatch_mode
    return pop, push, private.count_dispatch_modes
