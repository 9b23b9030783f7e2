"""The dispatcher's state in a thread: modes, keys, devices of factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainfit.torch_private.needed import needed, place

with needed():
    from torch.overrides import (
        _get_current_function_mode_stack,
        _pop_mode,
        _push_mode,
    )
    from torch.utils import _device, _python_dispatch, _pytree
    from torch.utils._mode_utils import no_dispatch as no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    #: The key of operators that are nothing but calls of others.
    COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd
    #: The set of the key that makes autocast's casts.
    AUTOCAST_CUDA: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    #: A context in which operators skip a set of keys.
    WithoutKeys: Any = torch._C._ExcludeDispatchKeyGuard
    #: A context at whose end the thread's keys are those of before.
    KeepKeys: Any = torch._C._PreserveDispatchKeyGuard
    NoTorchDispatch: Any = torch._C._DisableTorchDispatch
    include_meta: Callable[[bool], None] = torch._C._set_meta_in_tls_dispatch_include
    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    registrations: Callable[[str], list[str]] = (
        torch._C._dispatch_get_registrations_for_dispatch_key
    )

    #: Does ``torch.tensor`` make its data where modes do not see it, whatever the device?
    lifts_cpu_only: Callable[[], bool] = torch._C._only_lift_cpu_tensors
    lift_cpu_only: Callable[[bool], None] = torch._C._set_only_lift_cpu_tensors

    function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
    pop_function_mode: Callable[[], Any] = _pop_mode
    push_function_mode: Callable[[Any], None] = _push_mode
    count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
    pop_dispatch_mode: Callable[[], Any] = _python_dispatch._pop_mode
    push_dispatch_mode: Callable[[Any], None] = _python_dispatch._push_mode
    count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

    #: Functions that make tensors on the default device.
    device_constructors: Callable[[], Any] = _device._device_constructors
    DeviceContext: Any = _device.DeviceContext
    _default_device: Any = torch._GLOBAL_DEVICE_CONTEXT
    #: ``map_leaves(torch.Tensor, function, tree)``, for the leaves of a class.
    map_leaves: Callable[..., Any] = _pytree.tree_map_only
    leaves_of: Callable[[Any], list[Any]] = _pytree.tree_leaves

PARSE_TO = place(torch._C._nn, "_parse_to")


def default_device_context() -> Any:
    """What ``torch.set_default_device`` has left; ``None``: nothing."""
    return getattr(_default_device, "device_context", None)


def set_default_device(device: torch.device | None) -> None:
    """``torch.set_default_device``, whose ``None`` PyTorch 2.8 leaves where
    ``torch.get_default_device`` takes it for a context, and fails."""
    torch.set_default_device(device)
    if device is None and hasattr(_default_device, "device_context"):
        del _default_device.device_context
