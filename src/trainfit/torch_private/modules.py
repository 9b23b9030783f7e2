"""Modules and what trains them: layers, calls, optimizers, gradient scaling, autocast, FSDP."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.amp import autocast_mode
from torch.optim import optimizer as optim

from trainfit.results.text import dtype_name
from trainfit.torch_private.needed import attribute, needed, place

with needed():
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
    from torch.nn.modules.dropout import _DropoutNd
    from torch.utils import _foreach_utils

Convolution = _ConvNd
TransposedConvolution = _ConvTransposeNd
BatchNorm = _BatchNorm
Dropout = _DropoutNd

#: What a module itself holds, by name: parameters and buffers may be ``None``.
parameters_of: Callable[[nn.Module], dict[str, Any]] = attribute(nn.Module, "_parameters")
buffers_of: Callable[[nn.Module], dict[str, Any]] = attribute(nn.Module, "_buffers")
children_of: Callable[[nn.Module], dict[str, Any]] = attribute(nn.Module, "_modules")
#: ``None`` where the module is not compiled in place.
_compiled_call: Callable[[nn.Module], Any] = attribute(nn.Module, "_compiled_call_impl")
attribute(nn.Module, "_call_impl")
_HOOKS: Final = tuple(
    attribute(nn.Module, name)
    for name in (
        *("_forward_pre_hooks", "_forward_hooks"),
        *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs"),
        "_forward_hooks_always_called",
    )
)

APPLY = place(nn.Module, "_apply")
FLATTENS_RNN_WEIGHTS = place(torch, "_use_cudnn_rnn_flatten_weight")


def is_ready(module: Any) -> bool:
    """Has the constructor of the base class run?"""
    return "_modules" in vars(module)


def forward_hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The hooks of a module's calls by their numbers, and what is known of each number."""
    return [named(module) for named in _HOOKS]


#: Where what ``torch.compile`` returns for a module has that module.
COMPILED: Final = "_orig_mod"


def uncompiled(model: Any) -> Any:
    """What ``torch.compile`` was given, where ``model`` is what it returned."""
    return getattr(model, COMPILED, model)


def is_compiled(module: nn.Module) -> bool:
    """Is it compiled, by ``torch.compile`` or its own ``compile``? Then the calls of its layers are
    not seen."""
    return is_wrapper_of_compiled(module) or _compiled_call(module) is not None


def is_wrapper_of_compiled(module: nn.Module) -> bool:
    """Is it what ``torch.compile`` returned?"""
    return hasattr(module, COMPILED)


def outermost_call() -> FrameType | None:
    """The frame of the call of a module that holds all others in this thread's stack now; its
    ``self`` is the module."""
    found, frame = None, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_call_impl":
            found = frame
    return found


class Inside:
    """Is a call of a module within another now? It is hashable, as constants of code are."""

    __slots__ = ("is_on",)

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on


def fast_call(
    original: Callable[..., Any], inside: Inside, outermost: Callable[..., Any]
) -> Callable[..., Any] | None:
    """A ``Module.__call__`` that is ``outermost(module, args, kwargs)`` unless ``inside.is_on``.

    Inside it does what PyTorch's own does, in no more frames, also where a ``PatchSet`` hooks it
    (:data:`trainfit.simgpu.patching.SHORTCUT`). ``None`` where ``original`` is not the one that is
    known.
    """
    code = getattr(original, "__code__", None)
    if code is None or code.co_names != ("_compiled_call_impl", "_call_impl"):
        return None
    if code.co_varnames != ("self", "args", "kwargs"):  # a hook's, which has a shortcut
        return None

    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if inside.is_on:
            if self._compiled_call_impl is not None:
                return self._compiled_call_impl(*args, **kwargs)
            return self._call_impl(*args, **kwargs)
        return outermost(self, args, kwargs)

    __call__.trainfit_shortcut = inside, _AS_PYTORCH  # type: ignore[attr-defined]
    return __call__


#: What ``Module.__call__`` does, in the names of a hook's code.
_AS_PYTORCH: Final = (
    "if self._compiled_call_impl is not None:",
    "    return self._compiled_call_impl(*_trainfit_args, **_trainfit_kwargs)",
    "return self._call_impl(*_trainfit_args, **_trainfit_kwargs)",
)


# -- what trains them ------------------------------------------------------------------------------

#: The types of tensors that optimizers take lists of, in each module that has the list.
FOREACH_TYPES = tuple(
    place(module, "_foreach_supported_types") for module in (_foreach_utils, optim)
)
GROUP_TENSORS = place(torch._C, "_group_tensors_by_device_and_dtype")
UNSCALE_GRADS = place(torch.amp.GradScaler, "_unscale_grads_")

attribute(torch.amp.GradScaler, "_scale")
#: Is a context of autocast switched on?
autocast_is_on: Callable[[Any], bool] = attribute(autocast_mode.autocast, "_enabled")


def scale_of(scaler: Any) -> Any:
    """A GradScaler's scale: a tensor on the device once it is used."""
    return getattr(scaler, "_scale", None)


def switch_off(context: Any) -> None:
    """Let a context of autocast change nothing."""
    context._enabled = False


def unscales_itself(optimizer: Any) -> None:
    """Let a GradScaler leave the gradients to the optimizer, as it does for fused ones."""
    optimizer._step_supports_amp_scaling = True


def parts_of_schedule(scheduler: Any) -> tuple[Any, ...]:
    """The schedules of learning rates that one is made of, as ``SequentialLR`` is."""
    return tuple(getattr(scheduler, "_schedulers", ()))


# ---
# FSDP, of both kinds: what it computes in, and the states of its optimizers, which ranks share out.


#: Where both are found once something has imported them.
_OF_FSDP: Final = "torch.distributed.fsdp"
#: The module of an optimizer's state, imported with FSDP, and what tells the keys of all ranks.
OPTIMIZER_STATES: Final = "torch.distributed.fsdp._optim_utils"
KEYS_OF_STATES: Final = "_map_param_key_to_optim_keys"
#: The module of FSDP2's groups of parameters, its class, what ends a backward pass over a group,
#: and where each of its ``fsdp_params`` then has the gradient of the whole parameter, in the type
#: that it is reduced in, until the last micro-batch.
SHARDED_GROUPS: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
SHARDED_GROUP: Final = "FSDPParamGroup"
END_OF_BACKWARD: Final = "post_backward"
WHOLE_GRADIENT: Final = "unsharded_accumulated_grad"


#: The module of ``ZeroRedundancyOptimizer``, and by what its ranks send each other their states.
SHARED_OPTIMIZERS: Final = "torch.distributed.optim.zero_redundancy_optimizer"
SENDS_STATES: Final = "_broadcast_object"


def state_elsewhere(optimizer: Any, rank: int) -> dict[str, Any]:
    """The state of a ``ZeroRedundancyOptimizer`` that ``rank`` of its group has, without values:
    which parameters it updates."""
    groups, start = [], 0
    parts = optimizer._partition_parameters()[rank]
    own = optimizer.optim.state_dict()["param_groups"]
    for group, part in zip(own, parts, strict=True):
        end = start + len(part["params"])
        groups.append({**group, "params": list(range(start, end))})
        start = end
    return {"state": {}, "param_groups": groups}


#: The module that plans what each rank writes of a checkpoint (``torch.distributed.checkpoint``),
#: what leaves to one rank what several have, and what checks that all together have each tensor.
PLANS_OF_CHECKPOINTS: Final = "torch.distributed.checkpoint.default_planner"
SHARING_OF_PLANS: Final = "dedup_save_plans"
CHECK_OF_PLANS: Final = "_validate_global_plan"

#: The module that copies a checkpoint into RAM before it is written (``async_save``), its class,
#: and the method that copies a tensor; the module that has it written, and its classes that do so
#: in a process and in a thread.
STAGERS: Final = "torch.distributed.checkpoint._state_dict_stager"
STAGER: Final = "StateDictStager"
STAGES_TENSOR: Final = "_offload_tensor"
ASYNC_SAVES: Final = "torch.distributed.checkpoint.state_dict_saver"
BY_PROCESS: Final = "_ProcessBasedAsyncCheckpointExecutor"
BY_THREAD: Final = "_ThreadBasedAsyncCheckpointExecutor"


def nothing_wrong(check: Callable[..., Any]) -> Any:
    """What the function of :data:`CHECK_OF_PLANS` returns of plans that are right: since
    PyTorch 2.11 an empty list of errors."""
    return True if check.__annotations__.get("return") in (bool, "bool") else []


def keys_of_other_ranks(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """The keys of parameters that have all their elements on other ranks, in a call of the function
    of :data:`KEYS_OF_STATES`; none where each rank has the flat parameter."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    if not given.get("merge_keys"):
        return
    make = sys.modules[OPTIMIZER_STATES]._OptimStateKey
    states = given["optim_state_dict"]["state"]
    for key, parameter in given["param_key_to_param"].items():
        names = given["param_to_fqns"][parameter]
        managed = given["fqn_to_fsdp_param_info"].get(names[0])
        if key not in states and managed is not None and not parameter.numel():
            yield make(unflat_param_names=tuple(names), is_fsdp_managed=True)


def in_sync_batch_norm(frame: FrameType | None) -> bool:
    """Is ``frame`` called by SyncBatchNorm's forward pass?"""
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.modules._functions":
            return "count_all" in frame.f_code.co_varnames
        frame = frame.f_back
    return False


def in_shards(model: Any) -> bool:
    """Does FSDP of the first kind keep a part of each parameter of ``model`` on each of its ranks?
    (The second kind's parameters are tensors that know of the others' parts.)"""
    module: Any = sys.modules.get(_OF_FSDP)
    first = getattr(module, "FullyShardedDataParallel", ())
    return any(
        isinstance(part, first) and part.sharding_strategy.name != "NO_SHARD"
        for part in model.modules()
    )


def half_of(model: Any) -> str:
    """The half precision to which FSDP casts the parameters of ``model``, or of its first part
    that has one; empty: there is none."""
    if _OF_FSDP not in sys.modules:
        return ""
    for part in model.modules():
        dtype = dtype_name(_cast_to(part))
        if dtype in ("bfloat16", "float16"):
            return dtype
    return ""


def _cast_to(part: Any) -> Any:
    """The dtype to which FSDP casts the parameters of a part of a model; ``None``: to none."""
    module: Any = sys.modules[_OF_FSDP]
    first, second = module.FullyShardedDataParallel, getattr(module, "FSDPModule", ())
    policy = part.mixed_precision if isinstance(part, first) else None
    if isinstance(part, second):
        policy = getattr(part._get_fsdp_state(), "_mp_policy", None)
    return getattr(policy, "param_dtype", None)


class _ShardedParameter(NamedTuple):
    """A parameter that FSDP keeps in shards and puts together for its use, with what ``unit``, a
    part of the model, has of others at once; ``owner`` is the module that has it. ``numbers`` and
    ``nbytes`` are of the whole parameter, in the dtype in which it is put together."""

    unit: Any
    owner: Any
    numbers: int
    nbytes: int


def sharded_parameters(model: Any) -> list[_ShardedParameter]:
    """The sharded parameters of ``model``, by both kinds of FSDP; none of an FSDP1 that does not
    free them after the forward pass."""
    module: Any = sys.modules.get(_OF_FSDP)
    if module is None:
        return []
    parameters = []
    for unit in module.FullyShardedDataParallel.fsdp_modules(model):
        if unit.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD") and unit._handle:
            flat = unit._handle.flat_param
            width = (_cast_to(unit) or flat.dtype).itemsize
            infos = zip(flat._param_infos, flat._numels, strict=False)
            parameters += [_ShardedParameter(unit, at.module, n, n * width) for at, n in infos]
    if second := getattr(module, "FSDPModule", None):
        parameters += _of_second_kind(model, None, second)
    return parameters


def _of_second_kind(part: Any, unit: Any, kind: type) -> Iterator[_ShardedParameter]:
    unit = part if isinstance(part, kind) else unit
    for parameter in parameters_of(part).values() if unit is not None else ():
        if hasattr(parameter, "device_mesh"):  # not one that is left out (ignored_params)
            width = (_cast_to(unit) or parameter.dtype).itemsize
            yield _ShardedParameter(unit, part, parameter.numel(), parameter.numel() * width)
    for child in filter(None, children_of(part).values()):
        yield from _of_second_kind(child, unit, kind)


def within_checkpoint(layer: Any) -> Any:
    """The layer that PyTorch's wrapper, which computes it again in the backward pass, is around;
    the layer itself where there is none."""
    return getattr(layer, "_checkpoint_wrapped_module", layer)
