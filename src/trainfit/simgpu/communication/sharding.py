"""Kernels of FSDP's own copies: into the buffers of its collectives, and out of them.

Their operators write to a tensor that they are given, all of it, and read what they copy once
(``_fsdp_collectives.py``).
"""

from __future__ import annotations

from typing import Any

from trainfit.results.gpus import Kernel
from trainfit.simgpu.operators.kernel_rules import (
    Arguments,
    bytes_of,
    dtype_of,
    launched_by,
    tensors_in,
)


@launched_by("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
def _copies(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    written = call["out"] if "out" in call else call["all_gather_output"]
    targets = {id(each) for each in tensors_in(written)}
    sources = [each for each in tensors_in(list(call.values())) if id(each) not in targets]
    moved = bytes_of(sources)
    return [Kernel("pointwise", dtype_of(sources[0]), 0, moved, moved)] if sources else []
