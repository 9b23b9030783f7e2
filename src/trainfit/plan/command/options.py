"""The options of a command: those that its script's parser knows, and words that look like some.

A script that reads its words itself (``name=value`` of Hydra, a loop over ``sys.argv``) has no
parser that could be asked; neither have variables before the program, and a launcher's words.
Which tunable an option is, its name tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.command.tunables import (
    LOADER_SWITCHES,
    LOADER_TUNABLES,
    NUMBER,
    CommandError,
    as_switch,
    placeholders,
)
from trainfit.plan.command.words import OptionCandidate, said, write_value, written
from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.script import ScriptOption
from trainfit.scripts.option_parsers import OptionPlace, place_of

# ---
# Names that options of training scripts have in the field, by the tunable that they are.


#: Tunable → names of options, as Transformers, Lightning, timm, LeRobot, Accelerate's and
#: torchvision's examples, fairseq, MAE, YOLO and many scripts of people's own have them. Dashes
#: are underscores here, capitals small, and what is before the last dot is cut off; ``trainBatch``
#: and ``train_batch`` are one name.
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "batch_size": (
        *("batch_size", "batchsize", "batch", "bs", "b", "bsz", "mbs", "train_bs", "train_bsz"),
        *("train_batch_size", "training_batch_size", "batch_size_train", "train_batch"),
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "per_device_batch_size"),
        *("per_gpu_batch_size", "batch_size_per_gpu", "batch_size_per_device", "batch_per_gpu"),
        *("micro_batch_size", "micro_batch", "microbatch_size", "micro_bsz", "device_batch_size"),
        *("local_batch_size", "mini_batch_size", "minibatch_size", "loader_batch_size"),
        *("train_micro_batch_size_per_gpu", "micro_train_batch_size", "dataloader_batch_size"),
        *("imgs_per_gpu", "samples_per_gpu", "ims_per_batch", "images_per_batch"),
        *("images_per_gpu", "samples_per_batch", "global_batch_size", "total_batch_size"),
        *("batch_size_gpu", "batch_gpu", "minibatch", "mb_size", "b_size", "batch_sz", "sz_batch"),
        *("n_rand", "n_rays", "num_rays", "rays_per_batch", "num_rays_per_batch"),  # of a NeRF
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
        *("num_threads", "n_threads", "threads", "data_threads", "num_data_threads"),
        *("loader_threads", "num_loader_threads", "nthread", "n_data_workers"),
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
_OF_NAME: Final = {
    name.replace("_", ""): tunable for tunable, names in NAMES.items() for name in names
}

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
#: Where a word of a name begins that is written as in ``trainBatchSize``.
_WORDS: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_NEGATIONS: Final = ("no_", "disable_", "without_", "not_")


def plain_name(option: str) -> str:
    """An option's name as the tables have it; empty where it is for an evaluation."""
    name = _WORDS.sub("_", option.lstrip("+~-")).lower().replace("-", "_")
    parts = re.split(r"[./]", name)
    if _NOT_TRAINING.intersection(token for part in parts for token in part.split("_")):
        return ""
    return parts[-1]


def tunable_of(option: str) -> str | None:
    """The tunable that an option of this name very likely is; ``None``: none."""
    return _OF_NAME.get(plain_name(option).replace("_", ""))


def without_negation(option: str) -> str:
    """The tunable's name in that of an option that switches it off ("--no-amp"); else empty."""
    name = plain_name(option)
    texts = (name.removeprefix(start) for start in _NEGATIONS if name.startswith(start))
    return next((text for text in texts if text.replace("_", "") in _OF_NAME), "")


#: ``--name=value``, ``name=value``, Hydra's ``+name=value``, a variable.
_ASSIGNED: Final = re.compile(r"((?:\+{0,2}|-{0,2})[A-Za-z_][\w./\-]*)=(.*)", re.DOTALL)
_FLAG: Final = re.compile(r"-{1,2}[A-Za-z_][\w.\-]*")


def candidates(command: Command, options: Sequence[ScriptOption]) -> list[OptionCandidate]:
    """All options of ``command``, of which ``options`` are its parser's; none of those that hold a
    placeholder of the user's."""
    begins = command.arguments_at
    arguments = command.words[begins:]
    known = {
        flag for script_option in options for flag in (*script_option.flags, *script_option.off)
    }
    found, taken = [], set()
    for option in options:
        place = _last(
            place_of(arguments, option.flags, known, switch=option.switch, bare=option.bare),
            place_of(arguments, option.off, known, switch=True),
        )
        if option.given != (place is not None):
            continue  # its parser reads the words in another way
        if place is not None:
            place = _moved(place, begins)
            taken |= {place.at, place.value_at}
        found.append(OptionCandidate(_upright(option), place))
    found += _literals(command, known, {at for at in taken if at is not None})
    return [each for each in found if not _is_marked(command, each)]


def _last(one: OptionPlace | None, other: OptionPlace | None) -> OptionPlace | None:
    """The later of two: it counts."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda place: place.at)


def _moved(place: OptionPlace, by: int) -> OptionPlace:
    value_at = None if place.value_at is None else place.value_at + by
    return OptionPlace(place.at + by, place.flag, value_at, place.start)


def _upright(option: ScriptOption) -> ScriptOption:
    """A switch that is named by what it switches off ("--no-amp"), as its opposite."""
    if not option.switch or option.off or any(map(tunable_of, option.flags)):
        return option
    name = next(filter(None, map(without_negation, option.flags)), "")
    if not name:
        return option

    def turned(text: str | None) -> str:
        return str(not as_switch(text))

    return ScriptOption(
        flags=(),
        name=name,
        value=turned(option.value),
        given=option.given,
        switch=True,
        default=turned(option.default),
        off=option.flags,
        ahead=option.ahead,
    )


def _is_marked(command: Command, candidate: OptionCandidate) -> bool:
    place = candidate.place
    if place is None:
        return False
    words = {command.words[at] for at in (place.at, place.value_at) if at is not None}
    return any(map(_has_braces, words))


def _has_braces(word: str) -> bool:
    """Is there anything in it that is, or may become, a placeholder?"""
    try:
        return bool(placeholders([word])) or "{{" in word
    except TrainfitError:
        return True


# -- words that no parser told of --------------------------------------------------------------


def _literals(command: Command, known: set[str], taken: set[int]) -> Iterator[OptionCandidate]:
    for assignment in command.assignments_at:
        yield from _assigned(command.words[assignment], assignment)
    launcher = command.launcher
    if launcher is not None:
        own = range(launcher.begins, launcher.ends)
        for candidate in _in_words(command, own, set(), set()):
            # What else a launcher is told is of processes.
            if tunable_of(candidate.shown) == "amp":
                yield candidate
    yield from _in_words(command, range(command.arguments_at, len(command.words)), known, taken)


def _in_words(
    command: Command, places: range, known: set[str], taken: set[int]
) -> Iterator[OptionCandidate]:
    words = command.words
    for at in places:
        word = words[at]
        if at in taken:
            continue
        if word == "--" and word not in known:
            return
        if _ASSIGNED.fullmatch(word):
            if word.partition("=")[0] not in known:
                yield from _assigned(word, at)
        elif _FLAG.fullmatch(word) and word not in known:
            follows = at + 1 in places and at + 1 not in taken and words[at + 1][:1] != "-"
            value = words[at + 1] if follows else "True"
            place = OptionPlace(at, word, at + 1 if follows else None)
            yield OptionCandidate(_literal(word, value, switch=not follows), place)


def _assigned(word: str, at: int) -> Iterator[OptionCandidate]:
    match = _ASSIGNED.fullmatch(word)
    if match is not None:
        place = OptionPlace(at, match[1], at, len(match[1]) + 1)
        yield OptionCandidate(_literal(match[1], match[2], switch=False), place)


def _literal(name: str, value: str, *, switch: bool) -> ScriptOption:
    """An option of which only the words are known; without its word a switch is off."""
    default = "False" if switch else None
    return ScriptOption((name,), name, value, given=True, switch=switch, default=default)


# ---
# Marks the settings of a DataLoader that a command says, by their names alone.
#
# For who changes them and looks in the run whether they followed; a plan has more to go by
# (:mod:`trainfit.plan.runs.options`).


def marked(words: Sequence[str]) -> tuple[str, ...]:
    """``words`` with placeholders for the values of such options (``--workers={num_workers:4}``
    for ``--workers=4``); as they are where the user marked one, several have a name, or
    the command is none that is understood (it may run all the same)."""
    try:
        command = parse_command(words)
    except CommandError:
        return tuple(words)
    options = candidates(command, ())
    writings = {}
    for name in LOADER_TUNABLES:
        named = [option for option in options if _says(command, option, name)]
        if len(named) == 1 and name not in command.present:
            writings[name] = write_value(command, named[0], name, said(command, named[0]))
    return written(command, writings).words


def _says(command: Command, option: OptionCandidate, name: str) -> bool:
    if tunable_of(option.shown) != name:
        return False
    text = said(command, option)
    read = as_switch(text) if name in LOADER_SWITCHES else NUMBER.fullmatch(text)
    return read is not None
