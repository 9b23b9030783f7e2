"""What to change in a script for mixed precision, and where."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trainfit.plan.command.frameworks import FRAMEWORKS
from trainfit.results.runs.trace import TraceOutcome

_SCALER = (
    'scaler = torch.amp.GradScaler("cuda") before the loop, scaler.scale(loss).backward(), '
    "scaler.step(optimizer) and scaler.update()"
)


def line_for(dtype: str, outcome: TraceOutcome, *, has: str | None) -> tuple[str, str]:
    """The place in the script (empty: not known) and what to write there for ``dtype``.

    ``outcome`` is of a run with autocast, if there is one; ``has`` the dtype that the script itself
    has there (``None``: none, or not known).
    """
    seen = outcome.amp
    if seen.framework:
        return place_of(seen.framework_at), FRAMEWORKS[seen.framework].with_precision(dtype)
    needs_scaler = dtype == "float16" and not seen.scaled
    made_at = place_of(seen.scaler_at)
    enabled = 'torch.amp.GradScaler("cuda") enabled'
    if needs_scaler and has == dtype:
        return (made_at, enabled) if made_at else ("", _SCALER)
    scaler = f"; {made_at}: {enabled}" if made_at else f"; {_SCALER}"
    scaler = scaler if needs_scaler else ""
    if outcome.autocast_at is not None:
        written = "enabled=False" if dtype == "off" else f"dtype=torch.{dtype}"
        return place_of(outcome.autocast_at), f'torch.autocast("cuda", {written}){scaler}'
    around = "around the forward pass and the loss"
    written = f'with torch.autocast("cuda", dtype=torch.{dtype}): {around}{scaler}'
    return place_of(seen.forward_at), written


def place_of(place: str | None) -> str:
    """A line of the user's, from the working directory where it is below; empty: none."""
    with contextlib.suppress(ValueError):
        return str(Path(place or "").relative_to(Path.cwd())) if place else ""
    return place or ""
