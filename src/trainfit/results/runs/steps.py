"""What simulated steps consist of: make-up, kernels, and what was seen of the training."""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Literal

Course = Literal[
    "settled",  # from some step on, every one (or every period of them) uses the same
    "growing",  # each step leaves more behind than the one before
    "irregular",  # neither: the steps differ, as with batches of variable shape
    "unknown",  # too few steps to tell
]


#: What a script waits for the GPU for: a number, a tensor's values, the size of a result that
#: depends on data, a copy to the GPU, or all that was submitted (``synchronize()``).
WaitKind = Literal["value", "copy", "size", "upload", "all"]

#: What told how many samples an optimizer step has: the batches that the DataLoader gave, or the
#: calls of the model that a backward pass followed.
StepSource = Literal["DataLoader", "model calls", "unknown"]

#: Libraries whose training loop makes the step; "" is the script's own.
Framework = Literal["", "Accelerate", "Lightning", "Transformers"]


#: Optimizer steps of a long training. Over as many, growth must stay within what a recommendation
#: leaves free: a loss that is kept for each step of an epoch (512 bytes) does, a batch does not.
LONG_TRAINING: Final = 1_000_000
#: What a recommendation leaves free at least, as a share of the GPU.
_LEFT_FREE: Final = 0.09


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """What a line copies from the host's memory to the GPU in each step: ``nbytes`` in ``times``
    copies. ``is_made``: it is made on the host each time, else the same numbers are copied."""

    line: str
    nbytes: int
    times: int
    is_made: bool


@dataclasses.dataclass(frozen=True)
class StepMakeup:
    """What one optimizer step consists of: ``micro_batch`` samples × ``accumulation``
    micro-batches = ``effective_batch`` samples, as the simulated steps had it most often.

    The three are ``None`` where they cannot be told; ``why`` says why, and what would be needed.
    ``loader_batches`` are the batches that the DataLoader gives for a step (``None``: it gives
    none). ``per_step`` are the micro-batches of each simulated step; ``varied`` says whether the
    steps differed, the shorter last one of an epoch included. ``loop`` is whose loop makes the
    step, ``where`` the user's line that it is called from; ``waits`` are the user's lines at which
    the CPU waits for the GPU in each step, ``wait_kinds`` what each waits for (empty: not known);
    ``looped_waits``: how often at the first of them, where that is in a loop (0: it is not);
    ``uploads`` are lines that copy to the GPU in each step what could be there. ``trials`` are the
    steps after the first in which ``cudnn.benchmark`` timed algorithms of one convolution, for
    sizes that had not come before.
    ``is_whole``: each step is of the same tensors, as all samples at once are. ``rounds`` are the
    steps of optimizers in turns that it has, each with as many of its samples. ``is_kept``: at
    another batch size the script itself makes as many micro-batches as have the same samples.
    ``processes`` of a job have such a step each, at once, of samples of their own: ranks that share
    the same samples, and a pipeline's, count once.
    """

    micro_batch: int | None
    accumulation: int | None
    effective_batch: int | None
    source: StepSource = "unknown"
    loader_batches: int | None = None
    per_step: tuple[int, ...] = ()
    varied: bool = False
    loop: Framework = ""
    where: str | None = None
    waits: tuple[str, ...] = ()
    wait_kinds: tuple[WaitKind, ...] = ()
    uploads: tuple[HostCopy, ...] = ()
    trials: int = 0
    looped_waits: int = 0
    why: str = ""
    is_whole: bool = False
    rounds: int = 1
    is_kept: bool = False
    processes: int = 1

    def of_all(self, processes: int) -> StepMakeup:
        """The makeup with the samples of all ``processes``, of which this one has as many as the
        others."""
        micro, samples = self.micro_batch, self.effective_batch
        return dataclasses.replace(
            self,
            micro_batch=None if micro is None else micro * processes,
            effective_batch=None if samples is None else samples * processes,
            processes=max(1, self.processes // processes),
        )


#: Operators whose results no cache of keys and values is made of, but a backward pass needs.
_OF_GRAPHS: Final = re.compile(r"conv|elu|silu|mish|sigmoid|tanh|pool|softmax|dropout|rnn|lstm|gru")


@dataclasses.dataclass(frozen=True)
class GrowthSource:
    """A line or module whose memory stays behind: ``bytes_per_step`` on average.

    ``line`` is the user's line that ran the operator, where it is known.
    """

    bytes_per_step: int
    operator: str
    module: str
    kind: str
    phase: str
    line: str | None

    @property
    def is_of_graph(self) -> bool:
        """Is it what a layer computes for a backward pass, and no cache of keys and values?"""
        return bool(self.module) and _OF_GRAPHS.search(self.operator) is not None


StepUnit = Literal["optimizer step", "backward pass", "model call"]


@dataclasses.dataclass(frozen=True)
class StepPattern:
    """What the simulated steps say of all others.

    ``peak_bytes`` and ``end_bytes`` are, per step, the largest and the last sum of all
    allocations, each rounded up to 512 bytes (the allocator can charge a little more for a
    block that is not split). ``settled_from`` counts steps from 1; ``period`` is in steps.
    ``steps_until_full`` counts from the start, and is ``None`` where nothing grows. ``unit`` is
    what a step is: without an optimizer of PyTorch's a backward pass, of what does not train a
    call. ``text_calls`` are the
    calls to the end of a generated text, where figures are for that (``None``: they are for the
    simulated steps). ``grows_by_bytes`` is what it grows by in all, where what it keeps has a bound
    (a deque with ``maxlen``), or is let go at the end of each epoch, of ``freed_every`` steps
    (``None``: it is not, or that was not simulated).
    """

    course: Course
    steps: int
    peak_bytes: tuple[int, ...]
    end_bytes: tuple[int, ...]
    settled_from: int | None = None
    period: int | None = None
    growth_bytes_per_step: int | None = None
    steps_until_full: int | None = None
    sources: tuple[GrowthSource, ...] = ()
    unit: StepUnit = "optimizer step"
    text_calls: int | None = None
    grows_by_bytes: int | None = None
    freed_every: int | None = None

    @property
    def grows_slowly(self) -> bool:
        """Does a long training leave no more behind than a recommendation leaves free?"""
        growth, until = self.growth_bytes_per_step, self.steps_until_full
        if self.course != "growing" or not growth or until is None or not self.peak_bytes:
            return False
        gpu_bytes = max(self.peak_bytes) + growth * max(0, until - self.steps)
        return growth * LONG_TRAINING <= _LEFT_FREE * gpu_bytes


# ---
# What of a training run was among its simulated steps.


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Whether the script evaluated its model and wrote a checkpoint while it was simulated.

    ``evaluated``: a model with trained parameters was called in evaluation mode or without
    gradients. ``saved``: ``torch.save`` or safetensors wrote something. ``epochs`` is how much of
    its data the DataLoader had given by the last step, ``steps_per_epoch`` how many optimizer
    steps an epoch has at that pace, ``all_epochs`` how many the script's loop has (``None``: not
    known). ``evaluation_batches`` is the length of the longest DataLoader that was cut short in
    addition to the training's (``None``: none was, or it has no length), ``evaluation_batch_size``
    the samples of its batches. ``graph_at`` is the user's
    line at which an evaluation calls the model with gradients on, ``training_at`` the one at which
    it does so in training mode, ``dropping_at`` the one that drops values out in it whatever the
    mode (``None``: none does). ``after`` is the first line after all loops that may need the GPU's
    memory, ``by_number`` the one at which something goes by the number of an epoch (``None``: there
    is none, or the loops are none of the script's). ``is_whole``: the script came to its end, and
    has no more than was simulated. ``most_steps`` are those of the training, where a library's
    trainer knows them (``None``: none does). ``is_eager``: what it gives to ``torch.compile`` ran
    in eager mode. ``evaluated_each`` and ``saved_each`` are lines that evaluate the model, or write
    a checkpoint, in each step after the first, of several in an epoch (``None``: none does).
    """

    evaluated: bool
    saved: bool
    epochs: float | None = None
    steps_per_epoch: int | None = None
    all_epochs: int | None = None
    evaluation_batches: int | None = None
    evaluation_batch_size: int | None = None
    graph_at: str | None = None
    training_at: str | None = None
    dropping_at: str | None = None
    after: str | None = None
    by_number: str | None = None
    is_whole: bool = False
    most_steps: int | None = None
    is_eager: bool = False
    evaluated_each: str | None = None
    saved_each: str | None = None

    @property
    def all_steps(self) -> int | None:
        """Optimizer steps of the training; of one epoch where no loop tells how many it has."""
        of_epochs = self.steps_per_epoch and self.steps_per_epoch * (self.all_epochs or 1)
        return min(filter(None, (of_epochs, self.most_steps)), default=of_epochs)


# ---
# The kernels that a simulated run would have launched on its GPU, with their work.
#
# One row is one kernel, or several of the same kind that an operator launches one after another.
# Columns are whole numbers, so that two batch sizes give every other one (they are affine in it).


#: What processes do together, over the links between their GPUs.
COLLECTIVES: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "send_receive",
)

#: From one GPU of a process to another.
PEER_COPY: Final = "peer_copy"
#: All that passes between GPUs.
TRANSFERS: Final = (*COLLECTIVES, PEER_COPY)

#: Copies between host and device that the host waits for, and those of pinned memory.
PAGEABLE_COPIES: Final = ("upload", "download")
PINNED_COPIES: Final = ("upload_pinned", "download_pinned")
HOST_COPIES: Final = (*PAGEABLE_COPIES, *PINNED_COPIES)

#: What a kernel does, in the order of the codes of ``Recording.kernel_kind``.
#: "matmul": matrix multiplications. "convolution…": as implicit matmuls, by cuDNN;
#: "convolution_3x3…": by filters that Winograd's algorithm is for, in steps of 1 and planes apart;
#: "convolution_1x1…": by filters of one place, of channels that are next to each other;
#: "grouped…": convolutions in several groups, "grouped_nhwc…" of channels-last tensors;
#: "depthwise…": one filter a channel, by PyTorch's own kernels; "depthwise_nhwc…" by cuDNN's for
#: channels-last tensors. "attention…": fused scaled dot product attention.
#: "pointwise": elementwise, over operands of one layout; "pointwise_reordered": over some whose
#: neighbours in memory are others; "layout": cuDNN's copies into the order of its convolutions;
#: "batch_norm…": in training ("batch_norm_nhwc…" of channels-last tensors) and "batch_norm_eval";
#: "normalization…": of layers and groups; "indexing": look-ups and scatters; "optimizer": over
#: lists of parameters; "upload…", "download…": between host and device ("…_pinned": of pinned
#: memory, while the host goes on); "wait": no kernel, the host waits here until the GPU has done
#: everything, "stream_wait": until the row's stream has; "event": number ``rows`` is recorded;
#: "event_wait": the row's stream goes on after
#: event ``rows`` of stream ``columns``; "event_synchronize": the host does, after one of the row's;
#: "unknown": of an operator that is not PyTorch's and has no FLOP rule: counted are its bytes;
#: "graph": the ``rows`` rows that follow are launched together, by one launch (a CUDA graph's);
#: "all_reduce" and what else is of :data:`COLLECTIVES`: by NCCL, of ``read`` bytes among ``rows``
#: processes (as nccl-tests count them: of an all-gather and a reduce-scatter the whole) on
#: ``columns`` machines (0: one);
#: "peer_copy": from one GPU of a process to another, on a stream of the first.
KINDS: Final = (
    "matmul",
    "convolution",
    "convolution_input_gradient",
    "convolution_weight_gradient",
    "grouped",
    "grouped_input_gradient",
    "grouped_weight_gradient",
    "grouped_nhwc",
    "grouped_nhwc_input_gradient",
    "grouped_nhwc_weight_gradient",
    "depthwise",
    "depthwise_input_gradient",
    "depthwise_weight_gradient",
    "depthwise_nhwc",
    "depthwise_nhwc_input_gradient",
    "depthwise_nhwc_weight_gradient",
    "attention",
    "attention_gradient",
    "recurrent",
    "pointwise",
    "layout",
    "reduction",
    "normalization",
    "normalization_gradient",
    "softmax",
    "pooling",
    "pooling_gradient",
    "resampling",
    "indexing",
    "sorting",
    "fill",
    "optimizer",
    "upload",
    "upload_pinned",
    "download",
    "wait",
    "pointwise_reordered",
    "concatenation",
    "batch_norm",
    "batch_norm_gradient",
    "batch_norm_nhwc",
    "batch_norm_nhwc_gradient",
    "batch_norm_eval",
    "stream_wait",
    "event",
    "event_wait",
    "event_synchronize",
    "convolution_3x3",
    "convolution_3x3_input_gradient",
    "graph",
    "unknown",
    *TRANSFERS,
    "convolution_1x1",
    "convolution_1x1_input_gradient",
    "convolution_1x1_weight_gradient",
    "download_pinned",
)

#: Rows of these kinds are no kernels.
MARKS: Final = ("wait", "stream_wait", "event", "event_wait", "event_synchronize", "graph")

#: In which numbers a kernel computes, in the order of the codes of ``Recording.kernel_dtype``.
DTYPES: Final = ("float32", "tfloat32", "float16", "bfloat16", "float64", "float8", "integer")

#: Kernels that the CPU can be ahead of the GPU: CUDA's launch queue holds 1,024, and a further
#: launch waits. (Not documented; what is seen where launches are timed.)
LAUNCH_QUEUE: Final = 1024
