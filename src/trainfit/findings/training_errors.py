"""Exceptions of a training's own code: its graph, mixed precision, ranks, labels and files.

The address next to a text is where PyTorch (or the library) raises it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Final

from trainfit.findings import fixes
from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import ParsedException
from trainfit.results.findings import Finding, failure_finding


@dataclasses.dataclass(frozen=True)
class KnownError:
    """What an exception's message says, and what it means."""

    kind: str
    said: re.Pattern[str]
    title: str
    fix: str


def first_met(errors: Iterable[KnownError], message: str) -> tuple[KnownError, str] | None:
    """The first of them whose words are in the message, and these words; ``None``: none is."""
    for each in errors:
        if found := each.said.search(message):
            return each, found[0]
    return None


#: torch/csrc/autograd/saved_variable.cpp gives the tensor's operator: a transposed weight's, or
#: that of the many weights of a recurrent layer.
_OF_WEIGHTS: Final = re.compile(r"output 0 of (?:As(?:Strided)?|T|Permute|Unsqueeze)\w*Backward")
_STEP_BETWEEN: Final = (
    "what is carried from step to step (a hidden state) needs .detach(); else optimizer.step() "
    "came between a forward pass and its backward pass: make all backward passes first, or a new "
    "forward pass after the step"
)

_NOT_IN_PLACE: Final = "x = x + y instead of x += y or x[…] = y, inplace=False of activations"

_KNOWN: Final = (
    # torch/csrc/autograd/functions/utils.h, of a leaf or a result without a graph
    KnownError(
        "no_graph",
        re.compile(r"element \d+ of tensors does not require grad and does not have a grad_fn"),
        "The loss has no graph: nothing that led to it needs a gradient",
        "look at what is between the model and the loss: no torch.no_grad(), .detach(), .item(), "
        ".numpy() or argmax; torch.set_grad_enabled(True) after an evaluation; some parameter with "
        "requires_grad=True (a frozen model under checkpointing: use_reentrant=False)",
    ),
    # torch/csrc/autograd/saved_variable.cpp
    KnownError(
        "graph_used_twice",
        re.compile(r"Trying to backward through the graph a second time"),
        "A backward pass goes through a graph that an earlier one has used",
        "detach what is carried from step to step (hidden = hidden.detach()); add the losses of "
        "one forward pass and call backward() once; retain_graph=True lets memory grow",
    ),
    # torch/csrc/autograd/saved_variable.cpp
    KnownError(
        "changed_in_place",
        re.compile(r"needed for gradient computation has been modified by an inplace operation"),
        "A tensor that the backward pass needs was changed in place after the forward pass",
        f"{_NOT_IN_PLACE}; or, of a weight: {_STEP_BETWEEN}",
    ),
    # aten/src/ATen/autocast_mode.cpp
    KnownError(
        "unsafe_autocast",
        re.compile(r"are unsafe to autocast"),
        "BCELoss after a sigmoid overflows in float16, and autocast refuses it",
        "leave the sigmoid out and use binary_cross_entropy_with_logits (BCEWithLogitsLoss)",
    ),
    # torch/amp/grad_scaler.py
    KnownError(
        "scaler_unused",
        re.compile(
            r"No inf checks were recorded for this optimizer"
            r"|Attempted (?:step|unscale_|update) but _scale is None"
        ),
        "The GradScaler's step has no scaled gradients",
        "scaler.scale(loss).backward() instead of loss.backward(); if it is there, no parameter "
        "of this optimizer got a gradient: see that it has those of the model that runs",
    ),
    KnownError(
        "scaler_order",
        re.compile(
            r"unscale_\(\) (?:has already been called|is being called after step)"
            r"|step\(\) has already been called since the last update"
        ),
        "unscale_() or step() of a GradScaler was called twice for one update()",
        "for each optimizer step, in this order: unscale_(optimizer), clipping, step(optimizer), "
        "then scaler.update() once, only in the last micro-batch",
    ),
    # torch/optim/optimizer.py
    KnownError(
        "no_parameters",
        re.compile(r"optimizer got an empty parameter list"),
        "The optimizer got no parameters: model.parameters() gives each once, and was used up "
        "before, or the model has none",
        "call model.parameters() again for it, or keep list(model.parameters()); layers in a "
        "Python list need nn.ModuleList",
    ),
    # aten/src/ATen/core/Generator.h
    KnownError(
        "generator_device",
        re.compile(r"Expected a '\w+' device type for generator but found '\w+'"),
        "Random numbers on the GPU were asked of a generator of the CPU, or the reverse",
        'after torch.set_default_device("cuda"): DataLoader(…, shuffle=True, '
        'generator=torch.Generator(device="cuda")), or no default device and model.to("cuda"); '
        "elsewhere a generator of the device that the numbers are made on",
    ),
    # aten/src/ATen/native/Memory.cpp
    KnownError(
        "pins_gpu_tensor",
        re.compile(r"cannot pin '[\w.]+' only dense CPU tensors can be pinned"),
        "pin_memory=True, and the data set gives tensors that are on the GPU already",
        "pin_memory=False for them; or leave the data set on the CPU, and move each batch",
    ),
    # torch/optim/lr_scheduler.py
    KnownError(
        "schedule_over",
        re.compile(r"Tried to step \d+ times\. The specified number of total steps is \d+"),
        "OneCycleLR is stepped more often than its total_steps",
        fixes.SCHEDULE,
    ),
    # torch/nn/functional.py
    KnownError(
        "batch_of_one",
        re.compile(r"Expected more than 1 (?:value per channel|spatial element) when training"),
        "BatchNorm got one value a channel, of which there is no variance",
        "drop_last=True of the DataLoader (its last batch has one sample), a larger batch, or "
        "GroupNorm; model.eval() before an evaluation or a trial with one sample",
    ),
    # aten/src/ATen/native/LossNLL.cpp, LossNLL2d.cpp, TensorAdvancedIndexing.cpp, EmbeddingBag.cpp
    KnownError(
        "label_out_of_range",
        re.compile(r"Target -?\d+ is out of bounds"),
        "A class label is not in 0 … classes - 1",
        "number labels from 0, make the last layer as wide as there are classes, or give "
        "ignore_index; on a GPU the same is a device-side assert",
    ),
    KnownError(
        "index_out_of_range",
        re.compile(r"^index out of range in self$"),
        "An index is not in the embedding's table",
        "an embedding as large as the vocabulary with its added tokens "
        "(model.resize_token_embeddings(len(tokenizer))), positions below its longest length; on "
        "a GPU the same is a device-side assert",
    ),
    # torch/csrc/distributed/c10d/reducer.cpp
    KnownError(
        "unused_parameters",
        re.compile(r"Expected to have finished reduction in the prior iteration"),
        "DistributedDataParallel waits for gradients of parameters that the loss does not use",
        "leave modules that do not run out of the model, or use all outputs in the loss; "
        "find_unused_parameters=True costs a pass over the graph each step; "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names them",
    ),
    KnownError(
        "ready_twice",
        re.compile(r"Expected to mark a variable ready only once"),
        "DistributedDataParallel got a parameter's gradient twice in one pass",
        "checkpoint(…, use_reentrant=False), or DistributedDataParallel(…, static_graph=True); no "
        "find_unused_parameters=True together with checkpointing",
    ),
    # torch/_C, aten/src/ATen/native/Convolution.cpp
    KnownError(
        "two_devices",
        re.compile(
            r"Expected all tensors to be on the same device"
            r"|[Ii]nput type \(torch\.(?:cuda\.)?\w+\) and weight type \(torch\.(?:cuda\.)?\w+\) "
            r"should be the same"
        ),
        "One operator got tensors on the CPU and on the GPU",
        "move the batch (x = x.to(device), which returns a new tensor) and the whole model; what a "
        "module keeps in an attribute or list: register_buffer, ModuleList",
    ),
    # torch/nn/modules/module.py
    KnownError(
        "state_dict_names",
        re.compile(r"Error\(s\) in loading state_dict[\s\S]*\"(?:module|_orig_mod)\."),
        "The checkpoint's names begin with module. or _orig_mod., of a wrapper that was around the "
        "model",
        "save model.module.state_dict() (of torch.compile: model._orig_mod), or take the beginning "
        "off the names when it is loaded",
    ),
    # PIL/Image.py, PIL/ImageFile.py, zipfile, gzip
    KnownError(
        "unreadable_file",
        re.compile(
            r"cannot identify image file|image file is truncated|broken (?:data stream|PNG file)"
            r"|Truncated File Read|File is not a zip file"
        ),
        "A file of the data set cannot be read",
        "download or write that file again, or leave it out of the list: open each file once "
        "before the training; ImageFile.LOAD_TRUNCATED_IMAGES = True reads what is there of a "
        "truncated image",
    ),
    # transformers/utils/hub.py, huggingface_hub/errors.py
    KnownError(
        "hub_unreachable",
        re.compile(r"couldn't connect to '[^']*' to load|cannot find the requested files in the"),
        "A model, tokenizer or data set is not on this machine, and its hub cannot be reached",
        "hf download NAME --local-dir FOLDER where there is a network, and that folder's path "
        "instead of the name; or a copy of its cache (HF_HOME)",
    ),
    KnownError(
        "hub_refused",
        re.compile(r"gated repo|is not a valid model identifier listed on"),
        "The hub does not give this model: it is gated, private, or has another name",
        "accept its terms on its page, then `hf auth login` (or HF_TOKEN); check the name",
    ),
    # transformers/tokenization_utils_base.py
    KnownError(
        "no_padding_token",
        re.compile(r"tokenizer does not have a padding token"),
        "Samples of different lengths are to be padded, and the tokenizer has no token for that",
        "tokenizer.pad_token = tokenizer.eos_token after it was made",
    ),
)
#: Their kinds.
KINDS: Final = tuple(each.kind for each in _KNOWN)
#: Of these the message itself says what it is about.
_TOLD: Final = ("label_out_of_range", "unreadable_file")
_LONGEST: Final = 100


def known(raised: ParsedException, _: FailureContext) -> Finding | None:
    """What a training's own exception means."""
    met = first_met(_KNOWN, raised.message)
    if met is None:
        return None
    found = met[0]
    title, fix = found.title, found.fix
    if found.kind in _TOLD:
        title += f" ({raised.message.strip()[:_LONGEST]})"
    if found.kind == "changed_in_place" and _OF_WEIGHTS.search(raised.message):
        title, fix = "A weight was changed between a forward and its backward pass", _STEP_BETWEEN
    elif found.kind == "changed_in_place" and "which is output" not in raised.message:
        fix = f"{_STEP_BETWEEN}; of data: {_NOT_IN_PLACE}"
    return failure_finding(found.kind, title, "", fix)
