"""Is that an error of memory that ran out?"""

from __future__ import annotations

from typing import Final

import torch

#: Words of PyTorch's errors: of CUDA, and of its allocator of the host's memory
#: (c10/core/impl/alloc_cpu.cpp).
_WORDS: Final = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU or of the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    return any(each in text for each in _WORDS)
