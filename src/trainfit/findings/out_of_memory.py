"""Why a GPU's memory was full, and what would have helped: conditions over plain facts.

The facts are those of one moment, whoever saw it: a snapshot of PyTorch's allocator, or a simulated
run's peak.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from trainfit.findings.habits import FRAGMENTED
from trainfit.results.findings import CALLS_WITH_GRAPH, Evidence, Finding, Fix, Place
from trainfit.results.runs.trace import FailedRequest
from trainfit.results.text import count, percent, size

#: A cause is named from this share of the allocated memory on.
_SHARE: Final = 0.05
#: What is meant to be is worth a warning from this share on, and is what the memory mostly is.
_MUCH: Final = 0.2
#: What is kept from step to step was left by so many of them at least, and by this share of those
#: that made some.
KEPT_PASSES: Final = 8
_KEPT_SHARE: Final = 0.9
#: Scratch memory below this is not worth a word: every job has some.
_SCRATCH: Final = 64 << 20
#: One checkpoint() around the whole model recomputes nearly all activations at once.
_ALL: Final = 0.8


@dataclasses.dataclass(frozen=True)
class HeldMemory:
    """Blocks with one origin.

    Attributes
    ----------
    kind: Of memory ("activation", "optimizer_state", …, "loaded", "backward", "other").
    place: The line that made them; ``None``: not known.
    kept: How many of them were made one after another, each in another pass of the script's loop,
        and never freed; 0: that is not so, or cannot be seen.
    loss: Whether the loss over classes or a vocabulary made them.
    recomputed: Whether a checkpointed part made them again in the backward pass.
    survived: Whether they were there at an earlier request that failed.
    pairwise: Whether they grow with the square of what an evaluation goes through.
    before: Bytes of them that the line made in the step before the one at the peak, which it made
        once more there.
    idle: How many of them calls of a model left for a backward pass that never began.
    adapted: Whether a layer with an adapter made them of its input, for the adapter's type.
    """

    kind: str
    operator: str
    place: Place | None
    nbytes: int
    kept: int = 0
    loss: bool = False
    recomputed: bool = False
    survived: bool = False
    pairwise: bool = False
    adapted: bool = False
    before: int = 0
    idle: int = 0


@dataclasses.dataclass(frozen=True)
class FullMemory:
    """A GPU's memory at one moment, in bytes.

    Attributes
    ----------
    requested_bytes: What was asked for in vain; ``None``: nothing was.
    largest_free_bytes: The largest free block of the cache; ``None``: not known.
    failures: Requests that failed, one after another.
    helpful_settings: Allocator settings with which the same requests do not fail (or need less), as
        NAME=VALUE for the environment, with the bytes that are reserved then.
    weights: Bytes of the model's parameters of 32 bits or more ("wide"), of 16 ("half") and of less
        ("small"); empty: not known.
    """

    held: Sequence[HeldMemory]
    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int | None = None
    largest_free_bytes: int | None = None
    failures: int = 0
    helpful_settings: Mapping[str, int] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def share(self, nbytes: int) -> float:
        """The share of the allocated memory (0 to 1)."""
        return nbytes / self.allocated_bytes if self.allocated_bytes else 0.0


def is_left_behind(passes: Sequence[int], made: Sequence[int], alive: Collection[int]) -> bool:
    """Whether pass after pass of the script's loop leaves some of a line's tensors behind.

    Args:
        passes: places at which a pass begins, in order.
        made: places at which the line made a tensor.
        alive: those of them whose tensors are still there.
    """
    born = {bisect_right(passes, place) for place in made}
    left = {bisect_right(passes, place) for place in alive}
    return len(left) >= KEPT_PASSES and len(left) >= _KEPT_SHARE * len(born)


#: The kind of what is kept from step to step.
TENSORS_KEPT: Final = "tensors_kept"
#: Tensors that a backward pass would need, of which it was the last.
_OF_GRAPHS: Final = "activation"
_NO_GRAPH: Final = Fix(
    "torch.no_grad() around an evaluation; in training `.item()` or `.detach()` of a loss before "
    "it is added or appended"
)
HELD_OVER: Final = "held_over"
#: What nobody means, whether it fits or not.
MISTAKES: Final = (
    *("checkpoint_on_gpu", "one_checkpoint", "adapter_copies", "bucket_large", HELD_OVER),
)
#: The kind of the finding that says what there is most of; the others are faults.
MOSTLY: Final = "memory_mostly"


def of_full_memory(memory: FullMemory) -> tuple[Finding, ...]:
    """The causes, the one with the most memory first."""
    causes = (
        *(_kept, _idle, _held_over, _pairwise, _survivors, _loaded, _loss, _whole_checkpoint),
        *(_adapters, _buckets, _workspaces, _fragments, _most),
    )
    findings = [finding for cause in causes for finding in cause(memory)]
    if any(finding.kind != MOSTLY for finding in findings[:-1]):
        findings.sort(key=lambda finding: (finding.kind == MOSTLY, -(finding.share or 0)))
    return tuple(findings)


def _kept(memory: FullMemory) -> Iterator[Finding]:
    kept = sorted((held for held in memory.held if held.kept), key=lambda held: -held.nbytes)
    nbytes = sum(held.nbytes for held in kept)
    share = memory.share(nbytes)
    if share < _SHARE:
        return
    lines = list(dict.fromkeys(str(held.place) for held in kept if held.place is not None))
    where = " and ".join(lines[:2]) or kept[0].operator
    number = sum(held.kept for held in kept)
    graphs = [held for held in kept if held.kind == _OF_GRAPHS]
    # Of a graph there are several layers' results; of what is kept by itself one.
    of_graphs = len(graphs) > 1 and 2 * sum(held.nbytes for held in graphs) > nbytes
    text = "activations of graphs" if of_graphs else "predictions, losses with their graph"
    yield Finding(
        TENSORS_KEPT,
        "critical",
        f"{size(nbytes)} are {count(number, 'tensor')} that {where} made in one step after "
        "another, all still there",
        (Evidence("kept", nbytes, "bytes"), Evidence("kept tensors", str(number))),
        f"they are kept in a list, a sum or an attribute ({text}), so memory grows with each step",
        (
            *((_NO_GRAPH,) if of_graphs else ()),
            Fix(
                "keep numbers, or copies on the CPU: `.detach().cpu()` before it is appended, "
                "`.item()` of a loss"
            ),
        ),
        share=share,
        place=kept[0].place,
    )


def _idle(memory: FullMemory) -> Iterator[Finding]:
    idle = sorted((held for held in memory.held if held.idle), key=lambda held: -held.nbytes)
    nbytes = sum(held.nbytes for held in idle)
    if memory.share(nbytes) < _SHARE:
        return
    kept = str(sum(held.idle for held in idle))
    yield Finding(
        CALLS_WITH_GRAPH,
        "critical",
        f"{size(nbytes)} are the graph of many calls of the model in a row, and no backward pass "
        "uses it: gradients are on while it samples or evaluates",
        (Evidence("of graphs", nbytes, "bytes"), Evidence("kept tensors", kept)),
        "each call gets what the one before gave, or its result is kept: all activations of all "
        "calls stay until the last one",
        (Fix("@torch.no_grad() on the function that samples or evaluates"),),
        share=memory.share(nbytes),
        place=idle[0].place,
    )


def _held_over(memory: FullMemory) -> Iterator[Finding]:
    late = sorted((held for held in memory.held if held.before), key=lambda held: -held.before)
    nbytes = sum(held.before for held in late)
    share = memory.share(nbytes)
    if share < _MUCH:
        return
    yield Finding(
        HELD_OVER,
        "warning",
        f"{size(nbytes)} of the step before are still there while the next step makes its own",
        (Evidence("of the step before", nbytes, "bytes"),),
        "a variable keeps what the last step made until this one gives it another: both are in "
        "memory at once, from the second step on",
        (Fix("del of that variable after its last use, or the step in a function of its own"),),
        share=share,
        place=late[0].place,
    )


def _pairwise(memory: FullMemory) -> Iterator[Finding]:
    pairs = sorted((held for held in memory.held if held.pairwise), key=lambda held: -held.nbytes)
    nbytes = sum(held.nbytes for held in pairs)
    share = memory.share(nbytes)
    if share < _SHARE:
        return
    place = next((held.place for held in pairs if held.place is not None), None)
    where = place or pairs[0].operator
    yield Finding(
        "all_pairs",
        "critical",
        f"{size(nbytes)} are between all samples and all others, made at {where}",
        (Evidence("of all pairs", nbytes, "bytes"),),
        "a matrix of all pairs (distances, similarities) grows with the square of the samples",
        (Fix("compute it for some rows after another, and keep of each what is needed (top k)"),),
        share=share,
        place=place,
    )


def _survivors(memory: FullMemory) -> Iterator[Finding]:
    nbytes = sum(held.nbytes for held in memory.held if held.survived and _of_a_step(held))
    share = memory.share(nbytes)
    if memory.failures < 2 or share < _SHARE:
        return
    yield Finding(
        "failed_try_alive",
        "critical",
        f"{size(nbytes)} are tensors of the try that failed before, still there in the next one",
        (
            Evidence("of the failed try", nbytes, "bytes"),
            Evidence("failed requests", str(memory.failures)),
        ),
        "inside `except` the error's traceback holds the frames of the failed try, and those their "
        "tensors",
        (
            Fix(
                "leave the except clause before trying again (set a flag there, retry after it), "
                "then gc.collect() and torch.cuda.empty_cache()"
            ),
        ),
        share=share,
    )


def _of_a_step(held: HeldMemory) -> bool:
    return held.kind in ("activation", "backward", "temporary", "gradient", "other")


def _loaded(memory: FullMemory) -> Iterator[Finding]:
    """A checkpoint on the GPU in addition to the model that it was loaded into."""
    models = sum(held.nbytes for held in memory.held if held.kind == "parameter")
    for held in memory.held:
        share = memory.share(held.nbytes)
        if held.kind != "loaded" or share < _SHARE or models < held.nbytes / 4:
            continue
        yield Finding(
            "checkpoint_on_gpu",
            "warning",
            f"{size(held.nbytes)} were read from a file onto the GPU and are kept in addition to "
            "the model",
            (Evidence("loaded", held.nbytes, "bytes"),),
            "torch.load puts tensors where they were when they were saved",
            (Fix("torch.load(FILE, map_location='cpu'), and `del` it after load_state_dict"),),
            share=share,
            place=held.place,
        )


def _loss(memory: FullMemory) -> Iterator[Finding]:
    of_loss = [held for held in memory.held if held.loss]
    nbytes = sum(held.nbytes for held in of_loss)
    share = memory.share(nbytes)
    if share < 2 * _SHARE:
        return
    largest = max(of_loss, key=lambda held: held.nbytes)
    yield Finding(
        "logits_copied",
        "warning",
        f"{size(nbytes)} are logits, their float32 copy and what the loss makes of them",
        (Evidence("of the loss", nbytes, "bytes"),),
        "batch × positions × classes numbers, several times: as they come out of the model, in "
        "float32, and once more for the gradient",
        (
            Fix("a chunked or fused cross-entropy (liger-kernel, cut-cross-entropy)"),
            Fix("logits only where there is a label; a shorter sequence"),
        ),
        share=share,
        place=largest.place,
    )


def _whole_checkpoint(memory: FullMemory) -> Iterator[Finding]:
    kept = [held for held in memory.held if held.kind == "activation" or held.recomputed]
    total = sum(held.nbytes for held in kept)
    again = sum(held.nbytes for held in kept if held.recomputed)
    if memory.share(again) < 2 * _SHARE or again < _ALL * total:
        return
    yield Finding(
        "one_checkpoint",
        "warning",
        f"{size(again)} are activations that checkpointing computed again, all at once",
        (Evidence("recomputed", again, "bytes"), Evidence("activations", total, "bytes")),
        "one checkpoint() around most of the model: in the backward pass all of it is there again, "
        "so its peak is that without checkpointing",
        (Fix("checkpoint each block (layer) by itself"),),
        share=memory.share(again),
    )


def _adapters(memory: FullMemory) -> Iterator[Finding]:
    """Adapters in float32 on layers in 16 bits: PEFT means them to be so, their memory rarely."""
    copies = sum(held.nbytes for held in memory.held if held.adapted and held.kind == "activation")
    share = memory.share(copies)
    if share < 2 * _SHARE:
        return
    yield Finding(
        "adapter_copies",
        "warning" if share >= _MUCH else "info",
        f"{size(copies)} are copies of layers' inputs for their adapters",
        (Evidence("copies", copies, "bytes"),),
        "the adapters have another type (PEFT makes them float32) than the model: each adapted "
        "layer keeps a copy of its input for the backward pass",
        (
            Fix(
                "adapters in the model's type, which rounds their updates: "
                "get_peft_model(model, config, autocast_adapter_dtype=False)",
                line="get_peft_model(model, config, autocast_adapter_dtype=False)",
            ),
        ),
        share=share,
    )


def _buckets(memory: FullMemory) -> Iterator[Finding]:
    nbytes = sum(held.nbytes for held in memory.held if held.kind == "bucket")
    share = memory.share(nbytes)
    if share < 2 * _SHARE:
        return
    yield Finding(
        "bucket_large",
        "warning" if share >= _MUCH else "info",
        f"{size(nbytes)} are DeepSpeed's bucket, in which gradients wait for being reduced",
        (Evidence("bucket", nbytes, "bytes"),),
        "it has room for reduce_bucket_size gradients, by default 500,000,000, however few the "
        "model has; overlap_comm makes two of them",
        (
            Fix(
                'a smaller "reduce_bucket_size" in "zero_optimization" of DeepSpeed\'s '
                'configuration: 5e7, or "auto" with Transformers (the square of its hidden size)',
                cost="more, smaller reductions",
            ),
        ),
        share=share,
    )


def _workspaces(memory: FullMemory) -> Iterator[Finding]:
    nbytes = sum(held.nbytes for held in memory.held if held.kind == "workspace")
    share = memory.share(nbytes)
    if share < 2 * _SHARE or nbytes < _SCRATCH:
        return
    yield Finding(
        "workspace_large",
        "warning",
        f"{size(nbytes)} are scratch memory of cuDNN and cuBLAS",
        (Evidence("workspaces", nbytes, "bytes"),),
        "what convolutions and matmuls need of it goes by the size of the batch; with "
        "cudnn.benchmark each new input size tries every algorithm, the hungriest, too",
        (
            Fix("a smaller batch where this one is made (an evaluation of all samples at once)"),
            Fix("no torch.backends.cudnn.benchmark = True where sizes change"),
            Fix("CUBLAS_WORKSPACE_CONFIG=:4096:2 bounds cuBLAS'"),
        ),
        share=share,
    )


def _fragments(memory: FullMemory) -> Iterator[Finding]:
    unused = memory.reserved_bytes - memory.allocated_bytes
    asked = memory.requested_bytes
    helps = dict(memory.helpful_settings)
    if asked is None:
        if not helps or unused < 2 * _SHARE * memory.reserved_bytes:
            return
    elif unused < asked and not helps:
        return
    largest = memory.largest_free_bytes
    facts = [Evidence("reserved and unused", unused, "bytes")]
    if largest is not None:
        facts.append(Evidence("largest free block", largest, "bytes"))
    title = f"{size(unused)} are reserved by PyTorch and not in use"
    if asked is not None:
        title += f", in pieces too small for {size(asked)}"
    fixes = [
        Fix(
            setting, undo="leave the variable out", cost=f"reserves {size(reserved)} then, replayed"
        )
        for setting, reserved in helps.items()
    ]
    if not fixes:
        fixes = [Fix(FRAGMENTED.action)]
    yield Finding(
        "fragmented",
        "critical" if asked is not None else "info",
        title,
        tuple(facts),
        "free blocks lie in segments that other tensors hold; one request needs one block",
        tuple(fixes),
        confidence="certain" if helps else "likely",
        share=unused / memory.reserved_bytes if memory.reserved_bytes else None,
    )


#: Kinds that a model's weights are of.
_WEIGHTS: Final = ("parameter", "loaded")
#: What lowers the kinds that memory mostly consists of.
_LESS: Final[Mapping[str, tuple[str, ...]]] = {
    "activation": (
        "checkpoint the blocks of the model (torch.utils.checkpoint): activations are computed "
        "again in the backward pass",
        "a smaller batch with gradient accumulation; bfloat16 autocast",
    ),
    "temporary": (
        "fewer samples at a time, or shorter ones: an evaluation works with smaller batches; "
        "attention by scaled_dot_product_attention, which never has the whole matrix",
    ),
    "backward": (
        "a smaller batch with gradient accumulation; checkpoint the blocks of the model",
        "optimizer.zero_grad(set_to_none=True) before the forward pass",
    ),
    "optimizer_state": (
        "an optimizer with 8-bit states (bitsandbytes.optim.AdamW8bit), or Adafactor",
        "train fewer parameters (LoRA)",
    ),
    "gradient": (
        "step in the backward pass (register_post_accumulate_grad_hook), or train fewer parameters "
        "(LoRA)",
    ),
    **dict.fromkeys(_WEIGHTS, ("weights in bfloat16, or quantized with adapters (QLoRA)",)),
    "data": (
        "keep the data in the host's memory and move each batch: x.to(device) in the loop, by a "
        "DataLoader with workers and pin_memory=True",
        "a smaller type on the GPU: images as uint8, numbers as float16, until they are used",
    ),
}


def _most(memory: FullMemory) -> Iterator[Finding]:
    """What there is most of, and what makes it less."""
    kinds: dict[str, int] = {}
    for held in memory.held:
        kinds[held.kind] = kinds.get(held.kind, 0) + held.nbytes
    known = {kind: nbytes for kind, nbytes in kinds.items() if kind in _LESS}
    if not known:
        return
    kind = max(known, key=lambda name: known[name])
    largest = max((held for held in memory.held if held.kind == kind), key=lambda held: held.nbytes)
    share = memory.share(known[kind])
    if share < _MUCH:
        return
    yield Finding(
        MOSTLY,
        "info",
        f"{percent(share)} of the memory: {KINDS[kind]}",
        (Evidence(KINDS[kind], known[kind], "bytes"),),
        "",
        tuple(map(Fix, _of_half(memory) if kind in _WEIGHTS else _LESS[kind])),
        share=share,
        place=largest.place,
    )


def _of_half(memory: FullMemory) -> tuple[str, ...]:
    """What makes weights less, by what they are stored in already."""
    wide, half, small = (memory.weights.get(name, 0) for name in ("wide", "half", "small"))
    if small > max(wide, half):
        return ("a smaller model: its weights are quantized already",)
    return ("weights quantized, with adapters (QLoRA)",) if half > wide else _LESS["parameter"]


def of_first_step(by_kind: Mapping[str, int]) -> Finding:
    """The finding that a GPU is full at an optimizer's first step, by what it has of each kind."""
    parameters = by_kind.get("parameter", 0)
    return Finding(
        "optimizer_state_first",
        "critical",
        "Memory is full in the optimizer's first step, which makes its state",
        (
            Evidence("parameters", parameters, "bytes"),
            Evidence("gradients", by_kind.get("gradient", 0), "bytes"),
            Evidence("optimizer state so far", by_kind.get("optimizer_state", 0), "bytes"),
        ),
        f"Adam and AdamW keep two numbers for each parameter that is trained (here up to "
        f"{size(2 * parameters)}), SGD with momentum one, plain SGD none; a backward pass that "
        "fits says nothing of it",
        tuple(map(Fix, _LESS["optimizer_state"])),
    )


#: Kinds of memory by the names that people read.
KINDS: Final[Mapping[str, str]] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations",
    "input": "inputs",
    "temporary": "temporaries",
    "workspace": "workspaces",
    "kv_cache": "KV cache",
    "data": "data",
    "bucket": "gradient bucket",
    "backward": "backward pass",
    "loaded": "read from files",
    "other": "outside modules",
    "before_history": "older: no stack",
    "no_stack": "no stack",
}


#: A result this many times what it is computed of is one of all pairs, or of each class.
_BLOWN_UP: Final = 16
_ROW_BY_ROW: Final = (
    "compute it for some rows after another, and keep of each what is needed (top k)"
)
#: How operators that make such results do without.
_WITHOUT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("sub", "pow", "mul", "add", "div", "abs", "maximum", "minimum", "eq", "where", "clone"),
        "torch.cdist(x, y), or norms and x @ y.T, which have one number for each pair and not one "
        "for each feature of it, too",
    ),
    **dict.fromkeys(
        ("mm", "bmm", "baddbmm"),
        "of logits a chunked or fused cross-entropy, of attention scaled_dot_product_attention",
    ),
    **dict.fromkeys(
        ("cdist_forward", "euclidean_dist", "pairwise_distance", "repeat"), _ROW_BY_ROW
    ),
    **dict.fromkeys(
        ("one_hot", "scatter"),
        "class indices in place of one-hot vectors: cross_entropy and Embedding use them",
    ),
}


def of_request(request: FailedRequest, place: Place | None) -> Iterator[Finding]:
    """The cause that a single request for too much memory shows by itself."""
    instead = _WITHOUT.get(request.operator)
    if instead is None or request.nbytes < _BLOWN_UP * request.input_bytes:
        return
    more = request.nbytes / request.input_bytes
    yield Finding(
        "result_blown_up",
        "critical",
        f"{size(request.nbytes)} at once for one result of {request.operator}: {more:.0f} times "
        "what it is computed of",
        (
            Evidence("asked for", request.nbytes, "bytes"),
            Evidence("computed of", " and ".join(request.inputs)),
        ),
        "each number of one tensor meets each of another (broadcast, expand, all pairs, a place "
        "for each class): the result has as many numbers as their sizes multiplied",
        tuple(map(Fix, dict.fromkeys((instead, _ROW_BY_ROW)))),
        place=place,
    )


#: PyTorch's words, of what was asked for and what is free.
_ASKED: Final = re.compile(
    r"^(?:(?P<place>[^\s:]+:\d+): )?[\s\S]*Tried to allocate (?P<asked>[\d.]+ \w+)\."
    r"[\s\S]*?of which (?P<free>[\d.]+ \w+) is free"
)


def asked_in_vain(message: str) -> str:
    """What an out-of-memory message says, in short: "train.py:7 asks for 2.00 GiB, and 1.10 GiB are
    free"; empty where it says something else."""
    match = _ASKED.search(message)
    if match is None:
        return ""
    return (
        f"{match['place'] or 'the script'} asks for {match['asked']}, and {match['free']} are free"
    )


def needed_and_there(message: str) -> str:
    """PyTorch's message without the advice at its end: what was asked for, and what there is."""
    return message.partition(" If reserved")[0]
