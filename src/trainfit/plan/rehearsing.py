"""Rehearses a command's DataLoader in a child process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trainfit.plan.command import Command
from trainfit.plan.loading import Listener, LoadingOptions, call_on_loader, notes_of
from trainfit.results.rehearsal import Rehearsal

_FUNCTION: Final = "trainfit.loader.rehearsal:rehearse_request"
#: Seconds that a rehearsal may take beyond its duration: until a hang is told, and its end.
_BEYOND_S: Final = 60.0


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
) -> Rehearsed:
    """Run the loader of ``command`` (or ``options.loader``) against a GPU's step.

    It runs for ``duration_s`` seconds; ``settings`` are those of the loader that differ from
    the script's own. Raises :class:`~trainfit.plan.failures.ScriptError` where the script comes
    to no loader, and ``KeyboardInterrupt`` where nothing was seen until then.
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
        step_is_bound=options.step_s is None,
    )
    return Rehearsed(result, loaded.interrupt)
