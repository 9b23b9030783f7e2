"""The few places outside of ``torch.cuda`` that know tensors or devices by type."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.nn import parameter

from trainfit.simgpu.device.device_names import complete
from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.simgpu.device.host_fills import is_in_pinned, pin
from trainfit.simgpu.device.subclasses import become
from trainfit.simgpu.device.tensor import (
    CUDA,
    DeviceTensor,
    SimulatedTensor,
    current_engine,
    several_gpus,
    vars_of,
)
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.autograd import walk
from trainfit.torch_private.modules import APPLY, FLATTENS_RNN_WEIGHTS, FOREACH_TYPES, GROUP_TENSORS
from trainfit.torch_private.operators import (
    COMPATIBLE_TYPE,
    NoTorchFunction,
    has_compatible_type,
    use_count,
)


def install(
    patches: PatchSet,
    *,
    clear_casts: Callable[[], None],
    moved: Callable[[torch.nn.Module], None],
    materialized: Callable[[torch.Tensor], None],
    compiled: Callable[..., Any],
) -> None:
    """Patch them.

    ``clear_casts`` forgets autocast's copies, ``moved`` is told of every module whose own tensors
    were moved, ``materialized`` of every parameter or buffer of a lazy module that got its shape,
    and ``compiled`` stands for ``torch.compile``.
    """
    for place in FOREACH_TYPES:
        patches.set(*place, [*place.now, SimulatedTensor])
    group = GROUP_TENSORS.now

    def group_tensors(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        # C++ groups simulated tensors under "meta"; foreach support is asked by that key.
        groups = group(*args, **kwargs)
        tensors: dict[Any, Any] = {}
        for (device, dtype), value in groups.items():
            if device.type == "meta":
                tensors |= {(gpu, dtype): part for gpu, part in _by_gpu(value)}
            else:
                tensors[device, dtype] = value
        return tensors

    patches.set(*GROUP_TENSORS, group_tensors)
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        clear_casts()
        clear()

    patches.set(torch, "clear_autocast_cache", clear_autocast_cache)
    patches.set(torch.Tensor, "pin_memory", _pin_memory)
    patches.set(torch.Tensor, "is_pinned", _is_pinned)
    patches.set(*COMPATIBLE_TYPE, _sets_data)
    patches.set(*APPLY, _watched_apply(APPLY.now, moved))
    lazy: Any = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
    patches.set(lazy, "materialize", _materializer(lazy.materialize, materialized))
    patches.set(torch, "compile", compiled)
    patches.set(*FLATTENS_RNN_WEIGHTS, lambda: True)


def _by_gpu(grouped: Any) -> Iterator[tuple[torch.device, Any]]:
    """What C++ has put together, the tensors of each GPU by themselves."""
    lists, indices = grouped
    if not several_gpus():
        yield CUDA, grouped
        return
    on = [each.device for each in lists[0]]
    for gpu in dict.fromkeys(on):
        places = [place for place, device in enumerate(on) if device == gpu]
        yield (
            gpu,
            (
                [[each[place] for place in places] if each else each for each in lists],
                [indices[place] for place in places] if indices else indices,
            ),
        )


_EXTENSIONS = "torch.utils.cpp_extension"


def refuse_extensions(patches: PatchSet, stand_in: Callable[[str, Sequence[str]], Any]) -> None:
    """Refuse to build CUDA extensions, from when PyTorch's module for that is imported: until
    ``patches`` is restored. Those for the CPU are built. ``stand_in`` is given an extension's name
    and source files, and gives what takes its place, or ``None``."""

    def patch(module: ModuleType) -> None:
        for name in ("load", "load_inline"):
            patches.set(module, name, _without_cuda(name, getattr(module, name), stand_in))

    patches.when_imported(_EXTENSIONS, patch)


def _without_cuda(
    name: str, build: Callable[..., Any], stand_in: Callable[[str, Sequence[str]], Any]
) -> Callable[..., Any]:
    signature = inspect.signature(build)

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        sources = given.get("sources", ())
        files = [sources] if isinstance(sources, str | os.PathLike) else sources
        known = stand_in(given["name"], [os.fspath(file) for file in files])
        if known is not None:
            return known
        on_gpu = given.get("with_cuda") or given.get("cuda_sources")
        if on_gpu or any(os.fspath(file).endswith((".cu", ".cuh")) for file in files):
            raise UnsupportedOperatorError(
                f"the CUDA extension {given['name']!r} ({_EXTENSIONS}.{name})",
                user_frame(),
                "built when it is loaded",
                "its kernels run on a GPU only; plan a run without it, with operators of PyTorch "
                "in its place",
            )
        return build(*args, **kwargs)

    return built


def _sets_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Does ``Module._apply`` go on with ``tensor.data = other``, as between CPU and CUDA?

    Gradients that change the device are replaced: their parameter was, in C++'s view. So are
    parameters that a graph in use still holds on to: they cannot become something else.
    """
    if isinstance(tensor, DeviceTensor) is isinstance(other, DeviceTensor):
        return isinstance(tensor, DeviceTensor) or bool(has_compatible_type(tensor, other))
    if not isinstance(tensor, torch.nn.Parameter):
        return False
    with NoTorchFunction():  # a lazy module's parameter refuses to tell
        held = use_count(tensor) > 1 + tensor.requires_grad
    if held:
        current_engine().assume(
            "a parameter changed the device while a graph held it: it was replaced, and an "
            "optimizer created before keeps the old one"
        )
    return not held


def _materializer(
    original: Callable[..., None], materialized: Callable[[torch.Tensor], None]
) -> Callable[..., None]:
    """``materialize`` of a lazy module's parameter or buffer, which changes its class.

    On the device a parameter's class is another than the one that PyTorch would set.
    """

    @functools.wraps(original)
    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        own = self.data
        device = own.device if device is None else complete(device)
        value = torch.empty(shape, device=device, dtype=dtype or own.dtype)
        if not isinstance(value, DeviceTensor):
            original(self, shape, device, dtype)
            return
        with NoTorchFunction():
            requires_grad, attributes = self.requires_grad, vars_of(self)
        if issubclass(self.cls_to_become, torch.nn.Parameter):
            value = self.cls_to_become(value, requires_grad)
        vars(value).update(attributes)
        become(self, value)
        materialized(self)

    return materialize


def _watched_apply(
    apply: Callable[..., Any], moved: Callable[[torch.nn.Module], None]
) -> Callable[..., Any]:
    """``Module._apply`` that tells ``moved`` of every module whose own tensors were moved.

    Some modules keep a tensor computed from their parameters: ``torch.nn.utils.weight_norm``
    does, until its hook recomputes it in each forward call. Its graph holds on to the
    parameters, which could not change their device then; so it is let go first. One that is
    computed from others keeps its graph (``nn.Parameter(x).to(device)``).
    """

    @functools.wraps(apply)
    def _apply(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = {id(each) for each in module.parameters(recurse=False)}
        computed = [
            name
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) and _is_computed_of(value.grad_fn, own)
        ]
        for name in computed:
            vars(module)[name] = vars(module)[name].detach()
        result = apply(module, *args, **kwargs)
        moved(module)
        return result

    return _apply


def _is_computed_of(node: Any, tensors: Collection[int]) -> bool:
    """Does a graph end in one of these tensors, given by identity?"""
    return bool(tensors) and any(id(getattr(e, "variable", None)) in tensors for e in walk(node))


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Pinning needs a real driver; the simulated copy takes any host memory."""
    if isinstance(tensor, DeviceTensor):
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    pin(tensor)
    return tensor


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return is_in_pinned(tensor)
