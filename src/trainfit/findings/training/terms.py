"""What the terms of a loss are computed of, and what several backward passes and optimizers do with
gradients, where that is not what is meant: what was seen, why it matters, what to write."""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.findings.training.worker_copies import (
    generator_copied,
    shared_handle,
    too_few_shards,
)
from trainfit.results.findings import Evidence, Finding, Fix, Kinds
from trainfit.results.text import count

TERMS: Final = Kinds()


@TERMS.of("log_of_output")
def _of_output(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"torch.{name} gets a layer's output, which may be below 0: NaN, and then all weights are",
        (),
        "a logarithm of a number below 0 is NaN, of 0 -inf, and so are its gradients",
        (
            Fix(
                "for probabilities torch.log_softmax(output, dim=-1) or F.logsigmoid(output), in "
                "place of the logarithm"
            ),
            Fix("for another number above 0: F.softplus(output) + 1e-6 before the logarithm"),
        ),
        confidence="likely",
    )


@TERMS.of("log_of_zero")
def _of_zero(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"torch.{name} gets numbers that are 0 wherever they were below 0 (relu, clamp(min=0)): "
        "-inf, and then all weights are NaN",
        (),
        "the logarithm of 0 is -inf and its derivative infinite: 0 times that is NaN, in an "
        "entropy p * log(p), and in the backward pass behind a torch.where or a clamp, too",
        (
            Fix("x.clamp(min=1e-8) before the logarithm", line="clamp(min=1e-8)"),
            Fix("torch.softmax in place of relu and a division: torch.log_softmax(output, dim=-1)"),
        ),
    )


@TERMS.of("deviation_of_one", later=True)
def _of_one(kind: str, name: str, shape: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"{name}() goes over a single number ({shape}): it is NaN, and so are the loss and then "
        "all weights",
        (Evidence("given", shape),),
        "it divides by one less than the numbers it goes over, which is 0",
        (
            Fix("DataLoader(…, drop_last=True), if the last batch has one sample alone"),
            Fix(f"{name}(…, correction=0), which is 0 for a single number, and a small number"),
        ),
    )


@TERMS.of("focal_of_mean")
def _focal(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "A focal loss is computed of the batch's mean loss: no sample has a weight of its own",
        (),
        "the loss function averages before exp(-loss): the factor is one number for all samples, "
        "those that are learned count as much as the others",
        (
            Fix(
                "loss = F.cross_entropy(x, y, reduction='none'); p = torch.exp(-loss); "
                "((1 - p) ** gamma * loss).mean()",
                line="reduction='none'",
            ),
        ),
    )


@TERMS.of("target_trained")
def _trained_target(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{name} trains its target, too: what is expected of the next state has a graph",
        (),
        "the error is made smaller by changing what is expected as well as what is predicted: "
        "learning is slow or goes elsewhere, and the graph of both is kept",
        (
            Fix("with torch.no_grad(): around the target, or target.detach()", line=".detach()"),
            Fix("a target network for it: copy.deepcopy(model), updated every so many steps"),
        ),
        confidence="likely",
    )


@TERMS.of("target_of_logs")
def _of_logs(kind: str, target: str) -> Finding:
    are_logs = target == "logarithms"
    return Finding(
        kind,
        "critical",
        "kl_div gets "
        + (
            "log-probabilities as target, and wants probabilities"
            if are_logs
            else "probabilities as target, and is told that they are logarithms"
        ),
        (),
        "a target below 0 has no logarithm, and counts as 0 there: the loss has another sign and "
        "no least value"
        if are_logs
        else "exp() of a probability is a number from 1 to 2.7: no distribution",
        (
            Fix("F.kl_div(log_p, log_q, log_target=True)", line="log_target=True")
            if are_logs
            else Fix("no log_target=True, or log_softmax for the target"),
        ),
    )


@TERMS.of("labels_too_long", later=True)
def _too_long(kind: str, rows: str, of: str, steps: str, labels: str, infinite: str) -> Finding:
    is_left_out = infinite == "out"
    return Finding(
        kind,
        "warning" if is_left_out else "critical",
        f"ctc_loss gets more labels than steps: {labels} labels of {steps} steps in {rows} of "
        f"{count(int(of), 'sample')}: "
        + ("they train nothing" if is_left_out else "its loss is inf, and gradients are NaN"),
        (Evidence("steps", steps), Evidence("labels", labels)),
        "each label needs a step of its own (two equal ones a blank between them): the layers "
        "before make fewer steps of the input than there are labels",
        (
            Fix("a smaller stride along the width (time), or longer inputs"),
            Fix(
                "leave such samples out of the data set; CTCLoss(zero_infinity=True) gives those "
                "that remain no gradient"
            ),
        ),
    )


@TERMS.of("divergence_dominates")
def _dominates(kind: str, times: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"The divergence counts {float(times):,.0f}× as much as the error: it is a sum over the "
        "batch, the error a mean over all numbers",
        (Evidence("weight of the divergence", f"{times}×"),),
        "all samples get one and the same code, which makes the divergence 0: the decoder gives "
        "the mean of the data",
        (
            Fix("the sum of both: F.mse_loss(output, x, reduction='sum') + kld"),
            Fix("the mean of both: kld / x.numel(), with reduction='mean'"),
        ),
        confidence="likely",
    )


@TERMS.of("graph_beyond")
def _beyond(kind: str, tensors: str, name: str) -> Finding:
    which = f" ({name}, …)" if name else ""
    return Finding(
        kind,
        "warning",
        f"A backward pass goes on through {count(int(tensors), 'tensor')} of another optimizer"
        f"{which}, whose gradients are dropped",
        (Evidence("gradients dropped", count(int(tensors), "tensor")),),
        "what that part of the model gave has its graph (a generator's images, for the "
        "discriminator): time and activations for a pass that trains nothing",
        (
            Fix("discriminator(fake.detach())", line=".detach()"),
            Fix("with torch.no_grad(): around what makes it, if no other loss is computed of it"),
        ),
    )


@TERMS.of("step_of_two")
def _of_two(kind: str, tensors: str, name: str) -> Finding:
    which = f" ({name}, …)" if name else ""
    return Finding(
        kind,
        "critical",
        f"Two optimizers step with the same gradients of {count(int(tensors), 'tensor')}{which}",
        (Evidence("in both", count(int(tensors), "tensor")),),
        "both have these parameters, and nothing sets their gradients to zero in between",
        (
            Fix("give each parameter to one optimizer: Adam(agent.actor.parameters())"),
            Fix("optimizer.zero_grad() before each backward pass, right after the other's step"),
        ),
    )


@TERMS.of("trained_in_turn")
def _in_turn(kind: str, tensors: str, name: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{count(int(tensors), 'tensor')}{f' ({name}, …)' if name else ''} are in two optimizers, "
        "which train them in turn by different losses",
        (Evidence("tensors in both", tensors),),
        "a discriminator that the generator's optimizer has, too, is trained to be deceived",
        (Fix("give each optimizer the parameters that its loss is to train, and no others"),),
        confidence="likely",
    )


@TERMS.of("attack_in_step")
def _attack(kind: str, passes: str, _: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"Each step uses the gradients of {passes} passes to the inputs, too: those of an attack",
        (Evidence("passes to inputs", passes),),
        "loss.backward() adds gradients of the parameters as well as of the inputs, and they are "
        "not set to zero before the pass that trains",
        (
            Fix(
                "gradient, = torch.autograd.grad(loss, adversarial), which leaves the parameters'",
                line="torch.autograd.grad(loss, adversarial)",
            ),
            Fix("optimizer.zero_grad() after the attack, before the pass that trains"),
        ),
        confidence="likely",
    )


@TERMS.of("one_memory", later=True)
def _memory(kind: str, one: str, other: str, tensors: str, shape: str, _: str) -> Finding:
    names = f"Two models ({one})" if one == other else f"{one} and {other}"
    return Finding(
        kind,
        "critical",
        f"{names} have one memory: each step of one changes the other, too",
        (Evidence("in common", f"{count(int(tensors), 'matrix', 'matrices')}, one of {shape}"),),
        "target.data = source.data copies nothing: both are the same numbers from then on",
        (
            Fix("target.data.copy_(source.data)", line="target.data.copy_(source.data)"),
            Fix("target.load_state_dict(source.state_dict()), which copies"),
        ),
    )


@TERMS.of("norm_of_frozen")
def _of_frozen(kind: str, norms: str, name: str) -> Finding:
    more = f" (and {count(int(norms) - 1, 'more layer')})" if int(norms) > 1 else ""
    return Finding(
        kind,
        "warning",
        f"BatchNorm {name}{more} is frozen, and its running statistics still follow each batch",
        (Evidence("layers", norms),),
        "requires_grad=False stops its weight and bias alone: in training mode it normalizes by "
        "the batch, and mean and variance move away from those it was trained with",
        (
            Fix(
                "backbone.eval() after each model.train(), or for each BatchNorm of the part that "
                "is frozen",
                line="model.backbone.eval()",
            ),
            Fix("leave it, if the statistics are to follow the new data"),
        ),
        confidence="likely",
    )


@TERMS.of("norm_left_behind", later=True)
def _left(kind: str, norms: str, name: str) -> Finding:
    more = f" (and of {count(int(norms) - 1, 'more layer')})" if int(norms) > 1 else ""
    return Finding(
        kind,
        "critical",
        f"A copy of the model is evaluated whose weights are averaged, and the statistics of "
        f"BatchNorm {name}{more} are not",
        (Evidence("layers", norms),),
        "parameters() has weights and biases alone: running_mean and running_var of the copy are "
        "those from when it was made, and its results are worse than the model's",
        (
            Fix(
                "the buffers as well: for own, new in zip(ema.buffers(), model.buffers()): "
                "own.copy_(new)"
            ),
            Fix(
                "torch.optim.swa_utils.AveragedModel(model, "
                "multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)"
            ),
        ),
        confidence="likely",
    )


@TERMS.of("hooks_added")
def _hooks(kind: str, hooks: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"Each step adds one more hook to the same module, {hooks} so far, and none is removed",
        (Evidence("hooks of this line", hooks),),
        "all of them are called in each forward pass: steps get slower, and what hooks keep stays "
        "in memory",
        (
            Fix("register the hook once, before the loop"),
            Fix("handle = module.register_forward_hook(…), and handle.remove() after the pass"),
        ),
    )


@TERMS.of("pinned_in_vain")
def _not_pinned(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"pin_memory=True has no effect: batches are of the script's own class {name}",
        (),
        "the DataLoader pins tensors in lists, tuples and dictionaries, and of other objects what "
        "their method pin_memory() does; copies of pageable memory wait, non_blocking or not",
        (
            Fix(
                f"a method of {name}: def pin_memory(self): self.x = self.x.pin_memory(); … "
                "return self"
            ),
            Fix("a NamedTuple or a dictionary in its place"),
        ),
    )


@TERMS.of("handle_of_workers")
def _handle(kind: str, path: str, type_name: str) -> Finding:
    return dataclasses.replace(shared_handle({path: type_name}, "warning", "likely"), kind=kind)


@TERMS.of("workers_without_shard")
def _shards(kind: str, name: str, shards: str, workers: str) -> Finding:
    finding = too_few_shards(kind, int(shards), int(workers), "warning", "likely")
    cause = (
        f"{name} has {shards}, and each worker is given every {workers}th of them from its own on"
    )
    return dataclasses.replace(finding, cause=f"{cause}; the others make no batch, and need memory")


@TERMS.of("generator_of_workers")
def _copied(kind: str, path: str, workers: str, epochs: str) -> Finding:
    copied = generator_copied(
        (path,), "warning", by_workers=int(workers) > 1, by_epochs=bool(epochs)
    )
    return dataclasses.replace(
        copied,
        kind=kind,
        cause="a worker begins with the data set as it is when the workers start, its generator's "
        "state too; PyTorch seeds random, numpy.random and torch in each of them, and no other",
        confidence="likely",
    )


@TERMS.of("pinned_by_hand")
def _by_hand(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "Each batch is pinned by the training itself: it waits while pinned memory is made and "
        "the batch is copied into it",
        (),
        "pin_memory() copies on the host before the copy to the GPU, and is no faster than "
        ".to(device) alone; a DataLoader does it in a thread, meanwhile",
        (
            Fix(
                "DataLoader(…, pin_memory=True), and x.to(device, non_blocking=True)",
                line="x = x.to(device, non_blocking=True)",
            ),
        ),
    )


@TERMS.of("return_minimized")
def _minimized(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"The loss is the log-probabilities times {name}, without a minus sign: it is minimized, "
        "and good actions become less likely",
        (),
        "backward() and step() make a loss smaller, and an expected return is to become larger",
        (
            Fix(f"loss = -(log_prob * {name}).mean()", line=f"-(log_prob * {name}).mean()"),
            Fix("maximize=True of the optimizer, if this is all that it minimizes"),
        ),
        confidence="likely",
    )


@TERMS.of("same_views")
def _same_views(kind: str, shape: str, compared: str) -> Finding:
    evidence = (Evidence("input", shape),) if shape else ()
    once = Fix("compute the result of one input once, and use it for both")
    if not compared:
        return Finding(
            kind,
            "info",
            f"A model computes the same {shape} twice in a step, with the same result",
            evidence,
            "without dropout or noise the second pass gives what the first gave, and costs as much",
            (once,),
            confidence="likely",
        )
    return Finding(
        kind,
        "critical",
        "Both views are one: "
        + (f"a layer gets the same {shape} twice in a step" if shape else "one tensor is put twice")
        + ", and gives the same result",
        evidence,
        "one augmented sample stands for both views: a sample is then compared with itself, which "
        "is no task to learn from",
        (
            Fix(
                "draw the augmentation for each view: view1, view2 = augment(x), augment(x) (in a "
                "data set: return self.augment(x), self.augment(x))"
            ),
            once,
        ),
        confidence="likely",
    )


@TERMS.of("states_aliased", later=True)
def _aliased(kind: str, number: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "Of each transition in the replay buffer the state and the next state are one array: "
        "what is learned of it is no transition",
        (Evidence("transitions", number),),
        "the environment changes its state in place and returns that array: all that was stored of "
        "it changes with each step, and holds the last state at the end",
        (
            Fix("in the environment: return self.state.copy()", line="self.state.copy()"),
            Fix("store copies: buffer.append((state.copy(), action, reward, next_state.copy()))"),
        ),
    )
