"""Operators by their private names, the dispatcher's state in a thread; tensors, their classes,
storages and files.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import serialization

from trainfit.torch_private.needed import MissingNameError, attribute, needed, place

_aten: Any = torch.ops.aten

with needed():
    from torch._library import custom_ops
    from torch._ops import OpOverload

    #: How ``scaled_dot_product_attention`` prefers its backends.
    attention_order: Callable[[], list[Any]] = torch._C._get_sdp_priority_order
    foreach_norms: Callable[..., Any] = torch._foreach_norm
    #: Those that change the tensors of a list in place.
    foreach_in_place: frozenset[Any] = frozenset(
        getattr(torch, name)
        for name in dir(torch)
        if name.startswith("_foreach_") and name.endswith("_")
    )
    #: Operators that are written in Python, by name.
    python_operators: Any = custom_ops.OPDEFS
    PythonOperator: Any = custom_ops.CustomOpDef
    _destroy: Callable[[Any], None] = torch.library.Library._destroy

    addmm_activation = _aten._addmm_activation
    amp_foreach_non_finite_check_and_unscale_ = _aten._amp_foreach_non_finite_check_and_unscale_
    amp_update_scale_ = _aten._amp_update_scale_
    batch_norm_impl_index = _aten._batch_norm_impl_index
    ctc_loss = _aten._ctc_loss
    ctc_loss_backward = _aten._ctc_loss_backward
    coalesce = _aten._coalesce
    coalesced_ = _aten._coalesced_
    cudnn_rnn = _aten._cudnn_rnn
    cudnn_rnn_backward = _aten._cudnn_rnn_backward
    cudnn_rnn_flatten_weight = _aten._cudnn_rnn_flatten_weight
    dense_dim = _aten._dimV
    dirichlet_grad = _aten._dirichlet_grad
    embedding_bag_backward = _aten._embedding_bag_backward
    fft_c2c = _aten._fft_c2c
    fft_c2r = _aten._fft_c2r
    fft_r2c = _aten._fft_r2c
    flash_attention_backward = _aten._flash_attention_backward
    flash_attention_forward = _aten._flash_attention_forward
    foreach_copy_ = _aten._foreach_copy_
    foreach_norm = _aten._foreach_norm
    fused_adam_ = _aten._fused_adam_
    fused_adamw_ = _aten._fused_adamw_
    fused_dropout = _aten._fused_dropout
    index_put_impl_ = _aten._index_put_impl_
    indices = _aten._indices
    int_mm = _aten._int_mm
    is_all_true = _aten._is_all_true
    is_any_true = _aten._is_any_true
    local_scalar_dense = _aten._local_scalar_dense
    log_softmax = _aten._log_softmax
    log_softmax_backward_data = _aten._log_softmax_backward_data
    nested_tensor_from_mask_left_aligned = _aten._nested_tensor_from_mask_left_aligned
    nnz = _aten._nnz
    pack_padded_sequence = _aten._pack_padded_sequence
    pin_memory = _aten._pin_memory
    safe_softmax = _aten._safe_softmax
    sample_dirichlet = _aten._sample_dirichlet
    scaled_dot_product_attention_math = _aten._scaled_dot_product_attention_math
    scaled_dot_product_cudnn_attention = _aten._scaled_dot_product_cudnn_attention
    scaled_dot_product_cudnn_attention_backward = _aten._scaled_dot_product_cudnn_attention_backward
    scaled_dot_product_efficient_attention = _aten._scaled_dot_product_efficient_attention
    scaled_dot_product_efficient_attention_backward = (
        _aten._scaled_dot_product_efficient_attention_backward
    )
    scaled_dot_product_flash_attention = _aten._scaled_dot_product_flash_attention
    scaled_dot_product_flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
    scaled_mm = _aten._scaled_mm
    softmax = _aten._softmax
    softmax_backward_data = _aten._softmax_backward_data
    sparse_addmm = _aten._sparse_addmm
    sparse_coo_tensor_with_dims = _aten._sparse_coo_tensor_with_dims
    sparse_coo_tensor_with_dims_and_tensors = _aten._sparse_coo_tensor_with_dims_and_tensors
    sparse_dim = _aten._dimI
    sparse_mm = _aten._sparse_mm
    to_copy = _aten._to_copy
    to_dense = _aten._to_dense
    to_sparse = _aten._to_sparse
    trilinear = _aten._trilinear
    unique2 = _aten._unique2
    unsafe_view = _aten._unsafe_view
    values = _aten._values
    weight_norm_interface_backward = _aten._weight_norm_interface_backward

schema: Callable[[Any], Any] = attribute(OpOverload, "_schema")
#: ``call_for(operator)(key, *args)`` is what the operator does under a dispatch key.
call_for: Callable[[Any], Callable[..., Any]] = attribute(OpOverload, "_op_dk")
#: An operator's name without its namespace and overload.
short_name: Callable[[Any], str] = attribute(OpOverload, "_opname")
packet: Callable[[Any], Any] = attribute(OpOverload, "_overloadpacket")
fake_kernel: Callable[[Any], Any] = attribute(PythonOperator, "_abstract_fn")
bodies: Callable[[Any], dict[Any, Any]] = attribute(PythonOperator, "_backend_fns")
_function: Callable[[Any], Any] = attribute(PythonOperator, "_init_fn")
full_name: Callable[[Any], str] = attribute(PythonOperator, "_qualname")
try:
    _casts = attribute(PythonOperator, "_autocast_dtype")
except MissingNameError:  # in older versions: a name for each kind of device
    _casts = attribute(PythonOperator, "_autocast_cuda_dtype")


def is_of_triton(operator: Any) -> bool:
    """Was an operator that is written in Python made by ``torch.library.triton_op``?

    Its function is then its fake kernel, too, inside of what the dispatcher calls; PyTorch 2.8
    keeps no list of such operators.
    """
    return str(_function(operator).__qualname__).startswith(f"{torch.library.triton_op.__name__}.")


def casts_itself(operator: Any) -> bool:
    """Was an operator that is written in Python told its dtype in autocast on a GPU?"""
    finding = _casts(operator)
    return bool(finding.get("cuda") if isinstance(finding, dict) else finding)


def destroy(library: torch.library.Library) -> None:
    """Take back what a library has registered."""
    _destroy(library)


# ---
# The dispatcher's state in a thread: modes, keys, devices of factories.


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
    #: The functions that autograd gives what it saves, if there are any.
    hooks_of_saved_tensors: Callable[[bool], Any] = (
        torch._C._autograd._top_saved_tensors_default_hooks
    )
    #: Are tensors wrapped by ``torch.func``, as ``vmap`` does?
    has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
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


with needed():
    from torch._C import Generator as Generator
    from torch._prims_common import suggest_memory_format as suggest_memory_format
    from torch.storage import _StorageBase

    #: PyTorch's own, whatever hooks the public ones have.
    item: Callable[[torch.Tensor], Any] = torch._C.TensorBase.item
    as_subclass: Callable[..., torch.Tensor] = torch._C.TensorBase.as_subclass
    data: Callable[[torch.Tensor], torch.Tensor] = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
    set_data: Callable[..., None] = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
    make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
    #: ``Tensor.__torch_function__`` of the class that it is given.
    torch_function: Callable[..., Any] = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    #: For ``__torch_function__``: there is none.
    disabled_torch_function: Any = torch._C._disabled_torch_function_impl
    NoTorchFunction: Any = torch._C.DisableTorchFunction
    NoTorchFunctionOfSubclasses: Any = torch._C.DisableTorchFunctionSubclass
    #: A context: inference mode or not.
    InferenceMode: Any = torch._C._InferenceMode
    _no_dispatch: Any = torch._C._disabled_torch_dispatch_impl
    _storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
    _keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_keys
    _AUTOCAST_CUDA: Any = torch._C.DispatchKey.AutocastCUDA
    _KeySet: Any = torch._C.DispatchKeySet
    #: May a tensor's data become another's?
    has_compatible_type: Callable[..., Any] = torch._has_compatible_shallow_copy_type
    #: Swaps what two objects are, for Python; C++ keeps to what it holds.
    swap_tensor_impl: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl

StorageBase = _StorageBase
#: What identifies a storage among all that live.
storage_key: Callable[[Any], int] = attribute(torch.UntypedStorage, "_cdata")
untyped: Callable[[Any], Any] = attribute(torch.TypedStorage, "_untyped_storage")
attribute(torch.Tensor, "_is_view")
is_view: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_view")
attribute(torch.Tensor, "_use_count")
#: How many hold on to a tensor in C++.
use_count: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")
_version: Callable[[torch.Tensor], int] = attribute(torch.Tensor, "_version")


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 of what inference mode made, of which PyTorch does
    not count it."""
    return 0 if tensor.is_inference() else _version(tensor)


def storage_uses(tensor: torch.Tensor) -> int:
    """How many hold on to a tensor's storage."""
    return _storage_uses(storage_key(tensor.untyped_storage()))


#: A tensor of a class that keeps its data in others: its sizes and its device are only told.
MAKE_WRAPPER = place(torch.Tensor, "_make_wrapper_subclass")
MAKE_SUBCLASS = place(torch.Tensor, "_make_subclass")
COMPATIBLE_TYPE = place(torch, "_has_compatible_shallow_copy_type")
FILE_WRITER = place(torch._C, "PyTorchFileWriter")
PACKAGE_REGISTRY = place(serialization, "_package_registry")
REBUILD_TENSOR = place(torch._utils, "_rebuild_tensor")


#: What tells a parameter of another class than ``Parameter``.
PARAMETER_MARK = "_is_param"


def computes(kind: type) -> bool:
    """Has a class a ``__torch_dispatch__`` of its own?"""
    return kind.__torch_dispatch__ is not _no_dispatch  # type: ignore[attr-defined]


_EXTRA_KEYS = "_extra_dispatch_keys"


def like_on_cuda(options: dict[str, Any]) -> dict[str, Any]:
    """Options of :data:`MAKE_WRAPPER` with which autocast sees a tensor on a GPU, wherever C++
    is told that it is."""
    keys, given = _KeySet(_AUTOCAST_CUDA), options.get(_EXTRA_KEYS)
    return options | {_EXTRA_KEYS: keys if given is None else keys | given}


def is_like_on_cuda(tensor: torch.Tensor) -> bool:
    """Was a tensor made with :func:`like_on_cuda`, or is it on a GPU?"""
    return bool(_keys(tensor).has(_AUTOCAST_CUDA))


def is_parameter(tensor: torch.Tensor) -> bool:
    """Was it made a parameter, whatever its class?"""
    return getattr(tensor, PARAMETER_MARK, False)


def untyped_of(storage: Any) -> Any:
    """The bytes of a storage, which may be typed."""
    return getattr(storage, "_untyped_storage", storage)


def local_part(tensor: Any) -> Any:
    """The tensor that this process has of a DTensor; another as it is."""
    return getattr(tensor, "_local_tensor", tensor)
