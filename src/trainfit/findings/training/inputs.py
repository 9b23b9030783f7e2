"""What losses, layers and optimizers are given that is not what they are for, though it has the
right shape: what was seen, why it matters, what to write.

Sequences that are not what a layer or a loss is for: padding as their last step or in what is
attended to, positions that are those of samples, labels that are the tokens themselves.
"""

from __future__ import annotations

from typing import Final

from trainfit.results.findings import Evidence, Finding, Fix, Kinds
from trainfit.results.text import percent, size

INPUTS: Final = Kinds()

#: Of a run that trains nothing.
PREDICTS: Final = "predicts_in_training"


@INPUTS.of("casts_undone")
def _casts(kind: str, nbytes: str, lines: str, text: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"Activations are cast to float32 by hand, and autocast casts them back right after: "
        f"{size(int(nbytes))} in each step ({text})",
        (Evidence("cast", int(nbytes), "bytes"), Evidence("lines", lines)),
        "the copies are kept for the backward pass and read and written once more; what needs "
        "float32 (norms, softmax, losses) autocast computes in it by itself",
        (Fix("leave .float() and .to(torch.float32) out between layers", line=".float()"),),
    )


@INPUTS.of("arguments_swapped")
def _swapped(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"{name} gets the targets first and the model's output second",
        (),
        "its arguments are (input, target): the logarithm is of the targets, 0 and 1, and the "
        "gradient is none of the loss that is meant",
        (Fix("criterion(output, target)"),),
    )


@INPUTS.of("labels_ignored")
def _ignored(kind: str, ignored: str, shape: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"All labels of a batch ({shape}) are {ignored}, which the loss leaves out: it is 0/0 = "
        "NaN, and then all weights are",
        (Evidence("labels", shape),),
        "no label is left to average over: the text was cut before the part that is learned, or "
        "all of it is prompt or padding",
        (
            Fix(
                "leave such samples out of the data set, or cut the prompt (from its start) in "
                "place of the answer"
            ),
            Fix(
                "reduction='sum', divided by the number of labels that count, at least 1: "
                "loss / (labels != -100).sum().clamp(min=1)"
            ),
        ),
    )


@INPUTS.of("several_classes")
def _several(kind: str, most: str, shape: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"cross_entropy gets targets with up to {most} classes at once, and is for one of them",
        (Evidence("targets", shape), Evidence("classes in a row", most)),
        "its softmax makes classes compete, and targets that add up to more than 1 are no "
        "probabilities: a sample of several classes can never be right",
        (Fix("nn.BCEWithLogitsLoss(), and output > 0 in place of argmax for the predictions"),),
    )


@INPUTS.of("sees_ahead")
def _ahead(kind: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "The model sees the tokens that it is to predict: its attention has no causal mask",
        (),
        "labels are the tokens that follow, and each position attends to all of them: the loss "
        "falls to 0, and generated text is nonsense",
        (
            Fix(
                "mask=nn.Transformer.generate_square_subsequent_mask(n, device=x.device), "
                "is_causal=True; of scaled_dot_product_attention is_causal=True"
            ),
        ),
    )


@INPUTS.of("softmax_over_queries")
def _over_queries(kind: str, shape: str, dim: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"The softmax of an attention goes over dimension {dim} of {shape}, that of the queries: "
        "no query's weights add up to 1",
        (Evidence("weights", shape),),
        "the matmul with the values goes over the last dimension, that of the keys: sums of "
        "values are larger or smaller by chance, and queries compete for each key",
        (Fix("softmax(scores, dim=-1)", line="dim=-1"),),
        confidence="likely",
    )


@INPUTS.of("backward_at_its_start")
def _at_its_start(kind: str, shape: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"Of a bidirectional layer's output {shape} the last step is used: there the backward "
        "direction has seen that step alone",
        (Evidence("output", shape),),
        "it goes from the last step to the first: half of the features hold nothing of the rest",
        (
            Fix("h, of out, (h, _) = lstm(x): torch.cat([h[-2], h[-1]], dim=1)"),
            Fix("torch.cat([out[:, -1, :H], out[:, 0, H:]], dim=1), or out.mean(dim=1)"),
        ),
    )


@INPUTS.of("images_unscaled")
def _unscaled(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "The first layer gets images as numbers from 0 to 255",
        (),
        "layers are initialized for numbers of about -1 to 1: with 100 times larger ones outputs "
        "and gradients are, the loss begins high, and steps overshoot",
        (
            Fix("x.float() / 255, then Normalize(mean, std)"),
            Fix("v2.ToDtype(torch.float32, scale=True); ToTensor() of a PIL image divides by 255"),
        ),
        confidence="likely",
    )


@INPUTS.of("teacher_in_training")
def _teacher(kind: str, model: str, layer: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{model} is not trained and runs in training mode, with its {layer} on",
        (Evidence("layer", layer),),
        "dropout makes its results random, BatchNorm normalizes them by the batch and changes its "
        "own statistics: they are not those it was trained for",
        (Fix("teacher.eval(), once, after it is loaded", line="teacher.eval()"),),
        confidence="likely",
    )


@INPUTS.of("rate_restored")
def _restored(kind: str, name: str, rate: str, own: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"load_state_dict brings back the learning rate {own}: lr={rate}, that {name} was made "
        "with, has no effect",
        (Evidence("learning rate", own),),
        "an optimizer's state has its settings, too: lr, betas, weight_decay",
        (
            Fix(
                "after it: for group in optimizer.param_groups: group['lr'] = lr",
                line="group['lr'] = lr",
            ),
        ),
        confidence="likely",
    )


@INPUTS.of("schedule_restarted")
def _restarted(kind: str, name: str, rate: str, first: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{name} begins from its start: the optimizer's state is of a run whose schedule had come "
        f"from {first} to {rate}, and the schedule's own state is not loaded",
        (Evidence("learning rate", rate), Evidence("at the run's start", first)),
        "an optimizer's state has the learning rate, and not how often its schedule was stepped",
        (
            Fix(
                'scheduler.load_state_dict(checkpoint["scheduler"]) after it is made, of '
                '"scheduler": scheduler.state_dict() in the checkpoint',
                line='scheduler.load_state_dict(checkpoint["scheduler"])',
            ),
        ),
        confidence="likely",
    )


@INPUTS.of("weights_initialized_again")
def _initialized_again(kind: str, number: str, of: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"{number} of {of} matrices that load_state_dict had filled are initialized after it: what "
        "was loaded is lost",
        (Evidence("initialized after loading", f"{number} of {of} matrices"),),
        "model.apply(init) goes over all layers, those with loaded weights, too",
        (
            Fix("model.apply(init) before load_state_dict(…)"),
            Fix("only for what is new: model.head.apply(init)"),
        ),
    )


@INPUTS.of("divergence_averaged")
def _averaged(kind: str, shape: str, classes: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"kl_div averages over the {classes} numbers of each sample, too: it is "
        f"{int(classes):,} times smaller than the divergence",
        (Evidence("input", shape),),
        "reduction='mean', the default, divides by all numbers; a divergence is the sum over the "
        "classes, and its weight in the loss is meant for that",
        (Fix("F.kl_div(…, reduction='batchmean')", line="reduction='batchmean'"),),
    )


@INPUTS.of("dropout_of_one_layer")
def _one_layer(kind: str, name: str, rate: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"dropout={rate} of {name} drops nothing: it is between layers, and there is one",
        (),
        "recurrent layers drop the outputs of all layers but the last",
        (Fix("self.drop = nn.Dropout(p) after it, or num_layers=2"),),
    )


@INPUTS.of("targets_large")
def _large_targets(kind: str, name: str, mean: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{name} compares a layer's output with targets of about {mean}: outputs begin near 0",
        (Evidence("mean of the targets", mean),),
        "with SGD the gradient is as large, and steps overshoot to NaN; Adam moves a bias by the "
        "learning rate in each step, and does not get there",
        (
            Fix(
                "train on (y - mean) / std, of the training set's, and compute output * std + mean "
                "for predictions"
            ),
            Fix("log1p(y) of prices, counts and other numbers above 0"),
        ),
        confidence="likely",
    )


@INPUTS.of("targets_outside")
def _outside(kind: str, name: str, least: str, largest: str) -> Finding:
    of_bytes = float(least) >= 0 and float(largest) > 1
    return Finding(
        kind,
        "critical",
        f"{name} gets targets from {least} to {largest}, and wants probabilities, 0 to 1",
        (Evidence("least target", least), Evidence("largest target", largest)),
        "outside of 0 to 1 the loss has no least value: it falls below 0 without end, and the "
        "outputs grow",
        (
            Fix(
                f"target / {largest}, or (target > 0).float() of a mask of two values"
                if of_bytes
                else "(target > 0).float() of targets of -1 and 1; what is to be ignored is left "
                "out by weight=…, or by a mask of the loss with reduction='none'"
            ),
        ),
    )


#: The share of a job's trained numbers from which such tables are most of an optimizer's step, and
#: the bytes from which that costs a GPU some ms (Adam moves seven times as many, at 1 TB/s).
_MOST, _LARGE_TABLE = 0.5, 256 << 20


@INPUTS.of("rows_untouched")
def _untouched(kind: str, rows: str, every: str, _: str, nbytes: str, share: str) -> Finding:
    return Finding(
        kind,
        "warning" if float(share) >= _MOST and int(nbytes) >= _LARGE_TABLE else "info",
        f"A batch needs at most {int(rows):,} of the {int(every):,} rows of its embeddings, and "
        f"each step computes all of them: the gradient alone is {size(int(nbytes))}",
        (Evidence("rows of a batch", rows), Evidence("rows", every)),
        "the gradient of an embedding has a row for each of the table, nearly all of them 0, and "
        "the optimizer reads and writes them with its averages (Adam's have twice their size)",
        (
            Fix(
                "nn.Embedding(…, sparse=True) with an optimizer of its own for these tables: "
                "torch.optim.SparseAdam, SGD or Adagrad (rows that a batch does not need stay as "
                "they are; no weight decay)",
                line="sparse=True",
            ),
            Fix("a smaller table: rare ids as one, or hashed ids"),
        ),
    )


@INPUTS.of(PREDICTS)
def _predicts(kind: str, model: str, layer: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"{model} predicts in training mode, with its {layer} on",
        (Evidence("layer", layer),),
        "a model is in training mode when it is made: dropout makes predictions random, BatchNorm "
        "normalizes by the batch, and changes its own statistics",
        (Fix("model.eval() before the first prediction", line="model.eval()"),),
        confidence="likely",
    )


@INPUTS.of("plateau_by_batch")
def _by_batch(kind: str, patience: str, batches: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"ReduceLROnPlateau is stepped with each batch: it lowers the learning rate after "
        f"{patience} of {batches} batches without a lower loss",
        (Evidence("patience", patience), Evidence("batches of an epoch", batches)),
        "its patience counts calls of step(); losses of single batches go up and down, and the "
        "rate falls to nothing within an epoch or two",
        (
            Fix(
                "scheduler.step(val_loss) once at each epoch's end", line="scheduler.step(val_loss)"
            ),
        ),
        confidence="likely",
    )


@INPUTS.of("scaler_in_vain")
def _scaler(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "A GradScaler scales losses that are computed in float32: no layer runs in float16",
        (),
        "it is for gradients of float16, which autocast makes; without it the step is as slow and "
        "needs as much memory as before",
        (
            Fix(
                'with torch.autocast("cuda", dtype=torch.float16): around the forward pass and the '
                "loss",
                line='with torch.autocast("cuda", dtype=torch.float16):',
            ),
            Fix("leave the GradScaler out, to compute in float32"),
        ),
    )


@INPUTS.of("targets_of_zero")
def _opposite(kind: str, name: str, zeros: str, of_all: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"{name} gets targets of 0, for which it has no term: {zeros} of {of_all} samples of a "
        "batch train nothing",
        (Evidence("targets of 0", f"{zeros} of {of_all}"),),
        "its targets are 1 (alike, the first is to be larger) and -1 (not alike, the second is)",
        (Fix("2 * y - 1 of labels 0 and 1", line="2 * y - 1"),),
    )


@INPUTS.of("validation_trained")
def _validation(kind: str, part: str, whole: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"The training goes over the whole data set, {int(part):,} samples of the validation "
        f"included ({int(whole):,} in all)",
        (Evidence("samples of both", int(part)),),
        "random_split gave two parts, and the DataLoader of the training has what was split: the "
        "validation measures what was learned by heart",
        (Fix("DataLoader(train_set, …) of the part", line="DataLoader(train_set, …)"),),
        confidence="likely",
    )


@INPUTS.of("shuffled_apart")
def _apart(kind: str, samples: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"Inputs and labels come from two DataLoaders, and each shuffles its {int(samples):,} "
        "samples by itself: labels are those of other inputs",
        (Evidence("samples", int(samples)),),
        "each draws an order of its own: nothing can be learned but how many there are of a class",
        (
            Fix(
                "one DataLoader of both: DataLoader(TensorDataset(x, y), batch_size, shuffle=True)",
                line="TensorDataset(x, y)",
            ),
        ),
    )


@INPUTS.of("autocast_of_cpu")
def _of_cpu(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        'autocast("cpu") has no effect on layers on a GPU: all of the model computes in float32',
        (),
        "autocast changes the operators of the device that it names",
        (
            Fix(
                'torch.autocast("cuda", dtype=torch.bfloat16)',
                line='torch.autocast("cuda", dtype=torch.bfloat16)',
            ),
        ),
    )


SEQUENCES: Final = Kinds()


@SEQUENCES.of("last_step_padded")
def _padded(kind: str, rows: str, of_rows: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"The last step of a recurrent layer is used, and in {rows} of {of_rows} rows it is "
        "padding",
        (Evidence("rows that end in padding", f"{rows} of {of_rows}"),),
        "the layer goes on over the padding, and forgets what came before: a short text's result "
        "depends on how long the others of its batch are",
        (
            Fix(
                "pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False), "
                "and h[-1] of out, (h, c) = lstm(packed)"
            ),
            Fix("out[torch.arange(len(out)), lengths - 1], the last step of each row itself"),
        ),
    )


@SEQUENCES.of("padding_attended")
def _attended(kind: str, padded: str, positions: str, shape: str) -> Finding:
    share = percent(int(padded) / int(positions))
    return Finding(
        kind,
        "warning",
        f"Attention has no mask for padding, which is {share} of a batch's positions ({shape})",
        (Evidence("padding", f"{padded} of {positions} positions"),),
        "all tokens attend to padding as well: a sample's result depends on how long the others of "
        "its batch are",
        (
            Fix(
                "src_key_padding_mask=(tokens == 0), of nn.TransformerEncoder, True where there is "
                "padding (key_padding_mask of nn.MultiheadAttention)",
                line="src_key_padding_mask=(tokens == 0)",
            ),
            Fix(
                "attention_mask of the tokenizer for models of Transformers; of "
                "scaled_dot_product_attention attn_mask=(tokens != 0)[:, None, None, :]"
            ),
        ),
    )


@SEQUENCES.of("positions_by_sample")
def _by_sample(kind: str, shape: str, table: str) -> Finding:
    samples = shape.split("×")[0]
    return Finding(
        kind,
        "critical",
        f"Positions are added by the number of the sample, not of the step: all steps of a sample "
        f"get the same one ({shape}, of which {samples} is the batch)",
        (Evidence("of the table", table),),
        "the table is for inputs with the steps first, and these have the batch first: the model "
        "knows no order, and a sample's place in the batch changes its result",
        (
            Fix(
                "x + self.pe[: x.size(1)].transpose(0, 1), of a table (length, 1, width)",
                line="self.pe[: x.size(1)].transpose(0, 1)",
            ),
            Fix("a table of (1, length, width), and x + self.pe[:, : x.size(1)]"),
        ),
        confidence="likely",
    )


@SEQUENCES.of("labels_not_shifted")
def _not_shifted(kind: str, shape: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "The labels are the tokens that the model is given, each at its own place: it learns to "
        "copy them",
        (Evidence("labels", shape),),
        "a causal model sees the token that it is to give: the loss falls to 0, and generated text "
        "repeats one token",
        (
            Fix(
                "F.cross_entropy(logits[:, :-1].reshape(-1, classes), tokens[:, 1:].reshape(-1))",
                line="logits[:, :-1], tokens[:, 1:]",
            ),
        ),
    )


@SEQUENCES.of("blank_in_labels")
def _blank(kind: str, blank: str, labels: str, of_labels: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"ctc_loss gets its blank, {blank}, as a label: {labels} of {of_labels} labels",
        (Evidence("labels that are the blank", f"{labels} of {of_labels}"),),
        "the blank says that there is no letter: a letter with its number is never read, and the "
        "loss stays high",
        (
            Fix(
                "number the letters from 1, with one more output (len(letters) + 1); blank=0 is "
                "the default"
            ),
            Fix("nn.CTCLoss(blank=len(letters)), and as many outputs and one"),
        ),
    )


@SEQUENCES.of("padding_averaged")
def _padding_averaged(kind: str, padding: str, positions: str, shape: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"A mean over time goes over padding, too: {percent(int(padding) / int(positions))} of the "
        "positions are padding",
        (Evidence("padding", f"{padding} of {positions} positions"), Evidence("tokens", shape)),
        "features of padding are added up with those of the tokens: a short text's mean is mostly "
        "padding, and depends on what it is put together with in a batch",
        (
            Fix(
                "keep = (tokens != pad).unsqueeze(-1), then (x * keep).sum(1) / keep.sum(1)",
                line="(x * keep).sum(1) / keep.sum(1)",
            ),
        ),
        confidence="likely",
    )
