"""What models, losses, masks and DataLoaders are given, and how they are put together, where that
is not what they are for: what was seen, why it matters, what to write."""

from __future__ import annotations

from typing import Final

from trainfit.results.findings import Evidence, Finding, Fix, Kinds
from trainfit.results.text import count, percent, size

WIRING: Final = Kinds()

#: Bytes of scores from which they are worth a warning.
_MUCH: Final = 1 << 30


@WIRING.of("compared_with_all", later=True)
def _compared(kind: str, output: str, target: str) -> Finding:
    rows = output.partition("×")[0]
    return Finding(
        kind,
        "critical",
        f"Each prediction is compared with every target: {output} with {target} gives "
        f"{rows}×{rows}, and an accuracy above 100%",
        (Evidence("predictions", output), Evidence("targets", target)),
        "tensors of different shapes are broadcast against each other",
        (Fix("give both one shape: pred.squeeze(1) == y, or pred == y.unsqueeze(1)"),),
        confidence="likely",
    )


@WIRING.of("norm_forgets")
def _forgets(kind: str, layers: str, name: str, momentum: str) -> Finding:
    other = f"{1 - float(momentum):.2g}"
    more = f" (and {count(int(layers) - 1, 'more layer')})" if int(layers) > 1 else ""
    return Finding(
        kind,
        "warning",
        f"BatchNorm {name}{more} has momentum={momentum}: its running statistics are those of "
        "the last batch, and evaluations are noisy",
        (Evidence("momentum", momentum),),
        "PyTorch's momentum is the share of the new batch, that of Keras the share of the old "
        f"ones: {momentum} there is {other} here",
        (Fix(f"momentum={other} (the default is 0.1)", line=f"momentum={other}"),),
        confidence="likely",
    )


@WIRING.of("checkpointing_idle")
def _idle(kind: str, name: str, parts: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"Gradient checkpointing has no effect: {name} is trained in evaluation mode",
        (Evidence("with checkpointing on", count(int(parts), "part")),),
        "its layers recompute activations in training mode only, and from_pretrained() gives a "
        "model in evaluation mode: all activations are kept, and dropout is off",
        (Fix("model.train() before the training", line="model.train()"),),
    )


@WIRING.of("search_in_vain")
def _searches(kind: str) -> Finding:
    return Finding(
        kind,
        "info",
        "find_unused_parameters=True looks through the graph in each step, and every parameter "
        "has a gradient",
        (),
        "it is for models some of whose parameters a step does not use",
        (
            Fix(
                "leave find_unused_parameters out, unless other steps use other parts of the model"
            ),
            # Its default is True without gradient checkpointing (`Trainer._wrap_model`).
            Fix("of Transformers' Trainer: TrainingArguments(ddp_find_unused_parameters=False)"),
        ),
        confidence="likely",
    )


@WIRING.of("weights_unused")
def _unused_weights(kind: str, layers: str, nbytes: str) -> Finding:
    return Finding(
        kind,
        "warning" if int(nbytes) >= _MUCH else "info",
        f"nn.MultiheadAttention gives its weights, which nobody uses: {size(int(nbytes))} in each "
        f"step ({count(int(layers), 'layer')}), several times over",
        (Evidence("weights of all heads", int(nbytes), "bytes"),),
        "need_weights=True, the default, computes all scores, their softmax and an average, and "
        "keeps them for the backward pass; without it a fused kernel needs none of them",
        (Fix("attention(x, x, x, need_weights=False)", line="need_weights=False"),),
    )


@WIRING.of("attention_by_hand")
def _by_hand(kind: str, layers: str, nbytes: str, shape: str) -> Finding:
    return Finding(
        kind,
        "warning" if int(nbytes) >= _MUCH else "info",
        f"Attention is computed by a matmul and a softmax: {size(int(nbytes))} of scores in each "
        f"step ({count(int(layers), 'layer')}, {shape} each), several times over",
        (Evidence("scores", int(nbytes), "bytes"),),
        "scores grow with the square of the length, and the masked ones, their softmax and its "
        "dropout are kept for the backward pass; a fused kernel keeps none of them",
        (
            Fix(
                "F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=…), or with "
                "attn_mask=; of Transformers' models attn_implementation='sdpa'",
                line="F.scaled_dot_product_attention(q, k, v)",
            ),
        ),
    )


@WIRING.of("loss_not_scaled")
def _not_scaled(kind: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "A loss that is not scaled goes to parameters whose gradients the GradScaler divides (by "
        "65536 as a rule): it trains next to nothing",
        (),
        "scaler.step() unscales all gradients of the optimizer, also those of a loss that "
        "scaler.scale() did not get",
        (Fix("scaler.scale(loss).backward() of each loss, or of their sum"),),
        confidence="likely",
    )


@WIRING.of("tie_lost")
def _tie(kind: str, one: str, other: str, how: str) -> Finding:
    is_moved = how == "moved"
    return Finding(
        kind,
        "warning",
        f"{other} is not tied to {one}: "
        + (
            "since the model was moved they are two tensors, trained apart"
            if is_moved
            else "they have one memory, and each gets a gradient and a step of its own"
        ),
        (Evidence("parameters", f"{one}, {other}"),),
        "nn.Parameter(other.weight) and .data = other.weight.data make a second parameter of the "
        "same memory" + (", and .to(device) copies each of them" if is_moved else ""),
        (
            Fix(
                "one parameter for both: decoder.weight = encoder.weight; of a transposed one "
                "F.linear(x, encoder.weight.t(), bias) in forward"
            ),
        ),
    )


@WIRING.of("frozen_moves", later=True)
def _moves(kind: str, tensors: str, name: str) -> Finding:
    which = f" ({name}, …)" if name else ""
    return Finding(
        kind,
        "critical",
        f"{count(int(tensors), 'frozen tensor')}{which} still change in each step: they have "
        "gradients from before they were frozen",
        (Evidence("frozen with a gradient", count(int(tensors), "tensor")),),
        "an optimizer leaves out tensors whose gradient is None, not those with requires_grad="
        "False: with a gradient of 0 weight decay, momentum and averages go on",
        (
            Fix("parameter.grad = None where requires_grad is set to False"),
            Fix("optimizer.zero_grad(), which sets them to None (set_to_none=True)"),
        ),
    )


@WIRING.of("unfrozen_untrained", later=True)
def _untrained(kind: str, tensors: str, name: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"{count(int(tensors), 'tensor')} ({name}, …) are frozen no more, and never trained: no "
        "optimizer has them",
        (Evidence("not trained", count(int(tensors), "tensor")),),
        "the optimizer was made of the parameters that needed gradients then",
        (
            Fix(
                'optimizer.add_param_group({"params": model.backbone.parameters()}) where they are '
                "unfrozen"
            ),
            Fix("give it all parameters from the start: it leaves out those without a gradient"),
        ),
    )


#: What a mask does, by where it is True (or what it adds hides).
_HIDDEN: Final = {
    "not_after": "hides from each position itself and all before it",
    "not_before": "hides from each position itself and all after it",
    "tokens": "hides the tokens and leaves the padding",
}
_CAUSAL: Final = (
    "torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1), True for what follows; or "
    "nn.Transformer.generate_square_subsequent_mask(n)"
)


@WIRING.of("mask_misused")
def _mask(kind: str, how: str, where: str, by: str) -> Finding:
    if how == "added":
        title = "A mask of 0 and 1 is added to the scores of attention: it hides nothing"
        cause = f"{by} adds a mask of numbers; only one of truth values hides by itself"
        fix = "give it truth values: mask.bool(), or ~mask.bool() where 1 stands for what is seen"
    elif how == "rows":
        title = "A mask makes whole rows of attention's scores -inf: their softmax is NaN"
        cause = (
            f"the {by} of a row is over its keys, and the mask has one value for the row: 0 / 0; "
            "its gradient is NaN, too, whatever is put in its place after that"
        )
        fix = (
            "mask the keys, not the queries: scores.masked_fill(padding.unsqueeze(1), "
            'float("-inf")) of (batch, queries, keys); what padding gives is left out later'
        )
    elif how == "sample":
        title = "A sample of the batch is nothing but padding: the softmax of its scores is NaN"
        cause = (
            f"all keys of that sample are -inf, and their {by} is 0 / 0; its gradient is NaN, too, "
            "and with the first such batch all weights are"
        )
        fix = (
            "leave out empty samples in the data set (or give them one token), or fill with "
            "torch.finfo(scores.dtype).min in place of -inf"
        )
    elif how == "attended":
        title = "The mask of attention hides from each position itself: one of them sees nothing"
        cause = f"{by} shows what is True, the reverse of nn.MultiheadAttention"
        fix = "~mask, or is_causal=True without a mask"
    else:
        title = f"The mask of attention {_HIDDEN[where]}: NaN where nothing is left"
        cause = f"{by} hides what is True"
        fix = "tokens == padding: True for padding" if how == "tokens" else _CAUSAL
    return Finding(kind, "critical", title, (), cause, (Fix(fix),), confidence="likely")


@WIRING.of("targets_misordered")
def _misordered(kind: str, output: str, target: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "Outputs are compared with targets of other positions: one is flattened with its positions "
        f"first ({output}), the other with its samples ({target})",
        (Evidence("output", output), Evidence("target", target)),
        "both have as many rows, so that nothing fails; the first rows of one are the first "
        "position of each sample, those of the other all positions of the first sample",
        (
            Fix(
                "F.cross_entropy(output.flatten(0, 1), target.t().flatten()), or batch_first=True "
                "of the recurrent layer and the input as it is",
                line="target.t().flatten()",
            ),
        ),
    )


@WIRING.of("samples_over_width")
def _over_width(kind: str, vector: str, shape: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"A number of each sample ({vector}) is multiplied along the last dimension of {shape}, "
        "not sample by sample: both have the same size",
        (Evidence("factor", vector), Evidence("other", shape)),
        "a tensor of one dimension is broadcast over the last dimension of the other; with another "
        "batch size the line would fail",
        (Fix("factor.view(-1, 1, 1, 1): as many ones as the other has further dimensions"),),
    )


@WIRING.of("samples_changed")
def _changed(kind: str, name: str, attribute: str, line: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"{name} changes the samples that it keeps in self.{attribute}: each further epoch gets "
        "them changed once more",
        (Evidence("line", line),),
        f"self.{attribute}[index] is no copy, and the line computes in place",
        (
            Fix(
                f"x = self.{attribute}[index].clone() (of an array .copy()), or an operator that "
                "gives a new tensor: x = (x - mean) / std"
            ),
        ),
    )


@WIRING.of("samples_never_drawn")
def _never_drawn(kind: str, *text: str) -> Finding:
    weights, samples = map(int, text)
    return Finding(
        kind,
        "critical",
        f"WeightedRandomSampler has {count(weights, 'weight')} for {samples:,} samples: only the "
        f"first {weights:,} are ever drawn",
        (Evidence("weights", weights), Evidence("samples", samples)),
        "its weights are of samples, one for each, not of classes",
        (
            Fix(
                "a weight for each sample: WeightedRandomSampler(class_weights[labels], "
                "num_samples=len(labels))"
            ),
        ),
        confidence="likely",
    )


@WIRING.of("workers_not_told", later=True)
def _not_told(kind: str, name: str, attribute: str, before: str, now: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{name}.{attribute} is {now} here and {before} in the DataLoader's workers: what is set "
        "after they were started does not reach them",
        (Evidence(attribute, f"{before} in workers, {now} in the main process"),),
        "persistent_workers=True keeps the workers, each with its own copy of the data set of the "
        "first epoch",
        (
            Fix(
                "a value that processes share: self.epoch = torch.zeros((), dtype=torch.long)"
                ".share_memory_(), set by fill_(epoch)"
            ),
            Fix("persistent_workers=False, which starts workers in each epoch"),
        ),
    )


@WIRING.of("batch_from_gpu")
def _from_gpu(kind: str, *text: str) -> Finding:
    batch, parts = map(int, text)
    return Finding(
        kind,
        "warning",
        f"Each batch is put together from {batch} samples on the GPU one by one: {batch * parts} "
        "small kernels for indexing, before the training's own",
        (Evidence("batch size", batch),),
        "the data set is on the GPU, and a DataLoader asks it for single samples",
        (
            Fix(
                "no DataLoader: for rows in torch.randperm(len(x), device=x.device)"
                ".split(batch_size): xb, yb = x[rows], y[rows]"
            ),
            Fix("keep the data set on the CPU, with workers and pin_memory=True"),
        ),
    )


@WIRING.of("padding_learned")
def _padding(kind: str, *text: str) -> Finding:
    padded, positions, *token = map(int, text)
    if token:
        return Finding(
            kind,
            "warning",
            f"The loss goes over padding: {percent(padded / positions)} of a batch's labels are "
            f"{token[0]}, the embedding's padding_idx",
            (Evidence("labels of padding", f"{padded} of {positions}"),),
            "cross_entropy leaves out labels of -100, if it is told no other: the model learns to "
            "give padding, and its loss is no longer that of the text",
            (
                Fix(
                    f"nn.CrossEntropyLoss(ignore_index={token[0]})",
                    line=f"ignore_index={token[0]}",
                ),
            ),
        )
    return Finding(
        kind,
        "warning",
        f"The loss goes over padding: {percent(padded / positions)} of a batch's labels are those "
        "of positions that attention_mask leaves out",
        (Evidence("labels at padding", f"{padded} of {positions}"),),
        "labels are a copy of input_ids: the model learns to give padding, and its loss is no "
        "longer that of the text",
        (
            Fix(
                "labels[attention_mask == 0] = -100, which cross_entropy leaves out",
                line="labels[attention_mask == 0] = -100",
            ),
        ),
    )


@WIRING.of("images_flat")
def _flat(kind: str, least: str, largest: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"The numbers of all images are between {least} and {largest}: there is next to no "
        "contrast to learn from",
        (Evidence("numbers of images", f"{least} to {largest}"),),
        "images are scaled twice: ToTensor() gives 0 to 1 already",
        (Fix("no division by 255 after ToTensor(); mean and std of Normalize as parts of 1"),),
        confidence="likely",
    )


@WIRING.of("pixels_of_one_class")
def _one_class(kind: str, number: str, batches: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"All targets of {count(int(batches), 'batch', 'batches')} are class {number}: a model "
        "that gives it everywhere is right",
        (Evidence("batches looked at", int(batches)),),
        "masks of class numbers that ToTensor() or a division by 255 brought to 0..1 are 0 as "
        "whole numbers",
        (
            Fix(
                "torch.from_numpy(np.array(mask)).long() of the file's numbers, without ToTensor() "
                "and without a division"
            ),
        ),
        confidence="likely",
    )


@WIRING.of("images_by_pixels")
def _by_pixels(kind: str, next_to: str, third: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "Images have the shape (3, H, W), and numbers in the order of (H, W, 3): colours and "
        "positions are mixed",
        (
            Evidence("numbers next to each other differ by", next_to),
            Evidence("every third ones differ by", third),
        ),
        "view and reshape keep the order of numbers in memory: they do not bring the colours to "
        "the front",
        (Fix("x.permute(0, 3, 1, 2) of a batch, or image.transpose(2, 0, 1) of a NumPy array"),),
        confidence="likely",
    )


@WIRING.of("rate_large")
def _large(kind: str, name: str, rate: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"The learning rate of {name} is {rate} from the first step on: steps throw the weights "
        "far from where they are, and the loss rises or is NaN",
        (Evidence("learning rate", rate),),
        "a step of SGD moves a weight by the rate times its gradient"
        if name == "SGD"
        else f"a step of {name} moves each weight by about the rate, whatever its gradient is",
        (Fix(f"lr={'0.1' if name == 'SGD' else '1e-3'}, or lower, and a warm-up"),),
        confidence="likely",
    )


@WIRING.of("moved_each_step")
def _moved(kind: str, name: str, nbytes: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{name} is moved to the GPU in each step: {size(int(nbytes))} of weights",
        (Evidence("weights", int(nbytes), "bytes"),),
        "it is moved back to the CPU after its use: the step waits for both copies",
        (
            Fix("move it to the GPU once, before the loop, and leave it there"),
            Fix("if the GPU's memory is too small for it: in half of the bytes, model.bfloat16()"),
        ),
    )


@WIRING.of("host_copies_kept")
def _copies_kept(kind: str, per_step: str) -> Finding:
    nbytes = int(per_step)
    return Finding(
        kind,
        "warning",
        f"Copies of the GPU's tensors are kept in the host's memory: {size(nbytes)} more with each "
        f"step, {size(1000 * nbytes)} after 1,000 steps",
        (Evidence("each step", nbytes, "bytes"),),
        "what .cpu() gives is added to what earlier steps gave, and lives as long as that",
        (
            Fix("keep what is needed of it: a number (.item()), a mean, the classes (argmax)"),
            Fix("write it to a file, or empty the list, each so many steps"),
        ),
    )
