"""Parameters that a training does not reach, gradients that nobody uses: how many, why, what to
write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from trainfit.results.findings import Evidence, Finding, Fix, Place
from trainfit.results.runs.learning import CUT_OFF, LearningFacts, Misuse
from trainfit.results.text import count, size

#: Below this share of the tensors one or the other unused part of a model is meant so.
_UNUSED: Final = 0.1
#: Names that are given.
_NAMED: Final = 3


def gradients(facts: LearningFacts) -> Iterator[Finding]:
    needing = facts.optimized - facts.frozen
    if not facts.without_gradient or not needing:
        return
    if facts.dropped_micro_batches == facts.micro_batches:
        return  # they had gradients, which zero_grad dropped
    if _is_replaced(facts):
        return  # :func:`replaced` says it
    checkpoint = facts.checkpoint_without_gradient
    cut: Misuse | None = None
    share = facts.without_gradient / needing
    names = ", ".join(facts.without_names)
    more = "" if facts.without_gradient <= len(facts.without_names) else ", …"
    if checkpoint is not None:
        cause = (
            "a reentrant checkpoint whose inputs need no gradient (frozen embeddings, data) gives "
            "none to the parameters within it"
        )
        fixes: tuple[Fix, ...] = (
            Fix("checkpoint(…, use_reentrant=False)"),
            Fix("model.enable_input_require_grads(), of Transformers' models"),
        )
    elif facts.loss_without_graph is not None and share == 1:
        cause = (
            "backward() is called of a new tensor: requires_grad was set on a loss that argmax, a "
            "comparison, .item(), .data or NumPy had cut off from the model"
        )
        fixes = (
            Fix(
                "a loss of what the model gives, by differentiable operators (probabilities in "
                "place of argmax), and no requires_grad of the loss"
            ),
        )
    elif facts.foreign == facts.without_gradient == needing:
        cause = "no model that runs has any of the optimizer's tensors: it was made of another one"
        fixes = (
            Fix(
                "make the optimizer after the model is built, replaced, copied or loaded, of the "
                "parameters of the model that is called"
            ),
        )
    elif share == 1 and facts.unused_gradients:
        names_of_others = ", ".join(facts.unused_gradients[:_NAMED])
        cause = (
            "the optimizer was given the parameters of another model than the one that is trained: "
            f"the loss's gradients go to {names_of_others}, which no optimizer has"
        )
        fixes = (Fix("make the optimizer of the parameters of the model that gives the loss"),)
    elif (cut := _cut(facts)) is not None and cut.told[0] in _CUTS:
        cause, fixes = _CUTS[cut.told[0]]
    elif cut is not None:
        cause = (
            f"{cut.told[0]} at this line cuts them off from the loss: what is computed of its "
            "result has no graph back to them"
        )
        fixes = (
            Fix(
                f"give the loss what the model gave, as it is, without {cut.told[0]} (of a GAN: "
                "detach() is for the discriminator's loss, not for the generator's)"
                if cut.told[0] == "detach"
                else f"no {cut.told[0]} between the model and its loss"
            ),
            Fix("leave them out of the optimizer if that is meant"),
        )
    else:
        cause = "their modules did not run, or the loss does not depend on what they computed"
        fixes = (
            Fix("check that the loss depends on them (no detach(), no_grad() or .data before it)"),
            Fix("leave them out of the optimizer if that is meant"),
        )
    place = checkpoint or (facts.loss_without_graph if share == 1 else None)
    is_copied = cut is not None and cut.told[0] == _COPIES
    is_certain = checkpoint is not None or place is not None or is_copied
    place = place or (None if cut is None else cut.place)
    nothing = "Nothing is learned: " if share == 1 else ""
    serious = is_certain or share >= _UNUSED
    yield Finding(
        "no_gradient",
        "critical" if is_certain or share == 1 else "warning" if serious else "info",
        f"{nothing}{facts.without_gradient} of {needing} trainable tensors had no gradient "
        f"in {count(facts.steps, 'step')}: {names}{more}",
        (Evidence("without a gradient", f"{facts.without_gradient} of {needing} tensors"),),
        cause,
        fixes,
        confidence="certain" if is_certain else "likely",
        place=Place.parse(place),
    )


#: What cuts parameters off from the loss: the cause, and what to write.
_COPIES: Final = "deepcopy"
_CUTS: Final[Mapping[str, tuple[str, tuple[Fix, ...]]]] = {
    "no_grad": (
        "this line computes them where gradients are off (torch.no_grad(), inference_mode()): what "
        "comes of it has no graph back to them",
        (
            Fix("compute it outside of torch.no_grad() (and without the decorator)"),
            Fix("leave them out of the optimizer if that is meant"),
        ),
    ),
    _COPIES: (
        "this line copies them (copy.deepcopy) in each step, and the loss is computed with the "
        "copies, whose gradients do not reach the originals",
        (
            Fix(
                "compute with the originals: torch.func.functional_call(model, parameters, inputs) "
                "of what the inner step makes of them, by torch.autograd.grad(…, create_graph=True)"
            ),
            Fix(
                "first-order: add the copies' gradients to the originals (p.grad += copied.grad), "
                "then optimizer.step()"
            ),
        ),
    ),
}


def _cut(facts: LearningFacts) -> Misuse | None:
    """The misuse that cut off all that has no gradient from the loss, if one line did that."""
    for misuse in facts.misuses:
        behind = misuse.told[1:]
        known = set(behind).issuperset(facts.without_names)
        is_all = facts.without_gradient <= len(behind) and known
        if misuse.kind == CUT_OFF and is_all:
            return misuse
    return None


def _is_replaced(facts: LearningFacts) -> bool:
    """Has the optimizer tensors of a part that the model had before?"""
    needing = facts.optimized - facts.frozen
    return bool(facts.left_out) and 0 < facts.foreign <= facts.without_gradient < needing


def replaced(facts: LearningFacts) -> Iterator[Finding]:
    if not _is_replaced(facts):
        return
    names = ", ".join(facts.left_out[:_NAMED]) + ", …" * (len(facts.left_out) > _NAMED)
    yield Finding(
        "part_replaced",
        "critical",
        f"{names}: never trained, no optimizer has {'it' if len(facts.left_out) == 1 else 'them'}",
        (
            Evidence("not trained", count(len(facts.left_out), "tensor")),
            Evidence("of another model", count(facts.foreign, "tensor")),
        ),
        "the optimizer was made before this part of the model was replaced, and has the old one's "
        "tensors",
        (Fix("make the optimizer after the model is complete (its last layer, too)"),),
    )


def unregistered(facts: LearningFacts) -> Iterator[Finding]:
    found = facts.unregistered
    if not found:
        return
    names = ", ".join(dict.fromkeys(found))
    made_again = facts.made_again == len(found)
    yield Finding(
        "not_registered",
        "critical",
        f"{count(len(found), 'tensor')} that the loss depends on are never trained: no optimizer "
        f"has them, and no model ({names})",
        (Evidence("not trained", count(len(found), "tensor")),),
        "each forward pass makes new ones, with other random numbers"
        if made_again
        else "layers in a Python list or dict are no part of a module, nor is "
        "nn.Parameter(x).to(device), a copy: parameters() and state_dict() leave them out",
        (
            Fix("make layers once, in __init__ (self.fc = nn.Linear(…)), and call them in forward")
            if made_again
            else Fix(
                "keep layers in nn.ModuleList or nn.ModuleDict, tensors in nn.ParameterList, one "
                "that is moved as nn.Parameter(x.to(device))"
            ),
        ),
        confidence="likely",
    )


def unused_gradients(facts: LearningFacts) -> Iterator[Finding]:
    """A part that is frozen by leaving it out of the optimizer, a teacher's graph."""
    found = facts.unused_gradients
    if not found:
        return
    names = ", ".join(found[:_NAMED]) + ", …" * (len(found) > _NAMED)
    yield Finding(
        "gradients_unused",
        "warning" if 2 * facts.unused_bytes > facts.gradient_bytes else "info",
        f"{count(len(found), 'tensor')} get gradients ({size(facts.unused_bytes)}) that no "
        f"optimizer uses: {names}",
        (Evidence("not used", facts.unused_bytes, "bytes"),),
        "they are left out of the optimizer and not frozen: the backward pass goes through them, "
        "their gradients stay in memory, and activations are kept for them",
        (
            Fix(
                "requires_grad_(False) of that part before the training; torch.no_grad() around "
                "its forward pass, too, if nothing before it is trained (a backbone, a teacher; "
                "not a perceptual loss); or give them to the optimizer"
            ),
        ),
    )
