"""Habits of training scripts that cost time, memory or the result: why, and what to write instead.

`trainfit doctor` sees them in the source, `trainfit watch` by what they cost, `trainfit plan` and
`trainfit loader` by what a run without them gives: each says it in these words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Habit:
    """``cause`` says what it does, ``action`` what to do instead, ``line`` what to write."""

    cause: str
    action: str
    line: str = ""


LOADED_IN_TRAINING: Final = Habit(
    "num_workers=0: each batch is loaded in the training process, between steps, and the training "
    "waits for it; workers load the next ones meanwhile",
    "set num_workers=4 and persistent_workers=True",
)
UNPINNED: Final = Habit(
    "The GPU cannot read pageable memory: the driver first copies it into a buffer, and the host "
    "waits for that, with non_blocking=True, too",
    "set pin_memory=True in the DataLoader and copy with non_blocking=True",
    "batch = batch.to(device, non_blocking=True)",
)
#: A data set, or what it makes, on the GPU.
ON_GPU_EARLY: Final = Habit(
    'With workers it fails with "Cannot re-initialize CUDA in forked subprocess"',
    f"move each batch in the training loop: {UNPINNED.line}",
    UNPINNED.line,
)
DATA_PARALLEL: Final = Habit(
    "DataParallel runs all GPUs from one Python process: it copies the model to every GPU in each "
    "forward pass, gathers all outputs on the first one (which needs more memory), and its threads "
    "contend for the GIL",
    "use DistributedDataParallel with torchrun: one process per GPU",
)
#: A model whose layers are on several GPUs, with nothing that lets them work at the same time.
TAKES_TURNS: Final = Habit(
    "A model that is split over GPUs computes one part after the other: while one works, the "
    "others wait. It makes room for a large model, and is no faster than one GPU",
    "use FullyShardedDataParallel with torchrun, which splits the memory and lets all GPUs work; "
    "where it fits on one GPU, DistributedDataParallel",
)
FLOAT32: Final = Habit(
    "In float32, matmuls and convolutions do not use the Tensor Cores' 16-bit rates, and "
    "activations need twice the memory",
    "run the forward pass and the loss under torch.autocast",
)
#: Gradients in float16 without a scaler.
UNSCALED: Final = Habit(
    "gradients below 6e-8 become 0 in float16, and numbers above 65504 infinite",
    "scale the loss by torch.amp.GradScaler, or compute in bfloat16",
)
KEPT_GRAPHS: Final = Habit(
    "what is kept with its autograd graph keeps every step's graph alive: memory grows with every "
    "step, on the host by the graph's nodes, on the GPU by what backward() has not freed",
    "keep numbers, not tensors: total += loss.item() or loss.detach()",
)
KEPT_BATCHES: Final = Habit(
    "batches or outputs of past steps are kept: memory grows with every step, and a batch of a "
    "worker lies in /dev/shm and keeps a file open",
    "keep only what is needed of it (.clone() a part, .item()), move it to a file, or clear the "
    "list at each epoch",
)
#: Steps that get longer.
GROWING_WORK: Final = Habit(
    "what a step computes with grows with the number of steps: a history that is never cut, a "
    "hidden state or a sum whose graph goes back to the first step, hooks that each step adds",
    "cut the history (x[:, -N:]), and detach() what one step gives to the next; register hooks "
    "once",
)
FRAGMENTED: Final = Habit(
    "free blocks of the caching allocator do not fit the requested sizes: batches of changing "
    "shapes leave such blocks",
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the command",
)


#: What :data:`FRAGMENTED` sets.
EXPANDABLE: Final = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def autocast(dtype: str) -> str:
    """The line that begins autocast in "bfloat16" or "float16"."""
    return f'with torch.autocast("cuda", dtype=torch.{dtype}):'


def restarted_workers(workers: int | None = None) -> str:
    """Why an epoch begins slowly without ``persistent_workers``."""
    which = "the workers" if workers is None else f"{workers} worker processes"
    return (
        f"Each epoch restarts {which}: they are started, get the data set, and the training waits "
        "for the first batches"
    )
