"""What speaks for and against each precision of mixed precision, and which is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from trainfit.results.plan.configuration import Configuration

#: What can go wrong with a precision, or keeps it from a gain. "emulated": the GPU computes in it
#: by way of another; "no tensor cores": it has no units that are faster in it; "no scaler": float16
#: without a gradient scaler, so that small gradients become 0; "fails", "overflow": the script
#: raises in it, the latter for a number that float16 cannot hold; "outside autocast": operators
#: that autocast would run in float32 ran in float16; "custom function", "custom operator": code
#: that does not know of autocast; "float32 operators": autocast runs much of the step in float32.
AmpHazardKind = Literal[
    "emulated",
    "no tensor cores",
    "no scaler",
    "fails",
    "overflow",
    "outside autocast",
    "custom function",
    "custom operator",
    "float32 operators",
]


@dataclasses.dataclass(frozen=True)
class AmpHazard:
    """Something that was seen of autocast in ``dtype``.

    ``text`` is one line, ``place`` the user's ("file:line"; empty: none), ``remedy`` what to
    do (empty: nothing). ``share`` is that of a step's time (``None``: not known). ``blocks``: the
    dtype is not recommended for it.
    """

    kind: AmpHazardKind
    dtype: str
    text: str
    place: str = ""
    remedy: str = ""
    share: float | None = None
    blocks: bool = False


#: How a precision is asked for: it is there already; a value of ``{amp}``; Accelerate's variable;
#: a change of the script.
AmpAsked = Literal["present", "placeholder", "variable", "by hand"]


@dataclasses.dataclass(frozen=True)
class AmpCandidate:
    """A precision that was compared: ``value`` is the placeholder's or the variable's.

    ``as_of`` is the dtype of the run that its figures are from, where it was not simulated itself:
    bfloat16 and float16 have as many bytes, autocast casts the same operators, and Tensor cores
    that have both are equally fast in both (empty: it was simulated).
    """

    dtype: str
    asked: AmpAsked
    value: str = ""
    as_of: str = ""


@dataclasses.dataclass(frozen=True)
class AmpChoice:
    """Which mixed precision the launch command asks for, and why.

    ``value`` is for the placeholder (``None``: the command has none), ``dtype`` what autocast then
    computes in ("off": none); ``variable`` is the value of ``ACCELERATE_MIXED_PRECISION`` that asks
    for it (empty: it is not set for it). ``configuration`` is the job with it where that is not the
    present setting. ``reason`` is one line; ``samples_per_s`` are those at the recommended batch
    sizes, by dtype. ``by_hand`` is a change of the script that is faster still ("": none is), for
    ``by_hand_dtype``, and ``line`` what to write at ``place`` ("train.py:41"; empty: not known).
    ``hazards`` are those of every candidate and of what could not be simulated; ``memory_reason``
    and ``time_reason`` say what AMP saves at the current batch size, and where it is little, why.
    """

    value: str | None
    dtype: str
    reason: str
    configuration: Configuration | None = None
    samples_per_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    by_hand: str = ""
    variable: str = ""
    by_hand_dtype: str = ""
    line: str = ""
    place: str = ""
    hazards: tuple[AmpHazard, ...] = ()
    candidates: tuple[AmpCandidate, ...] = ()
    memory_reason: str = ""
    time_reason: str = ""

    @property
    def own_hazards(self) -> tuple[AmpHazard, ...]:
        """Those of the dtype that is chosen."""
        return tuple(each for each in self.hazards if each.dtype == self.dtype)

    @property
    def told_hazards(self) -> tuple[AmpHazard, ...]:
        """Those to tell of: of the chosen dtype, and what keeps others from being chosen that the
        command can ask for."""
        asked = {each.dtype for each in self.candidates if each.asked != "by hand"}
        told = {
            each.text: each
            for each in self.hazards
            if each.dtype == self.dtype
            or (each.blocks and (each.dtype in asked or each.kind in ("fails", "overflow")))
        }
        return tuple(told.values())
