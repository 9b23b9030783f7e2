"""Loss functions, layers and calls that get something else than they are for, or have no effect:
which, why it matters, what to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from trainfit.findings.training.accumulation import ACCUMULATION
from trainfit.findings.training.inputs import INPUTS, SEQUENCES
from trainfit.findings.training.numbers import NUMBERS
from trainfit.findings.training.stalled import STALLED
from trainfit.findings.training.terms import TERMS
from trainfit.findings.training.wiring import WIRING
from trainfit.results.findings import Evidence, Finding, Fix, Kinds, Place
from trainfit.results.runs.learning import WITHOUT_GRAPH, Misuse
from trainfit.results.text import count, percent, size

_OWN: Final = Kinds()


def of_misuse(found: Misuse) -> Finding:
    """The finding of what has not the effect that it is meant to have."""
    return dataclasses.replace(
        _MISUSES[found.kind](found.kind, *found.told), place=Place.parse(found.place)
    )


def of_kind(kind: str, misuses: Iterable[Misuse]) -> Finding | None:
    """The finding of a kind of them; ``None``: there is none."""
    return next((of_misuse(misuse) for misuse in misuses if misuse.kind == kind), None)


@_OWN.of("term_cut_off")
def _cut_off(kind: str, operator: str, cut_at: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "A term of the loss trains nothing: it has no gradient, and only moves the number",
        (Evidence("cut off by", operator), *((Evidence("at", cut_at),) if cut_at else ())),
        f"{operator} cuts it off from what the model computes: what comes after it has no graph",
        (Fix("torch.autograd.grad(…, create_graph=True)", line="create_graph=True"),)
        if operator == WITHOUT_GRAPH
        else (
            Fix(
                "compute it by differentiable operators of what the model gives (probabilities in "
                "place of argmax or a threshold, parameters without .data or detach())"
            ),
            Fix("leave it out of the loss if it is only to be shown"),
        ),
    )


@_OWN.of("graph_grows")
def _grows(kind: str) -> Finding:
    return Finding(
        kind,
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


@_OWN.of("graphs_kept")
def _graphs_kept(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"Losses of past steps are kept with their graph{f', in {name}' if name else ''}: memory "
        "grows with each step",
        (),
        "a loss that is kept as a tensor keeps its whole graph, on the host, and on the GPU what "
        "backward() has not freed; .cpu(), .to() and arithmetic give a tensor that still has it",
        (Fix("keep the number: loss.item(), or loss.detach()", line="loss.item()"),),
    )


@_OWN.of("results_unused")
def _unused(kind: str, number: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{number} results of the model are kept with a graph that no backward pass uses: with all "
        "activations of their calls",
        (Evidence("results", number),),
        "gradients are on where results are only collected: a rollout's actions, values and log "
        "probabilities, statistics, targets; detach() later frees none of it as long as one result "
        "is there",
        (
            Fix(
                "with torch.no_grad(): around calls whose results are stored, and computed once "
                "more for the loss",
                line="with torch.no_grad():",
            ),
        ),
    )


@_OWN.of("loss_averaged")
def _averaged(kind: str, shape: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"The loss is one number already when it is multiplied by {shape} weights or a mask: they "
        "have no effect",
        (Evidence("weights", shape),),
        "the loss function has averaged over all positions, padding as well",
        (Fix("reduction='none' in the loss function, then (loss * mask).sum() / mask.sum()"),),
    )


@_OWN.of("gradient_flat")
def _flat(kind: str, operator: str, number: str, *names: str) -> Finding:
    more = ", …" * (int(number) > len(names))
    return Finding(
        kind,
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


@_OWN.of("own_state", later=True)
def _own_state(kind: str, name: str) -> Finding:
    return Finding(
        kind,
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


@_OWN.of("state_not_loaded", later=True)
def _not_loaded(kind: str, name: str, number: str, own: str, other: str) -> Finding:
    before, _, rest = other.partition(".")
    prefixed = bool(rest) and (
        other.endswith(f".{own}") or rest.startswith(f"{own.split('.')[0]}.")
    )
    return Finding(
        kind,
        "critical",
        f"Nothing was loaded into {name}: none of the {number} names of the state is one of the "
        f"model's ({other} against {own})",
        (Evidence("names of the state", number), Evidence("of them in the model", "0")),
        "with strict=False names that do not match are passed over without a word"
        + ("; DataParallel and DDP put module. before each" if before == "module" else ""),
        (
            Fix(
                f'{{name.removeprefix("{before}."): value for name, value in state.items()}}'
                if prefixed
                else "give it the names of the model (a checkpoint may have them one level below: "
                'checkpoint["state_dict"])'
            ),
            Fix("look at what load_state_dict(…, strict=False) returns, or leave strict=False out"),
        ),
    )


@_OWN.of("shifted_twice")
def _shifted_twice(kind: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "Labels are shifted twice: the model learns the token after the next one",
        (),
        "the script gives the tokens from the second on as labels, and the model shifts its labels "
        "by one itself (Transformers' …ForCausalLM)",
        (
            Fix(
                "give both the same tokens: model(input_ids=tokens, labels=tokens)",
                line="model(input_ids=tokens, labels=tokens)",
            ),
            Fix("without labels=…, cross_entropy(logits.flatten(0, 1), labels.flatten())"),
        ),
    )


@_OWN.of("second_order_unused")
def _second_order(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "backward(create_graph=True) records a graph of the gradients that no other pass uses: it "
        "keeps all activations, and each gradient a graph, until the gradients are dropped",
        (),
        "it is for a second derivative (a gradient penalty, MAML), and none is computed; gradients "
        "and parameters hold each other, so that memory may never be freed",
        (
            Fix("loss.backward()", line="loss.backward()"),
            Fix("for a second derivative: torch.autograd.grad(loss, inputs, create_graph=True)"),
        ),
    )


@_OWN.of("clips_nothing")
def _clips_nothing(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "Gradients are not clipped: the parameters given are an iterator that was used up before",
        (),
        "model.parameters(), chain(…), filter(…) give each parameter once; the optimizer, or the "
        "step before, had them",
        (Fix("parameters = list(model.parameters()), or call model.parameters() each time"),),
    )


@_OWN.of("softmax_over_samples")
def _over_samples(kind: str, name: str, shape: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{name} without dim goes over the first dimension of {shape}: over samples",
        (Evidence("input", shape),),
        "without dim PyTorch chooses dimension 0 of a tensor with three: weights of different "
        "samples sum to 1, not those of one",
        (Fix("dim=-1 (nn.Softmax(dim=-1))", line="nn.Softmax(dim=-1)"),),
        confidence="likely",
    )


@_OWN.of("samples_as_steps")
def _samples_as_steps(kind: str, name: str, shape: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{name} goes over samples as if they were time steps: its input is {shape}, "
        "the batch first, and its batch_first is False",
        (Evidence("input", shape),),
        "without batch_first the first dimension is time: each sample sees those of its batch, and "
        "the result depends on how they are put together",
        (Fix("batch_first=True, or x.transpose(0, 1) before and after it"),),
        confidence="likely",
    )


@_OWN.of("freeze_ignored", later=True)
def _not_frozen(kind: str, number: str, *names: str) -> Finding:
    more = ", …" * (int(number) > len(names))
    return Finding(
        kind,
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


@_OWN.of("one_hot")
def _one_hot(kind: str, shape: str, nbytes: str) -> Finding:
    return Finding(
        kind,
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


@_OWN.of("one_layer")
def _one_layer(kind: str, name: str, times: str) -> Finding:
    return Finding(
        kind,
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


@_OWN.of("softmax_by_hand")
def _by_hand(kind: str) -> Finding:
    return Finding(
        kind,
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


@_OWN.of("optimizer_remade")
def _optimizer_remade(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"A new {name} is made for each step: what it keeps of past gradients is lost each time",
        (),
        "each of several optimizers of this line, over the same parameters, made a single step",
        (Fix("make the optimizer once, before the loop, and use it in each step"),),
        confidence="likely",
    )


@_OWN.of("schedule_left_behind", later=True)
def _left_behind(kind: str, schedule: str, optimizer: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"{schedule} changes the learning rate of an optimizer that makes no steps any more: that "
        f"of the {optimizer} which does stays as it is",
        (),
        "the optimizer was made another time after its schedule, which still has the first one",
        (Fix("make the schedule after the optimizer that is used, and of it"),),
    )


@_OWN.of("sample_without_graph")
def _without_graph(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"{name}.sample() has no gradient: what is computed of the sample does not train what gave "
        "the distribution",
        (),
        "the loss reaches its mean and deviation through the divergence only, which makes all "
        "distributions alike; sample() is for rewards and log_prob()",
        (Fix("z = distribution.rsample()", line=".rsample()"),),
    )


@_OWN.of("norm_of_a_shard")
def _norm_of_a_shard(kind: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "Gradients are clipped by the norm of this rank's shard: each rank scales its part of them "
        "by another factor",
        (),
        "torch.nn.utils.clip_grad_norm_ sees the part of FSDP's parameters that the rank keeps; "
        "the norm of all is known to the model that FSDP made",
        (
            Fix(
                "model.clip_grad_norm_(max_norm) of the FSDP model",
                line="model.clip_grad_norm_(max_norm)",
            ),
        ),
    )


@_OWN.of("gathered_at_once")
def _gathered(kind: str, layer: str, layers: str, own: str, every: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"FSDP gathers {size(int(own))} of the model's {size(int(every))} at once: its {layers} "
        f"{layer} are one unit",
        (Evidence("at once", size(int(own))), Evidence("layers", f"{layers} {layer}")),
        "each rank holds all of a unit while it computes, and waits for it: with a unit for each "
        "layer it holds one or two, and gathers the next meanwhile",
        (
            Fix(
                f"fully_shard(layer) for each {layer}, then fully_shard(model); of FSDP1 "
                "auto_wrap_policy=ModuleWrapPolicy({" + layer + "})"
            ),
            # accelerate/utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy (1.15).
            Fix(
                "Accelerate, Trainer: TRANSFORMER_BASED_WRAP with "
                f"transformer_layer_cls_to_wrap {layer}; a policy that is a function (peft's "
                "fsdp_auto_wrap_policy) has no effect with version 2, the default of Transformers "
                "5.23 and newer"
            ),
        ),
    )


@_OWN.of("gloo_of_gpus")
def _gloo(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "The gradients of models on GPUs are exchanged by gloo, through the memory of the host",
        (),
        "gloo copies them to the CPU, adds them up there and copies them back; NCCL goes from GPU "
        "to GPU (predicted times are those of NCCL)",
        (Fix('init_process_group("nccl")', line='init_process_group("nccl")'),),
    )


@_OWN.of("no_sync_in_vain")
def _no_sync(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "no_sync() is around the backward pass alone: gradients are averaged in each micro-batch",
        (),
        "DistributedDataParallel decides in its forward pass whether the backward pass averages "
        "them, so that has to be within no_sync(), too",
        (
            Fix(
                "with model.no_sync(): around the forward and the backward pass of each "
                "micro-batch but the last of a step"
            ),
        ),
    )


@_OWN.of("never_averaged")
def _never_averaged(kind: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "The ranks never average their gradients: all passes are within no_sync()",
        (),
        "each rank trains a model of its own, on its share of the data",
        (Fix("leave the last micro-batch of each step out of no_sync()"),),
    )


@_OWN.of("sorted_by_class")
def _sorted(kind: str, classes: str, size_: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"The data set is sorted by class and is not shuffled: batches of {size_} have one class "
        f"after another of {classes}",
        (Evidence("classes", classes),),
        "a model that sees one class for many steps forgets the others; BatchNorm's averages are "
        "those of a class",
        (Fix("DataLoader(…, shuffle=True)", line="shuffle=True"),),
    )


@_OWN.of("padding_everywhere")
def _padding(kind: str, shape: str, used: str) -> Finding:
    length = int(shape.split("×")[1])
    return Finding(
        kind,
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


@_OWN.of("autocast_in_vain")
def _in_vain(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "No layer runs within autocast: all of the model computes in float32",
        (),
        "autocast is entered after the forward pass (around the loss only), and what was computed "
        "before it stays as it is",
        (Fix("call the model within it: with torch.autocast(…): loss = criterion(model(x), y)"),),
    )


@_OWN.of("double")
def _double(kind: str) -> Finding:
    return Finding(
        kind,
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


@_OWN.of("result_on_context")
def _on_context(kind: str, name: str, attribute: str) -> Finding:
    return Finding(
        kind,
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


@_OWN.of("advantage_with_graph")
def _advantage(kind: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "The policy's loss trains the critic, too: the advantage that log_prob is multiplied by "
        "has a graph",
        (),
        "the critic gets gradients that raise or lower its values for the policy's loss, next to "
        "those of its own loss",
        (Fix("advantage = (returns - values).detach()", line=".detach()"),),
    )


_ROOMS: Final = (_OWN, ACCUMULATION, INPUTS, NUMBERS, SEQUENCES, STALLED, WIRING, TERMS)
_MISUSES: Final = {kind: finds for room in _ROOMS for kind, finds in room.items()}
#: Those that an evaluation, a later epoch or the run's end may be the first to show.
LATER: Final = tuple(kind for room in _ROOMS for kind in room.later)
#: Of its findings that are not of losses.
KINDS: Final = ("log_of_softmax", *_MISUSES)
