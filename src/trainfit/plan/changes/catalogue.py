"""Catalogue of the remedies: names, what they change, instructions, and their price."""

from __future__ import annotations

import dataclasses
import linecache
from collections.abc import Callable, Iterable, Sequence

from trainfit.findings.source_code import from_here
from trainfit.results.changes import OWN_CHECKPOINTING, Changes, ExtraCompute, Remedy
from trainfit.results.runs.trace import Applicability, Compute

#: Characters of a user's line that are shown.
_LINE = 120
#: Lines of the user's code that are shown for one remedy.
_PLACES = 3


@dataclasses.dataclass(frozen=True)
class RemedyKind:
    """One remedy.

    ``slots`` are what it occupies: two that share one exclude each other in a combination.
    ``how`` makes the instructions from what a survey found; the lines of the user's code
    that it names are added to them. ``combines``: what a survey found for others holds with it.
    """

    name: str
    title: str
    changes: Changes
    changes_detail: str
    how: Callable[[Applicability], tuple[str, ...]]
    slots: frozenset[str] = frozenset()
    combines: bool = True


def instructions(kind: RemedyKind, finding: Applicability) -> tuple[str, ...]:
    """What to change, first the lines of the user's own code."""
    shown = [source_line(place) for place in finding.places[:_PLACES]]
    if len(finding.places) > _PLACES:
        shown.append(f"… and {len(finding.places) - _PLACES} more such lines")
    return (*shown, *kind.how(finding))


def source_line(place: str) -> str:
    """``file:line: code``, as much of it as can be read."""
    name, _, number = place.rpartition(":")
    code = linecache.getline(name, int(number)).strip() if number.isdigit() else ""
    code = code if len(code) <= _LINE else code[: _LINE - 1] + "…"
    place = f"{from_here(name) or name}:{number}" if name else place
    return f"{place}: {code}" if code else place


def _says(*lines: str) -> Callable[[Applicability], tuple[str, ...]]:
    return lambda finding: lines


def _frozen(finding: Applicability) -> tuple[str, ...]:
    paths = [target.partition(":")[2] for target in finding.targets]
    before = "before that line, where the optimizer is made"
    if len(paths) == 1:
        return (f"{before}: model.{paths[0]}.requires_grad_(False)",)
    first = ", ".join(f"model.{path}" for path in paths[:6])
    more = ", …" if len(paths) > 6 else ""
    return (f"{before}: for part in ({first}{more}): part.requires_grad_(False)",)


def _checkpointed(finding: Applicability) -> tuple[str, ...]:
    paths = [target.partition(":")[2] for target in finding.targets]
    own = [path for path in paths if path.rpartition(".")[2] in OWN_CHECKPOINTING]
    if own:
        return (f"before the training loop: {'; '.join(f'model.{path}()' for path in own)}",)
    if "segments" in finding.detail:
        path, count = (finding.targets[0].partition(":")[2], finding.targets[1])
        name = f"self.{path}" if path else "model"
        call = f"checkpoint_sequential({name}, {count}, x, use_reentrant=False)"
        return (f"from torch.utils.checkpoint import checkpoint_sequential; {name}(x) -> {call}",)
    return (
        "from torch.utils.checkpoint import checkpoint; where the forward pass calls them, "
        "block(x, …) -> checkpoint(block, x, …, use_reentrant=False)",
    )


def _eight_bit(finding: Applicability) -> tuple[str, ...]:
    return (
        f"there, bitsandbytes.optim.{finding.detail}(…) with the same arguments "
        "(pip install bitsandbytes)",
    )


def _shrunk(finding: Applicability) -> tuple[str, ...]:
    return (f"resize in the data set's transform: {finding.detail}",)


def _switched_on(finding: Applicability) -> tuple[str, ...]:
    return (finding.detail or "as in the command below",)


def _configured(finding: Applicability) -> tuple[str, ...]:
    return (finding.detail if finding.places else "as in the command below",)


def _pooled(finding: Applicability) -> tuple[str, ...]:
    _, channels, outputs = (text.split()[0] for text in finding.detail.split(", "))
    path = finding.targets[0].partition(":")[2]
    head = path.rpartition(".")[0] or path
    layers = f"nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear({channels}, {outputs})"
    return (f"model.{head} = nn.Sequential({layers}), and do not flatten before it",)


_FEWER_STATES = "another optimizer: its learning rate has to be tuned"

#: In the order of the seed articles where equal. "AMP should be on by default; if it does not
#: fit, first a smaller batch, then consider a frozen backbone, gradient checkpointing or a
#: lower resolution" (the note on ACT); "remove fully connected layers for global average
#: pooling, smaller batch, smaller maps, inplace operations and no_grad" (the note on the T4).
#: What they do not name follows: first what leaves the training as it is.
KINDS = (
    RemedyKind(
        "amp-bf16",
        "mixed precision (AMP) in bfloat16",
        "precision",
        "matmuls and convolutions compute in bfloat16",
        _says('with torch.autocast("cuda", dtype=torch.bfloat16): around forward pass and loss'),
        frozenset({"amp"}),
    ),
    RemedyKind(
        "amp-fp16",
        "mixed precision (AMP) in float16",
        "precision",
        "matmuls and convolutions compute in float16; the loss is scaled",
        _says(
            'with torch.autocast("cuda", dtype=torch.float16): around forward pass and loss, '
            'and torch.amp.GradScaler("cuda") around backward and step'
        ),
        frozenset({"amp"}),
    ),
    RemedyKind(
        "accumulate",
        "smaller micro-batch with gradient accumulation",
        "nothing",
        "",
        _says(),  # the numbers are the trial's
        frozenset({"gradients"}),
    ),
    RemedyKind(
        "freeze-backbone",
        "frozen backbone",
        "training",
        "the frozen part is no longer trained",
        _frozen,
    ),
    RemedyKind(
        "checkpoint",
        "activation checkpointing of the repeated blocks",
        "nothing",
        "",
        _checkpointed,
    ),
    RemedyKind(
        "lower-resolution",
        "images of half the pixels",
        "training",
        "small objects in the images may be lost",
        _shrunk,
    ),
    RemedyKind(
        "fewer-cameras",
        "one camera or frame fewer",
        "training",
        "its content is lost; that camera is simulated with images of 32 × 32 pixels",
        lambda finding: (f"remove from the data set and the model {finding.detail}",),
    ),
    RemedyKind(
        "smaller-model",
        "the next smaller model of the same family",
        "training",
        "a different model, of unknown accuracy",
        lambda finding: (f"there, or where the name comes from: {finding.detail}",),
        combines=False,
    ),
    RemedyKind(
        "global-pooling",
        "global average pooling instead of the fully connected head",
        "training",
        "a new head, which has to be trained from scratch",
        _pooled,
    ),
    RemedyKind(
        "inplace",
        "activations in place",
        "nothing",
        "",
        lambda finding: (f"inplace=True for {finding.detail}",),
    ),
    RemedyKind(
        "no-grad-eval",
        "evaluation without gradients",
        "nothing",
        "",
        _says("with torch.no_grad(): around it"),
    ),
    RemedyKind(
        "attention-weights",
        "nn.MultiheadAttention without its weights (fused attention)",
        "nothing",
        "",
        _says("there, add need_weights=False: the weights are not used"),
    ),
    RemedyKind(
        "fused-attention",
        "F.scaled_dot_product_attention instead of written-out attention",
        "nothing",
        "",
        _says("there, torch.nn.functional.scaled_dot_product_attention(q, k, v, …)"),
    ),
    RemedyKind(
        "set-to-none",
        "gradients freed between steps",
        "nothing",
        "",
        _says("there, zero_grad(set_to_none=True), which is the default"),
    ),
    RemedyKind(
        "expandable-segments",
        "allocator with expandable segments",
        "nothing",
        "",
        _says(),
        frozenset({"allocator"}),
    ),
    RemedyKind(
        "allocator-settings",
        "other settings of the allocator",
        "nothing",
        "",
        _says(),
        frozenset({"allocator"}),
    ),
    RemedyKind(
        "lora",
        "adapters (LoRA) instead of all weights",
        "training",
        "small matrices next to the frozen weights are trained",
        _switched_on,
        frozenset({"weights"}),
    ),
    RemedyKind(
        "chunked-loss",
        "cross-entropy of a part of the tokens at a time (Liger)",
        "nothing",
        "",
        lambda finding: (finding.detail,),
    ),
    RemedyKind(
        "qlora",
        "4-bit weights with adapters (QLoRA)",
        "training",
        "the frozen weights are rounded to 4 bits, small matrices next to them are trained",
        _switched_on,
        frozenset({"weights"}),
    ),
    RemedyKind(
        "paged-optimizer",
        "paged optimizer with 8-bit states",
        "precision",
        "the optimizer's states are quantized in blocks, and move to RAM where the GPU is full",
        _switched_on,
        frozenset({"optimizer"}),
    ),
    RemedyKind(
        "shorter-sequences",
        "sequences of half the length",
        "training",
        "longer samples are cut, or fewer tokens are learned from in a step",
        _configured,
        frozenset({"length"}),
    ),
    RemedyKind(
        "reference-logprobs",
        "log-probabilities of the reference model computed before the training",
        "nothing",
        "",
        lambda finding: (f"{finding.detail}, and no ref_model: one more pass over the data set",),
        frozenset({"reference"}),
    ),
    RemedyKind(
        "fewer-generations",
        "half as many completions of each prompt",
        "training",
        "a completion's advantage is told from half as many others",
        _configured,
        frozenset({"completions"}),
    ),
    RemedyKind(
        "shorter-completions",
        "completions of half the length",
        "training",
        "longer answers are cut",
        _configured,
        frozenset({"length"}),
    ),
    RemedyKind(
        "fused-optimizer",
        "fused optimizer",
        "nothing",
        "",
        _says("there, add fused=True"),
        frozenset({"optimizer"}),
    ),
    RemedyKind(
        "optimizer-in-backward",
        "optimizer step inside the backward pass",
        "nothing",
        "",
        _says(
            "one optimizer per parameter, each stepped in "
            "parameter.register_post_accumulate_grad_hook(…) (PyTorch's tutorial "
            '"How to save memory by fusing the optimizer step into the backward pass")'
        ),
        frozenset({"optimizer", "gradients"}),
    ),
    RemedyKind(
        "channels-last",
        "convolutions in channels_last",
        "nothing",
        "",
        _says(
            "model = model.to(memory_format=torch.channels_last), and the images likewise: "
            "images.to(device, memory_format=torch.channels_last)"
        ),
    ),
    RemedyKind(
        "optimizer-8bit",
        "optimizer with 8-bit states",
        "precision",
        "the optimizer's states are quantized in blocks",
        _eight_bit,
        frozenset({"optimizer"}),
    ),
    RemedyKind(
        "adafactor",
        "Adafactor",
        "training",
        _FEWER_STATES,
        _says("there, torch.optim.Adafactor(…)"),
        frozenset({"optimizer"}),
    ),
    RemedyKind(
        "adam",
        "Adam",
        "training",
        _FEWER_STATES,
        _says("there, torch.optim.Adam(…)"),
        frozenset({"optimizer"}),
    ),
    RemedyKind(
        "momentum",
        "SGD with momentum",
        "training",
        _FEWER_STATES,
        _says("there, torch.optim.SGD(…, momentum=0.9)"),
        frozenset({"optimizer"}),
    ),
    RemedyKind(
        "sgd",
        "SGD without momentum",
        "training",
        _FEWER_STATES,
        _says("there, torch.optim.SGD(…)"),
        frozenset({"optimizer"}),
    ),
)

BY_NAME = {kind.name: kind for kind in KINDS}
NAMES = tuple(BY_NAME)


# ---
# The price of a remedy, and the order that follows from it.
#
# The price is in percent of a training step's compute:
#
# - 1 for the line to change: nothing is free;
# - what the step computes more, by FLOPs or by bytes moved, whichever grew more (a remedy that
#   saves compute is not paid for it: it was asked for memory);
# - 100 if the training becomes another one (other optimizer, frozen part, smaller images): to
#   know whether it is as good, it has to be done once more.
#
# Remedies are ordered by bytes of device memory won for each percent. Where that is equal to
# two digits, the order of the project's seed articles decides.


_A_LINE = 1.0
_ANOTHER_TRAINING = 100.0


def extra_compute(before: Compute | None, after: Compute | None) -> ExtraCompute | None:
    """How much more a step computes; ``None`` where one of both is not known."""
    if before is None or after is None:
        return None
    return ExtraCompute(
        flops_share=_more(before.flops, after.flops),
        traffic_share=_more(before.traffic_bytes, after.traffic_bytes),
        operators_share=_more(before.operators, after.operators),
    )


def cost_percent(extra: ExtraCompute | None, changes: Changes) -> float:
    """The price in percent of a step's compute, by the rule above."""
    more = max(0.0, extra.flops_share, extra.traffic_share) if extra is not None else 0.0
    return _A_LINE + 100 * more + (_ANOTHER_TRAINING if changes == "training" else 0.0)


def ordered(items: Iterable[Remedy], seed_order: Sequence[str]) -> tuple[Remedy, ...]:
    """Best first; then what wins nothing, what failed or was not tried, what does not apply."""

    def key(remedy: Remedy) -> tuple[int, float, int]:
        index = seed_order.index(remedy.name)
        if remedy.saved_bytes is None or remedy.cost_percent is None:
            return (3 if remedy.status == "not applicable" else 2), 0.0, index
        value = remedy.saved_bytes / remedy.cost_percent
        return (0 if value > 0 else 1), -two_digits(value), index

    return tuple(sorted(items, key=key))


def _more(before: int, after: int) -> float:
    return after / before - 1 if before else 0.0


def two_digits(value: float) -> float:
    """Rounded to two significant digits: what is equal to that is equal."""
    return float(f"{value:.1e}")
