"""Tensors of the user's own classes on the simulated device.

``MetaTensor``, torchvision's ``tv_tensors`` or a subclass of ``Parameter``: on a GPU such a class
stays what it is. Here the tensor's class also has to say what Python sees of the device, so each
gets a class of its own below it, made once: an instance of that is one of the user's class, has
its methods, and finds below them what :class:`trainfit.simgpu.device.tensor.DeviceTensor`
supplies.

Nothing of the simulation is kept in these objects, for users replace ``__dict__`` and swap
tensors: the engine works on a stand-in over the same storage, made for each operator.

A class that keeps its data in other tensors (torchao's, a DTensor) only tells where it is: C++ is
told "meta", or autograd would ask a GPU that may not be there for its stream, and end the process.
"""

from __future__ import annotations

import copyreg
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import handles
from trainfit.simgpu.device.tensor import (
    CUDA,
    META,
    DeviceTensor,
    SimulatedTensor,
    current_engine,
    plain,
    swapping,
    vars_of,
)
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import operators as private

aten = torch.ops.aten

_new_parameter = torch.nn.Parameter.__new__

#: By the user's class, the one on the device; and the other way round.
_ON_DEVICE: dict[type, type] = {}
_ORIGIN: dict[type, type] = {}
#: Those on the device.
SUBCLASSES: set[type] = set()


class _Wanted(threading.local):
    """The class that the result of the current ``aten::alias`` gets."""

    kind: type | None = None


_wanted = _Wanted()


def on_device(kind: type) -> type:
    """The class on the device of tensors of the user's class ``kind``."""
    found = _ON_DEVICE.get(kind)
    if found is None:
        # As the user's classes are of each other: a tensor of one leaves an operator to its bases'
        # (Tensor.__torch_function__ asks issubclass of all that are given).
        bases = [base for base in kind.__bases__ if issubclass(base, torch.Tensor)]
        above = [on_device(base) for base in bases if not _is_torchs(base)]
        found = types.new_class(kind.__name__, (kind, *above, DeviceTensor))
        found.__module__, found.__qualname__ = kind.__module__, kind.__qualname__
        _ON_DEVICE[kind], _ORIGIN[found] = found, kind
        SUBCLASSES.add(found)
    return found


def origin(kind: type) -> type:
    """The user's class of a tensor's class, on the device or not."""
    return _ORIGIN.get(kind, torch.Tensor if kind is SimulatedTensor else kind)


def make_subclass(kind: Any, data: Any, require_grad: bool = False, **options: Any) -> torch.Tensor:
    """``Tensor._make_subclass``; the class follows the data to the device and back."""
    kind = origin(kind)
    if not isinstance(data, DeviceTensor):
        return private.make_subclass(kind, data, require_grad, **options)  # type: ignore[no-any-return]
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(plain(data), requires_grad=require_grad)
    if kind is torch.Tensor:
        made: torch.Tensor = plain(data).detach().requires_grad_(require_grad)
        return made
    return _over(plain(data)._meta, on_device(kind), require_grad)


def _over(meta: torch.Tensor, kind: type, requires_grad: bool = False) -> torch.Tensor:
    made: torch.Tensor = private.make_subclass(
        kind, meta, requires_grad, device_for_backend_keys=CUDA
    )
    return made


def as_subclass(tensor: torch.Tensor, cls: Any) -> torch.Tensor:
    """``Tensor.as_subclass``, which autograd sees as a view."""
    kind = origin(cls)
    if not isinstance(tensor, DeviceTensor):
        return private.as_subclass(tensor, kind)
    before, _wanted.kind = _wanted.kind, None if kind is torch.Tensor else on_device(kind)
    try:
        with private.NoTorchFunctionOfSubclasses():
            return aten.alias.default(tensor)  # type: ignore[no-any-return]
    finally:
        _wanted.kind = before


@handles(aten.alias.default)
def alias(engine: Engine, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """A view of the whole; of the class that :func:`as_subclass` asks for."""
    result: SimulatedTensor = engine.generic(engine.info(func), args, kwargs)
    kind, _wanted.kind = _wanted.kind, None
    return result if kind is None else _over(result._meta, kind)


def has_operators(kinds: Iterable[type]) -> bool:
    """Are those that are not on the device classes of the user's that compute by themselves?

    A mode leaves the operator to them then, and gets what they call.
    """
    others = [kind for kind in kinds if not issubclass(kind, DeviceTensor)]
    return bool(others) and all(_computes(kind) for kind in others)


def _computes(kind: type) -> bool:
    return not _is_torchs(kind) and private.computes(kind)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


#: What Python sees of a tensor that tells that it is on the device.
_SEEN: dict[str, Any] = {"device": CUDA, "is_cuda": True, "is_meta": False, "is_cpu": False}


#: Names of what ``Tensor._make_wrapper_subclass`` is given by place, after the sizes.
_OF_WRAPPERS = (
    "strides", "storage_offset", "memory_format", "dtype", "layout", "device", "pin_memory",
    "requires_grad", "dispatch_sizes_strides_policy", "dispatch_device", "dispatch_layout",
    "_extra_dispatch_keys", "storage_size",
)  # fmt: skip


def _make_wrapper(patches: PatchSet) -> Callable[..., torch.Tensor]:
    """``Tensor._make_wrapper_subclass``, with C++ told "meta" where the device is CUDA's."""
    original, kinds = private.MAKE_WRAPPER.now, set[type]()

    def make(kind: type, *sizes: Any, **options: Any) -> torch.Tensor:
        options |= dict(zip(_OF_WRAPPERS, sizes[1:], strict=False))
        sizes = sizes[:1]
        device = options.get("device")
        if device is None or torch.device(device).type != "cuda":
            return original(kind, *sizes, **options)  # type: ignore[no-any-return]
        if kind not in kinds:
            kinds.add(kind)
            for name in _SEEN:
                if getattr(kind, name) is getattr(torch.Tensor, name):
                    patches.set(kind, name, property(_of_wrapper(name)))
        options = private.like_on_cuda(options | {"device": META})
        return original(kind, *sizes, **options)  # type: ignore[no-any-return]

    return make


def _of_wrapper(name: str) -> Callable[[torch.Tensor], Any]:
    inherited = getattr(torch.Tensor, name)

    def get(tensor: torch.Tensor) -> Any:
        return _SEEN[name] if private.is_like_on_cuda(tensor) else inherited.__get__(tensor)

    return get


def _parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> torch.Tensor:
    """``Parameter.__new__``, whose own test is for the very class ``Tensor``."""
    if cls is torch.nn.Parameter or type(data) is not SimulatedTensor:
        return _new_parameter(origin(cls), data, requires_grad)
    return make_subclass(cls, data, requires_grad)


@swapping
def _swap(target: torch.Tensor, made: torch.Tensor) -> None:
    """``torch.utils.swap_tensors``, without what it refuses: weak references are held to the
    object, which is to be the one that was moved; and views (FSDP's, of its flat parameter) stay
    over the memory that they are over, as after PyTorch's own ``target.data = …``."""
    names = copyreg._slotnames(type(target))  # type: ignore[attr-defined]
    with torch.enable_grad():
        if _has_graph(target):
            edge = torch.autograd.graph.get_gradient_edge(target)
            edge.node.register_prehook(_refusing(target))
            _LEFT[target] = TensorWeakRef(made)
    for name in ("__class__", "__dict__", *names):
        ours, theirs = getattr(target, name, _MISSING), getattr(made, name, _MISSING)
        for tensor, value in ((target, theirs), (made, ours)):
            if value is not _MISSING:
                setattr(tensor, name, value)
            elif hasattr(tensor, name):
                delattr(tensor, name)
    private.swap_tensor_impl(target, made)


_MISSING: Final = object()
#: What leaves were on the other device when they changed it with a graph from there, which keeps
#: it: FSDP's parameters that are offloaded come back for their backward pass, to what it knows.
_LEFT: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _has_graph(leaf: torch.Tensor) -> bool:
    return leaf.is_leaf and leaf.requires_grad and private.use_count(leaf) > 1


def _refusing(target: torch.Tensor) -> Callable[[Any], None]:
    """A hook that refuses a gradient for a tensor that is on another device by now."""
    held, device = weakref.ref(target), target.device

    def refuse_gradient(_: Any) -> None:
        now = held()
        if now is None or now.device != device:
            raise RuntimeError(
                "a tensor that requires a gradient changed the device between forward and "
                "backward: move it before the forward pass or after the backward pass"
            )

    return refuse_gradient


def _return(target: torch.Tensor, former: torch.Tensor) -> None:
    """Let ``target`` be again what it was on this device, with the user's attributes of now."""
    attributes = vars_of(target)
    for name in vars_of(former):
        del vars(former)[name]
    vars(former).update(attributes)
    become(target, former)


def replace_data(target: torch.Tensor, value: torch.Tensor) -> None:
    """``target.data = value`` where one of them is simulated; ``target`` stays the object.

    Between host and device the two objects swap what they are, since the type tells which.
    """
    gradient = target.grad if target.is_leaf else None
    if not isinstance(target, DeviceTensor) and isinstance(value, DeviceTensor):
        if _GRADIENTS.get(target) is not None:
            target.grad = None  # its class is as it was
        former = _LEFT.pop(target, lambda: None)()
        if isinstance(former, DeviceTensor) and _has_graph(former):
            _return(target, former)
    if isinstance(target, DeviceTensor) and isinstance(value, DeviceTensor):
        current_engine().set_data(target, value)
    else:
        with private.NoTorchFunctionOfSubclasses():
            become(target, _moved(target, value))
    if isinstance(gradient, DeviceTensor) and target.grad is not gradient:
        _keep_gradient(target, gradient)


#: Gradients on the device of leaves that moved to the host, and the classes of these meanwhile.
_GRADIENTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_WITH_GRADIENT: dict[type, type] = {}


def _keep_gradient(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """``leaf.data = …`` leaves ``leaf.grad`` where it is, until another one is set. C++ would
    refuse one of the device for what is on the host."""
    if isinstance(leaf, DeviceTensor):
        leaf.grad = gradient
        return
    kind = type(leaf)
    if kind not in _WITH_GRADIENT:
        names = {"__module__": kind.__module__, "grad": _left_gradient(kind)}
        _WITH_GRADIENT[kind] = type(kind.__name__, (kind,), names)
    _GRADIENTS[leaf] = gradient
    leaf.__class__ = _WITH_GRADIENT[kind]


def _left_gradient(kind: Any) -> property:
    def get(leaf: Any) -> torch.Tensor | None:
        left = _GRADIENTS.get(leaf)
        if left is not None and not isinstance(left, DeviceTensor):
            put(leaf, left)  # it has followed its leaf to the host
        own: torch.Tensor | None = kind.grad.__get__(leaf)  # of a copy there is no other
        return own if left is None else left

    def put(leaf: Any, value: torch.Tensor | None) -> None:
        _GRADIENTS.pop(leaf, None)
        leaf.__class__ = kind
        leaf.grad = value

    return property(get, put, lambda leaf: put(leaf, None))


def become(target: torch.Tensor, made: torch.Tensor) -> None:
    """Let ``target`` be what ``made`` is, for whoever holds it, without a gradient."""
    with private.NoTorchFunctionOfSubclasses():
        target.grad = None
        _swap(target, made)


def _moved(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What ``target`` is to become over the data of ``value``, with the user's attributes."""
    parameter = type(target) is SimulatedTensor and isinstance(target, torch.nn.Parameter)
    kind = torch.nn.Parameter if parameter else origin(type(target))
    made = make_subclass(kind, value.detach(), target.requires_grad)
    vars(made).update(vars_of(target))
    return made


def install(engine: Engine, patches: PatchSet) -> None:
    """Let classes follow their tensors while a simulation runs."""
    engine.replace_data = replace_data
    patches.set(*private.MAKE_SUBCLASS, staticmethod(make_subclass))
    patches.set(*private.MAKE_WRAPPER, staticmethod(_make_wrapper(patches)))
    patches.set(torch.Tensor, "as_subclass", as_subclass)
    patches.set(torch.utils, "swap_tensors", swapping(torch.utils.swap_tensors))
    patches.set(torch.nn.Parameter, "__new__", staticmethod(_parameter))
