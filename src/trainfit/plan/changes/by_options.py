"""Remedies that an option of the script switches on: adapters, 4-bit weights, paged optimizers.

The options are those of Transformers' ``TrainingArguments``, TRL's ``ModelConfig`` and scripts that
call them likewise; each becomes a tunable of the command, named as its remedy is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final

from trainfit.plan.command.options import candidates
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import as_switch
from trainfit.plan.command.words import OFF, ON, OptionCandidate, write_switch, write_texts, written
from trainfit.results.changes import ADAMW, PAGED
from trainfit.results.runs.script import ScriptOption

#: By remedy: switches that ask for it.
_SWITCHES: Final[Mapping[str, tuple[str, ...]]] = {
    "lora": ("use_peft", "use_lora", "lora", "peft", "enable_lora"),
    "qlora": ("load_in_4bit", "use_4bit", "use_qlora", "qlora", "use_4bit_quantization"),
}
#: An optimizer's name, by which Transformers makes it, and the one whose states are paged.
_OPTIMIZERS: Final = ("optim", "optimizer_type")
#: What each remedy needs in addition.
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {"qlora": ("lora",)}
#: Names of these remedies.
BY_OPTIONS: Final = (*_SWITCHES, "paged-optimizer")


def with_switches(command: Command, options: Sequence[ScriptOption]) -> Command:
    """``command`` with the remedies as tunables that its options can switch on, now off; it says
    the same. ``options`` are those of the script's parser."""
    there = candidates(command, options)
    present: dict[str, str] = {}
    writings = {}
    for name, spelled in _SWITCHES.items():
        option_candidates = [candidate for candidate in there if _is_named(candidate, spelled)]
        if len(option_candidates) != 1 or as_switch(option_candidates[0].option.value) is None:
            continue
        writing = write_switch(command, option_candidates[0], {ON: True, OFF: False})
        now = ON if as_switch(option_candidates[0].option.value) else OFF
        if writing is not None:
            writings[name], present[name] = writing, now
    option_candidates = [candidate for candidate in there if _is_named(candidate, _OPTIMIZERS)]
    if len(option_candidates) == 1 and ADAMW.fullmatch(
        str(option_candidates[0].option.value).rpartition(".")[2].lower()
    ):
        text = str(option_candidates[0].option.value)
        texts = {OFF: text, ON: PAGED}
        writings["paged-optimizer"] = write_texts(command, option_candidates[0], texts)
        present["paged-optimizer"] = OFF
    if not writings:
        return command
    filled = written(command, writings)
    return dataclasses.replace(
        filled,
        present={**command.present, **present},
        supposed=command.supposed | present.keys(),
    )


def switched_on(command: Command, name: str) -> dict[str, str] | None:
    """The values that switch the remedy on; ``None`` where the command has no option for it, or it
    is on."""
    if command.present.get(name) != OFF:
        return None
    return {each: ON for each in (name, *NEEDS.get(name, ())) if each in command.present}


def _is_named(candidate: OptionCandidate, names: Sequence[str]) -> bool:
    option = candidate.option
    spelled = (*option.flags, option.name)
    return any(re.split(r"[./]", flag.lstrip("+~-"))[-1].replace("-", "_").lower() in names
               for flag in spelled)  # fmt: skip
