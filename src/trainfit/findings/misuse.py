"""Loss functions, layers and calls that get something else than they are for, or have no effect:
which, why it matters, what to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

from trainfit.results.findings import Evidence, Finding, Fix, Place
from trainfit.results.runs.learning import LEAST_HALF, LossMisfit, Misuse
from trainfit.results.text import count, percent, size


def of_misfit(found: LossMisfit) -> Finding:
    """The finding of a loss function and what it gets."""
    if found.missing is not None:
        return _not_activated(found)
    if found.activation == "log":
        return _log_of_softmax(found)
    if found.activation == "log_softmax":
        return Finding(
            "activation_elsewhere",
            "critical",
            f"The log_softmax before {found.name} does not go over the classes (outputs are "
            f"{found.shapes[0]}, classes in dimension 1)",
            (Evidence("outputs", found.shapes[0]),),
            "it makes probabilities of samples, not of classes: they do not sum to 1 for a sample",
            (
                Fix("log_softmax(x, dim=1)", line="F.log_softmax(x, dim=1)")
                if found.name == "nll_loss"
                else Fix("the last layer's output as it is (logits)"),
            ),
            place=Place.parse(found.place),
        )
    if found.activation is not None:
        return _activated_twice(found, found.activation)
    if len(found.shapes) == 1:
        return Finding(
            "one_class",
            "critical",
            f"{found.name} gets a single class (outputs are {found.shapes[0]}): nothing is learned",
            (Evidence("outputs", found.shapes[0]),),
            "the softmax over a single class is 1, whatever the model gives",
            (
                Fix(
                    "two outputs for two classes; or one output and "
                    "BCEWithLogitsLoss()(output.squeeze(1), y.float())"
                ),
            ),
            place=Place.parse(found.place),
        )
    output, target = found.shapes
    return Finding(
        "loss_broadcast",
        "critical",
        f"{found.name or 'The loss'} compares each output with every target: outputs are "
        f"{output}, targets {target}",
        (Evidence("outputs", output), Evidence("targets", target)),
        "tensors of different shapes are broadcast against each other: the network learns the "
        "targets' mean",
        (Fix("give both one shape: output.squeeze(1), or target.unsqueeze(1)"),),
        place=Place.parse(found.place),
    )


def of_lost_eps(eps: float, place: str) -> Finding:
    """The finding of a small number that float16 does not have."""
    return Finding(
        "eps_lost",
        "warning",
        f"{eps:g} is 0 in float16, to which it is added: a logarithm or a division after it gives "
        "inf or NaN where the rest is 0",
        (Evidence("added", eps), Evidence("smallest float16", LEAST_HALF)),
        "autocast leaves that operator in the type of its input, float16",
        (
            Fix("x.float() before it (the loss in float32), or bfloat16"),
            Fix("1e-4 instead"),
        ),
        place=Place.parse(place),
    )


def _not_activated(found: LossMisfit) -> Finding:
    """A layer's output where probabilities or their logarithms are wanted."""
    instead, does = _BY_ITSELF[found.name]
    return Finding(
        "activation_missing",
        "critical",
        f"{found.name} gets a layer's output as it is, and wants that of a {found.missing}",
        (),
        does,
        (Fix(f"{instead}; or {found.missing} before it"),),
        confidence="likely",
        place=Place.parse(found.place),
    )


#: What to take instead of a function that needs an activation before it; what comes of it without.
_BY_ITSELF: Final = {
    "nll_loss": (
        "cross_entropy (CrossEntropyLoss), which applies log_softmax itself",
        "it gives the output of the right class with the sign turned: the loss falls below 0 "
        "without end, and no other class is lowered",
    ),
    "kl_div": (
        "kl_div(log_softmax(output, dim=1), target)",
        "numbers that are no logarithms of probabilities give no divergence: the loss has no least "
        "value",
    ),
    "binary_cross_entropy": (
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss), which applies sigmoid itself",
        "numbers outside of 0 … 1 have no logarithm: on a GPU that is a device-side assert",
    ),
}


def _log_of_softmax(found: LossMisfit) -> Finding:
    return Finding(
        "log_of_softmax",
        "warning",
        f"{found.name} gets log(softmax(x)): where a probability is 0 its logarithm is -inf, and "
        "the gradient NaN",
        (),
        "softmax gives 0 for classes that are 104 below the largest (in float16 17), and a "
        "logarithm of its own cannot know what they were",
        (
            Fix(
                "log_softmax(x, dim=1); or cross_entropy of the last layer's output",
                line="F.log_softmax(x, dim=1)",
            ),
        ),
        place=Place.parse(found.place),
    )


def _activated_twice(found: LossMisfit, activation: str) -> Finding:
    if activation == "relu":
        return Finding(
            "activation_clips",
            "warning",
            f"{found.name} gets the output of a relu, and wants logits, which may be below 0",
            (),
            "what the last layer gives below 0 is cut off and gets no gradient: no class can be "
            "made less likely than that",
            (Fix("no relu after the last layer"),),
            place=Place.parse(found.place),
        )
    wants_log = found.name in _OF_LOGARITHMS
    instead = "log_softmax" if wants_log else "the last layer's output as it is (logits)"
    return Finding(
        "activation_twice",
        "critical" if wants_log else "warning",
        f"{found.name} gets the output of a {activation}, and wants "
        f"{'log-probabilities' if wants_log else 'logits'}",
        (),
        "probabilities are read as logarithms: the loss is wrong"
        if wants_log
        else f"it applies {_APPLIES.get(found.name, activation)} itself: twice, gradients "
        "are small and the loss cannot get near 0",
        (Fix(f"give it {instead}; {activation} for predictions only"),),
        place=Place.parse(found.place),
    )


#: Loss functions that want logarithms of probabilities; what the others apply.
_OF_LOGARITHMS: Final = ("nll_loss", "kl_div")
_APPLIES: Final = {
    "cross_entropy": "softmax",
    "binary_cross_entropy_with_logits": "sigmoid",
}


# --- Without the effect that is meant --------------------------------------------------------


def of_misuse(found: Misuse) -> Finding:
    """The finding of what has not the effect that it is meant to have."""
    return dataclasses.replace(_MISUSES[found.kind](found), place=Place.parse(found.place))


def _cut_off(found: Misuse) -> Finding:
    operator, cut_at = found.told
    return Finding(
        "term_cut_off",
        "warning",
        "A term of the loss trains nothing: it has no gradient, and only moves the number",
        (Evidence("cut off by", operator), *((Evidence("at", cut_at),) if cut_at else ())),
        f"{operator} cuts it off from what the model computes: what comes after it has no graph",
        (
            Fix(
                "compute it by differentiable operators of what the model gives (probabilities in "
                "place of argmax or a threshold, parameters without .data or detach())"
            ),
            Fix("leave it out of the loss if it is only to be shown"),
        ),
    )


def _grows(found: Misuse) -> Finding:
    return Finding(
        "graph_grows",
        "warning",
        "What is computed here has a graph that goes back through all steps: it grows with each",
        (),
        "it is computed of what the step before computed, and so on: the host's memory grows, and "
        "the GPU's where a node keeps a tensor",
        (
            Fix("with torch.no_grad(): around averages of parameters (an EMA)"),
            Fix("`.detach()` of what one step gives to the next, `.item()` of losses"),
        ),
    )


def _averaged(found: Misuse) -> Finding:
    (shape,) = found.told
    return Finding(
        "loss_averaged",
        "critical",
        f"The loss is one number already when it is multiplied by {shape} weights or a mask: they "
        "have no effect",
        (Evidence("weights", shape),),
        "the loss function has averaged over all positions, padding as well",
        (Fix("reduction='none' in the loss function, then (loss * mask).sum() / mask.sum()"),),
    )


def _flat(found: Misuse) -> Finding:
    operator, number, *names = found.told
    more = ", …" * (int(number) > len(names))
    return Finding(
        "gradient_flat",
        "critical",
        f"{count(int(number), 'tensor')} never change: their gradient is 0, as {operator} has no "
        f"slope ({', '.join(names)}{more})",
        (Evidence("gradient 0", count(int(number), "tensor")),),
        f"all that the loss gets of them goes through {operator}, which is flat wherever it has a "
        "derivative",
        (
            Fix(
                "let the gradient pass by (straight-through): "
                f"x + (torch.{operator}(x) - x).detach(); or a smooth function in training (tanh, "
                "sigmoid)"
            ),
        ),
    )


def _own_state(found: Misuse) -> Finding:
    (name,) = found.told
    return Finding(
        "own_state",
        "warning",
        f"load_state_dict gives {name} its own tensors: nothing is copied",
        (),
        "both names are one model (target = model), or the state was kept without a copy and has "
        "changed with the model since",
        (
            Fix(
                "copy.deepcopy(model) for a second model; copy.deepcopy(model.state_dict()) for a "
                "state that is to be kept"
            ),
        ),
    )


def _clips_nothing(found: Misuse) -> Finding:
    return Finding(
        "clips_nothing",
        "warning",
        "Gradients are not clipped: the parameters given are an iterator that was used up before",
        (),
        "model.parameters(), chain(…), filter(…) give each parameter once; the optimizer, or the "
        "step before, had them",
        (Fix("parameters = list(model.parameters()), or call model.parameters() each time"),),
    )


def _over_samples(found: Misuse) -> Finding:
    name, shape = found.told
    return Finding(
        "softmax_over_samples",
        "warning",
        f"{name} without dim goes over the first dimension of {shape}: over samples",
        (Evidence("input", shape),),
        "without dim PyTorch chooses dimension 0 of a tensor with three: weights of different "
        "samples sum to 1, not those of one",
        (Fix("dim=-1 (nn.Softmax(dim=-1))", line="nn.Softmax(dim=-1)"),),
        confidence="likely",
    )


def _samples_as_steps(found: Misuse) -> Finding:
    name, shape = found.told
    return Finding(
        "samples_as_steps",
        "warning",
        f"{name} goes over samples as if they were time steps: its input is {shape}, "
        "the batch first, and its batch_first is False",
        (Evidence("input", shape),),
        "without batch_first the first dimension is time: each sample sees those of its batch, and "
        "the result depends on how they are put together",
        (Fix("batch_first=True, or x.transpose(0, 1) before and after it"),),
        confidence="likely",
    )


def _not_frozen(found: Misuse) -> Finding:
    number, *names = found.told
    more = ", …" * (int(number) > len(names))
    return Finding(
        "freeze_ignored",
        "warning",
        f"requires_grad = False of a module freezes nothing: {', '.join(names)}{more} are trained",
        (Evidence("modules", number),),
        "a module has no requires_grad: the line sets an attribute that nothing reads",
        (
            Fix(
                "module.requires_grad_(False), or parameter.requires_grad = False for each of "
                "module.parameters()",
                line="module.requires_grad_(False)",
            ),
        ),
    )


def _one_hot(found: Misuse) -> Finding:
    shape, nbytes = found.told
    return Finding(
        "one_hot",
        "warning",
        f"One-hot vectors of {shape} are {size(int(nbytes))}: a number for each class of each "
        "position, of which one is 1",
        (Evidence("one-hot", int(nbytes), "bytes"),),
        "one_hot gives numbers of 8 bytes, and .float() makes a copy of them",
        (
            Fix(
                "class indices instead: cross_entropy(logits, target), Embedding or weight[target] "
                "for a matmul with them; logits.gather(-1, target[..., None]) for one of them"
            ),
        ),
    )


def _one_layer(found: Misuse) -> Finding:
    name, times = found.told
    return Finding(
        "one_layer",
        "warning",
        f"{times} layers are one and the same {name}: they share their weights",
        (Evidence("entries", f"{times}, one object"),),
        "[layer] * n repeats the layer, it makes no others: the model has the parameters of one, "
        "through which its result passes several times",
        (
            Fix(
                f"a {name} of its own for each: [{name}(…) for _ in range({times})]; "
                "copy.deepcopy(layer) for a given one"
            ),
            Fix("if one is meant: a single attribute, called in a loop"),
        ),
    )


def _by_hand(found: Misuse) -> Finding:
    return Finding(
        "softmax_by_hand",
        "warning",
        "A softmax is computed as exp(x) / exp(x).sum(): exp is inf from 89 on (in float16 from "
        "12), and inf / inf is NaN",
        (),
        "x is a layer's output, which may be any number; softmax subtracts the largest one before",
        (
            Fix("torch.softmax(x, dim)", line="torch.softmax(x, dim)"),
            Fix("for a loss: cross_entropy(x, target), or log_softmax(x, dim) for logarithms"),
        ),
    )


def _optimizer_remade(found: Misuse) -> Finding:
    (name,) = found.told
    return Finding(
        "optimizer_remade",
        "warning",
        f"A new {name} is made for each step: what it keeps of past gradients is lost each time",
        (),
        "each of several optimizers of this line, over the same parameters, made a single step",
        (Fix("make the optimizer once, before the loop, and use it in each step"),),
        confidence="likely",
    )


def _left_behind(found: Misuse) -> Finding:
    schedule, optimizer = found.told
    return Finding(
        "schedule_left_behind",
        "critical",
        f"{schedule} changes the learning rate of an optimizer that makes no steps: that of the "
        f"{optimizer} which does stays as it is",
        (),
        "the optimizer was made another time after its schedule, which still has the first one",
        (Fix("make the schedule after the optimizer that is used, and of it"),),
    )


def _without_graph(found: Misuse) -> Finding:
    (name,) = found.told
    return Finding(
        "sample_without_graph",
        "critical",
        f"{name}.sample() has no gradient: what is computed of the sample does not train what gave "
        "the distribution",
        (),
        "the loss reaches its mean and deviation through the divergence only, which makes all "
        "distributions alike; sample() is for rewards and log_prob()",
        (Fix("z = distribution.rsample()", line=".rsample()"),),
    )


def _sorted(found: Misuse) -> Finding:
    classes, size_ = found.told
    return Finding(
        "sorted_by_class",
        "critical",
        f"The data set is sorted by class and is not shuffled: batches of {size_} have one class "
        f"after another of {classes}",
        (Evidence("classes", classes),),
        "a model that sees one class for many steps forgets the others; BatchNorm's averages are "
        "those of a class",
        (Fix("DataLoader(…, shuffle=True)", line="shuffle=True"),),
    )


def _padding(found: Misuse) -> Finding:
    shape, used = found.told
    length = int(shape.split("×")[1])
    return Finding(
        "padding_everywhere",
        "warning",
        f"{percent(1 - int(used) / length)} of the positions are padding in all rows of a batch: "
        f"batches are {shape}, and no row is longer than {used}",
        (Evidence("longest row", used), Evidence("padded to", str(length))),
        "batches are padded to one length (the longest of the data set, a maximum), and the model "
        "computes with the padding, too",
        (
            Fix(
                "pad to the longest row of the batch, in the collate function (pad_sequence; of "
                "Transformers DataCollatorWithPadding, padding='longest')"
            ),
            Fix("batches of rows of like length (a sampler by length)"),
        ),
    )


def _in_vain(found: Misuse) -> Finding:
    return Finding(
        "autocast_in_vain",
        "warning",
        "No layer runs within autocast: all of the model computes in float32",
        (),
        "autocast is entered after the forward pass (around the loss only), and what was computed "
        "before it stays as it is",
        (Fix("call the model within it: with torch.autocast(…): loss = criterion(model(x), y)"),),
    )


def _double(found: Misuse) -> Finding:
    return Finding(
        "double",
        "info",
        "The model is trained in float64: twice the memory of float32, and GPUs but those of data "
        "centers compute it 32 to 64 times slower",
        (),
        "NumPy's arrays are float64, and so is what set_default_dtype or .double() makes",
        (
            Fix(
                "no set_default_dtype(torch.float64) and no model.double(); x.float(), or "
                "array.astype(np.float32) in the data set"
            ),
        ),
    )


def _on_context(found: Misuse) -> Finding:
    name, attribute = found.told
    return Finding(
        "result_on_context",
        "warning",
        f"{name} keeps its result as ctx.{attribute}: its memory is never freed, and grows with "
        "each step",
        (),
        "the result has the function's node, the node its context, and the context the result",
        (
            Fix(
                f"ctx.save_for_backward({attribute}, …) in forward, and ctx.saved_tensors in "
                "backward"
            ),
        ),
    )


def _advantage(found: Misuse) -> Finding:
    return Finding(
        "advantage_with_graph",
        "critical",
        "The policy's loss trains the critic, too: the advantage that log_prob is multiplied by "
        "has a graph",
        (),
        "the critic gets gradients that raise or lower its values for the policy's loss, next to "
        "those of its own loss",
        (Fix("advantage = (returns - values).detach()", line=".detach()"),),
    )


def _to_nothing(found: Misuse) -> Finding:
    limit = float(found.told[0])
    turned = limit < 0
    return Finding(
        "clipped_to_nothing",
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


def _added(found: Misuse) -> Finding:
    times, first, now = found.told
    return Finding(
        "parameters_added",
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


def _twice(found: Misuse) -> Finding:
    several, every = found.told
    return Finding(
        "parameters_twice",
        "warning",
        f"The optimizer has {several} of {every} tensors more than once: each of its steps changes "
        "them as often",
        (Evidence("more than once", f"{several} of {every} tensors"),),
        "lists of parameters were put together that have some in common",
        (Fix("give each parameter once: list(dict.fromkeys(parameters))"),),
    )


def _profiled(found: Misuse) -> Finding:
    (steps,) = found.told
    return Finding(
        "profiler_on",
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


def _one_batch(found: Misuse) -> Finding:
    steps, batches = found.told
    return Finding(
        "one_batch",
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


def _without_slope(found: Misuse) -> Finding:
    weights, tensors = found.told
    return Finding(
        "gradients_zero",
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


def _dead(found: Misuse) -> Finding:
    layers, name, dead, units = found.told
    more = f" (and most of {count(int(layers) - 1, 'other layer')})" if int(layers) > 1 else ""
    return Finding(
        "units_dead",
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


def _alike(found: Misuse) -> Finding:
    layers, name, units = found.told
    more = f" (and of {count(int(layers) - 1, 'other layer')})" if int(layers) > 1 else ""
    return Finding(
        "units_alike",
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


_MISUSES: Final[Mapping[str, Callable[[Misuse], Finding]]] = {
    "term_cut_off": _cut_off,
    "loss_averaged": _averaged,
    "graph_grows": _grows,
    "gradient_flat": _flat,
    "own_state": _own_state,
    "clips_nothing": _clips_nothing,
    "softmax_over_samples": _over_samples,
    "samples_as_steps": _samples_as_steps,
    "freeze_ignored": _not_frozen,
    "one_hot": _one_hot,
    "one_layer": _one_layer,
    "softmax_by_hand": _by_hand,
    "optimizer_remade": _optimizer_remade,
    "schedule_left_behind": _left_behind,
    "sample_without_graph": _without_graph,
    "sorted_by_class": _sorted,
    "padding_everywhere": _padding,
    "autocast_in_vain": _in_vain,
    "double": _double,
    "result_on_context": _on_context,
    "advantage_with_graph": _advantage,
    "clipped_to_nothing": _to_nothing,
    "parameters_added": _added,
    "parameters_twice": _twice,
    "profiler_on": _profiled,
    "one_batch": _one_batch,
    "gradients_zero": _without_slope,
    "units_alike": _alike,
    "units_dead": _dead,
}
#: Of its findings that are not of losses.
KINDS: Final = ("log_of_softmax", *_MISUSES)
