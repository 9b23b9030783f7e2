"""FSDP: the kernels of its own copies, and what other ranks have of its parameters.

Operators copy into the buffers of its collectives, and out of them: they write to a tensor that
they are given, all of it, and read what they copy once (``_fsdp_collectives.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trainfit.results.gpus import Kernel
from trainfit.simgpu.operators.kernel_rules import (
    Arguments,
    bytes_of,
    dtype_of,
    launched_by,
    tensors_in,
)
from trainfit.simgpu.patching import ImportHook, PatchSet
from trainfit.torch_private import modules as private


@launched_by("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
def _copies(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    written = call["out"] if "out" in call else call["all_gather_output"]
    targets = {id(each) for each in tensors_in(written)}
    sources = [each for each in tensors_in(list(call.values())) if id(each) not in targets]
    moved = bytes_of(sources)
    return [Kernel("pointwise", dtype_of(sources[0]), 0, moved, moved)] if sources else []


def watch_states(patches: PatchSet) -> ImportHook:
    """Let checkpoints of FSDP1's optimizers have the states of all ranks, until ``patches`` is
    restored; the hook is the caller's to remove.

    With ``use_orig_params`` each rank has the parameters whose elements are in its shards; taken
    as equal, the others would have this one's, and those that it has none of would have no state.
    """

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def keys_of_ranks(*args: Any, **kwargs: Any) -> Any:
            keys, own = original(*args, **kwargs)
            return sorted({*keys, *private.keys_of_other_ranks(original, args, kwargs)}), own

        return keys_of_ranks

    def seen(module: ModuleType) -> None:
        if hasattr(module, private.KEYS_OF_STATES):
            patches.hook(module, private.KEYS_OF_STATES, hook)

    return ImportHook(private.OPTIMIZER_STATES, seen)
