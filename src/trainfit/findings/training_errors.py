"""Exceptions of a training's own code: its graph, mixed precision, ranks, labels and files.

The address next to a text is where PyTorch (or the library) raises it.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    for error in errors:
        if found := error.said.search(message):
            return error, found[0]
    return None


#: torch/csrc/autograd/saved_variable.cpp gives the tensor's operator: a transposed weight's, or
#: that of the many weights of a recurrent layer.
_OF_WEIGHTS: Final = re.compile(
    r"output 0 of (?:As(?:Strided)?|T|Permute|Unsqueeze)(?:Backward\d*)?\b"
)
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
        "requires_grad=True (a frozen model under checkpointing: use_reentrant=False); before "
        "PyTorch 2.11 an autocast region of its own for a forward pass under no_grad(), whose "
        "casts of weights it keeps",
    ),
    # torch/csrc/autograd/saved_variable.cpp
    KnownError(
        "graph_used_twice",
        re.compile(r"Trying to backward through the graph a second time"),
        "A backward pass goes through a graph that an earlier one has used",
        "detach what is carried from step to step (hidden = hidden.detach()) and what is made for "
        "another loss (D(fake.detach()) of a GAN's discriminator); add the losses of one forward "
        "pass and call backward() once; what several passes use again (log_prob and values of a "
        "rollout) belongs in torch.no_grad(); retain_graph=True lets memory grow",
    ),
    # torch/optim/lbfgs.py
    KnownError(
        "no_closure",
        re.compile(r"LBFGS\.step\(\) missing 1 required positional argument: 'closure'"),
        "LBFGS computes the loss several times a step, and wants a function that does it",
        "def closure(): optimizer.zero_grad(); loss = criterion(model(x), y); loss.backward(); "
        "return loss, and optimizer.step(closure)",
    ),
    # torch/optim/adam.py, adamw.py
    KnownError(
        "optimizer_argument",
        re.compile(r"betas must be either both floats or both Tensors"),
        "Adam's betas are of different types: a whole number next to a float",
        "betas=(0.0, 0.9) instead of betas=(0, 0.9)",
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
        "scaler_skipped",
        re.compile(r"No inf checks were recorded prior to update"),
        "scaler.update() came without a step by the scaler: optimizer.step() used scaled gradients",
        "scaler.step(optimizer) instead of optimizer.step(), then scaler.update()",
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
    # torch/optim/lr_scheduler.py
    KnownError(
        "schedule_resumed",
        re.compile(r"param 'initial_lr' is not specified in param_groups\[\d+\]"),
        "A schedule that goes on (last_epoch) is made of an optimizer that had none before",
        "optimizer.load_state_dict(…) before the schedule is made; or last_epoch left out, and "
        "scheduler.load_state_dict(…)",
    ),
    # aten/src/ATen/native/TensorConversions.cpp, torch/nn/modules/module.py
    KnownError(
        "no_numbers",
        re.compile(r"Cannot copy out of meta tensor; no data"),
        'Weights that were made on "meta" have no numbers that could be moved',
        "model.to_empty(device=device), then load_state_dict(state) (or load_state_dict(state, "
        "assign=True) first); in transformers device_map={'': 0} in place of .to(device)",
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
        re.compile(r"Tried to step \d+ times\. The (?:specified )?(?:total )?number of "),
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
    # The same file; pytorch#143580.
    KnownError(
        "static_graph_unsynced",
        re.compile(r"expect_autograd_hooks_ INTERNAL ASSERT FAILED"),
        "DistributedDataParallel(static_graph=True) makes its first backward pass within "
        "no_sync(), or several of one forward pass",
        "leave static_graph out where no_sync() accumulates gradients: PyTorch may also stop "
        "reducing them, without an error, when another pass comes first",
    ),
    # torch/distributed/fsdp/_fully_shard/_fsdp_state.py, since PyTorch 2.13.
    KnownError(
        "tied_across_groups",
        re.compile(r"is shared with a parameter already managed by another FSDP group"),
        "A weight that modules share (tied embeddings) is in two of fully_shard's groups",
        "fully_shard([…], …) with a list of all modules that share it, before the model itself; of "
        "a library that calls fully_shard (accelerate with a tied encoder and decoder): FSDP1, "
        "there fsdp_version: 1",
    ),
    KnownError(
        "ready_twice",
        re.compile(r"Expected to mark a variable ready only once"),
        "DistributedDataParallel got a parameter's gradient twice in one pass",
        "checkpoint(…, use_reentrant=False), or DistributedDataParallel(…, static_graph=True); no "
        "find_unused_parameters=True together with checkpointing",
    ),
    KnownError(
        "two_devices",
        re.compile(
            r"Expected all tensors to be on the same device[\s\S]*(?:nll_loss|cross_entropy)"
        ),
        "The loss function's class weights, or the targets, are not where the model's output is",
        "criterion = criterion.to(device) (or weight=weights.to(device)); y.to(device) for targets",
    ),
    # aten/src/ATen/native/RNN.cpp
    KnownError(
        "two_devices",
        re.compile(r"Input and hidden tensors are not at the same device"),
        "A recurrent layer gets a first state that is not where its input is",
        "torch.zeros(layers, batch, hidden, device=x.device) where the state is made (and "
        "state.to(x.device) of one that is kept); without a state the layer begins with zeros",
    ),
    KnownError(
        "two_devices",
        re.compile(r"(?:devices,|is on) cuda:\d+(?: and|, different from other tensors on) cuda:"),
        "One operator got tensors of two GPUs",
        "move one to the other's GPU where the model is split: x = x.to(y.device); with a "
        "device_map, what one forward uses stays together (no_split_module_classes)",
    ),
    # torch/_C, aten/src/ATen/native/Convolution.cpp
    KnownError(
        "two_devices",
        re.compile(
            r"Expected all tensors to be on the same device"
            r"|Input and parameter tensors are not at the same device"
            r"|[Ii]nput type \(torch\.cuda\.\w+\) and (?:weight|bias) type \(torch\.\w+\)"
            r"|[Ii]nput type \(torch\.\w+\) and (?:weight|bias) type \(torch\.cuda\.\w+\)"
            r"|indices should be either on \w+ or on the same device as the indexed tensor"
            r"|stft input and window must be on the same device"
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
    # torch/serialization.py
    KnownError(
        "checkpoint_types",
        re.compile(r"Weights only load failed"),
        "The checkpoint holds more than tensors and plain numbers, which torch.load has refused "
        "since PyTorch 2.6",
        "of a file of your own: torch.load(path, weights_only=False); and write it with plain "
        "numbers: float(accuracy), vars(args)",
    ),
    # torch/csrc/autograd/VariableTypeUtils.h
    KnownError(
        "leaf_in_place",
        re.compile(r"leaf Variable that requires grad is being used in an in-place operation"),
        "A parameter is changed in place while autograd records",
        "with torch.no_grad(): around it, or torch.nn.init; elsewhere x = x + y instead of x += y",
    ),
    # torch/autograd/__init__.py
    KnownError(
        "loss_not_scalar",
        re.compile(r"grad can be implicitly created only for scalar outputs"),
        "backward() is called of several numbers, not of one loss",
        "loss.mean().backward(): a loss with reduction='none', or of DataParallel, has one for "
        "each sample or GPU",
    ),
    # torch/csrc/autograd/python_variable_methods.cpp
    KnownError(
        "numpy_of_graph",
        re.compile(r"Can't call numpy\(\) on Tensor that requires grad"),
        "NumPy is given a tensor with its autograd graph",
        "x.detach().cpu().numpy(); torch.no_grad() around an evaluation",
    ),
    # aten/src/ATen/native/LossNLL.cpp, cuda/Loss.cu, cuda/NLLLoss2d.cu, torch/nn/functional.py
    KnownError(
        "target_type",
        re.compile(r"only batches of spatial targets supported"),
        "The loss of an image wants a class for each pixel: targets of (N, H, W)",
        "mask.squeeze(1).long() of (N, 1, H, W); mask.argmax(1) of one-hot classes (N, classes, H, "
        "W); of an image in colours each colour becomes a class's number first",
    ),
    KnownError(
        "target_type",
        re.compile(
            r"expected target dtype to be Long|expected scalar type Long but found"
            r"|nll_loss\w*\" not implemented for '(?:Int|Short|Char|Bool|Float|Double|Half)'"
            r"|floating point type for target with class probabilities"
            r"|result type \w+ can't be cast to the desired output type"
            r"|multi-target not supported"
        ),
        "The targets have not the type or shape that this loss wants",
        "cross_entropy wants classes as y.long() of shape (N), or probabilities as y.float() of "
        "(N, classes): y.squeeze(1) of (N, 1), y.argmax(1) of one-hot classes; BCE, MSE and L1 "
        "want y.float() of the output's shape",
    ),
    # torch/nn/functional.py
    KnownError(
        "target_shape",
        re.compile(
            r"[Tt]arget size \(torch\.Size.* (?:must be the same as|different to the) input"
        ),
        "Targets and outputs differ in shape",
        "output.squeeze(1) (one number for each sample), or y.unsqueeze(1).float()",
    ),
    KnownError(
        "batches_differ",
        re.compile(r"Expected input batch_size \(\d+\) to match target batch_size"),
        "Outputs and targets have different numbers of samples",
        "look at what reshapes them: x.view(-1, n) of a wrong n moves samples into features; "
        "x.flatten(1) keeps the batch",
    ),
    # aten/src/ATen/native/LinearAlgebra.cpp, Convolution.cpp
    KnownError(
        "features_differ",
        re.compile(
            r"mat1 and mat2 shapes cannot be multiplied|to have \d+ channels, but got \d+ channels"
        ),
        "A layer is made for another number of features than it gets",
        "in_features (in_channels) as wide as its input, by the size of the data: nn.LazyLinear "
        "finds it; channels come first in PyTorch (x.permute(0, 3, 1, 2)), and an image may be "
        'grey (image.convert("RGB"))',
    ),
    # torch/nn/modules/rnn.py
    KnownError(
        "hidden_size",
        re.compile(r"Expected hidden(?:\[\d\])? size .*, got"),
        "The hidden state is of another batch size than the batch: the last batch is smaller",
        "drop_last=True, or a hidden state made for each batch (x.size(0)); its second dimension "
        "is the batch's with batch_first=True, too",
    ),
    # torch/nn/utils/rnn.py
    KnownError(
        "lengths_on_gpu",
        re.compile(r"'lengths' argument should be a 1D CPU int64 tensor"),
        "pack_padded_sequence wants lengths on the CPU",
        "pack_padded_sequence(x, lengths.cpu(), …)",
    ),
    # torch/optim/optimizer.py
    KnownError(
        "optimizer_groups",
        re.compile(
            r"loaded state dict (?:contains a parameter group that doesn't match the size"
            r"|has a different number of parameter groups)"
        ),
        "The optimizer's checkpoint is of other parameters: layers were added, left out or frozen",
        "make model and optimizer as they were when it was written (the same parameters need "
        "gradients, in the same groups), or leave its state out and load the model alone",
    ),
    KnownError(
        "parameter_twice",
        re.compile(r"some parameters appear in more than one parameter group"),
        "The optimizer is given a parameter in two groups",
        "leave out of the second group what the first has: shared weights (an embedding tied to "
        "the head), a part in addition to the whole model",
    ),
    # torch/optim/lr_scheduler.py
    KnownError(
        "plateau_metric",
        re.compile(r"ReduceLROnPlateau\.step\(\) missing 1 required positional argument"),
        "ReduceLROnPlateau wants to be told what it goes by",
        "scheduler.step(validation_loss), once an epoch; of Lightning give a monitor",
    ),
    # torch/_tensor.py
    KnownError(
        "copied_graph",
        re.compile(r"Only Tensors created explicitly by the user .* support the deepcopy"),
        "A copy is made of a model that keeps a computed tensor",
        "keep no result as an attribute (self.features = …) or .detach() it; copy the model "
        "before its first forward pass; torch.nn.utils.parametrizations.weight_norm",
    ),
    # torch/csrc/utils/tensor_numpy.cpp
    KnownError(
        "negative_strides",
        re.compile(r"strides? in the given numpy array (?:is|are) negative"),
        "A flipped NumPy array has negative strides, which tensors have not",
        "torch.from_numpy(array.copy()), or np.ascontiguousarray(array)",
    ),
    KnownError(
        "object_array",
        re.compile(r"can't convert np\.ndarray of type numpy\.object_"),
        "A NumPy array of objects: its rows differ in length, or a column has text",
        "df.to_numpy(dtype=np.float32) after text is encoded and gaps are filled; pad rows to one "
        "length",
    ),
    # torch/distributed/distributed_c10d.py, rendezvous.py
    KnownError(
        "no_process_group",
        re.compile(
            r"Default process group has not been initialized"
            r"|environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected"
        ),
        "The script wants to be one of several processes, and nothing made it one",
        "start it with torchrun --nproc_per_node=N script.py and call init_process_group() before "
        "DistributedDataParallel, barrier() and DistributedSampler",
    ),
    KnownError(
        "state_dict_sizes",
        re.compile(r"Error\(s\) in loading state_dict[\s\S]*size mismatch for"),
        "The checkpoint has layers of another size than the model (its last layer, by the classes)",
        "make the model as it was, load it, and then replace the last layer; or take the keys that "
        "differ out of the state: strict=False alone does not skip them",
    ),
    # transformers/modeling_utils.py
    KnownError(
        "state_dict_sizes",
        re.compile(r"`ignore_mismatched_sizes` to `False`"),
        "The checkpoint has layers of another size than the model (its last layer, by the classes)",
        "from_pretrained(…, ignore_mismatched_sizes=True), which makes those layers new (the "
        "examples have --ignore_mismatched_sizes); or num_labels= as the checkpoint has it",
    ),
    # caffe2/serialize/inline_container.cc by way of torch/serialization.py
    KnownError(
        "no_folder",
        re.compile(r"Parent directory .+? does not exist"),
        "A checkpoint is written to a folder that does not exist",
        "os.makedirs(os.path.dirname(path), exist_ok=True) where the training begins: an error "
        "there costs no training",
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
    # torchvision/datasets
    KnownError(
        "no_data_set",
        re.compile(
            r"Dataset (?:metadata file )?not found(?: or corrupted)?\. "
            r"You (?:can|may) use download=True"
        ),
        "torchvision does not find the data set in the folder that it is given, or finds other "
        "files than the published ones",
        "correct the path: its root is the folder above the data set's own (MNIST/raw, "
        "VOCdevkit/VOC2012); or download=True once, where there is a network",
    ),
    KnownError(
        "no_data_set",
        re.compile(r"Couldn't find any class folder in|Found no valid file for the classes"),
        "ImageFolder finds no image: it wants a folder for each class",
        "give it the folder above those of the classes: FOLDER/cat/1.jpg, FOLDER/dog/2.jpg",
    ),
    # transformers/tokenization_utils_base.py
    KnownError(
        "no_padding_token",
        re.compile(r"tokenizer does not have a padding token"),
        "Samples of different lengths are to be padded, and the tokenizer has no token for that",
        "tokenizer.pad_token = tokenizer.eos_token after it was made",
    ),
    # transformers/trainer.py
    KnownError(
        "trainer_columns",
        re.compile(
            r"No columns in the dataset match the model's forward method signature"
            r"|The batch received was empty"
        ),
        "Trainer drops the data set's columns that forward() does not name: all of them",
        "name columns as forward() does (input_ids, labels), or "
        "TrainingArguments(remove_unused_columns=False)",
    ),
    KnownError(
        "trainer_steps",
        re.compile(r"train_dataset does not implement __len__, max_steps has to be specified"),
        "A data set without a length has no epochs",
        "TrainingArguments(max_steps=…)",
    ),
)
#: Their kinds.
KINDS: Final = tuple(dict.fromkeys(error.kind for error in _KNOWN))
#: Of these the message itself says what it is about.
_TOLD: Final = ("label_out_of_range", "unreadable_file", "no_folder", "no_data_set")
_LONGEST: Final = 100
#: Where an optimizer's step raises that two devices meet, and what it means there.
_OPTIMIZERS: Final = "/torch/optim/"
_OF_OPTIMIZER: Final = (
    "The optimizer's state is on another device than its parameters",
    "model.to(device) before optimizer.load_state_dict(…), which moves the state to where the "
    "parameters are at that time; the same order as in a new run: the model to the GPU, the "
    "optimizer, its state",
)


def _is_in_optimizer(raised: ParsedException) -> bool:
    """Did PyTorch's optimizer raise it, and no closure that it calls?"""
    below = itertools.takewhile(lambda frame: not frame.is_user, reversed(raised.frames))
    return any(_OPTIMIZERS in frame.path for frame in below)


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
    elif found.kind == "two_devices" and _is_in_optimizer(raised):
        title, fix = _OF_OPTIMIZER
    return failure_finding(found.kind, title, "", fix)
