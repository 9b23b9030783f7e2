"""What a script needs that generates text: memory by context, time by token."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ContextPoint:
    """The longest context at a batch size: positions of a sequence, prompt and new tokens together.

    ``by_model``: no longer one was looked at, as the model is made for no more. ``is_estimate``: it
    follows from shorter ones, as a replay to its end would take too long.
    """

    batch_size: int | None
    positions: int
    by_model: bool = False
    is_estimate: bool = False


@dataclasses.dataclass(frozen=True)
class Generation:
    """A text as a script generates it, to the length that it asks for.

    Attributes:
        new_tokens: of each sequence; figures are for ``known_tokens`` of them, fewer where
            ``reason`` says why the others cannot be told.
        prompt_tokens: positions of the prompt (``None``: not known).
        sequences: made at once (``None``: not known).
        model_tokens: positions that the model is made for (``None``: not known).
        cache: kind of its cache, empty where it is the script's own.
        cache_bytes: its bytes at the end (``None``: it could not be told from other tensors).
        simulated_calls: calls of the model that were simulated; the others follow from them.
        by: what says where the text ends.
        first_token_s: seconds of the call for the prompt (``None``: no rates of this GPU).
        token_s: seconds of the first and of the last call for a further token.
        total_s: seconds of all calls.
        tokens_per_s: new tokens of a sequence over ``total_s``.
        all_tokens_per_s: the same of all sequences together.
        longest: the longest context at the present batch size (``None``: memory does not limit it).
        frontier: that of other batch sizes, the smallest first.
    """

    new_tokens: int
    known_tokens: int
    prompt_tokens: int | None
    sequences: int | None
    model_tokens: int | None
    cache: str
    cache_bytes: int | None
    simulated_calls: int
    by: str
    reason: str = ""
    first_token_s: float | None = None
    token_s: tuple[float, float] | None = None
    total_s: float | None = None
    tokens_per_s: float | None = None
    all_tokens_per_s: float | None = None
    longest: ContextPoint | None = None
    frontier: tuple[ContextPoint, ...] = ()
