"""Trainings that step and learn nothing, or not from what they are given: what was seen, why, what
to write. And what makes each step dearer for good."""

from __future__ import annotations

from typing import Final

from trainfit.results.findings import Evidence, Finding, Fix, Kinds
from trainfit.results.text import count, percent

STALLED: Final = Kinds()


@STALLED.of("clipped_to_nothing")
def _to_nothing(kind: str, text: str) -> Finding:
    limit = float(text)
    turned = limit < 0
    return Finding(
        kind,
        "critical",
        f"Gradients are clipped to {limit:g}: "
        + (
            "they point the other way, and steps raise the loss" if turned else "nothing is learned"
        ),
        (Evidence("limit", f"{limit:g}"),),
        "they are multiplied by the limit over their norm: a negative one turns them around"
        if turned
        else "they are multiplied by the limit over their norm, which leaves nothing of them",
        (
            Fix(
                "a limit above 0, as 1.0; to leave them as they are, no call (if max_norm > 0: "
                "clip_grad_norm_(…)), or float('inf') to measure their norm"
            ),
        ),
    )


@STALLED.of("parameters_added")
def _added(kind: str, times: str, first: str, now: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"The optimizer gets new parameters again and again: {times} times so far, from {first} to "
        f"{now} tensors",
        (Evidence("add_param_group", f"{times} times"),),
        "each step makes all of them, and the optimizer keeps its averages of all",
        (
            Fix(
                "make all parts of the model, and the optimizer over all of them, before the loop; "
                "add_param_group() for a part only once"
            ),
        ),
        confidence="likely",
    )


@STALLED.of("parameters_twice", later=True)
def _twice(kind: str, several: str, every: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"The optimizer has {several} of {every} tensors more than once: each of its steps changes "
        "them as often",
        (Evidence("more than once", f"{several} of {every} tensors"),),
        "lists of parameters were put together that have some in common",
        (Fix("give each parameter once: list(dict.fromkeys(parameters))"),),
    )


@STALLED.of("profiler_on")
def _profiled(kind: str, steps: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"A profiler records all steps, {steps} or more so far: each operator costs more, what it "
        "keeps of them fills the RAM, and its end lasts long",
        (Evidence("recorded", count(int(steps), "step")),),
        "torch.profiler records from its start to its end, where no schedule says otherwise",
        (
            Fix(
                "profile some steps only: profile(schedule=torch.profiler.schedule(wait=5, "
                "warmup=2, active=3, repeat=1)) with prof.step() after each step; or leave it out"
            ),
        ),
    )


@STALLED.of("one_batch")
def _one_batch(kind: str, steps: str, batches: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"All steps, {steps} or more, learn from one and the same batch: the DataLoader has "
        f"{batches}",
        (Evidence("batches used", f"1 of {batches}"),),
        "the batch is taken before the loop, next(iter(loader)), and no other one in it",
        (
            Fix(
                "for batch in loader: … around the step; right as it is only to see whether the "
                "model can learn one batch by heart"
            ),
        ),
        confidence="likely",
    )


@STALLED.of("gradients_zero")
def _without_slope(kind: str, weights: str, tensors: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"The gradients of all weights are 0 ({weights} of the optimizer's {tensors} tensors): "
        "nothing is learned any more",
        (Evidence("gradients 0", f"{weights} of {tensors} tensors"),),
        "units that give 0 or are saturated for all samples have no slope (ReLUs after a step that "
        "was far too large, a sigmoid of large numbers), nor have inputs that are 0",
        (
            Fix(
                "a lower learning rate from the start, a warm-up or clip_grad_norm_; inputs of "
                "about mean 0 and deviation 1; LeakyReLU or GELU"
            ),
        ),
        confidence="likely",
    )


@STALLED.of("weights_decayed")
def _decayed(kind: str, rate: str, decay: str, gone: str) -> Finding:
    taken = min(1.0, float(rate) * float(decay))
    return Finding(
        kind,
        "critical",
        f"Weight decay has brought {percent(float(gone))} of the weights to 0: weight_decay="
        f"{decay} at lr={rate} removes {percent(taken)} of each in every step",
        (
            Evidence("lr × weight_decay", f"{taken:.2g}"),
            Evidence("weights below 1e-8, of a large tensor", float(gone)),
        ),
        "in each step the optimizer multiplies weights by 1 - lr × weight_decay, which gradients "
        "cannot make up for; weights of next to nothing are denormal, too, and slow on a CPU",
        (
            Fix(
                "a weight decay with which lr × weight_decay is 1e-6 to 1e-4: 0.01 to 0.1 for "
                "AdamW, 1e-4 to 5e-4 for SGD"
            ),
        ),
        confidence="likely",
    )


@STALLED.of("rate_times_rate")
def _times_rate(kind: str, factor: str, rate: str, largest: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"The learning rate is never above {largest}: LambdaLR multiplies lr={rate} by what its "
        f"function gives, {factor} at most",
        (Evidence("lr", rate), Evidence("largest factor", factor)),
        "the function gives the rate itself, and is meant to give a factor of it",
        (
            Fix("a function that begins at 1: lambda epoch: 0.95 ** epoch"),
            Fix("lr=1.0 in the optimizer, if the function gives the rate"),
        ),
        confidence="likely",
    )


@STALLED.of("schedule_first")
def _first(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "info",
        f"{name} is stepped before the optimizer's first step: the learning rate that it begins "
        "with is used by no step",
        (),
        "its step() comes before that of the optimizer in the loop, so that all of the schedule is "
        "one call early (PyTorch's warning of it names no line)",
        (Fix("scheduler.step() after optimizer.step(), of epochs at their end"),),
        confidence="likely",
    )


@STALLED.of("units_dead")
def _dead(kind: str, layers: str, name: str, dead: str, units: str) -> Finding:
    more = f" (and most of {count(int(layers) - 1, 'other layer')})" if int(layers) > 1 else ""
    return Finding(
        kind,
        "warning",
        f"{dead} of the {units} units of {name}{more} are dead: no sample passes them, and they "
        "get no gradient",
        (Evidence("without a gradient", f"{dead} of {units} units"),),
        "a step that was far too large has put them where they give 0 for all samples (ReLU): from "
        "there nothing brings them back",
        (
            Fix(
                "a lower learning rate from the start, a warm-up or clip_grad_norm_; inputs of "
                "about mean 0 and deviation 1; LeakyReLU or GELU"
            ),
        ),
        confidence="likely",
    )


@STALLED.of("units_alike")
def _alike(kind: str, layers: str, name: str, units: str) -> Finding:
    more = f" (and of {count(int(layers) - 1, 'other layer')})" if int(layers) > 1 else ""
    return Finding(
        kind,
        "critical",
        f"All {units} units of {name}{more} are one and the same: equal weights get equal "
        "gradients, and stay equal",
        (Evidence("layers", layers),),
        "their weights began with one value; only random ones make units different",
        (
            Fix(
                "leave PyTorch's own initialization, or nn.init.kaiming_normal_, xavier_uniform_ "
                "or normal_ for weights; constants for biases and norms only"
            ),
        ),
    )


@STALLED.of("tracing_on")
def _traced(kind: str, name: str, frames: str) -> Finding:
    what, off = _TRACERS.get(name, ("each call", f"end what {name} runs for"))
    keeps = f" and keeps {count(int(frames), 'frame')} of each" if int(frames) else ""
    return Finding(
        kind,
        "warning",
        f"{name} is on: it follows {what}{keeps}, which slows down all Python code",
        (Evidence("on at each step looked at", name),),
        "a profiler, a debugger or a search for a leak was left on",
        (Fix(f"{off}; or switch it on for a few steps only"),),
    )


#: What each of them follows, and what ends it.
_TRACERS: Final = {
    "tracemalloc": (
        "each allocation of Python",
        "no tracemalloc.start() (and no PYTHONTRACEMALLOC, no -X tracemalloc); start(1) costs a "
        "sixth of start(25)",
    ),
    "cProfile": ("each call", "leave cProfile out, or disable() it after some steps"),
    "sys.settrace": ("each line", "run it without the debugger, or without coverage"),
}
