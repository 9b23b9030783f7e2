"""FSDP, of both kinds: what it computes in, and the states of its optimizers, which ranks share
out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

#: The module of an optimizer's state, imported with FSDP, and what tells the keys of all ranks.
OPTIMIZER_STATES: Final = "torch.distributed.fsdp._optim_utils"
KEYS_OF_STATES: Final = "_map_param_key_to_optim_keys"


def keys_of_other_ranks(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """Of a call of the function of :data:`KEYS_OF_STATES`, the keys of parameters that have all
    their elements on other ranks; none where each rank has the flat parameter."""
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


def half_of(model: Any) -> str:
    """The half precision to which FSDP casts the parameters of ``model``, or of its first part
    that has one; empty: there is none."""
    module: Any = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return ""
    first, second = module.FullyShardedDataParallel, getattr(module, "FSDPModule", ())
    for part in model.modules():
        policy = part.mixed_precision if isinstance(part, first) else None
        if isinstance(part, second):
            policy = getattr(part._get_fsdp_state(), "_mp_policy", None)
        dtype = str(getattr(policy, "param_dtype", "")).removeprefix("torch.")
        if dtype in ("bfloat16", "float16"):
            return dtype
    return ""
