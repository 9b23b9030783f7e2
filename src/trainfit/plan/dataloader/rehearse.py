"""Rehearses a command's DataLoader in a child process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trainfit.plan.command.parsing import Command
from trainfit.plan.dataloader.loading_process import Listener
from trainfit.plan.dataloader.measure import LoadingOptions, call_on_loader, notes_of
from trainfit.results.loader.rehearsal import Predicted, Rehearsal
from trainfit.results.loader.result import LoaderResult

_FUNCTION: Final = "trainfit.loader.rehearsal.run:rehearse_request"
#: Seconds that a rehearsal may take beyond its duration: until a hang is told, and its end.
_BEYOND_S: Final = 60.0
#: Steps that differ by less are one.
_SAME_STEP: Final = 0.01


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """A rehearsal, and the user's interrupt that ended it, if one did."""

    result: Rehearsal
    interrupt: KeyboardInterrupt | None


def rehearse_command(
    command: Command | None,
    options: LoadingOptions,
    duration_s: float,
    settings: Mapping[str, Any],
    progress: Callable[[str], None] | Listener = lambda text: None,
    compare: LoaderResult | None = None,
) -> Rehearsed:
    """Run the loader of ``command`` (or ``options.loader``) against a GPU's step.

    It runs for ``duration_s`` seconds; ``settings`` are those of the loader that differ from
    the script's own. The model's prediction for them in ``compare`` is added. Raises
    :class:`~trainfit.plan.runs.failures.ScriptError` where the script comes to no loader, and
    ``KeyboardInterrupt`` where there are no results yet.
    """
    whole = dataclasses.replace(
        options,
        time_limit_s=options.time_limit_s + duration_s + _BEYOND_S,
        script_limit_s=options.time_limit_s,
    )
    arguments = {"duration_s": duration_s, "settings": dict(settings)}
    loaded = call_on_loader(command, whole, progress, _FUNCTION, arguments)
    text = loaded.result or loaded.partial
    assert text is not None
    result = Rehearsal.from_json(text, Path("the rehearsing process"))
    loader = loaded.outcome.loader if loaded.outcome is not None else ""
    notes = (*result.notes, *notes_of(loaded, command, whole))
    result = dataclasses.replace(
        result,
        loader=loader or result.loader,
        notes=notes,
        step_is_bound=options.step is None,
        protection=loaded.protection,
    )
    if compare is not None:
        result = with_prediction(result, compare)
    return Rehearsed(result, loaded.interrupt)


def with_prediction(result: Rehearsal, found: LoaderResult) -> Rehearsal:
    """The rehearsal with the model's prediction for its settings, or a note why there is none."""
    candidate = found.candidate(result.settings)
    reason = ""
    if abs(found.step_s / result.step_s - 1) > _SAME_STEP:
        step = f"{1e3 * found.step_s:.7g}ms"
        reason = f"it was made for a step of {step}: rehearse with --step-time {step}"
    elif candidate is None:
        reason = "its candidates do not include these settings"
    elif candidate.infeasible:
        reason = f"these settings are infeasible: {candidate.infeasible}"
    if candidate is None or reason:
        note = f"nothing to compare in the result of trainfit loader: {reason}"
        return dataclasses.replace(result, notes=(*result.notes, note))
    predicted = Predicted(candidate.batches_per_s, candidate.waiting_share)
    return dataclasses.replace(result, predicted=predicted)
