"""Habits of training scripts that cost time, memory or the result: why, and what to write instead.

`trainfit doctor` sees them in the source, `trainfit watch` by what they cost, `trainfit plan` and
`trainfit loader` by what a run without them gives: each says it in these words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainfit.results.findings import EVALUATION_WITH_GRAPH, Evidence, Finding, Fix, Place
from trainfit.results.runs.steps import Coverage, HostCopy, StepMakeup, WaitKind
from trainfit.results.text import count


@dataclass(frozen=True)
class ScriptHabit:
    """``cause`` says what it does, ``action`` what to do instead, ``line`` what to write."""

    cause: str
    action: str
    line: str = ""


LOADED_IN_TRAINING: Final = ScriptHabit(
    "num_workers=0: each batch is loaded in the training process, between steps, and the training "
    "waits for it; workers load the next ones meanwhile",
    "set num_workers=4 and persistent_workers=True",
)
UNPINNED: Final = ScriptHabit(
    "The GPU cannot read pageable memory: the driver first copies it into a buffer, and the host "
    "waits for that, with non_blocking=True, too",
    "set pin_memory=True in the DataLoader and copy with non_blocking=True",
    "batch = batch.to(device, non_blocking=True)",
)
#: A data set, or what it makes, on the GPU.
ON_GPU_EARLY: Final = ScriptHabit(
    'With workers it fails with "Cannot re-initialize CUDA in forked subprocess"',
    f"move each batch in the training loop: {UNPINNED.line}",
    UNPINNED.line,
)
DATA_PARALLEL: Final = ScriptHabit(
    "DataParallel runs all GPUs from one Python process: it copies the model to every GPU in each "
    "forward pass, gathers all outputs on the first one (which needs more memory), and its threads "
    "contend for the GIL",
    "use DistributedDataParallel with torchrun: one process per GPU",
)
#: A model whose layers are on several GPUs, with nothing that lets them work at the same time.
TAKES_TURNS: Final = ScriptHabit(
    "A model that is split over GPUs computes one part after the other: while one works, the "
    "others wait. It makes room for a large model, and is no faster than one GPU",
    "use FullyShardedDataParallel with torchrun, which splits the memory and lets all GPUs work; "
    "where it fits on one GPU, DistributedDataParallel",
)
FLOAT32: Final = ScriptHabit(
    "In float32, matmuls and convolutions do not use the Tensor Cores' 16-bit rates, and "
    "activations need twice the memory",
    "run the forward pass and the loss under torch.autocast",
)
#: Gradients in float16 without a scaler.
UNSCALED: Final = ScriptHabit(
    "gradients below 6e-8 become 0 in float16, and numbers above 65504 infinite",
    "scale the loss by torch.amp.GradScaler, or compute in bfloat16",
)
WAITS: Final = ScriptHabit(
    "item(), cpu(), print(tensor), synchronize(), empty_cache() and the like wait until the GPU is "
    "done; it is idle until the host has launched the next kernels",
    "read the loss every 50 steps only (loss.detach() in between), compute metrics on the GPU, and "
    "leave empty_cache() out of the loop: PyTorch gives freed memory to the next tensors by itself",
    "if step % 50 == 0: print(loss.item())",
)
#: A loop over the samples of a batch that reads a tensor of the GPU for each of them.
WAITS_FOR_EACH: Final = ScriptHabit(
    "a condition on a number of the GPU (if y[i] == 1), item() or print() of it waits until the "
    "GPU has computed it; between two of them the GPU has one small kernel at a time",
    "numbers: keep the tensors, and read all of them once after the loop, by "
    "torch.stack(values).tolist() (a norm of gradients: torch.nn.utils.get_total_norm); conditions "
    "for each sample: torch.where or a mask over the whole batch, or y.tolist() before the loop",
    "values = torch.stack(values).tolist()",
)
#: What a tensor is copied to the host for: metrics, histograms, plots.
COPIES_OUT: Final = ScriptHabit(
    "cpu(), numpy() or print() of a tensor waits until the GPU has computed it, and copies it; the "
    "GPU is idle until the host has launched the next kernels",
    "copy it every 100 steps only, or compute on the GPU what is needed of it (a mean, "
    "torch.histc) and read that",
    "if step % 100 == 0: …",
)
#: A result that has as many elements as the data says.
SIZED_BY_DATA: Final = ScriptHabit(
    "x[mask], nonzero(), masked_select(), unique() and the like give a result whose size depends "
    "on the data: the CPU waits until the GPU has counted, and the GPU is then idle until the host "
    "has launched the next kernels",
    "compute with the whole tensor and weigh it by the mask: losses of reduction='none', then "
    "(losses * mask).sum() / mask.sum(); torch.where(mask, x, 0); x.masked_fill(mask, value)",
    "loss = (losses * mask).sum() / mask.sum()",
)
SYNCHRONIZED: Final = ScriptHabit(
    "synchronize() and empty_cache() wait until the GPU is done with all that was launched; it is "
    "idle until the host has launched the next kernels, and memory that was given back is "
    "requested from the driver",
    "leave them out of the loop: PyTorch gives freed memory to the next tensors by itself; times "
    "are measured by CUDA events, or over many steps",
)
#: By what a line waits for.
_OF_WAITS: Final[Mapping[WaitKind, ScriptHabit]] = {
    "value": WAITS,
    "copy": COPIES_OUT,
    "size": SIZED_BY_DATA,
    "all": SYNCHRONIZED,
}
#: The same numbers, copied to the GPU again and again.
COPIED_EACH_STEP: Final = ScriptHabit(
    "a copy of the host's memory to the GPU waits until the GPU is done with what was launched "
    "before it; what does not change can stay there",
    'in a module self.register_buffer("mask", mask), which model.to(device) moves; elsewhere '
    ".to(device) once, before the loop",
    'self.register_buffer("mask", mask)',
)
#: What is made on the CPU, and needed on the GPU.
MADE_ON_HOST: Final = ScriptHabit(
    "what is made on the CPU is copied, and the copy waits until the GPU is done with what was "
    "launched before it",
    "make it where it is needed: torch.zeros(…, device=x.device), torch.randn_like(x), "
    "torch.arange(n, device=x.device); what is the same in each step: register_buffer",
    "torch.zeros(…, device=x.device)",
)
#: ``cudnn.benchmark`` where sizes change.
TRIALS: Final = ScriptHabit(
    "torch.backends.cudnn.benchmark times each algorithm at each new size, and empties the cache",
    "set torch.backends.cudnn.benchmark = False, or pad batches to a few sizes",
    "torch.backends.cudnn.benchmark = False",
)
EVALUATED_WITH_GRAPH: Final = ScriptHabit(
    "the graph of each forward pass keeps all its activations until the next, for a backward pass "
    "that never comes; eval() alone does not change that",
    "put the evaluation under torch.no_grad() or torch.inference_mode()",
    "with torch.no_grad():",
)
EVALUATED_IN_TRAINING: Final = ScriptHabit(
    "in training mode dropout is on, and BatchNorm uses each batch's own statistics and learns "
    "those of the evaluation's data",
    "switch the model before the evaluation, and back after it",
    "model.eval()",
)
#: What an epoch's end is for, done within its loop over batches.
EVALUATED_EACH_STEP: Final = ScriptHabit(
    "the loop over batches evaluates after each of them: a step costs a whole evaluation as well",
    "evaluate at the end of the epoch (one level out of the loop over batches), or every few "
    "hundred steps",
    "if step % 500 == 0: validate(model)",
)
SAVED_EACH_STEP: Final = ScriptHabit(
    "the whole state is copied to the host and written to a file while the GPU has nothing to do",
    "save at the end of the epoch (one level out of the loop over batches), or every few hundred "
    "steps",
    "if step % 500 == 0: torch.save(state, path)",
)
DROPS_ALWAYS: Final = ScriptHabit(
    "a function does not know the model's mode: its training is True unless it is told, and so is "
    "that of a layer which forward() makes or which is kept in a list",
    "pass the mode, or make a layer (self.drop = nn.Dropout(p)) in __init__, which has it",
    "F.dropout(x, p, training=self.training)",
)
KEPT_GRAPHS: Final = ScriptHabit(
    "what is kept with its autograd graph keeps every step's graph alive: memory grows with every "
    "step, on the host by the graph's nodes, on the GPU by what backward() has not freed",
    "keep numbers, not tensors: total += loss.item() or loss.detach()",
)
KEPT_BATCHES: Final = ScriptHabit(
    "batches or outputs of past steps are kept: memory grows with every step, and a batch of a "
    "worker lies in /dev/shm and keeps a file open",
    "keep only what is needed of it (.clone() a part, .item()), move it to a file, or clear the "
    "list at each epoch",
)
#: A loader that is gone over again and again.
CYCLED: Final = ScriptHabit(
    "itertools.cycle keeps all that it has given, to give it again: the batches of an epoch, and "
    "each later epoch gets them in the same order",
    "go over the DataLoader again: def endless(loader): while True: yield from loader",
)
#: A loader that each step begins.
RESTARTED_ITERATOR: Final = ScriptHabit(
    "next(iter(loader)) starts the workers again for one batch and ends them after it, and without "
    "shuffle=True the batch is the first one each time",
    "for batch in loader: …, or batches = iter(loader) before the loop and next(batches) in it "
    "(begun again at StopIteration)",
)
#: Steps that get longer.
GROWING_WORK: Final = ScriptHabit(
    "what a step computes with grows with the number of steps: a history that is never cut, a "
    "hidden state or a sum whose graph goes back to the first step, hooks that each step adds",
    "cut the history (x[:, -N:]), and detach() what one step gives to the next; register hooks "
    "once",
)
#: Likewise, where waiting for batches does.
GROWING_BATCHES: Final = ScriptHabit(
    "to make a batch costs more and more: the data set goes through all that it has kept or read "
    "so far (a list that is searched, a file that is read from its start, a cache that is written)",
    "look up what is needed (a dict, an index, seek()), and keep nothing of past samples that is "
    "gone through again",
)
#: Likewise, where the script's own code goes through a list or a dict that grows.
ALL_AGAIN: Final = ScriptHabit(
    "each step writes out or sums up all of a history that grows with the number of steps",
    "use only what is new of it (append a line to the file, keep a running sum), or do it every "
    "few hundred steps",
)
FRAGMENTED: Final = ScriptHabit(
    "free blocks of the caching allocator do not fit the requested sizes: batches of changing "
    "shapes leave such blocks",
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the command",
)


#: What :data:`FRAGMENTED` sets.
EXPANDABLE: Final = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def autocast(dtype: str) -> str:
    """The line that begins autocast in "bfloat16" or "float16"."""
    return f'with torch.autocast("cuda", dtype=torch.{dtype}):'


def restarted_workers(workers: int | None) -> str:
    """Why an epoch begins slowly without ``persistent_workers``."""
    which = "the workers" if workers is None else f"{workers} worker processes"
    return (
        f"Each epoch restarts {which}: they are started, get the data set, and the training waits "
        "for the first batches"
    )


#: An object that is made again does not know the workers of the last one.
MADE_AGAIN: Final = ScriptHabit(
    "The DataLoader is made again each time: its workers are started, and get the data set, for a "
    "few batches",
    "make the DataLoader once, before the loop, with persistent_workers=True, and go over that one "
    "in each epoch; of single batches: one iterator over all of them, and next() of it",
)


#: Of waits that each step has.
WAITS_KIND: Final = "hidden_syncs"
#: Lines that are named.
_NAMED: Final = 4
#: Steps with trials after the first: a last batch that is shorter makes one.
_LEAST_TRIALS: Final = 2


def of_steps(makeup: StepMakeup | None) -> Iterator[Finding]:
    """What simulated steps show of a script's habits."""
    if makeup is None:
        return
    if makeup.waits:
        yield _of_waits(makeup)
    if makeup.uploads:
        yield _of_uploads(makeup.uploads)
    if makeup.trials >= _LEAST_TRIALS:
        yield Finding(
            "cudnn_trials",
            "warning",
            "cudnn.benchmark is on, and the sizes of inputs change from step to step",
            (Evidence("with trials", f"{count(makeup.trials, 'step')} after the first"),),
            TRIALS.cause,
            (Fix(TRIALS.action, line=TRIALS.line),),
        )


def _of_waits(makeup: StepMakeup) -> Finding:
    lines, looped = makeup.waits, makeup.looped_waits
    kinds = list(dict.fromkeys(makeup.wait_kinds[: 1 if looped else None])) or ["value"]
    habits = [_OF_WAITS[kind] for kind in kinds]
    if looped and kinds == ["value"]:
        habits = [WAITS_FOR_EACH]
    return Finding(
        WAITS_KIND,
        "warning" if looped else "info",
        f"The CPU waits for the GPU {looped:,} times in each step at {lines[0]}"
        if looped
        else f"The CPU waits for the GPU in each step: {_named(lines)}",
        (Evidence("waits", count(len(lines), "line")),),
        habits[0].cause if len(habits) == 1 else WAITS.cause,
        tuple(Fix(habit.action, line=habit.line) for habit in habits),
        place=Place.parse(lines[0]),
    )


def _named(lines: Sequence[str]) -> str:
    return ", ".join(lines[:_NAMED]) + ("" if len(lines) <= _NAMED else ", …")


def _of_uploads(copies: Sequence[HostCopy]) -> Finding:
    """The finding on what each step copies to the GPU that could be there, or be made there."""
    habits = [MADE_ON_HOST if copy.is_made else COPIED_EACH_STEP for copy in copies]
    are_made = habits[0] is MADE_ON_HOST
    times, nbytes = sum(copy.times for copy in copies), sum(copy.nbytes for copy in copies)
    lines, often = [copy.line for copy in copies], f", {times:,} times" if times > 1 else ""
    what = "what is made on the CPU" if are_made else "the same numbers"
    if len(set(habits)) > 1:
        what = "what could be made or stay there"
    return Finding(
        "host_copies",
        "info",
        f"Each step copies {what} to the GPU{often}: {_named(lines)}",
        (Evidence("copied in each step", nbytes, "bytes"), Evidence("copies", str(times))),
        habits[0].cause,
        tuple(Fix(habit.action, line=habit.line) for habit in dict.fromkeys(habits)),
        place=Place.parse(lines[0]),
    )


def of_evaluation(coverage: Coverage | None) -> Iterator[Finding]:
    """What an evaluation that was simulated shows. Without a DataLoader of its own it may be a look
    at the training itself (samples of a generator, a loss)."""
    if coverage is None:
        return
    seen = [
        (coverage.evaluated_each, *_IN_EACH_STEP),
        (coverage.saved_each, *_SAVED_IN_EACH),
        (coverage.graph_at, *_WITH_GRAPH),
    ]
    if coverage.evaluation_batches is not None:
        seen += [(coverage.training_at, *_IN_TRAINING), (coverage.dropping_at, *_DROPS)]
    for place, kind, title, habit in seen:
        if place is not None:
            yield Finding(
                kind,
                "warning",
                title,
                (),
                habit.cause,
                (Fix(habit.action, line=habit.line),),
                place=Place.parse(place),
            )


#: Kind of a finding, its title, and the habit.
_IN_EACH_STEP: Final = (
    "evaluated_each_step",
    "Each training step is followed by an evaluation of the model",
    EVALUATED_EACH_STEP,
)
_SAVED_IN_EACH: Final = (
    "saved_each_step",
    "Each training step writes a checkpoint",
    SAVED_EACH_STEP,
)
_WITH_GRAPH: Final = (
    EVALUATION_WITH_GRAPH,
    "The evaluation calls the model with gradients on",
    EVALUATED_WITH_GRAPH,
)
_IN_TRAINING: Final = (
    "evaluation_in_training_mode",
    "The evaluation calls the model in training mode: its results are not those of the model",
    EVALUATED_IN_TRAINING,
)
_DROPS: Final = (
    "dropout_in_evaluation",
    "Dropout stays on in the evaluation: its results are random",
    DROPS_ALWAYS,
)
