"""Names of PyTorch as stacks and profiles show them; without importing it.

One that is gone is not seen any more: nothing is looked up by it.
"""

from __future__ import annotations

from typing import Any, Final

#: Functions of a DataLoader's worker, of the thread that pins memory, and of the main process that
#: asks the sampler for the next batch's indices.
WORKER_LOOP: Final = "_worker_loop"
PIN_MEMORY_LOOP: Final = "_pin_memory_loop"
NEXT_INDEX: Final = "_next_index"
WORKER_FILE: Final = "utils/data/_utils/worker.py"
PIN_MEMORY_FILE: Final = "utils/data/_utils/pin_memory.py"

#: Modules whose functions cost a sample its time.
COLLATION: Final = "torch.utils.data._utils.collate"
OPERATORS: Final = "torch._ops"
#: How C modules call what PyTorch shows by another name.
SHOWN_AS: Final = (
    (("torch._C", "_VariableFunctionsClass"), "torch"),
    (("torch._C", "_VariableFunctions"), "torch"),
    (("torch._C", "TensorBase"), "torch.Tensor"),
    (("torch._C", "_TensorBase"), "torch.Tensor"),
)

#: What :func:`is_in_bad_fork` asks.
BAD_FORK: Final = "torch.cuda._is_in_bad_fork()"


def is_in_bad_fork(cuda: Any) -> bool:
    """Was this process forked from one that had started CUDA? ``cuda`` is ``torch.cuda``."""
    return bool(cuda._is_in_bad_fork())
