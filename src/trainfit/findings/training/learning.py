"""What spoils a training's learning: conditions over what a run showed, and each fix's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.findings import habits
from trainfit.findings.training import inputs, losses, misuse, rates, untrained
from trainfit.results.findings import SCHEDULE_ENDS, Evidence, Finding, Fix, Place, by_severity
from trainfit.results.runs.learning import CUT_OFF, LEAST_HALF, LearningFacts
from trainfit.results.text import count, percent

#: Steps with gradients that were used before: one in so many is no accident.
_IN_THREE: Final = 3
#: Below this share of the tensors one or the other unused part of a model is meant so.
_UNUSED: Final = 0.1
#: Names that are given.
_NAMED: Final = 3
#: So little of an optimizer's numbers trained is hardly meant.
_TRAINED: Final = 0.01
#: Of all batches, what is worth a warning if it trains nothing.
_MUCH_LOST: Final = 0.05


def of_learning(facts: LearningFacts) -> tuple[Finding, ...]:
    """The findings, those that spoil the result first; of a run that trains nothing, what spoils
    its predictions."""
    if not facts.steps:
        found = misuse.of_kind(inputs.PREDICTS, facts.misuses)
        return () if found is None else (found,)
    return by_severity(finding for rule in _RULES for finding in rule(facts))


def of_later_learning(facts: LearningFacts) -> tuple[Finding, ...]:
    """The findings that an evaluation, a later epoch or the run's end may be the first to show."""
    return tuple(finding for finding in of_learning(facts) if finding.kind in BETWEEN_EPOCHS)


def _graph_unused(facts: LearningFacts) -> Iterator[Finding]:
    """A teacher, a target network."""
    if facts.graph_unused is None:
        return
    name, place, is_small = facts.graph_unused
    yield Finding(
        "graph_unused",
        "info" if is_small else "warning",
        f"{name} is called with gradients on and gets none: its activations are kept for no "
        "backward pass",
        (),
        "its parameters need gradients, what it gives is detached or not part of the loss, and no "
        "optimizer has them (a teacher, a target network)",
        (
            Fix(
                "with torch.no_grad(): around that call, or requires_grad_(False) of the model "
                "before the training",
                line="with torch.no_grad():",
            ),
        ),
        place=Place.parse(place),
    )


def _swapped(facts: LearningFacts) -> Iterator[Finding]:
    if facts.swapped is None:
        return
    source, result, place = facts.swapped
    yield Finding(
        "view_for_transpose",
        "warning",
        f"A view of {source} as {result} mixes its dimensions: it does not swap them",
        (Evidence("of", source), Evidence("as", result)),
        "view and reshape keep the order of numbers in memory, so that each row has numbers of "
        "several samples, positions or channels",
        (
            Fix("transpose(…) or permute(…) to swap dimensions, and view or reshape after that"),
            Fix("of heads: x.view(batch, length, heads, -1).transpose(1, 2)"),
        ),
        confidence="likely",
        place=Place.parse(place),
    )


def _frozen(facts: LearningFacts) -> Iterator[Finding]:
    """Most of what the optimizer has is frozen, and not next to adapters."""
    if not facts.frozen or not facts.all_numbers or facts.has_adapters:
        return
    share = facts.trained_numbers / facts.all_numbers
    if share >= _TRAINED:
        return
    only = facts.trained_vector
    yield Finding(
        "mostly_frozen",
        # Adapters and prompts train few numbers, too, but never one bias alone.
        "warning" if only is None else "critical",
        f"Only `{only}` is trained, {facts.trained_numbers:,} of {facts.all_numbers:,} numbers: "
        f"{count(facts.frozen, 'tensor')} of the optimizer are frozen"
        if only is not None
        else f"{facts.frozen} of the optimizer's {count(facts.optimized, 'tensor')} are frozen: "
        f"{percent(share, decimals=1)} of its numbers are trained",
        (
            Evidence("frozen", f"{facts.frozen} of {facts.optimized} tensors"),
            Evidence("trained", f"{facts.trained_numbers:,} of {facts.all_numbers:,} numbers"),
        ),
        "requires_grad is False for the others",
        (Fix("if that is not meant: parameter.requires_grad_(True) for what is to be trained"),),
        confidence="possible" if only is None else "likely",
    )


def _clipping(facts: LearningFacts) -> Iterator[Finding]:
    if facts.clipped_scaled is None:
        return
    yield Finding(
        "clipped_scaled",
        "critical",
        "Gradients are clipped while they are scaled: the limit applies to the scaled ones, so "
        "nearly every step is clipped to next to nothing",
        (),
        "clipping (clip_grad_norm_, clip_grad_value_) comes before the scaler has unscaled",
        (Fix("scaler.unscale_(optimizer) before clipping", line="scaler.unscale_(optimizer)"),),
        place=Place.parse(facts.clipped_scaled),
    )


def _clipping_late(facts: LearningFacts) -> Iterator[Finding]:
    if facts.clipped_late is None:
        return
    yield Finding(
        "clipped_late",
        "warning",
        "Gradients are clipped after the step that used them: clipping has no effect",
        (),
        "clip_grad_norm_ comes after optimizer.step(), or before backward()",
        (Fix("clip between backward() and optimizer.step()"),),
        place=Place.parse(facts.clipped_late),
    )


def _loss(facts: LearningFacts) -> Iterator[Finding]:
    if facts.misfit is not None:
        yield losses.of_misfit(facts.misfit)
    if facts.eps_lost is not None:
        yield losses.of_lost_eps(*facts.eps_lost)
    yield from (misuse.of_misuse(each) for each in facts.misuses if each.kind != CUT_OFF)


def _restarted(facts: LearningFacts) -> Iterator[Finding]:
    if facts.restarted is None:
        return
    yield Finding(
        "iterator_restarted",
        "critical" if facts.same_batch else "warning",
        "Each step starts a new pass over the data for one batch"
        + (": it is the same first batch each time" if facts.same_batch else ""),
        (),
        habits.RESTARTED_ITERATOR.cause,
        (Fix(habits.RESTARTED_ITERATOR.action),),
        place=Place.parse(facts.restarted),
    )


def _ranks(facts: LearningFacts) -> Iterator[Finding]:
    """What several processes that train one model do wrong together."""
    if facts.passed_by is not None:
        yield Finding(
            "gradients_not_shared",
            "critical",
            f"The ranks' gradients are never averaged: {facts.passed_by} is called instead of the "
            "DistributedDataParallel around it",
            (),
            "model.module(…) goes past DistributedDataParallel, whose forward pass prepares the "
            "exchange: each rank trains a model of its own",
            (Fix("call the wrapper: model(x); model.module for its attributes and state_dict()"),),
        )
    if facts.not_split is not None:
        yield Finding(
            "data_not_split",
            "warning",
            "Each rank goes over all of the data: an epoch is as long as on one GPU",
            (),
            "the DataLoader has no DistributedSampler; that is right only if the data set of each "
            "rank is another part of the data",
            (
                Fix(
                    "sampler = DistributedSampler(data); DataLoader(data, sampler=sampler, …) "
                    "without shuffle, and sampler.set_epoch(epoch) in each epoch"
                ),
            ),
            confidence="likely",
            place=Place.parse(facts.not_split),
        )
    if facts.same_order is not None:
        yield Finding(
            "same_order",
            "warning",
            "Each epoch goes over the data in the same order, in the same batches",
            (),
            "DistributedSampler shuffles by the number of the epoch, which nobody tells it",
            (
                Fix(
                    "sampler.set_epoch(epoch) at the start of each epoch",
                    line="sampler.set_epoch(epoch)",
                ),
            ),
            place=Place.parse(facts.same_order),
        )


def _half(facts: LearningFacts) -> Iterator[Finding]:
    if facts.small_eps is not None:
        yield Finding(
            "small_eps",
            "critical",
            f"Adam's eps {facts.small_eps:g} is 0 in float16, the type of the parameters: its step "
            "divides by zero where a gradient is small",
            (Evidence("eps", facts.small_eps), Evidence("smallest float16", LEAST_HALF)),
            "parameters are float16, and so is what Adam computes with",
            (
                Fix("keep the parameters in float32 and use autocast"),
                Fix("eps=1e-4"),
            ),
            place=Place.parse(facts.half_at),
        )
    if facts.scaler_on_half:
        yield Finding(
            "scaler_on_half",
            "critical",
            "A GradScaler is used on parameters that are float16 themselves",
            (),
            "it needs float32 gradients to unscale: PyTorch refuses to unscale float16 ones, and a "
            "step on them loses small updates",
            (Fix("keep the parameters in float32: no model.half(), autocast casts them"),),
            place=Place.parse(facts.half_at),
        )


def _scaled(facts: LearningFacts) -> Iterator[Finding]:
    if facts.steps_scaled < 2:
        return
    yield Finding(
        "scaled_step",
        "critical",
        "The optimizer steps on gradients that the GradScaler has scaled (by 65536 as a rule) and "
        "nothing unscales",
        (Evidence("with scaled gradients", count(facts.steps_scaled, "step")),),
        "optimizer.step() is called instead of scaler.step(optimizer), which unscales and leaves "
        "steps with inf out",
        (
            Fix(
                "scaler.step(optimizer); scaler.update()",
                line="scaler.step(optimizer); scaler.update()",
            ),
        ),
    )


def _zeroing(facts: LearningFacts) -> Iterator[Finding]:
    if facts.kept_gradients < 2:
        return
    of = f" of {facts.kept_of}, …" if facts.kept_of else ""
    yield Finding(
        "gradients_kept",
        "critical",
        f"Gradients{of} are never set to zero: each step uses the sum of all gradients so far",
        (Evidence("with old gradients", count(facts.kept_gradients, "step")),),
        "zero_grad() of its optimizer is not called between its steps, and another's backward pass "
        "adds to them, too"
        if of
        else "zero_grad() is not called between steps",
        (Fix("optimizer.zero_grad() after optimizer.step()", line="optimizer.zero_grad()"),),
    )


def _repeated(facts: LearningFacts) -> Iterator[Finding]:
    if not facts.used_again or _IN_THREE * facts.used_again < facts.steps:
        return
    yield Finding(
        "step_repeated",
        "critical",
        "The optimizer's step is taken twice with the same gradients",
        (Evidence("repeated", f"{facts.used_again} of {count(facts.steps, 'step')}"),),
        "optimizer.step() is called again before the next backward pass (next to a scaler's "
        "step(optimizer), or in a callback as well)",
        (Fix("one step for each backward pass: scaler.step(optimizer) or optimizer.step()"),),
        place=Place.parse(facts.used_again_at),
    )


def _dropped(facts: LearningFacts) -> Iterator[Finding]:
    if not facts.dropped_micro_batches:
        return
    lost, number = facts.dropped_micro_batches, facts.micro_batches
    yield Finding(
        "gradients_dropped",
        "critical",
        f"The gradients of {lost} of {number} micro-batches are dropped before the step: "
        "accumulation has no effect"
        if lost < number
        else "All gradients are dropped between backward() and step(): nothing is learned",
        (Evidence("dropped", f"{lost} of {number} micro-batches"),),
        "zero_grad() runs between the backward passes of one step"
        if lost < number
        else "zero_grad() runs after the backward pass",
        (Fix("optimizer.zero_grad() once a step, right after optimizer.step()"),),
        place=Place.parse(facts.dropped_at),
    )


def _remainder(facts: LearningFacts) -> Iterator[Finding]:
    lost, share = facts.remainder, facts.remainder_share
    if not lost or facts.dropped_micro_batches:
        return
    yield Finding(
        "remainder_dropped",
        "warning" if share >= _MUCH_LOST else "info",
        f"The rest of an epoch, {count(lost, 'batch', 'batches')}, trains nothing: it is less than "
        f"a step accumulates, and zero_grad() drops its gradients ({percent(share)} of all so far)",
        (Evidence("dropped", count(lost, "batch", "batches")),),
        "the step is taken after each full number of micro-batches, and the next epoch begins with "
        "zero_grad()",
        (
            Fix(
                "step after the last batch, too: if (i + 1) % accumulate == 0 or i + 1 == "
                "len(loader)"
            ),
        ),
        place=Place.parse(facts.dropped_at),
    )


def _anomaly(facts: LearningFacts) -> Iterator[Finding]:
    if not facts.anomaly:
        return
    yield Finding(
        "anomaly_mode",
        "warning",
        "Autograd's anomaly mode is on: each operator records a stack and each gradient is checked "
        "for NaN",
        (),
        "torch.autograd.set_detect_anomaly(True), or detect_anomaly(), was left on",
        (Fix("torch.autograd.set_detect_anomaly(False)"),),
        place=Place.parse(facts.anomaly_at or None),
    )


def _mode(facts: LearningFacts) -> Iterator[Finding]:
    if facts.evaluating_at is None:
        return
    yield Finding(
        "evaluation_mode",
        "critical",
        "The model is trained in evaluation mode: dropout is off, BatchNorm uses old statistics",
        (),
        "it was switched by eval() and not back",
        (Fix("model.train() after the evaluation", line="model.train()"),),
        place=Place.parse(facts.evaluating_at),
    )


def _accumulation(facts: LearningFacts) -> Iterator[Finding]:
    if facts.is_divided is not False:
        return
    number = facts.micro_batches
    yield Finding(
        "loss_not_divided",
        "warning",
        f"The losses of {number} micro-batches are added, not averaged: gradients are {number}× "
        "those of one batch of the same samples",
        (Evidence("micro-batches of a step", str(number)),),
        "the loss is not divided by the number of micro-batches, so another number is another "
        "learning rate",
        # The Trainer divides unless a model's forward() has **kwargs, which it counts as a promise
        # to divide by num_items_in_batch; many models have them and average all the same
        # (transformers/trainer.py: model_accepts_loss_kwargs).
        (
            Fix(
                "loss = loss / accumulation before backward(); with Transformers' Trainer: "
                "model.accepts_loss_kwargs = False before it"
            ),
        ),
    )


#: Of its findings.
KINDS: Final = (
    *("no_gradient", "clipped_scaled", "small_eps", "scaler_on_half", "gradients_kept"),
    *("gradients_dropped", "step_repeated", "rate_vanishes", "rate_rises", SCHEDULE_ENDS),
    *("not_registered", "scaled_step", "activation_clips", "graph_unused"),
    *("view_for_transpose", "eps_lost"),
    *("iterator_restarted", "gradients_not_shared", "data_not_split", "same_order"),
    *("part_replaced", "clipped_late", "loss_broadcast", "activation_twice", "schedule_unused"),
    *("activation_missing", "activation_elsewhere", "one_class", "gradients_unused"),
    *("rate_zero", "evaluation_mode", "mostly_frozen", "anomaly_mode", "loss_not_divided"),
    *("denormals", "remainder_dropped", *misuse.KINDS),
)
#: Of these, what may begin with a later epoch or come at the run's end, and is no less true of
#: epochs that are cut short.
BETWEEN_EPOCHS: Final = ("evaluation_mode", "same_order", "part_replaced", *misuse.LATER)
_RULES: Final = (
    *(_restarted, _ranks, untrained.gradients, untrained.replaced, untrained.unregistered, _loss),
    *(_clipping, _clipping_late, _half, _scaled, _zeroing, _dropped, _remainder, _repeated),
    *(rates.rate, rates.vanishing, rates.schedule, rates.unused_schedule),
    *(_mode, _frozen, _anomaly, _accumulation, untrained.unused_gradients, _graph_unused),
    *(rates.denormals, _swapped),
)
