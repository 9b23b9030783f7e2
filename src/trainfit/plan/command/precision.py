"""The options that switch mixed precision, and how a command says each precision by them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.plan.command.options import AMP_DTYPE_NAMES, DTYPE_OF_SWITCH, plain_name, tunable_of
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import PRECISIONS, as_switch, opposite_switch
from trainfit.plan.command.words import (
    OFF,
    ON,
    OptionCandidate,
    Writing,
    said,
    write_switch,
    write_texts,
    write_value,
)
from trainfit.results.runs.script import ScriptOption

#: Spellings of bfloat16, float16 and neither; of the whole number 16 too.
_FAMILIES: Final = (*PRECISIONS, ("bf16", "16", "32"), ("amp_bf16", "amp_fp16", "fp32"))
#: How an option that has no value yet is spelled: Accelerate's, Lightning's.
_OF_NAME: Final = {"mixed_precision": PRECISIONS[0], "precision": PRECISIONS[4]}
_DTYPES: Final = ("bfloat16", "float16", "off")
#: Values of options that say autocast's dtype.
_DTYPE_TEXTS: Final = (
    ("bfloat16", "float16"),
    ("bf16", "fp16"),
    ("torch.bfloat16", "torch.float16"),
)


@dataclasses.dataclass(frozen=True)
class AmpReading:
    """Options by which a command says its precision.

    ``now`` is it, as autocast has it: a dtype, "on" (the script says which) or "off"; ``present``
    is that as ``{amp}``'s value, ``opposite`` what switches it the other way round and ``float16``
    what asks for float16 (``None``: nothing does). ``given``: the command says it.
    """

    shown: str
    now: str
    present: str
    opposite: str
    float16: str | None
    writing: Writing
    given: bool

    def agrees(self, autocast: str | None) -> bool:
        """Is this what a run had?"""
        if self.now == "on":
            return autocast is not None
        return self.now == (autocast or "off")


def amp_readings(command: Command, options: Sequence[OptionCandidate]) -> list[AmpReading]:
    """All ways to read the options as a switch of mixed precision."""
    named = [option for option in options if _names_amp(option.option)]
    pairs = list(_pairs(command, named))
    if pairs:
        return pairs
    # nanoGPT's --dtype is autocast's, without a switch.
    named = named or [option for option in options if _says_dtype(option.option)]
    return [reading for each in named for reading in _single(command, each, options)]


def _names_amp(option: ScriptOption) -> bool:
    return any(tunable_of(name) == "amp" for name in _names(option))


def _names(option: ScriptOption) -> tuple[str, ...]:
    return (*option.flags, *option.off, option.name)


def _is_boolean(option: ScriptOption) -> bool:
    text = option.value
    if _is_open(option):
        return True
    if option.switch or as_switch(text) is not None:
        # "no" is a precision where there are others.
        return option.switch or not (text == "no" and _family(option) is not None)
    return False


def _is_open(option: ScriptOption) -> bool:
    """A boolean without a value, which the script decides on (TRL's ``--bf16``, which is on unless
    ``--fp16`` is)?"""
    return option.value is None and "bool" in option.type.lower()


def _readings_of(candidate: OptionCandidate) -> Iterator[OptionCandidate]:
    """An option as it may be meant: one without a value is on or off."""
    if not _is_open(candidate.option):
        yield candidate
        return
    for text in ("True", "False"):
        yield dataclasses.replace(
            candidate, option=dataclasses.replace(candidate.option, value=text)
        )


def _dtype_of(option: ScriptOption) -> str | None:
    """The dtype that a boolean asks for, by its name."""
    found = (DTYPE_OF_SWITCH.get(plain_name(name)) for name in _names(option))
    return next(filter(None, found), None)


def _pairs(command: Command, named: Sequence[OptionCandidate]) -> Iterator[AmpReading]:
    """Two booleans, one for each dtype (Transformers' bf16 and fp16)."""
    booleans = [candidate for candidate in named if _is_boolean(candidate.option)]
    of_dtype = {
        dtype: [
            reading
            for boolean in booleans
            if _dtype_of(boolean.option) == dtype
            for reading in _readings_of(boolean)
        ]
        for dtype in _DTYPES[:2]
    }
    for bf16, fp16 in itertools.product(*of_dtype.values()):
        on = [name for name, each in (("bf16", bf16), ("fp16", fp16)) if _is_on(each)]
        now = {"": "off", "bf16": "bfloat16", "fp16": "float16"}.get("".join(on))
        present = on[0] if on else "no"
        first = _written(command, bf16, {"bf16": True, "fp16": False, "no": False}, present)
        other = _written(command, fp16, {"bf16": False, "fp16": True, "no": False}, present)
        if now is None or first is None or other is None:
            continue
        yield AmpReading(
            shown=f"{bf16.shown}, {fp16.shown}",
            now=now,
            present=present,
            opposite="no" if on else "bf16",
            float16="fp16",
            writing=first + other,
            given=bf16.place is not None or fp16.place is not None,
        )


def _written(
    command: Command, candidate: OptionCandidate, on_at: Mapping[str, bool], present: str
) -> Writing | None:
    """A boolean at a precision's values. What none was given for depends on the other options: it
    is said wherever they are others than at ``present``."""
    option = candidate.option
    if candidate.place is None and option.default is None and not option.switch:
        return write_texts(command, candidate, {at: str(on) for at, on in on_at.items()}, present)
    return write_switch(command, candidate, on_at)


def _is_on(candidate: OptionCandidate) -> bool:
    return as_switch(candidate.option.value) is True


def _single(
    command: Command, candidate: OptionCandidate, options: Sequence[OptionCandidate]
) -> Iterator[AmpReading]:
    if not _is_boolean(candidate.option):
        yield from _by_precision(command, candidate)
        return
    dtypes = [option for option in options if _says_dtype(option.option)]
    if len(dtypes) == 1 and _dtype_of(candidate.option) is None:
        found = _by_switch_and_dtype(command, candidate, dtypes[0])
        if found is not None:
            yield found
            return
    for reading in _readings_of(candidate):
        yield from _by_switch(command, reading)


def _by_precision(command: Command, candidate: OptionCandidate) -> Iterator[AmpReading]:
    """An option whose value names a precision."""
    option = candidate.option
    family = _family(option)
    if family is None:
        return
    text, state = option.value, "off"
    if text is not None:
        state = _DTYPES[family.index(text)]
    present = said(command, candidate) or str(text)
    able = dict(zip(_DTYPES, family, strict=True))
    if option.choices:
        able = {name: each for name, each in able.items() if each in option.choices}
    on = able.get("bfloat16", able.get("float16"))
    opposite = able.get("off") if state != "off" else on
    if opposite is None:
        return
    writing = write_value(command, candidate, "amp", present)
    float16 = able.get("float16")
    yield AmpReading(
        candidate.shown, state, present, opposite, float16, writing, candidate.place is not None
    )


def _family(option: ScriptOption) -> tuple[str, ...] | None:
    """How the option spells precisions."""
    text = option.value
    if text is None and not option.choices:
        names = (plain_name(name) for name in _names(option))
        return next((_OF_NAME[name] for name in names if name in _OF_NAME), None)
    for family in _FAMILIES:
        if text is not None and text not in family:
            continue
        if option.choices and not set(family[:2]).intersection(option.choices):
            continue
        if text == "no" and not option.choices and not _says_precision(option):
            continue
        return family
    return None


def _says_precision(option: ScriptOption) -> bool:
    return any("precision" in plain_name(name) for name in _names(option))


def _by_switch(command: Command, candidate: OptionCandidate) -> Iterator[AmpReading]:
    """A boolean; which dtype it means is in its name, or the script's own affair."""
    option = candidate.option
    on, dtype = _is_on(candidate), _dtype_of(option)
    text = said(command, candidate)
    if text and option.type != "bool" and as_switch(text) == as_switch(option.value):
        present, other = text, opposite_switch(text)
        writing: Writing | None = write_value(command, candidate, "amp", text)
    else:
        present, other = (ON, OFF) if on else (OFF, ON)
        writing = _written(command, candidate, {ON: True, OFF: False}, present)
    if writing is None:
        return
    float16 = None
    if dtype == "float16":
        float16 = present if on else other
    now = (dtype or "on") if on else "off"
    yield AmpReading(
        candidate.shown, now, present, other, float16, writing, candidate.place is not None
    )


def _says_dtype(option: ScriptOption) -> bool:
    if not any(plain_name(name) in AMP_DTYPE_NAMES for name in _names(option)):
        return False
    text = option.value
    return text is not None and (_family(option) is not None or _dtype_texts(text) is not None)


def _dtype_texts(text: str) -> tuple[str, str] | None:
    return next((texts for texts in _DTYPE_TEXTS if text in texts), None)


def _by_switch_and_dtype(
    command: Command, switch: OptionCandidate, dtype: OptionCandidate
) -> AmpReading | None:
    """A switch, and an option for the dtype (timm's --amp and --amp-dtype)."""
    text = str(dtype.option.value)
    texts = _dtype_texts(text)
    if texts is None or (dtype.option.choices and not set(texts) <= set(dtype.option.choices)):
        return None
    by_name: Mapping[str, str] = dict(zip(("bf16", "fp16"), texts, strict=True))
    name = next(each for each, spelled in by_name.items() if spelled == text)
    one = write_switch(command, switch, {"bf16": True, "fp16": True, "no": False})
    if one is None:
        return None
    on = _is_on(switch)
    return AmpReading(
        shown=f"{switch.shown}, {dtype.shown}",
        now={"bf16": "bfloat16", "fp16": "float16"}[name] if on else "off",
        present=name if on else "no",
        opposite="no" if on else "bf16",
        float16="fp16",
        writing=one + write_texts(command, dtype, {**by_name, "no": text}),
        given=switch.place is not None,
    )


def other_value(command: Command, gpu: GpuSpec, *, is_on: bool) -> str | None:
    """The value for ``{amp}`` of autocast the other way round; ``None`` without the placeholder."""
    on = None if is_on or gpu.supports_bf16 else command.float16_amp
    return on or command.other_amp
