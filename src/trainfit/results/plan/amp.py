"""What speaks for and against each precision of mixed precision."""

from __future__ import annotations

import dataclasses
from typing import Literal

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
