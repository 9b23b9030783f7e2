"""Exceptions of a script that uses PyTorch, pandas or Transformers otherwise than they are meant.

The address next to a text is where the library raises it.
"""

from __future__ import annotations

import re
from typing import Final

from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import ParsedException
from trainfit.findings.training_errors import KnownError, first_met
from trainfit.results.findings import Finding, failure_finding

#: Of a DataLoader.
_OPTIONS: Final = "loader_options"
_KNOWN: Final = (
    # torch/nn/modules/module.py
    KnownError(
        "attribute_of_wrapper",
        re.compile(
            r"'(?:DistributedDataParallel|DataParallel|FullyShardedDataParallel)' object has no "
            r"attribute '\w+'"
        ),
        "An attribute of the model is asked of the wrapper around it",
        "model.module.NAME for attributes, methods and state_dict(); call the wrapper itself "
        "(model(x)) for the forward pass",
    ),
    KnownError(
        "no_forward",
        re.compile(r'is missing the required "forward" function'),
        "The module has no forward()",
        "define forward(self, …) in the class itself: look at its spelling and its indentation",
    ),
    KnownError(
        "no_super",
        re.compile(r"cannot assign (?:module|parameters?) before Module\.__init__\(\) call"),
        "A module assigns layers before nn.Module is set up",
        "super().__init__() as the first line of __init__",
    ),
    KnownError(
        "checkpoint_whole",
        re.compile(
            r"Error\(s\) in loading state_dict[\s\S]*Unexpected key\(s\) in state_dict:[^\n]*"
            r"\"(?:state_dict|model|model_state_dict|optimizer|optimizer_state_dict|epoch)\""
        ),
        "The file is a whole checkpoint, with the model's state as one part of it",
        'model.load_state_dict(checkpoint["state_dict"]), by the name that the message lists',
    ),
    # torch.load gives what was saved, a dictionary of tensors.
    KnownError(
        "state_as_model",
        re.compile(
            r"'(?:collections\.)?OrderedDict' object (?:has no attribute '\w+'|is not callable)"
            r"|'dict' object has no attribute '(?:eval|train|parameters|load_state_dict|forward)'"
        ),
        "A state_dict, the model's weights by name, is used as if it was the model",
        "model = Net(…), as it was made before; model.load_state_dict(torch.load(path)) (of a "
        "whole checkpoint its part: torch.load(path)['model']); and then model.to(device)",
    ),
    KnownError(
        "assigned_parameter",
        re.compile(r"cannot assign '[^']+' as (?:parameter|child module)"),
        "A tensor is put in the place of a parameter",
        "with torch.no_grad(): layer.weight.copy_(values); or nn.Parameter(values)",
    ),
    KnownError(
        "not_a_module",
        re.compile(r"is not a Module subclass"),
        "nn.Sequential or nn.ModuleList gets something that is no layer",
        "a layer that was made: nn.ReLU(), neither F.relu nor nn.ReLU; in nn.Sequential a module "
        "of your own for anything else",
    ),
    KnownError(
        "forward_arguments",
        re.compile(
            r"\bforward\(\) (?:take\w+ \d|missing \d|got (?:an unexpected|multiple values))"
        ),
        "A module is called with other arguments than its forward() has",
        "the same arguments at the call and in def forward(self, …), in their order; "
        "nn.Sequential hands one on; leave columns out that the model does not know",
    ),
    KnownError(
        "state_wanted",
        re.compile(r"Expected state_dict to be dict-like, got <class"),
        "load_state_dict gets a path or a model, and wants a state",
        "model.load_state_dict(torch.load(path)); where the file has a whole model, its "
        ".state_dict()",
    ),
    # torch/utils/data/dataloader.py
    KnownError(
        "loader_indexed",
        re.compile(r"'\w*DataLoader' object is not (?:subscriptable|an iterator)"),
        "A DataLoader is used like a list or an iterator",
        "for batch in loader; next(iter(loader)) for a single batch, dataset[i] for one sample",
    ),
    KnownError(
        "split_lengths",
        re.compile(r"Sum of input lengths does not equal the length of the input dataset"),
        "random_split is asked for parts that do not add up to the data set",
        "n = int(0.8 * len(data)); random_split(data, [n, len(data) - n]), or [0.8, 0.2]",
    ),
    # torch/utils/data/dataloader.py
    KnownError(
        _OPTIONS,
        re.compile(r"sampler option is mutually exclusive with shuffle"),
        "A DataLoader gets a sampler and shuffle=True, and the sampler gives the order",
        "leave out shuffle: RandomSampler and DistributedSampler(shuffle=True) shuffle themselves",
    ),
    KnownError(
        _OPTIONS,
        re.compile(r"batch_sampler option is mutually exclusive with"),
        "A DataLoader gets a batch_sampler and what that decides itself",
        "leave out batch_size, shuffle, sampler and drop_last; BatchSampler(sampler, batch_size, "
        "drop_last) has them",
    ),
    KnownError(
        _OPTIONS,
        re.compile(r"batch_size=None option disables auto-batching and is mutually exclusive"),
        "A DataLoader makes no batches (batch_size=None), of which it is to drop the last",
        "leave out drop_last, or give it a batch_size",
    ),
    KnownError(
        _OPTIONS,
        re.compile(r"DataLoader with IterableDataset: expected unspecified shuffle"),
        "A DataLoader cannot shuffle an IterableDataset, which gives samples in its own order",
        "leave out shuffle, and shuffle in __iter__: the list of files or shards, or a buffer of "
        "samples",
    ),
    KnownError(
        _OPTIONS,
        re.compile(r"DataLoader with IterableDataset: expected unspecified"),
        "A DataLoader gets a sampler for an IterableDataset, which gives samples in its own order",
        "leave out sampler and batch_sampler; a data set with __getitem__ and __len__ has them",
    ),
    KnownError(
        _OPTIONS,
        re.compile(r"persistent_workers option needs num_workers > 0"),
        "persistent_workers=True keeps workers, and there are none",
        "num_workers=1 or more, or leave out persistent_workers",
    ),
    KnownError(
        _OPTIONS,
        re.compile(r"prefetch_factor option could only be specified in multiprocessing"),
        "prefetch_factor is how many batches a worker makes ahead, and there is no worker",
        "num_workers=1 or more, or leave out prefetch_factor",
    ),
    # torch/utils/data/sampler.py
    KnownError(
        "no_samples",
        re.compile(r"num_samples should be a positive integer value, but got num_samples=0"),
        "The data set is empty",
        "print(len(dataset)): a folder or pattern that matches no file (paths are relative to the "
        "folder that the command is started in), a filter or a split that leaves nothing",
    ),
    # torch/nn/functional.py, torch/nn/modules/transformer.py
    KnownError(
        "attention_shapes",
        re.compile(
            r"the batch number of src and tgt must be equal"
            r"|was expecting embedding dimension of \d+, but got \d+"
        ),
        "Attention gets another batch or another width than it is made for",
        "batch_first=True in nn.Transformer and its layers for (batch, steps, features), and "
        "features as wide as d_model: nn.Embedding(words, d_model)",
    ),
    KnownError(
        "method_not_called",
        re.compile(r"'(?:method|builtin_function_or_method)' object is not iterable"),
        "A method is given in place of what it gives: its parentheses are missing",
        "model.parameters(), in place of model.parameters",
    ),
    # torch/optim/optimizer.py
    KnownError(
        "optimizer_tensors",
        re.compile(r"optimizer can only optimize Tensors"),
        "The optimizer is given something else than parameters",
        "one list of parameters: [*a.parameters(), *b.parameters()]; a tensor of your own as "
        "nn.Parameter(x.to(device)), not nn.Parameter(x).to(device), which is a copy",
    ),
    KnownError(
        "state_of_optimizer",
        re.compile(r"^'param_groups'$"),
        "The optimizer is given another state than one of an optimizer",
        'optimizer.load_state_dict(checkpoint["optimizer"]), by the name that it was saved under',
    ),
    # torch/optim/lr_scheduler.py
    KnownError(
        "schedule_of",
        re.compile(r"\w+ is not an Optimizer$"),
        "A schedule is made for something else than an optimizer",
        "StepLR(optimizer, …), not of the model or its parameters",
    ),
    KnownError(
        "schedule_length",
        re.compile(r"You must define either total_steps OR \(epochs AND steps_per_epoch\)"),
        "OneCycleLR is not told how long the training is",
        "OneCycleLR(optimizer, max_lr, epochs=epochs, steps_per_epoch=len(loader)), stepped after "
        "each batch",
    ),
    # multiprocessing/context.py
    KnownError(
        "start_method_set",
        re.compile(r"context has already been set"),
        "The start method of processes is set twice",
        'set it once, under if __name__ == "__main__":, or DataLoader(…, '
        'multiprocessing_context="spawn") for its workers alone',
    ),
    # torch/nn/parallel/distributed.py
    KnownError(
        "nothing_to_share",
        re.compile(r"DistributedDataParallel is not needed when a module doesn't have any param"),
        "DistributedDataParallel is put around a model that is frozen, or has no parameters",
        "leave it as it is (model.to(device)), or freeze it after it was wrapped only in part",
    ),
    # torch/distributed/fsdp/_flat_param.py
    KnownError(
        "uneven_shards",
        re.compile(r"Must flatten tensors with uniform `?(?:dtype|requires_grad)"),
        "FSDP puts parameters into one, and they differ in type or in whether they are trained",
        "use_orig_params=True for frozen and trained ones (adapters) together, one dtype for all "
        "(model.to(torch.bfloat16)); or fully_shard of FSDP2",
    ),
    # torchvision/transforms
    KnownError(
        "transform_order",
        re.compile(
            r"pic should be (?:PIL Image|Tensor) or ndarray|[Ii]mg should be (?:PIL Image|Tensor)"
            r"|[Ii]nput tensor should be a torch tensor\. Got"
            r"|Unexpected type <class 'numpy\.ndarray'>"
        ),
        "A transform gets another kind of image than it is for",
        "ToTensor() once, Normalize after it; Image.fromarray(array) before transforms of PIL "
        "images",
    ),
    # Objects/typeobject.c and the like: of Python itself
    KnownError(
        "method_not_called",
        re.compile(
            r"passed to (?:builtin_function_or_method|method)\.__format__"
            r"|unsupported operand type\(s\) for [^\n]*'(?:builtin_function_or_method|method)'"
            r"|'(?:builtin_function_or_method|method)' object is not (?:iterable|subscriptable)"
        ),
        "A method is used without being called",
        "with parentheses: loss.item(), model.parameters(), x.size(0)",
    ),
    KnownError(
        "parts_unpacked",
        re.compile(r"(?:not enough|too many) values to unpack \(expected"),
        "A value has another number of parts than there are names for them",
        "print(len(batch)): x, y = batch of a data set that returns two, (x,) = batch of "
        "TensorDataset(x); enumerate(loader) gives the number first",
    ),
    KnownError(
        "few_samples",
        re.compile(r"Sample larger than population or is negative"),
        "More samples are drawn than there are",
        "wait until the buffer has a batch: if len(buffer) < batch_size: continue",
    ),
    KnownError(
        "not_an_array",
        re.compile(r"expected np\.ndarray \(got NoneType\)"),
        "torch.from_numpy gets None: what was to be read could not be",
        "check what was read before it: cv2.imread and VideoCapture.read give None for a file that "
        "is not there or broken, and where workers share one open file",
    ),
    # numpy/_core/src/multiarray/array_coercion.c, torch/csrc/utils/tensor_numpy.cpp
    KnownError(
        "ragged_array",
        re.compile(r"The requested array has an inhomogeneous shape"),
        "An array is to be made of rows with different lengths",
        "pad them to one length, or keep a list: [torch.tensor(row) for row in rows]",
    ),
    KnownError(
        "not_an_array",
        re.compile(r"expected np\.ndarray \(got \w+\)"),
        "torch.from_numpy gets something else than an array",
        "torch.tensor(x) of lists and numbers, torch.from_numpy(np.stack(arrays)) of a list of "
        "arrays",
    ),
    # transformers/trainer.py, tokenization_utils_base.py
    KnownError(
        "no_loss",
        re.compile(r"The model did not return a loss from the inputs"),
        "The model gets no labels, so it gives no loss",
        "a column named labels (label_names= otherwise), and a model with a head for the task "
        "(AutoModelForSequenceClassification, not AutoModel)",
    ),
    KnownError(
        "ragged_batch",
        re.compile(r"Unable to create tensor, you should probably activate truncation"),
        "Samples of one batch have different lengths, or a column is text",
        "a collator that pads labels as well (DataCollatorForTokenClassification, "
        "DataCollatorForSeq2Seq; DataCollatorWithPadding pads inputs only), and "
        "remove_columns=data.column_names in map() so that text is left out",
    ),
    # transformers/trainer.py
    KnownError(
        "quantized_training",
        re.compile(r"cannot perform fine-tuning on purely quantized models"),
        "Quantized weights cannot be trained themselves",
        "adapters on top of them: get_peft_model(prepare_model_for_kbit_training(model), "
        "LoraConfig(…)); or load the model without quantization",
    ),
)
#: The same of packages around language models: Transformers, PEFT, TRL, huggingface_hub.
_OF_LANGUAGE_MODELS: Final = (
    # huggingface_hub/utils/_validators.py, transformers/utils/hub.py
    KnownError(
        "no_model_folder",
        re.compile(
            r"Repo id must (?:be in the form|use alphanumeric)|Incorrect path_or_model_id"
            r"|Error no file named \S+\.(?:safetensors|bin|json)"
        ),
        "There is no model in the folder that is named",
        "a folder that save_pretrained() wrote (config.json and *.safetensors; paths are relative "
        "to the folder that the command is started in), or a name on the hub: owner/name",
    ),
    # modeling_layers.py
    KnownError(
        "classifier_padding",
        re.compile(r"Cannot handle batch sizes > 1 if no padding token is defined"),
        "The classifier looks for the last token before the padding, and knows no padding token",
        "model.config.pad_token_id = tokenizer.pad_token_id (set tokenizer.pad_token first, to "
        "tokenizer.eos_token if it has none)",
    ),
    # generation/utils.py
    KnownError(
        "no_room_for_tokens",
        re.compile(r"Input length of \S+ is \d+, but `max_length` is set to"),
        "max_length counts the prompt, which is longer: no token is left to generate",
        "max_new_tokens= instead of max_length=",
    ),
    KnownError(
        "unused_inputs",
        re.compile(r"The following `model_kwargs` are not used by the model"),
        "generate() is given inputs that this model has not",
        'inputs.pop("token_type_ids", None), or return_token_type_ids=False of the tokenizer',
    ),
    # quantizers/*.py
    KnownError(
        "quantizer_refuses",
        re.compile(
            r"GPU is required to (?:quantize|run)|No GPU(?: or XPU)? found\. A GPU"
            r"|quantization requires a (?:CUDA )?GPU|NVFP4 requires Blackwell"
            r"|quantiz(?:ed models|ation) is only supported on"
        ),
        "The package that quantizes these weights refuses this device",
        "look at the GPU that the message asks for, and name one with --gpu; to plan the memory "
        "of weights of 4 or 8 bits, BitsAndBytesConfig(load_in_4bit=True) is simulated whole",
    ),
    KnownError(
        "not_prequantized",
        re.compile(r"quantization method \S+ does require the model to be pre-quantized"),
        "This method does not quantize while it loads: its checkpoints are quantized before",
        "the model's checkpoint of that method (named …-AWQ, …-GPTQ), without a "
        "quantization_config; or BitsAndBytesConfig(load_in_4bit=True), which quantizes any",
    ),
    KnownError(
        "quantized_offload",
        re.compile(r"Some modules are dispatched on the CPU or the disk"),
        "The quantized model is larger than the GPU's memory, and its layers cannot be offloaded",
        "4 instead of 8 bits, a smaller model, or a larger GPU; else BitsAndBytesConfig("
        "llm_int8_enable_fp32_cpu_offload=True) with a device_map of your own",
    ),
    # integrations/deepspeed.py
    KnownError(
        "deepspeed_disagrees",
        re.compile(r"Please correct the following DeepSpeed config values that mismatch"),
        "DeepSpeed's configuration and TrainingArguments say different things",
        'the same in both, or "auto" in DeepSpeed\'s: bf16=True of TrainingArguments where '
        "Accelerate's file has mixed_precision: bf16",
    ),
    # accelerate/accelerator.py, big_modeling.py
    KnownError(
        "quantized_device",
        re.compile(
            r"is not supported for `?4-bit`? or `?8-bit`?"
            r"|loaded in 8-bit or 4-bit precision on a different device"
        ),
        "A quantized model is moved after it was loaded, or lies on another device",
        'device_map={"": 0} of from_pretrained, and no .to() or .cuda() after it',
    ),
    # transformers/models/auto
    KnownError(
        "unknown_model",
        re.compile(
            r"Transformers does not recognize this architecture"
            r"|Tokenizer class \w+ does not exist or is not currently imported"
        ),
        "This version of Transformers does not know the model",
        "pip install --upgrade transformers; trust_remote_code=True for models with code of their "
        "own",
    ),
    KnownError(
        "other_head",
        re.compile(r"Unrecognized configuration class [\s\S]* for this kind of AutoModel"),
        "The class of models that loads it has none of this kind",
        "AutoModelForCausalLM for decoders, AutoModelForSeq2SeqLM for T5 and BART, "
        "AutoModelForImageTextToText for models with images",
    ),
    KnownError(
        "no_chat_template",
        re.compile(r"tokenizer\.chat_template is not set and no template"),
        "The tokenizer has no chat template: it is a base model's",
        "the tokenizer of its instruct version, tokenizer.chat_template = …, or text without turns",
    ),
    # peft/tuners
    KnownError(
        "adapter_targets",
        re.compile(r"Target modules [\s\S]* not found in the base model|specify `target_modules`"),
        "The adapters' target modules are not layers of this model",
        'target_modules="all-linear", or names that model.named_modules() lists',
    ),
    # trl/trainer/grpo_config.py, rloo_config.py
    KnownError(
        "generations",
        re.compile(r"divisible by (?:num_generations|the number of generations)"),
        "The samples of a step cannot be shared out to groups of num_generations answers",
        "per_device_train_batch_size × gradient_accumulation_steps as a multiple of "
        "num_generations, or fewer num_generations",
    ),
)
#: A text that is longer than the model's table of positions.
_TOO_LONG: Final = "context_too_long"
#: transformers/models: what is cut or added by position, of a fixed length.
_BY_POSITION: Final = re.compile(r"token_type_ids|position_(?:embeddings|ids)|pos_embed")
_SIZES: Final = re.compile(
    r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)"
    r"|size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"
)
_NO_INDEX: Final = "index out of range in self"
#: A pandas table that is asked for a label it has not; a data set without a length.
_ROW_LABEL: Final = "row_label"
_NO_LENGTH: Final = "no_length"
_OF_NOTHING: Final = "length_of_nothing"
_BY_LENGTH: Final = re.compile(r"/\s*(?:float\(\s*)?len\(")
_HAS_NO_LENGTH: Final = re.compile(r"object of type '(?!NoneType)\w+' has no len\(\)")
_TEXT_FOR_NUMBER: Final = "text_for_number"
_COMPARED: Final = re.compile(
    r"'[<>]=?' not supported between instances of '(?:str' and 'float|float' and 'str)'"
)
#: What Python says of None, and of a key that is not there.
_OF_NONE: Final = re.compile(
    r"'NoneType' object is not (?:subscriptable|iterable|a mapping)"
    r"|argument of type 'NoneType' is not|must be a mapping, not NoneType"
    r"|'NoneType' object has no attribute '(?:get|items|keys|values|pop|copy|update)'"
)
#: A variable that is assigned what a file of settings holds.
_READ: Final = re.compile(
    r"^\s*(\w+)(?:\s*:[^=]+)? = .*?"
    r"(?:\byaml\.\w*load|\byaml_load|\bload_yaml|\bread_yaml|\btomllib\.loads?|\bjson\.loads?)\("
)
#: Of what a line asks for a part.
_PART: Final = re.compile(
    r"(?<![\w.])(\w+)(?=\[|\.(?:get|items|keys|values|pop|copy|update)\b)|(?:\bin |\*\*)(\w+)"
)
_NOTHING_READ, _KEY_NOT_READ = "nothing_read", "key_not_read"
#: Their kinds.
KINDS: Final = (
    *dict.fromkeys(error.kind for error in (*_KNOWN, *_OF_LANGUAGE_MODELS)),
    *(_ROW_LABEL, _NO_LENGTH, _OF_NOTHING, _TOO_LONG, _TEXT_FOR_NUMBER),
    *(_NOTHING_READ, _KEY_NOT_READ),
)


def known(raised: ParsedException, _: FailureContext) -> Finding | None:
    """What a library's refusal means."""
    if _is_row_label(raised):
        return failure_finding(
            _ROW_LABEL,
            "A row of a pandas table is asked for by a label that it has not: after a split, a "
            "filter or a shuffle the labels have gaps",
            "",
            "df.iloc[index] (df[column].iloc[index]), or df = df.reset_index(drop=True) once",
        )
    if _HAS_NO_LENGTH.search(raised.message) and _in_package(raised, "torch"):
        return failure_finding(
            _NO_LENGTH,
            "The data set has no __len__, and something asks how many samples it has",
            "",
            "def __len__(self) next to __getitem__; a stream of samples is an IterableDataset, "
            "which is not shuffled and counted",
        )
    if _COMPARED.search(raised.message) and _in_package(raised, "torch"):
        return failure_finding(
            _TEXT_FOR_NUMBER,
            "A number was given as text",
            "",
            "float(config[…]): YAML reads 1e-3 as text (1.0e-3 is a number); type=float of "
            "argparse",
        )
    if raised.type == "ZeroDivisionError" and _BY_LENGTH.search(raised.code):
        return failure_finding(
            _OF_NOTHING,
            "Something is divided by the length of a DataLoader or a list that has nothing: the "
            "loop over it made no pass",
            "",
            "drop_last=False, or a smaller batch size: drop_last=True leaves out all samples of a "
            "data set that is smaller than a batch; else look at how many samples were found",
        )
    if (read := _of_settings(raised)) is not None:
        return read
    met = first_met((*_KNOWN, *_OF_LANGUAGE_MODELS), raised.message)
    return met and failure_finding(met[0].kind, met[0].title, "", met[0].fix)


def _of_settings(raised: ParsedException) -> Finding | None:
    """A file of settings or data that is empty, or lacks the key that the user's line asks for."""
    key = raised.message if raised.type == "KeyError" else ""
    if not key and not _OF_NONE.search(raised.message):
        return None
    name, number = _read_above(raised)
    culprit = raised.culprit
    if culprit is None or not name or not _looks_into(culprit.code, name, key):
        return None
    where = f"{culprit.path}:{number}"
    if key:
        return failure_finding(
            _KEY_NOT_READ,
            f"A file that was read has no {key} where the line looks for it",
            "",
            f"put it into the file that {where} reads: look at its spelling and, in YAML, at how "
            "far it is indented",
        )
    return failure_finding(
        _NOTHING_READ,
        "A file that was read is empty, or has nothing where the line looks",
        "",
        f"look at the file that {where} reads: its path, and what stands in it (an empty YAML file "
        "is None, as is a key with nothing behind it)",
    )


def _read_above(raised: ParsedException) -> tuple[str, int]:
    """The variable that was assigned last what a file holds, in the function that the user's line
    is in, and the line; empty where there is none."""
    lines = raised.lines
    for number in range(len(lines) - 1, 0, -1):
        line = lines[number - 1]
        if match := _READ.match(line):
            return match[1], number
        if line.lstrip().startswith(("def ", "async def ", "class ")):
            break
    return "", 0


def _looks_into(code: str, name: str, key: str) -> bool:
    """Does a line ask for a part of what is called ``name``, and where it is ``key``, which is no
    other's?"""
    if key:
        chain = rf"\b{name}(?:\[[^\]]*\])*\[{re.escape(key)}\]"
        return re.search(chain, code.replace('"', "'")) is not None
    return {one or other for one, other in _PART.findall(code)} == {name}


def too_long(raised: ParsedException, seen: FailureContext) -> Finding | None:
    """An error of sizes or of an index that a text makes which is too long for the model."""
    lengths = _lengths(raised, seen)
    if lengths is None:
        return None
    longest, positions = lengths
    return failure_finding(
        _TOO_LONG,
        f"A text has {longest:,} tokens, and the model is made for {positions:,} positions",
        "",
        f"truncation=True, max_length={positions} where texts are tokenized; fewer new tokens "
        "where one is generated; or a model with a longer context",
    )


def _lengths(raised: ParsedException, context: FailureContext) -> tuple[int, int] | None:
    """Tokens of a text that is longer than the model's positions, and these."""
    if raised.message == _NO_INDEX and context.tokens is not None and context.positions is not None:
        return (context.tokens, context.positions) if context.tokens > context.positions else None
    sizes = _SIZES.search(raised.message)
    if sizes is None or not _in_package(raised, "transformers"):
        return None
    if not _BY_POSITION.search(raised.frames[-1].code):
        return None
    given, there = sorted((int(part) for part in sizes.groups() if part is not None), reverse=True)
    return (given, there) if there > 1 else None


def _is_row_label(raised: ParsedException) -> bool:
    is_number = raised.message.strip().lstrip("-").isdigit()
    return raised.type == "KeyError" and is_number and _in_package(raised, "pandas")


def _in_package(raised: ParsedException, name: str) -> bool:
    """Does code of the package raise it?"""
    return bool(raised.frames) and raised.frames[-1].package == name
