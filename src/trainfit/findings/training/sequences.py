"""Sequences that are not what a layer or a loss is for: padding as their last step or in what is
attended to, positions that are those of samples, labels that are the tokens themselves."""

from __future__ import annotations

from typing import Final

from trainfit.findings.training.kinds import Kinds
from trainfit.results.findings import Evidence, Finding, Fix
from trainfit.results.text import percent

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
def _averaged(kind: str, padding: str, positions: str, shape: str) -> Finding:
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
