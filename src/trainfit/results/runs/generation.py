"""Text that a script generates: what a simulated run saw of it, and what it needs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from trainfit.results.files.decoding import DecodingError, decode

if TYPE_CHECKING:  # results of plans have texts, and are imported without NumPy
    from trainfit.results.runs.recording import Recording


@dataclasses.dataclass(frozen=True)
class GeneratedText:
    """A text that a script generates, a token of each sequence with each call of its model.

    Attributes:
        prefill: the step of the recording (from 0) that is the call for the prompt.
        decodes: steps after it that were simulated, calls for one more token each.
        calls_left: calls of the script after them, to the end of its text.
        prompt: positions of the prompt (``None``: not known).
        rows: sequences that are made at once, beams included (``None``: not known).
        sequences: the same without beams.
        limit: positions that the model is made for (``None``: not known).
        cache: its kind, as the library calls it; empty: the script's own.
        window: positions that sliding windows keep (``None``: there is none).
        in_window: modules whose cache is one of these.
        by: what says where the text ends.
        reason: why the calls left cannot be told from those simulated: these are in no figure.
        round: steps of the recording, from one up to another that is none of them, in which an
            assistant proposes tokens and the model checks them, the last of such rounds.
    """

    prefill: int
    decodes: int
    calls_left: int = 0
    prompt: int | None = None
    rows: int | None = None
    sequences: int | None = None
    limit: int | None = None
    cache: str = ""
    window: int | None = None
    in_window: tuple[str, ...] = ()
    by: str = ""
    reason: str = ""
    round: tuple[int, int] | None = None

    @property
    def new_tokens(self) -> int:
        """A sequence's new tokens at the end: one for each call, that of the prompt included."""
        return 1 + self.decodes + self.calls_left

    @property
    def known_tokens(self) -> int:
        """The new tokens that figures are for."""
        return self.new_tokens if not self.reason else 1 + self.decodes

    @property
    def positions(self) -> int | None:
        """Positions of a sequence at the end of the text; ``None``: not known."""
        return None if self.prompt is None else self.prompt + self.new_tokens


def generated_text(recording: Recording) -> GeneratedText | None:
    """The text of a recording that has its steps; ``None`` where its script makes none."""
    told = recording.header.get("generation")
    if told is None:
        return None
    try:
        text = decode(GeneratedText, told)
    except DecodingError:
        return None
    steps = (recording.simulated or recording).steps
    is_there = text.decodes > 0 and 0 <= text.prefill < steps - text.decodes
    return text if is_there and text.calls_left >= 0 else None


# ---
# What the text needs: memory by context, time by token.


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
        longest: the longest context at the current batch size (``None``: memory does not limit it).
        frontier: that of other batch sizes, the smallest first.
        round_s: seconds in which an assistant proposes ``proposed`` tokens and the model checks
            them, which gives one token at least (``None``: there is no assistant).
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
    round_s: float | None = None
    proposed: int = 0
