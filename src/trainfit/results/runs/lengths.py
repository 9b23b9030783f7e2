"""What a value of a tunable costs: a sequence's length, or any whole number of a command.

Memory and time over (batch size, value), and the largest value that fits.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TunablePoint:
    """A job at a value of its tunable and a batch size.

    Attributes:
        value: of the tunable.
        batch_size: ``None``: not known.
        device_bytes: at the peak, as ``nvidia-smi`` shows them.
        fits: is that on the GPU?
        step_s: seconds of a step (``None``: no rates of this GPU).
        is_simulated: a run at these; otherwise it follows from runs at two other batch sizes.
    """

    value: int
    batch_size: int | None
    device_bytes: int
    fits: bool
    step_s: float | None = None
    is_simulated: bool = True


@dataclasses.dataclass(frozen=True)
class TunableLimit:
    """About the largest ``value`` at a batch size, from the memory at values that were simulated;
    no run was made there. ``by_model``: the model is made for no more."""

    batch_size: int
    value: int
    by_model: bool = False


@dataclasses.dataclass(frozen=True)
class TunableSizes:
    """A tunable's values, and what they cost.

    Attributes:
        tunable: its name; ``shown`` is the option as the command says it.
        present: its value now.
        points: by value, then by batch size.
        largest: that was simulated and fits, at the current batch size (0: none does; ``None``:
            it was not looked for).
        recommended: the same with the safety margin left free.
        too_large: the smallest that was simulated and does not fit (``None``: none).
        limit: values above this one were not looked at; ``limit_reason`` says why (empty: there is
            none).
        limits: about the largest at other batch sizes.
        growth: "linear", "quadratic", or "mixed": how memory at the peak grows with the value;
            empty where that was not seen.
        quadratic_bytes: of the peak at ``present``, what grows with the square.
        quadratic_in: the module whose tensors have most of it (empty: none has).
        command: the user's, with the recommended value.
        reason: why there is nothing, or no more.
    """

    tunable: str
    shown: str
    present: int
    points: tuple[TunablePoint, ...] = ()
    largest: int | None = None
    recommended: int | None = None
    too_large: int | None = None
    limit: int | None = None
    limit_reason: str = ""
    limits: tuple[TunableLimit, ...] = ()
    growth: str = ""
    quadratic_bytes: int = 0
    quadratic_in: str = ""
    command: str = ""
    reason: str = ""
