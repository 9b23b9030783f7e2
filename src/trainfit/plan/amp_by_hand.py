"""What to change in a script for mixed precision, and where."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trainfit.results.trace import Framework, TraceOutcome

_SCALER = (
    'scaler = torch.amp.GradScaler("cuda") before the loop, scaler.scale(loss).backward(), '
    "scaler.step(optimizer) and scaler.update()"
)
#: The argument of each library that asks for a dtype; float16 comes with a scaler there.
_ARGUMENTS: dict[Framework, dict[str, str]] = {
    "transformers": {
        "bfloat16": "TrainingArguments(bf16=True, …)",
        "float16": "TrainingArguments(fp16=True, …)",
        "off": "TrainingArguments(bf16=False, fp16=False, …)",
    },
    "lightning": {
        "bfloat16": 'Trainer(precision="bf16-mixed", …)',
        "float16": 'Trainer(precision="16-mixed", …)',
        "off": 'Trainer(precision="32-true", …)',
    },
    "accelerate": {
        "bfloat16": 'Accelerator(mixed_precision="bf16", …)',
        "float16": 'Accelerator(mixed_precision="fp16", …)',
        "off": 'Accelerator(mixed_precision="no", …)',
    },
}


def line_for(dtype: str, outcome: TraceOutcome, *, has: str | None) -> str:
    """The line of the script that asks for ``dtype``, with its place.

    ``outcome`` is of a run with autocast, if there is one; ``has`` the dtype that the script itself
    has there (``None``: none, or not known).
    """
    seen = outcome.amp
    if seen.framework:
        return _at(seen.framework_at) + _ARGUMENTS[seen.framework][dtype]
    scaler = "" if dtype != "float16" or seen.scaled else _scaler(seen.scaler_at)
    if scaler and has == dtype:
        return scaler
    scaler = scaler and f"; {scaler}"
    if outcome.autocast_at is not None:
        written = "enabled=False" if dtype == "off" else f"dtype=torch.{dtype}"
        return f'{_at(outcome.autocast_at)}torch.autocast("cuda", {written}){scaler}'
    around = "around the forward pass and the loss"
    written = f'with torch.autocast("cuda", dtype=torch.{dtype}): {around}'
    return _at(seen.forward_at) + written + scaler


def _scaler(made_at: str | None) -> str:
    """The scaler that float16 needs; it may be there, but switched off."""
    return _SCALER if made_at is None else f'{_at(made_at)}torch.amp.GradScaler("cuda") enabled'


def _at(place: str | None) -> str:
    return f"{place_of(place)}: " if place else ""


def place_of(place: str) -> str:
    """A line of the user's, from the working directory where it is below."""
    with contextlib.suppress(ValueError):
        return str(Path(place).relative_to(Path.cwd()))
    return place
