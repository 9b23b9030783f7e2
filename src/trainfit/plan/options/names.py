"""Names that options of training scripts have in the field, by the tunable that they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

#: Tunable → names of options, as Transformers, Lightning, timm, LeRobot, Accelerate's and
#: torchvision's examples, fairseq, MAE, YOLO and many scripts of people's own have them. Dashes
#: are underscores here, capitals small, and what is before the last dot is cut off.
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "batch_size": (
        *("batch_size", "batchsize", "batch", "bs", "b", "bsz", "mbs", "train_bs", "train_bsz"),
        *("train_batch_size", "training_batch_size", "batch_size_train", "train_batch"),
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "per_device_batch_size"),
        *("per_gpu_batch_size", "batch_size_per_gpu", "batch_size_per_device", "batch_per_gpu"),
        *("micro_batch_size", "micro_batch", "microbatch_size", "device_batch_size"),
        *("local_batch_size", "mini_batch_size", "minibatch_size", "loader_batch_size"),
        *("train_micro_batch_size_per_gpu", "micro_train_batch_size", "dataloader_batch_size"),
        *("imgs_per_gpu", "samples_per_gpu", "ims_per_batch", "images_per_batch"),
    ),
    "grad_accum": (
        *("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"),
        *("gradient_accumulate_every", "gradient_accumulate_steps"),
        *("grad_accum", "gradient_accumulation", "grad_accumulation_steps", "accum_iter"),
        *("accumulation_steps", "accum_steps", "accumulate", "accumulate_steps", "update_freq"),
        *("grad_accumulation", "grad_acc_steps", "iters_to_accumulate", "accum_grad", "grad_acc"),
        *("num_accumulation_steps", "accumulate_gradients", "accum", "accum_grad_iters"),
    ),
    "num_workers": (
        *("num_workers", "workers", "j", "n_workers", "nworkers", "nw", "n_cpu", "num_worker"),
        *("dataloader_num_workers", "dataloader_workers", "data_loader_workers"),
        *("loader_workers", "num_loader_workers", "num_data_workers", "data_workers"),
        *("data_loader_num_workers", "train_num_workers", "train_workers", "loader_num_workers"),
        *("workers_per_gpu", "num_workers_per_gpu", "workers_per_device"),
    ),
    "prefetch_factor": (
        *("prefetch_factor", "prefetch", "dataloader_prefetch_factor", "loader_prefetch_factor"),
        *("data_loader_prefetch_factor", "num_prefetch", "prefetch_batches"),
    ),
    "pin_memory": (
        *("pin_memory", "pin_mem", "pinned_memory", "dataloader_pin_memory", "pin"),
        *("data_loader_pin_memory", "use_pinned_memory", "use_pin_memory"),
    ),
    "persistent_workers": (
        *("persistent_workers", "dataloader_persistent_workers", "persistent"),
        *("use_persistent_workers", "data_loader_persistent_workers", "keep_workers"),
    ),
    "amp": (
        *("amp", "use_amp", "native_amp", "enable_amp", "autocast", "use_autocast", "with_amp"),
        *("mixed_precision", "use_mixed_precision", "mixed", "precision", "compute_precision"),
        *("fp16", "use_fp16", "half", "use_half", "float16", "use_float16"),
        *("bf16", "use_bf16", "bfloat16", "use_bfloat16"),
    ),
}
_OF_NAME: Final = {name: tunable for tunable, names in NAMES.items() for name in names}

#: Booleans that ask for one dtype.
DTYPE_OF_SWITCH: Final = {
    **dict.fromkeys(("fp16", "use_fp16", "half", "use_half", "float16", "use_float16"), "float16"),
    **dict.fromkeys(("bf16", "use_bf16", "bfloat16", "use_bfloat16"), "bfloat16"),
}
#: Options that say in which dtype autocast computes where another switches it on.
AMP_DTYPE_NAMES: Final = ("amp_dtype", "autocast_dtype", "dtype", "mp_dtype", "amp_type")

#: Parts of names by which an option is another's: an evaluation's.
_NOT_TRAINING: Final = frozenset(
    (
        *("eval", "evaluation", "val", "valid", "validation", "dev", "test", "testing", "infer"),
        *("inference", "predict", "prediction", "sample", "sampling", "generate", "generation"),
    )
)
_NEGATIONS: Final = ("no_", "disable_", "without_", "not_")


def plain_name(option: str) -> str:
    """An option's name as the tables have it; empty where it is for an evaluation."""
    name = option.lstrip("+~-").lower().replace("-", "_")
    parts = re.split(r"[./]", name)
    if _NOT_TRAINING.intersection(token for part in parts for token in part.split("_")):
        return ""
    return parts[-1]


def tunable_of(option: str) -> str | None:
    """The tunable that an option of this name very likely is; ``None``: none."""
    return _OF_NAME.get(plain_name(option))


def without_negation(option: str) -> str:
    """The tunable's name in that of an option that switches it off ("--no-amp"); else empty."""
    name = plain_name(option)
    found = (name.removeprefix(start) for start in _NEGATIONS if name.startswith(start))
    return next((each for each in found if each in _OF_NAME), "")
