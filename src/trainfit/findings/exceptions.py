"""Causes that an exception's message and traceback reveal, with their fixes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from trainfit.findings import (
    autograd_errors,
    fixes,
    gpu_errors,
    habits,
    script_errors,
    tensor_errors,
    tracebacks,
    training_errors,
)
from trainfit.findings.environment import hub, missing, outdated
from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import Frame, ParsedException
from trainfit.results.findings import Finding, failure_finding
from trainfit.results.text import count, short
from trainfit.torch_private.needed import FETCH_FILE, WORKER_FILE


def known(raised: ParsedException, seen: FailureContext) -> Finding | None:
    """The known cause of an exception, if it has one; without evidence."""
    return next((fault for rule in _RULES if (fault := rule(raised, seen)) is not None), None)


def _fault(kind: str, summary: str, fix: str) -> Finding:
    return failure_finding(kind, summary, "", fix)


# --- Of data sets and their collation ---------------------------------------------------------


#: torch/cuda/__init__.py (and xpu, mtia); in a worker also the driver's own words.
_REINITIALIZED: Final = re.compile(r"Cannot re-initialize \w+ in forked subprocess")
_INITIALIZATION: Final = re.compile(
    r"CUDA error: initialization error"
    # of a worker of a simulated run, which moves a tensor there or stacks some that are there
    r"|PyTorch is not linked with support for cuda devices"
    r"|UntypedStorage\(\): Storage device not recognized: cuda"
)
#: multiprocessing/process.py
_DAEMONIC: Final = "daemonic processes are not allowed to have children"
#: torch.stack; torch/utils/data/_utils/collate.py; ATen/native/Resize
_UNEQUAL: Final = re.compile(
    r"stack expects each tensor to be equal size|should be of equal size"
    r"|Trying to resize storage that is not resizable"
)
_TWO_SIZES: Final = re.compile(r"got \[([\d, ]+)\] at entry \d+ and \[([\d, ]+)\] at entry")
#: torch.stack into shared memory; torch/multiprocessing/reductions.py
_WITH_HISTORY: Final = re.compile(
    r"stack\(\): functions with out=\.\.\. arguments don't support automatic differentiation"
    r"|Cowardly refusing to serialize non-leaf tensor which requires_grad"
)
#: torch/utils/data/_utils/collate.py
_UNCOLLATED: Final = "default_collate: batch must contain tensors"


def _gpu_in_worker(raised: ParsedException, _: FailureContext) -> Finding | None:
    in_worker = raised.worker is not None and _INITIALIZATION.search(raised.message)
    if not in_worker and not _REINITIALIZED.search(raised.message):
        return None
    return _fault(
        "cuda_in_worker",
        "The data set uses the GPU in a forked worker",
        f"keep the data set on the CPU and {habits.ON_GPU_EARLY.action}; or "
        'multiprocessing_context="spawn" with what is on the GPU made in the worker; or '
        "num_workers=0",
    )


def _nested(raised: ParsedException, _: FailureContext) -> Finding | None:
    if _DAEMONIC not in raised.message:
        return None
    if raised.worker is None:
        return _fault(
            "nested_processes",
            "A daemonic process starts processes, which it cannot do",
            "start it with daemon=False, or start the processes from the main process",
        )
    return _fault(
        "nested_processes",
        "The data set starts processes, which a worker cannot do",
        "num_workers=0, or make the data set single-process: the DataLoader's workers "
        "already run in parallel",
    )


def _collation(raised: ParsedException, _: FailureContext) -> Finding | None:
    at = f" ({short(raised.message, 120)})"
    if "NoneType" in raised.message and _meets_none(raised):
        return _none_in_batch(raised)
    if raised.type == "KeyError" and _is_of(raised, _COLLATE):
        return _fault(
            "collate",
            f"Samples of one batch have different keys: {short(raised.message, 40)} is in the "
            "first and not in all",
            "give each sample the same keys (0, an empty tensor or a mask where there is nothing), "
            "or pass a collate_fn that joins what is there",
        )
    if _WITH_HISTORY.search(raised.message) and raised.worker is not None:
        return _fault(
            "collate",
            "Samples have gradients to come, with which a worker cannot send them",
            "return x.detach(), or make samples under torch.no_grad(); a layer that is to be "
            "trained belongs in the model, not in the data set",
        )
    if _UNCOLLATED in raised.message and "PIL." in raised.message:
        return _fault(
            "collate",
            "The data set gives images of PIL, of which no batch can be made",
            "transform them to tensors: torchvision.transforms.ToTensor() as the last transform, "
            "or torch.from_numpy(np.array(image))",
        )
    if _UNCOLLATED in raised.message:
        return _fault(
            "collate",
            f"Samples contain a type that default_collate does not support{at}",
            "return tensors, arrays, numbers, strings or containers of them, or pass a collate_fn",
        )
    if not _UNEQUAL.search(raised.message) or not _collates(raised):
        return None
    if _differ_in_channels(raised.message):
        return _fault(
            "collate",
            f"Images of one batch differ in their channels: some are grey, or have an alpha{at}",
            'Image.open(path).convert("RGB") in the data set',
        )
    return _fault(
        "collate",
        f"Samples of one batch differ in size and cannot be stacked{at}",
        "resize, crop or pad samples to one size in the data set, or pass a collate_fn "
        "that pads them or keeps them in a list",
    )


def _differ_in_channels(message: str) -> bool:
    """Are two samples as large as each other but for 1, 3 or 4 channels?"""
    match = _TWO_SIZES.search(message)
    if match is None:
        return False
    one, other = ([int(part) for part in sizes.split(",")] for sizes in match.groups())
    return len(one) == 3 and one[1:] == other[1:] and {one[0], other[0]} <= {1, 3, 4}


def _collates(raised: ParsedException) -> bool:
    """Does a batch's collation raise it, and not a ``torch.stack`` of the model's?"""
    if not raised.frames or raised.worker is not None:
        return True
    return any("collate" in f"{frame.path} {frame.function}" for frame in raised.frames)


#: What a collate_fn of the user's does to a sample: x, y = sample; sample["x"]; zip(*samples).
_PARTS_OF_NONE: Final = re.compile(r"NoneType.*(?:subscriptable|iterable|has no len)|iterable None")


def _meets_none(raised: ParsedException) -> bool:
    """Does a batch's collation meet None, and not what else a collate_fn uses?"""
    if _UNCOLLATED in raised.message or _is_of(raised, _COLLATE):
        return True
    is_own = any(frame.is_user and "collate" in frame.function for frame in raised.frames)
    of_self = "self." in raised.code
    return is_own and not of_self and _PARTS_OF_NONE.search(raised.message) is not None


def _none_in_batch(raised: ParsedException) -> Finding:
    if (
        sum(_is_torchs(frame, _COLLATE) and frame.function == "collate" for frame in raised.frames)
        > 1
    ):
        return _fault(
            "collate",
            "The data set gives None for a part of a sample",
            "a value of the same kind for what a sample lacks (0, an empty text, a mask), the part "
            "left out of all samples, or a collate_fn that keeps it in a list",
        )
    return _fault(
        "collate",
        "The data set gives None for a sample",
        "leave samples that cannot be read out of the list before the training, or a "
        "collate_fn that drops them: default_collate([it for it in batch if it is not None])",
    )


def _is_of(raised: ParsedException, *names: str) -> bool:
    """Is the innermost line one of these files of PyTorch's?"""
    return bool(raised.frames) and _is_torchs(raised.frames[-1], *names)


def _is_torchs(frame: Frame, *names: str) -> bool:
    return frame.package == "torch" and frame.path.endswith(names)


#: torch/utils/data: what calls the user's functions.
_COLLATE: Final = "utils/data/_utils/collate.py"
_CALLERS: Final = {
    "init_fn(worker_id)": ("worker_init_fn", "the worker's number", "worker_id"),
    "self.collate_fn(data)": ("collate_fn", "a list of samples", "samples"),
    "self.dataset[": ("__getitem__", "an index", "index"),
}
_ARGUMENTS: Final = re.compile(r"^([\w.<>]+)\(\) (?:take\w+|missing) .*positional argument")


def _signature(raised: ParsedException, _: FailureContext) -> Finding | None:
    """A function of the user's that takes other arguments than a DataLoader gives."""
    named = _ARGUMENTS.match(raised.message)
    if named is None or not _is_of(raised, WORKER_FILE, FETCH_FILE):
        return None
    code = raised.frames[-1].code
    called = next((caller for start, caller in _CALLERS.items() if start in code), None)
    if called is None:
        return None
    what, given, parameter = called
    *scopes, name = named[1].split(".")
    of_class = bool(scopes) and scopes[-1] != "<locals>"
    return _fault(
        "arguments",
        f"{what} is called with {given} alone, and {named[1]}() cannot be",
        f"def {name}({'self, ' if of_class else ''}{parameter}): give other parameters a default, "
        "or bind them with functools.partial",
    )


#: "list index out of range", "index 5 is out of bounds for axis 0 with size 5", "single positional
#: indexer is out-of-bounds" (pandas).
_BEYOND: Final = re.compile(
    r"\bindex (?:-?\d+ is )?out of (?:range|bounds)(?! for (?:axis|dimension) [1-9])"
    r"|positional indexers? (?:is|are) out-of-bounds"
)
#: "list indices must be integers or slices, not numpy.float64"; NumPy's, PyTorch's.
_NO_INTEGER: Final = re.compile(
    r"indices must be integers(?: or slices)?, not ([\w.]+)"
    r"|only integers, slices .* are valid indices(?: \(got ([\w.]+)\))?"
)
_OF_DATA_SETS: Final = "utils/data/dataset.py"


def _index(raised: ParsedException, _: FailureContext) -> Finding | None:
    """An index of the sampler's that the data set has nothing for."""
    beyond = raised.type == "IndexError" and _BEYOND.search(raised.message)
    at = f"({short(raised.message, 80)})"
    if beyond and _is_of(raised, _OF_DATA_SETS) and "indices[" in raised.frames[-1].code:
        return _fault(
            "index_beyond_data",
            f"A Subset is asked, or asks, for an index that is not there {at}",
            "indices of a Subset count in the data set that it is made of, 0 to its length - 1: of "
            "a Subset of a Subset in the inner one; and samplers of a Subset in the Subset",
        )
    fetches = next((frame for frame in raised.frames if _is_torchs(frame, FETCH_FILE)), None)
    if fetches is None or raised.culprit is None:
        return None
    if not (found := beyond or _NO_INTEGER.search(raised.message)):
        return None
    if not tracebacks.indexes_by_parameter(raised.culprit, "__getitem__"):
        return None
    if not beyond:
        kind = next(filter(None, found.groups()), "another type")
        return _fault(
            "index_type_of_data",
            f"The data set is asked for a sample by {kind}, and not by an integer {at}",
            "a sampler that gives integers: iter(order.tolist()) of an array of integers, int(i) "
            "of others; one that gives lists is passed as batch_sampler=",
        )
    return _fault(
        "index_beyond_data",
        "The data set is asked for a sample that it does not have: what this line reads is "
        f"shorter {at}",
        "__len__ must return the number of samples that there are, the least of its lists "
        "(len(self.labels)); a sampler must be made for this data set: indices 0 to len - 1, as "
        "many weights as samples",
    )


#: webdataset/filters.py; a worker without a shard has nothing to give.
_FEW_SHARDS: Final = re.compile(r"fewer shards than (?:there are )?workers")


def _stops(raised: ParsedException, _: FailureContext) -> Finding | None:
    if raised.type != "StopIteration" or not any(
        _is_torchs(frame, FETCH_FILE) for frame in raised.frames
    ):
        return None
    return _fault(
        "stops_epoch",
        "A sample raises StopIteration, which ends the epoch there without an error",
        "next(iterator) has nothing more to give: read by the index that __getitem__ is given, "
        "next(iterator, default), or an IterableDataset for what comes in a stream",
    )


def _shards(raised: ParsedException, _: FailureContext) -> Finding | None:
    if not _FEW_SHARDS.search(raised.message):
        return None
    return _fault(
        "few_shards",
        "A worker has no shard: the data set has fewer shards than workers",
        fixes.MORE_SHARDS,
    )


#: What libraries say when a file that was opened before the fork is read in a worker.
_OF_HANDLES: Final[dict[str, re.Pattern[str]]] = {
    "h5py": re.compile(
        r"Unable to (?:synchronously )?(?:open|read|get)|Can't (?:synchronously )?read data"
        r"|wrong B-tree signature|addr overflow|bad (?:object|local heap|symbol)|inflate\(\) failed"
    ),
    "lmdb": re.compile(r"MDB_BAD_RSLOT|MDB_READERS_FULL|opened by this process"),
    "zipfile": re.compile(
        r"Bad magic number|Bad CRC-32|Error -3 while decompressing|Overlapped entries"
    ),
    "tarfile": re.compile(
        r"(?:unexpected end of data|bad checksum|truncated header|invalid header)"
    ),
    "av": re.compile(r"Invalid data found|avcodec_send_packet|Operation not permitted"),
    "sqlite3": re.compile(r"disk image is malformed|locking protocol|disk I/O error"),
}
#: Of these an exception says enough by itself.
_CERTAIN: Final = re.compile(r"MDB_BAD_RSLOT")


def _handle(raised: ParsedException, context: FailureContext) -> Finding | None:
    """A file that was opened before workers were forked, and that two of them now read."""
    if raised.worker is None:
        return None
    text = f"{raised.type}: {raised.message}"
    suspects = [name for name, pattern in _OF_HANDLES.items() if pattern.search(text)]
    held = {path: kind for path, kind in context.handles.items() if kind.split(".")[0] in suspects}
    if not suspects or (not held and not _CERTAIN.search(text)):
        return None
    what = ", ".join(f"{path} ({kind})" for path, kind in held.items()) or f"a {suspects[0]} file"
    return _fault(
        "handle_before_fork",
        f"{what} was opened before the workers were forked, and they share its file position",
        fixes.OPEN_IN_WORKER,
    )


# --- Of types ---------------------------------------------------------------------------------


_DTYPE: Final = (
    r"(?:torch\.(?:cuda\.)?)?(?:c10::)?"
    r"(Half|BFloat16|Float|Double|float16|bfloat16|float32|float64|half|float|double)(?:Tensor)?\b"
)
#: Operators that want one dtype, each in its words (`ATen`): "expected scalar type Half but found
#: Float", "mat1 and mat2 must have the same dtype, but got Half and Float", "Input type
#: (c10::Half) and bias type (float) should be the same", "expected m1 and m2 to have the same
#: dtype, but got: float != c10::Half", "Expected query, key, and value to have the same dtype, but
#: got query.dtype: float key.dtype: c10::Half", "Index put requires the source and destination
#: dtypes match, got Float for the destination and Half for the source."
_MISMATCHES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"expected scalar type {_DTYPE} but found {_DTYPE}",
        rf"have the same dtype,? but got:? {_DTYPE} (?:and|!=) {_DTYPE}",
        rf"[Ii]nput type \({_DTYPE}\) and (?:weight|bias) type \({_DTYPE}\) should be the same",
        rf"dtypes? match, got {_DTYPE} for the destination and {_DTYPE} for the source",
        rf"have the same dtype, but got query\.dtype: {_DTYPE} key\.dtype: {_DTYPE}",
        rf"Found dtype {_DTYPE} but expected {_DTYPE}",
        rf"self \({_DTYPE}\) and source \({_DTYPE}\) must have the same scalar type",
        rf"have the same dtype, but got \(self\) {_DTYPE} and \(source\) {_DTYPE}",
    )
)
_HALVES: Final = ("half", "bfloat16", "float16")
_UNSCALED: Final = "Attempting to unscale FP16 gradients"


def _dtypes(raised: ParsedException, _: FailureContext) -> Finding | None:
    found = next(filter(None, (mismatch.search(raised.message) for mismatch in _MISMATCHES)), None)
    if found is None:
        return None
    names = {part.lower() for part in found.groups()}
    at = f"{found[1]} and {found[2]}"
    if names & set(_HALVES):
        return _fault(
            "mixed_dtypes",
            f"An operator gets tensors of two precisions ({at}): mixed precision is only partly on",
            "run the whole forward pass and the loss inside torch.autocast (evaluation, too) and "
            "leave model and batch in float32; without autocast give model and batch the same "
            "dtype; where autocast does not reach (custom functions, index assignment, buffers) "
            "cast: x.to(other.dtype)",
        )
    if names & {"double", "float64"} and names & {"float", "float32"}:
        return _fault(
            "mixed_dtypes",
            f"An operator gets tensors of two precisions ({at}): float64 is NumPy's default",
            "convert in the data set: torch.as_tensor(array, dtype=torch.float32), or x.float()",
        )
    return None


def _unscaled(raised: ParsedException, _: FailureContext) -> Finding | None:
    if _UNSCALED not in raised.message:
        return None
    return _fault(
        "fp16_gradients",
        "GradScaler gets gradients in float16: the model's parameters are float16",
        "what is trained in float32: no .half(), no torch_dtype=float16, and torch.autocast; of "
        "adapters on a frozen model in float16 these alone (cast_training_params of diffusers, "
        "autocast_adapter_dtype=True of PEFT); or bfloat16, without GradScaler",
    )


# --- Of processes and ports -------------------------------------------------------------------


_IN_USE: Final = re.compile(r"Address already in use|EADDRINUSE|\[Errno 98\]")
_OF_RANKS: Final = re.compile(r"torch/distributed/|MASTER_PORT|The server socket has failed to")
_PORT: Final = re.compile(r"\bport:? (\d{2,5})\b")


def _port(raised: ParsedException, _: FailureContext) -> Finding | None:
    if not _IN_USE.search(raised.message):
        return None
    frames = "\n".join(frame.path for frame in raised.frames)
    match = _PORT.search(raised.message)
    number = f" {match[1]}" if match else ""
    summary = f"The port{number} is in use by another process, perhaps one of a former run"
    look = (
        f"`ss -ltnp` shows which process has it ({'sport = :' + match[1] if match else 'LISTEN'})"
    )
    if _OF_RANKS.search(f"{raised.message}\n{frames}"):
        return _fault(
            "port_in_use",
            summary,
            "give each job on a machine a port of its own: torchrun --standalone, or "
            f"--master-port (MASTER_PORT) with a free number; {look}",
        )
    return _fault("port_in_use", summary, f"end that process, or use another port; {look}")


def _notebook(raised: ParsedException, _: FailureContext) -> Finding | None:
    if "name 'get_ipython' is not defined" not in raised.message:
        return None
    return _fault("notebook_line", "A line of a notebook that only IPython runs", fixes.NOTEBOOK)


#: Python, where a method is called of its class.
_OF_CLASS: Final = re.compile(
    r"^(?:\w+\.)*(\w+)\(\) missing \d+ required positional arguments?: 'self'"
)
#: pickle, of a function that has no name in its module.
_UNNAMED: Final = re.compile(
    r"[Cc]an't (?:get|pickle) (?:local object|<function)|[Cc]annot pickle '\w+' object"
)
_OF_SAVE: Final = "torch/serialization.py"
_SAVES: Final = re.compile(r"\btorch\.save\(")


#: aten/src/ATen/TensorIterator.cpp
_CAST: Final = "can't be cast to the desired output type"


def _whole_in_place(raised: ParsedException, _: FailureContext) -> Finding | None:
    """The finding on decimals that are written into a tensor of whole numbers; ``None`` for a
    loss, of whose targets the same words are."""
    if _CAST not in raised.message or any("torch/nn/" in frame.path for frame in raised.frames):
        return None
    return _fault(
        "whole_in_place",
        "A result with decimals is written into a tensor of whole numbers",
        "x = x * 0.5 in place of x.mul_(0.5) and x *= 0.5; of an average over state_dict() the "
        "floating-point tensors alone (if each.is_floating_point()), and each.copy_(…) for the "
        "rest: BatchNorm counts its batches (num_batches_tracked) in whole numbers",
    )


#: torch/utils/data/dataset.py
_DATA_SIZES: Final = "Size mismatch between tensors"


def _sizes_of_data(raised: ParsedException, _: FailureContext) -> Finding | None:
    if _DATA_SIZES not in raised.message:
        return None
    return _fault(
        "sizes_of_data",
        "TensorDataset gets tensors with different numbers of samples",
        "look at what splits and filters them: train_test_split(X, y) gives X_train, X_test, "
        "y_train, y_test; what drops samples drops their labels, too",
    )


def _used_up(raised: ParsedException, context: FailureContext) -> Finding | None:
    """``next(iterator)`` of the script's own line."""
    if raised.type != "StopIteration" or raised.worker is not None:
        return None
    if not re.search(r"\bnext\(", raised.code):
        return None
    batches = context.epoch_batches
    if batches == 0:
        return _fault(
            "iterator_at_end",
            "next() is called of a DataLoader that gives no batch",
            "a batch_size of at most as many samples as there are, or drop_last=False; look at "
            "what filters the data set",
        )
    ended = "as a DataLoader's does after one epoch"
    if batches is not None:
        ended = f"the DataLoader's after its {count(batches, 'batch', 'batches')}"
    return _fault(
        "iterator_at_end",
        f"next() is called of an iterator that has come to its end, {ended}",
        "for x, y in loader: in a loop over epochs; or try: batch = next(batches) / except "
        "StopIteration: batches = iter(loader); batch = next(batches)",
    )


def _class_called(raised: ParsedException, _: FailureContext) -> Finding | None:
    match = _OF_CLASS.search(raised.message)
    if match is None:
        return None
    return _fault(
        "class_called",
        f"{match[1]}() is called of a class, not of an object that was made of it",
        "parentheses make the object: model = Net(), optimizer = torch.optim.Adam("
        "model.parameters()); a class without them is no model",
    )


def _saved_whole(raised: ParsedException, _: FailureContext) -> Finding | None:
    saves = any(frame.path.replace("\\", "/").endswith(_OF_SAVE) for frame in raised.frames)
    # In a simulated run the frames below the script's line are ours, and are not shown.
    saves = saves or bool(raised.frames and _SAVES.search(raised.frames[-1].code))
    if not saves or not _UNNAMED.search(raised.message):
        return None
    return _fault(
        "saved_whole",
        "torch.save() gets a whole object that pickle refuses: a lambda, a local function, a lock "
        "or an open file among its attributes",
        "torch.save(model.state_dict(), path), the weights alone, and model.load_state_dict("
        "torch.load(path)) of a model that was made before; or a module-level function (def) in "
        "place of the lambda",
    )


_RULES: Final[tuple[Callable[[ParsedException, FailureContext], Finding | None], ...]] = (
    _gpu_in_worker,
    _nested,
    _collation,
    _signature,
    _index,
    _stops,
    _class_called,
    _saved_whole,
    _whole_in_place,
    _sizes_of_data,
    _used_up,
    _shards,
    _handle,
    gpu_errors.known,
    _dtypes,
    _unscaled,
    _port,
    _notebook,
    missing.mismatch,
    missing.gpu_not_seen,
    missing.no_terminal,
    missing.no_nvidia_smi,
    script_errors.too_long,
    hub.known,
    training_errors.known,
    missing.hidden,
    outdated.outdated,
    missing.missing,
    missing.told,
    autograd_errors.known,
    tensor_errors.known,
    script_errors.known,
    outdated.excluded,
    outdated.argument_gone,
)
